"""Tables and the figure, from the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.record import select, unique, us_text
from harness.tuning import print_tuning_table
from rich.console import Console
from rich.table import Table

from .methods import ALONE, CHOICES, FUSED, PRODUCTS, UNFUSED

__all__ = ["draw_figure", "print_tables", "print_tuning"]

_Line = dict[str, Any]
_DRAWN = ("fused", "prefetch", *UNFUSED)


def print_tables(lines: Sequence[_Line], console: Console) -> None:
    """Print the runs, what was found wrong, and the times of every world."""
    run = select(lines, "run")[-1]
    place = run.get("gpu", run.get("processor"))
    console.print(
        f"{place}, torch {run['torch']}"
        + (f", driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}" if run["backend"] == "cuda" else "")
        + f", commit {(run['commit'] or 'unknown')[:9]}; bf16"
    )
    for line in select(lines, "ceilings"):
        console.print(f"ceiling, {line['pes']} PEs: read {line['read'] / 1e12:.3f} TB/s per PE")
    for line in select(lines, "left_out"):
        console.print(f"left out, {line['pes']} PEs: {line['what']}: {line['problem']}", soft_wrap=True)
    checks = select(lines, "check")
    failures = [f"{line['pes']} PEs, {line['shape_name']}: {text}" for line in checks for text in line["failures"]]
    largest = max((line["largest_share_of_bound"] for line in checks), default=0.0)
    console.print(
        f"WRONG: {len(failures)} checks failed; the first: {failures[0]}"
        if failures
        else f"correct: within the rounding bound of fp64 (at most {largest:.2f} of it); the same bits on all PEs, "
        "when repeated, in both algorithms, with prefetch, in graphs, and for a vector alone"
    )
    if run["backend"] == "host":
        console.print("Host PEs share this machine's cores, and shapes are small: the times say nothing about GPUs.")
    for pes in unique(select(lines, "time"), "pes"):
        console.print(_time_table(lines, pes))
    if select(lines, "spread"):
        console.print(
            "us: of a call among others in one graph. single: calls timed one by one, with an event after each."
        )


def _time_table(lines: Sequence[_Line], pes: int) -> Table:
    table = Table(
        title=f"{pes} PEs" if pes > 1 else "1 PE: nothing to exchange",
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("M x K per PE", no_wrap=True)
    table.add_column("method", no_wrap=True)
    against = "x best\nunfused" if pes > 1 else "x cuBLAS"
    for header in ("us", "p95", "% of\nlimit", against, "single:\nmedian", "p99"):
        table.add_column(header, justify="right")
    for name in unique(select(lines, "time", pes=pes), "shape_name"):
        rows = select(lines, "time", pes=pes, shape_name=name)
        spreads = {line["method"]: line for line in select(lines, "spread", pes=pes, shape_name=name)}
        base = _base(rows)
        for i, row in enumerate(rows):
            spread = spreads.get(row["method"])
            table.add_row(
                (name, f"limit {us_text(row['limit_us'])}")[i] if i < 2 else "",
                row["label"],
                us_text(row["us"]),
                us_text(row["us_p95"]),
                f"{row['limit_us'] / row['us']:.0%}",
                f"{base['us'] / row['us']:.2f}" if base and row["method"] in CHOICES else "-",
                us_text(spread["us_median"]) if spread else "-",
                us_text(spread["us_p99"]) if spread else "-",
                end_section=i == len(rows) - 1,
            )
    products = [PRODUCTS[line["chosen"]] for line in select(lines, "product", pes=pes) if line["us"]]
    if products:
        table.caption = "fastest product by cuBLAS, the one used: " + ", ".join(products)
    return table


def _base(rows: Sequence[_Line]) -> _Line | None:
    """Return the fastest line without the operator: of those that exchange, where there are any."""
    for names in (UNFUSED, ("cublas_alone",)):
        found = [row for row in rows if row["method"] in names]
        if found:
            return min(found, key=lambda row: float(row["us"]))
    return None


def print_tuning(lines: Sequence[_Line], console: Console) -> None:
    """Print the best combinations of each shape, and how many did not run and why."""
    keys = dict.fromkeys((line["pes"], line["shape_name"], line["method"]) for line in select(lines, "tune"))
    for pes, shape, method in keys:
        rows = select(lines, "tune", pes=pes, shape_name=shape, method=method)
        print_tuning_table(rows, f"{shape}, {method}, {pes} PEs", console)


def draw_figure(lines: Sequence[_Line], path: Path) -> None:
    """Draw the normalised times as the paper's figure 9 does; then the worlds beside each other, and the GEMV alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = select(lines, "time")
    worlds = sorted(pes for pes in unique(times, "pes") if pes > 1)
    panels: list[tuple[str, int | None]] = []
    if worlds:
        panels.append(("fused", worlds[-1]))
    if len(worlds) > 1:
        panels.append(("worlds", None))
    if any(line["pes"] == 1 for line in times):
        panels.append(("alone", 1))
    if not panels:
        return
    width = 1.5 * max(6, len(unique(times, "shape_name")))
    figure, grid = pyplot.subplots(
        len(panels), 1, figsize=(width, 4.2 * len(panels)), layout="constrained", squeeze=False
    )
    for axes, (kind, pes) in zip(grid[:, 0], panels, strict=True):
        if kind == "worlds":
            _draw_worlds(axes, times, worlds)
        else:
            _draw_times(axes, select(times, "time", pes=pes), _DRAWN if kind == "fused" else ALONE)
            place = f"{pes} PEs" if kind == "fused" else "one PE, nothing to exchange"
            axes.set_title(f"GEMV + AllReduce, bf16, {place} (dotted: time to read the weight)")
    if any(line["backend"] == "host" for line in select(lines, "run")):
        figure.suptitle("host backend, small shapes: says nothing about GPUs", color="red")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _groups(lines: Sequence[_Line]) -> dict[str, dict[str, _Line]]:
    """Return the lines by shape, then by method."""
    groups: dict[str, dict[str, _Line]] = {}
    for line in lines:
        groups.setdefault(line["shape_name"], {})[line["method"]] = line
    return groups


