"""Replicated embedding tables: equal bits on all PEs and on a single owner, bad lookups, failures, checkpoints."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kept_pes import in_processes
from sharded_embedding_cases import CASES, Case, batch_of, blocks_of, gradient_of, samples_of
from worlds import error_of, in_world, init_with_impatient_kernels, run_pes, world_of

import persistent_ops as po
from persistent_ops.nn import TableConfig
from persistent_ops.nn.embedding_features import Features
from persistent_ops.nn.replicated_tables import _parts

_SHARED = next(case for case in CASES if case.name == "shared")
_TABLES = [
    TableConfig("a", 30, 8, ["x", "y"]),
    TableConfig("b", 9, 4, ["z", "x"], "mean"),
    TableConfig("c", 12, 16, ["y"], "sum", torch.bfloat16),
    TableConfig("d", 1, 8, ["w"]),
    TableConfig("e", 5, 6, ["w"]),  # rows that are not aligned
]
_OWNED = {"b": "table_wise"}
_REPLICATED: dict[str, Any] = dict.fromkeys("acde", "replicated")
_OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adagrad": {},
    "rowwise_adagrad": {"weight_decay": 0.01, "weight_decay_mode": "decoupled", "max_norm": 0.4},
    "adam": {"weight_decay": 0.01},
}


def test_sums_in_parts_of_bfloat16_are_those_of_float32() -> None:
    """Also values that overflow bfloat16 or are not finite. The same rows become infinite as with one owner's sums."""
    sums = torch.tensor([1.0, -3.1415927, 0.0, 1.2345e-30, 3.4e38, -3.3999e38, math.inf, -math.inf])
    added = torch.zeros_like(sums)
    for part in _parts(sums, torch.bfloat16):
        added += part.float()
    assert torch.equal(added, sums)
    assert _parts(torch.tensor([math.nan]), torch.bfloat16)[0].isnan()
    assert _parts(sums, torch.float32)[0] is sums


def _blocks(module: Any) -> dict[str, list[torch.Tensor]]:
    """Return this PE's blocks of every table and state, as they are now, without their places."""
    return {name: [block for _, block in blocks] for name, blocks in blocks_of(module).items()}


def _step(module: Any, case: Case, step: int, gradient: torch.Tensor | None = None) -> torch.Tensor:
    batch = batch_of(case, po.rank(), step)
    split = [samples_of(pe, step) for pe in range(po.world_size())] if step % 2 else None
    result: torch.Tensor = module(batch.values.to(po.device()), batch.lengths.to(po.device()), batch_per_rank=split)
    gradient = gradient_of(case, po.rank(), step) if gradient is None else gradient
    result.backward(gradient.to(po.device()))
    module.optimizer.step()
    return result.detach()


# ---- room ------------------------------------------------------------------------------------------------------------


def _in_a_capture(room: int) -> tuple[bool, bool, list[str]]:
    """Return whether all results are NaN, or none is, and what changed; the host does not look at what is captured."""
    module = Case("room", _TABLES, _REPLICATED, "adagrad").make()
    tables = module._replicas
    assert tables is not None
    device, before = po.device(), _blocks(module)
    for stack in tables._stacks:
        stack.room = room
    features = Features(torch.zeros(4 * 5 * 2, dtype=torch.int64), torch.full((4 * 5,), 2), None)  # 5 samples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._world.workspace, "is_capturing", lambda: True)
        begun = tables.begin(Features(features.values.to(device), features.lengths.to(device), None))
    pooled = tables.pool(begun)
    is_nan = torch.cat([each.isnan().flatten() for each in pooled])
    torch.autograd.backward(pooled, [torch.ones_like(each) for each in pooled])
    po.check()
    after = _blocks(module)
    changed = [name for name in after if not all(map(torch.equal, before[name], after[name]))]
    return bool(is_nan.all()), bool(is_nan.any()), changed


def test_captured_lookups_without_room_are_not_a_number_and_change_nothing(backend: str) -> None:
    for every, some, changed in in_world(_in_a_capture, 2, backend, 1):
        assert every and some and not changed
    for _, some, changed in in_world(_in_a_capture, 2, backend, 1000):
        assert not some and any("a.weight" in name for name in changed)


