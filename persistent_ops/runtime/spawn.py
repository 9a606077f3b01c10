"""Start PEs on this machine without a launcher: fresh processes, or threads (`pe_threads`) for tests."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from persistent_ops.runtime.bootstrap import connection as bootstrap
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.bootstrap.mailbox import Worker, serve_store
from persistent_ops.runtime.errors import PersistentOpsError
from persistent_ops.runtime.pe_failure import Failure, RemoteTraceback, first_cause, text_of
from persistent_ops.runtime.pe_threads import launch_threads
from persistent_ops.runtime.task import Task, hidden_main, pack, pack_task

__all__ = ["launch"]

_GRACE_S = 1.0  # for the other PEs to report their own errors after the first one
_LEAVE_S = 10.0  # for the exit handlers of a PE
_TERMINATE_S = 0.5  # between SIGTERM and SIGKILL
_LOOK_S = 1.0  # between looks at whether PEs are alive
_LONGEST_WAIT_S = 86400.0  # at a time: the system counts milliseconds in 32 bits
_HEADER_BYTES = 8
_PR_SET_PDEATHSIG = 1


def launch(
    fn: Callable[..., Any], world_size: int, *args: Any, threads: bool = False, timeout: float | None = None
) -> list[Any]:
    """Run a function on several PEs of this machine and return their results.

    Args:
        fn: called as `fn(*args)` on every PE. It calls `persistent_ops.init()` itself if it needs the other PEs. It
            must be picklable (defined at module level) unless `threads` is set. The calling script must guard the call
            with `if __name__ == "__main__":`, because each process imports the script again. From a notebook, `python
            -c` or standard input, which no process can import, `fn` is sent by value with everything that it refers to;
            this needs cloudpickle (`pip install 'persistent-ops[notebook]'`). The processes have RANK, WORLD_SIZE,
            LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, so `fn` may call
            `torch.distributed.init_process_group()`.
        world_size: number of PEs.
        args: arguments of `fn`, the same for all PEs.
        threads: make the PEs threads of this process instead of processes, for tests. A thread cannot be killed: a
            thread that hangs past `timeout` continues as a daemon thread. At the interpreter's exit, SystemExit is
            raised in such threads once they are back in Python code, and the interpreter waits for them for at most 5
            s. No environment variables are set.
        timeout: seconds for the whole run; then the processes are killed. None for no limit.

    Returns:
        The results in rank order. Results of processes are copies by pickle: a CUDA tensor needs a GPU to be read.

    Raises:
        Exception: the exception of the PE that failed first, if its type can be imported here, with that PE's traceback
            as its cause.
        PersistentOpsError: the error names the rank. A PE was killed by a signal, ended without a result, returned a
            result that cannot be pickled, or raised an exception that cannot be rebuilt here; or the time-out passed;
            or this process is daemonic and may start no processes.
        TypeError: `fn` is not a function.
        ValueError: `world_size` is less than 1, `timeout` is not positive, `fn` or `args` cannot be pickled, or they
            need cloudpickle, which is not installed.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    is_time = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_time and timeout > 0):
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
    if threads:
        return launch_threads(fn, world_size, args, timeout)
    if multiprocessing.current_process().daemon:
        raise PersistentOpsError(
            "this process is daemonic, as workers of a pool or a DataLoader are, and may start none: launch from its "
            "parent, or pass threads=True"
        )
    return _Processes(pack_task(fn, args), world_size, timeout).run()


