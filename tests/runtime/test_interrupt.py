"""Ctrl-C: an operator that waits stops at once, the world can be recovered, and nothing is left on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from warm_python import Popen
from worlds import python_path

from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.interruptible import Interruptible

# PE 0 waits in an operator for PE 1, which comes on a command.
PROGRAM = """
import os, sys, time, torch
import persistent_ops as po
from test_peer_watch import _exchange
from worlds import error_of
backend, folder = sys.argv[1:]
po.init(backend, operator_timeout=200.0, heap_size=16 << 20)
right = [1.0, 2.0]
assert _exchange(po.rank() + 1.0).flatten().tolist() == right
po.barrier()
if po.rank() == 0:
    print("waits", flush=True)
    start = time.monotonic()
    try:
        _exchange(1.0)
        po.check()
    except KeyboardInterrupt:
        print(f"interrupted {time.monotonic() - start:.1f}", flush=True)
    print("then", *error_of(lambda: _exchange(1.0))[:2], flush=True)
    open(folder + "/interrupted", "w").close()
else:
    while not os.path.exists(folder + "/interrupted"):
        time.sleep(0.05)
    def call():
        _exchange(2.0)
        po.check()
    print("peer", *error_of(call)[:2], flush=True)
po.recover()
print("after", _exchange(po.rank() + 1.0).flatten().tolist() == right, flush=True)
po.finalize()
"""


def _environ(rank: int, port: int) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    environ["PYTHONPATH"] = python_path()
    return environ


def test_an_operator_that_waits_is_left_at_once(backend: str, tmp_path: Path) -> None:
    port = 20000 + os.getpid() % 9000
    command = [sys.executable, "-c", PROGRAM, backend, str(tmp_path)]
    pes = [Popen(command, env=_environ(rank, port), stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        assert pes[0].stdout is not None and pes[1].stdout is not None
        assert pes[0].stdout.readline() == "waits\n"
        time.sleep(2.0)
        pes[0].send_signal(signal.SIGINT)
        told = pes[0].stdout.readline().split()
        assert told[0] == "interrupted" and float(told[1]) < 60.0, told  # of 200
        then = pes[0].stdout.readline()
        assert then.startswith("then PeerLostError PE 0 was interrupted while it waited") and "recover" in then
        assert pes[1].stdout.readline().startswith("peer PeerLostError PE 0 was interrupted, so PE 1 left its launch")
        assert [pe.stdout.readline() for pe in pes if pe.stdout is not None] == ["after True\n"] * 2
        assert [pe.wait(60) for pe in pes] == [0, 0]
    finally:
        for pe in pes:
            pe.kill()
            pe.wait()


# A PE that has no peer to wait for.
THREADS = """
import threading, torch
import persistent_ops as po
po.init("host", heap_size=16 << 20)
for _ in range(3):
    po.all_reduce(torch.ones(8))
print([thread.name for thread in threading.enumerate() if thread.name.startswith("persistent_ops wait")])
try:
    print("calls", flush=True)
    while True:
        po.all_reduce(torch.ones(8))
except KeyboardInterrupt:
    print("left", po.all_reduce(torch.ones(8)).tolist() == [1.0] * 8)
"""


@pytest.mark.host
def test_a_pe_without_peers_launches_in_its_own_thread() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-c", THREADS]
    pe = Popen(command, env=environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE, text=True)
    try:
        assert pe.stdout is not None
        assert pe.stdout.readline() == "[]\n"
        assert pe.stdout.readline() == "calls\n"
        pe.send_signal(signal.SIGINT)
        assert pe.stdout.read() == "left True\n"
        assert pe.wait(60) == 0
    finally:
        pe.kill()
        pe.wait()


DEMO = """
import sys, threading, time
from persistent_ops.cli import main
sys.argv = ["persistent-ops", "demo", "--backend", "host", "--steps", "1000000", "--pes", "2", "--max-rows", "1000"]
main()
"""


@pytest.mark.slow
@pytest.mark.host
def test_the_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ |= {"TMPDIR": str(tmp_path), "PYTHONPATH": python_path()}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    demo = Popen([sys.executable, "-c", DEMO], env=environ, start_new_session=True, **pipes)
    try:
        # A PE that has loaded the operator's kernel has started and has its tables' memory.
        deadline = time.monotonic() + 200
        while _with_a_kernel(demo.pid) < 2 and time.monotonic() < deadline:
            assert demo.poll() is None, "the demo ended by itself"
            time.sleep(0.2)
        assert _with_a_kernel(demo.pid) >= 2, "the PEs have not come to their kernels"
        time.sleep(1.0)  # in the midst of its steps
        os.killpg(demo.pid, signal.SIGINT)
        start = time.monotonic()
        assert demo.wait(60) != 0
        assert time.monotonic() - start < 30.0
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
    assert list(tmp_path.iterdir()) == []


def _with_a_kernel(leader: int) -> int:
    """Return how many processes of a group have loaded the kernel of embedding_all_to_all."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
            found += group == leader and "/embedding_all_to_all.so" in (process / "maps").read_text()
        except OSError:
            continue
    return found


# ---- the piece that it rests on --------------------------------------------------------------------------------------


def test_results_and_errors_come_through() -> None:
    waits = Interruptible()
    assert waits.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        waits.call(lambda: 1 // 0)
    waits.close()
    assert waits.call(lambda: 8) == 8, "closed is not unusable"
    waits.close()


def test_an_interrupted_call_has_ended_when_it_is_told() -> None:
    waits, leave, ended = Interruptible(), threading.Event(), threading.Event()

    class Interrupted:
        def __enter__(self) -> None:
            leave.set()

        def __exit__(self, *_: object) -> None:
            assert ended.is_set(), "the call was still under way"

    def wait() -> None:
        leave.wait(60)
        ended.set()

    waits.interrupted = Interrupted
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        waits.call(wait)
    assert ended.is_set()
    waits.close()


def test_interrupts_behind_the_first_one_wait_too() -> None:
    waits, ends, signals = Interruptible(), list[str](), list[int]()

    def call() -> None:
        deadline = time.monotonic() + 20
        while len(signals) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        ends.append("ended")

    def interrupt(*_: object) -> None:
        signals.append(1)
        if len(signals) <= 3:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            waits.call(call)
        assert ends == ["ended"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    waits.close()


def test_patience_ends() -> None:
    waits, leave = Interruptible(), threading.Event()

    class Interrupted:
        def __enter__(self) -> None:
            leave.set()

        def __exit__(self, *_: object) -> None:
            pass

    waits.interrupted = Interrupted
    assert waits.call(lambda: 3, patience=60.0) == 3 and not leave.is_set()
    assert waits.call(lambda: leave.wait(60), patience=0.2)
    waits.close()


def test_other_threads_call_directly() -> None:
    waits, names = Interruptible(), []
    thread = threading.Thread(
        target=lambda: waits.call(lambda: names.append(threading.current_thread().name)), name="T"
    )
    thread.start()
    thread.join()
    assert names == ["T"]


def test_a_call_for_which_there_is_no_thread_is_made_once() -> None:
    """The pool has queued the task when it finds that there is no thread."""
    waits, calls = Interruptible(), list[int]()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        waits.call(lambda: calls.append(1))
    waits.call(lambda: calls.append(2))
    waits.close()
    assert calls == [1, 2]
