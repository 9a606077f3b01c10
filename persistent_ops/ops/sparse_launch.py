"""Launches of sparse_all_reduce: entries in order, plans, and the wait for a number of rows nobody knows beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.errors import PeerLostError, PeerTimeoutError
from ..runtime.world import World
from .sparse_plan import GIVEN_UP, OPERATOR, TUNING, Layout, Room, SparsePlan, Tuning, reserve, state_of

__all__ = ["Entries", "PendingSum", "Wanted", "find_plan", "refuse_capture", "sorted_entries", "start"]


@dataclass(frozen=True)
class Entries:
    """One PE's part of a sum.

    Attributes:
        rows: `[n]`, ascending.
        order: `[n]`, int64, which of the values belongs to an entry; None: they are in order and each row occurs once.
        values: `[n, ...]`, contiguous.
    """

    rows: torch.Tensor
    order: torch.Tensor | None
    values: torch.Tensor


def sorted_entries(indices: torch.Tensor, values: torch.Tensor, count: torch.Tensor | None = None) -> Entries:
    """Return entries in order of rows, those of one row in order of occurrence, those behind `count` last."""
    if count is not None:
        number = torch.arange(indices.numel(), dtype=torch.int64, device=indices.device)
        indices = torch.where(number < count, indices, torch.iinfo(indices.dtype).max)
    rows, order = torch.sort(indices, stable=True)
    return Entries(rows, order, values)


# ---- plans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What a launch is to be: a plan's signature, with the tensors behind it.

    Attributes:
        layout, capacity, gathers: see `SparsePlan`.
        entries: of this PE.
        is_aligned: see `SparsePlan`.
        outputs, count: see `SparsePlan`.
        tag: tells plans apart that are the same but for where they report.
    """

    layout: Layout
    capacity: int
    gathers: bool
    entries: Entries
    is_aligned: bool
    outputs: tuple[int, int] = (0, 0)
    count: int = 0
    tag: int = 0

    def signature(self) -> tuple[object, ...]:
        """Return what tells plans apart."""
        has_order = self.entries.order is not None
        kind = (self.capacity, self.gathers, self.entries.rows.dtype, has_order, self.is_aligned)
        return (self.layout, *kind, *self.outputs, self.count, self.tag)


def find_plan(world: World, wanted: Wanted) -> SparsePlan:
    """Return the plan of a launch; collective, on all PEs alike, where areas must grow for it.

    Raises:
        RuntimeError: it would have to be made in a CUDA-graph capture.
    """
    state = state_of(world)
    signature = wanted.signature()
    plan = state.plans.get(signature)
    if plan is not None:
        return plan
    OPERATOR.begin_plan(world)
    reserve(world, state, wanted.layout, wanted.capacity, gathers=wanted.gathers)
    plan = SparsePlan(
        world,
        state,
        wanted.layout,
        wanted.capacity,
        wanted.entries.rows.dtype,
        is_aligned=wanted.is_aligned,
        gathers=wanted.gathers,
        has_order=wanted.entries.order is not None,
        outputs=wanted.outputs,
        count=wanted.count,
    )
    return OPERATOR.keep(world, state.plans, signature, plan)


# ---- results of a size that is not known ---------------------------------------------------------------------------


