"""HugeCTR's raw format: records of one size, memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from persistent_ops.testing.dlrm_batch import DLRM_POOLING

from .checks import NUM_DENSE, checked, checked_tables
from .digests import digest_of_file
from .records import IntArray, Records

__all__ = ["RawFile"]

_ONE_AS_FLOAT = 0x3F800000  # the bits of 1.0


def _record(hotness: Sequence[int]) -> np.dtype[np.void]:
    """Return the layout of a sample, little-endian and without gaps."""
    return np.dtype([("label", "<u4"), ("dense", "<f4", (NUM_DENSE,)), ("ids", "<i4", (sum(hotness),))])


class RawFile:
    """A file in HugeCTR's raw format: for each sample a label, 13 float32, and the int32 ids of all features in order.

    The label is an int32, as HugeCTR's conversion of MLPerf's files writes it, or a float32: 0 has the same bits in
    both; 1 has not. With MLPerf's lookups a sample has 912 bytes.

    Args:
        path: of the file.
        num_rows: of the tables; a row is the id modulo this.
        hotness: ids of each feature; the file itself does not say.

    Raises:
        ValueError: the file's size is not a multiple of the record's size. A malformed value is found when its sample
            is read; the error then names file and record.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path, *, num_rows: Sequence[int], hotness: Sequence[int] = DLRM_POOLING) -> None:
        self.num_rows, self.hotness = checked_tables(num_rows, hotness)
        self.num_dense = NUM_DENSE
        self._path = Path(path)
        layout = _record(self.hotness)
        num_bytes = self._path.stat().st_size
        self.num_samples, rest = divmod(num_bytes, layout.itemsize)
        expected = (
            f"{path} has {num_bytes} bytes; expected records of {layout.itemsize} (label, {NUM_DENSE} float32, "
            f"{sum(self.hotness)} int32)"
        )
        if not self.num_samples:
            raise ValueError(f"{expected}, at least one")
        if rest:
            raise ValueError(f"{expected}, but {rest} bytes follow record {self.num_samples - 1}")
        self._records = np.memmap(self._path, layout, "r")

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        found = np.asarray(self._records[numbers])
        return checked(
            np.ascontiguousarray(found["dense"]),
            [found["ids"]],
            _labels(found["label"]),
            num_rows=self.num_rows,
            hotness=self.hotness,
            where=lambda _, place: f"{self._path}, record {numbers[place]}",
        )

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        told = {"file": self._path.name, "num_samples": self.num_samples, "contents": digest_of_file(self._path)}
        return {"format": "raw", **told}


def _labels(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Return labels of either type."""
    is_float = bits == _ONE_AS_FLOAT
    return np.where(is_float, np.float32(1), bits.view(np.int32).astype(np.float32))
