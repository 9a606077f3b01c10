"""What the GPU kernels need of an SM: which combinations there are, and the table of what they use.

    python tests/kernel_resources.py --write    compile what is not in the table yet, and write it
    python tests/kernel_resources.py --all      compile all of them (some minutes), and print

The table is benchmarks/kernel_resources.json. Each row has a digest of the code that was compiled, so that
tests/test_kernel_resources.py needs no compiler to see that a row is of other sources.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import struct
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from kernel_digests import digest

from persistent_ops.ops.all_reduce_plan import kernel_request as all_reduce_kernel_request
from persistent_ops.ops.embedding_backward_kernel import (
    GRADIENT,
    STEPS,
    Tiles,
    kernel_request as backward_kernel_request,
)
from persistent_ops.ops.embedding_inputs_plan import (
    THREADS as INPUTS_THREADS,
    THREADS_BESIDE as INPUTS_THREADS_BESIDE,
    kernel_request as inputs_kernel_request,
)
from persistent_ops.ops.embedding_inversion import Tuning as InversionTuning, kernel_request as inversion_kernel_request
from persistent_ops.ops.embedding_plan import LookupKind, Tuning, _request, _threads
from persistent_ops.ops.embedding_weight_gradients import (
    OPERATOR as WEIGHT_GRADIENTS,
    kernel_request as weight_gradients_kernel_request,
)
from persistent_ops.ops.gemv_plan import Tuning as GemvTuning, choose_depth, kernel_request, team_factor
from persistent_ops.ops.sparse_plan import kernel_request as sparse_kernel_request
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.jit import KernelResources, compile_cuda
from persistent_ops.runtime.toolchain import find_nvcc

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "benchmarks" / "kernel_resources.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
POOLINGS = ("sum", "weighted sum", "mean")
SHAPES = tuple(1 << shape for shape in range(6))  # tables of one row shape each
ALL_SHAPES = (1 << 6) - 1
BLOCKS_PER_SM = 2  # GpuBackend.default_blocks_per_sm; its module cannot be imported without a GPU's packages
REGISTERS_PER_SM = 1 << 16


@dataclass(frozen=True)
class Embedding:
    """One compilation of the kernel of embedding_all_to_all, with the defaults that its plan takes."""

    dtype: str
    pooling: str
    shapes: int
    arch: str = "sm_90"
    index: torch.dtype = torch.int64
    offset: torch.dtype = torch.int64
    from_sources: bool = False
    wire: str | None = None

    @property
    def name(self) -> str:
        integers = f"{self.index}/{self.offset}".replace("torch.", "") + ", by source" * self.from_sources
        wire = f", {self.wire} on the wire" if self.wire else ""
        shapes = f"shapes {self.shapes:#04x}"
        return f"embedding_all_to_all {self.arch} {self.dtype} {self.pooling}{wire}, {shapes}, {integers}"

    @property
    def threads(self) -> int:
        return _threads(self.shapes, self.pooling == "weighted sum", self.from_sources)

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        lookups = LookupKind(self.index, self.offset, 1, self.pooling == "weighted sum", 1, self.from_sources)
        mode = "mean" if self.pooling == "mean" else "sum"
        rows = Tuning().rows_in_flight
        return _request(DTYPES[self.dtype], self._wire, lookups, mode, self.shapes, self.threads, rows, BLOCKS_PER_SM)

    @property
    def _wire(self) -> torch.dtype:
        return DTYPES[self.wire or self.dtype]


@dataclass(frozen=True)
class EmbeddingBackward:
    """One compilation of the kernel of embedding_all_to_all's backward pass."""

    dtype: str
    step: str
    pooling: str = "sum"
    width: int = 128
    decay: str = "none"
    rounding: str = "nearest"
    is_aligned: bool = True
    has_wide_keys: bool = False
    arch: str = "sm_90"
    wire: str | None = None
    has_max_norm: bool = False

    @property
    def name(self) -> str:
        parts = [f"embedding_backward {self.arch} {self.dtype} {self.step}, {self.pooling}, {self.width} columns"]
        parts += [f"{self.wire} on the wire"] if self.wire else []
        parts += [f"decay {self.decay}"] if self.decay != "none" else []
        parts += [f"rounding {self.rounding}"] if self.rounding != "nearest" else []
        flags = {"max norm": self.has_max_norm, "unaligned": not self.is_aligned, "64-bit keys": self.has_wide_keys}
        return ", ".join((*parts, *(name for name, is_so in flags.items() if is_so)))

    @property
    def threads(self) -> int:
        return self.request().threads

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        mode = "mean" if self.pooling == "mean" else "sum"
        dtype, wire_dtype = DTYPES[self.dtype], DTYPES[self.wire or self.dtype]
        return backward_kernel_request(
            dtype,
            wire_dtype,
            self.step,
            mode=mode,
            is_weighted=self.pooling == "weighted sum",
            is_aligned=self.is_aligned,
            tiles=Tiles.of(self.width * dtype.itemsize),
            decay=self.decay,
            rounding=self.rounding,
            has_max_norm=self.has_max_norm,
            has_wide_keys=self.has_wide_keys,
        )


