"""The area under the ROC curve, exactly, over the predictions of all PEs."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

__all__ = ["all_predictions", "auroc"]


def auroc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of pairs of a click and a non-click that the scores order rightly; a tie counts half.

    Args:
        scores: `[n]`, of a floating dtype.
        labels: `[n]`, 0 or 1 in any dtype.

    Returns:
        The area, from integer counts; NaN where there are no clicks, or nothing else.

    Raises:
        ValueError: a score is NaN, a label is neither 0 nor 1, or the numbers of both differ.
    """
    _check(scores, labels)
    clicks = labels.to(torch.int64)
    below, ties = _ordered_pairs(scores, clicks, 1 - clicks)
    num_clicks = int(clicks.sum())
    num_pairs = num_clicks * (len(clicks) - num_clicks)
    return (2 * int(below) + int(ties)) / (2 * num_pairs) if num_pairs else math.nan


def _check(scores: torch.Tensor, labels: torch.Tensor) -> None:
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"scores and labels: expected [n] both, got {list(scores.shape)} and {list(labels.shape)}")
    if bool(scores.isnan().any()):
        raise ValueError(f"scores: sample {int(scores.isnan().nonzero()[0])} has NaN; the training has diverged")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels: expected 0 or 1")


def _ordered_pairs(
    scores: torch.Tensor, clicks: torch.Tensor, others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of pairs of a click and another whose score is lower, and of those whose scores are equal."""
    order = torch.sort(scores).indices
    _, group_sizes = torch.unique_consecutive(scores[order], return_counts=True)
    group = torch.repeat_interleave(torch.arange(len(group_sizes), device=scores.device), group_sizes)
    zeros = torch.zeros(len(group_sizes), dtype=clicks.dtype, device=clicks.device)
    group_clicks = zeros.index_add(0, group, clicks[order])
    group_others = zeros.index_add(0, group, others[order])
    others_below = group_others.cumsum(0) - group_others
    return (group_clicks * others_below).sum(), (group_clicks * group_others).sum()


def all_predictions(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predictions of all PEs, by rank; collective where torch.distributed has several.

    Args:
        scores: `[n]`, this PE's; n may differ between PEs, and be 0.
        labels: `[n]`, 0 or 1, of float32.

    Returns:
        Scores and labels of all PEs, on every one of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return scores, labels
    own = torch.tensor([len(scores)], device=scores.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    most = max(int(count) for count in counts)
    padded = torch.zeros(2, most, dtype=torch.float32, device=scores.device)
    padded[0, : len(scores)], padded[1, : len(labels)] = scores, labels
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    parts = [each[:, : int(count)] for each, count in zip(gathered, counts, strict=True)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
