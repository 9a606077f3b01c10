"""Criteo's text format, as published. A file is read into memory once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from persistent_ops.testing.criteo import NUM_CATEGORICAL, read_batches
from persistent_ops.testing.lookups import FeatureLookups

from .checks import NUM_DENSE, checked_tables
from .digests import digest_of_arrays
from .records import IntArray, Records

__all__ = ["CriteoText"]

_READ_SAMPLES = 4096
_MOST_SAMPLES = 20_000_000


class CriteoText:
    """A file in Criteo's text format: label, 13 dense columns, 26 hexadecimal ones; tabs or commas, gzip or not.

    An empty dense field counts as 0, a dense value x becomes log(max(x, -2) + 3), which is what MLPerf's files hold of
    the terabyte log; an empty categorical field is an empty bag. A row is the id modulo the rows of its table.

    Text can only be read from its beginning, so that a PE holds all of it: 164 bytes a sample.

    Args:
        path: of the file.
        num_rows: of the 26 tables, at most 2^31.
        most_samples: what the file may have; a larger one is better converted to MLPerf's `.npy` files.

    Raises:
        ValueError: a line is malformed (the message names file and line), or there are more samples than that.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path, *, num_rows: Sequence[int], most_samples: int = _MOST_SAMPLES) -> None:
        self.num_rows, self.hotness = checked_tables(num_rows, (1,) * NUM_CATEGORICAL)
        if max(num_rows) > 2**31:
            raise ValueError(f"num_rows: expected at most {2**31} rows, got {max(num_rows)}")
        self.num_dense = NUM_DENSE
        self._path = Path(path)
        dense, rows, labels = [], [], []
        num_samples = 0
        for batch in read_batches(path, batch_size=_READ_SAMPLES, num_rows=self.num_rows):
            bad = np.flatnonzero((batch.labels != 0) & (batch.labels != 1))
            if len(bad):
                raise ValueError(
                    f"{path}, record {num_samples + bad[0]}: the label is {batch.labels[bad[0]]}; expected 0 or 1"
                )
            values = np.maximum(np.nan_to_num(batch.dense.astype(np.float64), nan=0.0), -2.0)
            dense.append(np.log(values + 3.0).astype(np.float32))
            rows.append(np.stack([_column(feature) for feature in batch.categorical], axis=1))
            labels.append(batch.labels)
            num_samples += batch.batch_size
            if num_samples > most_samples:
                raise ValueError(
                    f"{path} has more than {most_samples} samples, and text is held in memory; convert it to .npy "
                    "files as MLPerf does, or allow more"
                )
        self._dense, self._rows, self._labels = np.concatenate(dense), np.concatenate(rows), np.concatenate(labels)
        self.num_samples = num_samples

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        return Records(self._dense[numbers], self._rows[numbers], self._labels[numbers])

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        held = (self._dense, self._rows, self._labels)
        told = {"file": self._path.name, "num_samples": self.num_samples, "contents": digest_of_arrays(held)}
        return {"format": "criteo text", **told}


def _column(feature: FeatureLookups) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a feature's rows, -1 for an empty bag."""
    column = np.full(len(feature.lengths), -1, np.int32)
    column[feature.lengths > 0] = feature.indices
    return column
