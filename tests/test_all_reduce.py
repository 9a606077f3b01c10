"""all_reduce and all_reduce_rms_norm: exact bits in every world, faults and recovery, arguments, torch, graphs, PDL.

The protocol under ThreadSanitizer is in test_all_reduce_sanitizer.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from kept_pes import in_processes
from protocol import Mismatch, ProtocolSuite, Work
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from worlds import CaseWorld, CaseWorlds, error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops.all_reduce import reference
from persistent_ops.ops.all_reduce_plan import FLOAT8, OPERATOR, SWITCH_POINTS, Tuning, choose_algorithm

MB = 1 << 20
ALGORITHMS = ("one_shot", "two_shot", "slices")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_ITERATIONS = 6


# ---- a model of the exact bits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What the PEs pass in one iteration, on the CPU."""

    xs: Sequence[torch.Tensor]
    residual: torch.Tensor | None
    bias: torch.Tensor | None
    weight: torch.Tensor
    eps: float = 1e-6
    weight_bias: float = 0.0
    scale: float | None = None


def sum_model(inputs: Inputs) -> torch.Tensor:
    """In fp32: the PEs in rank order, bias, residual; rounded once."""
    total = inputs.xs[0].float()
    for x in inputs.xs[1:]:
        total = total + x.float()
    for addend in (inputs.bias, inputs.residual):
        if addend is not None:
            total = total + addend.float()
    return total.to(inputs.xs[0].dtype)


