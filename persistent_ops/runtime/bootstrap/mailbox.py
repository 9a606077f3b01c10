"""Mailboxes: tables of keys and bytes that all PEs of a job see while they start.

`StoreMailbox` uses torch.distributed's store; `ThreadMailbox` serves PEs that are threads of this process. No call
outlasts its deadline. Torch's store can block for ever in its constructor (a peer that accepts the connection and sends
nothing) and in a request (a stopped server). So every call runs in a thread of its own, which the caller abandons at
the deadline.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from persistent_ops.runtime.bounded import leave_behind, refuse_after
from persistent_ops.runtime.errors import BootstrapError

__all__ = [
    "Mailbox",
    "StoreMailbox",
    "ThreadMailbox",
    "ThreadTable",
    "Worker",
    "connect_store",
    "serve_store",
    "tcp_store",
]

T = TypeVar("T")

# A request that is answered takes much less time than this. A call may exceed its deadline by it, so that a rank which
# timed out can still report which ranks are missing.
_LAST_REQUEST_S = 0.5

_STORE_CALL = "a call of torch's store (or of what else tells rank 0's address)"
_MOST_HANGING = 4


class Mailbox(Protocol):
    """The mailbox interface that the bootstrap needs. `deadline` is a `time.monotonic()`."""

    def put(self, key: str, value: bytes, deadline: float) -> None:
        """Store `value` under `key`."""

    def claim(self, key: str, value: bytes, deadline: float) -> bytes:
        """Store `value` unless there is one already, and return the stored value."""

    def read(self, keys: Sequence[str], deadline: float) -> list[bytes]:
        """Return the values of keys that are known to exist."""

    def has(self, key: str, deadline: float) -> bool:
        """Return whether `key` exists."""

    def add(self, key: str, amount: int, deadline: float) -> int:
        """Add to a counter that starts at zero, and return the sum."""

    def remove(self, key: str, deadline: float) -> None:
        """Forget `key`."""

    def pause(self, seconds: float) -> None:
        """Wait for a moment, or less where a change is noticed."""

    def close(self) -> None:
        """Let go of the connection."""


class Worker:
    """A daemon thread that makes calls which may never return: torch's store, its groups, the start of MPI.

    Raises:
        BootstrapError: too many earlier ones still hang in such a call, which nothing can end.
    """

    def __init__(self) -> None:
        refuse_after(
            _MOST_HANGING,
            _STORE_CALL,
            "end what listens at the job's address (MASTER_ADDR and MASTER_PORT, if set) without answering, or start "
            "this process again",
        )
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[tuple[bool, Any]]] | None]
        self._jobs = queue.SimpleQueue()
        self._stuck = False
        self._thread = threading.Thread(target=self._run, name="persistent_ops bootstrap", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Return the result of `function`.

        Raises:
            TimeoutError: It did not return within `seconds`, nor a moment later, or an earlier call still has not.
        """
        if self._stuck:
            raise TimeoutError
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._jobs.put((function, answer))
        # The moment is for the thread where this process did not run for a while: it may have to take an answer yet.
        for patience in (max(seconds, 0.001), _LAST_REQUEST_S):
            with suppress(queue.Empty):
                good, value = answer.get(timeout=patience)
                break
        else:
            self._stuck = True
            raise TimeoutError
        if not good:
            raise value
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread. If its call in progress does not return, the thread stays, and ends when the call does."""
        self._jobs.put(None)
        self._thread.join(_LAST_REQUEST_S)
        leave_behind(self._thread, _STORE_CALL)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, answer = job
            try:
                answer.put((True, function()))
            except BaseException as error:
                answer.put((False, error))
            del job, function, answer  # A store must not be kept alive by the thread that waits for its next call.


class StoreMailbox:
    """A mailbox over a torch.distributed store.

    Args:
        store: The store; only `worker` calls it.
        prefix: What all keys of this job begin with.
        worker: The thread that makes the calls.
    """

    def __init__(self, store: Any, prefix: str, worker: Worker) -> None:
        self._store = store
        self._prefix = prefix
        self._worker: Worker | None = worker

    def put(self, key: str, value: bytes, deadline: float) -> None:
        self._call(lambda store: store.set(self._prefix + key, value), deadline)

    def claim(self, key: str, value: bytes, deadline: float) -> bytes:
        text = value.decode("ascii")
        return bytes(self._call(lambda store: store.compare_set(self._prefix + key, "", text), deadline))

    def read(self, keys: Sequence[str], deadline: float) -> list[bytes]:
        names = [self._prefix + key for key in keys]
        return [bytes(value) for value in self._call(lambda store: store.multi_get(names), deadline)]

    def has(self, key: str, deadline: float) -> bool:
        return bool(self._call(lambda store: store.check([self._prefix + key]), deadline))

    def add(self, key: str, amount: int, deadline: float) -> int:
        return int(self._call(lambda store: store.add(self._prefix + key, amount), deadline))

    def remove(self, key: str, deadline: float) -> None:
        self._call(lambda store: store.delete_key(self._prefix + key), deadline)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = self._store = None

    def _call(self, function: Callable[[Any], Any], deadline: float) -> Any:
        store, worker = self._store, self._worker
        if worker is None:
            raise BootstrapError("the connection to the other ranks is closed; call init() again on every rank")
        try:
            return worker.call(lambda: function(store), deadline - time.monotonic())
        except TimeoutError:
            raise BootstrapError(
                "the store of this job does not answer any more; is the process that serves it (rank 0, or the "
                "launcher) stopped, or the network to its host cut?"
            ) from None
        except (RuntimeError, OSError):
            # torch's text names the address, which should not be in a log.
            raise BootstrapError(
                "the connection to the store of this job broke: the process that serves it (rank 0, or the launcher) "
                "has left"
            ) from None


class ThreadTable:
    """The table that the mailboxes of one process' threads share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}
        self.changed = threading.Condition()


