"""Tables of an embedding collection, in the forms that users and TorchRec give."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.arguments import as_number, as_whole_number
from ..runtime.dtypes import SCALARS

__all__ = ["TableConfig", "check_wire", "lookup_estimates", "plain_name", "table_configs", "whole_number"]

_POOLINGS = ("sum", "mean")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TableConfig:
    """A table and the features that are looked up in it; TorchRec's EmbeddingBagConfig has the same attributes.

    Attributes:
        name: of the table; no dots.
        num_embeddings: R, number of rows.
        embedding_dim: D.
        feature_names: in the order of their columns in the result.
        pooling: "sum" or "mean".
        data_type: float32, float16 or bfloat16.
        init_range: lower and upper bound of the uniform initial values; None for -1/sqrt(R) and 1/sqrt(R).
        init_fn: instead of init_range: fills a float32 tensor `[R, D]` on the CPU with torch's default generator, which
            is seeded for it. Each PE that holds a part of the table calls it for the whole table.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    data_type: torch.dtype = torch.float32
    init_range: tuple[float, float] | None = None
    init_fn: Callable[[torch.Tensor], object] | None = field(default=None, repr=False)  # PEs compare what repr says

    @property
    def init_bounds(self) -> tuple[float, float]:
        bound = 1.0 / math.sqrt(self.num_embeddings)
        return self.init_range or (-bound, bound)


# ---- what is given ---------------------------------------------------------------------------------------------------


def table_configs(given: Iterable[Any]) -> tuple[TableConfig, ...]:
    """Return the configs of tables given as `TableConfig`, as TorchRec's EmbeddingBagConfig, or as tuples.

    Raises:
        ValueError, TypeError: for what a table cannot be.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"tables: expected a sequence of configs or tuples, got {type(given).__name__}")
    configs = tuple(_table_config(number, each) for number, each in enumerate(given))
    if not configs:
        raise ValueError("tables: expected at least one")
    names = [config.name for config in configs]
    for name in names:
        if not name or "." in name or names.count(name) > 1:
            raise ValueError(f"tables: expected names without dots that occur once, got {name!r} among {names}")
        if hasattr(torch.nn.ModuleDict(), name):
            raise ValueError(f"tables: {name!r} is an attribute of torch.nn.ModuleDict, so it cannot be a table's name")
    return configs


def _table_config(number: int, given: Any) -> TableConfig:
    try:
        if isinstance(given, tuple):
            given = TableConfig(*given)
        name, rows, dim, features = given.name, given.num_embeddings, given.embedding_dim, given.feature_names
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"tables[{number}]: expected a TableConfig, an EmbeddingBagConfig or a tuple (name, rows, columns, "
            f"features), got {type(given).__name__}: {error}"
        ) from error
    if not isinstance(name, str):
        raise TypeError(f"tables[{number}]: expected a name, got {name!r}")
    rows = whole_number(f"tables[{number}]: rows", rows, 1)
    dim = whole_number(f"tables[{number}]: columns", dim, 1)
    if isinstance(features, str) or not features or len(set(features)) != len(features):
        raise ValueError(f"tables[{number}]: expected names of features that occur once each, got {features!r}")
    if not all(isinstance(feature, str) for feature in features):
        raise TypeError(f"tables[{number}]: expected names of features, got {features!r}")
    pooling = plain_name(getattr(given, "pooling", "sum"))
    if pooling not in _POOLINGS:
        raise ValueError(f"tables[{number}]: expected pooling {' or '.join(_POOLINGS)}, got {pooling!r}")
    dtype = getattr(given, "data_type", torch.float32)
    dtype = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(plain_name(dtype), dtype)
    if dtype not in SCALARS:
        raise TypeError(f"tables[{number}]: expected float32, float16 or bfloat16, got {dtype}")
    if getattr(given, "use_virtual_table", False) or getattr(given, "total_num_buckets", None):
        raise NotImplementedError(
            f"tables[{number}]: virtual tables and buckets are not supported; pass a TableConfig without them"
        )
    bounds = getattr(given, "init_range", None)
    low, high = getattr(given, "weight_init_min", None), getattr(given, "weight_init_max", None)
    if low is not None or high is not None:  # EmbeddingBagConfig: where one is missing, 1 / sqrt(R)
        bound = 1.0 / math.sqrt(rows)
        bounds = (-bound if low is None else low, bound if high is None else high)
    init_fn = getattr(given, "init_fn", None)
    if (
        isinstance(init_fn, functools.partial)
        and init_fn.func is torch.nn.init.uniform_
        and set(init_fn.keywords) == {"a", "b"}
    ):
        # EmbeddingBagConfig's own, where none is given
        bounds, init_fn = (init_fn.keywords["a"], init_fn.keywords["b"]), None
    if bounds is not None and not (len(bounds) == 2 and -math.inf < bounds[0] <= bounds[1] < math.inf):
        raise ValueError(f"tables[{number}]: init_range: expected a least and a largest number, got {bounds}")
    return TableConfig(name, rows, dim, tuple(features), pooling, dtype, bounds, init_fn)


def lookup_estimates(configs: Sequence[TableConfig], given: float | Mapping[str, float]) -> dict[str, float]:
    """Return the lookups per sample of each feature, given by their names or one number for all."""
    names = list(dict.fromkeys(name for config in configs for name in config.feature_names))
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    if set(given) != set(names):
        raise ValueError(f"lookups_per_sample: expected a number for each of {names}, got {sorted(given)}")
    found = {name: as_number(f"lookups_per_sample of {name!r}", given[name]) for name in names}
    if not all(0 <= each < math.inf for each in found.values()):
        raise ValueError(f"lookups_per_sample: expected numbers of at least 0, got {found}")
    return found


def whole_number(name: str, given: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a number of any type of whole numbers as an int.

    Raises:
        ValueError: it is none, a truth value, or out of range.
    """
    number: int | None = None
    with contextlib.suppress(TypeError):
        number = as_whole_number(given, name)
    if number is None or not (least is None or number >= least) or not (most is None or number <= most):
        limits = "" if least is None else f" of at least {least}" if most is None else f" of {least} to {most}"
        raise ValueError(f"{name}: expected a whole number{limits}, got {given!r}")
    return number


def check_wire(configs: Sequence[TableConfig], wire_dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype in which rows of no table travel."""
    if wire_dtype != torch.bfloat16 or all(config.data_type != torch.float32 for config in configs):
        raise TypeError(f"wire_dtype: expected None, or torch.bfloat16 where tables are of float32, got {wire_dtype}")


def plain_name(value: Any) -> str:
    """Return an enumeration's value, or the text itself, in small letters."""
    return str(getattr(value, "value", value)).lower()