class PendingSum:
    """A launch into room that may turn out to be too small. Made, and resolved, in the same order on all PEs."""

    def __init__(self, world: World, room: Room, entries: Entries, algorithm: str, tag: int) -> None:
        self._world = world
        self._state = state_of(world)
        self._room = room
        self._layout = room.layout
        self._entries: Entries | None = entries
        self._algorithm = algorithm
        self._tag = tag
        self._generation = self._state.generation
        self._stream = torch.cuda.current_stream(world.backend.device) if world.backend.name == "cuda" else None
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None
        self._error: Exception | None = None
        self._launch(entries)
        room.unresolved = self

    def is_completed(self) -> bool:
        """Return whether `pair` would neither wait nor launch, and the rows have come, or will not come any more."""
        if self._entries is not None and self._generation == self._state.generation:
            report = self._plan.report
            if report.state and report.num_rows > self._plan.capacity:
                return False
        return self._is_over()

    def resolve(self) -> None:
        """Wait for the number of rows, and launch again where there is no room for so many; never raises.

        Until then the report's place is this launch's. Collective in that all PEs launch again, or none.
        """
        if self._entries is None:
            return
        entries, room = self._entries, self._room
        try:
            self._check_generation()
            num_rows, shares = self._plan.await_report(self._world, self._is_over)
        except Exception as error:
            self._error = error
        self._entries = None
        if room.unresolved is self:
            room.unresolved = None
        if self._error is not None:
            return
        room.learn(num_rows, shares)
        if num_rows > self._plan.capacity:
            try:
                self._launch(entries)
                num_rows, _ = self._plan.await_report(self._world, self._is_over)
            except BaseException as error:
                # Too large for the heap on all PEs, or the others miss this launch: what comes next need not fail.
                room.rows = 0
                if not isinstance(error, Exception):
                    self._error = PeerLostError("sparse_all_reduce: this sum was interrupted between its launches")
                    raise
                self._error = error
                return
        self._result = self._views(num_rows)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row numbers and values, ordered before what the current stream does next.

        Raises:
            PersistentOpsError: the launch was given up, now or before a recovery.
        """
        self.resolve()
        if self._error is not None:
            raise self._error
        self._check_generation()
        if self._stream is not None:
            here = torch.cuda.current_stream(self._world.backend.device)
            if here != self._stream:
                here.wait_event(self._ended)
        assert self._result is not None
        return self._result

    def tensor(self) -> torch.Tensor:
        """Return the sum of `pair` as a sparse tensor."""
        rows, values = self.pair()
        size = (self._layout.num_rows, *self._layout.row_shape)
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, check_invariants=False, is_coalesced=True)

    def result(self) -> torch.Tensor:
        """Return the sum; raise what the launch reported."""
        tensor = self.tensor()
        self._world.workspace.raise_pending()
        return tensor

    def _check_generation(self) -> None:
        if self._generation != self._state.generation:
            raise PeerTimeoutError(GIVEN_UP)

    def _launch(self, entries: Entries) -> None:
        if self._stream is None:
            self._launch_here(entries)
            return
        here = torch.cuda.current_stream(self._world.backend.device)
        if here == self._stream:
            self._launch_here(entries)
        else:
            self._stream.wait_stream(here)  # which may still read what lay in the room that comes
            with torch.cuda.stream(self._stream):
                self._launch_here(entries)
        self._ended = torch.cuda.Event()
        self._ended.record(self._stream)

    def _launch_here(self, entries: Entries) -> None:
        world, layout = self._world, self._layout
        capacity = self._room.rows
        is_aligned = not (layout.row_bytes | entries.values.data_ptr()) & 15
        gathers = _gathers(world, self._room, self._algorithm)
        wanted = Wanted(layout, capacity, gathers, entries, is_aligned, tag=self._tag)
        self._plan = find_plan(world, wanted)
        self._values_bytes = -(-capacity * layout.row_bytes // 8) * 8
        nbytes = max(self._values_bytes + 8 * capacity, 512)
        slot = world.outputs.take(nbytes, world.backend.stream(), is_captured=False)
        self._buffer = slot.tensor(torch.uint8, (nbytes,))
        self._plan.launch(world, entries.rows, entries.order, entries.values, slot.offset, raises_input_errors=False)

    def _is_over(self) -> bool:
        return self._stream is None or bool(self._ended.query())

    def _views(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        layout, buffer = self._layout, self._buffer
        values = buffer[: num_rows * layout.row_bytes].view(layout.dtype).view(num_rows, *layout.row_shape)
        rows = buffer[self._values_bytes : self._values_bytes + 8 * num_rows].view(torch.int64)
        return rows, values


def start(
    world: World,
    layout: Layout,
    indices: torch.Tensor,
    values: torch.Tensor,
    algorithm: str,
    *,
    in_order: bool,
    tag: int = 0,
) -> PendingSum:
    """Launch a sum over this PE's entries.

    Args:
        world: of this PE.
        layout: of the sum.
        indices, values: see `Entries`, in any order.
        algorithm: not "dense".
        in_order: their rows are ascending and each occurs once.
        tag: the same on all PEs. Of each layout and tag one sum is under way: the next waits for its number of rows,
            whoever else waits for it or not, so that all PEs have learned the same from it.
    """
    refuse_capture(world)
    room = state_of(world).room(layout, tag)
    if room.unresolved is not None:
        room.unresolved.resolve()
    values = values.contiguous()
    entries = Entries(indices.contiguous(), None, values) if in_order else sorted_entries(indices, values)
    return PendingSum(world, room, entries, algorithm, tag)


def refuse_capture(world: World) -> None:
    """Raise where the current stream is being captured into a CUDA graph."""
    if world.workspace.is_capturing():
        raise RuntimeError(
            "sparse_all_reduce: the size of its result is known on the host only; capture sparse_all_reduce_into"
        )


def _gathers(world: World, room: Room, algorithm: str) -> bool:
    if room.rows == 0 or algorithm == "owner":
        return False
    if algorithm == "allgather":
        return True
    tuning: Tuning = world.operator_state.get(TUNING) or Tuning()
    nbytes = world.size * room.rows * room.layout.columns * 4
    return nbytes <= tuning.gather_bytes and room.shares <= tuning.gather_share
