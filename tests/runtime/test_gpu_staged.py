"""Puts and signals of the GPU kernel: over NVLink where peers are reachable, and over NVSHMEM's remote transport.

The second path runs on one host without a network card: NVSHMEM's UCX transport over shared memory, the heap in pinned
host memory, and a replacement of GDRCopy (gdrapi_stub.c). NVSHMEM's pointers to peers are then null, and the kernel's
puts use its proxy thread as they would to another host. With the names of two hosts (two_hostnames.c) PEs of one host
store directly, and put to those of the other one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bits import check
from embedding_cases import CASES, EmbeddingTrial
from every_operator import BETWEEN_NODES, problems
from worlds import python_path

import persistent_ops as po

TESTS = Path(__file__).resolve().parents[1]
# Few kernels, since each takes tens of seconds to compile with NVSHMEM: all but the last two cases share one.
NAMES = [
    "plain",
    "uneven default split",
    "fewer samples than PEs",
    "no samples",
    "empty bags only",
    "huge and tiny bags",
    "many tables",
    "single-sample slices",
    "bf16",
    "mixed and odd widths, one PE without tables",
]
REMOTE = {
    "NVSHMEM_REMOTE_TRANSPORT": "ucx",
    "NVSHMEM_HEAP_KIND": "SYSMEM",
    "NVSHMEM_DISABLE_NVLS": "1",
}
PROGRAM = """
import json, sys
import persistent_ops as po
import test_gpu_staged
program, size = sys.argv[1:]
results = po.launch(getattr(test_gpu_staged, program), int(size), {"transport": "auto"}, timeout=500)
print("RESULTS", json.dumps(results))
"""
Found = dict[str, Any]


def staged_cases(options: dict[str, Any]) -> Found:
    """Run the cases on this PE; return whether its peers' memory was reachable."""
    po.init("cuda", operator_timeout=60.0, heap_size=64 << 20, **options)
    world = po.runtime.world.current()
    cases = {case.name: case for case in CASES}
    found = {
        "reachable": [base != 0 for base in world.backend.peer_heaps],
        "problems": {name: check(EmbeddingTrial(cases[name]))[0] for name in NAMES},
    }
    po.finalize()
    return found


def every_operator(options: dict[str, Any]) -> Found:
    """Call every operator on this PE; return where it was, and whose memory was reachable."""
    po.init("cuda", operator_timeout=60.0, heap_size=96 << 20, **options)
    world = po.runtime.world.current()
    found = {
        "host": socket.gethostname(),
        "reachable": [base != 0 for base in world.backend.peer_heaps],
        "problems": problems(BETWEEN_NODES),
    }
    po.finalize()
    return found


def _check(results: list[Found]) -> None:
    assert [found["reachable"] for found in results] == [[True, False], [False, True]]
    for rank, found in enumerate(results):
        assert found["problems"] == dict.fromkeys(NAMES), f"PE {rank}"


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_puts_to_reachable_peers() -> None:
    _check(po.launch(staged_cases, 2, {"transport": "staged"}, timeout=560))


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_every_operator_between_nodes() -> None:
    _check_nodes(po.launch(every_operator, 4, {"transport": "nodes:2"}, timeout=560))


def _check_nodes(results: list[Found]) -> None:
    first, second = [True, True, False, False], [False, False, True, True]
    assert [found["reachable"] for found in results] == [first, first, second, second]
    assert [found["problems"] for found in results] == [{}] * 4


def _built(source: str, library: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"needs a C compiler, `cc`, for {source}")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(TESTS / source), "-o", str(library), "-ldl"], check=True)
    return library


def _library_path(folder: Path) -> str:
    """Return an LD_LIBRARY_PATH with the stub and UCX; skip if one of them is not available."""
    folders = [str(_built("gdrapi_stub.c", folder / "libgdrapi.so.2").parent)]
    wheel = importlib.util.find_spec("libucx")  # of the wheel libucx-cu13
    if wheel is not None and wheel.submodule_search_locations:
        folders += [str(Path(place, "lib")) for place in wheel.submodule_search_locations]
    folders += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    path = ":".join(folders)
    loads = "import ctypes; ctypes.CDLL('libgdrapi.so.2'); ctypes.CDLL('libucp.so.0')"
    environ = {**os.environ, "LD_LIBRARY_PATH": path}
    done = subprocess.run([sys.executable, "-c", loads], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"needs UCX, from the system or by `pip install libucx-cu13`: {reason}")
    return path


def _over_ucx(folder: Path, program: Callable[..., Found], size: int, **variables: str) -> list[Found]:
    """Run a program of this file on PEs that NVSHMEM's remote transport connects."""
    environ = {**os.environ, **REMOTE, "LD_LIBRARY_PATH": _library_path(folder), **variables}
    environ["PYTHONPATH"] = python_path()
    command = [sys.executable, "-c", PROGRAM, program.__name__, str(size)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return list(json.loads(lines[-1].removeprefix("RESULTS ")))


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_puts_over_the_remote_transport(tmp_path: Path) -> None:
    _check(_over_ucx(tmp_path, staged_cases, 2, NVSHMEM_DISABLE_P2P="1"))


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_two_hosts(tmp_path: Path) -> None:
    names = _built("two_hostnames.c", tmp_path / "two_hostnames.so")
    # NVSHMEM's PEs of two hosts do not meet over the loopback interface by themselves.
    results = _over_ucx(tmp_path, every_operator, 4, LD_PRELOAD=str(names), NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="lo")
    assert [found["host"] for found in results] == ["host0", "host0", "host1", "host1"]
    _check_nodes(results)
