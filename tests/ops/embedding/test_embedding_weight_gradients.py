"""Gradients of lookups' weights on their way back: bits with features in several slots, graphs, faults, misuse."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from bits import NUM_ITERATIONS, BitsSuite, CaseWorld, Outcome, Trial, difference
from graphs import NUM_INPUTS, Call, Graph, GraphSuite
from protocol import Mismatch, ProtocolSuite, Work
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.lookups import fields_of_source
from persistent_ops.ops.embedding.weight_gradients import OPERATOR, Tuning, return_gradients

_WIDTH = 4  # a chunk of 16 bytes: its products are added up in order


@dataclass(frozen=True)
class Case:
    """Slots that are spread over the PEs, and lookups.

    Attributes:
        slots: (feature, rows) of each; slot n belongs to PE `5 * n % P`, so the order differs between worlds.
        features: number of features in the lookups.
        batch: samples of a PE in an iteration.
        max_length: of a bag.
        bad: one in `bad` lookups is outside of the tables; 0: none.
        outside: number of values before the first bag, and after the last bag.
        lookups_per_sample: of each feature.
        owner: of all slots; None: as described at `slots`.
        dtype: of values.
    """

    name: str
    slots: tuple[tuple[int, int], ...] = ((0, 9), (1, 7), (0, 20), (2, 5), (0, 9), (1, 30), (0, 11))
    features: int = 4  # the last one has no slot
    batch: tuple[int, ...] = (5, 3, 0, 7, 4)
    max_length: int = 4
    bad: int = 0
    outside: int = 0
    lookups_per_sample: float = 4.0
    owner: int | None = None
    dtype: torch.dtype = torch.int64

    def samples(self, rank: int, iteration: int) -> int:
        return self.batch[(rank + iteration) % len(self.batch)]

    def slots_of(self, rank: int, world: int) -> list[int]:
        """Return the numbers of a PE's slots, the last ones first."""
        owners = [5 * n % world if self.owner is None else self.owner % world for n in range(len(self.slots))]
        return [n for n in reversed(range(len(self.slots))) if owners[n] == rank]

    def make(self, **options: Any) -> po.EmbeddingInputs:
        world = po.world_size()
        numbers = [self.slots_of(pe, world) for pe in range(world)]
        return po.EmbeddingInputs(
            [[self.slots[n] for n in of_pe] for of_pe in numbers],
            num_features=self.features,
            max_batch=max(self.batch),
            is_weighted=True,
            bounds="ignore" if self.bad or self.outside else "fatal",
            slot_order=numbers,
            **{"lookups_per_sample": self.lookups_per_sample, **options},
        )


@functools.lru_cache(maxsize=256)
def _rng(*what: object) -> int:
    return zlib.crc32(" ".join(map(str, what)).encode())


def _generator(*what: object) -> torch.Generator:
    return torch.Generator().manual_seed(_rng(*what))


def _table(case: Case, number: int) -> torch.Tensor:
    """Return a slot's table. Magnitudes differ, so that sums depend on their order."""
    rows = torch.randn(case.slots[number][1], _WIDTH, generator=_generator(case.name, "table", number))
    return rows * 10.0 ** (number % 3)


@dataclass(frozen=True)
class Given:
    """A PE's lookups, and the gradients of each slot's result, `[B, columns]`."""

    values: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor
    gradients: list[torch.Tensor]


@functools.lru_cache(maxsize=256)
def _given(case: Case, rank: int, iteration: int) -> Given:
    rng = _generator(case.name, rank, iteration)
    samples = case.samples(rank, iteration)
    lengths = torch.randint(0, case.max_length + 1, (case.features * samples,), generator=rng)
    rows = [min([10**6, *(rows for of, rows in case.slots if of == feature)]) for feature in range(case.features)]
    limits = torch.tensor(rows).repeat_interleave(samples).repeat_interleave(lengths)
    values = torch.randint(0, 1 << 40, limits.shape, generator=rng) % limits
    if case.bad:
        outside = torch.tensor([-1, 1 << 20, 10])  # the last one is a row of some tables only
        values[:: case.bad] = outside[torch.arange(len(values[:: case.bad])) % 3]
    around = torch.zeros(case.outside, dtype=torch.int64)
    values = torch.cat([around, values, around])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + case.outside
    weights = torch.randn(len(values), generator=rng)
    gradients = [torch.randn(samples, _WIDTH, generator=rng) for _ in case.slots]
    return Given(values.to(case.dtype), lengths.to(case.dtype), offsets.to(case.dtype), weights, gradients)


