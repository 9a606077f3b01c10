"""Features that only GPUs have: heaps of any size one after the other in a process, and the choice of a device."""

from __future__ import annotations

import os

import pytest
import torch
from graphs import world_size

import persistent_ops as po

pytestmark = [pytest.mark.gpu, pytest.mark.apart]


def _heap_after_heap() -> list[str]:
    """Use nearly all of heaps of different sizes, one after the other in one process."""
    problems: list[str] = []
    for heap_size in (64 << 20, 1 << 30, 128 << 20):
        before = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        po.init("cuda", operator_timeout=60.0, heap_size=heap_size)
        after = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        if after != before | {"NVSHMEM_DISABLE_NVLS": "1"}:
            problems.append(f"variables: {before} became {after}")
        mine = po.empty(heap_size - (16 << 20), dtype=torch.uint8)
        mine.fill_(po.rank() + 1)
        po.barrier()
        peer = (po.rank() + 1) % po.world_size()
        if int(po.peer_view(mine, peer)[-1]) != peer + 1:
            problems.append(f"heap of {heap_size} bytes: the end of PE {peer}'s is wrong")
        po.barrier()
        po.finalize()
    return problems


def _devices(reverse: bool) -> tuple[int, int]:
    """Return this PE's device in a world that may find a chosen one, and in the next, which must find none of ours."""
    rank = int(os.environ["PERSISTENT_OPS_RANK"])
    if reverse:
        torch.cuda.set_device(torch.cuda.device_count() - 1 - rank)
    found = []
    for _ in range(2):
        po.init("cuda", operator_timeout=60.0, heap_size=64 << 20)
        found.append(int(po.device().index))
        po.barrier()
        po.finalize()
    return found[0], found[1]


def test_each_world_has_the_heap_size_that_it_asked_for() -> None:
    pes = world_size("cuda")
    assert po.launch(_heap_after_heap, pes, timeout=200) == [[]] * pes


@pytest.mark.parametrize("reverse", [False, True])
def test_the_device_that_was_chosen_is_taken(reverse: bool) -> None:
    count = torch.cuda.device_count()
    order = range(count - 1, -1, -1) if reverse else range(count)
    assert po.launch(_devices, count, reverse, timeout=200) == [(index, index) for index in order]


def test_gpus_with_different_numbers_of_pes_are_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(po.BootstrapError, match="some GPUs have more PEs than others"):
        po.launch(_takes_the_first_but_for_the_last, 3, timeout=100)


def _takes_the_first_but_for_the_last() -> None:
    torch.cuda.set_device(int(os.environ["PERSISTENT_OPS_RANK"]) // 2)
    po.init("cuda", operator_timeout=60.0, heap_size=64 << 20)
