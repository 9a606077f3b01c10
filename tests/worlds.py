"""Running PEs for tests: a program in a world, an operator's cases in many worlds, a PE that dies on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kept_pes import in_processes

import persistent_ops as po

__all__ = [
    "CaseWorld",
    "CaseWorlds",
    "Survivor",
    "assert_gone",
    "dead_peer",
    "error_of",
    "gave_up",
    "in_world",
    "init_with_impatient_kernels",
    "python_path",
    "run_pes",
]

Results = list[dict[str, tuple[str | None, int]]]


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
    """Run `program(backend, *args)`, which opens its world and closes it, on so many PEs.

    On the host they are threads, which cost nothing; on GPUs processes that are kept (see `kept_pes`).
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


def python_path() -> str:
    """Return the folders in which a program that a test starts finds the package and the tests' modules."""
    tests = Path(__file__).resolve().parent
    return os.pathsep.join(filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")]))


def init_with_impatient_kernels(backend: str, timeout: float, heap_size: int, **options: Any) -> None:
    """Join a world whose kernels wait for a peer at most `timeout` seconds, and the PEs themselves as long as it takes.

    On a busy machine PEs come to a meeting on the host one after the other.
    """
    po.init(backend, operator_timeout=60.0, heap_size=heap_size, **options)
    po.runtime.world.current().workspace.timeout = timeout


def error_of(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Return type and text of what an action raises, or "", and how many seconds it took."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # the test asserts which
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def gave_up(folder: Path, count: int) -> None:
    """Wait until `count` PEs have left a file gave_up_<rank>, however busy the machine is; at most 60 s."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("gave_up_*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)


# ---- cases -----------------------------------------------------------------------------------------------------------


class CaseWorld(NamedTuple):
    """A world in which cases are run.

    Attributes:
        size: number of PEs.
        options: of po.init.
        cases: what is run, each with a `name` and a `dtype`.
    """

    size: int
    options: dict[str, Any]
    cases: Sequence[Any]


class CaseWorlds:
    """An operator's cases in many worlds, each of which is launched once, when its first case is asked for.

    Args:
        run_cases: the body of a PE, called with backend, names of cases and options of po.init; returns by name what
            is wrong with a case, or None, and a digest of its bits.
        worlds: by name.
        halved_by: a dtype that about half of the cases have: the world of one runs those and the others side by side.
    """

    def __init__(self, run_cases: Callable[..., Any], worlds: dict[str, CaseWorld], *, halved_by: torch.dtype) -> None:
        self._run_cases = run_cases
        self._worlds = worlds
        self._halved_by = halved_by
        self._found: dict[tuple[str, str], Results | Exception] = {}

    def params(self) -> list[Any]:
        """Return a parameter for each case of each world: the world's name and the case."""
        params = []
        for name, world in self._worlds.items():
            marks = [pytest.mark.gpu] if world.size > 4 else [pytest.mark.host] if world.options else []
            for case in world.cases:
                params.append(pytest.param(name, case, id=f"{name}-{case.name}", marks=marks))
        return params

    def assert_bits(self, backend: str, name: str, case: Any) -> None:
        """Fail where a PE of the world found a case's result wrong, or PEs have different bits."""
        _skip_without_gpus_for(self._worlds[name].size)
        if (backend, name) not in self._found:
            self._found[backend, name] = self._launched(backend, self._worlds[name])
        found = self._found[backend, name]
        if isinstance(found, Exception):
            raise found
        results = [of_pe[case.name] for of_pe in found]
        for rank, (problem, _) in enumerate(results):
            assert problem is None, f"PE {rank}: {problem}"
        assert len({digest for _, digest in results}) == 1, "the PEs have different bits"

    def _launched(self, backend: str, world: CaseWorld) -> Results | Exception:
        """Run a world's cases. What the launch raised is kept too, so that it is not launched again for every case."""

        def launch(chosen: Sequence[Any]) -> Results:
            names = [case.name for case in chosen]
            options = world.options
            return run_pes(self._run_cases, world.size, backend, names, options, timeout=280)

        try:
            if backend == "cuda" or world.size > 1:
                return launch(world.cases)
            # It is the compiler that takes the time here, for kernels that all the other worlds find.
            halves = ([c for c in world.cases if (c.dtype == self._halved_by) == is_in] for is_in in (True, False))
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(launch, halves)
            return [first[0] | second[0]]
        except Exception as error:
            return error


def _skip_without_gpus_for(world: int) -> None:
    """PEs may share GPUs, equally many on each, but take turns there: beyond four of them that is too slow."""
    count = torch.cuda.device_count()
    if world > 4 and count < world and (count == 1 or world % count):
        pytest.skip(f"{world} PEs need {world} GPUs, or a smaller number that divides it; this machine has {count}")


# ---- dead peers ------------------------------------------------------------------------------------------------------


class Survivor(NamedTuple):
    """What a PE reported that was left with a dead one: text of its time-out, seconds until then."""

    text: str
    seconds: float


_NOTICED = "the survivors have noticed"
_ITERATIONS = 6


def dead_peer(work: Callable[[int], bool], backend: str, how: str, folder: Path) -> list[Survivor]:
    """Let PE 1 die in the middle of its work, and check that nothing hangs and nobody is left over.

    Args:
        work: calls the operator for one of six iterations, and returns whether the result is right; importable.
        backend: "host" or "cuda".
        how: "stopped", in a world of three whose survivors wait at most 3 s in a kernel; "killed", in one of two, where
            the launcher notices first.
        folder: for what the PEs report.

    Returns:
        What the survivors of a stopped PE reported; nothing for a killed one.
    """
    is_stopped = how == "stopped"
    world = 3 if is_stopped else 2
    with pytest.raises(RuntimeError, match=_NOTICED if is_stopped else "rank 1|PE 1"):
        po.launch(_dies, world, work, backend, how, str(folder), timeout=200)  # they are processes, and compile
    assert_gone(folder, world)
    if not is_stopped:
        return []
    # Nobody but the survivors can tell: they did, by themselves.
    reports = [(folder / f"{rank}.error").read_text().split("|", 2) for rank in (0, 2)]
    assert [error for error, _, _ in reports] == ["PeerTimeoutError"] * 2, reports
    return [Survivor(text, float(seconds)) for _, seconds, text in reports]


def assert_gone(folder: Path, world: int) -> None:
    """Fail where a PE is still there; each has left its process number in <rank>.pid."""
    for rank in range(world):
        pid = int((folder / f"{rank}.pid").read_text())
        for _ in range(50):
            if not os.path.exists(f"/proc/{pid}"):
                break
            time.sleep(0.1)
        assert not os.path.exists(f"/proc/{pid}"), f"PE {rank} is left over"


def _dies(work: Callable[[int], bool], backend: str, how: str, folder: str) -> None:
    init_with_impatient_kernels(backend, 3.0, 64 << 20)
    for iteration in range(_ITERATIONS):  # whatever they need has been set aside then
        assert work(iteration)
    Path(folder, f"{po.rank()}.pid").write_text(str(os.getpid()))
    po.barrier()
    if po.rank() == 1:  # in the middle of whatever it then does
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
