"""Plan of sparse_all_reduce: kernel, plans in device memory, room for row sets and progress."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.areas import Need
from ..runtime.backend import KernelRequest, LaunchShape, check_resident
from ..runtime.compile.literals import vector_bytes, warp_size
from ..runtime.contract import Contract, Field
from ..runtime.dtypes import INDEX_TYPES, SCALARS
from ..runtime.errors import CapacityError, PeerTimeoutError
from ..runtime.operator import Operator, OperatorState
from ..runtime.plans import Plan
from ..runtime.team import Team
from ..runtime.tuning import BoundedTuning, at_least
from ..runtime.workspace import InputRecord
from ..runtime.world import World, upload

__all__ = [
    "GIVEN_UP",
    "HOST_WORK_GROUPS",
    "MAX_ENTRIES",
    "MAX_ROOMS",
    "MAX_ROWS",
    "OPERATOR",
    "OPS",
    "SCALARS",
    "Entries",
    "Layout",
    "Room",
    "SparseKey",
    "SparsePlan",
    "SparseState",
    "Tuning",
    "bad_row",
    "fitting_rows",
    "gather_need",
    "kernel_request",
    "low_need",
    "room_needs",
    "sample_requests",
    "state_of",
    "warps_of",
]

OPS = ("sum", "mean")
MAX_ROWS = 1 << 31
MAX_ENTRIES = (1 << 31) - 1
MAX_ROOMS = 1024
_NAME = "sparse_all_reduce"
_GATHER = "gather"  # areas: all PEs' rows in fp32, for "allgather"
_LOW = "low"  # room for lower halves of this PE's sums
_LOOKS = 32
_THREADS = 256
GIVEN_UP = "sparse_all_reduce: this launch was given up: po.recover() or po.finalize() came before its wait"
HOST_WORK_GROUPS = 2
_LEAST_ROOM = 64  # rows
_PATIENT_BYTES = 16 << 20
_PATIENCE = 32


def bad_row(entry: int, row: int, num_rows: int) -> IndexError:
    """Return the error for an entry that is no row of the tensor."""
    return IndexError(
        f"indices: entry {entry} is row {row}, but the tensor has {num_rows} rows (valid: 0 to {num_rows - 1})"
    )


def _bad_row(record: Any) -> IndexError:
    return bad_row(record.inner, record.value, record.limit)


def _bad_count(record: Any) -> IndexError:
    return IndexError(f"count: expected 0 to {record.limit}, the number of entries, got {record.value}")


def _too_many_rows(record: Any) -> CapacityError:
    return CapacityError(
        f"out_values: the PEs have {record.value} rows together, but the capacity is {record.limit}: "
        f"{record.value - record.limit} too many. Nothing was written; pass more room in out_indices and out_values."
    )


def _not_ascending(record: Any) -> ValueError:
    return ValueError(
        f"indices: expected ascending rows, since the input is marked coalesced, got row {record.value} "
        f"after row {record.limit} at entry {record.inner}. The sums are wrong; call coalesce() first."
    )


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many as fit the GPU at once. All PEs must agree.
        gather_bytes: the most bytes of room, for all PEs' rows in fp32, before "auto" no longer lets every PE add up
            for itself.
        gather_share: the most rows per row of the union, on average, for the same.
    """

    work_groups: int | None = None
    gather_bytes: int = at_least(0, 4 << 20)
    gather_share: float = at_least(0, 1.25)


