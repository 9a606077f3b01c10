"""Sort the lookups of an embedding batch by table row, in one launch of this PE alone."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...runtime.backend import KernelRequest, LaunchShape, check_resident
from ...runtime.dtypes import INDEX_TYPES
from ...runtime.operator import Operator
from ...runtime.plans import Plan, Plans
from ...runtime.team import Team
from ...runtime.tuning import BoundedTuning
from ...runtime.world import World, upload
from .inputs_plan import aligned_bytes
from .lookups import Lookups

__all__ = [
    "OPERATOR",
    "Inverted",
    "Rows",
    "Sorting",
    "Tuning",
    "invert",
    "invert_sources",
    "is_wide",
    "kernel_request",
    "request_for",
    "sample_requests",
]

_NAME = "embedding_inversion"
_MAX_NARROW_KEYS = 2**31 - 1
_ITEMS = {8: (8, 4, 2), 16: (4, 2)}  # of a thread, by the bytes of what is sorted
_HOST_ITEMS = 256
_HOST_WORK_GROUPS = 2


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that lookups are sorted by; what a plan makes once. Its identity is a part of the keys of plans.

    A row's *key* is its table's first key plus its number. Tables that are one tensor have the same first key, so that
    the lookups of such a row lie side by side, also if they are in different tables.

    Attributes:
        first_keys: `[T]`, int64, on the device.
        num_rows: `[T]`, int64, on the device.
        num_keys: all keys are below it.
        batch: bags of a table.
        members: `[T]`, int32, on the device: number of a table among those that are one tensor; None where lookups come
            as one source, table after table.
        member_bits: of these numbers.
    """

    first_keys: torch.Tensor
    num_rows: torch.Tensor
    num_keys: int
    batch: int
    members: torch.Tensor | None = None
    member_bits: int = 0

    @classmethod
    def of(
        cls,
        world: World,
        first_keys: Sequence[int],
        num_rows: Sequence[int],
        batch: int,
        members: Sequence[int] | None = None,
    ) -> Rows:
        """Return the rows of tables.

        Args:
            world: of this PE.
            first_keys: of each table.
            num_rows: of each table.
            batch: bags of a table.
            members: of each table, its number among those that are one tensor, where lookups come by source: a row's
                then lie table by table all the same.

        Raises:
            ValueError: the lists differ in length, a number is negative, or there are 2^31 bags or more.
        """
        if len(first_keys) != len(num_rows):
            raise ValueError(f"num_rows: expected one for each of {len(first_keys)} tables, got {len(num_rows)}")
        if min((*first_keys, *num_rows, batch), default=0) < 0:
            raise ValueError(
                f"first_keys, num_rows, batch: expected none below 0, got {first_keys}, {num_rows}, {batch}"
            )
        if len(first_keys) * batch >= 2**31:
            raise ValueError(f"batch: at most 2^31 - 1 bags in all tables, got {len(first_keys) * batch}")
        device = world.backend.device
        member_bits = max(members or (0,), default=0).bit_length()
        return cls(
            torch.tensor(first_keys, dtype=torch.int64, device=device),
            torch.tensor(num_rows, dtype=torch.int64, device=device),
            max((first + rows for first, rows in zip(first_keys, num_rows, strict=True)), default=0),
            batch,
            torch.tensor(members, dtype=torch.int32, device=device) if member_bits else None,
            member_bits,
        )

    @functools.cached_property
    def num_tables(self) -> int:
        """Return T."""
        return self.first_keys.numel()

    @functools.cached_property
    def num_bags(self) -> int:
        """Return T * B."""
        return self.num_tables * self.batch

    @functools.cached_property
    def key_dtype(self) -> torch.dtype:
        """Return the dtype of `Inverted.keys`: int32 where there are fewer than 2^31 sort keys."""
        return torch.int64 if is_wide(self.num_sort_keys) else torch.int32

    @functools.cached_property
    def num_sort_keys(self) -> int:
        """Return the exclusive upper bound of all keys during the sort: each with its table's member."""
        return self.num_keys << self.member_bits