@dataclass(frozen=True)
class EmbeddingInversion:
    """One compilation of the kernel that inverts an embedding batch for its backward pass."""

    items: int
    digit_bits: int = 8
    is_wide: bool = False
    lookups: bool = False
    counts: bool = False
    index: torch.dtype = torch.int64
    offset: torch.dtype = torch.int64
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        integers = f"{self.index}/{self.offset}".replace("torch.", "")
        flags = {"wide": self.is_wide, "with lookups": self.lookups, "with counts": self.counts}
        parts = (integers, f"{self.items} items", f"digits of {self.digit_bits} bits")
        return (
            f"embedding_inversion {self.arch} {', '.join((*parts, *(flag for flag, is_so in flags.items() if is_so)))}"
        )

    @property
    def threads(self) -> int:
        return InversionTuning().threads

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        return inversion_kernel_request(
            self.index,
            self.offset,
            is_wide=self.is_wide,
            lookups=self.lookups,
            counts=self.counts,
            digit_bits=self.digit_bits,
            items=self.items,
            threads=self.threads,
            work_groups_per_sm=InversionTuning().work_groups_per_sm,
            arena_bytes=0,
        )


@dataclass(frozen=True)
class EmbeddingInputs:
    """One compilation of the kernel of the input exchange."""

    value: torch.dtype = torch.int64
    index: torch.dtype = torch.int32
    bound: torch.dtype = torch.int32
    has_lengths: bool = True
    is_weighted: bool = False
    arch: str = "sm_90"
    threads: int = INPUTS_THREADS_BESIDE

    @property
    def name(self) -> str:
        integers = f"{self.value} to {self.index}, {self.bound}".replace("torch.", "")
        kind = "lengths" if self.has_lengths else "offsets"
        wide = f", {self.threads} threads" * (self.threads != INPUTS_THREADS_BESIDE)
        return f"embedding_inputs {self.arch} {integers} {kind}{', weighted' * self.is_weighted}{wide}"

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        return inputs_kernel_request(
            self.value,
            self.index,
            self.bound,
            has_lengths=self.has_lengths,
            is_weighted=self.is_weighted,
            threads=self.threads,
        )


@dataclass(frozen=True)
class EmbeddingWeightGradients:
    """The kernel that lets gradients of lookups' weights travel back."""

    arch: str

    @property
    def name(self) -> str:
        return f"embedding_weight_gradients {self.arch}"

    @property
    def threads(self) -> int:
        return WEIGHT_GRADIENTS.description.constants["kThreads"]

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        return weight_gradients_kernel_request(self.threads)


@dataclass(frozen=True)
class Barrier:
    """The kernel of po.barrier()."""

    arch: str

    @property
    def name(self) -> str:
        return f"barrier {self.arch}"

    threads = 64

    def request(self) -> KernelRequest:
        """Return what a launch would have compiled."""
        return KernelRequest("barrier", None, self.threads)