def _tree(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension of 32 as a tree of neighbours."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _in_turn(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension one by one."""
    total = torch.zeros(values.shape[:-1])
    for value in values.unbind(-1):
        total = total + value
    return total


def norm_model(total: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Of the rounded sum: squares by chunks of 16 bytes, 32 chunks as a tree, 32 blocks as another one."""
    width, elements = total.shape[-1], 16 // total.element_size()
    values = total.float().reshape(-1, width)
    groups = -(-width // (32 * 32 * elements))
    padded = torch.zeros(len(values), groups * 32 * 32 * elements)
    padded[:, :width] = values * values
    of_blocks = _tree(_in_turn(padded.view(len(values), groups * 32, 32, elements)))
    squares = _tree(_in_turn(of_blocks.view(len(values), groups, 32).transpose(1, 2)))
    # Torch multiplies by the reciprocal of a divisor that is the same for all; numpy divides.
    mean = squares.numpy() / np.float32(width)
    factor = torch.from_numpy(np.float32(1) / np.sqrt(mean + np.float32(inputs.eps)))
    norm = values * factor[:, None] * (torch.tensor(inputs.weight_bias) + inputs.weight.float())
    if inputs.scale is None:
        return norm.to(total.dtype).view(total.shape)
    divided = torch.from_numpy(norm.numpy() / np.float32(inputs.scale))
    return divided.clamp(-448, 448).to(FLOAT8).view(total.shape)


def difference(found: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return how two tensors' bits differ, or None."""
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"{found.dtype} {list(found.shape)} instead of {want.dtype} {list(want.shape)}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    wrong = (found.cpu().contiguous().view(integer) != want.contiguous().view(integer)).nonzero()
    if not len(wrong):
        return None
    place = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {want.numel()} elements; {place}: {found[place].item()} instead of {want[place].item()}"


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A shape, the same on every PE.

    Attributes:
        norms: whether the norm is asked for.
        is_shifted: tensors begin one element behind an aligned address.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    norms: bool = False
    is_shifted: bool = False


CASES = [
    Case("one element", (1,)),
    Case("no element, fp16", (0, 8), torch.float16),
    Case("a scalar", ()),
    Case("ragged, fp32", (1003,), torch.float32),
    Case("a block", (2, 128)),
    Case("matrix, fp16", (7, 333), torch.float16),
    Case("larger", (9001,)),
    Case("shifted, fp16", (5, 77), torch.float16, is_shifted=True),
    Case("norm, no rows", (0, 64), norms=True),
    Case("norm, one row", (1, 4096), norms=True),
    Case("norm, ragged rows, fp16", (5, 301), torch.float16, norms=True),
    Case("norm, narrow rows, fp32", (67, 3), torch.float32, norms=True),
    Case("norm, many blocks, fp32", (2, 5000), torch.float32, norms=True),
    Case("norm, a batch", (3, 2, 520), norms=True),
    Case("norm, shifted", (3, 264), norms=True, is_shifted=True),
]
FEW = [case for case in CASES if case.name in ("ragged, fp32", "larger", "norm, a batch", "norm, ragged rows, fp16")]
# By iteration: what is passed, and where results go: to new memory, to an output, or into an input's place.
WAYS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((), "new", "new"),
    (("residual",), "new", "out"),
    (("residual", "bias"), "residual", "x"),
    (("bias",), "x", "new"),
    (("residual", "bias"), "out", "residual"),
    (("residual",), "x", "residual"),
)


def make_inputs(case: Case, world: int, iteration: int) -> Inputs:
    """Make what all PEs pass; another order of the sums would give other bits."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {iteration}".encode()))

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-4, 5, shape, generator=rng)).to(case.dtype)

    row = case.shape[-1:]
    passed = WAYS[iteration][0] if case.shape else ()
    return Inputs(
        [draw(*case.shape) for _ in range(world)],
        draw(*case.shape) if "residual" in passed else None,
        draw(*row) if "bias" in passed else None,
        draw(*row),
        eps=(1e-6, 0.0 if case.shape[-1:] == (4096,) else 1e-5, 1.0)[iteration % 3],
        weight_bias=float(iteration % 2),
        scale=0.07 if iteration % 3 == 1 else None,
    )


def placed(tensor: torch.Tensor | None, is_shifted: bool) -> torch.Tensor | None:
    """Return a copy on the device, one element behind an aligned address where it is to be shifted."""
    if tensor is None:
        return None
    if not is_shifted:
        return tensor.to(po.device(), copy=True)
    room = torch.full((tensor.numel() + 2,), float("nan")).to(po.device(), tensor.dtype)
    room[1:-1] = tensor.reshape(-1).to(po.device())
    return room[1:-1].view(tensor.shape)


def call(
    case: Case, inputs: Inputs, iteration: int, algorithm: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator in an iteration's way; return its results."""
    _, total_to, norm_to = WAYS[iteration]
    x = placed(inputs.xs[po.rank()], case.is_shifted)
    assert x is not None
    residual, bias = (placed(t, case.is_shifted) for t in (inputs.residual, inputs.bias))
    places = {"new": None, "x": x, "residual": residual, "out": torch.full_like(x, float("nan"))}
    out = places[total_to]
    if not case.norms:
        result = po.all_reduce(x, residual=residual, bias=bias, out=out, algorithm=algorithm)
        assert out is None or result is out
        return result, None
    scale = None if inputs.scale is None else torch.tensor([inputs.scale], device=po.device())
    places["out"] = torch.full_like(x, float("nan")).to(x.dtype if scale is None else FLOAT8)
    norm_out = places[norm_to]
    if norm_to in (total_to, "x", "residual") and (norm_to == total_to or scale is not None):
        norm_out = places["out"]
    weight = placed(inputs.weight, case.is_shifted)
    assert weight is not None
    total, norm = po.all_reduce_rms_norm(
        x,
        weight,
        residual=residual,
        bias=bias,
        eps=inputs.eps,
        weight_bias=inputs.weight_bias,
        out=out,
        norm_out=norm_out,
        scale=scale,
        algorithm=algorithm,
        **options,
    )
    assert (out is None or total is out) and (norm_out is None or norm is norm_out)
    return total, norm


def check_case(case: Case, iterations: Sequence[int] = range(NUM_ITERATIONS)) -> tuple[str | None, int]:
    """Run a case on this PE; return what is wrong, and a number for its bits."""
    problem, digest = None, 0
    for iteration in iterations:
        inputs = make_inputs(case, po.world_size(), iteration)
        want = sum_model(inputs)
        want_norm = norm_model(want, inputs) if case.norms else None
        for algorithm in (*ALGORITHMS, "auto") if iteration == 0 else ALGORITHMS:
            total, norm = call(case, inputs, iteration, algorithm)
            found = difference(total, want)
            if want_norm is not None and norm is not None:
                found = found or ((what := difference(norm, want_norm)) and f"norm: {what}")
            if found and problem is None:
                problem = f"iteration {iteration}, {algorithm}: {found}"
            digest = zlib.crc32(total.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    po.check()
    return problem, digest


def run_cases(backend: str, names: Sequence[str], options: dict[str, Any]) -> dict[str, tuple[str | None, int]]:
    """Run cases on this PE; `room_bytes` and `work_groups` are for the Tuning."""
    options = dict(options)
    tuning = {name: options.pop(name) for name in ("room_bytes", "work_groups") if name in options}
    po.init(backend, operator_timeout=30.0, heap_size=64 << 20, **options)
    try:
        if tuning:
            OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))
        return {case.name: check_case(case) for case in CASES if case.name in names}
    finally:
        po.finalize()


