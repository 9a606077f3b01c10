"""Launches of two workspaces: which ones fit on a GPU together, and which ones take turns."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.inputs_plan import WORKSPACE
from persistent_ops.runtime.residency import Footprint, Residency, Sm, room_beside, room_on_gpu
from persistent_ops.runtime.workspace import Workspace

H200 = Sm(threads=2048, registers=65536, shared_bytes=228 << 10, blocks=32)
# Of kernels for sm_90: threads, registers, bytes of shared memory, WGs that an SM holds.
INPUTS = Footprint(64, 64, 376, 16)
FORWARD = Footprint(256, 114, 344, 2)
BACKWARD = Footprint(256, 96, 376, 2)
BARRIER = Footprint(64, 40, 300, 21)


@pytest.mark.parametrize(
    ("resident", "count", "room"),
    [
        (FORWARD, 2, 1),  # 61440 of 65536 registers are taken
        (FORWARD, 1, 4),  # 1408 bytes of the least memory that an SM is divided for, 8 KiB
        (FORWARD, 0, 16),
        (BACKWARD, 1, 4),
        (Footprint(256, 128, 344, 2), 2, 0),  # no register is left
        (Footprint(1024, 32, 0, 2), 2, 0),  # no thread
        (Footprint(32, 16, 0, 32), 32, 0),  # no block
        (Footprint(128, 64, 15 << 10, 2), 2, 0),  # 32 KiB of memory are taken, for which the SM may be divided
        (FORWARD._replace(overlaps=True), 1, 0),
    ],
)
def test_room_on_an_sm(resident: Footprint, count: int, room: int) -> None:
    assert room_beside(H200, resident, count, INPUTS) == room


def test_room_on_a_gpu_is_that_of_the_worst_way_to_lie() -> None:
    """The result is at most what an exhaustive search finds. It is exact if all SMs are alike."""
    numbers = random.Random(7)
    for _ in range(200):
        most = numbers.randint(1, 3)
        resident = Footprint(256, numbers.randint(40, 80), numbers.randint(0, 3000), most)
        own = Footprint(64, numbers.randint(16, 64), numbers.randint(0, 1000), 16)
        grid = numbers.randint(0, 4 * most)
        ways = (way for way in itertools.product(range(most + 1), repeat=4) if sum(way) <= grid)
        worst = min(sum(room_beside(H200, resident, count, own) for count in way) for way in ways)
        found = room_on_gpu(H200, 4, resident, grid, own)
        assert found <= worst
        if grid == 4 * most:
            assert found == 4 * min(room_beside(H200, resident, count, own) for count in range(most + 1))


def _residency(*main: tuple[Footprint, int]) -> Residency:
    found = Residency(H200, 132)
    for footprint, grid in main:
        found.add("", footprint, grid)
    return found


def test_what_fits_a_gpu() -> None:
    found = _residency((FORWARD, 264), (BACKWARD, 132), (BARRIER, 1))
    assert found.fits()
    found.add("inputs", INPUTS, 16)
    assert found.fits()
    found.add("inputs", INPUTS, 132)
    assert found.fits(), "one on each SM"
    found.add("more", INPUTS, 1)
    assert not found.fits(), "one more than there is room for"
    other = _residency((FORWARD, 264))
    other.add("inputs", INPUTS._replace(threads=128), 1)
    assert not other.fits()
    other = _residency((Footprint(256, 128, 344, 2), 264))
    other.add("inputs", INPUTS, 1)
    assert not other.fits()
    other = _residency((Footprint(256, 128, 344, 2), 264 - 4))
    other.add("inputs", INPUTS, 16)
    assert other.fits(), "two SMs are left, or halves of four"


def test_a_kernel_that_waits_for_nobody_needs_no_room() -> None:
    product = Footprint(384, 168, 230 << 10, 1, overlaps=True, cluster=2)
    for is_resident in (True, False):
        found = _residency((product._replace(is_resident=is_resident), 132))
        found.add("inputs", INPUTS, 16)
        assert found.fits() != is_resident


def test_a_cluster_is_not_what_must_find_room() -> None:
    found = _residency((FORWARD._replace(cluster=2), 264))
    found.add("inputs", INPUTS, 16)
    assert found.fits()
    found.add("inputs", INPUTS._replace(cluster=2), 2)
    assert not found.fits()


# ---- a world's workspaces --------------------------------------------------------------------------------------------


class _Kernel:
    """A kernel that does nothing."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self.admitted_grid = 0

    def footprint(self) -> Footprint:
        return self._footprint

    def launch(self, grid: int, plan: int, call: Any, *, begins_early: bool = False) -> None:
        pass


