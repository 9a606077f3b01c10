"""Embedding collections for TorchRec's users: inputs, results, plans; what is refused; placements."""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sharded_embedding_cases import CASES, Case, Reference, batch_of, gradient_of, samples_of
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.nn import KeyedEmbeddings, TablePlacement, ignore_sharded_tables
from persistent_ops.nn.embedding_tables import table_configs
from persistent_ops.nn.table_layout import Layout, place
from persistent_ops.nn.table_owners import bytes_read
from persistent_ops.nn.table_placements import placements_of
from persistent_ops.ops.embedding.plan import OPERATOR
from persistent_ops.runtime import world as po_world

_SHARED = next(case for case in CASES if case.name == "shared")
_WEIGHTED = next(case for case in CASES if case.name == "weighted")

# ---- stand-ins for TorchRec's ----------------------------------------------------------------------------------------


class PoolingType(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(enum.Enum):
    FP32 = "FP32"
    BF16 = "BF16"
    INT8 = "INT8"


def _config(name: str, rows: int, dim: int, features: list[str], **more: Any) -> Any:
    """Return an object with EmbeddingBagConfig's attributes."""
    given = {"data_type": DataType.FP32, "pooling": PoolingType.SUM, "weight_init_min": None, "weight_init_max": None}
    return SimpleNamespace(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, **{**given, **more}
    )


class Jagged:
    """An object with KeyedJaggedTensor's methods, with lookups in some order of features."""

    def __init__(self, keys: list[str], values: list[torch.Tensor], lengths: list[torch.Tensor], weights: Any) -> None:
        self._parts = keys, values, lengths, weights
        self.is_variable = False

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> torch.Tensor:
        return torch.cat(self._parts[1])

    def lengths(self) -> torch.Tensor:
        return torch.cat(self._parts[2])

    def weights_or_none(self) -> torch.Tensor | None:
        return None if self._parts[3] is None else torch.cat(self._parts[3])

    def variable_stride_per_key(self) -> bool:
        return self.is_variable

    def permute(self, order: list[int]) -> Jagged:
        return Jagged(*[None if part is None else [part[n] for n in order] for part in self._parts])  # type: ignore[arg-type]


class _Detaching(Jagged):
    """One whose operator for another order has no backward pass."""

    def permute(self, order: list[int]) -> Jagged:
        with torch.no_grad():
            keys, values, lengths, weights = super().permute(order)._parts
            return Jagged(keys, values, lengths, [each.detach() for each in weights])


def _jagged(case: Case, rank: int, step: int, order: list[int], factors: torch.Tensor | None = None) -> Jagged:
    """Return a PE's lookups; `factors`: in place of the weights of the batch."""
    batch, names = batch_of(case, rank, step), case.features()
    lengths = batch.lengths.unflatten(0, (len(names), -1))
    counts = lengths.sum(1).tolist()
    factors = batch.weights if factors is None else factors
    weights = None if factors is None else list(factors.to(po.device()).split(counts))
    parts = (list(batch.values.to(po.device()).split(counts)), list(lengths.to(po.device())))
    return Jagged(names, *parts, weights).permute(order)


def _of_jagged(name: str) -> list[Any]:
    case = next(case for case in CASES if case.name == name)
    module, reference = case.make(gradient_scale=1.0), Reference(case)
    seen = []
    for step, order in enumerate(([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0, 3])):
        order = [number for number in order if number < len(case.features())]
        weights = batch_of(case, po.rank(), step).weights
        weights = None if weights is None else weights.to(po.device(), copy=True).requires_grad_()
        result = module(_jagged(case, po.rank(), step, order, weights))
        assert isinstance(result, KeyedEmbeddings)
        batch = batch_of(case, po.rank(), step)
        if batch.weights is not None:
            batch = replace(batch, weights=batch.weights.clone().requires_grad_())
        wanted = reference.forward(batch)
        right = torch.allclose(result.values().detach().cpu(), wanted.detach(), rtol=2e-5, atol=2e-5)
        at = 0
        for key, dim in zip(result.keys(), result.length_per_key(), strict=True):
            block = result.values()[:, at : at + dim]
            right &= torch.equal(result[key], block) and torch.equal(result.to_dict()[key], block)
            at += dim
        assert result.offset_per_key()[-1] == at == result.values().shape[1] and result.key_dim() == 1
        gradient = gradient_of(case, po.rank(), step)
        result.values().backward(gradient.to(po.device()))
        if weights is not None and batch.weights is not None:
            assert weights.grad is not None
            (of_weights,) = torch.autograd.grad(wanted, batch.weights, gradient)
            right &= torch.allclose(weights.grad.cpu(), of_weights, rtol=2e-5, atol=2e-5)
        reference.step(po.world_size(), step)
        seen.append(right)
    return [seen, result.keys()]


@pytest.mark.parametrize("name", ["shared", "weighted"])
def test_keyed_jagged_tensors(backend: str, name: str) -> None:
    keys = {"shared": ["x@a", "y@a", "z", "x@b", "y@c"], "weighted": ["x", "y", "z", "w"]}[name]
    assert in_world(_of_jagged, 2, backend, name) == [[[True] * 3, keys]] * 2


class _Collection:
    """An object with EmbeddingBagCollection's methods."""

    def __init__(self) -> None:
        self._configs = [
            _config("a", 11, 8, ["x"], pooling=PoolingType.MEAN),
            _config("b", 5, 4, ["y"], data_type=DataType.BF16, weight_init_max=0.5),
        ]

    def embedding_bag_configs(self) -> list[Any]:
        return self._configs

    def is_weighted(self) -> bool:
        return False

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, torch.nn.Parameter(rows)) for name, rows in self.state_dict().items()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        shapes = {each.name: (each.num_embeddings, each.embedding_dim) for each in self._configs}
        return {
            f"embedding_bags.{name}.weight": torch.arange(shape[0] * shape[1]).float().view(shape)
            for name, shape in shapes.items()
        }


