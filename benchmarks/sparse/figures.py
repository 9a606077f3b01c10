"""The figures, from the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.figures import draw_bars, figure
from harness.report import fastest

from persistent_ops.testing.record import pes_text, select, unique, us_text

from .cases import CASES
from .methods import BASELINES, METHODS
from .report import crossover, measured_with_both, swept_lines

__all__ = ["draw_figures"]

_Line = dict[str, Any]
_MARKERS = "osv^D<>*"


def draw_figures(lines: Sequence[_Line], path: Path) -> None:
    """Draw the cases, and each sweep, of the largest world that has them, beside `path` with names that begin alike."""
    for group, draw in (("cases", _draw_cases), ("sparsity", _draw_sparsity), ("overlap", _draw_overlap)):
        times = select(lines, "time", group=group)
        if times:
            name = path.stem if group == "cases" else f"{path.stem}_{group}"
            with figure(lines, path.with_name(f"{name}.png"), size=(11.0, 6.0)) as (drawn, (axes,)):
                draw(axes, lines, max(unique(times, "pes")))
                drawn.legend(loc="outside lower center", ncols=5, fontsize=8)


def _draw_cases(axes: Any, lines: Sequence[_Line], pes: int) -> None:
    times = select(lines, "time", group="cases", pes=pes)
    names = [name for name in CASES if select(times, "time", case=name)]
    rows = [select(times, "time", case=name) for name in names]
    # The others are divided by this one: the best baseline; without a baseline, the operator.
    bases = [float((fastest(own, BASELINES) or fastest(own, METHODS) or own[0])["us"]) for own in rows]
    series: dict[str, dict[int, float]] = {}
    for method in ("auto", "into", *BASELINES):
        for place, (own, base) in enumerate(zip(rows, bases, strict=True)):
            for row in select(own, "time", method=method):
                series.setdefault(row["label"], {})[place] = row["us"] / base
    heads = [f"{name}\n1 = {us_text(base)} us" for name, base in zip(names, bases, strict=True)]
    draw_bars(axes, heads, series, width=0.86)
    for place, (name, base) in enumerate(zip(names, bases, strict=True)):
        (case,) = select(lines, "case", group="cases", pes=pes, case=name)
        for limit, style in (("limit_us", "dotted"), ("unicast_us", "dashed")):
            if case[limit] is not None:
                axes.hlines(case[limit] / base, place - 0.45, place + 0.45, "black", style)
    axes.set_yscale("log")
    axes.set_ylabel("time / best baseline")
    axes.set_title(
        f"Sparse all-reduce, fp32, {pes_text(pes)} (dotted: limit of the hardware; dashed: without multicast)"
    )


def _draw_sparsity(axes: Any, lines: Sequence[_Line], pes: int) -> None:
    points = swept_lines(lines, "sparsity", pes)
    _draw_lines(axes, points)
    axes.set_xscale("log")
    places = [case["shape"]["point"] for case, _ in points]
    axes.set_xticks(places, [f"{round(100 - 100 * place, 2):g} %" for place in places], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("sparsity of each PE's gradient")
    found = crossover(*measured_with_both(points, "auto", "dense_reduce"))
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
            linestyle="--" if method in BASELINES else "-",
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
    axes.set_title(f"{title}: {shape['rows']} rows of {shape['dim']} fp32, {pes_text(pes)}")
    axes.grid(visible=True, alpha=0.3)