# ---- bits ------------------------------------------------------------------------------------------------------------


def _with_owners_and_without(optimizer: str) -> tuple[list[str], dict[str, list[torch.Tensor]]]:
    """Train with whole-numbered gradients, whose sums are exact: return what differs between the two placements."""
    options = {"gradient_scale": 0.25, "lr": 0.125, **_OPTIONS[optimizer]}
    owned = Case("owned", _TABLES, _OWNED, optimizer, options=options)
    modules = [replace(owned, placement=placement).make() for placement in ({}, _REPLICATED)]
    wrong = []
    for step in range(6):
        gradient = 37 * gradient_of(owned, po.rank(), step)  # bfloat16 has these, but not their sums
        first, second = (_step(module, owned, step, gradient) for module in modules)
        if not torch.equal(first, second):
            wrong.append(f"result of step {step}")
    po.check()
    owner, replica = map(_blocks, modules)
    for name in owner:
        if len(replica[name]) != 1 and "b" not in name.split("."):
            wrong.append(f"{name}: {len(replica[name])} blocks")
        for a, b in zip(owner[name], replica[name], strict=False):
            if not torch.equal(a, b):
                wrong.append(name)
    states = [{name for name in each if "embedding_bags" not in name} for each in (owner, replica)]
    assert states[0] == states[1] and bool(states[0]) is (optimizer != "sgd")
    return wrong, {name: blocks for name, blocks in replica.items() if "b" not in name.split(".")}


@pytest.mark.parametrize("optimizer", _OPTIONS)
def test_replicas_have_the_bits_of_an_owner(backend: str, optimizer: str) -> None:
    found = in_world(_with_owners_and_without, 3, backend, optimizer)
    assert [wrong for wrong, _ in found] == [[]] * 3
    _assert_equal([blocks for _, blocks in found])


def _assert_equal(of_pes: list[dict[str, list[torch.Tensor]]]) -> None:
    for blocks in of_pes[1:]:
        assert {*blocks} == {*of_pes[0]}
        for name, (first,) in of_pes[0].items():
            assert torch.equal(first, blocks[name][0]), name


def _of_any_gradients() -> tuple[dict[str, list[torch.Tensor]], float]:
    case = Case("any", _TABLES, "replicated", "rowwise_adagrad", options={"lr": 0.05})
    module, owned = case.make(), replace(case, placement="table_wise").make()
    for step in range(8):
        rng = torch.Generator().manual_seed(100 * step + po.rank())
        gradient = torch.randn(gradient_of(case, po.rank(), step).shape, generator=rng)
        _step(module, case, step, gradient)
        _step(owned, case, step, gradient)
    po.check()
    replica, owner = _blocks(module), _blocks(owned)
    errors = [
        float(((a - b).abs() / (1 + b.abs())).max())
        for name in owner
        if "c" not in name.split(".")
        for a, b in zip(owner[name], replica[name], strict=False)
        if a.numel()
    ]
    return replica, max(errors, default=0.0)


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_stay_equal_whatever_the_gradients(backend: str, world: int) -> None:
    found = in_world(_of_any_gradients, world, backend)
    _assert_equal([blocks for blocks, _ in found])
    assert max(error for _, error in found) < 1e-5


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def _bad_on_one(placement: Any) -> list[Any]:
    case = replace(_SHARED, placement=placement)
    module = case.make()
    batch = batch_of(case, po.rank(), 0)
    seen = []
    values, lengths = batch.values.clone(), batch.lengths.clone()
    if po.rank() == 1:
        values[0] = 10_000  # of "x", which is looked up in "a" and "b"
    seen.append(error_of(lambda: module(values, lengths))[:2])
    if po.rank() == 1:
        lengths[0] -= 1
    seen.append(error_of(lambda: module(batch.values, lengths))[:2])
    with torch.no_grad():
        good = module(batch.values, batch.lengths)
        ignoring = replace(case, options={"bounds": "ignore"}).make()(values, batch.lengths)
    return [*seen, torch.equal(good, ignoring) is (po.rank() == 0)]


