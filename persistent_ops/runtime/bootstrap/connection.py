"""Connect the PEs of a job, and let them exchange small values during setup.

The protocol, over a `mailbox` (a table that all PEs see):

- A PE claims its rank (a counter per rank: a second claim means a second process with that rank) and the world size
  (the first claim counts). It then gives its identity in the first exchange.
- In exchange n each PE puts its value, then increments a count. A PE that sees the count complete reads all values. A
  PE that has counted itself in exchange n + 1 has read exchange n, so values are removed one exchange late.
- A PE that gives up writes the reason. Every waiting PE looks for a reason between two looks at the count. Waiting PEs
  also watch the processes of this host, so they notice a killed PE before the time-out.

The mailbox is not secret: every process that can connect to the loopback interface (or, with several hosts, to rank 0's
port) can read it, as with torch.distributed. Keep jobs of several hosts on a network that you trust.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from persistent_ops.runtime.bootstrap import pmi
from persistent_ops.runtime.bootstrap.launchers import LaunchEnvironment
from persistent_ops.runtime.bootstrap.mailbox import Mailbox, StoreMailbox, ThreadMailbox, ThreadTable, Worker
from persistent_ops.runtime.bootstrap.peer_watch import ABSENT, HERE, PREPARING, Calls, PeerWatch, tell_state
from persistent_ops.runtime.bootstrap.process_identity import ProcessIdentity, identify
from persistent_ops.runtime.bootstrap.rendezvous import meet, store_over
from persistent_ops.runtime.errors import BootstrapError

__all__ = ["Bootstrap", "connect", "fail_all", "from_group", "from_threads"]

_LONGEST_PAUSE_S = 0.02  # between two looks at the mailbox: bounds the load of many waiters, and the delay of a failure
_LOOK_AT_PROCESSES_S = 0.2
_TOGETHER, _ALONE = b"together", b"alone"  # how PEs leave
_LONGEST_FAREWELL_S = 10.0  # how long the PE that serves the store waits for the others to leave first
_MEET_BEHIND_FAILURE_S = 10.0  # PEs that give up learn it at once, but may be in a library call
_FAREWELL_AFTER_FAILURE_S = 1.0  # how long it waits after a failure, also for ranks that have not come yet

_live: set[Bootstrap] = set()
_attempts: Counter[str] = Counter()


@dataclass(frozen=True)
class _Identity:
    """The report of a PE to the others about itself."""

    launcher: str
    local_rank: int | None
    local_world_size: int | None
    process: ProcessIdentity

    @classmethod
    def read(cls, value: bytes) -> _Identity:
        """Return what `write` has made."""
        fields = json.loads(value)
        return cls(**{**fields, "process": ProcessIdentity(**fields["process"])})

    def write(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Bootstrap:
    """One PE's connection to the other PEs of its job; made by `connect`, `from_group` or `from_threads`.

    After a `BootstrapError` the connection is dead on every PE: the PEs no longer agree on what was exchanged.

    Attributes:
        rank: Number of this PE.
        world_size: Number of PEs.
        local_rank: Number of this PE among its host's PEs.
        local_world_size: Number of PEs on its host.
        launcher: What started the job.
        single_host: Whether all PEs are on one host.
        shares_memory: Whether all PEs run under one kernel and see each other's processes, whatever their host names.
    """

    def __init__(
        self,
        mailbox: Mailbox | None,
        rank: int,
        world_size: int,
        launcher: str,
        timeout: float,
        *,
        serves: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = 0
        self.local_world_size = 1
        self.launcher = launcher
        self.single_host = self.shares_memory = True
        self.timeout = timeout
        self._mailbox = mailbox
        self._serves = serves
        self._serving_rank: int | None = 0
        self._sequence = 0
        self._identities: list[_Identity] = []
        self._failure: str | None = None
        self._told = False
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def exchange(self, tag: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Give a value to all PEs and receive theirs (all-gather). Collective.

        Args:
            tag: What this exchange is for; all PEs must pass the same. It may be used again.
            value: This PE's value.
            timeout: Seconds to wait for the other PEs; None for the time-out of `connect`.

        Returns:
            The values of all PEs, in rank order.

        Raises:
            BootstrapError: PEs are missing after the time-out (named), a PE has died, has given up or has closed its
                connection, or the PEs are at different exchanges.
            TypeError: `value` is not bytes.
            ValueError: `timeout` is not a positive number.
        """
        if not isinstance(value, bytes):
            raise TypeError(f"value must be bytes, got {type(value).__name__}; encode it first")
        deadline = time.monotonic() + (self.timeout if timeout is None else _checked(timeout))
        with self._lock:
            self._must_be_usable()
            if self._mailbox is None:
                return [value]
            try:
                return self._exchange(self._mailbox, tag, value, deadline)
            except BootstrapError as error:
                self._tell(str(error))
                raise
            except BaseException as error:
                self._tell(f"it was interrupted by {type(error).__name__}")
                raise

    def meet_to_leave(self, seconds: float) -> bool:
        """Return whether all PEs have come to leave, within so many seconds of each; all get the same answer.

        The first PE that knows decides: all are there, or it gives them up. A later PE finds this decision, and takes
        it over.
        """
        return self._decide_to_leave(lambda: self.exchange("close", b"", timeout=seconds))

    def fail_and_meet(self, message: str) -> bool:
        """Do as `fail`, and return whether all PEs do, within some seconds of each other; see `meet_to_leave`."""
        self.fail(message)
        return self._decide_to_leave(self._meet_behind_failure)

    def _decide_to_leave(self, meet_others: Callable[[], object]) -> bool:
        says = _ALONE
        try:
            meet_others()
            says = _TOGETHER
        except BootstrapError:
            pass
        finally:  # also where Ctrl-C comes
            if self._mailbox is not None and self._pid == os.getpid():
                with self._lock:
                    try:
                        says = self._mailbox.claim("leave", says, time.monotonic() + _FAREWELL_AFTER_FAILURE_S)
                    except BootstrapError:
                        says = _ALONE
        return says == _TOGETHER

    def _meet_behind_failure(self) -> None:
        """Wait for all PEs to have failed, over a counter of its own: exchanges are no longer possible."""
        mailbox = self._mailbox
        if mailbox is None or self._pid != os.getpid():
            return
        with self._lock:
            deadline = time.monotonic() + _MEET_BEHIND_FAILURE_S
            mailbox.add("failed", 1, deadline)
            while True:
                # The reasons to give up come first: this PE may not run for a while.
                is_over = time.monotonic() >= deadline or mailbox.has("leave", deadline)
                has_died = any(self._is_dead(identity) for identity in self._identities)
                if mailbox.add("failed", 0, deadline) >= self.world_size:
                    return
                if is_over:
                    raise BootstrapError("not all ranks have given up")
                if has_died:
                    raise BootstrapError("a rank has died")
                mailbox.pause(_LONGEST_PAUSE_S)

    def fail(self, message: str) -> None:
        """Announce that this PE gives up, so that the other PEs' exchanges raise at once.

        Args:
            message: Why; the first message of the job is the one that the others show.
        """
        if self._pid == os.getpid() and not self._closed:
            self._tell(message)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Leave the job; exchanges that other PEs begin later raise.

        The PE that serves the store waits for the others to leave, at most 10 s, so that what they have not read yet
        does not vanish under them. After a failure it waits 1 s at most, also for ranks that are still on their way, so
        that they find out why.
        """
        if self._closed or self._pid != os.getpid():
            return
        failed = self._failure is not None
        self._tell("it has closed its connection (finalize)")
        self._closed = True
        _live.discard(self)
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is None:
            return
        try:
            with suppress(BootstrapError):
                self._say_farewell(
                    mailbox, _FAREWELL_AFTER_FAILURE_S if failed else min(self.timeout, _LONGEST_FAREWELL_S)
                )
        finally:
            mailbox.close()

    def _say_farewell(self, mailbox: Mailbox, seconds: float) -> None:
        """Count this PE as gone and, where it serves the store, wait for the others to be gone too."""
        deadline = time.monotonic() + seconds
        tell_state(mailbox, self.rank, ABSENT, deadline)
        mailbox.put(f"left/{self.rank}", b"", deadline)
        left = mailbox.add("left", 1, deadline)
        while self._serves and time.monotonic() < deadline:
            gone = [rank for rank, identity in enumerate(self._identities) if self._is_dead(identity)]
            dead = sum(not mailbox.has(f"left/{rank}", deadline) for rank in gone)
            if left + dead >= max(mailbox.add("joined", 0, deadline), self.world_size):
                break
            mailbox.pause(_LONGEST_PAUSE_S)
            left = mailbox.add("left", 0, deadline)

    def watch(self, report: Callable[[frozenset[int], frozenset[int]], None], calls: Calls) -> PeerWatch | None:
        """Watch the other PEs from a thread; None in a world of one. See `PeerWatch` for `report` and `calls`."""
        if self._mailbox is None:
            return None

        def find_dead() -> list[int]:
            return [r for r, identity in enumerate(self._identities) if r != self.rank and self._is_dead(identity)]

        return PeerWatch(
            self._mailbox,
            self.rank,
            self.world_size,
            serving_rank=None if self._serving_rank == self.rank else self._serving_rank,
            find_dead=find_dead,
            report=report,
            calls=calls,
        )

    def _exchange(self, mailbox: Mailbox, tag: str, value: bytes, deadline: float) -> list[bytes]:
        number = self._sequence
        begin = time.monotonic()
        longest = deadline - begin
        self._sequence += 1
        label = tag.encode()
        mailbox.put(f"{number}/{self.rank}", struct.pack("<H", len(label)) + label + value, deadline)
        arrived = mailbox.add(f"{number}/count", 1, deadline)
        pause, next_look = 0.0005, time.monotonic() + _LOOK_AT_PROCESSES_S
        while arrived < self.world_size:
            self._raise_if_someone_failed(mailbox, number, deadline)
            now = time.monotonic()
            if now >= deadline:
                missing = [r for r in range(self.world_size) if not mailbox.has(f"{number}/{r}", deadline)]
                if not missing:
                    break  # they came after this PE's last look: it may not have run for a while
                known = [f"state/{r}" for r in missing if mailbox.has(f"state/{r}", deadline)]
                if known and PREPARING in mailbox.read(known, deadline):
                    deadline = now + longest
                    continue
                raise BootstrapError(
                    f"{_ranks(missing)} of {self.world_size} did not reach {tag!r} within {now - begin:.3g} s; look at "
                    "their output, and check that all of them were started and make the same calls"
                )
            if now >= next_look:
                next_look = now + _LOOK_AT_PROCESSES_S
                self._raise_if_someone_died(mailbox, number, tag, deadline)
            mailbox.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            arrived = mailbox.add(f"{number}/count", 0, deadline)
        frames = mailbox.read([f"{number}/{r}" for r in range(self.world_size)], deadline)
        values = [self._unpack(frame, r, tag) for r, frame in enumerate(frames)]
        if number > 0:
            mailbox.remove(f"{number - 1}/{self.rank}", deadline)
            if self.rank == 0:
                mailbox.remove(f"{number - 1}/count", deadline)
        return values

    def _unpack(self, frame: bytes, rank: int, tag: str) -> bytes:
        length = struct.unpack_from("<H", frame)[0] if len(frame) >= 2 else 0
        other = frame[2 : 2 + length].decode("utf-8", "replace")
        if len(frame) < 2 + length or not other:
            raise BootstrapError(
                f"rank {rank} sent a message that cannot be read; check that all ranks run the same version of "
                "persistent_ops"
            )
        if other != tag:
            raise BootstrapError(
                f"the ranks do not make the same calls: rank {rank} is at {other!r}, rank {self.rank} at {tag!r}; make "
                "collective calls on all ranks in the same order"
            )
        return frame[2 + length :]

    def _join(self, local_rank: int | None, local_world_size: int | None, deadline: float) -> None:
        """Claim this PE's number, meet the others, and find out who shares this host."""
        mailbox = self._mailbox
        if mailbox is None:
            return
        mine = _Identity(self.launcher, local_rank, local_world_size, identify())
        mailbox.put(f"state/{self.rank}", HERE, deadline)
        mailbox.add("joined", 1, deadline)
        _live.add(self)
        problem = ""
        standing = mailbox.claim("world_size", str(self.world_size).encode(), deadline)
        if standing != str(self.world_size).encode():
            problem = (
                f"the world size differs: rank {self.rank} was told {self.world_size}, another rank "
                f"{standing[:20].decode('ascii', 'replace')}; start all ranks with one launcher command"
            )
        elif mailbox.add(f"claims/{self.rank}", 1, deadline) > 1:
            problem = (
                f"two processes claim rank {self.rank}; the second one is process {mine.process.pid} on host "
                f"{socket.gethostname()}; give every process its own number"
            )
        if problem:
            # A stray process must not end a job that is complete.
            if mailbox.add("0/count", 0, deadline) < int(standing if standing.isdigit() else b"0"):
                self._tell(problem)
            self._failure, self._told = problem, True
            raise BootstrapError(problem)
        remaining = max(deadline - time.monotonic(), 0.001)
        values = self.exchange("connect", mine.write(), remaining)
        try:
            self._identities = [_Identity.read(value) for value in values]
        except (ValueError, TypeError, KeyError):
            problem = "a rank sent an identity that cannot be read; run the same version of persistent_ops everywhere"
        launchers = sorted({identity.launcher for identity in self._identities})
        if len(launchers) > 1:
            problem = f"the ranks were started by different launchers ({', '.join(launchers)}); start them by one"
        here = [r for r, identity in enumerate(self._identities) if identity.process.host == mine.process.host]
        self.single_host = len(here) == self.world_size
        self.shares_memory = len({identity.process.kernel for identity in self._identities}) == 1
        self.local_rank = here.index(self.rank) if local_rank is None and here else local_rank or 0
        self.local_world_size = len(here) if local_world_size is None else local_world_size
        numbers = [self._identities[r].local_rank for r in here]
        if self.local_world_size == len(here) and None not in numbers and len(set(numbers)) < len(here):
            problem = f"two of {_ranks(here)}, which share a host, have the same local rank; {numbers} were given"
        if problem:
            self._tell(problem)
            raise BootstrapError(problem)

    def _must_be_usable(self) -> None:
        if self._pid != os.getpid():
            raise BootstrapError("this process was forked after init(), and is not a PE; start PEs with a launcher")
        if self._closed:
            raise BootstrapError("the connection to the other ranks is closed; call init() again on every rank")
        if self._failure is not None:
            raise BootstrapError(f"the connection to the other ranks is unusable since: {self._failure}")

    def _tell(self, message: str) -> None:
        """Leave the reason for giving up in the mailbox, unless another PE's stands there already."""
        if self._failure is None:
            self._failure = message
        mailbox = self._mailbox
        if mailbox is None or self._told:
            return
        self._told = True
        deadline = time.monotonic() + _FAREWELL_AFTER_FAILURE_S
        with suppress(BootstrapError):  # The store may be what failed; the others see that for themselves.
            if mailbox.add("failures", 1, deadline) == 1:
                mailbox.put("failure", json.dumps([self.rank, message]).encode(), deadline)

    def _raise_if_someone_failed(self, mailbox: Mailbox, number: int, deadline: float) -> None:
        if self._failure is not None:  # fail(), from another thread of this PE
            raise BootstrapError(f"rank {self.rank} gave up: {self._failure}")
        # Who left when all had arrived has given up nothing here.
        if mailbox.has("failure", deadline) and mailbox.add(f"{number}/count", 0, deadline) < self.world_size:
            try:
                rank, message = json.loads(mailbox.read(["failure"], deadline)[0])
            except ValueError:
                rank, message = "?", "its message cannot be read"
            raise BootstrapError(f"rank {rank} gave up: {message}")

    def _raise_if_someone_died(self, mailbox: Mailbox, number: int, tag: str, deadline: float) -> None:
        for rank, identity in enumerate(self._identities):
            if self._is_dead(identity) and not mailbox.has(f"{number}/{rank}", deadline):
                pid = identity.process.pid
                raise BootstrapError(f"rank {rank} (process {pid}) died before {tag!r}; look at its output")

    def _is_dead(self, identity: _Identity) -> bool:
        return identity.process.is_seen_dead_by(self._identities[self.rank].process)


