"""Timelines of launches, for every CTA on every PE: `persistent_ops.trace`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .runtime import world as _world
from .runtime.arguments import as_whole_number
from .runtime.clock_alignment import Clock, align_clocks
from .runtime.operator import Operator
from .runtime.team import WORLD
from .runtime.tracing import Launch, Span, Tasks, Tracer

__all__ = ["LaunchSummary", "PeTimeline", "Timeline", "trace"]

_BEGINNING = Operator("beginning of a timeline (po.trace)", (), has_kernel=False)
_GATHER_S = 60.0
_WRITE_S = 600.0  # that PE 0 may take for the file, with millions of events
_PIECE = 4 << 20


class PeTimeline(NamedTuple):
    """Timeline of one PE; all times in nanoseconds of PE 0's clock.

    Attributes:
        pe: its rank.
        launches: one entry for each CTA of each launch, in order of start.
        dropped: number of CTAs whose timeline found no room.
        clock_error: largest error of times relative to PE 0's times.
    """

    pe: int
    launches: list[Launch]
    dropped: int
    clock_error: float

    @property
    def lost_spans(self) -> int:
        """Number of waits and signals that found no room."""
        return sum(launch.lost for launch in self.launches)


@dataclass
class Timeline:
    """Result of `trace`. It is filled at the end of the context: on PE 0 for all PEs, on other PEs for the PE itself.

    Attributes:
        pes: timelines of the PEs, in rank order.
    """

    pes: list[PeTimeline] = field(default_factory=list)

    def events(self) -> dict[str, Any]:
        """Return the timeline in Chrome's trace event format, which Perfetto reads: a process for each PE, times in
        us.
        """
        begin = min((launch.begin for pe in self.pes for launch in pe.launches), default=0.0)
        events: list[dict[str, Any]] = []
        for pe in self.pes:
            events.append({"ph": "M", "name": "process_name", "pid": pe.pe, "args": {"name": f"PE {pe.pe}"}})
            events += _events_of(pe, begin)
        about = {
            "clock_error_us": {f"PE {pe.pe}": pe.clock_error / 1e3 for pe in self.pes},
            "dropped_work_groups": {f"PE {pe.pe}": pe.dropped for pe in self.pes},
            "lost_spans": {f"PE {pe.pe}": pe.lost_spans for pe in self.pes},
        }
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}

    def operators(self) -> list[str]:
        """Return the names of the launched operators, PE by PE in the order of their first launches."""
        return list(dict.fromkeys(launch.operator for pe in self.pes for launch in pe.launches))

    def summary(self) -> list[LaunchSummary]:
        """Return a summary of each operator's launches on each PE, averaged over launches whose CTAs all found room."""
        begins: dict[_Key, list[float]] = defaultdict(list)
        # If not all WGs of a launch found room, its times are not known.
        rounds = {
            (pe.pe, key): wgs
            for pe in self.pes
            for key, wgs in _by_launch(pe.launches).items()
            if len(wgs) == wgs[0].num_wgs
        }
        for (_, key), wgs in rounds.items():
            begins[key].append(min(wg.begin for wg in wgs))
        found = []
        for pe in self.pes:
            for operator in self.operators():
                own = {key: wgs for (rank, key), wgs in rounds.items() if rank == pe.pe and key[0] == operator}
                if own:
                    skews = [
                        max(begins[key]) - min(begins[key]) for key in own if key[1] == WORLD and len(begins[key]) > 1
                    ]
                    found.append(_summary(pe.pe, operator, list(own.values()), skews))
        return found

    def draw(self, path: str | os.PathLike[str], operator: str | None = None, launch: int = -1) -> None:
        """Draw one launch: a panel for each PE, a line for each CTA, as in figure 11 of the SC24 paper.

        Of a launch with many CTAs, up to 24 are drawn, evenly spaced.

        Args:
            path: of the figure.
            operator: name of the operator; None for the operator that was launched last.
            launch: index among its launches, in order of start; negative numbers count from the last, as in a list.

        Raises:
            ValueError: there was no such launch.
            ImportError: matplotlib is missing (the extra "plot").
        """
        _draw(self, path, operator, launch)


