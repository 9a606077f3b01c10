"""Start PEs on this machine without a launcher: fresh processes, or threads for tests."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import secrets
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from persistent_ops.runtime import bootstrap
from persistent_ops.runtime.board import Worker, serve_store
from persistent_ops.runtime.bootstrap import Bootstrap
from persistent_ops.runtime.errors import BootstrapError, PeerTimeoutError, PersistentOpsError
from persistent_ops.runtime.launchers import LAUNCHER_VARIABLES

__all__ = ["launch", "thread_bootstrap"]

_GRACE_S = 1.0  # for the other PEs to report their own errors after the first one
_THREAD_GRACE_S = 5.0  # threads cannot be ended, so they get longer to end by themselves
_TERMINATE_S = 0.5  # between SIGTERM and SIGKILL
_HEADER_BYTES = 8
_PR_SET_PDEATHSIG = 1

_this_thread = threading.local()


def launch(
    fn: Callable[..., Any], num_pes: int, *args: Any, threads: bool = False, timeout: float | None = None
) -> list[Any]:
    """Run a function on several PEs of this machine and return their results.

    Args:
        fn: Called as `fn(*args)` on every PE; calls `persistent_ops.init()` itself where it needs the other PEs. Must
            be picklable (defined at module level) unless `threads` is set; the script that calls `launch` must guard
            that call with `if __name__ == "__main__":`, because each process imports it afresh.
        num_pes: Number of PEs.
        args: Arguments of `fn`, the same for all PEs.
        threads: Make the PEs threads of this process instead of processes. A thread cannot be killed: one that hangs
            past `timeout` is left behind as a daemon thread.
        timeout: Seconds for the whole; then the processes are killed. None for no limit.

    Returns:
        The results in rank order. From processes they come as copies by pickle: a CUDA tensor needs a GPU to be read.

    Raises:
        Exception: The exception of the PE that failed first, where its type can be imported here, with that PE's
            traceback as its cause.
        PersistentOpsError: A PE was killed by a signal, ended without a result, raised an exception that cannot be
            rebuilt here, or the time-out passed; the rank is named.
        ValueError: `num_pes` is less than 1, `timeout` is not positive, or `fn` or `args` cannot be pickled.
    """
    if not isinstance(num_pes, int) or num_pes < 1:
        raise ValueError(f"num_pes must be a whole number of at least 1, got {num_pes!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
    if threads:
        return _launch_threads(fn, num_pes, args, timeout)
    try:
        task = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fn and args must be picklable to reach the PEs ({error}); define fn at module level, or pass threads=True"
        ) from error
    return _Processes(task, num_pes, timeout).run()


def thread_bootstrap() -> Bootstrap | None:
    """Return the connection of the PE that this thread is, or None outside `launch(..., threads=True)`."""
    return getattr(_this_thread, "bootstrap", None)


class _RemoteTraceback(Exception):
    """Carries a PE's traceback as text, to be shown as the cause of its exception."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Failure:
    """Why one PE has no result."""

    def __init__(self, rank: int, error: BaseException, *, killed: bool = False) -> None:
        self.rank = rank
        self.error = error
        # A PE that died, or failed in its own code, explains the ones that then missed it.
        missed_a_peer = isinstance(error, (BootstrapError, PeerTimeoutError))
        self.order = 0 if killed else 2 if missed_a_peer else 1


