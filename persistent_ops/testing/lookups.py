"""The lookups of one global batch, in the form that the operators take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FeatureLookups", "concatenate", "rows_of"]

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


def rows_of(ids: npt.NDArray[np.integer[Any]], num_rows: int | Sequence[int]) -> npt.NDArray[np.integer[Any]]:
    """Return the rows that a click log's ids stand for: ids modulo rows, from 0 on, by Python's rule.

    Args:
        ids: `[...]` of any integer dtype.
        num_rows: of the table, or of the table of each id along the last axis.

    Returns:
        `[...]` int32 or int64; the ids themselves where they are rows already.
    """
    # In a dtype that holds both: numpy would take uint64 modulo int64 in float64.
    dtype = ids.dtype if np.max(num_rows) <= np.iinfo(ids.dtype).max else np.dtype(np.int64)
    ids, rows = ids.astype(dtype, copy=False), np.asarray(num_rows, dtype)
    # A division takes many times as long as a comparison, and most files need none.
    if ids.size and (ids.min() < 0 or (ids >= rows).any()):
        ids = ids % rows
    return ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int64)
