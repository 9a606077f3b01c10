"""Tables of an embedding collection: what they are, which PE has which part, in which order columns come."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..runtime.dtypes import SCALARS

__all__ = ["Group", "Layout", "Slot", "TableConfig", "TablePlacement", "place", "placements_of", "table_configs"]

_POOLINGS = ("sum", "mean")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_KINDS = ("table_wise", "column_wise")
_LATER = {
    "replicated": "gradients of replicated tables have no operator; use 'table_wise' or 'column_wise'",
    "auto": "there is no measured cost to choose by; use 'table_wise', which balances lookups x bytes",
}


@dataclass(frozen=True)
class TableConfig:
    """A table and the features that are looked up in it; TorchRec's EmbeddingBagConfig has the same attributes.

    Attributes:
        name: of the table; no dots.
        num_embeddings: R, its rows.
        embedding_dim: D.
        feature_names: in the order of their columns in the result.
        pooling: "sum" or "mean".
        data_type: float32, float16 or bfloat16.
        init_range: from and to which values first rows are drawn uniformly; None for -1/sqrt(R) and 1/sqrt(R).
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    data_type: torch.dtype = torch.float32
    init_range: tuple[float, float] | None = None

    @property
    def init_bounds(self) -> tuple[float, float]:
        bound = 1.0 / math.sqrt(self.num_embeddings)
        return self.init_range or (-bound, bound)


@dataclass(frozen=True)
class TablePlacement:
    """Where a table lies.

    Attributes:
        kind: "table_wise", whole on one PE, or "column_wise", in slices of equally many columns.
        num_slices: of "column_wise"; part of what is trained under "rowwise_adagrad", whose states are means over a
            slice's columns, so it does not depend on the world.
        ranks: of the PEs that have the slices in turn; None to balance.
    """

    kind: str = "table_wise"
    num_slices: int = 1
    ranks: tuple[int, ...] | None = None


# ---- what is given ---------------------------------------------------------------------------------------------------


def table_configs(given: Iterable[Any]) -> tuple[TableConfig, ...]:
    """Return the configs of tables given as `TableConfig`, as TorchRec's EmbeddingBagConfig, or as tuples.

    Raises:
        ValueError, TypeError: for what a table cannot be.
    """
    configs = tuple(_table_config(number, each) for number, each in enumerate(given))
    if not configs:
        raise ValueError("tables: expected at least one")
    names = [config.name for config in configs]
    for name in names:
        if not name or "." in name or names.count(name) > 1:
            raise ValueError(f"tables: expected names without dots that occur once, got {name!r} among {names}")
    return configs


def _table_config(number: int, given: Any) -> TableConfig:
    if isinstance(given, tuple):
        given = TableConfig(*given)
    try:
        name, rows, dim, features = given.name, given.num_embeddings, given.embedding_dim, given.feature_names
    except AttributeError as error:
        raise TypeError(
            f"tables[{number}]: expected a TableConfig, an EmbeddingBagConfig or a tuple (name, rows, columns, "
            f"features), got {type(given).__name__}: {error}"
        ) from error
    if not (isinstance(rows, int) and isinstance(dim, int) and rows > 0 and dim > 0):
        raise ValueError(f"tables[{number}]: expected whole numbers of rows and columns above 0, got {rows} and {dim}")
    if isinstance(features, str) or not features or len(set(features)) != len(features):
        raise ValueError(f"tables[{number}]: expected names of features that occur once each, got {features!r}")
    pooling = _plain(getattr(given, "pooling", "sum"))
    if pooling not in _POOLINGS:
        raise ValueError(f"tables[{number}]: expected pooling {' or '.join(_POOLINGS)}, got {pooling!r}")
    dtype = getattr(given, "data_type", torch.float32)
    dtype = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(_plain(dtype), dtype)
    if dtype not in SCALARS:
        raise TypeError(f"tables[{number}]: expected float32, float16 or bfloat16, got {dtype}")
    if getattr(given, "use_virtual_table", False) or getattr(given, "total_num_buckets", None):
        raise NotImplementedError(f"tables[{number}]: virtual tables and buckets are not provided")
    bounds = getattr(given, "init_range", None)
    low, high = getattr(given, "weight_init_min", None), getattr(given, "weight_init_max", None)
    if low is not None or high is not None:  # EmbeddingBagConfig: where one is missing, 1 / sqrt(R)
        bound = 1.0 / math.sqrt(rows)
        bounds = (-bound if low is None else low, bound if high is None else high)
    return TableConfig(name, rows, dim, tuple(features), pooling, dtype, bounds)


