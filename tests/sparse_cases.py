"""Test inputs of sparse_all_reduce, a model of its exact bits, a bound around fp64 sums, and the calls of a case.

Data depends on (case, rank, iteration), so every PE can compute the inputs of every other PE. Magnitudes differ
widely, so the bits of a sum show the order of the additions.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from bits import NUM_ITERATIONS, SMALLEST, UNIT, Outcome, Trial, difference
from serially import serially

import persistent_ops as po

ALGORITHMS = ("owner", "allgather", "dense")
INTO_ALGORITHMS = ("owner", "allgather")
# What a case calls: the first of each pair says which entry point, the second its algorithm.
WAYS = (
    ("sparse", "owner"),
    ("into", "owner"),
    ("sparse", "allgather"),
    ("into", "allgather"),
    ("sparse", "dense"),
    ("sparse", "auto"),
    ("into", "auto"),
)
UNTOUCHED = -77.0  # what outputs hold before a call; no sum equals it
UNTOUCHED_INDEX = -7


class Entries(NamedTuple):
    """What one PE passes, on the CPU. Nobody may write to it.

    Attributes:
        indices: [nnz], int64.
        values: [nnz, ...].
    """

    indices: torch.Tensor
    values: torch.Tensor


class Rows(NamedTuple):
    """The result that every PE must get.

    Attributes:
        indices: sorted, int64.
        values: a row for each.
    """

    indices: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Draw:
    """What the indices of one PE in one iteration depend on."""

    rows: int
    rank: int
    world: int
    iteration: int
    own: torch.Generator
    shared: torch.Generator


Pattern = Callable[[Draw], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One shape of the operator.

    Attributes:
        rows: R.
        pattern: draws a PE's indices.
        row_shape: of the dense part.
        op: "sum" or "mean".
        index_dtype: of the indices where they are passed as a buffer.
        is_coalesced: x is marked as coalesced; the pattern must produce coalesced indices.
    """

    name: str
    rows: int
    pattern: Pattern
    row_shape: tuple[int, ...] = (8,)
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    index_dtype: torch.dtype = torch.int64
    is_coalesced: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.row_shape)


# ---- rows of a PE ----------------------------------------------------------------------------------------------------


def uniform(*counts: int) -> Pattern:
    """Random rows with repetitions. Counts depend on the rank, and a little on the iteration."""

    def draw(d: Draw) -> torch.Tensor:
        count = counts[d.rank % len(counts)]
        count += 3 * (d.iteration % 4) if count > 1 else 0
        return torch.randint(d.rows, (count,), generator=d.own) if count else torch.empty(0, dtype=torch.int64)

    return draw


def distinct(count: int) -> Pattern:
    """Different rows, in any order."""
    return lambda d: torch.randperm(d.rows, generator=d.own)[:count]


def identical(count: int) -> Pattern:
    """The same rows on every PE, in a different order on each."""

    def draw(d: Draw) -> torch.Tensor:
        rows = torch.randperm(d.rows, generator=d.shared)[:count]
        return rows[torch.randperm(count, generator=d.own)]

    return draw


def disjoint(count: int) -> Pattern:
    """No row is on two PEs."""

    def draw(d: Draw) -> torch.Tensor:
        rows = torch.randperm(d.rows, generator=d.shared)
        return rows[rows % d.world == d.rank][:count]

    return draw


def nested(count: int) -> Pattern:
    """The rows of a PE are among the rows of the next PE."""
    return lambda d: torch.randperm(d.rows, generator=d.shared)[: count * (d.rank + 1)]


def zipf(count: int) -> Pattern:
    """A few rows very often, and sometimes many rows."""

    def draw(d: Draw) -> torch.Tensor:
        weights = 1.0 / torch.arange(1, d.rows + 1)
        return torch.multinomial(weights, count, replacement=True, generator=d.own)

    return draw


def edges(d: Draw) -> torch.Tensor:
    """Rows on both sides of multiples of powers of two, where words of bits and blocks of words end."""
    rows = {0, d.rows - 1, d.rows - 2}
    for power in range(5, 40):
        for multiple in (1, 3):
            rows |= {multiple * 2**power + side for side in (-1, 0, 1)}
    chosen = torch.tensor(sorted(row for row in rows if 0 <= row < d.rows))
    return chosen[torch.rand(len(chosen), generator=d.own) < 0.6]


