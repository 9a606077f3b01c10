"""Test inputs of gemv_all_reduce, models of its exact bits and rounding bound, and the calls of a case.

Data depends on (case, rank, index, iteration), so every PE can compute the inputs of every other PE. Most values are
small whole numbers. Their sums are exact in fp32 in any order, so every bit of the result is known on every backend.
With other values, bits are compared between ranks, algorithms and runs, and sizes with an fp64 reference.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bits import SMALLEST, UNIT, Outcome, Trial, difference
from serially import serially

import persistent_ops as po
from persistent_ops.ops.gemv_all_reduce import reference

ALGORITHMS = ("one_shot", "two_shot")
# iteration -> what is passed beside weight and x. "in place": out is the residual.
WAYS = ((), ("bias",), ("residual",), ("bias", "residual", "out"), ("bias", "residual", "in place"), ("out",))


@dataclass(frozen=True)
class Case:
    """One shape of the operator.

    Attributes:
        rows: M.
        columns: rank -> K_r.
        vectors: N; 0 for an x of one dimension.
        values: "whole" (small whole numbers), "normal", "ordered" (one column per rank, of very different magnitudes:
            the bits follow from the rank order alone) or "cancelling" (odd ranks subtract most of what even ranks add).
        wire_dtype: what the call passes; "own" for the dtype of the weight.
        is_shifted: tensors begin one element after an aligned address, in memory that is full of NaN.
    """

    name: str
    rows: int
    columns: Callable[[int], int]
    vectors: int = 0
    dtype: torch.dtype = torch.bfloat16
    values: str = "whole"
    wire_dtype: torch.dtype | str | None = None
    is_shifted: bool = False

    @property
    def comm(self) -> torch.dtype | None:
        return self.dtype if self.wire_dtype == "own" else self.wire_dtype  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vectors, self.rows) if self.vectors else (self.rows,)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What all PEs pass in one iteration, on the CPU. Nobody may write to it."""

    weights: Sequence[torch.Tensor]
    xs: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    residual: torch.Tensor | None


def _always(count: int) -> Callable[[int], int]:
    return lambda rank: count


def _by_rank(*counts: int) -> Callable[[int], int]:
    return lambda rank: counts[rank % len(counts)]


_FP32, _FP16 = torch.float32, torch.float16
CASES = [
    Case("one row", 1, _always(1024)),
    Case("seven rows, fp16", 7, _always(8), dtype=_FP16),
    Case("eight rows, one column, fp32", 8, _always(1), 2, _FP32),
    Case("nine rows, 31 columns, N 3", 9, _always(31), 3),
    Case("63 rows, 1000 columns, N 1, fp16", 63, _always(1000), 1, _FP16),
    Case("64 rows, 7 columns, fp32", 64, _always(7), 0, _FP32),
    Case("1000 rows, 33 columns, N 16", 1000, _always(33), 16),
    Case("1000 rows, 1024 columns", 1000, _always(1024)),
    Case("1001 rows, 8 columns, N 8, fp16", 1001, _always(8), 8, _FP16),
    Case("columns by rank, N 5, fp32", 129, _by_rank(8, 1000, 33, 1024, 1), 5, _FP32),
    Case("columns by rank", 65, _by_rank(1000, 31, 1024, 7)),
    Case("a long rank", 17, lambda rank: 20000 if rank == 0 else 16),
    Case("no columns on one rank, N 4", 40, lambda rank: 0 if rank == 1 else 40, 4),
    Case("no columns on rank 0, fp32", 23, lambda rank: 0 if rank == 0 else 9, 0, _FP32),
    Case("no columns", 19, _always(0), 2, _FP16),
    Case("no rows", 0, _always(24), 3),
    Case("comm bf16, N 16", 72, _always(1024), 16, wire_dtype="own"),
    Case("comm fp16", 100, _by_rank(48, 56), 0, _FP16, wire_dtype="own"),
    Case("comm fp32, N 2", 33, _always(64), 2, wire_dtype=_FP32),
    Case("comm fp32 of fp32", 33, _always(64), 0, _FP32, wire_dtype="own"),
    Case("shifted", 37, _always(64), 0, is_shifted=True),
    Case("shifted, N 7, fp16", 37, _by_rank(33, 40), 7, _FP16, is_shifted=True),
    Case("shifted, N 16, fp32", 20, _always(13), 16, _FP32, is_shifted=True),
    Case("normal", 200, _by_rank(1024, 512, 999), 0, values="normal"),
    Case("normal, N 16", 48, _always(264), 16, values="normal"),
    Case("normal, N 9, fp16", 48, _always(100), 9, _FP16, values="normal"),
    Case("normal, N 12, fp32", 48, _always(100), 12, _FP32, values="normal"),
    Case("normal, fp32", 300, _by_rank(640, 77), 0, _FP32, values="normal"),
    Case("normal, comm bf16", 48, _always(264), 0, values="normal", wire_dtype="own"),
    Case("normal, comm fp16, N 4", 48, _always(264), 4, _FP16, values="normal", wire_dtype="own"),
    Case("cancelling", 96, _always(64), 0, values="cancelling"),
    Case("cancelling, N 6, fp16", 96, _always(64), 6, _FP16, values="cancelling"),
    Case("ordered, fp32", 333, _always(1), 0, _FP32, values="ordered"),
    Case("ordered, N 16", 50, _always(1), 16, values="ordered"),
    Case("ordered, comm bf16", 200, _always(1), 2, values="ordered", wire_dtype="own"),
]
# The cases of the other worlds. Every kind of value, dtype, wire_dtype and raggedness occurs.
FEW = [case for case in CASES if case.rows < 300 and case.columns(0) < 1000]


