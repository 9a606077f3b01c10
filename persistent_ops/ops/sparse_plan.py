"""What sparse_all_reduce needs again at every call: kernel, plans in device memory, room for row sets and progress."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.backend import Kernel, KernelRequest
from ..runtime.contract import Contract, Field
from ..runtime.dtypes import INDEX_TYPES, SCALARS
from ..runtime.errors import CapacityError, PeerTimeoutError
from ..runtime.operator import Operator
from ..runtime.world import World, upload

__all__ = [
    "GIVEN_UP",
    "MAX_ROWS",
    "OPERATOR",
    "OPS",
    "SCALARS",
    "TUNING",
    "Areas",
    "Layout",
    "Room",
    "SparsePlan",
    "SparseState",
    "Tuning",
    "kernel_request",
    "reserve",
    "state_of",
]

TUNING = "sparse_all_reduce.tuning"  # key in a world's operator_state of a Tuning other than the default one
OPS = ("sum", "mean")
MAX_ROWS = 1 << 31
_NAME = "sparse_all_reduce"
_THREADS = 256
GIVEN_UP = "sparse_all_reduce: this launch was given up before po.recover()"
_HOST_WORK_GROUPS = 2
_VECTOR_BYTES = 16
_LEAST_ROOM = 64  # rows
_PATIENT_BYTES = 16 << 20
_PATIENCE = 32


def _bad_row(record: Any) -> IndexError:
    return IndexError(
        f"indices: entry {record.inner} is row {record.value}, but the tensor has {record.limit} rows (valid: 0 to "
        f"{record.limit - 1})"
    )


def _bad_count(record: Any) -> IndexError:
    return IndexError(f"count: {record.value} entries are not within 0 to {record.limit}, those there are")


def _too_many_rows(record: Any) -> CapacityError:
    return CapacityError(
        f"out_values: the PEs have {record.value} rows together, capacity {record.limit}: "
        f"{record.value - record.limit} too many; nothing was written"
    )


def _not_ascending(record: Any) -> ValueError:
    return ValueError(
        f"indices: entry {record.inner} is row {record.value}, behind row {record.limit}, in what was said to be "
        "coalesced; the sums are wrong"
    )


OPERATOR = Operator(
    _NAME,
    (
        "world_size",
        "rows",
        "columns",
        Field.numbers("row_shape"),
        Field.dtype("dtype", list(SCALARS)),
        Field.flag("mean"),
        Field.flag("gathers"),
        "capacity",
        "work_groups",
        "planes",
        "gather_area",
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
)


@dataclass(frozen=True)
class Tuning:
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many as fit the GPU at once. All PEs must agree.
        gather_bytes: the most bytes of room, for all PEs' rows in fp32, before "auto" no longer lets every PE add up
            for itself.
        gather_share: the most rows per row of the union, on average, for the same.
    """

    work_groups: int | None = None
    gather_bytes: int = 4 << 20
    gather_share: float = 1.25


@dataclass(frozen=True)
class Layout:
    """What all PEs agree on in a call, beside the room for the result.

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
        """Values of a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * self.dtype.itemsize


@dataclass
class Areas:
    """Symmetric memory of the operator, and what goes with it. Grows; a CUDA graph keeps what it was captured with.

    Attributes:
        headers, progress: symmetric.
        totals, met, hot: private.
        plane_words: of one PE's row set.
        planes: symmetric, a row set per PE.
        first_entry: private, a 32-bit number per word.
        gather: symmetric, all PEs' rows in fp32; None before "allgather" was used.
    """

    headers: torch.Tensor
    progress: torch.Tensor
    totals: torch.Tensor
    met: torch.Tensor
    hot: torch.Tensor
    plane_words: int
    planes: torch.Tensor
    first_entry: torch.Tensor
    gather: torch.Tensor | None = None


