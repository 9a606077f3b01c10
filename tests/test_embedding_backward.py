"""The backward pass of embedding_all_to_all: exact bits of updated tables and states, against torch, faults, misuse."""

from __future__ import annotations

import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_cases import CASES as FORWARD_CASES
from embedding_cases import Case as Shape
from embedding_cases import split_of
from protocol import Mismatch, ProtocolSuite, Work
from worlds import error_of, gave_up, in_world

import persistent_ops as po
from persistent_ops.ops.embedding_backward_plan import OPERATOR, Tuning

_CHUNK = 256
_BLOCK_CHUNKS = 32


_SHAPE = Shape("backward")


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and how its tables are updated.

    Attributes:
        shape: of the forward pass.
        algorithm, options: of the optimizer.
        scale: of gradients.
        bad: a share of the lookups that is outside of the tables, one in so many; 0: none.
        tuning: of the backward pass.
    """

    name: str
    shape: Shape = _SHAPE
    algorithm: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    scale: float = 1.0
    bad: int = 0
    tuning: Tuning | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype


_SHAPES = {shape.name: shape for shape in FORWARD_CASES}
_HOT = Shape("hot rows", rows=3, max_pooling=90, batch=lambda world: 40)
_DECAY = (("weight_decay", 0.01),)
_VARIED = "mixed and odd widths, one PE without tables"
CASES = [
    *(Case(f"{algorithm}", algorithm=algorithm) for algorithm in ("sgd", "adagrad", "rowwise_adagrad", "adam")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("fewer samples than PEs", "no samples", "empty bags only")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("one row", "same table twice", "many tables")),
    *(Case(f"sgd, {name}", _SHAPES[name]) for name in ("int32 both, bf16", "uneven default split")),
    *(Case(f"rowwise, {name}", _SHAPES[name], "rowwise_adagrad") for name in (_VARIED, "fp16", "mean fp16")),
    *(Case(f"adagrad, {name}", _SHAPES[name], "adagrad") for name in (_VARIED, "weighted bf16", "mean", "width one")),
    Case("rowwise, bf16, one PE without tables", _SHAPES["bf16, one PE without tables"], "rowwise_adagrad"),
    Case("adagrad, every row shape", _SHAPES["every row shape"], "adagrad"),
    Case("rowwise, wide rows", _SHAPES["wide rows"], "rowwise_adagrad"),
    Case("rowwise, L2", algorithm="rowwise_adagrad", options=_DECAY, scale=0.25),
    Case("rowwise, decoupled", algorithm="rowwise_adagrad", options=(*_DECAY, ("weight_decay_mode", "decoupled"))),
    Case("adam, weighted, decay", _SHAPES["weighted"], "adam", (*_DECAY, ("betas", (0.8, 0.95)))),
    Case("adam, bf16", _SHAPES["bf16"], "adam", scale=0.5),
    Case("sgd, skipped entries", bad=5),
    Case("rowwise, skipped entries of means", _SHAPES["mean"], "rowwise_adagrad", bad=3),
    Case("sgd, more lookups than a chunk has", _HOT),
    Case("adagrad, the same in bf16", dataclasses.replace(_HOT, dtype=torch.bfloat16), "adagrad"),
    Case("sgd, pieces of one sample", tuning=Tuning(slice_samples=1, pushing_work_groups=1)),
    Case("sgd, one work-group", tuning=Tuning(work_groups=1)),
]  # fmt: skip
_FEW = [case for number, case in enumerate(CASES) if number % 3 == 0 or "skipped" in case.name]


# ---- inputs, and what they must give ---------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What one PE passes; nobody may write to it."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None


def _seed(*what: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, what)).encode()))


@functools.lru_cache(maxsize=64)
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
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    indices = torch.randint(0, shape.rows, (int(offsets[-1]),), generator=rng)
    if case.bad:
        indices[:: case.bad] = torch.tensor([-1, shape.rows])[torch.arange(len(indices[:: case.bad])) % 2]
    factors = torch.randn(indices.shape, generator=rng) if shape.is_weighted else None
    return Inputs(tables, indices.to(shape.index_dtype), offsets.to(shape.offset_dtype), factors)


@functools.lru_cache(maxsize=64)
def make_gradient(case: Case, world: int, iteration: int, step: int) -> torch.Tensor:
    """Return the gradient of the whole batch, for the tables of all PEs."""
    columns = sum(_columns(case, world))
    rng = _seed(case.name, "gradient", iteration, step)
    return torch.randn(sum(split_of(case.shape, world)), columns, generator=rng).to(case.shape.dtype)


def _columns(case: Case, world: int) -> list[int]:
    of_pe = [list(case.shape.dims(rank)) for rank in range(world)]
    return [2 * dims[0] if case.shape.same_table else sum(dims) for dims in of_pe]


def _in_order(slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add up the values of each of the slots 0, 1, ..., in order of occurrence, from 0 on."""
    count = int(slots.max()) + 1 if len(slots) else 0
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=count)
    occurrence = torch.arange(len(slots)) - (counts.cumsum(0) - counts)[slots[order]]
    sums = torch.zeros(count, values.shape[1])
    for n in range(int(counts.max()) if len(counts) else 0):
        entries = order[occurrence == n]
        sums[slots[entries]] += values[entries]
    return sums


