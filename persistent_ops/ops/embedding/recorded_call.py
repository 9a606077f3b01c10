"""A call of embedding_all_to_all that autograd records: what its backward pass needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from ...runtime import world as _world
from ...runtime.call_numbers import CallNumbers
from ...runtime.plain_call import require_plain
from ...runtime.torch_private import is_zero_tensor
from ...runtime.uncompiled import uncompiled
from .inversion import Inverted, Rows, invert, invert_sources
from .lookups import Lookups
from .weight_gradients import return_gradients

__all__ = ["Inputs", "OfBatch", "record"]


@dataclass(frozen=True)
class OfBatch:
    """The lookups of the global batch, side by side."""

    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None

    from_sources: ClassVar = False

    @property
    def num_offsets(self) -> int:
        return self.offsets.numel()

    @property
    def is_weighted(self) -> bool:
        return self.factors is not None

    def check(self) -> None:
        """Nothing: torch has seen that they have not changed."""

    def invert(self, world: _world.World, rows: Rows, *, counts: bool, room_for: int = 0) -> Inverted:
        return invert(
            world, rows, self.indices, self.offsets, counts=counts, lookups=self.is_weighted, room_for=room_for
        )

    def returned(self, world: _world.World, gradients: torch.Tensor) -> torch.Tensor:
        """Return the factors' gradients as the caller has the factors."""
        return gradients


@dataclass(frozen=True)
class _OfExchange:
    """The same, where an input exchange has left them."""

    lookups: Lookups

    from_sources: ClassVar = True

    @property
    def num_offsets(self) -> int:
        return len(self.lookups.rows) * sum(self.lookups.batch_per_rank or ()) + 1

    @property
    def is_weighted(self) -> bool:
        return self.lookups.is_weighted

    @property
    def factors(self) -> torch.Tensor | None:
        """Return all floats of the regions, among which the inversion has numbered the weights."""
        if not self.is_weighted:
            return None
        memory = self.lookups.memory
        return memory[: memory.numel() // 4 * 4].view(torch.float32)

    def check(self) -> None:
        self.lookups.check_is_here()
        if self.lookups.gives_gradients:
            self.lookups.check_is_captured()

    def invert(self, world: _world.World, rows: Rows, *, counts: bool, room_for: int = 0) -> Inverted:
        return invert_sources(world, rows, self.lookups, counts=counts, room_for=room_for)

    def returned(self, world: _world.World, gradients: torch.Tensor) -> torch.Tensor:
        """Let them travel to the PEs that brought the lookups; collective."""
        return return_gradients(world, self.lookups, gradients)


Inputs = OfBatch | _OfExchange


def _never_changed() -> int:
    return 0


def record(
    backward: Callable[..., tuple[Sequence[torch.Tensor | None], torch.Tensor | None]],
    placeholder: torch.Tensor,
    forward: Callable[..., torch.Tensor],
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | Lookups,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
    split: Mapping[str, Any],
    choices: Mapping[str, str],
    *,
    calls: CallNumbers,
    name: str | Callable[[], str],
    once: str | None = None,
    version: Callable[[], int] = _never_changed,
) -> torch.Tensor:
    """Call `embedding_all_to_all`, and keep what its backward pass needs.

    Args:
        backward: called as ``backward(gradient, weights, inputs, split, mode, wants_factors=..., forward_pass=...)``,
            the last one the call's number; returns gradients of the tables, one for each or none at all, and that of
            per_sample_weights.
        placeholder: requires a gradient, so that the backward pass comes on every PE; it gets none.
        forward: the operator.
        weights, indices, offsets, per_sample_weights, split, choices: its arguments.
        calls: of the world's workspace.
        name: whose pass it is, as errors say it.
        once: what a second backward pass would do, where that is refused.
        version: of the tables of all PEs, as far as this PE knows without having any; it changes where they do.
    """
    # Autograd sees the tables that a gradient may come for.
    tables = () if once else tuple(weights)
    if isinstance(indices, Lookups):
        per_sample_weights = indices.per_sample_weights
    result: torch.Tensor = _Recorded.apply(  # type: ignore[no-untyped-call]
        placeholder,
        per_sample_weights,
        (backward, once),
        (calls, name, version),
        forward,
        tuple(weights),
        indices,
        offsets,
        split,
        choices,
        *tables,
    )
    return result


class _Recorded(torch.autograd.Function):
    """A call of embedding_all_to_all with a backward pass; see `record`."""

    @staticmethod
    def forward(
        context: Any,
        placeholder: torch.Tensor,
        per_sample_weights: torch.Tensor | None,
        backward: tuple[Callable[..., Any], str | None],
        caller: tuple[CallNumbers, str | Callable[[], str], Callable[[], int]],
        forward: Callable[..., torch.Tensor],
        weights: Sequence[torch.Tensor],
        indices: torch.Tensor | Lookups,
        offsets: torch.Tensor | None,
        split: Mapping[str, Any],
        choices: Mapping[str, str],
        *tables: torch.Tensor,
    ) -> torch.Tensor:
        context.lookups = indices if isinstance(indices, Lookups) else None
        if context.lookups is None:
            context.save_for_backward(indices, offsets, per_sample_weights)
        else:
            per_sample_weights = None  # the lookups have them
        context.passes_back, context.once = backward
        context.weights = weights
        context.split, context.mode = split, choices["mode"]
        context.is_done = False
        context.world = _world.for_call()
        calls, name, context.version = caller
        context.versions = _versions(context)
        result = forward(weights, indices, offsets, per_sample_weights, **split, **choices)
        context.number = calls.last
        calls.name(context.number, name)
        return result.detach()  # a view that is made in here could not be changed in place

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if context.is_done and context.once:
            raise RuntimeError(
                f"embedding_all_to_all: a second backward pass of one forward pass {context.once}; call the operator "
                "again"
            )
        if _world.for_call() is not context.world:
            raise RuntimeError("embedding_all_to_all: this backward pass is of a world that has been left")
        gradient = _memory_of(gradients[0])
        saved = context.saved_tensors  # torch refuses here what needs retain_graph, also where none are saved
        inputs = OfBatch(*saved) if context.lookups is None else _OfExchange(context.lookups)
        inputs.check()
        context.is_done = True
        # Those that travel concern all PEs, whatever is asked for here.
        wants_factors = context.needs_input_grad[1] if context.lookups is None else context.lookups.gives_gradients
        if wants_factors and context.versions != _versions(context):
            raise RuntimeError(
                "embedding_all_to_all: the tables have changed since the forward pass, so the gradient of "
                "per_sample_weights cannot be computed; make the backward pass first, one for each call"
            )
        of_tables, of_factors = context.passes_back(
            gradient,
            context.weights,
            inputs,
            context.split,
            context.mode,
            wants_factors=wants_factors,
            forward_pass=context.number,
        )
        return None, of_factors, *[None] * _NUM_OTHERS, *of_tables


def _versions(context: Any) -> list[int]:
    return [context.version(), *(weight._version for weight in context.weights)]


def _memory_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as kernels take it: autograd may hand on one that is sparse, or still to be negated or filled.

    Raises:
        TypeError: it is a fake one, or one of several (is_grads_batched, vectorize).
    """
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient  # type: ignore[no-untyped-call]
    gradient = gradient.clone() if is_zero_tensor(gradient) else gradient.resolve_neg()
    require_plain({"gradient": gradient})
    return gradient


_NUM_OTHERS = 8  # arguments between per_sample_weights and the tables
