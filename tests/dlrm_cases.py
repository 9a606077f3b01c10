"""Click logs for tests, as arrays and in file formats. The numbers depend on the sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dlrm.records import Records

HOTNESS = (2, 1, 3)
ROWS = (11, 4, 1000)


@dataclass(frozen=True)
class Log:
    """A log as arrays: dense `[N, 13]`, the ids of each feature `[N, hotness]`, labels `[N]`."""

    dense: np.ndarray[Any, Any]
    ids: list[np.ndarray[Any, Any]]
    labels: np.ndarray[Any, Any]

    def expected(self, numbers: list[int], num_rows: tuple[int, ...] = ROWS) -> Records:
        """Return what a source must read."""
        rows = [ids[numbers].astype(object) % table for ids, table in zip(self.ids, num_rows, strict=True)]
        found = np.concatenate(rows, axis=1).astype(np.int64)  # by Python's rule
        return Records(self.dense[numbers], found, self.labels[numbers].astype(np.float32))


def drawn_log(num_samples: int, hotness: tuple[int, ...] = HOTNESS, seed: int = 0) -> Log:
    drawer = np.random.default_rng((seed, num_samples))
    return Log(
        drawer.normal(size=(num_samples, 13)).astype(np.float32),
        [drawer.integers(-(2**31), 2**31, size=(num_samples, hot)).astype(np.int32) for hot in hotness],
        drawer.integers(0, 2, size=num_samples).astype(np.int32),
    )


def write_day(folder: Path, day: int, log: Log, *, multi_hot: bool = True) -> None:
    """Write a day in the format of MLPerf's scripts."""
    np.save(folder / f"day_{day}_dense.npy", log.dense)
    np.save(folder / f"day_{day}_labels.npy", log.labels.reshape(-1, 1))
    if multi_hot:
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **{str(number): ids for number, ids in enumerate(log.ids)})
    else:
        np.save(folder / f"day_{day}_sparse.npy", np.concatenate(log.ids, axis=1))


def write_raw_bytes(path: Path, log: Log) -> Path:
    """Write a log in the format of HugeCTR's conversion script: per sample the label, dense columns, and ids."""
    ids = np.concatenate(log.ids, axis=1)
    samples = zip(log.labels, log.dense, ids, strict=True)
    path.write_bytes(b"".join(label.tobytes() + dense.tobytes() + own.tobytes() for label, dense, own in samples))
    return path


def same_records(one: Records, other: Records) -> bool:
    """Return whether all numbers are equal and the dtypes are permitted ones."""
    if one.rows.dtype not in (np.int32, np.int64):
        return False
    pairs = [(one.dense, other.dense), (one.labels, other.labels)]
    return np.array_equal(one.rows, other.rows) and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