def _root(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded square roots; torch's of fp32 are not."""
    return values.double().sqrt().float()


class Model:
    """The exact bits of a PE's tables, states and factors' gradients."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self._case, self._rank, self._world = case, rank, world
        self.tables = [table.clone() for table in make_inputs(case, rank, world, 0).tables]
        if case.shape.same_table:
            self.tables = [self.tables[0]] * 2
        rowwise = case.algorithm == "rowwise_adagrad"
        count = {"sgd": 0, "adam": 2}.get(case.algorithm, 1)
        self.states = [
            [torch.zeros(len(t)) if rowwise else torch.zeros(t.shape) for _ in range(count)] for t in self.tables
        ]
        self._powers = torch.ones(2)
        self._options = dict(case.options)

    def step(self, iteration: int, step: int, lr: float) -> torch.Tensor | None:
        """Make a step; return the gradient of the factors."""
        case, shape = self._case, self._case.shape
        inputs = make_inputs(case, self._rank, self._world, iteration)
        batch = sum(split_of(shape, self._world))
        gradient = make_gradient(case, self._world, iteration, step).float()
        column = sum(_columns(case, self._world)[: self._rank])
        offsets, indices = inputs.offsets.long(), inputs.indices.long()
        lengths = offsets[1:] - offsets[:-1]
        bags = torch.arange(len(lengths)).repeat_interleave(lengths)
        is_row = (indices >= 0) & (indices < shape.rows)
        counts = torch.zeros(max(len(lengths), 1)).index_add_(0, bags, is_row.float())
        factor_gradients = None if inputs.factors is None else torch.zeros_like(inputs.factors)
        self._powers = self._powers * torch.tensor(self._options.get("betas", (0.9, 0.999)))
        rows_of, values_of = [], []
        for number, table in enumerate(self.tables):
            width = table.shape[1]
            chosen = (is_row & (bags // max(batch, 1) == number)).nonzero().flatten()
            values = gradient[bags[chosen] % max(batch, 1), column : column + width]
            column += width
            if inputs.factors is not None and factor_gradients is not None:
                factor_gradients[chosen] = self._dots(table[indices[chosen]].float(), values)
                values = values * inputs.factors[chosen, None]
            if shape.mode == "mean":
                values = values * (1 / counts[bags[chosen], None])
            rows_of.append(indices[chosen])
            values_of.append(values)
        if shape.same_table:
            self._update(0, torch.cat(rows_of), torch.cat(values_of), lr)
        else:
            for number, (rows, values) in enumerate(zip(rows_of, values_of, strict=True)):
                self._update(number, rows, values, lr)
        return factor_gradients

    def _dots(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._over_columns(rows * values)

    def _over_columns(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a row's values as a warp does: elements of a chunk, chunks of a block as a tree, blocks."""
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

    def _update(self, number: int, rows: torch.Tensor, values: torch.Tensor, lr: float) -> None:
        """Update one tensor with what its lookups bring, in their order."""
        table, states = self.tables[number], self.states[number]
        touched, slots, counts = rows.unique(return_inverse=True, return_counts=True)
        order = slots.argsort(stable=True)
        occurrence = torch.empty_like(slots)
        occurrence[order] = torch.arange(len(slots)) - (counts.cumsum(0) - counts)[slots[order]]
        chunks, chunk_of = (slots * 4096 + occurrence // _CHUNK).unique(return_inverse=True)
        sums = _in_order(chunks // 4096, _in_order(chunk_of, values)) * self._case.scale
        w, options, algorithm = table[touched].float(), self._options, self._case.algorithm
        rate, eps, decay = torch.tensor(lr), torch.tensor(1e-8), torch.tensor(options.get("weight_decay", 0.0))
        is_l2 = options.get("weight_decay_mode", "l2") == "l2"
        if algorithm == "sgd":
            w = w - rate * sums
        elif algorithm == "adagrad":
            states[0][touched] += sums * sums
            w = w - rate * sums / (_root(states[0][touched]) + eps)
        elif algorithm == "rowwise_adagrad":
            g = sums + decay * w if is_l2 and decay else sums
            states[0][touched] += self._over_columns(g * g) * torch.tensor(1 / table.shape[1])
            m = rate / (_root(states[0][touched]) + eps)
            kept = torch.ones(1) if not decay else 1 - m * decay if is_l2 else 1 - (rate * decay).view(1)
            w = kept.view(-1, 1) * w - m[:, None] * sums
        else:
            b1, b2 = torch.tensor(options.get("betas", (0.9, 0.999)))
            first, second = states
            first[touched] = b1 * first[touched] + (1 - b1) * sums
            second[touched] = b2 * second[touched] + (1 - b2) * sums * sums
            mean = first[touched] / (1 - self._powers[0])
            spread = _root(second[touched] / (1 - self._powers[1])) + eps
            w = w - rate * (mean / spread + decay * w)
        table[touched] = w.to(table.dtype)


# ---- bits ------------------------------------------------------------------------------------------------------------


class BackwardTrial(Trial):
    """Tables that are updated from turn to turn; the last turn begins with them as they were at first."""

    held: ClassVar[Sequence[int]] = ()

    def __init__(self, case: Case) -> None:
        self._case = case
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._begin()

    def _begin(self) -> None:
        case, rank, world = self._case, po.rank(), po.world_size()
        tables = [table.to(po.device(), copy=True) for table in make_inputs(case, rank, world, 0).tables]
        self._tables = [tables[0]] * 2 if case.shape.same_table else tables
        self._optimizer = po.EmbeddingOptimizer(self._tables, case.algorithm, lr=0.1, **dict(case.options))
        self._optimizer.gradient_scale.fill_(case.scale)
        self._model = Model(case, rank, world)

    def ways(self, turn: int) -> Sequence[Hashable]:
        return (0,)

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        if turn and iteration == 0:
            self._begin()
        case, rank, world = self._case, po.rank(), po.world_size()
        shape, split = case.shape, split_of(case.shape, world)
        lr = 0.1 / (1 + iteration)
        self._optimizer.lr.fill_(lr)
        inputs = make_inputs(case, rank, world, iteration)
        indices, offsets = inputs.indices.to(po.device()), inputs.offsets.to(po.device())
        factors = None if inputs.factors is None else inputs.factors.to(po.device(), copy=True).requires_grad_()
        result = po.embedding_all_to_all(
            self._tables,
            indices,
            offsets,
            factors,
            mode=shape.mode,
            batch_per_rank=split,
            dim_per_rank=_columns(case, world),
            dtype=shape.dtype,
            bounds="ignore",
            optimizer=self._optimizer,
        )
        first = sum(split[:rank])
        gradient = make_gradient(case, world, iteration, 0)[first : first + split[rank]].to(po.device())
        if turn % 2:  # begins anywhere
            gradient = torch.cat([gradient.flatten()[:1], gradient.flatten()])[1:].view(gradient.shape)
        result.backward(gradient)
        wanted = self._model.step(iteration, 0, lr)
        found = None
        pairs = [*zip(self._tables, self._model.tables, strict=True)]
        for table, states in zip(self._tables, self._model.states, strict=True):
            pairs += zip(self._optimizer.state(table), states, strict=True)
        if factors is not None:
            assert factors.grad is not None and wanted is not None
            pairs.append((factors.grad, wanted))
        for number, (tensor, want) in enumerate(pairs):
            found = found or ((problem := difference(tensor, want)) and f"tensor {number}: {problem}")
        outputs = [tensor.detach().clone() for tensor, _ in pairs]
        return Outcome(outputs, found)


class TestBits(BitsSuite):
    trial = BackwardTrial
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, _FEW),
        "4": CaseWorld(4, CASES),
        "3-staged": CaseWorld(3, _FEW, {"transport": "staged"}),
        "2-wg4": CaseWorld(2, _FEW, {"host_options": {"wg_size": 4}}),
    }


# ---- faults ----------------------------------------------------------------------------------------------------------

_FAULTS = Shape("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19)
_WAYS = ("sgd", "rowwise_adagrad")


class _Training:
    """Tables of this PE, their model, and an optimizer; collective.

    Args:
        case: what is trained.
        is_new: whether no backward pass has been made, which compiles the kernel and lets the PEs agree.
    """

    def __init__(self, case: Case, *, is_new: bool = False) -> None:
        self._case, self._world, self._rank = case, po.world_size(), po.rank()
        inputs = make_inputs(case, self._rank, self._world, 0)
        self.tables = [table.to(po.device(), copy=True) for table in inputs.tables]
        self.optimizer = po.EmbeddingOptimizer(self.tables, case.algorithm, lr=0.0, **dict(case.options))
        if not is_new:
            self.backward(0)()
            po.check()
        self.begin()

    def begin(self) -> None:
        """Set tables, states and rate to what they are before the first step."""
        self.model = Model(self._case, self._rank, self._world)
        for table, first in zip(self.tables, self.model.tables, strict=True):
            table.copy_(first)
            for state in self.optimizer.state(table):
                state.zero_()
        self.optimizer.lr.fill_(0.1)
        self.optimizer.loaded(0)

    def backward(self, iteration: int) -> Callable[[], None]:
        """Make a forward pass; return its backward pass."""
        inputs = make_inputs(self._case, self._rank, self._world, iteration)
        split = split_of(self._case.shape, self._world)
        result = po.embedding_all_to_all(
            self.tables,
            inputs.indices.to(po.device()),
            inputs.offsets.to(po.device()),
            batch_per_rank=split,
            dim_per_rank=_columns(self._case, self._world),
            optimizer=self.optimizer,
        )
        first = sum(split[: self._rank])
        gradient = make_gradient(self._case, self._world, iteration, 0)[first : first + split[self._rank]]
        gradient = gradient.to(po.device())
        return lambda: result.backward(gradient)

    def is_right(self) -> bool:
        pairs = zip(self.tables, self.model.tables, strict=True)
        return all(difference(table, want) is None for table, want in pairs)


def _case_of(way: str, shape: Shape = _FAULTS) -> Case:
    return Case(f"{way}, {shape.name}", shape, way)


class TestFaults(ProtocolSuite):
    operator = "embedding_backward"
    ways = _WAYS
    absences = (("sgd", "auto"), ("rowwise_adagrad", "staged"))
    mismatches: ClassVar = {
        "shape": Mismatch(lambda: _prepared().pop("shape")(), ["batch=21", "batch=19"]),
        "dtype": Mismatch(lambda: _prepared().pop("dtype")(), ["dtype=bfloat16"]),
        "optimizer": Mismatch(lambda: _prepared().pop("optimizer")(), ["optimizer=rowwise_adagrad", "optimizer=sgd"]),
        "barrier": Mismatch(po.barrier, ["barrier(world_size=3)"]),
    }
    deaths = (("stopped", "sgd"), ("killed", "rowwise_adagrad"))
    names_the_dead = False

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        return cls._work(_Training(_case_of(way)), iteration)

    @classmethod
    def next_work(cls, iteration: int, way: str) -> Work:
        """With the optimizer of the earlier ones: a new one's PEs agree on the host, where a dead one is found late."""
        prepared = _prepared()
        if way in prepared:
            prepared[way].begin()
        else:
            prepared[way] = _Training(_case_of(way))
        return cls._work(prepared[way], iteration)

    @staticmethod
    def _work(training: _Training, iteration: int) -> Work:
        backward = training.backward(iteration)
        training.model.step(iteration, 0, 0.1)
        return Work(backward, training.is_right)

    @classmethod
    def warm_up(cls) -> None:
        super().warm_up()
        shape = dataclasses.replace(_FAULTS, batch=lambda world: 21)
        others = {
            "shape": _case_of("sgd", shape),
            "dtype": _case_of("sgd", dataclasses.replace(_FAULTS, dtype=torch.bfloat16)),
            "optimizer": _case_of("rowwise_adagrad"),
        }
        _prepared().update({kind: _Training(case).backward(1) for kind, case in others.items()})
        _prepared()["meet"] = [_Training(_case_of("sgd")).backward(1) for _ in cls.mismatches]

    @classmethod
    def meet(cls) -> object:
        return _prepared()["meet"].pop()()

    def test_the_first_call_meets_something_else(self, backend: str) -> None:
        """In the exchange of the tables' widths, which sets nothing aside."""
        assert in_world(_first_backward, 3, backend) == [["ContractMismatchError", True, True, True]] * 3


def _first_backward() -> list[Any]:
    """PE 1 meets the others' first backward pass with a barrier; then all make one."""
    training = _Training(_case_of("sgd"), is_new=True)
    backward, later = training.backward(1), training.backward(2)
    name, text, seconds = error_of(lambda: [po.barrier() if po.rank() == 1 else backward(), po.check()])
    po.recover()
    later()
    training.model.step(2, 0, 0.1)
    po.check()
    return [name, "agreement on the columns" in text, seconds < 30.0, training.is_right()]


_of_worlds: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _prepared() -> dict[str, Any]:
    """Return what this PE's world has ready: passes whose forward part is over."""
    return _of_worlds.setdefault(po.runtime.world.current(), {})


# ---- against torch ---------------------------------------------------------------------------------------------------


def _against_torch(algorithm: str, is_whole: bool) -> list[str]:
    """Ten steps, beside one process with embedding_bag and torch.optim; return what differs too much."""
    rank, world = po.rank(), po.world_size()
    shape = Shape("torch", dims=lambda rank: (16, 8), batch=lambda world: 12)
    case = Case(f"torch {algorithm}", shape, algorithm)
    tables = make_inputs(case, rank, world, 0).tables
    if is_whole:
        tables = [table.mul(8).round() for table in tables]
    own = [table.to(po.device(), copy=True) for table in tables]
    wanted = [table.clone().requires_grad_() for table in tables]
    optimizer = po.EmbeddingOptimizer(own, algorithm, lr=0.5)
    options = {} if algorithm == "sgd" else {"eps": 1e-8}
    of_torch = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[algorithm](wanted, lr=0.5, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(of_torch, 0.5 if is_whole else 0.9)]
    split = split_of(shape, world)
    batch, first = sum(split), sum(split[:rank])
    for step in range(10):
        inputs = make_inputs(case, rank, world, step % 5)
        gradient = make_gradient(case, world, step % 5, step)
        gradient = gradient.mul(4).round() if is_whole else gradient
        optimizer.lr.fill_(of_torch.param_groups[0]["lr"])
        arguments = (own, inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
        result = po.embedding_all_to_all(*arguments, batch_per_rank=split, optimizer=optimizer)
        result.backward(gradient[first : first + split[rank]].to(po.device()))
        of_torch.zero_grad()
        columns = []
        for number, table in enumerate(wanted):
            bounds = inputs.offsets[number * batch : (number + 1) * batch + 1]
            chosen = inputs.indices[bounds[0] : bounds[-1]]
            bag = torch.nn.functional.embedding_bag
            columns.append(bag(chosen, table, bounds - bounds[0], mode="sum", include_last_offset=True))
        begin = sum(_columns(case, world)[:rank])
        pooled = torch.cat(columns, 1)
        pooled.backward(gradient[:, begin : begin + pooled.shape[1]])
        of_torch.step()
        for scheduler in schedulers:
            scheduler.step()
    po.check()
    tolerance = 0.0 if is_whole else 1e-5
    errors = [float((a.cpu() - b.detach()).abs().max()) for a, b in zip(own, wanted, strict=True)]
    return [f"table {number}: {error}" for number, error in enumerate(errors) if not error <= tolerance]


@pytest.mark.parametrize(("algorithm", "is_whole"), [("sgd", True), ("sgd", False), ("adagrad", False)])
@pytest.mark.parametrize("world", [1, 3])
def test_ten_steps_are_those_of_one_process(backend: str, algorithm: str, is_whole: bool, world: int) -> None:
    assert in_world(_against_torch, world, backend, algorithm, is_whole) == [[]] * world


# ---- how it is called ------------------------------------------------------------------------------------------------


def _passes() -> list[Any]:
    """Forward A, forward B, backward A, backward B; then what is refused."""
    first, second = _Training(_case_of("sgd")), _Training(_case_of("adagrad"))
    passes = [first.backward(1), second.backward(2)]
    for backward in passes:
        backward()
    first.model.step(1, 0, 0.1)
    second.model.step(2, 0, 0.1)
    po.check()
    seen: list[Any] = [first.is_right(), second.is_right(), int(first.optimizer.step_count)]
    again = error_of(passes[0])
    other = po.EmbeddingOptimizer([torch.ones(4, 8, device=po.device())])
    offsets = torch.arange(1, device=po.device())
    refused = error_of(
        lambda: po.embedding_all_to_all(first.tables, offsets[:0], offsets, batch_per_rank=[0] * 2, optimizer=other)
    )
    with torch.no_grad():
        plain = error_of(first.backward(1))
    return [*seen, again[0], "twice" in again[1], refused[0], plain[0]]


def test_passes_may_overlap_and_come_once(backend: str) -> None:
    # torch itself refuses a second pass, unless the graph is retained; a result without a graph has none.
    found = in_world(_passes, 2, backend)
    assert [seen[:3] for seen in found] == [[True, True, 1]] * 2, found
    assert [seen[3] for seen in found] == ["RuntimeError"] * 2
    assert [seen[5] for seen in found] == ["ValueError"] * 2


def _retained() -> list[Any]:
    training = _Training(_case_of("sgd"))
    inputs = make_inputs(_case_of("sgd"), po.rank(), 2, 0)
    arguments = (training.tables, inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
    split = split_of(_FAULTS, 2)
    result = po.embedding_all_to_all(*arguments, batch_per_rank=split, optimizer=training.optimizer)
    result.sum().backward(retain_graph=True)
    po.check()
    before = [table.clone() for table in training.tables]
    name, text, _ = error_of(lambda: result.sum().backward())
    po.check()
    return [name, "second backward" in text, all(map(torch.equal, before, training.tables))]


def test_a_second_backward_pass_is_refused(backend: str) -> None:
    assert in_world(_retained, 2, backend) == [["RuntimeError", True, True]] * 2


def _half_updated(folder: Path) -> list[Any]:
    """PE 0 stays away from a backward pass: what the other's launch may have changed is refused."""
    po.runtime.world.current().workspace.timeout = 4.0  # of kernels; on the host PEs come as late as they like
    training = _Training(_case_of("sgd"))
    backward, later = training.backward(1), training.backward(2)
    if po.rank() == 0:
        gave_up(folder, 1)
    name = error_of(lambda: [backward(), po.check()])[0]
    (folder / f"gave_up_{po.rank()}").touch()
    error_of(po.barrier)
    po.recover()
    again = error_of(later) if po.rank() == 1 else ("", "", 0.0)
    # From a checkpoint:
    for table, saved in zip(training.tables, make_inputs(_case_of("sgd"), po.rank(), 2, 0).tables, strict=True):
        table.copy_(saved)
    training.optimizer.loaded(0)
    training.backward(3)()
    training.model.step(3, 0, 0.1)
    po.check()
    return [name, again[0], "load it anew" in again[1], training.is_right()]


def test_tables_that_may_be_half_updated_are_refused(backend: str, tmp_path: Path) -> None:
    late, (name, again, says_so, is_right) = in_world(_half_updated, 2, backend, tmp_path)
    assert name == "PeerTimeoutError" and again == "PersistentOpsError" and says_so and is_right and late[3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "lamb"}, "algorithm"),
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"algorithm": "adam", "betas": (0.9, 1.0)}, "betas"),
        ({"algorithm": "rowwise_adagrad", "weight_decay_mode": "cowclip"}, "weight_decay_mode"),
    ],
)
def test_what_an_optimizer_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        po.EmbeddingOptimizer([torch.ones(2, 4)], **options)


