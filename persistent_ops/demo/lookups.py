"""The lookups of one global batch, in the form that the operators take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FeatureLookups", "concatenate"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FeatureLookups:
    """The lookups of one categorical feature, for the whole global batch.

    Attributes:
        indices: rows of the feature's table, `[n]` int64, sample by sample.
        lengths: how many of them each sample has, `[B]` int64; 0 is an empty bag.
    """

    indices: IntArray
    lengths: IntArray


def concatenate(features: Sequence[FeatureLookups]) -> tuple[IntArray, IntArray]:
    """Join the lookups of several features, feature-major.

    Args:
        features: T features of the same batch size B.

    Returns:
        indices `[n]` and offsets `[T*B+1]`: bag i = t*B+b, of feature t and sample b, is
        indices[offsets[i]:offsets[i+1]].
    """
    if not features:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    lengths = np.concatenate([feature.lengths for feature in features])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.concatenate([feature.indices for feature in features]), offsets
