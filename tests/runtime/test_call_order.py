"""PEs that wait for each other in different workspaces learn of it long before their time-out. Other PEs do not."""

from __future__ import annotations

import itertools
import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import TRANSPORTS, error_of, in_world

import persistent_ops as po
from persistent_ops.runtime.call_order import _LOOKS_BEFORE_GIVING_UP, _STILL_LOOKS, CallOrder
from persistent_ops.runtime.credits import OtherCall
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import World, current

_CALL = Operator("test's call in a workspace beside", (), has_kernel=False)


def _call_beside() -> None:
    world = current()
    world.meet(_CALL.contract(world.team), world.side_workspace("test"))


def _works() -> bool:
    _call_beside()
    po.barrier()
    return bool((po.all_reduce(torch.ones(3, device=po.device())) == po.world_size()).all())


# ---- PEs in different calls ------------------------------------------------------------------------------------------


def _different_calls() -> list[Any]:
    assert _works()
    found: list[Any] = []
    for _ in range(2):
        name, text, seconds = error_of(_call_beside if po.rank() == 1 else po.barrier)
        po.recover()
        found.append([name, text, seconds < 30.0])
    return [*found, _works()]


@pytest.mark.parametrize("options", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_pes_in_different_calls_learn_of_it(backend: str, world: int, options: dict[str, Any]) -> None:
    found = in_world(_different_calls, world, backend, operator_timeout=90.0, **options)
    for rank, (*errors, works) in enumerate(found):
        assert works
        for name, text, is_soon in errors:
            assert name == "ContractMismatchError" and is_soon, text
            calls = ["barrier()", _CALL.name]
            mine, theirs = reversed(calls) if rank == 1 else calls
            assert f"PE {rank} in {mine}, PE " in text and f" in {theirs}. " in text, text


def _skips_a_batch() -> list[Any]:
    """PE 0 skips a batch with bad lookups. It is in the next exchange while its peer is in the backward pass."""
    module = po.nn.ShardedEmbeddingBagCollection([("a", 10, 4, ["x"])], max_batch=4)
    lengths = torch.ones(4, dtype=torch.int64, device=po.device())

    def step(last: int) -> None:
        module(torch.tensor([0, 1, 2, last], device=po.device()), lengths).sum().backward()
        po.check()

    step(3)

    def skip() -> None:
        for last in (99 if po.rank() == 0 else 3, 3):
            try:
                step(last)
            except IndexError:
                continue

    told = error_of(skip)
    po.recover()
    return list(told)


@pytest.mark.host
def test_a_batch_that_one_pe_skips_is_noticed() -> None:
    (name, text, seconds), (other_name, other, other_seconds) = in_world(
        _skips_a_batch, 2, "host", operator_timeout=90.0
    )
    assert name == other_name == "ContractMismatchError" and max(seconds, other_seconds) < 30.0
    assert "PE 0 in embedding_inputs(" in text and "PE 1 in embedding_backward(" in text
    assert "PE 1 in embedding_backward(" in other and "PE 0 in embedding_inputs(" in other


def _late() -> list[Any]:
    """Every PE comes late to a call in another workspace, while its peers wait there or are ahead."""
    found = []
    for late in range(po.world_size()):
        for call in (_call_beside, po.barrier):
            if po.rank() == late:
                time.sleep(3.0)
            found.append(error_of(call)[0])
    return found


@pytest.mark.slow
def test_who_is_late_is_in_no_other_call(backend: str) -> None:
    assert in_world(_late, 2, backend, operator_timeout=90.0) == [[""] * 4] * 2


# ---- what is known ---------------------------------------------------------------------------------------------------


class _Workspace:
    """What PE 1 has begun, as PE 0 sees it; contracts are epochs."""

    has_failed, piece = False, None

    def __init__(self, first_epoch: int, of_peer: int) -> None:
        self.first_epoch, self.of_peer, self.calls = first_epoch, of_peer, []

    @property
    def credits(self) -> _Workspace:
        return self

    def begun(self) -> list[int]:
        return [0, self.of_peer]

    def contract_of(self, peer: int) -> tuple[int, ...]:
        return (self.of_peer,)

    def own_contract(self, epoch: int) -> tuple[int, ...]:
        return (epoch,)

    def is_in_another_call(self, other: OtherCall, first_epoch: int, *, gives_up: bool) -> None:
        self.calls.append((other, gives_up))


def _report(begun: list[list[int]]) -> bytes:
    """Return what a PE reports: by workspace, the epochs that its peers have begun."""
    return array("q", itertools.chain.from_iterable(begun)).tobytes()


def _watched(
    first: int, peers: list[int], told: bytes, looks: int, *, is_known: bool = True, has_failed: bool = False
) -> list[Any]:
    """Return what PE 0 finds in `looks` looks. `peers`: PE 1's calls so far; `told`: what PE 1 says of PE 0."""
    workspaces = [_Workspace(first, epoch) for epoch in peers]
    workspaces[1].has_failed = has_failed
    order = CallOrder(0, lambda: workspaces, lambda pieces: is_known)  # type: ignore[arg-type,return-value]
    for _ in range(looks):
        order.look()
        order.compare({1: told})
    return [workspace.calls for workspace in workspaces]


_MANY = _STILL_LOOKS + _LOOKS_BEFORE_GIVING_UP + 1


def test_what_is_found_is_told_first_and_then_given_up_for() -> None:
    beside, main = _watched(0, [4, 6], _report([[5, 0], [5, 0]]), _MANY)
    assert not main
    assert [gives_up for _, gives_up in beside] == [False] * _LOOKS_BEFORE_GIVING_UP + [True]
    assert {other for other, _ in beside} == {OtherCall(1, (5,), (6,))}


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (0, _report([[5, 0], [6, 0]])),  # ahead in one alone
        (0, _report([[4, 0], [5, 0]])),  # behind in one workspace only
        (0, _report([[3, 0], [2, 0]])),  # of long ago
        (7, _report([[5, 0], [5, 0]])),  # from before a recovery
        (0, _report([[5, 0]])),  # of a PE that knows of no other workspace yet
        (0, b""),
    ],
)
def test_who_is_ahead_or_behind_is_in_no_other_call(first: int, told: bytes) -> None:
    assert _watched(first, [4, 6], told, _MANY) == [[], []]


