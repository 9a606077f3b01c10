"""A call of embedding_all_to_all that autograd records, with what its backward pass needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...runtime import world as _world
from ...runtime.plain_call import PlainCalls, require_plain
from ...runtime.torch_private import is_zero_tensor
from ...runtime.uncompiled import uncompiled
from .inversion import Inverted, Rows, invert, invert_sources
from .lookups import Lookups
from .plan import EmbeddingKey, OfBatch
from .weight_gradients import return_gradients

__all__ = ["BatchInputs", "EmbeddingCall", "Inputs", "Recording", "record"]

_plain = PlainCalls()  # gradients


class EmbeddingCall(NamedTuple):
    """A call of embedding_all_to_all whose arguments have been checked.

    Attributes:
        world: of this PE.
        key: of its plan.
        weights: this PE's tables.
        arrived: lookups of an input exchange; None if the caller gave the lookups of the global batch.
    """

    world: _world.World
    key: EmbeddingKey
    weights: tuple[torch.Tensor, ...]
    arrived: Lookups | None


class BatchInputs(OfBatch):
    """The lookups of the global batch as a backward pass reads them."""

    def check(self) -> None:
        """Nothing: torch has seen that they have not changed."""

    def invert(self, world: _world.World, rows: Rows, *, counts: bool, room_for: int = 0) -> Inverted:
        has_factors = self.per_sample_weights is not None
        return invert(world, rows, self.indices, self.offsets, counts=counts, lookups=has_factors, room_for=room_for)

    def returned(self, world: _world.World, gradients: torch.Tensor) -> torch.Tensor:
        """Return the per-sample weights' gradients as the caller has the weights."""
        return gradients


class _OfExchange:
    """The same, where an input exchange has left them.

    Attributes:
        per_sample_weights: all floats of the regions, among which the sort by row numbers the weights; None where there
            are none.
    """

    def __init__(self, lookups: Lookups) -> None:
        self._lookups, memory = lookups, lookups.memory
        is_weighted = lookups.is_weighted
        self.per_sample_weights = memory[: memory.numel() // 4 * 4].view(torch.float32) if is_weighted else None

    def check(self) -> None:
        self._lookups.check_is_here()
        if self._lookups.gives_gradients:
            self._lookups.check_is_captured()

    def invert(self, world: _world.World, rows: Rows, *, counts: bool, room_for: int = 0) -> Inverted:
        return invert_sources(world, rows, self._lookups, counts=counts, room_for=room_for)

    def returned(self, world: _world.World, gradients: torch.Tensor) -> torch.Tensor:
        """Let them travel to the PEs that brought the lookups; collective."""
        return return_gradients(world, self._lookups, gradients)


Inputs = BatchInputs | _OfExchange


def _never_changed() -> int:
    return 0


class Recording(NamedTuple):
    """How the backward pass of a call is made.

    Attributes:
        backward: called as ``backward(call, gradient, inputs, wants_factors=..., forward_pass=...)``, the last one the
            call's number. Returns gradients of the tables, one for each or none, and of per_sample_weights.
        placeholder: requires a gradient, so that the backward pass comes on every PE; it gets none.
        name: of the pass, for errors.
        once: what a second backward pass would do, if it is refused.
        version: of the tables of all PEs, also if this PE has none; it changes if they change.
    """

    backward: Callable[..., tuple[Sequence[torch.Tensor | None], torch.Tensor | None]]
    placeholder: torch.Tensor
    name: str | Callable[[], str]
    once: str | None = None
    version: Callable[[], int] = _never_changed


def record(
    recording: Recording, call: EmbeddingCall, launch: Callable[[], torch.Tensor], *lookups: Any
) -> torch.Tensor:
    """Make a call, and keep what its backward pass needs.

    Args:
        recording: how that is made.
        call: see above.
        launch: makes the call, and returns its result.
        lookups: indices, offsets and per_sample_weights of the global batch; none where they have arrived.
    """
    # Autograd sees the tables that a gradient may come for.
    tables = () if recording.once else call.weights
    *others, factors = lookups or (call.arrived.per_sample_weights,)  # type: ignore[union-attr]
    result: torch.Tensor = _Recorded.apply(  # type: ignore[no-untyped-call]
        recording.placeholder, factors, recording, call, launch, others, *tables
    )
    return result


class _Recorded(torch.autograd.Function):
    """A call of embedding_all_to_all with a backward pass; see `record`."""

    @staticmethod
    def forward(
        context: Any,
        placeholder: torch.Tensor,
        factors: torch.Tensor | None,
        recording: Recording,
        call: EmbeddingCall,
        launch: Callable[[], torch.Tensor],
        others: Sequence[torch.Tensor],
        *tables: torch.Tensor,
    ) -> torch.Tensor:
        context.recording, context.call, context.is_done = recording, call, False
        context.versions = None
        if factors is not None and factors.requires_grad:
            context.versions = _versions(context)
        if call.arrived is None:
            context.save_for_backward(*others, factors)
        result = launch()
        calls = call.world.workspace.calls
        context.number = calls.last
        calls.name(context.number, recording.name)
        return result.detach()  # a view that is made in here could not be changed in place

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recording, call = context.recording, context.call
        if context.is_done and recording.once:
            raise RuntimeError(
                f"embedding_all_to_all: a second backward pass of one forward pass {recording.once}; call the operator "
                "again"
            )
        if _world.for_call() is not call.world:
            raise RuntimeError(
                "embedding_all_to_all: the forward pass of this backward pass ran before po.finalize(); run the "
                "forward pass again"
            )
        (gradient,) = gradients
        if not _plain.has(gradients):
            gradient = _memory_of(gradient)
        saved = context.saved_tensors  # torch refuses here what needs retain_graph, also where none are saved
        inputs = BatchInputs(*saved) if call.arrived is None else _OfExchange(call.arrived)
        inputs.check()
        context.is_done = True
        # Those that travel concern all PEs, whatever is asked for here.
        wants_factors = context.needs_input_grad[1] if call.arrived is None else call.arrived.gives_gradients
        if wants_factors and context.versions != _versions(context):
            raise RuntimeError(
                "embedding_all_to_all: the tables have changed since the forward pass, so the gradient of "
                "per_sample_weights cannot be computed; make the backward pass first, one for each call"
            )
        of_tables, of_factors = recording.backward(
            call, gradient, inputs, wants_factors=wants_factors, forward_pass=context.number
        )
        return None, of_factors, *[None] * _NUM_OTHERS, *of_tables


def _versions(context: Any) -> list[int]:
    return [context.recording.version(), *(weight._version for weight in context.call.weights)]


def _memory_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as kernels take it: autograd may hand on one that is sparse, or still to be negated or filled.

    Raises:
        TypeError: it is a fake one, or one of several (is_grads_batched, vectorize).
    """
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient  # type: ignore[no-untyped-call]
    gradient = gradient.clone() if is_zero_tensor(gradient) else gradient.resolve_neg()
    require_plain({"gradient": gradient})
    return gradient


_NUM_OTHERS = 4  # arguments between per_sample_weights and the tables