def runs(d: Draw) -> torch.Tensor:
    """Runs of neighboring rows, in order, each row twice."""
    begins = torch.randint(d.rows - 70, (4,), generator=d.own)
    return torch.cat([torch.arange(70) + begin for begin in begins]).repeat_interleave(2).sort().values


def ordered(pattern: Pattern) -> Pattern:
    return lambda d: pattern(d).sort().values


def where(condition: Callable[[Draw], bool], pattern: Pattern) -> Pattern:
    """No rows on a PE, or in an iteration, for which the condition is false."""
    return lambda d: pattern(d) if condition(d) else torch.empty(0, dtype=torch.int64)


def _is_last(d: Draw) -> bool:
    return d.rank == d.world - 1


def _growing(d: Draw) -> torch.Tensor:
    return torch.randint(d.rows, (2 * 3**d.iteration,), generator=d.own)


def _shrinking(d: Draw) -> torch.Tensor:
    return torch.randint(d.rows, (2 * 3 ** (NUM_ITERATIONS - 1 - d.iteration),), generator=d.own)


# Rows of multiples of 16 bytes, each dtype, and 32-bit indices have their own kernels. Few cases have 32-bit indices.
_FP16, _BF16, _INT32 = torch.float16, torch.bfloat16, torch.int32
CASES = [
    Case("a few rows of many", 5000, uniform(60, 20, 90)),
    Case("nothing anywhere", 100, uniform(0)),
    Case("nothing on rank 0", 300, uniform(0, 40, 25), dtype=_BF16),
    Case("nothing but on the last rank", 300, where(_is_last, uniform(31))),
    Case("nothing but on rank 0, mean, fp16", 300, where(lambda d: d.rank == 0, uniform(31)), op="mean", dtype=_FP16),
    Case("nothing now and then", 64, where(lambda d: (d.rank + d.iteration) % 2 == 0, uniform(9)), (5,)),
    Case("a table of one row", 1, uniform(1, 0, 5, 2), (6,)),
    Case("a table of no rows", 0, uniform(0)),
    Case("one row of many, fp16", 700, lambda d: torch.tensor([699 - d.iteration]), dtype=_FP16),
    Case("one row per PE", 77, lambda d: torch.tensor([(7 * d.rank + d.iteration) % 77])),
    Case("all rows", 1025, distinct(1025), (4,), index_dtype=_INT32),
    Case("all rows, bf16, mean", 96, distinct(96), (40,), _BF16, "mean"),
    Case("all rows of few, coalesced", 64, ordered(distinct(64)), is_coalesced=True),
    Case("one row again and again", 50, lambda d: torch.full((200 + d.rank,), 17 + d.iteration), (9,)),
    Case("one row again and again, bf16", 50, lambda d: torch.full((100,), 17 + d.rank % 2), dtype=_BF16),
    # More occurrences than one warp adds up alone.
    Case("hot rows", 9, uniform(900, 0, 700), (33,)),
    Case("hot rows, bf16", 12, uniform(700, 900), (40,), _BF16),
    Case("hot rows among others, fp16, mean", 2000, zipf(1500), (70,), _FP16, "mean"),
    Case("duplicates", 20, uniform(150, 90), (12,)),
    Case("duplicates, fp16", 20, uniform(90, 120), (10,), _FP16),
    Case("duplicates, bf16, mean", 33, uniform(100, 75), (16,), _BF16, "mean"),
    Case("identical rows", 900, identical(90), (16,)),
    Case("identical rows, fp16, mean", 900, identical(50), (8,), _FP16, "mean"),
    Case("disjoint rows", 999, disjoint(70), (20,)),
    Case("disjoint rows, bf16", 999, disjoint(33), (24,), _BF16, index_dtype=_INT32),
    Case("nested rows", 800, nested(25), (12,)),
    Case("skewed", 4000, uniform(900, 3, 1, 10), index_dtype=_INT32),
    Case("Zipf", 2000, zipf(250), (16,)),
    Case("scalar rows", 500, uniform(40, 70), ()),
    Case("scalar rows, bf16, mean", 65, uniform(40, 70), (), _BF16, "mean"),
    Case("rows of one", 129, uniform(50, 20), (1,), _FP16),
    Case("rows of 3", 128, uniform(50, 20), (3,), _BF16),
    Case("rows of 7, mean", 127, uniform(50, 20), (7,), op="mean"),
    Case("rows of 33, fp16", 63, uniform(30, 25), (33,), _FP16),
    Case("rows of 129", 64, uniform(20, 25), (129,)),
    Case("rows of 1000, bf16", 65, uniform(12, 9), (1000,), _BF16),
    Case("rows of 3 x 5 x 2", 200, uniform(33, 44), (3, 5, 2)),
    Case("rows of 2 x 9, bf16", 200, uniform(44, 33), (2, 9), _BF16),
    Case("rows of nothing", 200, uniform(20, 30), (3, 0)),
    Case("word edges", 4097, edges, (4,)),
    Case("word edges, fp16", 8192, edges, (2,), _FP16),
    Case("runs of rows", 3000, runs, (8,)),
    Case("coalesced", 700, ordered(distinct(80)), (10,), is_coalesced=True),
    Case("growing", 3000, _growing, (4,)),
    Case("shrinking, bf16", 3000, _shrinking, (4,), _BF16),
]  # fmt: skip
# The cases of the other worlds. Every kind of row set, dtype and raggedness occurs.
FEW = [case for case in CASES if case.rows < 1000 and case.name != "one row again and again"]