@functools.lru_cache(maxsize=256)
def _wanted(case: Case, rank: int, iteration: int) -> torch.Tensor:
    """Return the gradient of a PE's weights: for each slot in order, its columns in order."""
    given, samples = _given(case, rank, iteration), case.samples(rank, iteration)
    result, is_new = torch.zeros(len(given.values)), torch.ones(len(given.values), dtype=torch.bool)
    for number, (feature, rows) in enumerate(case.slots):
        table, ends = _table(case, number), given.offsets[feature * samples :].tolist()
        for sample in range(samples):
            for at in range(ends[sample], ends[sample + 1]):
                index, dot = int(given.values[at]), torch.zeros(())
                if 0 <= index < rows:
                    for column in range(_WIDTH):
                        dot = dot + table[index, column] * given.gradients[number][sample, column]
                result[at] = dot if is_new[at] else result[at] + dot
                is_new[at] = False
    return result


def _gradient(case: Case, given: Given) -> torch.Tensor:
    """Return the gradient of this PE's result, whose columns come PE by PE."""
    world = po.world_size()
    columns = [given.gradients[n] for pe in range(world) for n in case.slots_of(pe, world)]
    return torch.cat(columns, 1).to(po.device())


def _tables(case: Case) -> list[torch.Tensor]:
    return [_table(case, n).to(po.device()) for n in case.slots_of(po.rank(), po.world_size())]


def _dims(case: Case) -> list[int]:
    world = po.world_size()
    return [_WIDTH * len(case.slots_of(pe, world)) for pe in range(world)]


def _exchange(
    inputs: po.EmbeddingInputs, case: Case, iteration: int, way: str = "offsets"
) -> tuple[po.Lookups, torch.Tensor]:
    given = _given(case, po.rank(), iteration)
    weights = given.weights.to(po.device(), copy=True).requires_grad_()
    bounds = {way: getattr(given, way).to(po.device())}
    split = [case.samples(pe, iteration) for pe in range(po.world_size())]
    values = given.values.to(po.device())
    return inputs.exchange(values, **bounds, per_sample_weights=weights, batch_per_rank=split), weights


# ---- bits ------------------------------------------------------------------------------------------------------------

_PLAIN = Case("plain")
_CASES = [
    _PLAIN,
    Case("int32", dtype=torch.int32),
    Case("skipped lookups", bad=4),
    Case("values of no bag", outside=3, dtype=torch.int32),
    Case("one PE has all tables", owner=0, dtype=torch.int32),
    Case("long bags", max_length=90, lookups_per_sample=90.0),
    Case("empty bags only", max_length=0),
    Case("no samples", batch=(0,)),
    Case("room grows", lookups_per_sample=0.4, dtype=torch.int32),
]


class _Model:
    """This PE's tables of a case, with an optimizer that does not change them."""

    def __init__(self, case: Case) -> None:
        self._case, self._inputs = case, case.make()
        self.tables = _tables(case)
        self.optimizer = po.EmbeddingOptimizer(self.tables, lr=0.0)

    def exchange(self, iteration: int = 0, way: str = "offsets") -> tuple[po.Lookups, torch.Tensor]:
        return _exchange(self._inputs, self._case, iteration, way)

    def pooled(self, lookups: po.Lookups) -> torch.Tensor:
        return po.embedding_all_to_all(self.tables, lookups, dim_per_rank=_dims(self._case), optimizer=self.optimizer)

    def gradient(self, iteration: int = 0) -> torch.Tensor:
        """Return the gradient of `pooled`'s result."""
        return _gradient(self._case, _given(self._case, po.rank(), iteration))


