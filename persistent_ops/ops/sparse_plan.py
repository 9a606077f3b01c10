"""What sparse_all_reduce needs again at every call: kernel, plans in device memory, room for row sets and progress."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.backend import Kernel, KernelRequest
from ..runtime.contract import Contract, register
from ..runtime.errors import PeerTimeoutError
from ..runtime.layout import Team
from ..runtime.world import World, upload

__all__ = [
    "GIVEN_UP",
    "MAX_ROWS",
    "OPS",
    "SCALARS",
    "TUNING",
    "Layout",
    "Report",
    "SparsePlan",
    "SparseState",
    "Tuning",
    "kernel_request",
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
GIVEN_UP = "sparse_all_reduce: this launch was given up before po.recover()"
_HOST_WORK_GROUPS = 2
_VECTOR_BYTES = 16
register(
    _NAME,
    ("world_size", "rows", "columns", "dtype", "mean", "gathers", "capacity", "work_groups"),
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
        ("listed", ctypes.c_uint64),
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
class SparseState:
    """What a world keeps for this operator.

    Attributes:
        grid: WGs of every launch.
        workers: warps of all WGs.
        headers, progress: symmetric memory.
        planes: symmetric memory for the row sets of all PEs, as many words for each as `plane_words`.
        first_entry: private, of the same length.
        totals, listed: private.
        plans: by signature.
        rooms: by layout, the rows that results had room for, and the shares per row seen last; the same on every PE.
        unresolved: the launch whose count of rows the host has not read yet.
        stream: of asynchronous launches.
    """

    grid: int
    workers: int
    headers: torch.Tensor
    progress: torch.Tensor
    totals: torch.Tensor
    listed: torch.Tensor
    planes: torch.Tensor | None = None
    first_entry: torch.Tensor | None = None
    plane_words: int = 0
    gather: torch.Tensor | None = None
    plans: dict[tuple[Any, ...], SparsePlan] = field(default_factory=dict)
    rooms: dict[Layout, tuple[int, float]] = field(default_factory=dict)
    unresolved: Any = None
    stream: Any = None

    def forget(self) -> None:
        """Drop what PEs learned from launches of which some were given up."""
        self.rooms.clear()
        if self.unresolved is not None:
            self.unresolved.fail()


def state_of(world: World) -> SparseState:
    """Return the world's state of this operator; collective the first time."""
    state: SparseState | None = world.operator_state.get(_NAME)
    if state is None:
        tuning: Tuning = world.operator_state.get(TUNING) or Tuning()
        backend = world.backend
        grid = tuning.work_groups or backend.num_sms * backend.default_blocks_per_sm
        warps = _THREADS // 32
        if backend.name == "host":
            grid = tuning.work_groups or _HOST_WORK_GROUPS
            warps = 64  # at most: a thread each
        grid = min(grid, world.workspace.max_ready_words)
        headers = world.heap.empty((world.size,), torch.int64)
        progress = world.heap.empty((world.size * grid * warps,), torch.int64)
        for area in (headers, progress):
            area.zero_()
        backend.synchronize()
        world.bootstrap.exchange("sparse-areas", b"")  # no flag comes before the areas are zero
        state = SparseState(
            grid, grid * warps, headers, progress, backend.private_words(2 * grid), backend.private_words(grid)
        )
        world.operator_state[_NAME] = state
    return state


