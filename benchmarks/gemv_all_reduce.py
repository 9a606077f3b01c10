"""Benchmark of gemv_all_reduce and gemv: persistent-ops bench gemv_all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
from gemv.check import check_fused, check_methods
from gemv.methods import ALONE, CHOICES, FUSED, LABELS, METHODS, PRODUCTS, UNFUSED, Methods
from gemv.shapes import DTYPE, SHAPES, Shape, shape_named
from harness.check import replay_differs
from harness.command import at_least, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import draw_bars, figure, legend
from harness.report import SPEEDUP, case_table, fastest, times_as_long
from harness.timing import Subject
from harness.tuning import compile_together, refusal

from persistent_ops.ops.gemv_plan import OPERATOR, GemvKey, GemvPlan, Tuning, choose_algorithm, reserve_packets
from persistent_ops.runtime.world import World
from persistent_ops.testing.record import pes_text, select, unique, us_text
from persistent_ops.testing.symmetric_memory import symmetric_buffer

_DRAWN_AT_A_TIME = 1 << 28  # a generator's call takes fewer than 2^31 elements
_PRODUCT_ROUNDS = 5
_Line = dict[str, Any]


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help.

    Attributes:
        shapes: names, of SHAPES or others.
        replays: timed one by one for the spread; None for the backend's default.
    """

    methods: tuple[str, ...] = METHODS
    calls: int = 20
    shapes: tuple[str, ...] = tuple(SHAPES)
    replays: int | None = None


