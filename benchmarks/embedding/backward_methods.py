"""The operator's backward pass as functions that can be called again and again.

This is the only module that knows how the package calls its backward pass. Backward alone is the method that autograd's
node calls (`EmbeddingOptimizer._backward`). It needs no forward pass before it, so it can be repeated, and captured by
itself. The check compares its bits with the bits of a forward and backward pass through autograd. The parts of such a
call, sort by row and kernel, get the arguments that the call itself passes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import persistent_ops as po
from persistent_ops.ops.embedding import recorded_call as embedding_recorded_call
from persistent_ops.ops.embedding.backward_plan import OPERATOR, BackwardKey, BackwardPlan
from persistent_ops.runtime.plans import Plans
from persistent_ops.runtime.world import World

from .configs import Config
from .inputs import LookupSet
from .methods import plan_key

__all__ = ["OPERATOR", "OurBackward"]


class _Parts(NamedTuple):
    """A call of the backward pass in two.

    Attributes:
        invert: sorts the lookups.
        key: of the plan.
        arguments, options: of its launch: the gradient, what the sort gave, and more.
    """

    invert: Callable[[], object]
    key: BackwardKey
    arguments: tuple[Any, ...]
    options: dict[str, Any]


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
        self._split: dict[str, Any] = {
            "batch_per_rank": [config.batch // world.size] * world.size,
            "dim_per_rank": [config.tables * config.dim] * world.size,
            "dtype": config.torch_dtype,
            "wire_dtype": config.wire_dtype,
            "columns": None,
        }
        self._plans: Plans[BackwardPlan] = OPERATOR.state(world).plans
        self._parts: list[_Parts] = []

    @property
    def states(self) -> list[torch.Tensor]:
        """The states of each table; none under SGD."""
        return [state for table in self._tables for state in self._optimizer.state(table)]

    def backward(self, number: int) -> None:
        """Make the backward pass of a set alone."""
        drawn = self._sets[number]
        key = plan_key(self._world, self._world.team, self._config, self._tables, drawn)
        call = embedding_recorded_call.EmbeddingCall(self._world, key, tuple(self._tables), None)
        inputs = embedding_recorded_call.BatchInputs(drawn.indices, drawn.offsets, None)
        self._optimizer._backward(call, self._gradients[number], inputs, wants_factors=False, forward_pass=0)

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
            plan, arguments, options = calls["launch"]
            key: Any = next(key for key, found in self._plans.items() if found is plan)
            (invert,) = calls["invert"]
            # Alone it is after no sort.
            self._parts.append(_Parts(invert, key, arguments, options | {"begins_early": False}))

    def sort(self, number: int) -> None:
        """Sort a set's lookups by row."""
        self._parts[number].invert()

    def kernel(self, number: int) -> None:
        """Launch the kernel with lookups that were sorted before."""
        parts = self._parts[number]
        self._plan(parts.key).launch(*parts.arguments, **parts.options)

    def kernel_alone(self, number: int, received: torch.Tensor) -> None:
        """Launch the kernel as a team of one, which exchanges nothing and waits for nobody.

        Args:
            number: of the set.
            received: `[B, T * D]`, the gradient of the whole batch for this PE's tables.
        """
        parts = self._parts[number]
        rank, key = self._world.rank, parts.key
        alone = key._replace(
            team=self._world.alone,
            dim_per_rank=(sum(key.widths[rank]),),
            widths=(key.widths[rank],),
            batch_per_rank=(self._config.batch,),
        )
        self._plan(alone).launch(received, *parts.arguments[1:], **parts.options)

    def _plan(self, key: BackwardKey) -> BackwardPlan:
        """Return the plan of a key with these tables; under `po.trace` another one, whose kernel traces."""
        make = partial(self._optimizer._plan, self._world, key, self._tables)
        return self._plans.get(key, make)


@contextmanager
def _overheard() -> Iterator[dict[str, tuple[Any, ...]]]:
    """Take down how a backward pass calls its two parts: the sort by row as a call, the launch as plan and
    arguments."""
    calls: dict[str, tuple[Any, ...]] = {}
    invert, launch = embedding_recorded_call.invert, BackwardPlan.launch

    def heard_invert(*arguments: Any, **options: Any) -> Any:
        calls["invert"] = (partial(invert, *arguments, **options),)
        return invert(*arguments, **options)

    def heard_launch(plan: BackwardPlan, *arguments: Any, **options: Any) -> None:
        calls["launch"] = (plan, arguments, options)
        launch(plan, *arguments, **options)

    embedding_recorded_call.invert, BackwardPlan.launch = heard_invert, heard_launch  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        embedding_recorded_call.invert, BackwardPlan.launch = invert, launch  # type: ignore[method-assign]
