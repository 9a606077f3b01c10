"""Kernels that plans choose, compiled for GPUs: `SAMPLE` has a few of each operator, `every_kernel` most."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from persistent_ops.ops.all_reduce_plan import kernel_request as all_reduce_request
from persistent_ops.ops.embedding.backward_kernel import GRADIENT, STEPS, Tiles, kernel_request as backward_request
from persistent_ops.ops.embedding.inputs_plan import THREADS, THREADS_BESIDE, kernel_request as inputs_request
from persistent_ops.ops.embedding.inversion import Tuning as InversionTuning, kernel_request as inversion_request
from persistent_ops.ops.embedding.plan import LookupKind, Tuning, _request, _threads
from persistent_ops.ops.embedding.weight_gradients import (
    OPERATOR as WEIGHT_GRADIENTS,
    kernel_request as weights_request,
)
from persistent_ops.ops.gemv_plan import Tuning as GemvTuning, choose_depth, kernel_request as gemv_request, team_factor
from persistent_ops.ops.sparse_plan import kernel_request as sparse_request
from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile.jit import KernelResources, compile_cuda

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BLOCKS_PER_SM = 2  # GpuBackend.default_blocks_per_sm; its module cannot be imported without a GPU's packages
FP32, FP16, BF16 = DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOLINGS = ("sum", "weighted sum", "mean")
SHAPES = tuple(1 << shape for shape in range(6))  # tables of one row shape each
ALL_SHAPES = (1 << 6) - 1


@dataclass(frozen=True)
class GpuKernel:
    """A kernel and the architecture that it is compiled for."""

    request: KernelRequest
    arch: str = "sm_90"

    @property
    def name(self) -> str:
        config = ", ".join(f"{name} {value.rpartition('::')[2]}" for name, value in self.request.config or ())
        traced = ", traced" * self.request.traces
        return f"{self.request.name} {self.arch} {self.request.shape.threads} threads{traced}: {config}".rstrip(": ")

    def traced(self) -> GpuKernel:
        """Return the same kernel, leaving a timeline."""
        return GpuKernel(dataclasses.replace(self.request, traces=True), self.arch)

    def compiled(self) -> tuple[KernelResources, bytes]:
        """Compile it; return what a WG needs, and the cubin.

        Raises:
            RuntimeError: the compiler has made what no GPU executes.
        """
        code = compile_cuda(self.request.source(), arch=self.arch + self.request.shape.architecture_suffix)
        cubin = code.path.read_bytes()
        opcodes = (word & 0xFFF for word in _instructions(cubin))
        if self.arch == "sm_90" and _LDGSTS_UR in opcodes:  # in code for sm_80 it is as good as any
            raise RuntimeError(f"{self.name}: an asynchronous copy whose uniform registers the compiler has lost")
        return code.kernels[self.request.name], cubin


# LDGSTS with an offset in a uniform register: what nvcc 13.0 emits in some loops for a copy with a cache policy, though
# it has no such offset. It names UR0 and UR1, which hold something else; a GPU stops there with an illegal instruction.
_LDGSTS_UR = 0xDAE
_EXECUTABLE = 4  # SHF_EXECINSTR


def _instructions(cubin: bytes) -> Iterator[int]:
    """Return the first halves of a cubin's instructions, which have the opcode."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for number in range(count):
        _, _, flags, _, offset, nbytes = struct.unpack_from("<IIQQQQ", cubin, sections + number * size)
        if flags & _EXECUTABLE:
            yield from (word for word, _ in struct.iter_unpack("<QQ", cubin[offset : offset + nbytes]))


# ---- one kernel of each operator, as its plan asks for it ------------------------------------------------------------


def embedding(
    dtype: torch.dtype,
    pooling: str,
    shapes: int,
    arch: str = "sm_90",
    index: torch.dtype = torch.int64,
    offset: torch.dtype = torch.int64,
    wire: torch.dtype | None = None,
    *,
    from_sources: bool = False,
) -> GpuKernel:
    is_weighted = pooling == "weighted sum"
    lookups = LookupKind(index, offset, 1, is_weighted, 1, from_sources)
    threads, rows = _threads(shapes, is_weighted, from_sources), Tuning().rows_in_flight
    return GpuKernel(
        _request(
            dtype, wire or dtype, lookups, pooling.removeprefix("weighted "), shapes, threads, rows, BLOCKS_PER_SM
        ),
        arch,
    )