class Products(Trial):
    """One shape: the methods, each with every copy of the weight in turn."""

    def __init__(self, world: World, name: str, methods: Methods, chosen: Sequence[str]) -> None:
        self._world = world
        self._shaped = methods
        self.fields = {"shape_name": name, "shape": dataclasses.asdict(methods.shape)}
        self.methods = methods.available(world, tuple(chosen))
        self.moved = (methods.shape.weight_bytes, 0.0)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self._shaped.run, name, copy) for copy in range(self._shaped.shape.copies)]

    def check(self) -> dict[str, Any]:
        return check_methods(self._world, self._shaped, tuple(self.methods))

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare graphs of the operator with plain calls on the last copy, which comes last in them."""
        failures = []
        for name in CHOICES:
            if name in subjects and replay_differs(self._world, self._shaped.out, self.calls(name)[-1], subjects[name]):
                failures.append(f"{name}, a replay gives other bits than a call")
        return failures

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        return {"weight_bytes": self._shaped.shape.weight_bytes, "calls_per_graph": calls}

    def problem_of(self, name: str, tuning: Any) -> str | None:
        return problem_of(self._world, self._shaped, name, tuning)

    def check_tuned(self, name: str) -> list[str]:
        return check_fused(self._world, self._shaped, name, 0)[1]


def problem_of(world: World, methods: Methods, name: str, tuning: Tuning) -> str | None:
    """Return why there is no plan of a method, or None where there is one; launches nothing."""
    shape, choice = methods.shape, CHOICES[name]

    def plan() -> GemvPlan:
        key = GemvKey(
            world.team,
            shape.rows,
            shape.columns,
            shape.vectors,
            DTYPE,
            None,
            choice.algorithm,
            methods.is_aligned,
            choice.prefetch_weight,
            tuning,
        )
        if choice.algorithm == "auto":
            key = key._replace(algorithm=choose_algorithm(world, key))
        return GemvPlan(world, key)

    return refusal(plan)


class GemvAllReduce(Experiment[str]):
    """Products and their sums, by shape."""

    name = "gemv_all_reduce"
    labels = LABELS
    case_field = "shape_name"
    worlds_help = "1,2,4,8; in a world of 1 the operator is its GEMV alone (default: one PE per GPU, then 1; host 2,1)"
    time_limit = 600.0
    quick_help = "few rounds and replays"
    is_fresh = True
    operator = OPERATOR
    tuned_methods = traced_methods = ("fused", "gemv_alone")  # one of them, by the world
    tunable = tuple(CHOICES)
    knobs: ClassVar = {"occupancy": ("work_groups", ())}
    correct = (
        "correct: within the rounding bound of fp64 (at most {largest_share_of_bound:.2f} of it); the same bits on all "
        "PEs, when repeated, in both algorithms, with prefetch, in graphs, and for a vector alone"
    )
    note = "; bf16"
    preparing = "weights and ceilings"
    shares: ClassVar[Mapping[str, float]] = {**Experiment.shares, "us_p999": 0.999}

    @classmethod
    def default_worlds(cls, pes: int) -> list[int]:
        # The largest first: its PEs compile side by side what the world of one needs too.
        return sorted({1, pes}, reverse=True)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shapes", help=f"comma-separated MxK or MxK_Nn (default: {','.join(SHAPES)})")
        parser.add_argument("--calls", type=int, default=20, help="least number of calls in a graph (default 20)")
        parser.add_argument("--replays", type=int, help="single calls that show the spread (default 10000; host 50)")

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        at_least("--calls", [arguments.calls])
        shapes = tuple(shape_named(n).name for n in (arguments.shapes.split(",") if arguments.shapes else SHAPES))
        replays = 20 if arguments.replays is None and arguments.quick else arguments.replays
        return Options(**common, shapes=shapes, calls=arguments.calls, replays=replays)

    # ---- on a PE -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        self._sizes: dict[str, Shape] = {name: shape_named(name) for name in self.options.shapes}
        if self.backend == "host":
            self._sizes = {name: shape.for_host() for name, shape in self._sizes.items()}
        largest = max(shape.copies * shape.weight_bytes for shape in self._sizes.values())
        elements = max(largest, self.read_bytes[self.backend]) // DTYPE.itemsize
        self._storage = torch.empty(elements, dtype=DTYPE, device=self.device)
        generator = torch.Generator(self.device).manual_seed(1000 + self.world.rank)
        for part in self._storage.split(_DRAWN_AT_A_TIME):
            part.uniform_(-1, 1, generator=generator)
        most = max(shape.vectors * shape.rows for shape in self._sizes.values())
        self._symmetric, problem = symmetric_buffer(most, DTYPE)
        if problem is not None:
            self.progress(f"  no torch symmetric memory: {problem}")
            self.write("left_out", what="torch symmetric memory", problem=problem)
        reserve_packets(self.world)  # collective, which a plan that fails on one PE alone could not be

    def source(self) -> torch.Tensor:
        return self._storage

    def begin(self) -> None:
        """Compile what will be called, the PEs side by side."""
        # Without prefetching, "auto" takes the kernel of one of the other two.
        wanted = [
            (choice, self._methods(name)) for choice in ("one_shot", "two_shot", "prefetch") for name in self._sizes
        ]
        attempts = [functools.partial(problem_of, self.world, m, choice, Tuning()) for choice, m in wanted]
        for number, problem in compile_together(self.world, attempts).items():
            self.progress(f"  does not compile: {CHOICES[wanted[number][0]]}: {problem}")

    def _methods(self, name: str) -> Methods:
        return Methods(self.world, self._sizes[name], self._storage, self._symmetric, seed=77 + self.world.rank)

    def cases(self) -> Iterable[str]:
        return list(self._sizes)

    def prepare(self, case: str) -> Products:
        methods = self._methods(case)
        trial = Products(self.world, case, methods, self.options.methods)
        if not self.options.tune:
            tried = methods.choose_product(
                self.world, rounds=_PRODUCT_ROUNDS, burst_seconds=self.options.burst_ms * 1e-3
            )
            self.write("product", **trial.fields, chosen=methods.product, us=tried)
        return trial

    def after_times(self, trial: Products, us: Mapping[str, float]) -> None:
        """Time single calls: of the operator, and of the fastest that it is compared with."""
        baselines = UNFUSED if self.world.size > 1 else ("cublas_alone",)
        names = [name for name in ("fused", "gemv_alone") if name in us]
        names += sorted((name for name in us if name in baselines), key=lambda name: us[name])[:1]
        replays = {"cuda": 10_000, "host": 50}[self.backend] if self.options.replays is None else self.options.replays
        if replays and names:
            self.write_spread(trial, names, replays)

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[_Line]) -> Iterable[Any]:
        for pes in unique(select(lines, "time"), "pes"):
            yield _time_table(lines, pes)
        if select(lines, "spread"):
            yield "us: of a call among others in one graph. single: calls timed one by one, with an event after each."

    @classmethod
    def draw(cls, lines: Sequence[_Line], path: Path) -> None:
        """Draw the normalized times as the paper's figure 9 does; then worlds beside each other, and the GEMV alone."""
        times = select(lines, "time")
        worlds = sorted(pes for pes in unique(times, "pes") if pes > 1)
        panels = ["fused"] * bool(worlds) + ["worlds"] * (len(worlds) > 1)
        panels += ["alone"] * any(line["pes"] == 1 for line in times)
        size = (1.5 * max(6, len(unique(times, "shape_name"))), 4.2 * len(panels))
        with figure(lines, path, size=size, rows=len(panels)) as (_, grid):
            for axes, kind in zip(grid, panels, strict=True):
                if kind == "worlds":
                    _draw_worlds(axes, times, worlds)
                    continue
                pes, methods = (worlds[-1], ("fused", "prefetch", *UNFUSED)) if kind == "fused" else (1, ALONE)
                _draw_times(axes, select(times, "time", pes=pes), methods)
                place = pes_text(pes) if kind == "fused" else "one PE, nothing to exchange"
                axes.set_title(f"GEMV + AllReduce, bf16, {place} (dotted: time to read the weight)")


