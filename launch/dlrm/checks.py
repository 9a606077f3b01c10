"""What all readers check of the samples that they have read; an error names file and record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from persistent_ops.demo.synthetic import DLRM_POOLING

from .records import Records

__all__ = ["MLPERF_HOTNESS", "NUM_DENSE", "checked", "checked_tables"]

NUM_DENSE = 13  # of the Criteo logs, in every format
MLPERF_HOTNESS = DLRM_POOLING


def checked_tables(num_rows: Sequence[int], hotness: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return tables and lookups per feature; ValueError where they do not belong together."""
    if not num_rows or len(num_rows) != len(hotness):
        raise ValueError(
            f"num_rows and hotness: expected one number for each feature, got {len(num_rows)} and {len(hotness)}"
        )
    if min(num_rows) < 1 or min(hotness) < 1:
        raise ValueError(f"num_rows and hotness must be positive, got {list(num_rows)} and {list(hotness)}")
    return tuple(num_rows), tuple(hotness)


def checked(
    dense: npt.NDArray[np.float32],
    ids: npt.NDArray[np.integer[Any]],
    labels: npt.NDArray[np.float32],
    *,
    num_rows: Sequence[int],
    hotness: Sequence[int],
    where: Callable[[str, int], str],
) -> Records:
    """Turn what a file holds into records; a row is an id modulo the rows of its table, as MLPerf has it.

    Args:
        dense, ids, labels: as in `Records`, with ids for rows.
        num_rows, hotness: of the features.
        where: returns what names a sample, by the argument (dense, ids, labels) and the place in it.

    Raises:
        ValueError: a number is not finite, an id is negative, or a label is neither 0 nor 1.
    """
    if bad := _first(~np.isfinite(dense)):
        raise ValueError(f"{where('dense', bad[0])}: dense column {bad[1]} is {dense[bad]}; expected a finite number")
    if ids.dtype not in (np.int32, np.int64):
        ids = ids.astype(np.int64)
    features = np.repeat(np.arange(len(hotness)), hotness)
    if ids.size and ids.min() < 0 and (bad := _first(ids < 0)):
        feature = features[bad[1]]
        raise ValueError(f"{where('ids', bad[0])}: an id of feature {feature} is {ids[bad]}; expected at least 0")
    if bad := _first((labels != 0) & (labels != 1)):
        raise ValueError(f"{where('labels', bad[0])}: the label is {labels[bad]}; expected 0 or 1")
    # Of the ids' dtype where that reaches so far: then there is no copy of all of them.
    table_rows = np.asarray(num_rows, ids.dtype if max(num_rows) <= np.iinfo(ids.dtype).max else np.int64)[features]
    if (ids >= table_rows).any():  # a division takes many times as long as a comparison, and most files need none
        ids = ids % table_rows
    return Records(dense, ids, labels)


def _first(is_bad: npt.NDArray[np.bool_]) -> tuple[int, ...] | None:
    """Return where the first true value stands, or None."""
    return tuple(int(place) for place in np.argwhere(is_bad)[0]) if is_bad.any() else None
