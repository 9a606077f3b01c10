"""Start NVSHMEM in one job at a time, and in none during another job's end, where PEs of a host share GPUs.

PEs that share a GPU exchange this fact in shared memory. NVSHMEM (3.4.5, src/host/init/init.cu) names that memory after
the first of these PEs only: mps_shm_0, in every job. A start beside another job's start finds that job's memory, and a
start beside an end finds the memory removed: either way the processes crash. With a GPU for each PE there is no such
memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .bootstrap.connection import Bootstrap
from .bootstrap.process_identity import boot_id, pid_space, start_of
from .errors import BootstrapError
from .file_lock import lock_within

__all__ = ["turn_to_end", "turn_to_start"]

_log = logging.getLogger("persistent_ops")
_SHARED_MEMORY = Path("/dev/shm")  # containers that share it share what must not be found there
_OVER = "over"


@contextlib.contextmanager
def turn_to_start(bootstrap: Bootstrap, seconds: float) -> Iterator[None]:
    """Give a context in which no other job of this user starts NVSHMEM or ends it on the hosts of this one; collective.

    Args:
        bootstrap: of the job's PEs, all of which share GPUs.
        seconds: to wait for others on a host.

    Raises:
        BootstrapError: another job has not ended its turn in time; the error names the processes that hold it.
    """
    with _lock_file() as descriptor:
        identity = "" if descriptor is None else _identity(descriptor)
        identities = bootstrap.exchange("nvshmem-lock", identity.encode())
        # One PE locks for all that see the same file, file by file in the same order everywhere.
        for first in sorted({identities.index(each) for each in identities if each}):
            if first == bootstrap.rank and descriptor is not None and not _lock(descriptor, seconds, shared=False):
                raise BootstrapError(
                    f"NVSHMEM starts in one job at a time where PEs share a GPU, and the turn of this one has not come "
                    f"within {seconds:g} s: {_holders(descriptor)}. Wait for it or end it, pass a longer timeout to "
                    "po.init(), or give each PE a GPU of its own"
                )
            bootstrap.exchange("nvshmem-turn", b"")
        yield
        bootstrap.exchange("nvshmem-turn-over", b"")  # who locked may be the first to have started


@contextlib.contextmanager
def turn_to_end(seconds: float) -> Iterator[None]:
    """Give a context in which no job of this user starts NVSHMEM on this host.

    Args:
        seconds: to wait for another job. Then this job continues beside it, and prints a message: nothing may keep it
            from leaving.
    """
    with _lock_file() as descriptor:
        if descriptor is not None and not _lock(descriptor, seconds, shared=True):
            _log.warning("persistent_ops: after %g s NVSHMEM ends beside others: %s", seconds, _holders(descriptor))
        yield


@contextlib.contextmanager
def _lock_file() -> Iterator[int | None]:
    """Open the lock's file, and unlock and close it at the end; None, with a warning, if it cannot be opened."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"persistent_ops.nvshmem.{os.getuid()}.lock"
    try:
        descriptor = _open_own(path)
    except OSError as error:
        _log.warning("persistent_ops: jobs that start at the same time may crash each other: %s", error)
        yield None
        return
    try:
        yield descriptor
    finally:
        _note(descriptor, _OVER)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile shares the lock
        os.close(descriptor)


def _open_own(path: Path) -> int:
    """Open or make a file that no other user owns: the name can be guessed, and all users may write to the folder."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(f"{path} is not a file of user id {os.geteuid()} alone; remove it")
    return descriptor


def _identity(descriptor: int) -> str:
    """Return the identity of a file, on this host (containers have their own names) and among hosts."""
    status = os.fstat(descriptor)
    return f"{boot_id() or os.uname().nodename} {status.st_dev} {status.st_ino}"


def _lock(descriptor: int, seconds: float, *, shared: bool) -> bool:
    """Return whether the turn has come in time. Without locks there are no turns, and a warning says so."""
    try:
        if not lock_within(seconds, descriptor, shared=shared):
            return False
        if not shared:
            os.ftruncate(descriptor, 0)  # whose turn it was before
        _note(descriptor, "ending" if shared else "starting")
    except OSError as error:
        _log.warning("persistent_ops: jobs that start at the same time may crash each other: %s", error)
    return True


# ---- whose turn it is ------------------------------------------------------------------------------------------------


def _note(descriptor: int, what: str) -> None:
    """Append to the lock's file the purpose of a turn, or its end; process and descriptor identify the turn."""
    pid = os.getpid()
    line = f"{pid} {descriptor} {start_of(pid)} {_pid_numbers()} {what} {time.monotonic()}\n"
    with contextlib.suppress(OSError):  # only errors read it
        os.write(descriptor, line.encode())


def _pid_numbers() -> str:
    """Return by what PIDs are numbered here: containers that share a file may each have numbers of their own."""
    return f"{boot_id()}/{pid_space()}"


def _holders(descriptor: int) -> str:
    """Return which processes have a turn, at what, and for how long: those that have noted it and still live.

    A process of another container is left out: its number means another process here, and its end is not visible.
    """
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()
    turns: dict[tuple[str, str, str], str] = {}
    for pid, number, started, numbers, what, since in re.findall(
        r"(?m)^(\d+) (\d+) (\d*) (\S+) (\w+) (\d+\.\d+)$", text
    ):
        turn = pid, number, numbers
        turns.pop(turn, None)
        has_been = f"has been {what} NVSHMEM for {time.monotonic() - float(since):.1f} s"
        if what == _OVER:
            continue
        if numbers != _pid_numbers():
            turns[turn] = f"a process of another container {has_been}, unless it has been killed"
        elif started and start_of(int(pid)) == started:
            turns[turn] = f"process {pid} {has_been}"
    return ", ".join(turns.values()) or "another process, which this one cannot see, has been at it"
