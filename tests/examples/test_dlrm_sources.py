"""Readers of click logs: every format reads what was written. Errors name the file and the record."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from criteo_cases import criteo_line, write
from dlrm.click_log import ClickLog
from dlrm.criteo_text import CriteoText
from dlrm.mlperf_numpy import numpy_day, numpy_days
from dlrm.raw import RawFile
from dlrm.records import Joined, Records, Source, Span
from dlrm_cases import HOTNESS, ROWS, Log, drawn_log, same_records, write_day, write_raw_bytes

NUMBERS = [5, 0, 19, 5, 7]  # out of order, and one twice
TEXT_ROWS = tuple(3 + 17 * table for table in range(26))


def read(source: Source, numbers: list[int]) -> Records:
    return source.read(np.array(numbers, np.int64))


def changed(log: Log, what: str, place: tuple[int, ...], value: float) -> Log:
    """Return a copy of a log with one number changed; `what` is dense, labels, or the number of a feature."""
    parts = {"dense": log.dense.copy(), "labels": log.labels.copy(), "ids": [ids.copy() for ids in log.ids]}
    (parts["ids"][int(what)] if what.isdigit() else parts[what])[place] = value
    return Log(**parts)


# ---- Criteo's text -------------------------------------------------------------------------------------------------


def expected_text(number: int) -> tuple[list[float], list[int], float]:
    """Return a line's dense columns, rows and label, from its fields."""
    fields = criteo_line(number).split("\t")
    dense = [math.log(max(float(field or 0), -2.0) + 3.0) for field in fields[1:14]]
    rows = [int(field, 16) % table if field else -1 for field, table in zip(fields[14:], TEXT_ROWS, strict=True)]
    return dense, rows, float(fields[0])


@pytest.mark.parametrize("compressed", [False, True])
def test_criteo_text(tmp_path: Path, compressed: bool) -> None:
    path = write(tmp_path / "day_0", [criteo_line(number) for number in range(20)])
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    source = CriteoText(path, num_rows=TEXT_ROWS)
    assert (source.num_samples, source.num_dense, source.hotness) == (20, 13, (1,) * 26)
    found = read(source, NUMBERS)
    expected = [expected_text(number) for number in NUMBERS]
    assert np.allclose(found.dense, [dense for dense, _, _ in expected], rtol=1e-6)
    assert found.rows.tolist() == [rows for _, rows, _ in expected]
    assert found.labels.tolist() == [label for _, _, label in expected]
    assert (found.rows == -1).any() and (found.rows > 0).any()
    assert [each.dtype for each in vars(found).values()] == [np.float32, np.int32, np.float32]


def test_criteo_text_that_does_not_do(tmp_path: Path) -> None:
    lines = [criteo_line(number) for number in range(5000)]
    lines[4500] = "3" + lines[4500][1:]
    path = write(tmp_path / "day_0", lines)
    with pytest.raises(ValueError, match=re.escape(f"{path}, record 4500: the label is 3.0; expected 0 or 1")):
        CriteoText(path, num_rows=TEXT_ROWS)
    lines[4500] = "no sample"
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 4501: expected 40 columns")):
        CriteoText(write(path, lines), num_rows=TEXT_ROWS)
    with pytest.raises(ValueError, match="has more than 10 samples"):
        CriteoText(write(path, lines[:11]), num_rows=TEXT_ROWS, most_samples=10)
    with pytest.raises(FileNotFoundError):
        CriteoText(tmp_path / "absent", num_rows=TEXT_ROWS)


# ---- MLPerf's arrays -----------------------------------------------------------------------------------------------


def test_multi_hot_arrays_are_mapped(tmp_path: Path) -> None:
    log = drawn_log(20)
    write_day(tmp_path, 3, log)
    source = numpy_day(tmp_path, 3, num_rows=ROWS)
    assert (source.num_samples, source.hotness) == (20, HOTNESS)
    assert same_records(read(source, NUMBERS), log.expected(NUMBERS))
    assert all(isinstance(array.base, np.memmap) or isinstance(array, np.memmap) for array in source._features)
    # What is mapped is read when it is asked for.
    other = changed(log, "2", (19, 1), 12345)
    with (tmp_path / "day_3_sparse_multi_hot.npz").open("r+b") as file:
        content = file.read()
        file.seek(content.index(log.ids[2].tobytes()) + (19 * 3 + 1) * 4)
        file.write(np.int32(12345).tobytes())
    assert same_records(read(source, NUMBERS), other.expected(NUMBERS))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_one_hot_arrays(tmp_path: Path, dtype: type) -> None:
    log = drawn_log(20, (1, 1, 1))
    log = Log(log.dense, [ids.astype(dtype) for ids in log.ids], log.labels)
    write_day(tmp_path, 0, log, multi_hot=False)
    source = numpy_day(tmp_path, 0, num_rows=ROWS)
    assert source.hotness == (1, 1, 1)
    assert same_records(read(source, NUMBERS), log.expected(NUMBERS))
    assert all(same_records(read(source, [each]), log.expected([each])) for each in range(20))  # of one sign, too
    write_day(tmp_path, 0, drawn_log(20))  # the multi-hot file comes first where there are both
    assert numpy_day(tmp_path, 0, num_rows=ROWS).hotness == HOTNESS