@dataclass(frozen=True)
class Gemv:
    """One compilation of the kernel of gemv_all_reduce."""

    dtype: str
    vectors: int
    algorithm: str
    is_aligned: bool = True
    is_resident: bool = True
    comm_dtype: str = "float32"
    prefetches: bool = False
    lets_in: str = "kAtOnce"
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        parts = (self.arch, self.dtype, f"sums in {self.comm_dtype}", f"{self.vectors} vectors", self.algorithm)
        flags = {"unaligned": not self.is_aligned, "not resident": not self.is_resident}
        flags["prefetches"] = self.prefetches
        flags |= {"lets its successor in late": self.lets_in == "kLate", "at the end": self.lets_in == "kAtEnd"}
        return f"gemv_all_reduce {' '.join((*parts, *(name for name, is_so in flags.items() if is_so)))}"

    @property
    def threads(self) -> int:
        return self.request().threads

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        dtype = DTYPES[self.dtype]
        warps = GemvTuning().warps
        factor = 1 if self.is_resident else team_factor(warps, dtype)
        return kernel_request(
            dtype,
            DTYPES[self.comm_dtype],
            self.vectors,
            warps=warps * factor,
            depth=choose_depth(1 << 30, 12 if self.prefetches else 0) // factor,
            arena_bytes=0,
            is_aligned=self.is_aligned,
            is_resident=self.is_resident,
            two_phase=self.algorithm == "two_phase",
            prefetches=self.prefetches,
            lets_in=self.lets_in,
        )


@dataclass(frozen=True)
class Sparse:
    """One compilation of the kernel of sparse_all_reduce."""

    dtype: str
    row_bytes: int
    algorithm: str
    is_aligned: bool = True
    index: torch.dtype = torch.int64
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        index = str(self.index).replace("torch.", "")
        rows = f"rows of {self.row_bytes} bytes" + ("" if self.is_aligned else " unaligned")
        return f"sparse_all_reduce {self.arch} {self.dtype} {rows}, {index}, {self.algorithm}"

    @property
    def threads(self) -> int:
        return self.request().threads

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        return sparse_kernel_request(
            DTYPES[self.dtype],
            self.index,
            row_bytes=self.row_bytes,
            is_aligned=self.is_aligned,
            gathers=self.algorithm == "allgather",
            is_host=False,
        )


@dataclass(frozen=True)
class AllReduce:
    """One compilation of the kernel of all_reduce."""

    dtype: str
    algorithm: str
    threads: int
    norms: bool = False
    warp_blocks: int = 1
    is_aligned: bool = True
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        parts = [self.arch, self.dtype, self.algorithm, f"{self.threads} threads"]
        if self.algorithm == "slices" or self.warp_blocks > 1:
            parts.append(f"of {self.warp_blocks} blocks")
        flags = {"with norm": self.norms, "unaligned": not self.is_aligned}
        return f"all_reduce {' '.join((*parts, *(name for name, is_so in flags.items() if is_so)))}"

    def request(self) -> KernelRequest:
        """Return what the plan would have compiled."""
        return all_reduce_kernel_request(
            DTYPES[self.dtype],
            self.algorithm,
            norms=self.norms,
            is_aligned=self.is_aligned,
            warp_blocks=self.warp_blocks,
            threads=self.threads,
        )


@dataclass(frozen=True)
class Traced:
    """The same kernel, leaving a timeline behind."""

    of: Embedding | EmbeddingBackward | Gemv | Sparse | AllReduce

    @property
    def name(self) -> str:
        return f"{self.of.name}, traced"

    @property
    def arch(self) -> str:
        return self.of.arch

    @property
    def threads(self) -> int:
        return self.of.threads

    def request(self) -> KernelRequest:
        """Return what a plan under `po.trace` would have compiled."""
        return dataclasses.replace(self.of.request(), traces=True)


Combination = (
    Embedding
    | EmbeddingBackward
    | EmbeddingInversion
    | EmbeddingInputs
    | EmbeddingWeightGradients
    | Barrier
    | Gemv
    | Sparse
    | AllReduce
    | Traced
)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_UPDATES = [step for step in STEPS if step != GRADIENT]


def _lets_in(arch: str) -> str:
    return "kLate" if arch == "sm_90" else "kAtOnce"


