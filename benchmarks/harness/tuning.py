"""Grids of an operator's Tuning: reading them, walking through them, and showing what was fastest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from .record import us_text

__all__ = ["combinations", "gist", "parse_grid", "print_tuning_table"]

_Tuning = TypeVar("_Tuning")
Grid = Sequence[tuple[str, Sequence[Any]]]


def parse_grid(text: str, tuning: type[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Read "threads=256:192,local_delay=0:0.5" into fields of a Tuning and their values.

    Args:
        text: of the option; "none" is None.
        tuning: a dataclass whose fields all have defaults; a field without a default's type holds whole numbers.

    Raises:
        ValueError: no such field, or a value of another type.
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
            grid.append((name, tuple(None if v == "none" else convert(v) for v in values.split(":"))))
        except ValueError as error:
            raise ValueError(f"--tune: {part!r}: {error}") from error
    return tuple(grid)


def combinations(tuning: type[_Tuning], grid: Grid, mode: str) -> Iterator[_Tuning]:
    """Yield the default Tuning, then those of the grid: all products, or ("star") one field at a time."""
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


def print_tuning_table(rows: Sequence[dict[str, Any]], title: str, console: Console, *, best: int = 12) -> None:
    """Print the best combinations of one shape, and how many did not run and why.

    Args:
        rows: lines of a record with "tuning", "us" (None: did not run), "problem" and "h200_limit_us"; the default
            Tuning comes first.
        title: of the table.
        console: to print to.
        best: how many to show.
    """
    timed = sorted((row for row in rows if row["us"] is not None), key=lambda row: row["us"])
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("us", justify="right")
    table.add_column("x H200's limit", justify="right")
    table.add_column("tuning")
    tried = [name for name in rows[0]["tuning"] if len({str(row["tuning"][name]) for row in rows}) > 1]
    for place, row in enumerate(timed):
        is_default = row["tuning"] == rows[0]["tuning"]
        if place < best or is_default or row["problem"]:
            text = " ".join(f"{name}={row['tuning'][name]}" for name in tried)
            note = " (default)" if is_default else ""
            note += f" WRONG: {row['problem']}" if row["problem"] else ""
            table.add_row(us_text(row["us"]), f"{row['us'] / row['h200_limit_us']:.3f}", text + note)
    console.print(table)
    refused = [row for row in rows if row["us"] is None]
    for problem in list(dict.fromkeys(row["problem"] for row in refused))[:3]:
        console.print(f"  did not run: {problem}", soft_wrap=True)
