"""Collections of tables for tests, batches for them, and a model in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from serially import serially
from torch.nn import functional as F

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement

__all__ = [
    "CASES",
    "Batch",
    "Case",
    "PlainCollection",
    "Reference",
    "batch_of",
    "blocks_of",
    "gradient_of",
    "one_each",
    "one_table",
    "samples_of",
]


@dataclass(frozen=True)
class Case:
    """A collection.

    Attributes:
        tables: of it.
        placement: of it.
        optimizer: its name.
        is_weighted: whether lookups have weights.
        max_length: of a bag.
        index_dtype: of values and lengths.
    """

    name: str
    tables: Sequence[TableConfig]
    placement: Any = "table_wise"
    optimizer: str = "sgd"
    is_weighted: bool = False
    max_length: int = 5
    index_dtype: torch.dtype = torch.int64
    options: dict[str, Any] = field(default_factory=dict)

    def features(self) -> list[str]:
        return list(dict.fromkeys(name for table in self.tables for name in table.feature_names))

    def make(self, **options: Any) -> po.nn.ShardedEmbeddingBagCollection:
        """Make it; collective."""
        chosen = {"max_batch": 16, "lookups_per_sample": 3.0, "lr": 0.5, "seed": 3, **self.options, **options}
        return po.nn.ShardedEmbeddingBagCollection(
            self.tables,
            placement=self.placement,
            optimizer=self.optimizer,
            is_weighted=self.is_weighted,
            **chosen,
        )


_PLAIN = [
    TableConfig("a", 40, 8, ["x"]),
    TableConfig("b", 7, 4, ["y"]),
    TableConfig("c", 3, 12, ["z"]),
    TableConfig("d", 50, 4, ["w"]),
]
_SHARED = [
    TableConfig("a", 30, 8, ["x", "y"]),
    TableConfig("b", 9, 4, ["z", "x"]),
    TableConfig("c", 1, 16, ["y"]),
]
_MIXED = [
    TableConfig("a", 30, 8, ["x"], "mean"),
    TableConfig("b", 9, 4, ["y"]),
    TableConfig("c", 12, 16, ["z"], "mean"),
    TableConfig("d", 12, 8, ["x"], "sum", torch.bfloat16),
    TableConfig("e", 5, 4, ["w"]),
]
_DTYPES = [
    TableConfig("a", 30, 8, ["x", "y"]),
    TableConfig("b", 9, 8, ["x", "z"], "sum", torch.bfloat16),
    TableConfig("c", 12, 16, ["y"]),
]
_EQUAL = [TableConfig("a", 30, 8, ["x", "y"]), TableConfig("b", 9, 8, ["z", "x"]), TableConfig("c", 1, 16, ["y"])]
_SLICED = {"a": TablePlacement("column_wise", 2), "c": TablePlacement("column_wise", 4)}
CASES = [
    Case("plain", _PLAIN),
    Case("one table", _PLAIN[:1], index_dtype=torch.int32),
    Case("shared", _SHARED),
    Case("mixed", _MIXED),
    Case("weighted", _PLAIN, is_weighted=True),
    Case("weighted slices", _SHARED, _SLICED, "adagrad", is_weighted=True),
    Case("weighted, of two dtypes", _DTYPES, _SLICED, is_weighted=True, index_dtype=torch.int32),
    Case("weighted slices beside replicas", _DTYPES, {**_SLICED, "b": "replicated"}, is_weighted=True),
    Case("weighted replicas", _EQUAL, "replicated", "adagrad", is_weighted=True),
    Case("on the last", _PLAIN, {name: TablePlacement(ranks=(-1,)) for name in "abcd"}),
    Case("slices", _SHARED, _SLICED),
    Case("many lookups beside few", _PLAIN, options={"lookups_per_sample": {"x": 1.0, "y": 5.0, "z": 2.0, "w": 9.0}}),
    Case("slices, mixed", _MIXED, _SLICED, index_dtype=torch.int32),
    Case("adagrad", _SHARED, _SLICED, "adagrad"),
    Case("bf16 on the wire", _MIXED, _SLICED, options={"wire_dtype": torch.bfloat16}),
    Case("auto", _MIXED, "auto"),
    Case("replicated", _PLAIN, "replicated"),
    Case("replicated beside slices", _SHARED, {**_SLICED, "b": "replicated"}, "adagrad"),
    Case("replicated, mixed", _MIXED, {"a": "replicated", "b": "table_wise", "d": "replicated", "e": "replicated"}),
    Case(
        "replicated, weighted",
        _PLAIN,
        {"a": "replicated", "c": "replicated"},
        is_weighted=True,
        options={"lookups_per_sample": 0.25},  # the exchange enlarges its room
    ),
]


def samples_of(rank: int, step: int) -> int:
    """Return the number of samples of a PE in a step, sometimes zero."""
    return 0 if (rank, step) == (0, 1) else 2 + (3 * rank + step) % 4


@dataclass(frozen=True)
class Batch:
    """One PE's lookups."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