def _rest() -> Iterator[Combination]:
    """What both sets have: every dtype and pooling once with all row shapes, int32, the other architectures."""
    for i, dtype in enumerate(DTYPES):
        yield Embedding(dtype, POOLINGS[i], ALL_SHAPES)
    yield Embedding("float32", "sum", SHAPES[2], index=torch.int32, offset=torch.int32)
    yield Embedding("bfloat16", "weighted sum", SHAPES[1], index=torch.int32)
    for pooling, index in zip(POOLINGS, (torch.int32, torch.int64, torch.int32), strict=True):
        for shape in (SHAPES[1], SHAPES[2], ALL_SHAPES):
            yield Embedding("bfloat16", pooling, shape, index=index, offset=torch.int32, from_sources=True)
    # Shapes of tables of several widths, which share a kernel: of one vector a lane, two of them and all.
    pairs = [one | other for one, other in itertools.combinations(SHAPES[2:], 2)]
    for dtype, pooling, shapes in itertools.product(DTYPES, POOLINGS, (*pairs, sum(SHAPES[2:]))):
        yield Embedding(dtype, pooling, shapes)
    for dtype, pooling in itertools.product(DTYPES, POOLINGS):
        yield Embedding(dtype, pooling, pairs[0], index=torch.int32, offset=torch.int32, from_sources=True)
    for arch in ("sm_80", "sm_100"):
        # The shape with the most registers, and the one of tables that no vector fits, which has most instructions.
        yield Embedding("float32", "weighted sum", SHAPES[1], arch)
        yield Embedding("bfloat16", "mean", SHAPES[0], arch)
        yield Embedding("float16", "sum", SHAPES[5], arch)
        yield Embedding("float32", "weighted sum", SHAPES[2], arch, wire="bfloat16")
        yield EmbeddingBackward("float32", "adam", "weighted sum", 256, arch=arch, wire="bfloat16")
    for pooling, shape in itertools.product(POOLINGS, (*SHAPES, pairs[0], sum(SHAPES[2:]), ALL_SHAPES)):
        yield Embedding("float32", pooling, shape, wire="bfloat16")
    for dtype, shape in itertools.product(DTYPES, SHAPES[:3]):
        yield Embedding(dtype, "weighted sum", shape, offset=torch.int32, from_sources=True)
    for pooling, shape in itertools.product(POOLINGS, (SHAPES[2], pairs[0])):
        yield Embedding(
            "float32", pooling, shape, index=torch.int32, offset=torch.int32, from_sources=True, wire="bfloat16"
        )
    # Widths: a chunk or two, one, two and four chunks a lane, and more than registers hold.
    widths = itertools.cycle((8, 32, 256, 512, 4096))
    for dtype, step, pooling in itertools.product(DTYPES, _UPDATES, POOLINGS):
        yield EmbeddingBackward(dtype, step, pooling)
        yield EmbeddingBackward(dtype, step, pooling, next(widths))
    for dtype, decay in itertools.product(DTYPES, ("l2", "decoupled")):
        yield EmbeddingBackward(dtype, "rowwise_adagrad", "sum", 256, decay)
        yield EmbeddingBackward(dtype, "rowwise_adagrad", "weighted sum", 512, decay, has_wide_keys=True)
    for dtype, width in itertools.product(DTYPES, (64, 256, 512, 4096)):
        yield EmbeddingBackward(dtype, "rowwise_adagrad", "sum", width, has_max_norm=True)
        yield EmbeddingBackward(dtype, "rowwise_adagrad", "sum", width, "l2", is_aligned=False, has_max_norm=True)
    for dtype, rounding in itertools.product(("float16", "bfloat16"), ("nearest", "stochastic")):
        yield EmbeddingBackward(
            dtype, "rowwise_adagrad", "weighted sum", 512, "l2", rounding, has_wide_keys=True, has_max_norm=True
        )
    yield EmbeddingBackward(
        "float32", "rowwise_adagrad", "weighted sum", 512, "l2", has_wide_keys=True, wire="bfloat16", has_max_norm=True
    )
    for dtype, step in itertools.product(("float32", "bfloat16"), _UPDATES):
        yield EmbeddingBackward(dtype, step, "weighted sum", next(widths), is_aligned=False)
        yield EmbeddingBackward(dtype, step, "sum", 256, has_wide_keys=True)
    # What has three WGs of an SM, or nearly: by the lanes of a row, and by elements where rows are not aligned.
    for dtype, step, width in itertools.product(DTYPES, ("sgd", "adagrad", "rowwise_adagrad"), (64, 128, 256)):
        yield EmbeddingBackward(dtype, step, "sum", width, is_aligned=False)
    for width in (64, 256):
        yield EmbeddingBackward("float32", "adagrad", "sum", width)
    for (step, pooling), width in zip(itertools.product(STEPS, POOLINGS), itertools.cycle((256, 32, 512, 1024, 4096))):
        yield EmbeddingBackward("float32", step, pooling, width, wire="bfloat16")
    for step, width, decay in (("sgd", 1024, "none"), ("rowwise_adagrad", 256, "none"), ("rowwise_adagrad", 512, "l2")):
        yield EmbeddingBackward("float32", step, "sum", width, decay, wire="bfloat16")
        yield EmbeddingBackward("float32", step, "sum", width, decay, is_aligned=False, wire="bfloat16")
        yield EmbeddingBackward("float32", step, "weighted sum", width, decay, has_wide_keys=True, wire="bfloat16")
    for dtype, pooling in itertools.product(DTYPES, POOLINGS):
        yield EmbeddingBackward(dtype, GRADIENT, pooling)
        yield EmbeddingBackward(dtype, GRADIENT, pooling, next(widths))
    for dtype, step, pooling in itertools.product(("float16", "bfloat16"), _UPDATES, POOLINGS[:2]):
        for width in (128, next(widths)):
            yield EmbeddingBackward(dtype, step, pooling, width, rounding="stochastic")
    for dtype, decay in itertools.product(("float16", "bfloat16"), ("l2", "decoupled")):
        yield EmbeddingBackward(dtype, "rowwise_adagrad", "weighted sum", 512, decay, "stochastic", has_wide_keys=True)
    for step in _UPDATES:
        yield EmbeddingBackward("bfloat16", step, "mean", next(widths), rounding="stochastic", is_aligned=False)
    for step in ("sgd", GRADIENT):
        yield EmbeddingBackward("bfloat16", step, "sum", 4096, is_aligned=False)
    yield EmbeddingBackward("float32", GRADIENT, "weighted sum", 512, is_aligned=False)
    yield EmbeddingBackward("bfloat16", GRADIENT, "weighted sum", 512, has_wide_keys=True)
    for digit_bits, counts in itertools.product((7, 8), (False, True)):
        for items in (8, 4, 2):
            yield EmbeddingInversion(items, digit_bits, counts=counts)
        for items, is_wide, lookups in itertools.product((4, 2), (False, True), (False, True)):
            if is_wide or lookups:
                yield EmbeddingInversion(items, digit_bits, is_wide, lookups, counts)
    for index, offset in itertools.product((torch.int32, torch.int64), repeat=2):
        yield EmbeddingInversion(8, counts=True, index=index, offset=offset)
        yield EmbeddingInversion(4, is_wide=True, lookups=True, counts=True, index=index, offset=offset)
    integers = ((torch.int64, torch.int32), (torch.int64, torch.int64), (torch.int32, torch.int32))
    for (value, index), bound, lengths in itertools.product(integers, (torch.int32, torch.int64), (True, False)):
        for threads in (INPUTS_THREADS, INPUTS_THREADS_BESIDE):
            yield EmbeddingInputs(
                value, index, bound, lengths, is_weighted=(value == bound) == lengths, threads=threads
            )
    for arch in ARCHITECTURES:
        yield EmbeddingInversion(8, arch=arch)
        yield EmbeddingInversion(4, is_wide=True, lookups=True, counts=True, arch=arch)
        yield EmbeddingWeightGradients(arch)
        yield Barrier(arch)
        yield EmbeddingBackward("bfloat16", "rowwise_adagrad", "weighted sum", arch=arch)
        yield EmbeddingInputs(torch.int64, torch.int64, torch.int64, is_weighted=True, arch=arch)
    for dtype, vectors, algorithm in itertools.product(DTYPES, (1, 8, 16), ("one_shot", "two_phase")):
        yield Gemv(dtype, vectors, algorithm, prefetches=vectors == 1, lets_in="kLate" if vectors == 1 else "kAtEnd")
    for vectors, algorithm in itertools.product((1, 8), ("one_shot", "two_phase")):
        yield Gemv("bfloat16", vectors, algorithm, prefetches=True)
        lets_in = "kLate" if vectors == 8 else "kAtOnce"
        yield Gemv("bfloat16", vectors, algorithm, prefetches=vectors == 8, lets_in=lets_in)
    for dtype, algorithm in itertools.product(DTYPES, ("one_shot", "two_phase")):
        yield Gemv(dtype, 16, algorithm, is_aligned=False, is_resident=False, comm_dtype=dtype)
    for vectors, algorithm in itertools.product((8, 16), ("one_shot", "two_phase")):
        yield Gemv("bfloat16", vectors, algorithm, is_resident=False)
    for dtype, algorithm in itertools.product(DTYPES, ("owner", "allgather")):
        yield Sparse(dtype, 8192, algorithm)
    for i, dtype in enumerate(DTYPES):
        yield Sparse(dtype, (64, 128, 256)[i], "owner")
        yield Sparse(dtype, 8190, "owner", is_aligned=False, index=torch.int32)
    yield Sparse("float32", 4, "owner", is_aligned=False)
    for arch in ("sm_80", "sm_100"):
        yield Sparse("bfloat16", 8192, "owner", arch=arch)
    for dtype, algorithm, norms in itertools.product(DTYPES, ("one_shot", "two_shot"), (False, True)):
        yield AllReduce(dtype, algorithm, 256, norms)
    for dtype, norms in itertools.product(DTYPES, (False, True)):
        yield AllReduce(dtype, "slices", 256, norms, warp_blocks=2)
    yield AllReduce("bfloat16", "slices", 256, norms=True)
    for algorithm, threads, warp_blocks in (("one_shot", 128, 1), ("two_shot", 128, 1), ("two_shot", 512, 1)):
        yield AllReduce("bfloat16", algorithm, threads, True, warp_blocks)
    for dtype in DTYPES:
        yield AllReduce(dtype, "two_shot", 512, norms=True, warp_blocks=2)
    for algorithm, threads, warp_blocks in (("one_shot", 128, 1), ("two_shot", 256, 1), ("slices", 256, 2)):
        yield AllReduce("float16", algorithm, threads, True, warp_blocks, is_aligned=False)
        for arch in ("sm_80", "sm_100"):
            yield AllReduce("bfloat16", algorithm, threads, True, warp_blocks, arch=arch)
    for arch in ("sm_80", "sm_100"):
        yield Gemv("bfloat16", 1, "one_shot", arch=arch)
        yield Gemv("float16", 16, "two_phase", comm_dtype="float16", arch=arch)
    for arch in ARCHITECTURES:
        yield _traced(arch)
    for dtype, algorithm, vectors in itertools.product(DTYPES, ("one_shot", "two_phase"), (1, 8)):
        yield Traced(Gemv(dtype, vectors, algorithm, prefetches=True, lets_in="kLate"))
    for vectors, algorithm in itertools.product((1, 16), ("one_shot", "two_phase")):
        yield Traced(Gemv("bfloat16", vectors, algorithm, prefetches=vectors == 1))
    yield Traced(Embedding("float32", "weighted sum", SHAPES[1]))
    yield Traced(Embedding("bfloat16", "sum", ALL_SHAPES))
    yield Traced(Embedding("float32", "mean", pairs[0], wire="bfloat16"))
    for algorithm in ("owner", "allgather"):
        yield Traced(Sparse("bfloat16", 8192, algorithm))
    for algorithm, warp_blocks in (("one_shot", 1), ("two_shot", 1), ("slices", 2)):
        yield Traced(AllReduce("bfloat16", algorithm, 256, True, warp_blocks))