def _reserve_planes(world: World, state: SparseState, num_words: int) -> None:
    """Make room for row sets of `num_words`; collective where it grows. Earlier plans keep what they were made with."""
    if state.plane_words >= num_words:
        return
    words = 1 << (num_words - 1).bit_length()
    state.planes = world.heap.empty((world.size * words,), torch.int64)
    state.first_entry = world.backend.private_words((words + 1) // 2)
    state.plane_words = words


def _reserve_gather(world: World, state: SparseState, nbytes: int) -> None:
    """Make room for all PEs' rows in fp32; collective where it grows. The old room goes where no graph uses it."""
    if state.gather is not None and state.gather.nbytes >= nbytes:
        return
    users = {key for key, plan in state.plans.items() if plan.gathers}
    if state.gather is not None and not any(state.plans[key] in world.captured for key in users):
        world.backend.synchronize()
        for key in users:
            del state.plans[key]
        world.heap.free(state.gather)
    state.gather = world.heap.empty((-(-nbytes // 8),), torch.int64)


class SparsePlan:
    """One signature's kernel and plan. Made by all PEs together.

    Attributes:
        layout, capacity, gathers: see below.
        report: what the last launch told.

    Args:
        world: of this PE.
        layout: what the PEs agree on.
        capacity: rows that the result has room for.
        index_dtype: of the sorted row numbers.
        is_aligned: whether rows of values and results begin at multiples of 16 bytes.
        gathers: every PE adds up for itself.
        has_order: entries are not the values in order, so rows may have several.
        outputs: tensors that every launch writes: rows, number of rows; None for results of the operator's own.
        count: tensor with the number of valid entries, or None.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        capacity: int,
        index_dtype: torch.dtype,
        *,
        is_aligned: bool,
        gathers: bool,
        has_order: bool,
        outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
        count: torch.Tensor | None = None,
    ) -> None:
        if world.workspace.is_capturing():
            raise RuntimeError(
                "sparse_all_reduce: the first call with these shapes compiles and loads its kernel, which a CUDA-graph "
                "capture cannot do: call it once before the capture, with the same buffers"
            )
        state = state_of(world)
        backend = world.backend
        num_words = max(1, -(-layout.num_rows // _ROWS_PER_WORD))
        _reserve_planes(world, state, num_words)
        is_narrow = layout.dtype.itemsize == 2
        low_offset = 0
        self._low: torch.Tensor | None = None
        if is_narrow and not gathers and (has_order or not world.all_reachable) and capacity:
            slot = world.outputs.take(capacity * layout.row_bytes, backend.stream(), is_captured=False)
            self._low = slot.tensor(torch.uint8, (capacity * layout.row_bytes,))
            low_offset = slot.offset
        if gathers:
            _reserve_gather(world, state, max(8, world.size * capacity * layout.columns * 4))
        request = kernel_request(
            layout.dtype,
            index_dtype,
            row_bytes=layout.row_bytes,
            is_aligned=is_aligned,
            gathers=gathers,
            is_host=backend.name == "host",
        )
        self._kernel: Kernel = backend.load(request)
        if backend.name == "cuda" and self._kernel.max_blocks_per_sm() * backend.num_sms < state.grid:
            raise ValueError(f"work_groups: {state.grid} WGs of this kernel do not fit the GPU at once")
        # What the plan points to must live as long as it does.
        self._held = (state.planes, state.first_entry, state.gather, outputs, count)
        self._grid = state.grid
        self.layout = layout
        self.capacity = capacity
        self.gathers = gathers
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(Report))
        self.report = Report.from_address(self._mailbox.data_ptr())
        values = (
            world.size,
            layout.num_rows,
            layout.columns,
            list(SCALARS).index(layout.dtype),
            int(layout.op == "mean"),
            int(gathers),
            capacity,
            state.grid,
        )
        base = backend.heap_base
        assert state.planes is not None and state.first_entry is not None
        plan = _Plan(
            team=world.workspace.team(Contract(_NAME, values)),
            sets=_RowSets(
                num_rows=layout.num_rows,
                num_words=num_words,
                planes_offset=state.planes.data_ptr() - base,
                headers_offset=state.headers.data_ptr() - base,
                first_entry=state.first_entry.data_ptr(),
                totals=state.totals.data_ptr(),
                listed=state.listed.data_ptr(),
            ),
            row_bytes=layout.row_bytes,
            capacity=capacity,
            progress_offset=state.progress.data_ptr() - base,
            num_workers=state.workers,
            gather_offset=0 if state.gather is None else state.gather.data_ptr() - base,
            low_offset=low_offset,
            rows_out=0 if outputs is None else outputs[0].data_ptr(),
            num_rows_out=0 if outputs is None else outputs[1].data_ptr(),
            num_entries=0 if count is None else count.data_ptr(),
            report=ctypes.addressof(self.report),
            splits_partials=int(is_narrow and has_order and low_offset != 0),
            reports_overflow=int(outputs is not None),
            divisor=world.size if layout.op == "mean" else 1,
            all_reachable=int(world.all_reachable),
        )
        self._words = upload(backend, bytes(plan))
        self._address = self._words.data_ptr()

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
