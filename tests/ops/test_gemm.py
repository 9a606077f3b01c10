"""gemm: exact bits for every layout, dtype and division, gradients, graphs, torch, arguments, the choice of a tile.

See also: the main loop under ThreadSanitizer in test_gemm_sanitizer.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from bits import UNIT, BitsSuite, CaseWorld, Outcome, Trial, difference
from gpu_kernels import GpuKernel
from graphs import NUM_INPUTS, Call, GraphSuite
from torch_checks import assert_schemas, opcheck_problems
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.gemm import _WARNED, OPERATOR, kernel_request, sample_requests
from persistent_ops.ops.product import CANDIDATES, Shape, Tile, Tuning, choose_tile
from persistent_ops.runtime.compile.jit import compile_cuda
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.world import current

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
        shape: M, K, N.
        a_k_major, b_k_major: see `Shape`.
        values: "whole": small whole numbers, of which all sums are exact; "normal"; "one-hot": rows of a have a single
            one.
        tuning: of the operator. The host has its own tiles, but takes `sharing`, `parts` and `stages`.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype = BFLOAT16
    a_k_major: bool = True
    b_k_major: bool = True
    has_bias: bool = False
    values: str = "whole"
    tuning: Tuning | None = None

    def numbers(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a, b and bias in fp32."""
        (rows, depth, columns), rng = self.shape, torch.Generator().manual_seed(iteration)
        bias = torch.randint(-3, 4, (columns,), generator=rng).float() if self.has_bias else None
        if self.values == "normal":
            return torch.randn(rows, depth, generator=rng), torch.randn(depth, columns, generator=rng), bias
        b = torch.randint(-3, 4, (depth, columns), generator=rng).float()
        if self.values == "whole":
            return torch.randint(-3, 4, (rows, depth), generator=rng).float(), b, bias
        a = torch.zeros(rows, depth)
        a[torch.arange(rows), torch.randint(depth, (rows,), generator=rng)] = 1
        return a, torch.randint(-128, 129, (depth, columns), generator=rng).float(), bias

    def given(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the arguments, on this PE's device and in their layouts."""
        a, b, bias = (None if each is None else each.to(po.device(), self.dtype) for each in self.numbers(iteration))
        assert a is not None and b is not None
        return _laid_out(a, self.a_k_major), _laid_out(b, not self.b_k_major), bias

    def problem(self, result: torch.Tensor, iteration: int) -> str | None:
        a, b, bias = (None if t is None else t.to(self.dtype).double() for t in self.numbers(iteration))
        assert a is not None and b is not None
        exact = a @ b + (0 if bias is None else bias)
        if self.values != "normal":
            return difference(result.cpu(), exact.to(self.dtype))
        # One rounding of the result, and one of fp32 for each product and sum.
        bound = UNIT[self.dtype] * exact.abs() + self.shape[1] * 2.0**-23 * (a.abs() @ b.abs())
        worst = float(((result.cpu().double() - exact).abs() / bound).max())
        return None if worst <= 1 else f"{worst} times the bound"


def _laid_out(matrix: torch.Tensor, is_row_major: bool) -> torch.Tensor:
    """Return it with rows, or columns, that begin at multiples of 16 bytes, between NaNs."""
    if not is_row_major:
        return _laid_out(matrix.t(), True).t()
    whole = matrix.new_full((matrix.shape[0], math.ceil(matrix.shape[1] / 8) * 8 + 8), math.nan)
    return whole[:, : matrix.shape[1]].copy_(matrix)


CASES = [
    Case("one step", (8, 8, 8)),
    Case("a row", (1, 16, 8)),
    Case("ragged", (203, 91, 296), has_bias=True),
    Case("ragged, fp16", (203, 91, 296), FLOAT16, has_bias=True),
    *(
        Case(
            f"one-hot, {dtype}, {a_k_major}, {b_k_major}", (70, 72, 200), dtype, a_k_major, b_k_major, values="one-hot"
        )
        for dtype in (BFLOAT16, FLOAT16)
        for a_k_major in (True, False)
        for b_k_major in (True, False)
    ),
    Case("normal", (140, 700, 136), values="normal"),
    Case("normal, fp16", (140, 700, 136), FLOAT16, a_k_major=False, values="normal", has_bias=True),
]
_DIVISIONS = {
    "sharing": Tuning(sharing=2),
    "parts": Tuning(parts=2, sharing=1),
    "parts and sharing": Tuning(parts=2, sharing=2),
    "stages": Tuning(stages=3, sharing=2, band=1),
    "wide": Tuning(rows=256, columns=160, sharing=2),
    "narrow": Tuning(rows=128, columns=80, sharing=1),
}
DIVIDED = [
    Case(
        f"{name}, {b_k_major}",
        (8, 200, 8) if tuning.parts else (203, 91, 296),  # on the host, parts are for a single cluster
        b_k_major=b_k_major,
        has_bias=b_k_major,
        tuning=tuning,
    )
    for name, tuning in _DIVISIONS.items()
    for b_k_major in (True, False)
]


def _on_few_tiles(case: Case) -> Case:
    """Threads of a WG on the host wait for each other in each step of 8 x 8 x 8."""
    rows, depth, columns = case.shape
    return replace(case, shape=(min(rows, 43), depth, min(columns, 40)))


class GemmTrial(Trial):
    def __init__(self, case: Case) -> None:
        self._case = case
        self._tuning = OPERATOR.tune(current(), case.tuning)

    def ways(self, turn: int) -> Sequence[str]:
        return ("result", "out")

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        a, b, bias = self._case.given(iteration)
        out = a.new_empty((a.shape[0], b.shape[1])) if way == "out" else None
        result = po.gemm(a, b, bias=bias, out=out)
        problem = self._case.problem(result, iteration)
        if po.gemm.last_path != "kernel" and _has_kernel():  # type: ignore[attr-defined]
            problem = f"took the path {po.gemm.last_path}"  # type: ignore[attr-defined]
        return Outcome([result], problem)

    def close(self) -> None:
        OPERATOR.tune(current(), self._tuning)


def _has_kernel() -> bool:
    return po.device().type == "cpu" or torch.cuda.get_device_capability()[0] == 9


class TestBits(BitsSuite):
    trial = GemmTrial
    halved_by = FLOAT16
    is_the_same_on_all_pes = False  # each PE is alone
    worlds: ClassVar = {
        "1": CaseWorld(1, [*CASES, *DIVIDED]),
        "2": CaseWorld(2, [*CASES[:4], *DIVIDED]),
        "1-wg3": CaseWorld(1, [_on_few_tiles(case) for case in (CASES[2], *DIVIDED)], {"host_options": {"wg_size": 3}}),
    }


def _every_tile() -> list[str]:
    """Return the tiles that make a wrong product of one-hot operands."""
    backend, cases, requests = current().backend, [], []
    for rows, columns, sharing, parts in CANDIDATES:
        tuning = Tuning(rows=rows, columns=columns, sharing=sharing, parts=parts)
        for dtype, a_k_major, b_k_major in itertools.product((BFLOAT16, FLOAT16), (True, False), (True, False)):
            case = Case("", (200, 264, 296), dtype, a_k_major, b_k_major, True, "one-hot", tuning)
            shape = Shape(*case.shape, a_k_major, b_k_major)
            tile = choose_tile(
                OPERATOR.description.queries, shape, tuning, num_sms=backend.num_sms, arena_bytes=backend.arena_bytes
            )
            requests.append(kernel_request(dtype, shape, tile, depth=64, has_bias=True))
            cases.append(case)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda request: compile_cuda(request.source(), arch="sm_90a"), requests))
    return [f"{case}: {found}" for case in cases if (found := GemmTrial(case).call(0, 0, "out").problem)]


