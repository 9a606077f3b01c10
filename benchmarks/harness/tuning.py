"""Grids of an operator's Tuning: reading them, walking through them, compiling their kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather

__all__ = ["Grid", "combinations", "compile_together", "gist", "occupancies", "parse_grid", "refusal", "tuned"]

_Tuning = TypeVar("_Tuning")
_COMPILE_TIMEOUT_S = 500.0
_SHARES_OF_SMS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 2)
Grid = tuple[tuple[str, tuple[Any, ...]], ...]


def parse_grid(text: str, tuning: type[Any]) -> Grid:
    """Read "threads=256:192,local_delay=0:0.5" into fields of a Tuning and their values.

    Args:
        text: of the option; "none" is None.
        tuning: a dataclass whose fields all have defaults; a field without a default's type holds whole numbers.

    Raises:
        ValueError: no such field, or a value that the Tuning does not take.
    """
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(tuning):
        kinds[field.name] = type(field.default) if field.default is not None else int
    grid = []
    for part in text.split(","):
        name, _, values = part.partition("=")
        if name not in kinds or not values:
            raise ValueError(f"--tune: expected FIELD=VALUE:VALUE with a field of {', '.join(kinds)}; got {part!r}")
        convert = kinds[name]
        try:
            found = tuple(None if v == "none" else convert(v) for v in values.split(":"))
            for value in found:
                tuning(**{name: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"--tune: {part!r}: {error}") from error
        grid.append((name, found))
    return tuple(grid)


def occupancies(backend: str) -> tuple[int, ...]:
    """Return numbers of resident WGs, from few to two on each SM; on the host, where they share the cores, a few."""
    if backend == "host" or not torch.cuda.is_available():
        return (1, 2, 4, 8)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return tuple(sorted({max(1, round(num_sms * share)) for share in _SHARES_OF_SMS}))


def combinations(tuning: type[_Tuning], grid: Grid, mode: str) -> Iterator[_Tuning]:
    """Yield the default Tuning, then the grid's: all products, or ("star") one field at a time."""
    seen = {tuning()}
    yield tuning()
    if mode == "star":
        changes: Iterator[dict[str, Any]] = ({name: value} for name, values in grid for value in values)
    else:
        names = [name for name, _ in grid]
        changes = (dict(zip(names, row, strict=True)) for row in itertools.product(*(values for _, values in grid)))
    for change in changes:
        changed = tuning(**change)
        if changed not in seen:
            seen.add(changed)
            yield changed


def gist(message: str) -> str:
    """Return a compiler's first error, or the beginning of another message."""
    errors = [line for line in message.splitlines() if "error" in line and not line.startswith("command")]
    return (errors[-1] if errors and "\n" in message else message)[-300:]


def compile_together(world: World, attempts: Sequence[Callable[[], str | None]]) -> dict[int, str]:
    """Make each attempt on one PE, which compiles a kernel into the cache that all share; collective.

    Args:
        world: of this PE.
        attempts: return why there is no kernel, or None; they launch nothing.

    Returns:
        The reasons, by the place in `attempts`, the same on every PE.
    """
    own = []
    for number in range(world.rank, len(attempts), world.size):
        problem = attempts[number]()
        if problem is not None:
            own.append((number, problem))
    return dict(item for items in gather(own, timeout=_COMPILE_TIMEOUT_S) for item in items)


def refusal(make: Callable[[], object]) -> str | None:
    """Return why a plan cannot be made, or None where it can."""
    try:
        make()
    except (ValueError, RuntimeError, CompileError) as error:
        return f"{type(error).__name__}: {gist(str(error))}"
    return None


@contextmanager
def tuned(world: World, operator: Operator, tuning: Any) -> Iterator[None]:
    """Let an operator take a Tuning meanwhile."""
    before = operator.tune(world, tuning)
    try:
        yield
    finally:
        operator.tune(world, before)
