"""Sparse gradients, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cases import DTYPE, Case

__all__ = ["RowSet", "draw_rows", "draw_set"]

_SPREAD = 2654435761  # a prime: multiplying by it permutes the rows of any smaller gradient
_SEED = 1_000_003


@dataclass(frozen=True)
class RowSet:
    """One PE's input.

    Attributes:
        indices: `[n]`, int64, sorted, distinct.
        values: `[n, D]`, fp32.
        sparse: `[R, D]`, coalesced, over the same memory.
    """

    indices: torch.Tensor
    values: torch.Tensor
    sparse: torch.Tensor


def draw_set(case: Case, *, rank: int, world_size: int, number: int, device: torch.device) -> RowSet:
    """Draw the input that takes turn `number` on PE `rank`; values have magnitudes below 1."""
    indices = draw_rows(case, rank=rank, world_size=world_size, number=number, device=device)
    generator = torch.Generator(device).manual_seed(_SEED * (number + 1) + 2 * rank + 1)
    values = torch.empty(case.rows_per_rank, case.dim, dtype=DTYPE, device=device).uniform_(-1, 1, generator=generator)
    # Uniform numbers are multiples of one small number, so their sums are exact in any order. Sums of products are not.
    values.mul_(torch.empty_like(values).uniform_(0, 1, generator=generator))
    sparse = torch.sparse_coo_tensor(
        indices.view(1, -1), values, (case.rows, case.dim), is_coalesced=True, check_invariants=False
    )
    return RowSet(indices, values, sparse)


def draw_rows(case: Case, *, rank: int, world_size: int, number: int, device: torch.device) -> torch.Tensor:
    """Draw the rows of one PE.

    Args:
        case: whose distribution they have.
        rank: of the PE.
        world_size: PEs that share the rows of "overlap".
        number: of the set.
        device: of the result.

    Returns:
        `[n]`, int64, sorted, distinct.

    Raises:
        ValueError: there are fewer rows than the PEs of "overlap" need.
    """
    if case.distribution == "overlap":
        indices = _overlapping(case, rank, world_size, number).to(device)
    else:
        generator = torch.Generator(device).manual_seed(_SEED * (number + 1) + 2 * rank)
        if case.distribution == "uniform":
            indices = torch.randperm(case.rows, generator=generator, device=device)[: case.rows_per_rank]
        else:
            indices = _zipf(case, generator, device)
    return indices.sort().values


def _overlapping(case: Case, rank: int, world_size: int, number: int) -> torch.Tensor:
    common = round(case.rows_per_rank * case.shared)
    own = case.rows_per_rank - common
    if common + world_size * own > case.rows:
        raise ValueError(f"{case.name}: {world_size} PEs need {common + world_size * own} rows of {case.rows}")
    # On the CPU: every PE must draw the same permutation.
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(_SEED + number))
    begin = common + rank * own
    return torch.cat([order[:common], order[begin : begin + own]])


def _zipf(case: Case, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Draw distinct rows one after the other, each with its weight's share of those that are left.

    The rows of the n largest (log weight + Gumbel noise) are drawn.
    """
    ranks = torch.arange(1, case.rows + 1, dtype=torch.float64, device=device)
    uniform = torch.rand(case.rows, dtype=torch.float64, device=device, generator=generator).clamp_(min=1e-300)
    noise = uniform.log_().neg_().log_().neg_()
    keys = noise.sub_(ranks.log_().mul_(case.skew))
    # The popular rows lie anywhere in the gradient, at the same places on all PEs.
    return torch.topk(keys, case.rows_per_rank, sorted=False).indices.mul_(_SPREAD).remainder_(case.rows)
