"""A synthetic click log with a known best AUC: a teacher draws the labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from persistent_ops.testing.dlrm_batch import DLRM_POOLING, DLRM_ROWS, ZIPF_EXPONENT, ZipfSampler

from .checks import NUM_DENSE, checked_tables
from .metrics import auroc
from .records import IntArray, Records

__all__ = ["ClickLog", "Teacher"]

_Words = npt.NDArray[np.uint64]
_Doubles = npt.NDArray[np.float64]

# The purpose of a drawn number: the first word of its key.
_DENSE, _ID, _BAG, _LABEL, _EFFECT, _FACTOR, _WEIGHT = range(7)

_NUM_ROWS = tuple(min(rows, 2000) for rows in DLRM_ROWS)
_READ_SAMPLES = 16384


def _hash(*key: int | IntArray | _Words) -> _Words:
    """Mix integers, broadcast against one another, into 64 random-looking bits.

    The finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
    applied after every word: a number depends on its key alone, in whatever order and process it is asked for.
    """
    state = np.full(1, 0x9E3779B97F4A7C15, np.uint64)
    for word in key:
        state = (state ^ np.asarray(word).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def _uniform(*key: int | IntArray | _Words) -> _Doubles:
    """Return numbers of [0, 1)."""
    return np.asarray((_hash(*key) >> np.uint64(11)) * 2.0**-53)


def _normal(*key: int | IntArray | _Words) -> _Doubles:
    """Return numbers of the standard normal distribution (Box and Muller)."""
    radius = np.sqrt(-2.0 * np.log1p(-_uniform(*key, 0)))
    return np.asarray(radius * np.cos(2.0 * math.pi * _uniform(*key, 1)))


@dataclass(frozen=True)
class Teacher:
    """The logistic model that draws labels: P(click) = 1 / (1 + exp(-z)).

    Every row r of table t has an effect a and a factor f, both standard normal; A_t and F_t of a sample are their sums
    over feature t's lookups, divided by the root of their number. With T features, the dense columns x and K random
    weights w:

        z = bias + row_scale * sum_t A_t / sqrt(T) + dense_scale * w.x / |w|
            + pair_scale * (sum of F_t * F_{t+1} over t = 0, 2, ... + sum of F_t * x_{t mod K}) / sqrt(number of terms)

    Attributes:
        bias: about the logarithm of the odds of a click.
        row_scale, dense_scale, pair_scale: standard deviations of the parts, over random rows.
    """

    bias: float = -1.0
    row_scale: float = 1.0
    dense_scale: float = 0.7
    pair_scale: float = 0.5


class ClickLog:
    """A click log that is drawn, not read: a sample is a function of the seed and its number.

    Ids follow a Zipf distribution. As in MLPerf's multi-hot data an id has a fixed set of rows, itself and others drawn
    uniformly from its table, so that duplicates within a batch follow the skew of the ids. Dense columns are standard
    normal. Labels are drawn from a `Teacher`, whose probabilities rank samples best: see `best_auroc`.

    Args:
        num_samples: of the log.
        num_rows: of the tables; by default MLPerf's, but at most 2000 rows per table.
        hotness: lookups of each feature, in every sample; by default MLPerf's.
        seed: of everything.
        num_dense: dense columns, at least 1.
        exponent: of the Zipf distribution; 0 for uniform ids.
        teacher: of the labels.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        num_rows: Sequence[int] = _NUM_ROWS,
        hotness: Sequence[int] = DLRM_POOLING,
        seed: int = 0,
        num_dense: int = NUM_DENSE,
        exponent: float = ZIPF_EXPONENT,
        teacher: Teacher | None = None,
    ) -> None:
        if num_samples < 1 or num_dense < 1:
            raise ValueError(f"num_samples and num_dense must be at least 1, got {num_samples} and {num_dense}")
        self.num_samples = num_samples
        self.num_dense = num_dense
        self.num_rows, self.hotness = checked_tables(num_rows, hotness)
        self.teacher = teacher or Teacher()
        self._seed = seed
        self._exponent = exponent
        self._samplers = [ZipfSampler(rows, exponent) for rows in self.num_rows]
        self._weights = _normal(self._seed, _WEIGHT, np.arange(num_dense))

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        return self._draw(numbers)[0]

    def probabilities(self, numbers: IntArray) -> _Doubles:
        """Return the probabilities with which the labels of these samples were drawn, `[n]`."""
        return self._draw(numbers)[1]

    def best_auroc(self, first: int = 0, num_samples: int | None = None) -> float:
        """Return the best AUC that a model can be expected to reach: the AUC of the true probabilities.

        Args:
            first: number of the first sample that counts.
            num_samples: how many do; None for all from the first one on.
        """
        end = self.num_samples if num_samples is None else first + num_samples
        parts = [
            self._draw(np.arange(begin, min(begin + _READ_SAMPLES, end), dtype=np.int64))
            for begin in range(first, end, _READ_SAMPLES)
        ]
        probabilities = torch.from_numpy(np.concatenate([found for _, found in parts]))
        labels = torch.from_numpy(np.concatenate([records.labels for records, _ in parts]))
        return auroc(probabilities, labels)

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {
            "format": "synthetic",
            "num_samples": self.num_samples,
            "hotness": list(self.hotness),
            "num_dense": self.num_dense,
            "seed": self._seed,
            "exponent": self._exponent,
            "teacher": dict(vars(self.teacher)),
        }

    def _draw(self, numbers: IntArray) -> tuple[Records, _Doubles]:
        """Return samples, and the probabilities that their labels were drawn with."""
        numbers = np.asarray(numbers, np.int64)
        dense = _normal(self._seed, _DENSE, numbers[:, None], np.arange(self.num_dense)).astype(np.float32)
        uniform = _uniform(self._seed, _ID, numbers[:, None], np.arange(len(self.num_rows)))
        rows, effects, factors = [], [], []
        for table, sampler in enumerate(self._samplers):
            # A set is made once for all samples that have its id: in a large batch most ids are the hot ones.
            ids, of_sample = np.unique(sampler.rows(sampler.ranks(uniform[:, table])), return_inverse=True)
            bags = self._bags(table, ids)
            rows.append(bags[of_sample])
            effects.append(self._pooled(_EFFECT, table, bags)[of_sample])
            factors.append(self._pooled(_FACTOR, table, bags)[of_sample])
        probabilities = self._probabilities(dense.astype(np.float64), np.stack(effects, 1), np.stack(factors, 1))
        labels = _uniform(self._seed, _LABEL, numbers) < probabilities
        return Records(dense, np.concatenate(rows, axis=1), labels.astype(np.float32)), probabilities

    def _bags(self, table: int, ids: IntArray) -> IntArray:
        """Return the rows of each id, `[n, hotness]`: the id, then others."""
        others = _hash(self._seed, _BAG, table, ids[:, None], np.arange(1, self.hotness[table]))
        others = (others % np.uint64(self.num_rows[table])).astype(np.int64)
        return np.concatenate([ids[:, None], others], axis=1)

    def _pooled(self, purpose: int, table: int, bags: IntArray) -> _Doubles:
        """Return the sum of the rows' numbers over each bag, `[n]`, divided by the root of its lookups."""
        return np.asarray(_normal(self._seed, purpose, table, bags).sum(axis=1) / math.sqrt(bags.shape[1]))

    def _probabilities(self, x: _Doubles, effects: _Doubles, factors: _Doubles) -> _Doubles:
        teacher = self.teacher
        num_features = effects.shape[1]
        pairs = factors[:, 0:-1:2] * factors[:, 1::2]
        crosses = factors * x[:, np.arange(num_features) % self.num_dense]
        products = (pairs.sum(axis=1) + crosses.sum(axis=1)) / math.sqrt(pairs.shape[1] + num_features)
        z = teacher.bias + teacher.row_scale * effects.sum(axis=1) / math.sqrt(num_features)
        z += teacher.dense_scale * (x @ self._weights) / np.linalg.norm(self._weights)
        z += teacher.pair_scale * products
        return np.asarray(1.0 / (1.0 + np.exp(-z)))