def _traced(arch: str) -> Combination:
    prefetches = arch == "sm_90"
    return Traced(Gemv("bfloat16", 1, "one_shot", prefetches=prefetches, arch=arch, lets_in=_lets_in(arch)))


def sample() -> list[Combination]:
    """Return a kernel of each operator for sm_90, those that need most, and for the other architectures some.

    These are the life of a launch, the largest kernel, and the one with instructions that not all of them have.
    """
    each = (
        Embedding("float32", "weighted sum", SHAPES[1]),
        EmbeddingInversion(8),
        EmbeddingInputs(torch.int64, torch.int64, torch.int64, is_weighted=True),
        EmbeddingWeightGradients("sm_90"),
        Sparse("bfloat16", 8192, "owner"),
        AllReduce("bfloat16", "one_shot", 128, norms=True),
        _traced("sm_90"),
    )
    everywhere = [
        combination
        for arch in ARCHITECTURES
        for combination in (
            Barrier(arch),
            EmbeddingBackward("bfloat16", "rowwise_adagrad", "weighted sum", arch=arch),
            Gemv("bfloat16", 1, "one_shot", prefetches=arch == "sm_90", arch=arch, lets_in=_lets_in(arch)),
        )
    ]
    most = (
        Gemv("bfloat16", 16, "two_phase", lets_in="kAtEnd"),
        Sparse("float16", 8192, "allgather"),
        AllReduce("float32", "slices", 256, norms=True, warp_blocks=2),
    )
    return [*each, *everywhere, *most]


