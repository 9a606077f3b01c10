"""Jobs that share a GPU start and end NVSHMEM in turn. The end is skipped if peers do not come."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import Popen

import persistent_ops as po
from persistent_ops.runtime import nvshmem_end, nvshmem_turns, world
from persistent_ops.runtime.bootstrap.connection import Bootstrap, from_threads
from persistent_ops.runtime.errors import BootstrapError
from persistent_ops.runtime.file_lock import lock_within
from persistent_ops.runtime.host import HostBackend
from persistent_ops.runtime.nvshmem_turns import turn_to_end, turn_to_start

Turn = Callable[[float], AbstractContextManager[None]]
_LOCK = f"persistent_ops.nvshmem.{os.getuid()}.lock"


def _start_alone(seconds: float) -> AbstractContextManager[None]:
    return turn_to_start(from_threads(1, 60.0)[0], seconds)


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(nvshmem_turns, "_SHARED_MEMORY", tmp_path)


def _start_by_turns(folder: Path, number: int) -> list[bool]:
    """Start and end repeatedly; return whether no other job started meanwhile, nor ended during this one's start."""
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


def test_a_start_whose_turn_does_not_come_names_who_has_it(caplog: pytest.LogCaptureFixture) -> None:
    with _start_alone(60.0):
        time.sleep(0.3)
        with pytest.raises(BootstrapError) as raised, _start_alone(0.1):
            pytest.fail("it has started beside another job")
    assert f"process {os.getpid()} has been starting NVSHMEM for " in str(raised.value)
    assert _seconds_in(str(raised.value))[-1] >= 0.4, "since the other one's turn began"
    with _start_alone(0.0):
        assert not caplog.records, "left when it ends"


_ENDS_FOR_EVER = """
import os, pathlib, sys, time
from persistent_ops.runtime import nvshmem_turns
nvshmem_turns._SHARED_MEMORY = pathlib.Path(sys.argv[1])
with nvshmem_turns.turn_to_end(60.0):
    print(os.getpid(), flush=True)
    time.sleep(200.0)
"""


def _ending(folder: Path) -> Popen:
    return Popen([sys.executable, "-c", _ENDS_FOR_EVER, str(folder)], stdout=subprocess.PIPE, text=True)


def _seconds_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+(?:\.\d+)?) s\b", text)]


def test_a_start_names_all_who_end_and_nobody_else(tmp_path: Path) -> None:
    with _start_alone(60.0), turn_to_end(0.0):
        pass
    children = [_ending(tmp_path) for _ in range(3)]
    try:
        numbers = [json.loads(child.stdout.readline()) for child in children]  # type: ignore[union-attr]
        children[0].kill()
        children[0].wait()
        with turn_to_end(0.0):
            pass
        with pytest.raises(BootstrapError) as raised, _start_alone(0.1):
            pytest.fail("it has started beside another job")
    finally:
        for child in children:
            child.kill()
            child.wait()
    named = re.findall(r"process (\d+) has been ending NVSHMEM for", str(raised.value))  # in the order of their turns
    assert sorted(map(int, named)) == sorted(numbers[1:])
    assert str(raised.value).count("process ") == 2


def test_an_end_whose_turn_does_not_come_goes_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with _start_alone(60.0):
        assert not caplog.records
        with turn_to_end(0.1):
            pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"after 0.1 s NVSHMEM ends beside others: process {os.getpid()} has been starting" in caplog.text
    with turn_to_end(0.0):
        assert len(caplog.records) == 1, "left when it ends"


def test_a_process_of_another_container_has_no_number_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if a process here has that number. It also does not take over that process' turn."""
    with _start_alone(60.0):
        (line,) = (tmp_path / _LOCK).read_text().splitlines()
        (tmp_path / _LOCK).write_text("")
        with monkeypatch.context() as there:
            there.setattr(nvshmem_turns, "pid_space", lambda: "pid:[1]")
            with (tmp_path / _LOCK).open("a") as file:
                nvshmem_turns._note(file.fileno(), "starting")
        with pytest.raises(BootstrapError) as raised, _start_alone(0.0):
            pytest.fail("it has started beside another job")
        assert re.search(r": a process of another container has been starting NVSHMEM for \d+\.\d s", str(raised.value))
        assert str(os.getpid()) not in str(raised.value)
        with (tmp_path / _LOCK).open("a") as file:
            file.write(line + "\n")
        with pytest.raises(BootstrapError) as raised, _start_alone(0.0):
            pytest.fail("it has started beside another job")
        assert f"process {os.getpid()} has been starting" in str(raised.value)
        assert "a process of another container" in str(raised.value)


