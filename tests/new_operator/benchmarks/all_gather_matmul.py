"""Benchmark of all_gather_matmul: persistent-ops bench all_gather_matmul [OPTIONS]."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from harness.check import bits_differ
from harness.command import run_benchmark
from harness.experiment import Experiment, Options, Trial
from harness.figures import figure
from harness.report import method_tables

import persistent_ops as po
from persistent_ops.ops.all_gather_matmul import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import select, unique

SIZES = {"16K": 16 << 10, "256K": 256 << 10, "4M": 4 << 20}  # bytes of each PE's tensor
_HOST_BYTES = 64 << 10  # the most that a size is on CPUs
_NUM_INPUTS = 2
_DEPTH, _COLUMNS = 64, 32


class Products(Trial):
    """One size's inputs, which take turns, and the methods as functions of one."""

    def __init__(self, world: World, options: Options, size: str) -> None:
        nbytes = SIZES[size] if world.backend.name == "cuda" else min(SIZES[size], _HOST_BYTES)
        self.fields = {"size": size, "bytes": nbytes}
        self.methods = options.methods if world.size > 1 else ("fused",)
        self.moved = (nbytes, nbytes * (world.size - 1))
        self._world = world
        device, generator = world.backend.device, torch.Generator().manual_seed(7)
        # The same on all PEs; whole numbers, so that sums are exact.
        rows = world.size * nbytes // (4 * _DEPTH)
        numbers = torch.randint(-3, 4, (_NUM_INPUTS, rows, _DEPTH), generator=generator).float()
        self._b = torch.randint(-3, 4, (_DEPTH, _COLUMNS), generator=generator).float().to(device)
        self._wanted = numbers.to(device)
        self._out = torch.empty_like(self._wanted[0])

    def calls(self, name: str) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        own = [whole.chunk(self._world.size)[self._world.rank] for whole in self._wanted]
        return [functools.partial(self._run, name, a) for a in own]

    def check(self) -> dict[str, Any]:
        failures = []
        for name in self.methods:
            for number, (call, wanted) in enumerate(zip(self.calls(name), self._wanted, strict=True)):
                for found, want in zip(call(), (wanted, wanted @ self._b), strict=True):
                    self._world.check()
                    failures += [f"{name}, input {number}"] if bits_differ(found, want) else []
                    found.fill_(torch.nan)  # the next call must write it again
        return {"failures": failures}

    def _run(self, name: str, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "fused":
            gathered, (product,) = po.all_gather_matmul(a, [self._b])
            return gathered, product
        dist.all_gather_into_tensor(self._out, a)
        return self._out, self._out @ self._b


class AllGatherMatmul(Experiment[str]):
    """All-gathers and products by size."""

    name = "all_gather_matmul"
    labels: ClassVar = {"fused": "all_gather_matmul", "nccl": "{collective} + matmul"}
    case_field = "size"
    is_fresh = True
    operator = OPERATOR
    tuned_methods = tunable = ("fused",)
    knobs: ClassVar = {"occupancy": ("work_groups", ())}
    note = "; fp32"

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        return Options(**common)

    def cases(self) -> Iterable[str]:
        return SIZES

    def prepare(self, case: str) -> Products:
        return Products(self.world, self.options, case)

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return method_tables(lines, "size", "size", "fp32", lambda row: ["nccl"] if row["method"] == "fused" else [])

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the times over the size, for the largest world."""
        times = select(lines, "time", pes=max(line["pes"] for line in lines))
        with figure(lines, path, size=(6, 4)) as (_, (axes,)):
            for method in unique(times, "method"):
                rows = select(times, "time", method=method)
                axes.plot([row["bytes"] for row in rows], [row["us"] for row in rows], label=rows[0]["label"])
            axes.set(xscale="log", yscale="log", xlabel="bytes of a", ylabel="us")
            axes.legend()


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    return run_benchmark(AllGatherMatmul, argv)