class _Processes:
    """The processes of one `launch`."""

    def __init__(self, task: bytes, num_pes: int, timeout: float | None) -> None:
        self._task = task
        self._num_pes = num_pes
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        self._received = [bytearray() for _ in range(num_pes)]
        self._results: dict[int, Any] = {}
        self._failures: list[_Failure] = []

    def run(self) -> list[Any]:
        worker = Worker()
        store = None
        try:
            # Nobody but the processes below is told the port; the token keeps a stranger's keys apart from theirs.
            store, port = serve_store("127.0.0.1", worker, time.monotonic() + 30.0)
            self._start(f"127.0.0.1:{port}", secrets.token_hex(16))
            self._watch()
        finally:
            self._end()
            del store
            worker.close()
        if self._failures:
            raise min(self._failures, key=lambda failure: failure.order).error
        return [self._results[rank] for rank in range(self._num_pes)]

    def _start(self, store: str, job: str) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._num_pes):
            reader, writer = context.Pipe(duplex=False)
            self._readers.append(reader)
            environment = {
                "PERSISTENT_OPS_RANK": str(rank),
                "PERSISTENT_OPS_WORLD_SIZE": str(self._num_pes),
                "PERSISTENT_OPS_STORE": store,
                "PERSISTENT_OPS_JOB": job,
            }
            process = context.Process(
                target=_run_process, args=(self._task, environment, writer, os.getpid()), name=f"PE {rank}"
            )
            with contextlib.closing(writer):
                process.start()
            self._processes.append(process)
            os.set_blocking(reader.fileno(), False)

    def _watch(self) -> None:
        """Collect results until all PEs are done, the first failure's grace time has passed, or time is up."""
        grace_ends: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(self._readers[rank].fileno(), selectors.EVENT_READ, rank)
                selector.register(process.sentinel, selectors.EVENT_READ, rank)
            running = set(range(self._num_pes))
            while running:
                if self._failures and grace_ends is None:
                    grace_ends = time.monotonic() + _GRACE_S
                limits = [limit for limit in (grace_ends, self._deadline) if limit is not None]
                wait = max(0.0, min(limits) - time.monotonic()) if limits else None
                ready = {key.data for key, _ in selector.select(wait)} & running
                for rank in ready:
                    if self._collect(rank):
                        running.discard(rank)
                        selector.unregister(self._readers[rank].fileno())
                        selector.unregister(self._processes[rank].sentinel)
                if running and limits and time.monotonic() >= min(limits):
                    if not self._failures:
                        names = ", ".join(map(str, sorted(running)))
                        text = f"launch() ran longer than {self._timeout} s and was ended; still running: PE {names}"
                        self._failures.append(_Failure(min(running), PersistentOpsError(text)))
                    return

    def _collect(self, rank: int) -> bool:
        """Read what a PE has sent so far; return whether it is done."""
        ended = not self._processes[rank].is_alive()  # Asked first: what was sent before the end is then all here.
        received = self._received[rank]
        closed = False
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._readers[rank].fileno(), 1 << 20):
                received += part
            closed = True
        if len(received) >= _HEADER_BYTES:
            size = int.from_bytes(received[:_HEADER_BYTES], "little")
            if len(received) == _HEADER_BYTES + size:
                self._take(rank, bytes(received[_HEADER_BYTES:]))
                return True
        if closed and not ended:
            self._processes[rank].join(_GRACE_S)  # Closing the pipe is among the last things a dying process does.
            ended = True
        if ended:
            self._failures.append(_Failure(rank, self._death(rank), killed=True))
        return ended

    def _take(self, rank: int, message: bytes) -> None:
        self._received[rank] = bytearray()
        try:
            result, error, name, text, trace = pickle.loads(message)
            if error is None and name is None:
                self._results[rank] = pickle.loads(result)
                return
            rebuilt = pickle.loads(error) if error else None
        except Exception as error:
            unreadable = PersistentOpsError(f"what PE {rank} returned cannot be rebuilt here: {error}")
            self._failures.append(_Failure(rank, unreadable))
            return
        if not isinstance(rebuilt, BaseException):
            rebuilt = PersistentOpsError(f"PE {rank} of {self._num_pes} raised {name}: {text}")
        rebuilt.__cause__ = _RemoteTraceback(f"PE {rank} of {self._num_pes} raised it:\n{trace}")
        self._failures.append(_Failure(rank, rebuilt))

    def _death(self, rank: int) -> PersistentOpsError:
        code = self._processes[rank].exitcode
        who = f"PE {rank} of {self._num_pes}"
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            remedy = " (out of memory?)" if -code == signal.SIGKILL else ""
            return PersistentOpsError(f"{who} was killed by {name}{remedy} before it returned a result")
        return PersistentOpsError(
            f"{who} exited with code {code} before it returned a result; look at its output, and guard the script's "
            'call of launch() with if __name__ == "__main__":'
        )

    def _end(self) -> None:
        """End and reap every process, whatever state it is in."""
        if self._failures or len(self._results) < len(self._processes):
            for process in self._processes:
                process.terminate()
            self._join(_TERMINATE_S)
        else:
            self._join(self._time_to_leave())
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()

    def _time_to_leave(self) -> float:
        # PEs that have returned their results still run their exit handlers.
        return 10.0 if self._deadline is None else max(1.0, self._deadline - time.monotonic())

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))


def _run_process(task: bytes, environment: dict[str, str], writer: Connection, parent: int) -> None:
    """Be one PE: run the task and send its result, or its exception, to the process that called `launch`."""
    if sys.platform == "linux":
        # The parent ends its PEs, but cannot once it is killed itself; so the kernel does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its PEs.
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        fn, args = pickle.loads(task)
        # Plain pickle, not multiprocessing's: that one would send a tensor as a handle of a shared memory segment.
        message = pickle.dumps((pickle.dumps(fn(*args)), None, None, None, None))
    except SystemExit:
        raise
    except BaseException as error:
        bootstrap.fail_all(f"{type(error).__name__}: {error}")
        message = _describe(error)
    with writer:
        view = memoryview(len(message).to_bytes(_HEADER_BYTES, "little") + message)
        while view:
            view = view[os.write(writer.fileno(), view) :]


def _describe(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # Many exceptions pickle, but cannot be rebuilt.
    except Exception:
        pickled = b""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return pickle.dumps((None, pickled, name, str(error), trace))


def _launch_threads(fn: Callable[..., Any], num_pes: int, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
    boards = bootstrap.from_threads(num_pes, timeout if timeout is not None else 30.0)
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    changed = threading.Condition()

    def run(rank: int) -> None:
        _this_thread.bootstrap = boards[rank]
        failure, result = None, None
        try:
            result = fn(*args)
        except BaseException as error:
            boards[rank].fail(f"{type(error).__name__}: {error}")
            if error.__cause__ is None:
                error.__cause__ = _RemoteTraceback(f"PE {rank} of {num_pes} (a thread) raised it")
            failure = _Failure(rank, error)
        finally:
            del _this_thread.bootstrap
        with changed:
            if failure is None:
                results[rank] = result
            else:
                failures.append(failure)
            changed.notify_all()

    deadline = None if timeout is None else time.monotonic() + timeout
    pes = [threading.Thread(target=run, args=(rank,), name=f"PE {rank}", daemon=True) for rank in range(num_pes)]
    for pe in pes:
        pe.start()
    with changed:
        while len(results) + len(failures) < num_pes:
            if failures:
                changed.wait_for(lambda: len(results) + len(failures) == num_pes, _THREAD_GRACE_S)
                break
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                hung = [rank for rank in range(num_pes) if rank not in results]
                for board in boards:
                    board.fail("the time-out of launch() passed")
                raise PersistentOpsError(
                    f"launch() ran longer than {timeout} s; still running: PE {', '.join(map(str, hung))} (threads, "
                    "which cannot be ended)"
                )
            # A bounded wait, so that Ctrl-C is seen on every platform.
            changed.wait(1.0 if remaining is None else min(remaining, 1.0))
        if failures:
            raise min(failures, key=lambda failure: failure.order).error
    return [results[rank] for rank in range(num_pes)]
