"""sparse_all_reduce_into: the entry for CUDA graphs. Row sets and counts that change, capacities, the torch operator.

What needs no graph runs on both backends, and the loop of replays runs eagerly on the host.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_cases import (
    INTO_ALGORITHMS,
    Case,
    Entries,
    Room,
    Rows,
    disjoint,
    expected,
    make_inputs,
    padded,
    rows_problem,
    taken_apart,
    to_sparse,
    uniform,
    wanted,
    where,
    zipf,
)
from worlds import in_world

import persistent_ops as po

MB = 1 << 20
_NUM_INPUTS = 5  # of an odd number of turns, so that inputs meet both parities of the epoch
_INSTANCES = [
    Case("graphs: uniform", 700, lambda d: torch.randint(d.rows, (1 + 23 * d.iteration,), generator=d.own), (16,)),
    Case("graphs: Zipf, bf16, mean", 99, zipf(90), (8,), torch.bfloat16, "mean", torch.int32),
    Case("graphs: now and then", 300, where(lambda d: (d.rank + d.iteration) % 3 > 0, uniform(30)), (), torch.float16),
]


def _pes(backend: str) -> int:
    return 3 if backend == "host" else max(2, min(4, torch.cuda.device_count()))


def _replays(backend: str) -> int:
    if backend == "host":
        return 51
    return 1001 if torch.cuda.device_count() > 1 else 301  # PEs that share a GPU take turns


class Instance:
    """A shape with buffers that keep their place, and with inputs and results of several iterations."""

    def __init__(self, case: Case, algorithm: str = "auto", first_iteration: int = 0) -> None:
        rank, world = po.rank(), po.world_size()
        self.case, self.algorithm = case, algorithm
        iterations = range(first_iteration, first_iteration + _NUM_INPUTS)
        inputs = [make_inputs(case, world, i) for i in iterations]
        self.wants = [wanted(case, world, i) for i in iterations]
        length = 3 + max(len(entries.indices) for of_all in inputs for entries in of_all)
        self.inputs = [padded(case, of_all[rank], length) for of_all in inputs]
        self.indices, self.values, self.count = (tensor.clone() for tensor in self.inputs[0])
        self.room = Room(max(len(want.indices) for want in self.wants), case.row_shape, case.dtype)

    def load(self, turn: int) -> None:
        for place, given in zip((self.indices, self.values, self.count), self.inputs[turn % _NUM_INPUTS], strict=True):
            place.copy_(given)

    def call(self) -> None:
        po.sparse_all_reduce_into(
            self.indices,
            self.values,
            num_rows=self.case.rows,
            **self.room.arguments(),  # type: ignore[arg-type]
            count=self.count,
            op=self.case.op,
            algorithm=self.algorithm,
        )

    def problem(self, turn: int) -> str | None:
        return self.room.problem(self.wants[turn % _NUM_INPUTS])


def _captured(program: Callable[[], Any]) -> Callable[[], None]:
    """Capture a program; what is returned replays it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        program()
    return graph.replay  # type: ignore[no-any-return]


# ---- replays ---------------------------------------------------------------------------------------------------------


