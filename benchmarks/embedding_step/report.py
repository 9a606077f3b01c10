"""Tables and the figure of the embedding part of a step, from the lines of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.figures import draw_shares
from harness.report import BOUND_COLUMNS, bound_cells, case_table, right_times

from persistent_ops.testing.record import pes_text, select, unique, us_text

from .methods import PHASES

__all__ = ["draw", "tables"]

_Line = dict[str, Any]


def tables(lines: Sequence[_Line], baselines: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    """Yield, for every world, where the tables lie, the methods of each case, and the phases of their steps.

    Args:
        lines: of the record.
        baselines: by method of the package, what it is compared with.
    """
    for line in select(lines, "library"):
        yield f"{line['name']} {line['version']}"
    for line in select(lines, "placement"):
        yield f"placement, {pes_text(line['pes'])}, {line['tables_of']}: {line['text']}"
    for pes in unique(select(lines, "time"), "pes"):
        cases = right_times(lines, pes, ["case"])
        yield case_table(
            f"{pes_text(pes)}: time per step, least bytes of HBM and NVLink of the PE with the most, and the bound at "
            "this run's ceilings",
            ("case", "method"),
            BOUND_COLUMNS,
            [(_heads(case, rows), bound_cells(rows, baselines)) for (case,), rows in cases.items()],
        )
        phases = {case: select(lines, "phases", pes=pes, case=case[0]) for case in cases}
        blocks = [
            (case, [[line["label"], *_phases(line)] for line in rows if line["method"] in cases[case]])
            for case, rows in phases.items()
            if rows
        ]
        if blocks:
            yield case_table(
                f"{pes_text(pes)}: us of the phases of eager steps, one behind the other",
                ("case", "method"),
                PHASES,
                blocks,
                caption="sort: by row, of the package; that of others is part of their backward pass",
            )


def _heads(case: str, rows: Mapping[str, _Line]) -> list[str]:
    line = next(iter(rows.values()))
    return [case, f"B {line['shape']['batch']}", f"{line['unique_rows'] / line['lookups']:.2f} of lookups are rows"]


def _phases(line: _Line) -> list[str]:
    return [us_text(line["us"][name]) if name in line["us"] else "-" for name in PHASES]


def draw(lines: Sequence[_Line], path: Path) -> None:
    """Draw bound / time of every method, case by case, for the largest world."""
    groups = right_times(lines, max(unique(select(lines, "time"), "pes")), ["case"])
    draw_shares(lines, path, groups, "The embedding part of a DLRM's step, as a share of what the hardware allows")