class LaunchSummary(NamedTuple):
    """An operator's launches on one PE. Times are means over launches, in microseconds; shares are of its warps' time.

    Attributes:
        us: from the start of the first CTA to the end of the last.
        own, others: share of time spent on the PE's own part of the result, and on parts for other PEs.
        waiting: share of time spent waiting.
        waits: microseconds per launch that CTAs spent on waits of each kind, summed: (PE, purpose) and time, longest
            first; only waits that found room.
        hidden: share of warps' time, from the launch's first work for other PEs to its end, that is not spent waiting
            for peers: the part of the exchange that overlaps with work. None if there was no work for others, or if
            waits found no room.
        slowest_wg: CTA that ended last most often.
        skew_us: from the start of the first PE to the start of the last; None if other PEs' launches are not known
            here.
    """

    pe: int
    operator: str
    launches: int
    work_groups: int
    us: float
    own: float
    others: float
    waiting: float
    waits: list[tuple[int, str, float]]
    hidden: float | None
    slowest_wg: int
    skew_us: float | None

    def __str__(self) -> str:
        shares = f"{self.own:.0%} own tasks, {self.others:.0%} for others, {self.waiting:.0%} waiting"
        hidden = "" if self.hidden is None else f", {self.hidden:.0%} of the exchange hidden"
        skew = "" if self.skew_us is None else f"; PEs begin within {self.skew_us:.1f} us"
        waits = [f"\n  {us:.1f} us for PE {peer}: {what}" for peer, what, us in self.waits]
        return (
            f"PE {self.pe}, {self.operator}: {self.us:.1f} us, the mean of {self.launches}; {shares}{hidden}; "
            f"WG {self.slowest_wg} of {self.work_groups} mostly ends last{skew}{''.join(waits)}"
        )


_Key = tuple[str, int, int, int, int]  # operator, team, epoch, grid, and which with those


def _by_launch(launches: Sequence[Launch]) -> dict[_Key, list[Launch]]:
    """Return the WGs of each launch.

    After a recovery a PE's epochs of its own start again: a WG that comes again is of another launch, and so is one of
    another grid.
    """
    found: dict[_Key, list[Launch]] = defaultdict(list)
    seen: Counter[tuple[str, int, int, int, int]] = Counter()
    for launch in launches:
        epoch = (launch.operator, launch.team, launch.epoch, launch.num_wgs)
        wg = (*epoch, launch.wg)
        key = (*epoch, seen[wg])
        found[key].append(launch)
        seen[wg] += 1
    return found


def _summary(pe: int, operator: str, launches: list[list[Launch]], skews: list[float]) -> LaunchSummary:
    wgs = [wg for launch in launches for wg in launch]
    warp_time = sum((wg.end - wg.begin) * wg.num_warps for wg in wgs) or 1.0
    waits: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for wg in wgs:
        for span in wg.spans:
            if span.kind == "wait":
                waits[span.peer, _NUMBER.sub("", span.what)].append(span)
    window = exposed = 0.0  # of warps, from the launch's first work for others on
    for launch in launches:
        first = min((wg.others.begin for wg in launch if wg.others), default=math.inf)
        for wg in launch:
            window += max(wg.end - first, 0.0) * wg.num_warps
            waits_for_peers = [span for span in wg.spans if span.kind == "wait" and span.peer != pe]
            exposed += sum(max(span.end - max(span.begin, first), 0.0) for span in waits_for_peers)
    last = Counter(max(launch, key=lambda wg: wg.end).wg for launch in launches)
    us = [max(wg.end for wg in launch) - min(wg.begin for wg in launch) for launch in launches]
    return LaunchSummary(
        pe=pe,
        operator=operator,
        launches=len(launches),
        work_groups=max(wg.num_wgs for wg in wgs),
        us=sum(us) / len(us) / 1e3,
        own=sum(wg.own.total for wg in wgs if wg.own) / warp_time,
        others=sum(wg.others.total for wg in wgs if wg.others) / warp_time,
        waiting=min(sum(wg.waited for wg in wgs) / warp_time, 1.0),
        waits=sorted(
            (
                (peer, _what_for(spans), sum(span.end - span.begin for span in spans) / len(launches) / 1e3)
                for (peer, _), spans in waits.items()
            ),
            key=lambda wait: -wait[2],
        ),
        hidden=max(1.0 - exposed / window, 0.0) if window and not any(wg.lost for wg in wgs) else None,
        slowest_wg=last.most_common(1)[0][0],
        skew_us=sum(skews) / len(skews) / 1e3 if skews else None,
    )


