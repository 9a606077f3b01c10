"""Test inputs of embedding_all_to_all, a model of its exact bits, and the calls of a case.

Data depends on (case, rank, index, iteration), so every PE can compute the inputs of every other PE.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bits import Outcome, Trial, check, difference
from serially import serially

import persistent_ops as po
from persistent_ops.ops.embedding.all_to_all import reference
from persistent_ops.ops.embedding.plan import OPERATOR, Tuning

Inputs = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One shape of the operator.

    Attributes:
        dims: rank -> D of each of its tables.
        wire: dtype of pooled rows; None: the dtype of the tables.
        batch: global batch, or a function from the world size to the samples of each PE.
        pooling: (rank, iteration, generator, number of bags) -> length of each bag.
        is_in_turn: whether columns begin with the first table of each PE, then the second table of each PE, and so on.
    """

    name: str
    dims: Callable[[int], Sequence[int]] = lambda rank: (8, 16)
    batch: Callable[[int], int | list[int]] = lambda world: 37
    rows: int = 61
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    pooling: str = "sum"
    is_weighted: bool = False
    max_pooling: int = 6
    same_table: bool = False
    huge_bag: int = 0
    tuning: Tuning | None = None
    wire: torch.dtype | None = None
    is_in_turn: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        return self.wire or self.dtype


def _varied_dims(rank: int) -> Sequence[int]:
    return ((3, 8), (), (128, 5, 64, 256), (16,))[rank % 4]


CASES = [
    Case("plain"),
    Case("int32 indices", index_dtype=torch.int32),
    Case("int32 offsets", offset_dtype=torch.int32),
    Case("int32 both, bf16", index_dtype=torch.int32, offset_dtype=torch.int32, dtype=torch.bfloat16),
    Case("fp16", dtype=torch.float16, dims=lambda rank: (24, 128)),
    Case("bf16", dtype=torch.bfloat16, dims=lambda rank: (128,) * 3),
    Case("mean", pooling="mean"),
    Case("mean fp16", pooling="mean", dtype=torch.float16),
    Case("weighted", is_weighted=True),
    Case("weighted bf16", is_weighted=True, dtype=torch.bfloat16, dims=lambda rank: (8, 32)),
    Case(
        "mixed and odd widths, one PE without tables", dims=_varied_dims, batch=lambda w: [11, 0, 19, 5, 1, 2, 3, 4][:w]
    ),
    Case("bf16, one PE without tables", dims=_varied_dims, dtype=torch.bfloat16, batch=lambda w: [4] * w),
    Case("uneven default split", batch=lambda w: 4 * w + 1),
    Case("fewer samples than PEs", batch=lambda w: max(1, w - 1)),
    Case("no samples", batch=lambda w: [0] * w),
    Case("empty bags only", max_pooling=0),
    Case("one row", rows=1, max_pooling=3),
    Case("pooling one", max_pooling=1),
    Case("wide rows", dims=lambda rank: (2048, 1000), batch=lambda w: 9, max_pooling=3),
    Case("width one", dims=lambda rank: (1, 1, 2), batch=lambda w: 21),
    Case("every row shape", dims=lambda rank: (4, 16, 32, 64, 100, 128, 256, 300), batch=lambda w: 19),
    Case("same table twice", same_table=True),
    Case("huge and tiny bags", huge_bag=700, batch=lambda w: 11),
    Case("many tables", dims=lambda rank: (4,) * (70 + rank), batch=lambda w: 6, max_pooling=2),
    Case("single-sample slices", tuning=Tuning(slice_samples=1)),
    Case("large slices, locals mixed in", tuning=Tuning(slice_samples=16, local_delay=0.0)),
    Case("columns in turn", is_in_turn=True, dims=lambda rank: (8, 16, 64)),
    Case(
        "columns in turn, mixed and odd widths, one PE without tables",
        dims=_varied_dims,
        batch=lambda w: [11, 0, 19, 5, 1, 2, 3, 4][:w],
        is_in_turn=True,
    ),
    Case("columns in turn, bf16 on the wire", dims=lambda rank: (128, 8, 256), wire=torch.bfloat16, is_in_turn=True),
    Case("bf16 on the wire", wire=torch.bfloat16),
    Case("bf16 on the wire, mean", pooling="mean", wire=torch.bfloat16, index_dtype=torch.int32),
    Case("bf16 on the wire, weighted", is_weighted=True, dims=lambda rank: (8, 128), wire=torch.bfloat16),
    Case(
        "bf16 on the wire, mixed and odd widths",
        dims=_varied_dims,
        batch=lambda w: [11, 0, 19, 5, 1, 2, 3, 4][:w],
        wire=torch.bfloat16,
    ),
    Case(
        "bf16 on the wire, every row shape",
        dims=lambda rank: (4, 16, 32, 64, 100, 128, 256, 520),
        batch=lambda w: 19,
        wire=torch.bfloat16,
    ),
    Case("bf16 on the wire, pooling one", max_pooling=1, dims=lambda rank: (256,), wire=torch.bfloat16),
]


