"""sparse_all_reduce: exact bits over worlds, transports and row sets; special values; memory of results."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from sparse_cases import (
    ALGORITHMS,
    CASES,
    FEW,
    INTO_ALGORITHMS,
    WAYS,
    Case,
    Entries,
    Room,
    Rows,
    SparseTrial,
    bound_problem,
    call_into,
    distinct,
    draw_values,
    edges,
    expected,
    form_problem,
    make_inputs,
    rows_problem,
    taken_apart,
    to_sparse,
    uniform,
    wanted,
    zeros_have_signs,
)
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.sparse_all_reduce import reference

MB = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_SMALL = [case for case in FEW if case.rows <= 100]


class TestBits(BitsSuite):
    trial = SparseTrial
    halved_by = torch.float32
    # The host's staged transport delays and reorders. Several threads per WG share its rows, as warps do on a GPU.
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, FEW),
        "4": CaseWorld(4, CASES),
        "5": CaseWorld(5, FEW),
        "8": CaseWorld(8, FEW),
        "2-staged": CaseWorld(2, FEW[::2], {"transport": "staged"}),
        "3-staged-slow": CaseWorld(3, _SMALL[::3], {"transport": "staged", "host_options": {"network_delay_us": 1000}}),
        "2-wg4": CaseWorld(2, FEW[::2], {"host_options": {"wg_size": 4}}),
        "3-wg3": CaseWorld(3, FEW[1::4], {"host_options": {"wg_size": 3}}),
        "2-wg5-staged": CaseWorld(2, FEW[3::6], {"transport": "staged", "host_options": {"wg_size": 5}}),
    }


# ---- the model -------------------------------------------------------------------------------------------------------


def _one_by_one(inputs: list[Entries], op: str) -> Rows:
    """Add up in the order that the operator documents, one entry at a time."""
    of_row: dict[int, torch.Tensor] = {}
    for indices, values in inputs:
        of_pe: dict[int, torch.Tensor] = {}
        for index, value in zip(indices.tolist(), values.float(), strict=True):
            of_pe[index] = of_pe[index] + value if index in of_pe else value
        for index, value in of_pe.items():
            of_row[index] = of_row[index] + value if index in of_row else value
    rows = sorted(of_row)
    sums = torch.stack([of_row[row] for row in rows])
    if op == "mean":
        sums = sums / torch.tensor(float(len(inputs)))
    return Rows(torch.tensor(rows), sums.to(inputs[0].values.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_model_adds_in_the_stated_order(dtype: torch.dtype, op: str) -> None:
    case = Case("model", 15, uniform(40, 25, 0, 33), (5,), dtype)
    inputs = make_inputs(case, 5, 1)
    want = _one_by_one(inputs, op)
    assert rows_problem(expected(inputs, op), want) is None
    assert bound_problem(case.rows, want, inputs, op) is None
    if dtype == torch.float32:  # one rounding to 16 bits hides most effects of the order
        flat = Entries(*(torch.cat(parts) for parts in zip(*inputs, strict=True)))
        backwards = [Entries(indices.flip(0), values.flip(0)) for indices, values in inputs]
        for other in ([flat, *[Entries(flat.indices[:0], flat.values[:0])] * 4], inputs[::-1], backwards):
            assert rows_problem(expected(other, op), want) is not None, "another order has the same bits"


def test_the_bound_and_the_comparison_notice_errors() -> None:
    case = Case("bound", 30, uniform(25, 25), (4,), torch.bfloat16)
    inputs = make_inputs(case, 2, 0)
    right = expected(inputs)
    assert bound_problem(30, right, inputs) is None and rows_problem(right, right) is None
    # Partial sums rounded to bf16 in transit, a missing PE or row, a row elsewhere, a sum instead of a mean.
    rounded = expected([Entries(*expected([entries])) for entries in inputs])
    fewer = expected([inputs[0], Entries(inputs[1].indices[1:], inputs[1].values[1:])])
    shifted = Rows(right.indices, right.values.roll(1, 0))
    shorter = Rows(right.indices[1:], right.values[1:])
    for wrong in (rounded, fewer, shifted, shorter):
        assert rows_problem(wrong, right) is not None
    for wrong in (fewer, shifted, shorter, expected(inputs[:1])):
        assert bound_problem(30, wrong, inputs) is not None
    assert bound_problem(30, right, inputs, "mean") is not None
    poisoned = Rows(right.indices, right.values.index_fill(0, torch.tensor([3]), torch.nan))
    assert bound_problem(30, poisoned, inputs) is not None
    unsorted = Rows(right.indices.flip(0), right.values.flip(0))
    assert bound_problem(30, unsorted, inputs) is None and rows_problem(unsorted, right) is not None


def test_the_reference_is_the_dense_sum() -> None:
    case = Case("reference", 40, uniform(30, 0, 25), (3,), torch.float16)
    inputs = make_inputs(case, 3, 0)
    xs = [torch.sparse_coo_tensor(rows[None], values, case.shape, check_invariants=False) for rows, values in inputs]
    dense = sum(x.double().to_dense() for x in xs)
    for op, want in (("sum", dense), ("mean", dense / 3)):
        rows, values = reference(xs, op)
        assert rows.tolist() == expected(inputs).indices.tolist() and values.dtype == torch.float64
        assert torch.allclose(
            torch.zeros(case.shape).double().index_copy(0, rows, values), want, rtol=1e-14, atol=1e-14
        )


# ---- random cases ----------------------------------------------------------------------------------------------------

_MAX_WORLD = 3
_TABLES = (1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1000, 1023, 1025, 4096, 4097)


@st.composite
def _drawn(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a case as plain data that can be sent to other processes."""
    rows = draw(st.sampled_from(_TABLES))
    dtype = draw(st.sampled_from(DTYPES))
    row_shape = draw(st.sampled_from([(), (1,), (4,), (5,), (2, 3), (16,)]))
    near = st.integers(0, rows - 1) | st.sampled_from([0, rows - 1, rows // 2])
    return {
        "rows": rows,
        "row_shape": row_shape,
        "dtype": dtype,
        "op": draw(st.sampled_from(["sum", "mean"])),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])) if row_shape == (16,) else torch.int64,
        "indices": [draw(st.lists(near, max_size=24)) for _ in range(_MAX_WORLD)],
        "slack": draw(st.integers(0, 3)),
    }


