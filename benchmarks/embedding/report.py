"""Tables and the figure, from the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .methods import UNFUSED

__all__ = ["draw_figure", "print_tables", "print_tuning"]

_Line = dict[str, Any]


def _of(lines: Sequence[_Line], kind: str, **wanted: Any) -> list[_Line]:
    return [
        line
        for line in lines
        if line["kind"] == kind and all(line.get(name) == value for name, value in wanted.items())
    ]


def _unique(lines: Sequence[_Line], field: str) -> list[Any]:
    return list(dict.fromkeys(line[field] for line in lines))


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def print_tables(lines: Sequence[_Line], console: Console) -> None:
    """Print the run, the comparison of the schedules, and the times of the largest world."""
    pes = max(_unique(_of(lines, "run"), "pes"))
    run = _of(lines, "run", pes=pes)[-1]
    ceilings = _of(lines, "ceilings", pes=pes)[-1]
    place = run.get("gpu", run.get("processor"))
    console.print(
        f"{pes} PEs, {place}, torch {run['torch']}"
        + (f", driver {run['driver']}, CUDA {run['cuda']}, NCCL {run['nccl']}" if run["backend"] == "cuda" else "")
        + f", commit {(run['commit'] or 'unknown')[:9]}"
    )
    store = ceilings["store"]
    console.print(
        f"ceilings per PE: read {ceilings['read'] / 1e12:.3f} TB/s, "
        + (f"store to all peers {store / 1e9:.0f} GB/s" if store else "no peer to store to")
    )
    for line in _of(lines, "host_cost"):
        costs = ", ".join(f"{name}: {us:.1f}" for name, us in line["us_per_call"].items())
        console.print(f"host time of a plain call, {line['pes']} PEs (us): {costs}")
    if _of(lines, "skew"):
        console.print(_schedule_table(lines))
    for distribution in _unique(_of(lines, "time"), "distribution"):
        console.print(_time_table(lines, distribution, pes))
    failures = [failure for line in _of(lines, "check") for failure in line["failures"]]
    largest = max((line["largest_difference"] for line in _of(lines, "check")), default=0.0)
    console.print(
        f"WRONG: {len(failures)} checks failed; the first: {failures[0]}"
        if failures
        else f"correct: fused agrees with unfused (largest relative difference {largest:.2g}), bits repeat, also in the "
        "oblivious order, in graphs and without the exchange"
    )
    if run["backend"] == "host":
        console.print(
            "Host PEs share this machine's cores, and the shapes are small: these times say nothing about GPUs."
        )


def _time_table(lines: Sequence[_Line], distribution: str, pes: int) -> Table:
    table = Table(title=f"{distribution} indices, {pes} PEs", title_justify="left", pad_edge=False)
    table.add_column("config")
    table.add_column("method", no_wrap=True)
    for header in ("us", "p95", "GB sent", "x limit", "x H200's", "x best\nunfused"):
        table.add_column(header, justify="right")
    for config in _unique(_of(lines, "time", distribution=distribution, pes=pes), "config"):
        rows = _of(lines, "time", distribution=distribution, pes=pes, config=config)
        unfused = min((row["us"] for row in rows if row["method"] in UNFUSED), default=None)
        for i, row in enumerate(rows):
            label = f"{config}\n{_us(row['limit_us'])} us {row['limit_by']}"
            table.add_row(
                label.split("\n")[i] if i < 2 else "",
                row["label"],
                _us(row["us"]),
                _us(row["us_p95"]),
                f"{row['sent_bytes'] / 1e9:.3g}" if row["sent_bytes"] else "-",
                f"{row['us'] / row['limit_us']:.2f}",
                f"{row['us'] / row['h200_limit_us']:.2f}",
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
    for aware in _of(lines, "skew", method="fused"):
        key = {name: aware[name] for name in ("pes", "distribution", "config")}
        other = _of(lines, "skew", method="oblivious", **key)
        cells = [_us(other[0]["us"]), f"{other[0]['skew']:.1%}", f"{other[0]['us'] / aware['us']:.2f}"] if other else []
        table.add_row(
            str(aware["pes"]), aware["distribution"], aware["config"], _us(aware["us"]), f"{aware['skew']:.1%}", *cells
        )
    return table


def print_tuning(lines: Sequence[_Line], console: Console, *, best: int = 12) -> None:
    """Print the best combinations of each config, and how many did not run and why."""
    for distribution in _unique(_of(lines, "tune"), "distribution"):
        for config in _unique(_of(lines, "tune", distribution=distribution), "config"):
            rows = _of(lines, "tune", distribution=distribution, config=config)
            timed = sorted((row for row in rows if row["us"] is not None), key=lambda row: row["us"])
            table = Table(title=f"{config}, {distribution}, {rows[0]['pes']} PEs", title_justify="left", pad_edge=False)
            table.add_column("us", justify="right")
            table.add_column("x H200's limit", justify="right")
            table.add_column("tuning")
            for place, row in enumerate(timed):
                is_default = row is next((r for r in rows if r["us"] is not None), None)
                if place < best or is_default or row["problem"]:
                    text = " ".join(f"{name}={value}" for name, value in row["tuning"].items())
                    note = " (default)" if row["tuning"] == rows[0]["tuning"] else ""
                    note += f" WRONG: {row['problem']}" if row["problem"] else ""
                    table.add_row(_us(row["us"]), f"{row['us'] / row['h200_limit_us']:.3f}", text + note)
            console.print(table)
            refused = [row for row in rows if row["us"] is None]
            for problem in list(dict.fromkeys(row["problem"] for row in refused))[:3]:
                console.print(f"  did not run: {problem}", soft_wrap=True)


def draw_figure(lines: Sequence[_Line], path: Path) -> None:
    """Draw the normalised times, and the two schedules with their skew, as the paper's figures 8 and 14 do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pes = max(_unique(_of(lines, "run"), "pes"))
    times = _of(lines, "time", pes=pes)
    groups = list(dict.fromkeys((line["config"], line["distribution"]) for line in times))
    labels = {line["method"]: line["label"] for line in times if line["method"] in ("fused", *UNFUSED)}
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(max(8.0, 1.3 * len(groups)), 9.0), layout="constrained")
    for number, (method, label) in enumerate(labels.items()):
        heights, limits = [], []
        for config, distribution in groups:
            rows = {
                line["method"]: line
                for line in times
                if (line["config"], line["distribution"]) == (config, distribution)
            }
            base = next((rows[name]["us"] for name in ("unfused_own", "unfused_torch", "fused") if name in rows), None)
            heights.append(rows[method]["us"] / base if base and method in rows else 0.0)
            limits.append(next(iter(rows.values()))["limit_us"] / base if base else 0.0)
        width = 0.8 / len(labels)
        places = [group + (number - (len(labels) - 1) / 2) * width for group in range(len(groups))]
        bars = top.bar(places, heights, width, label=label)
        top.bar_label(bars, fmt="%.2f", fontsize=7)
        if number == 0:
            top.hlines(
                limits, [g - 0.4 for g in range(len(groups))], [g + 0.4 for g in range(len(groups))], "black", "dotted"
            )
    top.set_xticks(range(len(groups)), [f"{c}\n{d}" for c, d in groups], fontsize=7)
    top.set_ylabel("time / unfused, own kernel")
    top.set_title(f"Fused and unfused on {pes} PEs (dotted: limit of the hardware)")
    top.legend(fontsize=8)

    skews = _of(lines, "skew")
    keys = list(dict.fromkeys((line["config"], line["distribution"], line["pes"]) for line in skews))
    for number, (method, label) in enumerate((("fused", "communication-aware"), ("oblivious", "oblivious"))):
        heights, low, high = [], [], []
        for config, distribution, num_pes in keys:
            found = {
                line["method"]: line
                for line in _of(skews, "skew", config=config, distribution=distribution, pes=num_pes)
            }
            base = found.get("oblivious", next(iter(found.values())))["us"]
            middle = found[method]["us"] / base if method in found else 0.0
            by_pe = [us / base for us in found[method]["us_by_pe"]] if method in found else [0.0]
            heights.append(middle)
            low.append(max(0.0, middle - min(by_pe)))
            high.append(max(0.0, max(by_pe) - middle))
        places = [group + (number - 0.5) * 0.4 for group in range(len(keys))]
        bottom.bar(places, heights, 0.4, yerr=[low, high], capsize=3, label=label)
    bottom.set_xticks(
        range(len(keys)), [f"{c}\n{d}, {n} PEs" for c, d, n in keys], fontsize=7, rotation=0 if len(keys) < 13 else 90
    )
    bottom.set_ylabel("time / oblivious")
    bottom.set_title("Order of the tasks; whiskers: fastest and slowest PE of a launch that all begin together")
    bottom.legend(fontsize=8)
    if any(line["backend"] == "host" for line in _of(lines, "run")):
        figure.suptitle("host backend, small shapes: says nothing about GPUs", color="red")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
