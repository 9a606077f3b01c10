"""Shared by the tests of embedding_all_to_all's backward pass: cases, inputs, exact bits, a training."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from bits import difference
from embedding_cases import CASES as FORWARD_CASES, Case as Shape, split_of
from serially import serially

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import Tuning

__all__ = [
    "CASES",
    "FEW",
    "SMALL",
    "Case",
    "Gradients",
    "Inputs",
    "Model",
    "Training",
    "case_of",
    "columns_of",
    "make_gradient",
    "make_inputs",
    "sparse_problem",
]

_CHUNK = 256
_BLOCK_CHUNKS = 32
_SHAPE = Shape("backward")


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and how its tables are updated.

    Attributes:
        shape: of the forward pass.
        optimizer, options: its name and its options.
        scale: of gradients.
        bad: one in `bad` lookups is outside of the tables; 0: none.
        drawn: rows: "uniform"; "Zipf", the n-th row with 1 / n of the first row's probability; "once", all rows of a
            table in some order, in bags of any length; or "hot", 15 in 16 lookups have the same row.
        tuning: of the backward pass.
    """

    name: str
    shape: Shape = _SHAPE
    optimizer: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    scale: float = 1.0
    bad: int = 0
    drawn: str = "uniform"
    tuning: Tuning | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype


def _of(width: int) -> Callable[[int], tuple[int, ...]]:
    """Return a function that gives each PE one table of that width."""
    return lambda rank: (width,)


_SHAPES = {shape.name: shape for shape in FORWARD_CASES}
_HOT = Shape("hot rows", rows=3, max_pooling=90, batch=lambda world: 40)
# Rows with some hundred lookups, which span the ranges of several tickets, and rows with fewer lookups than a chunk.
_WARM = Shape("warm rows", rows=12, max_pooling=90, batch=lambda world: 40)
_WIDE = Shape("hot wide rows", rows=3, max_pooling=90, batch=lambda world: 8, dims=lambda rank: (700,))
_OF_MANY_LOOKUPS = (
    ("rowwise_adagrad", dataclasses.replace(_HOT, name="hot means", pooling="mean")),
    ("adam", dataclasses.replace(_HOT, name="hot weighted rows", is_weighted=True)),
    ("rowwise_adagrad", _WIDE),
    ("rowwise_adagrad", _WARM),
    ("adagrad", dataclasses.replace(_WARM, name="warm weighted rows", is_weighted=True, dtype=torch.bfloat16)),
)
# A warp has more lanes than such a row has chunks, so each lane has a share of one chunk, also for single elements.
_SHARED = (
    ("rowwise_adagrad", dataclasses.replace(_HOT, name="hot fp16 rows of 128", dims=_of(128), dtype=torch.float16)),
    ("rowwise_adagrad", dataclasses.replace(_HOT, name="hot bf16 rows of 64", dims=_of(64), dtype=torch.bfloat16)),
    ("adagrad", dataclasses.replace(_HOT, name="hot fp16 rows of 100", dims=_of(100), dtype=torch.float16)),
    ("rowwise_adagrad", dataclasses.replace(_HOT, name="hot rows of 64", dims=_of(64))),
    ("sgd", dataclasses.replace(_HOT, name="hot rows of 30, bf16 on the wire", dims=_of(30), wire=torch.bfloat16)),
)
_ONE_PART = Shape("one part", dims=lambda rank: (512, 64))
_TILES = Shape("tiles", dims=lambda rank: (128, 64))
_NARROW = dataclasses.replace(_TILES, name="narrow", wire=torch.bfloat16)
_NARROW_SHAPES = [name for name in _SHAPES if name.startswith("bf16 on the wire, ")]
_NARROW_WIDE = dataclasses.replace(_WIDE, name="narrow wide", rows=12, is_weighted=True, wire=torch.bfloat16)
_DECAY = (("weight_decay", 0.01),)
_MAX_NORM = (("max_norm", 3.0),)
_VARIED = "mixed and odd widths, one PE without tables"
_STOCHASTIC = (("rounding", "stochastic"), ("seed", 1 << 40))
_OF_16_BITS = (
    ("sgd", "bf16", _SHAPES["bf16"]),
    ("rowwise_adagrad", "fp16", _SHAPES["fp16"]),
    ("adagrad", "weighted bf16", _SHAPES["weighted bf16"]),
    ("adam", "mean fp16", _SHAPES["mean fp16"]),
    ("rowwise_adagrad", "odd widths", dataclasses.replace(_SHAPES[_VARIED], dtype=torch.bfloat16)),
    ("sgd", "same table twice", dataclasses.replace(_SHAPES["same table twice"], dtype=torch.float16)),
    ("adagrad", "hot wide rows", dataclasses.replace(_WIDE, dtype=torch.bfloat16)),
)


