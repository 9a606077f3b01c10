"""Backward passes that a ShardedEmbeddingBagCollection refuses: for all tables or none, on all PEs or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement

_ON_PE_0 = TablePlacement(ranks=(0,))


def _module(placement: Any, dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32), **options: Any) -> Any:
    tables = [
        TableConfig(name, 7, 8, [f"of {name}"], data_type=dtype) for name, dtype in zip("ab", dtypes, strict=True)
    ]
    return po.nn.ShardedEmbeddingBagCollection(tables, max_batch=4, placement=placement, lr=0.5, **options)


def _lookups(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lookups of one sample per two rows."""
    return torch.tensor(rows, device=po.device()), torch.ones(len(rows), dtype=torch.int64, device=po.device())


def _rows(module: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def _left(module: Any, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, before, module.parameters()))


# ---- more forward passes than may wait -------------------------------------------------------------------------------


def _third(records: bool) -> list[Any]:
    """Leave two forward passes open, and make a third one; return the oldest one's error in the backward pass."""
    module, split = _module({"b": "replicated"}), {"batch_per_rank": [1] * po.world_size()}
    oldest, other = module(*_lookups(1, 2), **split), module(*_lookups(3, 4), **split)
    with torch.set_grad_enabled(records):
        third = module(*_lookups(5, 6), **split)
    other.sum().backward()
    before = _rows(module)
    kind, text, _ = error_of(oldest.sum().backward)
    is_left = _left(module, before)
    if records:
        third.sum().backward()
    po.check()
    return [
        kind,
        "may wait for their backward passes" in text and "call release()" not in text,
        is_left,
        _left(module, before) is not records,
    ]


@pytest.mark.parametrize("records", [True, False])
def test_the_oldest_of_three_changes_no_table(backend: str, records: bool) -> None:
    assert in_world(_third, 2, backend, records) == [["RuntimeError", True, True, True]] * 2


# ---- rows that have changed ------------------------------------------------------------------------------------------


def _changed(how: str, placement: Any, dtypes: Sequence[torch.dtype], is_looked_at: bool) -> list[Any]:
    module = _module(placement, dtypes, is_weighted=True)
    weights = torch.ones(2, device=po.device(), requires_grad=True)
    result = module(*_lookups(1, 2), per_sample_weights=weights)
    if is_looked_at:  # which updates nothing
        torch.autograd.grad(result.sum(), [result], retain_graph=True)
    if how == "written":
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if ".a." in name:
                    parameter.mul_(2)
    elif how == "drawn":
        module.reset_parameters(5)
    else:
        rows = {
            f"embedding_bags.{name}.weight": torch.full((7, 8), 0.5, dtype=each)
            for name, each in zip("ab", dtypes, strict=True)
        }
        module.load_state_dict(rows)
    before = _rows(module)
    kind, text, _ = error_of(result.sum().backward)
    po.check()
    return [kind, text.startswith("the tables have changed since the forward pass"), _left(module, before)]


_PLACES = {
    "one each": {},
    "all on PE 0": {"a": _ON_PE_0, "b": _ON_PE_0},
    "one replicated": {"b": "replicated"},
}


@pytest.mark.parametrize("how", ["written", "drawn", "loaded"])
@pytest.mark.parametrize("place", _PLACES)
def test_rows_that_have_changed_are_refused_by_all(backend: str, place: str, how: str) -> None:
    """Also on a PE without such tables. Tables of two dtypes have an update each."""
    for dtypes in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
        is_looked_at = dtypes[1] == torch.bfloat16
        found = in_world(_changed, 2, backend, how, _PLACES[place], dtypes, is_looked_at, operator_timeout=30.0)
        assert found == [["RuntimeError", True, True]] * 2


# ---- fake tensors ----------------------------------------------------------------------------------------------------


def _fake(is_module: bool, is_given_fakes: bool) -> list[Any]:
    if is_module:
        called: Any = _module({"b": "replicated"})
        call = called
    else:
        called = po.EmbeddingInputs([[(0, 7), (1, 7)]], num_features=2, max_batch=4, lookups_per_sample=[1.0, 1.0])
        call = lambda values, lengths: called.exchange(values, lengths=lengths)  # noqa: E731
    given = _lookups(1, 2)

    def pretend() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            call(*(map(mode.from_tensor, given) if is_given_fakes else given))

    kind, text, _ = error_of(pretend)
    result = call(*given)
    if is_module:
        result.sum().backward()
    else:
        result.wait()
        result.release()
    po.check()
    return [kind, text]


@pytest.mark.parametrize("is_given_fakes", [True, False])
@pytest.mark.parametrize("is_module", [True, False])
def test_fake_tensors_are_refused(backend: str, is_module: bool, is_given_fakes: bool) -> None:
    """They have no addresses, and a kernel would read at 0."""
    ((kind, text),) = in_world(_fake, 1, backend, is_module, is_given_fakes)
    if is_given_fakes:
        assert kind == "TypeError" and text.startswith("values: expected a plain dense tensor, got a FakeTensor")
    else:
        assert kind == "NotImplementedError" and "values: expected real tensors, got fake ones" in text
