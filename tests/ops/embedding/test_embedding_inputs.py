"""The input exchange: results in every world and for every way to call it; faults, graphs, misuse."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bits import NUM_ITERATIONS, BitsSuite, CaseWorld, Outcome, Trial
from embedding_inputs_cases import CASES, Case, arrived, batches, make, make_given, problem
from graphs import NUM_INPUTS, Call, Graph, GraphSuite
from protocol import Mismatch, ProtocolSuite, Work
from worlds import TRANSPORTS, error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding import lookups as embedding_lookups
from persistent_ops.ops.embedding.inputs import _num_beside
from persistent_ops.ops.embedding.inputs_plan import OPERATOR, Tuning
from persistent_ops.ops.embedding.lookups import fields_of_source
from persistent_ops.runtime import world as po_world
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.workspace import Workspace

_FEW = [case for number, case in enumerate(CASES) if number % 3 == 0 or "room" in case.name]
_WAYS = ("lengths", "offsets")


def _exchange(
    inputs: po.EmbeddingInputs, case: Case, iteration: int, way: str, *, knows_split: bool = True
) -> po.Lookups:
    given = make_given(case, po.rank(), iteration)
    bounds = {way: getattr(given, way).to(po.device())}
    weights = None if given.weights is None else given.weights.to(po.device())
    split = batches(case, po.world_size(), iteration) if knows_split else None
    values = given.values.to(po.device())
    return inputs.exchange(values, **bounds, per_sample_weights=weights, batch_per_rank=split)


# ---- what arrives ----------------------------------------------------------------------------------------------------


class _Arrivals(Trial):
    """Read a batch when it has arrived, and again when the next batch has arrived."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._inputs = make(case)
        self._last: tuple[int, po.Lookups] | None = None

    def ways(self, turn: int) -> Sequence[Hashable]:
        return _WAYS

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        lookups = _exchange(self._inputs, self._case, iteration, way, knows_split=turn % 2 == 0)
        lookups.wait()
        found = arrived(lookups)
        wrong = problem(self._case, iteration, found)
        if self._last is not None:
            last, earlier = self._last
            wrong = wrong or problem(self._case, last, arrived(earlier))
            earlier.release()
        self._last = iteration, lookups
        digest = [torch.tensor([*each.offsets, *each.indices], dtype=torch.int32) for each in found]
        return Outcome(digest, wrong)


class TestArrivals(BitsSuite):
    trial = _Arrivals
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, CASES),
        "4": CaseWorld(4, _FEW),
        "small pieces": CaseWorld(3, CASES, {}, {"work_groups": 3, "chunk_bags": 2, "piece_lookups": 3}),
        "one work-group": CaseWorld(2, _FEW, {}, {"work_groups": 1}),
        "sixteen work-groups": CaseWorld(2, _FEW, {}, {"work_groups": 16, "chunk_bags": 1, "piece_lookups": 1}),
        "staged": CaseWorld(3, CASES, {"transport": "staged"}),
        "threads": CaseWorld(2, CASES, {"host_options": {"wg_size": 3}}, {"chunk_bags": 3, "piece_lookups": 16}),
    }
    halved_by = torch.int32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False

    @classmethod
    def tune(cls, **tuning: Any) -> None:
        OPERATOR.tune(po.runtime.world.current(), Tuning(**tuning))


# ---- late, absent and dead peers -------------------------------------------------------------------------------------

_FAULTS = Case("faults", batch=lambda rank, iteration: 4 + (rank + iteration) % 3, is_weighted=True)
_OTHER = dataclasses.replace(_FAULTS, name="another one")
_CASES = Operator("inputs of cases", (), has_kernel=False)


def _made(case: Case) -> po.EmbeddingInputs:
    """Return what exchanges a case's lookups in this PE's world; collective the first time."""
    state = _CASES.state(po.runtime.world.current())
    known: dict[str, po.EmbeddingInputs] = state.own or {}
    if case.name not in known:
        state.own = known | {case.name: make(case)}
    return state.own[case.name]  # type: ignore[no-any-return]


