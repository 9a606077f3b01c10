"""Reader of Criteo-format click logs: label, 13 dense columns, 26 categorical columns in hexadecimal.

The format is the format of the Criteo Kaggle and Terabyte data sets: one sample a line, fields separated by tabs (or by
commas, as in many derived files); any of the dense and categorical fields may be empty.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .lookups import FeatureLookups, rows_of

__all__ = ["NUM_CATEGORICAL", "NUM_DENSE", "CriteoBatch", "read_batches"]

NUM_DENSE = 13
NUM_CATEGORICAL = 26
_NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
_FIRST_CATEGORICAL = 1 + NUM_DENSE

_NUMBER = r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_HEX = r"[0-9a-fA-F]{1,16}"
_NAME = re.compile(r"[\"']?[A-Za-z_][^\t,]*")
_Sample = tuple[int, list[str]]


@dataclass(frozen=True)
class CriteoBatch:
    """Some consecutive samples of a file.

    Attributes:
        labels: `[B]` float32, finite.
        dense: `[B, 13]` float32, finite; NaN where the field is empty.
        categorical: 26 features; an empty field is an empty bag, any other a bag of one row.
    """

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    categorical: tuple[FeatureLookups, ...]

    @property
    def batch_size(self) -> int:
        """Return the number of samples."""
        return len(self.labels)


def read_batches(path: str | Path, *, batch_size: int, num_rows: Sequence[int]) -> Iterator[CriteoBatch]:
    """Read a Criteo-format file batch by batch.

    Only one batch is held in memory. The separator is taken from the first line; a header line is skipped; a file that
    is compressed with gzip is recognized by its first bytes.

    Args:
        path: the file.
        batch_size: samples per batch; the last batch of the file may be smaller.
        num_rows: rows of the 26 tables. A row is the hexadecimal value modulo the table's rows (`rows_of`).

    Yields:
        The batches, in the file's order.

    Raises:
        ValueError: a line is malformed, or has a number beyond float32 (the message names file, line and what is
            wrong), the file holds no sample, its compressed data is damaged, or an argument is out of range.
        OSError: the file cannot be read.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(num_rows) != NUM_CATEGORICAL or min(num_rows) < 1:
        raise ValueError(f"num_rows must be {NUM_CATEGORICAL} positive numbers, one per table, got {list(num_rows)}")
    path = Path(path)
    samples: list[_Sample] = []
    for sample in _read_samples(path):
        samples.append(sample)
        if len(samples) == batch_size:
            yield _to_batch(path, samples, num_rows)
            samples = []
    if samples:
        yield _to_batch(path, samples, num_rows)


def _open_text(path: Path) -> io.TextIOWrapper:
    raw = path.open("rb")
    try:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw, mode="rb") if compressed else raw
        # Bytes that are no text become a character that no field may hold: the line is reported like any other.
        return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")  # type: ignore[type-var]
    except BaseException:
        raw.close()
        raise


def _read_samples(path: Path) -> Iterator[_Sample]:
    """Yield the line's number and the 40 fields of each sample, whose form is checked."""
    separator = ""
    line_pattern: re.Pattern[str] | None = None
    blank_line = 0
    num_samples = 0
    number = 0
    with _open_text(path) as stream:
        try:
            for number, text in enumerate(stream, start=1):
                line = text.rstrip("\r\n")
                if not line:
                    blank_line = blank_line or number  # allowed at the end of the file only
                    continue
                if blank_line:
                    raise ValueError(f"{path}, line {blank_line}: the line is empty, but more lines follow")
                if line_pattern is None:
                    separator = "\t" if "\t" in line else ","
                    line_pattern = _line_pattern(separator)
                    if _is_header(line.split(separator)):
                        continue
                if line_pattern.fullmatch(line) is None:
                    raise ValueError(f"{path}, line {number}: {_diagnose(line, separator)}")
                num_samples += 1
                yield number, line.split(separator)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}, after line {number}: the gzip data is damaged or cut off ({error})") from error
    if num_samples == 0:
        raise ValueError(f"{path} holds no sample; expected lines of {_NUM_COLUMNS} columns in Criteo's format")


def _line_pattern(separator: str) -> re.Pattern[str]:
    """Return what a whole well-formed line matches: one check a line, in C, instead of forty in Python."""
    columns = [_NUMBER, *[f"(?:{_NUMBER})?"] * NUM_DENSE, *[f"(?:{_HEX})?"] * NUM_CATEGORICAL]
    return re.compile(separator.join(columns))


def _is_header(fields: list[str]) -> bool:
    """Return whether fields are column names: as many as columns, and label and dense columns start with a letter."""
    return len(fields) == _NUM_COLUMNS and all(_NAME.fullmatch(field) for field in fields[:_FIRST_CATEGORICAL])


def _column_name(column: int) -> str:
    if column == 0:
        return "label"
    if column < _FIRST_CATEGORICAL:
        return f"dense column {column}"
    return f"categorical column {column - NUM_DENSE}"


def _shown(field: str) -> str:
    return repr(field if len(field) <= 40 else field[:40] + "...")


def _diagnose(line: str, separator: str) -> str:
    """Return the error of a malformed line."""
    fields = line.split(separator)
    if len(fields) != _NUM_COLUMNS:
        name = "tab" if separator == "\t" else "comma"
        return (
            f"expected {_NUM_COLUMNS} columns separated by a {name} (label, {NUM_DENSE} dense, {NUM_CATEGORICAL} "
            f"categorical), found {len(fields)}"
        )
    for column, value in enumerate(fields):
        if column == 0 and not value:
            return "the label is empty; expected a number"
        pattern, expected = (
            (_NUMBER, "a number") if column < _FIRST_CATEGORICAL else (_HEX, "1 to 16 hexadecimal digits")
        )
        if value and re.fullmatch(pattern, value) is None:
            return f"{_column_name(column)} is {_shown(value)}; expected {expected}"
    raise AssertionError(f"the line pattern and the column patterns disagree on {line!r}")


def _to_batch(path: Path, samples: list[_Sample], num_rows: Sequence[int]) -> CriteoBatch:
    lines, fields = zip(*samples, strict=True)
    columns = list(zip(*fields, strict=True))
    numbers = np.array([[value or "nan" for value in column] for column in columns[:_FIRST_CATEGORICAL]], np.float64)
    with np.errstate(over="ignore"):
        held = numbers.astype(np.float32)
    too_large = np.argwhere(np.isinf(held).T)
    if len(too_large):
        sample, column = too_large[0]
        shown = _shown(columns[column][sample])
        raise ValueError(
            f"{path}, line {lines[sample]}: {_column_name(column)} is {shown}; expected a finite number of float32"
        )
    features = []
    for values, table_rows in zip(columns[_FIRST_CATEGORICAL:], num_rows, strict=True):
        ids = np.array([int(value, 16) for value in values if value], dtype=np.uint64)
        lengths = np.array([1 if value else 0 for value in values], dtype=np.int64)
        features.append(FeatureLookups(rows_of(ids, table_rows).astype(np.int64, copy=False), lengths))
    return CriteoBatch(held[0], np.ascontiguousarray(held[1:].T), tuple(features))
