"""Test inputs of gemm_all_to_all, gemm_reduce_scatter and gemm_all_reduce, a model of their exact bits, and calls.

Data depends on (case, rank, iteration), so every PE can compute the inputs of every other PE. Most values are small
whole numbers. Each PE's product is exact then, so every bit of the result is known on every backend.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from bits import SMALLEST, UNIT, Outcome, Trial, difference
from serially import serially

import persistent_ops as po
from persistent_ops.ops.gemm import OPERATOR as GEMM
from persistent_ops.ops.gemm_exchange_plan import EXCHANGES, OPERATOR
from persistent_ops.ops.product import Tuning
from persistent_ops.runtime.world import current

OPERATORS = tuple(EXCHANGES)
ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE = OPERATORS
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
K_MAJOR = ("rows", "columns")


@dataclass(frozen=True)
class Case:
    """A product and its exchange.

    Attributes:
        operator: of OPERATORS.
        rows: of a. In the dimension that is scattered, those of each PE's part.
        depth, columns: K, N.
        layouts: of a and b on PE r, for the first PEs; then they repeat. "rows": rows are contiguous, "columns":
            columns are, "shifted": as "rows", but one element behind an aligned address.
        values: "whole": small whole numbers. "ordered": products of which two PEs' are large and cancel each other,
            for K = 1: the bits follow from the order of the PEs. "normal".
        tuning: of the operator, and of gemm. The host has its own tiles, but takes `sharing`, `parts`, `stages` and
            `band`.
        num_sms: of the host.
    """

    name: str
    rows: tuple[int, ...]
    depth: int
    columns: int
    dtype: torch.dtype = BFLOAT16
    operator: str = REDUCE_SCATTER
    op: str = "sum"
    scatter_dim: int = 0
    wire_dtype: torch.dtype | None = None
    has_bias: bool = False
    has_residual: bool = False
    layouts: tuple[tuple[str, str], ...] = (K_MAJOR,)
    values: str = "whole"
    tuning: Tuning | None = None
    num_sms: int = 1

    @property
    def adds(self) -> bool:
        return self.operator != ALL_TO_ALL

    def given_rows(self, world: int) -> tuple[int, ...]:
        """Return the dimensions of a's rows."""
        if self.operator == ALL_REDUCE:
            return self.rows
        return tuple(size * world if dim == self.scatter_dim else size for dim, size in enumerate(self.rows))

    def shape(self, world: int) -> tuple[int, ...]:
        """Return that of the result."""
        return (*(self.given_rows(world) if self.operator == ALL_TO_ALL else self.rows), self.columns)

    def has_kernel(self) -> bool:
        """Return whether a kernel takes it in this PE's world."""
        return current().team.all_reachable and self.columns % 8 == 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the PEs pass in one iteration, on the CPU. Nobody may write to it.

    Attributes:
        factors: a and b of each PE.
        added: bias and residual of each PE, or None.
    """

    factors: Sequence[tuple[torch.Tensor, torch.Tensor]]
    added: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]


# ---- inputs, and what they must give ---------------------------------------------------------------------------------


def _generator(*named: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, named)).encode()))


def _numbers(case: Case, rng: torch.Generator, *shape: int) -> torch.Tensor:
    if case.values == "whole":
        return torch.randint(-3, 4, shape, generator=rng).to(case.dtype)
    return torch.randn(shape, generator=rng).to(case.dtype)


def _ordered(case: Case, rank: int, world: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a, which is the same on all PEs, and b. In each column, b is large on two PEs, with opposite signs."""
    rng = _generator(case.name, iteration)
    a, large = (_numbers(case, rng, *shape) for shape in ((*case.given_rows(world), 1), (1, case.columns)))
    place = torch.rand(world, case.columns, generator=rng).argsort(0)[rank]
    small = _numbers(case, _generator(case.name, rank, iteration), 1, case.columns)
    return a, torch.where(place > 1, small, large * 2.0**20 * (1 - 2 * place))