def _random(cases: list[dict[str, Any]]) -> list[str]:
    problems = []
    for number, fields in enumerate(cases):
        indices, slack = fields["indices"], fields["slack"]
        fields = {name: value for name, value in fields.items() if name not in ("indices", "slack")}
        case = Case("random", pattern=lambda d, lists=indices: torch.tensor(lists[d.rank]), **fields)
        inputs = []
        for rank in range(po.world_size()):
            own = torch.Generator().manual_seed(rank + 100 * number)
            rows = torch.tensor(indices[rank], dtype=torch.int64)
            inputs.append(Entries(rows, draw_values(len(rows), case.row_shape, case.dtype, own)))
        want = expected(inputs, case.op)
        entries = inputs[po.rank()]
        room = Room(len(want.indices) + slack, case.row_shape, case.dtype)
        for entry, algorithm in WAYS:
            if entry == "into":
                room.reset()
                call_into(case, entries, room, algorithm, len(entries.indices) + slack if slack else None)
                found = room.problem(want)
            else:
                result = po.sparse_all_reduce(to_sparse(case, entries), op=case.op, algorithm=algorithm)
                found = form_problem(result, case)
                found = found or rows_problem(taken_apart(result), want, zeros_have_signs=zeros_have_signs(algorithm))
            if found is not None:
                problems.append(f"{entry} {algorithm}: {found}")
        room.free()
    return problems


@pytest.mark.slow
def test_random_cases(backend: str) -> None:
    is_host = backend == "host"  # where a world takes milliseconds instead of many seconds

    @settings(
        max_examples=25 if is_host else 3,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if is_host else (Phase.generate,),
    )
    @given(
        world=st.integers(1, _MAX_WORLD),
        cases=st.lists(_drawn(), min_size=1, max_size=3 if is_host else 20),
        transport=st.sampled_from(["auto", "staged"] if is_host else ["auto"]),
        wg_size=st.sampled_from([1, 4]),
    )
    def check(world: int, cases: list[dict[str, Any]], transport: str, wg_size: int) -> None:
        options: dict[str, Any] = {"transport": transport, "host_options": {"wg_size": wg_size}} if is_host else {}
        assert in_world(_random, world, backend, cases, **options) == [[]] * world

    check()


# ---- special values --------------------------------------------------------------------------------------------------


