"""Benchmark of gemm_reduce_scatter, gemm_all_to_all and gemm_all_reduce: persistent-ops bench gemm_exchange [OPTIONS].

See README.md beside it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
import torch.distributed as dist
from gemm import DTYPE, copies_and_passes, shape_named
from harness.check import bits_differ, poisoned, replay_differs
from harness.command import names, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import figure
from harness.report import SPEEDUP, case_table, fastest, right_times
from harness.timing import Subject, queued
from harness.world import chosen_backend

import persistent_ops as po
from persistent_ops.ops.gemm_exchange import ALGORITHMS
from persistent_ops.ops.gemm_exchange_plan import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import pes_text, select, unique, us_text
from persistent_ops.testing.symmetric_memory import matmul_reduce_scatter, symmetric_buffer

LABELS = {
    "fused": "fused",
    "auto": "auto",
    "unfused": "unfused",
    "gemm": "own GEMM alone",
    "cublas": "{product} alone",
    "nccl": "{product} + {collective}",
    "symm_mem": "symm_mem",
}
METHODS = tuple(LABELS)
PEERS = ("nccl", "symm_mem")
EXCHANGES = ("reduce_scatter", "all_to_all", "all_reduce")
SHAPES = (
    *(f"{m}x{k}x8192" for m in (256, 1024, 4096) for k in (7168, 2560)),
    *("16384x2560x8192", "1024x2048x4096", "4096x4096x4096"),
)
_ALL_TO_ALL_SHAPES = ("8192x7168x2048", "8192x768x7168")  # beside SHAPES
_SWEEP = tuple(f"{128 << i}x2560x8192" for i in range(9))
_QUICK_SHAPES = ("1024x2560x8192",)
_HOST_SHAPES, _HOST_SWEEP = ("16x32x24", "64x64x64"), ("16x32x24", "32x32x24", "64x32x24")
_EAGER_CALLS = 8  # of symm_mem: twice as many have fewer launches than a stream's queue holds
_LOAD_ROUNDS = 2  # not timed: after them the GPU's clock is that of a GPU under load
_LARGEST_ERROR = 6e-3  # relative to the norm of the result
_Line = dict[str, Any]
_Parts = Sequence[tuple[Sequence[str], Callable[[Mapping[str, _Line]], list[str]]]]


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help.

    Attributes:
        cases: exchange and shape.
    """

    methods: tuple[str, ...] = METHODS
    burst_ms: float = 20.0
    cases: tuple[tuple[str, str], ...] = ()


