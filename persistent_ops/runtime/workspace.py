"""Flags, epochs and error records of one world: what makes a launch of one operator follow another.

One launch is in flight on a workspace at a time; `StreamOrder` sees to it where they come from several streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from .backend import Backend, Kernel
from .bootstrap import Bootstrap
from .contract import Contract, describe, differences
from .errors import CapacityError, ContractMismatchError, PeerLostError, PeerTimeoutError, PersistentOpsError
from .heap import SymmetricHeap
from .layout import (
    BLAME_KIND_SHIFT,
    CONTRACT_WORDS,
    EPOCH_SHIFT,
    GRANT_BYTES,
    LOCAL_STATE_WORDS,
    ErrorRecord,
    InputErrorRecord,
    LocalState,
    Team,
    contract_hash,
)
from .stream_order import StreamOrder

__all__ = ["Workspace"]

_ALONE_GRANTS = 3
_READY_WORDS = 16384  # per sender: the most WGs, or slices for one peer, that a launch may have
_MAX_CONTRACTS = 1024  # whose values are kept for messages
_KINDS = {1: "timeout", 2: "contract", 3: "lost", 4: "reported"}
_PHASES = {
    1: "credit to write its output (has it launched the operator?)",
    2: "its rows (sliceRdy word of its work-group {index})",
    3: "its rows (sliceRdy word of its slice {index})",
    4: "its partial sums of the rows in tile {index}",
    5: "the result of the rows in tile {index}, which it owns",
    6: "the set of its rows (part of its work-group {index})",
    7: "its sums of rows that several PEs have (its warp {index})",
    8: "its rows (its warp {index})",
}


class Workspace:
    """See the module. Made collectively."""

    def __init__(self, backend: Backend, bootstrap: Bootstrap, heap: SymmetricHeap, timeout: float) -> None:
        self._backend = backend
        self._bootstrap = bootstrap
        self.lock = threading.Lock()
        self.timeout = timeout
        self._contracts: dict[tuple[int, ...], Contract] = {}
        self._telling = threading.Lock()
        self._lost = self._preparing = 0  # a bit per PE
        self._is_interrupted = False
        size = bootstrap.world_size
        # One per peer and two staging copies; behind them the same for a team of this PE alone.
        self._grants = heap.empty(((size + 2 + _ALONE_GRANTS) * GRANT_BYTES // 8,), torch.int64)
        self._ready = heap.empty((size * _READY_WORDS,), torch.int64)
        self._abort = heap.empty((size,), torch.int64)
        for flags in (self._grants, self._ready, self._abort):
            flags.zero_()
        self._local = backend.private_words(LOCAL_STATE_WORDS)
        self._local_alone = backend.private_words(LOCAL_STATE_WORDS)
        self._wg_done: list[torch.Tensor] = []
        self._mailbox = backend.host_visible_bytes(ctypes.sizeof(ErrorRecord) + ctypes.sizeof(InputErrorRecord))
        self._error = ErrorRecord.from_address(self._mailbox.data_ptr())
        self._input_error = InputErrorRecord.from_address(self._mailbox.data_ptr() + ctypes.sizeof(ErrorRecord))
        self._peer_heaps = backend.private_words(size + 1)
        self._peer_heaps.copy_(torch.tensor([*backend.peer_heaps, backend.heap_base], dtype=torch.int64))
        self._failure: PersistentOpsError | None = None
        self._order = StreamOrder(backend.device)
        backend.waits.interrupted = self.interrupted
        backend.synchronize()
        bootstrap.exchange("workspace", b"")  # nobody signals before all flags are zero

    # ---- plans -----------------------------------------------------------------------------------------------------

    @property
    def max_ready_words(self) -> int:
        """The most WGs, or slices for one peer, that a launch may have."""
        return _READY_WORDS

    def wg_done_words(self, count: int) -> torch.Tensor:
        """Return `count` zeroed words for WG_Done bitmasks; they are zero again after every launch."""
        if not self._wg_done or self._wg_done[-1].numel() < count:
            self._wg_done.append(self._backend.private_words(count))
        return self._wg_done[-1]

    def team(self, contract: Contract, *, wg_done: torch.Tensor | None = None, is_alone: bool = False) -> Team:
        """Return the part of a plan that every operator shares.

        Args:
            contract: of its launches.
            wg_done: of `wg_done_words`, where the operator needs them.
            is_alone: the team is this PE, whatever the world: its launches have epochs of their own, and no peer knows
                of them.
        """
        words = contract.words()
        if len(self._contracts) >= _MAX_CONTRACTS:
            self._contracts.clear()
        self._contracts[words] = contract
        base = self._backend.heap_base
        rank, size, first_heap, first_grant = self._bootstrap.rank, self._bootstrap.world_size, 0, 0
        if is_alone:  # what it needs lies behind what the world needs
            rank, size, first_heap, first_grant = 0, 1, size, size + 2
        return Team(
            rank=rank,
            size=size,
            heap=base,
            peer_heaps=self._peer_heaps[first_heap:].data_ptr(),
            grants_offset=self._grants.data_ptr() - base + first_grant * GRANT_BYTES,
            ready_offset=self._ready.data_ptr() - base,
            abort_offset=self._abort.data_ptr() - base,
            ready_stride=_READY_WORDS,
            local=(self._local_alone if is_alone else self._local).data_ptr(),
            wg_done=0 if wg_done is None else wg_done.data_ptr(),
            error=ctypes.addressof(self._error),
            input_error=ctypes.addressof(self._input_error),
            timeout_ns=int(self.timeout * 1e9),
            contract_hash=contract_hash(words),
            contract=(ctypes.c_int64 * CONTRACT_WORDS)(*words),
            network=self._backend.network,
        )

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(
        self, kernel: Kernel, grid: int, plan: int, words: Sequence[int], *, raises_input_errors: bool = True
    ) -> None:
        """Launch on the current stream, after earlier launches on this workspace; raise what they left behind.

        A failure is raised instead of launching. Bad input of earlier launches, which failed nobody, is raised behind
        the launch, since the peers count on it; without `raises_input_errors`, by a later `raise_pending`.
        """
        with self.lock:
            if self._failure is not None or self._error.state:
                self.raise_failure()
            if self._backend.name == "cuda":
                self._order.follow(self._backend.stream())
            kernel.launch(grid, plan, words)
        if self._backend.name == "host" and self._error.state:
            self.raise_failure()
        if raises_input_errors and self._input_error.state:
            self.raise_pending()

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        return self._backend.name == "cuda" and torch.cuda.is_current_stream_capturing()

    # ---- errors ----------------------------------------------------------------------------------------------------

    def raise_pending(self) -> None:
        """Raise what launches so far have reported; cheap, and without waiting for launches in flight."""
        self.raise_failure()
        if self._input_error.state:
            error = self._describe_input_error()
            self._input_error.state = 0  # launches may report the next one
            raise error

    def raise_failure(self) -> None:
        """Raise what made a launch give up; the world needs `recover`."""
        if self._failure is None and self._error.state:
            self._failure = self._describe_failure()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _describe_failure(self) -> PersistentOpsError:
        error = self._error
        kind, me = _KINDS[error.kind], self._bootstrap.rank
        remedy = "The output is poisoned with NaN. po.recover(), called by every PE, makes the world usable again."
        if kind == "contract":
            return ContractMismatchError(
                f"PE {me} and PE {error.peer} launched operators that do not match (epoch {error.epoch})"
                f"{self._describe_contracts(f'PE {error.peer}')}. {remedy}"
            )
        if kind == "reported":
            return self._describe_report(remedy)
        if kind == "lost" and error.peer == me:
            return PeerLostError(f"PE {me} was interrupted while it waited (epoch {error.epoch}). {remedy}")
        what = _PHASES[error.phase].format(index=error.index)
        waited = (
            f"PE {me} waited {error.waited_ns / 1e9:.2f} s for PE {error.peer}: {what}; expected epoch {error.epoch}, "
            f"saw {error.seen >> EPOCH_SHIFT}"
        )
        if kind == "lost":
            return PeerLostError(
                f"{waited}; PE {error.peer} has ended, look at its output. The output of this PE is poisoned with NaN."
            )
        return PeerTimeoutError(f"{waited}. {remedy}")

    def _describe_contracts(self, peer: str) -> str:
        """Tell both sides of a mismatch: what differs, then all of both."""
        error, me = self._error, self._bootstrap.rank
        mine, theirs = tuple(error.own_contract), tuple(error.peer_contract)
        own = self._contracts.get(mine)
        differing = differences(mine, own, theirs, me, error.peer)
        head = f": {differing}" if differing else ""
        return f"{head}. PE {me}: {describe(mine, own)}; {peer}: {describe(theirs, own)}"

    def _describe_report(self, remedy: str) -> PersistentOpsError:
        """Describe a failure that another PE met first and told this one."""
        error, me = self._error, self._bootstrap.rank
        blamed = f"PE {error.peer}" + (" (this PE)" if error.peer == me else "")
        left = f"so PE {me} left its launch too (epoch {error.epoch})"
        reason = _KINDS[error.seen >> BLAME_KIND_SHIFT & 3]
        if reason == "contract":
            told = self._describe_contracts(f"PE {error.peer}, as far as PE {me} was told")
            return ContractMismatchError(
                f"PE {error.index} and {blamed} launched operators that do not match, {left}{told}. {remedy}"
            )
        if reason == "lost":
            what = "was interrupted" if error.peer == error.index else f"found that {blamed} has ended"
            return PeerLostError(f"PE {error.index} {what}, {left}. {remedy}")
        return PeerTimeoutError(
            f"PE {error.index} gave up on epoch {error.seen >> EPOCH_SHIFT} because of {blamed}, {left}. {remedy}"
        )

    def _describe_input_error(self) -> Exception:
        record = self._input_error
        where = f"table {record.table}, bag {record.bag}"
        valid = f"valid: 0 to {record.limit - 1}"
        if record.kind == 1:
            return IndexError(
                f"indices: {where} has index {record.value}, but the table has {record.limit} rows ({valid})"
            )
        if record.kind == 2:
            return IndexError(
                f"offsets: {where} has offset {record.value}, but offsets must start at 0, not fall, and end at the "
                f"number of indices, {record.limit}"
            )
        if record.kind == 3:
            return IndexError(
                f"indices: entry {record.bag} is row {record.value}, but the tensor has {record.limit} rows ({valid})"
            )
        if record.kind == 4:
            return IndexError(f"count: {record.value} entries are not within 0 to {record.limit}, those there are")
        if record.kind == 6:
            return ValueError(
                f"indices: entry {record.bag} is row {record.value}, behind row {record.limit}, in what was said to be "
                "coalesced; the sums are wrong"
            )
        return CapacityError(
            f"out_values: the PEs have {record.value} rows together, capacity {record.limit}: "
            f"{record.value - record.limit} too many; nothing was written"
        )

    # ---- what the host tells launches under way ----------------------------------------------------------------------

    def peers_changed(self, lost: Iterable[int], preparing: Iterable[int]) -> None:
        """Let launches know which PEs have ended, and which prepare a launch; from any thread."""
        with self._telling:
            self._lost = sum(1 << rank for rank in lost)
            self._preparing = sum(1 << rank for rank in preparing)
            self._tell_kernels()

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Let launches give up that wait while this context is open; `recover` makes up for it. From any thread."""
        self._set_interrupted(True)
        try:
            yield
        finally:
            self._set_interrupted(False)

    def _set_interrupted(self, is_interrupted: bool) -> None:
        with self._telling:
            self._is_interrupted = is_interrupted
            self._tell_kernels()

    def _tell_kernels(self) -> None:
        own = 1 << self._bootstrap.rank if self._is_interrupted else 0
        self._backend.set_word(self._local, LocalState.preparing.offset // 8, self._preparing)
        self._backend.set_word(self._local, LocalState.lost.offset // 8, self._lost | own)

    # ---- recovery --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Start clean epochs after a failure; collective."""
        self._backend.synchronize()
        epoch = int(self._local[0])
        epochs = [int(raw) for raw in self._bootstrap.exchange("recover", str(epoch).encode())]
        # No PE runs a kernel any more. What their signals still have under way must land before the words are cleared.
        self._backend.quiet()
        self._bootstrap.exchange("recover-quiet", b"")
        self._abort.zero_()
        with self._telling:
            self._local.zero_()
            self._local_alone.zero_()
            self._backend.synchronize()
            self._tell_kernels()
        for words in self._wg_done:
            words.zero_()
        self._local[LocalState.epoch.offset // 8] = max(epochs) + 1
        self._backend.synchronize()
        self._error.state = 0
        self._input_error.state = 0
        self._failure = None
        self._bootstrap.exchange("recovered", b"")

    def set_epoch(self, epoch: int) -> None:
        """Continue from another epoch; collective, all PEs with the same number, above the present one (for tests)."""
        self._backend.synchronize()
        self._local[LocalState.epoch.offset // 8] = epoch
        self._backend.synchronize()
        self._bootstrap.exchange("set-epoch", b"")
