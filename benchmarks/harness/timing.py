"""Times of what runs on a PE's stream: CUDA-graph replays, interleaved in rounds; plain calls on the host backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from persistent_ops.runtime.world import World

from .pes import gather

__all__ = ["Subject", "record", "time_aligned", "time_interleaved"]

_MAX_REPLAYS = 500
_HEAD_START_CYCLES = 400_000  # about 0.2 ms on H200: the host queues what is timed behind it


@dataclass(frozen=True)
class Subject:
    """What is timed: `replay` runs `calls` calls of a method, each on another set of inputs."""

    replay: Callable[[], object]
    calls: int


def record(world: World, calls: list[Callable[[], object]]) -> Subject:
    """Make one CUDA graph of the calls, in order; on the host backend a plain function.

    The calls run once before the capture: kernels are compiled and loaded, communicators connected.
    """

    def run_all() -> None:
        for call in calls:
            call()

    if world.backend.name != "cuda":
        return Subject(run_all, len(calls))
    run_all()
    world.check()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for its events meanwhile, which the default mode forbids to all threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run_all()
    return Subject(graph.replay, len(calls))


def _burst_seconds(world: World, replay: Callable[[], object], replays: int) -> float:
    """Return the seconds that `replays` replays take on this PE, behind one that lets all PEs begin together."""
    world.barrier()
    replay()
    if world.backend.name != "cuda":
        begin = time.perf_counter()
        for _ in range(replays):
            replay()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        replay()
    end.record()
    world.check()
    return float(start.elapsed_time(end)) / 1e3


def time_interleaved(
    world: World, subjects: Mapping[str, Subject], *, rounds: int, burst_seconds: float
) -> dict[str, list[float]]:
    """Time the subjects in turn, `rounds` times over, beginning each round with another one.

    Args:
        world: of this PE; all PEs pass the same subjects.
        subjects: by name.
        rounds: times per subject.
        burst_seconds: a time is that of a burst of replays that takes at least about this long.

    Returns:
        Seconds per call on this PE, one number per round, by name.
    """
    replays = {}
    for name, subject in subjects.items():
        seconds = max(gather(world.bootstrap, _burst_seconds(world, subject.replay, 1)))
        replays[name] = min(max(math.ceil(burst_seconds / max(seconds, 1e-9)), 1), _MAX_REPLAYS)
    names = list(subjects)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            seconds = _burst_seconds(world, subjects[name].replay, replays[name])
            times[name].append(seconds / replays[name] / subjects[name].calls)
    return times


def time_aligned(world: World, replay: Callable[[], object], *, trials: int) -> list[float]:
    """Return this PE's seconds for single replays that all PEs begin together: their differences are the PEs' skew."""
    times = []
    for _ in range(trials):
        world.barrier()
        if world.backend.name != "cuda":
            world.enqueue_barrier()
            begin = time.perf_counter()
            replay()
            times.append(time.perf_counter() - begin)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        world.enqueue_barrier()
        start.record()
        replay()
        end.record()
        world.check()
        times.append(start.elapsed_time(end) / 1e3)
    return times
