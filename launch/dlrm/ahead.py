"""The next batch, which is copied to the device during the computation of the present batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from persistent_ops.nn import balanced_splits

from .embedding import EmbeddingModule
from .records import Batch

__all__ = ["Sent", "Sender"]


@dataclass(frozen=True)
class Sent:
    """A batch whose lookups are on their way to the tables.

    Attributes:
        batch: this PE's samples.
        batch_size: samples of the global batch.
        lookups: what the embedding module is called with; None where they are not sent ahead.
        copied: on a GPU, an event after the batch's copies.
    """

    batch: Batch
    batch_size: int
    lookups: Any
    copied: torch.cuda.Event | None

    def await_copy(self) -> None:
        """Let the current stream use the batch."""
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)
            for tensor in vars(self.batch).values():
                tensor.record_stream(stream)


class Sender:
    """Takes batches from an iterator and sends their lookups, on GPUs on a stream of its own.

    Args:
        embedding: whose `input_dist` sends them; None: the batch is brought to the device, and nothing sent.
        world_size: that share a batch.
        device: of the batches.
    """

    def __init__(self, embedding: EmbeddingModule | None, world_size: int, device: torch.device) -> None:
        self._embedding = embedding
        self._world_size = world_size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send_next(self, batches: Iterator[tuple[Batch, int]]) -> Sent | None:
        """Send the next batch's lookups; None where there is no batch. Collective where lookups are sent.

        Args:
            batches: this PE's samples, and how many the global batch has.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            found = next(batches, None)
            if found is None:
                return None
            batch, size = found
            lookups = None
            if self._embedding is not None:
                split = balanced_splits(size, self._world_size)
                lookups = self._embedding.input_dist(batch.values, batch.lengths, batch_per_rank=split)
            return Sent(batch, size, lookups, None if self._stream is None else self._stream.record_event())
