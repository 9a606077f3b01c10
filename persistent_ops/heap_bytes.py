"""The bytes of the symmetric heap that calls take, before there is a world: for ``po.init(heap_size=...)``.

A function has the name of a call. It returns the bytes on one PE, the one that needs most, of the first such call: its
result, and the areas that the operator keeps for later calls. A result that is still held when the next one is made
counts once more (`empty`). Add up what a program calls, beside `init`. Numbers are of PEs that reach each other's
memory directly, as those of one host do. They are computed by what the operators themselves use, and take a C++
compiler, but no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from .ops import all_reduce_plan, gemm_exchange_plan, gemv_plan, sparse_launch, sparse_plan
from .ops.embedding import backward_plan, inputs
from .ops.product import CANDIDATES, HOST_TILE, Rows, Tile
from .runtime.areas import Need
from .runtime.backend import GPU_BLOCKS_PER_SM
from .runtime.heap import room_of, whole_pages
from .runtime.workspace import workspace_bytes
from .runtime.world import SIDE_READY_WORDS

__all__ = [
    "all_reduce",
    "embedding_all_to_all",
    "embedding_backward",
    "embedding_inputs",
    "empty",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemv_all_reduce",
    "init",
    "sparse_all_reduce",
]

_MOST_SMS = 192  # of a GPU


def init(world_size: int) -> int:
    """Return what `po.init` takes: flags and credits.

    Args:
        world_size: number of PEs.
    """
    return _sum(workspace_bytes(world_size))


def empty(size: Sequence[int], dtype: torch.dtype) -> int:
    """Return what a tensor takes: of `po.empty` or `po.to_symmetric`, or a result.

    Args:
        size: its shape.
        dtype: of it.
    """
    nbytes = math.prod(size) * dtype.itemsize
    return room_of(nbytes) if nbytes else 0


def embedding_all_to_all(
    batch_per_rank: Sequence[int], dim_per_rank: Sequence[int], *, wire_dtype: torch.dtype = torch.float32
) -> int:
    """Return what the result of `po.embedding_all_to_all` takes.

    Args:
        batch_per_rank: samples that each PE receives, in rank order.
        dim_per_rank: sum of the columns of each PE's tables.
        wire_dtype: dtype of the result.
    """
    return room_of(max(batch_per_rank) * sum(dim_per_rank) * wire_dtype.itemsize)


def embedding_backward(
    batch_per_rank: Sequence[int], dim_per_rank: Sequence[int], *, wire_dtype: torch.dtype = torch.float32
) -> int:
    """Return what the backward pass of `po.embedding_all_to_all` takes: gradients on their way to the tables.

    Args: see `embedding_all_to_all`. Gradients of per_sample_weights that an `EmbeddingInputs` has sent are not
        counted.
    """
    if len(dim_per_rank) == 1:
        return 0
    return _of_areas([backward_plan.staging_need(sum(batch_per_rank), dim_per_rank, wire_dtype)])


def embedding_inputs(
    slots: Sequence[Sequence[tuple[int, int]]],
    *,
    num_features: int,
    max_batch: int,
    lookups_per_sample: float | Sequence[float] | None = None,
    capacity: Sequence[Sequence[int]] | None = None,
    is_weighted: bool = False,
    index_dtype: torch.dtype | None = None,
) -> int:
    """Return what a `po.EmbeddingInputs` with these arguments takes.

    Counted are the two regions, and the flags and credits of the exchanges, which a world has once. Where messages have
    more lookups than the capacity, the regions grow while the last ones are held: to 5/4 of the lookups that came.

    Args:
        slots, num_features, max_batch, lookups_per_sample, capacity, is_weighted, index_dtype: as there.
    """
    size = len(slots)
    layout, chosen, _ = inputs.layout_of(
        slots,
        size,
        num_features=num_features,
        max_batch=max_batch,
        lookups_per_sample=lookups_per_sample,
        capacity=capacity,
        is_weighted=is_weighted,
        index_dtype=index_dtype,
        bounds="fatal",
    )
    region = max(layout.region_offsets(owner, chosen)[-1] for owner in range(size))
    return _sum(workspace_bytes(size, SIDE_READY_WORDS)) + 2 * room_of(region)


def all_reduce(world_size: int, *, heap_size: int = 1 << 30) -> int:
    """Return what `po.all_reduce` and `po.all_reduce_rms_norm` take together, whatever the shapes: a part of the heap.

    Args:
        world_size: number of PEs.
        heap_size: of `po.init`. The default gives the most that they take of any heap.
    """
    return _of_areas(all_reduce_plan.room_needs(world_size, whole_pages(heap_size)))


def gemv_all_reduce(world_size: int, *, heap_size: int = 1 << 30) -> int:
    """Return what `po.gemv_all_reduce` takes, whatever the shapes: a part of the heap.

    Args:
        world_size: number of PEs.
        heap_size: of `po.init`. The default gives the most that it takes of any heap.
    """
    return _of_areas([gemv_plan.packet_need(world_size, whole_pages(heap_size))])


def sparse_all_reduce(
    size: Sequence[int],
    num_rows: int,
    dtype: torch.dtype,
    world_size: int,
    *,
    algorithm: str = "auto",
    backend: str = "cuda",
) -> int:
    """Return what `po.sparse_all_reduce` takes, at most, for a sum with so many rows, and the call that learns that.

    It is exact on the host backend, but where x in 16 bits is coalesced, or "auto" finds rows that many PEs have; then
    and on GPUs of up to 192 SMs it is a bound. A larger sum than the last one takes areas of its own.

    Args:
        size: shape of x.
        num_rows: number of rows of the sum; without knowledge of x, the sum of the PEs' rows.
        dtype: of x.
        world_size: number of PEs.
        algorithm: "owner", "allgather" or "auto".
        backend: "cuda" or "host".
    """
    layout = sparse_plan.Layout(size[0], tuple(size[1:]), dtype, "sum")
    grid = sparse_plan.HOST_WORK_GROUPS if backend == "host" else _MOST_SMS * GPU_BLOCKS_PER_SM
    needs = sparse_plan.room_needs(world_size, layout, grid * sparse_plan.warps_of(backend))
    rows = sparse_plan.fitting_rows(layout, num_rows)
    gather, low = sparse_plan.gather_need(world_size, layout, rows), sparse_plan.low_need(layout, rows)
    may_gather = algorithm == "allgather" or (
        algorithm == "auto" and gather.nbytes <= sparse_plan.OPERATOR.default_tuning.gather_bytes
    )
    needs += [gather] * may_gather + [low] * (dtype.itemsize == 2 and algorithm != "allgather")
    results = [sparse_launch.result_bytes(each, layout.row_bytes) for each in (0, rows)]
    return _of_areas(needs) + _sum(results)


def gemm_all_to_all(size: Sequence[int], dtype: torch.dtype) -> int:
    """Return what the result of `po.gemm_all_to_all` takes; with `out`, a tensor of `po.empty`, there is none.

    Args:
        size: shape of the result.
        dtype: of it.
    """
    return empty(size, dtype)


def gemm_reduce_scatter(
    size: Sequence[int],
    wire_dtype: torch.dtype,
    world_size: int,
    *,
    scatter_dim: int = 0,
    backend: str = "cuda",
) -> int:
    """Return what `po.gemm_reduce_scatter` takes: partial sums on their way.

    It is exact on the host backend, and a bound on GPUs, where whole tiles of a size that suits the GPU travel. Calls
    share the memory: of several, the largest one counts.

    Args:
        size: shape of ``a @ b``.
        wire_dtype: dtype in which products travel.
        world_size: number of PEs.
        scatter_dim: dimension of a whose rows are spread.
        backend: "cuda" or "host".
    """
    segments = math.prod(size[:scatter_dim])
    segment_rows = math.ceil(size[scatter_dim] / world_size) * math.prod(size[scatter_dim + 1 : -1])
    rows = Rows(world_size, 0, segments, segment_rows)
    tiles = [HOST_TILE] if backend == "host" else [Tile(*candidate, 0) for candidate in CANDIDATES]
    return max(
        _of_areas(gemm_exchange_plan.partial_needs(world_size, rows, size[-1], tile, wire_dtype, backend_name=backend))
        for tile in tiles
    )


def gemm_all_reduce(
    size: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    *,
    wire_dtype: torch.dtype | None = None,
    backend: str = "cuda",
) -> int:
    """Return what `po.gemm_all_reduce` takes: the result, and partial sums, as of `gemm_reduce_scatter`.

    Args:
        size: shape of the result.
        dtype: of it.
        world_size: number of PEs.
        wire_dtype: dtype in which products travel: the result's (the default), or torch.float32.
        backend: "cuda" or "host".
    """
    whole = math.prod(size[:-1]), size[-1]
    return empty(size, dtype) + gemm_reduce_scatter(whole, wire_dtype or dtype, world_size, backend=backend)


def _of_areas(needs: Iterable[Need]) -> int:
    return _sum(need.size for need in needs)


def _sum(sizes: Iterable[int]) -> int:
    return sum(map(room_of, sizes))
