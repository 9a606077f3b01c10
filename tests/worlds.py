"""Running PEs for tests: a program in a world, and a PE that dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from folders import FOLDERS, TESTS
from kept_pes import in_processes

import persistent_ops as po
from persistent_ops.runtime.world import World, current

__all__ = [
    "TRANSPORTS",
    "Survivor",
    "assert_gone",
    "dead_peer",
    "error_of",
    "gave_up",
    "in_world",
    "init_with_impatient_kernels",
    "meet_in",
    "message_of",
    "python_path",
    "run_pes",
    "told_later",
    "world_of",
]

# How PEs reach each other: options of po.init.
TRANSPORTS = [
    pytest.param({}, id="direct"),
    pytest.param({"transport": "staged"}, id="staged", marks=[pytest.mark.host, pytest.mark.slow]),
]


def in_world(program: Callable[..., Any], world: int, backend: str, *args: Any, **options: Any) -> list[Any]:
    """Run a program in a world that is opened and closed for it.

    Args:
        program: called as `program(*args)` on every PE.
        world: number of PEs.
        backend: "host" or "cuda".
        args: of the program.
        options: of po.init.
    """
    return run_pes(_in_a_world, world, backend, program, options, *args, timeout=250)


def run_pes(program: Callable[..., Any], world: int, backend: str, *args: Any, timeout: float) -> list[Any]:
    """Run `program(backend, *args)`, which opens and closes its world, on `world` PEs.

    On the host PEs are threads, which cost nothing. On GPUs they are kept processes (see `kept_pes`).
    """
    if backend == "host":
        return po.launch(program, world, backend, *args, threads=True, timeout=timeout)
    return in_processes(program, world, backend, *args, timeout=timeout)


def _in_a_world(backend: str, program: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    po.init(backend, **{"operator_timeout": 30.0, "heap_size": 64 << 20, **options})
    try:
        result = program(*args)
        po.check()
        return result
    finally:
        po.finalize()


@contextlib.contextmanager
def world_of(backend: str, group: str | None = None, *, has_group: bool = True, **options: Any) -> Iterator[World]:
    """Join a world on this PE, with torch's process group of the same PEs.

    Args:
        backend: "host" or "cuda".
        group: backend of the group; see `po.process_group`.
        has_group: whether there is one.
        options: of po.init.
    """
    po.init(backend, **{"operator_timeout": 60.0, "heap_size": 64 << 20, **options})
    try:
        if backend == "host":
            torch.set_num_threads(1)
        with po.process_group(group) if has_group else contextlib.nullcontext():
            yield current()
    finally:
        po.finalize()


def python_path() -> str:
    """Return the folders in which a program started by a test finds the package and the tests' modules."""
    return os.pathsep.join(filter(None, [*FOLDERS, str(TESTS.parent), os.environ.get("PYTHONPATH")]))


def init_with_impatient_kernels(backend: str, timeout: float, heap_size: int, **options: Any) -> None:
    """Join a world whose kernels wait for a peer at most `timeout` seconds. Host code waits without limit.

    On a busy machine, PEs reach a meeting of host code one after the other.
    """
    po.init(backend, operator_timeout=60.0, heap_size=heap_size, **options)
    po.runtime.world.current().workspace.timeout = timeout


def error_of(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Return type and text of what an action raises, or "", and how many seconds it took."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # the test checks the type
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def message_of(kind: type[BaseException], call: Callable[[], object]) -> str:
    """Return the text of an error of a kind that a call raises. Another error is passed on."""
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


@contextlib.contextmanager
def told_later() -> Iterator[None]:
    """Let launches return before the host looks at this PE's input, as on GPUs. The host backend looks at once."""
    workspace = current().workspace
    launch = workspace.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "launch", lambda *args, **how: launch(*args, **{**how, "raises_input_errors": False}))
        yield


def gave_up(folder: Path, count: int) -> None:
    """Wait until `count` PEs have left a file gave_up_<rank>; at most 60 s."""
    _await_files(folder, "gave_up_*", count, 0.02)


def meet_in(folder: Path, name: str) -> None:
    """Wait until all PEs of the world have called this, which launches nothing; at most 60 s."""
    (folder / f"{name}.{po.rank()}").touch()
    _await_files(folder, f"{name}.*", po.world_size(), 0.001)


def _await_files(folder: Path, pattern: str, count: int, pause: float) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(pause)


# ---- dead peers ------------------------------------------------------------------------------------------------------


class Survivor(NamedTuple):
    """Report of a PE that outlived a dead one: text of its time-out, seconds until then."""

    text: str
    seconds: float


_NOTICED = "the survivors have noticed"
_ITERATIONS = 6


def dead_peer(work: Callable[[int], bool], backend: str, how: str, folder: Path) -> list[Survivor]:
    """Let PE 1 die during its work, and check that nothing hangs and no process is left over.

    Args:
        work: calls the operator for one of six iterations and returns whether the result is right; importable.
        backend: "host" or "cuda".
        how: "stopped": a world of three, whose survivors wait at most 3 s in a kernel; "killed": a world of two, where
            the launcher notices first.
        folder: for what the PEs report.

    Returns:
        The survivors' reports if a PE was stopped; nothing if it was killed.
    """
    is_stopped = how == "stopped"
    world = 3 if is_stopped else 2
    with pytest.raises(RuntimeError, match=_NOTICED if is_stopped else "rank 1|PE 1"):
        po.launch(_dies, world, work, backend, how, str(folder), timeout=200)  # PEs are processes and compile
    assert_gone(folder, world)
    if not is_stopped:
        return []
    # Only the survivors can report this.
    reports = [(folder / f"{rank}.error").read_text().split("|", 2) for rank in (0, 2)]
    assert [error for error, _, _ in reports] == ["PeerTimeoutError"] * 2, reports
    return [Survivor(text, float(seconds)) for _, seconds, text in reports]


def assert_gone(folder: Path, world: int) -> None:
    """Fail if a PE still exists. Each PE has left its process number in <rank>.pid."""
    for rank in range(world):
        pid = int((folder / f"{rank}.pid").read_text())
        for _ in range(50):
            if not os.path.exists(f"/proc/{pid}"):
                break
            time.sleep(0.1)
        assert not os.path.exists(f"/proc/{pid}"), f"PE {rank} is left over"


def _dies(work: Callable[[int], bool], backend: str, how: str, folder: str) -> None:
    init_with_impatient_kernels(backend, 3.0, 64 << 20)
    for iteration in range(_ITERATIONS):  # afterwards all memory is set aside
        assert work(iteration)
    Path(folder, f"{po.rank()}.pid").write_text(str(os.getpid()))
    po.barrier()
    if po.rank() == 1:  # while the others do something else
        number = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}[how]
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()

    def call() -> None:
        while True:
            for iteration in range(_ITERATIONS):
                assert work(iteration)

    name, text, seconds = error_of(call)
    Path(folder, f"{po.rank()}.partial").write_text(f"{name}|{seconds:.1f}|{text}")
    os.rename(f"{folder}/{po.rank()}.partial", f"{folder}/{po.rank()}.error")
    deadline = time.monotonic() + 10
    others = [rank for rank in range(po.world_size()) if rank != 1]
    while not all(os.path.exists(f"{folder}/{rank}.error") for rank in others) and time.monotonic() < deadline:
        time.sleep(0.05)
    raise RuntimeError(_NOTICED)
