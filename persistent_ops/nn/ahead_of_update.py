"""What is seen to when a gradient comes to a collection's result, ahead of all updates that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ops.embedding.lookups import Lookups
from ..runtime.world import World
from .embedding_bag_optimizer import EmbeddingBagOptimizer

__all__ = ["AheadOfUpdate"]


class AheadOfUpdate:
    """The hook of one result, which looks ahead of its gradient's way to the tables.

    Each group of tables is updated by a launch of its own. What would be refused for one of them is refused here, so
    that none is updated, and on all PEs alike, those without a table among them.

    Args:
        optimizer: of the tables; the rate that it has now is that of the update.
        world: of the collection.
        lookups: that are kept for the backward pass.
        versions: of all tables, which change where rows do, where the gradient of weights is made of them; else None.
    """

    def __init__(
        self,
        optimizer: EmbeddingBagOptimizer,
        world: World,
        lookups: Sequence[Lookups],
        versions: Callable[[], list[int]] | None,
    ) -> None:
        self._optimizer, self._world = optimizer, world
        self._lookups = list(lookups)
        self._versions, self._were = versions, None if versions is None else versions()

    def __call__(self, _: torch.Tensor) -> None:
        for lookups in self._lookups:
            lookups.check_is_here()
        if self._versions is not None and self._were != self._versions():
            raise RuntimeError(
                "the tables have changed since the forward pass, so the gradient of per_sample_weights cannot be "
                "computed; make the backward pass first, one for each call"
            )
        if not self._world.workspace.is_capturing():
            self._optimizer.push_rate()

    def begun(self, *_: object) -> None:
        """Look no more: a table has been updated. What had the first backward pass refuses a second one.

        Not told by a gradient that came to the result alone, as `torch.autograd.grad` brings it there.
        """
        self._lookups.clear()
        self._versions = None
