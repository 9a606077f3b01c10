"""Jobs that share a GPU start and end NVSHMEM in turn."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import persistent_ops as po
from persistent_ops.runtime import nvshmem_turns
from persistent_ops.runtime.bootstrap import Bootstrap, from_threads
from persistent_ops.runtime.file_lock import lock_within
from persistent_ops.runtime.nvshmem_turns import turn_to_end, turn_to_start

Turn = Callable[[float], AbstractContextManager[None]]


def _start_alone(seconds: float) -> AbstractContextManager[None]:
    return turn_to_start(from_threads(1, 60.0)[0], seconds)


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(nvshmem_turns, "_SHARED_MEMORY", tmp_path)


def _start_by_turns(folder: Path, number: int) -> list[bool]:
    """Start and end so many times; return whether nobody else started meanwhile, nor ended while this one started."""
    found = []
    for _ in range(20):
        with _start_alone(60.0):
            trace = folder / f"starting-{number}"
            trace.touch()
            time.sleep(0.005)
            found.append(sorted(folder.glob("starting-*")) == [trace] and not list(folder.glob("ending-*")))
            trace.unlink()
        with turn_to_end(60.0):
            trace = folder / f"ending-{number}"
            trace.touch()
            time.sleep(0.005)
            found.append(not list(folder.glob("starting-*")))
            trace.unlink()
    return found


def test_starts_are_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:  # locks are of open files, so threads exclude each other as jobs do
        for found in pool.map(functools.partial(_start_by_turns, tmp_path), range(3)):
            assert found == [True] * 40


def test_ends_do_not_wait_for_each_other() -> None:
    meeting = threading.Barrier(3)

    def end() -> None:
        with turn_to_end(60.0):
            meeting.wait(60.0)  # as NVSHMEM's end waits for the other PEs'

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(end) for _ in range(3)]:
            future.result()


def test_a_turn_lasts_until_all_pes_of_the_job_have_started() -> None:
    events: list[str] = []

    def start(bootstrap: Bootstrap) -> None:
        with turn_to_start(bootstrap, 60.0):
            if bootstrap.rank == 1:
                time.sleep(0.3)
                events.append("started")

    def start_another() -> None:
        while not _is_locked():
            time.sleep(0.001)
        with _start_alone(60.0):
            events.append("another")

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(start, bootstrap) for bootstrap in from_threads(2, 120.0)]
        for future in [*futures, pool.submit(start_another)]:
            future.result()
    assert events == ["started", "another"]


def _is_locked() -> bool:
    with nvshmem_turns._lock_file() as descriptor:
        assert descriptor is not None
        return not lock_within(0.0, descriptor)


@pytest.mark.parametrize("turn", [_start_alone, turn_to_end])
def test_who_waits_in_vain_goes_on_and_says_so(turn: Turn, caplog: pytest.LogCaptureFixture) -> None:
    with _start_alone(60.0):
        assert not caplog.records
        with turn(0.1):
            pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "another job has started NVSHMEM for 0.1 s" in caplog.text
    with turn(0.0):
        assert len(caplog.records) == 1, "left when it ends"


def test_the_pes_of_a_job_do_not_wait_for_each_other(caplog: pytest.LogCaptureFixture) -> None:
    meeting = threading.Barrier(3)

    def start(bootstrap: Bootstrap) -> None:
        with turn_to_start(bootstrap, 60.0):
            meeting.wait(60.0)  # as NVSHMEM's start waits for the other PEs'

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(start, bootstrap) for bootstrap in from_threads(3, 120.0)]:
            future.result()
    assert not caplog.records


@pytest.mark.parametrize("turn", [_start_alone, turn_to_end])
def test_without_the_file_there_are_no_turns(turn: Turn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"persistent_ops.nvshmem.{os.getuid()}.lock").mkdir()
    with turn(60.0):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "may crash each other" in caplog.text


def _init_again_and_again(count: int) -> list[bool]:
    right = []
    for _ in range(count):
        po.init("cuda", heap_size=32 << 20)
        right.append(bool((po.all_reduce(torch.ones(3, device=po.device())) == po.world_size()).all()))
        po.finalize()
    return right


@pytest.mark.gpu
def test_jobs_side_by_side() -> None:
    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(po.launch, _init_again_and_again, 2, 12, timeout=250) for _ in range(5)]
        for job in jobs:
            assert job.result() == [[True] * 12] * 2
