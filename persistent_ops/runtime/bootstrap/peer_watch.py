"""Watch the other PEs for what flags cannot report: PEs that have ended, compile, or are in another call.

Every PE publishes its state in the mailbox ("here", with `CallOrder`'s view of the peers' launches) and counts changes.
A thread looks at that count, and at the processes of this host, four times a second. It passes what it finds to the
kernels, which then stop waiting, or do not count the time.

A PE that prepares a launch repeats this state every second. If it falls silent (its process is stopped, for example),
or prepares for longer than any compiler takes, time counts again: every wait is bounded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from persistent_ops.runtime.bootstrap.mailbox import Mailbox
from persistent_ops.runtime.errors import BootstrapError

__all__ = ["ABSENT", "HERE", "PREPARING", "Calls", "PeerWatch", "tell_state"]

HERE, PREPARING, ABSENT = b"here", b"preparing", b"absent"
_PERIOD_S = 0.25
_SILENT_S = 5.0  # a thread of a busy machine may come late
_LONGEST_S = 1800.0  # of one preparation
_REQUEST_S = 3600.0  # a slow mailbox is no news; callers that need it have their own time-outs
_NEWS = "news"


def tell_state(mailbox: Mailbox, rank: int, state: bytes, deadline: float) -> None:
    """Let all PEs know the state of one."""
    mailbox.put(f"state/{rank}", state, deadline)
    mailbox.add(_NEWS, 1, deadline)


class Calls(Protocol):
    """An object that finds PEs in other calls: `CallOrder`."""

    def look(self) -> bytes:
        """Look at what the peers have begun; return the report for them."""

    def compare(self, told: Mapping[int, bytes]) -> None:
        """Compare the last results of each peer's `look`."""


class PeerWatch:
    """The thread of one PE; it ends with `close`, or when the mailbox is gone.

    Args:
        mailbox: of the job; all PEs have published their state.
        rank: of this PE.
        size: of the world.
        serving_rank: the PE that serves the mailbox; None where it is none of them.
        find_dead: returns the ranks whose processes are known to have ended.
        report: called from the thread, with the ranks that have ended and those that prepare a launch, at each change.
        calls: finds out which peers are in other calls; None: this is not checked.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        size: int,
        *,
        serving_rank: int | None,
        find_dead: Callable[[], Sequence[int]],
        report: Callable[[frozenset[int], frozenset[int]], None],
        calls: Calls | None = None,
    ) -> None:
        self._mailbox: Mailbox | None = mailbox
        self._rank = rank
        self._size = size
        self._serving_rank = serving_rank
        self._find_dead = find_dead
        self._report = report
        self._calls = calls
        self._calls_told: dict[int, bytes] = {}  # by peer
        self._seen = 0
        self._lost: frozenset[int] = frozenset()
        self._preparing: frozenset[int] = frozenset()
        self._said: dict[int, tuple[bytes, float]] = {}  # per preparing PE: its last state, and when it was new
        self._busy_since: float | None = None
        self._told = HERE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persistent_ops peer watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Let the peers not count the time that this takes, where it takes long enough to matter."""
        if self._busy_since is not None:
            yield
            return
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            lost, preparing = self._lost, self._preparing
            if self._mailbox is not None:
                try:
                    self._tell(self._mailbox)
                    preparing, absent = self._read(self._mailbox)
                    lost |= absent
                    if self._calls is not None:
                        self._calls.compare(self._calls_told)
                except BootstrapError:
                    # The PE that served the mailbox has left. The processes of PEs on this host give more information.
                    self._mailbox, preparing = None, frozenset()
                    if self._serving_rank is not None and not self._stopped.is_set():
                        lost |= {self._serving_rank}
            dead = frozenset(self._find_dead()) - lost
            for rank in dead:
                with contextlib.suppress(BootstrapError):
                    if self._mailbox is not None:  # PEs on other hosts cannot see it for themselves
                        tell_state(self._mailbox, rank, ABSENT, time.monotonic() + _REQUEST_S)
            lost = (lost | dead) - {self._rank}
            preparing -= lost | {self._rank}
            if not self._stopped.is_set() and (lost, preparing) != (self._lost, self._preparing):
                self._lost, self._preparing = lost, preparing
                self._report(lost, preparing)

    def _tell(self, mailbox: Mailbox) -> None:
        begun = b"" if self._calls is None else self._calls.look()
        since = self._busy_since
        seconds = 0.0 if since is None else time.monotonic() - since
        state = PREPARING + b" %d" % seconds if _PERIOD_S / 2 < seconds < _LONGEST_S else HERE + begun
        if state != self._told:
            tell_state(mailbox, self._rank, state, time.monotonic() + _REQUEST_S)
            self._told = state

    def _read(self, mailbox: Mailbox) -> tuple[frozenset[int], frozenset[int]]:
        """Return the PEs that prepare a launch, and the PEs that have announced their leave."""
        deadline = time.monotonic() + _REQUEST_S
        number = mailbox.add(_NEWS, 0, deadline)
        absent: frozenset[int] = frozenset()
        if number != self._seen:
            states = mailbox.read([f"state/{rank}" for rank in range(self._size)], deadline)
            self._seen = number
            absent = frozenset(rank for rank, state in enumerate(states) if state == ABSENT)
            told = {rank: state.removeprefix(HERE) for rank, state in enumerate(states) if state.startswith(HERE)}
            self._calls_told |= {rank: begun for rank, begun in told.items() if rank != self._rank}
            busy = {rank: state for rank, state in enumerate(states) if state.startswith(PREPARING)}
            now, said = time.monotonic(), self._said
            self._said = {
                r: said[r] if r in said and said[r][0] == state else (state, now) for r, state in busy.items()
            }
        heard_since = time.monotonic() - _SILENT_S
        return frozenset(rank for rank, (_, when) in self._said.items() if when > heard_since), absent
