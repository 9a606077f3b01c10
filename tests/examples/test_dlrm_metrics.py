"""The AUC, compared with its definition over pairs: with ties, and divided among PEs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from dlrm.metrics import all_predictions, auroc
from kept_pes import in_processes
from worlds import world_of

import persistent_ops as po


def over_pairs(scores: list[float], clicks: list[int]) -> float:
    """Return the AUC by its definition."""
    pairs = [(a, b) for a, b in itertools.product(range(len(scores)), repeat=2) if clicks[a] == 1 and clicks[b] == 0]
    return sum(1.0 if scores[a] > scores[b] else 0.5 if scores[a] == scores[b] else 0.0 for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("num_values", [3, 20, 10**6])
def test_any_scores(num_values: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(num_values, (200,), generator=generator).float()
    clicks = torch.randint(2, (200,), generator=generator)
    found = auroc(scores, clicks)
    assert found == pytest.approx(over_pairs(scores.tolist(), clicks.tolist()), rel=1e-12)
    order = torch.randperm(200, generator=generator)
    assert auroc(scores[order], clicks[order]) == found
    assert auroc(-scores, clicks) == pytest.approx(1 - found, rel=1e-12)


def test_counts_do_not_round() -> None:
    """One pair of 4e10 that is wrong is seen, and scores are not rounded to float32."""
    numbers = torch.arange(400_000)
    scores = 1.0 + numbers.double() * 2.0**-40
    clicks = (numbers >= 200_000).to(torch.int64)
    assert auroc(scores, clicks) == 1.0
    scores[199_999], scores[200_000] = scores[200_000].clone(), scores[199_999].clone()
    assert auroc(scores, clicks) == (200_000**2 - 1) / 200_000**2 < 1.0


def test_what_has_no_auc() -> None:
    assert math.isnan(auroc(torch.tensor([1.0, 2.0]), torch.tensor([1, 1])))
    assert math.isnan(auroc(torch.tensor([1.0]), torch.tensor([0])))
    assert math.isnan(auroc(torch.zeros(0), torch.zeros(0)))
    with pytest.raises(ValueError, match="sample 1 has NaN"):
        auroc(torch.tensor([1.0, math.nan]), torch.tensor([1, 0]))


# ---- several PEs ---------------------------------------------------------------------------------------------------


def predictions(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_samples, generator=generator), torch.randint(2, (num_samples,), generator=generator).float()


def gather_parts(num_samples: int, ends: list[int]) -> tuple[bool, float]:
    with world_of("host", "gloo"):
        assert dist.get_world_size() == len(ends)
        own = slice(ends[po.rank() - 1] if po.rank() else 0, ends[po.rank()])
        scores, labels = predictions(num_samples)
        found = all_predictions(scores[own], labels[own])
        return torch.equal(found[0], scores) and torch.equal(found[1], labels), auroc(*found)


@pytest.mark.host
@pytest.mark.parametrize("ends", [[100], [60, 100], [0, 37, 100]])
def test_predictions_of_all_pes(ends: list[int]) -> None:
    expected = auroc(*predictions(100))
    assert in_processes(gather_parts, len(ends), 100, ends, timeout=120) == [(True, expected)] * len(ends)
