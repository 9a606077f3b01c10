"""The symmetric heap and its pool of results: who may use memory, when it is used again, what errors say."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_cases import Case, expected_bits, make_inputs, split_of
from hypothesis import given, settings, strategies as st
from worlds import run_pes

import persistent_ops as po
from persistent_ops.runtime import host
from persistent_ops.runtime.areas import Areas, Need
from persistent_ops.runtime.heap import _FreeList
from persistent_ops.runtime.plans import Plans
from persistent_ops.runtime.world import _BARRIER, current

MB = 1 << 20
_CASE = Case("heap", dims=lambda rank: (8, 24), batch=lambda world: 13)


def _run(program: Callable[..., Any], world_size: int, backend: str, *args: Any) -> list[Any]:
    return run_pes(program, world_size, backend, *args, timeout=120)


def _call(iteration: int, case: Case = _CASE, **options: Any) -> torch.Tensor:
    rank, world = po.rank(), po.world_size()
    weights, indices, offsets, _ = make_inputs(case, rank, world, iteration)
    device = po.device()
    return po.embedding_all_to_all(
        [w.to(device) for w in weights],
        indices.to(device),
        offsets.to(device),
        batch_per_rank=split_of(case, world),
        dim_per_rank=[sum(case.dims(pe)) for pe in range(world)],
        **options,
    )


def _want(iteration: int, case: Case = _CASE) -> torch.Tensor:
    world = po.world_size()
    inputs = [make_inputs(case, pe, world, iteration) for pe in range(world)]
    return expected_bits(case, inputs, po.rank(), split_of(case, world))


def _free_bytes() -> int:
    return po.runtime.world.current().heap.free_list.free_bytes


def _error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # the test asserts which
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- symmetric tensors ---------------------------------------------------------------------------------------------


def _writes_to_every_peer(backend: str) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=8 * MB)
    rank, world = po.rank(), po.world_size()
    before = _free_bytes()
    problems = []
    board = po.empty(world, 5, dtype=torch.int32)
    for iteration in range(6):
        board.fill_(-1)
        po.barrier()
        for peer in range(world):
            values = torch.arange(5, dtype=torch.int32) + 100 * rank + 1000 * peer + 10000 * iteration
            po.peer_view(board, peer)[rank] = values.to(po.device())
        po.barrier()
        want = torch.stack(
            [torch.arange(5, dtype=torch.int32) + 100 * pe + 1000 * rank + 10000 * iteration for pe in range(world)]
        )
        if not torch.equal(board.cpu(), want):
            problems.append(f"iteration {iteration}: {board.tolist()}")
        neighbor = (rank + 1) % world
        row = po.peer_view(board[neighbor], neighbor)  # of a view with an offset
        if row.tolist() != (torch.arange(5) + 1100 * neighbor + 10000 * iteration).tolist():
            problems.append(f"iteration {iteration}, read from PE {neighbor}: {row.tolist()}")
        po.barrier()
    source = torch.arange(12).view(3, 4).t() + rank  # neither contiguous nor in the heap
    copy = po.to_symmetric(source)
    if copy.device != po.device() or not torch.equal(copy.cpu(), source):
        problems.append("to_symmetric changed the values")
    po.barrier()
    if not torch.equal(po.peer_view(copy, 0).cpu(), source - rank):
        problems.append("peer_view of to_symmetric is not PE 0's")
    po.barrier()
    po.free(copy)
    po.free(board)
    if _free_bytes() != before:
        problems.append("free() did not give everything back")
    po.finalize()
    return problems


def test_writes_through_a_peer_view_are_seen_after_a_barrier(backend: str) -> None:
    assert _run(_writes_to_every_peer, 3, backend) == [[]] * 3


def _empty_tensors(backend: str) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=4 * MB)
    before = _free_bytes()
    problems = []
    nothing = po.empty(0, 16)
    scalar = po.empty((), dtype=torch.float64)
    if nothing.shape != (0, 16) or scalar.shape != () or scalar.dtype != torch.float64:
        problems.append(f"{nothing.shape}, {scalar.shape}, {scalar.dtype}")
    if po.peer_view(nothing, po.world_size() - 1).shape != (0, 16):
        problems.append("peer_view of no elements")
    lookups = torch.zeros(0, dtype=torch.int64, device=po.device())
    tables = [torch.ones(3, 8 * (po.rank() + 1), device=po.device())]
    dims = [8 * (pe + 1) for pe in range(po.world_size())]
    out = po.empty(0, sum(dims))
    no_bags = torch.zeros(1, dtype=torch.int64, device=po.device())
    result = po.embedding_all_to_all(tables, lookups, no_bags, out=out, dim_per_rank=dims)
    if result is not out:
        problems.append("out= was not returned")
    for tensor in (out, scalar, nothing):
        po.free(tensor)
    if _free_bytes() != before:
        problems.append("free() did not give everything back")
    po.finalize()
    return problems


def test_tensors_without_elements(backend: str) -> None:
    assert _run(_empty_tensors, 2, backend) == [[]] * 2


def _full_on_one_pe(backend: str, heap_size: int) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=heap_size)
    rank = po.rank()
    tables = [torch.ones(4, 1024, device=po.device())]
    samples = 256  # 1 MB for PE 1 from each of two PEs, nothing for PE 0
    lookups = torch.zeros(samples, dtype=torch.int64, device=po.device())
    offsets = torch.arange(samples + 1, device=po.device())
    held = [po.embedding_all_to_all(tables, lookups, offsets, batch_per_rank=[0, samples]) for _ in range(3)]
    seen = [_error_of(lambda: po.empty(5, MB // 4))]
    small = po.empty(100)  # the heap is still of use
    seen.append("usable" if rank == 0 or all(bool((rows == 1).all()) for rows in held) else "a result changed")
    po.free(small)
    held.clear()
    po.empty(5, MB // 4).zero_()  # room that idle buffers of the pool take is given up for it
    po.finalize()
    return seen


def test_exhaustion_on_one_pe_is_an_error_on_all(backend: str) -> None:
    for error, after in _run(_full_on_one_pe, 2, backend, 8 * MB):
        assert error.startswith("SymmetricHeapError: the symmetric heap of PE 1 has no room for 5242880 bytes")
        assert "heap_size 8388608 bytes" in error and "pass heap_size >= " in error
        assert after == "usable"
    assert (
        _run(_full_on_one_pe, 2, backend, 13631488) == [["no error", "usable"]] * 2
    )  # what the error has named is enough


def _different_requests(backend: str) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=4 * MB)
    before = _free_bytes()
    errors = [
        _error_of(lambda: po.empty(3, 4 + (po.rank() == 1))),
        _error_of(lambda: po.empty(3, dtype=torch.int32 if po.rank() else torch.float32)),
    ]
    assert _free_bytes() == before
    first, second = po.empty(8), po.empty(8)
    errors.append(_error_of(lambda: po.free(first if po.rank() else second)))
    po.free(first)
    po.free(second)
    assert _free_bytes() == before
    po.finalize()
    return errors


def test_requests_that_differ_between_pes(backend: str) -> None:
    for shapes, dtypes, freed in _run(_different_requests, 2, backend):
        assert shapes.startswith("SymmetricHeapError: po.empty() needs the same call on every PE")
        assert "PE 0: (3, 4) torch.float32; PE 1: (3, 5) torch.float32" in shapes
        assert "PE 0: (3,) torch.float32; PE 1: (3,) torch.int32" in dtypes
        assert freed.startswith("SymmetricHeapError: po.free() needs the same tensor on every PE")


# ---- tensors that are not this PE's symmetric memory ---------------------------------------------------------------


def _wrong_outputs(backend: str) -> dict[str, str]:
    po.init(backend, operator_timeout=20.0, heap_size=8 * MB)
    rank = po.rank()
    rows, columns = split_of(_CASE, 2)[rank], 64
    result = _call(0)
    freed = po.empty(7, columns)
    po.free(freed)
    live = po.empty(7, columns)
    other = po.empty(7, columns)
    po.free(other)
    wrong = {
        "ordinary": torch.empty(rows, columns, device=po.device()),
        "peer's": po.peer_view(live, 1 - rank)[:rows],
        "freed": other[:rows],
        "result": result,
    }
    errors = {name: _error_of(lambda tensor=tensor: _call(1, out=tensor)) for name, tensor in wrong.items()}
    errors["free ordinary"] = _error_of(lambda: po.free(wrong["ordinary"]))
    errors["free twice"] = _error_of(lambda: po.free(other))
    errors["free one in whose place another lies"] = _error_of(lambda: po.free(freed))  # `live`
    errors["free a view"] = _error_of(lambda: po.free(live[1:]))
    errors["free peer's"] = _error_of(lambda: po.free(po.peer_view(live, 1 - rank)))
    errors["view of ordinary"] = _error_of(lambda: po.peer_view(wrong["ordinary"], 0))
    errors["view of a result"] = _error_of(lambda: po.peer_view(result, 0))
    errors["no such PE"] = _error_of(lambda: po.peer_view(live, 2))
    errors["not contiguous"] = _error_of(lambda: po.peer_view(live.t(), 0))
    assert torch.equal(result.cpu(), _want(0)), "a refused call wrote into it"
    right = _call(2, out=live[:rows])  # a view of a symmetric tensor is one too
    po.check()
    assert right.data_ptr() == live.data_ptr() and torch.equal(live[:rows].cpu(), _want(2))
    po.finalize()
    return errors


def test_tensors_that_are_not_symmetric(backend: str) -> None:
    for rank, errors in enumerate(_run(_wrong_outputs, 2, backend)):
        assert errors["ordinary"].startswith(
            "NotSymmetricError: out: expected a tensor in the symmetric heap, got an ordi"
        )
        assert "po.empty()" in errors["ordinary"]
        assert errors["peer's"].startswith("NotSymmetricError: out: expected a tensor of this PE")
        assert f"got PE {1 - rank}'s copy" in errors["peer's"]
        assert errors["freed"].startswith("NotSymmetricError: out: this tensor was given back with po.free()")
        assert errors["result"] == (
            "NotSymmetricError: out: expected a tensor from po.empty(), got an output of an operator"
        )
        for name in ("free ordinary", "view of ordinary"):
            assert errors[name].startswith("NotSymmetricError: tensor: expected a tensor in the symmetric heap")
        assert "was given back with po.free()" in errors["free twice"]
        assert "belongs to another tensor now" in errors["free one in whose place another lies"]
        assert errors["free a view"].startswith("NotSymmetricError: tensor: expected a whole tensor")
        assert f"got PE {1 - rank}'s copy" in errors["free peer's"]
        assert "output of an operator" in errors["view of a result"]
        assert errors["no such PE"] == "ValueError: rank: expected 0 to 1, got 2"
        assert errors["not contiguous"].startswith("ValueError: tensor: expected a contiguous tensor")


@pytest.mark.host
def test_a_peer_behind_a_network_has_no_view() -> None:
    def program() -> str:
        po.init("host", operator_timeout=20.0, heap_size=4 * MB, transport="staged")
        mine = po.empty(4)
        error = _error_of(lambda: po.peer_view(mine, 1 - po.rank()))
        assert po.peer_view(mine, po.rank()).data_ptr() == mine.data_ptr()
        po.finalize()
        return error

    results = po.launch(program, 2, threads=True, timeout=60)
    for rank, error in enumerate(results):
        assert error.startswith(f"NotSymmetricError: PE {1 - rank} is not load/store reachable from this PE")


@pytest.mark.host
def test_growing_batches_share_the_room_for_staged_rows() -> None:
    def program() -> list[int]:
        po.init("host", operator_timeout=120.0, heap_size=6 * MB, transport="staged")
        world, wrong = po.world_size(), []
        table = torch.arange(40.0).repeat(64, 1).t().contiguous()
        for batch in [*range(400, 4000, 400), 1, 4000, 17]:  # rows of up to 1 MB a PE sends, of 256 bytes each
            indices = torch.arange(batch) % 40
            result = po.embedding_all_to_all([table], indices, torch.arange(batch + 1), dim_per_rank=[64] * world)
            first = sum((batch + world - 1 - pe) // world for pe in range(po.rank()))
            want = table[indices[first : first + result.shape[0]]].repeat(1, world)
            if not torch.equal(result, want):
                wrong.append(batch)
        po.finalize()
        return wrong

    assert po.launch(program, 2, threads=True, timeout=250) == [[], []]


# ---- the pool of results -------------------------------------------------------------------------------------------


def _thousand_calls(backend: str) -> list[str]:
    po.init(backend, operator_timeout=60.0, heap_size=8 * MB)
    rank, world = po.rank(), po.world_size()
    weights, indices, offsets, _ = make_inputs(_CASE, rank, world, 0)
    tables = [w.to(po.device()) for w in weights]
    indices, offsets = indices.to(po.device()), offsets.to(po.device())
    free_bytes, addresses, problems = [], set(), []
    result = None
    for _ in range(1000):
        result = po.embedding_all_to_all(tables, indices, offsets)  # the one before is held during the call
        addresses.add(result.data_ptr())
        free_bytes.append(_free_bytes())
    if len(addresses) != 2 or len(set(free_bytes[2:])) != 1:
        problems.append(f"{len(addresses)} buffers, free bytes {sorted(set(free_bytes))}")
    if result is None or not torch.equal(result.cpu(), _want(0)):
        problems.append("the last result is wrong")
    half = Case("half", dims=lambda rank: (16, 48), batch=_CASE.batch, dtype=torch.float16)  # as many bytes
    del result
    for iteration in range(6):
        narrow = _call(iteration, half)
        if not torch.equal(narrow.cpu(), _want(iteration, half)):
            problems.append(f"fp16, iteration {iteration}: wrong bits")
        if narrow.data_ptr() not in addresses:
            problems.append(f"fp16, iteration {iteration}: a new buffer")
        del narrow
        wide = _call(iteration)
        if wide.data_ptr() not in addresses or not torch.equal(wide.cpu(), _want(iteration)):
            problems.append(f"fp32, iteration {iteration}: a new buffer or wrong bits")
        del wide
    po.finalize()
    return problems


def test_buffers_of_dropped_results_are_used_again(backend: str) -> None:
    assert _run(_thousand_calls, 2, backend) == [[]] * 2


def _held(backend: str) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=8 * MB)
    problems = []
    with torch.inference_mode():
        _call(0)  # and its buffer is the next one's
    whole = _call(0)
    if whole.is_inference():
        problems.append("what was made in inference mode stays out of autograd")
    source = _call(1)
    view = source.t()[5:, 1:3]
    shared = torch.utils.dlpack.from_dlpack(_call(2))
    other_dtype = _call(3).view(torch.int32)
    detached = _call(4).detach().view(-1)
    array = _call(5).numpy() if backend == "host" else None
    storage = _call(6).untyped_storage()
    del source
    held_at = {tensor.data_ptr() for tensor in (whole, shared, other_dtype, detached, storage)}
    held_at.add(view.data_ptr() - view.element_size() * view.storage_offset())
    if array is not None:
        held_at.add(int(array.__array_interface__["data"][0]))
    if len(held_at) != 6 + (array is not None):
        problems.append("two results that are held share a buffer")
    for iteration in range(7, 30):
        result = _call(iteration)
        if result.data_ptr() in held_at:
            problems.append(f"iteration {iteration}: wrote over a result that is held")
        result.fill_(float("nan"))
    for name, found, want in (
        ("result", whole, _want(0)),
        ("view", view, _want(1).t()[5:, 1:3]),
        ("tensor from DLPack", shared, _want(2)),
        ("view of another dtype", other_dtype, _want(3).view(torch.int32)),
        ("detached view", detached, _want(4).flatten()),
        ("storage", torch.empty_like(detached).set_(storage), _want(6).flatten()),  # type: ignore[call-overload]
        ("array", shared if array is None else torch.from_numpy(array), _want(2 if array is None else 5)),
    ):
        if not torch.equal(found.cpu(), want):
            problems.append(f"the {name} changed while it was held")
    po.finalize()
    return problems


def test_a_result_stays_while_anything_shares_it(backend: str) -> None:
    assert _run(_held, 2, backend) == [[]] * 2


def _moved_away(backend: str) -> list[str]:
    """torch moves a storage under the same tensors if another process is to see it."""
    po.init(backend, heap_size=8 * MB)
    problems = []
    moved = _call(0)
    moved.share_memory_()
    rows = torch.tensor([[1, 3]])
    summed = po.sparse_all_reduce(torch.sparse_coo_tensor(rows, torch.ones(2, 1), (5, 1), check_invariants=False))
    for part in (summed._indices(), summed._values()):
        part.share_memory_()
    del moved, summed, part
    for iteration in range(1, 5):
        if not torch.equal(_call(iteration), _want(iteration)):
            problems.append(f"iteration {iteration}: results are not what was written")
        values = torch.full((2, 1), float(iteration))
        found = po.sparse_all_reduce(torch.sparse_coo_tensor(rows, values, (5, 1), check_invariants=False))
        if found.to_dense().flatten().tolist() != [0.0, 2.0 * iteration, 0.0, 2.0 * iteration, 0.0]:
            problems.append(f"iteration {iteration}: the sparse sum is not what was written")
    po.finalize()
    return problems


@pytest.mark.host
def test_a_buffer_whose_storage_torch_has_moved_is_not_used_again() -> None:
    assert _run(_moved_away, 2, "host") == [[]] * 2


def _changed_in_place(backend: str) -> list[str]:
    """Results have a history of their own, though they use the memory of earlier results."""
    po.init(backend, operator_timeout=20.0, heap_size=8 * MB)
    problems = []
    rows, ones = torch.arange(3, device=po.device()), torch.ones(3, 4, device=po.device())
    scale = torch.full((), 3.0, device=po.device(), requires_grad=True)

    def scaled(kind: str, result: torch.Tensor) -> None:
        if result.requires_grad or result.grad_fn is not None:
            problems.append(f"{kind} came with the history of an earlier one")
        result.mul_(scale).sum().backward()

    for iteration in range(3):
        scaled("a result", _call(iteration))
        po.sparse_all_reduce_buffers(
            rows, ones, num_rows=8, completion_fn=lambda indices, values, context: scaled("values", values)
        )
        x = torch.sparse_coo_tensor(rows[None], ones, (8, 4), check_invariants=False)
        if po.sparse_all_reduce(x).requires_grad:
            problems.append("a sum came with the history of values that were handed to a callback")
    po.check()
    po.finalize()
    return problems


def test_results_that_were_changed_in_place_leave_no_history(backend: str) -> None:
    assert _run(_changed_in_place, 2, backend) == [[]] * 2


def _fills_the_pool(backend: str) -> tuple[str, list[str]]:
    po.init(backend, operator_timeout=20.0, heap_size=8 * MB)
    problems = []

    def call(samples: int, value: float) -> torch.Tensor:
        tables = [torch.full((4, 1024), value, device=po.device())]
        lookups = torch.zeros(samples, dtype=torch.int64, device=po.device())
        return po.embedding_all_to_all(tables, lookups, torch.arange(samples + 1, device=po.device()))

    held: list[torch.Tensor] = []
    error = ""
    while not error and len(held) < 100:
        try:
            held.append(call(256, float(len(held))))
        except po.SymmetricHeapError as reason:
            error = str(reason)
    if not 6 <= len(held) <= 8:  # of 1 MB each, in 8 MB, less the flags
        problems.append(f"{len(held)} results of 1 MB fit into 8 MB")
    if any(not bool((rows == i).all()) for i, rows in enumerate(held)):
        problems.append("a result changed while it was held")
    held.pop(2)
    if not bool((call(256, 50.0) == 50).all()):  # the buffer that was dropped
        problems.append("wrong rows after one result was dropped")
    held.clear()
    for samples in (700, 300, 1100, 256):  # no two of them fit beside each other's leavings
        if not bool((call(samples, float(samples)) == samples).all()):
            problems.append(f"{samples} samples: wrong rows")
    po.finalize()
    return error, problems


def test_results_that_are_held_can_fill_the_heap_and_idle_ones_make_room(backend: str) -> None:
    for error, problems in _run(_fills_the_pool, 1, backend):
        assert problems == []
        assert "no room for 1048576 bytes more" in error and "results that are still held" in error
        held = re.search(r"(\d+) in results", error)
        assert held is not None and int(held.group(1)) in (6 * MB, 7 * MB, 8 * MB)
        assert "drop results" in error and "pass heap_size >= " in error


def _holds_unlike_results(backend: str) -> str:
    """Let PE 0 hold results that PE 1 drops, so that free memory begins at other offsets; then drop them, too."""
    po.init(backend, operator_timeout=20.0, heap_size=64 * MB)
    large, small = po.empty(16 * MB // 4), po.empty(MB // 4)
    po.free(large)

    def call(rows: int) -> torch.Tensor:
        indices, values = torch.arange(rows, device=po.device()), torch.ones(rows, 1024, device=po.device())
        return po.sparse_all_reduce(torch.sparse_coo_tensor(indices[None], values, (4096, 1024), is_coalesced=True))

    held = []
    for number in range(50):
        result = call(256)  # 1 MB
        if po.rank() == 0 and number < 48:
            held.append(result)
        del result
    if po.rank() == 0:
        del held[:30]
    call(1000)
    held.clear()
    po.check()
    error = _error_of(lambda: po.free(po.empty(14 * MB // 4)))
    po.free(small)
    po.finalize()
    return error


def test_what_one_pe_keeps_for_later_is_no_reason_to_refuse(backend: str) -> None:
    assert _run(_holds_unlike_results, 2, backend) == ["no error"] * 2


# ---- the allocator -------------------------------------------------------------------------------------------------

_SIZE = 64
_STEPS = st.lists(st.tuples(st.integers(1, 24), st.booleans(), st.integers(0, 99)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(_STEPS)
def test_free_list_against_a_model(steps: list[tuple[int, bool, int]]) -> None:
    free_list = _FreeList(_SIZE)
    taken: dict[int, int] = {}
    cells = [False] * _SIZE  # the model: which unit is taken
    for length, from_top, choice in steps:
        if choice % 3 == 0 and taken:
            offset = sorted(taken)[choice % len(taken)]
            size = taken.pop(offset)
            cells[offset : offset + size] = [False] * size
            free_list.give(offset, size)
        else:
            fits = [i for i in range(_SIZE - length + 1) if not any(cells[i : i + length])]
            offset_or_none = free_list.take(length, from_top=from_top)
            assert offset_or_none == (None if not fits else fits[-1] if from_top else fits[0])
            if offset_or_none is not None:
                taken[offset_or_none] = length
                cells[offset_or_none : offset_or_none + length] = [True] * length
        assert free_list.free_bytes == cells.count(False)
    for offset, size in taken.items():
        free_list.give(offset, size)
    assert free_list.free_bytes == _SIZE
    assert free_list.take(_SIZE, from_top=False) == 0, "neighboring blocks were not merged"


# ---- the host backend's shared memory ------------------------------------------------------------------------------


@pytest.mark.host
def test_host_heaps_are_private_to_the_user_and_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    make = host._Segment.__init__

    def record(self: Any, fd: int, nbytes: int) -> None:
        status = os.fstat(fd)
        seen.append((stat.S_IMODE(status.st_mode), status.st_nlink, status.st_uid, status.st_size))
        make(self, fd, nbytes)

    monkeypatch.setattr(host._Segment, "__init__", record)
    names = set(os.listdir("/dev/shm"))

    def program() -> None:
        po.init("host", operator_timeout=20.0, heap_size=3 * MB)
        assert not {name for name in set(os.listdir("/dev/shm")) - names if "persistent" in name}
        po.finalize()

    po.launch(program, 2, threads=True, timeout=60)
    assert seen == [(0o600, 0, os.geteuid(), 3 * MB)] * 4


def _own_area_without_room(backend: str) -> list[Any]:
    """Of the PEs' own areas, only the last PE's does not fit."""
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    world = current()
    areas, contract = Areas(world, Plans(world, "barrier", 1)), _BARRIER.contract(world.team)
    free, seen = world.heap.free_list.free_bytes, []
    for own in (20 if po.rank() else 2, 2):
        try:
            areas.reserve([Need("small", MB)], lambda: contract, Need("own", own * MB))
            seen.append("room")
        except po.SymmetricHeapError as error:
            seen.append(str(error)[: len("room on PE 1")])
        seen.append((areas.nbytes_of("small"), areas.nbytes_of("own"), free - world.heap.free_list.free_bytes))
    po.finalize()
    return seen


def test_areas_of_which_one_pe_has_no_room_for_its_own_leave_nothing_behind(backend: str) -> None:
    wants = ["room on PE 1", (0, 0, 0), "room", (MB, 2 * MB, 3 * MB)]
    assert _run(_own_area_without_room, 2, backend) == [wants] * 2