def split_of(case: Case, world: int) -> list[int]:
    batch = case.batch(world)
    if isinstance(batch, list):
        return batch
    return [batch // world + int(rank < batch % world) for rank in range(world)]


class Placed:
    """The columns of a case in a world."""

    def __init__(self, case: Case, world: int) -> None:
        widths = [list(case.dims(rank)) for rank in range(world)]
        if case.same_table:
            widths = [[of_pe[0]] * 2 for of_pe in widths]
        tables = [(pe, table) for pe, of_pe in enumerate(widths) for table in range(len(of_pe))]
        begins, begin = {}, 0
        for pe, table in sorted(tables, key=lambda each: (each[1], each[0]) if case.is_in_turn else each):
            begins[pe, table] = begin
            begin += widths[pe][table]
        self.columns = [begins[each] for each in tables] if case.is_in_turn else None
        ranges = [range(begins[pe, table], begins[pe, table] + widths[pe][table]) for pe, table in tables]
        self._places = torch.tensor([place for each in ranges for place in each], dtype=torch.int64)

    def by_pe(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result's columns side by side, ordered by PE."""
        return result if self.columns is None else result[:, self._places.to(result.device)]


@functools.lru_cache(maxsize=512)
def _inputs(case: Case, rank: int, world: int, iteration: int) -> Inputs:
    """Make the inputs once for all PEs that are threads of this process. Nobody may write to them."""
    seed = zlib.crc32(f"{case.name} {rank}".encode())
    tables_rng = torch.Generator().manual_seed(seed)
    weights = [torch.randn(case.rows, dim, generator=tables_rng).to(case.dtype) for dim in case.dims(rank)]
    if case.same_table:
        weights = [weights[0]] * 2
    rng = torch.Generator().manual_seed(seed * 31 + iteration + 1)
    num_bags = len(weights) * sum(split_of(case, world))
    lengths = torch.randint(0, case.max_pooling + 1, (num_bags,), generator=rng)
    if case.max_pooling == 1:
        lengths.fill_(1)
    if case.huge_bag and num_bags:
        lengths[(7 * iteration + rank) % num_bags] = case.huge_bag
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    indices = torch.randint(0, case.rows, (int(offsets[-1]),), generator=rng)
    factors = torch.randn(indices.shape, generator=rng) if case.is_weighted else None
    return weights, indices.to(case.index_dtype), offsets.to(case.offset_dtype), factors


@serially
def make_inputs(case: Case, rank: int, world: int, iteration: int) -> Inputs:
    """Return one PE's inputs on the CPU, as new tensors. Tables stay the same over iterations, lookups change."""
    weights, indices, offsets, factors = _inputs(case, rank, world, iteration)
    copies = [weight.clone() for weight in weights]
    return copies, indices.clone(), offsets.clone(), None if factors is None else factors.clone()


@serially
def expected_bits(case: Case, inputs: Sequence[Inputs], rank: int, split: Sequence[int]) -> torch.Tensor:
    """Return the exact result of PE `rank`: fp32 sums in index order, one rounding at the end."""
    batch, first, rows = sum(split), sum(split[:rank]), split[rank]
    columns = []
    for weights, indices, offsets, factors in inputs:
        for t, weight in enumerate(weights):
            weight = weight.float()
            begins = offsets[t * batch + first : t * batch + first + rows].long()
            lengths = offsets[t * batch + first + 1 : t * batch + first + rows + 1].long() - begins
            total = torch.zeros(rows, weight.shape[1])
            for j in range(int(lengths.max()) if rows else 0):
                bags = (lengths > j).nonzero().flatten()
                places = begins[bags] + j
                values = weight[indices[places].long()]
                total[bags] += values if factors is None else values * factors[places, None]
            if case.pooling == "mean":
                scale = torch.where(lengths > 1, 1.0 / lengths.clamp(min=1).float(), torch.ones(()))
                total *= scale[:, None]
            columns.append(total.to(case.result_dtype))
    return torch.cat(columns, dim=1) if columns else torch.zeros(rows, 0, dtype=case.result_dtype)


class EmbeddingTrial(Trial):
    """A case, called with both schedules. Results come from a pool, which reuses a buffer that nobody holds."""

    held = (1, 4)

    def __init__(self, case: Case) -> None:
        self._case, world = case, po.world_size()
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._split, self._placed = split_of(case, world), Placed(case, world)
        self._tables = [weight.to(po.device()) for weight in make_inputs(case, po.rank(), world, 0)[0]]
        if case.same_table:
            self._tables = [self._tables[0]] * 2
        everyone = [sum(w.shape[1] for w in _inputs(case, pe, world, 0)[0]) for pe in range(world)]
        self._dims = everyone if 0 in everyone else None  # None: the PEs agree among themselves
        self._wants: dict[int, torch.Tensor] = {}

    def ways(self, turn: int) -> Sequence[str]:
        return ("communication_aware", "oblivious")

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        case, rank, split, device = self._case, po.rank(), self._split, po.device()
        inputs = [_inputs(case, pe, po.world_size(), iteration) for pe in range(po.world_size())]
        _, indices, offsets, factors = inputs[rank]
        output = po.embedding_all_to_all(
            self._tables,
            indices.to(device),
            offsets.to(device),
            None if factors is None else factors.to(device),
            pooling=case.pooling,
            batch_per_rank=split,
            dim_per_rank=self._dims,
            dtype=case.dtype,
            wire_dtype=case.wire,
            schedule=way,
            columns=self._placed.columns,
        )
        if iteration not in self._wants:
            self._wants[iteration] = expected_bits(case, inputs, rank, split)
        found = self._placed.by_pe(output).cpu()
        problem = difference(found, self._wants[iteration])
        if problem is None and turn == 0:
            problem = _is_near(case, found, reference(inputs, rank, split, case.pooling), inputs, rank, split)
        return Outcome([output], problem)

    def close(self) -> None:
        OPERATOR.tune(po.runtime.world.current(), None)


def _is_near(
    case: Case, output: torch.Tensor, exact: torch.Tensor, inputs: Sequence[Inputs], rank: int, split: Sequence[int]
) -> str | None:
    """Compare with the fp64 reference under the rounding bound of a sequential fp32 sum."""
    magnitudes = [([w.abs() for w in ws], i, o, None if f is None else f.abs()) for ws, i, o, f in inputs]
    size = reference(magnitudes, rank, split, case.pooling)
    longest = max(case.max_pooling, case.huge_bag) + 2
    unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[case.result_dtype]
    bound = longest * 2.0**-23 * size + 2 * unit * exact.abs() + 1e-7
    if bool(((output.double() - exact).abs() > bound).any()):
        return f"differs from the fp64 reference by {float((output.double() - exact).abs().max())}"
    return None


def run_cases(backend: str, names: Sequence[str], options: dict[str, Any]) -> dict[str, str | None]:
    """Run cases one after the other on this PE, each in a world of its own."""
    po.init(backend, operator_timeout=20.0, heap_size=256 << 20, **options)
    try:
        return {case.name: check(EmbeddingTrial(case))[0] for case in CASES if case.name in names}
    finally:
        po.finalize()