# ---- inputs and what they must give ----------------------------------------------------------------------------------


def _draw(case: Case, rng: torch.Generator, *shape: int, is_factor: bool = True) -> torch.Tensor:
    if case.values == "whole":
        limit = 6 if is_factor else 100
        values = torch.randint(-limit, limit + 1, shape, generator=rng).float()
    else:
        values = torch.randn(*shape, generator=rng)
        if case.values == "ordered":
            values = torch.ldexp(values, torch.randint(-7, 8, shape, generator=rng))
    return values.to(case.dtype)


@serially
@functools.lru_cache(maxsize=16)
def _weights(case: Case, world: int) -> list[torch.Tensor]:
    weights = []
    for rank in range(world):
        rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {rank}".encode()))
        weights.append(_draw(case, rng, case.rows, case.columns(rank)))
    if case.values == "cancelling":
        for rank in range(1, world, 2):
            weights[rank] = (-weights[rank - 1].float() * (1 + 2.0**-5)).to(case.dtype)
    return weights


@functools.lru_cache(maxsize=16)
def _inputs(case: Case, world: int, iteration: int) -> Inputs:
    way = WAYS[iteration % len(WAYS)]
    shape = (case.vectors,) if case.vectors else ()
    xs = []
    for rank in range(world):
        rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {rank} {iteration}".encode()))
        xs.append(_draw(case, rng, *shape, case.columns(rank)))
    if case.values == "cancelling":
        xs[1::2] = xs[: world - 1 : 2]
    rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {iteration}".encode()))
    bias = _draw(case, rng, case.rows, is_factor=False)
    residual = _draw(case, rng, *case.shape, is_factor=False)
    return Inputs(_weights(case, world), xs, bias if "bias" in way else None, residual if "residual" in way else None)


@serially
def make_inputs(case: Case, world: int, iteration: int) -> Inputs:
    """Return what all PEs pass in an iteration. Weights stay the same over iterations, the other tensors change."""
    return _inputs(case, world, iteration)