def connect(environment: LaunchEnvironment, timeout: float) -> Bootstrap:
    """Meet the other PEs of the job that a launcher started. Collective.

    Args:
        environment: What `launchers.detect` found.
        timeout: Seconds within which all PEs must have come; also the default of `Bootstrap.exchange`.

    Returns:
        The connection of this PE.

    Raises:
        BootstrapError: A rank is missing, died, is there twice, or has another world size; the job's store cannot
            be reached, or is not one. Raised on every rank that is there.
        ValueError: `timeout` is not a positive number.
    """
    deadline = time.monotonic() + _checked(timeout)
    rank, world_size = environment.rank, environment.world_size
    if not 0 <= rank < world_size:
        raise BootstrapError(f"rank {rank} is outside the world of {world_size}; ranks count from 0 to world size - 1")
    if world_size == 1:
        return Bootstrap(None, 0, 1, environment.launcher, timeout)
    attempt = _next_attempt(f"{environment.launcher}/{environment.job}/{environment.port}")
    pmi.set_failed(True)
    meeting = meet(environment, attempt, deadline)
    try:
        found = Bootstrap(meeting.mailbox, rank, world_size, environment.launcher, timeout, serves=meeting.serves)
        found._serving_rank = None if environment.rendezvous == "store" else 0
        _joined(found, environment.local_rank, environment.local_world_size, deadline)
    finally:
        meeting.stop()
    pmi.set_failed(False)
    return found