def test_tables_that_overlap_are_refused() -> None:
    memory = torch.ones(6, 4)
    with pytest.raises(ValueError, match="overlap"):
        po.EmbeddingOptimizer([memory[:4], memory[2:]])
    po.EmbeddingOptimizer([memory[:3], memory[3:], memory[:3]])


def _resumed() -> list[bool]:
    """Adam, stopped behind two steps and resumed by another optimizer, beside one that goes on."""
    training = _Training(_case_of("adam"))
    training.optimizer.step_count = 0
    for step in range(2):
        training.backward(step)()
    tables = [table.clone() for table in training.tables]
    resumed = po.EmbeddingOptimizer(tables, "adam", lr=0.1)
    for table, old in zip(tables, training.tables, strict=True):
        for state, saved in zip(resumed.state(table), training.optimizer.state(old), strict=True):
            state.copy_(saved)
    resumed.step_count = int(training.optimizer.step_count)
    training.backward(2)()
    other = _Training(_case_of("adam"))
    other.tables, other.optimizer = tables, resumed
    other.backward(2)()
    po.check()
    return [torch.allclose(a, b, rtol=0.0, atol=1e-5) for a, b in zip(tables, training.tables, strict=True)]


def test_an_optimizer_is_resumed(backend: str) -> None:
    assert in_world(_resumed, 2, backend) == [[True, True]] * 2


def _changed_in_place() -> list[Any]:
    training = _Training(_case_of("sgd"))
    inputs = make_inputs(_case_of("sgd"), po.rank(), 2, 0)
    lookups = (inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
    split, optimizer = split_of(_FAULTS, 2), training.optimizer
    po.embedding_all_to_all(
        training.tables, *lookups, batch_per_rank=split, optimizer=optimizer
    ).relu_().sum().backward()
    po.check()
    other_list = error_of(
        lambda: po.embedding_all_to_all(training.tables[::-1], *lookups, batch_per_rank=split, optimizer=optimizer)
    )
    factors = torch.ones(inputs.indices.shape, device=po.device(), requires_grad=True)
    results = [
        po.embedding_all_to_all(training.tables, *lookups, factors, batch_per_rank=split, optimizer=optimizer)
        for _ in range(2)
    ]
    results[0].sum().backward()
    return [other_list[0], error_of(lambda: results[1].sum().backward())[1]]


def test_results_in_place_other_lists_and_tables_that_have_changed(backend: str) -> None:
    for name, text in in_world(_changed_in_place, 2, backend):
        assert name == "ValueError" and "tables have changed" in text
