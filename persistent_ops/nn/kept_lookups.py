"""Lookups of forward passes that wait for their backward passes, which read them where they have arrived."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..ops.embedding.lookups import Lookups
from ..runtime.world import World

__all__ = ["KeptLookups"]

_MOST = 2
_TWO_WAIT = (
    "of a module's forward passes, those that torch.utils.checkpoint makes anew among them, at most two may wait for "
    "their backward passes where batch_per_rank is given, or weights require a gradient: make the first one's backward "
    "pass sooner, or leave batch_per_rank out"
)


class _Graph:
    """What the hooks of a forward pass hold, and nobody else: it goes with the graph."""


class _Waiting:
    """A forward pass that waits for its backward pass.

    Args:
        lookups: that are kept for it.
        graph: of its result.
        since: recoveries that the world had then.
    """

    def __init__(self, lookups: Sequence[Lookups], graph: _Graph, since: int) -> None:
        self.lookups = list(lookups)
        self._graph, self._since = weakref.ref(graph), since

    def is_lost(self, num_recoveries: int) -> bool:
        """Return whether its backward pass can come no longer."""
        return self._graph() is None or self._since != num_recoveries


class KeptLookups:
    """Those of a module's forward passes, the oldest first.

    Args:
        world: of the module.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, sent: Sequence[Lookups], pooled: Sequence[torch.Tensor]) -> None:
        """Keep what was sent until the backward passes of what was made of each."""
        graph, all_waiting = _Graph(), self._waiting
        waiting = _Waiting(sent, graph, self._world.num_recoveries)
        all_waiting.append(waiting)

        def release(lookups: Lookups) -> None:
            lookups.release()
            waiting.lookups.remove(lookups)
            if not waiting.lookups and waiting in all_waiting:
                all_waiting.remove(waiting)

        for lookups, result in zip(sent, pooled, strict=True):
            assert result.grad_fn is not None
            result.grad_fn.register_hook(lambda *_, lookups=lookups, graph=graph: release(lookups))

    def forget_lost(self) -> None:
        """Release those of forward passes that are never differentiated: their results are gone, or they failed."""
        for waiting in list(self._waiting):
            if waiting.is_lost(self._world.num_recoveries):
                self._waiting.remove(waiting)
                for lookups in waiting.lookups:
                    lookups.release()

    def make_room(self) -> None:
        """Release the oldest ones where as many wait as may: their backward passes are refused then."""
        self.forget_lost()
        while len(self._waiting) >= _MOST:
            for lookups in self._waiting.pop(0).lookups:
                lookups.release(_TWO_WAIT)
