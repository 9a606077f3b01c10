"""The operator's backward pass as functions that can be called again and again.

This is the only place that knows how the package calls it. Backward alone is the method that autograd's node calls
(`EmbeddingOptimizer._backward`): it needs no forward pass before it, so it can be repeated, and captured by itself; the
check compares its bits with those of a forward and backward pass through autograd. The parts of such a call, inversion
and kernel, are called with what the call itself passes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import persistent_ops as po
from persistent_ops.ops import embedding_backward
from persistent_ops.ops.embedding_backward_plan import OPERATOR, BackwardPlan
from persistent_ops.runtime.world import World

from .configs import Config
from .inputs import LookupSet

__all__ = ["OPERATOR", "OurBackward"]


class _Parts(NamedTuple):
    """A call of the backward pass in two."""

    invert: Callable[[], object]
    plan: BackwardPlan
    arguments: tuple[Any, ...]  # of the plan's launch: the gradient, what the inversion gave, and more
    options: dict[str, Any]

    def launch(self) -> None:
        self.plan.launch(*self.arguments, **self.options)


class OurBackward:
    """The operator with the tables of one case.

    Args:
        world: of this PE.
        config: shape; its batch must divide by the world's size.
        tables: this PE's.
        optimizer: of them.
        sets: the lookups.
        gradients: of each set, `[B / P, P * T * D]`.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        tables: list[torch.Tensor],
        optimizer: po.EmbeddingOptimizer,
        sets: Sequence[LookupSet],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._world = world
        self._config = config
        self._tables = tables
        self._optimizer = optimizer
        self._sets = sets
        self._gradients = gradients
        self._split = {
            "batch_per_rank": [config.batch // world.size] * world.size,
            "dim_per_rank": [config.tables * config.dim] * world.size,
            "dtype": config.torch_dtype,
            "wire_dtype": config.wire_dtype,
        }
        self._parts: list[_Parts] = []
        self._alone: BackwardPlan | None = None

    @property
    def states(self) -> list[torch.Tensor]:
        """The states of each table; none under SGD."""
        return [state for table in self._tables for state in self._optimizer.state(table)]

    def backward(self, number: int) -> None:
        """Make the backward pass of a set alone."""
        drawn = self._sets[number]
        self._optimizer._backward(
            self._gradients[number],
            self._tables,
            embedding_backward._OfBatch(drawn.indices, drawn.offsets, None),
            self._split,
            "sum",
            wants_factors=False,
        )

    def forward_backward(self, number: int) -> None:
        """Make both passes through autograd."""
        drawn = self._sets[number]
        with torch.enable_grad():
            result = po.embedding_all_to_all(
                self._tables, drawn.indices, drawn.offsets, optimizer=self._optimizer, **self._split
            )
            result.backward(self._gradients[number])

    def take_apart(self) -> None:
        """Make the backward pass of every set, for what follows; collective."""
        for number in range(len(self._sets)):
            with _overheard() as calls:
                self.backward(number)
            self._parts.append(_Parts(*calls["invert"], *calls["launch"]))
        self._alone = self._plan_alone(self._parts[0].plan)

    def inversion(self, number: int) -> None:
        """Sort a set's lookups by row."""
        self._parts[number].invert()

    def kernel(self, number: int) -> None:
        """Launch the kernel with lookups that were sorted before."""
        self._parts[number].launch()

    def kernel_alone(self, number: int, received: torch.Tensor) -> None:
        """Launch the kernel as a team of one, which exchanges nothing and waits for nobody.

        Args:
            number: of the set.
            received: `[B, T * D]`, the gradient of the whole batch for this PE's tables.
        """
        assert self._alone is not None
        parts = self._parts[number]
        self._alone.launch(received, *parts.arguments[1:], **parts.options)

    def _plan_alone(self, plan: BackwardPlan) -> BackwardPlan:
        """Return the plan for a team of one with the same tables."""
        plans, rank = OPERATOR.state(self._world).plans, self._world.rank
        key = next(key for key, found in plans.items() if found is plan)
        alone: Any = key._replace(  # type: ignore[attr-defined]  # a BackwardKey
            team=self._world.alone,
            dim_per_rank=(sum(key.widths[rank]),),  # type: ignore[attr-defined]
            widths=(key.widths[rank],),  # type: ignore[attr-defined]
            batch_per_rank=(self._config.batch,),
        )
        return self._optimizer._plan(self._world, alone, self._tables)


@contextmanager
def _overheard() -> Iterator[dict[str, tuple[Any, ...]]]:
    """Take down how a backward pass calls its two parts: the inversion as a call, the launch as plan and arguments."""
    calls: dict[str, tuple[Any, ...]] = {}
    invert, launch = embedding_backward.invert, BackwardPlan.launch

    def heard_invert(*arguments: Any, **options: Any) -> Any:
        calls["invert"] = (partial(invert, *arguments, **options),)
        return invert(*arguments, **options)

    def heard_launch(plan: BackwardPlan, *arguments: Any, **options: Any) -> None:
        calls["launch"] = (plan, arguments, options)
        launch(plan, *arguments, **options)

    embedding_backward.invert, BackwardPlan.launch = heard_invert, heard_launch  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        embedding_backward.invert, BackwardPlan.launch = invert, launch  # type: ignore[method-assign]
