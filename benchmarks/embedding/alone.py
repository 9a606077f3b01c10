"""The operator's kernel with its exchange taken out: each PE runs it alone, as a team of one.

The kernel then pools the whole batch into local memory and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from persistent_ops.ops.embedding_plan import EmbeddingPlan
from persistent_ops.runtime.world import World

__all__ = ["AlonePooling"]


class AlonePooling:
    """Pools the global batch from this PE's tables with the operator's kernel.

    Args:
        world: of this PE.
        weights: this PE's tables, all of one width.
        indices, offsets: one set of lookups; later ones have the same shapes.
        output: `[B, T * D]`, any memory of this PE.
    """

    def __init__(
        self,
        world: World,
        weights: Sequence[torch.Tensor],
        indices: torch.Tensor,
        offsets: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self._world = world
        self._output = output
        # The kernel adds this to the heap's base, so that the output may lie outside the heap, and below it.
        self._output_offset = output.data_ptr() - world.backend.heap_base
        self._plan = EmbeddingPlan(
            world,
            world.alone,
            None,
            weights,
            indices,
            offsets,
            None,
            (output.shape[1],),
            (output.shape[0],),
            output.dtype,
            "sum",
            "fatal",
            "communication_aware",
        )

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream; returns the output."""
        self._plan.launch(self._world, indices, offsets, None, self._output_offset)
        return self._output
