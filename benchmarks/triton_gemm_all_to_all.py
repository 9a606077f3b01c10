"""Benchmark of GEMM + All-to-All in Triton: persistent-ops bench triton_gemm_all_to_all [OPTIONS].

The operator is the example launch/triton_operators/overlapped_gemm_all_to_all.py. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemm import shape_named
from gemm_exchange import GemmExchange, Options, Products
from harness.command import run_benchmark
from harness.report import SPEEDUP, fastest
from harness.timing import record, time_interleaved
from harness.world import chosen_backend

from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather
from persistent_ops.testing.record import us_text

LABELS = {
    "triton": "Triton, fused",
    "triton_gemm": "Triton GEMM alone",
    "triton_nccl": "Triton GEMM + {collective}",
    "fused": "gemm_all_to_all",
    "cublas": "{product} alone",
    "nccl": "{product} + {collective}",
}
_PEERS = ("triton_nccl", "nccl")
SHAPES = ("1024x2560x8192", "4096x2560x8192", "4096x7168x8192", "8192x2048x7168")
_EXAMPLE = Path(__file__).parents[1] / "launch/triton_operators/overlapped_gemm_all_to_all.py"
_META = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
_SMALLER = {**_META, "BN": 128, "num_warps": 4}  # two of these work-groups fit an SM
_ALONE = tuple({**meta, "FLATTEN": flatten} for meta in (_META, _SMALLER) for flatten in (False, True))
_TRIAL_ROUNDS = 5  # of a choice for the product alone
_Line = dict[str, Any]
_Cells = Callable[[Mapping[str, _Line]], list[str]]


class TritonProducts(Products):
    """A shape. The product alone takes its fastest configuration, the operator always the same one."""

    alone = (*Products.alone, "triton_gemm")
    own = (*Products.own, "triton", "triton_gemm", "triton_nccl")

    def __init__(self, world: World, methods: Sequence[str], exchange: str, name: str) -> None:
        super().__init__(world, methods, exchange, name)
        from triton_product import gemm

        self._gemm, self._operator_in_triton = gemm, _example().overlapped_gemm_all_to_all
        self._staging = self._empty(self._shape.rows, self._shape.columns)
        a, b = self._operands[0]
        products = {f"{i}": functools.partial(self._multiply, a, b, 0, meta) for i, meta in enumerate(_ALONE)}
        subjects = {name: record(world, [call] * self._passes) for name, call in products.items()}
        seconds = time_interleaved(world, subjects, rounds=_TRIAL_ROUNDS, burst_seconds=3e-3)
        self._choice_alone = _ALONE[gather(int(min(seconds, key=lambda name: min(seconds[name]))))[0]]

    def _run(self, name: str, copy: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if name == "triton":
            return self._fused(a, b, copy)
        if name not in ("triton_gemm", "triton_nccl"):
            return super()._run(name, copy, a, b)
        product = self._multiply(a, b, copy, self._choice_alone)
        if name == "triton_nccl":
            dist.all_to_all_single(self._received[copy], product)
        return self._out(name, copy)

    def _out(self, name: str, copy: int) -> torch.Tensor:
        return self._results[copy] if name == "triton" else super()._out(name, copy)

    def _fused(self, a: torch.Tensor, b: torch.Tensor, copy: int) -> torch.Tensor:
        rows, depth, columns, _, _ = self._shape
        sizes = (self._staging, rows, columns, depth)
        result: torch.Tensor = self._operator_in_triton(
            *_descriptors(a, b, _META), *sizes, out=self._results[copy], meta=_META
        )
        return result

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, copy: int, meta: Mapping[str, Any]) -> torch.Tensor:
        rows, depth, columns, _, _ = self._shape
        grid = self._world.backend.num_sms * (_META["BN"] // meta["BN"])
        self._gemm[(grid,)](*_descriptors(a, b, meta), self._products[copy], rows, columns, depth, **meta)
        return self._products[copy]

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        about = super().measured(name, calls)
        return {**about, "meta": self._choice_alone} if name == "triton_gemm" else about


def _example() -> Any:
    if (folder := str(_EXAMPLE.parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(_EXAMPLE.stem)


def _descriptors(a: torch.Tensor, b: torch.Tensor, meta: Mapping[str, Any]) -> list[Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(each, [meta[size], meta["BK"]]) for each, size in ((a, "BM"), (b.t(), "BN"))]


class TritonGemmAllToAll(GemmExchange):
    """The all-to-all of products, in Triton and by others."""

    name = "triton_gemm_all_to_all"
    labels = LABELS
    trial = TritonProducts
    traced_methods = ("triton",)
    quick_help = "few rounds and one shape"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--shapes", help=f"comma-separated MxKxN that a PE multiplies (default: {','.join(SHAPES)})"
        )

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        if chosen_backend(arguments.backend) == "host":
            raise ValueError("--backend: expected cuda, since Triton's interpreter says nothing about speed")
        if not _EXAMPLE.exists():
            raise ValueError(f"{_EXAMPLE} is missing: run this benchmark in a checkout")
        shapes = tuple(arguments.shapes.split(",")) if arguments.shapes else SHAPES[: 1 if arguments.quick else None]
        pes = math.lcm(*worlds)
        for name in shapes:
            if shape_named(name).rows % pes:
                raise ValueError(f"--shapes: expected a multiple of {pes}, the number of PEs, for M, got {name}")
        return Options(**common, cases=tuple(("all_to_all", name) for name in shapes))

    @classmethod
    def parts(cls) -> Sequence[tuple[Sequence[str], _Cells]]:
        return ((COLUMNS, cells),)


COLUMNS = (
    *("Triton\nGEMM", "cuBLAS\nalone", "Triton GEMM\n+ NCCL", "cuBLAS +\nNCCL", "CUDA,\nfused", "Triton,\nfused"),
    *("link", "fused /\nTriton GEMM", SPEEDUP),
)


def cells(by_method: Mapping[str, _Line]) -> list[str]:
    """Return a row: times, the limit of the links, and how the operator in Triton compares."""
    times = [by_method.get(name) for name in ("triton_gemm", "cublas", "triton_nccl", "nccl", "fused", "triton")]
    own, alone, best = by_method.get("triton"), by_method.get("triton_gemm"), fastest(by_method.values(), _PEERS)
    ratios = [f"{x['us'] / y['us']:.2f}" if x and y else "" for x, y in ((own, alone), (best, own))]
    link = us_text(next(iter(by_method.values()))["limit_us"]) if by_method else ""
    return [*(us_text(line["us"]) if line else "" for line in times), link, *ratios]


main = functools.partial(run_benchmark, TritonGemmAllToAll)