class _Parameter:
    """An object with ParameterSharding's attributes."""

    def __init__(self, kind: str, ranks: list[int], widths: list[int], **more: Any) -> None:
        self.sharding_type, self.ranks = kind, ranks
        self.compute_kernel = "fused"
        self.__dict__ |= more
        self.sharding_spec = SimpleNamespace(shards=[SimpleNamespace(shard_sizes=[1, width]) for width in widths])


def _from_collection() -> list[Any]:
    plan = {
        "other.path": {"c": None},
        "model.ebc": {"a": _Parameter("column_wise", [1, 0], [4, 4]), "b": _Parameter("table_wise", [1], [4])},
    }
    collection = _Collection()
    placement = SimpleNamespace(plan=plan)
    module = po.nn.ShardedEmbeddingBagCollection.from_collection(collection, max_batch=4, placement=placement)
    whole = collection.state_dict()
    here = {}
    for name, shards in module.state_dict().items():
        for (row, column), block in shards.shards:
            wanted = whole[name][row : row + block.shape[0], column : column + block.shape[1]]
            assert torch.equal(block.cpu().float(), wanted)
        here[name] = [tuple(offsets) for offsets, _ in shards.shards]
    configs = module.embedding_bag_configs()
    names = [name for name, _ in module.named_parameters()]
    return [here, names, configs[0].pooling, configs[1].data_type, configs[1].init_bounds[1], module.is_weighted()]


def test_in_place_of_a_collection(backend: str) -> None:
    first, second = in_world(_from_collection, 2, backend)
    names = ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    assert first == [{names[0]: [(0, 4)], names[1]: []}, names, "mean", torch.bfloat16, 0.5, False]
    assert second[0] == {names[0]: [(0, 0)], names[1]: [(0, 0)]}


# ---- placement -------------------------------------------------------------------------------------------------------


def _placed(configs: Any, placement: Any, lookups: dict[str, float], world: int) -> Layout:
    placements = placements_of(configs, placement)
    return place(configs, placements, bytes_read(configs, placements, lookups, world), lookups, world)


def _orders_of_tasks() -> list[tuple[int, int]]:
    """Return for each plan how many tables run beside the others, and how many there are."""
    case = next(case for case in CASES if case.name == "many lookups beside few")
    case = replace(case, placement={name: TablePlacement(ranks=(0,)) for name in "abcd"})
    module, batch = case.make(), batch_of(case, 0, 0)
    split = [samples_of(0, 0)] * po.world_size()
    waiting = []  # after a forward pass that waits, lookups are copied
    for knows_split in (split, None):
        waiting.append(module(batch.values.to(po.device()), batch.lengths.to(po.device()), batch_per_rank=knows_split))
    orders = [plan._struct.order for plan in OPERATOR.state(po_world.current()).plans.values()]
    return [(order.num_beside, order.num_tables) for order in orders]