WORLDS = CaseWorlds(
    run_cases,
    {
        "1": CaseWorld(1, {}, CASES),
        "2": CaseWorld(2, {}, CASES),
        "3": CaseWorld(3, {}, CASES),
        "4": CaseWorld(4, {"work_groups": 3}, FEW),
        "8": CaseWorld(8, {}, FEW),
        "2-staged": CaseWorld(2, {"transport": "staged"}, FEW),
        "3-staged-wg2": CaseWorld(3, {"transport": "staged", "host_options": {"wg_size": 2}}, FEW[1:3]),
        "2-wg3": CaseWorld(2, {"host_options": {"wg_size": 3}, "work_groups": 2}, FEW),
        "3-rounds": CaseWorld(3, {"room_bytes": 1 << 20, "host_options": {"wg_size": 2}}, FEW),
    },
    halved_by=torch.bfloat16,
)


@pytest.mark.parametrize(("name", "case"), WORLDS.params())
def test_bits(backend: str, name: str, case: Case) -> None:
    WORLDS.assert_bits(backend, name, case)


# ---- guarantees ------------------------------------------------------------------------------------------------------


def _rounds() -> list[Any]:
    """Large tensors in rounds: packets in several launches, slices in many steps of one."""
    world = po.runtime.world.current()
    problems: list[Any] = []
    OPERATOR.tune(world, Tuning(room_bytes=100 << 10))
    case = Case("rounds", (65, 1000), torch.float16, norms=True)
    problems.append(check_case(case, range(3))[0])
    problems.append(check_case(Case("rounds, flat", (70001,)), (0, 1))[0])
    counts = {plan.algorithm: len(plan.launches) for plan in OPERATOR.state(world).plans.values()}
    OPERATOR.tune(world, None)
    problems.append(check_case(case, (4,))[0])
    return [*problems, counts["one_shot"] > 2, counts["two_shot"] > 2, counts["slices"]]


@pytest.mark.parametrize("transport", ["auto", pytest.param("staged", marks=pytest.mark.host)])
def test_what_does_not_fit_goes_in_rounds(backend: str, transport: str) -> None:
    options = {} if transport == "auto" else {"transport": transport}
    assert in_world(_rounds, 2, backend, **options) == [[None, None, None, True, True, 1]] * 2


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
        norms: [choose_algorithm(2, 1 << bits, Tuning(), norms=bool(norms)) for bits in (10, 18, 24)]
        for norms in (0, 1)
    }
    assert sizes == {0: ["one_shot", "two_shot", "slices"], 1: ["one_shot", "one_shot", "slices"]}
    assert choose_algorithm(4, 1 << 10, Tuning(one_shot_bytes=0, two_shot_bytes=0), norms=True) == "slices"


# ---- late PEs, faults, recovery --------------------------------------------------------------------------------------

_CASE = Case("protocol", (6, 700), norms=True)
TRANSPORTS = [
    pytest.param({}, id="direct"),
    pytest.param({"transport": "staged"}, id="staged", marks=pytest.mark.host),
]


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
            lambda x: po.all_reduce(x[:, :39].contiguous(), algorithm="one_shot"), "width=234", "width=240"
        ),
        "dtype": _other(lambda x: po.all_reduce(x.half(), algorithm="one_shot"), "dtype=float16", "dtype=bfloat16"),
        "algorithm": _other(lambda x: po.all_reduce(x, algorithm="slices"), "algorithm=slices", "algorithm=one_shot"),
        "residual": _other(lambda x: po.all_reduce(x, residual=x, algorithm="one_shot"), "residual=True"),
        "bias": _other(lambda x: po.all_reduce(x, bias=x[0], algorithm="one_shot"), "bias=True", "bias=False"),
        "norm": _other(lambda x: po.all_reduce_rms_norm(x, x[0], algorithm="one_shot"), "norm=True", "norm=False"),
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


