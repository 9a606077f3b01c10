"""PEs find each other. Every failure to do so ends in an error on every PE, in time.

The PEs of most tests are three processes that stay alive and get their commands over pipes, because the import of
torch takes far longer than a test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from pe_processes import LOOPBACK, SLACK, clean_environment, host_address, listening, wait_for
from warm_python import Popen

from persistent_ops.runtime import spawn
from persistent_ops.runtime.bootstrap.connection import Bootstrap, connect, from_threads
from persistent_ops.runtime.bootstrap.launchers import LaunchEnvironment, detect
from persistent_ops.runtime.bootstrap.mailbox import ThreadMailbox, ThreadTable
from persistent_ops.runtime.errors import BootstrapError, PersistentOpsError

JOB_NUMBERS = count(int(time.time() * 1000) % 10**9)

WORKER = """
import json, os, sys, time
from persistent_ops.runtime.bootstrap import connection as bootstrap, launchers
import torch.distributed as dist
pe = None
def do(order):
    global pe
    what = order["do"]
    if what == "connect":
        pe = bootstrap.connect(launchers.detect(order["environ"]), order["timeout"])
        return [pe.rank, pe.world_size, pe.local_rank, pe.local_world_size, pe.single_host, pe.launcher]
    if what == "exchange":
        value = order.get("value", str(pe.rank)).encode()
        return [v.decode() for v in pe.exchange(order.get("tag", "t"), value, order.get("timeout"))]
    if what == "many":
        for i in range(order["rounds"]):
            values = pe.exchange("many", bytes([pe.rank, i % 251]) * (1 + 97 * pe.rank))
            assert values == [bytes([r, i % 251]) * (1 + 97 * r) for r in range(pe.world_size)], (i, values)
        return order["rounds"]
    if what == "fail":
        return pe.fail(order["message"])
    if what == "close":
        return pe.close()
    if what == "group":
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=order["url"], rank=order["rank"], world_size=order["size"])
        members = order.get("members")
        group = None if members is None else dist.new_group(members)
        if order.get("hidden"):
            del dist.ProcessGroup.get_group_store
        pe = bootstrap.from_group(group, order["timeout"])
        return [pe.rank, pe.world_size, pe.local_rank, pe.local_world_size, pe.single_host, pe.launcher]
print("ready", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    try:
        answer = {"value": do(json.loads(line))}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answer["seconds"] = time.monotonic() - began
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """A process that receives commands."""

    def __init__(self) -> None:
        self.process = Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        # torch's log messages must not fill the pipe. Tests of what may not be logged read it.
        self.log: list[str] = []
        assert self.process.stderr is not None
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True)
        self.reader.start()

    def tell(self, do: str, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "".join(self.log)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Worker]]:
    workers = [Worker() for _ in range(3)]
    for worker in workers:
        assert worker.process.stdout is not None
        assert worker.process.stdout.readline() == "ready\n", "".join(worker.log)
    yield workers
    for worker in workers:
        worker.end()


def srun(rank: int, size: int, job: int) -> dict[str, str]:
    """The variables of a Slurm step on one host."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
    }


def openmpi(rank: int, size: int, job: int) -> dict[str, str]:
    """The variables of an Open MPI job on one host."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": f"prterun-here-{job}@1",
    }


def by_hand(rank: int, size: int, job: int) -> dict[str, str]:
    """torch.distributed's variables, on a host that is not called localhost: rank 0 serves at the given port."""
    port = 20000 + job % 10000
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host_address(), "MASTER_PORT": str(port)}


def all_do(workers: list[Worker], do: str, **order: Any) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell(do, **order)
    return [worker.answer() for worker in workers]


def connect_all(
    workers: list[Worker], numbers: list[tuple[int, int]], timeout: float, kind: Callable[..., dict[str, str]] = srun
) -> list[dict[str, Any]]:
    """Connect worker i as numbers[i] = (rank, world size)."""
    job = next(JOB_NUMBERS)
    for worker, (rank, size) in zip(workers, numbers, strict=True):
        worker.tell("connect", environ=kind(rank, size, job), timeout=timeout)
    return [worker.answer() for worker in workers]


def assert_all_failed(answers: list[dict[str, Any]], within: float, *words: str) -> None:
    for answer in answers:
        assert answer.get("error") == "BootstrapError", answer
        assert answer["seconds"] < within, answer
        for word in words:
            assert word in answer["text"], answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", [srun, openmpi, by_hand])