@pytest.mark.gpu
@pytest.mark.slow
def test_every_tile(backend: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for sm_90")
    assert in_world(_every_tile, 1, backend) == [[]]


def _timed(shape: tuple[int, int, int]) -> float:
    a, b, _ = Case("", shape).given(0)
    po.gemm(a, b)
    start = time.monotonic()
    po.gemm(a, b)
    return time.monotonic() - start


def test_threads_of_a_wg_wait_for_each_other_while_all_cores_are_busy() -> None:
    """They wait in 5,000 steps: threads that gave their cores away in each would take a minute."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    for process, core in zip(busy, os.sched_getaffinity(0), strict=True):
        os.sched_setaffinity(process.pid, {core})
    try:
        (seconds,) = in_world(_timed, 1, "host", (200, 64, 200), host_options={"wg_size": 3})
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert seconds < 15


# ---- gradients and torch ---------------------------------------------------------------------------------------------


def _loss(a: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    hidden = po.gemm(a, weight.t(), bias=bias)
    return (po.gemm(hidden, b).float() * torch.arange(24, device=a.device)).sum()


def _wanted(a: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.linear(a, weight, bias)
    return ((hidden @ b).float() * torch.arange(24, device=a.device)).sum()


def _gradients(compiler: str | None) -> list[str | None]:
    """Whole numbers, of which all sums are exact."""
    rng = torch.Generator().manual_seed(1)
    tensors = [torch.randint(-2, 3, size, generator=rng) for size in ((16, 24), (32, 24), (32, 24), (32,))]
    given, wants = ([t.to(po.device(), BFLOAT16).requires_grad_() for t in tensors] for _ in range(2))
    torch._dynamo.reset()
    function = torch.compile(_loss, fullgraph=True, backend=compiler) if compiler else _loss
    function(*given).backward()
    _wanted(*wants).backward()
    po.check()
    assert all(t.grad is not None and t.grad.stride() == t.stride() for t in given)
    return [difference(t.grad, want.grad) for t, want in zip(given, wants, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("compiler", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients(compiler: str | None, backend: str) -> None:
    assert in_world(_gradients, 1, backend, compiler) == [[None] * 4]


def _opcheck() -> list[str]:
    rng = torch.Generator().manual_seed(1)
    a, b, bias = (torch.randn(s, generator=rng).to(po.device(), BFLOAT16) for s in ((16, 24), (24, 32), (32,)))
    operators = torch.ops.persistent_ops
    recorded = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
    calls = {
        "plain": (operators.gemm, (a, b, None), {}),
        "recorded": (operators.gemm, recorded, {}),
        "out": (operators.gemm_out, (a, b, bias), {"out": a.new_empty(16, 32)}),
    }
    assert_schemas("gemm", "out", is_collective=False)
    return opcheck_problems(calls)


def test_opcheck(backend: str) -> None:
    assert in_world(_opcheck, 1, backend) == [[]]


class TestGraphs(GraphSuite):
    operator = "gemm"
    cases = (
        Case("small", (16, 64, 24)),
        Case("ragged", (70, 96, 296), has_bias=True),
        Case("fp16", (9, 8, 8), FLOAT16),
    )
    ways = ("plain",)
    test_a_replay_without_a_peer_ends = None  # it needs no peer
    growing = (Case("first", (8, 8, 8)), Case("second", (16, 64, 24)), Case("third", (9, 8, 8)))

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        def act(a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor, way: str) -> torch.Tensor:
            return po.gemm(a, b, bias=bias[0] if bias else None)

        given = [[t for t in case.given(turn) if t is not None] for turn in range(NUM_INPUTS)]
        given = [[t.contiguous() for t in tensors] for tensors in given]
        wants = [[_reference(case, turn)] for turn in range(NUM_INPUTS)]
        return Call(case.name, way, act, given, wants)


def _reference(case: Case, turn: int) -> torch.Tensor:
    a, b, bias = case.numbers(turn)
    return (a @ b + (0 if bias is None else bias)).to(case.dtype)


# ---- arguments, and what torch multiplies ----------------------------------------------------------------------------


def _ones(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=po.device())


def _shared() -> dict[str, torch.Tensor]:
    """Return a result that shares memory with a column of a."""
    memory = _ones(8 * 24)
    return {"a": memory.view(8, 24)[:, 8:16], "out": memory[8:72].view(8, 8)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "dtype": (lambda: {"a": _ones(8, 8, dtype=torch.float32)}, TypeError, "a: expected float16 or bfloat16"),
    "dtypes": (lambda: {"b": _ones(8, 8, dtype=FLOAT16)}, TypeError, "b: expected a's dtype torch.bfloat16"),
    "shape": (lambda: {"a": _ones(8)}, ValueError, "a: expected shape [M, K]"),
    "shapes": (lambda: {"b": _ones(16, 8)}, ValueError, "b: expected shape [8, N]"),
    "bias": (lambda: {"bias": _ones(16)}, ValueError, "bias: expected shape [8]"),
    "out": (lambda: {"out": _ones(8, 16)}, ValueError, "out: expected shape [8, 8]"),
    "layout": (lambda: {"out": _ones(8, 16)[:, :8]}, ValueError, "out: expected a contiguous"),
    "overlap": (_shared, ValueError, "out: expected memory apart from a"),
    "no tensor": (lambda: {"a": [1.0]}, TypeError, "a: expected a tensor"),
}


def _wrong_calls() -> dict[str, tuple[str, str, float]]:
    errors = {
        name: error_of(lambda make=make: po.gemm(**{"a": _ones(8, 8), "b": _ones(8, 8), **make()}))
        for name, (make, _, _) in REFUSED.items()
    }
    assert bool((po.gemm(_ones(8, 16), _ones(16, 8)) == 16).all()), "the world has suffered"
    return errors


def test_wrong_arguments(backend: str) -> None:
    (errors,) = in_world(_wrong_calls, 1, backend)
    for name, (_, kind, text) in REFUSED.items():
        assert errors[name][0] == kind.__name__ and text in errors[name][1], errors[name]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _by_torch() -> list[str]:
    """Return what is wrong with products that the copy engine cannot load."""
    _WARNED.clear()
    messages = _Messages()
    logging.getLogger("persistent_ops").addHandler(messages)
    problems = []
    cases = {
        "rows": (_ones(8, 9), _ones(9, 16)),
        "address": (_ones(8 * 16 + 1)[1:].view(8, 16), _ones(16, 16)),
        "columns": (_ones(8, 16), _ones(16, 9)),
        "expanded": (_ones(1, 16).expand(8, 16), _ones(16, 16)),
        "strided": (_ones(8, 32)[:, ::2], _ones(16, 16)),
        "no depth": (_ones(8, 0), _ones(0, 16)),
        "no rows": (_ones(0, 16), _ones(16, 16)),
    }
    for name, (a, b) in cases.items():
        for bias in (None, _ones(b.shape[1])):
            result = po.gemm(a, b, bias=bias)
            if po.gemm.last_path != "torch":  # type: ignore[attr-defined]
                problems.append(f"{name}: path {po.gemm.last_path}")  # type: ignore[attr-defined]
            want = a.shape[1] + (bias is not None)
            if result.shape != (a.shape[0], b.shape[1]) or not bool((result == want).all()):
                problems.append(f"{name}: wrong result")
    if len(warned := [text for text in messages.texts if "gemm takes torch's product" in text]) != 1:
        problems.append(f"warnings: {warned}")
    return problems


def test_products_that_torch_makes(backend: str) -> None:
    assert in_world(_by_torch, 1, backend) == [[]]


# ---- tiles -----------------------------------------------------------------------------------------------------------

_H200 = {"num_sms": 132, "arena_bytes": 232448}
_SIZES = (1, 64, 300, 1024, 5000, 16384)


@pytest.mark.parametrize("k_major", [(True, True), (True, False), (False, True), (False, False)])
def test_every_shape_has_a_tile(k_major: tuple[bool, bool]) -> None:
    geometry = OPERATOR.description.queries
    for shape in (Shape(m, k, n, *k_major) for m in _SIZES for k in _SIZES for n in _SIZES):
        tile = choose_tile(OPERATOR.description.queries, shape, Tuning(), **_H200)
        steps, tiles = (
            math.ceil(shape.depth / 64),
            math.ceil(shape.rows / 128) * math.ceil(shape.columns / tile.columns),
        )
        stage_bytes = geometry["stage_bytes"](tile.rows, tile.columns, 64, *k_major)
        assert tile.stages >= 2 and tile.parts <= steps
        assert tile.parts == 1 or tiles * tile.cluster <= _H200["num_sms"]
        rest = geometry["rest_bytes"](tile.columns, tile.parts) + 1024
        assert tile.stages * stage_bytes + rest <= _H200["arena_bytes"]


def test_tuning_is_taken() -> None:
    shape = Shape(1024, 1024, 1024, True, True)
    tile = choose_tile(
        OPERATOR.description.queries, shape, Tuning(rows=128, columns=96, sharing=1, parts=1, stages=3), **_H200
    )
    assert tile == Tile(128, 96, 1, 1, 3)
    assert choose_tile(OPERATOR.description.queries, shape, Tuning(), num_sms=1, arena_bytes=232448).cluster == 1
    with pytest.raises(ValueError, match="no tile suits"):
        choose_tile(OPERATOR.description.queries, shape, Tuning(parts=2), **_H200 | {"num_sms": 1})


def _tuned_wrong() -> dict[str, tuple[str, str, float]]:
    world, errors = current(), {}
    for name, value in (("columns", 4096), ("sharing", 3), ("parts", 3), ("rows", 100)):
        OPERATOR.tune(world, Tuning(**{name: value}))
        errors[name] = error_of(lambda: po.gemm(_ones(8, 8), _ones(8, 8)))
    return errors


def test_wrong_tunings(backend: str) -> None:
    (errors,) = in_world(_tuned_wrong, 1, backend)
    for name, (kind, text, _) in errors.items():
        assert kind == "ValueError" and text.startswith(f"{name}: expected one of"), text


@pytest.mark.slow
def test_tensor_cores_that_would_wait_are_refused() -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    request = next(sample_requests())
    assert "(C75" not in compile_cuda(request.source(), arch="sm_90a").log
    assert GpuKernel(request).compiled()[0].spill_store_bytes == 0
    with pytest.raises(CompileError, match="C7504"):
        compile_cuda(request.source(), arch="sm_90a", extra_flags=("-rdc=true", "-dc"))