def _draw_times(axes: Any, lines: Sequence[_Line], methods: Sequence[str]) -> None:
    groups = _groups(lines)
    drawn = [name for name in methods if any(name in rows for rows in groups.values())]
    bases = [_base(list(rows.values())) or next(iter(rows.values())) for rows in groups.values()]
    for number, name in enumerate(drawn):
        places, heights, label = [], [], name
        for place, (rows, base) in enumerate(zip(groups.values(), bases, strict=True)):
            if name in rows:
                places.append(place + (number - (len(drawn) - 1) / 2) * 0.84 / len(drawn))
                heights.append(rows[name]["us"] / base["us"])
                label = rows[name]["label"]
        axes.bar_label(axes.bar(places, heights, 0.84 / len(drawn), label=label), fmt="%.2f", fontsize=7)
    for place, base in enumerate(bases):
        axes.hlines(base["limit_us"] / base["us"], place - 0.44, place + 0.44, "black", "dotted")
    names = [f"{name}\n1 = {us_text(base['us'])} us" for name, base in zip(groups, bases, strict=True)]
    axes.set_xticks(range(len(groups)), names, fontsize=8)
    axes.set_ylabel("time / fastest without the operator")
    if drawn:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8)


def _draw_worlds(axes: Any, lines: Sequence[_Line], worlds: Sequence[int]) -> None:
    names = unique(lines, "shape_name")
    for number, pes in enumerate(worlds):
        groups = _groups(select(lines, "time", pes=pes))
        places, heights = [], []
        for place, name in enumerate(names):
            rows = list(groups.get(name, {}).values())
            base = _base(rows)
            own = [row["us"] for row in rows if row["method"] in FUSED]
            if base and own:
                places.append(place + (number - (len(worlds) - 1) / 2) * 0.84 / len(worlds))
                heights.append(base["us"] / min(own))
        axes.bar_label(axes.bar(places, heights, 0.84 / len(worlds), label=f"{pes} PEs"), fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linestyle="dotted")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("best unfused / best fused")
    axes.set_title("Speed-up by the number of PEs")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8)
