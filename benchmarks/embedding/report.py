"""Tables and the figure, from the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.record import select, unique, us_text
from harness.tuning import print_tuning_table
from rich.console import Console
from rich.table import Table

from .methods import UNFUSED

__all__ = ["draw_figure", "print_tables", "print_tuning"]

_Line = dict[str, Any]


def print_tables(lines: Sequence[_Line], console: Console) -> None:
    """Print the run, the comparison of the schedules, and the times of the largest world."""
    pes = max(unique(select(lines, "run"), "pes"))
    run = select(lines, "run", pes=pes)[-1]
    place = run.get("gpu", run.get("processor"))
    console.print(
        f"{pes} PEs, {place}, torch {run['torch']}"
        + (f", driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}" if run["backend"] == "cuda" else "")
        + f", commit {(run['commit'] or 'unknown')[:9]}"
    )
    for line in select(lines, "ceilings", pes=pes):
        store = f"store to all peers {line['store'] / 1e9:.0f} GB/s" if line["store"] else "no peer to store to"
        console.print(f"ceilings per PE: read {line['read'] / 1e12:.3f} TB/s, {store}")
    for line in select(lines, "host_cost"):
        costs = ", ".join(f"{name}: {us:.1f}" for name, us in line["us_per_call"].items())
        console.print(f"host time of a plain call, {line['pes']} PEs (us): {costs}")
    failures = [failure for line in select(lines, "check") for failure in line["failures"]]
    largest = max((line["largest_difference"] for line in select(lines, "check")), default=0.0)
    console.print(
        f"WRONG: {len(failures)} checks failed; the first: {failures[0]}"
        if failures
        else f"correct: fused agrees with unfused (largest relative difference {largest:.2g}); its bits repeat, also "
        "in the oblivious order, in graphs and without the exchange"
    )
    if run["backend"] == "host":
        console.print("Host PEs share this machine's cores, and shapes are small: the times say nothing about GPUs.")
    if select(lines, "skew"):
        console.print(_schedule_table(lines))
    for distribution in unique(select(lines, "time"), "distribution"):
        console.print(_time_table(lines, distribution, pes, run["backend"] == "cuda"))


def _time_table(lines: Sequence[_Line], distribution: str, pes: int, is_gpu: bool) -> Table:
    table = Table(
        title=f"{distribution} indices, {pes} PEs: time per call, sent per PE, and the limit of this run's ceilings"
        + (" and of those measured on 8x H200" if is_gpu else ""),
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("config")
    table.add_column("method", no_wrap=True)
    h200 = ("x H200's",) if is_gpu else ()
    for header in ("us", "p95", "MB sent", "x limit", *h200, "x best\nunfused"):
        table.add_column(header, justify="right")
    for config in unique(select(lines, "time", distribution=distribution, pes=pes), "config"):
        rows = select(lines, "time", distribution=distribution, pes=pes, config=config)
        unfused = min((row["us"] for row in rows if row["method"] in UNFUSED), default=None)
        for i, row in enumerate(rows):
            label = f"{config}\n{us_text(row['limit_us'])} us {row['limit_by']}"
            table.add_row(
                label.split("\n")[i] if i < 2 else "",
                row["label"],
                us_text(row["us"]),
                us_text(row["us_p95"]),
                f"{row['sent_bytes'] / 1e6:.3g}" if row["sent_bytes"] else "-",
                f"{row['us'] / row['limit_us']:.2f}",
                *([f"{row['us'] / row['h200_limit_us']:.2f}"] if is_gpu else []),
                f"{unfused / row['us']:.2f}" if unfused and row["sent_bytes"] else "-",
                end_section=i == len(rows) - 1,
            )
    return table


def _schedule_table(lines: Sequence[_Line]) -> Table:
    table = Table(
        title="communication-aware (ca) against oblivious (ob) order: single launches that all PEs begin together",
        title_justify="left",
        pad_edge=False,
    )
    for header in ("PEs", "indices", "config"):
        table.add_column(header)
    for header in ("ca us", "ca skew", "ob us", "ob skew", "ob / ca"):
        table.add_column(header, justify="right")
    for aware in select(lines, "skew", method="fused"):
        key = {name: aware[name] for name in ("pes", "distribution", "config")}
        other = select(lines, "skew", method="oblivious", **key)
        cells = (
            [us_text(other[0]["us"]), f"{other[0]['skew']:.1%}", f"{other[0]['us'] / aware['us']:.2f}"] if other else []
        )
        table.add_row(
            str(aware["pes"]),
            aware["distribution"],
            aware["config"],
            us_text(aware["us"]),
            f"{aware['skew']:.1%}",
            *cells,
        )
    return table


def print_tuning(lines: Sequence[_Line], console: Console) -> None:
    """Print the best combinations of each config, and how many did not run and why."""
    for distribution in unique(select(lines, "tune"), "distribution"):
        for config in unique(select(lines, "tune", distribution=distribution), "config"):
            rows = select(lines, "tune", distribution=distribution, config=config)
            print_tuning_table(rows, f"{config}, {distribution}, {rows[0]['pes']} PEs", console)


def draw_figure(lines: Sequence[_Line], path: Path) -> None:
    """Draw the normalised times, and the two schedules with their skew, as the paper's figures 8 and 14 do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 1.4 * max(6, len(_groups(select(lines, "time"))), len(_groups(select(lines, "skew"))))
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(width, 9.0), layout="constrained")
    _draw_times(top, lines)
    _draw_schedules(bottom, lines)
    if any(line["backend"] == "host" for line in select(lines, "run")):
        figure.suptitle("host backend, small shapes: says nothing about GPUs", color="red")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _groups(lines: Sequence[_Line]) -> dict[tuple[str, str, int], dict[str, _Line]]:
    """Return the lines by (config, distribution, PEs), then by method."""
    groups: dict[tuple[str, str, int], dict[str, _Line]] = {}
    for line in lines:
        groups.setdefault((line["config"], line["distribution"], line["pes"]), {})[line["method"]] = line
    return groups


