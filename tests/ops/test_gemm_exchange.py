"""gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce: bits, choice of an algorithm, gradients, graphs, arguments.

See also: their protocol in test_gemm_exchange_protocol.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from arguments import Arguments, ArgumentSuite, Function, Wrong, given_as
from bits import BitsSuite, CaseWorld, check, difference
from gemm_exchange_cases import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    OPERATORS,
    REDUCE_SCATTER,
    Case,
    ExchangeTrial,
    Inputs,
    bound_problem,
    call,
    cases,
    divided,
    expected_bits,
    make_inputs,
    of_rank,
)
from graph_chains import Chain, ChainSuite, ChainTest
from graphs import NUM_INPUTS, Call
from kept_pes import in_processes
from torch_checks import assert_schemas, opcheck_problems
from worlds import error_of, in_world, world_of

import persistent_ops as po
from persistent_ops.ops import row_exchange
from persistent_ops.ops.gemm_exchange_plan import (
    OPERATOR,
    Choice,
    ExchangeKey,
    _tuning,
    choose_algorithm,
)
from persistent_ops.ops.product import CANDIDATES, DTYPES, Rows, Shape, Tuning, choose_tile
from persistent_ops.runtime.team import Team
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs
from persistent_ops.runtime.world import current

_ADDED: dict[str, Any] = {"has_bias": True, "has_residual": True}
each_operator = pytest.mark.parametrize("operator", OPERATORS)


# ---- bits ------------------------------------------------------------------------------------------------------------


def _worlds(operator: str) -> dict[str, CaseWorld]:
    every, tiles = cases(operator), divided(operator)
    few = [*every[::3], *tiles[:2]]
    # A WG of one or two threads has no carriers. With more, one carries and the others multiply.
    return {
        "1": CaseWorld(1, [*every, *tiles]),
        "2": CaseWorld(2, [*every, *tiles]),
        "3": CaseWorld(3, [*every, *tiles]),
        "4": CaseWorld(4, [*every[1::2], *tiles]),
        "2-wg2": CaseWorld(2, [*every[::4], *tiles], {"host_options": {"wg_size": 2}}),
        "3-wg3": CaseWorld(3, [*every[1::4], *tiles], {"host_options": {"wg_size": 3}}),
        "2-wg5": CaseWorld(2, [*every[2::4], *tiles], {"host_options": {"wg_size": 5}}),
        "2-staged": CaseWorld(2, few, {"transport": "staged"}),
        "3-nodes": CaseWorld(3, few, {"transport": "nodes:2"}),
    }


class _Bits(BitsSuite):
    trial = ExchangeTrial
    halved_by = FLOAT16


class TestAllToAllBits(_Bits):
    is_the_same_on_all_pes = False
    worlds: ClassVar = _worlds(ALL_TO_ALL)


class TestReduceScatterBits(_Bits):
    is_the_same_on_all_pes = False
    worlds: ClassVar = _worlds(REDUCE_SCATTER)


class TestAllReduceBits(_Bits):
    worlds: ClassVar = _worlds(ALL_REDUCE)


@each_operator
def test_the_model_and_the_bound_notice_errors(operator: str) -> None:
    """Products in another order, or rounded otherwise; a NaN; an addend that is left out."""
    case = Case("model", (40,), 1, 64, operator=operator, values="ordered")
    inputs = make_inputs(case, 3, 0)
    want = expected_bits(case, inputs, 0)
    turned = Inputs(inputs.factors[1:] + inputs.factors[:1], inputs.added)
    assert difference(expected_bits(case, turned, 0), want) is not None
    exact = expected_bits(replace(case, wire_dtype=FLOAT32), inputs, 0)
    assert (difference(exact, want) is None) == (operator == ALL_TO_ALL)
    case = Case("bound", (8,), 64, 24, operator=operator, values="normal", **(_ADDED if case.adds else {}))
    inputs = make_inputs(case, 3, 0)
    want = expected_bits(case, inputs, 1)
    assert bound_problem(case, want, inputs, 1) is None
    assert bound_problem(case, want.index_fill(1, torch.tensor([7]), math.nan), inputs, 1) is not None
    for less in ([(None, residual) for _, residual in inputs.added], [(bias, None) for bias, _ in inputs.added]):
        problem = bound_problem(case, expected_bits(case, Inputs(inputs.factors, less), 1), inputs, 1)
        assert (problem is not None) == case.adds


def _grids(operator: str) -> list[str]:
    """Divide the tiles among different numbers of WGs. No bit may change."""
    world, problems, want = current(), [], None
    case = Case("grids", (40,), 200, 72, operator=operator, values="normal")
    most = world.backend.num_sms if po.backend() == "cuda" else 64
    OPERATOR.tune(world, Tuning(rows=128, columns=64, sharing=1, parts=1))
    for num_sms in (1, 2, 5, most):
        OPERATOR.state(world).plans.clear()
        with mock.patch.object(world.backend, "num_sms", num_sms):
            result = call(case, make_inputs(case, world.size, 0), algorithm="fused").clone()
        want = result if want is None else want
        if (problem := difference(result, want)) is not None:
            problems.append(f"{num_sms} SMs: {problem}")
    return problems


@each_operator
def test_the_number_of_sms_changes_no_bit(backend: str, operator: str) -> None:
    assert in_world(_grids, 2, backend, operator) == [[], []]


def _every_tile(operator: str) -> list[str]:
    """Return the tiles that make a wrong result. Each tile travels in another order of its registers."""
    problems = []
    for number, (rows, columns, sharing, parts) in enumerate(CANDIDATES):
        case = Case(
            f"{rows} x {columns}, sharing {sharing}, parts {parts}",
            (200 if operator != ALL_REDUCE else 400,),
            264,
            296,
            operator=operator,
            wire_dtype=FLOAT32 if operator != ALL_TO_ALL and rows == 128 and number % 2 else None,
            layouts=(("rows", "columns"), ("columns", "rows")),
            tuning=Tuning(rows=rows, columns=columns, sharing=sharing, parts=parts),
            **({} if operator == ALL_TO_ALL else _ADDED),
        )
        trial = ExchangeTrial(case)
        if (problem := trial.call(0, number, "fused").problem) is not None:
            problems.append(f"{case.name}: {problem}")
        trial.close()
    return problems


@pytest.mark.gpu
@pytest.mark.slow
@each_operator
def test_every_tile(backend: str, operator: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for sm_90")
    assert in_world(_every_tile, 2, backend, operator) == [[], []]


# ---- algorithms ------------------------------------------------------------------------------------------------------


def _in_a_group(backend: str, transport: str) -> list[str]:
    """Exchange rows with torch.distributed."""
    problems = []
    chosen = (
        "ragged, fp16",
        "three dimensions",
        "N of 12",
        "bias and residual",
        "fp32 travels",
        "scatter_dim 1",
        "a row",
    )
    with world_of(backend, transport=transport):
        for operator in OPERATORS:
            for case in (case for case in cases(operator) if case.name in chosen):
                with mock.patch.object(row_exchange, "all_reduce", None):
                    problem, _ = check(ExchangeTrial(case))
                problems += [] if problem is None else [f"{operator}, {case.name}: {problem}"]
    return problems


@pytest.mark.apart
@pytest.mark.parametrize("transport", ["auto", pytest.param("staged", marks=pytest.mark.host)])
def test_rows_travel_in_a_process_group(backend: str, transport: str) -> None:
    assert in_processes(_in_a_group, 2, backend, transport, timeout=250) == [[], []]


def _choices(backend: str, transport: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    with world_of(backend, has_group=False, transport=transport):
        for operator in OPERATORS:
            function, found[operator] = getattr(po, operator), []
            for columns in (16, 12):
                for algorithm in ("auto", "unfused", "fused"):
                    error = error_of(
                        lambda f=function, n=columns, a=algorithm: f(_ones(8, 8), _ones(8, n), algorithm=a)
                    )
                    found[operator].append(error[:2] if error[0] else tuple(function.last_choice))
    return found


_STAGED = "some PEs do not reach each other's memory"


@pytest.mark.host
@pytest.mark.parametrize(
    ("transport", "why", "why_of_12"),
    [
        ("auto", "", "N is no multiple of 8"),
        ("staged", _STAGED, _STAGED),
    ],
)
def test_what_a_call_took_and_why(transport: str, why: str, why_of_12: str) -> None:
    for found in in_processes(_choices, 2, "host", transport, timeout=200):
        for operator, choices in found.items():
            wanted: list[Any] = []
            for reason in (why, why_of_12):
                refusal = f"algorithm: {operator} cannot be fused here: {reason}"
                wanted.append(Choice("unfused", reason) if reason else Choice("fused", "the host backend"))
                wanted.append(Choice("unfused", reason or "asked for"))
                wanted.append(("NotImplementedError", refusal) if reason else Choice("fused", "asked for"))
            assert choices == [tuple(each) for each in wanted]


def _h200(heap_bytes: int = 4 << 30, *, leaves_room: bool = False) -> Any:
    """Return what the choice asks of a world of H200 GPUs."""
    backend = SimpleNamespace(
        name="cuda", num_sms=132, arena_bytes=232448, heap_bytes=heap_bytes, leaves_room=leaves_room
    )
    return SimpleNamespace(backend=backend, preparing=contextlib.nullcontext)


def _key(operator: str, size: int, rows: int, depth: int, columns: int, **changes: Any) -> ExchangeKey:
    key = ExchangeKey(
        Team(0, size, 64, 0, True),
        operator,
        Shape(rows, depth, columns, True, True),
        Rows(size, 1 % size, 1, math.ceil(rows / size)),
        BFLOAT16,
        BFLOAT16,
        False,
        False,
        False,
        None,
    )
    return key._replace(**changes)


_FLOPS_PER_US = 989.5e6  # that tensor cores of an H200 reach at most


@each_operator
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1024, 7168, 8192), (1024, 8192, 7168), (8192, 4096, 4096)])
def test_large_products_are_fused(operator: str, size: int, rows: int, depth: int, columns: int) -> None:
    choice = choose_algorithm(_h200(), _key(operator, size, rows, depth, columns))
    least = 2 * rows * depth * columns / _FLOPS_PER_US
    assert choice.algorithm == "fused" and choice.reason == "predicted to be faster"
    assert choice.fused_us is not None and choice.unfused_us is not None
    assert least < choice.fused_us < 2 * least and choice.fused_us < choice.unfused_us < 3 * least


@each_operator
def test_what_is_not_fused(operator: str) -> None:
    """Few rows for each PE, whose tiles are almost empty; sums that leave the heap no room."""
    few = choose_algorithm(_h200(), _key(operator, 8, 64, 7168, 8192))
    assert few.algorithm == "unfused" and few.fused_us is not None and few.unfused_us is not None
    assert few.unfused_us < few.fused_us
    large = choose_algorithm(_h200(60 << 20), _key(operator, 8, 1024, 7168, 8192))
    is_room = operator == ALL_TO_ALL
    assert large.algorithm == ("fused" if is_room else "unfused") and ("quarter of the heap" in large.reason) != is_room


@each_operator
@pytest.mark.parametrize("shape", [(0, 8, 16), (16, 0, 8), (16, 8, 0)])
def test_nothing_to_multiply_is_fused(operator: str, shape: tuple[int, int, int]) -> None:
    assert choose_algorithm(_h200(), _key(operator, 2, *shape)).algorithm == "fused"


def test_what_travels_takes_time() -> None:
    """A product that takes less time than its exchange."""
    times = [
        choose_algorithm(_h200(), _key(operator, 8, 8192, 64, 8192, wire_dtype=dtype))
        for operator, dtype in ((REDUCE_SCATTER, BFLOAT16), (REDUCE_SCATTER, FLOAT32), (ALL_REDUCE, FLOAT32))
    ]
    for one, other in itertools.pairwise(times):
        assert one.fused_us is not None and other.fused_us is not None and other.fused_us > 1.5 * one.fused_us


_LAYOUTS = list(itertools.product((True, False), repeat=2))


@each_operator
def test_all_pes_have_one_tile_whatever_their_layouts(operator: str) -> None:
    queries = OPERATOR.description.queries
    for size, shape in itertools.product((2, 8), itertools.product((64, 1000, 8192), (8, 4096), (8, 1000, 8192))):
        key = _key(operator, size, *shape)
        keys = [key._replace(shape=Shape(*shape, *layout)) for layout in _LAYOUTS]
        tunings = [_tuning(_h200(), each) for each in keys]
        assert len(set(tunings)) == 1
        for each in keys:
            tile = choose_tile(queries, each.shape, tunings[0], num_sms=132, arena_bytes=232448, rows=each.rows)
            assert tile[:4] == (tunings[0].rows, tunings[0].columns, tunings[0].sharing, tunings[0].parts)
            assert tile.stages >= 2
        alone = _tuning(_h200(leaves_room=True), key)
        assert (alone.sharing, alone.parts) == (1, 1), "clusters would need SMs side by side"


# ---- gradients -------------------------------------------------------------------------------------------------------

_LEARNT = [
    Case("two dimensions", (8,), 24, 16, operator=ALL_TO_ALL),
    Case("a weight, three dimensions", (2, 5), 16, 24, operator=ALL_TO_ALL, layouts=(("rows", "rows"),)),
    Case("sum", (8,), 24, 16, **_ADDED),
    Case("mean, three dimensions", (4, 3), 16, 24, op="mean", layouts=(("rows", "rows"),), **_ADDED),
    Case("scatter_dim 1", (3, 2), 16, 8, scatter_dim=1, **_ADDED),
    Case("scatter_dim 1, mean, N of 12", (2, 4), 8, 12, scatter_dim=1, op="mean", layouts=(("rows", "rows"),)),
    Case("sum for all", (7,), 24, 16, operator=ALL_REDUCE, **_ADDED),
    Case("three dimensions for all", (2, 4), 16, 24, operator=ALL_REDUCE, layouts=(("rows", "rows"),), **_ADDED),
]
_Leaves = list[torch.Tensor]


def _leaves(case: Case, rank: int) -> _Leaves:
    """Return a, the weight that is b or its transpose, bias and residual of a PE."""
    inputs = make_inputs(case, po.world_size(), 0)
    (a, b), added = inputs.factors[rank], inputs.added[rank]
    weight = b if case.layouts[0][1] == "rows" else b.t().contiguous()
    return [a, weight, *(each for each in added if each is not None)]


def _factors_of(case: Case, leaves: _Leaves) -> tuple[torch.Tensor, torch.Tensor]:
    return leaves[0], leaves[1] if case.layouts[0][1] == "rows" else leaves[1].t()


def _weights(case: Case, rank: int) -> torch.Tensor:
    """Return what a PE's loss multiplies its result by. Divided by the number of PEs it is whole."""
    rng = torch.Generator().manual_seed(0 if case.operator == ALL_REDUCE else rank)
    return torch.randint(-2, 3, case.shape(po.world_size()), generator=rng) * po.world_size()


