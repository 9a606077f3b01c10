"""Click logs as numbered samples, independent of the file's format, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Batch", "IntArray", "Joined", "Records", "Source", "Span", "feature_major"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Records:
    """Some samples of a source, in the order in which they were asked for.

    Attributes:
        dense: `[n, num_dense]`, float32, finite.
        rows: `[n, sum of hotness]`, int32 or int64: the columns of feature 0, then of feature 1, and so on. A
            negative number is no lookup.
        labels: `[n]`, float32, 0 or 1.
    """

    dense: npt.NDArray[np.float32]
    rows: npt.NDArray[np.integer[Any]]
    labels: npt.NDArray[np.float32]


class Source(Protocol):
    """A click log whose samples have the numbers 0 to num_samples - 1.

    Attributes:
        num_samples: in all.
        num_dense: dense columns of a sample.
        num_rows: of each feature's table; every row is below it.
        hotness: of each feature, the most lookups that a sample may have.
    """

    num_samples: int
    num_dense: int
    num_rows: tuple[int, ...]
    hotness: tuple[int, ...]

    def read(self, numbers: IntArray) -> Records:
        """Return these samples, in this order; ValueError, with file and record, where one is malformed."""

    def identity(self) -> dict[str, Any]:
        """Return this source's identity, made of types of JSON: a checkpoint of another source is refused."""


@dataclass(frozen=True)
class Batch:
    """One PE's samples of one step.

    Attributes:
        dense: `[B, num_dense]`, float32.
        values: `[n]`, the rows looked up, as in TorchRec's KeyedJaggedTensor: all of feature 0, sample by sample, then
            all of feature 1, and so on.
        lengths: `[T * B]`: how many of them feature t has in sample b is lengths[t * B + b]. Of the dtype of `values`.
        labels: `[B]`, float32.
    """

    dense: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor

    @property
    def num_samples(self) -> int:
        """The number of samples B, which may be 0."""
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; copies from pinned memory do not block the host."""
        return Batch(*(each.to(device, non_blocking=True) for each in vars(self).values()))

    def pinned(self) -> Batch:
        """Return the batch in page-locked memory."""
        return Batch(*(each.pin_memory() for each in vars(self).values()))


def feature_major(records: Records, hotness: Sequence[int], dtype: torch.dtype = torch.int64) -> Batch:
    """Make a batch of samples.

    Args:
        records: the samples.
        hotness: columns of `records.rows` that each feature has.
        dtype: of values and lengths, torch.int64 or torch.int32.
    """
    integer = np.int32 if dtype == torch.int32 else np.int64
    features = np.split(records.rows, np.cumsum(hotness)[:-1], axis=1)
    if records.rows.size == 0 or records.rows.min() >= 0:  # nothing is left out, as in all formats but text
        values = np.empty(records.rows.size, integer)
        ends = np.cumsum([columns.size for columns in features])[:-1]
        for columns, own in zip(features, np.split(values, ends), strict=True):
            own.reshape(columns.shape)[:] = columns  # row by row, which is sample by sample
        lengths = np.repeat(np.asarray(hotness, integer), len(records.rows))
    else:
        are_lookups = [columns >= 0 for columns in features]
        values = np.concatenate([columns[own] for columns, own in zip(features, are_lookups, strict=True)])
        lengths = np.concatenate([own.sum(axis=1) for own in are_lookups])
    return Batch(
        torch.from_numpy(records.dense),
        torch.from_numpy(values).to(dtype),
        torch.from_numpy(lengths).to(dtype),
        torch.from_numpy(records.labels),
    )


class Span:
    """Consecutive samples of a source, such as the half of a day that validates.

    Args:
        source: of the samples.
        first: number of the first one.
        num_samples: how many.

    Raises:
        ValueError: the source has no such samples.
    """

    def __init__(self, source: Source, first: int, num_samples: int) -> None:
        if first < 0 or num_samples < 1 or first + num_samples > source.num_samples:
            raise ValueError(
                f"expected 1 or more of the samples 0 to {source.num_samples - 1}, got {num_samples} from {first} on"
            )
        self._source = source
        self._first = first
        self.num_samples = num_samples
        self.num_dense = source.num_dense
        self.num_rows = source.num_rows
        self.hotness = source.hotness

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        return self._source.read(numbers + self._first)

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {"of": self._source.identity(), "first": self._first, "num_samples": self.num_samples}


class Joined:
    """Sources one after another, such as the days of a log.

    Args:
        sources: at least one; with the same columns and tables.

    Raises:
        ValueError: they differ in columns or tables, or there is none.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        shapes = {(each.num_dense, tuple(each.num_rows), tuple(each.hotness)) for each in sources}
        if len(shapes) != 1:
            raise ValueError(
                "expected sources with the same dense columns, tables and lookups per feature, got "
                + ("none" if not sources else "; ".join(map(str, sorted(shapes))))
            )
        self._sources = list(sources)
        self._ends = np.cumsum([each.num_samples for each in sources])
        self.num_samples = int(self._ends[-1])
        self.num_dense = sources[0].num_dense
        self.num_rows = sources[0].num_rows
        self.hotness = sources[0].hotness

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        dense = np.empty((len(numbers), self.num_dense), np.float32)
        rows = np.empty((len(numbers), sum(self.hotness)), np.int64)
        labels = np.empty(len(numbers), np.float32)
        owners = np.searchsorted(self._ends, numbers, side="right")
        for owner in np.unique(owners):
            places = np.flatnonzero(owners == owner)
            source = self._sources[owner]
            part = source.read(numbers[places] - (self._ends[owner] - source.num_samples))
            dense[places], rows[places], labels[places] = part.dense, part.rows, part.labels
        return Records(dense, rows, labels)

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {"joined": [each.identity() for each in self._sources]}