def everything() -> list[Combination]:
    """Return the whole product for sm_90, and the rest."""
    product = [Embedding(*parts) for parts in itertools.product(DTYPES, POOLINGS, (*SHAPES, ALL_SHAPES))]
    return list(dict.fromkeys([*product, *_rest()]))


def code_of(combination: Combination) -> str:
    """Return a digest of what is compiled for a combination."""
    return digest(combination.request().source(), combination.arch)


def compiled(combination: Combination) -> KernelResources:
    """Compile a combination as the plan would have it compiled.

    Raises:
        RuntimeError: the compiler has made what no GPU executes.
    """
    request = combination.request()
    code = compile_cuda(request.source(), arch=combination.arch)
    opcodes = (word & 0xFFF for word in _instructions(code.path.read_bytes()))
    if combination.arch == "sm_90" and _LDGSTS_UR in opcodes:  # in code for sm_80 it is as good as any
        raise RuntimeError(f"{combination.name}: an asynchronous copy whose uniform registers the compiler has lost")
    return code.kernels[request.name]


# LDGSTS with an offset in a uniform register: what nvcc 13.0 emits in some loops for a copy with a cache policy, though
# it has no such offset. It names UR0 and UR1, which hold something else; a GPU stops there with an illegal instruction.
_LDGSTS_UR = 0xDAE


