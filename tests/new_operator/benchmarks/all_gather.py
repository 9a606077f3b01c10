"""Benchmark of all_gather: persistent-ops bench all_gather [OPTIONS]."""

from __future__ import annotations

import argparse
import functools
import sys
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
from persistent_ops.ops.all_gather import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import select, unique

SIZES = {"16K": 16 << 10, "256K": 256 << 10, "4M": 4 << 20}  # bytes of each PE's tensor
_HOST_BYTES = 64 << 10  # the most that a size is on CPUs
_NUM_INPUTS = 2


class Gathers(Trial):
    """One size's inputs, which take turns, and the methods as functions of one."""

    def __init__(self, world: World, options: Options, size: str) -> None:
        nbytes = SIZES[size] if world.backend.name == "cuda" else min(SIZES[size], _HOST_BYTES)
        self.fields = {"size": size, "bytes": nbytes}
        self.methods = options.methods if world.size > 1 else ("fused",)
        self.moved = (nbytes, nbytes * (world.size - 1))
        self._world = world
        device, generator = world.backend.device, torch.Generator().manual_seed(7)
        parts = torch.randn((_NUM_INPUTS, world.size, nbytes // 4), generator=generator)  # the same on all PEs
        self._wanted = parts.to(device)
        self._out = torch.empty_like(self._wanted[0])

    def calls(self, name: str) -> list[Callable[[], torch.Tensor]]:
        return [functools.partial(self._run, name, parts[self._world.rank]) for parts in self._wanted]

    def check(self) -> dict[str, Any]:
        failures = []
        for name in self.methods:
            for number, (call, wanted) in enumerate(zip(self.calls(name), self._wanted, strict=True)):
                found = call()
                self._world.check()
                failures += [f"{name}, input {number}"] if bits_differ(found, wanted) else []
                found.fill_(torch.nan)  # the next call must write it again
        return {"failures": failures}

    def _run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "fused":
            return po.all_gather(x)
        dist.all_gather_into_tensor(self._out.view(-1), x)
        return self._out


class AllGather(Experiment[str]):
    """All-gathers by size."""

    name = "all_gather"
    labels: ClassVar = {"fused": "all_gather", "nccl": "{collective}"}
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

    def prepare(self, case: str) -> Gathers:
        return Gathers(self.world, self.options, case)

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
            axes.set(xscale="log", yscale="log", xlabel="bytes of x", ylabel="us")
            axes.legend()


def main(argv: list[str]) -> int:
    """Run the benchmark; see `run_benchmark`."""
    return run_benchmark(AllGather, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
