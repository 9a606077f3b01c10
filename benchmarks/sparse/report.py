"""Tables, from the lines of a record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from harness.report import SPEEDUP, case_table, fastest, times_as_long
from rich.table import Table

from persistent_ops.testing.record import pes_text, select, unique, us_text

from .cases import CASES, SWEEPS
from .methods import BASELINES, OURS

__all__ = ["crossover", "measured_with_both", "swept_lines", "tables"]

_Line = dict[str, Any]
_AXES = {"sparsity": "sparse", "overlap": "shared"}
_SHORT = {  # heads of a sweep's table
    "auto": "operator\n(auto)",
    "owner": "owner",
    "allgather": "all-\ngather",
    "dense": "dense",
    "into": "into,\ngraph",
    "dense_reduce": "dense\nreduce",
    "gather_add": "gather +\nadd",
    "union_reduce": "union +\nreduce",
}


def tables(lines: Sequence[_Line]) -> Iterator[Any]:
    """Yield the times of every world, and what was left out."""
    for pes in unique(select(lines, "run"), "pes"):
        if select(lines, "time", pes=pes, group="cases"):
            yield _case_table(lines, pes)
            yield (
                "us: of a call among others. p99: of calls timed one by one, with an event after each. limit: the rows "
                "to which other PEs contribute (lacked), over the store ceiling. unicast: m + P - 2 messages for a row "
                "with m contributors, over P PEs; without multicast nothing needs less. MB sent: values, on average. "
                "mem: peak of input, result and all else, over input and result. speedup: time of the best baseline "
                "over this one."
            )
        yield from _phases_table(lines, pes)
        for sweep in SWEEPS:
            yield from _sweep_table(lines, sweep, pes)
        yield from _skipped(lines, pes)


def _skipped(lines: Sequence[_Line], pes: int) -> Iterator[str]:
    """Yield a line per method and kind of reason; a reason's second half, after a semicolon, is its kind."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for line in select(lines, "skipped", pes=pes):
        own, _, kind = line["reason"].partition("; ")
        kinds.setdefault((line["label"], kind), []).append(f"{line['case']}: {own}")
    for (label, kind), found in kinds.items():
        text = f" ({kind})" if kind else ""
        yield f"skipped: {label}{text}: {'; '.join(found)}"


def _case_table(lines: Sequence[_Line], pes: int) -> Any:
    blocks = []
    for name in CASES:
        rows = select(lines, "time", pes=pes, group="cases", case=name)
        if rows:
            (case,) = select(lines, "case", pes=pes, group="cases", case=name)
            skipped = select(lines, "skipped", pes=pes, group="cases", case=name)
            best = fastest(rows, BASELINES)
            cells = [[row["label"], *_cells(lines, row, case, best)] for row in rows]
            blocks.append(([name, *_summary(case)], cells + [[line["label"], "skipped"] for line in skipped]))
    columns = ("us", "p99", "time /\nlimit", "time /\nunicast", "MB\nsent", "mem", SPEEDUP)
    return case_table(pes_text(pes), ("rows x width, rows per PE", "method"), columns, blocks)


def _summary(case: _Line) -> list[str]:
    found = [
        f"union {_count(case['union_rows'])}, {_count(case['rows_with_several'])} of several",
        f"lacked {_count(case['lacked_rows'])}",
    ]
    if case["limit_us"] is not None:
        found += [f"limit {us_text(case['limit_us'])} us", f"unicast {us_text(case['unicast_us'])} us"]
    return found


def _cells(lines: Sequence[_Line], row: _Line, case: _Line, best: _Line | None) -> list[str]:
    key = {name: row[name] for name in ("pes", "group", "case", "method")}
    spread = select(lines, "spread", **key)
    memory = select(lines, "memory", **key)
    return [
        us_text(row["us"]),
        us_text(spread[0]["us_p99"]) if spread else "-",
        _ratio(row["us"], case["limit_us"]),
        _ratio(row["us"], case["unicast_us"]),
        f"{row['sent_value_bytes'] / 1e6:.3g}",
        f"{memory[0]['ratio']:.2f}" if memory else "-",
        times_as_long(best if row["method"] in OURS else None, row),
    ]


