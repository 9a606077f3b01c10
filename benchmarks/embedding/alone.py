"""The operator's kernel with its exchange taken out: each PE runs it as a world of one, in the world it is in.

NVSHMEM is initialised once per process, so there is no second world; this gives the plan a view of the first one with
one PE. The kernel then pools the whole batch into local memory and waits for nobody. Every launch advances the epoch
of the workspace, so all PEs must run it equally often between launches that exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from persistent_ops.ops.embedding_plan import EmbeddingPlan
from persistent_ops.runtime.contract import Contract
from persistent_ops.runtime.workspace import Workspace
from persistent_ops.runtime.world import World

__all__ = ["AlonePooling"]


class _AloneWorkspace:
    def __init__(self, workspace: Workspace, heaps: torch.Tensor) -> None:
        self._workspace = workspace
        self._heaps = heaps
        self.max_ready_words = workspace.max_ready_words
        self.launch = workspace.launch

        self.is_capturing = workspace.is_capturing

    def team(self, contract: Contract) -> Any:
        team: Any = self._workspace.team(contract)
        team.rank, team.size, team.peer_heaps = 0, 1, self._heaps.data_ptr()
        return team


class _AloneWorld:
    """What EmbeddingPlan asks of a World, for one PE."""

    rank = 0
    size = 1
    all_reachable = True

    def __init__(self, world: World) -> None:
        self.backend = world.backend
        self.load = world.load
        self.preparing = world.preparing
        self.operator_state: dict[str, Any] = world.operator_state
        self._heaps = world.backend.private_words(1)
        self._heaps.fill_(world.backend.heap_base)
        self.workspace = _AloneWorkspace(world.workspace, self._heaps)


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
        self._view = cast(World, _AloneWorld(world))
        self._output = output
        # The kernel adds this to the heap's base, so that the output may lie outside the heap, and below it.
        self._output_offset = output.data_ptr() - world.backend.heap_base
        self._plan = EmbeddingPlan(
            self._view,
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
        self._plan.launch(self._view, indices, offsets, None, self._output_offset)
        return self._output
