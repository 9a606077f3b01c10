"""`po.launch`: what PEs return and raise, how they end, and that no PE outlives it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from pe_processes import LOOPBACK, SLACK, clean_environment, listening, wait_for
from warm_python import servers

from persistent_ops.runtime import spawn
from persistent_ops.runtime.bootstrap.connection import connect
from persistent_ops.runtime.bootstrap.launchers import detect
from persistent_ops.runtime.errors import PersistentOpsError
from persistent_ops.runtime.pe_threads import thread_bootstrap

_REPOSITORY = Path(__file__).resolve().parents[2]


class CustomError(Exception):
    """Cannot be rebuilt from its pickle, as the constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def pe_exchange(base: int) -> Any:
    import torch

    pe = connect(detect(os.environ), 20.0)
    values = [int(value) for value in pe.exchange("t", str(base + pe.rank).encode())]
    addresses = {address for address, _ in listening(os.getppid())}
    pe.close()
    return values, torch.full((3,), float(pe.rank)), addresses, [os.environ[name] for name in ("RANK", "LOCAL_RANK")]


def pe_fails_beside_torch(kind: str, missed: str) -> None:
    import torch.distributed as dist

    if kind == "gloo":
        dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        if kind == "gloo":
            dist.destroy_process_group()
        wait_for(Path(missed).exists)
        raise ValueError("the first cause")
    try:
        if kind == "gloo":
            dist.barrier()
        else:
            dist.TCPStore("127.0.0.1", 1, timeout=timedelta(seconds=1))
    finally:
        Path(missed).touch()


def pe_fails(kind: str) -> int:
    if kind == "custom":
        if os.environ["PERSISTENT_OPS_RANK"] == "1":
            raise CustomError("left", "right")
        return 0
    pe = connect(detect(os.environ), 200.0)
    if pe.rank == 1:
        if kind == "raise":
            raise KeyError("a table of rank 1")
        os.kill(os.getpid(), signal.SIGKILL)
    pe.exchange("never complete", b"")
    return pe.rank


def pe_ends(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "sys.exit":
        sys.exit(5)
    if how == "slow exit":
        for found in gc.get_objects():
            if isinstance(found, Connection):
                found.close()  # as the interpreter's end does, well before there is an exit status on a busy machine
        time.sleep(2.5)
        os._exit(6)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def pe_leaves_a_child(end: str) -> None:
    """Be killed, while a child that inherited everything from this process lives on until a file exists."""
    if os.environ["PERSISTENT_OPS_RANK"] == "0":
        time.sleep(1000)
    if os.fork() == 0:
        until = time.monotonic() + 100.0
        while not os.path.exists(end) and time.monotonic() < until:
            time.sleep(0.05)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split() if entry.name.isdecimal() else None
            if fields and int(fields[1]) == os.getpid():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def test_launch_returns_results_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # another launcher's, which must not reach the PEs
    assert spawn.launch(abs, 1, -3, timeout=60) == [3]  # multiprocessing's resource tracker stays from here on
    before, files = children(), len(os.listdir("/proc/self/fd"))
    results = spawn.launch(pe_exchange, 2, 40, timeout=60)
    assert [values for values, *_ in results] == [[40, 41], [40, 41]]
    assert [tensor.tolist() for _, tensor, *_ in results] == [[0.0] * 3, [1.0] * 3]
    assert all(addresses == {LOOPBACK} for *_, addresses, _ in results)
    assert [ranks for *_, ranks in results] == [["0", "0"], ["1", "1"]]
    assert children() == before
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_the_port_for_torch_is_nobody_else_s_while_it_is_held() -> None:
    from torch.distributed import TCPStore

    with spawn._held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_threads_are_given_no_variables() -> None:
    before = dict(os.environ)
    assert spawn.launch(lambda: dict(os.environ), 2, threads=True, timeout=60) == [before] * 2


@pytest.mark.slow
def test_the_examples_of_the_page_on_launchers_run(tmp_path: Path) -> None:
    page = (_REPOSITORY / "docs" / "launchers.md").read_text()
    train, launch, join, *_ = re.findall(r"^```python\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(train)
    environment = clean_environment(MASTER_ADDR="192.0.2.1", MASTER_PORT="1")  # another job's: not for the PEs
    for example, printed in ((launch, "[[1.0, -2.0, 3.0], [1.0, -2.0, 3.0]]\n"), (join, "[[0, 0], [1, 1]]\n")):
        (script := tmp_path / "example.py").write_text(example)
        command = [sys.executable, str(script)]
        ran = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert ran.stdout == printed, ran.stderr


@pytest.mark.parametrize("kind", ["raise", "custom", "kill"])
def test_launch_raises_what_went_wrong(kind: str) -> None:
    before, began = children(), time.monotonic()
    expected = {"raise": KeyError, "custom": PersistentOpsError, "kill": PersistentOpsError}[kind]
    with pytest.raises(expected) as caught:
        spawn.launch(pe_fails, 2, kind, timeout=250)
    assert time.monotonic() - began < 100  # the other PE waits with a time-out of 200 s: it got the report, or ended
    text = f"{caught.value} {caught.value.__cause__}"
    words = {
        "raise": ["a table of rank 1", "PE 1 of 2 raised it", "in pe_fails"],
        "custom": ["PE 1 of 2 raised", "CustomError: leftright", "in pe_fails"],
        "kill": ["PE 1 of 2 was killed by SIGKILL"],
    }[kind]
    for word in words:
        assert word in text
    assert children() <= before | helpers()


@pytest.mark.parametrize("kind", ["gloo", "store"])
def test_torch_s_loss_of_a_peer_is_no_first_cause(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_GRACE_S", 60.0)
    with pytest.raises(ValueError, match="the first cause"):
        spawn.launch(pe_fails_beside_torch, 2, kind, str(tmp_path / "missed"), timeout=250)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "exited with code 0 before"),
        ("sys.exit", "exited with code 5 before"),
        ("slow exit", "exited with code 6 before"),
        ("sleep", "longer than 3 s"),
    ],
)
def test_launch_ends_processes_that_bring_no_result(how: str, text: str) -> None:
    before = children()
    with pytest.raises(PersistentOpsError, match=text) as caught:
        spawn.launch(pe_ends, 1, how, timeout=3 if how == "sleep" else 60)
    assert "PE 0" in str(caught.value)
    assert children() <= before | helpers()


