"""Other uses of a ShardedEmbeddingBagCollection: compile, save, copy, freeze, send ahead and fail."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kept_pes import in_processes
from sharded_embedding_cases import PlainCollection, one_each as _lookups, one_table as _module
from torch.distributed.checkpoint.state_dict import get_state_dict
from worlds import error_of, in_world, world_of

import persistent_ops as po

_PLACEMENTS = ("table_wise", "replicated")


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
    module = _module(optimizer="adagrad")
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


def _saved_by_one_pe() -> list[str]:
    """Return the errors of saving a table with rows on another PE, too, and a table with all rows here."""
    placement = {"a": po.nn.TablePlacement("column_wise", 2), "b": "replicated"}
    tables = [("a", 13, 8, ["x"]), ("b", 13, 8, ["y"])]
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda shards: shards, lambda shards: shards.cpu().clone()]
    said = []
    with world_of("host", has_group=False):
        state = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=8, placement=placement).state_dict()
        for way, name in itertools.product(ways, "ab"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.save(way(state[f"embedding_bags.{name}.weight"]), io.BytesIO())
            said.append(" ".join(str(each.message) for each in caught))
    return said


def test_saving_one_pes_part_warns() -> None:
    for partial, whole, copied, copied_whole in in_processes(_saved_by_one_pe, 2, timeout=200):
        assert copied == partial and copied_whole == whole == ""
        assert "torch.save on one PE loses those of the others" in partial and "distributed.checkpoint.save" in partial


def _saved_without_a_group(folder: Path) -> str:
    """Return the warnings of torch.distributed.checkpoint if each PE takes itself for the whole job."""
    tables = [("a", 13, 8, ["x"]), ("b", 13, 8, ["y"])]
    with world_of("host", has_group=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=8).state_dict()
        dcp.save(state, checkpoint_id=folder / str(po.rank()), no_dist=True)
    return " ".join(str(each.message) for each in caught)


def test_saving_without_a_process_group_warns(tmp_path: Path) -> None:
    for said in in_processes(_saved_without_a_group, 2, tmp_path, timeout=200):
        assert "overwrites the files of the others" in said and "po.process_group()" in said


def _through_get_state_dict() -> list[Any]:
    with world_of("host", "gloo"):
        model = torch.nn.Sequential(_module(optimizer="adagrad"), torch.nn.Linear(8, 1))
        dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
        both = [dense, model[0].optimizer]
        errors = [error_of(lambda: get_state_dict(model, both)), error_of(lambda: get_state_dict(model[0], both[1]))]
        tables, state = get_state_dict(model, dense)
    return [[error[:2] for error in errors], sorted(tables), state["param_groups"][0]["params"]]


def test_get_state_dict_refuses_the_tables_optimizer() -> None:
    ((errors, tables, params),) = in_processes(_through_get_state_dict, 1, timeout=200)
    for kind, text in errors:
        assert kind == "NotImplementedError" and "save module.optimizer.state_dict() beside" in text
    assert tables == ["0.embedding_bags.a.weight", "1.bias", "1.weight"] and params == ["1.weight", "1.bias"]


def _copied() -> list[tuple[str, str]]:
    optimizer = _module(optimizer="adagrad").optimizer
    ways: tuple[Callable[[Any], object], ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    return [error_of(lambda way=way: way(optimizer))[:2] for way in ways]


def test_an_optimizer_is_not_copied() -> None:
    for kind, text in in_world(_copied, 1, "host")[0]:
        assert kind == "TypeError" and "Save its state_dict" in text


# ---- frozen ----------------------------------------------------------------------------------------------------------


def _from_frozen() -> list[Any]:
    collection = PlainCollection()
    made = po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4)
    collection.embedding_bags["b"].weight.requires_grad_(False)
    told = error_of(lambda: po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4))
    return [len(list(made.parameters())), *told[:2]]


def test_a_frozen_table_is_not_trained() -> None:
    ((count, kind, text),) = in_world(_from_frozen, 1, "host")
    assert (count, kind) == (2, "NotImplementedError") and text.startswith(
        "collection: embedding_bags.b.weight is frozen"
    )


# ---- inputs of inference mode ----------------------------------------------------------------------------------------


def _inputs_of_inference_mode(placement: str, is_sent: bool, is_copied: bool) -> list[torch.Tensor]:
    """Return the results of two steps, whose tensors are of inference mode, and of two others."""
    results = []
    for is_made_there in (True, False):
        module = _module(placement)
        for _ in range(2):
            with torch.inference_mode(is_made_there):
                given: tuple[Any, ...] = _lookups(3, 0, 3)
            given = tuple(each.clone() for each in given) if is_copied else given
            with torch.inference_mode(is_made_there):
                sent = module.input_dist(*given) if is_sent else None
            pooled = module(*given) if sent is None else module(sent)
            pooled.sum().backward()
            results.append(pooled.detach())
    return results


@pytest.mark.parametrize(("is_sent", "is_copied"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_lookups_may_be_of_inference_mode(placement: str, is_sent: bool, is_copied: bool) -> None:
    for first, second, *wanted in in_world(_inputs_of_inference_mode, 2, "host", placement, is_sent, is_copied):
        assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])
        assert not torch.equal(first, second)


# ---- parameters that are replaced ------------------------------------------------------------------------------------


def _by_functional_call(module: torch.nn.Module) -> None:
    values = {name: each.detach() + 1.0 for name, each in module.named_parameters()}
    torch.func.functional_call(module, values, _lookups(3))


def _by_data(module: torch.nn.Module) -> None:
    for each in module.parameters():
        each.data = each.data + 1.0
    module(*_lookups(3))


def _by_vector(module: torch.nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(module.parameters())
    torch.nn.utils.vector_to_parameters(vector + 1.0, module.parameters())
    module(*_lookups(3))


def _by_attribute(module: torch.nn.Module) -> None:
    table: Any = module.get_submodule("embedding_bags.a")
    table.weight = torch.nn.Parameter(table.weight.detach() + 1.0, requires_grad=False)
    module(*_lookups(3))


def _replaced(placement: str, replace: Callable[[torch.nn.Module], None]) -> list[Any]:
    return list(error_of(lambda: replace(_module(placement)))[:2])


@pytest.mark.parametrize("replace", [_by_functional_call, _by_data, _by_vector, _by_attribute])
@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_a_parameter_that_is_replaced_is_refused(placement: str, replace: Callable[[torch.nn.Module], None]) -> None:
    for kind, text in in_world(_replaced, 1, "host", placement, replace):
        assert kind == "RuntimeError" and text.startswith("embedding_bags.a.weight: its memory was replaced")


def _written_into(placement: str) -> list[torch.Tensor]:
    """Return results before and after rows are changed where they lie, in the ways that torch has for that."""
    module, results = _module(placement), []
    (weight,) = module.parameters()

    def fill(value: float) -> None:
        if value == 1.0:
            weight.data.fill_(value)
        elif value == 2.0:
            torch.nn.init.constant_(weight, value)
        elif value == 3.0:
            with torch.no_grad():
                weight.copy_(torch.full_like(weight, value))
        else:
            module.load_state_dict({"embedding_bags.a.weight": torch.full((13, 8), value)}, assign=True)

    same = {name: each.detach() for name, each in module.named_parameters()}
    for value in (1.0, 2.0, 3.0, 4.0):
        fill(value)
        with torch.no_grad():
            results.append(torch.func.functional_call(module, same, _lookups(3))[0, 0])
    return results


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_a_parameter_is_changed_where_it_lies(placement: str) -> None:
    assert in_world(_written_into, 2, "host", placement) == [[1.0, 2.0, 3.0, 4.0]] * 2


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


def _beside(placement: str) -> list[bool]:
    """Send each batch ahead of the last one's backward pass, in turn with all launches and beside them."""
    results = []
    for is_beside in (False, True):
        module = _module(placement)
        module(*_lookups(0)).sum().backward()
        if is_beside:
            results.append([torch.tensor(module.run_beside())])
        else:
            results.append([])
        sent = module.input_dist(*_lookups(1))
        for row in (2, 3, 1):
            pooled = module(sent)
            sent = module.input_dist(*_lookups(row))
            pooled.sum().backward()
            results[-1].append(pooled.detach().clone())
        sent.release()
        po.check()
    told, *beside = results[1]
    return [bool(told), *map(torch.equal, results[0], beside)]


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_lookups_ahead_travel_beside_other_launches(placement: str) -> None:
    assert in_world(_beside, 2, "host", placement) == [[True] * 4] * 2


