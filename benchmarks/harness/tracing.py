"""Timelines of one case's launches, of each method asked for; their sums, their cost, and the kernels of one call."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import persistent_ops as po
from persistent_ops.runtime.tracing import Tracer
from persistent_ops.runtime.world import World
from persistent_ops.testing.figures import pyplot, why_none
from persistent_ops.testing.pes import gather
from persistent_ops.testing.record import select, us_text
from persistent_ops.timeline import Timeline

from .kernels import Kernel, draw_kernels
from .timing import Subject, time_interleaved

__all__ = ["timeline_of", "timeline_tables", "tracing_cost", "write_kernels", "write_timeline"]

_LONGEST = 3  # waits that are shown
_MOST_CALLS = 2  # in a timeline, and as many replays of them: a launch on a GPU has ten thousand events and more
_FIGURE_S = 60.0  # that PE 0 may take to draw
_ROOM = {"cuda": 1 << 30, "host": 64 << 20}  # for a round's timelines, bytes: what is dropped would cost less


def timeline_of(
    world: World,
    calls: Sequence[Callable[[], object]],
    record: Callable[[list[Callable[[], object]]], Subject],
    *,
    path: Path,
) -> Timeline:
    """Trace the first of some calls, and replays of them; collective."""
    first = list(calls[:_MOST_CALLS])
    with po.trace(path) as timeline:
        for call in first:
            call()
        subject = record(first)
        for _ in range(_MOST_CALLS):
            subject.replay()
        world.check()
    return timeline


def write_timeline(
    world: World, timeline: Timeline, path: Path, write: Callable[..., None], fields: Mapping[str, Any]
) -> None:
    """Write a timeline's sums into the record, and draw its last launch beside the file, on PE 0; collective."""
    try:
        if world.rank == 0:
            _write_and_draw(timeline, path, write, fields)
    finally:
        gather(None, timeout=_FIGURE_S)


def _write_and_draw(timeline: Timeline, path: Path, write: Callable[..., None], fields: Mapping[str, Any]) -> None:
    errors = {pe.pe: pe.clock_error / 1e3 for pe in timeline.pes}
    for summary in timeline.summary():
        write("timeline", **fields, clock_error_us=errors[summary.pe], **summary._asdict())
    for pe in timeline.pes:
        if pe.dropped or pe.lost_spans:
            write("timeline_lost", **fields, pe=pe.pe, work_groups=pe.dropped, spans=pe.lost_spans)
    if not any(pe.launches for pe in timeline.pes):
        print(f"no figure: {fields['method']} launches none of the operators' kernels", file=sys.stderr)
        return
    _try_to_draw(lambda: timeline.draw(path.with_suffix(".png")))


def write_kernels(
    world: World, kernels: Sequence[Kernel], path: Path, write: Callable[..., None], fields: Mapping[str, Any]
) -> None:
    """Write the kernels of a method's call on all PEs into the record, and draw them, on PE 0; collective."""
    everyone = gather(list(kernels))
    try:
        if world.rank == 0 and any(everyone):
            write("kernels", **fields, kernels_by_pe=everyone)
            _try_to_draw(lambda: draw_kernels(everyone, path, f"{fields['method']}: the kernels of one call"))
    finally:
        gather(None, timeout=_FIGURE_S)


def _try_to_draw(draw: Callable[[], object]) -> None:
    try:
        pyplot()
        draw()
    except Exception as error:  # what has been measured is there
        print(f"no figure: {why_none(error)}", file=sys.stderr)


def tracing_cost(
    world: World,
    calls: Sequence[Callable[[], object]],
    record: Callable[[list[Callable[[], object]]], Subject],
    *,
    rounds: int,
    burst_seconds: float,
) -> dict[str, Any]:
    """Time calls with kernels that trace and with those that do not; collective.

    On GPUs graphs of both take turns. On the host backend, where traced kernels are planned again in each context, one
    comes after the other.

    Returns:
        Fields of a "tracing_cost" line: microseconds a call, traced and not, and the share of work-groups that found no
        room; none where the calls launch no kernels that trace.
    """
    tracer, plain = Tracer(world.backend, _ROOM[world.backend.name]), record(list(calls))
    times: dict[str, list[float]] = defaultdict(list)
    found = lost = 0

    def time(subjects: Mapping[str, Subject]) -> None:
        nonlocal found, lost
        for number in range(rounds):
            turns = list(subjects.items())[:: -1 if number % 2 else 1]
            for name, seconds in time_interleaved(world, dict(turns), rounds=1, burst_seconds=burst_seconds).items():
                times[name] += seconds
            used, dropped = tracer.clear()
            found, lost = found + used, lost + dropped

    world.set_tracer(tracer)
    try:
        traced = record(list(calls))
        tracer.clear()
        if world.backend.name != "cuda":
            time({"traced": traced})
    finally:
        world.set_tracer(None)
    time({"plain": plain} if "traced" in times else {"plain": plain, "traced": traced})
    tracer.close()
    us = {name: max(statistics.median(each) for each in gather(own)) * 1e6 for name, own in times.items()}
    return {"us": us["plain"], "us_traced": us["traced"], "dropped": lost / found} if found else {}


def timeline_tables(lines: Sequence[dict[str, Any]]) -> Iterable[Table | str]:
    """Return the tables of a record of timelines."""
    found = select(lines, "timeline")
    table = Table(title="means over launches; shares of the warps' time")
    for column in (
        "method",
        "operator",
        "PE",
        "launches",
        "us",
        "own",
        "for others",
        "waiting",
        "hidden",
        "skew us",
        "last",
    ):
        table.add_column(column)
    for line in found:
        shares = [_share(line[name]) for name in ("own", "others", "waiting", "hidden")]
        skew = "" if line["skew_us"] is None else us_text(line["skew_us"])
        head = [line["method"], line["operator"], str(line["pe"]), str(line["launches"]), us_text(line["us"])]
        table.add_row(*head, *shares, skew, f"WG {line['slowest_wg']}")
    yield table
    waits = Table(title="longest waits, us of all work-groups in a launch")
    for column in ("method", "operator", "PE", "for PE", "what for", "us"):
        waits.add_column(column)
    for line in found:
        for peer, what, us in line["waits"][:_LONGEST]:
            waits.add_row(line["method"], line["operator"], str(line["pe"]), str(peer), what, us_text(us))
    yield waits
    error = max((line["clock_error_us"] for line in found), default=0.0)
    yield f"The PEs' clocks are aligned to {us_text(error)} us."
    for line in select(lines, "tracing_cost"):
        share = 100 * (line["us_traced"] / line["us"] - 1)
        dropped = f"; {_share(line['dropped'])} of the work-groups found no room" if line["dropped"] else ""
        yield (
            f"{line['method']}: {us_text(line['us'])} us a call, and {us_text(line['us_traced'])} us where its kernels "
            f"trace ({share:+.1f} %{dropped})"
        )
    for line in select(lines, "timeline_lost"):
        yield (
            f"{line['method']}, PE {line['pe']}: {line['work_groups']} WGs and {line['spans']} waits and signals found "
            "no room"
        )


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