class _Returns(Trial):
    """Both passes. The next batch has arrived before the gradients of this batch are sent."""

    held: ClassVar[Sequence[int]] = ()

    def __init__(self, case: Case) -> None:
        self._case, self._model = case, _Model(case)

    def ways(self, turn: int) -> Sequence[Hashable]:
        return ("offsets",) if self._case.outside else ("lengths", "offsets")

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        model = self._model
        lookups, weights = model.exchange(iteration, way)
        with lookups:
            result = model.pooled(lookups)
            following, _ = model.exchange((iteration + 1) % NUM_ITERATIONS, way)
            following.wait()
            result.backward(model.gradient(iteration))
            following.release()
        assert weights.grad is not None
        problem = difference(weights.grad, _wanted(self._case, po.rank(), iteration))
        return Outcome([weights.grad], problem)


class TestBits(BitsSuite):
    trial = _Returns
    halved_by = torch.int64
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, _CASES),
        "2": CaseWorld(2, _CASES),
        "3": CaseWorld(3, _CASES),
        "4": CaseWorld(4, _CASES),
        "small pieces": CaseWorld(3, _CASES, {}, {"piece_lookups": 4, "work_groups": 3}),
        "one work-group": CaseWorld(2, _CASES, {}, {"work_groups": 1}),
        "staged": CaseWorld(3, _CASES, {"transport": "staged"}),
        "threads": CaseWorld(2, _CASES, {"host_options": {"wg_size": 3}}, {"piece_lookups": 8}),
    }

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))


# ---- graphs ----------------------------------------------------------------------------------------------------------


class TestGraphs(GraphSuite):
    operator = "embedding_inputs"  # the first operator of a call
    cases = (
        Case("graphs", batch=(5, 2, 8)),
        Case("graphs: skipped lookups", batch=(5, 2, 8), bad=3),
        Case("graphs: one PE has all tables", owner=1),
    )
    ways = ("lengths", "offsets")
    growing: ClassVar = [Case(f"graphs: batch of {n}", batch=(n,)) for n in (3, 30, 300, 9)]
    heap_bytes = 64 << 20

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        """All turns have the first turn's lookups. Weights and the gradient of the result differ."""
        rank, inputs, tables = po.rank(), case.make(), _tables(case)
        optimizer, given = po.EmbeddingOptimizer(tables, lr=0.0), _given(case, rank, 0)
        split = [case.samples(pe, 0) for pe in range(po.world_size())]
        values, bounds = given.values.to(po.device()), {way: getattr(given, way).to(po.device())}
        factors = [2.0**turn for turn in range(NUM_INPUTS)]

        def act(weights: torch.Tensor, gradient: torch.Tensor, *, way: str) -> torch.Tensor:
            required = weights.detach().requires_grad_()
            with inputs.exchange(values, **bounds, per_sample_weights=required, batch_per_rank=split) as lookups:
                result = po.embedding_all_to_all(tables, lookups, dim_per_rank=_dims(case), optimizer=optimizer)
                return torch.autograd.grad(result, required, gradient)[0]

        gradient, wanted = _gradient(case, given), _wanted(case, rank, 0)
        return Call(
            case.name,
            way,
            act,
            [[given.weights + turn, gradient * factor] for turn, factor in enumerate(factors)],
            [[wanted * factor] for factor in factors],
        )

    @classmethod
    def more_calls(cls) -> list[Call]:
        return [cls.call(cls.cases[0], "lengths")]


