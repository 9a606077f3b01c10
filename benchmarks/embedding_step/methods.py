"""Steps by the package, and by torch and FBGEMM with an exchange through torch.distributed, phase by phase."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from persistent_ops.ops.embedding import recorded_call as embedding_recorded_call
from persistent_ops.testing.exchanged_embedding import ExchangedEmbedding, KnownCounts

from .lookups import Batch
from .tables import StepTables

__all__ = ["PHASES", "Clock", "OurStep", "BaselineStep", "Step"]

PHASES = ("exchange", "forward", "sort", "backward")
_Span = tuple[Any, Any]


class Clock:
    """Times of the phases of steps: by events on GPUs, on the host by its clock.

    Args:
        is_gpu: the backend.
    """

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._spans: dict[str, list[_Span]] = {}

    def now(self) -> Any:
        """Return a mark after the work of the current stream."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is launched meanwhile as a phase."""
        begin = self.now()
        yield
        self._spans.setdefault(name, []).append((begin, self.now()))

    def seconds(self, name: str) -> float:
        """Return the sum of a phase's times, when the device has ended."""
        return sum(self._length(*span) for span in self._spans.get(name, []))

    def _length(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._is_gpu else end - begin


class Step(ABC):
    """A way to make steps.

    Args:
        batches: of this PE, that take turns.
        gradient: of what is pooled, `[B, F * D]`.
    """

    def __init__(self, batches: Sequence[Batch], gradient: torch.Tensor) -> None:
        self._batches, self._gradient = batches, gradient

    def run(self, number: int) -> torch.Tensor:
        """Make a step with a batch on the current stream; return what was pooled."""
        with torch.enable_grad():
            pooled = self.pool(self.send(number))
            self.back(pooled)
        return pooled.detach()

    def run_timed(self, number: int, clock: Clock) -> None:
        """Make a step with its phases on a clock; what "backward" has includes "sort"."""
        with torch.enable_grad():
            with clock.phase("exchange"):
                sent = self.send(number)
            with clock.phase("forward"):
                pooled = self.pool(sent)
            with clock.phase("backward"):
                self.back(pooled)

    @abstractmethod
    def send(self, number: int) -> Any:
        """Send a batch's lookups to the tables."""

    @abstractmethod
    def pool(self, sent: Any) -> torch.Tensor:
        """Pool them, for the PEs that have the samples."""

    @abstractmethod
    def back(self, pooled: torch.Tensor) -> None:
        """Send gradients back, and update rows."""

    @abstractmethod
    def parts(self) -> list[list[torch.Tensor]]:
        """Return the rows of this PE's slots, and their states."""


class OurStep(Step):
    """The package's collection.

    Args:
        tables: with the collection.
        batches, gradient: see `Step`.
    """

    def __init__(self, tables: StepTables, batches: Sequence[Batch], gradient: torch.Tensor) -> None:
        super().__init__(batches, gradient)
        self._tables, self._collection = tables, tables.collection
        self._side = torch.cuda.Stream() if gradient.is_cuda else None

    def send(self, number: int) -> Any:
        batch = self._batches[number]
        return self._collection.input_dist(batch.values, batch.lengths, batch_per_rank=batch.split)

    def pool(self, sent: Any) -> torch.Tensor:
        pooled: torch.Tensor = self._collection(sent)
        return pooled

    def back(self, pooled: torch.Tensor) -> None:
        pooled.backward(self._gradient)

    def run_timed(self, number: int, clock: Clock) -> None:
        with _inversions_on(clock):
            super().run_timed(number, clock)

    def run_ahead(self, numbers: Sequence[int]) -> torch.Tensor:
        """Make steps. From the second one on, lookups travel on another stream, after the forward pass before.

        Returns:
            What the first step has pooled.
        """
        with torch.enable_grad():
            pooled = self.pool(self.send(numbers[0]))
            first = pooled.detach()
            for number in numbers[1:]:
                sent = self._send_beside(number)
                self.back(pooled)
                pooled = self.pool(sent)
            self.back(pooled)
        return first

    def _send_beside(self, number: int) -> Any:
        if self._side is None:
            return self.send(number)
        with torch.cuda.stream(self._side):
            return self.send(number)

    def parts(self) -> list[list[torch.Tensor]]:
        return self._tables.parts()


@contextmanager
def _inversions_on(clock: Clock) -> Iterator[None]:
    """Put the sorts of lookups in a backward pass on a clock."""
    names = ("invert", "invert_sources")
    before = {name: getattr(embedding_recorded_call, name) for name in names}

    def timed(invert: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with clock.phase("sort"):
                return invert(*arguments, **options)

        return call

    for name, invert in before.items():
        setattr(embedding_recorded_call, name, timed(invert))
    try:
        yield
    finally:
        for name, invert in before.items():
            setattr(embedding_recorded_call, name, invert)


class BaselineStep(Step):
    """The same tables, exchanged through torch.distributed.

    A graph cannot read on the host how many lookups come: the numbers of a batch's first step are used again.

    Args:
        embedding: the tables.
        batches, gradient: see `Step`.
    """

    def __init__(self, embedding: ExchangedEmbedding, batches: Sequence[Batch], gradient: torch.Tensor) -> None:
        super().__init__(batches, gradient)
        self.embedding = embedding
        self._counts: dict[int, KnownCounts] = {}

    def send(self, number: int) -> Any:
        batch = self._batches[number]
        self.embedding.optimizer.zero_grad()
        return self.embedding.input_dist(batch.values, batch.lengths, batch_per_rank=batch.split)

    def pool(self, sent: Any) -> torch.Tensor:
        pooled: torch.Tensor = self.embedding(sent)
        return pooled

    def back(self, pooled: torch.Tensor) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fbgemm::dense.*autograd kernel")  # it has one, of the older kind
            pooled.backward(self._gradient)
        self.embedding.optimizer.step()

    def run_told(self, number: int) -> torch.Tensor:
        """Make a step that waits for nothing on the host, after a first one that does."""
        self.embedding.read = self._counts.setdefault(number, KnownCounts())
        try:
            return self.run(number)
        finally:
            self.embedding.read = torch.Tensor.tolist

    def parts(self) -> list[list[torch.Tensor]]:
        return self.embedding.parts()