@serially
def batch_of(case: Case, rank: int, step: int) -> Batch:
    """Return a PE's lookups, on the CPU."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    samples = samples_of(rank, step)
    names = case.features()
    lengths = torch.randint(0, case.max_length + 1, (len(names) * samples,), generator=rng)
    rows = [min(table.num_embeddings for table in case.tables if name in table.feature_names) for name in names]
    limits = torch.tensor(rows).repeat_interleave(samples).repeat_interleave(lengths)
    values = torch.randint(0, 1 << 30, limits.shape, generator=rng) % limits
    weights = torch.randint(-3, 4, limits.shape, generator=rng).float() if case.is_weighted else None
    return Batch(values.to(case.index_dtype), lengths.to(case.index_dtype), weights)


@serially
def gradient_of(case: Case, rank: int, step: int) -> torch.Tensor:
    """Return the gradient of a PE's result: whole numbers."""
    rng = torch.Generator().manual_seed(7000 + 100 * step + rank)
    columns = sum(table.embedding_dim * len(table.feature_names) for table in case.tables)
    return torch.randint(-4, 5, (samples_of(rank, step), columns), generator=rng).float()


class _ByRows:
    """Adam, or row-wise Adagrad with a mean for each slice, applied to the looked-up rows."""

    def __init__(
        self,
        tables: dict[str, torch.Tensor],
        optimizer: str,
        lr: float,
        slices: dict[str, int],
        touched: dict[str, set[int]],
    ) -> None:
        self._tables, self._lr, self._slices, self._touched = tables, lr, slices, touched
        self._is_adam, self._num_steps = optimizer == "adam", 0
        # By the names in state dicts.
        self.states: dict[str, torch.Tensor] = {}
        for name, table in tables.items():
            shape = table.shape if self._is_adam else (slices[name], len(table))
            self.states[f"{name}.momentum1"] = torch.zeros(shape)
            if self._is_adam:
                self.states[f"{name}.exp_avg_sq"] = torch.zeros(shape)

    def zero_grad(self) -> None:
        for name, table in self._tables.items():
            table.grad = None
            self._touched[name].clear()

    @torch.no_grad()
    def step(self) -> None:
        self._num_steps += 1
        for name, table in self._tables.items():
            rows = sorted(self._touched[name])
            if not rows:
                continue
            assert table.grad is not None
            g, first = table.grad[rows], self.states[f"{name}.momentum1"]
            if self._is_adam:
                second = self.states[f"{name}.exp_avg_sq"]
                first[rows] = 0.9 * first[rows] + 0.1 * g
                second[rows] = 0.999 * second[rows] + 0.001 * g * g
                mean, square = first[rows] / (1 - 0.9**self._num_steps), second[rows] / (1 - 0.999**self._num_steps)
                table[rows] -= self._lr * mean / (square.sqrt() + 1e-8)
                continue
            parts = g.view(len(rows), self._slices[name], -1)
            first[:, rows] += parts.square().mean(2).T
            table[rows] -= (self._lr * parts / (first[:, rows].T.sqrt() + 1e-8)[..., None]).flatten(1)