def _time_table(lines: Sequence[_Line], pes: int) -> Any:
    blocks = []
    for name in unique(select(lines, "time", pes=pes), "shape_name"):
        rows = select(lines, "time", pes=pes, shape_name=name)
        spreads = {line["method"]: line for line in select(lines, "spread", pes=pes, shape_name=name)}
        base = _base(rows)
        cells = []
        for row in rows:
            spread = spreads.get(row["method"])
            cells.append(
                [
                    row["label"],
                    us_text(row["us"]),
                    us_text(row["us_p95"]),
                    f"{row['limit_us'] / row['us']:.0%}",
                    times_as_long(base if row["method"] in CHOICES else None, row),
                    us_text(spread["us_median"]) if spread else "-",
                    us_text(spread["us_p99"]) if spread else "-",
                ]
            )
        blocks.append(([name, f"limit {us_text(rows[0]['limit_us'])}"], cells))
    products = [PRODUCTS[line["chosen"]] for line in select(lines, "product", pes=pes) if line["us"]]
    return case_table(
        pes_text(pes) if pes > 1 else "1 PE: nothing to exchange",
        ("M x K per PE", "method"),
        ("us", "p95", "limit /\ntime", SPEEDUP if pes > 1 else "speedup\nover cuBLAS", "single:\nmedian", "p99"),
        blocks,
        caption="fastest product by cuBLAS, the one used: " + ", ".join(products) if products else None,
    )


def _base(rows: Sequence[_Line]) -> _Line | None:
    """Return the fastest line without the operator: of those that exchange, where there are any."""
    return fastest(rows, UNFUSED) or fastest(rows, ("cublas_alone",))


def _draw_times(axes: Any, lines: Sequence[_Line], methods: Sequence[str]) -> None:
    names = unique(lines, "shape_name")
    rows = [select(lines, "time", shape_name=name) for name in names]
    bases = [_base(own) or own[0] for own in rows]
    series: dict[str, dict[int, float]] = {}
    for method in methods:
        for place, (own, base) in enumerate(zip(rows, bases, strict=True)):
            for row in select(own, "time", method=method):
                series.setdefault(row["label"], {})[place] = row["us"] / base["us"]
    heads = [f"{name}\n1 = {us_text(base['us'])} us" for name, base in zip(names, bases, strict=True)]
    draw_bars(axes, heads, series, fontsize=8)
    for place, base in enumerate(bases):
        axes.hlines(base["limit_us"] / base["us"], place - 0.44, place + 0.44, "black", "dotted")
    axes.set_ylabel("time / fastest without the operator")
    legend(axes)


def _draw_worlds(axes: Any, lines: Sequence[_Line], worlds: Sequence[int]) -> None:
    names = unique(lines, "shape_name")
    series: dict[str, dict[int, float]] = {}
    for pes in worlds:
        for place, name in enumerate(names):
            rows = select(lines, "time", pes=pes, shape_name=name)
            base, own = _base(rows), fastest(rows, FUSED)
            if base and own:
                series.setdefault(pes_text(pes), {})[place] = base["us"] / own["us"]
    draw_bars(axes, names, series, fontsize=8)
    axes.axhline(1.0, color="black", linestyle="dotted")
    axes.set_ylabel("best unfused / best fused")
    axes.set_title("Speed-up by the number of PEs")
    legend(axes)


main = functools.partial(run_benchmark, GemvAllReduce)