@serially
def expected_bits(inputs: Inputs, wire_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the exact result of every PE. Each rank's partial result must be exact in fp32.

    Partials are rounded to `wire_dtype` and summed in rank order in fp32. Bias and residual are added. One rounding.
    """
    total: torch.Tensor | None = None
    for weight, x in zip(inputs.weights, inputs.xs, strict=True):
        # + 0.0, since a sum of zeros that begins with 0.0 is 0.0, independent of their signs.
        partial = (x.double() @ weight.double().T + 0.0).float()
        partial = partial if wire_dtype is None else partial.to(wire_dtype).float()
        total = partial if total is None else total + partial
    assert total is not None
    for added in (inputs.bias, inputs.residual):
        if added is not None:
            total = total + added.float()
    return total.to(inputs.weights[0].dtype)


@serially
def bound_problem(output: torch.Tensor, inputs: Inputs, wire_dtype: torch.dtype | None = None) -> str | None:
    """Compare with the fp64 reference; return what is wrong, or None.

    The bound: one rounding of the result, one of each partial if `wire_dtype` is not fp32, and fp32 sums of all the
    products in any order. An addition may truncate (as in tensor cores), so it counts 2^-23 and not 2^-24.
    """
    exact = reference(inputs.weights, inputs.xs, inputs.bias, inputs.residual)
    sizes = Inputs(*_absolute(inputs))
    size = reference(sizes.weights, sizes.xs, sizes.bias, sizes.residual)
    terms = sum(weight.shape[1] for weight in inputs.weights) + len(inputs.weights) + 2
    slack = terms * 2.0**-23 * size
    if wire_dtype is not None and wire_dtype != torch.float32:
        for weight, x in zip(inputs.weights, inputs.xs, strict=True):
            slack = slack + 1.01 * UNIT[wire_dtype] * reference([weight], [x]).abs() + SMALLEST[wire_dtype]
    bound = UNIT[output.dtype] * (exact.abs() + slack) + slack + SMALLEST[output.dtype]
    error = (output.double() - exact).abs()
    if bool((error <= bound).all()):
        return None
    worst = int((error / bound).nan_to_num(torch.inf).argmax())
    return (
        f"element {worst} is {float(output.flatten()[worst])}, the fp64 reference {float(exact.flatten()[worst])} "
        f"+- {float(bound.flatten()[worst]):.3g}"
    )


def _absolute(inputs: Inputs) -> tuple[Any, ...]:
    return (
        [weight.abs() for weight in inputs.weights],
        [x.abs() for x in inputs.xs],
        None if inputs.bias is None else inputs.bias.abs(),
        None if inputs.residual is None else inputs.residual.abs(),
    )


# ---- calls -----------------------------------------------------------------------------------------------------------


class Buffer:
    """A tensor's memory with one NaN element before it and some after it, so that the tensor starts unaligned."""

    def __init__(self, values: torch.Tensor) -> None:
        self.memory = torch.full((values.numel() + 9,), float("nan"), dtype=values.dtype, device=po.device())
        self.tensor = self.memory[1 : 1 + values.numel()].view(values.shape)
        self.tensor.copy_(values)

    def is_intact(self) -> bool:
        return bool(self.memory[0].isnan()) and bool(self.memory[1 + self.tensor.numel() :].isnan().all())


def placed(case: Case, values: torch.Tensor) -> torch.Tensor:
    """Return the values on this PE's device, shifted if the case demands it."""
    return Buffer(values).tensor if case.is_shifted else values.to(po.device())


def call(case: Case, inputs: Inputs, weight: torch.Tensor, iteration: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Call the operator on this PE as the iteration demands.

    Returns:
        The result, and what is wrong with its memory (not with its values), or None.
    """
    way = WAYS[iteration % len(WAYS)]
    x = placed(case, inputs.xs[po.rank()])
    bias = None if inputs.bias is None else placed(case, inputs.bias)
    buffer, residual = None, None
    if inputs.residual is not None:
        buffer = Buffer(inputs.residual)
        residual = buffer.tensor if "in place" in way or case.is_shifted else inputs.residual.to(po.device())
    out = residual if "in place" in way else None
    if "out" in way:
        buffer = Buffer(torch.full(case.shape, float("nan"), dtype=case.dtype))
        out = buffer.tensor if case.is_shifted else torch.full_like(buffer.tensor, float("nan"))
    result = po.gemv_all_reduce(
        weight, x, bias=bias, residual=residual, out=out, wire_dtype=case.comm, prefetch_weight=False, **options
    )
    if out is not None and result is not out:
        return result, "out= was not returned"
    if buffer is not None and not buffer.is_intact():
        return result, "memory around the result was written"
    return result, None


class GemvTrial(Trial):
    """A case: called by both algorithms, and by "auto"."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._weight = placed(case, make_inputs(case, po.world_size(), 0).weights[po.rank()])
        self._first: torch.Tensor | None = None  # of the first algorithm, in an iteration

    def ways(self, turn: int) -> Sequence[str]:
        return (*ALGORITHMS, "auto") if turn == 0 else ALGORITHMS

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        inputs = make_inputs(self._case, po.world_size(), iteration)
        output, found = call(self._case, inputs, self._weight, iteration, algorithm=way)
        result = output.cpu().clone()
        if way == ALGORITHMS[0]:
            self._first = result
        assert self._first is not None
        return Outcome([output], found or bits_problem(self._case, inputs, result, self._first))


def bits_problem(case: Case, inputs: Inputs, result: torch.Tensor, first: torch.Tensor) -> str | None:
    """Return what is wrong with a result, or None. Where bits are not known, compare with the first algorithm's."""
    if case.values in ("whole", "ordered"):
        return difference(result, _expected(case, inputs))
    return difference(result, first) or bound_problem(result, inputs, case.comm)


@serially
@functools.lru_cache(maxsize=32)
def _expected(case: Case, inputs: Inputs) -> torch.Tensor:
    return expected_bits(inputs, case.comm)
