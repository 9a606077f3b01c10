"""A collection's open work: lookups that were sent, and forward passes whose backward passes have not run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..ops.embedding.lookups import Lookups
from ..runtime.world import World
from .embedding_bag_optimizer import EmbeddingBagOptimizer
from .replicated_tables import LocalBatch

__all__ = ["ForwardPass", "ForwardPasses", "SentFeatures"]

_MOST = 2
_TWO_WAIT = (
    "at most two forward passes of a module, with recomputed ones of torch.utils.checkpoint, may wait for their "
    "backward passes if batch_per_rank is given or weights require a gradient: run the first one's backward pass "
    "sooner, or leave batch_per_rank out"
)


class SentFeatures:
    """Lookups that travel to the owners of their tables: see `ShardedEmbeddingBagCollection.input_dist`.

    Args:
        is_keyed: whether they came as a KeyedJaggedTensor.
        knows_split: whether the host knows the number of samples of each PE.
        own: lookups for replicated tables; None if there are none.

    Attributes:
        is_over: whether the lookups have been pooled or released.
    """

    def __init__(self, *, is_keyed: bool, knows_split: bool, own: LocalBatch | None = None) -> None:
        self.is_keyed, self.knows_split, self.own = is_keyed, knows_split, own
        self.is_over = False
        self.lookups: list[Lookups] = []

    def take(self) -> list[Lookups]:
        """Return the lookups to pool, a handle for each group of tables; once."""
        if self.is_over:
            raise RuntimeError(
                "features: the batch that input_dist returned was pooled or released before; call input_dist again"
            )
        self.is_over = True
        return self.lookups

    def release(self) -> None:
        """Release the lookups instead of pooling them; on all PEs, between the same calls."""
        if not self.is_over:
            self.is_over = True
            for lookups in self.lookups:
                lookups.release()


class ForwardPass:
    """A forward pass; only the hooks of its result's graph hold it, so it lives as long as the graph.

    Each group of tables is updated by a launch of its own. What would be refused for one of them is refused ahead of
    all, so that none is updated, and on all PEs alike, those without a table among them.

    Args:
        passes: of the module.
        lookups: that are kept for the backward pass, which reads them where they have arrived.
        versions: of all tables, which change where rows do, where the gradient of weights is made of them; else None.
    """

    def __init__(
        self, passes: ForwardPasses, lookups: Sequence[Lookups], versions: Callable[[], list[int]] | None
    ) -> None:
        self._passes, self.lookups = passes, list(lookups)
        self._versions, self._were = versions, None if versions is None else versions()
        self._has_begun = False

    def check(self, _: torch.Tensor) -> None:
        """Check before all updates: a hook of the result, called with its gradient.

        When a table has been updated there is nothing more to check: what had the first backward pass refuses a second
        one. A gradient that came to the result alone, as `torch.autograd.grad` brings it there, updates none.
        """
        passes = self._passes
        if not self._has_begun:
            for lookups in self.lookups:
                lookups.check_is_here()
            if self._versions is not None and self._were != self._versions():
                raise RuntimeError(
                    "the tables have changed since the forward pass, so the gradient of per_sample_weights cannot be "
                    "computed; make the backward pass first, one for each call"
                )
        if not passes.world.workspace.is_capturing():
            passes.optimizer.push_rate()

    def updated(self, lookups: Lookups | None, *_: object) -> None:
        """Note that a group's tables have been updated: a hook of what was pooled for it.

        Args:
            lookups: of the group, where they are kept.
        """
        self._has_begun = self._passes.have_updated = True
        if lookups is not None:
            lookups.release()
            self.lookups.remove(lookups)
            if not self.lookups:
                self._passes._waiting = [each for each in self._passes._waiting if each.lookups]


class _Waiting(NamedTuple):
    """One that waits for its backward pass; `since`: recoveries that the world had then."""

    forward_pass: weakref.ref[ForwardPass]
    lookups: list[Lookups]
    since: int


class ForwardPasses:
    """A module's forward passes whose backward passes have not run, the oldest first.

    Args:
        world: of the module.
        optimizer: of its tables; an update uses the rate that the optimizer has when the gradient comes.

    Attributes:
        have_updated: whether a backward pass has updated tables since this was last set to False.
    """

    def __init__(self, world: World, optimizer: EmbeddingBagOptimizer) -> None:
        self.world, self.optimizer = world, optimizer
        self.have_updated = False
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, lookups: Sequence[Lookups], versions: Callable[[], list[int]] | None) -> ForwardPass:
        """Return a forward pass, and keep its lookups until their backward passes."""
        begun = ForwardPass(self, lookups, versions)
        if lookups:
            self._waiting.append(_Waiting(weakref.ref(begun), begun.lookups, self.world.num_recoveries))
        return begun

    def forget_lost(self) -> None:
        """Release the lookups of those that are never differentiated: their results are gone, or they failed."""
        for waiting in list(self._waiting):
            if waiting.forward_pass() is None or waiting.since != self.world.num_recoveries:
                self._waiting.remove(waiting)
                for lookups in waiting.lookups:
                    lookups.release()

    def make_room(self) -> None:
        """Release the oldest ones where as many wait as may: their backward passes are refused then."""
        self.forget_lost()
        while len(self._waiting) >= _MOST:
            for lookups in self._waiting.pop(0).lookups:
                lookups.release(_TWO_WAIT)