@pytest.mark.parametrize(("transport", "expected"), [("auto", [(2, 4), (0, 4)]), ("staged", [(0, 4), (0, 4)])])
def test_tables_with_many_lookups_run_beside_the_others(transport: str, expected: list[tuple[int, int]]) -> None:
    """Where an exchange with reliable estimates brings the lookups, and all peers are reachable."""
    first, second = in_world(_orders_of_tasks, 2, "host", transport=transport)
    assert first == expected and {beside for beside, _ in second} == {0}


def test_the_costliest_are_placed_first() -> None:
    configs = table_configs([("a", 9, 64, ["x"]), ("b", 9, 16, ["y"]), ("c", 9, 16, ["z"]), ("d", 9, 8, ["x", "z"])])
    lookups = {"x": 1.0, "y": 3.0, "z": 1.0}
    layout = _placed(configs, "table_wise", lookups, 2)
    assert layout.owners == ((0,), (1,), (1,), (1,))  # 256, 192, 64 and 64 bytes; PE 1 holds less than PE 0
    assert layout.loads == (256.0, 320.0)
    sliced = {"a": TablePlacement("column_wise", 4), "d": TablePlacement(ranks=(2,))}
    layout = _placed(configs, sliced, lookups, 3)
    assert layout.owners == ((1, 2, 1, 2), (0,), (1,), (2,))
    assert layout.features == ("x", "y", "z") and layout.names == ("x@a", "y", "z@c", "x@d", "z@d")
    assert sum(map(len, layout.groups[0].slots)) == 8 and layout.groups[0].dim_per_rank == (16, 48, 48)


# ---- clamped gradients -----------------------------------------------------------------------------------------------


_MOST = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float32: 3.4028234663852886e38}
_CLAMPED: dict[str, tuple[torch.dtype, torch.dtype | None, float, float, float]] = {
    # dtype, wire dtype, max_gradient; a gradient's elements; what a step of lr=1 makes of them
    "infinite, beyond float16": (torch.float16, None, 40_000.0, math.inf, _MOST[torch.float16] / 2),
    "infinite, beyond a wire of bfloat16": (torch.float32, torch.bfloat16, 3e38, math.inf, _MOST[torch.bfloat16] / 2),
    "infinite, beyond float32": (torch.float32, None, 3e38, -math.inf, -_MOST[torch.float32] / 2),
    "rounded down on a wire of bfloat16": (torch.float32, torch.bfloat16, 0.1, 100.0, 0.099609375),
    "rounded down in float16": (torch.float16, None, 0.3, -100.0, -0.2998046875),
    "as it is in float32": (torch.float32, None, 0.1, 100.0, torch.tensor(0.1).item()),
    "no bound": (torch.float32, None, math.inf, math.inf, math.inf),
    "no number": (torch.float16, None, 0.1, math.nan, math.nan),
}


def _clamped_step(placement: str) -> list[str]:
    """Return the cases in which elements of rows differ from the expected ones after a step."""
    wrong = []
    for name, (dtype, wire, bound, element, expected) in _CLAMPED.items():
        if placement == "replicated" and dtype == torch.float16:
            continue  # which is refused
        config = po.nn.TableConfig("t", 4, 8, ["x"], "sum", dtype, init_fn=torch.nn.init.zeros_)
        module = po.nn.ShardedEmbeddingBagCollection(
            [config], max_batch=2, lr=1.0, max_gradient=bound, wire_dtype=wire, placement=placement
        )
        pooled = module(*(torch.tensor([each], device=po.device()) for each in (po.rank(), 1)))
        pooled.backward(torch.full_like(pooled, element))
        for _, block in module.state_dict()["embedding_bags.t.weight"].shards:
            rows = block[:2].cpu()
            wanted = torch.full_like(rows, -expected)
            if not torch.equal(rows.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0)):
                wrong.append(f"{name}: {rows.tolist()}, expected {-expected}")
    po.check()
    return wrong


@pytest.mark.parametrize("placement", ["table_wise", "replicated"])
def test_what_is_sent_of_a_gradient_is_at_most_the_bound(backend: str, placement: str) -> None:
    """Each of two PEs has a row of its own, and divides its gradient by two."""
    assert in_world(_clamped_step, 2, backend, placement) == [[], []]


