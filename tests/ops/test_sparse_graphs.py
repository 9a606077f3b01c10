"""sparse_all_reduce_into, the entry for CUDA graphs: changing row sets and counts, capacities, the torch operator.

Its graphs are tested like every operator's graphs (graphs.py).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from checks import Checks
from graphs import NUM_INPUTS, Call, Graph, GraphSuite, world_size
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
from torch_checks import opcheck_problems, written_by
from worlds import in_world

import persistent_ops as po

_INSTANCES = [
    Case("graphs: uniform", 700, lambda d: torch.randint(d.rows, (1 + 23 * d.iteration,), generator=d.own), (16,)),
    Case("graphs: Zipf, bf16, mean", 99, zipf(90), (8,), torch.bfloat16, "mean", torch.int32),
    Case("graphs: now and then", 300, where(lambda d: (d.rank + d.iteration) % 3 > 0, uniform(30)), (), torch.float16),
]


class Into(Call):
    """A call of sparse_all_reduce_into. Its buffers for results keep their addresses too."""

    def __init__(self, case: Case, way: str, first_iteration: int = 0) -> None:
        rank, world = po.rank(), po.world_size()
        iterations = range(first_iteration, first_iteration + NUM_INPUTS)
        inputs = [make_inputs(case, world, i) for i in iterations]
        self.case, self._rows = case, [wanted(case, world, i) for i in iterations]
        length = 3 + max(len(entries.indices) for of_all in inputs for entries in of_all)
        self.room = Room(max(len(want.indices) for want in self._rows), case.row_shape, case.dtype)
        given = [padded(case, of_all[rank], length) for of_all in inputs]
        super().__init__(case.name, way, self._into, given, [[]] * NUM_INPUTS)
        self.indices, self.values, self.count = self._buffers

    def _into(self, indices: torch.Tensor, values: torch.Tensor, count: torch.Tensor, *, way: str) -> list[Any]:
        po.sparse_all_reduce_into(
            indices,
            values,
            num_rows=self.case.rows,
            **self.room.arguments(),  # type: ignore[arg-type]
            count=count,
            op=self.case.op,
            algorithm=way,
        )
        return [self.room.values]

    def load(self, turn: int) -> None:
        super().load(turn)
        self.room.reset()

    def clear(self, results: object, value: float = 0.0) -> None:
        """Loading new inputs clears the room."""

    def problem(self, results: object, turn: int) -> str | None:
        return self.room.problem(self._rows[turn % NUM_INPUTS])

    def check(self, checks: Checks, results: object, turn: int) -> None:
        checks.tell(f"turn {turn}, {self.name}", self.problem(results, turn))


class Sparse(Call):
    """A call of sparse_all_reduce. No graph knows the size of its result."""

    def __init__(self, case: Case) -> None:
        inputs = make_inputs(case, po.world_size(), 2)
        self._x, self._want = to_sparse(case, inputs[po.rank()]), wanted(case, po.world_size(), 2)
        super().__init__(case.name, "auto", self._sum, [[]] * NUM_INPUTS, [[]] * NUM_INPUTS)
        self._op = case.op

    def _sum(self, *, way: str) -> torch.Tensor:
        return po.sparse_all_reduce(self._x, op=self._op, algorithm=way)  # type: ignore[return-value]

    def problem(self, results: Sequence[torch.Tensor], turn: int) -> str | None:
        return rows_problem(taken_apart(results[0]), self._want, zeros_have_signs=False)

    def check(self, checks: Checks, results: Sequence[torch.Tensor], turn: int) -> None:
        checks.tell(f"turn {turn}, {self.name}", self.problem(results, turn))


class TestGraphs(GraphSuite):
    operator = "sparse_all_reduce_into"
    cases = tuple(_INSTANCES)
    ways = INTO_ALGORITHMS
    growing: ClassVar = [
        Case(f"rows of {rows}", rows, uniform(rows // 3), (8,), torch.bfloat16) for rows in (90, 900, 9000, 300)
    ]

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        return Into(case, way)

    @classmethod
    def more_calls(cls) -> list[Call]:
        return [Into(_INSTANCES[0], "auto", 1)]

    @classmethod
    def eager_calls(cls) -> list[Call]:
        return [Sparse(case) for case in _INSTANCES]


# ---- errors of a graph -----------------------------------------------------------------------------------------------


def _too_many_rows_in_a_replay() -> list[str]:
    """A replay whose union exceeds the room reports this, and the next replay is right."""
    problems = []
    call = Into(_INSTANCES[0], "owner")
    length = len(call.indices)
    more = Entries(torch.arange(length) + length * po.rank(), torch.ones(length, 16))
    union = length * po.world_size()
    assert union > len(call.room.indices)
    call.run()
    po.check()
    graph = Graph(call.run)
    for turn in range(6):
        call.load(turn)
        if turn % 2:
            call.indices.copy_(more.indices)
            call.values.copy_(more.values)
            call.count.fill_(length)
            graph.replay()
            with pytest.raises(po.CapacityError, match=f"{union} rows"):
                po.check()
            problems.append(call.room.problem(Rows(torch.arange(union), more.values), is_full=True))
        else:
            graph.replay()
            po.check()
            problems.append(call.problem((), turn))
    return [f"turn {turn}: {found}" for turn, found in enumerate(problems) if found is not None]


@pytest.mark.gpu
def test_capacity_exceeded_in_a_replay() -> None:
    pes = world_size("cuda")
    assert in_world(_too_many_rows_in_a_replay, pes, "cuda") == [[]] * pes


def _captured_without_buffers() -> list[str]:
    """A call whose size the host must know cannot be captured. It works after the attempt."""
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
                Graph(call)
            except RuntimeError as error:
                if "capture sparse_all_reduce_into" not in str(error):
                    problems.append(f"{name}, known {known}: {error}")
            else:
                problems.append(f"{name}, known {known}: no error")
        if rows_problem(taken_apart(po.sparse_all_reduce(x)), wanted(case, 1, 1), zeros_have_signs=False):
            problems.append(f"known {known}: an eager call after it is wrong")
    return problems


def test_a_capture_of_the_entry_without_buffers_is_refused(backend: str) -> None:
    assert in_world(_captured_without_buffers, 1, backend) == [[]]


# ---- capacity --------------------------------------------------------------------------------------------------------


def _capacities() -> list[str]:
    problems = []
    rank, world = po.rank(), po.world_size()
    for dtype, index_dtype in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32)):
        room = Room(100, (8,), dtype)
        case = Case("capacity", 600, uniform(0), (8,), dtype, index_dtype=index_dtype)
        for algorithm in INTO_ALGORITHMS:
            # Fewer rows follow too many rows, and too many follow too many.
            for turn, union in enumerate((40, 130, 100, 101, 600, 0, 131, 99)):
                rows = torch.randperm(600, generator=torch.Generator().manual_seed(turn))[:union]
                inputs = []
                for pe in range(world):  # each PE has its own rows, and some rows of the others
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
                    "no error"
                    if union <= 100
                    else f"{union} rows together, but the capacity is 100: {union - 100} too many"
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


def _buffers_of_one_call() -> list[bool]:
    """Return whether buffers still exist after calls, each of which was made with new buffers."""
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
    """The next operator raises the last operator's error, if nobody has asked before."""
    case = Case("pending", 64, disjoint(20), (4,))
    inputs = make_inputs(case, po.world_size(), 0)
    room = Room(10, (4,), torch.float32)
    indices, values, _ = padded(case, inputs[po.rank()], len(inputs[po.rank()].indices))
    po.sparse_all_reduce_into(indices, values, num_rows=64, **room.arguments())  # type: ignore[arg-type]
    torch.cuda.synchronize()
    with pytest.raises(po.CapacityError, match="40 rows together, but the capacity is 10: 30 too many"):
        po.sparse_all_reduce_into(indices, values, num_rows=64, **room.arguments())  # type: ignore[arg-type]
    with pytest.raises(po.CapacityError, match="30 too many"):
        po.check()  # the second call's error
    result = taken_apart(po.sparse_all_reduce(to_sparse(case, inputs[po.rank()])))
    found = rows_problem(result, expected(inputs), zeros_have_signs=False)
    return [] if found is None else [found]


