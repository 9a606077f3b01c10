"""What `po.heap_bytes` says that calls take: so much is enough, and a granule less is not; and what errors say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from worlds import run_pes

import persistent_ops as po
from persistent_ops import heap_bytes
from persistent_ops.ops import gemm_exchange_plan
from persistent_ops.ops.product import Rows, Shape, Tuning, choose_tile
from persistent_ops.runtime.heap import whole_pages
from persistent_ops.runtime.world import current

pytestmark = pytest.mark.host

_GRANULE = 512
_HEAP = 8 << 20
_LINES = (300, 64)  # of what sparse_all_reduce sums


class _Call(NamedTuple):
    """A call, and what is said to take its room in the heap.

    Attributes:
        run: makes it.
        nbytes: what is said, of the number of PEs.
    """

    run: Callable[[], Any]
    nbytes: Callable[[int], int]


def _batches(world_size: int) -> tuple[list[int], list[int]]:
    return [5] * world_size, [24] * world_size


def _pool(*, trains: bool = False, **options: Any) -> torch.Tensor:
    """Pool one lookup per bag."""
    batches, dims = _batches(po.world_size())
    samples = sum(batches)
    lookups = torch.zeros(2 * samples, dtype=torch.int64)
    offsets = torch.arange(2 * samples + 1)
    weights = [torch.ones(3, 8), torch.ones(3, 16)]
    if trains:
        options["optimizer"] = po.EmbeddingOptimizer(weights, "sgd", lr=0.1)
    return po.embedding_all_to_all(weights, lookups, offsets, batch_per_rank=batches, dim_per_rank=dims, **options)


def _train() -> None:
    pooled = _pool(trains=True)
    pooled.sum().backward()


def _slots(world_size: int) -> dict[str, Any]:
    """Return arguments of an `EmbeddingInputs`: PE 0 has most tables."""
    slots = [[(0, 9), (1, 9)]] + [[(0, 9)] for _ in range(world_size - 1)]
    return {"slots": slots, "num_features": 2, "max_batch": 40, "lookups_per_sample": [3, 5], "is_weighted": True}


def _send() -> None:
    inputs = po.EmbeddingInputs(**_slots(po.world_size()))
    for _ in range(2):
        values, lengths = torch.zeros(80, dtype=torch.int64), torch.ones(80, dtype=torch.int64)
        with inputs.exchange(values, lengths=lengths, per_sample_weights=torch.ones(80)):
            pass


def _sum_of_rows(dtype: torch.dtype, algorithm: str) -> torch.Tensor:
    rows = torch.arange(100) + 20 * po.rank()
    x = torch.sparse_coo_tensor(rows[None], torch.ones(100, _LINES[1], dtype=dtype), _LINES)
    return po.sparse_all_reduce(x, algorithm=algorithm)


def _bytes_of_rows(dtype: torch.dtype, algorithm: str) -> Callable[[int], int]:
    def nbytes(world_size: int) -> int:
        rows = 100 + 20 * (world_size - 1)
        return heap_bytes.sparse_all_reduce(_LINES, rows, dtype, world_size, algorithm=algorithm, backend="host")

    return nbytes


def _factors(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(*rows, 32, dtype=torch.bfloat16), torch.ones(32, 40, dtype=torch.bfloat16)


_WIRE = {"wire_dtype": torch.bfloat16}
_CALLS = {
    "empty": _Call(lambda: po.empty(1000, 3), lambda size: heap_bytes.empty((1000, 3), torch.float32)),
    "all_to_all": _Call(_pool, lambda size: heap_bytes.embedding_all_to_all(*_batches(size))),
    "all_to_all 16 bits": _Call(
        lambda: _pool(**_WIRE), lambda size: heap_bytes.embedding_all_to_all(*_batches(size), **_WIRE)
    ),
    "backward": _Call(
        _train,
        lambda size: heap_bytes.embedding_all_to_all(*_batches(size)) + heap_bytes.embedding_backward(*_batches(size)),
    ),
    "inputs": _Call(_send, lambda size: heap_bytes.embedding_inputs(**_slots(size))),
    "all_reduce": _Call(
        lambda: po.all_reduce(torch.ones(5000)), lambda size: heap_bytes.all_reduce(size, heap_size=_HEAP)
    ),
    "rms_norm": _Call(
        lambda: po.all_reduce_rms_norm(torch.ones(4, 64), torch.ones(64), eps=1e-5),
        lambda size: heap_bytes.all_reduce(size, heap_size=_HEAP),
    ),
    "gemv": _Call(
        lambda: po.gemv_all_reduce(torch.ones(64, 32), torch.ones(32)),
        lambda size: heap_bytes.gemv_all_reduce(size, heap_size=_HEAP),
    ),
    **{
        f"sparse {algorithm} {dtype}": _Call(
            lambda dtype=dtype, algorithm=algorithm: _sum_of_rows(dtype, algorithm),  # type: ignore[misc]
            _bytes_of_rows(dtype, algorithm),
        )
        for algorithm in ("owner", "allgather")
        for dtype in (torch.float32, torch.bfloat16)
    },
    "gemm_all_to_all": _Call(
        lambda: po.gemm_all_to_all(*_factors(36)), lambda size: heap_bytes.gemm_all_to_all((36, 40), torch.bfloat16)
    ),
    "gemm_reduce_scatter": _Call(
        lambda: po.gemm_reduce_scatter(*_factors(5, 36), scatter_dim=1),
        lambda size: heap_bytes.gemm_reduce_scatter((5, 36, 40), torch.bfloat16, size, scatter_dim=1, backend="host"),
    ),
    "gemm_all_reduce": _Call(
        lambda: po.gemm_all_reduce(*_factors(37), wire_dtype=torch.float32),
        lambda size: heap_bytes.gemm_all_reduce(
            (37, 40), torch.bfloat16, size, wire_dtype=torch.float32, backend="host"
        ),
    ),
}


# ---- so much is enough, and a granule less is not --------------------------------------------------------------------


def _error_of(backend: str, name: str, heap_size: int, nbytes: int | None = None) -> str:
    """Make a call in a new world, where so many bytes are free, or all; return its error, or ""."""
    try:
        po.init(backend, operator_timeout=30.0, heap_size=heap_size)
        heap = current().heap.free_list
        if nbytes is not None:
            assert heap_size - heap.free_bytes == heap_bytes.init(po.world_size())
            po.empty(heap.free_bytes - nbytes, dtype=torch.uint8)
            assert heap.free_bytes == nbytes
        _CALLS[name].run()
        po.check()
        return ""
    except (po.SymmetricHeapError, ValueError) as error:
        return str(error)
    finally:
        if po.is_initialized():
            po.finalize()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", _CALLS)
def test_so_many_bytes_are_enough_and_less_are_not(name: str, world_size: int, backend: str) -> None:
    nbytes = _CALLS[name].nbytes(world_size)
    assert run_pes(_error_of, world_size, backend, name, _HEAP, nbytes, timeout=120) == [""] * world_size
    refused = run_pes(_error_of, world_size, backend, name, _HEAP, nbytes - _GRANULE, timeout=120)
    assert all("no room for" in error for error in refused), refused


# ---- what errors say is enough ---------------------------------------------------------------------------------------


def _said(errors: list[str]) -> int:
    """Return the size of the heap that all PEs' errors name."""
    found = {match for error in errors for match in re.findall(r"pass heap_size >= (\d+) to po\.init\(\)", error)}
    assert len(found) == 1 and "" not in errors, errors
    return int(found.pop())