# ---- room for lookups ------------------------------------------------------------------------------------------------


def _refused_together() -> list[Any]:
    """Two groups of tables need more room, and the second finds none. Then the first one alone needs more."""
    tables = [("a", 10, 4, ["x"], "sum"), ("b", 10, 4, ["y"], "mean")]
    module = po.nn.ShardedEmbeddingBagCollection(tables, max_batch=1, lookups_per_sample=1.0)
    seen = []
    for lengths in ([1000, 2_000_000], [1000, 1]):
        before = [inputs.capacity for inputs in module._inputs], po_world.current().heap.free_list.free_bytes
        given = torch.ones(sum(lengths), dtype=torch.int64), torch.tensor(lengths)
        failure = error_of(functools.partial(module, *(each.to(po.device()) for each in given)))[0]
        after = [inputs.capacity for inputs in module._inputs], po_world.current().heap.free_list.free_bytes
        seen.append((failure, after == before, [now == then for now, then in zip(after[0], before[0], strict=True)]))
    po.check()
    return seen


def test_groups_of_tables_get_more_room_together_or_none(backend: str) -> None:
    wants = [("SymmetricHeapError", True, [True, True]), ("", False, [False, True])]
    assert in_world(_refused_together, 2, backend, heap_size=16 << 20) == [wants] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------

