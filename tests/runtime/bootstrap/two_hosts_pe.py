"""A PE of the tests with two hosts (test_two_hosts.py): joins, calls operators, and prints what it saw."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from every_operator import BETWEEN_NODES, problems
from pe_processes import wait_for
from worlds import error_of

import persistent_ops as po
from persistent_ops.runtime.world import current

SECONDS = 6.0  # that a PE waits for another one


def main(task: str, folder: str) -> None:
    """Do one thing; in a file of the folder, since a launcher's output may need the link that a test cuts."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    report = ""

    def join() -> None:
        po.init("host", timeout=60.0 if task != "no_route" else SECONDS, operator_timeout=60.0, transport="nodes:2")

    kind, text, seconds = error_of(join)
    if kind:
        report = f"{kind} after {seconds:.1f} s: {text}"
        rank = os.environ.get("SLURM_PROCID", "")
    else:
        rank = str(po.rank())
        joined = current().bootstrap
        report = f"{socket.gethostname()} {joined.local_rank}/{joined.local_world_size} of {joined.world_size}: "
        report += _TASKS[task](Path(folder))
    Path(folder, f"{rank}.partial").write_text(report)
    os.rename(f"{folder}/{rank}.partial", f"{folder}/{rank}.txt")
    if not kind:
        po.finalize()


def _operators(_: Path) -> str:
    return str(problems(BETWEEN_NODES) or "all right")


def _patient(folder: Path) -> None:
    """Call an operator, so that kernels are compiled; from then on wait as short as the test does."""
    assert not problems(BETWEEN_NODES[:1])
    po.barrier()
    (folder / f"{po.rank()}.joined").touch()


def _dead(folder: Path) -> str:
    _patient(folder)
    if po.rank() == po.world_size() - 1:
        wait_for(lambda: len(list(folder.glob("*.joined"))) == po.world_size())  # its signals have arrived
        os.kill(os.getpid(), signal.SIGKILL)
    return _until_it_fails()


def _cut(folder: Path) -> str:
    """Call operators, and what needs rank 0's store, without the link between the hosts."""
    _patient(folder)
    current().bootstrap.timeout = SECONDS
    wait_for((folder / "cut").exists)
    x = torch.ones(8)
    called = error_of(lambda: po.all_reduce(x))[0] or "all_reduce works"
    kind, text, seconds = error_of(lambda: po.empty(8))
    return f"{called}; {kind} after {seconds:.1f} s: {text}"


def _until_it_fails() -> str:
    def call() -> None:
        while True:
            po.all_reduce(torch.ones(8))
            time.sleep(0.01)

    kind, text, seconds = error_of(call)
    return f"{kind} after {seconds:.1f} s: {text}"


_TASKS = {"operators": _operators, "dead": _dead, "cut": _cut, "no_route": _operators}

if __name__ == "__main__":
    main(*sys.argv[1:])