class Products(Trial):
    """One exchange and shape: calls take turns with copies of the operands, which no cache holds together.

    Attributes:
        alone: methods that exchange nothing.
        own: methods that add up whole numbers exactly.
    """

    alone: ClassVar[tuple[str, ...]] = ("gemm", "cublas")
    own: ClassVar[tuple[str, ...]] = ("gemm", *ALGORITHMS)

    def __init__(self, world: World, methods: Sequence[str], exchange: str, name: str) -> None:
        self._shape = shape_named(name)
        rows, _, columns, _, _ = self._shape
        self.fields = {"exchange": exchange, "shape_name": name}
        self.methods = [m for m in methods if m != "symm_mem" or exchange == "reduce_scatter"]
        sent = rows * columns * DTYPE.itemsize * (world.size - 1) / world.size
        self.moved = (0.0, sent * (2 if exchange == "all_reduce" else 1))
        self._world, self._exchange = world, exchange
        self._operator = getattr(po, f"gemm_{exchange}")
        self._choice: dict[str, Any] = {}
        copies, self._passes = copies_and_passes(world.backend.name, self._shape)
        self._operands = [self._drawn(world.rank, copy) for copy in range(copies)]
        self._products = [self._empty(rows, columns) for _ in range(copies)]
        size = (rows // world.size if exchange == "reduce_scatter" else rows, columns)
        self._received = [self._empty(*size) for _ in range(copies)]  # of the libraries
        self._results = [po.empty(size, dtype=DTYPE) for _ in range(copies)]

    def close(self) -> None:
        for result in self._results:
            po.free(result)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=DTYPE, device=self._world.backend.device)

    def _drawn(self, pe: int, copy: int, *, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b of any PE, in normal or in whole numbers."""
        rows, depth, columns, _, b_k_major = self._shape
        generator = torch.Generator(self._world.backend.device).manual_seed(10_000 * copy + 2 * pe + whole)
        b_size = (columns, depth) if b_k_major else (depth, columns)
        a, b = self._empty(rows, depth), self._empty(*b_size)
        for each in (a, b):
            each.random_(-3, 4, generator=generator) if whole else each.normal_(generator=generator)
        return a, b.t() if b_k_major else b

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self._run, name, copy, *both) for copy, both in enumerate(self._operands)]

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        if name == "symm_mem":
            return queued(world, calls[:_EAGER_CALLS])
        return super().subject(world, name, calls * self._passes)

    def _run(self, name: str, copy: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Make a call; what it returns is valid until the next one with this copy."""
        out = self._out(name, copy)
        if name in ALGORITHMS:
            result: torch.Tensor = self._operator(a, b, out=out, algorithm=name)
            return result
        if name == "gemm":
            return po.gemm(a, b, out=out)
        if name == "symm_mem":
            return matmul_reduce_scatter(a, b)
        product = torch.mm(a, b, out=self._products[copy])
        if name == "nccl":
            if self._exchange == "reduce_scatter":
                dist.reduce_scatter_tensor(out, product)
            elif self._exchange == "all_to_all":
                dist.all_to_all_single(out, product)
            else:
                dist.all_reduce(out)
        return out

    def _out(self, name: str, copy: int) -> torch.Tensor:
        """Return where a method leaves its result; symm_mem leaves it elsewhere."""
        if name in ALGORITHMS:
            return self._results[copy]
        in_place = name in self.alone or self._exchange == "all_reduce"
        return (self._products if in_place else self._received)[copy]

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Compare whole numbers with the exact bits, and normal numbers with products and sums in fp32; collective."""
        failures, largest = [], 0.0
        for whole, copy in ((True, 0), *((False, copy) for copy in range(len(self._operands)))):
            alone, exchanged = self._expected(copy, whole=whole)
            operands = self._drawn(self._world.rank, 0, whole=True) if whole else self._operands[copy]
            for name in self.methods:
                want = alone if name in self.alone else exchanged
                call = functools.partial(self._run, name, copy, *operands)
                result = poisoned(self._world, self._out(name, copy), call)
                if name == "auto":
                    self._choice = self._operator.last_choice._asdict()
                if whole and name in self.own and bits_differ(result, want.to(DTYPE)):
                    failures.append(f"{name}, whole numbers: other bits than the exact ones")
                error = float((result.float() - want).norm() / want.norm())
                largest = max(largest, math.inf if math.isnan(error) else error)
                if not error <= _LARGEST_ERROR:
                    failures.append(f"{name}, copy {copy}: {error:.2g} from the fp32 result, relative to its norm")
        return {"largest_error": largest, "failures": failures}

    def _expected(self, copy: int, *, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this PE's product and its result, in fp32; of whole numbers, with products that travel in bf16."""
        share = self._shape.rows // self._world.size
        first = self._world.rank * share
        rows = slice(None) if self._exchange == "all_reduce" else slice(first, first + share)
        parts = []
        for pe in range(self._world.size):
            a, b = self._drawn(pe, copy, whole=whole)
            part = a[rows].float() @ b.float()
            parts.append(part.to(DTYPE).float() if whole else part)
        a, b = self._drawn(self._world.rank, copy, whole=whole)
        exchanged = torch.cat(parts) if self._exchange == "all_to_all" else functools.reduce(torch.add, parts)
        return a.float() @ b.float(), exchanged

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare graphs of the operators with plain calls on the last copy, which comes last in them."""
        failures = []
        for name in self.own:
            if name in subjects and replay_differs(
                self._world, self._out(name, -1), self.calls(name)[-1], subjects[name]
            ):
                failures.append(f"{name}, a replay gives other bits than a call")
        return failures

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        about = {"copies": len(self._operands), "calls_per_graph": calls}
        return {**about, "choice": self._choice} if name == "auto" else about


class GemmExchange(Experiment[tuple[str, str]]):
    """Products whose results are exchanged, by exchange and shape."""

    name = "gemm_exchange"
    labels = LABELS
    case_field = "shape_name"
    rounds = 7
    rounds_help = "(default 7; quick 3)"
    quick_help = "few rounds and one shape"
    operator = OPERATOR
    tuned_methods = tunable = traced_methods = ("fused",)
    correct = "correct: exact for whole numbers; within {largest_error:.1e} of fp32, relative to the result's norm"
    note = "; bf16"
    trial: ClassVar[type[Products]] = Products

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--exchanges", help=f"comma-separated, of {','.join(EXCHANGES)} (default: all)")
        chosen = parser.add_mutually_exclusive_group()
        chosen.add_argument("--shapes", help="comma-separated MxKxN that a PE multiplies (default: see README)")
        sweep = f"in place of --shapes: {_SWEEP[0]}, twice as many rows, and so on up to {_SWEEP[-1]}"
        chosen.add_argument("--sweep", dest="over_rows", action="store_true", help=sweep)

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        is_host = chosen_backend(arguments.backend) == "host"
        shapes = _HOST_SHAPES if is_host else _QUICK_SHAPES if arguments.quick else SHAPES
        if arguments.over_rows:
            shapes = _HOST_SWEEP if is_host else _SWEEP
        elif arguments.shapes:
            shapes = tuple(arguments.shapes.split(","))
        pes = math.lcm(*worlds)
        for name in shapes:
            if shape_named(name).rows % pes:
                raise ValueError(f"--shapes: expected a multiple of {pes}, the number of PEs, for M, got {name}")
        exchanges = names("--exchanges", arguments.exchanges, EXCHANGES)
        cases = [(exchange, name) for exchange in exchanges for name in shapes]
        if shapes is SHAPES and "all_to_all" in exchanges:
            cases += [("all_to_all", name) for name in _ALL_TO_ALL_SHAPES]
        return Options(**common, cases=tuple(cases))

    @classmethod
    def result_bytes(cls, options: Any, backend: str) -> int:
        """Return the room for results, and for partial sums, of which "auto" grants a quarter of the heap."""
        shapes = [shape_named(name) for _, name in options.cases]
        room = [(copies_and_passes(backend, shape)[0] + 4) * shape.rows * shape.columns for shape in shapes]
        return max(room) * DTYPE.itemsize

    def set_up(self) -> None:
        """See whether torch's symmetric memory multiplies here; collective."""
        self._methods = self.options.methods
        if "symm_mem" not in self._methods:
            return
        buffer, problem = symmetric_buffer(1, DTYPE)
        if buffer is not None:
            a = torch.zeros(8 * self.world.size, 64, dtype=DTYPE, device=self.device)
            _, problem = self.attempt(lambda: matmul_reduce_scatter(a, a.t()))
        if problem is not None:
            self.progress(f"  no symm_mem: {problem}")
            self.write("left_out", what="symm_mem", problem=problem)
        if buffer is None or problem is not None:
            self._methods = tuple(name for name in self._methods if name != "symm_mem")

    def cases(self) -> Iterable[tuple[str, str]]:
        yield from self.options.cases

    def prepare(self, case: tuple[str, str]) -> Products:
        return self.trial(self.world, self._methods, *case)

    def time(self, trial: Products, subjects: Mapping[str, Subject]) -> dict[str, list[float]]:
        self.interleave(subjects, _LOAD_ROUNDS)
        return self.interleave(subjects, self.options.rounds)

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def parts(cls) -> _Parts:
        """Return the columns of each table after the shape's, and what makes a row of them."""
        return TABLES

    @classmethod
    def tables(cls, lines: Sequence[_Line]) -> Iterable[Any]:
        for pes in unique(select(lines, "time"), "pes"):
            groups = right_times(lines, pes, ("exchange", "shape_name"))
            for exchange in unique(select(lines, "time", pes=pes), "exchange"):
                own = {name: by_method for (one, name), by_method in groups.items() if one == exchange}
                for columns, cells in cls.parts():
                    block = (list(own), [cells(by_method) for by_method in own.values()])
                    yield case_table(f"us, gemm_{exchange}, {pes_text(pes)}", ("M x K x N",), columns, [block])

    @classmethod
    def draw(cls, lines: Sequence[_Line], path: Path) -> None:
        """Draw the times over M of the K x N with most cases, for the largest world.

        Vertical lines are where another of "fused" and "unfused" becomes the faster one, and the one that "auto" takes.
        """
        pes = max(unique(select(lines, "time"), "pes"))
        groups = right_times(lines, pes, ("exchange", "shape_name"))
        ((layer, _),) = Counter(name.partition("x")[2] for _, name in groups).most_common(1)
        points: dict[str, dict[int, Mapping[str, _Line]]] = {}
        for (exchange, name), by_method in groups.items():
            rows, _, own = name.partition("x")
            if own == layer:
                points.setdefault(exchange, {})[int(rows)] = by_method
        with figure(lines, path, size=(5.5 * len(points), 5), columns=len(points)) as (_, panels):
            for axes, (exchange, times) in zip(panels, points.items(), strict=True):
                _draw_times(axes, dict(sorted(times.items())))
                axes.set(xscale="log", yscale="log", xlabel="M", ylabel="us")
                axes.set_title(f"gemm_{exchange}, M x {layer.replace('x', ' x ')}, bf16, {pes_text(pes)}", fontsize=9)
                axes.legend(fontsize=7)


def _draw_times(axes: Any, times: Mapping[int, Mapping[str, _Line]]) -> None:
    """Draw one exchange's times, by rising M."""
    for method in METHODS:
        own = {rows: by_method[method] for rows, by_method in times.items() if method in by_method}
        if own:
            style, label = "o-" if method in Products.own else "o--", next(iter(own.values()))["label"]
            axes.plot(list(own), [line["us"] for line in own.values()], style, markersize=3, label=label)
    limits = [next(iter(by_method.values()))["limit_us"] for by_method in times.values()]
    axes.plot(list(times), limits, "k:", label="link")
    for what, style, better in (("faster", "-", _faster), ("auto takes", "--", _taken)):
        known = [(rows, name) for rows, by_method in times.items() if (name := better(by_method))]
        for (rows, name), (more_rows, next_name) in itertools.pairwise(known):
            if name != next_name:
                label = f"{what}: {name} | {next_name}"
                axes.axvline(math.sqrt(rows * more_rows), color="gray", linestyle=style, linewidth=1, label=label)


def _faster(by_method: Mapping[str, _Line]) -> str | None:
    """Return which of both ways was measured to be the faster one; None where one was not."""
    if not {"fused", "unfused"} <= by_method.keys():
        return None
    return min("fused", "unfused", key=lambda name: by_method[name]["us"])


def _taken(by_method: Mapping[str, _Line]) -> str | None:
    """Return what "auto" has taken."""
    return by_method["auto"]["choice"]["algorithm"] if "auto" in by_method else None


# ---- tables: of the "time" lines of one exchange and shape, by method ------------------------------------------------


def time_cells(by_method: Mapping[str, _Line]) -> list[str]:
    """Return a row: times, and how they compare."""
    fused = by_method.get("fused")
    times = [_us(by_method.get(name)) for name in ("gemm", "cublas", *PEERS, "fused", "auto")]
    link = us_text(next(iter(by_method.values()))["limit_us"]) if by_method else ""
    best = fastest(by_method.values(), PEERS)
    return [*times, link, _ratio(fused, by_method.get("gemm")), _ratio(best, fused)]


def model_cells(by_method: Mapping[str, _Line]) -> list[str]:
    """Return a row: both ways, measured and predicted, and what "auto" took."""
    choice = by_method["auto"]["choice"] if "auto" in by_method else {}
    cells = []
    for name in ("fused", "unfused"):
        predicted = choice.get(f"{name}_us")
        cells += [_us(by_method.get(name)), us_text(predicted) if predicted else ""]
    return [*cells, _us(by_method.get("auto")), choice.get("algorithm", "")]


def _us(line: _Line | None) -> str:
    return us_text(line["us"]) if line else ""


def _ratio(line: _Line | None, other: _Line | None) -> str:
    return f"{line['us'] / other['us']:.2f}" if line and other else ""


_TIMES = (
    *("GEMM\nalone", "cuBLAS\nalone", "cuBLAS +\nNCCL", "symm_mem"),
    *("fused", "auto", "link", "fused /\nGEMM", SPEEDUP),
)
_MODEL = ("fused", "fused,\npredicted", "unfused", "unfused,\npredicted", "auto", "auto\ntakes")
TABLES: _Parts = ((_TIMES, time_cells), (_MODEL, model_cells))

main = functools.partial(run_benchmark, GemmExchange)
