"""gemv_all_reduce: exact bits, bounds and guarantees over worlds, transports and shapes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, bits, difference
from gemv_cases import (
    ALGORITHMS,
    CASES,
    FEW,
    Buffer,
    Case,
    GemvTrial,
    Inputs,
    bound_problem,
    expected_bits,
    make_inputs,
)
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.gemv_all_reduce import reference
from persistent_ops.ops.gemv_plan import OPERATOR, Tuning

MB = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TestBits(BitsSuite):
    trial = GemvTrial
    halved_by = torch.bfloat16
    # The host's staged transport delays and reorders. Several threads per WG share its columns and packets, as warps do
    # on a GPU.
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, FEW),
        "4": CaseWorld(4, CASES),
        "5": CaseWorld(5, FEW),
        "8": CaseWorld(8, FEW),
        "2-staged": CaseWorld(2, FEW, {"transport": "staged"}),
        "3-staged-slow": CaseWorld(3, FEW[::4], {"transport": "staged", "host_options": {"network_delay_us": 1000}}),
        "2-wg2": CaseWorld(2, FEW[1::3], {"host_options": {"wg_size": 2}}),
        "3-wg3": CaseWorld(3, FEW[::3], {"host_options": {"wg_size": 3}}),
        "2-wg5-staged": CaseWorld(2, FEW[2::3], {"transport": "staged", "host_options": {"wg_size": 5}}),
    }


# ---- guarantees ------------------------------------------------------------------------------------------------------


def _normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(po.device(), dtype)


def _batches(columns: int) -> list[str]:
    """Send vectors alone and together with others. Their bits must not change."""
    problems = []
    for number, dtype in enumerate(DTYPES):
        weight = _normal(41, columns, seed=po.rank(), dtype=dtype)
        xs = _normal(16, columns, seed=100 + po.rank(), dtype=dtype)
        bias, residual = _normal(41, seed=8, dtype=dtype), _normal(16, 41, seed=9, dtype=dtype)
        whole = po.gemv_all_reduce(weight, xs, bias=bias, residual=residual, algorithm="one_shot").cpu()

        def compare(
            what: str,
            x: torch.Tensor,
            given: torch.Tensor,
            rows: Any,
            want: torch.Tensor = whole,
            **options: Any,
        ) -> None:
            found = po.gemv_all_reduce(weight, x, bias=bias, residual=given, algorithm="one_shot", **options)  # noqa: B023
            if (problem := difference(found.cpu(), want[rows])) is not None:
                problems.append(f"{dtype}, {columns} columns, {what}: {problem}")  # noqa: B023

        for count in range(1, 17):
            compare(f"N {count}", xs[:count], residual[:count], slice(count))
        for n in range(16):
            compare(f"vector {n} alone", xs[n], residual[n], n)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(number))
        compare("another order", xs[order], residual[order], order)
        for poison in (float("nan"), float("inf")):
            others = torch.full_like(xs, poison)
            others[5] = xs[5]
            found = po.gemv_all_reduce(weight, others, bias=bias, residual=residual, algorithm="one_shot")
            if (problem := difference(found[5].cpu(), whole[5])) is not None:
                problems.append(f"{dtype}, a vector among vectors of {poison}: {problem}")
        if dtype == torch.bfloat16:
            want = po.gemv_all_reduce(weight, xs, bias=bias, residual=residual, wire_dtype=dtype).cpu()
            for n in (0, 7, 15):
                compare(f"vector {n}, comm bf16", xs[n], residual[n], n, want, wire_dtype=dtype)
    return problems


@pytest.mark.parametrize("columns", [33, 264])
def test_a_vector_has_the_same_bits_whatever_it_travels_with(backend: str, columns: int) -> None:
    assert in_world(_batches, 2, backend, columns) == [[], []]


def _grids(backend: str) -> list[str]:
    """Divide the rows among different numbers of WGs. No bit may change."""
    world = po.runtime.world.current()
    weight, x = (_normal(*shape, seed=po.rank(), dtype=torch.float16) for shape in ((333, 999), (3, 999)))
    most = world.backend.num_sms if backend == "cuda" else 5
    problems = []
    for algorithm in ALGORITHMS:
        want = po.gemv_all_reduce(weight, x, algorithm=algorithm).cpu()
        for grid in (1, 2, most - 1, most):
            OPERATOR.tune(world, Tuning(work_groups=grid))
            found = po.gemv_all_reduce(weight, x, algorithm=algorithm).cpu()
            if (problem := difference(found, want)) is not None:
                problems.append(f"{algorithm}, {grid} WGs: {problem}")
        OPERATOR.tune(world, None)
    return problems


def test_the_number_of_work_groups_changes_no_bit(backend: str) -> None:
    assert in_world(_grids, 2, backend, backend) == [[], []]


def _fresh_biases() -> list[str]:
    """Pass new tensors, which use one plan, and more shapes than the number of plans that are kept."""
    problems = []
    plans = OPERATOR.state(po.runtime.world.current()).plans
    weight, x = torch.ones(9, 4, device=po.device()), torch.ones(4, device=po.device())
    biases = [torch.full((9,), float(i), device=po.device()) for i in range(40)]
    outputs = [po.gemv_all_reduce(weight, x, bias=bias) for bias in biases]
    if len(set(map(id, plans.values()))) != 1:
        problems.append(f"{len(plans)} plans for one shape")
    for i, output in enumerate(outputs):
        if output.tolist() != [4.0 * po.world_size() + i] * 9:
            problems.append(f"bias {i}: {output.tolist()}")
    plans.most = 8
    for rows in range(1, 30):
        if (output := po.gemv_all_reduce(torch.ones(rows, 4, device=po.device()), x)).tolist() != [4.0] * rows:
            problems.append(f"{rows} rows: {output.tolist()}")
    if not 0 < len(plans) <= 9:  # "auto" and the algorithm that it selects share one plan
        problems.append(f"{len(plans)} plans are kept")
    return problems


def test_plans_do_not_collect(backend: str) -> None:
    assert in_world(_fresh_biases, 1, backend) == [[]]


def _equal_but_for_nan(output: torch.Tensor, want: torch.Tensor) -> bool:
    """NaN must be at the right places; the bits of a NaN are not specified."""
    there = ~want.isnan()
    return bool((output.isnan() == want.isnan()).all()) and torch.equal(bits(output)[there], bits(want)[there])


def _special_inputs(dtype: torch.dtype) -> dict[str, Inputs]:
    """What all PEs pass. Rows, columns and vectors have odd sizes."""
    world, rows, columns, vectors = po.world_size(), 11, 19, 3
    inf, nan = float("inf"), float("nan")
    last = world - 1

    def whole() -> Inputs:
        def draw(seed: int, *shape: int) -> torch.Tensor:
            rng = torch.Generator().manual_seed(seed)
            return torch.randint(-5, 6, shape, generator=rng).to(dtype)

        weights = [draw(rank, rows, columns) for rank in range(world)]
        xs = [draw(50 + rank, vectors, columns) for rank in range(world)]
        return Inputs(weights, xs, draw(90, rows), draw(91, vectors, rows))

    def single(values: list[list[float]], xs: list[float], residual: list[float] | None = None) -> Inputs:
        """One column per PE: values[rank][row] times xs[rank]."""
        weights = [torch.tensor(column, dtype=dtype)[:, None] for column in values]
        vectors = [torch.tensor([x], dtype=dtype) for x in xs]
        return Inputs(weights, vectors, None, None if residual is None else torch.tensor(residual, dtype=dtype))

    def by_rank(first: list[float], others: list[float], at_last: list[float]) -> list[list[float]]:
        return [first, *[others] * (world - 2), at_last][-world:] if world > 1 else [first]

    found = {"nothing special": whole()}
    found["NaN in a weight"] = whole()
    found["NaN in a weight"].weights[last][3, 4] = nan
    found["NaN in a vector"] = whole()
    found["NaN in a vector"].xs[0][1, columns - 1] = nan
    found["NaN with all bits set"] = whole()
    bits(found["NaN with all bits set"].weights[0])[rows - 1].fill_(-1)
    found["Inf in a weight"] = whole()
    found["Inf in a weight"].weights[last][2, 0] = inf
    found["Inf in a weight"].xs[last][:, 0] = torch.tensor([1, -1, 0])
    found["Inf of two signs"] = whole()
    for rank in range(world):
        found["Inf of two signs"].weights[rank][5, 7] = -inf if rank else inf
        found["Inf of two signs"].xs[rank][:, 7] = 1
    found["bias and residual"] = whole()
    bias, residual = found["bias and residual"].bias, found["bias and residual"].residual
    assert bias is not None and residual is not None
    bias[:3] = torch.tensor([nan, inf, -inf])
    residual[0, 4:7] = torch.tensor([nan, inf, -inf])
    residual[1, 1] = -inf

    largest = torch.finfo(dtype).max
    found["overflow"] = single(
        by_rank([largest, largest, -largest], [0.0] * 3, [largest, -largest, -largest]), [1.0] * world
    )
    # In rank order. In another order the overflow would disappear, or appear.
    order = [largest, largest, -largest, -largest, -largest][:world]
    found["overflow by order"] = single([[value, -value] for value in order], [1.0] * world)
    small = torch.finfo(dtype).tiny
    found["subnormal"] = single(by_rank([0.5, -1.0, 0.75], [0.25, 0.5, 0.0], [0.125, 0.25, -0.75]), [small] * world)
    # Products that round to -0.0 in fp16 alone, after the sum: two small negative numbers.
    if dtype == torch.float16:
        found["-0.0 by rounding"] = single([[-(2.0**-17), 2.0**-17]] * world, [2.0**-17] * world, [-0.0, -0.0])
    return found


def _specials() -> list[str]:
    problems = []
    device = po.device()
    for dtype in DTYPES:
        for name, inputs in _special_inputs(dtype).items():
            weight, x = inputs.weights[po.rank()].to(device), inputs.xs[po.rank()].to(device)
            added = {key: getattr(inputs, key) for key in ("bias", "residual")}
            added = {key: None if tensor is None else tensor.to(device) for key, tensor in added.items()}
            comms = (None, dtype) if dtype == torch.float16 else (None,)
            for algorithm in ALGORITHMS:
                for comm in comms:
                    output = po.gemv_all_reduce(weight, x, **added, algorithm=algorithm, wire_dtype=comm).cpu()
                    want = expected_bits(inputs, comm)
                    if not _equal_but_for_nan(output, want):
                        problems.append(
                            f"{dtype}, {name}, {algorithm}, comm {comm}: {output.tolist()} instead of {want.tolist()}"
                        )
        # A sum of nothing is +0.0, and +0.0 + -0.0 is +0.0.
        for columns in (0, 5):
            weight = torch.zeros(9, columns, dtype=dtype, device=device)
            x = -torch.ones(columns, dtype=dtype, device=device)
            for residual in (None, -torch.zeros(9, dtype=dtype, device=device)):
                output = po.gemv_all_reduce(weight, x, residual=residual)
                if bool(bits(output).any()):
                    problems.append(f"{dtype}, zeros, {columns} columns: {output.tolist()}")
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_special_values(backend: str, world: int) -> None:
    assert in_world(_specials, world, backend) == [[]] * world


def test_special_values_are_special() -> None:
    """The special values above must appear in the models, or the tests would be useless."""

    def program() -> dict[str, torch.Tensor]:
        return {name: expected_bits(inputs) for name, inputs in _special_inputs(torch.float16).items()}

    wants = in_world(program, 2, "host")[0]
    assert not wants["nothing special"].isnan().any()
    assert wants["NaN in a weight"].isnan().sum() == 3 and wants["NaN in a vector"].isnan().sum() == 11
    assert wants["Inf in a weight"][:, 2].tolist()[:2] == [float("inf"), -float("inf")]
    assert wants["Inf in a weight"][2, 2].isnan() and wants["Inf of two signs"].isnan().sum() == 3
    assert wants["overflow"].tolist() == [float("inf"), 0, -float("inf")]
    assert wants["subnormal"].tolist()[1] != 0 and wants["-0.0 by rounding"].signbit().tolist() == [True, False]


def _partials_beyond_fp16() -> list[Any]:
    """Sums of 120000 and -119040: within fp32, not within fp16."""
    weight = torch.full((9, 2), 60000.0 if po.rank() == 0 else -59520.0, dtype=torch.float16, device=po.device())
    x = torch.ones(2, dtype=torch.float16, device=po.device())
    found = [po.gemv_all_reduce(weight, x, algorithm=algorithm).cpu().tolist() for algorithm in ALGORITHMS]
    return [*found, bool(po.gemv_all_reduce(weight, x, wire_dtype=torch.float16).isnan().all())]


def test_sums_travel_in_fp32(backend: str) -> None:
    assert in_world(_partials_beyond_fp16, 2, backend) == [[[960.0] * 9, [960.0] * 9, True]] * 2


def test_the_bound_and_the_model_notice_errors() -> None:
    for case in (Case("model", 12, lambda rank: 64, 2), Case("bound", 12, lambda rank: 64, 2, values="cancelling")):
        inputs = make_inputs(case, 2, 3)
        exact = reference(inputs.weights, inputs.xs, inputs.bias, inputs.residual)
        right = exact.to(case.dtype)
        assert bound_problem(right, inputs) is None
        if case.values == "whole":
            assert difference(right, expected_bits(inputs)) is None
            assert difference(right + 1, expected_bits(inputs)) is not None
            assert difference(right * torch.tensor([[1], [-1]]), expected_bits(inputs)) is not None
        else:
            # Sums that are rounded to bf16 in transit would show, since most of the rounded value is subtracted again.
            assert bound_problem(expected_bits(inputs, case.dtype), inputs) is not None
            assert bound_problem(expected_bits(inputs, case.dtype), inputs, case.dtype) is None
        assert bound_problem(right.index_fill(1, torch.tensor([7]), float("nan")), inputs) is not None
        for left_out in ({"bias": None}, {"residual": None}, {"xs": [inputs.xs[0], 0 * inputs.xs[1]]}):
            fewer = Inputs(**{**inputs.__dict__, **left_out})
            wrong = reference(fewer.weights, fewer.xs, fewer.bias, fewer.residual).to(case.dtype)
            assert bound_problem(wrong, inputs) is not None


# ---- rows of several launches ----------------------------------------------------------------------------------------

_HUGE = {
    "direct": [
        Case("70001 rows", 70001, lambda rank: 2),
        Case("9001 rows, N 3, fp32", 9001, lambda rank: 1 + rank, 3, torch.float32),
        Case("1001 rows, N 16", 1001, lambda rank: 3, 16),
    ],
    "staged": [Case("601 rows, N 16", 601, lambda rank: 3, 16)],  # every packet is an operation of the network
}


def _huge(transport: str) -> list[str]:
    problems = []
    for case in _HUGE[transport]:
        weight = make_inputs(case, po.world_size(), 0).weights[po.rank()].to(po.device())
        for iteration, algorithm in ((0, "one_shot"), (3, "two_shot"), (4, "one_shot"), (2, "auto"), (4, "two_shot")):
            inputs = make_inputs(case, po.world_size(), iteration)
            x = inputs.xs[po.rank()].to(po.device())
            bias, residual = (None if t is None else t.to(po.device()) for t in (inputs.bias, inputs.residual))
            out = Buffer(torch.full(case.shape, float("nan"), dtype=case.dtype)) if iteration == 4 else None
            output = po.gemv_all_reduce(
                weight, x, bias=bias, residual=residual, out=out and out.tensor, algorithm=algorithm
            )
            problem = difference(output.cpu(), expected_bits(inputs))
            if out is not None and not out.is_intact():
                problem = "memory around out was written"
            if problem is not None:
                problems.append(f"{case.name}, iteration {iteration}, {algorithm}: {problem}")
    plans = OPERATOR.state(po.runtime.world.current()).plans.values()
    if any(len(plan._launches) < 2 for plan in plans):
        problems.append("one launch was enough")
    return problems


@pytest.mark.parametrize("transport", ["direct", pytest.param("staged", marks=pytest.mark.host)])
def test_rows_beyond_the_room_for_packets(backend: str, transport: str) -> None:
    """The room is a share of the heap, so it is small in a small heap."""
    options = {"transport": "staged"} if transport == "staged" else {}
    heap_size = MB if backend == "host" else 2 * MB
    assert in_world(_huge, 2, backend, transport, heap_size=heap_size, **options) == [[], []]