def returns_a_generator() -> Any:
    return (number for number in range(3))


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    text = r"what fn returned, a generator, cannot be pickled \(.*generator.*\): return what can be, or pass threads="
    with pytest.raises(PersistentOpsError, match=text) as caught:
        spawn.launch(returns_a_generator, 1, timeout=60)
    assert "PE 0 of 1 raised it" in str(caught.value.__cause__)
    (result,) = spawn.launch(returns_a_generator, 1, threads=True, timeout=60)
    assert list(result) == [0, 1, 2]


def helpers() -> set[int]:
    """The children that stay: multiprocessing's resource tracker, and the server that forks PEs."""
    from multiprocessing.resource_tracker import _resource_tracker

    pid = getattr(_resource_tracker, "_pid", None)
    return servers() if pid is None else servers() | {pid}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_do_not_outlive_launch(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from persistent_ops.runtime import spawn\n"
        "def hang():\n"
        "    pathlib.Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    spawn.launch(hang, 2)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(pids)], stderr=subprocess.PIPE, env=clean_environment()
    ) as parent:
        try:
            wait_for(lambda: len(list(pids.iterdir())) == 2, 150)
            parent.send_signal(number)
            _, log = parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert parent.returncode != 0
    assert (b"KeyboardInterrupt" in log) == (number == signal.SIGINT)
    wait_for(lambda: not any(Path("/proc", entry.name).exists() for entry in pids.iterdir()))


def test_a_pe_s_end_is_seen_though_a_child_of_it_lives(tmp_path: Path) -> None:
    end = tmp_path / "end"
    begin = time.monotonic()
    try:
        with pytest.raises(PersistentOpsError, match="PE 1 of 2 was killed by SIGKILL"):
            spawn.launch(pe_leaves_a_child, 2, str(end))
        assert time.monotonic() - begin < 60.0, "as long as the child lives"
    finally:
        end.touch()


def test_ctrl_c_while_processes_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when one is there, which nobody would end; and in the middle of a start, to another thread."""
    kind = multiprocessing.get_context("spawn").Process
    start = kind.start
    seen: list[Any] = []

    def interrupted(process: Any) -> None:
        other = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
        other.start()
        other.join()
        start(process)
        seen.append(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kind, "start", interrupted)
    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        spawn.launch(time.sleep, 2, 1000)
    assert len(seen) == 1, "the first one's start came to its end, and no other one began"
    assert multiprocessing.active_children() == before


def test_launch_with_threads() -> None:
    def work(base: int) -> list[int]:
        pe = thread_bootstrap()
        assert pe is not None
        return [int(value) for value in pe.exchange("t", str(base * pe.rank).encode())]

    assert spawn.launch(work, 3, 5, threads=True) == [[0, 5, 10]] * 3
    assert thread_bootstrap() is None

    def fails() -> None:
        pe = thread_bootstrap()
        assert pe is not None
        if pe.rank == 2:
            raise KeyError("rank 2's own error")
        pe.exchange("never complete", b"")

    began = time.monotonic()
    with pytest.raises(KeyError, match="rank 2's own error") as caught:
        spawn.launch(fails, 3, threads=True)
    assert "PE 2 of 3" in str(caught.value.__cause__)
    assert time.monotonic() - began < SLACK
