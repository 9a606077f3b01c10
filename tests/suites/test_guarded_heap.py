"""Kernels under AddressSanitizer, in guarded heaps: no error, but one if a kernel writes outside of its memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import guarded_heap
import pytest
from host_driver.build import CUDA
from mutations import Edit, Swap, mutated

_PROGRAM = """
import sys
from pathlib import Path

import guarded_heap
import torch

import persistent_ops as po
from persistent_ops.runtime.compile import jit

guarded_heap.guard()
jit.kernel_source_root = lambda: Path(sys.argv[1])


def all_reduce():
    for count in (3, 1000):  # no multiples of the heap's alignment
        x = po.empty(count)
        x.fill_(1.0)
        assert po.all_reduce(x).tolist() == [2.0] * count
        po.free(x)


def gemv():
    assert po.gemv_all_reduce(torch.ones(5, 4), torch.ones(4)).tolist() == [8.0] * 5


def embedding():
    rows, bags = torch.arange(6) % 3, torch.arange(7)
    assert po.embedding_all_to_all([torch.ones(3, 4)], rows, bags).tolist() == [[1.0] * 8] * 3


def calls(transport, operators):
    po.init("host", heap_size=16 << 20, transport=transport)
    for operator in operators:
        globals()[operator]()
    po.check()
    po.finalize()


for transport in sys.argv[2].split(","):
    po.launch(calls, 2, transport, sys.argv[3].split(","), threads=True, timeout=120)
print("silent")
"""


def _told_of(root: Path, transports: str, operators: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", _PROGRAM, str(root), transports, operators]
    done = subprocess.run(command, env=guarded_heap.environment(), capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_kernels_are_silent() -> None:
    assert _told_of(CUDA, "auto,staged", "all_reduce,gemv,embedding") == (0, "silent\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "transport", "operator", "what"),
    [
        (Swap("packet-parity", "team_.epoch % 2", "team_.epoch % 2 + 2"), "auto", "gemv", "use-after-poison"),
        (Swap("wg-done-reset", "done[i]", "done[i + 32]"), "staged", "embedding", "heap-buffer-overflow"),
    ],
    ids=["packets behind their places in the heap", "bits behind their words"],
)
def test_a_kernel_that_writes_beside_its_memory_is_caught(
    tmp_path: Path, edit: Edit, transport: str, operator: str, what: str
) -> None:
    code, out, told = _told_of(mutated(tmp_path, [edit]), transport, operator)
    assert code != 0 and "silent" not in out
    found = re.search(r"ERROR: AddressSanitizer: (\S+).*?\n *#0 [^\n]*/(\w+)_all_\w+\.so", told, re.DOTALL)
    assert found and found.groups() == (what, operator), told