_NUMBER = re.compile(r"\d+")


def _what_for(waits: Sequence[Span]) -> str:
    """Return what waits of one kind were for, with the range of the pieces' numbers."""
    numbers = zip(*(map(int, _NUMBER.findall(wait.what)) for wait in waits), strict=True)
    ranges = iter([str(min(n)) if min(n) == max(n) else f"{min(n)} to {max(n)}" for n in numbers])
    return _NUMBER.sub(lambda _: next(ranges), waits[0].what)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None, *, capacity: int = 64 << 20) -> Iterator[Timeline]:
    """Record what every CTA does in the launches of this context. Collective.

    Inside the context, operators use variants of their kernels that record a timeline: start and end of each CTA, when
    it worked for its own PE and for others, each wait with its peer and purpose, and each flag that it sent. These
    variants are compiled at first use, as at any first call. So a CUDA graph is traced if it was captured inside the
    context, after a first call there. Its replays after the context are not recorded. Other launches are unchanged.

    Args:
        path: JSON file for Perfetto (https://ui.perfetto.dev) and chrome://tracing, which PE 0 writes; None for no
            file.
        capacity: bytes of device memory for timelines, about 2 KiB for each CTA of each launch. Timelines that find no
            room are dropped and counted.

    Yields:
        A `Timeline`, which is filled at the end.

    Raises:
        RuntimeError: another trace is active, or the current stream is being captured.
        TypeError, ValueError: capacity is not a whole number, or is below 1.
        PeerTimeoutError: not all PEs start to trace.
        BootstrapError: at the end, on other PEs: PE 0 has ended, or needs more than ten minutes for the file.

    At the end every PE waits for its own launches, for the other PEs' launches, and for PE 0 to write the file. Round
    trips at both ends align the PEs' clocks; the file states their largest error.
    """
    world = _world.for_call()
    capacity = as_whole_number(capacity, f"capacity: expected a whole number of bytes, got {capacity!r}")
    if capacity < 1:
        raise ValueError(f"capacity: expected bytes above 0, got {capacity}")
    if world.tracer is not None:
        raise RuntimeError("trace: there is a trace already; contexts cannot be nested")
    if world.workspace.is_capturing():
        raise RuntimeError("trace: begin it outside of a CUDA-graph capture, and capture inside")
    timeline, (tracer, file) = Timeline(), _begun(world, capacity, path)
    before = align_clocks(world)
    world.set_tracer(tracer)
    is_whole = False
    try:
        yield timeline
        is_whole = _world.is_initialized() and _world.current() is world
    finally:
        world.set_tracer(None)
        after = align_clocks(world) if is_whole else None
        launches, dropped = tracer.read()
        tracer.close()
        own = PeTimeline(world.rank, launches, dropped, 0.0)
        timeline.pes = [own]
        if after is not None:  # else peers may be anywhere
            timeline.pes = _of_all(world, _aligned(own, before, after))
    try:
        if file is not None:
            file.write_text(json.dumps(timeline.events()))
    finally:
        if is_whole:  # a PE that went on would wait for PE 0 in its next launch
            world.bootstrap.exchange("trace", b"", timeout=_WRITE_S)