@pytest.mark.parametrize("turn", [_start_alone, turn_to_end])
def test_without_the_file_there_are_no_turns(turn: Turn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / _LOCK).mkdir()
    with turn(60.0):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "may crash each other" in caplog.text


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("turn", [_start_alone, turn_to_end])
@pytest.mark.parametrize("put", [Path.symlink_to, Path.hardlink_to, _fifo], ids=["link", "hard link", "fifo"])
def test_what_another_user_may_have_put_there_is_left_alone(
    put: Callable[[Path, Path], None], turn: Turn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("years of work", None):
        precious = tmp_path / f"precious {text}"
        if text is not None:
            precious.write_text(text)
        elif put is Path.hardlink_to:
            continue
        put(tmp_path / _LOCK, precious)
        with turn(60.0):
            pass
        assert text == (precious.read_text() if precious.exists() else None)
        (tmp_path / _LOCK).unlink()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all("may crash each other" in record.getMessage() for record in caplog.records)


def test_a_file_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / _LOCK).write_text("of another user")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with _start_alone(60.0):
        pass
    assert (tmp_path / _LOCK).read_text() == "of another user"
    assert f"{_LOCK} is not a file of user id {os.getuid() + 1} alone" in caplog.text


# ---- an end without peers --------------------------------------------------------------------------------------------


class _Library:
    """NVSHMEM, reduced to its end: it hangs if peers do not come."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def free(self) -> None:
        self.calls.append("free")

    def finalize(self) -> None:
        self.calls.append("finalize")


@pytest.fixture
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_end, "_is_left_running", False)


@pytest.mark.usefixtures("_afresh")
@pytest.mark.parametrize("shares_gpu", [False, True])
def test_an_end_without_peers_calls_nothing_says_so_and_is_the_last(
    shares_gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    library, heap = _Library(), object()
    uses = sys.getrefcount(heap)
    nvshmem_end.end(library.free, library.finalize, heap=heap, is_alone=True, shares_gpu=shares_gpu)
    assert library.calls == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NVSHMEM's end is left out, because it would wait for peers" in caplog.text
    assert sys.getrefcount(heap) > uses, "it would be released, and wait for peers, when the interpreter exits"
    assert nvshmem_end.runs_on()
    with pytest.raises(BootstrapError, match="start this process again"):
        nvshmem_end.refuse_restart()
    with _start_alone(0.0):
        pass  # no turn has been left over


@pytest.mark.usefixtures("_afresh")
def test_an_end_with_all_peers_is_followed_by_another_start(caplog: pytest.LogCaptureFixture) -> None:
    library = _Library()
    nvshmem_end.end(library.free, library.finalize, heap=library, is_alone=False, shares_gpu=True)
    assert library.calls == ["free", "finalize"] and not caplog.records and not nvshmem_end.runs_on()
    nvshmem_end.refuse_restart()


@pytest.mark.host
@pytest.mark.parametrize("stays_away", [False, True])
def test_a_world_tells_its_backend_whether_all_peers_have_come(
    monkeypatch: pytest.MonkeyPatch, stays_away: bool
) -> None:
    closed: list[bool] = []
    close = HostBackend.close

    def closing(self: HostBackend, *, is_alone: bool = False) -> None:
        closed.append(is_alone)
        close(self, is_alone=is_alone)

    def program() -> None:
        po.init("host", heap_size=1 << 20)
        while stays_away and po.rank() == 1 and len(closed) < 2:
            time.sleep(0.01)
        po.finalize()

    monkeypatch.setattr(HostBackend, "close", closing)
    monkeypatch.setattr(world, "_LONGEST_FAREWELL_S", {"cpu": 0.5 if stays_away else 60.0})
    po.launch(program, 3, threads=True, timeout=60)
    assert closed == [stays_away] * 3, "also the one that comes when the others have gone"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("failure", [BootstrapError("too late"), KeyboardInterrupt()], ids=["too late", "Ctrl-C"])
def test_pes_leave_together_or_alone_all_of_them(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException, is_first: bool
) -> None:
    """PE 0 gives up though all have come, before or after the others have decided."""
    pes, has_left = from_threads(3, 10.0), threading.Event()
    exchange = pes[0].exchange

    def fail(*args: Any, **options: Any) -> None:
        exchange(*args, **options)
        if not is_first:
            has_left.wait(10.0)
        raise failure

    def claim_later(mailbox: Any) -> Callable[..., bytes]:
        claim = mailbox.claim
        return lambda *args: claim(*args) if has_left.wait(10.0) else b""

    def leave(pe: Bootstrap) -> bool | None:
        try:
            return pe.meet_to_leave(5.0)
        except KeyboardInterrupt:
            return None
        finally:
            has_left.set()

    monkeypatch.setattr(pes[0], "exchange", fail)
    for pe in pes[1:]:
        if is_first:
            monkeypatch.setattr(pe._mailbox, "claim", claim_later(pe._mailbox))
    with ThreadPoolExecutor(3) as pool:
        told, *others = pool.map(leave, pes)
    assert others == [not is_first] * 2
    assert told == (None if isinstance(failure, KeyboardInterrupt) else not is_first)


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