def _replayed(replays: int) -> list[str]:
    problems: list[str] = []
    instances = [Instance(case, algorithm) for case in _INSTANCES for algorithm in INTO_ALGORITHMS]
    instances.append(Instance(_INSTANCES[0], "auto", 1))  # an odd number of launches in all

    def program() -> None:
        for instance in instances:
            instance.call()

    program()
    po.check()
    run = _captured(program) if po.backend() == "cuda" else program
    for turn in range(replays):
        for instance in instances:
            instance.load(turn)
            instance.room.reset()
        if (turn + po.rank()) % 17 == 0:
            time.sleep(0.002)
        run()
        for instance in instances:
            if (found := instance.problem(turn)) is not None:
                problems.append(f"turn {turn}, {instance.case.name}, {instance.algorithm}: {found}")
        if turn % 50 == 7:  # now and then eager calls between replays, an odd number too
            other = _INSTANCES[turn // 50 % 3]
            x = to_sparse(other, make_inputs(other, po.world_size(), 2)[po.rank()])
            output = po.sparse_all_reduce(x, op=other.op)
            if found := rows_problem(taken_apart(output), wanted(other, po.world_size(), 2), zeros_have_signs=False):
                problems.append(f"eager call after turn {turn}, {other.name}: {found}")
        if len(problems) > 20:
            break
    return problems


def test_a_thousand_replays_with_changing_rows_and_counts(backend: str) -> None:
    pes = _pes(backend)
    assert in_world(_replayed, pes, backend, _replays(backend), heap_size=128 * MB) == [[]] * pes


def _ready_for_capture(algorithm: str) -> list[str | None]:
    """Call each shape once, most of which need more room than the last, then all where nothing can be made any more."""
    cases = [Case(f"rows of {rows}", rows, uniform(rows // 3), (8,), torch.bfloat16) for rows in (90, 900, 9000, 300)]
    instances = [Instance(case, algorithm) for case in cases]
    for instance in instances:
        instance.call()
    po.check()
    workspace = po.runtime.world.current().workspace
    with pytest.MonkeyPatch.context() as patch:
        if po.backend() == "host":  # which has no captures
            patch.setattr(workspace, "is_capturing", lambda: True)
            run = functools.partial(_call_all, instances)
        else:
            run = _captured(functools.partial(_call_all, instances))
        for instance in instances:
            instance.load(1)
            instance.room.reset()
        run()
        return [instance.problem(1) for instance in instances]


def _call_all(instances: list[Instance]) -> None:
    for instance in instances:
        instance.call()


@pytest.mark.parametrize("algorithm", INTO_ALGORITHMS)
def test_one_call_of_each_shape_is_enough_before_a_capture(backend: str, algorithm: str) -> None:
    assert in_world(_ready_for_capture, 2, backend, algorithm) == [[None] * 4] * 2


def _two_graphs(replays: int) -> list[str]:
    """Replay two graphs and call other operators in an order that is not that of the capture."""
    problems: list[str] = []
    instances = [Instance(_INSTANCES[0], "owner"), Instance(_INSTANCES[1], "allgather", 1)]
    weight = torch.arange(24.0, device=po.device()).view(6, 4) + po.rank()
    ones = torch.ones(4, device=po.device())
    total = sum((torch.arange(24.0).view(6, 4) + pe).sum(1) for pe in range(po.world_size()))
    for instance in instances:
        instance.call()
    po.gemv_all_reduce(weight, ones)
    po.check()
    runs = [_captured(instance.call) for instance in instances]
    order = torch.Generator().manual_seed(11)  # the same on all PEs
    for turn in range(replays):
        kind = int(torch.randint(4, (), generator=order))
        if kind == 3:
            po.runtime.world.current().enqueue_barrier()
        elif kind == 2:
            if not torch.equal(po.gemv_all_reduce(weight, ones).cpu(), total):  # type: ignore[arg-type]
                problems.append(f"turn {turn}: gemv_all_reduce is wrong")
        else:
            instances[kind].load(turn)
            instances[kind].room.reset()
            runs[kind]()
            if (found := instances[kind].problem(turn)) is not None:
                problems.append(f"turn {turn}, graph {kind}: {found}")
    return problems


@pytest.mark.gpu
def test_graphs_and_other_operators_take_turns() -> None:
    pes = _pes("cuda")
    assert in_world(_two_graphs, pes, "cuda", _replays("cuda") // 5, heap_size=128 * MB) == [[]] * pes


def _two_streams() -> list[str]:
    problems: list[str] = []
    instances = [Instance(_INSTANCES[0], "owner"), Instance(_INSTANCES[1], "allgather", 1)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for instance in instances:
        instance.call()
    po.check()
    for turn in range(40):
        torch.cuda.synchronize()
        for i, (instance, stream) in enumerate(zip(instances, streams, strict=True)):
            with torch.cuda.stream(stream):
                if (turn + po.rank()) % 3 == i:
                    torch.cuda._sleep(2_000_000)  # PEs and streams drift
                instance.load(turn)
                instance.room.reset()
                instance.call()
        torch.cuda.synchronize()
        for i, instance in enumerate(instances):
            if (found := instance.problem(turn)) is not None:
                problems.append(f"turn {turn}, stream {i}: {found}")
    return problems


@pytest.mark.gpu
def test_two_instances_on_two_streams() -> None:
    pes = _pes("cuda")
    assert in_world(_two_streams, pes, "cuda", heap_size=128 * MB) == [[]] * pes


def _without_a_peer() -> dict[str, Any]:
    """A peer that does not replay: the others' replay ends, tells, and works again after recover()."""
    instance = Instance(_INSTANCES[0])
    instance.call()
    po.check()
    run = _captured(instance.call)
    seen: dict[str, Any] = {}

    def replay(turns: int) -> list[str | None]:
        problems = []
        for turn in range(turns):
            instance.load(turn)
            instance.room.reset()
            run()
            problems.append(instance.problem(turn))
        return problems

    seen["before"] = replay(3)
    if po.rank() != 1:
        run()
        try:
            po.check()
        except po.PeerTimeoutError as error:
            seen["error"] = str(error)
        seen["poisoned"] = bool(instance.room.values.isnan().all())
    else:
        time.sleep(4.0)  # until the other has given up, since recover() waits no longer than that for it
    po.recover()
    seen["after"] = replay(3)
    return seen


@pytest.mark.gpu
def test_a_replay_without_a_peer_ends() -> None:
    results = in_world(_without_a_peer, 2, "cuda", operator_timeout=4.0)
    for seen in results:
        assert seen["before"] == seen["after"] == [None] * 3
    assert "PE 1" in results[0]["error"] and results[0]["poisoned"]


def _too_many_rows_in_a_replay() -> list[str]:
    """A replay whose union outgrows the room tells so, and the next one is right."""
    problems = []
    instance = Instance(_INSTANCES[0], "owner")
    length = len(instance.indices)
    more = Entries(torch.arange(length) + length * po.rank(), torch.ones(length, 16))
    union = length * po.world_size()
    assert union > len(instance.room.indices)
    instance.call()
    po.check()
    run = _captured(instance.call)
    for turn in range(6):
        instance.load(turn)
        instance.room.reset()
        if turn % 2:
            instance.indices.copy_(more.indices)
            instance.values.copy_(more.values)
            instance.count.fill_(length)
            run()
            with pytest.raises(po.CapacityError, match=f"{union} rows"):
                po.check()
            problems.append(instance.room.problem(Rows(torch.arange(union), more.values), is_full=True))
        else:
            run()
            po.check()
            problems.append(instance.problem(turn))
    return [f"turn {turn}: {found}" for turn, found in enumerate(problems) if found is not None]


@pytest.mark.gpu
def test_capacity_exceeded_in_a_replay() -> None:
    pes = _pes("cuda")
    assert in_world(_too_many_rows_in_a_replay, pes, "cuda") == [[]] * pes


def _capture_needs_a_call_before() -> list[str]:
    instance = Instance(_INSTANCES[0])
    problems = []
    for attempt in range(2):
        try:
            _captured(instance.call)
        except RuntimeError as error:
            if "call it once before the capture" not in str(error):
                problems.append(f"attempt {attempt}: {error}")
        else:
            problems.append(f"attempt {attempt}: no error")
    instance.room.reset()
    instance.call()
    problems.append(instance.problem(0) or "")
    run = _captured(instance.call)
    for turn in (2, 3, 4):
        instance.load(turn)
        instance.room.reset()
        run()
        problems.append(instance.problem(turn) or "")
    return [problem for problem in problems if problem]


@pytest.mark.gpu
def test_first_call_inside_a_capture_is_refused() -> None:
    assert in_world(_capture_needs_a_call_before, 1, "cuda") == [[]]


def _captured_without_buffers() -> list[str]:
    """What the host must know the size of cannot be captured, and is none the worse for the attempt."""
    problems = []
    case = _INSTANCES[0]
    x = to_sparse(case, make_inputs(case, 1, 1)[0])
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: po.sparse_all_reduce(x),
        "asynchronous": lambda: po.sparse_all_reduce(x, async_op=True),
    }
    for known in (False, True):
        for name, call in calls.items():
            try:
                _captured(call)
            except RuntimeError as error:
                if "capture sparse_all_reduce_into" not in str(error):
                    problems.append(f"{name}, known {known}: {error}")
            else:
                problems.append(f"{name}, known {known}: no error")
        if rows_problem(taken_apart(po.sparse_all_reduce(x)), wanted(case, 1, 1), zeros_have_signs=False):
            problems.append(f"known {known}: an eager call after it is wrong")
    return problems


@pytest.mark.gpu
def test_a_capture_of_the_entry_without_buffers_is_refused() -> None:
    assert in_world(_captured_without_buffers, 1, "cuda") == [[]]


# ---- capacity --------------------------------------------------------------------------------------------------------


def _capacities() -> list[str]:
    problems = []
    rank, world = po.rank(), po.world_size()
    for dtype, index_dtype in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        room = Room(100, (8,), dtype)
        case = Case("capacity", 600, uniform(0), (8,), dtype, index_dtype=index_dtype)
        for algorithm in INTO_ALGORITHMS:
            # Fewer rows follow too many, and too many follow too many.
            for turn, union in enumerate((40, 130, 100, 101, 600, 0, 131, 99)):
                rows = torch.randperm(600, generator=torch.Generator().manual_seed(turn))[:union]
                inputs = []
                for pe in range(world):  # each PE has a part of the rows, and some of the others'
                    own = torch.cat([rows[pe::world], rows[: union // 3]])
                    rng = torch.Generator().manual_seed(10 * turn + pe)
                    inputs.append(Entries(own, torch.randn(len(own), 8, generator=rng).to(dtype)))
                want = expected(inputs)
                indices, values, _ = padded(case, inputs[rank], len(inputs[rank].indices))
                room.reset()
                text = "no error"
                try:
                    po.sparse_all_reduce_into(indices, values, num_rows=600, algorithm=algorithm, **room.arguments())  # type: ignore[arg-type]
                    po.check()
                except po.CapacityError as error:
                    text = str(error)
                wanted_text = (
                    "no error" if union <= 100 else f"{union} rows together, capacity 100: {union - 100} too many"
                )
                found = room.problem(want, is_full=union > 100)
                if wanted_text not in text:
                    found = f"{text!r}, expected {wanted_text!r}; {found}"
                if found is not None:
                    problems.append(f"{dtype}, {algorithm}, turn {turn}, union of {union}: {found}")
        room.free()
    return problems


TRANSPORTS = [
    pytest.param({}, id="direct"),
    pytest.param({"transport": "staged"}, id="staged", marks=pytest.mark.host),
    pytest.param({"host_options": {"wg_size": 4}}, id="wg4", marks=pytest.mark.host),
]


@pytest.mark.parametrize("options", TRANSPORTS)
def test_capacity_exceeded(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_capacities, 3, backend, **options) == [[]] * 3


def _no_capacity() -> list[str]:
    """Room for no rows is enough for none."""
    problems = []
    room = Room(0, (4,), torch.float32)
    for algorithm in INTO_ALGORITHMS:
        for nnz in (0, 1, 0):
            entries = Entries(torch.arange(nnz) + 7, torch.ones(nnz, 4))
            room.reset()
            text = "no error"
            try:
                indices, values = (tensor.to(po.device()) for tensor in entries)
                po.sparse_all_reduce_into(indices, values, num_rows=9, algorithm=algorithm, **room.arguments())  # type: ignore[arg-type]
                po.check()
            except po.CapacityError as error:
                text = str(error)
            found = room.problem(expected([entries] * po.world_size()), is_full=nnz > 0)
            if found is not None or ("1 rows together, capacity 0: 1 too many" in text) != bool(nnz):
                problems.append(f"{algorithm}, nnz {nnz}: {text}; {found}")
    room.free()
    return problems


def test_no_capacity(backend: str) -> None:
    assert in_world(_no_capacity, 2, backend) == [[], []]


def _buffers_of_one_call() -> list[bool]:
    """Return whether the buffers of calls live on that were made with new ones each time."""
    entries = torch.tensor([1, 2], device=po.device()), torch.ones(2, 4, device=po.device())
    out_values = po.empty(8, 4)
    seen = []
    for _ in range(4):
        out_indices, out_count, count = (torch.ones(n, dtype=torch.int64, device=po.device()) for n in (8, 1, 1))
        po.sparse_all_reduce_into(
            *entries, num_rows=8, out_indices=out_indices, out_values=out_values, out_count=out_count, count=count
        )
        seen += [weakref.ref(tensor) for tensor in (out_indices, out_count, count)]
        del out_indices, out_count, count
    po.check()
    gc.collect()
    return [reference() is not None for reference in seen]


def test_buffers_live_no_longer_than_their_owner_wants(backend: str) -> None:
    assert in_world(_buffers_of_one_call, 2, backend) == [[False] * 12] * 2


def _pending() -> list[str]:
    """The next operator tells what the last one met, where nobody has asked before."""
    case = Case("pending", 64, disjoint(20), (4,))
    inputs = make_inputs(case, po.world_size(), 0)
    room = Room(10, (4,), torch.float32)
    indices, values, _ = padded(case, inputs[po.rank()], len(inputs[po.rank()].indices))
    po.sparse_all_reduce_into(indices, values, num_rows=64, **room.arguments())  # type: ignore[arg-type]
    torch.cuda.synchronize()
    with pytest.raises(po.CapacityError, match="40 rows together, capacity 10: 30 too many"):
        po.sparse_all_reduce_into(indices, values, num_rows=64, **room.arguments())  # type: ignore[arg-type]
    with pytest.raises(po.CapacityError, match="30 too many"):
        po.check()  # of the second call
    result = taken_apart(po.sparse_all_reduce(to_sparse(case, inputs[po.rank()])))
    found = rows_problem(result, expected(inputs), zeros_have_signs=False)
    return [] if found is None else [found]


@pytest.mark.gpu
def test_the_next_operator_raises_what_the_last_one_met() -> None:
    assert in_world(_pending, 2, "cuda") == [[], []]


# ---- the operator behind torch.ops -----------------------------------------------------------------------------------


def _opcheck() -> dict[str, str]:
    """opcheck passes copies of all tensors, which are symmetric only where they have no elements."""
    results: dict[str, str] = {}
    device = po.device()
    operator = torch.ops.persistent_ops.sparse_all_reduce_into.default
    for name, index_dtype, count in (("", torch.int64, None), ("count", torch.int32, torch.tensor([3], device=device))):
        arguments = (torch.tensor([5, 2, 5, 1], dtype=index_dtype, device=device), torch.ones(4, 0, device=device))
        options = {
            "out_indices": torch.zeros(6, dtype=torch.int64, device=device),
            "out_values": torch.zeros(6, 0, device=device),
            "out_count": torch.zeros(1, dtype=torch.int64, device=device),
        }
        checked = torch.library.opcheck(
            operator, (*arguments, 10, count, "sum", "owner"), options, raise_exception=False
        )
        results |= {f"{name} {each}": str(result) for each, result in checked.items()}
    return results


def test_opcheck(backend: str) -> None:
    results = in_world(_opcheck, 1, backend)[0]
    assert len(results) >= 8 and set(results.values()) == {"SUCCESS"}, results


def test_the_schema_declares_what_is_written() -> None:
    schema = torch.ops.persistent_ops.sparse_all_reduce_into.default._schema
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    assert written == {"out_indices", "out_values", "out_count"} and not schema.returns


def _operator_and_function() -> list[str]:
    problems = []
    for number, case in enumerate(_INSTANCES):
        instance = Instance(case, "owner")
        for turn in range(3):
            instance.load(turn)
            instance.room.reset()
            with torch.inference_mode() if turn == 1 else torch.enable_grad():
                nothing = torch.ops.persistent_ops.sparse_all_reduce_into(
                    instance.indices,
                    instance.values,
                    case.rows,
                    instance.count,
                    case.op,
                    INTO_ALGORITHMS[number % 2],
                    **instance.room.arguments(),
                )
            po.check()
            found = instance.problem(turn)
            if found is not None or nothing is not None:
                problems.append(f"{case.name}, turn {turn}: {found}, returned {nothing}")
    return problems


def test_the_operator_and_the_function_are_the_same(backend: str) -> None:
    assert in_world(_operator_and_function, 2, backend) == [[], []]