@pytest.mark.gpu
def test_the_next_operator_raises_what_the_last_one_met() -> None:
    assert in_world(_pending, 2, "cuda") == [[], []]


# ---- the operator in torch.ops ---------------------------------------------------------------------------------------


def _opcheck() -> list[str]:
    """opcheck passes copies of all tensors, which are symmetric only where they have no elements."""
    device, calls = po.device(), {}
    for name, index_dtype, count in (
        ("all", torch.int64, None),
        ("count", torch.int32, torch.tensor([3], device=device)),
    ):
        entries = torch.tensor([5, 2, 5, 1], dtype=index_dtype, device=device), torch.ones(4, 0, device=device)
        written = {
            "out_indices": torch.zeros(6, dtype=torch.int64, device=device),
            "out_values": torch.zeros(6, 0, device=device),
            "out_count": torch.zeros(1, dtype=torch.int64, device=device),
        }
        arguments = (*entries, 10, count, "sum", "owner")
        calls[name] = (torch.ops.persistent_ops.sparse_all_reduce_into, arguments, written)
    return opcheck_problems(calls)


def test_opcheck(backend: str) -> None:
    assert in_world(_opcheck, 1, backend) == [[]]


def test_the_schema_declares_what_is_written() -> None:
    schema = torch.ops.persistent_ops.sparse_all_reduce_into.default._schema
    assert set(written_by(schema)) == {"order", "out_indices", "out_values", "out_count"} and not schema.returns


def _operator_and_function() -> list[str]:
    problems = []
    for number, case in enumerate(_INSTANCES):
        instance = Into(case, "owner")
        for turn in range(3):
            instance.load(turn)
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
            found = instance.problem((), turn)
            if found is not None or nothing is not None:
                problems.append(f"{case.name}, turn {turn}: {found}, returned {nothing}")
    return problems


def test_the_operator_and_the_function_are_the_same(backend: str) -> None:
    assert in_world(_operator_and_function, 2, backend) == [[], []]
