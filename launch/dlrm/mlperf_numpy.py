"""MLPerf's files: labels, dense columns and one-hot (.npy) or multi-hot (.npz) ids of each day; all memory-mapped."""

from __future__ import annotations

import contextlib
import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from .checks import NUM_DENSE, checked, checked_tables
from .digests import digest_of_file
from .records import IntArray, Joined, Records, Source, Span

__all__ = ["NumpyDay", "numpy_day", "numpy_days"]

_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name (PKWARE's APPNOTE, 4.3.7)
_Array = np.ndarray[Any, Any]


def numpy_day(folder: str | Path, day: int, *, num_rows: Sequence[int]) -> NumpyDay:
    """Open a day by the names that MLPerf gives: day_N_labels.npy, day_N_dense.npy, day_N_sparse_multi_hot.npz.

    Where there is no multi-hot file, day_N_sparse.npy is taken.

    Args:
        folder: of the files.
        day: 0 to 23 in the terabyte log, whose last one validates and tests.
        num_rows: of the tables.

    Raises:
        ValueError, OSError: see `NumpyDay`.
    """
    folder = Path(folder)
    multi_hot, one_hot = folder / f"day_{day}_sparse_multi_hot.npz", folder / f"day_{day}_sparse.npy"
    if not multi_hot.exists() and not one_hot.exists():
        raise FileNotFoundError(f"{folder} has neither {multi_hot.name} nor {one_hot.name}")
    sparse = multi_hot if multi_hot.exists() else one_hot
    return NumpyDay(folder / f"day_{day}_dense.npy", sparse, folder / f"day_{day}_labels.npy", num_rows=num_rows)


def numpy_days(folder: str | Path, num_days: int = 24, *, num_rows: Sequence[int]) -> tuple[Source, Source, Source]:
    """Open the days 0 to num_days - 1, divided as MLPerf does it.

    Args:
        folder: of the files; see `numpy_day`.
        num_days: at least 2.
        num_rows: of the tables.

    Returns:
        What trains, which is all days but the last; what validates, the first half of the last day, the larger one
        where they differ; and what tests, the rest of it.

    Raises:
        ValueError, OSError: see `NumpyDay`; or there are too few days, or samples in the last one.
    """
    if num_days < 2:
        raise ValueError(f"num_days must be at least 2, as the last one does not train, got {num_days}")
    days = [numpy_day(folder, day, num_rows=num_rows) for day in range(num_days)]
    last = days.pop()
    half = -(-last.num_samples // 2)
    return Joined(days), Span(last, 0, half), Span(last, half, last.num_samples - half)


class NumpyDay:
    """A day in MLPerf's files.

    Args:
        dense: `[N, 13]` float32, which are taken as they are; a `.npy` file.
        sparse: a `.npy` file, `[N, T]` of an integer dtype; or a `.npz` file whose members 0.npy to T-1.npy are
            `[N, hotness]` of an integer dtype. numpy.savez writes the latter, numpy.savez_compressed does not: what is
            compressed cannot be mapped.
        labels: `[N, 1]` or `[N]`, of any real dtype; a `.npy` file.
        num_rows: of the T tables; a row is the id modulo this, from 0 on, as in MLPerf's reference.

    Raises:
        ValueError: a file is malformed or cut off, or the files do not belong together; the message names it. A value
            that does not do is found, and named by file and record, when its sample is read.
        OSError: a file cannot be read.
    """

    def __init__(self, dense: str | Path, sparse: str | Path, labels: str | Path, *, num_rows: Sequence[int]) -> None:
        self._paths = {"dense": Path(dense), "ids": Path(sparse), "labels": Path(labels)}
        num_features = len(num_rows)
        self._dense = _mapped(Path(dense))
        if self._dense.ndim != 2 or self._dense.shape[1] != NUM_DENSE or self._dense.dtype != np.float32:
            raise ValueError(f"{dense}: expected [samples, {NUM_DENSE}] of float32, got {_shape(self._dense)}")
        self.num_samples, self.num_dense = self._dense.shape
        if not self.num_samples:
            raise ValueError(f"{dense} holds no sample")
        if Path(sparse).suffix == ".npz":
            self._features = _members(Path(sparse), num_features)
        else:
            ids = _mapped(Path(sparse))
            if ids.ndim != 2 or ids.shape[1] != num_features:
                raise ValueError(f"{sparse}: expected [samples, {num_features}] of integers, got {_shape(ids)}")
            self._features = [ids]
        for number, ids in enumerate(self._features):
            if ids.ndim != 2 or len(ids) != self.num_samples or ids.dtype.kind not in "iu":
                raise ValueError(
                    f"{sparse}, array {number}: expected [{self.num_samples}, lookups] of integers, as {dense} has so "
                    f"many samples, got {_shape(ids)}"
                )
        self._labels = _mapped(Path(labels))
        if self._labels.shape not in ((self.num_samples, 1), (self.num_samples,)):
            raise ValueError(f"{labels}: expected [{self.num_samples}, 1], got {_shape(self._labels)}")
        if self._labels.dtype.kind not in "biuf":
            raise ValueError(f"{labels}: expected real numbers, got {_shape(self._labels)}")
        is_one_hot = Path(sparse).suffix != ".npz"
        hotness = (1,) * num_features if is_one_hot else tuple(ids.shape[1] for ids in self._features)
        self.num_rows, self.hotness = checked_tables(num_rows, hotness)

    def read(self, numbers: IntArray) -> Records:
        """See `Source`."""
        return checked(
            np.ascontiguousarray(self._dense[numbers]),
            [ids[numbers] for ids in self._features],
            self._labels[numbers].reshape(len(numbers)),
            num_rows=self.num_rows,
            hotness=self.hotness,
            where=lambda part, place: f"{self._paths[part]}, record {numbers[place]}",
        )

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {
            "format": "numpy",
            "files": [path.name for path in self._paths.values()],
            "num_samples": self.num_samples,
            "contents": [digest_of_file(path) for path in self._paths.values()],
        }


def _shape(array: _Array) -> str:
    return f"{list(array.shape)} of {array.dtype}"


def _mapped(path: Path) -> _Array:
    """Map a .npy file."""
    with path.open("rb") as file:
        return _array(file, str(path), path.stat().st_size)


def _members(path: Path, num_features: int) -> list[_Array]:
    """Map the arrays of an uncompressed .npz file; numpy itself reads such arrays whole."""
    with path.open("rb") as file:
        with _is_whole(str(path), ".npz file"):
            archive = zipfile.ZipFile(file)
        names = set(archive.namelist())
        expected = [f"{number}.npy" for number in range(num_features)]
        if names != set(expected):
            raise ValueError(
                f"{path}: expected the arrays 0 to {num_features - 1}, one for each table, got "
                f"{', '.join(sorted(name.removesuffix('.npy') for name in names))}"
            )
        return [_member(file, f"{path}, {name}", archive, archive.getinfo(name)) for name in expected]


def _member(file: IO[bytes], name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Array:
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name}: is compressed, and cannot be mapped; write it with numpy.savez")
    with _is_whole(name, ".npy array"):
        archive.open(member).close()  # which compares its own header with what the archive says
        file.seek(member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(_LOCAL_HEADER_BYTES)[26:])
        file.seek(name_bytes + extra_bytes, 1)
    return _array(file, name, file.tell() + member.file_size)


def _array(file: IO[bytes], name: str, end: int) -> _Array:
    """Map the array that begins at a file's position and ends at `end`."""
    with _is_whole(name, ".npy array"):
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_fortran, dtype = read_header[version](file)
        if dtype.hasobject:
            raise ValueError(f"holds Python's objects, {dtype}")
        begin, order = file.tell(), "F" if is_fortran else "C"
        array = np.asarray(np.memmap(file, dtype, "r", begin, shape, order))  # type: ignore[call-overload]
        if begin + array.nbytes != end:
            raise ValueError(f"{array.nbytes} bytes should follow its header, and {end - begin} do")
        return array


@contextlib.contextmanager
def _is_whole(name: str, kind: str) -> Iterator[None]:
    """Name the file in any error: damage ends in many kinds of errors of numpy, zipfile and tokenize."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} is no {kind}, or is cut off: {error}") from error
