"""Puts and signals of the GPU kernel: over NVLink where peers are reachable, and over NVSHMEM's remote transport.

The second path runs on one host without a network card: NVSHMEM's UCX transport over shared memory, the heap in pinned
host memory, and a replacement of GDRCopy (gdrapi_stub.c). NVSHMEM's pointers to peers are then null, and the kernel's
puts use its proxy thread as they would to another host.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bits import check
from embedding_cases import CASES, EmbeddingTrial

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
    "NVSHMEM_DISABLE_P2P": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "ucx",
    "NVSHMEM_HEAP_KIND": "SYSMEM",
    "NVSHMEM_DISABLE_NVLS": "1",
}
PROGRAM = """
import json, sys
import persistent_ops as po
from test_gpu_staged import staged_cases
print("RESULTS", json.dumps(po.launch(staged_cases, 2, {"transport": "auto"}, timeout=500)))
"""


def staged_cases(options: dict[str, Any]) -> dict[str, Any]:
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


def _check(results: list[dict[str, Any]]) -> None:
    assert [found["reachable"] for found in results] == [[True, False], [False, True]]
    for rank, found in enumerate(results):
        assert found["problems"] == dict.fromkeys(NAMES), f"PE {rank}"


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_puts_to_reachable_peers() -> None:
    _check(po.launch(staged_cases, 2, {"transport": "staged"}, timeout=560))


def _build_stand_in(folder: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, `cc`, for the stand-in of GDRCopy")
    library = folder / "libgdrapi.so.2"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(TESTS / "gdrapi_stub.c"), "-o", str(library)], check=True)
    return library


def _library_path(folder: Path) -> str:
    """Return an LD_LIBRARY_PATH with the stub and UCX; skip if one of them is not available."""
    folders = [str(_build_stand_in(folder).parent)]
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


@pytest.mark.apart
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_puts_over_the_remote_transport(tmp_path: Path) -> None:
    environ = {**os.environ, **REMOTE, "LD_LIBRARY_PATH": _library_path(tmp_path)}
    roots = (str(TESTS), str(Path(po.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", ""))
    environ["PYTHONPATH"] = os.pathsep.join(root for root in roots if root)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    _check(json.loads(lines[-1].removeprefix("RESULTS ")))