def _slices_mismatched(backend: str) -> tuple[str, str, float, bool]:
    """The same where credit is awaited before anything is sent."""
    po.init(backend, operator_timeout=60.0, heap_size=32 * MB)
    x = torch.ones(6, 40, dtype=torch.bfloat16, device=po.device())
    name, text, seconds = error_of(
        lambda: [po.all_reduce(x if po.rank() != 1 else x.half(), algorithm="slices"), po.check()]
    )
    po.recover()
    is_right = TestFaults.checked(2, "slices")
    po.finalize()
    return name, text, seconds, is_right


def test_mismatch_of_slices(backend: str) -> None:
    for name, text, seconds, is_right in run_pes(_slices_mismatched, 3, backend, timeout=200):
        assert name == "ContractMismatchError" and "PE 1" in text and "dtype=float16" in text, text
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
    "x on meta": (
        lambda: {_X: _good().to("meta")},
        ValueError,
        "x: expected a tensor on (cpu|cuda:.), got one on meta",
    ),
    "scalar with bias": (lambda: {_X: _good(1)[0], "bias": _good(1)}, ValueError, r"x: expected \[\.\.\., D\]"),
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
    "algorithm": (lambda: {"algorithm": "ring"}, ValueError, "algorithm: expected one of 'auto', 'one_shot', .*'ring'"),
    "weight is None": (lambda: {_W: None}, TypeError, "weight: expected a tensor, got NoneType"),
    "weight shape": (lambda: {_W: _good(3)}, ValueError, r"weight: expected shape \[8\], got \[3\]"),
    "weight dtype": (lambda: {_W: _good(8).half()}, TypeError, "weight: expected x's dtype torch.float32"),
    "negative eps": (lambda: {_W: _good(8), "eps": -1.0}, ValueError, "eps: expected a number of at least 0"),
    "eps is NaN": (lambda: {_W: _good(8), "eps": float("nan")}, ValueError, "eps: expected a number"),
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
    for tuning in (Tuning(threads=100), Tuning(room_bytes=1000)):
        OPERATOR.tune(world, tuning)
        found.append(error_of(lambda: po.all_reduce(x, algorithm="slices"))[:2])
    return found


def test_tunings_without_room_are_refused(backend: str) -> None:
    for kind, text in in_world(_unfit_tunings, 1, backend)[0]:
        assert kind == "ValueError" and text.startswith("threads")


def test_use_before_init_and_keywords() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised in this process: call persistent_ops\.init\(\) first"):
        po.all_reduce(torch.ones(3))
    with pytest.raises(TypeError, match="positional"):
        po.all_reduce(torch.ones(3), torch.ones(3))  # type: ignore[misc]


# ---- torch -----------------------------------------------------------------------------------------------------------


def _opcheck() -> dict[str, str]:
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
    results = {}
    for name, (operator, arguments, written) in calls.items():
        checked = torch.library.opcheck(operator.default, arguments, written, raise_exception=False)
        results |= {f"{name} {test}": str(result) for test, result in checked.items()}
    return results


def test_opcheck(backend: str) -> None:
    results = in_world(_opcheck, 1, backend)[0]
    assert len(results) >= 20 and set(results.values()) == {"SUCCESS"}, results


def _in_torch() -> list[str]:
    """Autograd, fake tensors, version counters."""
    problems = []
    x, weight = _good(), _good(8)
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


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _pes() -> int:
    return max(2, min(4, torch.cuda.device_count()))


def _captured(program: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        result = program()
    return graph, result


def _draws(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> Iterator[list[torch.Tensor]]:
    for turn in range(count):
        yield [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * turn + pe)).to(dtype)
            for pe in range(po.world_size())
        ]