def _begun(world: _world.World, capacity: int, path: str | os.PathLike[str] | None) -> tuple[Tracer, Path | None]:
    """Set room aside and see whether the file can be written; where a PE cannot, none begins. Collective.

    Returns the file as well, on PE 0, wherever the working folder will be at the end.
    """
    world.meet(_BEGINNING.contract(world.team))
    problem = tracer = file = None
    try:
        tracer = Tracer(world.backend, capacity)
        if path is not None and world.rank == 0:
            file = Path(path).absolute()
            file.write_text("")
    except Exception as error:
        problem = error
    told = [
        raw.decode() for raw in world.bootstrap.exchange("trace", b"" if problem is None else str(problem).encode())
    ]
    if problem is not None:
        try:
            raise problem
        finally:
            del problem  # its traceback has this frame
    if tracer is None or any(told):
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        raise RuntimeError(f"trace: PE {rank} cannot begin: {text}")
    return tracer, file


def _of_all(world: _world.World, own: PeTimeline) -> list[PeTimeline]:
    """Return what all PEs have seen on PE 0, elsewhere what this one has; collective."""
    payload = b"" if world.rank == 0 else zlib.compress(json.dumps(own).encode(), 1)
    sizes = [int(raw) for raw in world.bootstrap.exchange("trace", str(len(payload)).encode(), timeout=_GATHER_S)]
    parts = [bytearray() for _ in sizes]
    for begin in range(0, max(sizes), _PIECE):  # torch's store takes 8 MiB at a time
        pieces = world.bootstrap.exchange("trace", payload[begin : begin + _PIECE], timeout=_GATHER_S)
        for part, piece in zip(parts, pieces, strict=True):
            part += piece
    if world.rank != 0:
        return [own]
    return [own, *(_pe_timeline(json.loads(zlib.decompress(part))) for part in parts[1:])]


def _aligned(own: PeTimeline, before: Clock, after: Clock) -> PeTimeline:
    """Return a timeline by PE 0's clock; this PE's may have gone faster than that one, or slower, in between."""
    drift = (after.offset - before.offset) / (after.at - before.at) if after.at > before.at else 0.0

    def moved(time: float) -> float:
        return time - before.offset - (time - before.at) * drift

    def tasks(of: Tasks | None) -> Tasks | None:
        return None if of is None else of._replace(begin=moved(of.begin), end=moved(of.end))

    def span(of: Span) -> Span:
        return of._replace(begin=moved(of.begin), end=moved(of.end))

    launches = [
        launch._replace(
            begin=moved(launch.begin),
            end=moved(launch.end),
            own=tasks(launch.own),
            others=tasks(launch.others),
            spans=[span(each) for each in launch.spans],
        )
        for launch in own.launches
    ]
    return own._replace(launches=launches, clock_error=max(before.error, after.error))


def _pe_timeline(data: list[Any]) -> PeTimeline:
    """Return what a PE has sent."""
    pe, launches, dropped, error = data

    def launch(values: list[Any]) -> Launch:
        found = Launch(*values)
        own, others = (None if tasks is None else Tasks(*tasks) for tasks in (found.own, found.others))
        return found._replace(own=own, others=others, spans=[Span(*span) for span in found.spans])

    return PeTimeline(pe, [launch(values) for values in launches], dropped, error)


# ---- events ----------------------------------------------------------------------------------------------------------

_ROWS = 100  # of a WG: itself, its tasks, its warps
_OWN, _OTHERS, _FIRST_WARP = 1, 2, 3