def test_connects_and_exchanges_again_and_again(pool: list[Worker], kind: Callable[..., dict[str, str]]) -> None:
    job = next(JOB_NUMBERS)
    host_address() if kind is by_hand else None
    for _ in range(3):  # init, finalize and init again, in one process
        for rank, worker in enumerate(pool):
            worker.tell("connect", environ=kind(rank, 3, job), timeout=15)
        launcher = {srun: "slurm", openmpi: "openmpi", by_hand: "torchrun"}[kind]
        for rank, worker in enumerate(pool):
            assert worker.answer()["value"] == [rank, 3, rank, 3, True, launcher]
        assert [answer["value"] for answer in all_do(pool, "many", rounds=20)] == [20] * 3
        if kind is not by_hand:
            assert {address for address, _ in listening(pool[0].process.pid)} == {LOOPBACK}
        assert [listening(worker.process.pid) for worker in pool[1:]] == [[], []]
        all_do(pool, "close")


def test_store_of_a_closed_job_is_gone(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 15)
    before = listening(pool[0].process.pid)
    all_do(pool, "close")
    wait_for(lambda: len(listening(pool[0].process.pid)) < len(before))
    answer = all_do(pool[:1], "exchange")[0]
    assert "closed" in answer["text"]


def test_missing_rank_is_named_on_every_rank(pool: list[Worker]) -> None:
    assert_all_failed(connect_all(pool[:2], [(0, 3), (1, 3)], 2), 2 + SLACK, "rank 2 of 3")


def test_missing_rank_zero(pool: list[Worker]) -> None:
    assert_all_failed(connect_all(pool[:2], [(1, 3), (2, 3)], 1.5), 1.5 + SLACK, "rank 0")


def test_two_ranks_with_one_number(pool: list[Worker]) -> None:
    answers = connect_all(pool, [(0, 3), (1, 3), (1, 3)], 30)
    assert_all_failed(answers, SLACK, "two processes claim rank 1")


def test_a_rank_that_comes_after_the_failure_learns_why(pool: list[Worker]) -> None:
    job = next(JOB_NUMBERS)
    for worker in pool[:2]:
        worker.tell("connect", environ=srun(0, 3, job), timeout=30)
    time.sleep(0.3)  # Both have met and failed by now; the one that serves the store waits for rank 1.
    pool[2].tell("connect", environ=srun(1, 3, job), timeout=30)
    assert_all_failed([worker.answer() for worker in pool], SLACK, "two processes claim rank 0")


def test_world_size_disagrees(pool: list[Worker]) -> None:
    assert_all_failed(connect_all(pool, [(0, 3), (1, 3), (2, 4)], 20), SLACK, "world size differs", "3", "4")


