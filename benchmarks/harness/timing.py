"""Times of work on a PE's stream: CUDA-graph replays, interleaved in rounds; plain calls on the host backend."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from persistent_ops.runtime.torch_private import sleep_on_gpu
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather
from persistent_ops.testing.timing import in_turn

__all__ = [
    "Subject",
    "on_stream",
    "plain",
    "quantile",
    "queued",
    "record",
    "time_interleaved",
    "time_replays",
]

_MAX_REPLAYS = 500
_BATCH = 100  # replays timed one by one between two looks at the clock: fewer than a stream's queue holds
_BATCH_CYCLES = 3_000_000  # about 1.6 ms on H200, in which the host queues a batch
_CYCLES_PER_SECOND = 1.9e9  # about an H200's that sleeps


@dataclass(frozen=True)
class Subject:
    """A subject of timing.

    Attributes:
        replay: runs `calls` calls of a method, each on another set of inputs.
        queue_seconds: that the GPU sleeps before a burst, which is one replay then, while the host queues all of it; 0:
            the host is fast enough.
    """

    replay: Callable[[], object]
    calls: int
    queue_seconds: float = 0.0


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue on another stream, after the current one's work so far and before its later work; None: on the current."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def plain(calls: Sequence[Callable[[], object]], *, stream: torch.cuda.Stream | None = None) -> Subject:
    """Make one function of the calls, in order; `stream`: that they are queued on, where it is not the current one."""

    def run_all() -> None:
        with on_stream(stream):
            for call in calls:
                call()

    return Subject(run_all, len(calls))


def record(world: World, calls: Sequence[Callable[[], object]], *, stream: torch.cuda.Stream | None = None) -> Subject:
    """Make one CUDA graph of the calls, in order; on the host backend a plain function.

    The calls run once before the capture: kernels are compiled and loaded, communicators connected.

    Args:
        world: of this PE.
        calls: see above.
        stream: of that run and of the capture. Calls that go through autograd need one of their own: it works on the
            stream that a forward pass had, also where that was before the capture.
    """
    once = plain(calls, stream=stream)
    if world.backend.name != "cuda":
        return once
    once.replay()
    world.check()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for its events meanwhile, which the default mode forbids to all threads.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return Subject(graph.replay, len(calls))


def queued(world: World, calls: Sequence[Callable[[], object]]) -> Subject:
    """Make one function of calls that no graph takes, and that the host needs longer for than the GPU."""
    once = plain(calls)
    if world.backend.name != "cuda":
        return once
    once.replay()
    world.check()
    begin = time.perf_counter()
    once.replay()
    seconds = time.perf_counter() - begin
    world.check()
    return Subject(once.replay, once.calls, 3 * seconds)  # a burst follows a replay that is not timed


def _burst_seconds(world: World, subject: Subject, replays: int, pause: float = 0.0) -> float:
    """Return the seconds that `replays` replays take on this PE.

    They come after one that lets all PEs begin together, or after a pause of so many seconds.
    """
    world.barrier()
    if subject.queue_seconds:
        sleep_on_gpu(round(subject.queue_seconds * _CYCLES_PER_SECOND))
    if not pause:
        subject.replay()
    elif world.backend.name == "cuda":
        sleep_on_gpu(round(pause * _CYCLES_PER_SECOND))
    else:
        time.sleep(pause)
    if world.backend.name != "cuda":
        begin = time.perf_counter()
        for _ in range(replays):
            subject.replay()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        subject.replay()
    end.record()
    world.check()
    return float(start.elapsed_time(end)) / 1e3


def time_interleaved(
    world: World, subjects: Mapping[str, Subject], *, rounds: int, burst_seconds: float, pauses: float = 0.0
) -> dict[str, list[float]]:
    """Time the subjects in turn, `rounds` times over, beginning each round with another one.

    Args:
        world: of this PE; all PEs pass the same subjects.
        subjects: by name.
        rounds: times per subject.
        burst_seconds: a time is taken of a burst of replays that lasts at least about this long.
        pauses: in which the GPU does nothing before each burst, in lengths of the burst; 0: a replay that is not timed.

    Returns:
        Seconds per call on this PE, one number per round, by name.
    """
    replays, pause = {}, {}
    for name, subject in subjects.items():
        seconds = max(gather(_burst_seconds(world, subject, 1)))
        most = 1 if subject.queue_seconds else _MAX_REPLAYS
        replays[name] = min(max(math.ceil(burst_seconds / max(seconds, 1e-9)), 1), most)
        pause[name] = pauses * seconds * replays[name]
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for name in in_turn(subjects, rounds):
        seconds = _burst_seconds(world, subjects[name], replays[name], pause[name])
        times[name].append(seconds / replays[name] / subjects[name].calls)
    return times


def time_replays(
    world: World, subjects: Mapping[str, Sequence[Callable[[], object]]], *, replays: int
) -> dict[str, list[float]]:
    """Time many replays one by one, for their spread; the subjects take turns in batches.

    Args:
        world: of this PE; all PEs pass the same subjects.
        subjects: by name, the replays that take turns, such as one graph per set of inputs.
        replays: to time of each subject.

    Returns:
        Seconds of every replay on this PE, by name. On GPUs they include the event that ends each, and the gap that it
        makes between one replay and the next.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for begin in range(0, replays, _BATCH):
        count = min(_BATCH, replays - begin)
        for name, turns in subjects.items():
            batch = [turns[(begin + i) % len(turns)] for i in range(count)]
            times[name] += _time_batch(world, turns[begin % len(turns) - 1], batch)
    return times


def _time_batch(world: World, first: Callable[[], object], batch: Sequence[Callable[[], object]]) -> list[float]:
    """Return the seconds of each replay, after one that is not timed."""
    world.barrier()
    if world.backend.name != "cuda":
        first()
        clock = [time.perf_counter()]
        for replay in batch:
            replay()
            clock.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(clock)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batch) + 1)]
    sleep_on_gpu(_BATCH_CYCLES)  # the device must never wait for the host
    world.enqueue_barrier()
    first()
    events[0].record()
    for replay, event in zip(batch, events[1:], strict=True):
        replay()
        event.record()
    world.check()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed (0.5: the upper median)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
