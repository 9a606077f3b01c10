"""What `make test-gpu` runs, as far as it can be tested without GPUs; workers and PEs that crash."""

from __future__ import annotations

import functools
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import kept_pes
import pytest
import torch
from checks import Checks
from conftest import _Scopes
from gpu_turns import turn

import persistent_ops as po
from persistent_ops.runtime.interruptible import Interruptible

REPOSITORY = Path(__file__).resolve().parents[2]


def _commands() -> list[list[str]]:
    """Return the calls of pytest that make would make."""
    environment = {**os.environ, "MAKEFLAGS": ""}
    made = ["make", "-n", "test-gpu", f"PERSISTENT_OPS_PYTHON={sys.executable}", "PYTEST_ARGS="]
    lines = subprocess.run(made, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(re.split(r"\|\||>", line)[0]) for line in lines.splitlines() if "pytest" in line]


@pytest.mark.slow
def test_what_runs_on_gpus_is_collected() -> None:
    """pytest would stop at once at an option that it does not know, or takes for a folder."""
    rehearsal, side_by_side, apart = _commands()
    rehearsal = rehearsal[rehearsal.index(sys.executable) :]
    assert rehearsal[3] == "--backend=rehearsal"
    for command, marks in ((side_by_side, "not apart"), (apart, "apart")):
        assert command == [*rehearsal[:3], "--backend=cuda", "-m", marks, *rehearsal[4:]], "each test once"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [*side_by_side, "-n", "0", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any("::" in line for line in done.stdout.splitlines())


def test_what_is_compared_now_and_looked_at_later_is_told() -> None:
    right, wrong = torch.arange(4.0), torch.tensor([0.0, 1.0, 2.0, -3.0])
    checks = Checks()
    changed = right.clone()
    checks.compare("turn 1, a", changed, right)
    changed.fill_(float("nan"))  # after the comparison
    checks.compare("turn 1, b", wrong, right)
    checks.compare("turn 2", torch.tensor([-0.0]), torch.tensor([0.0]))
    assert checks.look(19) == []
    assert checks.look(20) == ["turn 1, b: 1 elements differ", "turn 2: 1 elements differ"]
    assert checks.look() == []
    checks.compare("turn 21", right[:2], right)
    assert "got torch.float32 [2], expected torch.float32 [4]" in checks.look(21)[0], "what is known is told at once"
    checks.tell("turn 22", None)
    assert checks.look() == []


def test_the_pes_of_a_job_have_their_turn_together_and_jobs_one_after_the_other(tmp_path: Path) -> None:
    met = {job: threading.Barrier(2, timeout=60) for job in "abc"}
    said: list[str] = []

    def be_pe(job: str, rank: int) -> None:
        with turn(tmp_path / "turn", job, rank):
            met[job].wait()  # all PEs of the job are here
            said.append(job)
            time.sleep(0.05)
            met[job].wait()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(be_pe, "aabbcc", [1, 0] * 3))
    assert len(said) == 6 and said[::2] == said[1::2] and len(set(said[::2])) == 3


def _cores() -> set[int]:
    """Launch a kernel; return the cores of this PE."""
    po.init("host", heap_size=1 << 20)
    po.runtime.world.current().enqueue_barrier()
    po.finalize()
    return os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pes_that_are_threads_run_python_on_one_core_and_kernels_on_all() -> None:
    before = os.sched_getaffinity(0)
    of_waits = []
    call = Interruptible.call

    def seen(waits: Interruptible, *args: Any, **options: Any) -> Any:
        of_waits.append(os.sched_getaffinity(0))
        return call(waits, *args, **options)

    with mock.patch.object(Interruptible, "call", seen):  # in which PEs that have peers launch
        of_pes = po.launch(_cores, 2, threads=True, timeout=60)
    assert [len(cores) for cores in of_pes] == [1, 1] and of_waits.count(before) >= 2
    assert os.sched_getaffinity(0) == before


class _Worker:
    """A pytest-xdist worker from its controller's view: it begins a test when it knows the next test, or the end."""

    def __init__(self, tests: list[str], crashes: set[str]) -> None:
        self.gateway = SimpleNamespace(id=id(self))
        self.shutting_down = False
        self._tests, self._crashes = tests, crashes
        self._queue: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self._queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_begin(self) -> bool:
        return len(self._queue) > 1 or (self.shutting_down and bool(self._queue))

    def begin(self) -> tuple[int, bool]:
        """Return the number of the test that is run, and whether the worker ends with it."""
        number = self._queue.pop(0)
        return number, self._tests[number] in self._crashes