def backward(
    dtype: torch.dtype,
    step: str,
    pooling: str = "sum",
    width: int = 128,
    arch: str = "sm_90",
    wire: torch.dtype | None = None,
    *,
    is_aligned: bool = True,
    decay: str = "none",
    rounding: str = "nearest",
    has_wide_keys: bool = False,
    has_max_norm: bool = False,
) -> GpuKernel:
    request = backward_request(
        dtype,
        wire or dtype,
        step,
        pooling=pooling.removeprefix("weighted "),
        is_weighted=pooling == "weighted sum",
        tiles=Tiles.of(width * dtype.itemsize),
        is_aligned=is_aligned,
        decay=decay,
        rounding=rounding,
        has_wide_keys=has_wide_keys,
        has_max_norm=has_max_norm,
    )
    return GpuKernel(request, arch)


def inversion(
    items: int,
    arch: str = "sm_90",
    integer: torch.dtype = torch.int64,
    digit_bits: int = 8,
    *,
    is_wide: bool = False,
    lookups: bool = False,
    counts: bool = False,
) -> GpuKernel:
    tuning = InversionTuning()
    request = inversion_request(
        integer,
        integer,
        is_wide=is_wide,
        lookups=lookups,
        counts=counts,
        digit_bits=digit_bits,
        items=items,
        threads=tuning.threads,
        work_groups_per_sm=tuning.work_groups_per_sm,
        arena_bytes=0,
    )
    return GpuKernel(request, arch)


def inputs(
    integers: tuple[torch.dtype, torch.dtype, torch.dtype],
    arch: str = "sm_90",
    threads: int = THREADS_BESIDE,
    *,
    has_lengths: bool = True,
    is_weighted: bool = True,
) -> GpuKernel:
    """`integers`: of values, of what they become, and of lengths or offsets."""
    return GpuKernel(inputs_request(*integers, has_lengths=has_lengths, is_weighted=is_weighted, threads=threads), arch)


def weight_gradients(arch: str = "sm_90") -> GpuKernel:
    return GpuKernel(weights_request(WEIGHT_GRADIENTS.description.constants["kThreads"]), arch)


def barrier(arch: str = "sm_90") -> GpuKernel:
    return GpuKernel(KernelRequest("barrier", None, LaunchShape(64)), arch)


def gemv(
    dtype: torch.dtype,
    vectors: int,
    algorithm: str,
    arch: str = "sm_90",
    wire_dtype: torch.dtype = FP32,
    lets_in: str = "kAtOnce",
    *,
    is_aligned: bool = True,
    is_resident: bool = True,
    prefetches: bool = False,
) -> GpuKernel:
    warps = GemvTuning().warps
    factor = 1 if is_resident else team_factor(warps, dtype)
    request = gemv_request(
        dtype,
        wire_dtype,
        vectors,
        warps=warps * factor,
        depth=choose_depth(1 << 30, 12 if prefetches else 0) // factor,
        arena_bytes=0,
        is_aligned=is_aligned,
        is_resident=is_resident,
        two_shot=algorithm == "two_shot",
        prefetches=prefetches,
        lets_in=lets_in,
    )
    return GpuKernel(request, arch)


def sparse(
    dtype: torch.dtype,
    row_bytes: int,
    algorithm: str,
    arch: str = "sm_90",
    index: torch.dtype = torch.int64,
    *,
    is_aligned: bool = True,
) -> GpuKernel:
    gathers = algorithm == "allgather"
    request = sparse_request(dtype, index, row_bytes=row_bytes, is_aligned=is_aligned, gathers=gathers, is_host=False)
    return GpuKernel(request, arch)


def all_reduce(
    dtype: torch.dtype,
    algorithm: str,
    threads: int,
    warp_blocks: int = 1,
    arch: str = "sm_90",
    *,
    norms: bool = True,
    is_aligned: bool = True,
) -> GpuKernel:
    request = all_reduce_request(
        dtype, algorithm, norms=norms, is_aligned=is_aligned, warp_blocks=warp_blocks, threads=threads
    )
    return GpuKernel(request, arch)


# ---- sets of them ----------------------------------------------------------------------------------------------------


def _first_of_stream(arch: str) -> GpuKernel:
    """Return a GEMV that begins early where the architecture lets it."""
    early = {"prefetches": True, "lets_in": "kLate"} if arch == "sm_90" else {}
    return gemv(BF16, 1, "one_shot", arch, **early)  # type: ignore[arg-type]


def _sample() -> Iterator[GpuKernel]:
    yield embedding(FP32, "weighted sum", SHAPES[1])  # most registers
    yield embedding(BF16, "sum", ALL_SHAPES)
    yield inversion(8)
    yield inputs((torch.int64,) * 3)
    yield weight_gradients()
    for arch in ARCHITECTURES:
        yield barrier(arch)
        yield backward(BF16, "rowwise_adagrad", "weighted sum", arch=arch)
        yield _first_of_stream(arch)
    yield gemv(BF16, 16, "two_shot", lets_in="kAtEnd")
    yield _first_of_stream("sm_90").traced()
    yield sparse(BF16, 8192, "owner")
    yield sparse(FP16, 8192, "allgather")
    yield all_reduce(BF16, "one_shot", 128)
    yield all_reduce(FP32, "slices", 256, 2)


