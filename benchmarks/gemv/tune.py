"""Times the operator under other values of its Tuning."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Sequence
from typing import Any

from harness.ceilings import H200
from harness.pes import agree, gather
from harness.record import progress
from harness.timing import record, time_interleaved
from harness.tuning import combinations

from persistent_ops.ops.gemv_plan import Tuning

from .check import check_fused
from .methods import CHOICES, Methods
from .options import Options
from .plans import compile_together, problem_of, tuned
from .run import Bench, calls_of, joined_world

__all__ = ["tune_pe"]


def tune_pe(options: Options) -> bool:
    """Time every combination on every shape; collective. Rank 0 writes the record.

    Returns:
        Whether every combination that ran gave right results.
    """
    with joined_world(options) as world:
        bench = Bench(world, options)
        candidates = list(combinations(Tuning, options.tune, options.tune_mode))
        passed = True
        for shape_name in bench.sizes:
            methods = bench.methods(shape_name)
            for method in methods.available(world, options.methods):
                if method in CHOICES:
                    passed &= _tune(bench, methods, shape_name, method, candidates)
            del methods
        del bench
        gc.collect()
        return passed


def _tune(bench: Bench, methods: Methods, shape_name: str, method: str, candidates: Sequence[Tuning]) -> bool:
    """Time the combinations with one shape and method; collective."""
    world, choice = bench.world, CHOICES[method]
    progress(world.rank, f"{shape_name}, {method}: {len(candidates)} combinations")
    problems = compile_together(world, [(methods, choice, tuning) for tuning in candidates])
    passed = True
    for number, tuning in enumerate(candidates):
        refused = problems[number] if number in problems else problem_of(world, methods, choice, tuning)
        refused = agree(world.bootstrap, refused)
        row: dict[str, Any] = {
            "pes": world.size,
            "shape_name": shape_name,
            "method": method,
            "tuning": dataclasses.asdict(tuning),
            "h200_limit_us": methods.shape.weight_bytes / H200.read * 1e6,
        }
        if refused is not None:
            bench.recorder.write("tune", **row, us=None, problem=refused)
            continue
        times, wrong = _time(bench, methods, method, tuning)
        passed &= not wrong
        bench.recorder.write(
            "tune",
            **row,
            us=max(statistics.median(each) for each in times) * 1e6,
            problem="; ".join(wrong[:3]) or None,
            seconds_by_pe_and_round=times,
        )
        for text in wrong:
            progress(world.rank, f"  WRONG: {tuning}: {text}")
    return passed


def _time(bench: Bench, methods: Methods, method: str, tuning: Tuning) -> tuple[list[list[float]], list[str]]:
    """Return seconds per call by PE and round, and what is wrong with the results; collective."""
    world, options = bench.world, bench.options
    with tuned(world, tuning):
        failures = check_fused(world, methods, method, 0)[1]
        subject = record(world, calls_of(methods, method, options.calls))
        times = time_interleaved(
            world, {method: subject}, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3
        )[method]
    del subject
    gc.collect()  # the graph holds memory
    everyone = gather(world.bootstrap, [times, failures])
    wrong = [f"PE {pe}: {text}" for pe, entry in enumerate(everyone) for text in entry[1]]
    return [entry[0] for entry in everyone], wrong
