"""Tables and the figure of the embedding part of a step, from the lines of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.figures import draw_bars, figure, legend
from harness.report import SPEEDUP, case_table, fastest, times_as_long

from persistent_ops.testing.record import pes_text, select, unique, us_text

from .methods import PHASES

__all__ = ["draw_steps", "tables", "timed_by_case"]

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
        cases = timed_by_case(lines, pes)
        yield case_table(
            f"{pes_text(pes)}: time per step, least bytes of HBM and NVLink of the PE with the most, and the bound at "
            "this run's ceilings",
            ("case", "method"),
            ("us", "p95", "MB\nHBM", "MB\nsent", "bound", "share", SPEEDUP),
            [
                (_heads(case, rows), [_cells(row, rows, baselines) for row in rows.values()])
                for case, rows in cases.items()
            ],
        )
        phases = {case: select(lines, "phases", pes=pes, case=case) for case in cases}
        blocks = [
            ([case], [[line["label"], *_phases(line)] for line in rows if line["method"] in cases[case]])
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


def timed_by_case(lines: Sequence[_Line], pes: int) -> dict[str, dict[str, _Line]]:
    """Return the "time" lines of a world by case, then by method, without those that a check has found wrong."""
    failed = {
        (check["case"], failure.split(", ")[1])  # "PE 0, method, what is wrong"
        for check in select(lines, "check", pes=pes)
        for failure in check["failures"]
    }
    cases: dict[str, dict[str, _Line]] = {}
    for line in select(lines, "time", pes=pes):
        if (line["case"], line["method"]) not in failed:
            cases.setdefault(line["case"], {})[line["method"]] = line
    return cases


def _heads(case: str, rows: Mapping[str, _Line]) -> list[str]:
    line = next(iter(rows.values()))
    return [case, f"B {line['shape']['batch']}", f"{line['unique_rows'] / line['lookups']:.2f} of lookups are rows"]


def _cells(row: _Line, rows: Mapping[str, _Line], baselines: Mapping[str, Sequence[str]]) -> list[str]:
    times = [us_text(row["us"]), us_text(row["us_p95"])]
    moved = [f"{row['memory_bytes'] / 1e6:.3g}", f"{row['sent_bytes'] / 1e6:.3g}"]
    bound = [f"{us_text(row['limit_us'])} {row['limit_by']}", f"{row['limit_us'] / row['us']:.0%}"]
    best = times_as_long(fastest(rows.values(), baselines.get(row["method"], ())), row)
    return [row["label"], *times, *moved, *bound, best]


def _phases(line: _Line) -> list[str]:
    return [us_text(line["us"][name]) if name in line["us"] else "-" for name in PHASES]


def draw_steps(lines: Sequence[_Line], path: Path) -> None:
    """Draw bound / time of every method, case by case, for the largest world."""
    times = select(lines, "time")
    if not times:
        return
    cases = timed_by_case(lines, max(unique(times, "pes")))
    series: dict[str, dict[int, float]] = {}
    for place, rows in enumerate(cases.values()):
        for row in rows.values():
            series.setdefault(row["label"], {})[place] = row["limit_us"] / row["us"]
    with figure(lines, path, size=(max(9.0, 2.2 * len(cases)), 5.0)) as (_, (axes,)):
        draw_bars(axes, list(cases), series)
        axes.set_ylabel("bound / time")
        axes.set_title("The embedding part of a DLRM's step, as a share of what the hardware allows")
        legend(axes)
