"""Tables and the figure of the backward pass, from the lines of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.figures import draw_shares
from harness.report import BOUND_COLUMNS, bound_cells, case_table, right_times

from persistent_ops.testing.record import select, unique, us_text

__all__ = ["draw", "tables"]

_Line = dict[str, Any]
_CASE = ("config", "optimizer", "distribution")
_PARTS = ("fused", "sort", "kernel", "kernel_alone", "exchange")


def tables(lines: Sequence[_Line], baselines: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    """Yield, for every world, the methods of each case, and the parts of the operator's pass.

    Args:
        lines: of the record.
        baselines: by method of the operator, what it is compared with.
    """
    for pes in unique(select(lines, "time"), "pes"):
        groups = right_times(lines, pes, _CASE)
        yield _time_table(groups, baselines, pes)
        blocks = [(_heads(case), [cells]) for case, rows in groups.items() if (cells := _parts(rows))]
        if blocks:
            yield case_table(
                f"parts of the backward pass, {pes} PEs: us of each alone",
                ("config",),
                (
                    "all",
                    "sort",
                    "kernel",
                    "without\nexchange",
                    "library's\nexchange",
                    "sending,\nbound",
                    "hidden",
                ),
                blocks,
                caption="hidden: of the exchange at the store ceiling, what the kernel takes less than that longer",
            )


def _heads(case: Sequence[str]) -> list[str]:
    return [case[0], ", ".join(case[1:])]


def _time_table(
    groups: Mapping[tuple[str, ...], Mapping[str, _Line]], baselines: Mapping[str, Sequence[str]], pes: int
) -> Any:
    blocks = []
    for case, rows in groups.items():
        line = next(iter(rows.values()))
        heads = [*_heads(case), f"{line['unique_rows'] / line['lookups']:.2f} of lookups are rows"]
        blocks.append((heads, bound_cells(rows, baselines)))
    return case_table(
        f"{pes} PEs: time per call, least bytes of HBM and NVLink per PE, and the bound at this run's ceilings",
        ("config, optimizer, indices", "method"),
        BOUND_COLUMNS,
        blocks,
    )


def _parts(rows: Mapping[str, _Line]) -> list[str]:
    """Return the cells of a case's parts; none where neither was measured."""
    if not rows.keys() & set(_PARTS[1:]):
        return []
    cells = [us_text(rows[name]["us"]) if name in rows else "-" for name in _PARTS]
    sending = next((row["sending_us"] for row in rows.values() if row.get("sending_us")), None)
    cells.append("-" if sending is None else us_text(sending))
    if sending is None or not {"kernel", "kernel_alone"} <= rows.keys():
        return [*cells, "-"]
    longer = rows["kernel"]["us"] - rows["kernel_alone"]["us"]
    return [*cells, f"{min(max(1 - longer / sending, 0.0), 1.0):.0%}"]


def draw(lines: Sequence[_Line], path: Path) -> None:
    """Draw bound / time of every method, case by case, for the largest world."""
    groups = {
        case: {name: row for name, row in rows.items() if name not in _PARTS[1:]}
        for case, rows in right_times(lines, max(unique(select(lines, "time"), "pes")), _CASE).items()
    }
    draw_shares(lines, path, groups, "Backward passes, and steps, as shares of what the hardware allows")
