"""Batches: their form, their samples, and the order of the samples; also after an interruption."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from dlrm.batches import Batches
from dlrm.click_log import ClickLog
from dlrm.records import IntArray, Records, feature_major

CPU = torch.device("cpu")


class Numbered:
    """A source whose samples contain their number: it is the only dense column, and the row."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_dense = 1
        self.num_rows = (10**6,)
        self.hotness = (1,)

    def read(self, numbers: IntArray) -> Records:
        dense = numbers[:, None].astype(np.float32)
        return Records(dense, numbers[:, None], (numbers % 2).astype(np.float32))

    def identity(self) -> dict[str, Any]:
        return {"numbered": self.num_samples}


def epoch_of(num_samples: int, batch_size: int, world_size: int = 1, epoch: int = 0, **options: Any) -> list[list[int]]:
    """Return the numbers of each global batch, put together from the shares of all PEs."""
    shares = [
        Batches(Numbered(num_samples), batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    counts = {each.num_batches for each in shares}
    assert len(counts) == 1
    found = []
    for batch in range(counts.pop()):
        parts = [share.read(epoch, batch) for share in shares]
        sizes = [part.num_samples for part in parts]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == shares[0].size(batch)
        assert all(torch.equal(part.values, part.dense[:, 0].long()) for part in parts)
        found.append([number for part in parts for number in part.values.tolist()])
    return found


def joined(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


# ---- form ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lookups_are_feature_major(dtype: torch.dtype) -> None:
    rows = np.array([[7, 8, 1, -1, -1], [5, -1, 2, 3, -1], [-1, 6, -1, 4, -1]], np.int64)
    dense = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch = feature_major(Records(dense, rows, np.array([1, 0, 1], np.float32)), (2, 2, 1), dtype)
    assert batch.values.tolist() == [7, 8, 5, 6, 1, 2, 3, 4]  # feature 0 of samples 0, 1, 2, then feature 1
    assert batch.lengths.tolist() == [2, 1, 1, 1, 2, 1, 0, 0, 0]
    assert batch.values.dtype == batch.lengths.dtype == dtype
    assert batch.dense.tolist() == dense.tolist() and batch.labels.tolist() == [1, 0, 1]
    assert batch.num_samples == 3 and batch.to(CPU).num_samples == 3


def test_a_batch_without_samples() -> None:
    batches = Batches(ClickLog(5, num_rows=(3, 4), hotness=(1, 2)), batch_size=2, rank=2, world_size=3)
    batch = batches.read(0, 2)
    assert batch.num_samples == 0 and batch.dense.shape == (0, 13)
    assert batch.values.numel() == batch.lengths.numel() == 0


# ---- order and shares ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_an_epoch_has_every_sample_once_however_many_pes(world_size: int, block: int) -> None:
    whole = epoch_of(103, 10, seed=3, shuffle_block=block)
    assert [len(batch) for batch in whole] == [10] * 10 + [3]
    assert sorted(joined(whole)) == list(range(103))
    assert epoch_of(103, 10, world_size, seed=3, shuffle_block=block) == whole


@pytest.mark.parametrize("num_samples", [103, 100, 1, 4])
def test_blocks_stay_together(num_samples: int) -> None:
    in_order = set()
    for epoch in range(12):  # the short block at the end of the file stands first, last and in between
        numbers = joined(epoch_of(num_samples, 10, epoch=epoch, seed=1, shuffle_block=4))
        starts = [place for place, number in enumerate(numbers) if number % 4 == 0]
        blocks = [numbers[a:b] for a, b in zip(starts, [*starts[1:], num_samples], strict=True)]
        assert all(block == list(range(block[0], min(block[0] + 4, num_samples))) for block in blocks)
        assert sorted(numbers) == list(range(num_samples))
        in_order.add(tuple(numbers))
    assert len(in_order) == (12 if num_samples > 90 else 1)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    one = epoch_of(50, 7, seed=1)
    assert epoch_of(50, 7, seed=1) == one
    assert epoch_of(50, 7, seed=2) != one and epoch_of(50, 7, seed=1, epoch=1) != one
    assert joined(one) != list(range(50))
    late = Batches(Numbered(50), batch_size=7, seed=1)
    late.read(9, 3)
    assert late.read(0, 2).values.tolist() == one[2]
    for epoch in (0, 5):
        assert joined(epoch_of(50, 7, epoch=epoch)) == list(range(50))  # without a seed


def test_what_does_not_fill_a_batch() -> None:
    kept = Batches(Numbered(103), batch_size=10)
    assert (kept.num_batches, kept.size(9), kept.size(10)) == (11, 10, 3)
    assert kept.describe() == "103 samples in 11 batches of 10, the last one of 3"
    assert Batches(Numbered(100), batch_size=10).describe() == "100 samples in 10 batches of 10"
    assert Batches(Numbered(3), batch_size=10).num_batches == 1


# ---- the stream ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_readers", [1, 2, 5])
def test_a_stream_goes_from_any_position_to_any_other(num_readers: int) -> None:
    batches = Batches(Numbered(23), batch_size=5, seed=4, num_readers=num_readers)
    whole = [batches.read(epoch, batch).values.tolist() for epoch in range(3) for batch in range(5)]
    for first, last in ((0, 15), (3, 7), (5, 10), (14, 15), (7, 7), (9, 2)):
        found = list(batches.stream(divmod(first, 5), divmod(last, 5), CPU))
        assert [batch.values.tolist() for batch in found] == whole[first:last]


class Slow(Numbered):
    """A source that notes who reads, and fails with sample 12."""

    def __init__(self) -> None:
        super().__init__(20)
        self.threads: list[str] = []

    def read(self, numbers: IntArray) -> Records:
        self.threads.append(threading.current_thread().name)
        if 12 in numbers:
            raise ValueError("file, record 12: is wrong")
        return super().read(numbers)


def test_the_next_batch_is_read_meanwhile_and_an_error_comes_with_its_batch() -> None:
    source = Slow()
    batches = Batches(source, batch_size=4)
    stream = batches.stream((0, 0), (1, 0), CPU)
    next(stream)
    deadline = time.monotonic() + 30
    while len(source.threads) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # for one that reads too far ahead
    assert len(source.threads) == 2 and all(name.startswith("batches") for name in source.threads)
    assert next(stream).num_samples == next(stream).num_samples == 4
    with pytest.raises(ValueError, match="file, record 12: is wrong"):
        next(stream)
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")]


def test_a_stream_that_is_left_leaves_no_thread() -> None:
    with contextlib.closing(Batches(Slow(), batch_size=4).stream((0, 0), (1, 0), CPU)) as stream:
        next(stream)
    assert not [each for each in threading.enumerate() if each.name.startswith("batches")]
