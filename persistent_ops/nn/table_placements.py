"""Placement of tables of an embedding collection: by names, by `TablePlacement`s, or by TorchRec's plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.arguments import as_whole_number, as_whole_numbers
from .embedding_tables import TableConfig, plain_name

__all__ = ["AUTO", "COLUMN_WISE", "REPLICATED", "TABLE_WISE", "TablePlacement", "placements_of"]

TABLE_WISE, COLUMN_WISE, REPLICATED, AUTO = "table_wise", "column_wise", "replicated", "auto"
_KINDS = (TABLE_WISE, COLUMN_WISE, REPLICATED, AUTO)
_TORCHREC_KINDS = {"data_parallel": REPLICATED, TABLE_WISE: TABLE_WISE, COLUMN_WISE: COLUMN_WISE}
_TORCHREC_KERNELS = ("dense", "fused")
_TORCHREC_OPTIONS = ("cache_params", "key_value_params", "output_dtype", "stochastic_rounding")


@dataclass(frozen=True)
class TablePlacement:
    """Placement of a table.

    Attributes:
        kind: "table_wise": whole on one PE. "column_wise": in slices of equally many columns. "replicated": whole on
            every PE. "auto": chosen by measured costs.
        num_slices: of "column_wise". The number of slices is part of the trained model under "rowwise_adagrad", whose
            states are means over a slice's columns, and under stochastic rounding, which draws per slice. So it does
            not depend on the world.
        ranks: PEs that hold the slices in turn; None to balance the load.
    """

    kind: str = TABLE_WISE
    num_slices: int = 1
    ranks: tuple[int, ...] | None = None


def placements_of(configs: Sequence[TableConfig], given: Any) -> tuple[TablePlacement, ...]:
    """Return each table's placement.

    Args:
        configs: of the tables.
        given: one for all, a mapping of tables' names, where what is not named is "table_wise", or TorchRec's
            ShardingPlan, or its plan of one module.

    Raises:
        ValueError, TypeError: for what no placement can be.
        NotImplementedError: for one that is not supported.
    """
    if isinstance(given, (str, TablePlacement)):
        given = {config.name: given for config in configs}
    given = _plan_of_module(configs, given)
    unknown = set(given) - {config.name for config in configs}
    if unknown:
        raise ValueError(f"placement: expected names of the module's tables, got {sorted(unknown)}")
    return tuple(_placement(config, given.get(config.name, TABLE_WISE)) for config in configs)


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
        chosen = given
    elif isinstance(given, str):
        chosen = TablePlacement(given)
    elif hasattr(given, "sharding_type"):
        chosen = _of_parameter_sharding(name, given)
    else:
        raise TypeError(
            f"placement: expected a name, a TablePlacement or a ParameterSharding for {name}, got "
            f"{type(given).__name__}"
        )
    kind, count, ranks = chosen.kind, chosen.num_slices, chosen.ranks
    count = as_whole_number(count, f"placement: {name}: expected a number of slices, got {count!r}")
    if ranks is not None:
        ranks = as_whole_numbers(ranks, f"placement: {name}: expected a rank for each slice, got {ranks!r}")
    chosen = TablePlacement(kind, count, ranks)
    if kind not in _KINDS:
        raise NotImplementedError(f"placement: {kind!r}, of {name}, is not supported; expected one of {_KINDS}")
    if isinstance(given, str) and kind == COLUMN_WISE:
        raise ValueError(f"placement: {name}: pass TablePlacement('column_wise', num_slices=...)")
    if count < 1 or config.embedding_dim % count:
        raise ValueError(
            f"placement: {name}: expected a number of slices that divides its {config.embedding_dim} columns, "
            f"got {count}"
        )
    if kind != COLUMN_WISE and count != 1:
        raise ValueError(f"placement: {name}: expected one slice for {kind}, got {count}")
    if kind == REPLICATED and config.data_type == torch.float16:
        raise NotImplementedError(
            f"placement: {name} is float16, whose range is too small for sums of gradients; replicated tables "
            "are float32 or bfloat16"
        )
    if ranks is not None and kind in (REPLICATED, AUTO):
        raise ValueError(f"placement: {name}: expected no ranks for {kind}, got {ranks}")
    if ranks is not None and len(ranks) != count:
        raise ValueError(f"placement: {name}: expected {count} ranks, one per slice, got {ranks}")
    return chosen


def _of_parameter_sharding(name: str, given: Any) -> TablePlacement:
    """Return the placement of a TorchRec ParameterSharding; optimizer and rounding are the collection's."""
    torchrec_kind = plain_name(given.sharding_type)
    if torchrec_kind not in _TORCHREC_KINDS:
        raise NotImplementedError(
            f"placement: {torchrec_kind!r}, of {name}, is not supported; expected one of {tuple(_TORCHREC_KINDS)}"
        )
    kernel = plain_name(getattr(given, "compute_kernel", None) or "fused")
    if kernel not in _TORCHREC_KERNELS:
        raise NotImplementedError(
            f"placement: compute_kernel {kernel!r}, of {name}, is not supported: rows lie in the GPU's "
            f"memory; expected one of {_TORCHREC_KERNELS}"
        )
    asked = [option for option in _TORCHREC_OPTIONS if getattr(given, option, None)]
    if asked:
        raise NotImplementedError(
            f"placement: {', '.join(asked)} of {name}: not supported in a ParameterSharding; leave them out"
        )
    kind = _TORCHREC_KINDS[torchrec_kind]
    if kind == REPLICATED:  # on all PEs, whatever its ranks
        return TablePlacement(kind)
    shards = getattr(getattr(given, "sharding_spec", None), "shards", None) or []
    widths = [int(shard.shard_sizes[1]) for shard in shards]
    if len(set(widths)) > 1:
        raise NotImplementedError(f"placement: {name}: expected slices of equal width, got {widths} columns")
    ranks = tuple(given.ranks or ()) or None
    return TablePlacement(kind, len(ranks or ()) or len(shards) or 1, ranks)