_PLAIN = [("a", 10, 8, ["x"]), ("b", 5, 4, ["y"])]
_MADE: dict[str, tuple[dict[str, Any], str, str]] = {
    "row_wise": ({"placement": {"b": _Parameter("row_wise", [0], [])}}, "NotImplementedError", "'row_wise', of b"),
    "grid_shard": ({"placement": {"a": "grid_shard"}}, "NotImplementedError", "'grid_shard', of a"),
    "host memory": (
        {"placement": {"b": _Parameter("table_wise", [0], [4], compute_kernel="fused_uvm")}},
        "NotImplementedError",
        "compute_kernel 'fused_uvm', of b",
    ),
    "rounding": (
        {"placement": {"b": _Parameter("table_wise", [0], [4], stochastic_rounding=True)}},
        "NotImplementedError",
        "stochastic_rounding of b",
    ),
    "ranks of replicas": (
        {"placement": {"a": TablePlacement("replicated", ranks=(0,))}},
        "ValueError",
        "a: expected no ranks for replicated",
    ),
    "slices of replicas": (
        {"placement": {"a": TablePlacement("replicated", 2)}},
        "ValueError",
        "a: expected one slice for replicated, got 2",
    ),
    "no number": ({"placement": "column_wise"}, "ValueError", "num_slices="),
    "uneven": (
        {"placement": {"a": TablePlacement("column_wise", 3)}},
        "ValueError",
        "a: expected a number of slices that divides its 8 columns",
    ),
    "uneven plan": (
        {"placement": {"a": _Parameter("column_wise", [0, 0], [6, 2])}},
        "NotImplementedError",
        "[6, 2] columns",
    ),
    "nobody": ({"placement": {"a": TablePlacement(ranks=(1,))}}, "ValueError", "a is on PE 1"),
    "slices of a whole": ({"placement": {"a": TablePlacement(num_slices=2)}}, "ValueError", "one slice for table_wise"),
    "ranks of others": (
        {"placement": {"a": TablePlacement("column_wise", 2, (0,))}},
        "ValueError",
        "2 ranks, one per slice",
    ),
    "unknown": ({"placement": {"c": "table_wise"}}, "ValueError", "['c']"),
    "a number": ({"placement": 3}, "TypeError", "ShardingPlan, got int"),
    "no plan of it": ({"placement": SimpleNamespace(plan={"m": {"c": 1}})}, "ValueError", "one module"),
    "another plan": ({"placement": {"a": 3}}, "TypeError", "got int"),
    "rounding of no table": ({"rounding": "stochastic"}, "ValueError", "tables of 16 bits, but all are float32"),
    "unknown rounding": ({"rounding": "up"}, "ValueError", "rounding: expected one of 'nearest', 'stochastic'"),
    "no tables": ({"tables": []}, "ValueError", "at least one"),
    "names": ({"tables": [_PLAIN[0], _PLAIN[0]]}, "ValueError", "occur once"),
    "dots": ({"tables": [("a.b", 3, 4, ["x"])]}, "ValueError", "without dots"),
    "no rows": ({"tables": [("a", 0, 4, ["x"])]}, "ValueError", "rows: expected a whole number of at least 1, got 0"),
    "rows of no number": ({"tables": [("a", 2.5, 4, ["x"])]}, "ValueError", "rows: expected a whole number"),
    "columns": ({"tables": [("a", 2, True, ["x"])]}, "ValueError", "columns: expected a whole number of at least 1"),
    "a module's name": ({"tables": [("type", 2, 4, ["x"])]}, "ValueError", "'type' is an attribute of torch.nn.Module"),
    "a module's state": (
        {"tables": [("training", 2, 4, ["x"])]},
        "ValueError",
        "'training' is an attribute of torch.nn.Module",
    ),
    "range": ({"tables": [("a", 2, 4, ["x"], "sum", torch.float32, (1.0, -1.0))]}, "ValueError", "init_range"),
    "features": ({"tables": [("a", 2, 4, "xy")]}, "ValueError", "names of features"),
    "pooling": ({"tables": [_config("a", 2, 4, ["x"], pooling=PoolingType.NONE)]}, "ValueError", "pooling"),
    "dtype": ({"tables": [_config("a", 2, 4, ["x"], data_type=DataType.INT8)]}, "TypeError", "float32, float16"),
    "virtual": (
        {"tables": [_config("a", 2, 4, ["x"], use_virtual_table=True)]},
        "NotImplementedError",
        "virtual tables",
    ),
    "no config": ({"tables": [3]}, "TypeError", "got int"),
    "norm": ({"max_grad_norm": 1.0}, "NotImplementedError", "max_grad_norm"),
    "clamp": ({"max_gradient": 0.0}, "ValueError", "max_gradient"),
    "estimates": ({"lookups_per_sample": {"x": 1.0}}, "ValueError", "lookups_per_sample"),
    "weighted mean": ({"tables": [("a", 2, 4, ["x"], "mean")], "is_weighted": True}, "ValueError", "is_weighted"),
    "estimates below 0": (
        {"lookups_per_sample": -1},
        "ValueError",
        "lookups_per_sample: expected numbers of at least 0",
    ),
    "batch": ({"max_batch": 4.5}, "ValueError", "max_batch: expected a whole number of 0 to 2147483647, got 4.5"),
    "batch of replicas": ({"max_batch": -1, "placement": "replicated"}, "ValueError", "max_batch: expected"),
    "bounds": ({"bounds": "Fatal", "placement": "replicated"}, "ValueError", "bounds: expected one of ('fatal', 'ig"),
    "seed": ({"seed": 1.5}, "ValueError", "seed: expected a whole number, got 1.5"),
    "optimizer": ({"optimizer": "lamb"}, "ValueError", "optimizer"),
    "wire": ({"wire_dtype": torch.float16}, "TypeError", "wire_dtype"),
    "float16 replicas": (
        {"tables": [("a", 10, 8, ["x"], "sum", torch.float16)], "placement": "replicated"},
        "NotImplementedError",
        "a is float16",
    ),
    "wire of 16-bit tables": (
        {"tables": [("a", 2, 4, ["x"], "sum", torch.bfloat16)], "wire_dtype": torch.bfloat16},
        "TypeError",
        "wire_dtype",
    ),
}


def _refused() -> dict[str, tuple[str, str]]:
    seen = {}
    make = po.nn.ShardedEmbeddingBagCollection
    for name, (changed, _, _) in _MADE.items():
        given = {"tables": _PLAIN, "max_batch": 4, **changed}
        seen[name] = error_of(lambda given=given: make(given.pop("tables"), **given))[:2]  # type: ignore[misc]
    return seen


def test_what_it_cannot_be_made_of() -> None:
    (seen,) = in_world(_refused, 1, "host")
    for name, (_, kind, told) in _MADE.items():
        assert seen[name][0] == kind and told in seen[name][1], f"{name}: {seen[name]}"


