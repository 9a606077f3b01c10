"""sparse_all_reduce in flight: handles of asynchronous calls, and the life of their results."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from sparse_cases import (
    ALGORITHMS,
    Case,
    disjoint,
    form_problem,
    identical,
    make_inputs,
    rows_problem,
    taken_apart,
    to_sparse,
    uniform,
    wanted,
)
from worlds import TRANSPORTS, error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops import sparse_plan
from persistent_ops.ops.sparse_all_reduce import start_sum
from persistent_ops.ops.sparse_plan import Layout, Room, state_of
from persistent_ops.runtime import heap

# ---- handles ---------------------------------------------------------------------------------------------------------

_FLIGHT = [
    Case("flight: fp32", 400, uniform(60, 90), (16,)),
    Case("flight: bf16, mean", 64, uniform(50, 30), (5,), torch.bfloat16, "mean"),
    Case("flight: nothing on rank 0", 200, uniform(0, 25), ()),
    Case("flight: fp16", 999, disjoint(80), (2, 4), torch.float16),
    Case("flight: fp32 again", 400, identical(120), (16,)),
]


def _in_flight() -> list[str]:
    problems = []
    rank, world = po.rank(), po.world_size()
    first: dict[str, po.Work[torch.Tensor]] = {}
    for iteration in range(8):
        works = []
        for number, case in enumerate(_FLIGHT):
            x = to_sparse(case, make_inputs(case, world, iteration % 6)[rank])
            if (rank + number + iteration) % 4 == 0:
                time.sleep(0.002)
            algorithm = ("auto", *ALGORITHMS)[(number + iteration) % 4]
            works.append((case, algorithm, po.sparse_all_reduce(x, op=case.op, algorithm=algorithm, async_op=True)))
            shape = x._values().shape
            del x
            # Only the operator holds the input now. Other memory of its size, written at once, must not be its.
            torch.full(shape, float("nan"), dtype=case.dtype, device=po.device())
        if iteration % 3 == 1:
            po.barrier()
        order = works if iteration % 2 else works[::-1]  # the same on all PEs
        for case, algorithm, work in order:
            result = work.wait()
            want = wanted(case, world, iteration % 6)
            found = form_problem(result, case)
            found = found or rows_problem(taken_apart(result), want, zeros_have_signs=False)
            deadline = time.monotonic() + 20
            while not work.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            if not work.done():
                found = found or "not completed, though its result was read"
            if work.wait() is not result:
                found = found or "a second wait() returns another tensor"
            if found is not None:
                problems.append(f"iteration {iteration}, {case.name}, {algorithm}: {found}")
        if iteration == 0:
            first = {case.name: work for case, _, work in works}
    for case in _FLIGHT:
        if rows_problem(taken_apart(first[case.name].wait()), wanted(case, world, 0), zeros_have_signs=False):
            problems.append(f"{case.name}: a result changed while its handle was held")
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_several_in_flight(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_in_flight, 3, backend, **options) == [[]] * 3


def _counted_launches() -> list[int]:
    """Return a list to which every launch of this PE adds its plan."""
    workspace, seen = po.runtime.world.current().workspace, []
    launch = workspace.launch

    def counted(kernel: Any, grid: int, plan: int, words: Any, **options: Any) -> None:
        seen.append(plan)
        launch(kernel, grid, plan, words, **options)

    workspace.launch = counted
    return seen


def _of_many_sizes() -> dict[str, int]:
    """Sums of one layout, with unions of very different sizes in turn: the number of launches that they took."""
    rank, world = po.rank(), po.world_size()
    cases = [Case(f"sizes {count}", 5000, uniform(count), (8,)) for count in (900, 5, 60)]
    xs = [to_sparse(case, make_inputs(case, world, 0)[rank]) for case in cases]
    for x in xs:
        po.sparse_all_reduce(x)
    seen = _counted_launches()
    for x, case in list(zip(xs, cases, strict=True)) * 8:
        result = taken_apart(po.sparse_all_reduce(x))
        assert rows_problem(result, wanted(case, world, 0), zeros_have_signs=False) is None
    counts = {"launches": len(seen)}
    for _ in range(40):
        po.sparse_all_reduce(xs[1])
    room = state_of(po.runtime.world.current()).rooms[Layout(5000, (8,), torch.float32, "sum"), 0]
    return counts | {"room": room.rows}


def test_sizes_that_differ_do_not_launch_twice(backend: str) -> None:
    # A few small results in between do not free the room of large ones. Many in a row do.
    assert in_world(_of_many_sizes, 2, backend) == [{"launches": 24, "room": 128}] * 2


def test_room_for_large_results_shrinks_at_once() -> None:
    layout = Layout(1 << 20, (64,), torch.float32, "sum")
    room = Room(layout)
    room.learn(400_000, 1.0)
    assert room.rows == 425_024
    room.learn(210_000, 1.0)
    assert room.rows == 425_024, "more than half was needed"
    room.learn(100_000, 1.5)
    assert (room.rows, room.shares) == (106_304, 1.5)


def _bad_row_ends_a_loop(algorithm: str) -> dict[str, Any]:
    """A bad row on PE 0 ends its loop over handles, and PE 0 drops them. PE 1 waits for all of its handles."""
    rank, world = po.rank(), po.world_size()
    cases = [Case(f"loop {number}", 400, uniform(60), (4,)) for number in range(3)]
    seen: dict[str, Any] = {"error": "", "problems": []}
    for step in range(3):
        inputs = [make_inputs(case, world, step)[rank] for case in cases]
        if step == 1 and rank == 0:
            inputs[0].indices[0] = 400
        works = [
            po.sparse_all_reduce(to_sparse(case, entries), algorithm=algorithm, async_op=True)
            for case, entries in zip(cases, inputs, strict=True)
        ]
        try:
            results = [work.wait() for work in works]
        except IndexError as error:
            seen["error"], seen["again"] = str(error), error_of(works[0].wait)[1]
            continue
        if step != 1:
            found = [
                rows_problem(taken_apart(result), wanted(case, world, step), zeros_have_signs=False)
                for case, result in zip(cases, results, strict=True)
            ]
            seen["problems"] += [problem for problem in found if problem is not None]
        del works, results
    return seen


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_a_bad_row_that_ends_a_loop_over_handles(backend: str, algorithm: str) -> None:
    first, second = in_world(_bad_row_ends_a_loop, 2, backend, algorithm)
    assert "row 400" in first["error"] == first["again"] and second["error"] == ""
    assert first["problems"] == second["problems"] == []


def _too_large() -> list[str]:
    """A union that does not fit in the heap fails. Smaller unions after it do not fail."""
    rank, world = po.rank(), po.world_size()
    small, large = Case("small", 60_000, uniform(50), (128,)), Case("large", 60_000, uniform(50_000), (128,))
    said = []
    for case in (small, large, small, large, small):
        x = to_sparse(case, make_inputs(case, world, 0)[rank])
        try:
            result = taken_apart(po.sparse_all_reduce(x))
            said.append(str(rows_problem(result, wanted(case, world, 0), zeros_have_signs=False)))
        except po.SymmetricHeapError:
            said.append("no room")
    return said


def test_a_union_too_large_for_the_heap(backend: str) -> None:
    found = in_world(_too_large, 2, backend, heap_size=16 << 20)
    assert found == [["None", "no room", "None", "no room", "None"]] * 2


def _over_and_over(step: int) -> list[str]:
    """Sums of one layout. Each next sum starts before the host waits for the previous one."""
    problems = []
    rank, world = po.rank(), po.world_size()
    works = []
    for number, count in enumerate((40, 700, 3, 40)):
        case = Case(f"over {number}", 3000, uniform(count), (6,))
        x = to_sparse(case, make_inputs(case, world, step)[rank])
        works.append((case, po.sparse_all_reduce(x, async_op=True)))
    rooms = state_of(po.runtime.world.current()).rooms
    left = sum(room.unresolved is not None for room in rooms.values())
    if left != 1:
        problems.append(f"{left} sums of a layout are unresolved")
    for case, work in works:
        found = rows_problem(taken_apart(work.wait()), wanted(case, world, step), zeros_have_signs=False)
        if found is not None:
            problems.append(f"{case.name}: {found}")
    return problems


def _dropped_handles() -> list[str]:
    """Handles without a wait hold one result per layout. PEs that waited continue with PEs that did not."""
    problems = []
    rank, world = po.rank(), po.world_size()
    for step in range(6):
        case = Case(f"dropped {step}", 3000, uniform(30 + 200 * (step % 2)), (6,))
        x = to_sparse(case, make_inputs(case, world, step)[rank])
        work = po.sparse_all_reduce(x, async_op=True)
        if step % 3 == 2 and rank == 0:
            work.wait()
        del work
        problems += _over_and_over(step)
    return problems


def test_dropped_handles(backend: str) -> None:
    assert in_world(_dropped_handles, 2, backend) == [[], []]


def _many_layouts() -> list[Any]:
    """Sums of more layouts than are remembered. Handles of forgotten layouts work like others."""
    rank, world = po.rank(), po.world_size()
    problems, works, most = [], [], 0
    for number in range(11):
        case = Case(f"layout {number}", 400 + number, uniform(100), (4,))
        x = to_sparse(case, make_inputs(case, world, 0)[rank])
        works.append((case, po.sparse_all_reduce(x, async_op=True)))
        most = max(most, len(state_of(po.runtime.world.current()).rooms))
    for case, work in works:
        found = rows_problem(taken_apart(work.wait()), wanted(case, world, 0), zeros_have_signs=False)
        if found is not None:
            problems.append(f"{case.name}: {found}")
    return [most, problems]


def _of_few_rooms(backend: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_plan, "MAX_ROOMS", 4)
        po.init(backend, operator_timeout=30.0, heap_size=64 << 20)
        try:
            found = _many_layouts()
            po.check()
            po.barrier()  # PEs that are threads share the limit
            return found
        finally:
            po.finalize()


def test_layouts_are_forgotten_when_there_are_too_many(backend: str) -> None:
    assert run_pes(_of_few_rooms, 2, backend, timeout=200) == [[4, []]] * 2


class _Stream:
    """Replaces a CUDA stream: stores what it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Any] = []
        self.cuda_stream = id(self)

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)

    def wait_stream(self, stream: Any) -> None:
        self.awaited.append(stream)


