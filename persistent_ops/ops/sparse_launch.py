"""Launches of sparse_all_reduce: sorted entries, plans, and the wait for the number of rows."""

from __future__ import annotations

import functools

import torch

from ..runtime.compile.literals import vector_bytes
from ..runtime.errors import PeerLostError, PeerTimeoutError, to_raise
from ..runtime.operator import OperatorState
from ..runtime.world import World
from .sparse_plan import (
    GIVEN_UP,
    OPERATOR,
    Entries,
    Layout,
    Room,
    SparseKey,
    SparsePlan,
    SparseState,
    Tuning,
    state_of,
)

__all__ = ["PendingSum", "find_plan", "refuse_capture", "result_bytes", "sorted_entries", "start"]


def sorted_entries(indices: torch.Tensor, values: torch.Tensor, count: torch.Tensor | None = None) -> Entries:
    """Return entries in order of rows. Entries of one row keep their order; entries after `count` come last."""
    if count is not None:
        number = torch.arange(indices.numel(), dtype=torch.int64, device=indices.device)
        indices = torch.where(number < count, indices, torch.iinfo(indices.dtype).max)
    rows, order = torch.sort(indices, stable=True)
    return Entries(rows, order, values)


# ---- plans ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(256)
def _bytes_of_values(capacity: int, row_bytes: int) -> int:
    """Return the offset of the rows' numbers, which lie after the values of so many rows."""
    return OPERATOR.description.queries["values_bytes"](capacity, row_bytes)


@functools.lru_cache(256)
def result_bytes(capacity: int, row_bytes: int) -> int:
    """Return the size of a result with room for so many rows, and for their numbers."""
    return max(_bytes_of_values(capacity, row_bytes) + 8 * max(capacity, 1), 512)


def find_plan(
    world: World,
    state: OperatorState,
    layout: Layout,
    capacity: int,
    entries: Entries,
    *used: object,
    gathers: bool,
    row_bytes: int,
    is_into: bool = False,
    tag: int = 0,
) -> SparsePlan:
    """Return the plan of a launch; collective, on all PEs alike, where areas must grow for it.

    Raises:
        RuntimeError: it would have to be made in a CUDA-graph capture.
    """
    rows, order, values = entries
    is_aligned = not (row_bytes | values.data_ptr()) % vector_bytes()
    key = SparseKey(
        world.team, layout, state.tuning, capacity, gathers, rows.dtype, order is not None, is_aligned, is_into, tag
    )
    plan: SparsePlan
    plan = state.plans.get(key, lambda: SparsePlan(world, key), *used, caller="sparse_all_reduce_into")
    return plan


# ---- results of a size that is not known ---------------------------------------------------------------------------


