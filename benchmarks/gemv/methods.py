"""The ways to multiply and sum, for a comparison. All use the same weights and vectors."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness.timing import Subject, record, time_interleaved

import persistent_ops as po
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import agree, gather
from persistent_ops.testing.symmetric_memory import one_shot, two_shot

from .shapes import DTYPE, Shape

__all__ = [
    "ALONE",
    "CHOICES",
    "FUSED",
    "LABELS",
    "METHODS",
    "PRODUCTS",
    "SYMMETRIC",
    "UNFUSED",
    "Methods",
]

LABELS = {
    "fused": "fused",
    "one_shot": "fused, one-shot",
    "two_shot": "fused, two-shot",
    "prefetch": "fused, weight prefetch",
    "gemv_alone": "own GEMV alone",
    "gemv_alone_prefetch": "own GEMV alone, weight prefetch",
    "cublas_alone": "{product} alone",
    "cublas_nccl": "{product} + {collective}",
    "cublas_symm_one_shot": "{product} + symm_mem one-shot",
    "cublas_symm_two_shot": "{product} + symm_mem two-shot",
}
METHODS = tuple(LABELS)


@dataclass(frozen=True)
class Choice:
    """How the operator is called."""

    algorithm: str = "auto"
    prefetch_weight: bool = False


# Nothing on the stream writes weights: each kernel follows the previous call's kernel, so calls may prefetch.
CHOICES = {
    "fused": Choice(),
    "one_shot": Choice("one_shot"),
    "two_shot": Choice("two_shot"),
    "prefetch": Choice(prefetch_weight=True),
    "gemv_alone": Choice(),
    "gemv_alone_prefetch": Choice(prefetch_weight=True),
}
ALONE = ("gemv_alone", "gemv_alone_prefetch", "cublas_alone")  # the operator's is a world of one's
FUSED = tuple(name for name in CHOICES if name not in ALONE)  # the first one's bits are what the others must have
SYMMETRIC = ("cublas_symm_one_shot", "cublas_symm_two_shot")
UNFUSED = ("cublas_nccl", *SYMMETRIC)

PRODUCTS = {"mv": "torch.mv", "mm": "torch.mm (linear)", "mm_lt": "torch.mm through cuBLASLt"}


class Methods:
    """One shape's buffers and the methods as functions of a copy of the weight.

    Args:
        world: of this PE.
        shape: the sizes.
        storage: `[>= copies * M * K]`, where the copies of the weight lie, each with other numbers.
        symmetric: `[>= N * M]` in torch's symmetric memory, or None where there is none.
        seed: of the vectors; another on every PE.
    """

    def __init__(
        self, world: World, shape: Shape, storage: torch.Tensor, symmetric: torch.Tensor | None, *, seed: int
    ) -> None:
        self.shape = shape
        self.product = "mm"
        self._world = world
        device = world.backend.device
        size = shape.rows * shape.columns
        self.weights = [
            storage[number * size : (number + 1) * size].view(shape.rows, shape.columns)
            for number in range(shape.copies)
        ]
        several = (shape.vectors,) if shape.vectors > 1 else ()  # one alone is what a decoder of one sequence passes
        vectors, result = (*several, shape.columns), (*several, shape.rows)
        generator = torch.Generator(device).manual_seed(seed)
        self.x = torch.empty(vectors, dtype=DTYPE, device=device).uniform_(-1, 1, generator=generator)
        self.out = torch.empty(result, dtype=DTYPE, device=device)
        self._symmetric = None if symmetric is None else symmetric[: self.out.numel()].view(result)

    @property
    def is_aligned(self) -> bool:
        """Whether every row of weights and vectors begins at a multiple of 16 bytes: the operator's fast path."""
        row_bytes = self.shape.columns * DTYPE.itemsize
        return not any(tensor.data_ptr() % 16 for tensor in (*self.weights, self.x)) and row_bytes % 16 == 0

    def available(self, world: World, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the chosen methods that this world can run."""
        if world.size == 1:
            return tuple(name for name in chosen if name in ALONE)
        missing = SYMMETRIC if self._symmetric is None else ()
        return tuple(name for name in chosen if not name.startswith("gemv_alone") and name not in missing)

    def poison(self) -> None:
        """Take away what methods have left in any result; collective."""
        for result in (self.out, self._symmetric):
            if result is not None:
                result.fill_(math.nan)
        self._world.barrier()  # peers may read or write it as soon as they run

    def run(self, name: str, copy: int) -> torch.Tensor:
        """Run one of METHODS on the current stream; the result is valid until the next one."""
        weight = self.weights[copy]
        if name in CHOICES:
            return self.fused(weight, CHOICES[name])
        result = getattr(self, name)(weight)
        assert isinstance(result, torch.Tensor)
        return result

    def fused(self, weight: torch.Tensor, choice: Choice) -> torch.Tensor:
        return po.gemv_all_reduce(
            weight, self.x, out=self.out, algorithm=choice.algorithm, prefetch_weight=choice.prefetch_weight
        )

    def cublas_alone(self, weight: torch.Tensor) -> torch.Tensor:
        return self._multiply(weight, self.out)

    def cublas_nccl(self, weight: torch.Tensor) -> torch.Tensor:
        self._multiply(weight, self.out)
        dist.all_reduce(self.out)
        return self.out

    def cublas_symm_one_shot(self, weight: torch.Tensor) -> torch.Tensor:
        assert self._symmetric is not None
        return one_shot(self._multiply(weight, self._symmetric))

    def cublas_symm_two_shot(self, weight: torch.Tensor) -> torch.Tensor:
        assert self._symmetric is not None
        return two_shot(self._multiply(weight, self._symmetric))

    def _multiply(self, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write this PE's part into `out` by the product that `choose_product` found."""
        if self.product == "mv":
            return torch.mv(weight, self.x, out=out)
        with _blas_library("cublaslt" if self.product == "mm_lt" else None):
            torch.mm(self.x.view(-1, self.shape.columns), weight.t(), out=out.view(-1, self.shape.rows))
        return out

    def choose_product(self, world: World, *, rounds: int, burst_seconds: float) -> dict[str, float]:
        """Let the methods with cuBLAS use its fastest call for this shape; collective.

        Returns:
            Microseconds of the calls that were tried, the slowest PE's, by the names of PRODUCTS.
        """
        candidates = [name for name in PRODUCTS if name != "mv" or self.shape.vectors == 1]
        self.product = candidates[0]
        if world.backend.name != "cuda":
            return {}
        subjects: dict[str, Subject] = {}
        for name in candidates:
            self.product, problem = name, None  # what a graph holds stays as it was recorded
            try:
                subjects[name] = record(
                    world, [functools.partial(self.cublas_alone, weight) for weight in self.weights]
                )
            except RuntimeError as error:  # a build of torch without cuBLASLt
                problem = str(error)
            if agree(problem) is not None:
                subjects.pop(name, None)
        times = time_interleaved(world, subjects, rounds=rounds, burst_seconds=burst_seconds)
        us = {name: max(gather(statistics.median(times[name]))) * 1e6 for name in subjects}
        self.product = min(us, key=lambda name: us[name])
        return us


@contextmanager
def _blas_library(name: str | None) -> Iterator[None]:
    """Let torch prefer a BLAS library; None leaves its choice as it is."""
    if name is None:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