def _dropped(placement: str) -> list[Any]:
    """Send a batch ahead in a loop, drop the last one sent, and continue without it."""
    module = _module(placement)

    def epoch() -> None:
        sent = module.input_dist(*_lookups(0, 2))
        for _ in range(3):
            pooled = module(sent)
            sent = module.input_dist(*_lookups(0, 2))
            pooled.sum().backward()

    epoch()
    results = [list(module(*_lookups(1)).shape) for _ in range(4)]
    held = module.input_dist(*_lookups(0))
    return [results, error_of(lambda: module(*_lookups(0)))[0], list(module(held).shape)]


@pytest.mark.parametrize("placement", _PLACEMENTS)
def test_what_was_sent_and_dropped_holds_nobody_up(placement: str) -> None:
    assert in_world(_dropped, 2, "host", placement) == [[[[1, 8]] * 4, "RuntimeError", [1, 8]]] * 2


def _refused_while_two_wait() -> list[Any]:
    module = _module()
    values, lengths = _lookups(3)
    results = [module(values, lengths, batch_per_rank=[1]) for _ in range(2)]
    told = error_of(lambda: module(values.float(), lengths, batch_per_rank=[1]))[0]
    sum(results).sum().backward()  # type: ignore[union-attr]
    return [told]


def test_a_refused_call_takes_no_lookups_away() -> None:
    assert in_world(_refused_while_two_wait, 1, "host") == [["TypeError"]]
