"""HugeCTR's raw format: records of one size, memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .checks import MLPERF_HOTNESS, NUM_DENSE, checked, checked_tables
from .digests import digest_of_file
from .records import IntArray, Records, Source

__all__ = ["RawFile", "write_raw"]

_ONE_AS_FLOAT = 0x3F800000  # the bits of 1.0
_WRITE_SAMPLES = 8192


def _record(hotness: Sequence[int]) -> np.dtype[np.void]:
    """Return the layout of a sample, little-endian and without gaps."""
    return np.dtype([("label", "<u4"), ("dense", "<f4", (NUM_DENSE,)), ("ids", "<i4", (sum(hotness),))])


class RawFile:
    """A file in HugeCTR's raw format: for each sample a label, 13 float32, and the int32 ids of all features in order.

    The label is an int32, as HugeCTR's conversion of MLPerf's files writes it, or a float32: 0 has the same bits in
    both, and 1 tells them apart. With MLPerf's lookups a sample has 912 bytes.

    Args:
        path: of the file.
        num_rows: of the tables; a row is the id modulo this.
        hotness: ids of each feature; the file itself does not say.

    Raises:
        ValueError: the file's size is that of no number of records. A value that does not do is found, and named by
            file and record, when its sample is read.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path, *, num_rows: Sequence[int], hotness: Sequence[int] = MLPERF_HOTNESS) -> None:
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


def write_raw(source: Source, path: str | Path) -> None:
    """Write a source in HugeCTR's raw format, so that what takes time to make or to parse is mapped from then on.

    Args:
        source: with 13 dense columns and `hotness` lookups in every bag.
        path: of the file; an existing one is replaced.

    Raises:
        ValueError: the source has other dense columns, or rows beyond int32, or a bag with less lookups: the format has
            no empty place.
    """
    if source.num_dense != NUM_DENSE:
        raise ValueError(f"{path}: the format has {NUM_DENSE} dense columns, the source has {source.num_dense}")
    if max(source.num_rows) > 2**31:
        raise ValueError(f"{path}: the format has ids of int32, the source has a table of {max(source.num_rows)} rows")
    layout = _record(source.hotness)
    with Path(path).open("wb") as file:
        for first in range(0, source.num_samples, _WRITE_SAMPLES):
            numbers = np.arange(first, min(first + _WRITE_SAMPLES, source.num_samples), dtype=np.int64)
            records = source.read(numbers)
            is_short = (records.rows < 0).any(axis=1)
            if is_short.any():
                sample = first + int(np.argmax(is_short))
                raise ValueError(f"{path}: sample {sample} has fewer lookups than its features' {source.hotness}")
            packed = np.empty(len(numbers), layout)
            packed["label"], packed["dense"], packed["ids"] = records.labels, records.dense, records.rows
            file.write(packed.tobytes())