def _draw_times(axes: Any, lines: Sequence[_Line]) -> None:
    pes = max(unique(select(lines, "run"), "pes"))
    groups = _groups(select(lines, "time", pes=pes))
    drawn = [name for name in ("fused", *UNFUSED) if any(name in rows for rows in groups.values())]
    for number, name in enumerate(drawn):
        places, heights = [], []
        for place, rows in enumerate(groups.values()):
            if name in rows:
                places.append(place + (number - (len(drawn) - 1) / 2) * 0.8 / len(drawn))
                heights.append(rows[name]["us"] / _base(rows)["us"])
        label = next(rows[name]["label"] for rows in groups.values() if name in rows)
        axes.bar_label(axes.bar(places, heights, 0.8 / len(drawn), label=label), fmt="%.2f", fontsize=7)
    for place, rows in enumerate(groups.values()):
        base = _base(rows)
        axes.hlines(base["limit_us"] / base["us"], place - 0.4, place + 0.4, "black", "dotted")
    axes.set_xticks(range(len(groups)), [f"{config}\n{distribution}" for config, distribution, _ in groups], fontsize=7)
    axes.set_ylabel("time / unfused with the same kernel")
    axes.set_title(f"Fused and unfused on {pes} PEs (dotted: limit of the hardware)")
    if drawn:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8)


def _base(rows: dict[str, _Line]) -> _Line:
    """Return the line that the others are divided by."""
    return next((rows[name] for name in ("unfused_own", "unfused_torch") if name in rows), next(iter(rows.values())))


def _draw_schedules(axes: Any, lines: Sequence[_Line]) -> None:
    groups = _groups(select(lines, "skew"))
    for number, (name, label) in enumerate((("fused", "communication-aware"), ("oblivious", "oblivious"))):
        places, heights, below, above = [], [], [], []
        for place, rows in enumerate(groups.values()):
            if name in rows:
                base = rows.get("oblivious", rows[name])["us"]
                by_pe = [us / base for us in rows[name]["us_by_pe"]]
                height = rows[name]["us"] / base
                places.append(place + (number - 0.5) * 0.4)
                heights.append(height)
                below.append(max(0.0, height - min(by_pe)))
                above.append(max(0.0, max(by_pe) - height))
        if places:
            axes.bar(places, heights, 0.4, yerr=[below, above], capsize=3, label=label)
    names = [f"{config}\n{distribution}, {pes} PEs" for config, distribution, pes in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7, rotation=0 if len(groups) < 13 else 90)
    axes.set_ylabel("time / oblivious order")
    axes.set_title("Order of the tasks; whiskers: the fastest and the slowest PE of a launch that all begin together")
    if groups:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8)
