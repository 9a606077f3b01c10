"""Sparse all-reduce with the interface of oneCCL's sparse collective: separate buffers, callbacks for the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime import world as _world
from ..runtime.contract import Field
from ..runtime.errors import to_raise
from ..runtime.operator import Operator
from ..runtime.plain_call import require_plain
from ..runtime.uncompiled import uncompiled
from ..runtime.work import Work
from .sparse_all_reduce import check_choices, check_entries, check_num_entries, refuse_gradient
from .sparse_launch import PendingSum, start
from .sparse_plan import SCALARS, Layout, bad_row

__all__ = ["sparse_all_reduce_buffers"]

COALESCE = ("regular", "disable", "keep_precision")
CompletionFn = Callable[[torch.Tensor, torch.Tensor, Any], None]
AllocFn = Callable[[int, torch.dtype, tuple[int, ...], torch.dtype, Any], tuple[torch.Tensor, torch.Tensor]]
_ENTRIES = Operator(
    "sparse_all_reduce_buffers without coalescing",
    (
        Field("rows", argument="num_rows"),
        Field.numbers("row_shape", "the shape of a row of values"),
        Field.dtype("dtype", list(SCALARS), "the dtype of values"),
    ),
    has_kernel=False,
)


@uncompiled
def sparse_all_reduce_buffers(
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    num_rows: int,
    completion_fn: CompletionFn | None = None,
    alloc_fn: AllocFn | None = None,
    fn_ctx: Any = None,
    coalesce: str = "regular",
    op: str = "sum",
    async_op: bool = False,
) -> Work[None] | None:
    """Sum entries over all PEs and pass the result to a callback.

    Args:
        indices: `[n]`, int32 or int64: row numbers, in any order, with any number of repetitions; n is at most 2^31 -
            1.
        values: `[n, ...]`, float32, float16 or bfloat16.
        num_rows: R, at most 2^31, the same on every PE.
        completion_fn: called with the result's indices, values and `fn_ctx`. The library owns both tensors: copy what
            is needed after the call.
        alloc_fn: called with the number of rows of the result, the dtype of its indices, the shape of a row, the dtype
            of the values and `fn_ctx`. It returns two contiguous tensors, which receive indices and values. Pass
            exactly one of the two callbacks.
        fn_ctx: passed to the callback.
        coalesce: "regular": as `sparse_all_reduce`. "keep_precision": the same, with values of 16 bits returned as
            float32, not rounded. "disable": all PEs' entries one after the other, in rank order, neither sorted nor
            summed.
        op: "sum" or "mean"; "sum" with "disable".
        async_op: return a `Work` whose `wait()` calls the callback. With "disable" the call still waits on the host for
            the PEs' numbers of entries. Do not change indices and values until `wait()`.

    Returns:
        None, or with `async_op` a `Work`.

    Raises:
        TypeError, ValueError: an invalid argument; before any launch.
        IndexError, PeerTimeoutError, ContractMismatchError, SymmetricHeapError: as `sparse_all_reduce`; the callback is
            not called. The results of the other PEs lack the invalid entries, with "disable" too.
        NotImplementedError: a gradient of values is recorded.

    Collective, on the current stream. Source: the contract of oneCCL's sparse_allreduce (2021.1 to 2021.5).
    """
    world = _world.for_call()
    if (completion_fn is None) == (alloc_fn is None):
        raise ValueError("completion_fn, alloc_fn: expected exactly one of them")
    if coalesce not in COALESCE:
        raise ValueError(f"coalesce: expected one of {', '.join(map(repr, COALESCE))}, got {coalesce!r}")
    check_choices(op, "auto", ("auto",))
    if coalesce == "disable" and op != "sum":
        raise ValueError("op: expected 'sum' with coalesce='disable', which sums nothing, got 'mean'")
    require_plain({"indices": indices, "values": values})
    _, row_shape = check_entries(indices, values, num_rows, world.backend.device)
    refuse_gradient(values)
    delivery = _Delivery(indices.dtype, completion_fn, alloc_fn, fn_ctx)
    if coalesce == "disable":
        outside = (indices < 0) | (indices >= num_rows)
        if bool(outside.any()):
            entry = int(outside.nonzero()[0])
            delivery.error = bad_row(entry, int(indices[entry]), num_rows)
            indices, values = indices[~outside], values[~outside]
        delivery.indices, delivery.pending = _concatenate(world, num_rows, indices, values)
    else:
        if coalesce == "keep_precision":
            values = values.float()
        layout = Layout(num_rows, row_shape, values.dtype, op)
        delivery.pending = start(world, layout, indices, values, "auto", in_order=False)
    if async_op:
        return Work(delivery.wait, delivery.done)
    delivery.wait()
    return None


class _Delivery:
    """A result that a callback waits for."""

    def __init__(
        self,
        index_dtype: torch.dtype,
        completion_fn: CompletionFn | None,
        alloc_fn: AllocFn | None,
        fn_ctx: Any,
    ) -> None:
        self.pending: PendingSum | None = None
        self.indices: torch.Tensor | None = None
        """In place of the sum's row numbers."""
        self.error: Exception | None = None
        """What is wrong with this PE's entries: the callback is not called."""
        self._index_dtype = index_dtype
        self._completion_fn = completion_fn
        self._alloc_fn = alloc_fn
        self._fn_ctx = fn_ctx

    def done(self) -> bool:
        """Return whether the callback has been called, or `wait` would call it, or raise, at once."""
        return self.pending is None or self.pending.done()

    def wait(self) -> None:
        """Call the callback, once; raise the errors of launches, bad rows each time."""
        if self.pending is not None:
            indices, values = self.pending.pair()
            self.pending.raise_reported()
            self.pending = None
            if self.error is None:
                self._deliver(indices, values)
        if self.error is not None:
            raise to_raise(self.error)

    def _deliver(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        if self.indices is not None:
            indices, self.indices = self.indices, None
        indices = indices.to(self._index_dtype)
        if self._completion_fn is not None:
            self._completion_fn(indices, values, self._fn_ctx)
        elif self._alloc_fn is not None:
            self._fill(indices, values)

    def _fill(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        assert self._alloc_fn is not None
        row_shape = tuple(values.shape[1:])
        targets = self._alloc_fn(indices.shape[0], indices.dtype, row_shape, values.dtype, self._fn_ctx)
        if not (isinstance(targets, (tuple, list)) and len(targets) == 2):
            raise TypeError(f"alloc_fn: expected it to return two tensors, got {type(targets).__name__}")
        for name, target, source in zip(("indices", "values"), targets, (indices, values), strict=True):
            if not isinstance(target, torch.Tensor):
                raise TypeError(f"alloc_fn: expected a tensor for {name}, got {type(target).__name__}")
            is_alike = target.shape == source.shape and target.dtype == source.dtype
            if not is_alike or target.device != source.device:
                raise ValueError(
                    f"alloc_fn: expected {name} of shape {list(source.shape)} and dtype {source.dtype} on "
                    f"{source.device}, got {list(target.shape)}, {target.dtype} on {target.device}"
                )
            target.copy_(source)


def _concatenate(
    world: _world.World, num_rows: int, indices: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, PendingSum]:
    """Return all PEs' indices, and their values under way: a sum in which every entry is a row, in rank order."""
    device = indices.device
    world.meet(_ENTRIES.contract(world.team, num_rows, tuple(values.shape[1:]), values.dtype))
    halves = torch.tensor([[indices.numel() >> 16, indices.numel() & 0xFFFF]], dtype=torch.float32, device=device)
    own_number = torch.tensor([world.rank], dtype=torch.int64, device=device)
    counts_layout = Layout(world.size, (2,), torch.float32, "sum")
    _, counted = start(world, counts_layout, own_number, halves, "owner", in_order=True).pair()
    counts = [int(high) << 16 | int(low) for high, low in counted.tolist()]
    total, first = sum(counts), sum(counts[: world.rank])
    check_num_entries("indices of all PEs", total)
    num_places = 1 << max(total - 1, 0).bit_length()  # few layouts, as the total changes from call to call
    places = torch.arange(first, first + indices.numel(), device=device)
    # A row number travels as four numbers of 16 bits, which fp32 holds as they are.
    shifts = torch.tensor([48, 32, 16, 0], dtype=torch.int64, device=device)
    pieces = (indices.long().unsqueeze(1) >> shifts & 0xFFFF).float()
    pieces_layout = Layout(num_places, (4,), torch.float32, "sum")
    _, gathered = start(world, pieces_layout, places, pieces, "owner", in_order=True).pair()
    all_indices = (gathered.long() << shifts).sum(1)
    layout = Layout(num_places, tuple(values.shape[1:]), values.dtype, "sum")
    return all_indices, start(world, layout, places, values, "owner", in_order=True)
