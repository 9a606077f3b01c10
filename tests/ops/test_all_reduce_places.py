"""Places of all_reduce's packets: empty between launches and after recovery, for any data; room for them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from all_reduce_cases import ALGORITHMS, DTYPES, FEW, problem_of
from worlds import error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import OPERATOR, Tuning

MB = 1 << 20


def _nans() -> list[str]:
    """Elements with all bits set, which are NaN. A place without a packet has the same bits."""
    problems = []
    for dtype in DTYPES:
        words = torch.int32 if dtype is torch.float32 else torch.int16
        x = torch.ones(3, 1000, dtype=dtype, device=po.device())
        if po.rank() == 0:
            x.view(words)[:2] = -1
            x.view(words)[2, :7] = -1
        for algorithm in ALGORITHMS:
            total = po.all_reduce(x, algorithm=algorithm)
            same = total[2, 7:].eq(po.world_size()).all() and total[:2].isnan().all() and total[2, :7].isnan().all()
            problems += [] if bool(same) else [f"{dtype}, {algorithm}: {total}"]
    po.check()
    return problems


def test_elements_like_empty_places(backend: str) -> None:
    assert in_world(_nans, 3, backend, operator_timeout=60.0) == [[]] * 3


def _places_are_empty() -> bool:
    """Look between two launches, while no PE has packets in transit."""
    words = OPERATOR.state(po.runtime.world.current()).areas["packets"].memory
    po.barrier()
    po.check()
    found = bool((words == -1).all())
    po.barrier()
    po.check()
    return found


def _left_behind() -> list[object]:
    problems = [problem_of(case) for case in FEW]
    return [[each for each in problems if each is not None], _places_are_empty()]


def test_launches_leave_places_empty(backend: str) -> None:
    assert in_world(_left_behind, 2, backend, operator_timeout=60.0, heap_size=32 * MB) == [[[], True]] * 2


def _given_up(backend: str) -> list[object]:
    """Packets that arrive after a given-up launch stay in their places until `recover`."""
    po.init(backend, operator_timeout=5.0, heap_size=32 * MB)
    x = torch.full((4, 1000), 1.5, device=po.device())
    po.all_reduce(x, algorithm="one_shot")
    po.check()
    if po.rank() == 1:
        time.sleep(8)
    # PE 1 sends its elements when PE 0 no longer waits. PE 1 has all that it needs.
    with pytest.raises(po.PeerTimeoutError) if po.rank() == 0 else contextlib.suppress(po.PersistentOpsError):
        po.all_reduce(x, algorithm="one_shot")
        po.check()
    po.recover()
    found = [_places_are_empty(), float(po.all_reduce(x, algorithm="one_shot")[0, 0])]
    po.finalize()
    return found


@pytest.mark.slow
def test_recovery_empties_places(backend: str) -> None:
    assert run_pes(_given_up, 2, backend, timeout=120) == [[True, 3.0]] * 2


def _without_room(backend: str) -> list[object]:
    """A first call that finds no room. Another owner has the memory when `recover` is called."""
    po.init(backend, operator_timeout=20.0, heap_size=64 * MB)
    rest = po.empty((57 * MB,), dtype=torch.uint8)
    x = torch.ones(8, device=po.device())
    name, _, _ = error_of(lambda: po.all_reduce(x))
    mine = po.empty((1 << 19,), dtype=torch.float32).fill_(2.5)
    po.recover()
    found = [name, bool((mine == 2.5).all())]
    del rest, mine
    po.finalize()
    return found


def test_a_first_call_without_room_leaves_nothing_to_recover(backend: str) -> None:
    assert run_pes(_without_room, 2, backend, timeout=120) == [["SymmetricHeapError", True]] * 2


def _no_room_for_a_block() -> list[Any]:
    OPERATOR.tune(po.runtime.world.current(), Tuning(room_bytes=4096))
    x = torch.ones(64, device=po.device())
    refused = [error_of(lambda way=way: po.all_reduce(x, algorithm=way))[:2] for way in ALGORITHMS[:2]]
    OPERATOR.tune(po.runtime.world.current(), None)
    return [*refused, float(po.all_reduce(x)[0])]


def test_room_for_no_block_is_refused_by_name(backend: str) -> None:
    text = "room_bytes: the packets of a block do not fit; use a larger room_bytes, or algorithm='slices'"
    assert in_world(_no_room_for_a_block, 2, backend) == [[("ValueError", text), ("ValueError", text), 2.0]] * 2