def _called(placement: str) -> list[str]:
    """Return the errors that are missing or wrong."""
    module, split = replace(_SHARED, placement=placement).make(), "batch_per_rank"
    values, lengths = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    jagged = _jagged(_SHARED, 0, 0, [0, 1, 2])
    variable = _jagged(_SHARED, 0, 0, [0, 1, 2])
    variable.is_variable = True
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    model = torch.nn.Module()
    model.inner = type("DistributedModelParallel", (torch.nn.Module,), {})()
    sharded = type("ShardedEmbeddingBagCollection", (), {})()
    weighted = _WEIGHTED.make()
    factors = torch.ones(1, requires_grad=True)
    four = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    trained = _Detaching(list("yxzw"), [four[0][:1]] * 4, [four[1][:1]] * 4, [factors] * 4)

    def twice() -> None:
        result = module(values, lengths).sum()
        result.backward()
        result.backward()

    tried = (
        (lambda: module(variable), "NotImplementedError", "variable batch per feature"),
        (lambda: module(values), "TypeError", "got Tensor alone"),
        (lambda: module(jagged.permute([0, 1])), "ValueError", "lacks ['z']"),
        (lambda: module([0, 2, 1], lengths), "TypeError", "values: expected a tensor, got list"),
        (lambda: module(values.numpy(), lengths), "TypeError", "values: expected a tensor, got ndarray"),
        (
            lambda: module(values.repeat(2)[::2], lengths),
            "ValueError",
            "values: expected a contiguous tensor; pass",
        ),
        (lambda: module(values.float(), lengths), "TypeError", "values: expected"),
        (lambda: module(values.view(1, 3), lengths), "ValueError", "values: expected a 1-D tensor on cpu, got 2-D"),
        (lambda: module(values, lengths[:2]), "ValueError", "F * B elements for F = 3"),
        (lambda: module(jagged, per_sample_weights=values.float()), "ValueError", "its own"),
        (lambda: module(values, lengths, per_sample_weights=values.float()), "ValueError", "is_weighted"),
        (
            lambda: module(values, lengths, batch_per_rank=[2]),
            "ValueError",
            f"{split}: entry 0 is 2, but lengths has 1",
        ),
        (lambda: module(values, lengths, batch_per_rank=[1, 1]), "ValueError", f"{split}: expected 1 numbers of 0 to"),
        (lambda: weighted(*four), "ValueError", "is_weighted"),
        (lambda: weighted(trained), "NotImplementedError", "in the order ['x', 'y', 'z', 'w']"),
        (lambda: module(values + 1000, lengths), "IndexError", "index 1000"),
        (lambda: module(values.repeat(30), lengths.repeat(30)), "ValueError", "max_batch = 16"),
        (lambda: scaler.step(module.optimizer), "NotImplementedError", "GradScaler"),
        (lambda: module.optimizer.step(lambda: 0.0), "NotImplementedError", "closure"),
        (lambda: module.optimizer.add_param_group({"params": [values]}), "NotImplementedError", "param_groups"),
        (module.half, "NotImplementedError", "embedding_bags.a.weight"),
        (lambda: torch.nn.Sequential(module).to("meta"), "NotImplementedError", "cannot become torch.float32 on meta"),
        (lambda: ignore_sharded_tables(model), "NotImplementedError", "DistributedModelParallel"),
        (lambda: module.from_collection(sharded, max_batch=4), "NotImplementedError", "ShardedEmbeddingBagCollection"),
        (twice, "RuntimeError", "second"),
    )
    found = [(error_of(action)[:2], kind, told) for action, kind, told in tried]
    module.to(po.device()).float()
    assert module(values, lengths, batch_per_rank=[np.int64(1)]).shape == (1, 40), "after all that"
    return [f"{seen}: expected {kind}, {told}" for seen, kind, told in found if seen[0] != kind or told not in seen[1]]


@pytest.mark.parametrize("placement", ["table_wise", "replicated"])
def test_what_it_cannot_be_called_with(placement: str) -> None:
    assert in_world(_called, 1, "host", placement) == [[]]


