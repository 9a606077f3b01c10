"""The folder of compiled kernels: one entry per key, complete or absent.

Layout (PERSISTENT_OPS_CACHE, else XDG_CACHE_HOME/persistent_ops, else ~/.cache/persistent_ops):

    entries/<key>/manifest.json, <stem>.so or <stem>.cubin    complete and checked, or absent
    shared/<shared_key>                                       the key of an entry that other machines may use
    locks/<key>.lock                                          held with flock by the process that compiles
    tmp/<key>.<random>/                                       where it compiles; renamed to entries/<key> at the end

An entry appears by one rename, so a process that is killed leaves no half entry, and the operating system drops its
lock. The manifest holds the hash of the artifact: an entry that does not match it is compiled again. Environment
variables are read at every call.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError
from ..file_lock import lock_within
from ..file_sync import sync

__all__ = ["Job", "cache_folder", "count_shared", "fetch", "fetch_shared"]

_OUTPUT_LINES = 60
_DEFAULT_TIMEOUT_S = 600.0
_LONGEST_TIMEOUT_S = 20 * 86400.0  # the system counts milliseconds in 32 bits
_LEFT_OVER_S = 24 * 3600.0
_ROOT = 0

_log = logging.getLogger("persistent_ops")


@dataclass(frozen=True)
class Job:
    """One compilation.

    Attributes:
        what: what to call it in messages, for example "compiling kernels/name.cuh for sm_90".
        key: hash of all that decides what the compiler writes.
        artifact: name of the file that the last command writes.
        unit: name and text of the generated file that the commands compile.
        commands: run one after the other, in the folder that holds `unit`.
        unchanged: asked after compiling; False if the sources have changed since the key was made.
        shared_key: hash of what is compiled, whichever compiler does it: without a compiler, an entry is found by it.
            None for code that other machines may not be able to run.
    """

    what: str
    key: str
    artifact: str
    unit: tuple[str, str]
    commands: tuple[tuple[str, ...], ...]
    unchanged: Callable[[], bool]
    shared_key: str | None = None


def _cache_path() -> Path:
    explicit = os.environ.get("PERSISTENT_OPS_CACHE")
    if explicit:
        return Path(os.path.abspath(os.path.expanduser(explicit)))
    # The XDG base directory specification: a relative XDG_CACHE_HOME is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "persistent_ops"
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or os.environ.get("HOME") == "":
        raise CompileError(
            "the compile cache has no place: there is no home folder. Set PERSISTENT_OPS_CACHE to a folder."
        )
    return Path(home) / ".cache" / "persistent_ops"


def cache_folder() -> Path:
    """Return the compile cache's folder, created with mode 0700 where it did not exist.

    Raises:
        CompileError: it cannot be created, belongs to another user who is not root, or others may write to it. Code
            from it is loaded into this process, so there is no other place to fall back to silently.
    """
    folder = _cache_path()
    remedy = "Set PERSISTENT_OPS_CACHE to a folder of your own."
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise CompileError(f"the compile cache {folder} cannot be created: {error}. {remedy}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CompileError(f"the compile cache {folder} is not a folder. {remedy}")
    if status.st_uid not in (os.geteuid(), _ROOT):  # root could change this process anyway
        raise CompileError(
            f"the compile cache {folder} belongs to user id {status.st_uid}, but this process runs as {os.geteuid()}: "
            f"its content cannot be trusted. {remedy}"
        )
    if status.st_mode & 0o022:
        raise CompileError(
            f"the compile cache {folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): its "
            f"content cannot be trusted. Run `chmod 700 {shlex.quote(str(folder))}` after emptying it. {remedy}"
        )
    return folder


def timeout() -> float:
    """Return the seconds that a compiler may run."""
    value = os.environ.get("PERSISTENT_OPS_COMPILE_TIMEOUT")
    if not value:
        return _DEFAULT_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise CompileError(f"PERSISTENT_OPS_COMPILE_TIMEOUT must be a number of seconds above 0; got {value!r}.")
    return min(seconds, _LONGEST_TIMEOUT_S)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_entry(folder: Path, key: str, artifact: str) -> dict[str, Any] | None:
    """Return the manifest of a complete entry, or None where it is absent, truncated or changed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if not isinstance(manifest, dict) or manifest["key"] != key or not isinstance(manifest["log"], str):
            return None
        if _digest(folder / artifact) != manifest["artifacts"][artifact]:
            return None
        return manifest
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(path: Path, seconds: float, what: str) -> Iterator[None]:
    """Hold the lock of one key; wait for another holder for at most `seconds`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(seconds, descriptor):
            holder = os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "an unknown process"
            raise CompileError(
                f"{what}: waited {seconds:g} s for {holder}, which holds {path}. Wait for it, end it, or "
                "allow more seconds in PERSISTENT_OPS_COMPILE_TIMEOUT."
            )
        # The name is for the message above only; the lock itself is the operating system's and ends with its holder.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        # Closing would be enough, were it not for a child forked meanwhile by another thread, which shares the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def fetch(job: Job) -> tuple[Path, dict[str, Any]]:
    """Return a job's artifact, from the cache or compiled now.

    Of all the processes and threads that ask for one key at the same time, one compiles and the others wait for it, at
    most as long as a compiler may run (PERSISTENT_OPS_COMPILE_TIMEOUT seconds, 600 by default).

    Returns:
        The artifact's path and the manifest: "key", "artifacts" (name to sha256), "commands", "seconds", "log".

    Raises:
        CompileError: the compiler failed or took too long, or the cache cannot be used.
    """
    cache = cache_folder()
    entry = cache / "entries" / job.key
    manifest = _read_entry(entry, job.key, job.artifact)
    if manifest is not None:
        return entry / job.artifact, manifest
    seconds = timeout()
    try:
        for name in ("entries", "locks", "shared", "tmp"):
            (cache / name).mkdir(mode=0o700, exist_ok=True)
        with _locked(cache / "locks" / f"{job.key}.lock", seconds, job.what):
            manifest = _read_entry(entry, job.key, job.artifact)  # the previous holder of the lock may have compiled it
            if manifest is None:
                _announce(cache)
                manifest = _compile(job, cache, entry, seconds)
    except OSError as error:
        if job.shared_key is not None and (shared := fetch_shared(job.shared_key, job.artifact)) is not None:
            return shared
        raise CompileError(
            f"{job.what}: the compile cache {cache} cannot be written: {error}. Make room, or set "
            "PERSISTENT_OPS_CACHE to a folder that can be written."
        ) from error
    return entry / job.artifact, manifest


def fetch_shared(shared_key: str, artifact: str) -> tuple[Path, dict[str, Any]] | None:
    """Return what `fetch` has returned for a job with this shared key, on this machine or another one, or None."""
    cache = cache_folder()
    try:
        key = (cache / "shared" / shared_key).read_text()
    except OSError:
        return None
    entry = cache / "entries" / key
    manifest = _read_entry(entry, key, artifact)
    return None if manifest is None else (entry / artifact, manifest)


@functools.cache
def _announce(cache: Path) -> None:
    """Say why the program waits, unless a process that still runs, another PE for one, has said so."""
    descriptor = os.open(cache / "locks" / "announced", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if lock_within(0.0, descriptor):  # until this process ends
        _log.warning("persistent_ops: compiling kernels, once; they stay in %s", cache)
    else:
        os.close(descriptor)


def count_shared(suffix: str) -> int:
    """Return how many entries that other machines may use have an artifact with this suffix."""
    cache = cache_folder()
    keys = [path.read_text() for path in (cache / "shared").glob("*")]
    return sum(any((cache / "entries" / key).glob(f"*{suffix}")) for key in keys)


def _compile(job: Job, cache: Path, entry: Path, seconds: float) -> dict[str, Any]:
    """Compile a job into its entry. The caller holds the lock of the key."""
    _remove_left_overs(cache / "tmp", job.key)
    folder = Path(tempfile.mkdtemp(prefix=f"{job.key}.", dir=cache / "tmp"))
    try:
        scratch = folder / "scratch"
        scratch.mkdir()
        (folder / job.unit[0]).write_text(job.unit[1])
        started = time.monotonic()
        log = "".join(_run_compiler(command, folder, scratch, job.what, seconds) for command in job.commands)
        elapsed = time.monotonic() - started
        artifact = folder / job.artifact
        if not artifact.is_file():
            raise CompileError(
                f"{job.what}: the compiler reported success but wrote no {job.artifact}\n"
                f"command (in a folder of the cache): {shlex.join(job.commands[-1])}"
            )
        if not job.unchanged():
            raise CompileError(f"{job.what}: its sources were changed while they were compiled. Call it again.")
        shutil.rmtree(scratch)
        for file in list(folder.iterdir()):
            if file.name != job.artifact:
                file.unlink()
        manifest = {
            "key": job.key,
            "artifacts": {job.artifact: _digest(artifact)},
            "commands": [shlex.join(command) for command in job.commands],
            "seconds": round(elapsed, 3),
            "log": log,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in (artifact, folder / "manifest.json", folder):
            sync(path)
        if entry.exists():  # corrupt, or it would have been a hit
            entry.rename(folder / "replaced")
            shutil.rmtree(folder / "replaced")
        folder.rename(entry)
        sync(entry.parent)
        if job.shared_key is not None:
            _write_shared(cache, job.shared_key, job.key)
        _log.info("persistent_ops: %s: compiled in %.1f s", job.what, elapsed)
        return manifest
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_shared(cache: Path, shared_key: str, key: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f"{key}.", dir=cache / "tmp")
    with open(descriptor, "w") as file:
        file.write(key)
    os.rename(name, cache / "shared" / shared_key)


def _remove_left_overs(folder: Path, key: str) -> None:
    """Remove the working folders that killed processes left: all of `key`, whose lock is held, and any old one."""
    oldest = time.time() - _LEFT_OVER_S
    for left_over in folder.iterdir():
        with contextlib.suppress(OSError):
            if left_over.name.startswith(f"{key}.") or left_over.stat().st_mtime < oldest:
                shutil.rmtree(left_over, ignore_errors=True)


def _run_compiler(command: Sequence[str], folder: Path, scratch: Path, what: str, seconds: float) -> str:
    """Run one command in `folder` and return what it printed."""
    environ = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    shown = f"command (in a folder of the cache): {shlex.join(command)}"
    try:
        # A session of its own, so that nvcc's children end with it.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CompileError(f"{what}: the compiler cannot be started: {error}\n{shown}") from error
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CompileError(
                f"{what}: the compiler did not finish within {seconds:g} s (PERSISTENT_OPS_COMPILE_TIMEOUT)\n{shown}"
            ) from None
        raise
    if process.returncode != 0:
        lines = output.splitlines()
        cut = f" (last {_OUTPUT_LINES} of {len(lines)} lines)" if len(lines) > _OUTPUT_LINES else ""
        last = "\n".join(lines[-_OUTPUT_LINES:])
        raise CompileError(
            f"{what}: the compiler failed with status {process.returncode}\n{shown}\noutput{cut}:\n{last}"
        )
    return output