# ---- inputs and what they must give ----------------------------------------------------------------------------------


def _seed(*what: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, what)).encode()))


def draw_values(count: int, row_shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    shape = (count, *row_shape)
    values = torch.randn(shape, generator=rng)
    return torch.ldexp(values, torch.randint(-6, 7, shape, generator=rng)).to(dtype)


@functools.lru_cache(maxsize=32)
def _inputs(case: Case, world: int, iteration: int) -> list[Entries]:
    found = []
    for rank in range(world):
        own = _seed(case.name, rank, iteration)
        draw = Draw(case.rows, rank, world, iteration, own, _seed(case.name, iteration))
        indices = case.pattern(draw)
        found.append(Entries(indices, draw_values(len(indices), case.row_shape, case.dtype, own)))
    return found


@serially
def make_inputs(case: Case, world: int, iteration: int) -> list[Entries]:
    """Return what all PEs pass in an iteration."""
    return _inputs(case, world, iteration)


def sum_in_order(indices: torch.Tensor, values: torch.Tensor) -> Rows:
    """Add up the values of each row in order of occurrence, in their dtype, beginning with the first one."""
    rows, slots, counts = indices.unique(return_inverse=True, return_counts=True)
    order = slots.argsort(stable=True)
    begins = counts.cumsum(0) - counts
    occurrence = torch.arange(len(indices)) - begins[slots[order]]
    sums = torch.full((len(rows), *values.shape[1:]), torch.nan, dtype=values.dtype)
    for n in range(int(counts.max()) if len(counts) else 0):
        entries = order[occurrence == n]
        sums[slots[entries]] = values[entries] if n == 0 else sums[slots[entries]] + values[entries]
    return Rows(rows, sums)


@serially
def expected(inputs: Sequence[Entries], op: str = "sum", dtype: torch.dtype | None = None) -> Rows:
    """Return the exact result of every PE: each PE's duplicates, then PEs in rank order, in fp32, one rounding.

    Args:
        inputs: of all PEs.
        op: "sum" or "mean".
        dtype: of the result, or None for the dtype of the inputs.
    """
    parts = [sum_in_order(indices, values.float()) for indices, values in inputs]
    rows, sums = sum_in_order(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))
    if op == "mean":
        sums = sums / torch.full_like(sums, len(inputs))
    return Rows(rows, sums.to(dtype or inputs[0].values.dtype))


@functools.lru_cache(maxsize=32)
def _wanted(case: Case, world: int, iteration: int) -> Rows:
    return expected(_inputs(case, world, iteration), case.op)


@serially
@functools.lru_cache(maxsize=32)
def _model_problem(case: Case, world: int, iteration: int) -> str | None:
    inputs = _inputs(case, world, iteration)
    return bound_problem(case.rows, _wanted(case, world, iteration), inputs, case.op)