def _phases_table(lines: Sequence[_Line], pes: int) -> Iterator[Any]:
    found = select(lines, "phases", pes=pes, group="cases")
    blocks = []
    for name in CASES:
        rows = select(found, "phases", case=name)
        cells = [
            [row["method"], row["algorithm"], *map(us_text, row["us"].values()), _host(lines, row)] for row in rows
        ]
        if cells:
            blocks.append(([name], cells))
    if blocks:
        title = f"phases of single launches, {pes_text(pes)}: us"
        yield case_table(title, ("case", "method", "algorithm used"), (*found[0]["us"], "host"), blocks)
        if select(lines, "host", pes=pes):
            yield "host: of an eager call, beside its wait for the number of rows; of a call that is alone on the GPU."


def _host(lines: Sequence[_Line], row: _Line) -> str:
    found = select(lines, "host", **{name: row[name] for name in ("pes", "group", "case", "method")})
    return us_text(found[0]["us"]) if found else "-"


def _sweep_table(lines: Sequence[_Line], sweep: str, pes: int) -> Iterator[Any]:
    points = swept_lines(lines, sweep, pes)
    if not points:
        return
    table = Table(title=f"{sweep}, {pes_text(pes)}: us", title_justify="left", pad_edge=False)
    methods = [name for name in _SHORT if any(name in times for _, times in points)]
    for header in (_AXES[sweep], "union", "limit", "uni-\ncast", *[_SHORT[name] for name in methods]):
        table.add_column(header, justify="right")
    for case, times in points:
        point = case["shape"]["point"]
        table.add_row(
            f"{1 - point:.2%}" if sweep == "sparsity" else f"{point:.0%}",
            _count(case["union_rows"]),
            us_text(case["limit_us"]) if case["limit_us"] is not None else "-",
            us_text(case["unicast_us"]) if case["unicast_us"] is not None else "-",
            *[us_text(times[name]["us"]) if name in times else "skipped" for name in methods],
        )
    yield table
    if sweep == "sparsity":
        for ours, dense in (("auto", "dense_reduce"), ("owner", "dense")):
            yield _crossover_text(points, ours, dense)


def _crossover_text(points: Sequence[tuple[_Line, dict[str, _Line]]], ours: str, dense: str) -> str:
    measured = measured_with_both(points, ours, dense)
    if not (densities := measured[0]):
        return f"{ours} and {dense}: no crossover, for they were not both measured"
    found = crossover(*measured)
    if found is None:
        return f"{dense}: slower than {ours} down to {1 - densities[-1]:.2%} sparsity"
    return f"{dense}: faster than {ours} below {1 - found:.2%} sparsity"


def measured_with_both(
    points: Sequence[tuple[_Line, dict[str, _Line]]], ours: str, dense: str
) -> tuple[list[float], list[float], list[float]]:
    """Return the places of a sweep where both methods have times, and these; see `crossover`."""
    both = [(case["shape"]["point"], times) for case, times in points if ours in times and dense in times]
    return [place for place, _ in both], [each[ours]["us"] for _, each in both], [each[dense]["us"] for _, each in both]


def crossover(places: Sequence[float], times: Sequence[float], others: Sequence[float]) -> float | None:
    """Return where `others` begin to be the shorter ones, or None where they are not at the last place.

    Args:
        places: ascending, above 0.
        times, others: at each place; between two places their logarithms are straight over the place's.
    """
    gaps = [math.log(time / other) for time, other in zip(times, others, strict=True)]
    if not gaps or gaps[-1] <= 0:
        return None
    last = max((i for i, gap in enumerate(gaps) if gap <= 0), default=None)
    if last is None:
        return places[0]
    share = -gaps[last] / (gaps[last + 1] - gaps[last])
    return math.exp(math.log(places[last]) + share * math.log(places[last + 1] / places[last]))


def swept_lines(lines: Sequence[_Line], sweep: str, pes: int) -> list[tuple[_Line, dict[str, _Line]]]:
    """Return each point's "case" line and its "time" lines by method, in the order of the axis."""
    cases = sorted(select(lines, "case", pes=pes, group=sweep), key=lambda line: float(line["shape"]["point"]))
    return [
        (case, {line["method"]: line for line in select(lines, "time", pes=pes, group=sweep, case=case["case"])})
        for case in cases
    ]


def _ratio(us: float, limit: float | None) -> str:
    if not limit:
        return "-"
    return f"{us / limit:.2f}" if us < 100 * limit else f"{us / limit:.0f}"


def _count(number: float) -> str:
    return f"{number / 1e3:.1f}k" if number >= 1e4 else f"{number:.0f}"
