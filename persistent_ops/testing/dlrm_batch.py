"""A synthetic DLRM batch with the shape of MLPerf's recommendation benchmark.

Table sizes and the number of lookups per sample are public facts of MLPerf Training's recommendation_v2 benchmark
(DLRM-DCNv2 on the multi-hot Criteo data set). The rows to look up are drawn from a Zipf distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .lookups import FeatureLookups, IntArray

__all__ = ["DLRM_DIM", "DLRM_POOLING", "DLRM_ROWS", "ZIPF_EXPONENT", "ZipfSampler", "draw_feature"]

# fmt: off
DLRM_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
DLRM_POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
DLRM_DIM = 128
ZIPF_EXPONENT = 1.05

# Ranks up to here have their probability summed exactly. Beyond it, the sum over ranks is replaced by the integral from
# k - 1/2 to k + 1/2, whose relative error is below s(s+1)/(24 k^2): under 1e-10 from this rank on.
_NUM_HEAD_RANKS = 1 << 16


@dataclass(frozen=True)
class ZipfSampler:
    """A Zipf distribution over a finite number of rows, sampled through the inverse of its cumulative distribution.

    Rank k (1 is the hottest) has probability k^-exponent / sum over all ranks. Memory does not grow with the number of
    rows. The hottest ranks are spread over the table by a fixed permutation, so that they do not share its first rows.

    Attributes:
        num_rows: rows of the table, at least 1.
        exponent: at least 0; 0 is the uniform distribution.
    """

    num_rows: int
    exponent: float = ZIPF_EXPONENT

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {self.num_rows}")
        if not (math.isfinite(self.exponent) and self.exponent >= 0):
            raise ValueError(f"exponent must be a finite number of at least 0, got {self.exponent}")

    @functools.cached_property
    def _head(self) -> npt.NDArray[np.float64]:
        """Cumulative, unnormalized mass of the ranks that are summed exactly."""
        ranks = np.arange(1, min(self.num_rows, _NUM_HEAD_RANKS) + 1, dtype=np.float64)
        return np.cumsum(ranks**-self.exponent)

    def _integral(self, x: float) -> float:
        """Return an antiderivative of x^-exponent."""
        return math.log(x) if self.exponent == 1 else x ** (1 - self.exponent) / (1 - self.exponent)

    def _inverse_integral(self, y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.exponent == 1:
            return np.asarray(np.exp(y))
        return np.asarray(((1 - self.exponent) * y) ** (1 / (1 - self.exponent)))

    def ranks(self, uniform: npt.NDArray[np.float64]) -> IntArray:
        """Map uniform numbers of [0, 1) to ranks of 1 .. num_rows; larger numbers map to larger ranks.

        Args:
            uniform: any number of float64 values in [0, 1).

        Returns:
            One rank per value, int64, of the same shape.
        """
        head = self._head
        head_mass = float(head[-1])
        tail_start = self._integral(len(head) + 0.5)
        tail_mass = self._integral(self.num_rows + 0.5) - tail_start if self.num_rows > len(head) else 0.0
        mass = uniform * (head_mass + tail_mass)
        ranks = np.searchsorted(head, mass, side="right").astype(np.int64) + 1
        in_tail = mass >= head_mass
        if tail_mass > 0:
            ranks[in_tail] = np.rint(self._inverse_integral(tail_start + (mass[in_tail] - head_mass))).astype(np.int64)
            ranks[in_tail] = np.maximum(ranks[in_tail], len(head) + 1)
        return np.minimum(ranks, self.num_rows)  # rounding at the very end of the distribution

    def rows(self, ranks: IntArray) -> IntArray:
        """Map ranks of 1 .. num_rows to distinct rows of 0 .. num_rows - 1, neighbors far apart."""
        return ((ranks - 1) * _stride(self.num_rows)) % self.num_rows

    def draw(self, generator: np.random.Generator, count: int) -> IntArray:
        """Draw `count` rows, int64."""
        return self.rows(self.ranks(generator.random(count)))


def _stride(num_rows: int) -> int:
    """Return a number near the golden section of num_rows that shares no divisor with it: multiples visit every row."""
    stride = max(1, round(num_rows * 0.6180339887498949))
    while math.gcd(stride, num_rows) != 1:
        stride += 1
    return stride


@functools.lru_cache(maxsize=64)
def _sampler(num_rows: int, exponent: float) -> ZipfSampler:
    return ZipfSampler(num_rows, exponent)


def draw_feature(
    table: int, *, seed: int, step: int, batch_size: int, num_rows: Sequence[int], exponent: float = ZIPF_EXPONENT
) -> FeatureLookups:
    """Draw the lookups of one feature for the global batch of one step.

    Every PE gets the same lookups from the same arguments, with no communication; features and steps are independent.

    Args:
        table: which of the 26 features.
        seed: of the whole run.
        step: number of the batch.
        batch_size: samples of the global batch, B.
        num_rows: rows of the 26 tables.
        exponent: of the Zipf distribution.

    Returns:
        B bags of DLRM_POOLING[table] rows each; a row may occur twice in a bag.
    """
    pooling = DLRM_POOLING[table]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, table))))
    indices = _sampler(num_rows[table], exponent).draw(generator, batch_size * pooling)
    return FeatureLookups(indices, np.full(batch_size, pooling, np.int64))