OPERATOR = Operator(
    _NAME,
    (
        Field("rows", argument="num_rows (or x.shape[0])"),
        Field.internal("columns"),
        Field.numbers("row_shape", "the shape of a row of values"),
        Field.dtype("dtype", list(SCALARS), "the dtype of values"),
        Field.flag("op", texts=("sum", "mean")),
        Field.flag("algorithm", texts=("owner", "allgather")),
        Field("capacity", argument="the capacity of out_values"),
        *map(Field.internal, ("work_groups", "planes", "gather_area", "progress_area")),
    ),
    phases={
        "kPhaseRowSet": "the set of its rows (part of its work-group {index})",
        "kPhaseShare": "its sums of rows that several PEs have (its warp {index})",
        "kPhaseRows": "its rows (its warp {index})",
    },
    input_errors={
        "kBadRow": _bad_row,
        "kBadCount": _bad_count,
        "kTooManyRows": _too_many_rows,
        "kNotAscending": _not_ascending,
    },
    default_tuning=Tuning(),
)


class Layout(NamedTuple):
    """The values that all PEs agree on in a call, besides the room for the result.

    Attributes:
        num_rows: R.
        row_shape: of a row's values.
        dtype: of the values.
        op: of OPS.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    op: str

    @property
    def columns(self) -> int:
        """Return the values of a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self.columns * self.dtype.itemsize