def _disagreed() -> list[tuple[str, str]]:
    """Make collections with different arguments on each PE, and other collective parts; then an equal one."""
    rank, is_first = po.rank(), po.rank() == 0
    a, b = po.nn.TableConfig("a", 100, 8, ["x"]), po.nn.TableConfig("b", 100, 8, ["y"], "mean")
    make = functools.partial(po.nn.ShardedEmbeddingBagCollection, max_batch=4)
    lookups = 1e-3 if is_first else 1e5  # by which "auto" places tables differently
    tried = (
        lambda: make([a, ("b", 5, 4 + 4 * rank, ["y"])]),
        lambda: make([a], lr=0.1 * (1 + rank)),
        lambda: make([a] if is_first else [a, b]),
        lambda: make([a], placement="table_wise" if is_first else "replicated"),
        lambda: make([a], placement="table_wise" if is_first else "auto"),
        lambda: make([a, b], placement="auto", lookups_per_sample=lookups),
        lambda: make([a, b], placement="table_wise", lookups_per_sample=lookups),
    )
    told = [error_of(each)[:2] for each in tried]
    batch = batch_of(_SHARED, rank, 0)
    assert _SHARED.make()(batch.values.to(po.device()), batch.lengths.to(po.device())).shape[1] == 40
    return told


def test_pes_that_pass_different_tables_or_numbers(backend: str) -> None:
    for told in in_world(_disagreed, 2, backend):
        assert [kind for kind, _ in told] == ["ValueError"] * 7
        differing = ["tables", "lr", "tables", "placement", "placement", "lookups_per_sample", "lookups_per_sample"]
        starts = [f"{name}: expected the same on all PEs, got " for name in differing]
        assert all(text.startswith(start) for (_, text), start in zip(told, starts, strict=True)), told


# ---- lookups ahead ---------------------------------------------------------------------------------------------------


def _ahead(name: str) -> list[str]:
    """Train with lookups sent after the previous forward pass; return what differs from one process."""
    case = next(case for case in CASES if case.name == name)
    module, reference = case.make(gradient_scale=1.0), Reference(case)
    problems = []

    def send(step: int) -> Any:
        batch = batch_of(case, po.rank(), step)
        split = [samples_of(pe, step) for pe in range(po.world_size())]
        return module.input_dist(batch.values.to(po.device()), batch.lengths.to(po.device()), batch_per_rank=split)

    sent = send(0)
    for step in range(6):
        result = module(sent)
        sent = send(step + 1)
        if not torch.allclose(
            result.detach().cpu(), reference.forward(batch_of(case, po.rank(), step)).detach(), rtol=2e-5, atol=2e-5
        ):
            problems.append(f"step {step}")
        result.backward(gradient_of(case, po.rank(), step).to(po.device()))
        reference.step(po.world_size(), step)
    sent.release()
    with torch.no_grad():  # a batch that was given up is no other one's
        plain = module(_jagged(case, po.rank(), 2, [1, 0, 2])).values()
        jagged = module.input_dist(_jagged(case, po.rank(), 2, [1, 0, 2]))
        problems += [] if torch.equal(module(jagged).values(), plain) else ["keyed"]
    po.check()
    return problems


@pytest.mark.parametrize("name", ["slices", "adagrad", "replicated beside slices"])
def test_lookups_ahead_are_those_of_one_process(backend: str, name: str) -> None:
    assert in_world(_ahead, 3, backend, name) == [[]] * 3


def _ahead_refused() -> list[Any]:
    module, batch = _SHARED.make(), batch_of(_SHARED, po.rank(), 0)
    given = (batch.values, batch.lengths)
    seen = []
    with torch.no_grad():
        sent = module.input_dist(*given)
        seen.append(error_of(lambda: module.input_dist(*given)))
        seen.append(error_of(lambda: module(*given)))
        seen.append(error_of(lambda: module(sent, batch.lengths)))
        module(sent)
        seen.append(error_of(lambda: module(sent)))
        given_up = module.input_dist(*given)
        given_up.release()
        seen.append(error_of(lambda: module(given_up)))
        same = torch.equal(module(*given), module(module.input_dist(*given)))
    return [[(name, text) for name, text, *_ in seen], same]


def test_what_cannot_be_sent_or_pooled() -> None:
    wanted = [
        ("RuntimeError", "what input_dist has sent has not been pooled"),
        ("RuntimeError", "what input_dist has sent has not been pooled"),
        ("ValueError", "they were given to input_dist"),
        ("RuntimeError", "expected what the last call of this module's input_dist returned"),
        ("RuntimeError", "pooled or released"),
    ]
    for seen, same in in_world(_ahead_refused, 2, "host"):
        assert same
        for (kind, text), (name, told) in zip(seen, wanted, strict=True):
            assert kind == name and told in text
