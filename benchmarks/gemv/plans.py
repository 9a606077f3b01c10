"""The operator's plans, made ahead: the PEs compile kernels side by side, and learn what cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.pes import gather
from harness.tuning import gist

from persistent_ops.ops.gemv_plan import OPERATOR, GemvKey, GemvPlan, Tuning, choose_algorithm, reserve_packets
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.world import World

from .methods import Choice, Methods
from .shapes import DTYPE

__all__ = ["Wanted", "compile_together", "problem_of", "tuned"]

_COMPILE_TIMEOUT_S = 500.0
Wanted = tuple[Methods, Choice, Tuning]


def compile_together(world: World, wanted: Sequence[Wanted]) -> dict[int, str]:
    """Compile kernels into the cache, each on one PE; collective.

    Returns:
        Why there is no kernel, by the place in `wanted`. GPUs are alike: what fails on one is told to all.
    """
    reserve_packets(world)  # collective, which a plan that fails on one PE alone could not be
    own = []
    for number in range(world.rank, len(wanted), world.size):
        problem = problem_of(world, *wanted[number])
        if problem is not None:
            own.append((number, problem))
    return dict(item for items in gather(world.bootstrap, own, timeout=_COMPILE_TIMEOUT_S) for item in items)


def problem_of(world: World, methods: Methods, choice: Choice, tuning: Tuning) -> str | None:
    """Return why there is no plan, or None where there is one; launches nothing."""
    shape = methods.shape
    try:
        key = GemvKey(
            world.team,
            shape.rows,
            shape.columns,
            shape.vectors,
            DTYPE,
            None,
            choice.algorithm,
            methods.is_aligned,
            choice.prefetch_weight,
            tuning,
        )
        if choice.algorithm == "auto":
            key = key._replace(algorithm=choose_algorithm(world, key))
        GemvPlan(world, key)
    except (ValueError, RuntimeError, CompileError) as error:
        return f"{type(error).__name__}: {gist(str(error))}"
    return None


@contextmanager
def tuned(world: World, tuning: Tuning) -> Iterator[None]:
    """Let the operator take a Tuning meanwhile."""
    before = OPERATOR.tune(world, tuning)
    try:
        yield
    finally:
        OPERATOR.tune(world, before)