def test_nothing_is_known_before_it_has_stayed_the_same() -> None:
    assert _watched(0, [4, 6], _report([[5, 0], [5, 0]]), _STILL_LOOKS) == [[], []]
    assert _watched(0, [4, 6], _report([[5, 0], [5, 0]]), _MANY, is_known=False) == [[], []]


def test_nothing_is_found_behind_a_failure() -> None:
    assert _watched(0, [4, 6], _report([[5, 0], [5, 0]]), _MANY, has_failed=True) == [[], []]


def test_workspaces_that_run_beside_have_no_order_with_others() -> None:
    order, own = object(), object()
    main, turns, beside = (SimpleNamespace(order=each) for each in (order, order, own))
    of_backend = {
        name: World._ordered_workspaces(
            SimpleNamespace(workspace=main, workspaces=(main, turns, beside), backend=SimpleNamespace(name=name))  # type: ignore[arg-type]
        )
        for name in ("cuda", "host")
    }
    assert of_backend == {"cuda": [main, turns], "host": [main, turns, beside]}


def test_what_changes_is_not_told() -> None:
    workspace = _Workspace(0, 4)
    order = CallOrder(0, lambda: [workspace], lambda pieces: True)  # type: ignore[list-item,return-value]
    told = []
    for look in range(2 * _STILL_LOOKS + 4):
        workspace.of_peer += look < _STILL_LOOKS
        told.append(order.look())
    first = next(number for number, each in enumerate(told) if each)
    assert first == 2 * _STILL_LOOKS - 1 and set(told[first:]) == {_report([[0, 8]])}