def _plain(value: Any) -> str:
    """Return an enumeration's value, or the text itself, in small letters."""
    return str(getattr(value, "value", value)).lower()


def placements_of(configs: Sequence[TableConfig], given: Any) -> tuple[TablePlacement, ...]:
    """Return each table's placement.

    Args:
        configs: of the tables.
        given: one for all, a mapping of tables' names, where what is not named is "table_wise", or TorchRec's
            ShardingPlan, or its plan of one module.
    """
    if isinstance(given, (str, TablePlacement)):
        given = {config.name: given for config in configs}
    given = _plan_of_module(configs, given)
    unknown = set(given) - {config.name for config in configs}
    if unknown:
        raise ValueError(f"placement: no tables are called {sorted(unknown)}")
    return tuple(_placement(config, given.get(config.name, "table_wise")) for config in configs)


def _plan_of_module(configs: Sequence[TableConfig], given: Any) -> Mapping[str, Any]:
    plans = getattr(given, "plan", None)
    if plans is None:
        if not isinstance(given, Mapping):
            raise TypeError(f"placement: expected a name, a mapping or a ShardingPlan, got {type(given).__name__}")
        return given
    names = {config.name for config in configs}
    found = {path: plan for path, plan in plans.items() if set(plan) == names}
    if len(found) != 1:
        raise ValueError(
            f"placement: expected one module of the ShardingPlan to have the tables {sorted(names)}, got "
            f"{sorted(found)}; pass plan.plan[path]"
        )
    return next(iter(found.values()))  # type: ignore[no-any-return]


def _placement(config: TableConfig, given: Any) -> TablePlacement:
    name = config.name
    if isinstance(given, TablePlacement):
        kind, count, ranks = given.kind, given.num_slices, given.ranks
    elif isinstance(given, str):
        kind, count, ranks = given, 1, None
    elif hasattr(given, "sharding_type"):  # ParameterSharding
        kind, ranks = _plain(given.sharding_type), tuple(given.ranks or ()) or None
        count = len(ranks or ()) or 1
        shards = getattr(getattr(given, "sharding_spec", None), "shards", None) or []
        widths = [int(shard.shard_sizes[1]) for shard in shards]
        if len(set(widths)) > 1:
            raise NotImplementedError(f"placement: {name} has slices of {widths} columns; expected equally many")
    else:
        raise TypeError(
            f"placement: expected a name, a TablePlacement or a ParameterSharding for {name}, got "
            f"{type(given).__name__}"
        )
    if kind in _LATER:
        raise NotImplementedError(f"placement: {kind!r}, of {name}, is not provided: {_LATER[kind]}")
    if kind not in _KINDS:
        raise NotImplementedError(f"placement: {kind!r}, of {name}, is not provided; expected one of {_KINDS}")
    if isinstance(given, str) and kind == "column_wise":
        raise ValueError(f"placement: {name}: pass TablePlacement('column_wise', num_slices=...)")
    if not isinstance(count, int) or count < 1 or config.embedding_dim % count:
        raise ValueError(f"placement: {config.embedding_dim} columns of {name} do not divide into {count} slices")
    if kind == "table_wise" and count != 1:
        raise ValueError(f"placement: {name} is table_wise, and has {count} slices")
    if ranks is not None and len(ranks) != count:
        raise ValueError(f"placement: {name} has {count} slices, but ranks {ranks}")
    return TablePlacement(kind, count, ranks)


# ---- placing ---------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A feature looked up in a slice of a table.

    Attributes:
        table, slice: numbers; `feature`: in the order of inputs.
        width: columns of the slice.
    """

    table: int
    slice: int
    feature: int
    width: int


@dataclass(frozen=True)
class Group:
    """Tables of equal pooling and dtype, which one call of the operator takes.

    Attributes:
        pooling, dtype: of the tables.
        slots: of every PE, in the order of its tables, slices and features.
    """

    pooling: str
    dtype: torch.dtype
    slots: tuple[tuple[Slot, ...], ...]

    @property
    def dim_per_rank(self) -> tuple[int, ...]:
        return tuple(sum(slot.width for slot in of_pe) for of_pe in self.slots)

    @property
    def columns(self) -> tuple[Slot, ...]:
        """The slots in the order of the operator's columns."""
        return tuple(itertools.chain(*self.slots))