def _like(shape: Shape, name: str) -> Shape:
    """Return a case of the forward pass with the rows of another case."""
    return dataclasses.replace(
        _SHAPES[name], name=f"{name}, {shape.name}", rows=shape.rows, max_pooling=shape.max_pooling
    )


_ZIPF = Shape("Zipf", rows=3000, max_pooling=60)
_ONCE = Shape("once", rows=700)
# Tickets with the maximum number of lookups, as on GPUs with many more lookups for each warp.
_WITH_FEW_WGS = (
    (1, "rowwise_adagrad", "Zipf", _ZIPF),
    (1, "sgd", "once", _ONCE),
    (1, "rowwise_adagrad", "uniform", _HOT),
    (2, "rowwise_adagrad", "uniform", _WARM),
    (3, "rowwise_adagrad", "Zipf", _like(_ZIPF, "fp16")),
)
_DRAWN = (  # whose kernels other cases have too
    ("sgd", "Zipf drawn", "Zipf", _ZIPF, ()),
    ("adagrad", "Zipf drawn weighted bf16", "Zipf", _like(_ZIPF, "weighted bf16"), ()),
    ("rowwise_adagrad", "Zipf drawn fp16", "Zipf", _like(_ZIPF, "fp16"), _STOCHASTIC),
    ("sgd", "all rows drawn once", "once", _ONCE, ()),
    ("rowwise_adagrad", "all rows drawn once, mean fp16", "once", _like(_ONCE, "mean fp16"), ()),
)
CASES = [
    *(Case(f"{optimizer}", optimizer=optimizer) for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("fewer samples than PEs", "no samples", "empty bags only")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("one row", "same table twice", "many tables")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("int32 both, bf16", "uneven default split")),
    *(Case(f"rowwise, {name}", _SHAPES[name], "rowwise_adagrad") for name in (_VARIED, "fp16", "mean fp16")),
    *(Case(f"adagrad, {name}", _SHAPES[name], "adagrad") for name in (_VARIED, "weighted bf16", "mean", "width one")),
    Case("rowwise, bf16, one PE without tables", _SHAPES["bf16, one PE without tables"], "rowwise_adagrad"),
    Case("adagrad, every row shape", _SHAPES["every row shape"], "adagrad"),
    Case("rowwise, wide rows", _SHAPES["wide rows"], "rowwise_adagrad"),
    Case("rowwise, L2", optimizer="rowwise_adagrad", options=_DECAY, scale=0.25),
    Case("rowwise, decoupled", optimizer="rowwise_adagrad", options=(*_DECAY, ("weight_decay_mode", "decoupled"))),
    Case("rowwise, norms", optimizer="rowwise_adagrad", options=_MAX_NORM),
    Case("rowwise, norms, L2, means in fp16", _SHAPES["mean fp16"], "rowwise_adagrad", (*_MAX_NORM, *_DECAY)),
    Case(f"rowwise, norms, {_VARIED}", _SHAPES[_VARIED], "rowwise_adagrad", _MAX_NORM),
    Case("rowwise, norms, wide rows", _WIDE, "rowwise_adagrad", (("max_norm", 15.0),)),
    Case("rowwise, norms, bf16, stochastic", _SHAPES["bf16"], "rowwise_adagrad", (*_MAX_NORM, *_STOCHASTIC)),
    Case("adam, weighted, decay", _SHAPES["weighted"], "adam", (*_DECAY, ("betas", (0.8, 0.95)))),
    Case("adam, bf16", _SHAPES["bf16"], "adam", scale=0.5),
    Case("sgd, skipped entries", bad=5),
    Case("rowwise, skipped entries of means", _SHAPES["mean"], "rowwise_adagrad", bad=3),
    Case("sgd, more lookups than a chunk has", _HOT),
    Case("adagrad, the same in bf16", dataclasses.replace(_HOT, dtype=torch.bfloat16), "adagrad"),
    *(Case(f"{optimizer}, {shape.name}", shape, optimizer) for optimizer, shape in (*_OF_MANY_LOOKUPS, *_SHARED)),
    Case("adagrad, rows of one part", _ONE_PART, "adagrad"),
    *(Case(f"rowwise, tiles of {n} lanes", _TILES, "rowwise_adagrad", tuning=Tuning(lanes=n)) for n in (8, 16, 32)),
    *(Case(f"{optimizer}, bf16 on the wire", _NARROW, optimizer) for optimizer in ("sgd", "adagrad", "adam")),
    Case("rowwise, bf16 on the wire, L2", _NARROW, "rowwise_adagrad", _DECAY, scale=0.25),
    *(Case(f"rowwise, {name}", _SHAPES[name], "rowwise_adagrad") for name in _NARROW_SHAPES),
    Case("adagrad, bf16 on the wire, wide weighted rows", _NARROW_WIDE, "adagrad", bad=5),
    *(Case(f"{step}, stochastic, {name}", shape, step, _STOCHASTIC) for step, name, shape in _OF_16_BITS),
    Case("adam, seeds of tables", _SHAPES["bf16"], "adam", (("rounding", "stochastic"), ("seed", (5, 2**63 - 1, 0)))),
    Case("sgd, columns in turn", _SHAPES["columns in turn"]),
    Case(f"adagrad, columns in turn, {_VARIED}", _SHAPES[f"columns in turn, {_VARIED}"], "adagrad"),
    Case("rowwise, columns in turn", _SHAPES["columns in turn, bf16 on the wire"], "rowwise_adagrad"),
    Case("sgd, pieces of one sample", tuning=Tuning(slice_samples=1, pushing_work_groups=1, pushing_at_par=0)),
    Case("sgd, all push", tuning=Tuning(slice_samples=1, pushing_work_groups=1, pushing_at_par=1 << 20)),
    Case("sgd, one work-group", tuning=Tuning(work_groups=1)),
    *(
        Case(f"{optimizer}, {shape.name}, {n} work-groups", shape, optimizer, drawn=drawn, tuning=Tuning(work_groups=n))
        for n, optimizer, drawn, shape in _WITH_FEW_WGS
    ),
    *(Case(f"{step}, {name}", shape, step, options, drawn=drawn) for step, name, drawn, shape, options in _DRAWN),
]  # fmt: skip
FEW = [case for number, case in enumerate(CASES) if number % 3 == 0 or "skipped" in case.name or "drawn" in case.name]