def _special_inputs(dtype: torch.dtype, world: int) -> list[Entries]:
    """What all PEs pass: rows whose first values depend on row % 16, in a table of 40."""
    inf, nan, largest, tiny = float("inf"), float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).tiny
    last = world - 1
    # (row, PE, values in order of occurrence). PE `last` is PE 0 in a world of one: its values follow PE 0's.
    given: list[tuple[int, int, list[float]]] = [
        (0, 0, [nan]),
        (1, 0, [1.0]), (1, last, [nan]),
        (2, 0, [inf]), (2, last, [-inf]),
        (3, 0, [2.0]), (3, last, [inf]),
        (4, 0, [-0.0]),
        (5, last, [-0.0, -0.0]),
        (6, 0, [-0.0]), (6, last, [-0.0]),
        (7, 0, [0.0]), (7, last, [-0.0]),
        (8, 0, [largest, largest]), (8, last, [-largest]),
        (9, 0, [largest]), (9, last, [largest, -largest]),
        (10, 0, [tiny / 4]), (10, last, [tiny / 8, tiny / 4]),
        (11, 0, [1.0, -1.0]),
        (12, 0, [nan]), (12, last, [-inf]),
        (13, 0, [-largest, 0.5]), (13, last, [-largest]),
        (14, last, [tiny]),
        (15, 0, [nan, 1.0]), (15, last, [nan]),
    ]  # fmt: skip
    inputs = []
    for rank in range(world):
        indices = [16 + row for row, pe, values in given if pe == rank for _ in values]
        values = [value for _, pe, of_pe in given if pe == rank for value in of_pe]
        inputs.append(Entries(torch.tensor(indices), torch.tensor(values, dtype=dtype)[:, None].repeat(1, 3)))
    return inputs


def _without_nan(rows: Rows) -> Rows:
    """NaN must be at the right places; the bits of a NaN are not specified."""
    return Rows(rows.indices, rows.values.masked_fill(rows.values.isnan(), 12345.0))


def _specials() -> list[str]:
    problems = []
    world = po.world_size()
    for dtype in DTYPES:
        inputs = _special_inputs(dtype, world)
        room = Room(20, (3,), dtype)
        for op in ("sum", "mean"):
            case = Case("special", 40, uniform(0), (3,), dtype, op)
            want = _without_nan(expected(inputs, op))
            for entry, algorithm in WAYS:
                if entry == "into":
                    room.reset()
                    call_into(case, inputs[po.rank()], room, algorithm)
                    filled = int(room.count)
                    result = Rows(room.indices[:filled].cpu(), room.values[:filled].cpu())
                else:
                    output = po.sparse_all_reduce(to_sparse(case, inputs[po.rank()]), op=op, algorithm=algorithm)
                    result = taken_apart(output)
                found = rows_problem(_without_nan(result), want, zeros_have_signs=zeros_have_signs(algorithm))
                if found is not None:
                    problems.append(f"{dtype}, {op}, {entry} {algorithm}: {found}")
        room.free()
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_special_values(backend: str, world: int) -> None:
    assert in_world(_specials, world, backend) == [[]] * world


@pytest.mark.host
def test_special_values_are_special() -> None:
    """The special values must appear in the model, or the test above would be useless."""
    inf, largest = float("inf"), torch.finfo(torch.float32).max
    found = expected(_special_inputs(torch.float32, 2)).values[:, 0]
    assert found.isnan().nonzero().flatten().tolist() == [0, 1, 2, 12, 15]
    assert found[3] == inf and found[8] == inf and found[9] == largest and found[13] == -inf
    zeros = [4, 5, 6, 7, 11]
    assert not found[zeros].any() and found[zeros].signbit().tolist() == [True, True, True, False, False]
    assert 0 < found[10] < torch.finfo(torch.float32).tiny
    halves = expected(_special_inputs(torch.float16, 2)).values[:, 0]
    assert halves[8] == torch.finfo(torch.float16).max, "the sum of two did not fit into 16 bits on its way"


# ---- guarantees ------------------------------------------------------------------------------------------------------