def _admitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launch as on GPUs; return, step by step, whether the two workspaces have one order."""
    followed: list[tuple[object, int]] = []

    class Order:
        def __init__(self, device: torch.device) -> None:
            pass

        def follow(self, stream: int) -> None:
            followed.append((self, stream))

        def launched(self) -> None:
            assert followed[-1][0] is self

    monkeypatch.setattr("persistent_ops.runtime.workspace.StreamOrder", Order)
    world = po.runtime.world.current()
    main = world.workspace
    main.order = Order(world.backend.device)  # type: ignore[assignment]
    world.residency = Residency(H200, 132)
    side = world.side_workspace(WORKSPACE)
    for workspace in (main, side):
        workspace._is_asynchronous = True

    def is_one_order(workspace: Workspace, kernel: _Kernel, grid: int) -> bool:
        workspace.launch(kernel, grid, 0, None)  # type: ignore[arg-type]
        return main.order is side.order and followed[-1][0] is workspace.order

    forward, large = _Kernel(FORWARD), _Kernel(Footprint(256, 128, 344, 2))
    seen: list[Any] = [is_one_order(main, forward, 264), is_one_order(side, _Kernel(INPUTS), 16)]
    monkeypatch.setattr(world, "meet", lambda contract: None)
    seen += [world.agree_to_run_beside(), is_one_order(main, forward, 264), is_one_order(side, _Kernel(INPUTS), 16)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="leaves no room.*call run_beside"):
            main.launch(large, 264, 0, None)  # type: ignore[arg-type]
    seen += [is_one_order(main, forward, 264), world.agree_to_run_beside(), is_one_order(main, large, 264)]
    seen += [is_one_order(side, _Kernel(INPUTS), 16), len(world.workspaces)]
    main.is_capturing = lambda: True
    with pytest.raises(RuntimeError, match="capture"):
        world.agree_to_run_beside()
    main.is_capturing = lambda: False
    for workspace in (main, side):
        workspace._is_asynchronous = False
    return seen


def test_workspaces_take_turns_until_all_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = in_world(_admitted, 1, "host", monkeypatch)
    assert seen == [[True, True, True, False, False, False, False, True, True, 2]]


def _narrowed() -> list[bool]:
    """Agree to run beside other launches. Launches that take turns with all others fill the GPU."""
    world = po.runtime.world.current()
    world.residency = Residency(H200, 132)
    side, wide, narrow = world.side_workspace(WORKSPACE), _Kernel(Footprint(256, 64, 344, 4)), _Kernel(INPUTS)
    world.workspace.admit(world.workspace, _Kernel(FORWARD), 264)  # type: ignore[arg-type]
    side.admit(side, wide, 264)  # type: ignore[arg-type]
    agreed = [world.agree_to_run_beside()]
    side.launches_beside = lambda: [(narrow, 16)]  # type: ignore[list-item]
    agreed.append(world.agree_to_run_beside())
    with pytest.raises(RuntimeError, match="call run_beside"):
        side.admit(side, wide, 264)  # type: ignore[arg-type]
    return agreed


@pytest.mark.host
def test_launches_that_run_beside_are_smaller_ones() -> None:
    assert in_world(_narrowed, 1, "host") == [[False, True]]


def test_an_overlapping_kernel_takes_turns() -> None:
    found = _residency((FORWARD._replace(overlaps=True), 1))
    assert found.fits()
    found.add("inputs", INPUTS, 16)
    assert not found.fits()
