"""Tables and the figure of the backward pass, from the lines of a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.figures import draw_bars, figure, legend
from harness.report import SPEEDUP, case_table, fastest, times_as_long

from persistent_ops.testing.record import select, unique, us_text

__all__ = ["draw_shares", "tables"]

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
        groups = _groups(lines, pes)
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


def _groups(lines: Sequence[_Line], pes: int) -> dict[tuple[str, ...], dict[str, _Line]]:
    """Return the "time" lines of a world by case, then by method, without those that a check has found wrong."""
    failed = {
        (*[check[field] for field in _CASE], failure.split(", ")[1])  # "PE 0, method, what is wrong"
        for check in select(lines, "check", pes=pes)
        for failure in check["failures"]
    }
    groups: dict[tuple[str, ...], dict[str, _Line]] = {}
    for line in select(lines, "time", pes=pes):
        case = tuple(line[field] for field in _CASE)
        if (*case, line["method"]) not in failed:
            groups.setdefault(case, {})[line["method"]] = line
    return groups


def _heads(case: Sequence[str]) -> list[str]:
    return [case[0], ", ".join(case[1:])]


def _time_table(
    groups: Mapping[tuple[str, ...], Mapping[str, _Line]], baselines: Mapping[str, Sequence[str]], pes: int
) -> Any:
    blocks = []
    for case, rows in groups.items():
        line = next(iter(rows.values()))
        heads = [*_heads(case), f"{line['unique_rows'] / line['lookups']:.2f} of lookups are rows"]
        cells = [
            [
                row["label"],
                us_text(row["us"]),
                us_text(row["us_p95"]),
                _megabytes(row["memory_bytes"]),
                _megabytes(row["sent_bytes"]),
                *_share(row),
                times_as_long(fastest(rows.values(), baselines.get(row["method"], ())), row),
            ]
            for row in rows.values()
        ]
        blocks.append((heads, cells))
    return case_table(
        f"{pes} PEs: time per call, least bytes of HBM and NVLink per PE, and the bound at this run's ceilings",
        ("config, optimizer, indices", "method"),
        ("us", "p95", "MB\nHBM", "MB\nsent", "bound", "share", SPEEDUP),
        blocks,
    )


def _share(row: _Line) -> list[str]:
    if "limit_us" not in row:
        return ["-", "-"]
    return [f"{us_text(row['limit_us'])} {row['limit_by']}", f"{row['limit_us'] / row['us']:.0%}"]


def _megabytes(count: float | None) -> str:
    return f"{count / 1e6:.3g}" if count else "-"


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


def draw_shares(lines: Sequence[_Line], path: Path) -> None:
    """Draw bound / time of every method, case by case, for the largest world."""
    times = select(lines, "time")
    if not times:
        return
    groups = _groups(lines, max(unique(times, "pes")))
    series: dict[str, dict[int, float]] = {}
    for place, rows in enumerate(groups.values()):
        for row in rows.values():
            if "limit_us" in row and row["method"] not in _PARTS[1:]:
                series.setdefault(row["label"], {})[place] = row["limit_us"] / row["us"]
    with figure(lines, path, size=(max(9.0, 2.2 * len(groups)), 5.0)) as (_, (axes,)):
        draw_bars(axes, ["\n".join(case) for case in groups], series)
        axes.set_ylabel("bound / time")
        axes.set_title("Backward passes, and steps, as shares of what the hardware allows")
        legend(axes)