@pytest.mark.parametrize("placement", ["table_wise", "replicated", {"b": "replicated"}, {"c": "replicated"}])
def test_bad_lookups_are_told_where_they_are(placement: Any) -> None:
    good, bad = in_world(_bad_on_one, 2, "host", placement)
    assert good == [("", ""), ("", ""), True]
    assert bad[2] and [kind for kind, _ in bad[:2]] == ["IndexError"] * 2
    assert "index 10000" in bad[0][1] and "lengths" in bad[1][1]


def _numbered_rows(table: torch.Tensor) -> None:
    table.copy_(torch.arange(1.0, table.shape[0] + 1, device=table.device)[:, None].expand_as(table))


def _of_bad_lengths(placement: str, lengths: list[int]) -> list[torch.Tensor]:
    """Train two features of a table for two steps, of which the second one has all rows; return what is found."""
    config = TableConfig("t", 9, 4, ["x", "y"], init_fn=_numbered_rows)
    module = po.nn.ShardedEmbeddingBagCollection(
        [config], max_batch=2, placement=placement, bounds="ignore", lr=1.0, is_weighted=True
    )
    found = []
    for values, of_bags in ((range(1, 6), lengths), (range(9), [3, 2, 2, 2])):
        indices = torch.tensor([*values], device=po.device())
        weights = (indices.float() + po.rank()).requires_grad_()
        pooled = module(indices, torch.tensor(of_bags, device=po.device()), per_sample_weights=weights)
        pooled.backward(torch.arange(1.0, 5.0, device=po.device()).repeat_interleave(4).view(2, 8))
        assert weights.grad is not None
        found += [pooled.detach().cpu(), weights.grad.cpu()]
    po.check()
    return found


@pytest.mark.parametrize(
    "lengths",
    [
        [-1, 1, 1, 2],
        [2, -1, 1, 2],
        [2, -3, 4, 2],
        [1, 1, 1, 0],
        [2, 2, 2, 2],
        [9, 1, -1, 1],
        [-(2**63), 2, 2**62, 2**62],
    ],
)
def test_bad_lengths_are_those_of_an_owner(backend: str, lengths: list[int]) -> None:
    """Lengths below 0 count as 0. Missing and excess values are left out, for every placement."""
    owned, replicated = (in_world(_of_bad_lengths, 2, backend, how, lengths) for how in ("table_wise", "replicated"))
    for of_owner, of_replica in zip(owned, replicated, strict=True):
        for one, other in zip(of_owner, of_replica, strict=True):
            assert torch.equal(one, other)
        if lengths == [2, 2, 2, 2]:  # of which the last bag's values are missing
            assert not of_owner[0][1, 4:].any()


def _in_another_world(placement: str) -> list[tuple[str, str]]:
    po.init("host", heap_size=64 << 20)
    module = replace(_SHARED, placement=placement).make()
    values, lengths = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    pooled = module(values, lengths)
    po.finalize()
    po.init("host", heap_size=64 << 20)
    tried = (lambda: module(values, lengths), lambda: module.input_dist(values, lengths), pooled.sum().backward)
    told = [error_of(action)[:2] for action in tried]
    po.finalize()
    return told


@pytest.mark.parametrize("placement", ["replicated", "table_wise"])
def test_a_module_of_another_world_is_refused(placement: str) -> None:
    """Its gradients would be divided by the number of PEs of the world in which it was made."""
    for kind, told in _in_another_world(placement):
        assert kind == "RuntimeError" and "before po.finalize()" in told


def _one_does_not_come(backend: str) -> list[Any]:
    """One PE leaves out a backward pass: the others' replicas may be ahead, and must be loaded."""
    init_with_impatient_kernels(backend, 2.0, 64 << 20)
    case = replace(_SHARED, placement="replicated", optimizer="adagrad")
    module = case.make()
    _step(module, case, 0)
    tables, states = module.state_dict(), module.optimizer.state_dict()
    kept = {name: shards.clone() for name, shards in tables.items()}
    batch = batch_of(case, po.rank(), 2)
    result = module(batch.values, batch.lengths)
    seen = []
    if po.rank() == 0:
        seen.append(error_of(lambda: result.backward(gradient_of(case, 0, 2)))[:2])
    po.recover()
    if po.rank() == 0:
        refused = error_of(lambda: module(batch.values, batch.lengths).backward(gradient_of(case, 0, 2)))
        seen.append(refused[:2])
    module.load_state_dict(kept)
    module.optimizer.load_state_dict(states)
    _step(module, case, 3)
    po.check()
    blocks = _blocks(module)
    po.finalize()
    return [seen, blocks]