def _without_room_in_a_graph() -> list[Any]:
    """In a replay PE 1 has more lookups than PE 0 has room for. The excess lookups get no gradient, the others do."""
    rank, world = po.rank(), po.world_size()
    inputs = po.EmbeddingInputs(
        [[(0, 40)], [(1, 40)], []],
        num_features=2,
        max_batch=6,
        capacity=[[12 if (source, owner) == (1, 0) else 500 for owner in range(world)] for source in range(world)],
        is_weighted=True,
    )
    tables = [torch.arange(40.0, device=po.device()).unsqueeze(1).repeat(1, 4)] if rank < 2 else []
    optimizer = po.EmbeddingOptimizer(tables, lr=0.0)
    values, lengths = torch.arange(24, device=po.device()), torch.full((12,), 2, device=po.device())
    weights = torch.ones(24, device=po.device(), requires_grad=True)
    gradient = torch.ones(6, 8, device=po.device())

    def program() -> torch.Tensor:
        sent = inputs.exchange(values, lengths=lengths, per_sample_weights=weights, batch_per_rank=[6] * world)
        with sent as lookups:
            result = po.embedding_all_to_all(tables, lookups, dim_per_rank=[4, 4, 0], optimizer=optimizer)
            return torch.autograd.grad(result, weights, gradient)[0]

    eager = program()
    po.check()
    graph = Graph(program)
    po.check()
    if rank == 1:
        lengths.copy_(torch.tensor([20, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0]))
    with pytest.MonkeyPatch.context() as patch:
        if po.backend() == "host":
            patch.setattr(po.runtime.world.current().workspace, "is_capturing", lambda: True)
        found = graph.replay()
    name = error_of(po.check)[0]
    wanted = 4.0 * torch.arange(24.0)
    if rank == 1:
        wanted[:20] = 0.0
    return [name, difference(eager, 4.0 * torch.arange(24.0)), difference(found, wanted)]


def test_lookups_that_find_no_room_in_a_graph_have_no_gradient(backend: str) -> None:
    assert in_world(_without_room_in_a_graph, 3, backend) == [["CapacityError", None, None]] * 3


def _exchanged_outside_of_the_graph() -> list[Any]:
    """A graph would use the addresses of one batch's lookups. Nothing is launched, and the eager pass is right."""
    model = _Model(_PLAIN)
    lookups, weights = model.exchange()
    with lookups:
        result, gradient = model.pooled(lookups), model.gradient()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(po.runtime.world.current().workspace, "is_capturing", lambda: True)
            told = error_of(lambda: result.backward(gradient, retain_graph=True))[:2]
        steps = int(model.optimizer.step_count)
        result.backward(gradient)
    po.check()
    assert weights.grad is not None
    return [*told, steps, difference(weights.grad, _wanted(_PLAIN, po.rank(), 0))]


def test_a_graph_without_the_exchange_is_refused(backend: str) -> None:
    for name, text, steps, problem in in_world(_exchanged_outside_of_the_graph, 2, backend):
        assert name == "RuntimeError" and "Capture the exchange too" in text, text
        assert steps == 0 and problem is None


# ---- late, absent and dead peers -------------------------------------------------------------------------------------

_FAULTS = Case("faults", batch=(4, 6, 5))
_OTHER = Case("another one", batch=(4, 6, 5))