class ThreadMailbox:
    """A mailbox for PEs that are threads of this process; it never blocks, so that the deadlines have no say."""

    def __init__(self, table: ThreadTable) -> None:
        self._table = table

    def put(self, key: str, value: bytes, deadline: float) -> None:
        with self._table.changed:
            self._table.values[key] = value
            self._table.changed.notify_all()

    def claim(self, key: str, value: bytes, deadline: float) -> bytes:
        with self._table.changed:
            return self._table.values.setdefault(key, value)

    def read(self, keys: Sequence[str], deadline: float) -> list[bytes]:
        with self._table.changed:
            return [self._table.values[key] for key in keys]

    def has(self, key: str, deadline: float) -> bool:
        with self._table.changed:
            return key in self._table.values

    def add(self, key: str, amount: int, deadline: float) -> int:
        with self._table.changed:
            total = self._table.counters.get(key, 0) + amount
            if amount:
                self._table.counters[key] = total
                self._table.changed.notify_all()
            return total

    def remove(self, key: str, deadline: float) -> None:
        with self._table.changed:
            self._table.values.pop(key, None)
            self._table.counters.pop(key, None)

    def pause(self, seconds: float) -> None:
        with self._table.changed:
            self._table.changed.wait(seconds)

    def close(self) -> None:
        pass  # The table goes with the last mailbox.


def serve_store(host: str, worker: Worker, deadline: float) -> tuple[Any, int]:
    """Serve a store at a free port of one address of this host, and no other.

    Args:
        host: The address to listen on, "127.0.0.1" where all ranks are on this host.
        worker: The thread that makes the store, and later its calls.
        deadline: `time.monotonic()` at which to give up.

    Returns:
        The store, which serves as long as it lives, and its port.
    """

    def serve() -> tuple[Any, int]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # Without master_listen_fd the store listens on all interfaces.
            listener.bind((host, 0))
            listener.listen(4096)
            port = int(listener.getsockname()[1])
            store = tcp_store(host, port, deadline, is_master=True, master_listen_fd=listener.detach(), use_libuv=True)
        return store, port

    try:
        return worker.call(serve, deadline - time.monotonic())
    except TimeoutError:
        raise BootstrapError("this process could not serve the job's store within the time-out") from None
    except (RuntimeError, OSError) as error:
        raise BootstrapError(
            f"this process cannot serve the job's store: {type(error).__name__}; is networking set up on this host "
            "(the loopback interface, the host's own address)?"
        ) from None


def connect_store(host: str, port: int, worker: Worker, deadline: float) -> Any:
    """Connect to a store, waiting for it to appear.

    Args:
        host: Name or address of the store's host.
        port: Its port.
        worker: The thread that makes the connection, and later its calls.
        deadline: `time.monotonic()` at which to give up.
    """
    progress = ["its host name cannot be resolved"]

    def connect() -> Any:
        # torch's own attempts log the address and a C++ stack each time, so try to connect first.
        while True:
            remaining = deadline - time.monotonic()
            try:
                addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                progress[0] = "nobody listens at the address, or no route leads there"
                family, kind, protocol, _, address = addresses[0]
                with socket.socket(family, kind, protocol) as probe:
                    probe.settimeout(max(0.05, remaining))
                    probe.connect(address)
                break
            except OSError:
                if remaining <= 0:
                    raise
                time.sleep(0.05)
        progress[0] = "what listens there does not speak the protocol of torch.distributed's store"
        return tcp_store(host, port, deadline)

    try:
        return worker.call(connect, deadline - time.monotonic())
    except (TimeoutError, RuntimeError, OSError):
        raise BootstrapError(
            f"the store of this job cannot be reached: {progress[0]}; is rank 0 (or the launcher) alive, and do "
            "MASTER_ADDR and MASTER_PORT, if set, name its host and port?"
        ) from None


def tcp_store(host: str, port: int, deadline: float, **options: Any) -> Any:
    """Make a torch.distributed.TCPStore; its constructor may block for ever, so call it in a `Worker`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # imported late: it takes two seconds

    seconds = max(deadline - time.monotonic(), 0.1)  # torch refuses a time-out of zero
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=seconds), **options)
