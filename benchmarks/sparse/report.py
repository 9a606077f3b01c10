"""Tables, from the lines of a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.record import select, unique, us_text
from rich.console import Console
from rich.table import Table

from .cases import CASES, SWEEPS
from .methods import OURS, PEERS

__all__ = ["crossover", "print_tables", "swept_lines"]

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


def print_tables(lines: Sequence[_Line], console: Console) -> None:
    """Print the runs, what was found wrong or left out, and the times of every world."""
    run = select(lines, "run")[-1]
    place = run.get("gpu", run.get("processor"))
    console.print(
        f"{place}, torch {run['torch']}"
        + (f", driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}" if run["backend"] == "cuda" else "")
        + f", commit {(run['commit'] or 'unknown')[:9]}; fp32"
    )
    for line in select(lines, "ceilings"):
        store = f"store to all peers {line['store'] / 1e9:.0f} GB/s" if line["store"] else "no peer to store to"
        console.print(f"ceilings, {line['pes']} PEs: read {line['read'] / 1e12:.3f} TB/s, {store}, each")
    checks = select(lines, "check")
    failures = [f"{line['pes']} PEs, {line['case']}: {text}" for line in checks for text in line["failures"]]
    largest = max((line["largest_difference"] for line in checks), default=0.0)
    console.print(
        f"WRONG: {len(failures)} checks failed; the first: {failures[0]}"
        if failures
        else "correct: the operator's values have the bits of sums in the order of the PEs, on all PEs, with every "
        f"algorithm, when repeated and in graphs; the others' are at most {largest:.2g} away",
        soft_wrap=True,
    )
    if run["backend"] == "host":
        console.print("Host PEs share this machine's cores, and cases are small: the times say nothing about GPUs.")
    for pes in unique(select(lines, "run"), "pes"):
        for print_part in (_print_cases, _print_phases, *(_print_sweep(sweep) for sweep in SWEEPS), _print_skipped):
            print_part(lines, pes, console)


def _print_cases(lines: Sequence[_Line], pes: int, console: Console) -> None:
    if not select(lines, "time", pes=pes, group="cases"):
        return
    console.print(_case_table(lines, pes))
    console.print(
        "us: of a call among others. p99: of calls timed one by one, with an event after each. limit: the rows to "
        "which other PEs contribute (lacked), over the store ceiling. unicast: m + P - 2 messages for a row with m "
        "contributors, over P PEs; without multicast nothing needs less. MB sent: values, on average. mem: peak of "
        "input, result and all else, over input and result. x best peer: its time over this one's."
    )


def _print_skipped(lines: Sequence[_Line], pes: int, console: Console) -> None:
    """Print a line per method and kind of reason; a reason's second half, behind a semicolon, is its kind."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for line in select(lines, "skipped", pes=pes):
        own, _, kind = line["reason"].partition("; ")
        kinds.setdefault((line["label"], kind), []).append(f"{line['case']}: {own}")
    for (label, kind), found in kinds.items():
        text = f" ({kind})" if kind else ""
        console.print(f"skipped: {label}{text}: {'; '.join(found)}", soft_wrap=True)


def _case_table(lines: Sequence[_Line], pes: int) -> Table:
    table = Table(title=f"{pes} PEs", title_justify="left", pad_edge=False)
    table.add_column("rows x width, rows per PE", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for header in ("us", "p99", "x\nlimit", "x uni-\ncast", "MB\nsent", "mem", "x best\npeer"):
        table.add_column(header, justify="right")
    for name in CASES:
        rows = select(lines, "time", pes=pes, group="cases", case=name)
        skipped = select(lines, "skipped", pes=pes, group="cases", case=name)
        if not rows:
            continue
        (case,) = select(lines, "case", pes=pes, group="cases", case=name)
        heads = [name, *_summary(case)]
        best = _best_peer(rows)
        count = max(len(rows) + len(skipped), len(heads))
        for i in range(count):
            head = heads[i] if i < len(heads) else ""
            if i < len(rows):
                cells = [rows[i]["label"], *_cells(lines, rows[i], case, best)]
            elif i < len(rows) + len(skipped):
                cells = [skipped[i - len(rows)]["label"], "skipped", *[""] * 6]
            else:
                cells = [""] * 8
            table.add_row(head, *cells, end_section=i == count - 1)
    return table


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
        f"{best['us'] / row['us']:.2f}" if best and row["method"] in OURS else "-",
    ]


def _best_peer(rows: Sequence[_Line]) -> _Line | None:
    found = [row for row in rows if row["method"] in PEERS]
    return min(found, key=lambda row: float(row["us"])) if found else None


def _print_phases(lines: Sequence[_Line], pes: int, console: Console) -> None:
    rows = select(lines, "phases", pes=pes, group="cases")
    if not rows:
        return
    table = Table(title=f"phases of single launches, {pes} PEs: us", title_justify="left", pad_edge=False)
    for header in ("case", "method", "algorithm used"):
        table.add_column(header, no_wrap=True)
    for phase in rows[0]["us"]:
        table.add_column(phase, justify="right")
    for name in CASES:
        found = select(rows, "phases", case=name)
        for i, row in enumerate(found):
            cells = [us_text(value) for value in row["us"].values()]
            table.add_row(
                name if i == 0 else "", row["method"], row["algorithm"], *cells, end_section=i == len(found) - 1
            )
    console.print(table)


def _print_sweep(sweep: str) -> Any:
    def print_part(lines: Sequence[_Line], pes: int, console: Console) -> None:
        points = swept_lines(lines, sweep, pes)
        if not points:
            return
        table = Table(title=f"{sweep}, {pes} PEs: us", title_justify="left", pad_edge=False)
        for header in (_AXES[sweep], "union", "limit", "uni-\ncast"):
            table.add_column(header, justify="right")
        methods = [name for name in _SHORT if any(name in times for _, times in points)]
        for name in methods:
            table.add_column(_SHORT[name], justify="right")
        for case, times in points:
            point = case["shape"]["point"]
            table.add_row(
                f"{1 - point:.2%}" if sweep == "sparsity" else f"{point:.0%}",
                _count(case["union_rows"]),
                us_text(case["limit_us"]) if case["limit_us"] is not None else "-",
                us_text(case["unicast_us"]) if case["unicast_us"] is not None else "-",
                *[us_text(times[name]["us"]) if name in times else "skipped" for name in methods],
            )
        console.print(table)
        if sweep == "sparsity":
            for ours, dense in (("auto", "dense_reduce"), ("owner", "dense")):
                console.print(_crossover_text(points, ours, dense))

    return print_part


def _crossover_text(points: Sequence[tuple[_Line, dict[str, _Line]]], ours: str, dense: str) -> str:
    both = [(case["shape"]["point"], times) for case, times in points if ours in times and dense in times]
    if not both:
        return f"{ours} and {dense}: no crossover, for they were not both measured"
    found = crossover(
        [density for density, _ in both],
        [times[ours]["us"] for _, times in both],
        [times[dense]["us"] for _, times in both],
    )
    if found is None:
        return f"{dense}: slower than {ours} down to {1 - both[-1][0]:.2%} sparsity"
    return f"{dense}: faster than {ours} below {1 - found:.2%} sparsity"


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
