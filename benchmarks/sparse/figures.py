"""The figures, from the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.record import select, unique, us_text

from .cases import CASES
from .methods import PEERS
from .report import crossover, swept_lines

__all__ = ["draw_figures"]

_Line = dict[str, Any]
_DRAWN = ("auto", "into", *PEERS)
_MARKERS = "osv^D<>*"


def draw_figures(lines: Sequence[_Line], path: Path) -> None:
    """Draw the cases, and each sweep, of the largest world that has them, beside `path` with names that begin alike."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    is_host = any(line["backend"] == "host" for line in select(lines, "run"))
    for group, draw in (("cases", _draw_cases), ("sparsity", _draw_sparsity), ("overlap", _draw_overlap)):
        times = select(lines, "time", group=group)
        if not times:
            continue
        pes = max(unique(times, "pes"))
        figure, axes = pyplot.subplots(figsize=(11.0, 6.0), layout="constrained")
        draw(axes, lines, pes)
        figure.legend(loc="outside lower center", ncols=5, fontsize=8)
        if is_host:
            figure.suptitle("host backend, small cases: says nothing about GPUs", color="red")
        name = path.stem if group == "cases" else f"{path.stem}_{group}"
        figure.savefig(path.with_name(f"{name}.png"), dpi=130)
        pyplot.close(figure)


def _draw_cases(axes: Any, lines: Sequence[_Line], pes: int) -> None:
    times = select(lines, "time", group="cases", pes=pes)
    names = [name for name in CASES if select(times, "time", case=name)]
    rows = {name: {line["method"]: line for line in select(times, "time", case=name)} for name in names}
    cases = {line["case"]: line for line in select(lines, "case", group="cases", pes=pes)}
    bases = {name: _base(rows[name]) for name in names}
    drawn = [method for method in _DRAWN if any(method in rows[name] for name in names)]
    for number, method in enumerate(drawn):
        places, heights, label = [], [], method
        for place, name in enumerate(names):
            if method in rows[name]:
                places.append(place + (number - (len(drawn) - 1) / 2) * 0.86 / len(drawn))
                heights.append(rows[name][method]["us"] / bases[name])
                label = rows[name][method]["label"]
        axes.bar_label(axes.bar(places, heights, 0.86 / len(drawn), label=label), fmt="%.2f", fontsize=6)
    for place, name in enumerate(names):
        for limit, style in (("limit_us", "dotted"), ("unicast_us", "dashed")):
            if cases[name][limit] is not None:
                axes.hlines(cases[name][limit] / bases[name], place - 0.45, place + 0.45, "black", style)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [f"{name}\n1 = {us_text(bases[name])} us" for name in names], fontsize=7)
    axes.set_ylabel("time / best peer")
    axes.set_title(f"Sparse all-reduce, fp32, {pes} PEs (dotted: limit of the hardware; dashed: without multicast)")


def _base(rows: dict[str, _Line]) -> float:
    """Return the time of the best peer; where there is none, the operator's."""
    found = [row["us"] for name, row in rows.items() if name in PEERS] or [row["us"] for row in rows.values()]
    return float(min(found))


def _draw_sparsity(axes: Any, lines: Sequence[_Line], pes: int) -> None:
    points = swept_lines(lines, "sparsity", pes)
    _draw_lines(axes, points)
    axes.set_xscale("log")
    places = [case["shape"]["point"] for case, _ in points]
    axes.set_xticks(places, [f"{round(100 - 100 * place, 2):g} %" for place in places], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("sparsity of each PE's gradient")
    both = [(case["shape"]["point"], times) for case, times in points if {"auto", "dense_reduce"} <= times.keys()]
    found = crossover(
        [place for place, _ in both],
        [times["auto"]["us"] for _, times in both],
        [times["dense_reduce"]["us"] for _, times in both],
    )
    if found is not None:
        axes.axvline(found, color="grey", linewidth=1)
        axes.annotate(
            f"the dense all-reduce is faster below {1 - found:.2%}",
            (found, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=8,
            ha="right",
        )
    _finish_sweep(axes, points, pes, "Sparse all-reduce over sparsity")


def _draw_overlap(axes: Any, lines: Sequence[_Line], pes: int) -> None:
    points = swept_lines(lines, "overlap", pes)
    _draw_lines(axes, points)
    axes.set_xlabel("share of a PE's rows that all PEs have (0: disjoint, 1: identical)")
    _finish_sweep(axes, points, pes, "Sparse all-reduce over overlap")


def _draw_lines(axes: Any, points: Sequence[tuple[_Line, dict[str, _Line]]]) -> None:
    methods = dict.fromkeys(method for _, times in points for method in times)
    for number, method in enumerate(methods):
        found = [(case["shape"]["point"], times[method]) for case, times in points if method in times]
        axes.plot(
            [place for place, _ in found],
            [line["us"] for _, line in found],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1.2,
            linestyle="--" if method in PEERS else "-",
            label=found[0][1]["label"],
        )
    for limit, style, label in (("limit_us", "dotted", "limit"), ("unicast_us", "dashdot", "limit without multicast")):
        found = [(case["shape"]["point"], case[limit]) for case, _ in points if case[limit] is not None]
        if found:
            axes.plot([x for x, _ in found], [y for _, y in found], "black", linestyle=style, linewidth=1, label=label)


def _finish_sweep(axes: Any, points: Sequence[tuple[_Line, dict[str, _Line]]], pes: int, title: str) -> None:
    shape = points[0][0]["shape"]
    axes.set_yscale("log")
    axes.set_ylabel("us")
    axes.set_title(f"{title}: {shape['rows']} rows of {shape['dim']} fp32, {pes} PEs")
    axes.grid(visible=True, alpha=0.3)