@functools.lru_cache(maxsize=64)
def _inputs(case: Case, world: int, iteration: int) -> Inputs:
    factors, added = [], []
    for rank in range(world):
        rng = _generator(case.name, rank, iteration)
        if case.values == "ordered":
            factors.append(_ordered(case, rank, world, iteration))
        else:
            a = _numbers(case, rng, *case.given_rows(world), case.depth)
            factors.append((a, _numbers(case, rng, case.depth, case.columns)))
        if case.operator == ALL_REDUCE:  # all PEs add the same
            rng = _generator(case.name, iteration)
        bias = _numbers(case, rng, case.columns) if case.has_bias else None
        added.append((bias, _numbers(case, rng, *case.shape(world)) if case.has_residual else None))
    return Inputs(factors, added)


@serially
def make_inputs(case: Case, world: int, iteration: int) -> Inputs:
    """Return what all PEs pass in an iteration."""
    return _inputs(case, world, iteration)


def of_rank(case: Case, products: Sequence[torch.Tensor], rank: int, divisor: int) -> torch.Tensor:
    """Return what a PE gets of all products: rows of each, or of their sum in rank order."""
    world, dim = len(products), case.scatter_dim
    if not case.adds:
        return torch.cat([product.chunk(world)[rank] if len(product) else product for product in products])
    total = products[0]
    for product in products[1:]:
        total = total + product
    if divisor != 1:
        total = total / divisor
    if case.operator == ALL_REDUCE or not total.shape[dim]:
        return total
    return total.chunk(world, dim)[rank]


@serially
def expected_bits(case: Case, inputs: Inputs, rank: int) -> torch.Tensor:
    """Return a PE's exact result. Products must be exact in fp32."""
    wire = (case.wire_dtype or case.dtype) if case.adds else case.dtype
    products = [(a.double() @ b.double() + 0.0).to(wire).float() for a, b in inputs.factors]  # no sum of zeros is -0.0
    result = of_rank(case, products, rank, len(products) if case.op == "mean" else 1)
    for addend in inputs.added[rank]:
        result = result if addend is None else result + addend.float()
    return result.to(case.dtype)


@serially
def bound_problem(case: Case, result: torch.Tensor, inputs: Inputs, rank: int) -> str | None:
    """Compare with fp64; return what is wrong, or None.

    The bound: one rounding of the result, one of each product that travels, and fp32 sums of all terms in any order. An
    addition may truncate (as in tensor cores), so it counts 2^-23 and not 2^-24.
    """
    divisor = len(inputs.factors) if case.op == "mean" else 1
    exact = of_rank(case, [a.double() @ b.double() for a, b in inputs.factors], rank, divisor)
    size = of_rank(case, [a.double().abs() @ b.double().abs() for a, b in inputs.factors], rank, divisor)
    for addend in inputs.added[rank]:
        if addend is not None:
            exact, size = exact + addend.double(), size + addend.double().abs()
    slack = (case.depth + len(inputs.factors) + 3) * 2.0**-23 * size
    wire = case.wire_dtype or case.dtype
    if case.adds and wire != FLOAT32:
        of_wire = [UNIT[wire] * 1.01 * (a.double() @ b.double()).abs() + SMALLEST[wire] for a, b in inputs.factors]
        slack = slack + of_rank(case, of_wire, rank, divisor)
    bound = UNIT[case.dtype] * (exact.abs() + slack) + slack + SMALLEST[case.dtype]
    worst = float(((result.double() - exact).abs() / bound).nan_to_num(math.inf).max())
    return None if worst <= 1 else f"{worst} times the bound"


# ---- calls -----------------------------------------------------------------------------------------------------------