def _instructions(cubin: bytes) -> Iterator[int]:
    """Return the first halves of a cubin's instructions, which have the opcode."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for number in range(count):
        _, _, flags, _, offset, nbytes = struct.unpack_from("<IIQQQQ", cubin, sections + number * size)
        if flags & _EXECUTABLE:
            yield from (word for word, _ in struct.iter_unpack("<QQ", cubin[offset : offset + nbytes]))


_EXECUTABLE = 4  # SHF_EXECINSTR


def compile_all(
    combinations: Iterable[Combination], workers: int = 2
) -> dict[str, tuple[Combination, KernelResources]]:
    """Compile combinations, a few at a time, and return what each uses."""
    combinations = list(combinations)
    with ThreadPoolExecutor(workers) as pool:
        used = pool.map(compiled, combinations)
        return {combination.name: (combination, found) for combination, found in zip(combinations, used, strict=True)}


def row(combination: Combination, used: KernelResources) -> dict[str, int | str]:
    """Return one kernel's line of the table."""
    return {
        "code": code_of(combination),
        "threads": combination.threads,
        "registers": used.registers,
        "spill_bytes": used.spill_store_bytes + used.spill_load_bytes,
        "stack_bytes": used.stack_bytes,
        "shared_bytes": used.shared_bytes,
    }


def nvcc_release() -> str:
    return ".".join(map(str, find_nvcc().release))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}; without it, only print the table")
    parser.add_argument("--all", action="store_true", help="compile also what the table has of the same code")
    arguments = parser.parse_args()
    table = json.loads(TABLE.read_text()) if TABLE.exists() and not arguments.all else {}
    known = table["kernels"] if table.get("nvcc") == nvcc_release() else {}
    kept = {c.name: known[c.name] for c in everything() if known.get(c.name, {}).get("code") == code_of(c)}
    made = compile_all(combination for combination in everything() if combination.name not in kept)
    rows = dict(sorted({**kept, **{name: row(*found) for name, found in made.items()}}.items()))
    for name, found in rows.items():
        print(
            f"{name:84s} {found['threads']:4d} threads {found['registers']:4d} registers, {found['spill_bytes']} spilt"
        )
    if arguments.write:
        table = {"nvcc": nvcc_release(), "command": "python tests/kernel_resources.py --write", "kernels": rows}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
