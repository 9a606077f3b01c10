"""Assignment of table slices to PEs by cost and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

from .embedding_tables import TableConfig
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Cost", "Costs", "bytes_read", "choose_owners", "first_room", "load", "slice_bytes", "step_time"]

_ROOMS = 1.25, 1.5, 2.0  # times a PE's share of the bytes: the first one is no reason to give tables other owners
_FEW_BYTES = 1 << 30  # nor is this on top of it, or what other owners save
_WORTH = 1.1  # times as long a step may take for less memory


Cost = tuple[tuple[float, ...], ...]  # of the resources of each phase


class Costs(NamedTuple):
    """The costs that placements balance.

    Attributes:
        unit: of the numbers.
        of_slices: what a slice of each table, or a replica, costs the PE that has it: in each phase of a step, one
            after the other, of every resource that is used beside the others (`load`).
    """

    unit: str
    of_slices: tuple[Cost, ...]

    @property
    def nothing(self) -> Cost:
        """The cost of a PE without tables."""
        return tuple(tuple(0.0 for _ in phase) for phase in self.of_slices[0])


def load(cost: Cost) -> float:
    """Return the sum over the phases: a PE is done with one when it is with the resource that it uses most."""
    return sum(map(max, cost))


def step_time(costs: Iterable[Cost]) -> float:
    """Return the time of all PEs together: a phase ends for all when it does for the one with the most to do in it."""
    time: float = sum(max(map(max, of_pes)) for of_pes in zip(*costs, strict=True))
    return time


def bytes_read(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    lookups_per_sample: Mapping[str, float],
    world_size: int,
) -> Costs:
    """Return the bytes of rows that a sample of the global batch makes a slice's owner, or each replica, read."""
    of_slices = []
    for config, placement in zip(configs, placements, strict=True):
        lookups = sum(lookups_per_sample[name] for name in config.feature_names)
        width = config.embedding_dim // placement.num_slices
        samples = 1.0 / world_size if placement.kind == REPLICATED else 1.0
        of_slices.append(((lookups * width * config.data_type.itemsize * samples,),))
    return Costs("bytes_per_sample", tuple(of_slices))


