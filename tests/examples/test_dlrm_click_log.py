"""The synthetic click log: its samples, its teacher's formula, and the best AUC."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from dlrm.click_log import _EFFECT, _FACTOR, ClickLog, Teacher, _normal
from dlrm.metrics import auroc
from dlrm.records import Records

ROWS, HOTNESS = (50, 3, 200, 8, 1), (1, 2, 4, 3, 1)


def log_of(num_samples: int = 4000, **options: Any) -> ClickLog:
    return ClickLog(num_samples, **{"num_rows": ROWS, "hotness": HOTNESS, "seed": 9, **options})


def read(log: ClickLog, numbers: Any) -> Records:
    return log.read(np.asarray(numbers, np.int64))


def columns(rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the columns of each feature."""
    return np.split(rows, np.cumsum(HOTNESS)[:-1], axis=1)


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    log = log_of()
    whole = read(log, range(4000))
    some = read(log_of(), [3999, 7, 7, 0])
    for part, everything in zip(vars(some).values(), vars(whole).values(), strict=True):
        assert np.array_equal(part, everything[[3999, 7, 7, 0]])
    other = read(log_of(seed=10), range(4000))
    assert (other.dense != whole.dense).all() and (other.labels != whole.labels).any()
    assert (other.rows != whole.rows).any()
    assert len(np.unique(whole.dense)) > 0.99 * whole.dense.size
    assert np.mean(np.abs(whole.dense) < 1) == pytest.approx(0.6827, abs=0.006), "of a normal distribution"


def test_rows_are_in_their_tables_and_an_id_has_its_rows() -> None:
    rows = read(log_of(), range(4000)).rows
    for table, own in enumerate(columns(rows)):
        assert own.shape == (4000, HOTNESS[table]) and own.min() >= 0 and own.max() < ROWS[table]
        sets = {tuple(each) for each in own.tolist()}
        assert len(sets) == len({each[0] for each in sets}), "an id has two sets"
    assert len({each[1] for each in map(tuple, columns(rows)[2].tolist())}) > 50, "the other rows vary"


def test_ids_follow_zipf_and_so_do_duplicates() -> None:
    num_samples = 40_000
    ids = columns(read(log_of(num_samples, exponent=1.0), range(num_samples)).rows)[0][:, 0]
    counts = sorted(Counter(ids.tolist()).values(), reverse=True)
    harmonic = sum(1 / rank for rank in range(1, 51))
    for rank in (1, 2, 5, 20):
        expected = num_samples / rank / harmonic
        assert abs(counts[rank - 1] - expected) < 5 * math.sqrt(expected)
    even = columns(read(log_of(num_samples, exponent=0.0), range(num_samples)).rows)[0][:, 0]
    assert max(Counter(even.tolist()).values()) < 1.2 * num_samples / 50


@pytest.mark.parametrize("hotness", [HOTNESS, (1, 2, 1, 1), (3,)])
def test_probabilities_are_those_of_the_formula(hotness: tuple[int, ...]) -> None:
    teacher = Teacher(bias=-0.5, row_scale=1.3, dense_scale=0.6, pair_scale=0.9)
    num_features, seed = len(hotness), 4
    log = ClickLog(60, num_rows=ROWS[:num_features], hotness=hotness, seed=seed, num_dense=3, teacher=teacher)
    records = read(log, range(60))
    found = log.probabilities(np.arange(60))
    weights = log._weights.tolist()
    begins = np.cumsum([0, *hotness]).tolist()
    for sample in range(60):
        x = records.dense[sample].astype(float).tolist()
        pooled: dict[int, list[float]] = {_EFFECT: [], _FACTOR: []}
        for purpose, sums in pooled.items():
            for table, hot in enumerate(hotness):
                rows = records.rows[sample, begins[table] : begins[table] + hot].tolist()
                numbers = [float(_normal(seed, purpose, table, np.array([row]))[0]) for row in rows]
                sums.append(sum(numbers) / math.sqrt(hot))
        factors = pooled[_FACTOR]
        products = [factors[t] * factors[t + 1] for t in range(0, num_features - 1, 2)]
        products += [factors[t] * x[t % 3] for t in range(num_features)]
        z = teacher.bias + 1.3 * sum(pooled[_EFFECT]) / math.sqrt(num_features)
        z += 0.6 * sum(w * each for w, each in zip(weights, x, strict=True)) / math.sqrt(sum(w * w for w in weights))
        z += 0.9 * sum(products) / math.sqrt(len(products))
        assert found[sample] == pytest.approx(1 / (1 + math.exp(-z)), rel=1e-9)


def test_labels_are_drawn_with_their_probabilities() -> None:
    log = log_of(40_000)
    labels, probabilities = read(log, range(40_000)).labels, log.probabilities(np.arange(40_000))
    assert set(labels.tolist()) == {0.0, 1.0}
    for low in np.arange(0.05, 0.9, 0.1):
        found = (probabilities >= low) & (probabilities < low + 0.1)
        expected, spread = probabilities[found].mean(), 0.5 / math.sqrt(found.sum())
        assert found.sum() > 300 and abs(labels[found].mean() - expected) < 5 * spread


def test_the_best_auc_is_that_of_the_probabilities() -> None:
    log = log_of(40_000)
    probabilities, labels = log.probabilities(np.arange(40_000)), read(log, range(40_000)).labels
    on_these = log.best_auroc()
    assert on_these == auroc(torch.from_numpy(probabilities), torch.from_numpy(labels))
    assert 0.7 < on_these < 0.9
    assert log.best_auroc(30_000, 10_000) == auroc(
        torch.from_numpy(probabilities[30_000:]), torch.from_numpy(labels[30_000:])
    )
    # Whoever knows less ranks worse: without the factors, and with noise.
    noise = np.random.default_rng(0).normal(size=40_000)
    assert auroc(torch.from_numpy(probabilities + 0.1 * noise), torch.from_numpy(labels)) < on_these - 0.01
    assert log_of(40_000, teacher=Teacher(row_scale=0, dense_scale=0, pair_scale=0)).best_auroc() == 0.5
