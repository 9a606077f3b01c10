"""SMs that launches leave to NCCL's collectives: how many, what is refused, the time-out's message without them."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dlrm.workload import run_pe
from kept_pes import in_processes
from rehearsal import Gpu, Notes, PaperGpu, bound, rehearsing
from test_dlrm_train import options_of
from test_residency import BACKWARD, BARRIER, FORWARD, H200, INPUTS, _Kernel
from torch.nn.parallel import DistributedDataParallel
from worlds import error_of, gave_up, in_world, init_with_impatient_kernels, run_pes

import persistent_ops as po
from persistent_ops.nn.leave_room import _backends, _problem
from persistent_ops.ops import all_reduce_plan, gemm_exchange_plan, gemv_plan, sparse_plan
from persistent_ops.ops.embedding import (
    backward_plan as embedding_backward_plan,
    inputs_plan as embedding_inputs_plan,
    inversion as embedding_inversion,
    plan as embedding_plan,
)
from persistent_ops.runtime import world as po_world
from persistent_ops.runtime.leave_sms import leave_sms
from persistent_ops.runtime.residency import Residency

NUM_SMS = 8  # that are left
UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT


# ---- room ------------------------------------------------------------------------------------------------------------


def test_what_is_resident_together_leaves_room() -> None:
    found = Residency(H200, 132)
    assert found.leaves_room(is_beside=False) and found.num_free(is_beside=True) == 132
    found.add("", FORWARD, 264)
    found.add("inputs", INPUTS, 16)
    assert found.num_free(is_beside=False) == 132 and found.num_free(is_beside=True) == 116
    found.leave(NUM_SMS, is_beside=True)
    assert found.leaves_room(is_beside=True), "the large launch is forgotten"
    found.add("", BACKWARD, 108)
    assert found.leaves_room(is_beside=True) and found.fits()
    found.add("", BACKWARD, 124)
    assert found.leaves_room(is_beside=False) and not found.leaves_room(is_beside=True) and not found.fits()
    found.add("", FORWARD, 125)
    assert not found.leaves_room(is_beside=False)


OPERATORS = {
    each.OPERATOR.name: each.OPERATOR
    for each in (
        all_reduce_plan,
        embedding_backward_plan,
        embedding_inputs_plan,
        embedding_inversion,
        embedding_plan,
        gemm_exchange_plan,
        gemv_plan,
        sparse_plan,
    )
}


def _call_all() -> dict[str, int]:
    """Call operators in shapes that would fill a GPU; return the maximum number of WGs in the plans of each."""
    world = po_world.current()
    table = torch.zeros(64, 32)
    optimizer = po.EmbeddingOptimizer([table], "sgd")
    offsets = torch.arange(4096 * world.size + 1) * 4
    indices = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    pooled = po.embedding_all_to_all([table], indices, offsets, optimizer=optimizer)
    pooled.sum().backward()
    _exchange()
    for algorithm in ("one_shot", "slices"):
        po.all_reduce(torch.zeros(1 << 20), algorithm=algorithm)
    with contextlib.suppress(Exception):  # its host reads what a kernel would have left there
        po.sparse_all_reduce(torch.eye(256).to_sparse(1))
    po.gemv_all_reduce(torch.zeros(1 << 14, 64), torch.zeros(64))
    po.gemm_reduce_scatter(torch.zeros(1 << 12, 64).half(), torch.zeros(64, 1 << 12).half(), algorithm="fused")
    grids = {}
    for name, operator in OPERATORS.items():
        grids[name] = max(_grid_of(plan) for plan in operator.state(world).plans.values())
    return grids


def _exchange() -> None:
    inputs = po.EmbeddingInputs([[(0, 64)]] * po.world_size(), num_features=1, max_batch=4096, lookups_per_sample=[320])
    inputs.exchange(torch.zeros(8, dtype=torch.int64), lengths=torch.ones(8, dtype=torch.int64))


def _grid_of(plan: Any) -> int:
    if isinstance(plan, embedding_inputs_plan.InputsPlan):
        return plan.kernel_and_grid(is_beside=False)[1]
    return int(plan._division.grid if isinstance(plan, gemm_exchange_plan.ExchangePlan) else plan._grid)


def _grids_before_and_behind() -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, str]]:
    world = po_world.current()
    before = _call_all()
    leave_sms(world, NUM_SMS)
    assert world.backend.leaves_room and not any(len(operator.state(world).plans) for operator in OPERATORS.values())
    behind = _call_all()
    alone = [request for request, _ in world._kernels if dict(request.config or ()).get("blocks_per_sm") == "1"]
    threads = {request.name: request.shape.threads for request in alone}
    table, told = torch.zeros(64, 32), {}
    offsets, indices = torch.arange(2 * world.size + 1), torch.zeros(2 * world.size, dtype=torch.int64)

    def step() -> None:
        optimizer = po.EmbeddingOptimizer([table], "sgd")
        po.embedding_all_to_all([table], indices, offsets, optimizer=optimizer).sum().backward()

    calls = ((embedding_plan, step), (embedding_backward_plan, step), (embedding_inputs_plan, _exchange))
    for operator, call in calls:
        operator.OPERATOR.tune(world, operator.Tuning(work_groups=125))  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="work_groups") as caught:
            call()
        told[operator.OPERATOR.name] = str(caught.value)
        operator.OPERATOR.tune(world, None)
    return before, behind, threads, told


@pytest.mark.host
def test_launches_have_one_wg_for_each_sm_that_is_not_left(tmp_path: Path) -> None:
    with rehearsing(bound(PaperGpu, Gpu(), Notes(tmp_path / "notes"))):
        for before, behind, threads, told in in_world(_grids_before_and_behind, 2, "host", heap_size=128 << 20):
            assert all(grid >= 132 for grid in before.values())
            assert behind == dict.fromkeys(OPERATORS, 132 - NUM_SMS)
            assert threads == {"embedding_all_to_all": 512, "embedding_backward": 512, "embedding_inversion": 1024}
            fits = "work_groups: 124 WGs of this kernel fit the device at once, not 125"
            assert len(told) == 3 and all(fits in message for message in told.values())


def _admitted() -> list[str]:
    """Return what launches raise, as on a GPU with 132 SMs."""
    world = po_world.current()
    world.residency = Residency(H200, 132)
    side, main = world.side_workspace("inputs"), world.workspace
    told = []

    def launch(workspace: Any, kernel: _Kernel, grid: int) -> None:
        told.append(error_of(lambda: workspace.admit(workspace, kernel, grid))[1])

    launch(main, _Kernel(FORWARD), 264)
    launch(side, _Kernel(INPUTS), 16)
    leave_sms(world, NUM_SMS)
    launch(main, _Kernel(BARRIER), 1)
    launch(main, _Kernel(FORWARD), 124)
    launch(main, _Kernel(FORWARD), 125)
    return told


@pytest.mark.host
def test_a_launch_that_leaves_too_little_is_refused() -> None:
    *fit, last = in_world(_admitted, 1, "host")[0]
    assert fit == [""] * 4 and "po.nn.leave_room() again" in last


# ---- what is refused -------------------------------------------------------------------------------------------------


def _nccl(max_ctas: int = NUM_SMS, cluster: int = 1) -> Any:
    """Return a replacement of NCCL's part of a group."""
    config = SimpleNamespace(max_ctas=max_ctas, cga_cluster_size=cluster)
    return SimpleNamespace(name=lambda: "nccl", options=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("backends", "environment", "told"),
    [
        ([_nccl()], {}, ""),
        ([_nccl(cluster=0)], {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_CTAS": "0", "NCCL_MIN_CTAS": "many"}, ""),
        ([_nccl(4), _nccl(3)], {}, ""),
        ([_nccl(UNSET, UNSET)], {"NCCL_MAX_CTAS": "8", "NCCL_CGA_CLUSTER_SIZE": "0"}, ""),
        ([_nccl(16)], {"NCCL_MAX_CTAS": "0x8"}, ""),
        ([_nccl(9)], {}, "at least 16, which NCCL may take .*, got 8"),
        ([_nccl(5), _nccl(1)], {}, "at least 9"),
        (
            [_nccl(UNSET)],
            {},
            "max_ctas of at most 8 .*, which have none; make the group with options",
        ),
        ([_nccl(4)], {"NCCL_MAX_CTAS": "32"}, "at least 32"),
        (
            [_nccl(cluster=UNSET)],
            {},
            "cga_cluster_size of 1 .* got none, which is 4; .*_cluster_size = 8, 1;",
        ),
        ([_nccl()], {"NCCL_CGA_CLUSTER_SIZE": "2"}, "cga_cluster_size of 1 .* got 2"),
        ([_nccl(4)], {"NCCL_MIN_NCHANNELS": "5"}, "NCCL_MIN_NCHANNELS=5 overrules max_ctas, 4,"),
        ([_nccl()], {"NCCL_MIN_P2P_NCHANNELS": "16"}, "NCCL_MIN_P2P_NCHANNELS=16 overrules"),
        ([_nccl()], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 puts .* unset it"),
        ([SimpleNamespace(name=lambda: "gloo")], {}, "groups: expected process groups of NCCL .* got 'gloo'"),
        (
            [SimpleNamespace(name=lambda: "nccl", options=SimpleNamespace())],
            {},
            "groups: expected process groups of NCCL",
        ),
    ],
)
def test_what_nccl_may_take_is_checked(backends: list[Any], environment: dict[str, str], told: str) -> None:
    found = _problem(backends, NUM_SMS, environment)
    assert re.search(told, found) if told else found == ""


def _of_another_kind(backend: str) -> list[Any]:
    po.init(backend, heap_size=64 << 20)
    try:
        world = po_world.current()
        with po.process_group("gloo", timeout=60):
            module = DistributedDataParallel(torch.nn.Linear(2, 2))
            group = dist.group.WORLD
            assert group is not None
            (own,) = _backends([group, module.process_group], world.backend.device)
            wrapped = _backends([group], world.backend.device)[0] is own
            given: list[tuple[Any, Any]] = [((module,), NUM_SMS), ((), NUM_SMS), (("ddp",), NUM_SMS), ((group,), 0.5)]
            leave = functools.partial(functools.partial, po.nn.leave_room)
            errors = [error_of(leave(*groups, num_sms=num_sms))[:2] for groups, num_sms in given]
            return [wrapped, world.backend.leaves_room, *errors]
    finally:
        po.finalize()


@pytest.mark.host
def test_other_groups_are_refused() -> None:
    for is_one, leaves_room, gloo, none, text, number in in_processes(_of_another_kind, 2, "host", timeout=200):
        assert is_one and not leaves_room
        assert (
            gloo[0] == "ValueError"
            and "on PE 0: groups: expected process groups of NCCL" in gloo[1]
            and "'gloo'" in gloo[1]
        )
        assert none == ("TypeError", none[1]) and none[1].endswith("got none")
        assert text == ("TypeError", text[1]) and text[1].endswith("got str")
        assert number == ("TypeError", "num_sms: expected an int, got 0.5")


def _disagreements() -> list[Any]:
    world = po_world.current()
    problem = "NCCL is too large" if po.rank() == 1 else ""
    asked = [(NUM_SMS, problem), (0, ""), (132, ""), (131, "")]
    seen: list[Any] = [error_of(functools.partial(leave_sms, world, *each))[:2] for each in asked]
    return [*seen, (world.backend.leaves_room, world.backend.num_sms)]


@pytest.mark.host
def test_all_pes_leave_room_or_none(tmp_path: Path) -> None:
    with rehearsing(bound(PaperGpu, Gpu(), Notes(tmp_path / "notes"))):
        for too_large, nothing, everything, most, after in in_world(_disagreements, 3, "host"):
            assert too_large == ("ValueError", "on PE 1: NCCL is too large")
            for num_sms, (name, text) in ((0, nothing), (132, everything)):
                assert name == "ValueError"
                assert (
                    text == f"on PE 0: num_sms: expected 1 to 131, of the 132 SMs that launches may take, got {num_sms}"
                )
            assert most == ("", "") and after == (True, 1)


def _other_numbers() -> tuple[str, str]:
    found = error_of(lambda: leave_sms(po_world.current(), 4 + 4 * po.rank()))[:2]
    po.recover()
    return found


@pytest.mark.host
def test_pes_that_leave_other_numbers_are_told() -> None:
    for name, text in in_world(_other_numbers, 2, "host"):
        assert name == "ContractMismatchError" and "num_sms is " in text and "SMs that are left" in text


def _refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    world = po_world.current()
    with monkeypatch.context() as patch:
        patch.setattr(world.workspace, "is_capturing", lambda: True)
        return error_of(lambda: leave_sms(world, NUM_SMS))[:2]


@pytest.mark.host
def test_a_capture_is_no_time_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, text),) = in_world(_refused_in_a_capture, 1, "host", monkeypatch)
    assert name == "RuntimeError" and "capture" in text


@pytest.mark.host
def test_a_training_without_nccl_leaves_no_room(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--beside-nccl: room is for NCCL, which needs a GPU for each PE"):
        in_processes(run_pe, 2, options_of(tmp_path, beside_nccl="room"), timeout=200)
    with pytest.raises(ValueError, match="beside_nccl must be one of serial, room, got 'none'"):
        options_of(tmp_path, beside_nccl="none")
    with pytest.raises(ValueError, match="--beside-nccl: .* leave out room or --compare"):
        options_of(tmp_path, beside_nccl="room", compare_steps=3)


# ---- what a time-out says --------------------------------------------------------------------------------------------


def _timed_out(backend: str, folder: Path) -> list[str]:
    """Be PE 0, which waits for PE 1 until its time-out, or PE 1, which comes then; return the message."""
    init_with_impatient_kernels(backend, 1.0, 64 << 20)
    workspace = po_world.current().workspace
    table = torch.ones(4, 8, device=po.device())
    offsets, indices = torch.arange(5, device=po.device()), torch.arange(4, device=po.device())

    def call() -> None:
        po.embedding_all_to_all([table], indices, offsets, dim_per_rank=[8, 8])
        po.check()

    call()
    po.barrier()
    if po.rank() == 1:
        gave_up(folder, 1)
    told = [error_of(call)[1]]
    (folder / f"gave_up_{po.rank()}").touch()
    if backend == "host":  # the message on a GPU
        failures = workspace._failures
        failures.is_asynchronous = True
        told.append(str(failures.describe(None)))
        failures.is_asynchronous = False
    po.recover()
    call()
    po.finalize()
    return told


def test_a_time_out_names_what_may_hold_the_gpu(backend: str, tmp_path: Path) -> None:
    first, second = run_pes(_timed_out, 2, backend, tmp_path, timeout=200)
    assert " s for PE 1: PE 1 has not called the operator" in first[0]
    assert "because of PE 1 (this PE)" in second[0]
    if backend == "host":
        assert "NCCL" not in first[0] + second[0], "threads always find room"
    for told in (first[-1], second[-1]):
        assert "its launch found no room on its GPU beside another library's collective (NCCL's)" in told
        assert "which waited there for PE 0: let all PEs meet the two in one order (po.nn.order_all_reduce)" in told
        assert "po.nn.leave_room" in told and "po.recover()" in told
    assert "PE 1 called the operator too late, or its launch found no room" in second[-1]
