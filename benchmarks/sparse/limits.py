"""The least traffic of a case, and the bytes that each method sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Traffic", "count_traffic", "extra_room", "sent_rows"]


@dataclass(frozen=True)
class Traffic:
    """Rows of one all-reduce.

    Attributes:
        union: of the result.
        several: of the result, with more than one contributor.
        lacked: of the result, to which somebody else than this PE contributes: it cannot know their sum before at least
            one row's bytes have come in for each, whatever the network can do.
        unicast: that a PE sends on average, at least, where the network only copies from one PE to another. A row with
            m contributors takes m - 1 messages until one PE has heard of all of them, and P - 1 more until every other
            PE has the sum that this PE was the first to know: m + P - 2 in all, over P PEs. With m = P this is the
            2 (P - 1) / P of a dense all-reduce, with m = 1 the (P - 1) / P of an all-gather.
    """

    union: int
    several: int
    lacked: int
    unicast: float


def count_traffic(contributors: torch.Tensor, is_own: torch.Tensor, world_size: int) -> Traffic:
    """Count the rows that one PE lacks, and those that all send.

    Args:
        contributors: `[union]`, how many PEs have each row of the result, at least 1.
        is_own: `[union]`, bool, whether this PE has it.
        world_size: P.
    """
    return Traffic(
        union=contributors.numel(),
        several=int((contributors > 1).sum()),
        lacked=int((contributors > is_own.to(contributors.dtype)).sum()),
        unicast=float((contributors + (world_size - 2)).sum()) / world_size if world_size > 1 else 0.0,
    )


def sent_rows(scheme: str, *, rows: int, rows_per_rank: int, union: float, unicast: float, world_size: int) -> float:
    """Return the rows whose values a PE sends on average.

    Args:
        scheme: "owner": sums at an owner among the contributors; "gather": everything to everybody; "union" and
            "dense": all-reduces of the union's and of all rows.
        rows: R.
        rows_per_rank: n.
        union, unicast: see Traffic.
        world_size: P.
    """
    all_reduce = 2 * (world_size - 1) / world_size
    if scheme == "owner":
        return unicast
    if scheme == "gather":
        return float(rows_per_rank * (world_size - 1))
    return {"union": union, "dense": float(rows)}[scheme] * all_reduce


def extra_room(algorithm: str, *, rows: int, union: int, row_bytes: int, world_size: int) -> int:
    """Return the bytes of the symmetric heap that the operator takes beside the result's for an algorithm.

    Args:
        algorithm: "allgather" keeps a result's room for every PE, a power of two in all; "dense" needs all rows' room.
            Others need none.
        rows: R.
        union: rows of the result.
        row_bytes: of an fp32 row.
        world_size: P.
    """
    spare = 17 / 16  # room for a few more rows than the last result had
    if algorithm == "allgather":
        return 1 << (max(1, int(world_size * union * spare * row_bytes)) - 1).bit_length()
    return int(rows * spare * (row_bytes + 8)) if algorithm == "dense" else 0