class _Snapshot:
    """An exchange whose lookups are copied in stream order and released at once."""

    def __init__(self, iteration: int, way: str) -> None:
        self._inputs, self._iteration, self._way = _made(_FAULTS), iteration, way
        self._lookups: po.Lookups | None = None

    def run(self) -> None:
        self._region = self._inputs._exchange.next_region()
        lookups = _exchange(self._inputs, _FAULTS, self._iteration, self._way)
        with lookups:
            self._copies = lookups.memory.clone(), lookups.sources.clone()
        self._lookups = lookups

    def is_right(self) -> bool:
        if self._lookups is None:
            return False
        memory, sources = self._copies
        moved = sources.clone()
        moved[:, :3] += (memory.data_ptr() - self._lookups.memory.data_ptr()) * (sources[:, :3] != 0)
        self._lookups.memory, self._lookups.sources = memory, moved
        return problem(_FAULTS, self._iteration, arrived(self._lookups)) is None

    def is_poisoned(self) -> bool:
        """No samples, no lookups, and offsets that are 0."""
        fields = fields_of_source()
        told = [self._region.sources[:, fields[name]] for name in ("samples", "count")]
        return not any(bool(each.any()) for each in told)


class TestFaults(ProtocolSuite):
    operator = "embedding_inputs"
    ways = _WAYS
    absences = (("lengths", "auto"), ("offsets", "staged"))
    first_call = "opening of a workspace"
    mismatches: ClassVar = {
        "batch": Mismatch(lambda: _mismatched(_FAULTS, [4, 5, 7]), ["batch_per_rank is"]),
        "another one": Mismatch(lambda: _mismatched(_OTHER, [4, 5, 6]), ["the EmbeddingInputs object", "2 on PE 1"]),
        "meeting": Mismatch(
            lambda: po.runtime.world.current().meet(_meeting(), _made(_FAULTS).workspace),
            ["setup of embedding_inputs(number=7)"],
        ),
    }
    deaths = (("stopped", "lengths"), ("killed", "offsets"))

    @classmethod
    def workspace(cls) -> Workspace:
        return _made(_FAULTS).workspace

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        snapshot = _Snapshot(iteration, way)
        return Work(snapshot.run, snapshot.is_right, snapshot.is_poisoned)

    @classmethod
    def warm_up(cls) -> None:
        super().warm_up()
        _exchange(_made(_OTHER), _OTHER, 0, "lengths").release()

    @classmethod
    def meet(cls) -> object:
        return _mismatched(_FAULTS, [4, 5, 6])


def _meeting() -> Any:
    return embedding_lookups._ROOM.contract(po.runtime.world.current().team, 7)