def test_after_a_backward_pass_that_was_given_up_tables_are_loaded() -> None:
    first, second = run_pes(_one_does_not_come, 2, "host", timeout=200)
    (name, text), (refused, why) = first[0]
    assert name == "PeerTimeoutError" and second[0] == []
    assert text.startswith(
        "In all_reduce, forward pass last (replicated tables a, b, c, ReplicatedTables 1), PE 0 waited "
    ), text
    assert " s for PE 1: " in text and "may have left states, tables half updated" in text, text
    for told in (text, why):
        assert "load_state_dict of a ShardedEmbeddingBagCollection" in told, told
    assert refused == "PersistentOpsError" and why.startswith("weights: "), why  # in the forward pass
    _assert_equal([first[1], second[1]])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _states(module: Any) -> dict[str, Any]:
    return {"tables": module.state_dict(), "optimizer": module.optimizer.state_dict()}


def _checkpoints(backend: str, folder: str, cases: list[Case]) -> list[dict[str, list[torch.Tensor]]]:
    """Train and save; load what another world has saved into each placement; return blocks."""
    found = []
    with world_of(backend, "gloo"):
        for case in cases:
            module = case.make(gradient_scale=1.0, seed=3 if case is cases[0] else 99)
            if Path(folder).exists():
                parts = _states(module)
                dcp.load(parts, checkpoint_id=folder)
                module.load_state_dict(parts["tables"])
                module.optimizer.load_state_dict(parts["optimizer"])
            else:
                for step in range(3):
                    _step(module, case, step)
                dcp.save(_states(module), checkpoint_id=folder)
            po.check()
            found.append(_blocks(module))
    return found


def test_a_replica_is_stored_once_and_loaded_elsewhere(backend: str, tmp_path: Path) -> None:
    """Saved on two PEs, loaded on three with owners, on one, and into plain tensors; and the other way round."""
    owned = Case("owned", _TABLES, "table_wise", "rowwise_adagrad")
    replicated = replace(owned, placement="replicated")
    folder = str(tmp_path / "replicated")
    saved = [blocks for (blocks,) in in_processes(_checkpoints, 2, backend, folder, [replicated], timeout=200)]
    _assert_equal(saved)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.storage_data is not None
    stored = [index.fqn for index in metadata.storage_data]
    for table in _TABLES:
        name = f"embedding_bags.{table.name}.weight"
        assert stored.count(f"tables.{name}") == 1, stored
        assert stored.count(f"optimizer.state.{name}.{table.name}.momentum1") == 1, stored
    plain = {name: torch.zeros_like(each) for name, (each,) in saved[0].items() if "embedding_bags" in name}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"tables": plain}, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(each, saved[0][name][0]) for name, each in plain.items())
    on_three = in_processes(_checkpoints, 3, backend, folder, [owned, replicated], timeout=200)
    for name, (wanted,) in saved[0].items():
        (block,) = [block for of_owners, _ in on_three for block in of_owners[name]]
        assert torch.equal(block, wanted), name
        assert all(torch.equal(of_replicas[name][0], wanted) for _, of_replicas in on_three), name


def test_tables_of_owners_are_loaded_as_replicas(backend: str, tmp_path: Path) -> None:
    owned = Case("owned", _TABLES, {"a": po.nn.TablePlacement("column_wise", 2)}, "adagrad")
    folder = str(tmp_path / "owned")
    in_processes(_checkpoints, 2, backend, folder, [owned], timeout=200)
    found = in_processes(_checkpoints, 2, backend, folder, [owned, replace(owned, placement="replicated")], timeout=200)
    _assert_equal([of_replicas for _, of_replicas in found])
    for name, (replica,) in found[0][1].items():
        dim = 1 if name in ("embedding_bags.a.weight", "a.momentum1") else 0
        blocks = [block for of_owners, _ in found for block in of_owners[name]]
        order = blocks if len(blocks) == 1 or torch.equal(blocks[0][:, 0], replica[:, 0]) else blocks[::-1]
        assert torch.equal(torch.cat(order, dim), replica), name
