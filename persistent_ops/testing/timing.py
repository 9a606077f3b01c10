"""Times of work that the PEs begin together, with the methods in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from ..runtime.torch_private import sleep_on_gpu
from ..runtime.world import current

__all__ = ["in_turn", "seconds_of"]

_HEAD_START_CYCLES = 400_000  # about 0.2 ms on H200: the host queues what is timed after it


def in_turn(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield the names `rounds` times over, beginning each round with another one."""
    listed = list(names)
    for number in range(rounds):
        first = number % max(len(listed), 1)
        yield from listed[first:] + listed[:first]


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes on this PE; all PEs begin together. Collective.

    On GPUs these are seconds of the current stream.
    """
    world = current()
    world.barrier()
    if world.backend.name != "cuda":
        world.enqueue_barrier()  # the PEs leave the other one at different times
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sleep_on_gpu(_HEAD_START_CYCLES)
    world.enqueue_barrier()
    start.record()
    run()
    end.record()
    world.check()
    return float(start.elapsed_time(end)) / 1e3