def test_arrays_in_fortran_s_order(tmp_path: Path) -> None:
    log = drawn_log(20)
    write_day(tmp_path, 0, Log(np.asfortranarray(log.dense), [np.asfortranarray(ids) for ids in log.ids], log.labels))
    assert same_records(read(numpy_day(tmp_path, 0, num_rows=ROWS), NUMBERS), log.expected(NUMBERS))


@pytest.mark.parametrize(
    ("what", "place", "value", "message"),
    [
        ("dense", (17, 4), np.nan, "record 17: dense column 4 is nan; expected a finite number"),
        ("dense", (17, 12), np.inf, "record 17: dense column 12 is inf"),
        ("labels", (17,), 2, "record 17: the label is {label}; expected 0 or 1"),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "raw"])
def test_values_that_do_not_do_are_named_when_they_are_read(
    tmp_path: Path, kind: str, what: str, place: tuple[int, ...], value: float, message: str
) -> None:
    log = changed(drawn_log(20), what, place, value)
    if kind == "numpy":
        write_day(tmp_path, 0, log)
        source: Source = numpy_day(tmp_path, 0, num_rows=ROWS)
        names = {"dense": "day_0_dense.npy", "labels": "day_0_labels.npy"}
        name = str(tmp_path / names.get(what, "day_0_sparse_multi_hot.npz"))
    else:
        source = RawFile(write_raw_bytes(tmp_path / "raw", log), num_rows=ROWS, hotness=HOTNESS)
        name = str(tmp_path / "raw")
    read(source, [0, 16, 18])
    expected = message.format(label="2" if kind == "numpy" else "2.0")
    with pytest.raises(ValueError, match=re.escape(f"{name}, {expected}")):
        read(source, [3, 17])


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _compress(path: Path) -> None:
    arrays = dict(np.load(path))
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("dense.npy", _shorten, "day_0_dense.npy is no .npy array, or is cut off"),
        ("sparse_multi_hot.npz", _shorten, "day_0_sparse_multi_hot.npz is no .npz file, or is cut off"),
        ("sparse_multi_hot.npz", _compress, "npz, 0.npy: is compressed, and cannot be mapped"),
        ("dense.npy", lambda path: np.save(path, np.zeros((20, 12), np.float32)), r"expected [samples, 13] of float32"),
        ("dense.npy", lambda path: np.save(path, np.zeros((20, 13))), "got [20, 13] of float64"),
        ("dense.npy", lambda path: np.save(path, np.zeros((0, 13), np.float32)), "day_0_dense.npy holds no sample"),
        ("labels.npy", lambda path: np.save(path, np.zeros((19, 1))), "labels.npy: expected [20, 1], got [19, 1]"),
        (
            "sparse_multi_hot.npz",
            lambda path: np.savez(path, **{"0": np.zeros((20, 1), int), "1": np.zeros((20, 2), int)}),
            "expected the arrays 0 to 2, one for each table, got 0, 1",
        ),
        (
            "sparse_multi_hot.npz",
            lambda path: np.savez(path, **{str(t): np.zeros((20 + t, 1), int) for t in range(3)}),
            "array 1: expected [20, lookups] of integers",
        ),
        (
            "sparse_multi_hot.npz",
            lambda path: np.savez(path, **{str(t): np.zeros((20, 1)) for t in range(3)}),
            "array 0: expected [20, lookups] of integers",
        ),
    ],
)
def test_arrays_that_do_not_do_are_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], message: str
) -> None:
    write_day(tmp_path, 0, drawn_log(20))
    spoil(tmp_path / f"day_0_{name}")
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        numpy_day(tmp_path, 0, num_rows=ROWS)
    assert f"day_0_{name}" in str(raised.value)