# ---- inputs and expected results -------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What one PE passes. Nobody may write to it."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None


def _seed(*what: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, what)).encode()))


@serially
@functools.lru_cache(maxsize=512)
def make_inputs(case: Case, rank: int, world: int, iteration: int) -> Inputs:
    """Return a PE's inputs, on the CPU."""
    shape = case.shape
    rng = _seed(case.name, rank)
    tables = [torch.randn(shape.rows, dim, generator=rng).to(shape.dtype) for dim in shape.dims(rank)]
    if shape.same_table:
        tables = [tables[0]] * 2
    rng = _seed(case.name, rank, iteration)
    num_bags = len(tables) * sum(split_of(shape, world))
    lengths = torch.randint(0, shape.max_pooling + 1, (num_bags,), generator=rng)
    if case.drawn == "once" and num_bags:
        batch = num_bags // len(tables)
        of_tables = [torch.randint(0, batch, (shape.rows,), generator=rng).bincount(minlength=batch) for _ in tables]
        lengths = torch.cat(of_tables)
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    indices = _draw(case, int(offsets[-1]), rng)
    if case.bad:
        indices[:: case.bad] = torch.tensor([-1, shape.rows])[torch.arange(len(indices[:: case.bad])) % 2]
    factors = torch.randn(indices.shape, generator=rng) if shape.is_weighted else None
    return Inputs(tables, indices.to(shape.index_dtype), offsets.to(shape.offset_dtype), factors)


