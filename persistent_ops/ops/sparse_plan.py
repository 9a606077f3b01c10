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
from ..runtime.contract import Contract, Field, register
from ..runtime.errors import PeerTimeoutError
from ..runtime.layout import Team
from ..runtime.world import World, upload

__all__ = [
    "GIVEN_UP",
    "MAX_ROWS",
    "OPS",
    "SCALARS",
    "TUNING",
    "Areas",
    "Layout",
    "Report",
    "Room",
    "SparsePlan",
    "SparseState",
    "Tuning",
    "kernel_request",
    "reserve",
    "state_of",
]

TUNING = "sparse_all_reduce.tuning"  # key in a world's operator_state of a Tuning other than the default one
SCALARS = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
OPS = ("sum", "mean")
MAX_ROWS = 1 << 31
_NAME = "sparse_all_reduce"
_INDICES = {torch.int32: "int32_t", torch.int64: "int64_t"}
_ROWS_PER_WORD = 64
_THREADS = 256
_MEETINGS = 3  # of a launch's WGs
_MOST_HOT = 8192  # rows of a PE that all of its warps add up
GIVEN_UP = "sparse_all_reduce: this launch was given up before po.recover()"
_HOST_WORK_GROUPS = 2
_HOST_WARPS = 64  # of a WG, at most: a thread each
_VECTOR_BYTES = 16
_LEAST_ROOM = 64  # rows
_PATIENT_BYTES = 16 << 20
_PATIENCE = 32
register(
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


class Report(ctypes.Structure):
    """What a launch tells the host; `state` is written last."""

    _fields_ = (
        ("state", ctypes.c_uint64),
        ("num_rows", ctypes.c_int64),
        ("num_shares", ctypes.c_int64),
        ("phase_ns", ctypes.c_uint64 * 4),
    )


class _RowSets(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
        ("planes_offset", ctypes.c_uint64),
        ("headers_offset", ctypes.c_uint64),
        ("first_entry", ctypes.c_uint64),
        ("totals", ctypes.c_uint64),
        ("met", ctypes.c_uint64),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("team", Team),
        ("sets", _RowSets),
        ("row_bytes", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("progress_offset", ctypes.c_uint64),
        ("num_workers", ctypes.c_int64),
        ("gather_offset", ctypes.c_uint64),
        ("low_offset", ctypes.c_uint64),
        ("rows_out", ctypes.c_uint64),
        ("num_rows_out", ctypes.c_uint64),
        ("num_entries", ctypes.c_uint64),
        ("hot", ctypes.c_uint64),
        ("report", ctypes.c_uint64),
        ("splits_partials", ctypes.c_int64),
        ("reports_overflow", ctypes.c_int64),
        ("divisor", ctypes.c_int64),
        ("all_reachable", ctypes.c_int64),
    )


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
        fitting = max(_LEAST_ROOM, -(-(num_rows + num_rows // 16) // _ROWS_PER_WORD) * _ROWS_PER_WORD)
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
            warps = _HOST_WARPS
        grid = min(grid, world.workspace.max_ready_words)
        state = world.operator_state[_NAME] = SparseState(grid, grid * warps)
    return state


def reserve(world: World, state: SparseState, layout: Layout, capacity: int, *, gathers: bool) -> Areas:
    """Make room for a launch; collective where something must grow, which it does on all PEs at once, or on none."""
    num_words = _num_words(layout)
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
                private(2 * state.grid),
                private(_MEETINGS * state.grid),
                private(1 + _MOST_HOT),
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
    return max(1, -(-layout.num_rows // _ROWS_PER_WORD))


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
    return Contract(_NAME, values)


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
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(Report))
        self.report = Report.from_address(self._mailbox.data_ptr())
        base = backend.heap_base
        plan = _Plan(
            team=world.workspace.team(_contract(world, state, layout, capacity, gathers=gathers)),
            sets=_RowSets(
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
        words = (
            rows.data_ptr(),
            0 if order is None else order.data_ptr(),
            values.data_ptr(),
            rows.numel(),
            output_offset,
        )
        world.workspace.launch(self._kernel, self._grid, self._address, words, raises_input_errors=raises_input_errors)

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
    defines = {
        "PO_SCALAR": SCALARS[dtype],
        "PO_INDEX": _INDICES[index_dtype],
        "PO_GATHERS": str(gathers).lower(),
        "PO_LANES": "32" if is_host else str(lanes),
        "PO_BYTES": str(access),
    }
    return KernelRequest(_NAME, tuple(defines.items()), ctypes.sizeof(_Plan), _THREADS)
