"""all_reduce and all_reduce_rms_norm: exact bits in every world, faults and recovery, arguments, torch.

Graphs are in test_all_reduce_graphs.py, places of packets in test_all_reduce_places.py, the protocol under
ThreadSanitizer in test_all_reduce_sanitizer.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from all_reduce_cases import (
    ALGORITHMS,
    CASES,
    DTYPES,
    FEW,
    AllReduceTrial,
    Case,
    Inputs,
    call,
    make_inputs,
    norm_model,
    problem_of,
    sum_model,
)
from bits import NUM_ITERATIONS, BitsSuite, CaseWorld, difference
from protocol import Mismatch, ProtocolSuite, Work
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_checks import assert_schemas, opcheck_problems
from worlds import TRANSPORTS, error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops.all_reduce import reference
from persistent_ops.ops.all_reduce_plan import FLOAT8, OPERATOR, SWITCH_POINTS, Tuning, choose_algorithm

MB = 1 << 20


class TestBits(BitsSuite):
    trial = AllReduceTrial
    halved_by = torch.bfloat16
    heap_bytes = 64 * MB
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, CASES),
        "4": CaseWorld(4, FEW, tuning={"work_groups": 3}),
        "8": CaseWorld(8, FEW),
        "2-staged": CaseWorld(2, FEW, {"transport": "staged"}),
        "3-staged-wg2": CaseWorld(3, FEW[1:3], {"transport": "staged", "host_options": {"wg_size": 2}}),
        "2-wg3": CaseWorld(2, FEW, {"host_options": {"wg_size": 3}}, {"work_groups": 2}),
        "3-rounds": CaseWorld(3, FEW, {"host_options": {"wg_size": 2}}, {"room_bytes": 1 << 20}),
    }

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))


# ---- guarantees ------------------------------------------------------------------------------------------------------


def _rounds() -> list[Any]:
    """Large tensors in rounds: packets in several launches, slices in many steps of one."""
    world = po.runtime.world.current()
    problems: list[Any] = []
    OPERATOR.tune(world, Tuning(room_bytes=100 << 10))
    case = Case("rounds", (65, 1000), torch.float16, norms=True)
    problems.append(problem_of(case, range(3)))
    problems.append(problem_of(Case("rounds, flat", (70001,)), (0, 1)))
    counts = {plan.algorithm: len(plan.launches) for plan in OPERATOR.state(world).plans.values()}
    OPERATOR.tune(world, None)
    problems.append(problem_of(case, (4,)))
    return [*problems, counts["one_shot"] > 2, counts["two_shot"] > 2, counts["slices"]]


@pytest.mark.parametrize("transport", ["auto", pytest.param("staged", marks=pytest.mark.host)])
def test_what_does_not_fit_goes_in_rounds(backend: str, transport: str) -> None:
    options = {} if transport == "auto" else {"transport": transport}
    assert in_world(_rounds, 2, backend, **options) == [[None, None, None, True, True, 1]] * 2


def _no_rows_of_a_width(width: int) -> list[Any]:
    """A row for whose packets there is no room, as of a bias: by slices, whether there are rows or not."""
    ones, weight = torch.ones(width, device=po.device()), torch.ones(width, device=po.device())
    found: list[Any] = []
    for rows in (0, 1):
        x = torch.ones(rows, width, device=po.device())
        total = po.all_reduce(x, bias=ones)
        also, normed = po.all_reduce_rms_norm(x, weight)
        found += [
            tuple(total.shape),
            bool((total == po.world_size() + 1).all()),
            tuple(also.shape),
            tuple(normed.shape),
        ]
    return found


def test_a_tensor_without_rows_may_be_as_wide_as_one_with(backend: str) -> None:
    width = 1 << 20
    shapes = [[(rows, width), True, (rows, width), (rows, width)] for rows in (0, 1)]
    assert in_world(_no_rows_of_a_width, 2, backend, width, heap_size=256 << 20) == [[*shapes[0], *shapes[1]]] * 2


def _batches() -> list[str]:
    """A row's bits do not depend on the rows beside it, the grid or the algorithm."""
    problems = []
    rng = torch.Generator().manual_seed(po.rank())
    xs, weight = torch.randn(9, 777, generator=rng), torch.randn(777, generator=torch.Generator().manual_seed(99))
    for dtype in DTYPES:
        x, w = xs.to(po.device(), dtype), weight.to(po.device(), dtype)
        whole = po.all_reduce_rms_norm(x, w, algorithm="slices")
        for algorithm in ALGORITHMS:
            for rows in (slice(0, 1), slice(3, 5), slice(2, 9), torch.tensor([8, 1, 4])):
                for groups in (None, 2):
                    OPERATOR.tune(po.runtime.world.current(), Tuning(work_groups=groups))
                    found = po.all_reduce_rms_norm(x[rows].contiguous(), w, algorithm=algorithm)
                    for name, part, all_rows in zip(("sum", "norm"), found, whole, strict=True):
                        if (what := difference(part, all_rows[rows].cpu())) is not None:
                            problems.append(f"{dtype}, {algorithm}, {rows}, {groups}, {name}: {what}")
    return problems