def test_stray_process_does_not_end_a_complete_job(pool: list[Worker]) -> None:
    job = next(JOB_NUMBERS)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    serve = f"""
import torch.distributed as dist, sys
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("up", flush=True); sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Popen([sys.executable, "-c", serve], text=True, **pipes) as server:
        assert server.stdout is not None
        assert server.stdout.readline()
        environs = [
            {
                "PERSISTENT_OPS_RANK": str(rank),
                "PERSISTENT_OPS_WORLD_SIZE": "2",
                "PERSISTENT_OPS_STORE": f"127.0.0.1:{port}",
                "PERSISTENT_OPS_JOB": str(job),
            }
            for rank in (0, 1, 1)
        ]
        for worker, environ in zip(pool[:2], environs, strict=False):
            worker.tell("connect", environ=environ, timeout=10)
        assert all("value" in worker.answer() for worker in pool[:2])
        stray = all_do(pool[2:], "connect", environ=environs[2], timeout=10)
        assert_all_failed(stray, SLACK, "two processes claim rank 1")
        assert [answer["value"] for answer in all_do(pool[:2], "exchange")] == [["0", "1"]] * 2
        all_do(pool[:2], "close")
        server.kill()


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "nobody"])
def test_address_without_a_store(pool: list[Worker], listens: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if listens:
            listener.listen()
        port = listener.getsockname()[1]
        store = f"127.0.0.1:{port}"
        environ = {"PERSISTENT_OPS_RANK": "1", "PERSISTENT_OPS_WORLD_SIZE": "2", "PERSISTENT_OPS_STORE": store}
        answers = all_do(pool[:1], "connect", environ=environ, timeout=1.5)
    words = "does not speak" if listens else "nobody listens"
    assert_all_failed(answers, 1.5 + SLACK, "store of this job cannot be reached", words)
    assert str(port) not in answers[0]["text"]
    assert str(port) not in "".join(pool[0].log)


def test_a_rank_that_gives_up_is_heard_at_once(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 30)
    for worker in pool[:2]:
        worker.tell("exchange")
    pool[2].tell("fail", message="the disk is full")
    pool[2].answer()
    assert_all_failed([worker.answer() for worker in pool[:2]], SLACK, "rank 2 gave up", "the disk is full")
    # From then on the connection is dead, on the rank that failed too.
    assert_all_failed(all_do(pool, "exchange"), SLACK, "the disk is full")
    all_do(pool, "close")


def test_a_rank_that_closed_is_not_waited_for(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 30)
    all_do(pool[2:], "close")
    assert_all_failed(all_do(pool[:2], "exchange"), SLACK, "rank 2", "closed")
    all_do(pool[:2], "close")


def test_different_calls_are_an_error(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 30)
    for worker, tag in zip(pool, ["heap", "heap", "barrier"], strict=True):
        worker.tell("exchange", tag=tag)
    assert_all_failed([worker.answer() for worker in pool], SLACK, "'heap'", "'barrier'", "same calls")
    all_do(pool, "close")


def test_late_rank_is_named_after_the_timeout(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 30)
    assert_all_failed(all_do(pool[:2], "exchange", timeout=1, tag="heap"), 1 + SLACK, "rank 2 of 3", "'heap'")
    all_do(pool, "close")


def test_stopped_rank_zero(pool: list[Worker]) -> None:
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 30)
    os.kill(pool[0].process.pid, signal.SIGSTOP)
    try:
        assert_all_failed(all_do(pool[1:], "exchange", timeout=1), 1 + SLACK, "does not answer", "stopped")
    finally:
        os.kill(pool[0].process.pid, signal.SIGCONT)
    # The others cannot inform rank 0 any more that they have left. Without this it would wait for them in close().
    all_do(pool[:1], "fail", message="I was stopped")
    all_do(pool, "close")


def test_from_group(pool: list[Worker]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    for members, hidden in ((None, False), ([2, 1], False), (None, True)):
        for rank, worker in enumerate(pool):
            worker.tell("group", url=url, rank=rank, size=3, members=members, hidden=hidden, timeout=10)
        answers = [worker.answer() for worker in pool]
        if members is None:
            expected = [[rank, 3, rank, 3, True, "torch.distributed"] for rank in range(3)]
            assert [answer.get("value") for answer in answers] == expected, answers
            assert [answer["value"] for answer in all_do(pool, "exchange")] == [["0", "1", "2"]] * 3
            all_do(pool, "close")
        else:
            assert_all_failed(answers[:1], SLACK, "not in the group")
            assert sorted(answer["value"][0] for answer in answers[1:]) == [0, 1]
            assert [answer["value"] for answer in all_do(pool[1:], "exchange")] == [["0", "1"]] * 2
            all_do(pool[1:], "close")


def test_the_store_waits_for_every_rank_also_where_one_has_left_and_ended(pool: list[Worker]) -> None:
    third = Worker()
    try:
        assert third.process.stdout is not None
        assert third.process.stdout.readline() == "ready\n", "".join(third.log)
        connect_all([*pool[:2], third], [(0, 3), (1, 3), (2, 3)], 20)
        all_do([third], "close")
    finally:
        third.end()
    pool[0].tell("close")
    time.sleep(0.5)
    all_do([pool[1]], "close")
    assert pool[0].answer()["seconds"] >= 0.4


def test_killed_rank_is_named_long_before_the_timeout(pool: list[Worker]) -> None:
    """The last test with the pool, as it kills one of its processes."""
    connect_all(pool, [(0, 3), (1, 3), (2, 3)], 60)
    for worker in pool[:2]:
        worker.tell("exchange")
    time.sleep(0.1)
    pool[2].process.kill()
    assert_all_failed([worker.answer() for worker in pool[:2]], SLACK, "rank 2", "died")
    all_do(pool[:2], "close")


def join_threads(
    sizes: list[int], prepare: Callable[[ThreadTable], None] | None = None, **numbers: list[int]
) -> list[str]:
    """Join one PE per entry of `sizes` over one table; return what each raised, or ""."""
    table = ThreadTable()
    if prepare is not None:
        prepare(table)
    texts = [""] * len(sizes)

    def run(rank: int) -> None:
        pe = Bootstrap(ThreadMailbox(table), rank, sizes[rank], "slurm", 5.0)
        try:
            local_rank = numbers["local_ranks"][rank] if numbers else None
            pe._join(local_rank, None, time.monotonic() + 5.0)
        except BootstrapError as error:
            texts[rank] = str(error)
        finally:
            pe.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_identities_are_checked() -> None:
    assert join_threads([2, 2]) == ["", ""]
    assert all("same local rank" in text for text in join_threads([2, 2], local_ranks=[0, 0]))

    def forge(table: ThreadTable) -> None:
        table.values["0/2"] = b"\x07\x00connect{]"
        table.counters["0/count"] = 1

    assert all("cannot be read" in text for text in join_threads([3, 3], forge))


class LateBoard(ThreadMailbox):
    """Lets an event happen just before its PE looks for failures."""

    def __init__(self, table: ThreadTable, happens: Callable[[], None]) -> None:
        super().__init__(table)
        self._happens = [happens]

    def has(self, key: str, deadline: float) -> bool:
        if key == "failure" and self._happens:
            self._happens.pop()()
        return super().has(key, deadline)


@pytest.mark.parametrize("arrives", [True, False])
def test_who_leaves_behind_an_exchange_does_not_end_it(arrives: bool) -> None:
    table = ThreadTable()
    other = Bootstrap(ThreadMailbox(table), 1, 2, "slurm", 5.0)

    def leave() -> None:
        if arrives:
            assert other.exchange("t", b"1") == [b"0", b"1"]
        other.close()

    slow = Bootstrap(LateBoard(table, leave), 0, 2, "slurm", 5.0)
    if arrives:
        assert slow.exchange("t", b"0") == [b"0", b"1"]
    with pytest.raises(BootstrapError, match="rank 1 gave up: it has closed its connection"):
        slow.exchange("t", b"0")
    slow.close()


class HeldUpBoard(ThreadMailbox):
    """Holds its PE up once, after its first look at a counter, until time is over. Something happens meanwhile."""

    def __init__(self, table: ThreadTable, counter: str, happens: Callable[[], None]) -> None:
        super().__init__(table)
        self._counter, self._happens = counter, [happens]

    def add(self, key: str, amount: int, deadline: float) -> int:
        total = super().add(key, amount, deadline)
        if key == self._counter and self._happens:
            self._happens.pop()()
            time.sleep(0.6)
        return total


def test_a_rank_that_is_held_up_itself_does_not_miss_who_came_in_time() -> None:
    table = ThreadTable()
    other = Bootstrap(ThreadMailbox(table), 1, 2, "slurm", 5.0)

    def arrive() -> None:
        assert other.exchange("t", b"1") == [b"0", b"1"]

    slow = Bootstrap(HeldUpBoard(table, "0/count", arrive), 0, 2, "slurm", 5.0)
    assert slow.exchange("t", b"0", timeout=0.5) == [b"0", b"1"]
    for pe in (slow, other):
        pe.close()


def test_world_of_one_needs_nobody() -> None:
    pe = connect(detect({}), 1.0)
    assert (pe.rank, pe.world_size, pe.local_rank, pe.local_world_size, pe.single_host) == (0, 1, 0, 1, True)
    assert pe.exchange("t", b"x") == [b"x"]
    pe.close()


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    pe = from_threads(1, 1.0)[0]
    with pytest.raises(TypeError, match="value must be bytes, got str"):
        pe.exchange("t", "x")  # type: ignore[arg-type]
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            connect(detect({}), timeout)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        from_threads(0, 1.0)
    with pytest.raises(BootstrapError, match="rank 2 is outside the world of 2"):
        connect(LaunchEnvironment("slurm", 2, 2), 1.0)
    with pytest.raises(BootstrapError, match="PMI_FD=9999 is not an open connection"):
        connect(LaunchEnvironment("hydra", 0, 2, rendezvous="pmi", pmi_fd=9999), 1.0)
    with pytest.raises(ValueError, match="world_size must be a whole number"):
        spawn.launch(print, 0)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        spawn.launch(print, 1, timeout=0)
    with pytest.raises(ValueError, match="must be picklable"):
        spawn.launch(lambda: None, 1)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(PersistentOpsError, match=r"daemonic.*threads=True"):
        spawn.launch(print, 1)
