"""Checks of embedding_all_to_all's arguments: types, choices, tables, and their combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...runtime.arguments import as_whole_numbers
from ...runtime.compile.literals import literal
from ...runtime.dtypes import SCALARS
from ...runtime.plain_call import require_plain_list
from ...runtime.team import Team

__all__ = [
    "BOUNDS",
    "POOLINGS",
    "SCHEDULES",
    "check_are_tables",
    "check_choices",
    "check_gradient",
    "check_split",
    "check_tables",
    "check_types",
    "check_wire",
    "most_rows",
    "seeds_of",
]

POOLINGS = ("sum", "mean")
SCHEDULES = ("communication_aware", "oblivious")
BOUNDS = ("fatal", "ignore")


def check_types(
    weights: Sequence[torch.Tensor],
    lookups: Mapping[str, Any],
    dim_per_rank: Sequence[int] | None,
    batch_per_rank: Sequence[int] | None,
    *choices: Any,
) -> None:
    """Raise TypeError, or ValueError for a number of dimensions, before anything looks at the arguments' contents.

    Args:
        weights: tables.
        lookups: by name: indices, offsets and more; or what an input exchange has left, which has checked it.
        dim_per_rank, batch_per_rank: of `embedding_all_to_all`.
        choices: the other arguments, `columns` last.
    """
    check_are_tables(weights)
    columns = choices[-1] if choices else None
    for name, values in (("dim_per_rank", dim_per_rank), ("batch_per_rank", batch_per_rank), ("columns", columns)):
        if values is not None and not all(isinstance(value, int) for value in values):
            raise TypeError(f"{name}: expected whole numbers, got {list(values)}")
    for name in ("indices", "offsets"):
        if name in lookups and lookups[name].dim() != 1:
            raise ValueError(f"{name}: expected shape [n], got {list(lookups[name].shape)}")


def check_are_tables(weights: Sequence[torch.Tensor]) -> None:
    """Raise TypeError or ValueError if this is not a list of matrices."""
    if not isinstance(weights, (list, tuple)):
        require_plain_list("weights", weights)
    for t, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            require_plain_list("weights", weights)
        if weight.dim() != 2:
            raise ValueError(f"weights[{t}]: expected a contiguous [R, D] tensor, got shape {list(weight.shape)}")


def check_choices(pooling: str, bounds: str, schedule: str, *, is_weighted: bool) -> None:
    for name, value, choices in (
        ("pooling", pooling, POOLINGS),
        ("bounds", bounds, BOUNDS),
        ("schedule", schedule, SCHEDULES),
    ):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    if is_weighted and pooling != "sum":
        raise ValueError(f"per_sample_weights: only pooling='sum' takes them, got pooling={pooling!r}")


def most_rows() -> int:
    """Return how many rows a table may have: the number after them stands for none."""
    return literal("tile/bag_stream.cuh", "kNoRow")


def check_tables(weights: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in SCALARS:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    for t, weight in enumerate(weights):
        if weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(f"weights[{t}]: expected a contiguous [R, D] tensor, got shape {list(weight.shape)}")
        if weight.dtype != dtype:
            raise TypeError(f"weights[{t}]: all tables need the dtype {dtype}, got {weight.dtype}")
        if weight.device != device:
            raise ValueError(f"weights[{t}]: expected a tensor on {device}, got one on {weight.device}")
        if weight.shape[0] > most_rows() or weight.shape[1] * weight.element_size() >= 2**31:
            raise ValueError(
                f"weights[{t}]: expected at most {most_rows()} rows of less than 2 GiB, got {list(weight.shape)}"
            )


def check_wire(dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    if wire_dtype != dtype and (dtype, wire_dtype) != (torch.float32, torch.bfloat16):
        raise TypeError(
            f"wire_dtype: expected the tables' {dtype}, or torch.bfloat16 where tables are of torch.float32, got "
            f"{wire_dtype}"
        )


def check_split(
    team: Team,
    weights: Sequence[torch.Tensor],
    num_offsets: int,
    dim_per_rank: Sequence[int],
    batch_per_rank: Sequence[int],
) -> None:
    for name, values in (("dim_per_rank", dim_per_rank), ("batch_per_rank", batch_per_rank)):
        if len(values) != team.size or min(values) < 0:
            raise ValueError(f"{name}: expected {team.size} numbers of at least 0, one per PE, got {list(values)}")
    own = sum(weight.shape[1] for weight in weights)
    if dim_per_rank[team.rank] != own:
        raise ValueError(
            f"dim_per_rank: entry {team.rank} is {dim_per_rank[team.rank]}, but this PE's tables have {own} columns "
            "in all"
        )
    expected = len(weights) * sum(batch_per_rank) + 1
    if num_offsets != expected:
        raise ValueError(
            f"offsets: expected T * B + 1 = {len(weights)} * {sum(batch_per_rank)} + 1 = {expected} elements, got "
            f"{num_offsets}"
        )


def check_gradient(gradient: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raise for arguments that the kernel would misread; the sort by row checks the lookups."""
    for t, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(f"weights[{t}]: expected a contiguous [R, D] tensor")
        if weight.dtype != gradient.dtype or weight.device != gradient.device:
            raise TypeError(
                f"gradient: expected {weight.dtype} on {weight.device} as weights[{t}] is, got {gradient.dtype} on "
                f"{gradient.device}"
            )
    columns = sum(weight.shape[1] for weight in weights)
    if gradient.dim() != 2 or gradient.shape[1] != columns:
        raise ValueError(f"gradient: expected [B, {columns}], got {list(gradient.shape)}")


def seeds_of(seed: int | Sequence[int], count: int) -> list[int]:
    """Return a seed of stochastic rounding for each of so many tables; raise for what is none."""
    if not isinstance(seed, int) and not hasattr(seed, "__iter__"):
        raise TypeError(f"seed: expected a whole number, or one for each table, got {seed!r}")
    seeds = [seed + number for number in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"seed: expected one for each of {count} tables, got {len(seeds)}")
    seeds = list(as_whole_numbers(seeds, f"seed: expected whole numbers, got {seeds}"))
    if not all(0 <= each < 2**63 for each in seeds):
        raise ValueError(f"seed: expected numbers of at least 0 and below 2^63, got {seeds}")
    return seeds
