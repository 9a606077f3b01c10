"""What PEs know of each other without flags: a PE that has ended is noticed early; PEs wait for one that compiles."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import Popen
from worlds import error_of, python_path

import persistent_ops as po
from persistent_ops.runtime.bootstrap import peer_watch
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.bootstrap.mailbox import ThreadMailbox, ThreadTable
from persistent_ops.runtime.bootstrap.peer_watch import ABSENT, HERE, PREPARING, PeerWatch, tell_state
from persistent_ops.runtime.world import current


def eventually(condition: Any, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


# ---- the watch itself ------------------------------------------------------------------------------------------------


class Watched:
    """A mailbox of three PEs, of which this is PE 0."""

    def __init__(self, dead: list[int]) -> None:
        self.mailboxes = [ThreadMailbox(table) for table in [ThreadTable()] for _ in range(3)]
        for rank, mailbox in enumerate(self.mailboxes):
            tell_state(mailbox, rank, HERE, 0.0)
        self.reports: list[tuple[frozenset[int], frozenset[int]]] = []
        self.watch = PeerWatch(
            self.mailboxes[0],
            0,
            3,
            serving_rank=None,
            find_dead=lambda: dead,
            report=lambda lost, preparing: self.reports.append((lost, preparing)),
        )

    def tells(self, lost: set[int], preparing: set[int]) -> bool:
        return eventually(lambda: bool(self.reports) and self.reports[-1] == (lost, preparing))


def test_states_are_reported_once_for_each_change() -> None:
    watched = Watched([])
    tell_state(watched.mailboxes[1], 1, PREPARING, 0.0)
    assert watched.tells(set(), {1})
    tell_state(watched.mailboxes[1], 1, HERE, 0.0)
    assert watched.tells(set(), set())
    tell_state(watched.mailboxes[2], 2, ABSENT, 0.0)
    assert watched.tells({2}, set())
    watched.watch.close()
    assert len(watched.reports) == 3


def test_a_dead_process_is_told_to_those_who_cannot_see_it() -> None:
    watched = Watched([2])
    assert watched.tells({2}, set())
    assert watched.mailboxes[1].read(["state/2"], 0.0) == [ABSENT]
    watched.watch.close()


def test_only_long_preparations_are_told() -> None:
    watched = Watched([])
    with watched.watch.preparing():
        pass
    time.sleep(0.6)
    assert watched.mailboxes[1].add("news", 0, 0.0) == 3, "the three first states"
    with watched.watch.preparing(), watched.watch.preparing():
        assert eventually(lambda: watched.mailboxes[1].read(["state/0"], 0.0)[0].startswith(PREPARING))
    assert eventually(lambda: watched.mailboxes[1].read(["state/0"], 0.0) == [HERE])
    watched.watch.close()
    assert not watched.reports, "what a PE does itself is no news to it"


def test_a_long_preparation_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched([])
    heard = set()
    with watched.watch.preparing():
        assert eventually(lambda: heard.add(watched.mailboxes[1].read(["state/0"], 0.0)[0]) or len(heard - {HERE}) >= 3)
        monkeypatch.setattr(peer_watch, "_LONGEST_S", 1.0)
        assert eventually(lambda: watched.mailboxes[1].read(["state/0"], 0.0) == [HERE]), "it has no end"
    watched.watch.close()


def test_who_falls_silent_while_it_prepares_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "_SILENT_S", 2.0)
    watched = Watched([])
    for second in range(3):
        tell_state(watched.mailboxes[1], 1, PREPARING + b" %d" % second, 0.0)
        tell_state(watched.mailboxes[2], 2, PREPARING, 0.0)
        assert watched.tells(set(), {1, 2})
        time.sleep(0.5)
    tell_state(watched.mailboxes[1], 1, PREPARING + b" 3", 0.0)
    assert watched.tells(set(), {1})
    assert watched.tells(set(), set())
    watched.watch.close()


# ---- kernels that wait -----------------------------------------------------------------------------------------------


def _exchange(value: float) -> torch.Tensor:
    """Return what PEs with one table of one row get: `[1, world]`."""
    world, device = po.world_size(), po.device()
    table = torch.full((1, 4), value, device=device)
    indices, offsets = torch.zeros(world, dtype=torch.int64, device=device), torch.arange(world + 1, device=device)
    return po.embedding_all_to_all([table], indices, offsets, dim_per_rank=[4] * world)[:, ::4]


def _cold_cache(backend: str, folder: str, compiler: str) -> tuple[list[float], float]:
    if os.environ["PERSISTENT_OPS_RANK"] == "1":
        os.environ["PERSISTENT_OPS_CACHE"] = folder
        os.environ["PERSISTENT_OPS_CXX"] = compiler
    else:
        po.launch(_warm, 1, backend)
    po.init(backend, operator_timeout=2.0, heap_size=16 << 20)
    start = time.monotonic()
    result = _exchange(po.rank() + 1.0)
    po.check()
    seconds = time.monotonic() - start
    gathered = [round(float(x), 1) for x in result.flatten().tolist()]
    po.finalize()
    return gathered, seconds


def _warm(backend: str) -> None:
    """Put the kernels that two PEs need into the cache."""
    po.init(backend, heap_size=16 << 20)
    _exchange(1.0)
    po.check()
    po.finalize()


@pytest.mark.slow
def test_compiling_is_not_counted_as_waiting(backend: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow_c++"
    compiler = shutil.which("c++") or shutil.which("g++")
    # A request for the compiler's version is answered at once.
    slow.write_text(f'#!/bin/sh\ncase "$*" in *-shared*|*.cu*) sleep 5;; esac\nexec {compiler} "$@"\n')
    slow.chmod(0o755)
    results = po.launch(_cold_cache, 2, backend, str(tmp_path / "cache"), str(slow), timeout=250)
    for gathered, seconds in results:
        assert gathered == [1.0, 2.0]
        assert seconds > 2.0, "nobody waited longer than the time-out, so nothing was tested"


_STOPPED = "the peer has timed out"


def _stops_while_it_prepares(backend: str) -> None:
    po.init(backend, operator_timeout=2.0, heap_size=16 << 20)
    assert _exchange(po.rank() + 1.0).flatten().tolist() == [1.0, 2.0]
    po.check()
    if po.rank() == 1:
        with current().preparing():
            time.sleep(2.0)  # the peer knows, and counts no time
            os.kill(os.getpid(), signal.SIGSTOP)

    def call() -> None:
        _exchange(1.0)
        po.check()

    name, text, _ = error_of(call)
    assert name == "PeerTimeoutError" and "PE 1" in text, text
    raise RuntimeError(_STOPPED)  # ends the launch, and PE 1 with it


@pytest.mark.slow
def test_a_peer_that_is_stopped_while_it_prepares_becomes_a_timeout(backend: str) -> None:
    with pytest.raises(RuntimeError, match=_STOPPED):
        po.launch(_stops_while_it_prepares, 2, backend, timeout=120)


SURVIVOR = """
import sys, time, torch
import persistent_ops as po
from test_peer_watch import _exchange
from worlds import error_of
po.init(sys.argv[1], operator_timeout=200.0, heap_size=16 << 20)
assert _exchange(po.rank() + 1.0).flatten().tolist() == [1.0 + pe for pe in range(po.world_size())]
po.barrier()
print("ready", flush=True)
if po.rank() == int(sys.argv[2]):
    time.sleep(600)
