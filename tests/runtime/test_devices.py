"""The GPU that a PE takes, and the message if several PEs share one. Decided without a GPU."""

from __future__ import annotations

import pytest

from persistent_ops.runtime.bootstrap.launchers import local_numbers
from persistent_ops.runtime.devices import Numbers, check_sharing, choose_device
from persistent_ops.runtime.errors import BootstrapError

UUIDS = [f"GPU-{number}" for number in range(8)]


def chosen(
    count: int, pes: list[Numbers], current: list[int | None] | None = None, job: list[Numbers | None] | None = None
) -> list[int]:
    """Return the device of each PE of a world on one host, where every PE sees the same `count` GPUs."""
    currents = current or [None] * len(pes)
    jobs = job or [None] * len(pes)
    return [choose_device(count, current=c, of_job=j, of_world=w) for c, j, w in zip(currents, jobs, pes, strict=True)]


def world(size: int) -> list[Numbers]:
    return [Numbers(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("pes", "count", "expected"),
    [
        (1, 4, [0]),
        (4, 4, [0, 1, 2, 3]),
        (2, 4, [0, 1]),
        (4, 1, [0, 0, 0, 0]),  # equally many on each, whatever the number of GPUs
        (4, 2, [0, 1, 0, 1]),
        (4, 3, [0, 1, 0, 1]),
        (3, 2, [0, 0, 0]),
        (5, 4, [0, 0, 0, 0, 0]),
        (6, 4, [0, 1, 2, 0, 1, 2]),
    ],
)
def test_who_has_chosen_nothing_takes_the_device_of_its_local_rank(pes: int, count: int, expected: list[int]) -> None:
    assert chosen(count, world(pes)) == expected


def test_the_current_device_counts_where_it_was_chosen() -> None:
    assert chosen(4, world(4), [3, 2, 1, 0]) == [3, 2, 1, 0]
    assert chosen(8, world(2), [6, 7]) == [6, 7]
    assert chosen(4, world(2), [0, None]) == [0, 1]
    assert chosen(2, world(4), [1, 1, 0, 0]) == [1, 1, 0, 0]


def test_a_group_of_a_larger_job() -> None:
    """TP2 x DP2 on 4 GPUs: the second group's PEs are ranks 2 and 3 of the job, 0 and 1 of the group."""
    second_group, in_job = world(2), [Numbers(2, 4), Numbers(3, 4)]
    assert chosen(4, second_group, [2, 3]) == [2, 3]
    assert chosen(4, second_group, [2, 3], in_job) == [2, 3]
    assert chosen(4, second_group, [3, 2], in_job) == [3, 2]  # the user's choice before the launcher's number
    assert chosen(4, second_group, None, in_job) == [2, 3]
    assert chosen(2, second_group, None, in_job) == [0, 1]
    assert chosen(1, second_group, None, in_job) == [0, 0]
    assert chosen(4, second_group) == [0, 1]  # nobody says anything else
    assert chosen(4, second_group, None, [Numbers(2, None), Numbers(3, None)]) == [2, 3]


@pytest.mark.parametrize("pes", [1, 2, 4])
def test_pes_with_a_gpu_each_are_told_nothing(pes: int) -> None:
    assert [check_sharing(UUIDS[:pes], rank) for rank in range(pes)] == [""] * pes


def test_pes_that_share_gpus_are_told() -> None:
    assert "4 PEs share 1 GPU;" in check_sharing([UUIDS[0]] * 4, 2)
    assert "4 PEs share 2 GPUs;" in check_sharing([UUIDS[0], UUIDS[1], UUIDS[0], UUIDS[1]], 3)
    assert "useless for timing" in check_sharing([UUIDS[0]] * 2, 0)
    assert "torch.cuda.set_device" in check_sharing([UUIDS[0]] * 2, 0)


def test_gpus_with_different_numbers_of_pes_are_refused() -> None:
    with pytest.raises(BootstrapError, match=r"GPU-0: PE 0, 2; GPU-1: PE 1.*torch\.cuda\.set_device"):
        check_sharing([UUIDS[0], UUIDS[1], UUIDS[0]], 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"LOCAL_RANK": "3"}, Numbers(3, None)),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, Numbers(3, 4)),
        ({"LOCAL_RANK": "x"}, None),
        ({"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "2"}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "n"},
            Numbers(1, 4),
        ),
        ({"RANK": "5"}, None),  # what contradicts itself says nothing
    ],
)
def test_what_the_environment_says_about_this_host(environ: dict[str, str], expected: Numbers | None) -> None:
    found = local_numbers(environ)
    assert (None if found is None else Numbers(*found)) == expected
