"""Benchmark of po.nn.RowParallelLinear: persistent-ops bench row_parallel_linear [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness.experiment
import torch
import torch.distributed as dist
from gemv.shapes import DTYPE, Shape, shape_of
from harness.command import at_least, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import figure
from harness.report import method_tables
from torch.nn import functional as F

import persistent_ops as po
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import select, unique
from persistent_ops.testing.symmetric_memory import one_shot, symmetric_buffer, two_shot

LABELS = {
    "layer": "RowParallelLinear",
    "product": "{product} alone",
    "nccl": "{product} + {collective}",
    "symm_one_shot": "{product} + symm_mem one-shot",
    "symm_two_shot": "{product} + symm_mem two-shot",
}
METHODS = tuple(LABELS)
BASELINES = METHODS[2:]
LAYERS = ("8192x14336", "8192x4096", "4096x7168")  # out_features x this PE's in_features: of 70B and 8B on 2 GPUs
VECTORS = (17, 32, 64, 128)


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help."""

    methods: tuple[str, ...] = METHODS
    layers: tuple[str, ...] = LAYERS
    vectors: tuple[int, ...] = VECTORS


class Products(Trial):
    """One layer's weights and vectors. Calls take turns with copies of the weight, which no cache holds together."""

    def __init__(self, world: World, options: Options, shape: Shape, symmetric: torch.Tensor | None) -> None:
        self.fields = {"shape": shape.name, "vectors": shape.vectors}
        result_bytes = shape.vectors * shape.rows * DTYPE.itemsize
        self.moved = (shape.weight_bytes, 2 * result_bytes * (world.size - 1) / world.size)
        self._world = world
        device = world.backend.device
        generator = torch.Generator(device).manual_seed(31 + world.rank)

        def drawn(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=DTYPE, device=device).uniform_(-1, 1, generator=generator)

        self.x = drawn(shape.vectors, shape.columns)
        self.weights = [drawn(shape.rows, shape.columns) for _ in range(shape.copies)]
        self.layers = [_layer(world, weight) for weight in self.weights]
        self._out = torch.empty(shape.vectors, shape.rows, dtype=DTYPE, device=device)
        self._symmetric = None if symmetric is None else symmetric[: self._out.numel()].view_as(self._out)
        found = [name for name in options.methods if "symm" not in name or symmetric is not None]
        self.methods = tuple(name for name in found if world.size > 1 or name not in BASELINES)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self.run, name, number) for number in range(len(self.weights))]

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        return {"path": self.layers[0].last_path} if name == "layer" else {}

    def run(self, name: str, number: int) -> torch.Tensor:
        """Make one call with one of the weights on the current stream; the result is valid until the next one."""
        if name == "layer":
            result: torch.Tensor = self.layers[number](self.x)
            return result
        weight = self.weights[number].t()
        if "symm" in name:
            assert self._symmetric is not None
            torch.mm(self.x, weight, out=self._symmetric)
            return one_shot(self._symmetric) if name == "symm_one_shot" else two_shot(self._symmetric)
        torch.mm(self.x, weight, out=self._out)
        if name == "nccl":
            dist.all_reduce(self._out)
        return self._out

    def check(self) -> dict[str, Any]:
        """Compare each method with each weight with fp64; collective."""
        failures: list[str] = []
        for number, weight in enumerate(self.weights):
            part = F.linear(self.x.double(), weight.double())
            size = F.linear(self.x.double().abs(), weight.double().abs())
            terms = torch.stack([part, part.abs(), size])
            if self._world.size > 1:
                dist.all_reduce(terms)
            for name in self.methods:
                want = part if name == "product" else terms[0]
                for left in (self._out, self._symmetric):
                    if left is not None:
                        left.fill_(math.nan)
                self._world.barrier()  # peers may read or write it as soon as they run
                result = self.run(name, number).double()
                self._world.check()
                # Each PE's product is rounded, and the sum once; other libraries round after each PE.
                # Products are added up in fp32.
                roundings = 2 if name == "layer" else self._world.size
                bound = roundings * 2.0**-8 * terms[1] + 2.0**-18 * terms[2]
                if not bool(((result - want).abs() <= bound).all()):
                    failures.append(f"{name}, weight {number}, farther from the fp64 result than rounding explains")
        return {"failures": failures}


def _layer(world: World, weight: torch.Tensor) -> po.nn.RowParallelLinear:
    """Return the layer whose share on this PE is a weight `[M, K_r]`."""
    rows, columns = weight.shape
    layer = po.nn.RowParallelLinear(
        world.size * columns, rows, bias=False, device="meta", dtype=DTYPE, wire_dtype=DTYPE
    )
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


class RowParallelLinear(Experiment[Shape]):
    """Layers of several vectors, by out_features x in_features of a PE and by vectors."""

    name = "row_parallel_linear"
    labels = LABELS
    case_field = "shape"
    is_fresh = True
    note = "; bf16"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", help=f"comma-separated, OUTxIN_OF_A_PE (default: {','.join(LAYERS)})")
        parser.add_argument("--vectors", help=f"comma-separated (default: {','.join(map(str, VECTORS))})")

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        layers = tuple(arguments.layers.split(",")) if arguments.layers else LAYERS
        for layer in layers:
            _sizes(layer)
        vectors: tuple[int, ...] = VECTORS
        if arguments.vectors:
            vectors = tuple(_whole("--vectors", text) for text in arguments.vectors.split(","))
        at_least("--vectors", vectors)
        return Options(**common, layers=layers, vectors=vectors)

    def set_up(self) -> None:
        most = max(shape.vectors * shape.rows for shape in self.cases())
        self._symmetric, problem = symmetric_buffer(most, DTYPE)
        if problem is not None:
            self.write("left_out", what="torch symmetric memory", problem=problem)

    def cases(self) -> Iterable[Shape]:
        layers = [_sizes(layer) for layer in self.options.layers]
        shapes = [shape_of(*sizes, vectors) for sizes in layers for vectors in self.options.vectors]
        return [shape if self.backend == "cuda" else shape.for_host() for shape in shapes]

    def prepare(self, case: Shape) -> Products:
        return Products(self.world, self.options, case, self._symmetric)

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return method_tables(lines, "shape", "layer", "bf16", lambda row: BASELINES if row["method"] == "layer" else ())

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the times over the number of vectors, a panel for each layer, for the largest world."""
        times = select(lines, "time", pes=max(unique(select(lines, "time"), "pes")))
        layers = unique([{"layer": line["shape"].partition("_")[0]} for line in times], "layer")
        with figure(lines, path, size=(4 * len(layers), 4), columns=len(layers)) as (_, panels):
            for axes, layer in zip(panels, layers, strict=True):
                for method in unique(times, "method"):
                    rows = select(times, "time", method=method)
                    rows = [row for row in rows if row["shape"].partition("_")[0] == layer]
                    if rows:
                        axes.plot([row["vectors"] for row in rows], [row["us"] for row in rows], label=rows[0]["label"])
                axes.set(xlabel="vectors", ylabel="us", title=layer, ylim=(0, None))
                axes.legend(fontsize=7)


def _sizes(layer: str) -> tuple[int, int]:
    rows, by, columns = layer.partition("x")
    if not by:
        raise ValueError(f"--layers: expected sizes such as {LAYERS[0]}, got {layer}")
    sizes = _whole("--layers", rows), _whole("--layers", columns)
    at_least("--layers", sizes)
    return sizes


def _whole(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{option}: expected whole numbers, got {text}")
    return int(text)


main = functools.partial(run_benchmark, RowParallelLinear)
