"""Bad input is reported only to the caller who passed it, after all launches that peers count on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import error_of, in_world, told_later

import persistent_ops as po
from persistent_ops.runtime.world import current

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _tensor(*values: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=po.device())


def _bad_forward_pass() -> None:
    """Leave a problem of PE 0's input that has not been reported."""
    index = 99 if po.rank() == 0 else 1
    with told_later():
        po.embedding_all_to_all([torch.ones(4, 2, device=po.device())], _tensor(0, index), _tensor(0, 1, 2))


# ---- a backward pass -------------------------------------------------------------------------------------------------


def _optimizer() -> Callable[[], torch.Tensor]:
    table = torch.zeros(4, 2, device=po.device())
    optimizer = po.EmbeddingOptimizer([table], "sgd", lr=1.0)
    return lambda: po.embedding_all_to_all([table], _tensor(0, 1), _tensor(0, 1, 2), optimizer=optimizer)


def _sparse_gradient() -> Callable[[], torch.Tensor]:
    table = torch.zeros(4, 2, device=po.device(), requires_grad=True)
    return lambda: po.embedding_all_to_all([table], _tensor(0, 1), _tensor(0, 1, 2))


def _module(*names: str) -> Callable[[], torch.Tensor]:
    poolings = ("sum", "mean", "sum")  # one group each
    tables = [po.nn.TableConfig(f"t{n}", 4, 8 + 8 * n, [f"f{n}"], poolings[n]) for n in range(len(names))]
    sliced = po.nn.TablePlacement("column_wise", num_slices=2)
    placed = {f"t{n}": sliced if name == sliced.kind else name for n, name in enumerate(names)}
    module = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=4, placement=placed, optimizer="sgd", lr=1.0)
    assert len(module.layout.groups) == len(
        {p for p, name in zip(poolings, names, strict=False) if name != "replicated"}
    )
    values, lengths = _tensor(*[0, 1] * len(tables)), _tensor(*[1, 1] * len(tables))
    return lambda: module(values, lengths)


STEPS: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
    "optimizer": _optimizer,
    "sparse gradient": _sparse_gradient,
    "table-wise": lambda: _module("table_wise", "table_wise"),
    "replicated": lambda: _module("replicated"),
    "all": lambda: _module("table_wise", "column_wise", "replicated"),
}


def _steps(name: str) -> list[Any]:
    forward = STEPS[name]()
    forward().sum().backward()
    po.check()
    result = forward()
    _bad_forward_pass()
    told = [error_of(lambda: result.sum().backward())[0], error_of(po.check)[0]]
    for _ in range(2):
        forward().sum().backward()
    return [*told, error_of(po.check)[0]]


@pytest.mark.parametrize("name", STEPS)
def test_a_backward_pass_makes_all_its_launches(backend: str, name: str) -> None:
    assert in_world(_steps, 2, backend, name) == [["", "IndexError", ""], ["", "", ""]]


def _forward_pass_of_several_groups() -> list[str]:
    forward = _module("table_wise", "column_wise", "replicated")
    forward()
    po.check()
    _bad_forward_pass()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # so that the next call sees it
    return [error_of(forward)[0], error_of(forward)[0], error_of(po.check)[0]]


def test_a_forward_pass_of_several_groups_makes_all_its_launches(backend: str) -> None:
    assert in_world(_forward_pass_of_several_groups, 2, backend) == [["IndexError", "", ""], ["", "", ""]]


def _told_of_a_graph(call: Callable[[], object]) -> str:
    """Call after a graph replay without room for this PE's lookups; return what is raised."""
    problems = [po.CapacityError("no room")] if po.rank() == 0 else []
    (side,) = current()._side_workspaces.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side._input, "take", lambda: problems.pop() if problems else None)
        return error_of(call)[0]


def _behind_a_graph_that_found_no_room() -> list[str]:
    forward = _module("table_wise", "column_wise")
    forward()
    told = [_told_of_a_graph(forward), error_of(forward)[0]]
    inputs = po.EmbeddingInputs([[(0, 5)], [(0, 5)]], num_features=1, max_batch=2, lookups_per_sample=1)

    def enter() -> None:
        with inputs.exchange(_tensor(1, 2), lengths=_tensor(1, 1)):
            pass

    told += [_told_of_a_graph(enter) for _ in range(3)]
    return [*told, error_of(enter)[0]]


def test_what_a_graph_s_replay_found_leaves_no_launch_out_and_no_region_held(backend: str) -> None:
    first, second = in_world(_behind_a_graph_that_found_no_room, 2, backend)
    assert first == ["CapacityError", "", *["CapacityError"] * 3, ""] and second == [""] * 6


# ---- handles ---------------------------------------------------------------------------------------------------------


def _entries(num_rows: int, *, is_bad: bool) -> torch.Tensor:
    rows = _tensor(1, 77 if is_bad and po.rank() == 0 else 2)[None]
    values = torch.ones(2, 1, device=po.device())
    return torch.sparse_coo_tensor(rows, values, (num_rows, 1), check_invariants=False)


def _sums(*are_bad: bool) -> list[Any]:
    """Wait for sums of different sizes, which are in flight together, and for the first one twice."""
    sums = [po.sparse_all_reduce(_entries(8 + n, is_bad=is_bad), async_op=True) for n, is_bad in enumerate(are_bad)]
    between = [error_of(po.check)[0], error_of(lambda: po.all_reduce(torch.ones(3, device=po.device())))[0]]
    return [*between, *(error_of(work.wait)[0] for work in (*sums, sums[0]))]


_ORDERS = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("are_bad", _ORDERS)
def test_a_sparse_sum_tells_of_its_own_rows(backend: str, are_bad: tuple[bool, bool]) -> None:
    own = ["IndexError" if is_bad else "" for is_bad in (*are_bad, are_bad[0])]
    assert in_world(_sums, 2, backend, *are_bad) == [["", "", *own], [""] * 5]


def _exchanges(*are_bad: bool) -> list[str]:
    inputs = [
        po.EmbeddingInputs([[(0, 5)], [(0, 5)]], num_features=1, max_batch=2, lookups_per_sample=1) for _ in are_bad
    ]
    sent = [
        each.exchange(_tensor(1, 77 if is_bad and po.rank() == 0 else 2), lengths=_tensor(1, 1))
        for each, is_bad in zip(inputs, are_bad, strict=True)
    ]
    told = [error_of(lookups.wait)[0] for lookups in sent]
    for lookups in sent:
        lookups.release()
    return told


@pytest.mark.parametrize("are_bad", _ORDERS)
def test_an_exchange_tells_of_its_own_lookups(backend: str, are_bad: tuple[bool, bool]) -> None:
    own = ["IndexError" if is_bad else "" for is_bad in are_bad]
    assert in_world(_exchanges, 2, backend, *are_bad) == [own, [""] * 2]


def _exchanges_that_nobody_waits_for() -> list[str]:
    inputs = po.EmbeddingInputs([[(0, 5)], [(0, 5)]], num_features=1, max_batch=2, lookups_per_sample=1)
    told = []
    for index in (77, 2, 77, 2, 77):
        lookups = inputs.exchange(_tensor(1, index if po.rank() == 0 else 2), lengths=_tensor(1, 1))
        if index == 2:
            told.append(error_of(lookups.wait)[0])
        lookups.release()
    return told


def test_an_exchange_that_nobody_waited_for_is_not_the_next_one_s_fault(backend: str) -> None:
    assert in_world(_exchanges_that_nobody_waits_for, 2, backend) == [["", ""]] * 2