def from_group(group: Any, timeout: float) -> Bootstrap:
    """Meet the PEs of an initialized torch.distributed process group. Collective over the group.

    Args:
        group: The process group, or None for the default one.
        timeout: Seconds within which all PEs must have come; also the default of `Bootstrap.exchange`.

    Returns:
        The connection of this PE; its ranks are the group's ranks.

    Raises:
        BootstrapError: torch.distributed is not initialized, this process is not in the group, or as in `connect`.
        ValueError: `timeout` is not a positive number.
    """
    import torch.distributed as dist

    deadline = time.monotonic() + _checked(timeout)
    if not (dist.is_available() and dist.is_initialized()):
        raise BootstrapError("group was given, but torch.distributed is not initialized; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise BootstrapError("this process is not in the group; call init() with a group on its members only")
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Bootstrap(None, 0, 1, "torch.distributed", timeout)
    prefix = f"persistent_ops/group/{_next_attempt(f'group/{group.group_name}')}/"
    worker = Worker()
    try:
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        store = store_over(group, worker, deadline) if store is None else store
    except BaseException:
        worker.close()
        raise
    # The group's store lives, as the group does, at most as long as rank 0's process.
    mailbox = StoreMailbox(store, prefix, worker)
    found = Bootstrap(mailbox, rank, world_size, "torch.distributed", timeout, serves=rank == 0)
    return _joined(found, None, None, deadline)


def from_threads(world_size: int, timeout: float) -> list[Bootstrap]:
    """Make the connections of PEs that are threads of this process.

    Args:
        world_size: Number of PEs.
        timeout: Default of `Bootstrap.exchange`, in seconds.

    Returns:
        One connection for each PE, in rank order; each is used by one thread.

    Raises:
        ValueError: `world_size` is less than 1, or `timeout` is not a positive number.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    table, found = ThreadTable(), []
    for rank in range(world_size):
        mailbox = ThreadMailbox(table) if world_size > 1 else None
        if mailbox is not None:
            tell_state(mailbox, rank, HERE, math.inf)
        bootstrap = Bootstrap(mailbox, rank, world_size, "threads", _checked(timeout))
        bootstrap._serving_rank = None
        bootstrap.local_rank, bootstrap.local_world_size = rank, world_size
        found.append(bootstrap)
    return found


def fail_all(message: str) -> None:
    """Announce over every open connection of this process that it gives up.

    Args:
        message: Why.
    """
    for bootstrap in list(_live):
        bootstrap.fail(message)


def _joined(found: Bootstrap, local_rank: int | None, local_world_size: int | None, deadline: float) -> Bootstrap:
    try:
        found._join(local_rank, local_world_size, deadline)
    except BaseException:
        found.close()
        raise
    return found


def _next_attempt(job: str) -> int:
    """Number this process' connections to one job: all ranks connect equally often, and keys must not meet again."""
    _attempts[job] += 1
    return _attempts[job] - 1


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _checked(timeout: float) -> float:
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timeout


def _leave_at_exit() -> None:
    for bootstrap in list(_live):
        bootstrap.fail("it exited without finalize()")
        bootstrap.close()


atexit.register(_leave_at_exit)