def choose_owners(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> tuple[tuple[tuple[int, ...], ...], list[Cost]]:
    """Return the owners of each table's slices, and every PE's costs.

    The costliest slice comes first. Each slice goes to the PE with which a step takes the least time (`step_time`); of
    several such PEs to the one with the least `load`, then to the one with the fewest bytes.

    Costs say little about memory: a table of few lookups may be the largest. If a PE gets more than a quarter above its
    share of all rows' bytes (and 1 GiB) in this way, other ways are tried. Slices are then ordered by their part of all
    costs or of all bytes, the larger one of the two. Each goes to one of the PEs with room: 1.25, 1.5 or 2 times a PE's
    share, with and without more for the PE that has a slice beyond it. Such a way is taken if the fullest PE has at
    least 1 GiB less (if equal, the next one), and a step takes at most 10 % longer.

    Args:
        configs: of the tables.
        placements: of each; those that name owners are as they say, and replicas everybody's.
        costs: of their slices.
        world_size: number of PEs.

    Raises:
        ValueError: a placement names a PE that there is not.
    """
    fixed, free = _fixed(configs, placements, costs, world_size)
    chosen = by_cost = _spread(fixed, sorted(free, key=lambda part: -part.load), math.inf, math.inf)
    cost, memory = sum(part.load for part in free) or 1.0, sum(part.nbytes for part in free) or 1
    by_both = sorted(free, key=lambda part: (-max(part.load / cost, part.nbytes / memory), -part.load))
    share = sum(by_cost.nbytes) / world_size
    for times in _ROOMS:
        if max(by_cost.nbytes) <= times * share + _FEW_BYTES:
            break
        for beside in (0, (times - 1) * share + _FEW_BYTES):
            limited = _spread(fixed, by_both, times * share + _FEW_BYTES, beside)
            if limited.time <= _WORTH * by_cost.time and limited.saves_memory(chosen):
                chosen = limited
    return tuple(map(tuple, chosen.owners)), chosen.used


def first_room(nbytes: Sequence[int]) -> float:
    """Return the bytes that a PE may have of all PEs' bytes, before owners are chosen for memory too."""
    return _ROOMS[0] * sum(nbytes) / len(nbytes) + _FEW_BYTES


class _Part(NamedTuple):
    """A slice of a table that is to get an owner: its cost of each resource, and the bytes of its rows."""

    table: int
    slice: int
    cost: Cost
    nbytes: int

    @property
    def load(self) -> float:
        return load(self.cost)


class _Owned(NamedTuple):
    """The owners of each table's slices so far; every PE's cost of each resource, its bytes, its largest part's."""

    owners: list[list[int]]
    used: list[Cost]
    nbytes: list[int]
    largest: list[int]

    @property
    def time(self) -> float:
        return step_time(self.used)

    def saves_memory(self, other: _Owned) -> bool:
        """Return whether a PE has much less than its counterpart in the order of bytes, and none before it more."""
        ours, theirs = (sorted(each.nbytes, reverse=True) for each in (self, other))
        for here, there in zip(ours, theirs, strict=True):
            if here > there or here < there - _FEW_BYTES:
                return here < there
        return False


def _fixed(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    costs: Costs,
    world_size: int,
) -> tuple[_Owned, list[_Part]]:
    """Return the owners that placements name, and the slices whose owners they leave open."""
    owned = _Owned([], [costs.nothing] * world_size, [0] * world_size, [0] * world_size)
    free = []
    for table, (config, placement) in enumerate(zip(configs, placements, strict=True)):
        cost, nbytes = costs.of_slices[table], slice_bytes(config, placement)
        is_replicated = placement.kind == REPLICATED
        owned.owners.append([] if is_replicated else list(placement.ranks or [0] * placement.num_slices))
        if not is_replicated and placement.ranks is None:
            free += [_Part(table, number, cost, nbytes) for number in range(placement.num_slices)]
            continue
        for owner in range(world_size) if is_replicated else owned.owners[-1]:
            if not 0 <= owner < world_size:
                raise ValueError(f"placement: {config.name} is on PE {owner}, expected 0 to {world_size - 1}")
            owned.used[owner] = _plus(owned.used[owner], cost)
            owned.nbytes[owner] += nbytes
            owned.largest[owner] = max(owned.largest[owner], nbytes)
    return owned, free


def _spread(fixed: _Owned, parts: Sequence[_Part], room: float, beside: float) -> _Owned:
    """Give each part to a PE among those that have room, or to the one with the fewest bytes; see `choose_owners`.

    Args:
        fixed: what has an owner.
        parts: in this order.
        room: of a PE, in bytes.
        beside: the same beside a PE's largest part, where that leaves less.
    """
    owners, used = [list(of_table) for of_table in fixed.owners], list(fixed.used)
    nbytes, largest = list(fixed.nbytes), list(fixed.largest)
    for part in parts:
        pes = [
            pe
            for pe, has in enumerate(nbytes)
            if has + part.nbytes <= max(room, max(largest[pe], part.nbytes) + beside)
        ]
        if not pes:
            pes = [pe for pe, has in enumerate(nbytes) if has == min(nbytes)]
        owner = _cheapest(pes, part.cost, used, nbytes)
        owners[part.table][part.slice] = owner
        used[owner] = _plus(used[owner], part.cost)
        nbytes[owner] += part.nbytes
        largest[owner] = max(largest[owner], part.nbytes)
    return _Owned(owners, used, nbytes, largest)


def _cheapest(pes: Sequence[int], cost: Cost, used: Sequence[Cost], nbytes: Sequence[int]) -> int:
    """Return the PE with which a step takes the least time if it gets a part of this cost; see `choose_owners`."""
    so_far = [max(map(max, of_pes)) for of_pes in zip(*used, strict=True)]  # of each phase
    best, owner = (math.inf, math.inf, math.inf), pes[0]
    for pe in pes:
        time = own = 0.0
        for resources, more, most in zip(used[pe], cost, so_far, strict=True):
            then = max(map(add, resources, more))
            own += then
            time += max(then, most)
        if (this := (time, own, nbytes[pe])) < best:
            best, owner = this, pe
    return owner


def slice_bytes(config: TableConfig, placement: TablePlacement) -> int:
    """Return the bytes of the rows of each of a table's slices."""
    return config.num_embeddings * (config.embedding_dim // placement.num_slices) * config.data_type.itemsize


def _plus(used: Cost, cost: Cost) -> Cost:
    return tuple(tuple(map(add, *phases)) for phases in zip(used, cost, strict=True))