class _Ended:
    def query(self) -> bool:
        return True


def _read_on_other_streams() -> list[bool]:
    """A result that two streams have waited for, as on a GPU. The next writer of its buffer waits for both."""
    case = _FLIGHT[0]
    world = po.runtime.world.current()
    x = to_sparse(case, make_inputs(case, po.world_size(), 0)[po.rank()])
    po.sparse_all_reduce(x)
    pending: Any = start_sum(x, "sum")
    side, first, second = _Stream(), _Stream(), _Stream()
    pending._ended, pending._stream = _Ended(), side
    with pytest.MonkeyPatch.context() as patch:
        for stream in (side, first, second, second):
            patch.setattr(torch.cuda, "current_stream", lambda *_, stream=stream: stream)
            pending.wait()
        slot, own = pending._slot, world.backend.stream()
        waited = [first.awaited == [pending._ended], bool(second.awaited), not side.awaited]
        patch.setattr(torch.cuda, "current_stream", lambda *_: side)
        patch.setattr(heap, "capture_of", lambda stream: int(stream == second.cuda_stream))
        taken = [world.outputs.take(slot.nbytes, own, is_captured=False) is slot]  # it is held
        del pending
        taken.append(world.outputs.take(slot.nbytes, own, is_captured=False) is slot)  # a reader is being captured
        patch.setattr(heap, "capture_of", lambda stream: 0)
        taken.append(world.outputs.take(slot.nbytes, own, is_captured=False) is slot)
    return [*waited, *taken, len(side.awaited) == 2 and {*side.awaited} == {first, second}, not slot.readers]