def call():
    _exchange(1.0)
    po.check()
name, text, seconds = error_of(call)
print(f"{name}|{seconds:.1f}|{text}", flush=True)
"""


def _by_hand(world: int, port: int, *arguments: str) -> list[Popen]:
    """Start PEs that no launcher ends when one of them dies."""
    base = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    base |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    base["PYTHONPATH"] = python_path()
    pes = []
    for rank in range(world):
        environ = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", SURVIVOR, *arguments]
        pes.append(Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    return pes


@pytest.mark.parametrize("victim", [0, 2])
def test_a_peer_that_dies_is_noticed_long_before_the_timeout(backend: str, victim: int) -> None:
    pes = _by_hand(3, 20000 + os.getpid() % 9000 + victim, backend, str(victim))
    try:
        for pe in pes:
            assert pe.stdout is not None and pe.stdout.readline() == "ready\n"
        time.sleep(1.0)  # the survivors wait in their kernels by then
        os.kill(pes[victim].pid, signal.SIGKILL)
        pes[victim].wait()
        for rank, pe in enumerate(pes):
            if rank == victim:
                continue
            assert pe.stdout is not None
            name, seconds, text = pe.stdout.readline().rstrip().split("|", 2)
            assert name == "PeerLostError", text
            assert f"PE {victim}" in text and "has ended" in text
            assert float(seconds) < 60.0, "of 200"
    finally:
        for pe in pes:
            pe.kill()
            pe.wait()


def _leaves(backend: str) -> tuple[str, str, float]:
    po.init(backend, operator_timeout=100.0, heap_size=16 << 20)
    assert _exchange(po.rank() + 1.0).flatten().tolist() == [1.0, 2.0]
    po.check()
    if po.rank() == 1:
        time.sleep(0.3)
        po.finalize()
        return "", "", 0.0

    def call() -> None:
        _exchange(1.0)
        po.check()

    error = error_of(call)
    po.finalize()
    return error


@pytest.mark.host
def test_a_peer_that_has_left_is_noticed_too(backend: str) -> None:
    name, text, seconds = po.launch(_leaves, 2, backend, threads=True, timeout=120)[0]
    assert name == "PeerLostError" and "PE 1 has ended" in text and seconds < 60.0
