"""What users do around a ShardedEmbeddingBagCollection: compile, save, copy, freeze, send ahead and fail."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po

_PLACEMENTS = ("table_wise", "replicated")


def _module(placement: str = "table_wise", **options: Any) -> po.nn.ShardedEmbeddingBagCollection:
    config = po.nn.TableConfig("a", 13, 8, ["x"])
    return po.nn.ShardedEmbeddingBagCollection([config], max_batch=8, placement=placement, lr=0.5, **options)


def _lookups(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of a sample each."""
    return torch.tensor(values), torch.ones(len(values), dtype=torch.int64)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self, placement: str) -> None:
        super().__init__()
        self.embeddings = _module(placement)
        self.top = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(self.top.weight, 0.25)
        torch.nn.init.zeros_(self.top.bias)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.top(self.embeddings(values, lengths))  # type: ignore[no-any-return]


def _trained(placement: str, how: str) -> list[torch.Tensor]:
    """Return two steps' results, of which the first one makes all plans."""
    torch._dynamo.reset()
    model = _Model(placement)

    def step(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        result = called(values, lengths)
        result.sum().backward()
        return result.detach()

    called: Callable[..., torch.Tensor] = torch.compile(model, backend="eager") if how == "model" else model
    if how == "module":
        model.embeddings.compile(backend="eager")
    run = torch.compile(step, backend="eager") if how == "step" else step
    return [run(*_lookups(0, 3, 3)) for _ in range(2)]


@pytest.mark.parametrize("how", ["model", "module", "step"])
@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_the_first_step_may_be_compiled(placement: str, how: str) -> None:
    (wanted,), (found,) = (in_world(_trained, 1, "host", placement, way) for way in ("eagerly", how))
    assert not torch.equal(wanted[0], wanted[1])  # the tables have learned
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other)


# ---- saved and copied ------------------------------------------------------------------------------------------------


def _saved_and_loaded() -> bool:
    module = _module(algorithm="adagrad")
    module(*_lookups(0, 3, 3)).sum().backward()
    before = [each.clone() for each in module.parameters()]
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": module.optimizer.state_dict()}, file)
    module(*_lookups(0, 3, 3)).sum().backward()
    file.seek(0)
    loaded = torch.load(file)  # with `weights_only`, its default
    module.load_state_dict(loaded["model"])
    module.optimizer.load_state_dict(loaded["optimizer"])
    return all(map(torch.equal, module.parameters(), before))


def test_state_dicts_go_through_torch_save_and_load() -> None:
    assert in_world(_saved_and_loaded, 1, "host") == [True]


def _copied() -> list[tuple[str, str]]:
    optimizer = _module(algorithm="adagrad").optimizer
    ways: tuple[Callable[[Any], object], ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    return [error_of(lambda way=way: way(optimizer))[:2] for way in ways]


def test_an_optimizer_is_not_copied() -> None:
    for kind, text in in_world(_copied, 1, "host")[0]:
        assert kind == "TypeError" and "save its state_dict" in text


# ---- frozen ----------------------------------------------------------------------------------------------------------


class _Collection(torch.nn.Module):
    """What an EmbeddingBagCollection has, of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(13, 8) for name in "ab"})

    def embedding_bag_configs(self) -> list[Any]:
        return [po.nn.TableConfig(name, 13, 8, [f"of {name}"]) for name in "ab"]


def _from_frozen() -> list[Any]:
    collection = _Collection()
    made = po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4)
    collection.embedding_bags["b"].weight.requires_grad_(False)
    told = error_of(lambda: po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4))
    return [len(list(made.parameters())), *told[:2]]


def test_a_frozen_table_is_not_trained() -> None:
    ((count, kind, text),) = in_world(_from_frozen, 1, "host")
    assert (count, kind) == (2, "NotImplementedError") and text.startswith(
        "collection: embedding_bags.b.weight is frozen"
    )


# ---- made in inference mode ------------------------------------------------------------------------------------------


def _made_in_inference_mode(placement: str) -> bool:
    with torch.inference_mode():
        module = _module(placement)
    before = module(*_lookups(3)).detach().clone()
    module(*_lookups(3)).sum().backward()
    return not torch.equal(module(*_lookups(3)).detach(), before)


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_it_may_be_made_in_inference_mode(placement: str) -> None:
    assert in_world(_made_in_inference_mode, 1, "host", placement) == [True]


# ---- forward passes that wait ----------------------------------------------------------------------------------------


def _sent_ahead(placement: str) -> list[Any]:
    """Send a batch, fail, recover, and send another one."""
    module = _module(placement)
    given = SimpleNamespace(features=_lookups(0, 2), split={"batch_per_rank": [2] * po.world_size()})
    sent = module.input_dist(*given.features, **given.split)
    again = error_of(lambda: module.input_dist(*given.features, **given.split))
    po.recover()
    result = module(*given.features, **given.split)
    return [again[0], list(result.shape), error_of(lambda: module(sent))[0]]


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_what_was_sent_before_a_recovery_holds_nobody_up(placement: str) -> None:
    assert in_world(_sent_ahead, 2, "host", placement) == [["RuntimeError", [2, 8], "RuntimeError"]] * 2


def _three_wait() -> tuple[str, str]:
    module = _module()
    loss = torch.stack([module(*_lookups(row), batch_per_rank=[1]).sum() for row in range(3)]).sum()
    return error_of(loss.backward)[:2]


def test_a_third_forward_pass_that_waits_is_told_so() -> None:
    ((kind, text),) = in_world(_three_wait, 1, "host")
    assert kind == "RuntimeError" and "at most two may wait" in text and "call release()" not in text


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _given(placement: str) -> list[Any]:
    module = _module(placement)
    values, lengths = _lookups(0, 2)
    calls: list[tuple[Any, Any]] = [
        ([0, 2], lengths),
        (values.numpy(), lengths),
        (torch.tensor([0, 9, 2, 9])[::2], lengths),
    ]
    told = [error_of(lambda given=given: module(*given))[:2] for given in calls]
    split = [np.int64(2)]
    return [*told, list(module(values, lengths, batch_per_rank=split).shape)]


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_what_is_wrong_with_inputs_is_said(placement: str) -> None:
    (told,) = in_world(_given, 1, "host", placement)
    assert told == [
        ("TypeError", "values: expected a tensor, got list"),
        ("TypeError", "values: expected a tensor, got ndarray"),
        ("ValueError", "values: expected a contiguous tensor; pass values.contiguous()"),
        [2, 8],
    ]


def _negative_weights() -> str:
    module = _module("replicated", is_weighted=True)
    weights = torch._neg_view(torch.ones(2))
    return error_of(lambda: module(*_lookups(0, 2), per_sample_weights=weights))[1]


def test_weights_with_the_negative_bit_are_refused() -> None:
    assert "negative bit" in in_world(_negative_weights, 1, "host")[0]
