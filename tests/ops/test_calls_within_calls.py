"""A call within another call of the same operator, as in a signal handler. Each call uses its own tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.runtime import world as po_world


def _lookups(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lookups of six samples."""
    return torch.full((6,), row, device=po.device()), torch.arange(7, device=po.device())


_TABLES: dict[int, torch.Tensor] = {}  # by world: calls with one plan use the same table


def _pooled(row: int) -> torch.Tensor:
    table = _TABLES.setdefault(id(po_world.current()), torch.arange(24.0, device=po.device()).view(3, 8))
    return po.embedding_all_to_all([table], *_lookups(row))


def _summed(number: int) -> torch.Tensor:
    return po.all_reduce(torch.full((64,), 1.0 + number, device=po.device()))


def _multiplied(number: int) -> torch.Tensor:
    weight, vector = torch.ones(16, 64, device=po.device()), torch.full((64,), 1.0 + number, device=po.device())
    return po.gemv_all_reduce(weight, vector)


def _sparse(number: int) -> torch.Tensor:
    rows, values = torch.tensor([[1, 4]]), torch.full((2, 16), 1.0 + number)
    entries = torch.sparse_coo_tensor(rows, values, (9, 16), check_invariants=True).to(po.device())
    return po.sparse_all_reduce(entries.coalesce()).to_dense()


def _exchanged(number: int) -> torch.Tensor:
    a, b = torch.full((16, 24), 1.0 + number, device=po.device()), torch.ones(24, 32, device=po.device())
    return po.gemm_all_reduce(a.bfloat16(), b.bfloat16())


_OPERATORS: tuple[Callable[[int], torch.Tensor], ...] = (
    _pooled,
    _summed,
    _multiplied,
    _exchanged,
    _sparse,
)


def _within(operator: Callable[[int], torch.Tensor]) -> tuple[int, list[bool]]:
    """Make a call before each launch of another call. Return the number of calls, and whether all results are right."""
    expected = [operator(number).clone() for number in (0, 1)]
    workspace = po_world.current().workspace
    launch, found, is_within = workspace.launch, [], [False]

    def launch_behind_another_call(*arguments: Any, **options: Any) -> None:
        if not is_within[0]:
            is_within[0] = True
            found.append(torch.equal(operator(1), expected[1]))
            is_within[0] = False
        launch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "launch", launch_behind_another_call)
        result = operator(0)
    return len(found), [*found, torch.equal(result, expected[0])]


@pytest.mark.parametrize("operator", _OPERATORS, ids=lambda operator: operator.__name__[1:])
def test_each_call_takes_its_own_tensors(backend: str, operator: Callable[[int], torch.Tensor]) -> None:
    ((count, are_right),) = in_world(_within, 1, backend, operator)
    assert count and all(are_right), are_right


def _trained_behind_a_refused_call() -> list[float]:
    """Pool on all PEs. On PE 0 a call within that launch is refused. Then another call makes a step."""
    table = torch.ones(3, 8, device=po.device())
    optimizer = po.EmbeddingOptimizer([table], optimizer="sgd", lr=1.0)
    workspace = po_world.current().workspace
    launch, is_within = workspace.launch, [False]

    def pooled() -> torch.Tensor:
        return po.embedding_all_to_all([table], *_lookups(1), optimizer=optimizer)

    def launch_with_a_call_within(*arguments: Any, **options: Any) -> None:
        if not is_within[0]:
            is_within[0], workspace._launching = True, threading.get_ident()
            with pytest.raises(RuntimeError, match="called during a launch"):
                pooled()
            is_within[0], workspace._launching = False, 0
        launch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if po.rank() == 0:
            patch.setattr(workspace, "launch", launch_with_a_call_within)
        pooled()
    pooled().sum().backward()
    po.check()
    return table[:, 0].tolist()


def test_a_call_that_is_refused_is_none(backend: str) -> None:
    """The backward pass after it belongs to the same forward pass on all PEs."""
    for found in in_world(_trained_behind_a_refused_call, 2, backend):
        assert found == [1.0, 1.0 - 6.0, 1.0]
