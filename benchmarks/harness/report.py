"""The common parts of all benchmarks' tables: the description of the run, the errors found, and the tables' form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from persistent_ops.testing.record import pes_text, select, unique, us_text

if TYPE_CHECKING:
    from .experiment import Experiment

__all__ = [
    "BOUND_COLUMNS",
    "SPEEDUP",
    "bound_cells",
    "case_table",
    "fastest",
    "method_tables",
    "print_report",
    "print_tunings",
    "right_times",
    "times_as_long",
]

SPEEDUP = "speedup\nover best\nbaseline"  # header of what `times_as_long` returns: more is better
BOUND_COLUMNS = ("us", "p95", "MB\nHBM", "MB\nsent", "bound", "share", SPEEDUP)
_Line = dict[str, Any]
_NAMING = ("kind", "pes", "shape", "tuning", "us", "problem", "h200_limit_us", "seconds_by_pe_and_round")
_BEST = 12  # combinations of a Tuning that are shown


def print_report(experiment: type[Experiment[Any]], lines: Sequence[_Line], console: Console) -> None:
    """Print the last run, the ceilings, what was left out or found wrong, and the benchmark's own tables."""
    run = select(lines, "run")[-1]
    console.print(
        f"{run.get('gpu', run.get('processor'))}, torch {run['torch']}"
        + (f", driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}" if run["backend"] == "cuda" else "")
        + f", commit {(run['commit'] or 'unknown')[:9]}{experiment.note}"
    )
    for line in select(lines, "ceilings"):
        store = f"store to all peers {line['store'] / 1e9:.0f} GB/s" if line["store"] else "no peer to store to"
        update = f"update {line['update'] / 1e12:.3f} TB/s, " if line.get("update") else ""
        console.print(f"ceilings per PE, {pes_text(line['pes'])}: read {line['read'] / 1e12:.3f} TB/s, {update}{store}")
    for line in select(lines, "left_out"):
        console.print(f"left out, {pes_text(line['pes'])}: {line['what']}: {line['problem']}", soft_wrap=True)
    checks = select(lines, "check")
    failures = [f"{pes_text(c['pes'])}, {c[experiment.case_field]}: {text}" for c in checks for text in c["failures"]]
    if failures:
        told = f"WRONG: {len(failures)} checks failed; the first: {failures[0]}"
    else:
        told = experiment.correct.format_map(_largest(checks)) if checks else "nothing was checked"
    console.print(told, soft_wrap=True)
    if run["backend"] == "host":
        console.print("Host PEs share this machine's cores, and tensors are small: the times say nothing about GPUs.")
    for part in experiment.tables(lines):
        console.print(part, soft_wrap=isinstance(part, str))