@dataclass(frozen=True)
class Layout:
    """Which PE has which slice, and how results are put together.

    Attributes:
        configs, placements: of the tables.
        features: names, in the order of inputs: as they occur first.
        owners: of every table's slices.
        groups: see `Group`.
        outputs: for every block of the result's columns its group and its number among the group's columns.
        names, dims: of the result's features, and their columns.
        costs: of every PE, in bytes read per sample.
    """

    configs: tuple[TableConfig, ...]
    placements: tuple[TablePlacement, ...]
    features: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    outputs: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    dims: tuple[int, ...]
    costs: tuple[float, ...] = field(compare=False)

    def slices_of(self, table: int, rank: int) -> list[int]:
        """Return the slices of a table that a PE has."""
        return [number for number, owner in enumerate(self.owners[table]) if owner == rank]


def place(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    lookups_per_sample: Mapping[str, float],
    world_size: int,
) -> Layout:
    """Give every slice an owner, the costliest first and each to the PE that has the least so far.

    Args:
        configs: of the tables.
        placements: of each.
        lookups_per_sample: of each feature; a slice's cost is that times the bytes of its rows.
        world_size: number of PEs.
    """
    features = tuple(dict.fromkeys(name for config in configs for name in config.feature_names))
    owners, costs = _owners(configs, placements, lookups_per_sample, world_size)
    keys = list(dict.fromkeys((config.pooling, config.data_type) for config in configs))
    groups = []
    for key in keys:
        of_pes: list[list[Slot]] = [[] for _ in range(world_size)]
        for table, config in enumerate(configs):
            if (config.pooling, config.data_type) == key:
                width = config.embedding_dim // placements[table].num_slices
                for number, owner in enumerate(owners[table]):
                    of_pes[owner] += [Slot(table, number, features.index(f), width) for f in config.feature_names]
        groups.append(Group(*key, tuple(map(tuple, of_pes))))
    at = {
        (slot.table, slot.feature, slot.slice): (number, column)
        for number, group in enumerate(groups)
        for column, slot in enumerate(group.columns)
    }
    outputs, names, dims = [], [], []
    num_tables = {name: sum(name in config.feature_names for config in configs) for name in features}
    for table, config in enumerate(configs):
        for name in config.feature_names:
            outputs += [at[table, features.index(name), n] for n in range(placements[table].num_slices)]
            names.append(f"{name}@{config.name}" if num_tables[name] > 1 else name)  # as EmbeddingBagCollection does
            dims.append(config.embedding_dim)
    return Layout(
        tuple(configs),
        tuple(placements),
        features,
        owners,
        tuple(groups),
        tuple(outputs),
        tuple(names),
        tuple(dims),
        costs,
    )


def _owners(
    configs: Sequence[TableConfig],
    placements: Sequence[TablePlacement],
    lookups_per_sample: Mapping[str, float],
    world_size: int,
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    loads = [0.0] * world_size
    owners: list[list[int]] = [[0] * placement.num_slices for placement in placements]
    free = []
    for table, (config, placement) in enumerate(zip(configs, placements, strict=True)):
        lookups = sum(lookups_per_sample[name] for name in config.feature_names)
        cost = lookups * (config.embedding_dim // placement.num_slices) * config.data_type.itemsize
        for number in range(placement.num_slices):
            if placement.ranks is None:
                free.append((-cost, table, number))
                continue
            owner = placement.ranks[number]
            if not 0 <= owner < world_size:
                raise ValueError(f"placement: {config.name} is on PE {owner}, expected 0 to {world_size - 1}")
            owners[table][number] = owner
            loads[owner] += cost
    for cost, table, number in sorted(free):
        owner = min(range(world_size), key=lambda pe: (loads[pe], pe))
        owners[table][number] = owner
        loads[owner] -= cost
    return tuple(map(tuple, owners)), tuple(loads)