def placed(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """Return it on this PE's device in a layout (`Case.layouts`), between NaNs."""
    if layout == "columns":
        return placed(matrix.t(), "rows").t()
    rows, columns = matrix.shape
    if layout == "shifted":
        memory = torch.full((1 + rows * columns,), math.nan, dtype=matrix.dtype, device=po.device())
        return memory[1:].view(rows, columns).copy_(matrix)
    whole = torch.full((rows, math.ceil(columns / 8) * 8 + 8), math.nan, dtype=matrix.dtype, device=po.device())
    return whole[:, :columns].copy_(matrix)


def given(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return a, b and the options of this PE's call."""
    a, b = inputs.factors[po.rank()]
    of_a, of_b = case.layouts[po.rank() % len(case.layouts)]
    options: dict[str, Any] = {}
    if case.adds:
        bias, residual = (None if each is None else each.to(po.device()) for each in inputs.added[po.rank()])
        options = {"bias": bias, "residual": residual, "wire_dtype": case.wire_dtype}
    if case.operator == REDUCE_SCATTER:
        options |= {"op": case.op, "scatter_dim": case.scatter_dim}
    rows = math.prod(a.shape[:-1])
    return placed(a.reshape(rows, case.depth), of_a).view(a.shape), placed(b, of_b), options


def call(case: Case, inputs: Inputs, **more: Any) -> torch.Tensor:
    """Call the operator on this PE."""
    a, b, options = given(case, inputs)
    result: torch.Tensor = getattr(po, case.operator)(a, b, **options, **more)
    return result


def is_right(case: Case, result: torch.Tensor, iteration: int) -> bool:
    want = expected_bits(case, make_inputs(case, po.world_size(), iteration), po.rank())
    return difference(result.cpu(), want) is None


class ExchangeTrial(Trial):
    """A case: called by both algorithms, with and without `out`, and by "auto"."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._tunings = [each.tune(current(), case.tuning) for each in (OPERATOR, GEMM)]
        self._first: torch.Tensor | None = None  # of an iteration
        if po.backend() == "host":
            current().backend.num_sms = case.num_sms
        # Reduce-scatter takes a result anywhere, the others in the heap at a multiple of 16 bytes.
        shape = case.shape(po.world_size())
        size, self._is_symmetric = math.prod(shape), case.operator != REDUCE_SCATTER
        make, first = (po.empty, 8) if self._is_symmetric else (torch.empty, 1)
        self._memory = make(size + 16, dtype=case.dtype, **({} if self._is_symmetric else {"device": po.device()}))
        self._out = self._memory[first : first + size].view(shape)
        self._around = (self._memory[:first], self._memory[first + size :])

    def ways(self, turn: int) -> Sequence[str]:
        ways = ["fused", "unfused"] if self._case.has_kernel() else ["unfused"]
        return [*ways, "auto"] if turn in (1, 2) else ways

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        case, inputs = self._case, make_inputs(self._case, po.world_size(), iteration)
        self._memory.fill_(math.nan)
        out = self._out if iteration % 2 else None
        result = call(case, inputs, algorithm=way, out=out)
        found = None
        if out is not None and result is not out:
            found = "out was not returned"
        if not all(bool(each.isnan().all()) for each in self._around):
            found = "memory around out was written"
        return Outcome([result], found or self._problem(result.cpu().clone(), inputs, way))

    def _problem(self, result: torch.Tensor, inputs: Inputs, way: str) -> str | None:
        if self._case.values != "normal":
            return difference(result, expected_bits(self._case, inputs, po.rank()))
        if way == "fused":
            self._first = result
        # gemm adds up a tile in the same order. Products in fp32 are torch's.
        is_same = self._first is None or self._case.wire_dtype == FLOAT32 or difference(result, self._first) is None
        return bound_problem(self._case, result, inputs, po.rank()) if is_same else f"{way}: other bits than fused"

    def close(self) -> None:
        for operator, tuning in zip((OPERATOR, GEMM), self._tunings, strict=True):
            operator.tune(current(), tuning)
        if po.backend() == "host":
            current().backend.num_sms = 1
        if self._is_symmetric:
            po.free(self._memory)


# ---- cases -----------------------------------------------------------------------------------------------------------

_N_MAJOR, _SHIFTED = ("columns", "rows"), ("shifted", "shifted")
_ADDED: dict[str, Any] = {"has_bias": True, "has_residual": True}
_NORMAL: dict[str, Any] = {"values": "normal", "tuning": Tuning(parts=1)}
_ANY = [  # for every operator
    Case("a tile", (8,), 8, 8),
    Case("ragged", (19,), 45, 72),
    Case("ragged, fp16", (13,), 40, 88, FLOAT16, layouts=(_N_MAJOR,)),
    Case("three dimensions", (2, 11), 24, 40),
    Case("a in columns, fp16", (48,), 20, 16, FLOAT16, layouts=(("columns", "columns"),)),
    Case("three dimensions, a in columns", (2, 4), 20, 16, layouts=(_N_MAJOR,)),
    Case("copied", (9,), 21, 24, layouts=(_SHIFTED,)),
    Case("copied, fp16", (2, 5), 32, 16, FLOAT16, layouts=(("rows", "shifted"), ("shifted", "columns"))),
    Case("layouts by rank", (11,), 35, 40, layouts=(K_MAJOR, _N_MAJOR, ("rows", "rows"), ("columns", "columns"))),
    Case("N of 12", (7,), 16, 12),
    Case("N of 1, fp16", (3,), 9, 1, FLOAT16),
    Case("no depth", (5,), 0, 16),
    Case("no rows", (0,), 16, 16),
    Case("no columns", (4,), 16, 0),
    Case("normal", (21,), 300, 40, **_NORMAL),
    Case("normal, fp16", (10,), 77, 56, FLOAT16, layouts=(_N_MAJOR,), **_NORMAL),
]
_OF_SUMS = [  # for the operators that add
    Case("bias", (9,), 16, 24, has_bias=True),
    Case("residual, fp16", (12,), 24, 40, FLOAT16, has_residual=True),
    Case("bias and residual", (17,), 33, 56, **_ADDED),
    Case("fp32 travels", (9,), 40, 24, wire_dtype=FLOAT32, **_ADDED),
    Case("fp32 travels, N of 12, fp16", (6,), 24, 12, FLOAT16, wire_dtype=FLOAT32, **_ADDED),
    Case("own dtype travels, no depth", (4,), 0, 8, wire_dtype=BFLOAT16, **_ADDED),
    Case("ordered", (30,), 1, 64, values="ordered"),
    Case("ordered, fp32 travels", (30,), 1, 64, values="ordered", wire_dtype=FLOAT32, **_ADDED),
    Case("normal, fp32 travels", (18,), 96, 40, wire_dtype=FLOAT32, **_ADDED, **_NORMAL),
]
_SCATTERED = [  # for gemm_reduce_scatter
    Case("mean", (14,), 40, 24, op="mean"),
    Case("mean, fp32 travels, fp16", (14,), 40, 24, FLOAT16, op="mean", wire_dtype=FLOAT32, **_ADDED),
    Case("mean, N of 4", (5,), 16, 4, op="mean", **_ADDED),
    Case("scatter_dim 1", (3, 5), 24, 40, scatter_dim=1),
    Case("scatter_dim 1, four dimensions", (2, 9, 3), 16, 24, scatter_dim=1, op="mean", **_ADDED),
    Case("scatter_dim 1, N of 12", (4, 2), 16, 12, scatter_dim=1, has_residual=True),
    Case("scatter_dim 1, no rows before it", (0, 4), 16, 16, scatter_dim=1),
]
_FEW_ROWS = [  # for gemm_all_reduce, whose rows no number of PEs need divide
    Case("a row", (1,), 24, 40, has_residual=True),
    Case("two rows of three dimensions", (1, 2), 16, 16, has_bias=True),
    Case("two rows, N of 4, fp16", (2,), 16, 4, FLOAT16, **_ADDED),
    Case("a last part with fewer rows", (27,), 16, 24),
    Case("a last part without rows", (9,), 8, 16, **_ADDED),
]
_DIVIDED = [
    Case("shared tiles", (19,), 45, 72, tuning=Tuning(sharing=2)),
    Case("shared tiles, several WGs", (19,), 45, 72, layouts=(_N_MAJOR,), tuning=Tuning(sharing=2), num_sms=7),
    Case("several WGs", (19,), 45, 72, num_sms=5),
    Case("several WGs, fp32 travels", (19,), 24, 72, wire_dtype=FLOAT32, num_sms=7),
    Case("more WGs than tiles", (9,), 16, 16, num_sms=64),
    Case("divided sums", (9,), 200, 24, tuning=Tuning(parts=2, sharing=1), num_sms=64),
    Case("divided sums, shared tiles", (9,), 72, 24, tuning=Tuning(parts=2, sharing=2), num_sms=64),
    Case("stages and bands", (19,), 45, 72, tuning=Tuning(stages=3, band=2), num_sms=2),
]


def cases(operator: str) -> list[Case]:
    """Return the cases of an operator."""
    adding = {ALL_TO_ALL: [], REDUCE_SCATTER: [*_OF_SUMS, *_SCATTERED], ALL_REDUCE: [*_OF_SUMS, *_FEW_ROWS]}
    return [replace(case, operator=operator) for case in (*_ANY, *adding[operator])]


def divided(operator: str) -> list[Case]:
    """Return cases of other divisions into tiles, with all that the operator adds."""
    added = {} if operator == ALL_TO_ALL else _ADDED
    return [replace(case, operator=operator, **added) for case in _DIVIDED]
