"""Cases of the input exchange: what each PE passes, and a plain model of what the owners must get."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from serially import serially

import persistent_ops as po

__all__ = [
    "CASES",
    "Arrived",
    "Case",
    "Given",
    "arrived",
    "batches",
    "expected",
    "make",
    "make_given",
    "problem",
]

Slots = list[tuple[int, int]]


def _slots(rank: int) -> Slots:
    """Some features go to several PEs, and some to two slots of a PE."""
    return [(rank % 3, 40 + rank), (3, 30), (2, 50)][: 1 + rank % 3] + [(rank % 2, 9)] * (rank == 2)


@dataclass(frozen=True)
class Case:
    """One exchange.

    Attributes:
        slots: of a PE.
        batch: samples of a PE in an iteration, by PE and iteration.
        max_length: of a bag.
        value_dtype, bound_dtype, index_dtype: see `InputsKey`; index_dtype is None for the default.
        bad: one in `bad` lookups is outside of the tables; 0: none.
        lookups_per_sample: of each feature; None for a sufficient number.
    """

    name: str
    slots: Callable[[int], Slots] = _slots
    features: int = 4
    max_batch: int = 9
    batch: Callable[[int, int], int] = lambda rank, iteration: 3 + (rank + iteration) % 5
    max_length: int = 4
    value_dtype: torch.dtype = torch.int64
    bound_dtype: torch.dtype = torch.int64
    index_dtype: torch.dtype | None = None
    is_weighted: bool = False
    bad: int = 0
    lookups_per_sample: float | None = None
    dtype: torch.dtype = torch.int64  # splits the tests of a world in two


CASES = [
    Case("plain"),
    Case("int32", value_dtype=torch.int32, bound_dtype=torch.int32),
    Case("narrowed", bound_dtype=torch.int32, dtype=torch.int32),
    Case("widened", value_dtype=torch.int32, index_dtype=torch.int64),
    Case("weighted", is_weighted=True, dtype=torch.int32),
    Case("weighted int64", is_weighted=True, index_dtype=torch.int64),
    Case("no samples", batch=lambda rank, iteration: 0),
    Case("some PEs without samples", batch=lambda rank, iteration: 4 * ((rank + iteration) % 2), dtype=torch.int32),
    Case("no tables", slots=lambda rank: []),
    Case("one PE has all tables", slots=lambda rank: [(0, 7), (1, 8), (2, 9), (3, 10)] if rank == 0 else []),
    Case("empty bags only", max_length=0, dtype=torch.int32),
    Case("a feature for nobody", slots=lambda rank: [(0, 20)]),
    Case("long bags", max_length=70, max_batch=5, batch=lambda rank, iteration: 5 - rank % 2, dtype=torch.int32),
    Case("many bags", features=3, slots=lambda rank: [(rank % 3, 99)], max_batch=700, batch=lambda r, i: 650 + r + i),
    Case("large tables", slots=lambda rank: [(0, 2**32 - 2), (1, 2**31)], features=2),
    Case("skipped lookups", bad=5, dtype=torch.int32),
    Case("room grows", lookups_per_sample=0.3),
]


class Given(NamedTuple):
    """What a PE passes. Nobody may write to it."""

    values: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


@serially
@functools.lru_cache(maxsize=256)
def make_given(case: Case, rank: int, iteration: int) -> Given:
    """Return a PE's lookups, on the CPU."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {rank} {iteration}".encode()))
    samples = case.batch(rank, iteration)
    lengths = torch.randint(0, case.max_length + 1, (case.features * samples,), generator=rng)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    rows = [1 << 30] * case.features
    for pe in range(8):
        for feature, count in case.slots(pe):
            rows[feature] = min(rows[feature], count)
    limits = torch.tensor(rows).repeat_interleave(samples).repeat_interleave(lengths)
    values = torch.randint(0, 1 << 40, limits.shape, generator=rng) % limits
    if case.bad:
        outside = torch.tensor([-1, 1 << 30, 60])  # the last one is a row of some tables only
        values[:: case.bad] = outside[torch.arange(len(values[:: case.bad])) % 3]
    weights = torch.randn(values.shape, generator=rng) if case.is_weighted else None
    return Given(values.to(case.value_dtype), lengths.to(case.bound_dtype), offsets.to(case.bound_dtype), weights)


def batches(case: Case, world: int, iteration: int) -> list[int]:
    """Return every PE's samples."""
    return [case.batch(rank, iteration) for rank in range(world)]


class Arrived(NamedTuple):
    """What a PE sends for the tables of another PE, as far as it is defined; on the CPU."""

    first_sample: int
    samples: int
    offsets: list[int]
    indices: list[int]
    weights: list[float] | None


def expected(slots: Slots, given: Given, samples: int, first_sample: int) -> Arrived:
    """Return the part of a PE's lookups that goes to an owner of such slots."""
    ends = given.offsets.tolist()
    values = given.values.tolist()
    weights = None if given.weights is None else given.weights.tolist()
    offsets, indices, factors = [0], [], []
    for feature, rows in slots:
        for sample in range(samples):
            bag = feature * samples + sample
            for at in range(ends[bag], ends[bag + 1]):
                indices.append(values[at] if 0 <= values[at] < rows else -1)
                factors += [] if weights is None else [weights[at]]
            offsets.append(len(indices))
    return Arrived(first_sample, samples, offsets, indices, None if weights is None else factors)


def arrived(lookups: po.Lookups) -> list[Arrived]:
    """Return what arrived, by PE."""
    found = []
    for pe in range(po.world_size()):
        source = lookups.source(pe)
        count = int(source.offsets[-1])
        assert count == source.num_lookups <= source.capacity
        weights = None if source.per_sample_weights is None else source.per_sample_weights[:count].tolist()
        found.append(
            Arrived(
                source.first_sample, source.samples, source.offsets.tolist(), source.indices[:count].tolist(), weights
            )
        )
    return found


@serially
@functools.lru_cache(maxsize=1024)
def _wanted(case: Case, world: int, rank: int, iteration: int) -> list[Arrived]:
    split = batches(case, world, iteration)
    first = [0, *itertools.accumulate(split)]
    given = [make_given(case, pe, iteration) for pe in range(world)]
    return [expected(case.slots(rank), given[pe], split[pe], first[pe]) for pe in range(world)]


def problem(case: Case, iteration: int, found: Sequence[Arrived]) -> str | None:
    """Return what is wrong with what arrived at this PE, or None."""
    wanted = _wanted(case, po.world_size(), po.rank(), iteration)
    for pe, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if want != have:
            return f"from PE {pe}: {have}, not {want}"
    return None


def make(case: Case) -> po.EmbeddingInputs:
    """Make the exchange of a case's lookups; collective."""
    per_sample = case.lookups_per_sample
    return po.EmbeddingInputs(
        [case.slots(rank) for rank in range(po.world_size())],
        num_features=case.features,
        max_batch=case.max_batch,
        lookups_per_sample=case.max_length if per_sample is None else per_sample,
        is_weighted=case.is_weighted,
        index_dtype=case.index_dtype,
        bounds="ignore" if case.bad else "fatal",
    )
