"""The common parts of all benchmarks' figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persistent_ops.testing.figures import pyplot
from persistent_ops.testing.record import pes_text, select

__all__ = ["draw_bars", "draw_shares", "draw_sweep", "figure", "legend"]


@contextmanager
def figure(
    lines: Sequence[dict[str, Any]], path: Path, *, size: tuple[float, float], rows: int = 1, columns: int = 1
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Make a figure of a record, and write it; yields it and its axes, row by row."""
    plot = pyplot()
    drawn, grid = plot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    yield drawn, list(grid.flat)
    if any(line["backend"] == "host" for line in select(lines, "run")):
        drawn.suptitle("host backend, small tensors: says nothing about GPUs", color="red")
    drawn.savefig(path, dpi=130)
    plot.close(drawn)


def draw_sweep(lines: Sequence[dict[str, Any]], path: Path, *, field: str) -> None:
    """Draw times over a field of the Tuning, a line for each case and method; the default's time is the dashed one."""
    tried = [line for line in select(lines, "tune") if line["us"] is not None]
    series: dict[str, list[dict[str, Any]]] = {}
    for line in tried:
        names = [value for key, value in line.items() if isinstance(value, str) and key != "kind"]
        series.setdefault(", ".join([*names, pes_text(line["pes"])]), []).append(line)
    with figure(lines, path, size=(7, 5)) as (_, (axes,)):
        for name, points in series.items():
            default = points[0]  # which comes first
            swept = sorted((line for line in points[1:]), key=lambda line: line["tuning"][field])
            (drawn,) = axes.plot(
                [line["tuning"][field] for line in swept], [line["us"] for line in swept], "o-", label=name
            )
            axes.axhline(default["us"], linestyle="--", linewidth=0.8, color=drawn.get_color())
        axes.set(xlabel=field, ylabel="us", xscale="log", ylim=(0, None))
        values = sorted({line["tuning"][field] for points in series.values() for line in points[1:]})
        axes.set_xticks(values, [str(value) for value in values], fontsize=7)
        axes.minorticks_off()
        if series:
            axes.legend(fontsize=7)


def draw_shares(
    lines: Sequence[dict[str, Any]], path: Path, groups: Mapping[tuple[str, ...], Mapping[str, Any]], title: str
) -> None:
    """Draw limit / time of the methods that have a limit; `groups`: "time" lines by case, then by method."""
    series: dict[str, dict[int, float]] = {}
    for place, rows in enumerate(groups.values()):
        for row in rows.values():
            if "limit_us" in row:
                series.setdefault(row["label"], {})[place] = row["limit_us"] / row["us"]
    with figure(lines, path, size=(max(9.0, 2.2 * len(groups)), 5.0)) as (_, (axes,)):
        draw_bars(axes, ["\n".join(case) for case in groups], series)
        axes.set_ylabel("bound / time")
        axes.set_title(title)
        legend(axes)


def draw_bars(
    axes: Any,
    places: Sequence[str],
    series: Mapping[str, Mapping[int, float]],
    *,
    width: float = 0.84,
    errors: Mapping[str, Sequence[Sequence[float]]] | None = None,
    **ticks: Any,
) -> None:
    """Draw groups of bars.

    Args:
        axes: to draw in.
        places: names of the groups.
        series: by label, the heights by the number of the group.
        width: of a group, whose distance to the next one is 1.
        errors: by label, whiskers below and above each bar, in place of the heights in figures.
        ticks: of `set_xticks`.
    """
    share = width / max(len(series), 1)
    for number, (label, heights) in enumerate(series.items()):
        if not heights:
            continue
        left = [place + (number - (len(series) - 1) / 2) * share for place in heights]
        if errors is not None:
            axes.bar(left, list(heights.values()), share, yerr=errors[label], capsize=3, label=label)
        else:
            bars = axes.bar(left, list(heights.values()), share, label=label)
            axes.bar_label(bars, fmt="%.2f", fontsize=7 if len(series) < 7 else 6)
    axes.set_xticks(range(len(places)), places, **{"fontsize": 7, **ticks})


def legend(axes: Any) -> None:
    """Put a legend below the axes, where something is drawn in them."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8)
