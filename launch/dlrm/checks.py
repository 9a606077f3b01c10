"""Checks of samples, common to all readers. An error names file and record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from persistent_ops.testing.lookups import rows_of

from .records import Records

__all__ = ["NUM_DENSE", "checked", "checked_tables"]

NUM_DENSE = 13  # of the Criteo logs, in every format


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
    ids: Sequence[npt.NDArray[np.integer[Any]]],
    labels: npt.NDArray[np.generic],
    *,
    num_rows: Sequence[int],
    hotness: Sequence[int],
    where: Callable[[str, int], str],
) -> Records:
    """Turn a file's contents into records; a row is an id modulo the rows of its table (`rows_of`).

    Args:
        dense: as in `Records`.
        ids: side by side, of the same samples: `[n, ...]` each, sum of hotness columns in all, of any integer dtypes.
        labels: `[n]`, of any real dtype.
        num_rows, hotness: of the features.
        where: returns what names a sample, by the argument (dense, labels) and the place in it.

    Raises:
        ValueError: a number is not finite, or a label is neither 0 nor 1.
    """
    if bad := _first(~np.isfinite(dense)):
        raise ValueError(f"{where('dense', bad[0])}: dense column {bad[1]} is {dense[bad]}; expected a finite number")
    if bad := _first((labels != 0) & (labels != 1)):
        raise ValueError(f"{where('labels', bad[0])}: the label is {labels[bad]}; expected 0 or 1")
    if len({part.dtype for part in ids}) == 1:  # numpy would join int64 and uint64 in float64
        ids = [_side_by_side(ids)]  # and narrow arrays, one after the other, take twice as long
    table_rows = np.repeat(np.asarray(num_rows, np.int64), hotness)
    ends = np.cumsum([part.shape[1] for part in ids])
    rows = [rows_of(part, table_rows[end - part.shape[1] : end]) for part, end in zip(ids, ends, strict=True)]
    return Records(dense, _side_by_side(rows), labels.astype(np.float32))


def _side_by_side(parts: Sequence[npt.NDArray[np.integer[Any]]]) -> npt.NDArray[np.integer[Any]]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _first(is_bad: npt.NDArray[np.bool_]) -> tuple[int, ...] | None:
    """Return where the first true value stands, or None."""
    return tuple(int(place) for place in np.argwhere(is_bad)[0]) if is_bad.any() else None
