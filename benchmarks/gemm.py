"""Benchmark of gemm: persistent-ops bench gemm [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness.experiment
import torch
from harness.check import bits_differ, poisoned, replay_differs
from harness.command import names, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import figure
from harness.report import case_table, right_times
from harness.timing import Subject, time_interleaved
from harness.world import chosen_backend

import persistent_ops as po
from persistent_ops.ops.gemm import OPERATOR
from persistent_ops.ops.product import Shape, Tuning, choose_tile
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather
from persistent_ops.testing.record import pes_text, select, unique, us_text

DTYPE = torch.bfloat16
LABELS = {"gemm": "gemm", "cublas": "{product}"}
METHODS = tuple(LABELS)
LOADS = ("sustained", "paused")
COLUMNS = ("cuBLAS", "gemm", "cuBLAS / gemm", "TFLOP/s", "tile")  # of what `cells` returns
_LAYERS = (  # K x N of a PE: of Llama 8B, 70B and 405B on 2 GPUs
    *("4096x3072", "2048x4096", "4096x14336", "7168x4096"),
    *("8192x5120", "4096x8192", "8192x28672", "14336x8192"),
    *("16384x9216", "8192x16384", "16384x53248", "26624x16384"),
)
SHAPES = (
    *(f"{m}x{k}x8192" for k in (2560, 7168) for m in (256, 512, 1024, 4096, 16384)),
    *(f"{m}x8192x{n}" for n in (2560, 7168) for m in (256, 512, 1024, 4096, 16384)),
    *("4096x4096x4096", "8192x8192x8192"),
    *(f"{m}x{layer}" for layer in _LAYERS for m in (256, 1024, 4096)),
    *("256x7168x8192_N", "512x7168x8192_N", "1024x2560x8192_N", "1024x7168x8192_N", "1024x8192x2560_N"),
    *("4096x2560x8192_N", "4096x7168x8192_N", "8192x8192x8192_N"),
)
_QUICK_SHAPES = ("256x7168x8192", "1024x7168x8192", "4096x4096x4096", "1024x7168x8192_N")
_HOST_SHAPES = ("16x32x24", "64x64x64", "24x16x40_N")
_ROTATED_BYTES = 400_000_000  # several L2 caches of an H200: operands are gone when their turn comes
_FEWEST_COPIES, _MOST_COPIES = 2, 16
_FLOPS, _SHORTEST_SECONDS = 800e12, 3e-6  # about the most that an H200 does in a second; of a call, at least
_SPAN_SECONDS = 1e-3  # of a graph, at least
_PAUSES, _MOST_PAUSED_ROWS = 8.0, 8192  # a pause in lengths of the span after it; M of paused cases
_LOAD_SECONDS = 0.25
_LARGEST_ERROR = 4e-3  # relative to the norm of the result
_Line = dict[str, Any]


def shape_named(name: str) -> Shape:
    """Return the product of a name such as 1024x7168x8192 or 1024x7168x8192_N.

    Raises:
        ValueError: it is no such name, or no shape for the kernel.
    """
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})(_N)?", name)
    rows, depth, columns = (int(size) for size in found.groups()[:3]) if found else (0, 0, 0)
    if not found or depth % 8 or columns % 8:
        raise ValueError(f"--shapes: expected MxKxN or MxKxN_N, with multiples of 8 for K and N, got {name}")
    return Shape(rows, depth, columns, True, found[4] is None)


def copies_and_passes(backend: str, shape: Shape) -> tuple[int, int]:
    """Return the copies of a product's operands that take turns, and how often a graph goes through all of them."""
    rows, depth, columns, _, _ = shape
    if backend != "cuda":
        return _FEWEST_COPIES, 1
    bytes_each = (rows * depth + depth * columns + rows * columns) * DTYPE.itemsize
    copies = max(_FEWEST_COPIES, min(_ROTATED_BYTES // bytes_each + 1, _MOST_COPIES))
    seconds = max(2 * rows * depth * columns / _FLOPS, _SHORTEST_SECONDS)
    return copies, math.ceil(_SPAN_SECONDS / (seconds * copies))


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help."""

    methods: tuple[str, ...] = METHODS
    burst_ms: float = 20.0
    shapes: tuple[str, ...] = SHAPES
    loads: tuple[str, ...] = LOADS


class Products(Trial):
    """One shape under one load: calls take turns with copies of a, b and out, which no cache holds together.

    Attributes:
        tflops: by method, once it is timed.
    """

    def __init__(self, world: World, options: Options, name: str, load: str) -> None:
        self.fields = {"shape": name, "load": load}
        self.methods = options.methods
        self.tflops: dict[str, float] = {}
        self._world, self._shape = world, shape_named(name)
        self._generator = torch.Generator(world.backend.device).manual_seed(91 + world.rank)
        rows, depth, columns, _, _ = self._shape
        self.flop = 2 * rows * depth * columns
        copies, self._passes = copies_and_passes(world.backend.name, self._shape)
        self._inputs = [self._drawn(lambda x: x.normal_(generator=self._generator)) for _ in range(copies)]
        self._outs = [self._empty(rows, columns) for _ in range(copies)]

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=DTYPE, device=self._world.backend.device)

    def _drawn(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b, of which `draw` fills the memory."""
        rows, depth, columns, _, b_k_major = self._shape
        b = draw(self._empty(columns, depth)).t() if b_k_major else draw(self._empty(depth, columns))
        return draw(self._empty(rows, depth)), b

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(_run, name, a, b, out) for (a, b), out in zip(self._inputs, self._outs, strict=True)]

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        return super().subject(world, name, calls * self._passes)

    def check(self) -> dict[str, Any]:
        """Compare whole numbers with the exact bits, and normal numbers with torch's product in fp32; collective.

        cuBLAS may add parts of sums in bf16, so that its whole numbers need not be exact.
        """
        failures, largest = [], 0.0
        if "gemm" in self.methods:
            a, b = self._drawn(lambda x: x.random_(-3, 4, generator=self._generator))
            result = poisoned(self._world, self._outs[0], functools.partial(_run, "gemm", a, b, self._outs[0]))
            if bits_differ(result, (a.float() @ b.float()).to(DTYPE)):
                failures.append("gemm, whole numbers: other bits than the exact ones")
            if po.gemm.last_path != "kernel":  # type: ignore[attr-defined]
                failures.append("gemm, takes torch's product")
        for number, ((a, b), out) in enumerate(zip(self._inputs, self._outs, strict=True)):
            want = a.float() @ b.float()
            for name in self.methods:
                result = poisoned(self._world, out, functools.partial(_run, name, a, b, out))
                error = float((result.float() - want).norm() / want.norm())
                largest = max(largest, math.inf if math.isnan(error) else error)
                if not error <= _LARGEST_ERROR:
                    failures.append(f"{name}, copy {number}: {error:.2g} from the fp32 result, relative to its norm")
        return {"largest_error": largest, "failures": failures}

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare the operator's graph with a plain call on the last copy, which comes last in it."""
        is_wrong = "gemm" in subjects and replay_differs(
            self._world, self._outs[-1], self.calls("gemm")[-1], subjects["gemm"]
        )
        return ["gemm, a replay gives other bits than a call"] if is_wrong else []

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        about: dict[str, Any] = {"tflops": self.tflops[name], "copies": len(self._inputs), "calls_per_graph": calls}
        backend = self._world.backend
        if name == "gemm" and backend.name == "cuda":
            queries = OPERATOR.description.queries
            tile = choose_tile(queries, self._shape, Tuning(), num_sms=backend.num_sms, arena_bytes=backend.arena_bytes)
            about["tile"] = tile._asdict()
        return about


def _run(name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return po.gemm(a, b, out=out) if name == "gemm" else torch.mm(a, b, out=out)


class Gemm(Experiment[tuple[str, str]]):
    """Products, by shape and load."""

    name = "gemm"
    labels = LABELS
    case_field = "shape"
    worlds_help = "1,2; each PE multiplies alone (default: 1)"
    time_limit = 1800.0
    quick_help = "few rounds and shapes"
    correct = "correct: exact for whole numbers; within {largest_error:.1e} of fp32, relative to the result's norm"
    note = "; bf16"

    @classmethod
    def default_worlds(cls, pes: int) -> list[int]:
        return [1]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--shapes", help="comma-separated MxKxN, or MxKxN_N for a b whose rows are contiguous (default: see README)"
        )
        parser.add_argument("--loads", help=f"comma-separated, of {','.join(LOADS)} (default: all)")

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        is_host = chosen_backend(arguments.backend) == "host"
        shapes = _HOST_SHAPES if is_host else _QUICK_SHAPES if arguments.quick else SHAPES
        if arguments.shapes:
            shapes = tuple(arguments.shapes.split(","))
        for name in shapes:
            shape_named(name)
        return Options(**common, shapes=shapes, loads=names("--loads", arguments.loads, LOADS))

    def cases(self) -> Iterable[tuple[str, str]]:
        for name in self.options.shapes:
            for load in self.options.loads:
                if load != "paused" or shape_named(name).rows <= _MOST_PAUSED_ROWS:
                    yield name, load

    def prepare(self, case: tuple[str, str]) -> Products:
        return Products(self.world, self.options, *case)

    def time(self, trial: Products, subjects: Mapping[str, Subject]) -> dict[str, list[float]]:
        rounds = self.options.rounds
        if trial.fields["load"] == "paused":
            times = time_interleaved(self.world, subjects, rounds=rounds, burst_seconds=_SPAN_SECONDS, pauses=_PAUSES)
        else:
            until = time.monotonic() + _LOAD_SECONDS
            while time.monotonic() < until:
                for subject in subjects.values():
                    subject.replay()
                self.world.check()
            times = self.interleave(subjects, rounds)
        for name, own in times.items():
            trial.tflops[name] = trial.flop / max(gather(statistics.median(own))) / 1e12
        return times

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[_Line]) -> Iterable[Any]:
        for pes in unique(select(lines, "time"), "pes"):
            rows: dict[str, list[list[str]]] = {}
            for (name, load), by_method in right_times(lines, pes, ("shape", "load")).items():
                rows.setdefault(name, []).append([load, *cells(by_method)])
            blocks = [([name], own) for name, own in rows.items()]
            yield case_table(f"{pes_text(pes)}, us", ("M x K x N", "load"), COLUMNS, blocks)

    @classmethod
    def draw(cls, lines: Sequence[_Line], path: Path) -> None:
        """Draw the time of cuBLAS over the operator's, by shape, for the first world."""
        pes = select(lines, "time")[0]["pes"]
        cases = right_times(lines, pes, ("shape", "load"))
        shapes = list(dict.fromkeys(name for name, _ in cases))
        with figure(lines, path, size=(max(6.0, 0.25 * len(shapes)), 5)) as (_, (axes,)):
            for load in LOADS:
                pairs = {name: rows for (name, one), rows in cases.items() if one == load and len(rows) == len(METHODS)}
                ratios = [rows["cublas"]["us"] / rows["gemm"]["us"] for rows in pairs.values()]
                axes.plot([shapes.index(name) for name in pairs], ratios, "o", label=load)
            axes.axhline(1.0, color="black", linestyle="dotted")
            axes.set_xticks(range(len(shapes)), shapes, rotation=90, fontsize=7)
            axes.set(ylabel="time of cuBLAS / time of gemm", title=f"gemm, bf16, {pes_text(pes)}")
            axes.legend()


def cells(by_method: Mapping[str, _Line]) -> list[str]:
    """Return a row of a table below COLUMNS, of the "time" lines of one shape and load."""
    own, other = by_method.get("gemm"), by_method.get("cublas")
    times = [us_text(line["us"]) if line else "" for line in (other, own)]
    if own is None:
        return [*times, "", "", ""]
    share = f"{100 * other['us'] / own['us']:.1f} %" if other else ""
    return [*times, share, f"{own['tflops']:.0f}", _tile_text(own["tile"]) if "tile" in own else ""]


def _tile_text(tile: Mapping[str, int]) -> str:
    shared = ", multicast" if tile["sharing"] > 1 else ""
    return f"{tile['rows']}x{tile['columns']}{shared}" + (f", split-K {tile['parts']}" if tile["parts"] > 1 else "")


main = functools.partial(run_benchmark, Gemm)