def _draw(case: Case, count: int, rng: torch.Generator) -> torch.Tensor:
    """Return the rows of `count` lookups."""
    rows = case.shape.rows
    if case.drawn == "once":
        orders = [torch.randperm(rows, generator=rng) for _ in range(count // rows)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *orders])
    if case.drawn == "Zipf":
        return torch.multinomial(1 / torch.arange(1.0, rows + 1), count, replacement=True, generator=rng)
    indices = torch.randint(0, rows, (count,), generator=rng)
    if case.drawn == "hot":
        indices[torch.arange(count) % 16 != 0] = rows // 2
    return indices


@serially
@functools.lru_cache(maxsize=512)
def make_gradient(case: Case, world: int, iteration: int, step: int) -> torch.Tensor:
    """Return the gradient of the whole batch, for the tables of all PEs."""
    columns = sum(columns_of(case, world))
    rng = _seed(case.name, "gradient", iteration, step)
    return torch.randn(sum(split_of(case.shape, world)), columns, generator=rng).to(case.shape.result_dtype)


def columns_of(case: Case, world: int) -> list[int]:
    of_pe = [list(case.shape.dims(rank)) for rank in range(world)]
    return [2 * dims[0] if case.shape.same_table else sum(dims) for dims in of_pe]


def _in_order(slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add up the values of each of the slots 0, 1, ..., in order of occurrence, beginning with 0."""
    count = int(slots.max()) + 1 if len(slots) else 0
    return torch.zeros(count, values.shape[1]).index_add_(0, slots, values)  # on the CPU in this order


def _root(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded square roots. torch's fp32 square roots are not."""
    return values.double().sqrt().float()


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def philox(counter: Sequence[Any], key: int) -> list[np.ndarray]:
    """Return the four words of Philox4x32-10 for four words of 32 bits, each a number or an array, as uint64."""
    low = np.uint64(0xFFFFFFFF)
    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        products = [np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]]
        high = [product >> np.uint64(32) for product in products]
        mixed = [high[1] ^ x[1] ^ np.uint64(keys[0]), high[0] ^ x[3] ^ np.uint64(keys[1])]
        x = [mixed[0], products[1] & low, mixed[1], products[0] & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def random_halves(seed: int, step: int, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return 16 random bits, int64, for each element of rows: eight to a draw."""
    chunks = -(-width // 8)
    row = rows.numpy().astype(np.uint64)[:, None]
    counter = (row & np.uint64(0xFFFFFFFF), row >> np.uint64(32), np.arange(chunks)[None], step & 0xFFFFFFFF)
    words = np.stack(np.broadcast_arrays(*philox(counter, seed)), axis=-1)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
    return torch.from_numpy(halves.reshape(len(rows), chunks * 8)[:, :width].astype(np.int64))


def round_stochastically(values: torch.Tensor, random: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round finite floats away from zero if the digits after the last place and random / 2^16 add up to 1 or more."""
    digits, least = {torch.bfloat16: (8, -133), torch.float16: (11, -24)}[dtype]
    magnitudes = values.abs().double().numpy()
    places = np.maximum(np.frexp(magnitudes)[1] - digits, least)  # the last place counts 2^places
    units = np.floor(np.ldexp(magnitudes, 16 - places)).astype(np.int64)
    rounded = np.ldexp(((units + random.numpy()) >> 16).astype(np.float64), places)
    return torch.copysign(torch.from_numpy(rounded).float(), values).to(dtype)


# ---- the model -------------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Exact bits of the inputs of an optimizer step on a PE.

    Attributes:
        sums: for each distinct table: the looked-up rows, `[U]`, sorted, and their sums, `[U, D]`.
        factors: the gradient of the factors.
    """

    sums: list[tuple[torch.Tensor, torch.Tensor]]
    factors: torch.Tensor | None


class Model:
    """The exact bits of the tables, states and gradients of the factors of a PE."""

    @serially
    def __init__(self, case: Case, rank: int, world: int) -> None:
        self._case, self._rank, self._world = case, rank, world
        self.tables = [table.clone() for table in make_inputs(case, rank, world, 0).tables]
        if case.shape.same_table:
            self.tables = [self.tables[0]] * 2
        rowwise = case.optimizer == "rowwise_adagrad"
        count = {"sgd": 0, "adam": 2}.get(case.optimizer, 1)
        self.states = [
            [torch.zeros(len(t)) if rowwise else torch.zeros(t.shape) for _ in range(count)] for t in self.tables
        ]
        self._powers = torch.ones(2)
        self._num_steps = 0
        self._options = dict(case.options)
        self._sums: dict[tuple[int, int], Any] = {}  # of steps without factors: whatever the tables

    def rescale(self, scale: float) -> None:
        """Use another scale of gradients from the next step on."""
        self._case = dataclasses.replace(self._case, scale=scale)
        self._sums.clear()

    @serially
    def step(self, iteration: int, step: int, lr: float) -> torch.Tensor | None:
        """Make a step and return the gradient of the factors."""
        self._powers = self._powers * torch.tensor(self._options.get("betas", (0.9, 0.999)))
        found = self.gradients(iteration, step)
        for number, (touched, sums) in enumerate(found.sums):
            self._update(number, touched, sums, lr)
        self._num_steps += 1
        return found.factors

    @serially
    def gradients(self, iteration: int, step: int) -> Gradients:
        """Return the inputs of a step."""
        case, shape = self._case, self._case.shape
        inputs = make_inputs(case, self._rank, self._world, iteration)
        if (iteration, step) in self._sums:
            return Gradients(self._sums[iteration, step], None)
        batch = sum(split_of(shape, self._world))
        gradient = make_gradient(case, self._world, iteration, step).float()
        column = sum(columns_of(case, self._world)[: self._rank])
        offsets, indices = inputs.offsets.long(), inputs.indices.long()
        lengths = offsets[1:] - offsets[:-1]
        bags = torch.arange(len(lengths)).repeat_interleave(lengths)
        is_row = (indices >= 0) & (indices < shape.rows)
        counts = torch.zeros(max(len(lengths), 1)).index_add_(0, bags, is_row.float())
        factor_gradients = None if inputs.factors is None else torch.zeros_like(inputs.factors)
        rows_of, values_of = [], []
        for number, table in enumerate(self.tables):
            width = table.shape[1]
            chosen = (is_row & (bags // max(batch, 1) == number)).nonzero().flatten()
            values = gradient[bags[chosen] % max(batch, 1), column : column + width]
            column += width
            if inputs.factors is not None and factor_gradients is not None:
                factor_gradients[chosen] = self._dots(table[indices[chosen]].float(), values)
                values = values * inputs.factors[chosen, None]
            if shape.pooling == "mean":
                values = values * (1 / counts[bags[chosen], None])
            rows_of.append(indices[chosen])
            values_of.append(values)
        if shape.same_table:
            rows_of, values_of = [torch.cat(rows_of)], [torch.cat(values_of)]
        sums = [*map(self._sum_up, rows_of, values_of)]
        if factor_gradients is None:
            self._sums[iteration, step] = sums
        return Gradients(sums, factor_gradients)

    def _dots(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._over_columns(rows * values)

    def _over_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a row's values as a warp does: elements of a chunk, then chunks of a block as a tree, then blocks."""
        elements = 16 // self._case.shape.dtype.itemsize
        block = elements * _BLOCK_CHUNKS
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % block)).view(
            len(values), -1, _BLOCK_CHUNKS, elements
        )
        chunks = torch.zeros(padded.shape[:3])
        for element in range(elements):
            chunks = chunks + padded[..., element]
        while chunks.shape[2] > 1:
            chunks = chunks[:, :, ::2] + chunks[:, :, 1::2]
        total = torch.zeros(len(values))
        for number in range(chunks.shape[1]):
            total = total + chunks[:, number, 0]
        return total

    def _sum_up(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the looked-up rows, sorted, and the sums of their gradients in order of occurrence."""
        touched, slots, counts = rows.unique(return_inverse=True, return_counts=True)
        order = slots.argsort(stable=True)
        occurrence = torch.empty_like(slots)
        occurrence[order] = torch.arange(len(slots)) - (counts.cumsum(0) - counts)[slots[order]]
        chunks, chunk_of = (slots * 4096 + occurrence // _CHUNK).unique(return_inverse=True)
        return touched, _in_order(chunks // 4096, _in_order(chunk_of, values)) * self._case.scale

    def _update(self, number: int, touched: torch.Tensor, sums: torch.Tensor, lr: float) -> None:
        """Update rows of one tensor."""
        table, states = self.tables[number], self.states[number]
        w, options, optimizer = table[touched].float(), self._options, self._case.optimizer
        rate, eps, decay = torch.tensor(lr), torch.tensor(1e-8), torch.tensor(options.get("weight_decay", 0.0))
        is_l2 = options.get("weight_decay_mode", "l2") == "l2"
        if optimizer == "sgd":
            w = w - rate * sums
        elif optimizer == "adagrad":
            states[0][touched] += sums * sums
            w = w - rate * sums / (_root(states[0][touched]) + eps)
        elif optimizer == "rowwise_adagrad":
            g = sums + decay * w if is_l2 and decay else sums
            states[0][touched] += self._over_columns(g * g) * torch.tensor(1 / table.shape[1])
            m = rate / (_root(states[0][touched]) + eps)
            kept = torch.ones(1) if not decay else 1 - m * decay if is_l2 else 1 - (rate * decay).view(1)
            w = kept.view(-1, 1) * w - m[:, None] * sums
            if "max_norm" in options:
                norm, largest = _root(self._over_columns(w * w)), torch.tensor(options["max_norm"])
                w = w * torch.where(norm > largest, largest / norm, torch.ones(1))[:, None]
        else:
            b1, b2 = torch.tensor(options.get("betas", (0.9, 0.999)))
            first, second = states
            first[touched] = b1 * first[touched] + (1 - b1) * sums
            second[touched] = b2 * second[touched] + (1 - b2) * sums * sums
            mean = first[touched] / (1 - self._powers[0])
            spread = _root(second[touched] / (1 - self._powers[1])) + eps
            w = w - rate * (mean / spread + decay * w)
        table[touched] = self._rounded(number, touched, w)

    def _rounded(self, number: int, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        dtype = self.tables[number].dtype
        if self._options.get("rounding", "nearest") == "nearest":
            return values.to(dtype)
        seed = self._options["seed"]
        seed = seed + number if isinstance(seed, int) else seed[number]
        return round_stochastically(values, random_halves(seed, self._num_steps, rows, values.shape[1]), dtype)


@serially
def sparse_problem(
    table: torch.Tensor, gradient: torch.Tensor | None, wanted: tuple[torch.Tensor, torch.Tensor]
) -> str | None:
    """Return what is wrong with a table's sparse gradient, or None."""
    if gradient is None or not gradient.is_sparse or not gradient.is_coalesced() or gradient.shape != table.shape:
        return f"not a coalesced gradient of the table: {gradient}"
    rows, values = wanted
    return difference(gradient.values(), values.to(table.dtype)) or (
        None if torch.equal(gradient.indices().cpu(), rows[None]) else "other rows"
    )


# ---- a training ------------------------------------------------------------------------------------------------------

SMALL = Shape("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19)


class Training:
    """Tables of this PE, their model, and an optimizer; collective.

    Args:
        case: what is trained.
        is_new: whether no backward pass has been made, so that the first one compiles the kernel and the PEs agree.
    """

    def __init__(self, case: Case, *, is_new: bool = False) -> None:
        self._case, self._world, self._rank = case, po.world_size(), po.rank()
        inputs = make_inputs(case, self._rank, self._world, 0)
        self.tables = [table.to(po.device(), copy=True) for table in inputs.tables]
        self.optimizer = po.EmbeddingOptimizer(self.tables, case.optimizer, lr=0.0, **dict(case.options))
        if not is_new:
            self.backward(0)()
            po.check()
        self.begin()

    def begin(self) -> None:
        """Reset tables, states and rate to their values before the first step."""
        self.model = Model(self._case, self._rank, self._world)
        for table, first in zip(self.tables, self.model.tables, strict=True):
            table.copy_(first)
            for state in self.optimizer.state(table):
                state.zero_()
        self.optimizer.lr.fill_(0.1)
        self.optimizer.loaded(0)

    def backward(self, iteration: int) -> Callable[[], None]:
        """Make a forward pass and return its backward pass."""
        inputs = make_inputs(self._case, self._rank, self._world, iteration)
        split = split_of(self._case.shape, self._world)
        result = po.embedding_all_to_all(
            self.tables,
            inputs.indices.to(po.device()),
            inputs.offsets.to(po.device()),
            batch_per_rank=split,
            dim_per_rank=columns_of(self._case, self._world),
            dtype=self._case.dtype,
            wire_dtype=self._case.shape.wire,
            optimizer=self.optimizer,
        )
        first = sum(split[: self._rank])
        gradient = make_gradient(self._case, self._world, iteration, 0)[first : first + split[self._rank]]
        gradient = gradient.to(po.device())
        return lambda: result.backward(gradient)

    def is_right(self) -> bool:
        pairs = zip(self.tables, self.model.tables, strict=True)
        return all(difference(table, want) is None for table, want in pairs)


def case_of(way: str, shape: Shape = SMALL) -> Case:
    return Case(f"{way}, {shape.name}", shape, way)