class _Processes:
    """The processes of one `launch`."""

    def __init__(self, task: Task, world_size: int, timeout: float | None) -> None:
        self._task = task
        self._world_size = world_size
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        self._received = [bytearray() for _ in range(world_size)]
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []

    def run(self) -> list[Any]:
        worker = Worker()
        store = None
        try:
            # Only the processes below learn the port; the token separates a stranger's keys from theirs.
            store, port = serve_store("127.0.0.1", worker, time.monotonic() + 30.0)
            with _held_port() as torch_port:
                self._start(f"127.0.0.1:{port}", secrets.token_hex(16), torch_port)
                self._watch()
        finally:
            self._end()
            del store
            worker.close()
        if self._failures:
            raise first_cause(self._failures)
        return [self._results[rank] for rank in range(self._world_size)]

    def _start(self, store: str, job: str, torch_port: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._world_size):
            reader, writer = context.Pipe(duplex=False)
            self._readers.append(reader)
            environment = {
                "PERSISTENT_OPS_RANK": str(rank),
                "PERSISTENT_OPS_WORLD_SIZE": str(self._world_size),
                "PERSISTENT_OPS_STORE": store,
                "PERSISTENT_OPS_JOB": job,
                "RANK": str(rank),
                "WORLD_SIZE": str(self._world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self._world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(torch_port),
            }
            process = context.Process(
                target=_run_process, args=(self._task, environment, writer, os.getpid()), name=f"PE {rank}"
            )
            self._processes.append(process)
            with contextlib.closing(writer), hidden_main(), _held_back_interrupts():
                process.start()
            os.set_blocking(reader.fileno(), False)

    def _watch(self) -> None:
        """Collect results until all PEs are done, the first failure's grace time has passed, or time is up."""
        grace_ends: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(self._readers[rank].fileno(), selectors.EVENT_READ, rank)
                selector.register(process.sentinel, selectors.EVENT_READ, rank)
            running = set(range(self._world_size))
            while running:
                if self._failures and grace_ends is None:
                    grace_ends = time.monotonic() + _GRACE_S
                limits = [limit for limit in (grace_ends, self._deadline) if limit is not None]
                wait = max(0.0, min(limits) - time.monotonic()) if limits else _LOOK_S  # 0: this look is the last
                ready = {key.data for key, _ in selector.select(min(wait, _LOOK_S))} & running
                # A child of a PE holds both ends that would report the PE's end, for as long as the child lives.
                for rank in ready | {rank for rank in running if not self._processes[rank].is_alive()}:
                    if self._collect(rank):
                        running.discard(rank)
                        selector.unregister(self._readers[rank].fileno())
                        selector.unregister(self._processes[rank].sentinel)
                if running and wait == 0.0:
                    if not self._failures:
                        names = ", ".join(map(str, sorted(running)))
                        text = f"launch() ran longer than {self._timeout} s and was ended; still running: PE {names}"
                        self._failures.append(Failure(min(running), PersistentOpsError(text)))
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
            self._processes[rank].join(
                _LEAVE_S
            )  # What closes the pipe is the end of the process, exit handlers and all.
            ended = True
        if ended:
            self._failures.append(Failure(rank, self._death(rank), killed=True))
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
            self._failures.append(Failure(rank, unreadable))
            return
        if not isinstance(rebuilt, BaseException):
            rebuilt = PersistentOpsError(f"PE {rank} of {self._world_size} raised {name}: {text}")
        rebuilt.__cause__ = RemoteTraceback(f"PE {rank} of {self._world_size} raised it:\n{trace}")
        self._failures.append(Failure(rank, rebuilt))

    def _death(self, rank: int) -> PersistentOpsError:
        code = self._processes[rank].exitcode
        who = f"PE {rank} of {self._world_size}"
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            remedy = " (out of memory?)" if -code == signal.SIGKILL else ""
            return PersistentOpsError(f"{who} was killed by {name}{remedy} before it returned a result")
        # Exit code of a process that imports a script without the guard; the exit code of a PE on its own is unknown.
        guard = ', and guard the script\'s call of launch() with if __name__ == "__main__":' if code == 1 else ""
        return PersistentOpsError(
            f"{who} exited with code {code} before it returned a result; look at its output{guard}"
        )

    def _end(self) -> None:
        """End and reap every process, whatever state it is in."""
        started = [process for process in self._processes if process.pid is not None]
        if self._failures or len(self._results) < len(self._processes):
            for process in started:
                process.terminate()
            self._join(started, _TERMINATE_S)
        else:
            self._join(started, self._time_to_leave())
        for process in started:
            process.kill()
        for process in started:
            process.join()
            process.close()
        for reader in self._readers:
            reader.close()

    def _time_to_leave(self) -> float:
        # PEs that have returned their results still run their exit handlers.
        if self._deadline is None:
            return _LEAVE_S
        return min(max(1.0, self._deadline - time.monotonic()), _LONGEST_WAIT_S)

    @staticmethod
    def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
        until = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """Keep a free port of this host for the store that torch.distributed serves in rank 0.

    Linux lets two sockets that both set SO_REUSEADDR have one port while at most one of them listens. torch's store
    sets it. The system gives a port that is only bound to no process that asks for any free port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def _held_back_interrupts() -> Iterator[None]:
    """Let processes that are started here begin with SIGINT blocked, as this thread has it meanwhile.

    A PE ignores it from where it can, after its imports: up to there Ctrl-C would end it with a traceback. Another
    thread of this process, which does not block it, may get it meanwhile: what that does comes after the start, too.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT where it starts its process
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    is_noted = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:  # nested, as another signal's handler may raise anywhere
        if is_noted:
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # which lets the handler run, if it has been held back
        finally:
            if is_noted:
                signal.signal(signal.SIGINT, handler)
            if came:
                signal.raise_signal(signal.SIGINT)


def _run_process(task: Task, environment: dict[str, str], writer: Connection, parent: int) -> None:
    """Be one PE: run the task and send its result, or its exception, to the process that called `launch`."""
    if sys.platform == "linux":
        # The parent ends its PEs, but not if it is killed itself; the kernel does that.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its PEs.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        fn, args = _unpack(task)
        # Plain pickle, not multiprocessing's, which would send a tensor as a handle of a shared memory segment.
        message = pickle.dumps((_packed(fn(*args), by_value=task.by_value), None, None, None, None))
    except SystemExit:
        raise
    except BaseException as error:
        bootstrap.fail_all(f"{type(error).__name__}: {text_of(error)}")
        message = _describe(error, by_value=task.by_value)
    with writer:
        view = memoryview(len(message).to_bytes(_HEADER_BYTES, "little") + message)
        while view:
            view = view[os.write(writer.fileno(), view) :]


def _unpack(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(task.data)
    except (AttributeError, ImportError) as error:
        raise PersistentOpsError(
            f"fn or args cannot be found by a PE's process ({error}); define what they refer to at the top level of a "
            "module or script"
        ) from error
    return fn, args


def _packed(result: Any, *, by_value: bool) -> bytes:
    try:
        return pack(result, by_value=by_value)
    except Exception as error:
        raise PersistentOpsError(
            f"what fn returned, a {type(result).__name__}, cannot be pickled ({text_of(error)}): return what can be, "
            "or pass threads=True where PEs may be threads"
        ) from error


def _describe(error: BaseException, *, by_value: bool) -> bytes:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = pack(error, by_value=by_value)
        pickle.loads(pickled)  # Many exceptions pickle, but cannot be rebuilt.
    except Exception:
        pickled = b""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return pickle.dumps((None, pickled, name, text_of(error), trace))
