"""The ways to pool and exchange, for a comparison. All use the same tables and lookups."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import persistent_ops as po
from persistent_ops.ops.embedding.plan import (
    OPERATOR,
    Choices,
    EmbeddingKey,
    EmbeddingPlan,
    LookupKind,
    OfBatch,
    Tuning,
)
from persistent_ops.ops.embedding.split import table_set
from persistent_ops.runtime.plans import Plans
from persistent_ops.runtime.team import Team
from persistent_ops.runtime.world import World

from .backward_baselines import Exchange
from .configs import Config
from .inputs import LookupSet

__all__ = ["EXCHANGING", "LABELS", "METHODS", "Methods", "UNFUSED", "make_plan", "plan_key"]

LABELS = {
    "fused": "fused",
    "oblivious": "fused, oblivious order",
    "unfused_own": "own pooling + {collective} + reorder",
    "unfused_torch": "embedding_bag + {collective} + reorder",
    "pooling_own": "own pooling alone",
    "pooling_torch": "embedding_bag alone",
}
METHODS = tuple(LABELS)
UNFUSED = ("unfused_own", "unfused_torch")
EXCHANGING = ("fused", "oblivious", *UNFUSED)


def plan_key(
    world: World,
    team: Team,
    config: Config,
    weights: Sequence[torch.Tensor],
    lookups: LookupSet,
    *,
    tuning: Tuning | None = None,
    schedule: str = "communication_aware",
) -> EmbeddingKey:
    """Return the key of the operator's plan for a team."""
    dim_per_rank = (config.tables * config.dim,) * team.size
    batch_per_rank = (config.batch // team.size,) * team.size
    dtypes = (config.torch_dtype, config.wire_dtype)
    choices = Choices(dim_per_rank, batch_per_rank, *dtypes, "sum", "fatal", schedule, None)
    kind = LookupKind(*OfBatch(lookups.indices, lookups.offsets, None).kind(weights, batch_per_rank))
    return EmbeddingKey(team, table_set(world, weights), tuning, choices, kind)


def make_plan(world: World, key: EmbeddingKey, weights: Sequence[torch.Tensor]) -> EmbeddingPlan:
    """Return the operator's plan; ValueError and CompileError where there is none. Nothing is launched."""
    dim_per_rank, batch_per_rank = key.choices.dim_per_rank, key.choices.batch_per_rank
    assert dim_per_rank is not None and batch_per_rank is not None
    return EmbeddingPlan(world, key, weights, dim_per_rank, batch_per_rank)


class Methods:
    """One config's buffers and the methods as functions of a lookup set.

    Args:
        world: of this PE.
        config: shape; its batch must divide by the world's size.
        storage: `[tables * rows, dim]`, this PE's tables as one.
        sets: the lookups.
        out: `[B / W, W * T * D]` in the symmetric heap, for the fused operator.
    """

    def __init__(
        self, world: World, config: Config, storage: torch.Tensor, sets: list[LookupSet], out: torch.Tensor
    ) -> None:
        self.config = config
        self.sets = sets
        self.out = out
        self._storage = storage
        self._weights = list(storage.split(config.rows))
        self._batch_per_rank = [config.batch // world.size] * world.size
        self._dim_per_rank = [config.tables * config.dim] * world.size
        self._exchange = Exchange(world, config, storage.device)
        self._pooled = self._exchange.received  # which only gradients need
        self._world = world
        # The operator's kernel without its exchange: as a team of one it pools the whole batch, and does not wait.
        self._alone = plan_key(world, world.alone, config, self._weights, sets[0])
        # The kernel adds this to the heap's base, so that the output may lie outside the heap, and below it.
        self._pooled_offset = self._pooled.data_ptr() - world.backend.heap_base

    @property
    def weights(self) -> list[torch.Tensor]:
        return self._weights

    def run(self, name: str, lookups: LookupSet) -> torch.Tensor:
        """Run one of METHODS on the current stream; the result is valid until the next one."""
        result = getattr(self, name)(lookups)
        assert isinstance(result, torch.Tensor)
        return result

    def fused(self, lookups: LookupSet, schedule: str = "communication_aware") -> torch.Tensor:
        return po.embedding_all_to_all(
            self._weights,
            lookups.indices,
            lookups.offsets,
            out=self.out,
            batch_per_rank=self._batch_per_rank,
            dim_per_rank=self._dim_per_rank,
            wire_dtype=self.config.wire_dtype,
            schedule=schedule,
        )

    def oblivious(self, lookups: LookupSet) -> torch.Tensor:
        return self.fused(lookups, "oblivious")

    def pooling_own(self, lookups: LookupSet) -> torch.Tensor:
        world, key = self._world, self._alone
        plans: Plans[EmbeddingPlan] = OPERATOR.state(world).plans
        plan = plans.get(key, lambda: make_plan(world, key, self._weights))
        plan.launch(OfBatch(lookups.indices, lookups.offsets, None), self._pooled_offset)
        return self._pooled

    def pooling_torch(self, lookups: LookupSet) -> torch.Tensor:
        pooled = torch.nn.functional.embedding_bag(
            lookups.joint_indices, self._storage, lookups.offsets, mode="sum", include_last_offset=True
        )
        return pooled.view(self.config.batch, -1).to(self.config.wire_dtype)

    def unfused_own(self, lookups: LookupSet) -> torch.Tensor:
        return self._exchange.pooled(self.pooling_own(lookups))

    def unfused_torch(self, lookups: LookupSet) -> torch.Tensor:
        return self._exchange.pooled(self.pooling_torch(lookups))