def test_one_hot_arrays_that_do_not_do_are_refused(tmp_path: Path) -> None:
    write_day(tmp_path, 0, drawn_log(20, (1, 1, 1)), multi_hot=False)
    with pytest.raises(ValueError, match=re.escape("day_0_sparse.npy: expected [samples, 4] of integers, got [20, 3]")):
        numpy_day(tmp_path, 0, num_rows=(*ROWS, 5))


# ---- HugeCTR's raw format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_type", [np.int32, np.float32])
def test_raw_files(tmp_path: Path, label_type: type) -> None:
    log = drawn_log(20)
    log = Log(log.dense, log.ids, log.labels.astype(label_type))
    assert {0, 1} == set(log.labels[NUMBERS].tolist())
    source = RawFile(write_raw_bytes(tmp_path / "raw", log), num_rows=ROWS, hotness=HOTNESS)
    assert source.num_samples == 20
    assert same_records(read(source, NUMBERS), log.expected(NUMBERS))


def test_mlperf_s_samples_have_912_bytes(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(912 * 3))
    source = RawFile(path, num_rows=(10,) * 26)
    assert source.num_samples == 3 and sum(source.hotness) == 214
    path.write_bytes(bytes(912 * 3 + 7))
    with pytest.raises(ValueError, match=r"raw has 2743 bytes; expected records of 912 .*but 7 bytes follow record 2"):
        RawFile(path, num_rows=(10,) * 26)
    path.write_bytes(bytes(900))
    with pytest.raises(ValueError, match="raw has 900 bytes; expected records of 912 .*at least one"):
        RawFile(path, num_rows=(10,) * 26)


# ---- parts and joins -----------------------------------------------------------------------------------------------


def test_the_last_day_validates_and_tests(tmp_path: Path) -> None:
    logs = [drawn_log(length, seed=length) for length in (7, 4, 11)]
    for day, log in enumerate(logs):
        write_day(tmp_path, day, log)
    train, validation, test = numpy_days(tmp_path, 3, num_rows=ROWS)
    assert [each.num_samples for each in (train, validation, test)] == [11, 6, 5]
    assert same_records(read(train, [7]), logs[1].expected([0]))
    assert same_records(read(validation, [0, 5]), logs[2].expected([0, 5]))
    assert same_records(read(test, [0, 4]), logs[2].expected([6, 10]))
    with pytest.raises(ValueError, match="num_days must be at least 2"):
        numpy_days(tmp_path, 1, num_rows=ROWS)
    with pytest.raises(FileNotFoundError, match="neither day_3_sparse"):
        numpy_days(tmp_path, 4, num_rows=ROWS)


def test_data_of_the_same_names_and_sizes_are_told_apart(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {"numpy": [], "raw": [], "text": []}
    for number, seed in enumerate((1, 1, 2)):
        log, folder = drawn_log(900, seed=seed), tmp_path / str(number)
        folder.mkdir()
        write_day(folder, 0, log)
        found["numpy"].append(numpy_day(folder, 0, num_rows=ROWS).identity())
        raw = write_raw_bytes(folder / "raw", log)
        found["raw"].append(RawFile(raw, num_rows=ROWS, hotness=HOTNESS).identity())
        text = write(folder / "text", [criteo_line(seed + line) for line in range(20)])
        found["text"].append(CriteoText(text, num_rows=TEXT_ROWS).identity())
    for name, (first, same, other) in found.items():
        assert first == same != other, name


def test_days_behind_one_another_and_spans_of_them(tmp_path: Path) -> None:
    logs = [drawn_log(length, seed=length) for length in (7, 1, 12)]
    for day, log in enumerate(logs):
        write_day(tmp_path, day, log)
    days = Joined([numpy_day(tmp_path, day, num_rows=ROWS) for day in range(3)])
    whole = Log(
        np.concatenate([log.dense for log in logs]),
        [np.concatenate(parts) for parts in zip(*(log.ids for log in logs), strict=True)],
        np.concatenate([log.labels for log in logs]),
    )
    assert days.num_samples == 20
    for numbers in (NUMBERS, list(range(20)), [6, 7, 8], []):
        assert same_records(read(days, numbers), whole.expected(numbers))
    span = Span(days, 6, 9)
    assert span.num_samples == 9 and same_records(read(span, [8, 0, 1]), whole.expected([14, 6, 7]))
    assert Span(days, 5, 9).identity() != span.identity() != days.identity()
    for first, length in ((-1, 3), (0, 21), (12, 9), (3, 0)):
        with pytest.raises(ValueError, match="expected 1 or more of the samples 0 to 19"):
            Span(days, first, length)
    with pytest.raises(ValueError, match="same dense columns, tables and lookups"):
        Joined([days, ClickLog(5, num_rows=ROWS, hotness=(2, 1, 4))])