def _events_of(pe: PeTimeline, begin: float) -> Iterator[dict[str, Any]]:
    names: dict[int, str] = {}

    def span(row: int, name: str, category: str, first: float, last: float, **arguments: Any) -> dict[str, Any]:
        start, length = (first - begin) / 1e3, (last - first) / 1e3
        shape = {"ph": "X", "dur": length} if category != "send" else {"ph": "i", "s": "t"}
        event = {"name": name, "cat": category, "pid": pe.pe, "tid": row, "ts": start, **shape}
        return event | ({"args": arguments} if arguments else {})

    ends: dict[int, float] = {}
    for launch in pe.launches:
        # A WG of the next launch may begin before this one's ends: then it has a row of its own.
        row, wg = launch.wg * 2 * _ROWS, f"WG {launch.wg}"
        if ends.get(row, -math.inf) > launch.begin:
            row, wg = row + _ROWS, f"{wg} of the next launch"
        ends[row] = launch.end
        names[row] = wg
        yield span(row, launch.operator, "launch", launch.begin, launch.end, epoch=launch.epoch, lost_spans=launch.lost)
        for place, what, tasks in ((_OWN, "own tasks", launch.own), (_OTHERS, "tasks for others", launch.others)):
            if tasks is not None:
                names[row + place] = f"{wg}, {what}"
                yield span(row + place, f"{tasks.number} {what}", "tasks", tasks.begin, tasks.end)
        for each in launch.spans:
            place = row + _FIRST_WARP + each.warp
            names[place] = f"{wg}, warp {each.warp}"
            what = f"wait for PE {each.peer}: {each.what}" if each.kind == "wait" else f"signal to PE {each.peer}"
            yield span(place, what, each.kind, each.begin, each.end, peer=each.peer)
    for row, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": pe.pe, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pe.pe, "tid": row, "args": {"sort_index": row}}


# ---- the figure ------------------------------------------------------------------------------------------------------

_MOST_ROWS = 24  # of a panel: bars of more CTAs would hide each other
_PANELS_IN_A_ROW = 2  # so that labels can be read on a page
_COLORS = {"tasks for others": "tab:blue", "own tasks": "tab:green", "waits": "tab:red"}


def _draw(timeline: Timeline, path: str | os.PathLike[str], operator: str | None, number: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    everything = [launch for pe in timeline.pes for launch in pe.launches if operator in (None, launch.operator)]
    if not everything:
        raise ValueError(f"operator: expected one of {timeline.operators()}, got {operator!r}")
    chosen = max(everything, key=lambda launch: launch.begin).operator
    found_of = {pe.pe: _by_launch(pe.launches) for pe in timeline.pes}
    keys = {key: wgs[0].begin for of in found_of.values() for key, wgs in of.items() if key[0] == chosen}
    if not -len(keys) <= number < len(keys):
        raise ValueError(
            f"launch: expected {-len(keys)} to {len(keys) - 1}, the {len(keys)} launches of {chosen} in the order of "
            f"their begins; got {number}"
        )
    key = sorted(keys, key=lambda each: keys[each])[number]
    found = {pe: of.get(key, []) for pe, of in found_of.items()}
    begin = min(wg.begin for wgs in found.values() for wg in wgs)
    columns = min(len(found), _PANELS_IN_A_ROW)
    rows = -(-len(found) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), sharex=True, squeeze=False)
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    for axes, (pe, wgs) in zip(panels.flat, found.items(), strict=False):
        num_rows = max((wg.wg for wg in wgs), default=0) + 1
        step = -(-num_rows // _MOST_ROWS)
        for wg in wgs:
            if wg.wg % step:
                continue
            bars = [
                ("tasks for others", [(wg.others.begin, wg.others.end)] if wg.others else [], 0.28),
                ("own tasks", [(wg.own.begin, wg.own.end)] if wg.own else [], 0.0),
                ("waits", [(span.begin, span.end) for span in wg.spans if span.kind == "wait"], -0.28),
            ]
            axes.barh(wg.wg, (wg.end - wg.begin) / 1e3, left=(wg.begin - begin) / 1e3, height=0.9 * step, color="0.9")
            for what, spans, place in bars:
                pieces = [((first - begin) / 1e3, (last - first) / 1e3) for first, last in spans]
                axes.broken_barh(pieces, (wg.wg + (place - 0.13) * step, 0.26 * step), color=_COLORS[what])
        axes.set(xlabel="us", ylabel="CTA", title=f"PE {pe}", ylim=(-0.5 * step, num_rows - 0.5))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in _COLORS.values()]
    figure.legend(handles, list(_COLORS), loc="lower center", ncols=len(_COLORS), fontsize=8)
    figure.suptitle(f"{chosen}, launch {key[2]}")
    figure.tight_layout(rect=(0, 0.06 / rows, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