def test_a_row_has_the_same_bits_whatever_it_travels_with(backend: str) -> None:
    assert in_world(_batches, 2, backend) == [[], []]


def _specials() -> list[Any]:
    """NaN, infinities, overflow in rank order, zeros of both signs; float8 saturates."""
    found: list[Any] = []
    inf, nan = float("inf"), float("nan")
    first = po.rank() == 0
    x = torch.tensor([nan if first else 1, inf, inf if first else -inf, 60000.0, -0.0, 2.0**-24, 5.0])
    for algorithm in ALGORITHMS:
        total = po.all_reduce(x.to(po.device(), torch.float16), algorithm=algorithm).cpu()
        found.append([str(value) for value in total.tolist()])
        row = torch.tensor([[3.0, -4.0, 0.0, 0.5]], device=po.device(), dtype=torch.bfloat16) / 2
        ones = torch.ones(4, device=po.device(), dtype=torch.bfloat16)
        scale = torch.tensor(1e-3, device=po.device())
        norm = po.all_reduce_rms_norm(row, ones, scale=scale, algorithm=algorithm)[1]
        found.append(norm.float().cpu().tolist())
        row[0, 2] = nan
        norm = po.all_reduce_rms_norm(row, ones, scale=scale, algorithm=algorithm)[1]
        found.append(bool(norm.float().isnan().all()))
    return found


def test_special_values(backend: str) -> None:
    sums = ["nan", "inf", "nan", "inf", "-0.0", str(2.0**-23), "10.0"]
    for found in in_world(_specials, 2, backend):
        assert found == [sums, [[448.0, -448.0, 0.0, 192.0 + 16.0]], True] * 3 or found[0::3] == [sums] * 3
        assert all(row[0][:3] == [448.0, -448.0, 0.0] for row in found[1::3]) and all(found[2::3])


