"""Joining and leaving: worlds one after the other, with and without launchers, over torch.distributed groups."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedding_cases import run_cases
from worlds import error_of, python_path, run_pes

import persistent_ops as po
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES

NAMES = ["plain", "mixed and odd widths, one PE without tables"]
RIGHT = dict.fromkeys(NAMES)

# Two worlds, one after the other, in a program like a user's: without po.launch.
PROGRAM = """
import sys
import persistent_ops as po
from embedding_cases import run_cases
backend, *names = sys.argv[1:]
found = [run_cases(backend, names, {}) for _ in range(2)]
po.init(backend, operator_timeout=20.0, heap_size=16 << 20)
print(f"PE {po.rank()} of {po.world_size()}: {found == [dict.fromkeys(names)] * 2}", flush=True)
"""  # and without finalize(): leaving the process does it


def _run(backend: str, tmp_path: Path, *launcher: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ["PYTHONPATH"] = python_path()
    command = [*(launcher or (sys.executable,)), str(program), backend, *NAMES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Launchers merge what PEs print, and may do so between a line and its end.
    return sorted(re.findall(r"PE \d+ of \d+: \w+?(?=PE|\s|$)", done.stdout))


@pytest.mark.slow
def test_one_pe_needs_no_launcher(backend: str, tmp_path: Path) -> None:
    assert _run(backend, tmp_path) == ["PE 0 of 1: True"]


@pytest.mark.slow
def test_under_hydra(backend: str, tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    hydra = shutil.which("mpiexec.hydra", path=beside) or shutil.which("mpiexec.hydra")
    if hydra is None:
        pytest.skip("mpiexec.hydra is not installed (pip install mpich)")
    assert _run(backend, tmp_path, hydra, "-n", "2", sys.executable) == ["PE 0 of 2: True", "PE 1 of 2: True"]


@pytest.mark.slow
def test_under_torchrun(backend: str, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert _run(backend, tmp_path, *torchrun) == ["PE 0 of 2: True", "PE 1 of 2: True"]


def _groups(backend: str, folder: str) -> dict[str, Any]:
    me = int(os.environ["PERSISTENT_OPS_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=me, world_size=3)
    seen: dict[str, Any] = {"default": run_cases(backend, NAMES[:1], {})}
    members = dist.new_group([0, 2])
    if me == 1:
        with pytest.raises(po.BootstrapError) as caught:
            po.init(backend, members)
        seen["outside"] = str(caught.value)
    else:
        seen["members"] = run_cases(backend, NAMES, {"group": members})
        po.init(backend, members, operator_timeout=20.0, heap_size=16 << 20)
        seen["rank"] = (po.rank(), po.world_size())
        mine = po.to_symmetric(torch.full((4,), float(me)))
        po.barrier()
        seen["peer"] = po.peer_view(mine, 1 - po.rank()).tolist()
        po.barrier()
        po.finalize()
    dist.barrier()  # torch.distributed is as usable as before
    dist.destroy_process_group()
    return seen


def test_groups_of_torch_distributed(backend: str, tmp_path: Path) -> None:
    first, second, third = po.launch(_groups, 3, backend, str(tmp_path), timeout=200)
    assert first["default"] == second["default"] == third["default"] == {NAMES[0]: None}
    assert "not in the group" in second["outside"]
    assert first["members"] == third["members"] == RIGHT
    assert (first["rank"], third["rank"]) == ((0, 2), (1, 2))
    assert (first["peer"], third["peer"]) == ([2.0] * 4, [0.0] * 4)


def _grid(backend: str, folder: str) -> dict[str, Any]:
    """TP2 x DP2: two worlds side by side over the pairs that hold a model, then two over those that share a shard."""
    me = int(os.environ["PERSISTENT_OPS_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=me, world_size=4)
    tensor_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][me // 2]
    data_parallel = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][me % 2]
    seen: dict[str, Any] = {}
    for name, group in (("tp", tensor_parallel), ("dp", data_parallel), ("tp again", tensor_parallel)):
        seen[name] = run_cases(backend, NAMES, {"group": group})
        po.init(backend, group, heap_size=16 << 20)
        weight = torch.full((8, 4), float(me + 1), device=po.device())
        sums = [po.gemv_all_reduce(weight, torch.full((4,), float(i), device=po.device())).tolist() for i in range(6)]
        seen[name, "where"] = (po.rank(), po.world_size(), sums)
        po.check()
        po.finalize()
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.slow
def test_groups_side_by_side(backend: str, tmp_path: Path) -> None:
    def sums(first: int, second: int) -> list[list[float]]:
        return [[4.0 * i * (first + second + 2)] * 8 for i in range(6)]

    for me, seen in enumerate(po.launch(_grid, 4, backend, str(tmp_path), timeout=250)):
        partner = {"tp": me ^ 1, "tp again": me ^ 1, "dp": me ^ 2}
        for name, other in partner.items():
            assert seen[name] == RIGHT, (me, name)
            assert seen[name, "where"] == (int(other < me), 2, sums(me, other)), (me, name)


@pytest.mark.host
def test_a_group_without_torch_distributed() -> None:
    with pytest.raises(po.BootstrapError, match=r"torch\.distributed is not initialized"):
        po.init("host", group=object())


def _idle(backend: str) -> list[bool]:
    po.init(backend, operator_timeout=20.0, heap_size=16 << 20)
    po.check()
    for _ in range(5):
        po.barrier()
        po.check()
    usable = [run is None for run in (po.check(), po.barrier())]
    po.finalize()
    return usable


@pytest.mark.parametrize("world", [1, 3])
def test_check_and_barrier_without_launches(backend: str, world: int) -> None:
    results = run_pes(_idle, world, backend, timeout=60)
    assert results == [[True, True]] * world


def _called() -> list[torch.Tensor]:
    rank, device = po.rank(), po.device()
    rng = torch.Generator().manual_seed(rank)
    weight, x = (torch.randn(shape, generator=rng).to(device) for shape in ((24, 40), (2, 40)))
    tables = [torch.randn(30, 8, generator=rng).to(device)]
    indices, offsets = torch.arange(24, device=device), torch.arange(0, 25, 2, device=device)
    rows = torch.sparse_coo_tensor([[rank, 9]], torch.ones(2, 4), (12, 4), device=device, check_invariants=False)
    results = [po.gemv(weight, x), po.gemv_all_reduce(weight, x), po.all_reduce(x, algorithm="slices")]
    results += [po.embedding_all_to_all(tables, indices, offsets), po.sparse_all_reduce(rows).to_dense()]
    return [result.cpu() for result in results]


def _begun_in_inference_mode(backend: str, options: dict[str, Any]) -> list[bool]:
    with torch.inference_mode():
        po.init(backend, operator_timeout=20.0, heap_size=64 << 20, **options)
        own = po.empty(8, dtype=torch.int64)
        first = _called()
    right = [not own.is_inference(), int(own.zero_().sum()) == 0]
    for _ in range(2):
        po.recover()
        right += [torch.equal(a, b) for a, b in zip(first, _called(), strict=True)]
    po.finalize()
    return right


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="direct"),
        pytest.param({"transport": "staged"}, id="staged", marks=pytest.mark.host),
    ],
)
def test_what_begins_in_inference_mode_recovers_outside_of_it(backend: str, options: dict[str, Any]) -> None:
    assert run_pes(_begun_in_inference_mode, 2, backend, options, timeout=120) == [[True] * 12] * 2


def _from_a_thread(program: Any) -> Any:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(error_of(program)[:2]), name="second")
    thread.start()
    thread.join()
    return outcome[0]


def _two_callers(backend: str) -> list[Any]:
    po.init(backend, operator_timeout=20.0, heap_size=16 << 20)
    device = po.device()
    table = torch.ones(1, 4, device=device)
    weight, x = torch.ones(8, 8, device=device), torch.ones(8, device=device)
    sparse = torch.sparse_coo_tensor([[0]], torch.ones(1), (4,), device=device)
    calls = {
        "embedding": lambda: po.embedding_all_to_all(
            [table], torch.zeros(1, dtype=torch.int64, device=device), torch.arange(2, device=device)
        ),
        "gemv": lambda: po.gemv(weight, x),
        "gemv_all_reduce": lambda: po.gemv_all_reduce(weight, x),
        "gemm_all_to_all": lambda: po.gemm_all_to_all(weight.half(), weight.half()),
        "sparse": lambda: po.sparse_all_reduce(sparse),
        "barrier": po.barrier,
    }
    found = {name: _from_a_thread(call) for name, call in calls.items()}  # one thread after the other
    for call in calls.values():
        call()
    refused = {name: _from_a_thread(call) for name, call in calls.items()}
    allowed = _from_a_thread(po.check)
    for call in calls.values():
        call()
    # Autograd's own threads make calls on behalf of the thread that began the backward pass.
    leaf = torch.ones(1, device=device, requires_grad=True)
    seen: list[Any] = []
    y = leaf * 1
    y.register_hook(lambda gradient: seen.append(error_of(lambda: po.gemv(weight, x))[:2]))
    y.sum().backward()
    po.finalize()
    return [found, refused, allowed, seen]


def test_operators_are_called_from_one_thread(backend: str, tmp_path: Path) -> None:
    found, refused, allowed, seen = po.launch(_two_callers, 1, backend, timeout=200)[0]
    assert set(found.values()) == {("", "")}, found
    for name, (error, text) in refused.items():
        assert error == "RuntimeError" and "by thread 'MainThread', and now by 'second'" in text, (name, text)
    assert allowed == ("", "")
    assert seen == [("", "")]


def _settled() -> tuple[int, int, int]:
    """Return what this process has open, once threads that were asked to end have had the time for it."""
    found = [(-1, -1, -1)] * 4
    while len(set(found[-4:])) > 1 or found[-1][0] < 0:
        time.sleep(0.5)
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _mapped_heaps()))
    return found[-1]


def _mapped_heaps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:persistent_ops")


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.parametrize("options", [{}, {"transport": "staged"}], ids=["direct", "staged"])
def test_worlds_that_are_gone_leave_nothing_behind(options: dict[str, Any]) -> None:
    def world_after_world() -> None:
        assert po.launch(run_cases, 2, "host", NAMES[:1], options, threads=True, timeout=60) == [{NAMES[0]: None}] * 2

    world_after_world()  # what is kept for good: loaded kernels
    before = _settled()
    for _ in range(5):
        world_after_world()
    assert _settled() == before, "open files, threads, mapped heaps"