@serially
def wanted(case: Case, world: int, iteration: int) -> Rows:
    """Return `expected` of a case's inputs."""
    return _wanted(case, world, iteration)


def bound_problem(rows: int, result: Rows, inputs: Sequence[Entries], op: str = "sum") -> str | None:
    """Compare the whole table with a dense fp64 sum; return what is wrong, or None.

    The bound: fp32 additions of a row's values in any order, one division, one rounding of the result.
    """
    row_shape = tuple(inputs[0].values.shape[1:])
    exact = torch.zeros(rows, *row_shape, dtype=torch.float64)
    size, terms = exact.clone(), torch.zeros(rows, dtype=torch.float64)
    for indices, values in inputs:
        exact.index_add_(0, indices, values.double())
        size.index_add_(0, indices, values.double().abs())
        terms.index_add_(0, indices, torch.ones(len(indices), dtype=torch.float64))
    if op == "mean":
        exact, size = exact / len(inputs), size / len(inputs)
    table = torch.zeros(rows, *row_shape, dtype=torch.float64)
    table[result.indices] = result.values.double()
    slack = (terms + 1).view(-1, *[1] * len(row_shape)) * 2.0**-24 * size
    dtype = result.values.dtype
    bound = UNIT[dtype] * (exact.abs() + slack) + slack + SMALLEST[dtype] * (size > 0)
    error = (table - exact).abs()
    wrong = (~(error <= bound)).nonzero()
    if not len(wrong):
        return None
    place = tuple(int(i) for i in wrong[0])
    return f"{list(place)} is {float(table[place])}, the fp64 sum {float(exact[place])} +- {float(bound[place]):.3g}"


def zeros_have_signs(algorithm: str) -> bool:
    """Return whether -0.0 and 0.0 differ. With "dense" on a GPU this depends on how torch adds up duplicates."""
    return algorithm != "dense" or po.backend() == "host"


@serially
def rows_problem(result: Rows, want: Rows, *, zeros_have_signs: bool = True) -> str | None:
    """Return where a result differs in indices or in a bit of its values, or None."""
    if result.indices.dtype != torch.int64 or result.indices.tolist() != want.indices.tolist():
        return f"{result.indices.dtype} indices {result.indices.tolist()} instead of {want.indices.tolist()}"
    if zeros_have_signs:
        return difference(result.values, want.values)
    return difference(result.values + 0.0, want.values + 0.0)


# ---- calls -----------------------------------------------------------------------------------------------------------


@serially
def to_sparse(case: Case, entries: Entries) -> torch.Tensor:
    """Return a PE's entries as a sparse tensor on its device."""
    indices, values = (tensor.to(po.device()) for tensor in entries)
    return torch.sparse_coo_tensor(
        indices[None], values, case.shape, is_coalesced=case.is_coalesced, check_invariants=False
    )


@serially
def taken_apart(result: torch.Tensor) -> Rows:
    """Return a sparse result on the CPU; the copy does not hold its memory."""
    return Rows(result._indices()[0].cpu().clone(), result._values().cpu().clone())


def form_problem(result: torch.Tensor, case: Case) -> str | None:
    """Return what is wrong with a sparse result except for its rows, or None."""
    kind = (result.layout, tuple(result.shape), result.dtype, result.device, result.is_coalesced(), result.sparse_dim())
    want = (torch.sparse_coo, case.shape, case.dtype, po.device(), True, 1)
    if kind != want or tuple(result._values().shape[1:]) != case.row_shape or result.requires_grad:
        return f"got {kind} with values {list(result._values().shape)}, expected {want}"
    return None