def _loss(case: Case, weights: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
    a, b = _factors_of(case, list(leaves))
    options: dict[str, Any] = {}
    if case.operator == REDUCE_SCATTER:
        options = {"op": case.op, "scatter_dim": case.scatter_dim}
    if case.has_bias:
        options |= {"bias": leaves[2], "residual": leaves[3]}
    result: torch.Tensor = getattr(po, case.operator)(a, b, **options)
    return (result.float() * weights).sum()


def _wanted(case: Case) -> list[torch.Tensor]:
    """Return this PE's gradients, as one process has them: of the sum of all PEs' losses, or of one that all have."""
    world, rank = po.world_size(), po.rank()
    leaves = [[each.double().requires_grad_() for each in _leaves(case, pe)] for pe in range(world)]
    products = [a @ b for a, b in (_factors_of(case, each) for each in leaves)]
    losses = []
    for pe in [rank] if case.operator == ALL_REDUCE else range(world):
        result = of_rank(case, products, pe, world if case.op == "mean" else 1)
        losses.append(((result + sum(leaves[pe][2:])) * _weights(case, pe)).sum())
    torch.stack(losses).sum().backward()
    return [each.grad.to(case.dtype) for each in leaves[rank] if each.grad is not None]


def _gradients(backend: str, compiler: str | None, has_group: bool) -> list[str]:
    problems = []
    with world_of(backend, has_group=has_group, operator_timeout=200.0):  # a peer may compile meanwhile
        for case in _LEARNT:
            torch._dynamo.reset()
            loss: Callable[..., torch.Tensor] = functools.partial(
                _loss, case, _weights(case, po.rank()).to(po.device())
            )
            loss = torch.compile(loss, fullgraph=True, backend=compiler) if compiler else loss
            wants = _wanted(case)
            alone = [] if compiler else [[number] for number in range(len(wants))]
            for needed in [list(range(len(wants))), *alone]:
                leaves = [each.to(po.device(), copy=True) for each in _leaves(case, po.rank())]
                for number in needed:
                    leaves[number].requires_grad_()
                loss(*leaves).backward()
                po.check()
                for number, (leaf, want) in enumerate(zip(leaves, wants, strict=True)):
                    where = f"{case.operator}, {case.name}, {needed}: gradient {number}"
                    if number not in needed:
                        problems += [] if leaf.grad is None else [f"{where} was not asked for"]
                    elif leaf.grad is None or (found := difference(leaf.grad, want)) is not None:
                        problems.append(f"{where}: {'none' if leaf.grad is None else found}")
                    elif leaf.grad.stride() != leaf.stride():
                        problems.append(f"{where}: strides {leaf.grad.stride()}")
    return problems


@pytest.mark.parametrize(
    ("compiler", "world", "has_group"),
    [
        (None, 1, False),
        (None, 2, True),
        (None, 3, False),
        ("aot_eager", 2, False),
        pytest.param("inductor", 2, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process_that_multiplies(
    backend: str, compiler: str | None, world: int, has_group: bool
) -> None:
    assert in_processes(_gradients, world, backend, compiler, has_group, timeout=280) == [[]] * world


# ---- torch -----------------------------------------------------------------------------------------------------------


def _ones(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=po.device())


def _opcheck(operator: str) -> list[str]:
    rng = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(s, generator=rng).to(po.device(), BFLOAT16) for s in ((4, 4, 24), (24, 32), (32,), (4, 4, 32))
    ]
    rest: dict[str, tuple[Any, ...]] = {
        ALL_TO_ALL: ("auto", 1),
        REDUCE_SCATTER: ("mean", 1, FLOAT32, "auto", 1),
        ALL_REDUCE: (None, "unfused"),
    }
    count = 2 if operator == ALL_TO_ALL else 4
    recorded = [tensor.clone().requires_grad_() for tensor in tensors[:count]]
    out = po.empty(4, 4, 32, dtype=BFLOAT16)
    plain, with_out = (getattr(torch.ops.persistent_ops, name) for name in (operator, f"{operator}_out"))
    calls = {
        "plain": (plain, (*tensors[:2], *[None] * (count - 2), *rest[operator]), {}),
        "recorded": (plain, (*recorded, *rest[operator]), {}),
    }
    assert_schemas(operator, "out")
    writing = {"out": (with_out, (*tensors[:count], *rest[operator]), {"out": out})}
    if operator == REDUCE_SCATTER:
        return opcheck_problems({**calls, **writing})
    # The other checks call it with clones of `out` outside of the symmetric heap.
    return opcheck_problems(calls) + opcheck_problems(writing, ["test_autograd_registration"])


@each_operator
def test_opcheck(backend: str, operator: str) -> None:
    assert in_world(_opcheck, 1, backend, operator) == [[]]


def _compiled(operator: str) -> list[str | None]:
    """Between torch operators, with several numbers of rows. A result that is made in the graph is in no heap."""
    function, b, problems = getattr(po, operator), _ones(24, 32), []

    def block(a: torch.Tensor) -> torch.Tensor:
        hidden = function(torch.relu(a), b)
        out = torch.empty_like(hidden) if operator == REDUCE_SCATTER else None
        return 2 * function(-a, b, out=out) + hidden

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for rows in (4, 6, 16):
        a = torch.arange(rows * 24, device=po.device()).view(rows, 24).fmod(7).sub(3).to(BFLOAT16)
        want = (2 * (-a.float() @ b.float()) + torch.relu(a).float() @ b.float()).to(BFLOAT16)
        problems += [difference(each(a), want) for each in (compiled, block)]
    return problems


@each_operator
def test_compiled_function_is_one_graph(backend: str, operator: str) -> None:
    assert in_world(_compiled, 1, backend, operator) == [[None] * 6]


def _layers(width: int = 1024) -> Chain:
    """One of each kind, of the result of the previous one."""
    rank, world, rng = po.rank(), po.world_size(), torch.Generator().manual_seed(5)
    # One row of each column is not zero, so that sums stay small whole numbers.
    picks = torch.randint(width, (3, world, width), generator=rng)
    signs = torch.randint(0, 2, picks.shape, generator=rng).to(BFLOAT16) * 2 - 1
    starts = torch.randint(-3, 4, (NUM_INPUTS, world * 160, width), generator=rng).to(BFLOAT16)
    own = torch.zeros(3, width, width, dtype=BFLOAT16).scatter_(1, picks[:, rank, None], signs[:, rank, None])
    own = own.to(po.device())

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = po.gemm_all_to_all(x, own[0], algorithm="fused")
        sums = po.gemm_reduce_scatter(rows, own[1], algorithm="fused")
        return po.gemm_all_reduce(sums, own[2], algorithm="fused")

    def expected(x: torch.Tensor) -> torch.Tensor:
        given = [x] * world
        for layer, operator in enumerate(OPERATORS):
            case = Case("", tuple(given[0].shape[:1]), width, width, operator=operator)
            products = [signs[layer, pe] * given[pe][:, picks[layer, pe]] + 0.0 for pe in range(world)]
            given = [of_rank(case, products, pe, 1) for pe in range(world)]
        return given[0]

    return Chain(run, list(starts), [expected(start) for start in starts])


def _eager_layers() -> list[str | None]:
    chain = _layers(64)
    pairs = zip(chain.starts, chain.wants, strict=True)
    return [difference(chain.run(start.to(po.device())), want) for start, want in pairs]


def test_layers_of_each_kind(backend: str) -> None:
    assert in_world(_eager_layers, 2, backend) == [[None] * NUM_INPUTS] * 2


class TestGraphs(ChainSuite):
    operator = REDUCE_SCATTER
    cases = (
        Case("graphs: one tile", (8,), 16, 8),
        Case("graphs: ragged", (19,), 40, 72, **_ADDED),
        Case("graphs: fp16", (2, 6), 24, 16, FLOAT16, **_ADDED),
    )
    ways = OPERATORS
    growing = (
        Case("growing: small", (8,), 16, 8),
        Case("growing: large", (150,), 16, 264),
        Case("growing: medium", (40,), 24, 72),
    )
    chains: ClassVar = {"layers": ChainTest(_layers, repeats=2, share=3)}

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        own = replace(case, operator=way)
        if way == ALL_TO_ALL:
            own = replace(own, has_bias=False, has_residual=False)
        inputs = [make_inputs(own, po.world_size(), turn) for turn in range(NUM_INPUTS)]

        def act(a: torch.Tensor, b: torch.Tensor, *added: torch.Tensor, way: str) -> torch.Tensor:
            options = dict(zip(("bias", "residual"), added, strict=bool(added)))
            result: torch.Tensor = getattr(po, own.operator)(a, b, algorithm="fused", **options)
            return result

        tensors = [
            [t for t in (*of_all.factors[po.rank()], *of_all.added[po.rank()]) if t is not None] for of_all in inputs
        ]
        wants = [[expected_bits(own, of_all, po.rank())] for of_all in inputs]
        return Call(f"{own.name}, {way}", way, act, tensors, wants)

    @classmethod
    def first_calls(cls) -> dict[str, Call]:
        return {way: cls.call(cls.cases[0], way) for way in cls.ways}


# ---- arguments -------------------------------------------------------------------------------------------------------


def _good(operator: str) -> Arguments:
    shape = (6, 2, 8)
    arguments: Arguments = {"a": _ones(6, 2, 16), "b": _ones(16, 8)}
    if operator != ALL_TO_ALL:
        arguments |= {"bias": _ones(8), "residual": _ones(*shape)}
    out = _ones(*shape) if operator == REDUCE_SCATTER else po.empty(shape, dtype=BFLOAT16)
    return {**arguments, "out": out}


def _is_good(given: Arguments, result: torch.Tensor) -> bool:
    return tuple(result.shape) == (6, 2, 8) and bool((result == (18 if "bias" in given else 16)).all())


_SPECS = (
    TensorSpec("a", "... K", DTYPES, is_contiguous=False),
    TensorSpec("b", "K N", "a", is_contiguous=False),
    TensorSpec("bias", "N", "a"),
    TensorSpec("residual", "... N", DTYPES),
    TensorSpec("out", "... N", DTYPES),
)


def _function(operator: str) -> Function:
    specs = [spec for spec in _SPECS if operator != ALL_TO_ALL or spec.name not in ("bias", "residual")]
    return Function(getattr(po, operator), lambda: _good(operator), _is_good, TensorSpecs(*specs), ("a", "b"))


def _shared() -> Arguments:
    """Return a result that shares memory with a column of a, in the heap."""
    memory = po.empty(6 * 2 * 32, dtype=BFLOAT16)
    return {"a": memory.view(6, 2, 32)[..., 8:24], "out": memory[32 : 32 + 96].view(6, 2, 8)}


def _wrong(operator: str) -> dict[str, Wrong]:
    """What all three refuse."""
    wrong = functools.partial(Wrong, operator)
    found = {
        "algorithm": wrong(given_as(algorithm="ring"), ValueError, "^algorithm: .*'fused', 'unfused', got 'ring'"),
        "no algorithm": wrong(given_as(algorithm=None), ValueError, "^algorithm: expected one of .*, got None"),
        "a vector": wrong(lambda given: {"a": _ones(16)}, ValueError, r"^a: expected two or more .*, got \[16\]"),
        "b of three dimensions": wrong(
            lambda given: {"b": _ones(1, 16, 8)}, ValueError, r"^b: expected \[16, N\], as a"
        ),
        "other depths": wrong(
            lambda given: {"b": _ones(15, 8)}, ValueError, r"^b: expected \[16, N\].*, got \[15, 8\]"
        ),
        "fp16 as out": wrong(
            lambda given: {"out": given["out"].view(FLOAT16)},
            TypeError,
            r"^out: expected a's dtype torch\.bfloat16, got",
        ),
        "a's shape as out's": wrong(
            lambda given: {"out": _ones(6, 3, 8), "residual": None} if "bias" in given else {"out": _ones(6, 3, 8)},
            ValueError,
            r"^out: expected the result's shape \[6, 2, 8\], got \[6, 3, 8\]",
        ),
        "out within a": wrong(lambda given: _shared(), ValueError, "^out: expected memory apart from a, got"),
        "out that is recorded": wrong(
            lambda given: {"a": _ones(6, 2, 16).requires_grad_()}, NotImplementedError, "^out: cannot be given where"
        ),
        "fused where N is 12": wrong(
            lambda given: {**dict.fromkeys(given), "a": given["a"], "b": _ones(16, 12), "algorithm": "fused"},
            NotImplementedError,
            f"^algorithm: {operator} cannot be fused here: N is no multiple of 8",
        ),
    }
    if operator != REDUCE_SCATTER:
        found["ordinary out"] = wrong(lambda given: {"out": _ones(6, 2, 8)}, po.NotSymmetricError, "^out: .* po.empty")
        found["ordinary out, unfused"] = wrong(
            lambda given: {"out": _ones(6, 2, 8), "algorithm": "unfused"}, po.NotSymmetricError, "^out: .* po.empty"
        )
        found["out that begins between vectors"] = wrong(
            lambda given: {"out": po.empty(97, dtype=BFLOAT16)[1:].view(6, 2, 8)},
            ValueError,
            "^out: expected a tensor that begins at a multiple of 16 bytes, got offset",
        )
    if operator != ALL_TO_ALL:
        found["wire_dtype"] = wrong(
            given_as(wire_dtype=FLOAT16), TypeError, r"^wire_dtype: expected torch\.bfloat16 or torch\.float32, got"
        )
        found["fp16 as residual"] = wrong(
            lambda given: {"residual": given["residual"].half()}, TypeError, "^residual: expected a's dtype"
        )
        found["out that is the residual"] = wrong(
            lambda given: {"residual": given["out"]}, ValueError, "^out: expected memory apart from residual, got"
        )
    return {f"{operator}, {name}": each for name, each in found.items()}


class TestArguments(ArgumentSuite):
    functions: ClassVar = {operator: _function(operator) for operator in OPERATORS}
    wrong: ClassVar = {
        **{name: each for operator in OPERATORS for name, each in _wrong(operator).items()},
        "op": Wrong(REDUCE_SCATTER, given_as(op="max"), ValueError, "^op: expected one of 'sum', 'mean', got 'max'"),
        "scatter_dim": Wrong(
            REDUCE_SCATTER, given_as(scatter_dim=2), ValueError, "^scatter_dim: expected 0 or 1, got 2"
        ),
        "negative scatter_dim": Wrong(REDUCE_SCATTER, given_as(scatter_dim=-1), ValueError, "^scatter_dim: .*, got -1"),
        "scatter_dim of K": Wrong(
            REDUCE_SCATTER,
            lambda given: {**dict.fromkeys(given), "a": _ones(6, 16), "b": given["b"], "scatter_dim": 1},
            ValueError,
            r"^scatter_dim: expected a dimension of a's rows \[6\], got 1",
        ),
    }


def _undivided() -> list[str]:
    a, b, world = _ones(3 * po.world_size() - 1, 2, 16), _ones(16, 8), po.world_size()
    calls: Sequence[Callable[[], torch.Tensor]] = (
        lambda: po.gemm_all_to_all(a, b),
        lambda: po.gemm_reduce_scatter(a, b),
        lambda: po.gemm_reduce_scatter(a.transpose(0, 1), b, scatter_dim=1),
    )
    told = ["; ".join(error_of(each)[:2]) for each in calls]
    assert bool((po.gemm_all_reduce(a, b) == 16 * world).all()), "the world has suffered"
    return told


@pytest.mark.parametrize("world", [2, 3])
def test_rows_that_the_pes_cannot_share(backend: str, world: int) -> None:
    text = f"ValueError; a: expected a multiple of {world}, the number of PEs, in dimension %d, got {3 * world - 1}"
    assert in_world(_undivided, world, backend) == [[text % dim for dim in (0, 0, 1)]] * world
