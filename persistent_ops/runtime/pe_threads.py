"""PEs that are threads of this process: `launch(..., threads=True)`.

A world that a PE's function leaves open is closed after the function: a heap must not be unmapped while a thread of the
world still writes to it. A thread cannot be ended from outside. When the interpreter exits, a thread that a launch has
abandoned gets an exception, which it sees once it is back in Python code, and the interpreter waits for it. An earlier
exception could interrupt an import, which would then stay half done for the whole process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from persistent_ops.runtime.bootstrap import connection as bootstrap
from persistent_ops.runtime.bootstrap.connection import Bootstrap
from persistent_ops.runtime.errors import PersistentOpsError
from persistent_ops.runtime.pe_failure import Failure, RemoteTraceback, first_cause, text_of

__all__ = ["launch_threads", "thread_bootstrap", "when_pe_ends"]

_LONGEST_S = 1e9  # infinity is no time to meet in
_GRACE_S = 5.0  # for the other PEs to report their own errors after the first one; threads cannot be ended
_EXIT_S = 5.0  # for abandoned threads to end when the interpreter exits

_this_thread = threading.local()
_left_behind: list[tuple[_Threads, int]] = []


class _Abandoned(SystemExit):
    """Raised at exit in a PE whose launch has ended without it."""


def thread_bootstrap() -> Bootstrap | None:
    """Return the connection of the PE that this thread is, or None outside `launch(..., threads=True)`."""
    return getattr(_this_thread, "bootstrap", None)


def when_pe_ends(action: Callable[[], None]) -> None:
    """Have `action` called, in this thread, when the function of the PE that it is has returned or raised."""
    if action not in _this_thread.at_end:
        _this_thread.at_end.append(action)


def launch_threads(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
    """See `persistent_ops.launch`."""
    return _Threads(fn, world_size, args, timeout).run()


class _Threads:
    """The threads of one `launch`."""

    def __init__(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float | None) -> None:
        self._fn = fn
        self._args = args
        self._world_size = world_size
        self._timeout = timeout
        self._boards = bootstrap.from_threads(world_size, 30.0 if timeout is None else min(timeout, _LONGEST_S))
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._changed = threading.Condition()
        self._can_be_asked = [True] * world_size  # to end: its function runs
        self._threads = [
            threading.Thread(target=self._be_pe, args=(rank,), name=f"PE {rank}", daemon=True)
            for rank in range(world_size)
        ]

    def run(self) -> list[Any]:
        try:
            for rank, thread in enumerate(self._threads):
                try:
                    thread.start()
                except RuntimeError as error:
                    raise PersistentOpsError(
                        f"PE {rank} of {self._world_size}: the system has no room for its thread ({error}); launch "
                        "fewer PEs, or raise the limit of threads (ulimit -u, a container's pids.max)"
                    ) from error
            self._watch()
        finally:
            self._await_ends()
            self._leave_behind()
        if self._failures:
            raise first_cause(self._failures)
        return [self._results[rank] for rank in range(self._world_size)]

    def _watch(self) -> None:
        """Wait until all PEs are done, the first failure's grace time has passed, or time is up."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        with self._changed:
            while not self._is_complete():
                if self._failures:
                    self._changed.wait_for(self._is_complete, _GRACE_S)
                    return
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    hung = [str(rank) for rank, runs in enumerate(self._can_be_asked) if runs] or ["none, but closing"]
                    raise PersistentOpsError(
                        f"launch() ran longer than {self._timeout} s; still running: PE {', '.join(hung)} (threads, "
                        "which cannot be ended)"
                    )
                # A bounded wait, so that Ctrl-C is seen on every platform.
                self._changed.wait(1.0 if remaining is None else min(remaining, 1.0))

    def _exited(self, rank: int, code: object) -> PersistentOpsError:
        return PersistentOpsError(
            f"PE {rank} of {self._world_size} exited with code {code or 0} before it returned a result"
        )

    def _await_ends(self) -> None:
        """Wait for the threads of PEs that are done.

        What they hold in thread-local places is let go of after all code of theirs, and must be so before the
        interpreter ends: a world's tensors could not be released then (see `end_those_left_behind`).
        """
        with self._changed:
            done = {*self._results, *(failure.rank for failure in self._failures)}
        for rank in done:
            self._threads[rank].join(_EXIT_S)

    def _is_complete(self) -> bool:
        return len(self._results) + len(self._failures) == self._world_size

    def _be_pe(self, rank: int) -> None:
        _this_thread.bootstrap, _this_thread.at_end = self._boards[rank], []
        result: Any = None
        raised: list[BaseException] = []
        try:
            result = self._fn(*self._args)
        except BaseException as error:
            raised.append(error if type(error) is not SystemExit else self._exited(rank, error.code))
        while self._can_be_asked[rank]:
            with contextlib.suppress(_Abandoned):  # It may be asked at the last moment. Nobody asks twice.
                self._ask_no_more(rank)
        if raised:  # before the world is closed, which would wait for the others
            self._boards[rank].fail(f"{type(raised[0]).__name__}: {text_of(raised[0])}")
        for action in _this_thread.at_end:
            try:
                action()
            except BaseException as error:
                raised.append(error)
        del _this_thread.bootstrap, _this_thread.at_end
        with self._changed:
            if raised:
                self._failures.append(self._failed(rank, raised[0]))
            else:
                self._results[rank] = result
            self._changed.notify_all()

    def _failed(self, rank: int, error: BaseException) -> Failure:
        if error.__cause__ is None:
            error.__cause__ = RemoteTraceback(f"PE {rank} of {self._world_size} (a thread) raised it")
        return Failure(rank, error)

    def _ask_no_more(self, rank: int) -> None:
        with self._changed:
            self._can_be_asked[rank] = False

    def _leave_behind(self) -> None:
        """Notify the connections of PEs that still run, if any, that no launch waits for them."""
        running = [rank for rank, thread in enumerate(self._threads) if thread.is_alive()]
        if self._is_complete():
            return
        for rank in running:
            self._boards[rank].fail("launch() has ended without it")
        _left_behind.extend((self, rank) for rank in running)
        atexit.unregister(end_those_left_behind)
        atexit.register(end_those_left_behind)

    def ask_to_end(self, rank: int) -> threading.Thread:
        """Raise an exception in a PE's function, which sees it once it is back in Python code; return its thread."""
        thread = self._threads[rank]
        with self._changed:
            if self._can_be_asked[rank] and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
        return thread


def end_those_left_behind() -> None:
    """Ask the threads of PEs whose launches have returned to end, and wait for that, at most 5 s."""
    # If a thread asks for the interpreter's lock while the interpreter ends, the thread is unwound, and also torch's
    # C++ frames below it. These end the process (CPython before 3.14).
    until = time.monotonic() + _EXIT_S
    threads = [launch.ask_to_end(rank) for launch, rank in _left_behind]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