class _Arrived:
    """Lookups that have arrived in this PE's world. Their weights get gradients repeatedly."""

    def __init__(self, case: Case) -> None:
        self._case, self._inputs = case, case.make()
        lookups, weights = _exchange(self._inputs, case, 0)
        lookups.wait()
        self._lookups, self._num_values = lookups, len(weights)
        # Read here, as the host cannot read the lookups after a recovery.
        self._sources = [lookups.source(pe) for pe in range(po.world_size())]
        self._first_lookups = lookups.sources[:, fields_of_source()["first_lookup"]].tolist()

    @classmethod
    def of(cls, case: Case) -> _Arrived:
        """Return the lookups of this PE's world; collective the first time."""
        known = _of_worlds.setdefault(po.runtime.world.current(), {})
        if case.name not in known:
            known[case.name] = cls(case)
        return known[case.name]

    def work(self, iteration: int) -> Work:
        """Send products that depend on the owner, the slot and the index. They are whole numbers, so sums are exact."""
        lookups, case, rank, world = self._lookups, self._case, po.rank(), po.world_size()
        products = torch.zeros(lookups.memory.numel() // 4)
        for source, at in zip(self._sources, self._first_lookups, strict=True):
            for slot, number in enumerate(case.slots_of(rank, world)):
                begin, end = source.offsets[[slot * source.samples, (slot + 1) * source.samples]].tolist()
                indices = source.indices[begin:end].cpu().float()
                products[at + begin : at + end] = indices * 3 + number * 5 + iteration
        given = _given(case, rank, 0)
        wanted, samples = torch.zeros(self._num_values), case.samples(rank, 0)
        for number, (feature, _) in enumerate(case.slots):
            begin, end = given.offsets[[feature * samples, (feature + 1) * samples]].tolist()
            wanted[begin:end] += given.values[begin:end].float() * 3 + number * 5 + iteration
        sent, found = products.to(po.device()), []

        def run() -> None:
            found.append(return_gradients(po.runtime.world.current(), lookups, sent))

        return Work(
            run,
            lambda: difference(found[-1], wanted) is None,
            lambda: all(bool(gradient.isnan().all()) for gradient in found),
        )


_of_worlds: weakref.WeakKeyDictionary[Any, dict[str, _Arrived]] = weakref.WeakKeyDictionary()


class TestFaults(ProtocolSuite):
    operator = "embedding_weight_gradients"
    ways = ("returned",)
    absences = (("returned", "auto"), ("returned", "staged"))
    mismatches: ClassVar = {
        "another one": Mismatch(lambda: _Arrived.of(_OTHER).work(0).run(), ["the EmbeddingInputs object", "2 on PE 1"]),
        "barrier": Mismatch(po.barrier, ["barrier()"]),
    }
    deaths = (("stopped", "returned"), ("killed", "returned"))
    names_the_dead = False

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        return _Arrived.of(_FAULTS).work(iteration)

    @classmethod
    def warm_up(cls) -> None:
        super().warm_up()
        _Arrived.of(_OTHER).work(0).run()

    @classmethod
    def meet(cls) -> object:
        return _Arrived.of(_FAULTS).work(0).run()

    def test_the_first_call_meets_something_else(self, backend: str) -> None:
        """The fault is where memory is set aside. The lookups have arrived before."""
        assert in_world(_first_return, 3, backend) == [["ContractMismatchError", True, True, True]] * 3


def _first_return() -> list[Any]:
    """PE 1 calls a barrier while the others first return gradients. Then all PEs return gradients."""
    work = _Arrived.of(_FAULTS).work(1)
    name, text, seconds = error_of(lambda: [po.barrier() if po.rank() == 1 else work.run(), po.check()])
    po.recover()
    work.run()
    po.check()
    return [name, "setup of embedding_weight_gradients" in text, seconds < 30.0, work.is_right()]


# ---- what is refused -------------------------------------------------------------------------------------------------


def _on_one_pe() -> tuple[str, str]:
    inputs = _PLAIN.make()
    given = _given(_PLAIN, po.rank(), 0)
    weights = given.weights.to(po.device(), copy=True).requires_grad_(po.rank() == 1)
    tensors = given.values.to(po.device()), given.lengths.to(po.device())
    told = error_of(
        lambda: [inputs.exchange(tensors[0], lengths=tensors[1], per_sample_weights=weights).wait(), po.check()]
    )[:2]
    po.recover()
    return told


def test_gradients_are_wanted_by_all_pes_or_none(backend: str) -> None:
    for name, text in in_world(_on_one_pe, 2, backend):
        assert name == "ContractMismatchError" and "requires_grad of per_sample_weights is" in text, text


def _unrecorded() -> list[Any]:
    model = _Model(_PLAIN)
    with torch.no_grad():
        lookups, weights = model.exchange()
    with lookups:
        model.pooled(lookups).backward(model.gradient())
    po.check()
    return [lookups.gives_gradients, weights.grad]


def test_an_exchange_that_is_not_recorded_gives_no_gradient(backend: str) -> None:
    assert in_world(_unrecorded, 2, backend) == [[False, None]] * 2