@functools.lru_cache(256)
def fitting_rows(layout: Layout, num_rows: int) -> int:
    """Return for how many rows there is room after a result of so many."""
    fitting = max(_LEAST_ROOM, -(-(num_rows + num_rows // 16) // _LEAST_ROOM) * _LEAST_ROOM)
    return min(fitting, max(layout.num_rows, 1))


@dataclass
class Room:
    """How many rows the next result gets room for: what the last ones had, the same on every PE.

    It also knows the launch whose number of rows the host has not read yet, of which there is one at a time.

    A result that outgrows it costs a second launch, and room that is not used costs memory. So it grows at once, and
    shrinks when results have needed less than half of it: 32 in a row up to 16 MB, one beyond.

    Attributes:
        layout: of the results.
        rows: 0 before the first result.
        num_rows: of the last result.
        shares: the shares per row seen last.
        unresolved: that launch, a `PendingSum`, or None.
        columns, row_bytes: of the layout.
        size: of the results.
        strides: of the results' values.
    """

    layout: Layout
    rows: int = 0
    num_rows: int = 0
    shares: float = 0.0
    unresolved: Any = None
    columns: int = 0
    row_bytes: int = 0
    size: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    _num_small: int = 0  # results in a row that needed less than half
    _most_of_small: int = 0

    def __post_init__(self) -> None:
        row_shape = self.layout.row_shape
        self.size = (self.layout.num_rows, *row_shape)
        self.columns, self.row_bytes = self.layout.columns, self.layout.row_bytes
        self.strides = tuple(math.prod(row_shape[i:]) for i in range(len(row_shape) + 1))

    def learn(self, num_rows: int, shares: float) -> None:
        """Take in a result's number of rows."""
        self.num_rows, self.shares = num_rows, shares
        fitting = fitting_rows(self.layout, num_rows)
        if num_rows <= self.rows and self.rows > 2 * fitting:
            self._num_small += 1
            self._most_of_small = max(self._most_of_small, fitting)
            if self._num_small < _PATIENCE and self.rows * self.layout.row_bytes <= _PATIENT_BYTES:
                return
            fitting = self._most_of_small
        elif num_rows <= self.rows:
            fitting = self.rows
        self.rows, self._num_small, self._most_of_small = fitting, 0, 0


class Entries(NamedTuple):
    """One PE's part of a sum.

    Attributes:
        rows: `[n]` or `[1, n]`, ascending.
        order: of the same shape, int64, which of the values belongs to an entry; None: they are in order and each row
            occurs once.
        values: `[n, ...]`, contiguous.
    """

    rows: torch.Tensor
    order: torch.Tensor | None
    values: torch.Tensor


class SparseState:
    """The state that a world keeps for this operator, besides plans.

    Attributes:
        kept: what it keeps besides, plans among others.
        rooms: by layout and tag, MAX_ROOMS at most.
        generation: how often the world has recovered, or been closed.
    """

    def __init__(self, kept: OperatorState) -> None:
        self.kept = kept
        self.rooms: dict[tuple[Layout, int], Room] = {}
        self.generation = 0
        self._stream: torch.cuda.Stream | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle; few, and torch makes an object each time

    def stream(self, handle: int, device: torch.device) -> torch.cuda.Stream:
        """Return a stream to ask, given its handle."""
        if handle not in self._streams:
            made = torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
            self._streams[handle] = made
        return self._streams[handle]

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of asynchronous launches, ordered after the current one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def room(self, layout: Layout, tag: int) -> Room:
        """Return what was learned about results of a layout and tag; collective."""
        room = self.rooms.get((layout, tag))
        if room is None:
            self._make_room()
            room = self.rooms[layout, tag] = Room(layout)
        return room

    def _make_room(self) -> None:
        """Drop the older half where there are too many. All PEs have had the same ones, and drop the same."""
        if len(self.rooms) < MAX_ROOMS:
            return
        for key in list(self.rooms)[: MAX_ROOMS // 2]:
            unresolved = self.rooms[key].unresolved
            if unresolved is not None:
                unresolved.resolve()
            del self.rooms[key]

    def forget(self) -> None:
        """Drop what PEs learned from launches of which some were given up."""
        self.rooms.clear()
        self.generation += 1


def state_of(world: World) -> SparseState:
    """Return the world's state of this operator."""
    state = OPERATOR.state(world)
    if state.own is None:
        state.own = SparseState(state)
    return state.own  # type: ignore[no-any-return]


class SparseKey(NamedTuple):
    """The key of a plan.

    Attributes:
        team: whose rows are summed.
        layout: what the PEs agree on.
        tuning: see `OperatorState`.
        capacity: rows that the result has room for.
        gathers: every PE adds up for itself.
        index_dtype: of the sorted row numbers.
        has_order: entries are not the values in order, so rows may have several.
        is_aligned: whether rows of values and results begin at multiples of 16 bytes.
        is_into: results go to the caller's buffers, too many rows are an error.
        tag: distinguishes plans that differ only in where they report.
    """

    team: Team
    layout: Layout
    tuning: Tuning | None
    capacity: int
    gathers: bool
    index_dtype: torch.dtype
    has_order: bool
    is_aligned: bool
    is_into: bool
    tag: int = 0


def _words_of(layout: Layout) -> int:
    """Return the words that have a bit per row."""
    return max(1, -(-layout.num_rows // OPERATOR.description.constants["kRowsPerWord"]))


def _power_of_two(number: int) -> int:
    """Return the least one that is no less."""
    return 1 << (number - 1).bit_length()


def warps_of(backend_name: str) -> int:
    """Return the warps of a work-group."""
    return OPERATOR.description.constants["kMaxWarps"] if backend_name == "host" else _THREADS // warp_size()


def room_needs(world_size: int, layout: Layout, workers: int, put_rows: int = 0, last: int = 0) -> list[Need]:
    """Return the areas of every launch.

    Args:
        world_size, layout: see above.
        workers: warps of a launch.
        put_rows: where some peers are not reachable, rows for which the result has room.
        last: bytes that the area with flags of rows had.
    """
    num_words, flags = _words_of(layout), (world_size + 1) * put_rows  # `RowTransfer::flag_offset`
    return [
        Need("headers", world_size * 8, fill=0),
        Need("progress", (world_size * workers + flags) * 8, last + last // 2 if flags else 0, fill=0),
        Need("planes", world_size * num_words * 8, world_size * _power_of_two(num_words) * 8),
    ]


def gather_need(world_size: int, layout: Layout, capacity: int) -> Need:
    """Return the area where all PEs' rows come; `capacity`: of the result, in rows."""
    return Need(_GATHER, world_size * capacity * layout.columns * 4)


def low_need(layout: Layout, capacity: int) -> Need:
    """Return this PE's area for lower halves of sums in 16 bits; `capacity`: of the result, in rows."""
    return Need(_LOW, capacity * layout.row_bytes)


class SparsePlan(Plan):
    """One key's kernel and plan. Making it is collective where symmetric areas must grow, on all PEs or on none.

    Attributes:
        capacity, gathers: of the key.
        report: of the last launch.
    """

    def __init__(self, world: World, key: SparseKey) -> None:
        backend, layout, team = world.backend, key.layout, key.team
        structs = OPERATOR.prepare(world).structs
        tuning: Tuning = key.tuning or OPERATOR.default_tuning
        is_host = backend.name == "host"
        grid = tuning.work_groups or (HOST_WORK_GROUPS if is_host else backend.num_sms * backend.default_blocks_per_sm)
        self._grid = grid = min(grid, world.workspace.max_ready_words - 1)  # a header that is put has a word, too
        workers = grid * warps_of(backend.name)
        num_words = _words_of(layout)
        self._world, self._key, self._areas = world, key, OPERATOR.state(world).areas
        is_narrow = layout.dtype.itemsize == 2
        uses_low = bool(is_narrow and not key.gathers and (key.has_order or not team.all_reachable) and key.capacity)
        self._reserve(num_words, workers, low_need(layout, key.capacity) if uses_low else None)
        own = (_GATHER,) * key.gathers + (_LOW,) * uses_low
        self.areas = ("headers", "progress", "planes", "first_entry", "totals", "met", "hot", *own)
        request = kernel_request(
            layout.dtype,
            key.index_dtype,
            row_bytes=layout.row_bytes,
            is_aligned=key.is_aligned,
            gathers=key.gathers,
            is_host=is_host,
        ).with_config(pes=team.room)
        self._kernel = world.load(request, key.team)
        check_resident(self._kernel, grid)
        self.capacity = key.capacity
        self.gathers = key.gathers
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(structs["Report"]))
        self.report: Any = structs["Report"].from_address(self._mailbox.data_ptr())
        self._input = None if key.is_into else InputRecord(backend)
        self._struct: Any = structs["Plan"](
            row_bytes=layout.row_bytes,
            capacity=key.capacity,
            num_workers=workers,
            report=ctypes.addressof(self.report),
            splits_partials=int(uses_low and key.has_order),
            reports_overflow=int(key.is_into),
            divisor=team.size if layout.op == "mean" else 1,
            all_reachable=int(team.all_reachable),
        )
        self._struct.sets.num_rows, self._struct.sets.num_words = layout.num_rows, num_words
        self._new_call = structs["Call"]
        self.place()

    def _reserve(self, num_words: int, workers: int, own: Need | None) -> None:
        """Prepare the memory that every launch needs; collective where the symmetric areas must grow."""
        constants, areas, key = OPERATOR.description.constants, self._areas, self._key
        put_rows = 0 if key.team.all_reachable else key.capacity
        needs = room_needs(key.team.size, key.layout, workers, put_rows, areas.nbytes_of("progress"))
        if key.gathers:
            last = areas.nbytes_of(_GATHER)
            needs.append(gather_need(key.team.size, key.layout, key.capacity)._replace(room=last + last // 2))
        areas.reserve(needs, self._contract, own)
        areas.reserve_private("first_entry", num_words * 4, _power_of_two(num_words) * 4)
        areas.reserve_private("totals", constants["sizeof(Packet)"] * self._grid)
        areas.reserve_private("met", constants["kNumMeetings"] * self._grid * 8)
        areas.reserve_private("hot", constants["sizeof(HotList)"])

    def _contract(self) -> Contract:
        key, areas = self._key, self._areas
        planes, progress = areas.get("planes"), areas.get("progress")
        gather = areas.get(_GATHER) if key.gathers else None
        return OPERATOR.contract(
            key.team,
            key.layout.num_rows,
            key.layout.columns,
            key.layout.row_shape,
            key.layout.dtype,
            key.layout.op == "mean",
            key.gathers,
            key.capacity,
            self._grid,
            planes.offset if planes else 0,
            gather.offset if gather else 0,
            progress.offset if progress else 0,
        )

    def place(self) -> None:
        areas, struct, sets = self._areas, self._struct, self._struct.sets
        self.held = tuple(areas[name] for name in self.areas)
        struct.team = self._world.workspace.team(self._contract())
        if self._input is not None:
            struct.team.input_error = self._input.address
        sets.planes_offset, sets.headers_offset = areas["planes"].offset, areas["headers"].offset
        sets.first_entry, sets.totals = areas["first_entry"].address, areas["totals"].address
        sets.met, struct.hot = areas["met"].address, areas["hot"].address
        struct.progress_offset = areas["progress"].offset
        struct.gather_offset = areas[_GATHER].offset if _GATHER in self.areas else 0
        struct.low_offset = areas[_LOW].offset if _LOW in self.areas else 0
        self._words = upload(self._world.backend, struct)
        self._address = self._words.data_ptr()

    def launch(self, entries: Entries, output_offset: int, into: tuple[int, int, int] | None = None) -> None:
        """Launch on the current stream.

        Args:
            entries: of this PE.
            output_offset: of the result's values in this PE's heap.
            into: addresses of the caller's row numbers, of their number, and of the number of valid entries or 0.
                Without them, bad input is for `take_problem`.
        """
        self.report.state = 0
        if self._input is not None:
            self._input.clear()
        call, rows, order = self._new_call(), entries.rows, entries.order
        call.rows = rows.data_ptr()
        call.order = 0 if order is None else order.data_ptr()
        call.values = entries.values.data_ptr()
        call.num_entries = rows.numel()
        call.output_offset = output_offset
        if into is not None:
            call.rows_out, call.num_rows_out, call.num_valid = into
        self._world.workspace.launch(
            self._kernel, self._grid, self._address, call, raises_input_errors=into is not None
        )

    def take_problem(self) -> Exception | None:
        """Return what the last launch has found wrong with its entries, after its report; without `into`, and once."""
        assert self._input is not None
        return self._input.take()

    def await_report(self, world: World, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Wait for the last launch's number of rows, but not for its rows; return it and the shares per row.

        `is_over`: whether the launch has ended.
        """
        report, looks = self.report, 0
        while not report.state:
            looks += 1  # asking for the launch's end costs more than a look
            if looks % _LOOKS == 0 and is_over() and not report.state:
                world.workspace.raise_failure()
                raise PeerTimeoutError(GIVEN_UP)
        num_rows = report.num_rows
        return num_rows, report.num_shares / max(num_rows, 1)


def kernel_request(
    dtype: torch.dtype, index_dtype: torch.dtype, *, row_bytes: int, is_aligned: bool, gathers: bool, is_host: bool
) -> KernelRequest:
    """Return the kernel request for rows of a kind."""
    access = vector_bytes() if is_aligned else dtype.itemsize
    lanes = next((n for n in (1, 4, 8, 16) if n * access >= row_bytes), warp_size())
    return KernelRequest.of(
        _NAME,
        {
            "scalar": SCALARS[dtype],
            "index": INDEX_TYPES[index_dtype],
            "gathers": gathers,
            "lanes": warp_size() if is_host else lanes,
            "bytes": access,
            "threads": _THREADS,
        },
        LaunchShape(_THREADS),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    dtypes = torch.bfloat16, torch.int64
    yield kernel_request(*dtypes, row_bytes=8192, is_aligned=True, gathers=False, is_host=False)
    yield kernel_request(torch.float16, torch.int64, row_bytes=8192, is_aligned=True, gathers=True, is_host=False)
    yield kernel_request(torch.float32, torch.int32, row_bytes=60, is_aligned=False, gathers=False, is_host=False)
