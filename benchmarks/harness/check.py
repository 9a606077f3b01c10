"""The common parts of all benchmarks' checks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather

from .timing import Subject

__all__ = ["bits_differ", "everyones", "poisoned", "replay_differs"]


def everyones(failures: list[str]) -> list[str]:
    """Return the failures of all PEs, with the PE's number before each; collective."""
    everyone = gather(failures)
    return [f"PE {pe}, {text}" for pe, texts in enumerate(everyone) for text in texts]


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have other bits."""
    return not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def poisoned(world: World, out: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a copy of a call's result; the buffer `out` was full of NaN before, on every PE; collective."""
    out.fill_(math.nan)
    world.barrier()  # peers may write into it as soon as they launch
    result = call().clone()
    world.check()
    return result


def replay_differs(world: World, out: torch.Tensor, call: Callable[[], torch.Tensor], subject: Subject) -> bool:
    """Return whether a replay leaves other bits in `out` than `call`, the last one of it; collective."""
    expected = poisoned(world, out, call)
    out.fill_(math.nan)
    world.barrier()
    subject.replay()
    world.check()
    return bits_differ(out, expected)
