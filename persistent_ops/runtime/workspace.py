"""Flags, epochs and error records of one world, which order the launches of different operators.

One launch is in flight on a workspace at a time; `StreamOrder` orders launches from several streams. A world has a
workspace and may open others (`World.side_workspace`), whose launches have their own epochs and do not wait for the
first one's.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .backend import Backend, Kernel
from .bootstrap.connection import Bootstrap
from .call_numbers import CallNumbers
from .changes import Changes
from .compile.description import COMM, describe
from .contract import Contract, kind_of
from .credits import Credits, OtherCall, credit_bytes
from .errors import PersistentOpsError, to_raise
from .failures import Failures
from .heap import SymmetricHeap, room_of
from .host_hints import HostHints
from .stream_order import StreamOrder
from .team import ALONE, Team
from .torch_private import backward_pass

__all__ = ["InputRecord", "Workspace", "workspace_bytes"]

_READY_WORDS = 16384  # per sender: the most WGs, or slices for one peer, that a launch may have ...
_ALL_READY_WORDS = 1 << 20  # ... where so many are enough for all senders
_WITHIN = (
    "an operator was called during a launch, by a signal handler or a finalizer; set a flag there, "
    "and call the operator after the launch"
)


def workspace_bytes(world_size: int, ready_words: int = _READY_WORDS) -> tuple[int, int, int]:
    """Return the sizes of what a workspace has in the heap: credits, flags and abort words; `ready_words`: as there."""
    ready_words = min(ready_words, _ALL_READY_WORDS // world_size)
    return credit_bytes(world_size), world_size * ready_words * 8, world_size * 8


class InputRecord:
    """Where launches say what is wrong with this PE's input: all of a workspace, but for those with one of their own.

    Attributes:
        struct: an InputErrorRecord that the host sees.
    """

    def __init__(self, backend: Backend) -> None:
        kind = describe(COMM).structs["InputErrorRecord"]
        self._memory = backend.host_visible_bytes(ctypes.sizeof(kind))
        self.struct: Any = kind.from_address(self._memory.data_ptr())
        self.address = self._memory.data_ptr()

    def clear(self) -> None:
        """Let the next launch report; the last one has ended, or has reported."""
        self.struct.state = 0

    def find(self) -> Exception | None:
        """Return the error, where there is one."""
        if not self.struct.state:
            return None
        operator = kind_of(self.struct.operator_id)
        assert operator is not None
        return operator.input_error(self.struct)

    def take(self) -> Exception | None:
        """Return the error, once."""
        if not self.struct.state:
            return None
        problem = self.find()
        self.clear()
        return problem


class Workspace:
    """See the module. Made collectively.

    Args:
        backend, bootstrap, heap: of the world.
        timeout: of a wait, in seconds.
        ready_words: per sender: the most WGs, or slices for one peer, that a launch may have; fewer with many PEs.
        main: the world's first workspace, where this one is opened beside it; its launches are ordered with that one's
            until `run_beside`.
    """

    def __init__(
        self,
        backend: Backend,
        bootstrap: Bootstrap,
        heap: SymmetricHeap,
        timeout: float,
        *,
        ready_words: int = _READY_WORDS,
        main: Workspace | None = None,
    ) -> None:
        description = describe(COMM)
        self._structs, self._constants = description.structs, description.constants
        self._backend = backend
        self._bootstrap = bootstrap
        self.lock = threading.Lock()
        self._launching = 0  # the thread that launches
        self.timeout = timeout
        self._other_call: OtherCall | None = None
        self.first_epoch = 0
        """Below those of all launches since the last recovery."""
        size = bootstrap.world_size
        _, ready, abort = workspace_bytes(size, ready_words)
        self.credits = Credits(backend, heap, size, room_of(ready) + room_of(abort))
        """What PEs have begun here."""
        self._ready_words = ready // 8 // size
        self._ready = heap.empty((ready // 8,), torch.int64, further=room_of(abort))
        self._abort = heap.empty((abort // 8,), torch.int64)
        for flags in (self._ready, self._abort):
            flags.zero_()
        state_words = ctypes.sizeof(self._structs["LocalState"]) // 8
        self._local = backend.private_words(state_words)
        self._local_alone = backend.private_words(state_words)
        self.hints = HostHints(backend, bootstrap.rank, size)
        """The host's hints to running launches."""
        self._zero_words: dict[int, list[torch.Tensor]] = {}  # by team
        self._restored: list[tuple[torch.Tensor, int]] = []  # words, and what they are between launches
        self._input = InputRecord(backend)
        self._input_error = self._input.struct
        self._num_whole = 0  # calls that are under way and launch several times
        self._peer_heaps = backend.private_words(size + 1)
        self._peer_heaps.copy_(torch.tensor([*backend.peer_heaps, backend.heap_base], dtype=torch.int64, device="cpu"))
        self._failure: PersistentOpsError | None = None
        self.order: StreamOrder = StreamOrder(backend.device) if main is None else main.order
        """Of its launches; the main workspace's where they take turns."""
        self.is_capturing = _capture_test(backend, main)
        """Whether the current stream is being captured into a CUDA graph."""
        self._is_asynchronous = backend.name == "cuda"
        self.admit: Callable[[Workspace, Kernel, int], None] = _admit_all
        """Called before a kernel's first launch, and before its first one with so many WGs."""
        self.launches_beside: Callable[[], Iterable[tuple[Kernel, int]]] | None = None
        """What launches so far are where they run beside others, kernels and WGs; None: what they are without."""
        self.changes = Changes(self.is_capturing)
        self.calls = CallNumbers(self.is_capturing)
        """Numbers of calls that later launches name in their contracts."""
        self._failures = Failures(
            backend, bootstrap.rank, self.credits, self.changes, self.calls, lambda: self.is_capturing()
        )
        self._error = self._failures.record
        backend.synchronize()
        bootstrap.exchange("workspace", b"")  # no PE signals before all flags are zero

    # ---- plans -----------------------------------------------------------------------------------------------------

    @property
    def max_ready_words(self) -> int:
        """The most WGs, or slices for one peer, that a launch may have."""
        return self._ready_words

    def zero_words(self, team: Team, count: int) -> torch.Tensor:
        """Return `count` words that every launch finds zero and leaves so (WG_Done bitmasks), as `recover` does.

        A launch that is given up leaves them as they are. Those after it see that and touch none, if they are of the
        same team; launches of another one go on, so teams have words of their own.
        """
        of_team = self._zero_words.setdefault(team.number, [])
        if not of_team or of_team[-1].numel() < count:
            of_team.append(self._backend.private_words(count))
        return of_team[-1]

    def restore_in_recovery(self, words: torch.Tensor, value: int) -> None:
        """Let `recover` see to words that launches leave as they find them, unless they are given up."""
        self._restored.append((words, value))

    def team(self, contract: Contract) -> ctypes.Structure:
        """Return the part of a plan that every operator shares; `contract`: of its launches.

        Launches of a PE alone have epochs of their own, and no peer knows of them.
        """
        count = self._constants["kContractWords"]
        words = contract.words(count)
        self._failures.remember(contract, words)
        base = self._backend.heap_base
        is_alone = contract.team.number == ALONE
        first_heap = self._bootstrap.world_size if is_alone else 0
        return self._structs["Team"](
            rank=contract.team.rank,
            size=contract.team.size,
            heap=base,
            peer_heaps=self._peer_heaps[first_heap:].data_ptr(),
            grants_offset=self.credits.address(is_alone=is_alone) - base,
            ready_offset=self._ready.data_ptr() - base,
            abort_offset=self._abort.data_ptr() - base,
            ready_stride=self._ready_words,
            local=(self._local_alone if is_alone else self._local).data_ptr(),
            host_says=(self.hints.words_alone if is_alone else self.hints.words).data_ptr(),
            error=ctypes.addressof(self._error),
            input_error=self._input.address,
            timeout_ns=int(self.timeout * 1e9),
            contract_hash=_contract_hash(words),
            contract=(ctypes.c_int64 * count)(*words),
            network=self._backend.network,
        )

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        grid: int,
        plan: int,
        call: ctypes.Structure,
        *,
        raises_input_errors: bool = True,
        begins_early: bool = False,
        is_counted: bool = False,
    ) -> None:
        """Launch on the current stream, after earlier launches on this workspace; raise their errors.

        A failure is raised instead of launching. Bad input of earlier launches, which did not fail, is raised after
        the launch, since the peers count on it; without `raises_input_errors`, by a later `raise_pending`. So it is
        in a backward pass and under `whole_call`, too: peers count on the launches after this one.
        `begins_early`: see `Kernel.launch`. `is_counted`: whether other launches may belong to this call, which takes
        the next number (`CallNumbers`) then, also where an earlier failure is raised.
        """
        this_thread = threading.get_ident()
        if self._launching == this_thread:
            raise RuntimeError(_WITHIN)
        if is_counted:
            self.calls.count()
        with self.lock:
            self._launching = this_thread
            try:
                if self._failure is not None or self._error.state:
                    self.raise_failure()
                if self._is_asynchronous:
                    if grid > kernel.admitted_grid:
                        self.admit(self, kernel, grid)
                        kernel.admitted_grid = grid
                    self.order.follow(self._backend.stream())
                kernel.launch(grid, plan, call, begins_early=begins_early)
                if self._is_asynchronous:
                    self.order.launched()
            finally:
                self._launching = 0
        if not self._is_asynchronous and self._error.state:
            self.raise_failure()
        if raises_input_errors and self._input_error.state and not self._num_whole and backward_pass() == -1:
            self.raise_pending()

    def refuse_within(self) -> None:
        """Raise where this thread is within a launch here: before a call changes what peers count on.

        Raises:
            RuntimeError: it is.
        """
        if self._launching == threading.get_ident():
            raise RuntimeError(_WITHIN)

    @contextlib.contextmanager
    def no_launch(self) -> Iterator[None]:
        """Keep launches of other threads waiting; launches of this thread are refused."""
        self.refuse_within()
        with self.lock:
            self._launching = threading.get_ident()
            try:
                yield
            finally:
                self._launching = 0

    @contextlib.contextmanager
    def whole_call(self) -> Iterator[None]:
        """Leave bad input to the end of a call that launches several times: no launch of it is left out for that."""
        self._num_whole += 1
        try:
            yield
        finally:
            self._num_whole -= 1
        if self._input_error.state and not self._num_whole and backward_pass() == -1:
            self.raise_pending()

    def run_beside(self, main: Workspace, *, is_beside: bool) -> None:
        """Order launches with the main workspace's, or no longer; no launch of either may be in flight."""
        self.order = StreamOrder(self._backend.device) if is_beside else main.order

    # ---- errors ----------------------------------------------------------------------------------------------------

    def raise_pending(self, own: Exception | None = None) -> None:
        """Raise the errors that launches so far have reported; cheap, without waiting for launches in flight.

        Args:
            own: what a handle's own record had, which is raised before what others found wrong with their input.
        """
        if self._failure is not None or self._error.state:
            self.raise_failure()
        if own is not None:
            raise to_raise(own)
        if (problem := self._input.take()) is not None:
            raise to_raise(problem)

    def raise_failure(self) -> None:
        """Raise what made a launch give up; the world needs `recover`."""
        if self._failure is None and self._error.state:
            failure = self._failures.describe(self._other_call)
            if (problem := self._input.find()) is not None:  # which may be why peers, and so this PE, have waited
                failure = type(failure)(f"{failure} This PE has also found: {type(problem).__name__}: {problem}")
            self._failure = failure
            self.changes.give_up()
        if self._failure is not None:
            raise to_raise(self._failure)

    @property
    def has_failed(self) -> bool:
        """Whether a launch was given up since the last recovery, so that later ones give no credit."""
        return self._failure is not None or bool(self._error.state)

    def is_in_another_call(self, other: OtherCall, first_epoch: int, *, gives_up: bool) -> None:
        """Make errors report that a peer is in another call, and waiting launches give up; until `recover`.

        Args:
            other: the calls.
            first_epoch: as of which that was found.
            gives_up: whether they do already.
        """
        with self.hints.lock:
            if first_epoch == self.first_epoch and not self.hints.gives_up:
                self._other_call, self.hints.gives_up = other, gives_up
                self.hints.tell()

    # ---- recovery --------------------------------------------------------------------------------------------------

    def recover(self, patience: float) -> None:
        """Start clean epochs after a failure, where no launch is in flight; collective.

        Args:
            patience: seconds to wait for the peers.
        """
        epoch = int(self._local[0])
        has_given_up = self._error.state or int(self._local[self._structs["LocalState"].abort.offset // 8])
        if has_given_up and self._failure is None:  # which no call has reported
            self.changes.give_up()
        own = json.dumps([epoch, self.calls.counts, self.changes.refused()]).encode()
        told = [json.loads(raw) for raw in self._bootstrap.exchange("recover", own, timeout=patience)]
        epochs, counts, refused = zip(*told, strict=True)
        self.calls.agree(counts)
        # No PE runs a kernel any more. Signals that are still under way must land before the words are cleared.
        self._backend.quiet()
        self._bootstrap.exchange("recover-quiet", b"")
        self._abort.zero_()
        with self.hints.lock:
            self._local.zero_()
            self._local_alone.zero_()
            self._backend.synchronize()
            self.first_epoch, self._other_call, self.hints.gives_up = max(epochs) + 1, None, False
            self.hints.tell()
        for words in itertools.chain.from_iterable(self._zero_words.values()):
            words.zero_()
        for words, value in self._restored:
            words.fill_(value)
        self._local[self._structs["LocalState"].epoch.offset // 8] = self.first_epoch
        self._backend.synchronize()
        self._error.state = 0
        self._input_error.state = 0
        self._failure = None
        self.changes.recover(itertools.chain.from_iterable(refused))
        self._bootstrap.exchange("recovered", b"")

    def refuse_launches(self, error: PersistentOpsError) -> None:
        """Raise an error instead, from now on."""
        self._failure = error

    def set_epoch(self, epoch: int) -> None:
        """Continue from another epoch; collective, all PEs with the same number, above the present one (for tests)."""
        self._backend.synchronize()
        self._local[self._structs["LocalState"].epoch.offset // 8] = epoch
        self._backend.synchronize()
        self._bootstrap.exchange("set-epoch", b"")


def _capture_test(backend: Backend, main: Workspace | None) -> Callable[[], bool]:
    if main is not None:
        return lambda: main.is_capturing()
    return torch.cuda.is_current_stream_capturing if backend.name == "cuda" else bool  # which says False, from C


def _admit_all(workspace: Workspace, kernel: Kernel, grid: int) -> None:
    """Let every kernel be launched: no other workspace's launches run beside."""


def _contract_hash(words: tuple[int, ...]) -> int:
    """Hash a launch contract to the 16 bits that a flag has room for."""
    packed = bytes((ctypes.c_int64 * len(words))(*words))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=2).digest(), "little")
