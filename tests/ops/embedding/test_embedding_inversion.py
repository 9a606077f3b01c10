"""The sort by row of an embedding batch: the bits of a stable sort, for any lookups; repeatedly, and in graphs."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch
from graphs import Graph
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding import inversion as embedding_inversion
from persistent_ops.ops.embedding.inversion import OPERATOR, Inverted, Rows, Tuning, invert

_Lookups = tuple[torch.Tensor, torch.Tensor]


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables, and how their lookups are made.

    Attributes:
        rows: of each table.
        same_as: table number -> number of another table with the same keys.
        batch: bags of a table.
        most: lookups of a bag.
        indices: generator of n indices for tables of some rows: "uniform", "skewed", "once", "bad", "zero".
        offsets: how the offsets are changed: "falling", "inside", "beyond", "extreme", "empty".
        index_dtype, offset_dtype: of the lookups.
    """

    name: str
    rows: tuple[int, ...] = (50, 20, 70, 90, 7)
    same_as: tuple[tuple[int, int], ...] = ()
    batch: int = 7
    most: int = 30
    indices: str = "uniform"
    offsets: str = ""
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64

    def first_keys(self) -> list[int]:
        keys, key = [], 0
        for rows in self.rows:
            keys.append(key)
            key += rows
        for table, other in self.same_as:
            keys[table] = keys[other]
        return keys

    def lookups(self, iteration: int) -> _Lookups:
        """Return indices and offsets, on the CPU."""
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {iteration}".encode()))
        num_bags = len(self.rows) * self.batch
        lengths = torch.randint(0, self.most + 1, (num_bags,), generator=rng)
        if self.offsets == "empty":
            lengths *= torch.rand(num_bags, generator=rng) < 0.01
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        count = int(offsets[-1])
        of_lookup = torch.repeat_interleave(torch.tensor(self.rows).repeat_interleave(self.batch), lengths)
        shares = torch.rand(count, generator=rng, dtype=torch.float64)
        indices = (of_lookup * shares ** (8 if self.indices == "skewed" else 1)).long()
        if self.indices == "once":
            indices = torch.cat([torch.randperm(rows, generator=rng) for rows in self.rows])
            offsets = torch.arange(num_bags + 1) * self.rows[0] // self.batch
        if self.indices == "bad":
            bad = torch.tensor([-1, -(2**31), 2**31 - 1, 2**31 - 2])
            bad = torch.cat((bad, torch.tensor([2**32, 2**40, -(2**63), 2**32 - 1]))) if self._is_long else bad
            places = torch.rand(count, generator=rng) < 0.3
            indices[places] = bad[torch.randint(0, len(bad), (int(places.sum()),), generator=rng)]
            indices = torch.where(torch.rand(count, generator=rng) < 0.1, of_lookup, indices)
        if self.indices == "zero":
            indices = torch.zeros_like(indices)
        if self.offsets == "falling":
            offsets += torch.randint(-3 * self.most, 3 * self.most, offsets.shape, generator=rng)
        if self.offsets == "inside":
            offsets = (offsets // 2).clamp(min=count // 7)
        if self.offsets == "beyond":
            offsets = 3 * offsets - count
        if self.offsets == "extreme":
            offsets[0], offsets[-1] = -(2**63), 2**63 - 1
        return indices.to(self.index_dtype), offsets.to(self.offset_dtype)

    @property
    def _is_long(self) -> bool:
        return self.index_dtype == torch.int64


_INT32 = torch.int32
CASES = [
    Case("some of each"),
    Case("no lookups", most=0),
    Case("no tables", rows=()),
    Case("no samples", batch=0),
    Case("one bag", rows=(11,), batch=1, most=400),
    Case("one row for all", rows=(1,), batch=64),
    Case("one key in each table", rows=(60,) * 4, indices="zero"),
    Case("all rows once", rows=(64, 64, 64), batch=8, indices="once"),
    Case("skewed", rows=(1000, 900), batch=40, indices="skewed"),
    Case("tables of one and three rows", rows=(1, 3, 1, 3), batch=20),
    Case("skipped", indices="bad"),
    Case("skipped, int32", indices="bad", index_dtype=_INT32, offset_dtype=_INT32),
    Case("int32 indices", index_dtype=_INT32),
    Case("int32 offsets", offset_dtype=_INT32),
    Case("offsets fall", offsets="falling", batch=50, most=8),
    Case("offsets fall, int32", offsets="falling", batch=9, index_dtype=_INT32, offset_dtype=_INT32),
    Case("lookups of no bag", offsets="inside"),
    Case("offsets leave the lookups", offsets="beyond"),
    Case("offsets as far as there are numbers", offsets="extreme", batch=40, most=30),
    Case("few lookups in many bags", rows=(9, 8, 7), batch=3000, offsets="empty"),
    Case("shared rows", rows=(50, 20, 50, 50), same_as=((2, 0), (3, 0)), batch=12),
    Case("two passes", rows=(2**16 - 5, 3, 2), batch=9),
    Case("three passes of seven bits", rows=(2**17, 2**17), batch=9),
    Case("three passes", rows=(2**24 - 7, 7), batch=9),
    Case("four passes of seven bits", rows=(2**24, 7), batch=9),
    Case("four passes", rows=(2**30, 2**30 - 1), batch=9, indices="bad"),
    Case("a key more than int32 has", rows=(2**30, 2**30), batch=9, indices="bad"),
    Case("wide keys", rows=(2**40, 3, 2**33), batch=9),
    Case("wide keys and skipped, int32", rows=(2**40, 3, 2**33), batch=9, indices="bad", index_dtype=_INT32),
    Case("the widest keys", rows=(2**62, 2**62 - 1), batch=9, indices="bad"),
]  # fmt: skip


def expected(case: Case, indices: torch.Tensor, offsets: torch.Tensor) -> Inverted:
    """Sort with torch, on the CPU."""
    num_bags = len(case.rows) * case.batch
    places = torch.arange(indices.numel())
    bags = torch.searchsorted(offsets[1:].long(), places, right=True)
    has_bag = (bags < num_bags) & (places >= offsets[0])
    tables = torch.where(has_bag, bags, 0) // max(case.batch, 1)
    rows, first_keys = (torch.tensor([*each, 0]) for each in (case.rows, case.first_keys()))
    counts = has_bag & (indices >= 0) & (indices < rows[tables])
    keys = (first_keys[tables] + indices)[counts]
    keys, order = torch.sort(keys, stable=True)
    bags, places = bags[counts], places[counts]
    of_bags = torch.bincount(bags, minlength=num_bags).float()
    return Inverted(keys, bags[order].int(), places[order].int(), of_bags, torch.tensor([len(keys)]))


def problem(case: Case, got: Inverted, wants: Inverted) -> str | None:
    """Return what differs, or None."""
    count = int(got.count)
    if count != int(wants.count):
        return f"{case.name}: {count} lookups, not {int(wants.count)}"
    narrow = sum(case.rows) < 2**31
    if got.keys.dtype != (torch.int32 if narrow else torch.int64):
        return f"{case.name}: keys are {got.keys.dtype}"
    for name in ("keys", "bags", "lookups", "counts"):
        have, want = getattr(got, name), getattr(wants, name)
        if have is None:
            continue
        have = have.cpu() if name == "counts" else have[:count].cpu()
        if not torch.equal(have.to(want.dtype), want):
            return f"{case.name}: {name} differ from {int((have != want).nonzero()[0])} on"
    return None


class _Trial:
    """A case in this world."""

    def __init__(self, case: Case) -> None:
        self.case = case
        world = po.runtime.world.current()
        self._rows = Rows.of(world, case.first_keys(), case.rows, case.batch)

    def run(self, given: _Lookups, *, counts: bool = True, lookups: bool = True) -> Inverted:
        indices, offsets = (tensor.to(po.device()) for tensor in given)
        return invert(po.runtime.world.current(), self._rows, indices, offsets, counts=counts, lookups=lookups)

    def problem(self, iteration: int, **wanted: bool) -> str | None:
        given = self.case.lookups(iteration)
        return problem(self.case, self.run(given, **wanted), expected(self.case, *given))


# ---- bits ------------------------------------------------------------------------------------------------------------

_WAYS = [{"counts": wanted, "lookups": wanted} for wanted in (False, True)]


def _problems_of(names: list[str], tuning: Tuning | None) -> list[str]:
    OPERATOR.tune(po.runtime.world.current(), tuning)
    trials = [_Trial(case) for case in CASES if case.name in names]
    found = []
    for iteration in range(6):
        for number, trial in enumerate(trials):
            found.append(trial.problem(iteration, **_WAYS[(iteration + number) % len(_WAYS)]))
    return [each for each in found if each]


_TUNINGS = {
    "default": None,
    "small tiles": Tuning(work_groups=3, threads=64, items=2),
    "one work-group": Tuning(work_groups=1, threads=32, items=2),
    "an item": Tuning(work_groups=2, threads=64, items=1),
    "three items": Tuning(work_groups=2, threads=64, items=3),
    "four items": Tuning(work_groups=2, threads=64, items=4),
    "twelve items": Tuning(work_groups=2, threads=64, items=12),
}


@pytest.mark.parametrize("tuning", _TUNINGS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_it_is_a_stable_sort(backend: str, tuning: str, part: int) -> None:
    names = [case.name for case in CASES[part::4]]
    assert in_world(_problems_of, 1, backend, names, _TUNINGS[tuning]) == [[]]


def _wanted_apart() -> list[str | None]:
    trial = _Trial(CASES[0])
    return [trial.problem(0, counts=counts, lookups=not counts) for counts in (False, True)]


def test_what_is_wanted(backend: str) -> None:
    assert in_world(_wanted_apart, 1, backend) == [[None, None]]


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("wg_size", [2, 5])
def test_work_groups_of_several_threads(wg_size: int) -> None:
    names = [case.name for case in CASES]
    options = {"host_options": {"wg_size": wg_size}}
    assert in_world(_problems_of, 1, "host", names, _TUNINGS["small tiles"], **options) == [[]]


def _many_tiles() -> str | None:
    case = Case("many tiles", rows=(100_000, 3, 50_000), batch=3000, most=40, indices="skewed")
    return _Trial(case).problem(0)


def test_many_tiles(backend: str) -> None:
    assert in_world(_many_tiles, 1, backend) == [None]


def _traced() -> list[Any]:
    trial = _Trial(CASES[0])
    before = trial.problem(0)
    with po.trace() as timeline:
        found = [trial.problem(iteration) for iteration in range(3)]
    wgs = [launch for pe in timeline.pes for launch in pe.launches]
    launches = {launch.epoch for launch in wgs if launch.operator == "embedding_inversion"}
    return [before, *found, len(launches)]


def test_a_timeline(backend: str) -> None:
    assert in_world(_traced, 1, backend) == [[None] * 4 + [3]]


# ---- consecutive launches --------------------------------------------------------------------------------------------


def _in_turn() -> list[str]:
    """Launch without a host check in between, large and small, beside an operator that uses the same words."""
    world = po.runtime.world.current()
    OPERATOR.tune(world, Tuning(work_groups=4, threads=64, items=2))
    trials = [_Trial(case) for case in CASES]
    tables = [torch.ones(5, 4, device=po.device())]
    arguments = (torch.arange(5, device=po.device()), torch.arange(6, device=po.device()))
    results, sums = [], []
    for number in range(4 * len(trials)):
        trial = trials[number * 5 % len(trials)]
        lookups = trial.case.lookups(number)
        results.append((trial.case, lookups, trial.run(lookups)))
        if number % 3 == 0:
            sums.append(po.embedding_all_to_all(tables, *arguments, batch_per_rank=[5]))
    po.check()
    found = [problem(case, got, expected(case, *lookups)) for case, lookups, got in results]
    found += [None if bool((each == 1).all()) else "sums" for each in sums]
    return [each for each in found if each]


def test_launches_in_turn(backend: str) -> None:
    assert in_world(_in_turn, 1, backend) == [[]]


def _beside_peers() -> list[str | None]:
    """Each PE launches alone, any number of times, also after a recovery."""
    trials = [_Trial(CASES[po.rank() + 3 * number]) for number in range(3)]
    found = [trial.problem(iteration) for iteration in range(2 + po.rank()) for trial in trials]
    po.barrier()
    po.recover()
    found += [trial.problem(9) for trial in trials]
    return [each for each in found if each]


def test_each_pe_launches_for_itself(backend: str) -> None:
    assert in_world(_beside_peers, 2, backend) == [[], []]


def _captured() -> list[str | None]:
    OPERATOR.tune(po.runtime.world.current(), Tuning(work_groups=4, threads=64, items=2))
    case = Case("captured", rows=(300, 70_000), batch=30, most=6)
    trial, other = _Trial(case), _Trial(CASES[0])
    turns = [case.lookups(turn) for turn in range(7)]
    most = max(indices.numel() for indices, _ in turns)
    indices = torch.zeros(most, dtype=torch.int64, device=po.device())  # what is after the last offset has no bag
    offsets = torch.zeros(2 * 30 + 1, dtype=torch.int64, device=po.device())
    trial.run((indices, offsets))
    other.run(CASES[0].lookups(0))
    graph = Graph(lambda: trial.run((indices, offsets)))
    found = []
    for turn in range(51):
        new_indices, new_offsets = turns[turn % 7]
        indices.zero_()
        indices[: new_indices.numel()] = new_indices.to(po.device())
        offsets.copy_(new_offsets)
        got = graph.replay()
        if turn % 5 == 0:
            found.append(other.problem(turn))
        found.append(problem(case, got, expected(case, indices.cpu(), new_offsets)))
    return [each for each in found if each]


def test_a_graph_is_replayed(backend: str) -> None:
    assert in_world(_captured, 1, backend) == [[]]


def _first_call_in_a_graph() -> str:
    trial = _Trial(CASES[0])
    indices, offsets = (tensor.to(po.device()) for tensor in CASES[0].lookups(0))
    with pytest.raises(RuntimeError) as error:
        Graph(lambda: trial.run((indices, offsets)))
    return str(error.value)


def test_a_graph_needs_a_first_call(backend: str) -> None:
    assert "call it once before the capture" in in_world(_first_call_in_a_graph, 1, backend)[0]


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.host
def test_too_many_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATOR.description.constants, "kNumber", 8)
    ((name, text, _),) = in_world(lambda: error_of(lambda: _Trial(CASES[0]).problem(0)), 1, "host")
    assert name == "ValueError" and "expected at most 8 lookups" in text


def test_passes() -> None:
    passes = {
        0: (7, 1),
        1: (7, 1),
        2: (7, 1),
        2**7: (7, 1),
        2**7 + 1: (8, 1),
        2**8 + 1: (7, 2),
        2**14 + 1: (8, 2),
        2**16 + 1: (7, 3),
        2**24: (8, 3),
        2**25: (7, 4),
        2**31 - 1: (8, 4),
        2**63: (8, 8),
    }
    assert {keys: embedding_inversion.passes_of(keys, 8) for keys in passes} == passes
