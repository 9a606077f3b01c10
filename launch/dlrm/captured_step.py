"""Steps of a training as replays of one CUDA graph.

A graph holds addresses, so all that a replay reads stays at its address: batches are copied into one set of buffers,
and learning rates are tensors on the device. Two kinds of steps are eager. In the first steps kernels are compiled,
communicators connect and DistributedDataParallel makes its buckets. The last batch of an epoch is smaller.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from .records import Batch

__all__ = ["EAGER_STEPS", "CapturedStep", "StaticBatch", "StepGraph", "check_machine", "own_stream"]

# DistributedDataParallel times its first ten passes by events and reads their times in the next pass. It makes its
# buckets again after the first pass. A capture allows neither.
EAGER_STEPS = 11


def check_machine(*, has_gpus: bool, shares_gpu: bool) -> None:
    """Raise ValueError where no step can be captured.

    Args:
        has_gpus: whether PEs are on GPUs.
        shares_gpu: whether several of them share one.
    """
    if not has_gpus:
        raise ValueError("--graph: expected a GPU, as the host backend has no CUDA graphs; leave it out")
    if shares_gpu:
        raise ValueError("--graph: expected a GPU for each PE, as gloo's sums cannot be captured; pass fewer --pes")


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Put all that is done on a GPU onto a stream that can be captured, which the default one cannot.

    Model, DistributedDataParallel and every step belong inside: autograd adds a gradient up on the stream on which the
    parameter was first used, also where that was before the capture.
    """
    outside = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


class StaticBatch:
    """Buffers that keep their place, into which batches of one size are copied.

    Args:
        like: a batch of that size.
        most_lookups: that there is room for.

    Attributes:
        batch: over the buffers. Values after the last lookup (see its lengths) are arbitrary.
    """

    def __init__(self, like: Batch, most_lookups: int) -> None:
        self.batch = Batch(
            torch.empty_like(like.dense),
            like.values.new_zeros(most_lookups),
            torch.empty_like(like.lengths),
            torch.empty_like(like.labels),
        )

    def load(self, batch: Batch) -> None:
        """Copy a batch, on the current stream.

        Raises:
            ValueError: it has more lookups than there is room for, or another number of samples.
        """
        own, count = self.batch, batch.values.numel()
        if count > own.values.numel():
            raise ValueError(
                f"values: expected at most {own.values.numel()} lookups, which the CUDA graph is captured for, got "
                f"{count}; leave out --graph"
            )
        if batch.num_samples != own.num_samples:
            raise ValueError(f"batch: expected {own.num_samples} samples, got {batch.num_samples}")
        own.values[:count].copy_(batch.values)
        own.dense.copy_(batch.dense)
        own.lengths.copy_(batch.lengths)
        own.labels.copy_(batch.labels)


class StepGraph:
    """A program in a CUDA graph.

    Args:
        program: does the same work on the same tensors whenever it is called; returns a tensor. It has been called on
            the current stream, which is not the default one.
    """

    def __init__(self, program: Callable[[], torch.Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Threads that read batches allocate page-locked memory meanwhile, and NCCL's watchdog asks for its events: the
        # default mode forbids both to all threads.
        try:
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._result: torch.Tensor | None = program()
        except BaseException:
            self._graph.reset()  # else NCCL waits for its end where the error's traceback keeps it
            raise

    def replay(self) -> torch.Tensor:
        """Run the program again, on the current stream; return its result, in memory of its own."""
        if self._result is None:
            raise RuntimeError("the graph has been given back, and cannot be replayed")
        self._graph.replay()
        return self._result.clone()

    def close(self) -> None:
        """Give the graph back."""
        self._result = None
        self._graph.reset()


class CapturedStep:
    """Makes a training's steps, replays of a graph but for the first steps and steps with smaller batches.

    The first `EAGER_STEPS` whole batches are eager, on the buffers of which the graph is to read; the next one is
    captured, and replayed. All PEs decide alike: by the size of the global batch, and by how many came before.

    Args:
        step: makes a step with a batch on the device and the size of the global one; returns this PE's share of the
            loss. Collective.
        batch_size: of whole global batches.
        lookups_per_sample: the most that a sample has.
        make_graph: captures a program.

    Attributes:
        num_replays: steps that were replays.
        was_replay: whether the last step was one of a graph that had been captured before it.
    """

    def __init__(
        self,
        step: Callable[[Batch, int], torch.Tensor],
        *,
        batch_size: int,
        lookups_per_sample: int,
        make_graph: Callable[[Callable[[], torch.Tensor]], StepGraph] = StepGraph,
    ) -> None:
        self._step = step
        self._batch_size, self._lookups_per_sample = batch_size, lookups_per_sample
        self._make_graph = make_graph
        self._static: StaticBatch | None = None
        self._graph: StepGraph | None = None
        self._num_eager = 0
        self.num_replays = 0
        self.was_replay = False

    def would_replay(self, batch_size: int) -> bool:
        """Return whether a step with a global batch of that size is a replay of the graph that there is."""
        return self._graph is not None and batch_size == self._batch_size

    def run(self, batch: Batch, batch_size: int) -> torch.Tensor:
        """Make a step, on the current stream; see `step`.

        Raises:
            ValueError: the batch has more lookups than the graph has room for.
        """
        self.was_replay = self.would_replay(batch_size)
        if batch_size != self._batch_size:
            return self._step(batch, batch_size)
        if self._static is None:
            self._static = StaticBatch(batch, batch.num_samples * self._lookups_per_sample)
        self._static.load(batch)
        program = functools.partial(self._step, self._static.batch, batch_size)
        if self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            return program()
        if self._graph is None:
            self._graph = self._make_graph(program)
        self.num_replays += 1
        return self._graph.replay()

    def close(self) -> None:
        """Give the graph back; the next whole batch is captured again."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()