class Inverted(NamedTuple):
    """The lookups of a batch that count, sorted by key; lookups of one row keep their order.

    N is the number of indices; only the first `count` elements of keys, bags and lookups are written.

    Attributes:
        keys: `[N]`, `Rows.key_dtype`.
        bags: `[N]`, int32: table * B + sample.
        lookups: `[N]`, int32: place in `indices`; None where not asked for.
        counts: `[T * B]`, float32: lookups of a bag that count; None where not asked for.
        count: `[1]`, int64: lookups that count.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    lookups: torch.Tensor | None
    counts: torch.Tensor | None
    count: torch.Tensor  # type: ignore[assignment]  # it hides a method of tuple's


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many as the GPU holds at once.
        threads: of a WG, on the GPU.
        work_groups_per_sm: for which registers are given out.
        items: lookups of a thread in a tile, 1 to 4 or a multiple of 4; None for as many as leave a tile to every WG.
    """

    work_groups: int | None = None
    threads: int = 512
    work_groups_per_sm: int = 2
    items: int | None = None


# By whether SMs are left to others: then there is one WG in place of two.
_DEFAULTS = {False: Tuning(), True: Tuning(threads=1024, work_groups_per_sm=1)}
OPERATOR = Operator(_NAME, ("tables", "batch", "keys", "work_groups"), max_plans=256, default_tuning=_DEFAULTS[False])


class InversionKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: this PE alone.
        rows, index_dtype, offset_dtype, counts, lookups: see `invert`.
        items: of a thread in a tile.
        room_for: WGs of the launch after it.
        tuning: of the operator.
    """

    team: Team
    rows: Rows
    index_dtype: torch.dtype
    offset_dtype: torch.dtype
    counts: bool
    lookups: bool
    items: int
    room_for: int
    tuning: Tuning


class InversionPlan(Plan):
    """One key's kernel and plan.

    Attributes:
        room_for: of the key.
        most_lookups: that there may be: their numbers share a word with two bits.

    Raises:
        ValueError: the GPU does not hold the grid.
    """

    def __init__(self, world: World, key: InversionKey) -> None:
        description = OPERATOR.prepare(world)
        rows, threads = key.rows, key.tuning.threads
        self._world, self._rows = world, rows
        self.room_for = key.room_for
        self.most_lookups = description.constants["kNumber"]
        self._wants_counts, self._wants_lookups = key.counts, key.lookups
        entry = "SmallEntry" if _is_small(rows.num_sort_keys, lookups=key.lookups) else "LargeEntry"
        entry_bytes = description.constants[f"sizeof({entry})"]
        digit_bits, num_passes = passes_of(rows.num_sort_keys, description.constants["kMaxDigitBits"])
        is_host = world.backend.name == "host"
        tile_items = _tile_items(world, key.items, threads)
        # The sizes of scratch memory depend on these, and on the room for lookups.
        self._scratch = (tile_items, entry_bytes, num_passes, 1 << digit_bits, description.queries["tile_words_bytes"])
        sorting = Sorting(key.index_dtype, key.offset_dtype, key.counts, key.lookups, rows.num_sort_keys)
        most_sources = world.team.room
        self._kernel = world.load(_request_of(world, sorting, key.items, key.tuning), key.team)
        resident = self._kernel.resident_work_groups()
        self._grid = key.tuning.work_groups or (_HOST_WORK_GROUPS if is_host else max(resident - key.room_for, 1))
        check_resident(self._kernel, self._grid)
        num_words = ctypes.sizeof(description.structs["Words"]) // 8 + most_sources
        self._zero_words = world.workspace.zero_words(key.team, num_words)
        contract = OPERATOR.contract(key.team, rows.num_tables, rows.batch, rows.num_keys, self._grid)
        plan = description.structs["Plan"](
            team=world.workspace.team(contract),
            first_keys=rows.first_keys.data_ptr(),
            num_rows=rows.num_rows.data_ptr(),
            num_tables=rows.num_tables,
            batch=rows.batch,
            members=0 if rows.members is None else rows.members.data_ptr(),
            member_bits=rows.member_bits,
            num_passes=num_passes,
            words=self._zero_words.data_ptr(),
        )
        self._plan = upload(world.backend, plan)
        self._new_call: Any = description.structs["Call"]

    def launch(self, indices: torch.Tensor, offsets: torch.Tensor) -> Inverted:
        """Launch on the current stream."""
        call, count = self._new_call(), indices.numel()
        source = call.source
        source.indices, source.offsets = indices.data_ptr(), offsets.data_ptr()
        source.count, source.first_sample, source.samples = count, 0, self._rows.batch
        call.sources, call.num_sources = 0, 1
        return self._launch(call, (count,))

    def launch_from(self, sources: torch.Tensor, capacities: Sequence[int]) -> Inverted:
        """The same for lookups that are where an input exchange has left them; see `invert_sources`."""
        call = self._new_call()
        call.sources, call.num_sources = sources.data_ptr(), len(capacities)
        return self._launch(call, capacities)

    def _launch(self, call: Any, capacities: Sequence[int]) -> Inverted:
        """Launch for sources with at most so many lookups; the call says which."""
        rows, count, device = self._rows, sum(capacities), self._world.backend.device
        first, second, words = _scratch_bytes(tuple(capacities), *self._scratch)
        scratch = torch.empty(first + second + words, dtype=torch.uint8, device=device)
        inverted = Inverted(
            torch.empty(count, dtype=rows.key_dtype, device=device),
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.int32, device=device) if self._wants_lookups else None,
            torch.empty(rows.num_bags, dtype=torch.float32, device=device) if self._wants_counts else None,
            torch.empty(1, dtype=torch.int64, device=device),
        )
        start = scratch.data_ptr()
        call.entries[0], call.entries[1], call.tile_words = start, start + first, start + first + second
        call.keys, call.bags = inverted.keys.data_ptr(), inverted.bags.data_ptr()
        call.lookups = 0 if inverted.lookups is None else inverted.lookups.data_ptr()
        call.counts = 0 if inverted.counts is None else inverted.counts.data_ptr()
        call.count = inverted.count.data_ptr()
        self._world.workspace.launch(self._kernel, self._grid, self._plan.data_ptr(), call)
        return inverted


@functools.lru_cache(maxsize=256)
def _scratch_bytes(
    capacities: tuple[int, ...],
    tile_items: int,
    entry_bytes: int,
    num_passes: int,
    num_digits: int,
    words_bytes: Callable[[int, int, int], int],
) -> tuple[int, int, int]:
    """Return the bytes of both arrays of entries, and of the tiles' words, for sources with so many lookups at most."""
    num_tiles = sum(-(-capacity // tile_items) for capacity in capacities)
    entries = aligned_bytes(num_tiles * tile_items * entry_bytes)
    return entries, entries if num_passes > 1 else 0, aligned_bytes(words_bytes(num_passes, num_tiles, num_digits))


def passes_of(num_keys: int, most_bits: int) -> tuple[int, int]:
    """Return the bits of a digit and the number of passes: as few of these as there can be, and then small digits.

    Args:
        num_keys: that are sorted by.
        most_bits: that a digit may have; it has as many, or one fewer.
    """
    bits = max(1, (num_keys - 1).bit_length())
    num_passes = -(-bits // most_bits)
    return most_bits - ((most_bits - 1) * num_passes >= bits), num_passes


class Sorting(NamedTuple):
    """What a kernel sorts.

    Attributes:
        index_dtype, offset_dtype, counts, lookups: see `invert`.
        num_sort_keys: of the rows.
    """

    index_dtype: torch.dtype
    offset_dtype: torch.dtype
    counts: bool
    lookups: bool
    num_sort_keys: int


def request_for(world: World, sorting: Sorting, num_lookups: int) -> KernelRequest:
    """Return the kernel of a plan for so many lookups, any thread; see `InversionPlan`."""
    tuning: Tuning = OPERATOR.tuned(world) or _DEFAULTS[world.backend.leaves_room]
    is_small = _is_small(sorting.num_sort_keys, lookups=sorting.lookups)
    return _request_of(world, sorting, _choose_items(world, tuning, num_lookups, is_small=is_small), tuning)


def _request_of(world: World, sorting: Sorting, items: int, tuning: Tuning) -> KernelRequest:
    description, threads, is_host = OPERATOR.description, tuning.threads, world.backend.name == "host"
    digit_bits, _ = passes_of(sorting.num_sort_keys, description.constants["kMaxDigitBits"])
    entry = "SmallEntry" if _is_small(sorting.num_sort_keys, lookups=sorting.lookups) else "LargeEntry"
    arena_bytes = description.queries["arena_bytes"](
        world.backend.warps_of(threads),
        _tile_items(world, items, threads),
        1 << digit_bits,
        description.constants[f"sizeof({entry})"],
    )
    request = kernel_request(
        sorting.index_dtype,
        sorting.offset_dtype,
        is_wide=is_wide(sorting.num_sort_keys),
        lookups=sorting.lookups,
        counts=sorting.counts,
        digit_bits=digit_bits,
        items=items,
        threads=threads,
        work_groups_per_sm=tuning.work_groups_per_sm,
        arena_bytes=arena_bytes,
    )
    if is_host:  # one library for all numbers of threads
        request = request.with_config(threads=512, blocks_per_sm=2)
        request = dataclasses.replace(request, shape=LaunchShape(512))
    return request.with_config(pes=world.team.room)


def _tile_items(world: World, items: int, threads: int) -> int:
    return items * (world.backend.warps_of(threads) if world.backend.name == "host" else threads)


def kernel_request(
    index_dtype: torch.dtype,
    offset_dtype: torch.dtype,
    *,
    is_wide: bool,
    lookups: bool,
    counts: bool,
    digit_bits: int,
    items: int,
    threads: int,
    work_groups_per_sm: int,
    arena_bytes: int,
) -> KernelRequest:
    """Return the kernel request for one combination of choices."""
    return KernelRequest.of(
        _NAME,
        {
            "index": INDEX_TYPES[index_dtype],
            "offset": INDEX_TYPES[offset_dtype],
            "wide": is_wide,
            "lookups": lookups,
            "counts": counts,
            "digit_bits": digit_bits,
            "items": items,
            "threads": threads,
            "blocks_per_sm": work_groups_per_sm,
        },
        LaunchShape(threads, arena_bytes=arena_bytes),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    for has_all, digit_bits, items in ((False, 8, 8), (True, 7, 4)):
        yield kernel_request(
            torch.int64,
            torch.int64,
            is_wide=has_all,
            lookups=has_all,
            counts=has_all,
            digit_bits=digit_bits,
            items=items,
            threads=OPERATOR.default_tuning.threads,
            work_groups_per_sm=OPERATOR.default_tuning.work_groups_per_sm,
            arena_bytes=0,
        )


def is_wide(num_sort_keys: int) -> bool:
    """Return whether keys have 64 bits."""
    return num_sort_keys > _MAX_NARROW_KEYS


def _is_small(num_sort_keys: int, *, lookups: bool) -> bool:
    """Return whether a key and its payload take 8 bytes."""
    return not is_wide(num_sort_keys) and not lookups


def _choose_items(world: World, tuning: Tuning, num_lookups: int, *, is_small: bool) -> int:
    """Return how many lookups a thread has in a tile: many, as long as every WG has a tile."""
    if tuning.items is not None:
        return tuning.items
    if world.backend.name == "host":
        return _HOST_ITEMS
    wgs = tuning.work_groups or world.backend.num_sms * tuning.work_groups_per_sm
    choices = _ITEMS[8 if is_small else 16]
    return next((items for items in choices if num_lookups >= items * tuning.threads * wgs), choices[-1])


def _check(world: World, rows: Rows, indices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raise for arguments that `invert` cannot take."""
    device = world.backend.device
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in INDEX_TYPES:
            raise TypeError(f"{name}: expected int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous vector, got {list(tensor.shape)}, {tensor.stride()}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if offsets.numel() != rows.num_bags + 1:
        raise ValueError(f"offsets: expected {rows.num_bags + 1} for {rows.num_bags} bags, got {offsets.numel()}")


def invert(
    world: World,
    rows: Rows,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    counts: bool,
    lookups: bool,
    room_for: int = 0,
) -> Inverted:
    """Sort lookups by row, in one launch on the current stream.

    A lookup counts where a bag has it and its index is a row of the bag's table. The bag of a lookup is what a binary
    search of its place among the bags' ends finds (torch.searchsorted, right=True), so any offsets will do; those that
    fall have no bags that anyone meant, but the result is the same every time.

    Args:
        world: of this PE.
        rows: of the tables.
        indices: `[N]`, int32 or int64, contiguous; any numbers.
        offsets: `[T * B + 1]`, int32 or int64, contiguous: bag t * B + b has the lookups offsets[t * B + b] up to
            offsets[t * B + b + 1].
        counts: whether the result has counts.
        lookups: whether the result has lookups.
        room_for: WGs of the next launch on the stream, each no larger than one of this one, for which to leave room.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, layout or device; 2^30 lookups or more.
        RuntimeError: a CUDA-graph capture meets a combination that was not called before.

    Not collective, no host synchronization; may be captured in a CUDA graph after a first call.
    """
    _check(world, rows, indices, offsets)
    dtypes = (indices.dtype, offsets.dtype)
    plan = _plan(world, rows, dtypes, indices.numel(), counts=counts, lookups=lookups, room_for=room_for)
    if indices.numel() > plan.most_lookups:
        raise ValueError(f"indices: expected at most {plan.most_lookups} lookups, got {indices.numel()}")
    return plan.launch(indices, offsets)


def invert_sources(world: World, rows: Rows, arrived: Lookups, *, counts: bool, room_for: int = 0) -> Inverted:
    """The same for lookups that an input exchange has brought, where they are: no copy, no look at their numbers.

    N is the room for lookups; `Inverted.bags` are bags of the global batch. If the lookups have weights,
    `Inverted.lookups` are the weights' places among the floats of ``arrived.memory``. Otherwise the result is the same
    as `invert` returns for the global batch, if the tables that are one tensor have numbers in `Rows.members`.

    Args:
        world: of this PE.
        rows: of the tables, which are the slots.
        arrived: what the exchange has returned, that may be read (`Lookups.check_is_here`).
        counts: whether the result has counts.
        room_for: see `invert`.

    Raises:
        ValueError: room for 2^30 lookups or more, or regions of 4 GiB or more where there are weights.
        RuntimeError: see `invert`.

    Not collective, no host synchronization; may be captured in a CUDA graph after a first call.
    """
    dtypes = (arrived.index_dtype, torch.int32)
    plan = _plan(world, rows, dtypes, arrived.capacity, counts=counts, lookups=arrived.is_weighted, room_for=room_for)
    most = plan.most_lookups
    if arrived.capacity > most or (arrived.is_weighted and arrived.memory.nbytes // 4 > most + 1):
        raise ValueError(
            f"indices: expected room for at most {most} lookups, in regions of at most 4 GiB with their weights, got "
            f"{arrived.capacity} in {arrived.memory.nbytes} bytes"
        )
    return plan.launch_from(arrived.sources, arrived.capacities)


def _plan(
    world: World,
    rows: Rows,
    dtypes: tuple[torch.dtype, torch.dtype],
    num_lookups: int,
    *,
    counts: bool,
    lookups: bool,
    room_for: int,
) -> InversionPlan:
    state = OPERATOR.state(world)
    tuning: Tuning = state.tuning or _DEFAULTS[world.backend.leaves_room]
    is_small = _is_small(rows.num_sort_keys, lookups=lookups)
    items = _choose_items(world, tuning, num_lookups, is_small=is_small)
    key = InversionKey(world.alone, rows, *dtypes, counts, lookups, items, room_for, tuning)
    plans: Plans[InversionPlan] = state.plans
    return plans.get(key, lambda: InversionPlan(world, key))