@dataclass
class Room:
    """How many rows the next result gets room for: what the last ones had, the same on every PE.

    It also knows the launch whose number of rows the host has not read yet, of which there is one at a time.

    A result that outgrows it costs a second launch, and room that is not used costs memory. So it grows at once, and
    shrinks when results have needed less than half of it: 32 in a row up to 16 MB, one beyond.

    Attributes:
        layout: of the results.
        rows: 0 before the first result.
        shares: the shares per row seen last.
        unresolved: that launch, a `PendingSum`, or None.
    """

    layout: Layout
    rows: int = 0
    shares: float = 0.0
    unresolved: Any = None
    _num_small: int = 0  # results in a row that needed less than half
    _most_of_small: int = 0

    def learn(self, num_rows: int, shares: float) -> None:
        """Take in a result's number of rows."""
        self.shares = shares
        fitting = max(_LEAST_ROOM, -(-(num_rows + num_rows // 16) // _LEAST_ROOM) * _LEAST_ROOM)
        fitting = min(fitting, max(self.layout.num_rows, 1))
        if num_rows <= self.rows and self.rows > 2 * fitting:
            self._num_small += 1
            self._most_of_small = max(self._most_of_small, fitting)
            if self._num_small < _PATIENCE and self.rows * self.layout.row_bytes <= _PATIENT_BYTES:
                return
            fitting = self._most_of_small
        elif num_rows <= self.rows:
            fitting = self.rows
        self.rows, self._num_small, self._most_of_small = fitting, 0, 0


@dataclass
class SparseState:
    """What a world keeps for this operator.

    Attributes:
        grid: WGs of every launch.
        workers: warps of all WGs.
        areas: None before the first call.
        low: room for lower halves of this PE's sums, and its offset; None before it is needed.
        kernels: that were loaded.
        plans: by signature.
        rooms: by layout and tag.
        stream: of asynchronous launches.
        generation: how often the world has recovered.
    """

    grid: int
    workers: int
    areas: Areas | None = None
    low: tuple[torch.Tensor, int] | None = None
    kernels: dict[KernelRequest, Kernel] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], SparsePlan] = field(default_factory=dict)
    rooms: dict[tuple[Layout, int], Room] = field(default_factory=dict)
    stream: Any = None
    generation: int = 0

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of asynchronous launches, ordered behind the current one."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        return self.stream  # type: ignore[no-any-return]

    def room(self, layout: Layout, tag: int) -> Room:
        """Return what was learned about results of a layout and tag."""
        room = self.rooms.get((layout, tag))
        if room is None:
            room = self.rooms[layout, tag] = Room(layout)
        return room

    def forget(self) -> None:
        """Drop what PEs learned from launches of which some were given up."""
        self.rooms.clear()
        self.generation += 1


def state_of(world: World) -> SparseState:
    """Return the world's state of this operator; it has no areas yet the first time."""
    state: SparseState | None = world.operator_state.get(_NAME)
    if state is None:
        tuning: Tuning = world.operator_state.get(TUNING) or Tuning()
        backend = world.backend
        grid = tuning.work_groups or backend.num_sms * backend.default_blocks_per_sm
        warps = _THREADS // 32
        if backend.name == "host":
            grid = tuning.work_groups or _HOST_WORK_GROUPS
            warps = OPERATOR.prepare(world).constants["kMaxWarps"]
        grid = min(grid, world.workspace.max_ready_words)
        state = world.operator_state[_NAME] = SparseState(grid, grid * warps)
    return state


def reserve(world: World, state: SparseState, layout: Layout, capacity: int, *, gathers: bool) -> Areas:
    """Make room for a launch; collective where something must grow, which it does on all PEs at once, or on none."""
    num_words, constants = _num_words(layout), OPERATOR.description.constants
    gather_bytes = max(8, world.size * capacity * layout.columns * 4) if gathers else 0
    areas = state.areas
    has_gather = not gathers or (areas is not None and areas.gather is not None and areas.gather.nbytes >= gather_bytes)
    if areas is not None and areas.plane_words >= num_words and has_gather:
        return areas
    world.meet(_contract(world, state, layout, capacity, gathers=gathers))
    if areas is None:
        headers = world.heap.empty((world.size,), torch.int64)
        progress = world.heap.empty((world.size * state.workers,), torch.int64)
        for flags in (headers, progress):
            flags.zero_()
    if areas is None or areas.plane_words < num_words:
        words = 1 << (num_words - 1).bit_length()
        first_entry = world.backend.private_words((words + 1) // 2)
        planes = world.heap.empty((world.size * words,), torch.int64)
        if areas is None:
            private = world.backend.private_words
            areas = Areas(
                headers,
                progress,
                private(constants["sizeof(Packet)"] // 8 * state.grid),
                private(constants["kNumMeetings"] * state.grid),
                private(constants["sizeof(HotList)"] // 8),
                words,
                planes,
                first_entry,
            )
        else:
            areas = dataclasses.replace(areas, plane_words=words, planes=planes, first_entry=first_entry)
    if gathers and (areas.gather is None or areas.gather.nbytes < gather_bytes):
        last = 0 if areas.gather is None else areas.gather.nbytes
        room = max(gather_bytes, last + last // 2)
        areas = dataclasses.replace(areas, gather=world.heap.empty((-(-room // 8),), torch.int64))
    world.backend.synchronize()
    world.bootstrap.exchange("sparse-areas", b"")  # no flag comes before the areas are zero
    state.areas = areas
    # Plans of graphs live on with the areas that they know; all others are to name the same as on the other PEs.
    state.plans = {signature: plan.renewed(world, state) for signature, plan in state.plans.items()}
    return areas


def _reserve_low(world: World, state: SparseState, nbytes: int) -> int:
    """Make room for lower halves on this PE; return its offset."""
    if state.low is None or state.low[0].nbytes < nbytes:
        world.backend.synchronize()  # launches in flight may still use the last room
        slot = world.outputs.take(nbytes, world.backend.stream(), is_captured=False)
        state.low = slot.tensor(torch.uint8, (nbytes,)), slot.offset
        for signature, plan in state.plans.items():
            if plan.uses_low:
                state.plans[signature] = plan.renewed(world, state)
    return state.low[1]


def _num_words(layout: Layout) -> int:
    return max(1, -(-layout.num_rows // OPERATOR.description.constants["kRowsPerWord"]))


def _contract(world: World, state: SparseState, layout: Layout, capacity: int, *, gathers: bool) -> Contract:
    areas, base = state.areas, world.backend.heap_base
    values = (
        world.size,
        layout.num_rows,
        layout.columns,
        layout.row_shape,
        layout.dtype,
        layout.op == "mean",
        gathers,
        capacity,
        state.grid,
        0 if areas is None else areas.planes.data_ptr() - base,
        0 if areas is None or areas.gather is None or not gathers else areas.gather.data_ptr() - base,
    )
    return OPERATOR.contract(*values)


class SparsePlan:
    """One signature's kernel and plan; there is room for it already (`reserve`).

    Attributes:
        layout, capacity, gathers: see below.
        uses_low: whether it refers to `SparseState.low`.
        report: what the last launch told.

    Args:
        world: of this PE.
        state: of the operator.
        layout: what the PEs agree on.
        capacity: rows that the result has room for.
        index_dtype: of the sorted row numbers.
        is_aligned: whether rows of values and results begin at multiples of 16 bytes.
        gathers: every PE adds up for itself.
        has_order: entries are not the values in order, so rows may have several.
        outputs: addresses of what every launch writes: rows, number of rows; 0 for results of the operator's own.
        count: address of the number of valid entries, or 0.
    """

    def __init__(
        self,
        world: World,
        state: SparseState,
        layout: Layout,
        capacity: int,
        index_dtype: torch.dtype,
        *,
        is_aligned: bool,
        gathers: bool,
        has_order: bool,
        outputs: tuple[int, int] = (0, 0),
        count: int = 0,
    ) -> None:
        backend, areas = world.backend, state.areas
        assert areas is not None
        is_narrow = layout.dtype.itemsize == 2
        self.uses_low = bool(is_narrow and not gathers and (has_order or not world.all_reachable) and capacity)
        low_offset = _reserve_low(world, state, capacity * layout.row_bytes) if self.uses_low else 0
        request = kernel_request(
            layout.dtype,
            index_dtype,
            row_bytes=layout.row_bytes,
            is_aligned=is_aligned,
            gathers=gathers,
            is_host=backend.name == "host",
        )
        if request not in state.kernels:
            state.kernels[request] = world.load(request)
        self._kernel = state.kernels[request]
        if backend.name == "cuda" and self._kernel.max_blocks_per_sm() * backend.num_sms < state.grid:
            raise ValueError(f"work_groups: {state.grid} WGs of this kernel do not fit the GPU at once")
        self._remake = functools.partial(
            SparsePlan,
            layout=layout,
            capacity=capacity,
            index_dtype=index_dtype,
            is_aligned=is_aligned,
            gathers=gathers,
            has_order=has_order,
            outputs=outputs,
            count=count,
        )
        # What the plan points to must live as long as it does.
        self._held = (areas, state.low)
        self._grid = state.grid
        self.layout = layout
        self.capacity = capacity
        self.gathers = gathers
        structs = OPERATOR.description.structs
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(structs["Report"]))
        self.report: Any = structs["Report"].from_address(self._mailbox.data_ptr())
        base = backend.heap_base
        plan = structs["Plan"](
            team=world.workspace.team(_contract(world, state, layout, capacity, gathers=gathers)),
            sets=structs["RowSets"](
                num_rows=layout.num_rows,
                num_words=_num_words(layout),
                planes_offset=areas.planes.data_ptr() - base,
                headers_offset=areas.headers.data_ptr() - base,
                first_entry=areas.first_entry.data_ptr(),
                totals=areas.totals.data_ptr(),
                met=areas.met.data_ptr(),
            ),
            row_bytes=layout.row_bytes,
            capacity=capacity,
            progress_offset=areas.progress.data_ptr() - base,
            num_workers=state.workers,
            gather_offset=0 if areas.gather is None else areas.gather.data_ptr() - base,
            low_offset=low_offset,
            rows_out=outputs[0],
            num_rows_out=outputs[1],
            num_entries=count,
            hot=areas.hot.data_ptr(),
            report=ctypes.addressof(self.report),
            splits_partials=int(self.uses_low and has_order),
            reports_overflow=int(outputs[1] != 0),
            divisor=world.size if layout.op == "mean" else 1,
            all_reachable=int(world.all_reachable),
        )
        self._call = structs["Call"]()
        self._words = upload(backend, bytes(plan))
        self._address = self._words.data_ptr()

    def renewed(self, world: World, state: SparseState) -> SparsePlan:
        """Return the same plan for the areas that there are now."""
        return self._remake(world, state)

    def launch(
        self,
        world: World,
        rows: torch.Tensor,
        order: torch.Tensor | None,
        values: torch.Tensor,
        output_offset: int,
        *,
        raises_input_errors: bool,
    ) -> None:
        """Launch on the current stream.

        Args:
            world: of this PE.
            rows: `[n]`, ascending.
            order: `[n]`, which of the values belongs to an entry; None where they are in order.
            values: `[n, ...]`, contiguous.
            output_offset: of the result's values in this PE's heap.
            raises_input_errors: see `Workspace.launch`.
        """
        self.report.state = 0
        call = self._call
        call.rows = rows.data_ptr()
        call.order = 0 if order is None else order.data_ptr()
        call.values = values.data_ptr()
        call.num_entries = rows.numel()
        call.output_offset = output_offset
        world.workspace.launch(self._kernel, self._grid, self._address, call, raises_input_errors=raises_input_errors)

    def await_report(self, world: World, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Wait for the last launch's number of rows, but not for its rows; return it and the shares per row.

        `is_over`: whether the launch has ended.
        """
        while not self.report.state:
            if is_over() and not self.report.state:
                world.workspace.raise_failure()
                raise PeerTimeoutError(GIVEN_UP)
        num_rows = int(self.report.num_rows)
        return num_rows, self.report.num_shares / max(num_rows, 1)


def kernel_request(
    dtype: torch.dtype, index_dtype: torch.dtype, *, row_bytes: int, is_aligned: bool, gathers: bool, is_host: bool
) -> KernelRequest:
    """Return what is compiled for rows of a kind."""
    access = _VECTOR_BYTES if is_aligned else dtype.itemsize
    lanes = next((n for n in (1, 4, 8, 16) if n * access >= row_bytes), 32)
    config = {
        "scalar": SCALARS[dtype],
        "index": INDEX_TYPES[index_dtype],
        "gathers": str(gathers).lower(),
        "lanes": "32" if is_host else str(lanes),
        "bytes": str(access),
        "threads": str(_THREADS),
    }
    return KernelRequest(_NAME, tuple(config.items()), _THREADS)