def _forms_of_x() -> list[str]:
    """Pass tensors in all forms in which torch makes them and permits them."""
    rank, device = po.rank(), po.device()
    case = Case("forms", 50, uniform(30, 40), (6,))
    inputs = make_inputs(case, po.world_size(), 0)
    want = expected(inputs)
    indices, values = (tensor.to(device) for tensor in inputs[rank])

    def tensor_of(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(indices, values, case.shape, check_invariants=False)

    table = torch.nn.Embedding(50, 6, sparse=True, device=device)
    (table(indices) * values).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    forms = {
        "plain": tensor_of(indices[None], values),
        "embedding": table.weight.grad,
        "int32": tensor_of(indices[None].int(), values),
        "part of more": tensor_of(torch.stack([indices, indices + 1])[:1], torch.cat([values, -values])[: len(values)]),
        "indices with gaps": tensor_of(indices.repeat_interleave(2)[None, ::2], values),
        "values with gaps": tensor_of(indices[None], torch.cat([values, values], 1)[:, :6]),
        "transposed values": tensor_of(indices[None], values.t().contiguous().t()),
        "requires_grad": tensor_of(indices[None], values).requires_grad_(),
        "symmetric values": tensor_of(indices[None], padded_to(po.empty(64, 6), values)),
    }
    problems = []
    for name, x in forms.items():
        for algorithm in ALGORITHMS:
            with torch.no_grad():
                result = po.sparse_all_reduce(x, algorithm=algorithm)
            found = form_problem(result, case) or rows_problem(taken_apart(result), want)
            if found is not None:
                problems.append(f"{name}, {algorithm}: {found}")
    # The sums of a PE's duplicates, of a tensor that is marked as coalesced.
    parts = [Entries(*expected([entries])) for entries in inputs]
    once = torch.sparse_coo_tensor(
        parts[rank].indices[None].to(device),
        parts[rank].values.to(device),
        case.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    for algorithm in ALGORITHMS:
        if found := rows_problem(taken_apart(po.sparse_all_reduce(once, algorithm=algorithm)), want):
            problems.append(f"coalesced, {algorithm}: {found}")
    # The expanded gradient of a sum: every row is the same memory.
    ones = Entries(inputs[rank].indices, torch.ones(1, 6).expand(len(indices), 6))
    result = po.sparse_all_reduce(tensor_of(indices[None], ones.values.to(device)))
    counted = torch.cat([entries.indices for entries in inputs]).bincount(minlength=50)
    if not torch.equal(result.to_dense().cpu(), counted[:, None].float().expand(50, 6)):
        problems.append("expanded: wrong counts")
    return problems


def padded_to(memory: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of values at the beginning of larger memory."""
    memory[: len(values)] = values
    return memory[: len(values)]


def test_forms_of_x(backend: str) -> None:
    assert in_world(_forms_of_x, 2, backend) == [[], []]


def _partials_beyond_fp16() -> list[list[float]]:
    """Sums of 120000 and -119040: within fp32, not within fp16."""
    value = 60000.0 if po.rank() == 0 else -59520.0
    case = Case("beyond fp16", 9, uniform(0), (2,), torch.float16)
    entries = Entries(torch.tensor([4, 4]), torch.full((2, 2), value, dtype=torch.float16))
    return [
        po.sparse_all_reduce(to_sparse(case, entries), algorithm=algorithm)._values().tolist()[0]
        for algorithm in ALGORITHMS
    ]


def test_sums_travel_in_fp32(backend: str) -> None:
    assert in_world(_partials_beyond_fp16, 2, backend) == [[[960.0, 960.0]] * 3] * 2


def _same_in_every_run() -> list[str]:
    """Repeat calls while the order of the PEs varies, with all ways to get a sum."""
    problems = []
    case = Case("again", 300, uniform(200, 150, 250), (33,), torch.float32, "mean")
    want = wanted(case, po.world_size(), 0)
    for turn in range(10):
        for algorithm in ALGORITHMS:
            if (turn + po.rank()) % 3 == 0:
                time.sleep(0.003)
            x = to_sparse(case, make_inputs(case, po.world_size(), 0)[po.rank()])
            result = taken_apart(po.sparse_all_reduce(x, op="mean", algorithm=algorithm))
            if (found := rows_problem(result, want)) is not None:
                problems.append(f"turn {turn}, {algorithm}: {found}")
    return problems


def test_the_same_bits_in_every_run(backend: str) -> None:
    assert in_world(_same_in_every_run, 3, backend) == [[]] * 3


def _huge_table(rows: int) -> list[str]:
    problems = []
    case = Case(
        "huge", rows, lambda d: torch.cat([uniform(40, 50)(d), edges(d), torch.tensor([rows - 1 - d.rank])]), (3,)
    )
    room = Room(400, (3,), torch.float32)
    for iteration, (entry, algorithm) in enumerate(way for way in WAYS if way[1] in INTO_ALGORITHMS):
        inputs, want = make_inputs(case, po.world_size(), iteration), wanted(case, po.world_size(), iteration)
        if entry == "into":
            room.reset()
            call_into(case, inputs[po.rank()], room, algorithm)
            found = room.problem(want)
        else:
            result = po.sparse_all_reduce(to_sparse(case, inputs[po.rank()]), algorithm=algorithm)
            found = form_problem(result, case) or rows_problem(taken_apart(result), want)
        if found is not None:
            problems.append(f"{entry} {algorithm}: {found}")
    room.free()
    return problems


def test_rows_near_the_end_of_a_huge_table(backend: str) -> None:
    """Bit planes take R / 8 bytes for every other PE. This is the largest reasonable size."""
    rows, heap_size = (2**31, 4 << 30) if backend == "cuda" else (2**27 + 37, 256 * MB)
    assert in_world(_huge_table, 2, backend, rows, heap_size=heap_size) == [[], []]


# ---- results ---------------------------------------------------------------------------------------------------------


def _in_the_heap() -> dict[str, bool]:
    case = Case("memory", 4000, distinct(1000), (256,))
    world = po.runtime.world.current()
    inputs, want = make_inputs(case, po.world_size(), 0), wanted(case, po.world_size(), 0)
    x = to_sparse(case, inputs[po.rank()])
    result = po.sparse_all_reduce(x)
    seen = {"values": 0 <= result._values().data_ptr() - world.backend.heap_base < world.backend.heap_bytes}
    held = [result]
    try:
        while len(held) < 100:  # one or two megabytes each
            held.append(po.sparse_all_reduce(x))
    except po.SymmetricHeapError as error:
        seen["text"] = "heap_size" in str(error)
    seen["full"] = 4 < len(held) < 64
    seen["held"] = all(rows_problem(taken_apart(each), want) is None for each in held)
    # A view keeps the memory, like the result itself.
    row = held[0]._values()[7]
    values, copy = held[1]._values(), row.clone()
    held = []
    del result
    for _ in range(6):
        held = [*held[-1:], po.sparse_all_reduce(x * 2)]
    seen["views"] = torch.equal(row, copy) and rows_problem(Rows(want.indices, values.cpu()), want) is None
    seen["freed"] = rows_problem(taken_apart(held[-1]), Rows(want.indices, want.values * 2)) is None
    return seen


def test_results_live_in_the_symmetric_heap(backend: str) -> None:
    for seen in in_world(_in_the_heap, 2, backend, heap_size=32 * MB):
        assert set(seen) == {"values", "text", "full", "held", "views", "freed"} and all(seen.values()), seen


def _rows_of_nothing() -> list[list[int]]:
    """As in a world's first sums of 16 bits, for which the room that other rows need does not exist yet."""
    rows = torch.tensor([[3, 0, 3]], device=po.device())
    x = torch.sparse_coo_tensor(rows, torch.zeros(3, 0, dtype=torch.float16, device=po.device()), (5, 0))
    x = x.coalesce() if po.rank() == 0 else x
    results = [po.sparse_all_reduce(x, algorithm=algorithm) for algorithm in ("owner", "allgather")]
    return [result.indices()[0].tolist() for result in results]


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_rows_of_nothing_come_first(backend: str, transport: str) -> None:
    found = in_world(_rows_of_nothing, 2, backend, operator_timeout=20.0, transport=transport)
    assert found == [[[0, 3]] * 2] * 2


def _autograd() -> dict[str, Any]:
    case = Case("autograd", 30, uniform(20), (4,))
    x = to_sparse(case, make_inputs(case, 1, 0)[0])
    plain = po.sparse_all_reduce(x)
    recorded = po.sparse_all_reduce(x.clone().requires_grad_())
    with pytest.raises(NotImplementedError) as caught:
        recorded.to_dense().sum().backward()
    with torch.no_grad():
        unrecorded = po.sparse_all_reduce(x.clone().requires_grad_())
    return {
        "text": str(caught.value),
        "requires_grad": [each.requires_grad for each in (plain, recorded, unrecorded)],
        "equal": [torch.equal(each.to_dense(), plain.to_dense()) for each in (recorded, unrecorded)],
    }


def test_autograd_runs_forward_and_refuses_backward(backend: str) -> None:
    seen = in_world(_autograd, 1, backend)[0]
    assert "sparse_all_reduce has no backward pass" in seen["text"] and "torch.no_grad()" in seen["text"]
    assert seen["requires_grad"] == [False, True, False] and seen["equal"] == [True, True]
