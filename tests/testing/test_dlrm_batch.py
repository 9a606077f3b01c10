"""Synthetic batches: draws from a Zipf distribution, and the shape of MLPerf's benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from persistent_ops.testing import dlrm_batch

ROWS = tuple(min(rows, 1000) for rows in dlrm_batch.DLRM_ROWS)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000, 65_536, 65_537, 200_000])
def test_ranks_follow_the_exact_cumulative_distribution(num_rows: int, exponent: float) -> None:
    sampler = dlrm_batch.ZipfSampler(num_rows, exponent)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights) / weights.sum()
    # The uniform number in the middle of a rank's interval must give that rank, and the interval must have its width.
    probes = np.unique(np.linspace(0, num_rows - 1, 500).astype(np.int64))
    lower = np.concatenate([[0.0], cumulative])[probes]
    middle = (lower + cumulative[probes]) / 2
    assert sampler.ranks(middle).tolist() == (probes + 1).tolist()
    edge = 0.02 * (cumulative[probes] - lower)
    assert sampler.ranks(lower + edge).tolist() == (probes + 1).tolist()
    assert sampler.ranks(cumulative[probes] - edge).tolist() == (probes + 1).tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 65_537, 40_000_000])
def test_ranks_stay_inside_the_table(num_rows: int) -> None:
    sampler = dlrm_batch.ZipfSampler(num_rows)
    ranks = sampler.ranks(np.array([0.0, 0.5, np.nextafter(1.0, 0.0)]))
    assert ranks[0] == 1
    assert ranks[2] == num_rows
    assert ranks.min() >= 1
    assert ranks.max() <= num_rows


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    num_rows, count = 50, 200_000
    sampler = dlrm_batch.ZipfSampler(num_rows)
    drawn = sampler.draw(np.random.default_rng(5), count)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -dlrm_batch.ZIPF_EXPONENT
    probability = np.empty(num_rows)
    probability[sampler.rows(np.arange(1, num_rows + 1))] = weights / weights.sum()
    expected = probability * count
    chi_square = float((((np.bincount(drawn, minlength=num_rows) - expected) ** 2) / expected).sum())
    assert chi_square < 98  # 49 degrees of freedom: mean 49, standard deviation 10


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000))
def test_ranks_are_spread_by_a_permutation(num_rows: int) -> None:
    rows = dlrm_batch.ZipfSampler(num_rows).rows(np.arange(1, num_rows + 1))
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_hot_rows_do_not_lie_side_by_side() -> None:
    rows = np.sort(dlrm_batch.ZipfSampler(40_000_000).rows(np.arange(1, 101)))
    assert np.diff(rows).min() > 1000


def test_a_batch_is_a_function_of_seed_step_and_table() -> None:
    def draw(table: int, seed: int, step: int) -> list[int]:
        return dlrm_batch.draw_feature(table, seed=seed, step=step, batch_size=64, num_rows=ROWS).indices.tolist()

    base = draw(0, 1, 2)
    assert draw(0, 1, 2) == base
    assert draw(0, 2, 2) != base
    assert draw(0, 1, 3) != base
    assert draw(9, 1, 2)[: len(base)] != base


def test_a_batch_has_the_shape_of_the_benchmark() -> None:
    assert len(dlrm_batch.DLRM_ROWS) == len(dlrm_batch.DLRM_POOLING) == 26
    assert sum(dlrm_batch.DLRM_POOLING) == 214
    assert sum(dlrm_batch.DLRM_ROWS) == 204_184_588
    for table in range(26):
        feature = dlrm_batch.draw_feature(table, seed=0, step=0, batch_size=32, num_rows=ROWS)
        assert feature.lengths.tolist() == [dlrm_batch.DLRM_POOLING[table]] * 32
        assert len(feature.indices) == 32 * dlrm_batch.DLRM_POOLING[table]
        assert 0 <= feature.indices.min() <= feature.indices.max() < ROWS[table]