def _in_one_world_of_the_host() -> list[bool]:
    po.init("host", heap_size=32 << 20)
    try:
        return _read_on_other_streams()
    finally:
        po.finalize()


def test_the_next_result_waits_for_all_who_read_the_last_one() -> None:
    expected = [True] * 3 + [False, False, True] + [True] * 2
    assert po.launch(_in_one_world_of_the_host, 1, threads=True, timeout=60) == [expected]


def _added_to_nothing() -> list[bool]:
    """Gradients are accumulated by in-place addition. The existing tensor may be a sum without rows."""
    equal = []
    for rows in (3, 300):
        nothing = torch.empty(1, 0, dtype=torch.int64, device=po.device())
        values = torch.ones(rows, 2, 4, device=po.device())
        shape = (4000, 2, 4)
        empty = torch.sparse_coo_tensor(nothing, values[:0], shape, check_invariants=False, is_coalesced=True)
        some = torch.sparse_coo_tensor(
            torch.arange(rows, device=po.device())[None], values, shape, check_invariants=False, is_coalesced=True
        )
        for total in (po.sparse_all_reduce(empty), po.sparse_all_reduce(empty, async_op=True).wait()):
            total += some
            other = po.sparse_all_reduce(some)
            equal.append(torch.equal(total.to_dense(), some.to_dense()) and total._nnz() == rows == other._nnz())
    return equal


def test_a_sum_without_rows_can_be_added_to(backend: str) -> None:
    assert in_world(_added_to_nothing, 2, backend) == [[True] * 4] * 2