def test_the_model_is_close_to_fp64() -> None:
    case = Case("model", (4, 1030), torch.bfloat16, norms=True)
    inputs = make_inputs(case, 3, 5)
    total = sum_model(inputs)
    exact = reference(inputs.xs, inputs.bias, inputs.residual)
    assert ((total.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()
    root = (total.double().pow(2).mean(-1, keepdim=True) + inputs.eps).rsqrt()
    norm = total.double() * root * (inputs.weight_bias + inputs.weight.double())
    assert ((norm_model(total, inputs).double() - norm).abs() <= norm.abs() * 2.0**-8 + 1e-6).all()
    assert difference(norm_model(total * 1.01, inputs), norm_model(total, inputs)) is not None
    other = Inputs(inputs.xs[::-1], inputs.residual, inputs.bias, inputs.weight)
    assert difference(sum_model(other).float(), total.float()) is not None or case.dtype != torch.float32


def test_switch_points_are_a_table() -> None:
    assert max(SWITCH_POINTS) == 64
    assert all(one <= one_norm <= two for one, one_norm, two in SWITCH_POINTS.values())
    sizes = {
        norms: [choose_algorithm(2, 1 << bits, Tuning(), norms=bool(norms)) for bits in (10, 20, 24)]
        for norms in (0, 1)
    }
    assert sizes == {0: ["one_shot", "two_shot", "slices"], 1: ["one_shot", "one_shot", "slices"]}
    assert choose_algorithm(4, 1 << 10, Tuning(one_shot_bytes=0, two_shot_bytes=0), norms=True) == "slices"


# ---- late PEs, faults, recovery --------------------------------------------------------------------------------------

_CASE = Case("protocol", (6, 700), norms=True)


def _turns(backend: str, options: dict[str, Any]) -> list[str]:
    """PEs that are late in turn; shapes, algorithms and operators in a mixed order on one workspace."""
    po.init(backend, operator_timeout=30.0, heap_size=32 * MB, **options)
    problems = []
    cases = [_CASE, Case("turns: flat", (3001,), torch.float16), Case("turns: wide", (2, 4000), norms=True), CASES[1]]
    order = torch.Generator().manual_seed(3)  # the same on all PEs
    table = torch.arange(32.0, device=po.device()).view(8, 4)
    for turn in range(40):
        kind, which = (int(torch.randint(most, (), generator=order)) for most in (len(cases) + 2, 3))
        if turn % 7 == po.rank():
            time.sleep(0.02)
        if kind == len(cases):
            po.barrier()
        elif kind > len(cases):
            with torch.no_grad():
                po.gemv_all_reduce(table, table[0])
                po.embedding_all_to_all(
                    [table], torch.arange(6, device=po.device()), torch.arange(7, device=po.device())
                )
        else:
            inputs = make_inputs(cases[kind], po.world_size(), turn % NUM_ITERATIONS)
            found = difference(
                call(cases[kind], inputs, turn % NUM_ITERATIONS, ALGORITHMS[which])[0], sum_model(inputs)
            )
            problems += [f"turn {turn}: {found}"] if found else []
    po.check()
    po.finalize()
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_shapes_and_operators_in_turn(backend: str, options: dict[str, Any]) -> None:
    assert run_pes(_turns, 3, backend, options, timeout=120) == [[]] * 3


def _other(act: Callable[[torch.Tensor], object], *told: str) -> Mismatch:
    """PE 1's call where the others pass [6, 40] to all_reduce."""
    return Mismatch(lambda: act(torch.ones(6, 40, dtype=torch.bfloat16, device=po.device())), told)


class TestFaults(ProtocolSuite):
    operator = "all_reduce"
    ways = ALGORITHMS
    heap_bytes = 32 * MB
    absences = (*((each, "auto") for each in ALGORITHMS), ("two_shot", "staged"), ("slices", "staged"))
    mismatches: ClassVar = {
        "width": _other(
            lambda x: po.all_reduce(x[:, :39].contiguous(), algorithm="one_shot"),
            "the number of elements of x",
            "234 on PE 1",
        ),
        "dtype": _other(
            lambda x: po.all_reduce(x.half(), algorithm="one_shot"), "the dtype of x is ", "float16 on PE 1"
        ),
        "algorithm": _other(lambda x: po.all_reduce(x, algorithm="slices"), "algorithm is ", "slices on PE 1"),
        "residual": _other(
            lambda x: po.all_reduce(x, residual=x, algorithm="one_shot"), "epilogue", "residual on PE 1"
        ),
        "bias": _other(lambda x: po.all_reduce(x, bias=x[0], algorithm="one_shot"), "epilogue", "bias on PE 1"),
        "norm": _other(lambda x: po.all_reduce_rms_norm(x, x[0], algorithm="one_shot"), "epilogue", "norm on PE 1"),
        "barrier": _other(lambda x: po.barrier(), "barrier"),
    }
    first_call = "all_reduce"
    deaths = (("stopped", "two_shot"), ("killed", "slices"))
    deaths_on_gpus = (("stopped", "one_shot"), ("stopped", "slices"))

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        inputs = dataclasses.replace(make_inputs(_CASE, po.world_size(), iteration), scale=None)
        x, weight, residual, bias = (
            None if each is None else each.to(po.device())
            for each in (inputs.xs[po.rank()], inputs.weight, inputs.residual, inputs.bias)
        )
        assert x is not None and weight is not None
        out, norm_out = torch.ones_like(x), torch.ones_like(x)
        want = sum_model(inputs)
        norm = norm_model(want, inputs)
        run = functools.partial(
            po.all_reduce_rms_norm,
            x,
            weight,
            residual=residual,
            bias=bias,
            eps=inputs.eps,
            weight_bias=inputs.weight_bias,
            out=out,
            norm_out=norm_out,
            algorithm=way,
        )
        return Work(
            run,
            lambda: difference(out.cpu(), want) is None and difference(norm_out.cpu(), norm) is None,
            lambda: bool(out.isnan().all() and norm_out.isnan().all()),
            lambda: bool((out.isnan().cpu() | (out.cpu() == want)).all()),
        )

    @classmethod
    def meet(cls) -> object:
        return po.all_reduce(torch.ones(6, 40, dtype=torch.bfloat16, device=po.device()), algorithm="one_shot")


def _mismatch_of_slices() -> object:
    """The same where credit is awaited before anything is sent."""
    x = torch.ones(6, 40, dtype=torch.bfloat16, device=po.device())
    return po.all_reduce(x if po.rank() != 1 else x.half(), algorithm="slices")


def _mismatch_of_launches() -> object:
    """PE 1 leaves another number of rows to each launch."""
    x = torch.ones(400, 1000, device=po.device())
    OPERATOR.tune(po.runtime.world.current(), Tuning(room_bytes=(400 if po.rank() == 1 else 600) << 10))
    try:
        return po.all_reduce_rms_norm(x, x[0], algorithm="two_shot")
    finally:
        OPERATOR.tune(po.runtime.world.current(), None)


def _mismatched(backend: str, call: Callable[[], object]) -> tuple[str, str, float, bool]:
    po.init(backend, operator_timeout=60.0, heap_size=32 * MB)
    name, text, seconds = error_of(lambda: [call(), po.check()])
    po.recover()
    is_right = all(TestFaults.checked(2, way) for way in ALGORITHMS[1:])
    po.finalize()
    return name, text, seconds, is_right


@pytest.mark.parametrize(
    ("call", "told"), [(_mismatch_of_slices, "the dtype of x is "), (_mismatch_of_launches, "blocks_of_launch is ")]
)
def test_mismatch(backend: str, call: Callable[[], object], told: str) -> None:
    for name, text, seconds, is_right in run_pes(_mismatched, 3, backend, call, timeout=200):
        assert name == "ContractMismatchError" and "PE 1" in text and told in text, text
        assert seconds < 30.0 and is_right


# ---- arguments -------------------------------------------------------------------------------------------------------


def _good(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (3, 8), dtype=dtype, device=po.device())


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of [3, 8], the second one `count` elements behind the first."""
    room = _good(24 + count)
    return room[:24].view(3, 8), room[count:].view(3, 8)


_X, _W = "x", "weight"
# name: (arguments that differ from good ones, exception, text); those with a weight are for all_reduce_rms_norm.
WRONG: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "x is a list": (lambda: {_X: [1.0]}, TypeError, "x: expected a tensor, got list"),
    "x of int64": (
        lambda: {_X: _good().long()},
        TypeError,
        "x: expected float32, float16 or bfloat16, got torch.int64",
    ),
    "x with gaps": (
        lambda: {_X: _spread(_good())},
        ValueError,
        r"x: expected a contiguous tensor, got strides \(16, 2",
    ),
    "x sparse": (
        lambda: {_X: _good().to_sparse()},
        TypeError,
        "x: expected a plain dense tensor, got layout torch.sparse_coo",
    ),
    "x compressed": (
        lambda: {_X: _good().to_sparse_csr()},
        TypeError,
        "x: expected a plain dense tensor, got layout torch.sparse_csr",
    ),
    "x on meta": (
        lambda: {_X: _good().to("meta")},
        ValueError,
        "x: expected a tensor on (cpu|cuda:.), got one on meta",
    ),
    "scalar with bias": (
        lambda: {_X: _good(1)[0], "bias": _good(1)},
        ValueError,
        r"bias: expected shape \[D\], got \[1\]",
    ),
    "residual is a number": (lambda: {"residual": 1.0}, TypeError, "residual: expected a tensor, got float"),
    "residual dtype": (lambda: {"residual": _good().half()}, TypeError, "residual: expected x's dtype torch.float32"),
    "residual shape": (
        lambda: {"residual": _good(3, 7)},
        ValueError,
        r"residual: expected shape \[3, 8\], got \[3, 7\]",
    ),
    "bias shape": (lambda: {"bias": _good(3)}, ValueError, r"bias: expected shape \[8\], got \[3\]"),
    "bias dtype": (lambda: {"bias": _good(8).double()}, TypeError, "bias: expected x's dtype"),
    "out shape": (lambda: {"out": _good(8, 3)}, ValueError, r"out: expected shape \[3, 8\], got \[8, 3\]"),
    "out dtype": (lambda: {"out": _good().half()}, TypeError, "out: expected x's dtype"),
    "out with gaps": (lambda: {"out": _spread(_good())}, ValueError, "out: expected a contiguous tensor"),
    "out overlaps x": (lambda: dict(zip((_X, "out"), _part(4), strict=True)), ValueError, "out: expected x itself or"),
    "out overlaps residual": (
        lambda: dict(zip(("residual", "out"), _part(23), strict=True)),
        ValueError,
        "out: expected residual itself or memory apart from residual",
    ),
    "out is bias": (lambda: {_X: (b := _good(8)) + 1, "bias": b, "out": b}, ValueError, "out: expected memory apart"),
    "out in scale": (
        lambda: {_W: _good(8), "out": (o := _good()), "scale": o[1, 2:3]},
        ValueError,
        "out: expected memory apart from scale",
    ),
    "norm_out in scale": (
        lambda: {_W: _good(8), "scale": (s := _good())[2, :1], "norm_out": s.view(-1).view(FLOAT8)[60:84].view(3, 8)},
        ValueError,
        "norm_out: expected memory apart from scale",
    ),
    "algorithm": (lambda: {"algorithm": "ring"}, ValueError, "algorithm: expected one of 'auto', 'one_shot', .*'ring'"),
    "weight is None": (lambda: {_W: None}, TypeError, "weight: expected a tensor, got NoneType"),
    "weight shape": (lambda: {_W: _good(3)}, ValueError, r"weight: expected shape \[8\], got \[3\]"),
    "weight dtype": (lambda: {_W: _good(8).half()}, TypeError, "weight: expected x's dtype torch.float32"),
    "negative eps": (lambda: {_W: _good(8), "eps": -1.0}, ValueError, "eps: expected a number of at least 0"),
    "eps is NaN": (lambda: {_W: _good(8), "eps": float("nan")}, ValueError, "eps: expected a number"),
    "eps is none": (lambda: {_W: _good(8), "eps": "small"}, TypeError, "eps: expected a number, got 'small'"),
    "large weight_bias": (lambda: {_W: _good(8), "weight_bias": 1e300}, ValueError, "weight_bias: expected a finite"),
    "weight_bias": (lambda: {_W: _good(8), "weight_bias": float("inf")}, ValueError, "weight_bias: expected a finite"),
    "norm_out shape": (lambda: {_W: _good(8), "norm_out": _good(8)}, ValueError, r"norm_out: expected shape \[3, 8\]"),
    "norm_out dtype": (lambda: {_W: _good(8), "norm_out": _good().half()}, TypeError, "norm_out: expected x's dtype"),
    "float8 without scale": (
        lambda: {_W: _good(8), "norm_out": _good().to(FLOAT8)},
        ValueError,
        "scale: expected a float32 tensor for a norm_out of torch.float8_e4m3fn",
    ),
    "scale without float8": (
        lambda: {_W: _good(8), "norm_out": _good(), "scale": _good(1)},
        TypeError,
        "norm_out: expected torch.float8_e4m3fn where scale is given",
    ),
    "scale shape": (
        lambda: {_W: _good(8), "scale": _good(2)},
        ValueError,
        r"scale: expected one element, got shape \[2\]",
    ),
    "scale dtype": (lambda: {_W: _good(8), "scale": _good(1).half()}, TypeError, "scale: expected float32"),
    "norm_out is out": (
        lambda: {_W: _good(8), "out": (o := _good()), "norm_out": o},
        ValueError,
        "norm_out: expected memory apart from out",
    ),
    "float8 norm_out in x": (
        lambda: {
            _W: _good(8),
            _X: (x := _good()),
            "norm_out": x.view(-1).view(FLOAT8)[:24].view(3, 8),
            "scale": _good(1),
        },
        ValueError,
        "norm_out: expected x itself or memory apart from x",
    ),
}


def _call_with(arguments: dict[str, Any]) -> None:
    given = {_X: _good(), **arguments}
    if _W in given or given.keys() & {"eps", "weight_bias", "norm_out", "scale"}:
        po.all_reduce_rms_norm(given.pop(_X), given.pop(_W), **given)
    else:
        po.all_reduce(given.pop(_X), **given)


def _wrong_calls() -> dict[str, tuple[str, str, float]]:
    outcomes = {name: error_of(lambda make=make: _call_with(make())) for name, (make, _, _) in WRONG.items()}
    assert torch.equal(po.all_reduce(_good()).cpu(), torch.ones(3, 8)), "the world has suffered"
    return outcomes


@functools.cache
def _outcomes(backend: str) -> dict[str, tuple[str, str, float]]:
    return in_world(_wrong_calls, 1, backend)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(backend: str, name: str) -> None:
    _, error, text = WRONG[name]
    kind, message, _ = _outcomes(backend)[name]
    assert kind == error.__name__ and re.search(text, message), f"{kind}: {message}"


def _small_heap() -> list[Any]:
    world = po.runtime.world.current()
    OPERATOR.tune(world, Tuning(room_bytes=128 << 10, one_shot_bytes=1 << 20))
    row = torch.ones(2, 90000, device=po.device())
    refused = error_of(lambda: po.all_reduce_rms_norm(row, row[0], algorithm="one_shot"))
    totals = [po.all_reduce_rms_norm(row, row[0], algorithm=name)[0] for name in ("slices", "auto")]
    flat = po.all_reduce(row.view(-1))
    launches = {(plan.algorithm, len(plan.launches)) for plan in OPERATOR.state(world).plans.values()}
    right = [bool((total == po.world_size()).all()) for total in (*totals, flat)]
    return [refused[0], "algorithm='slices'" in refused[1], right, sorted(launches)]


def test_a_row_without_room_for_its_packets(backend: str) -> None:
    want = ["ValueError", True, [True] * 3, [("slices", 1)]]  # which "auto" takes where packets would go in rounds
    assert in_world(_small_heap, 2, backend) == [want] * 2


def _unfit_tunings() -> list[tuple[str, str]]:
    world, x = po.runtime.world.current(), torch.ones(1000, device=po.device())
    found = []
    for tuning in (Tuning(threads=100), Tuning(room_bytes=1000), Tuning(warp_blocks=3)):
        OPERATOR.tune(world, tuning)
        for algorithm in ("slices", "two_shot"):
            found.append(error_of(lambda algorithm=algorithm: po.all_reduce(x, algorithm=algorithm))[:2])
    return found


def test_tunings_without_room_are_refused(backend: str) -> None:
    found = in_world(_unfit_tunings, 1, backend)[0]
    assert {kind for kind, _ in found} == {"ValueError"}
    starts = ["threads", "threads", "threads, room_bytes", "room_bytes", "warp_blocks: expected 1 or 2, got 3"]
    for (_, text), start in zip(found, [*starts, starts[-1]], strict=True):
        assert text.startswith(start)


def test_use_before_init_and_keywords() -> None:
    with pytest.raises(RuntimeError, match=r"not initialized in this process: call persistent_ops\.init\(\) first"):
        po.all_reduce(torch.ones(3))
    with pytest.raises(TypeError, match="positional"):
        po.all_reduce(torch.ones(3), torch.ones(3))  # type: ignore[misc]


# ---- torch -----------------------------------------------------------------------------------------------------------


def _opcheck() -> list[str]:
    operators = torch.ops.persistent_ops
    x, weight, scale = _good(2, 20), _good(20), _good(1)
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "plain": (operators.all_reduce, (x, None, weight, "auto"), {}),
        "out": (operators.all_reduce_out, (x, x + 1, None, "slices"), {"out": torch.empty_like(x)}),
        "norm": (operators.all_reduce_rms_norm, (x, weight, x + 1, None, None, "auto", 1e-6, 0.0), {}),
        "float8": (operators.all_reduce_rms_norm, (x, weight, None, None, scale, "one_shot", 1e-6, 1.0), {}),
        "norm out": (
            operators.all_reduce_rms_norm_out,
            (x, weight, None, None, None, "two_shot", 1e-6, 0.0),
            {"out": torch.empty_like(x), "norm_out": torch.empty_like(x)},
        ),
    }
    return opcheck_problems(calls)


def test_opcheck(backend: str) -> None:
    assert in_world(_opcheck, 1, backend) == [[]]


def test_the_schemas_declare_what_is_written() -> None:
    assert_schemas("all_reduce", "out")
    assert_schemas("all_reduce_rms_norm", "out", "norm_out")


def _in_torch() -> list[str]:
    """The operator and the function, autograd, fake tensors, version counters."""
    problems = []
    x, weight = _good(), _good(8)
    with torch.inference_mode():
        pairs = [(torch.ops.persistent_ops.all_reduce(x, x, weight, "auto"), po.all_reduce(x, residual=x, bias=weight))]
        of_operator = torch.ops.persistent_ops.all_reduce_rms_norm(x, weight, x, None, None, "auto", 1e-6, 0.0)
        pairs += zip(of_operator, po.all_reduce_rms_norm(x, weight, residual=x), strict=True)
    problems += ["the operator and the function differ" for pair in pairs if difference(*pair)]
    recorded = x.clone().requires_grad_()
    total, norm = po.all_reduce_rms_norm(recorded, weight)
    for result in (total, norm, po.all_reduce(recorded)):
        kind, text, _ = error_of(lambda result=result: result.sum().backward())
        if kind != "NotImplementedError" or "forward only" not in text:
            problems.append(f"backward: {kind}: {text}")
    for written in ({"out": x.clone()}, {"norm_out": x.clone()}):
        kind, text, _ = error_of(lambda written=written: po.all_reduce_rms_norm(recorded, weight, **written))
        if kind != "NotImplementedError" or not text.startswith(next(iter(written))):
            problems.append(f"{kind}: {text}")
    out, norm_out = torch.zeros_like(x), torch.zeros_like(x)
    versions = out._version, norm_out._version
    po.all_reduce_rms_norm(x, weight, out=out, norm_out=norm_out)
    if (out._version, norm_out._version) != (versions[0] + 1, versions[1] + 1):
        problems.append("version counters stay")
    only = po.all_reduce_rms_norm(x, weight, norm_out=norm_out)
    if only[1] is not norm_out or not torch.equal(only[0], out):
        problems.append("norm_out alone")
    with FakeTensorMode() as mode:
        fake, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        results = po.all_reduce_rms_norm(fake, fake_weight, scale=mode.from_tensor(_good(1)))
        kinds = [(type(t), t.shape, t.dtype) for t in (*results, po.all_reduce(fake, bias=fake_weight))]
        if kinds != [(FakeTensor, x.shape, dtype) for dtype in (x.dtype, FLOAT8, x.dtype)]:
            problems.append(f"fake: {kinds}")
        total, norm = po.all_reduce_rms_norm(fake, fake_weight, norm_out=(norm_out := torch.empty_like(fake)))
        if norm is not norm_out or type(total) is not FakeTensor or total.shape != x.shape:
            problems.append(f"fake, norm_out alone: {total}")
        with pytest.raises(ValueError, match="algorithm: expected"):
            po.all_reduce(fake, algorithm="ring")
        with pytest.raises(ValueError, match="bias: expected"):
            po.all_reduce(fake, bias=fake)
    return problems


def test_in_torch(backend: str) -> None:
    assert in_world(_in_torch, 1, backend) == [[]]


def _compiled() -> list[bool]:
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm_out = torch.empty_like(x)
        hidden, norm = po.all_reduce_rms_norm(torch.relu(x), weight, residual=residual, norm_out=norm_out)
        out = torch.empty_like(hidden)
        po.all_reduce(2 * norm, residual=hidden, out=out)
        return out, hidden + 1

    compiled = torch.compile(block, fullgraph=True)
    given = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(po.device()), _good(3, 40), _good(40)
    return [torch.allclose(a, b) for a, b in zip(compiled(*given), block(*given), strict=True)]


def test_compiled_function_is_one_graph(backend: str) -> None:
    assert in_world(_compiled, 1, backend) == [[True, True]]
