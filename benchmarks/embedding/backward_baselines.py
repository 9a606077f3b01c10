"""The backward pass by other libraries: the gradient through all_to_all_single, then torch's kernels or FBGEMM's.

FBGEMM's table-batched embeddings update tables in their own backward pass, as MLPerf's references and TorchRec do. They
use the same memory for tables and states as torch's kernels, since two copies of the largest case do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from persistent_ops.runtime.world import World
from persistent_ops.testing.fbgemm_embedding import fused_tables

from .backward_inputs import EPS, RATE
from .configs import Config
from .inputs import LookupSet

__all__ = ["Exchange", "Fbgemm", "TorchUpdate"]

_ROWS_AT_ONCE = 1 << 20  # bounds the temporaries of an update


class Exchange:
    """Gradients to the PEs that have the tables, and pooled rows to those that have the samples, as batches.

    Args:
        world: of this PE.
        config: shape.
        device: of the buffers.

    Attributes:
        received: `[B, T * D]`, the gradient of the whole batch for this PE's tables.
    """

    def __init__(self, world: World, config: Config, device: torch.device) -> None:
        width = config.tables * config.dim
        self._shape = (config.batch // world.size, world.size, width)  # samples, PEs, columns
        options: dict[str, Any] = {"dtype": config.wire_dtype, "device": device}
        self._ordered = torch.empty(world.size, self._shape[0], width, **options)
        self._result = torch.empty(self._shape, **options)
        self.received = torch.empty(config.batch, width, **options)

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Send a gradient `[B / P, P * T * D]`; returns `received`."""
        self._ordered.copy_(gradient.view(self._shape).transpose(0, 1))
        _all_to_all(self.received, self._ordered)
        return self.received

    def pooled(self, pooled: torch.Tensor) -> torch.Tensor:
        """Send pooled rows `[B, T * D]`; returns `[B / P, P * T * D]`."""
        _all_to_all(self._ordered, pooled)
        self._result.copy_(self._ordered.transpose(0, 1))
        return self._result.view(self._shape[0], -1)


def _all_to_all(received: torch.Tensor, sent: torch.Tensor) -> None:
    received, sent = received.view(-1), sent.reshape(-1)
    if sent.device.type == "cpu":  # gloo does not know every dtype
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    dist.all_to_all_single(received, sent)


class TorchUpdate:
    """The sparse gradient and the update by torch's kernels, all tables as one: sort, sums, rows and states in place.

    A row's gradients are summed by embedding_bag, whose bags are rows and whose table is the gradient, so that no
    lookup's gradient is copied. How many rows a set has is known in advance: nothing waits for the host.

    Args:
        config: shape.
        optimizer: its name.
        storage: `[T * R, D]`, the tables.
        state: `[T * R]` for "rowwise_adagrad", `[T * R, D]` for "adagrad"; None.
        sets: the lookups.
    """

    def __init__(
        self,
        config: Config,
        optimizer: str,
        storage: torch.Tensor,
        state: torch.Tensor | None,
        sets: Sequence[LookupSet],
    ) -> None:
        self._optimizer = optimizer
        self._storage = storage
        self._state = state
        self._sets = sets
        device, shape = storage.device, (config.tables, config.batch, config.pooling)
        tables = torch.arange(config.tables, device=device).view(-1, 1, 1)
        samples = torch.arange(config.batch, device=device).view(1, -1, 1)
        self._first_rows = (tables * config.rows).expand(shape).reshape(-1)
        self._bags = (samples * config.tables + tables).expand(shape).reshape(-1)  # rows of the gradient
        self._counts = [int((drawn.indices + self._first_rows).unique().numel()) for drawn in sets]

    def update(self, received: torch.Tensor, number: int) -> None:
        """Update the tables with the gradient `[B, T * D]` of a set."""
        keys, order = torch.sort(self._sets[number].indices + self._first_rows)
        is_first = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=is_first[1:])
        runs = torch.arange(1, self._counts[number] + 1, device=keys.device)
        starts = torch.searchsorted(is_first.cumsum(0), runs)
        gradient = received.view(-1, self._storage.shape[1])
        sums = F.embedding_bag(self._bags[order], gradient, starts, mode="sum")
        for rows, part in zip(keys[starts].split(_ROWS_AT_ONCE), sums.split(_ROWS_AT_ONCE), strict=True):
            self._step(rows, part.float())

    def _step(self, rows: torch.Tensor, sums: torch.Tensor) -> None:
        if self._state is None:
            step = sums
        else:
            squares = sums.square()
            state = self._state[rows].add_(squares if self._optimizer == "adagrad" else squares.mean(1))
            self._state.index_copy_(0, rows, state)
            divisor = state.sqrt_().add_(EPS)
            step = sums / (divisor if self._optimizer == "adagrad" else divisor[:, None])
        updated = self._storage[rows].float().sub_(step, alpha=RATE)
        self._storage.index_copy_(0, rows, updated.to(self._storage.dtype))


class Fbgemm:
    """FBGEMM's table-batched embeddings over this PE's tables.

    As `fbgemm_gpu` has them by default, but exact: no stochastic rounding, results in the wire's dtype, everything in
    the GPU's memory. On CPUs it has no results in bfloat16: they are cast there, as their gradients are. What goes
    through autograd runs on one stream, `stream`, where its nodes belong.

    Args:
        config: shape.
        optimizer: its name.
        storage: `[T * R, D]`, the tables.
        sets: the lookups.
        is_gpu: the backend.

    Raises:
        Exception: of any type; it cannot be made here.

    Attributes:
        stream: to call it on; None on the host.
        state: what it has allocated for states, `[T * R]` or `[T * R, D]`; None under SGD.
    """

    def __init__(
        self, config: Config, optimizer: str, storage: torch.Tensor, sets: Sequence[LookupSet], *, is_gpu: bool
    ) -> None:
        self._sets, self._wire_dtype = sets, config.wire_dtype
        self._module = fused_tables(
            [(config.rows, config.dim)] * config.tables,
            optimizer,
            RATE,
            eps=EPS,
            dtype=config.torch_dtype,
            wire_dtype=config.wire_dtype,
            device=storage.device,
            memory=[storage.data.view(-1)],  # its passes may not see that other methods change the tables
        )
        self.state: torch.Tensor | None = None
        if optimizer != "sgd":
            shape = (len(storage),) if optimizer == "rowwise_adagrad" else storage.shape
            self.state = getattr(self._module, "momentum1_dev" if is_gpu else "momentum1_host").data.view(shape)
        self.stream = torch.cuda.Stream() if is_gpu else None
        self._pooled: dict[int, torch.Tensor] = {}

    def forward(self, number: int) -> torch.Tensor:
        """Return the pooled rows of a set, `[B, T * D]`."""
        drawn = self._sets[number]
        with torch.enable_grad():
            pooled: torch.Tensor = self._module(drawn.indices, drawn.offsets)
            return pooled.to(self._wire_dtype)

    def backward(self, received: torch.Tensor, number: int) -> None:
        """Update the tables with the gradient `[B, T * D]` of a set, whose forward pass was made once and is kept."""
        if number not in self._pooled:
            self._pooled[number] = self.forward(number)
        self._pooled[number].backward(received, retain_graph=True)