def _mismatched(case: Case, split: list[int]) -> po.Lookups:
    given = make_given(case, po.rank(), 0)
    assert given.weights is not None
    tensors = [tensor.to(po.device()) for tensor in (given.values, given.lengths, given.weights)]
    lookups = _made(case).exchange(tensors[0], lengths=tensors[1], per_sample_weights=tensors[2], batch_per_rank=split)
    lookups.release()
    return lookups


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def _call(case: Case, way: str) -> Call:
    """Lookups of every turn have the same lengths in another order, so that buffers keep their size."""
    rank, world = po.rank(), po.world_size()
    inputs = make(case)
    split = batches(case, world, 0)
    given = [[_turned(case, pe, turn) for turn in range(NUM_INPUTS)] for pe in range(world)]

    def act(values: torch.Tensor, lengths: torch.Tensor, *, way: str) -> list[torch.Tensor]:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        bounds = {"lengths": lengths} if way == "lengths" else {"offsets": offsets}
        with inputs.exchange(values, **bounds, batch_per_rank=split) as lookups:
            return [tensor for pe in range(world) for tensor in _views(inputs, lookups, pe, split[pe])]

    wants = []
    for turn in range(NUM_INPUTS):
        of_turn = []
        for pe in range(world):
            values, lengths = given[pe][turn]
            parts = list(zip(values.split(lengths.tolist()), range(len(lengths)), strict=True))
            bags = [parts[f * split[pe] + b][0] for f, _ in case.slots(rank) for b in range(split[pe])]
            ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
            of_turn += [ends.float(), torch.cat([torch.zeros(0), *(bag.float() for bag in bags)])]
        wants.append([_padded(inputs, number // 2, tensor, number % 2) for number, tensor in enumerate(of_turn)])
    return Call(case.name, way, act, [list(given[rank][turn]) for turn in range(NUM_INPUTS)], wants)


def _turned(case: Case, pe: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = make_given(case, pe, 0).lengths.roll(turn * 3 + 1)
    values = (torch.arange(int(lengths.sum())) * 7 + turn + pe) % 9
    return values, lengths


def _padded(inputs: po.EmbeddingInputs, pe: int, tensor: torch.Tensor, is_indices: int) -> torch.Tensor:
    if not is_indices:
        return tensor
    padded = torch.full((inputs.capacity[pe][po.rank()],), -2.0)
    padded[: len(tensor)] = tensor
    return padded


def _views(inputs: po.EmbeddingInputs, lookups: po.Lookups, pe: int, samples: int) -> list[torch.Tensor]:
    """Return copies, made by kernels alone, of what a PE has sent."""
    layout, capacity = inputs._exchange.layout, inputs.capacity
    first = layout.region_offsets(po.rank(), capacity)[pe]
    room, num_offsets = capacity[pe][po.rank()], lookups.num_slots * samples + 1
    begin = first + 128
    offsets = lookups.memory[begin : begin + 4 * num_offsets].view(torch.int32)
    is_told = lookups.sources[pe, fields_of_source()["samples"]] == samples
    begin = first + layout.region_bytes(po.rank(), 0)
    indices = lookups.memory[begin : begin + 4 * room].view(torch.int32)
    is_here = torch.arange(room, device=po.device()) < offsets[-1]
    found = offsets.float(), torch.where(is_here, indices, -2).float()
    return [torch.where(is_told, tensor, float("nan")) for tensor in found]


class TestGraphs(GraphSuite):
    operator = "embedding_inputs"
    cases = (
        Case("graphs", batch=lambda rank, iteration: 5 + rank),
        Case("graphs: one slot", slots=lambda rank: [(1, 9)]),
        Case("graphs: no tables on some", slots=lambda rank: [(0, 20), (2, 9)][: 2 * (rank % 2)]),
    )
    ways = _WAYS
    growing: ClassVar = [
        Case(f"graphs: batch of {n}", max_batch=n, batch=lambda rank, iteration, n=n: n) for n in (3, 30, 300, 9)
    ]

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        return _call(case, way)

    @classmethod
    def more_calls(cls) -> list[Call]:
        return [_call(cls.cases[0], "lengths")]


def _without_room_in_a_graph() -> list[Any]:
    """PE 1 sends 12 lookups to every PE, then 24. PE 0 has room for 12 of them."""
    inputs = po.EmbeddingInputs(
        [[(0, 40)]] * 3,
        num_features=2,
        max_batch=6,
        capacity=[[12 if (source, owner) == (1, 0) else 500 for owner in range(3)] for source in range(3)],
    )
    values = torch.arange(24, device=po.device())
    lengths = torch.full((12,), 2, device=po.device())
    inputs.exchange(values, lengths=lengths).release()
    po.check()
    kept: list[po.Lookups] = []

    def program() -> None:
        with inputs.exchange(values, lengths=lengths) as lookups:
            kept[:] = [lookups]

    graph = Graph(program)
    po.check()
    if po.rank() == 1:
        lengths.zero_()
        lengths[0] = 24
    with pytest.MonkeyPatch.context() as patch:
        if po.backend() == "host":
            patch.setattr(po.runtime.world.current().workspace, "is_capturing", lambda: True)
        graph.replay()
    name, text, _ = error_of(po.check)
    source = kept[0].source(1)
    seen = [source.num_lookups, source.samples, int(source.offsets[-1])]
    again = error_of(po.check)[0]
    before = inputs.capacity[1][0]
    with inputs.exchange(values, lengths=lengths) as lookups:
        here = lookups.source(1).num_lookups
    po.check()
    return [name, text, seen, again, before, inputs.capacity[1][0] >= 24, here]


def test_no_room_in_a_graph_is_told_on_every_pe(backend: str) -> None:
    results = in_world(_without_room_in_a_graph, 3, backend)
    for rank, (name, text, seen, again, before, has_grown, here) in enumerate(results):
        assert name == "CapacityError" and "PE 1 has 24 lookups for PE 0, and capacity is 12: 12 too many" in text, text
        assert seen == ([0, 6, 0] if rank == 0 else [24, 6, 24]) and again == "", seen
        assert before == 12 and has_grown and here == 24


# ---- bad input -------------------------------------------------------------------------------------------------------

_BAD: dict[str, tuple[str, list[int], str]] = {
    "an offset that falls": ("offsets", [0, 2, 1, 4, 6, 7, 8], "feature 0, sample 1 has offset 1"),
    "an offset behind the values": ("offsets", [0, 2, 3, 4, 6, 7, 99], "feature 1, sample 2 has offset 99"),
    "a negative offset": ("offsets", [0, 2, 3, -(1 << 40), 6, 7, 8], f"feature 0, sample 2 has offset {-(1 << 40)}"),
    "offsets that begin late": ("offsets", [1, 2, 3, 4, 6, 7, 8], "feature 0, sample 0 has offset 1"),
    "offsets that end early": ("offsets", [0, 2, 3, 4, 6, 7, 7], "feature 1, sample 2 has offset 7"),
    "a negative length": ("lengths", [2, -1, 1, 2, 1, 3], "feature 0, sample 1 has length -1"),
    "a length of more than all values": ("lengths", [2, 1, 1, 1 << 40, 1, 1], f"sample 0 has length {1 << 40}"),
    "lengths of too many": ("lengths", [2, 1, 1, 2, 1, 2], "8 lookups in all, the number of values, got 9"),
    "lengths of too few": ("lengths", [2, 1, 1, 2, 1, 0], "8 lookups in all, the number of values, got 7"),
    "a negative index": ("values", [0, -3, 0, 0, 0, 0, 0, 0], "lookup 1, of feature 0, has index -3"),
    "an index behind the table": ("values", [0, 0, 0, 0, 0, 1 << 35, 0, 0], f"feature 1, has index {1 << 35}"),
}


def _bad_inputs() -> list[str]:
    """PE 1 passes bad input. PE 1 gets an error, and the others get the valid part."""
    inputs = po.EmbeddingInputs(
        [[(1, 9), (0, 9)], [(0, 9)]], num_features=2, max_batch=3, capacity=[[16, 16], [16, 16]], bounds="fatal"
    )
    good = {"values": list(range(8)), "offsets": [0, 2, 3, 4, 6, 7, 8], "lengths": [2, 1, 1, 2, 1, 1]}
    problems = []
    for name, (what, bad, text) in _BAD.items():
        given = {**good, what: bad} if po.rank() == 1 else good
        way = what if what in _WAYS else "lengths"
        tensors = {key: torch.tensor(numbers, device=po.device()) for key, numbers in given.items()}
        for way in [what] if what in _WAYS else _WAYS:
            lookups = inputs.exchange(tensors["values"], **{way: tensors[way]}, batch_per_rank=[3, 3])
            error, told, _ = error_of(lambda lookups=lookups: [lookups.wait(), po.check()])  # type: ignore[misc]
            if po.rank() == 1 and (error != "IndexError" or text not in told):
                problems.append(f"{name}: {error} {told}")
            if po.rank() == 0 and error:
                problems.append(f"{name}, the other PE: {error} {told}")
            for pe in range(2):
                source = lookups.source(pe)
                ends = source.offsets.tolist()
                if ends != sorted(ends) or ends[0] != 0 or ends[-1] != source.num_lookups or ends[-1] > 16:
                    problems.append(f"{name}: offsets {ends} from PE {pe}")
                allowed = set(range(-1, 9)) if what == "values" else set(range(8))
                if not set(source.indices[: ends[-1]].tolist()) <= allowed:
                    problems.append(f"{name}: indices {source.indices.tolist()}")
            lookups.release()
    return problems


def test_bad_input_is_told_and_harms_nobody(backend: str) -> None:
    assert in_world(_bad_inputs, 2, backend) == [[], []]


def _garbage(way: str) -> list[str]:
    """Pass any numbers as bounds: what arrives is part of the values, and no region holds data of another region."""
    inputs = po.EmbeddingInputs(
        [[(0, 1 << 20), (1, 1 << 20)]] * 2,
        num_features=2,
        max_batch=40,
        capacity=[[50, 50], [50, 50]],
        bounds="ignore",
    )
    OPERATOR.tune(po.runtime.world.current(), Tuning(chunk_bags=7, piece_lookups=9, work_groups=2))
    rng = torch.Generator().manual_seed(5 + po.rank())
    problems = []
    for turn in range(12):
        values = torch.arange(20) + 1000 * (po.rank() + 1)
        bounds = torch.randint(-(1 << 40), 1 << 40, (80 + (way == "offsets"),), generator=rng)
        if turn % 2:
            bounds %= 30
        lookups = inputs.exchange(values.to(po.device()), **{way: bounds.to(po.device())})
        with lookups:
            for pe in range(2):
                source = lookups.source(pe)
                ends = source.offsets.tolist()
                found = source.indices[: ends[-1]]
                is_own = (found >= 1000 * (pe + 1)) & (found < 1000 * (pe + 1) + 20)
                if ends != sorted(ends) or not 0 <= ends[-1] <= 40 or not bool(is_own.all()):
                    problems.append(f"turn {turn}, from PE {pe}: {ends[-1]}, {found.tolist()}")
    po.check()
    return problems


@pytest.mark.parametrize("way", _WAYS)
def test_whatever_is_passed_stays_within_the_region(backend: str, way: str) -> None:
    assert in_world(_garbage, 2, backend, way) == [[], []]


# ---- regions ---------------------------------------------------------------------------------------------------------


def _held() -> list[Any]:
    case, world = CASES[0], po.world_size()
    inputs = make(case)
    first = _exchange(inputs, case, 0, "lengths")
    second = _exchange(inputs, case, 1, "offsets")
    name, text, _ = error_of(lambda: _exchange(inputs, case, 2, "lengths"))
    right = []
    for iteration, lookups in enumerate((first, second)):
        lookups.wait()
        right.append(problem(case, iteration, arrived(lookups)))
    first.release()
    third = _exchange(inputs, case, 2, "lengths")
    third.wait()
    right += [problem(case, 1, arrived(second)), problem(case, 2, arrived(third))]
    refused = error_of(first.wait)
    for lookups in (second, third, third):
        lookups.release()
    po.check()
    return [name, "release()" in text, right, refused[0], world]


def test_two_batches_are_held_and_no_more(backend: str) -> None:
    assert in_world(_held, 2, backend) == [["RuntimeError", True, [None] * 4, "RuntimeError", 2]] * 2


def _grown_while_held() -> list[Any]:
    """Both batches need more room. The earlier batch stays readable at its address."""
    case = dataclasses.replace(CASES[0], name="grown", lookups_per_sample=0.2, batch=lambda rank, iteration: 9)
    inputs = make(case)
    before = inputs.capacity
    first = _exchange(inputs, case, 0, "lengths")
    second = _exchange(inputs, case, 1, "offsets")
    lacked_room = not first.done()
    first.wait()
    lacked_room &= first.done()
    grown = inputs.capacity
    second.wait()
    right = [problem(case, 0, arrived(first)), problem(case, 1, arrived(second))]
    first.release()
    second.release()
    for iteration in range(2, 6):
        with _exchange(inputs, case, iteration, "lengths") as lookups:
            right.append(problem(case, iteration, arrived(lookups)))
    po.check()
    return [right, grown != before, lacked_room]


def test_room_grows_while_lookups_are_held(backend: str) -> None:
    assert in_world(_grown_while_held, 3, backend) == [[[None] * 6, True, True]] * 3


def _more_than_a_message_takes() -> list[Any]:
    case = dataclasses.replace(CASES[0], name="too long", lookups_per_sample=0.2, batch=lambda rank, iteration: 9)
    inputs = make(case)
    before = inputs.capacity
    with pytest.MonkeyPatch.context() as patch:
        if po.rank() == 0:  # of all PEs
            patch.setattr(embedding_lookups, "MOST_LOOKUPS", max(map(max, before)) + 1)
        po.barrier()
        lookups = _exchange(inputs, case, 0, "lengths")
        name, text, _ = error_of(lookups.wait)
        po.barrier()
    lookups.release()
    with _exchange(inputs, case, 1, "lengths") as lookups:
        right = problem(case, 1, arrived(lookups))
    po.check()
    return [name, "a message takes at most" in text, right]


def test_more_lookups_than_a_message_takes_are_told_on_every_pe() -> None:
    """The PEs are threads. One of them sets the limit for all."""
    results = po.launch(_in_a_host_world, 2, _more_than_a_message_takes, threads=True, timeout=100)
    assert results == [["CapacityError", True, None]] * 2


def _in_a_host_world(program: Any) -> Any:
    po.init("host", heap_size=32 << 20)
    result = program()
    po.finalize()
    return result


def _enlarged_too_far(lookups: int) -> list[Any]:
    """Return the state before and after an exchange that is refused, and whether an exchange that fits arrives.

    PE 0 gets all lookups. It has room for one region of that size, and not for two.
    """
    slots: list[list[tuple[int, int]]] = [[(0, 9)], *([[]] * (po.world_size() - 1))]
    made = po.EmbeddingInputs(slots, num_features=1, max_batch=1, lookups_per_sample=1.0)
    heap, seen = po_world.current().heap.free_list, []
    for count in (lookups, lookups // 3):
        before = made.capacity, [region.memory.nbytes for region in made._exchange.regions], heap.free_bytes
        values = torch.ones(count, dtype=torch.int64, device=po.device())
        arriving = made.exchange(values, lengths=torch.tensor([count], device=po.device()))
        failure = error_of(arriving.wait)[0] if count == lookups else arriving.wait()
        arriving.release()
        after = made.capacity, [region.memory.nbytes for region in made._exchange.regions], heap.free_bytes
        seen += [failure, after == before]
    sizes = {region.memory.nbytes for region in made._exchange.regions}
    po.check()
    return [*seen, len(sizes)]


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_refused_enlargement_leaves_all_regions_as_they_were(backend: str, options: dict[str, Any]) -> None:
    """A message of 4 bytes per lookup, and a quarter more, comes from each of two PEs."""
    lookups = (16 << 20) * 6 // 10 // 2 // 5  # a region takes 6/10 of the heap
    found = in_world(_enlarged_too_far, 2, backend, lookups, heap_size=16 << 20, **options)
    assert found == [["SymmetricHeapError", True, None, False, 1]] * 2


# ---- beside other launches -------------------------------------------------------------------------------------------


def _one_after_the_other(is_beside: bool) -> list[Any]:
    """Exchanges run one batch ahead of the forward passes that read them. Each PE is late in turn."""
    rank, world = po.rank(), po.world_size()
    case = Case("ahead")
    inputs = make(case)
    table = torch.ones(16, 4, device=po.device())
    indices, offsets = torch.arange(8, device=po.device()) % 16, torch.arange(9, device=po.device())
    if is_beside:
        with torch.no_grad(), _exchange(inputs, case, 0, "lengths"):
            po.embedding_all_to_all([table], indices, offsets)
        assert inputs.run_beside()
    side = torch.cuda.Stream() if po.backend() == "cuda" else None
    problems = []

    def send(iteration: int) -> po.Lookups:
        if side is None:
            return _exchange(inputs, case, iteration, "lengths")
        with torch.cuda.stream(side):
            return _exchange(inputs, case, iteration, "lengths")

    with torch.no_grad():
        following = send(0)
        for step in range(3 * NUM_ITERATIONS):
            lookups, following = following, send((step + 1) % NUM_ITERATIONS)
            if step % world == rank:
                time.sleep(0.01)
            if side is not None:  # on one PE the exchange begins first, on the next PE the forward pass
                with torch.cuda.stream(side if (step + rank) % 2 else torch.cuda.current_stream()):
                    torch.cuda._sleep(3_000_000)
            with lookups:
                result = po.embedding_all_to_all([table], indices, offsets)
                if (wrong := problem(case, step % NUM_ITERATIONS, arrived(lookups))) is not None:
                    problems.append((step, wrong))
            if not bool((result == 1).all()):
                problems.append((step, "the forward pass"))
        following.release()
    po.check()
    return problems


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_batch_ahead_of_the_forward_pass(backend: str, is_beside: bool) -> None:
    assert in_world(_one_after_the_other, 3, backend, is_beside) == [[]] * 3


def _given_up_apart() -> list[Any]:
    """An exchange that is given up does not affect the world's other launches. po.check() raises, all recover."""
    inputs, case = make(CASES[0]), CASES[0]
    inputs.workspace.timeout = 1.0  # shorter than the time to find PE 1 in another call
    with _exchange(inputs, case, 0, "lengths"):
        pass
    told = ""
    if po.rank() == 0:
        told = error_of(lambda: _exchange(inputs, case, 1, "lengths").wait())[0]
    with torch.no_grad():
        table = torch.ones(8, 4, device=po.device())
        lookups = torch.arange(4, device=po.device())
        result = po.embedding_all_to_all([table], lookups, torch.arange(5, device=po.device()))
    is_right = bool((result == 1).all())
    name = error_of(po.check)[0]
    if po.rank() == 1:
        told = error_of(lambda: [_exchange(inputs, case, 1, "lengths").wait()])[0]
    po.recover()
    with _exchange(inputs, case, 2, "lengths") as again:
        found = problem(case, 2, arrived(again))
    po.check()
    return [told, is_right, name, found]


def test_a_failure_is_of_one_workspace(backend: str) -> None:
    first, second = in_world(_given_up_apart, 2, backend)
    assert first == ["PeerTimeoutError", True, "PeerTimeoutError", None]
    assert second == ["PeerTimeoutError", True, "", None]


# ---- ways to call it -------------------------------------------------------------------------------------------------

_MADE: dict[str, tuple[dict[str, Any], str]] = {
    "no capacity": ({"lookups_per_sample": None}, "lookups_per_sample, capacity"),
    "both": ({"capacity": [[1]]}, "lookups_per_sample, capacity"),
    "a feature too many": ({"slots": [[(2, 5)]]}, "feature 2"),
    "negative rows": ({"slots": [[(0, -1)]]}, "rows"),
    "slots of two PEs": ({"slots": [[], []]}, "slots"),
    "no features": ({"num_features": 0}, "num_features"),
    "a batch below 0": ({"max_batch": -1}, "max_batch"),
    "estimates of one feature": ({"lookups_per_sample": [1.0]}, "lookups_per_sample"),
    "estimates below 0": ({"lookups_per_sample": -1.0}, "lookups_per_sample"),
    "a shape of capacity": ({"lookups_per_sample": None, "capacity": [[1, 2]]}, "capacity"),
    "capacity beyond a message": ({"lookups_per_sample": None, "capacity": [[2**31 - 1]]}, "capacity"),
    "capacity below 0": ({"lookups_per_sample": None, "capacity": [[-1]]}, "capacity"),
    "int32 for large tables": ({"slots": [[(0, 2**31)]], "index_dtype": torch.int32}, "index_dtype"),
    "another dtype": ({"index_dtype": torch.float32}, "index_dtype"),
    "other bounds": ({"bounds": "warn"}, "bounds"),
    "an order of too few PEs' slots": ({"slot_order": [[0]]}, "slot_order: expected a number for each slot"),
    "an order of other slots": ({"slot_order": [[0, 1, 2]]}, "[2] of them, got [3]"),
}
_CALLED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"lengths": None}, "lengths, offsets"),
    "both": ({"offsets": torch.arange(5)}, "lengths, offsets"),
    "values of floats": ({"values": torch.ones(4)}, "values"),
    "values in two dimensions": ({"values": torch.ones(2, 2, dtype=torch.int64)}, "values"),
    "values with gaps": ({"values": torch.arange(8)[::2]}, "values"),
    "no tensor": ({"values": [1, 2, 3, 4]}, "values"),
    "lengths of a part of a sample": ({"lengths": torch.ones(3, dtype=torch.int64)}, "lengths"),
    "no offsets at all": ({"lengths": None, "offsets": torch.arange(0)}, "offsets"),
    "too many samples": ({"lengths": torch.ones(8, dtype=torch.int64)}, "max_batch"),
    "weights": ({"per_sample_weights": torch.ones(4)}, "per_sample_weights"),
    "another split": ({"batch_per_rank": [1]}, "batch_per_rank"),
    "a split of two PEs": ({"batch_per_rank": [2, 2]}, "batch_per_rank"),
}


def _refused() -> dict[str, tuple[str, str]]:
    made = {"slots": [[(0, 5), (1, 5)]], "num_features": 2, "max_batch": 3, "lookups_per_sample": 2.0}
    seen = {}
    for name, (changed, _) in _MADE.items():
        seen[f"made with {name}"] = error_of(lambda changed=changed: po.EmbeddingInputs(**{**made, **changed}))[:2]  # type: ignore[misc]
    inputs = po.EmbeddingInputs(**made)  # type: ignore[arg-type]
    given = {"values": torch.arange(4) % 5, "lengths": torch.ones(4, dtype=torch.int64)}
    for name, (changed, _) in _CALLED.items():
        seen[f"called with {name}"] = error_of(lambda changed=changed: inputs.exchange(**{**given, **changed}))[:2]  # type: ignore[misc]
    weighted = po.EmbeddingInputs(**made, is_weighted=True)  # type: ignore[arg-type]
    for name, weights in (
        ("no weights", None),
        ("weights of too few", torch.ones(3)),
        ("int weights", torch.arange(4)),
    ):
        seen[name] = error_of(lambda weights=weights: weighted.exchange(**given, per_sample_weights=weights))[:2]  # type: ignore[misc]
    with inputs.exchange(**given) as lookups:
        assert lookups.source(0).indices[:4].tolist() == [0, 1, 2, 3]
    return seen


def test_what_is_refused() -> None:
    (seen,) = in_world(_refused, 1, "host")
    texts = {f"made with {name}": text for name, (_, text) in _MADE.items()}
    texts |= {f"called with {name}": text for name, (_, text) in _CALLED.items()}
    for name, (error, told) in seen.items():
        assert error in ("ValueError", "TypeError"), f"{name}: {error} {told}"
        assert texts.get(name, "per_sample_weights") in told, f"{name}: {told}"
    assert set(texts) < set(seen)


def _disagreed() -> list[Any]:
    rows = 5 + po.rank() // 2
    name, text, _ = error_of(
        lambda: po.EmbeddingInputs([[(0, rows)]] * 3, num_features=1, max_batch=2, lookups_per_sample=1.0)
    )
    inputs = make(CASES[0])
    with _exchange(inputs, CASES[0], 0, "lengths") as lookups:
        found = problem(CASES[0], 0, arrived(lookups))
    return [name, text.startswith("slots: expected the same on all PEs, got "), found, inputs._exchange.layout.number]


def test_pes_that_pass_different_layouts(backend: str) -> None:
    assert in_world(_disagreed, 3, backend) == [["ValueError", True, None, 1]] * 3


def test_slots_with_more_lookups_than_the_average() -> None:
    assert [_num_beside(each) for each in ([], [3.0], [9.0, 5.0, 2.0, 1.0], [1.0, 9.0], [9.0, 1.0, 9.0])] == [
        0,
        0,
        2,
        0,
        1,
    ]
    assert not any(_num_beside([0.1 * value] * count) for value in range(1, 30) for count in range(1, 12))