class PendingSum:
    """A launch into room that may turn out to be too small. Made, and resolved, in the same order on all PEs."""

    def __init__(
        self,
        world: World,
        state: SparseState,
        room: Room,
        entries: Entries,
        algorithm: str,
        tag: int,
        is_for_later: bool,
    ) -> None:
        self._world = world
        self._state = state
        self._room = room
        self._algorithm = algorithm
        self._tag = tag
        self._generation = state.generation
        self._ended: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if is_for_later and world.backend.name == "cuda":
            self._stream = torch.cuda.current_stream(world.backend.device)
        self._launch(entries)
        self._entries: Entries | None = entries
        self._error: Exception | None = None
        self._problem: Exception | None = None  # with this PE's entries
        self._tensor: torch.Tensor | None = None
        room.unresolved = self
        if not is_for_later:  # while the host would only wait; the number of rows is often the last one
            self._make(min(room.num_rows, self._plan.capacity))
            self._tensor = self._sparse()

    def done(self) -> bool:
        """Return whether `wait` would neither wait nor launch, and the rows have come, or will not come any more."""
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
            self._error = to_raise(error)
        self._entries = None
        if room.unresolved is self:
            room.unresolved = None
        if self._error is not None:
            return
        self._problem = self._plan.take_problem()
        room.learn(num_rows, shares)
        if num_rows > self._plan.capacity:
            try:
                self._launch(entries)
                num_rows, _ = self._plan.await_report(self._world, self._is_over)
                self._plan.take_problem()  # the same again
            except BaseException as error:
                # Too large for the heap on all PEs, or the others miss this launch: later calls need not fail.
                room.rows = 0
                if not isinstance(error, Exception):
                    self._error = PeerLostError("sparse_all_reduce: this sum was interrupted between its launches")
                    raise
                self._error = to_raise(error)
                return
        if num_rows != self._made_rows:
            self._make(num_rows)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row numbers and values, ordered before what the current stream does next.

        Raises:
            PersistentOpsError: the launch was given up, now or before a recovery, or its world is closed.
        """
        self._await()
        return self._rows[0], self._values

    def tensor(self) -> torch.Tensor:
        """Return the sum of `pair` as a sparse tensor."""
        self._await()
        if self._tensor is None:
            self._tensor = self._sparse()
        return self._tensor

    def _await(self) -> None:
        self.resolve()
        if self._error is not None:
            raise to_raise(self._error)
        self._check_generation()
        if self._ended is not None:
            here = torch.cuda.current_stream(self._world.backend.device)
            if here != self._stream:
                here.wait_event(self._ended)
                self._slot.readers.add(here)

    def wait(self) -> torch.Tensor:
        """Return the sum, the same tensor each time; raise the errors of launches."""
        tensor = self.tensor()
        self.raise_reported()
        return tensor

    def raise_reported(self) -> None:
        """Raise the errors that launches have reported: this sum's bad rows each time.

        What other launches found wrong with their input is raised once, and this sum stays.
        """
        self._world.workspace.raise_pending(self._problem)

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
        world, state, room = self._world, self._state.kept, self._room
        layout, capacity, row_bytes = room.layout, room.rows, room.row_bytes
        gathers = self._gathers(state.tuning or OPERATOR.default_tuning)
        self._plan = plan = find_plan(
            world, state, layout, capacity, entries, gathers=gathers, row_bytes=row_bytes, tag=self._tag
        )
        nbytes, stream = result_bytes(capacity, row_bytes), world.backend.stream()
        self._slot = slot = world.outputs.take(nbytes, stream, is_captured=False)
        plan.launch(entries, slot.offset)
        # While the kernel runs, not when the host has waited for it.
        as_values = slot.as_dtype(layout.dtype)
        self._as_rows = slot.behind(_bytes_of_values(capacity, row_bytes), world.backend, torch.int64)
        self._as_values = as_values.detach()  # keeps the buffer for this launch, and the values' history apart
        self._made_rows = -1

    def _gathers(self, tuning: Tuning) -> bool:
        room = self._room
        if room.rows == 0 or self._algorithm == "owner":
            return False
        if self._algorithm == "allgather":
            return True
        nbytes = self._world.size * room.rows * room.columns * 4
        return nbytes <= tuning.gather_bytes and room.shares <= tuning.gather_share

    def _is_over(self) -> bool:
        if self._ended is not None:
            return bool(self._ended.query())
        if self._world.backend.name != "cuda":
            return True
        return bool(self._state.stream(self._slot.stream, self._world.backend.device).query())

    def _make(self, num_rows: int) -> None:
        """Make the result of so many rows: their numbers, `[1, U]`, and values."""
        room = self._room
        self._tensor, self._made_rows = None, num_rows
        if num_rows:
            self._values = self._as_values.as_strided((num_rows, *room.size[1:]), room.strides, 0)
            self._rows = self._as_rows.as_strided((1, num_rows), (num_rows, 1))
            return
        # Not in the buffer: torch adds to an empty gradient by growing it in place.
        with torch.inference_mode(False):
            self._values = torch.empty_like(self._as_values[:0]).view(0, *room.size[1:])
            self._rows = torch.empty_like(self._as_rows[:0]).view(1, 0)

    def _sparse(self) -> torch.Tensor:
        values, size = self._values, self._room.size
        return torch.sparse_coo_tensor(
            self._rows, values, size, device=values.device, check_invariants=False, is_coalesced=True
        )


def start(
    world: World,
    layout: Layout,
    indices: torch.Tensor,
    values: torch.Tensor,
    algorithm: str,
    *,
    in_order: bool,
    tag: int = 0,
    is_for_later: bool = True,
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
        is_for_later: False where the caller takes the result at once, on this stream.
    """
    refuse_capture(world)
    state = state_of(world)
    room = state.room(layout, tag)
    if room.unresolved is not None:
        room.unresolved.resolve()
    values = values.contiguous()
    entries = Entries(indices.contiguous(), None, values) if in_order else sorted_entries(indices, values)
    return PendingSum(world, state, room, entries, algorithm, tag, is_for_later)


def refuse_capture(world: World) -> None:
    """Raise where the current stream is being captured into a CUDA graph."""
    if world.workspace.is_capturing():
        raise RuntimeError(
            "sparse_all_reduce: the size of its result is known on the host only; capture sparse_all_reduce_into"
        )
