"""Fill the compile cache ahead: operators and modules plan on paper, and the kernels that they ask for are compiled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

import persistent_ops as po

from .runtime import pe_threads, spawn, world as _world
from .runtime.backend import KernelRequest
from .runtime.compile.cache import cache_folder
from .runtime.compile.jit import compile_cuda
from .runtime.errors import CompileError
from .runtime.paper import Gpu, PaperBackend, Wanted

__all__ = ["DTYPES", "NAMES", "Program", "precompile", "wanted_by"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GPUS = {gpu.arch: gpu for gpu in (Gpu("sm_80", 108, 163 << 10), Gpu(), Gpu("sm_100", 148, 227 << 10))}
_HEAP_BYTES = 32 << 30
_TIMEOUT_S = 600.0
_VECTORS = (1, 8, 16)  # for each of which there is a kernel


@dataclass(frozen=True)
class Program:
    """The program that the kernels are for.

    Attributes:
        dtype: of weights and tables.
        pes: number of PEs.
        nodes: hosts of them.
        in_features, out_features: of the whole layer.
        tokens: rows of x.
        tables, rows, dim: embedding tables of a PE, and their sizes.
        batch: samples of a PE.
        lookups: of a sample, in each table.
        optimizer: of `EmbeddingOptimizer`.
        is_weighted: whether lookups have weights.
    """

    dtype: torch.dtype
    pes: int = 2
    nodes: int = 1
    in_features: int = 4096
    out_features: int = 4096
    tokens: int = 512
    tables: int = 4
    rows: int = 100_000
    dim: int = 128
    batch: int = 1024
    lookups: int = 1
    optimizer: str = "rowwise_adagrad"
    is_weighted: bool = False

    def empty(self, *shape: int) -> torch.Tensor:
        """Return a tensor of any content."""
        return torch.empty(shape, dtype=self.dtype, device="cpu")


# ---- what programs call ----------------------------------------------------------------------------------------------


def _all_reduce(of: Program) -> None:
    for tokens in (1, of.tokens):
        po.all_reduce(of.empty(tokens, of.out_features))


def _all_reduce_rms_norm(of: Program) -> None:
    for tokens in (1, of.tokens):
        x = of.empty(tokens, of.out_features)
        po.all_reduce_rms_norm(x, of.empty(of.out_features), residual=torch.empty_like(x))


def _gemv(of: Program) -> None:
    for vectors in _VECTORS:
        po.gemv(of.empty(of.out_features // of.pes, of.in_features), of.empty(vectors, of.in_features))


def _gemv_all_reduce(of: Program) -> None:
    columns = of.in_features // of.pes
    for vectors in _VECTORS:
        po.gemv_all_reduce(of.empty(of.out_features, columns), of.empty(vectors, columns))


def _factors(of: Program) -> tuple[torch.Tensor, torch.Tensor]:
    columns = of.in_features // of.pes
    return of.empty(of.tokens, columns), of.empty(of.out_features, columns).t()


def _sparse_all_reduce(of: Program) -> None:
    most = of.batch * of.pes
    po.sparse_all_reduce_into(
        torch.zeros(of.batch, dtype=torch.int64, device="cpu"),
        of.empty(of.batch, of.dim),
        num_rows=of.rows,
        out_indices=po.empty(most, dtype=torch.int64),
        out_values=po.empty(most, of.dim, dtype=of.dtype),
        out_count=po.empty(1, dtype=torch.int64),
    )


def _embedding_all_to_all(of: Program) -> None:
    tables = [of.empty(of.rows, of.dim) for _ in range(of.tables)]
    bags = of.tables * of.batch * of.pes
    offsets = torch.arange(bags + 1, dtype=torch.int64, device="cpu") * of.lookups
    indices = torch.zeros(bags * of.lookups, dtype=torch.int64, device="cpu")
    factors = torch.zeros(indices.numel(), dtype=torch.float32, device="cpu") if of.is_weighted else None
    optimizer = po.EmbeddingOptimizer(tables, of.optimizer)
    po.embedding_all_to_all(tables, indices, offsets, factors, optimizer=optimizer)


class _Undrawn(po.nn.ShardedEmbeddingBagCollection):
    def reset_parameters(self, seed: int = 0) -> None:
        """Leave memory as it is, so that the tables take none."""


def _collection(of: Program) -> None:
    configs = [
        po.nn.TableConfig(f"t{number}", of.rows, of.dim, [f"f{number}"], data_type=of.dtype)
        for number in range(of.tables * of.pes)
    ]
    _Undrawn(
        configs,
        max_batch=of.batch,
        lookups_per_sample=of.lookups,
        optimizer=of.optimizer,
        is_weighted=of.is_weighted,
    )


def _linear(kind: Callable[..., torch.nn.Module]) -> Callable[[Program], None]:
    def call(of: Program) -> None:
        layer = kind(of.in_features, of.out_features, bias=False, dtype=of.dtype)
        features = layer.get_parameter("weight").shape[1]
        with torch.no_grad():
            for tokens in (*_VECTORS, of.tokens):
                layer(of.empty(tokens, features))

    return call


_CALLS: dict[str, Callable[[Program], object]] = {
    "all_reduce": _all_reduce,
    "all_reduce_rms_norm": _all_reduce_rms_norm,
    "embedding_all_to_all": _embedding_all_to_all,
    "gemm": lambda of: po.gemm(*_factors(of)),
    "gemm_all_reduce": lambda of: po.gemm_all_reduce(*_factors(of), algorithm="fused"),
    "gemm_all_to_all": lambda of: po.gemm_all_to_all(*_factors(of), algorithm="fused"),
    "gemm_reduce_scatter": lambda of: po.gemm_reduce_scatter(*_factors(of), algorithm="fused"),
    "gemv": _gemv,
    "gemv_all_reduce": _gemv_all_reduce,
    "sparse_all_reduce": _sparse_all_reduce,
    "ColumnParallelLinear": _linear(po.nn.ColumnParallelLinear),
    "RowParallelLinear": _linear(po.nn.RowParallelLinear),
    "ShardedEmbeddingBagCollection": _collection,
}
NAMES = tuple(_CALLS)


# ---- on paper --------------------------------------------------------------------------------------------------------


def wanted_by(names: Sequence[str], of: Program, gpu: Gpu) -> Wanted:
    """Return the kernels that a program loads which uses operators and modules of these names."""
    wanted = Wanted()

    def run() -> None:
        bootstrap = pe_threads.thread_bootstrap()
        assert bootstrap is not None
        transport = "auto" if of.nodes == 1 else f"nodes:{of.nodes}"
        world = _world.World(bootstrap, PaperBackend(gpu, wanted, bootstrap, _HEAP_BYTES, transport), _TIMEOUT_S)
        _world.adopt(world, of_thread=True)
        for name in names:
            _CALLS[name](of)
        world.await_compilations()
        _world.finalize()

    spawn.launch(run, of.pes, threads=True, timeout=_TIMEOUT_S)
    return wanted


def _gpu_of(arch: str | None) -> Gpu:
    here = Gpu.of_machine()
    if arch is None:
        if here is None:
            raise ValueError(f"--arch: expected an architecture, since there is no GPU here: {', '.join(_GPUS)}")
        return here
    name = arch.removesuffix("a")  # which kernels add that need it
    if here is not None and here.arch == name:
        return here
    if name not in _GPUS:
        raise ValueError(f"--arch: expected one of {', '.join(_GPUS)}, got {arch!r}")
    return _GPUS[name]


def _named(request: KernelRequest) -> str:
    return " ".join([request.name, *(f"{field}={value.rpartition('::')[2]}" for field, value in request.config or ())])


def precompile(names: Sequence[str], programs: Sequence[Program], arch: str | None) -> Iterator[str]:
    """Compile what programs load, side by side; yield a line for each kernel, and one at the end.

    Raises:
        ValueError: a name or the architecture is unknown.
        CompileError: a kernel does not compile; after the others.
    """
    if unknown := [name for name in names if name not in (*NAMES, "all")]:
        raise ValueError(f"expected {', '.join((*NAMES, 'all'))}; got {', '.join(unknown)}")
    gpu, began = _gpu_of(arch), time.monotonic()
    chosen = NAMES if "all" in names else tuple(dict.fromkeys(names))
    kernels = {each: None for program in programs for each in wanted_by(chosen, program, gpu)}
    failure: CompileError | None = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_one(request: KernelRequest, links_nvshmem: bool) -> str:
            since = time.monotonic()
            target = gpu.arch + request.shape.architecture_suffix
            compile_cuda(request.source(), arch=target, nvshmem=links_nvshmem)
            return f"{time.monotonic() - since:5.1f} s  {target}{' with NVSHMEM' * links_nvshmem}  {_named(request)}"

        for done in as_completed([pool.submit(compile_one, *each) for each in kernels]):
            try:
                yield done.result()
            except CompileError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    yield f"{len(kernels)} kernels in {time.monotonic() - began:.1f} s are in {cache_folder()}"