@pytest.mark.parametrize("late", range(6))
@pytest.mark.parametrize("crashes", [{3}, {2, 3}, {0, 1, 2, 3, 4}, {10, 11}, set(range(12))], ids=str)
def test_workers_that_crash_are_replaced(crashes: set[int], late: int) -> None:
    """Every test runs once. `late` tests run while the replacement of a crashed worker collects."""
    tests = [f"tests/test_it.py::test_it[{number}]" for number in range(12)]
    options = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=lambda name: ["2*popen"], getoption=lambda name: "cuda", option=options)
    scopes: Any = _Scopes(config)
    workers = [_Worker(tests, {tests[number] for number in crashes}) for _ in range(2)]
    collecting: list[tuple[int, _Worker]] = []
    for worker in workers:
        scopes.add_node(worker)
        scopes.add_node_collection(worker, tests)
    scopes.schedule()
    run: list[int] = []
    crashed: list[str] = []
    while workers or collecting:
        for begun, worker in list(collecting):
            if len(run) >= begun + late or not any(each.can_begin for each in workers):
                collecting.remove((begun, worker))
                workers.append(worker)
                scopes.add_node_collection(worker, tests)
                scopes.schedule()
        assert any(worker.can_begin or worker.shutting_down for worker in workers), "they wait for each other"
        for worker in list(workers):
            if worker.can_begin:
                number, is_end = worker.begin()
                run.append(number)
                if is_end:
                    workers.remove(worker)
                    crashed.append(scopes.remove_node(worker))
                    collecting.append((len(run), _Worker(tests, {tests[number] for number in crashes})))
                    scopes.add_node(collecting[-1][1])
                else:
                    scopes.mark_test_complete(worker, number)
            elif worker.shutting_down:
                workers.remove(worker)
                assert scopes.remove_node(worker) is None
    assert sorted(run) == list(range(12))
    assert sorted(crashed) == sorted(tests[number] for number in crashes)


def test_a_world_whose_nvshmem_has_not_started_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["PE 1 of 2: NVSHMEM did not initialize (status 0)"] * 3 + ["PE 0 of 2: a problem"]

    def run(*arguments: Any, timeout: float) -> list[str]:
        if told:
            raise AssertionError(told.pop())
        return ["done"]

    monkeypatch.setattr(kept_pes, "_in_processes", run)
    with pytest.raises(AssertionError, match="a problem"):
        kept_pes.in_processes(run, 2, timeout=1.0)
    with pytest.raises(AssertionError, match="did not initialize"):
        kept_pes.in_processes(run, 2, timeout=1.0)
    assert kept_pes.in_processes(run, 2, timeout=1.0) == ["done"]


def test_on_gpus_worlds_of_each_size_have_pes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PEs of one worker start together. If a world fails, only its remaining PEs are ended."""
    started: list[object] = []

    def start() -> tuple[object, object]:
        started.append(object())
        return mock.Mock(), mock.Mock()

    monkeypatch.setattr(kept_pes, "_kept", {})
    monkeypatch.setattr(kept_pes, "_started", start)
    monkeypatch.setattr(kept_pes, "_collected", lambda pes, *_: [(len(pes), len(pes) == 3)] * len(pes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for worker, count in ((None, 2), ("gw0", 10)):
        kept_pes._kept.clear()
        started.clear()
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker) if worker else monkeypatch.delenv(
            "PYTEST_XDIST_WORKER", False
        )
        assert kept_pes.in_processes(print, 2, timeout=60) == [2, 2] and len(started) == count
    assert kept_pes.in_processes(print, 3, timeout=60) == [3] * 3 and len(started) == 10
    assert {size: len(pes) for size, pes in kept_pes._kept.items()} == {1: 1, 2: 2, 3: 0, 4: 4}, "worn: ended"


def _crashes_once(folder: str, *, before_it_joins: bool) -> int:
    first = Path(folder) / f"first{os.environ['PERSISTENT_OPS_RANK']}"
    is_first = not first.exists()
    first.touch()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would be gigabytes
    if is_first and before_it_joins:
        os.kill(os.getpid(), signal.SIGSEGV)
    po.init("host", heap_size=16 << 20)
    if is_first:
        os.kill(os.getpid(), signal.SIGSEGV)
    rank = po.rank()
    po.finalize()
    return rank


@pytest.mark.host
def test_a_pe_that_crashes_before_it_has_joined_is_started_again(tmp_path: Path) -> None:
    crashes = functools.partial(_crashes_once, str(tmp_path))
    assert kept_pes.in_processes(functools.partial(crashes, before_it_joins=True), 1, timeout=60) == [0]
    (tmp_path / "first0").unlink()
    with pytest.raises(AssertionError, match=r"PE 0 of 1 ended with -11\Z"):
        kept_pes.in_processes(functools.partial(crashes, before_it_joins=False), 1, timeout=60)
