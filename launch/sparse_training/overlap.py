"""The part of the exchange of gradients that overlaps with the backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import persistent_ops as po
from persistent_ops.testing.timing import in_turn

if TYPE_CHECKING:
    from .loop import _Pe

__all__ = ["seconds_per_pass"]

_ROUNDS = 5


def seconds_per_pass(pe: _Pe, steps: int) -> dict[str, float]:
    """Time forward and backward passes with three ways to exchange gradients; the tables stay as they are.

    Args:
        pe: after its training.
        steps: of each way and round.

    Returns:
        Seconds per pass, the median over the rounds, the maximum over the PEs: "hook" with `po.nn.ddp_sparse_hook`,
        "after" where the same sums begin when the backward pass has ended, "none" without any.
    """

    def hook(step: int) -> None:
        pe.backward(step)

    def none(step: int) -> None:
        with pe.module.no_sync():
            pe.backward(step)

    def after(step: int) -> None:
        none(step)
        for parameter in pe.model.parameters():
            parameter.grad = po.sparse_all_reduce(parameter.grad, op="mean")

    ways: dict[str, Callable[[int], None]] = {"hook": hook, "after": after, "none": none}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in in_turn(ways, _ROUNDS):
        po.barrier()
        begin = time.perf_counter()
        for step in range(steps):
            pe.optimizer.zero_grad()
            ways[name](step)
        po.check()
        seconds[name].append((time.perf_counter() - begin) / steps)
    pe.optimizer.zero_grad()
    return {name: max(pe.exchange(statistics.median(seconds[name]))) for name in ways}
