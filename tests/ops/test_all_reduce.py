"""all_reduce and all_reduce_rms_norm: exact bits in every world, faults and recovery, arguments.

See also: torch in test_forward_only.py, graphs in test_all_reduce_graphs.py, places of packets in
test_all_reduce_places.py, the protocol under ThreadSanitizer in test_all_reduce_sanitizer.py.
"""

from __future__ import annotations

import dataclasses
import functools
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
    make_inputs,
    norm_model,
    problem_of,
    sum_model,
)
from arguments import Arguments, ArgumentSuite, Function, Wrong, given_as
from bits import BitsSuite, CaseWorld, difference
from protocol import Mismatch, ProtocolSuite, Work
from worlds import error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops.all_reduce import reference
from persistent_ops.ops.all_reduce_plan import FLOAT8, OPERATOR, SWITCH_POINTS, Tuning, choose_algorithm
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

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
    """Large tensors in rounds: packets use several launches, slices use many steps of one launch."""
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
    """A row whose packets do not fit is sent by slices, as a bias or among other rows."""
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


# ---- faults, recovery ------------------------------------------------------------------------------------------------

_CASE = Case("protocol", (6, 700), norms=True)


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
    """The same faults where a PE awaits credit before it sends anything."""
    x = torch.ones(6, 40, dtype=torch.bfloat16, device=po.device())
    return po.all_reduce(x if po.rank() != 1 else x.half(), algorithm="slices")


def _mismatch_of_launches() -> object:
    """PE 1 passes a different number of rows to each launch."""
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


def _part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of [3, 8], the second one `count` elements after the first."""
    room = _good(24 + count)
    return room[:24].view(3, 8), room[count:].view(3, 8)


def _given(*names: str) -> dict[str, Any]:
    return {name: _good(8) if name in ("weight", "bias") else _good() for name in names}


_TENSORS = (
    TensorSpec("x", "... D?"),
    TensorSpec("weight", "D", "x"),
    TensorSpec("residual", "... D?", "x"),
    TensorSpec("bias", "D", "x"),
    TensorSpec("out", "... D?", "x"),
    TensorSpec("norm_out", "... D?", (*DTYPES, FLOAT8)),
    TensorSpec("scale", "one", (torch.float32,)),
)


def _declared(*names: str) -> TensorSpecs:
    return TensorSpecs(*(spec for spec in _TENSORS if spec.name in names))


def _is_sum(given: dict[str, Any], result: Any) -> bool:
    total = result if isinstance(result, torch.Tensor) else result[0]
    added = 1 + ("residual" in given) + ("bias" in given)
    return total.shape == given["x"].shape and bool((total == added).all())


_OF_SUM = ("x", "residual", "bias", "out")
_OF_NORM = ("x", "weight", "residual", "bias", "out", "norm_out")


def _in_sum(error: type[Exception], text: str, changes: Callable[[Arguments], Arguments]) -> Wrong:
    return Wrong("all_reduce", changes, error, text)


def _in_norm(error: type[Exception], text: str, changes: Callable[[Arguments], Arguments]) -> Wrong:
    return Wrong("all_reduce_rms_norm", changes, error, text)


class TestArguments(ArgumentSuite):
    functions: ClassVar = {
        "all_reduce": Function(
            po.all_reduce, lambda: _given(*_OF_SUM), _is_sum, specs=_declared(*_OF_SUM), required=("x",)
        ),
        "all_reduce_rms_norm": Function(
            po.all_reduce_rms_norm,
            lambda: _given(*_OF_NORM),
            _is_sum,
            specs=_declared(*_OF_NORM),
            required=("x", "weight"),
        ),
        "all_reduce_rms_norm, float8": Function(
            po.all_reduce_rms_norm,
            lambda: {**_given("x", "weight"), "norm_out": _good().to(FLOAT8), "scale": _good(1)},
            _is_sum,
            specs=_declared("x", "weight", "norm_out", "scale"),
        ),
    }
    wrong: ClassVar = {
        "x compressed": _in_sum(
            TypeError,
            "x: expected a plain dense tensor, got layout torch.sparse_csr",
            lambda given: {"x": given["x"].to_sparse_csr()},
        ),
        "scalar with bias": _in_sum(
            ValueError,
            r"bias: expected shape \[D\], got \[1\]",
            lambda given: {"x": _good(1)[0], "bias": _good(1), "residual": None, "out": None},
        ),
        "out transposed": _in_sum(
            ValueError, r"out: expected shape \[3, 8\], got \[8, 3\]", lambda given: {"out": _good(8, 3)}
        ),
        "out overlaps x": _in_sum(
            ValueError, "out: expected x itself or", lambda given: dict(zip(("x", "out"), _part(4), strict=True))
        ),
        "out overlaps residual": _in_sum(
            ValueError,
            "out: expected residual itself or memory apart from residual",
            lambda given: dict(zip(("residual", "out"), _part(23), strict=True)),
        ),
        "out is bias": _in_sum(
            ValueError,
            "out: expected memory apart",
            lambda given: {"x": (b := _good(8)) + 1, "residual": None, "bias": b, "out": b},
        ),
        "algorithm": _in_sum(
            ValueError, "algorithm: expected one of 'auto', 'one_shot', .*'ring'", given_as(algorithm="ring")
        ),
        "negative eps": _in_norm(ValueError, "eps: expected a number of at least 0", given_as(eps=-1.0)),
        "eps is NaN": _in_norm(ValueError, "eps: expected a number", given_as(eps=float("nan"))),
        "eps is none": _in_norm(TypeError, "eps: expected a number, got 'small'", given_as(eps="small")),
        "large weight_bias": _in_norm(ValueError, "weight_bias: expected a finite", given_as(weight_bias=1e300)),
        "weight_bias": _in_norm(ValueError, "weight_bias: expected a finite", given_as(weight_bias=float("inf"))),
        "norm_out dtype": _in_norm(
            TypeError, "norm_out: expected x's dtype", lambda given: {"norm_out": _good().half()}
        ),
        "float8 without scale": _in_norm(
            ValueError,
            "scale: expected a float32 tensor for a norm_out of torch.float8_e4m3fn",
            lambda given: {"norm_out": _good().to(FLOAT8)},
        ),
        "scale without float8": _in_norm(
            TypeError,
            "norm_out: expected torch.float8_e4m3fn where scale is given",
            lambda given: {"scale": _good(1)},
        ),
        "out in scale": _in_norm(
            ValueError,
            "out: expected memory apart from scale",
            lambda given: {"out": (o := _good()), "norm_out": None, "scale": o[1, 2:3]},
        ),
        "norm_out in scale": _in_norm(
            ValueError,
            "norm_out: expected memory apart from scale",
            lambda given: {"scale": (s := _good())[2, :1], "norm_out": s.view(-1).view(FLOAT8)[60:84].view(3, 8)},
        ),
        "norm_out is out": _in_norm(
            ValueError,
            "norm_out: expected memory apart from out",
            lambda given: {"out": (o := _good()), "norm_out": o},
        ),
        "float8 norm_out in x": _in_norm(
            ValueError,
            "norm_out: expected x itself or memory apart from x",
            lambda given: {
                "x": (x := _good()),
                "norm_out": x.view(-1).view(FLOAT8)[:24].view(3, 8),
                "scale": _good(1),
            },
        ),
    }


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
    want = ["ValueError", True, [True] * 3, [("slices", 1)]]  # "auto" takes slices if packets would need rounds
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