SAMPLE = tuple(_sample())


def every_kernel() -> list[GpuKernel]:
    """Return what differs in code: dtypes, poolings, row shapes, updates, alignment, algorithms, architectures."""
    return list(dict.fromkeys([*SAMPLE, *_embeddings(), *_backward_passes(), *_lookups(), *_sums()]))


def _embeddings() -> Iterator[GpuKernel]:
    pair = SHAPES[2] | SHAPES[3]
    for dtype, pooling, shapes in itertools.product(DTYPES, POOLINGS, (*SHAPES, pair, ALL_SHAPES)):
        yield embedding(dtype, pooling, shapes)
    for pooling, shapes in itertools.product(POOLINGS, (*SHAPES, ALL_SHAPES)):
        yield embedding(FP32, pooling, shapes, wire=BF16)
    for dtype, pooling, shapes in itertools.product(DTYPES, POOLINGS, (*SHAPES[:3], pair)):
        yield embedding(dtype, pooling, shapes, index=torch.int32, offset=torch.int32, from_sources=True)
    for arch in ("sm_80", "sm_100"):
        yield embedding(FP32, "weighted sum", SHAPES[1], arch)
        yield embedding(BF16, "mean", SHAPES[0], arch)
    yield embedding(FP32, "weighted sum", SHAPES[1]).traced()


def _backward_passes() -> Iterator[GpuKernel]:
    updates = [step for step in STEPS if step != GRADIENT]
    widths = itertools.cycle((8, 32, 256, 512, 4096))  # a chunk or two, some chunks a lane, more than registers hold
    for dtype, step, pooling in itertools.product(DTYPES, STEPS, POOLINGS):
        yield backward(dtype, step, pooling)
        yield backward(dtype, step, pooling, next(widths), is_aligned=False)
    for dtype, width in itertools.product(DTYPES, (64, 256, 512, 4096)):
        yield backward(dtype, "rowwise_adagrad", "weighted sum", width, decay="l2", has_wide_keys=True)
        yield backward(dtype, "rowwise_adagrad", "sum", width, has_max_norm=True)
    for dtype, step in itertools.product((FP16, BF16), updates):
        yield backward(dtype, step, "sum", next(widths), rounding="stochastic")
    for step, pooling in itertools.product(STEPS, POOLINGS):
        yield backward(FP32, step, pooling, next(widths), wire=BF16)


def _lookups() -> Iterator[GpuKernel]:
    flags = [{"is_wide": wide, "lookups": lookups} for wide, lookups in itertools.product((False, True), repeat=2)]
    for digit_bits, counts, items, kind in itertools.product((7, 8), (False, True), (4, 2), flags):
        yield inversion(items, digit_bits=digit_bits, counts=counts, **kind)  # type: ignore[arg-type]
    integers = itertools.product((torch.int32, torch.int64), repeat=3)
    for kinds, threads, lengths in itertools.product(integers, (THREADS, THREADS_BESIDE), (True, False)):
        yield inputs(kinds, threads=threads, has_lengths=lengths, is_weighted=lengths)  # type: ignore[arg-type]


def _sums() -> Iterator[GpuKernel]:
    early: dict[str, Any] = {"prefetches": True, "lets_in": "kLate"}
    for dtype, vectors, algorithm in itertools.product(DTYPES, (1, 8, 16), ("one_shot", "two_shot")):
        yield gemv(dtype, vectors, algorithm, lets_in="kAtEnd")
        yield gemv(dtype, vectors, algorithm, wire_dtype=dtype, is_aligned=False, is_resident=False)
        if vectors == 1:
            yield gemv(dtype, vectors, algorithm, **early)
            yield gemv(dtype, vectors, algorithm, **early).traced()
    for dtype, algorithm, nbytes in itertools.product(DTYPES, ("owner", "allgather"), (64, 256, 8192)):
        yield sparse(dtype, nbytes, algorithm)
        yield sparse(dtype, nbytes - 2 * dtype.itemsize, algorithm, index=torch.int32, is_aligned=False)
    for dtype, norms, aligned in itertools.product(DTYPES, (False, True), (False, True)):
        for algorithm, threads, blocks in (("one_shot", 128, 1), ("two_shot", 256, 1), ("slices", 256, 2)):
            yield all_reduce(dtype, algorithm, threads, blocks, norms=norms, is_aligned=aligned)
    for arch in ("sm_80", "sm_100"):
        yield sparse(BF16, 8192, "owner", arch)
        yield all_reduce(BF16, "slices", 256, 2, arch)