def _largest(checks: Sequence[_Line]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for line in checks:
        for field, value in line.items():
            if isinstance(value, float):
                found[field] = max(found[field], value)
    return found


def case_table(
    title: str,
    headers: Sequence[str],
    columns: Sequence[str],
    blocks: Iterable[tuple[Sequence[str], Sequence[Sequence[str]]]],
    *,
    caption: str | None = None,
) -> Table:
    """Return a table of cases, each with a row per method.

    Args:
        title: of the table.
        headers: of the columns of text: the case's, the method's.
        columns: headers of the columns of numbers.
        blocks: of each case the texts that stand one below the other in the first column, and its rows without that.
        caption: below the table.
    """
    table = Table(title=title, title_justify="left", pad_edge=False, caption=caption)
    for header in headers:
        table.add_column(header, no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right")
    for heads, rows in blocks:
        count = max(len(heads), len(rows))
        for i in range(count):
            cells = rows[i] if i < len(rows) else []
            table.add_row(heads[i] if i < len(heads) else "", *cells, end_section=i == count - 1)
    return table


def method_tables(
    lines: Sequence[_Line], case_field: str, header: str, note: str, baselines_of: Callable[[_Line], Sequence[str]]
) -> Iterable[Table]:
    """Return a table for each world: of each case the methods, their times, the limit, and how they compare.

    Args:
        lines: of the record.
        case_field: of the "time" lines, with the case's name.
        header: of the cases' column.
        note: after the number of PEs in the title.
        baselines_of: the methods that a line's is compared with; none for those that are not the operator's.
    """

    def cells(row: _Line, rows: Sequence[_Line]) -> list[str]:
        times = [us_text(row[name]) for name in ("us", "us_p95", "limit_us")]
        return [row["label"], *times, times_as_long(fastest(rows, baselines_of(row)), row)]

    for pes in unique(select(lines, "time"), "pes"):
        blocks = []
        for case in unique(select(lines, "time", pes=pes), case_field):
            rows = select(lines, "time", pes=pes, **{case_field: case})
            blocks.append(([case], [cells(row, rows) for row in rows]))
        yield case_table(f"{pes_text(pes)}, {note}", (header, "method"), ("us", "p95", "limit", SPEEDUP), blocks)


def right_times(lines: Sequence[_Line], pes: int, fields: Sequence[str]) -> dict[tuple[str, ...], dict[str, _Line]]:
    """Return the "time" lines of a world by case, then by method, without those that a check has found wrong.

    Args:
        lines: of the record.
        pes: the world's.
        fields: of a line, that name its case.
    """
    failed = {
        (*[check[field] for field in fields], failure.split(", ")[1])  # "PE 0, method, what is wrong"
        for check in select(lines, "check", pes=pes)
        for failure in check["failures"]
    }
    groups: dict[tuple[str, ...], dict[str, _Line]] = {}
    for line in select(lines, "time", pes=pes):
        case = tuple(line[field] for field in fields)
        if (*case, line["method"]) not in failed:
            groups.setdefault(case, {})[line["method"]] = line
    return groups


def bound_cells(rows: Mapping[str, _Line], baselines: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return a case's rows below BOUND_COLUMNS, labels first; `baselines`: by method, what it is compared with."""

    def cells(row: _Line) -> list[str]:
        moved = [f"{row[name] / 1e6:.3g}" if row[name] else "-" for name in ("memory_bytes", "sent_bytes")]
        bound = ["-", "-"]
        if "limit_us" in row:
            bound = [f"{us_text(row['limit_us'])} {row['limit_by']}", f"{row['limit_us'] / row['us']:.0%}"]
        best = fastest(rows.values(), baselines.get(row["method"], ()))
        return [row["label"], us_text(row["us"]), us_text(row["us_p95"]), *moved, *bound, times_as_long(best, row)]

    return [cells(row) for row in rows.values()]


def fastest(rows: Iterable[_Line], methods: Iterable[str]) -> _Line | None:
    """Return the "time" line of the fastest of the methods, or None where none of them has one."""
    wanted = set(methods)
    return min((row for row in rows if row["method"] in wanted), key=lambda row: float(row["us"]), default=None)


def times_as_long(other: _Line | None, row: _Line) -> str:
    """Return how many times as long the other method took, or "-" where there is none."""
    return f"{other['us'] / row['us']:.2f}" if other else "-"


def print_tunings(lines: Sequence[_Line], console: Console) -> None:
    """Print the best combinations of each case and method, and how many did not run and why."""
    groups: dict[tuple[str, ...], list[_Line]] = {}
    for line in select(lines, "tune"):
        naming = (*[str(value) for field, value in line.items() if field not in _NAMING], pes_text(line["pes"]))
        groups.setdefault(naming, []).append(line)
    for naming, rows in groups.items():
        _print_tuning(rows, ", ".join(naming), console)


def _print_tuning(rows: Sequence[_Line], title: str, console: Console) -> None:
    """Print one case's combinations, of which the default one comes first in `rows`."""
    timed = sorted((row for row in rows if row["us"] is not None), key=lambda row: row["us"])
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("us", justify="right")
    table.add_column("x H200's limit", justify="right")
    table.add_column("tuning")
    tried = [name for name in rows[0]["tuning"] if len({str(row["tuning"][name]) for row in rows}) > 1]
    for place, row in enumerate(timed):
        is_default = row["tuning"] == rows[0]["tuning"]
        if place < _BEST or is_default or row["problem"]:
            text = " ".join(f"{name}={row['tuning'][name]}" for name in tried)
            note = " (default)" if is_default else ""
            note += f" WRONG: {row['problem']}" if row["problem"] else ""
            limit = row["h200_limit_us"]
            table.add_row(us_text(row["us"]), "" if limit is None else f"{row['us'] / limit:.3f}", text + note)
    console.print(table)
    for problem in list(dict.fromkeys(row["problem"] for row in rows if row["us"] is None))[:3]:
        console.print(f"  did not run: {problem}", soft_wrap=True)
