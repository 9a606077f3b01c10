"""The samples of a batch: a function of seed, epoch and batch. The PEs share a batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from persistent_ops.nn import balanced_splits

from .records import Batch, IntArray, Source, feature_major

__all__ = ["Batches", "Position"]

Position = tuple[int, int]  # epoch, batch of the epoch


class Batches:
    """The global batches of a source, of which each PE reads its own samples.

    An epoch has every sample once. The last batch of an epoch is smaller where the batch size does not divide the
    number of samples; a PE may have no sample of it.

    Args:
        source: of the samples.
        batch_size: of the global batch.
        rank: of this PE.
        world_size: that share a batch; their shares differ by one sample at most.
        seed: of the order; each epoch has another order; None for the source's own order.
        shuffle_block: consecutive samples that stay together when the order is drawn. 1 shuffles samples; some hundred
            turn a large memory-mapped file into longer reads, and need as much less memory for the order.
        index_dtype: of values and lengths, torch.int64 or torch.int32. Where files have int32, so should batches.
        num_readers: threads of `stream`, each of which reads a batch ahead; it is copying, for which numpy does not
            hold Python's lock.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        shuffle_block: int = 1,
        index_dtype: torch.dtype = torch.int64,
        num_readers: int = 1,
    ) -> None:
        if batch_size < 1 or shuffle_block < 1:
            raise ValueError(f"batch_size and shuffle_block must be at least 1, got {batch_size} and {shuffle_block}")
        if num_readers < 1:
            raise ValueError(f"num_readers must be at least 1, got {num_readers}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be one of {world_size} PEs, got {rank}")
        if index_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index_dtype must be torch.int32 or torch.int64, got {index_dtype}")
        if index_dtype == torch.int32 and max(source.num_rows) > 2**31:
            raise ValueError(f"index_dtype: torch.int32 does not reach the rows of a table of {max(source.num_rows)}")
        whole, self._rest = divmod(source.num_samples, batch_size)
        self.num_batches = whole + (self._rest > 0)
        self.source = source
        self.batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._block = shuffle_block
        self._dtype = index_dtype
        self._num_readers = num_readers
        self._orders: dict[int, IntArray] = {}
        self._lock = threading.Lock()  # threads read

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the batches; the number of PEs does not."""
        return {
            "source": self.source.identity(),
            "num_rows": list(self.source.num_rows),
            "batch_size": self.batch_size,
            "seed": self._seed,
            "shuffle_block": self._block,
        }

    def describe(self) -> str:
        """Return one line on the batches of an epoch, the last of them in particular."""
        text = f"{self.source.num_samples:,} samples in {self.num_batches:,} batches of {self.batch_size:,}"
        return f"{text}, the last one of {self._rest:,}" if self._rest else text

    def size(self, batch: int) -> int:
        """Return the number of samples of a global batch of an epoch."""
        return self._rest if self._rest and batch == self.num_batches - 1 else self.batch_size

    def numbers(self, epoch: int, batch: int) -> IntArray:
        """Return the numbers of this PE's samples, in order. The global batch has the PEs' samples in order of rank."""
        if not 0 <= batch < self.num_batches or epoch < 0:
            raise ValueError(f"expected a batch of 0 to {self.num_batches - 1} of an epoch, got {batch} of {epoch}")
        splits = balanced_splits(self.size(batch), self._world_size)
        first = batch * self.batch_size + sum(splits[: self._rank])
        return self._samples(epoch, np.arange(first, first + splits[self._rank], dtype=np.int64))

    def read(self, epoch: int, batch: int) -> Batch:
        """Read this PE's samples of a batch."""
        records = self.source.read(self.numbers(epoch, batch))
        return feature_major(records, self.source.hotness, self._dtype)

    def after(self, position: Position) -> Position:
        """Return the position of the next batch."""
        epoch, batch = position
        return (epoch, batch + 1) if batch + 1 < self.num_batches else (epoch + 1, 0)

    def stream(self, begin: Position, end: Position, device: torch.device) -> Generator[Batch, None, None]:
        """Yield the batches from one position up to, but without, another; the next ones are read meanwhile.

        Close the generator where it is left before its end: threads read for it.
        """
        ahead: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(self._num_readers, thread_name_prefix="batches") as readers:
            try:
                while ahead or begin < end:
                    while begin < end and len(ahead) <= self._num_readers:  # one to yield, and as many after it
                        ahead.append(readers.submit(self._load, begin, device))
                        begin = self.after(begin)
                    yield ahead.popleft().result().to(device)
            finally:
                for each in ahead:
                    each.cancel()

    def _load(self, position: Position, device: torch.device) -> Batch:
        batch = self.read(*position)
        if device.type != "cuda":
            return batch
        with torch.cuda.device(device):  # each thread has its own, at first PE 0's
            return batch.pinned()

    def _samples(self, epoch: int, places: IntArray) -> IntArray:
        """Return which samples stand at these places of an epoch's order."""
        if self._seed is None:
            return places
        order = self._epoch_order(epoch, self._seed)
        num_short = self.source.num_samples % self._block
        if num_short:
            # The block at the file's end is short, and may be at any place of the order: places after it move up.
            missing = self._block - num_short
            end_of_short = int(np.flatnonzero(order == len(order) - 1)[0]) * self._block + num_short
            places = np.where(places < end_of_short, places, places + missing)
        return order[places // self._block] * self._block + places % self._block

    def _epoch_order(self, epoch: int, seed: int) -> IntArray:
        """Return the numbers of the blocks in the order of an epoch; two orders are kept, for where epochs meet."""
        with self._lock:
            if epoch not in self._orders:
                num_blocks = -(-self.source.num_samples // self._block)
                generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
                while len(self._orders) > 1:
                    del self._orders[next(iter(self._orders))]
                self._orders[epoch] = generator.permutation(num_blocks).astype(np.int64, copy=False)
            return self._orders[epoch]
