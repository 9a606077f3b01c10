"""Calls of embedding_all_to_all that autograd records: what is refused, with its name, and what is accepted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po

_BATCH, _ROWS, _COLUMNS = 4, 6, 2
_WAYS = ("sparse", "optimizer")


def _lookups() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 1, 2, 3, 0, 0, 5, 0]), torch.arange(0, 2 * _BATCH + 1, 2)


def _tables(way: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return a table and how it is trained. With an optimizer, its gradient is the decrease of the table."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(_ROWS, _COLUMNS, generator=generator)
    if way == "optimizer":
        return [table], {"optimizer": po.EmbeddingOptimizer([table], "sgd", lr=1.0)}
    return [table.requires_grad_()], {}


def _gradient(way: str, table: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if way == "optimizer":
        return before - table
    assert table.grad is not None
    return table.grad.to_dense()


# ---- what is refused -------------------------------------------------------------------------------------------------


def _twins() -> list[tuple[str, str]]:
    indices, offsets = torch.zeros(8, dtype=torch.int64), torch.arange(9)
    table = torch.randn(_ROWS, _COLUMNS, requires_grad=True)
    twins = ([table, table.detach()], [table, torch.nn.Parameter(table.data)])
    told = [error_of(lambda twin=twin: po.embedding_all_to_all(twin, indices, offsets))[:2] for twin in twins]
    with torch.no_grad():
        po.embedding_all_to_all(twins[0], indices, offsets)
    po.embedding_all_to_all([table, table], indices, offsets).sum().backward()
    assert table.grad is not None and table.grad.to_dense()[0, 0] == 8
    return told


def test_two_tensors_of_one_memory_are_refused() -> None:
    for kind, text in in_world(_twins, 1, "host")[0]:
        assert kind == "NotImplementedError" and text.startswith("weights: tables 0 and 1 share memory")


def _in_another_world(way: str) -> tuple[str, str]:
    po.init("host", heap_size=16 << 20)
    (table,), how = _tables(way)
    pooled = po.embedding_all_to_all([table], *_lookups(), **how)
    po.finalize()
    po.init("host", heap_size=16 << 20)
    told = error_of(pooled.sum().backward)[:2]
    po.finalize()
    return told


@pytest.mark.parametrize("way", _WAYS)
def test_a_backward_pass_in_another_world_is_refused(way: str) -> None:
    kind, text = _in_another_world(way)
    assert kind == "RuntimeError" and "ran before po.finalize()" in text


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(way: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="save their states and its step_count"):
        way(po.EmbeddingOptimizer([torch.zeros(2, 2)], "adagrad"))


def test_what_it_has_on_the_device_is_changed_by_operators() -> None:
    optimizer: Any = po.EmbeddingOptimizer([torch.zeros(2, 2)], "adam", lr=0.5)
    optimizer.lr *= 0.5
    optimizer.gradient_scale /= 4
    optimizer.step_count += 3
    other: Any = po.EmbeddingOptimizer([torch.zeros(2, 2)], "adam", lr=torch.tensor(0.125))
    assert (optimizer.lr.item(), optimizer.gradient_scale.item(), optimizer.step_count.item()) == (0.25, 0.25, 3)
    assert optimizer._beta_powers.tolist() == pytest.approx([0.9**3, 0.999**3])
    optimizer.lr = other.lr
    assert optimizer.lr.item() == 0.125 and optimizer.lr is not other.lr


def _steps(writes: str) -> list[torch.Tensor]:
    """Train with Adam, with states taken over from the fifth step on; return the table and states."""
    (table,), _ = _tables("optimizer")
    optimizer = po.EmbeddingOptimizer([table], "adam", lr=0.1)

    def step(number: int) -> None:
        pooled = po.embedding_all_to_all([table], *_lookups(), optimizer=optimizer)
        pooled.backward(torch.full_like(pooled, 1.0 + number))

    for number in range(4):
        step(number)
    if writes != "nothing":
        states = [each.clone() for each in optimizer.state(table)]
        taken, optimizer = table.clone(), po.EmbeddingOptimizer([table], "adam", lr=0.1)
        for own, given in zip(optimizer.state(table), states, strict=True):
            own.copy_(given)
        assert torch.equal(taken, table)
        if writes == "in place":
            optimizer.step_count.fill_(4)
        else:
            optimizer.step_count = 4  # type: ignore[assignment]
    for number in range(4, 9):
        step(number)
    return [table, *optimizer.state(table), optimizer.step_count]


@pytest.mark.parametrize("writes", ["in place", "assigned"])
def test_a_number_of_steps_goes_on_with_the_same_bits(writes: str) -> None:
    (wanted,), (found,) = (in_world(_steps, 1, "host", how) for how in ("nothing", writes))
    assert all(map(torch.equal, wanted, found))


# ---- what the caller changes between the passes ----------------------------------------------------------------------


def _between(way: str, name: str) -> list[torch.Tensor]:
    """Return the gradient for an unchanged list of the call, and for a list changed before the backward pass."""
    given = {"batch_per_rank": [3, 1], "dim_per_rank": [2, 2], "columns": [2, 0]}
    found = []
    for is_filled in (False, True):
        (table,), how = _tables(way)
        before, lists = table.detach().clone(), {key: list(values) for key, values in given.items()}
        pooled = po.embedding_all_to_all([table], torch.arange(4), torch.arange(5), **lists, **how)
        if is_filled:
            lists[name][:] = lists[name][::-1] if name != "dim_per_rank" else [7, 0]
        pooled.backward(torch.arange(float(pooled.numel())).view_as(pooled) + 100 * po.rank())
        found.append(_gradient(way, table.detach() if how else table, before))
    return found


@pytest.mark.parametrize("name", ["batch_per_rank", "dim_per_rank", "columns"])
@pytest.mark.parametrize("way", _WAYS)
def test_a_list_that_is_filled_anew_changes_no_backward_pass(way: str, name: str) -> None:
    for stayed, filled in in_world(_between, 2, "host", way, name):
        assert stayed.any() and torch.equal(stayed, filled)


def _moved_table() -> tuple[str, str]:
    table = torch.ones(4, 2)
    optimizer = po.EmbeddingOptimizer([table])
    po.embedding_all_to_all([table], torch.arange(4), torch.arange(5), optimizer=optimizer).sum().backward()
    table.data = table.data.clone()
    name, text, *_ = error_of(
        lambda: po.embedding_all_to_all([table], torch.arange(4), torch.arange(5), optimizer=optimizer)
    )
    return name, text


def test_a_table_that_has_moved_is_refused_ahead_of_the_exchange() -> None:
    ((name, text),) = in_world(_moved_table, 1, "host")
    assert name == "ValueError" and "expected the tables that the optimizer was made of" in text