class Room:
    """Buffers for a result of sparse_all_reduce_into, with some memory after them; collective.

    Attributes:
        indices, values, count: what the call gets.
    """

    def __init__(self, capacity: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        device = po.device()
        self._values = po.empty(capacity + 2, *row_shape, dtype=dtype)
        self._indices = torch.empty(capacity + 2, dtype=torch.int64, device=device)
        self._count = torch.empty(3, dtype=torch.int64, device=device)
        self.indices, self.values, self.count = self._indices[:capacity], self._values[:capacity], self._count[1:2]
        self.reset()

    def reset(self) -> None:
        self._values.fill_(UNTOUCHED)
        self._indices.fill_(UNTOUCHED_INDEX)
        self._count.fill_(UNTOUCHED_INDEX)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {"out_indices": self.indices, "out_values": self.values, "out_count": self.count}

    def problem(self, want: Rows, *, is_full: bool = False) -> str | None:
        """Return where the buffers differ from a result, or None.

        Args:
            want: the result.
            is_full: the result has more rows than the buffers: only the count may be written.
        """
        indices, values, count = self._indices.cpu(), self._values.cpu(), self._count.cpu().tolist()
        if count != [UNTOUCHED_INDEX, len(want.indices), UNTOUCHED_INDEX]:
            return f"the count and its neighbors are {count}, expected {len(want.indices)} in the middle"
        filled = 0 if is_full else count[1]
        if bool((indices[filled:] != UNTOUCHED_INDEX).any()) or bool((values[filled:] != UNTOUCHED).any()):
            return f"rows behind the first {filled} were written"
        return None if is_full else rows_problem(Rows(indices[:filled], values[:filled]), want)

    def free(self) -> None:
        po.free(self._values)


@serially
def padded(case: Case, entries: Entries, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indices, values and count of a PE, with entries after the count that nobody may read."""
    nnz = len(entries.indices)
    indices = torch.full((length,), case.rows + 9, dtype=case.index_dtype)
    indices[nnz + 1 :: 2] = -1
    values = torch.full((length, *case.row_shape), torch.nan, dtype=case.dtype)
    indices[:nnz], values[:nnz] = entries.indices, entries.values
    return indices.to(po.device()), values.to(po.device()), torch.tensor([nnz], device=po.device())


def call_into(case: Case, entries: Entries, room: Room, algorithm: str, length: int | None = None) -> None:
    """Call sparse_all_reduce_into.

    Args:
        case: the shape.
        entries: of this PE.
        room: takes the result.
        algorithm: the operator's.
        length: of the buffers, with a count of the valid entries; None for buffers of exactly the entries.
    """
    indices, values, count = padded(case, entries, len(entries.indices) if length is None else length)
    po.sparse_all_reduce_into(
        indices,
        values,
        num_rows=case.rows,
        **room.arguments(),  # type: ignore[arg-type]
        count=None if length is None else count,
        op=case.op,
        algorithm=algorithm,
        is_coalesced=case.is_coalesced,
    )


class SparseTrial(Trial):
    """A case, called by both entries: all algorithms in the first turn, and two in each other turn."""

    def __init__(self, case: Case) -> None:
        self._case = case
        world, iterations = po.world_size(), range(NUM_ITERATIONS)
        self._length = 2 + max(len(entries.indices) for i in iterations for entries in make_inputs(case, world, i))
        most = max(len(wanted(case, world, i).indices) for i in iterations)
        self._room = Room(most, case.row_shape, case.dtype)

    def ways(self, turn: int) -> Sequence[tuple[str, str]]:
        return WAYS if turn == 0 else [WAYS[(turn + step) % len(WAYS)] for step in (0, 3)]

    def call(self, turn: int, iteration: int, way: tuple[str, str]) -> Outcome:
        case, (entry, algorithm) = self._case, way
        entries, want = (make(case, po.world_size(), iteration) for make in (make_inputs, wanted))
        if entry == "into":
            self._room.reset()
            call_into(case, entries[po.rank()], self._room, algorithm, self._length if turn % 2 else None)
            return Outcome([], self._room.problem(want))
        x = to_sparse(case, entries[po.rank()])
        given = x._indices().clone(), x._values().clone(), x.is_coalesced()
        output = po.sparse_all_reduce(x, op=case.op, algorithm=algorithm)
        found = form_problem(output, case)
        found = found or rows_problem(taken_apart(output), want, zeros_have_signs=zeros_have_signs(algorithm))
        found = found or _model_problem(case, po.world_size(), iteration)
        if not (torch.equal(x._indices(), given[0]) and torch.equal(x._values(), given[1])):
            found = "the input was changed"
        if x.is_coalesced() != given[2]:
            found = "the input says something else of its being coalesced"
        return Outcome([output._indices(), output._values()], found)

    def close(self) -> None:
        self._room.free()
