"""Embedding collections and TorchRec's DistributedModelParallel: checkpoints both ways, and equal steps afterwards.

TorchRec and FBGEMM are the installed versions, on the CPU, with gloo.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kept_pes import in_processes
from worlds import world_of

import persistent_ops as po
from persistent_ops.nn import TablePlacement

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu")),
    reason="needs torchrec and fbgemm_gpu (on CPUs: fbgemm-gpu-cpu)",
)

_TABLES = {"a": (30, 16, ["x", "y"]), "b": (9, 4, ["z"]), "c": (12, 8, ["w"])}
_FEATURES = {"x": 30, "y": 30, "z": 9, "w": 12}
_PLACEMENT = {"a": TablePlacement("column_wise", 2, (-1, 0)), "b": TablePlacement(ranks=(0,)), "c": "replicated"}
_OPTIMIZERS = {"rowwise_adagrad": "RowWiseAdagrad", "adagrad": "Adagrad"}
_PATH = "sparse."
_RATE, _EPS = 0.5, 1e-8


class _Model(torch.nn.Module):
    def __init__(self, sparse: torch.nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, features: Any) -> Any:
        return self.sparse(features)


def _collection() -> Any:
    configs = importlib.import_module("torchrec.modules.embedding_configs")
    modules = importlib.import_module("torchrec.modules.embedding_modules")
    tables = [
        configs.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
        for name, (rows, dim, features) in _TABLES.items()
    ]
    return modules.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))


def _theirs(optimizer: str) -> Any:
    """Return TorchRec's model of two ranks: a in two slices, b and c on a rank each."""
    optim = importlib.import_module("torchrec.optim")
    parallel = importlib.import_module("torchrec.distributed.model_parallel")
    plans = importlib.import_module("torchrec.distributed.sharding_plan")
    sharders = importlib.import_module("torchrec.distributed.embeddingbag")
    types = importlib.import_module("torchrec.distributed.types")
    in_backward = importlib.import_module("torchrec.optim.apply_optimizer_in_backward").apply_optimizer_in_backward
    collection = _collection()
    in_backward(getattr(optim, _OPTIMIZERS[optimizer]), collection.parameters(), {"lr": _RATE, "eps": _EPS})
    sharder = sharders.EmbeddingBagCollectionSharder()
    placed = {"a": plans.column_wise(ranks=[0, 1]), "b": plans.table_wise(rank=1), "c": plans.table_wise(rank=0)}
    plan = plans.construct_module_sharding_plan(
        collection, placed, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    return parallel.DistributedModelParallel(
        _Model(collection),
        env=types.ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=types.ShardingPlan({"sparse": plan}),
        sharders=[sharder],
    )


def _ours(optimizer: str) -> _Model:
    """Return a model with a collection of other rows, placed otherwise."""
    last = po.world_size() - 1
    placement = {**_PLACEMENT, "a": TablePlacement("column_wise", 2, (last, 0))}
    return _Model(
        po.nn.ShardedEmbeddingBagCollection.from_collection(
            _collection(),
            max_batch=8,
            lookups_per_sample=3.0,
            placement=placement,
            optimizer=optimizer,
            lr=_RATE,
            eps=_EPS,
        )
    )


def _parts_of_theirs(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _parts_of_ours(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.sparse.optimizer.state_dict(prefix=_PATH)}


def _blocks(parts: dict[str, Any]) -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return this PE's blocks of every table and state, of TableShards or ShardedTensors."""
    named = dict(parts["model"])
    for of_table in parts["optimizer"]["state"].values():
        named |= of_table
    found = {}
    for name, whole in named.items():
        if hasattr(whole, "shards"):
            blocks = [(tuple(offsets), block) for offsets, block in whole.shards]
        else:
            blocks = [(tuple(each.metadata.shard_offsets), each.tensor) for each in whole.local_shards()]
        found[name] = [(offsets, block.detach().cpu().clone()) for offsets, block in blocks]
    return found


def _train(model: Any, device: torch.device, step: int) -> None:
    """Make a step with this PE's samples."""
    jagged = importlib.import_module("torchrec.sparse.jagged_tensor")
    rng = torch.Generator().manual_seed(10 * step + po.rank())
    samples = 3 + po.rank()
    lengths = torch.randint(0, 4, (len(_FEATURES), samples), generator=rng)
    values = [
        torch.randint(0, rows, (int(count),), generator=rng)
        for rows, count in zip(_FEATURES.values(), lengths.sum(1), strict=True)
    ]
    features = jagged.KeyedJaggedTensor(
        list(_FEATURES), torch.cat(values).to(device), lengths=lengths.flatten().to(device)
    )
    pooled = model(features)
    pooled = (pooled.wait() if hasattr(pooled, "wait") else pooled).to_dict()
    loss = torch.zeros(())
    for name in _FEATURES:
        factors = torch.randint(-4, 5, pooled[name].shape, generator=rng).float()
        loss = loss + (pooled[name].cpu() * factors).sum()
    loss.backward()


def _load_into_ours(model: Any, folder: str) -> None:
    model.sparse.optimizer.save_param_groups(False)
    parts = _parts_of_ours(model)
    dcp.load(parts, checkpoint_id=folder)
    model.load_state_dict(parts["model"])
    model.sparse.optimizer.load_state_dict(parts["optimizer"], prefix=_PATH)
    model.sparse.optimizer.save_param_groups(True)


def _exchanged(optimizer: str, folder: Path) -> list[Any]:
    theirs, cpu = _theirs(optimizer), torch.device("cpu")
    for step in range(2):
        _train(theirs, cpu, step)
    dcp.save(_parts_of_theirs(theirs), checkpoint_id=folder / "theirs")
    ours = _ours(optimizer)
    _load_into_ours(ours, str(folder / "theirs"))
    seen = [_blocks(_parts_of_theirs(theirs)), _blocks(_parts_of_ours(ours))]
    _train(theirs, cpu, 2)
    _train(ours, po.device(), 2)
    seen += [_blocks(_parts_of_theirs(theirs)), _blocks(_parts_of_ours(ours))]
    dcp.save(_parts_of_ours(ours), checkpoint_id=folder / "ours")
    again = _theirs(optimizer)
    parts = _parts_of_theirs(again)
    dcp.load(parts, checkpoint_id=folder / "ours")
    again.load_state_dict(parts["model"])
    again.fused_optimizer.load_state_dict(parts["optimizer"])
    return [*seen, _blocks(_parts_of_theirs(again))]


def _loaded(optimizer: str, folder: Path) -> list[Any]:
    ours = _ours(optimizer)
    _load_into_ours(ours, str(folder / "theirs"))
    return [_blocks(_parts_of_ours(ours))]


def _in_a_world(backend: str, program: Any, folder: Path) -> dict[str, list[Any]]:
    with world_of(backend, "gloo"):
        seen = {optimizer: program(optimizer, folder / optimizer) for optimizer in _OPTIMIZERS}
        po.check()
    return seen


def _whole(of_pes: list[Any], optimizer: str, number: int) -> dict[str, torch.Tensor]:
    """Concatenate the PEs' blocks of what was seen; NaN where no PE has one."""
    found = {}
    for name, (rows, dim, _) in _TABLES.items():
        slices = 2 if name == "a" else 1
        state = (rows * slices,) if optimizer == "rowwise_adagrad" else (rows, dim)
        for key, size in ((f"{_PATH}embedding_bags.{name}.weight", (rows, dim)), (f"{name}.momentum1", state)):
            whole = torch.full(size, float("nan"))
            for of_pe in of_pes:
                for offsets, block in of_pe[optimizer][number].get(key, []):
                    whole[tuple(slice(at, at + n) for at, n in zip(offsets, block.shape, strict=True))] = block
            found[key] = whole
    return found


def test_checkpoints_both_ways(backend: str, tmp_path: Path) -> None:
    """Saved by either of two PEs, loaded by the other, and on one PE. A step after that is equal for both."""
    of_two = in_processes(_in_a_world, 2, backend, _exchanged, tmp_path, timeout=250)
    of_one = in_processes(_in_a_world, 1, backend, _loaded, tmp_path, timeout=250)
    for optimizer in _OPTIMIZERS:
        theirs, ours, theirs_next, ours_next, again = (_whole(of_two, optimizer, number) for number in range(5))
        alone = _whole(of_one, optimizer, 0)
        for name, saved in theirs.items():
            assert torch.equal(ours[name], saved) and torch.equal(alone[name], saved), name
            assert torch.equal(again[name], ours_next[name]), name
            assert not torch.equal(theirs_next[name], saved), name
            torch.testing.assert_close(ours_next[name], theirs_next[name], rtol=1e-5, atol=1e-6)