def _graphs(replays: int) -> list[str]:
    """Replay calls of every algorithm and size with changing inputs, an odd number of launches in the graph."""
    po.init("cuda", operator_timeout=30.0, heap_size=512 * MB)
    problems: list[str] = []
    calls = []
    for shape, dtype in (((1, 8192), torch.bfloat16), ((33, 1000), torch.float16), ((300, 7168), torch.bfloat16)):
        weight = torch.randn(shape[-1], generator=torch.Generator().manual_seed(5)).to(dtype)
        draws = list(_draws(shape, dtype, 5))
        inputs = [Inputs(xs, None, None, weight) for xs in draws]
        totals = [sum_model(each) for each in inputs]
        norms = [norm_model(total, each) for total, each in zip(totals, inputs, strict=True)]
        x = torch.empty(shape, dtype=dtype, device=po.device())
        for algorithm in ALGORITHMS:
            calls.append(
                (x, weight.to(po.device()), algorithm, [d[po.rank()].to(po.device()) for d in draws], totals, norms)
            )

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [po.all_reduce_rms_norm(x, weight, algorithm=algorithm) for x, weight, algorithm, *_ in calls]

    run()
    po.check()
    graph, results = _captured(run)
    for turn in range(replays):
        for x, _, _, own, _, _ in calls:
            x.copy_(own[turn % 5])
        for result in results:
            for tensor in result:
                tensor.fill_(float("nan"))
        graph.replay()
        for (x, _, algorithm, _, totals, norms), (total, norm) in zip(calls, results, strict=True):
            for name, found, want in (("sum", total, totals[turn % 5]), ("norm", norm, norms[turn % 5])):
                if (what := difference(found.cpu(), want)) is not None:
                    problems.append(f"replay {turn}, {list(x.shape)}, {algorithm}, {name}: {what}")
        if problems:
            break
    po.check()
    po.finalize()
    return problems


@pytest.mark.gpu
def test_graph_replays_with_changing_inputs() -> None:
    assert in_processes(_graphs, _pes(), 101, timeout=300) == [[]] * _pes()


def _first_calls_in_captures() -> list[Any]:
    """Neither the first call of a world nor that of a shape may be captured; what is refused leaves no trace."""
    x, weight = torch.ones(4, 64, device=po.device()), torch.ones(64, device=po.device())
    found: list[Any] = []
    for call in (lambda: po.all_reduce(x), lambda: po.all_reduce_rms_norm(x, weight)[0]):
        with pytest.raises(RuntimeError) as caught:
            _captured(call)
        found += [str(caught.value).split(":")[0], bool((call() == po.world_size()).all())]
    return found


@pytest.mark.gpu
def test_first_calls_inside_captures_are_refused(backend: str) -> None:
    want = ["all_reduce", True, "all_reduce_rms_norm", True]
    assert in_world(_first_calls_in_captures, 2, backend) == [want] * 2


def _chain(replays: int) -> list[str]:
    """Launches that begin before the one whose result they read has ended: all_reduce and GEMVs in a chain."""
    po.init("cuda", operator_timeout=30.0, heap_size=512 * MB)
    problems: list[str] = []
    width, world = 4096, po.world_size()
    # One nonzero column in each row of the weights, so that sums stay small whole numbers.
    rng = torch.Generator().manual_seed(5)
    picks = torch.randint(width, (world, width), generator=rng)
    weights = torch.zeros(width, width, dtype=torch.bfloat16)
    weights[torch.arange(width), picks[po.rank()]] = 1
    own = weights.to(po.device())
    starts = torch.randint(-3, 4, (5, width), generator=rng).to(torch.bfloat16)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        first = po.all_reduce(x, algorithm="one_shot")
        second = po.gemv_all_reduce(own, first, prefetch_weight=True)
        third = po.all_reduce(second, residual=first, algorithm="two_shot")
        fourth = po.all_reduce(third, algorithm="slices")
        return [first, second, third, fourth, po.all_reduce(fourth, residual=third, out=fourth, algorithm="one_shot")]

    def expected(x: torch.Tensor) -> torch.Tensor:
        first = x.float() * world
        second = first[picks].sum(0)
        third = second * world + first
        return third * world * world + third

    x = starts[0].to(po.device())
    wants = [expected(start).to(torch.bfloat16) for start in starts]
    run(x)
    po.check()
    graph, results = _captured(lambda: [run(x) for _ in range(3)])
    for turn in range(replays):
        x.copy_(starts[turn % 5])
        if turn % 7 == po.rank():
            torch.cuda._sleep(1_000_000)
        graph.replay()
        # Whole numbers that bf16 holds, but for the last sum, which is rounded once.
        if any(difference(result[-1].cpu(), wants[turn % 5]) for result in results):
            problems.append(f"replay {turn}: wrong")
    po.check()
    po.finalize()
    return problems


@pytest.mark.gpu
def test_successors_that_begin_early_read_the_results() -> None:
    assert in_processes(_chain, _pes(), 201, timeout=300) == [[]] * _pes()


def test_cases_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES) and len(FEW) == 4