_PARTS = ("all_reduce", "rms_norm", "gemv")  # which take a part of the heap, and so of a larger one more
_MOST_ERRORS = 4  # the world, areas, and results on their way


@pytest.mark.parametrize("name", _CALLS)
def test_heaps_of_the_sizes_that_errors_name_end_at_the_one_that_is_enough(name: str, backend: str) -> None:
    sizes = [whole_pages(1)]
    while any(errors := run_pes(_error_of, 2, backend, name, sizes[-1], timeout=120)):
        sizes.append(_said(errors))
        assert len(sizes) <= 1 + _MOST_ERRORS, (sizes, errors)
    assert sizes[1] == whole_pages(heap_bytes.init(2)), sizes  # the world, at once
    if name not in _PARTS:
        assert sizes[-1] == whole_pages(heap_bytes.init(2) + _CALLS[name].nbytes(2)), sizes
    assert _said(run_pes(_error_of, 2, backend, name, sizes[-1] - whole_pages(1), timeout=120)) == sizes[-1]


def _fragmented(backend: str, heap_size: int) -> str:
    """Hold results and tensors with free places between them, and ask for more than any place has."""
    po.init(backend, operator_timeout=30.0, heap_size=heap_size)
    try:
        tensors = [po.empty(1 << 18) for _ in range(3)]  # 1 MiB each
        held = [_results(1 << 10) for _ in range(3)]
        po.free(tensors[1])
        del held[1]
        _results(3 << 10)
        return ""
    except po.SymmetricHeapError as error:
        return str(error)
    finally:
        po.finalize()


def _results(rows: int) -> torch.Tensor:
    lookups, offsets = torch.zeros(rows, dtype=torch.int64), torch.arange(rows + 1)
    return po.embedding_all_to_all([torch.ones(4, 256)], lookups, offsets, batch_per_rank=[rows], dim_per_rank=[256])


def test_a_heap_with_holes_is_widened_where_it_grows(backend: str) -> None:
    enough = _said(run_pes(_fragmented, 1, backend, 8 << 20, timeout=120))
    assert enough == whole_pages(heap_bytes.init(1) + (9 << 20))  # the places of six, and three more
    assert run_pes(_fragmented, 1, backend, enough, timeout=120) == [""]
    assert run_pes(_fragmented, 1, backend, enough - whole_pages(1), timeout=120) != [""]


# ---- without a world -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "depth"), [(64, 128, 512), (4096, 4096, 4096), (8192, 1000, 128)])
def test_bounds_of_products_hold_for_the_tiles_of_a_gpu(rows: int, columns: int, depth: int) -> None:
    size, queries = 8, gemm_exchange_plan.OPERATOR.description.queries
    parts = Rows(size, 0, 1, rows // size)
    shape = Shape(rows, depth, columns, True, True)
    tile = choose_tile(queries, shape, Tuning(), num_sms=132, arena_bytes=227 << 10, rows=parts)
    needs = gemm_exchange_plan.partial_needs(size, parts, columns, tile, torch.bfloat16, backend_name="cuda")
    bound = heap_bytes.gemm_reduce_scatter((rows, columns), torch.bfloat16, size)
    assert sum(need.size for need in needs) <= bound
    assert bound >= (size - 1) * rows // size * columns * 2
