"""Rounding of an embedding collection's tables, and its seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ..ops.embedding.backward_kernel import check_rounding as check_known
from .embedding_tables import TableConfig
from .table_layout import Group, Layout

__all__ = ["Drawn", "check_rounding", "drawn_of", "draws", "rounding_of", "rounding_seed"]

Drawn = tuple[str | int, ...]  # what has random bits of its own: a table's name and a slice, or all names of replicas


def check_rounding(configs: Sequence[TableConfig], rounding: str) -> None:
    """Raise ValueError for a rounding that is unknown, or of no table."""
    check_known(rounding)
    if rounding == "stochastic" and all(config.data_type == torch.float32 for config in configs):
        raise ValueError("rounding: 'stochastic' is for tables of 16 bits, but all are float32")


def draws(dtype: torch.dtype, rounding: str) -> bool:
    """Return whether rows of a dtype are rounded with random bits; float32 rows are not rounded."""
    return rounding == "stochastic" and dtype != torch.float32


def rounding_of(group: Group, rounding: str) -> str:
    """Return the rounding of a group's rows; float32 rows have none."""
    return "nearest" if group.dtype == torch.float32 else rounding


def drawn_of(layout: Layout, rank: int) -> list[list[Drawn]]:
    """Return what the tables of each optimizer are drawn as: of the layout's groups, then of its replicated ones.

    Neither the number of PEs nor the owners are part of it. Replicated tables lie one above the other in one tensor,
    where a row has a number of its own.
    """
    names = [config.name for config in layout.configs]
    spread: list[list[Drawn]] = [
        [(names[slot.table], slot.slice) for slot in group.slots[rank]] for group in layout.groups
    ]
    replicated: list[list[Drawn]] = [
        [tuple(dict.fromkeys(names[slot.table] for slot in group.columns))] for group in layout.replicated
    ]
    return spread + replicated


def rounding_seed(seed: int, drawn: Drawn) -> int:
    """Return a seed of `EmbeddingOptimizer`, below 2^63: different for each seed and each `drawn`."""
    digest = hashlib.blake2b(repr((seed, *drawn)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
