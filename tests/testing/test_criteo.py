"""The reader of Criteo-format files: every variant of the format, and every malformed line."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from criteo_cases import criteo_line, write

from persistent_ops.testing import criteo
from persistent_ops.testing.dlrm_batch import DLRM_ROWS

ROWS = tuple(min(rows, 1000) for rows in DLRM_ROWS)


def read(path: Path, batch_size: int = 4) -> list[criteo.CriteoBatch]:
    return list(criteo.read_batches(path, batch_size=batch_size, num_rows=ROWS))


def check_samples(batches: Sequence[criteo.CriteoBatch], num_samples: int) -> None:
    """Compare what was read with an independent reading of `criteo_line`."""
    assert sum(batch.batch_size for batch in batches) == num_samples
    number = 0
    for batch in batches:
        starts = [np.concatenate([[0], np.cumsum(feature.lengths)]) for feature in batch.categorical]
        for sample in range(batch.batch_size):
            fields = criteo_line(number).split("\t")
            assert batch.labels[sample] == float(fields[0])
            for column in range(13):
                value = batch.dense[sample, column]
                assert math.isnan(value) if fields[1 + column] == "" else value == float(fields[1 + column])
            for table, feature in enumerate(batch.categorical):
                bag = feature.indices[starts[table][sample] : starts[table][sample + 1]].tolist()
                text = fields[14 + table]
                assert bag == ([int(text, 16) % ROWS[table]] if text else [])
            number += 1


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("header", [False, True])
def test_reads_every_variant_of_the_format(tmp_path: Path, separator: str, compressed: bool, header: bool) -> None:
    lines = [criteo_line(number, separator) for number in range(11)]
    if header:
        names = ["label", *[f"I{n}" for n in range(1, 14)], *[f"C{n}" for n in range(1, 27)]]
        lines.insert(0, separator.join(names))
    path = write(tmp_path / "day_0", lines)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))  # the name says nothing: the content is recognized
    batches = read(path)
    assert [batch.batch_size for batch in batches] == [4, 4, 3]
    check_samples(batches, 11)


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n\n"])
def test_line_endings_and_a_missing_last_one(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "data"
    between = "\r\n" if ending == "\r\n" else "\n"
    path.write_bytes((between.join(criteo_line(number) for number in range(3)) + ending).encode())
    check_samples(read(path), 3)


def changed(column: int, value: str) -> str:
    fields = criteo_line(1).split("\t")
    fields[column] = value
    return "\t".join(fields)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (criteo_line(1) + "\tff", "expected 40 columns separated by a tab (label, 13 dense, 26 categorical), found 41"),
        ("\t".join(criteo_line(1).split("\t")[:39]), "found 39"),
        ("garbage", "found 1"),
        (changed(0, ""), "the label is empty; expected a number"),
        (changed(0, "yes"), "label is 'yes'; expected a number"),
        (changed(3, "12x"), "dense column 3 is '12x'; expected a number"),
        (changed(3, "nan"), "dense column 3 is 'nan'; expected a number"),
        (changed(3, "1e39"), "dense column 3 is '1e39'; expected a finite number of float32"),
        (changed(14, "xyz"), "categorical column 1 is 'xyz'; expected 1 to 16 hexadecimal digits"),
        (changed(39, "0x12"), "categorical column 26 is '0x12'; expected 1 to 16 hexadecimal digits"),
        (changed(39, "-1"), "categorical column 26 is '-1'"),
        (changed(20, "f" * 1000), "categorical column 7 is 'ffffffffffffffffffffffffffffffffffffffff...'"),
        ("", "the line is empty, but more lines follow"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "data.tsv", [criteo_line(0), criteo_line(1), line, criteo_line(2)])
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(message)):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\t".join([b"label"] + [b"x"] * 39) + b"\n"])
def test_a_file_without_samples_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no sample"):
        read(path)


def test_damaged_gzip_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    content = gzip.compress("".join(criteo_line(number) + "\n" for number in range(2000)).encode())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=re.escape(str(path)) + ", after line .*gzip"):
        read(path, 100)