class Reference:
    """The tables in one process, with embedding_bag and torch.optim.

    Attributes:
        tables: by name, float32.
    """

    @serially
    def __init__(self, case: Case, lr: float = 0.5, seed: int = 3) -> None:
        self._case = case
        self.tables: dict[str, torch.Tensor] = {}
        for number, table in enumerate(case.tables):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + 1 + number)
            bound = 1.0 / math.sqrt(table.num_embeddings)
            drawn = torch.empty(table.num_embeddings, table.embedding_dim).uniform_(-bound, bound, generator=generator)
            self.tables[table.name] = drawn.to(table.data_type).float().requires_grad_()
        self.touched: dict[str, set[int]] = {table.name: set() for table in case.tables}
        if case.optimizer in ("adam", "rowwise_adagrad"):
            slices = {name: getattr(case.placement.get(name), "num_slices", 1) for name in self.tables}
            self.optimizer: Any = _ByRows(self.tables, case.optimizer, lr, slices, self.touched)
            return
        options = {} if case.optimizer == "sgd" else {"eps": 1e-8}
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[case.optimizer]
        self.optimizer = kind(self.tables.values(), lr=lr, **options)  # type: ignore[operator]

    @serially
    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the pooled rows, float32."""
        names = self._case.features()
        per_feature = batch.lengths.long().unflatten(0, (len(names), -1))
        counts = per_feature.sum(1).tolist()
        split = dict(zip(names, batch.values.long().split(counts), strict=True))
        weights = None if batch.weights is None else dict(zip(names, batch.weights.split(counts), strict=True))
        pooled = []
        for table in self._case.tables:
            for name in table.feature_names:
                self.touched[table.name].update(split[name].tolist())
                pooled.append(
                    F.embedding_bag(
                        split[name],
                        self.tables[table.name],
                        F.pad(per_feature[names.index(name)].cumsum(0), (1, 0)),
                        mode=table.pooling,
                        per_sample_weights=None if weights is None else weights[name],
                        include_last_offset=True,
                    )
                )
        return torch.cat(pooled, 1)

    @serially
    def step(self, world: int, step: int, scale: float = 1.0) -> None:
        """Train with all PEs' samples."""
        self.optimizer.zero_grad()
        for rank in range(world):
            result = self.forward(batch_of(self._case, rank, step))
            result.backward(gradient_of(self._case, rank, step) * scale)
        self.optimizer.step()
        for table in self._case.tables:
            if table.data_type != torch.float32:
                tensor = self.tables[table.name]
                with torch.no_grad():
                    tensor.copy_(tensor.to(table.data_type).float())


def blocks_of(module: po.nn.ShardedEmbeddingBagCollection) -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return this PE's blocks of every table and state, with their current values."""
    named = dict(module.state_dict())
    for of_table in module.optimizer.state_dict()["state"].values():
        named |= of_table
    return {
        name: [(tuple(offsets), block.cpu().clone()) for offsets, block in shards.shards]
        for name, shards in named.items()
    }


def one_table(placement: str = "table_wise", **options: Any) -> po.nn.ShardedEmbeddingBagCollection:
    """Make a collection of one table; collective."""
    config = TableConfig("a", 13, 8, ["x"])
    return po.nn.ShardedEmbeddingBagCollection([config], max_batch=8, placement=placement, lr=0.5, **options)


def one_each(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lookups of one sample each."""
    return torch.tensor(values), torch.ones(len(values), dtype=torch.int64)


class PlainCollection(torch.nn.Module):
    """The parts of an EmbeddingBagCollection of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(13, 8) for name in "ab"})

    def embedding_bag_configs(self) -> list[TableConfig]:
        return [TableConfig(name, 13, 8, [f"of {name}"]) for name in "ab"]
