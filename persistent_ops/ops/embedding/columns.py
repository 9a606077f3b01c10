"""Positions of tables' columns in a row of embedding_all_to_all's result."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Columns", "columns_of", "own_begins"]


class Columns(NamedTuple):
    """The columns of every PE's tables, in their order.

    Attributes:
        begins: where each table's begin in a row.
        widths: how many each has.
    """

    begins: tuple[tuple[int, ...], ...]
    widths: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)
def columns_of(columns: tuple[int, ...], dim_per_rank: tuple[int, ...]) -> Columns:
    """Return what `columns` of `embedding_all_to_all` says of each PE; raises ValueError where it does not fill a row.

    A table's columns end where the next ones begin, and a PE's tables are as many as have its sum of columns.
    """
    total, refused = sum(dim_per_rank), f"columns: {list(columns)} do not divide a row into tables' columns"
    ordered = sorted(columns)
    ends = dict(itertools.pairwise([*ordered, total]))
    if len(ends) != len(ordered) or (ordered or [total])[0] != 0 or any(begin >= end for begin, end in ends.items()):
        raise ValueError(
            f"{refused}: expected different numbers from 0 up, below the {total} columns of all PEs (a table without "
            "columns has no place)"
        )
    begins, widths, left = [], [], iter(columns)
    for pe, dim in enumerate(dim_per_rank):
        of_pe: list[int] = []
        while (filled := sum(ends[begin] - begin for begin in of_pe)) < dim:
            of_pe.append(next(left))
        if filled != dim:
            raise ValueError(f"{refused}: PE {pe} has {dim} columns, but its tables would have {filled}")
        begins.append(tuple(of_pe))
        widths.append(tuple(ends[begin] - begin for begin in of_pe))
    return Columns(tuple(begins), tuple(widths))


def own_begins(
    columns: Sequence[int] | None, dim_per_rank: Sequence[int], weights: Sequence[torch.Tensor], rank: int
) -> tuple[int, ...]:
    """Return the first columns of this PE's tables. Without `columns` they follow the columns of the PEs before it."""
    widths = tuple(weight.shape[1] for weight in weights)
    if columns is None:
        return tuple(itertools.accumulate(widths, initial=sum(dim_per_rank[:rank])))[: len(widths)]
    of_all = columns_of(tuple(columns), tuple(dim_per_rank))
    if of_all.widths[rank] != widths:
        raise ValueError(
            f"columns: tables of PE {rank} would have {list(of_all.widths[rank])} columns, but have {list(widths)}"
        )
    return of_all.begins[rank]
