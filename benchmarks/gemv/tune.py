"""Times the operator under other values of its Tuning."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness.ceilings import H200
from harness.pes import agree, gather
from harness.record import progress
from harness.timing import record, time_interleaved
from harness.tuning import combinations, gist

from persistent_ops.ops.gemv_plan import TUNING, GemvPlan, Tuning, state_of
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.world import World

from .check import check_fused
from .methods import CHOICES, Methods
from .options import Options
from .run import Bench, calls_of, joined_world
from .shapes import DTYPE

__all__ = ["tune_pe"]

_COMPILE_TIMEOUT_S = 500.0


def tune_pe(options: Options) -> bool:
    """Time every combination on every shape; collective. Rank 0 writes the record.

    Returns:
        Whether every combination that ran gave right results.
    """
    with joined_world(options) as world:
        bench = Bench(world, options)
        state_of(world)  # collective: before any plan, which may fail on one PE alone
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
    world, options = bench.world, bench.options
    progress(world.rank, f"{shape_name}, {method}: {len(candidates)} combinations")
    # Each PE compiles its share first; a plan launches nothing. GPUs are alike: what fails on one is left out.
    own = []
    for number in range(world.rank, len(candidates), world.size):
        problem = _problem(world, methods, method, candidates[number])
        if problem is not None:
            own.append((number, problem))
    problems = dict(item for items in gather(world.bootstrap, own, timeout=_COMPILE_TIMEOUT_S) for item in items)
    passed = True
    for number, tuning in enumerate(candidates):
        refused = problems[number] if number in problems else _problem(world, methods, method, tuning)
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
        with _tuned(world, tuning):
            failures = check_fused(world, methods, method, 0)[1]
            subject = record(world, calls_of(methods, method, options.calls))
            times = time_interleaved(
                world, {method: subject}, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3
            )[method]
        everyone = gather(world.bootstrap, [times, failures])
        wrong = [f"PE {pe}: {text}" for pe, entry in enumerate(everyone) for text in entry[1]]
        passed &= not wrong
        bench.recorder.write(
            "tune",
            **row,
            us=max(statistics.median(entry[0]) for entry in everyone) * 1e6,
            problem="; ".join(wrong[:3]) or None,
            seconds_by_pe_and_round=[entry[0] for entry in everyone],
        )
        for text in wrong:
            progress(world.rank, f"  WRONG: {tuning}: {text}")
        del subject
        gc.collect()
    return passed


@contextmanager
def _tuned(world: World, tuning: Tuning) -> Iterator[None]:
    """Let the operator take a Tuning meanwhile."""
    before = world.operator_state.get(TUNING)
    world.operator_state[TUNING] = tuning
    try:
        yield
    finally:
        if before is None:
            del world.operator_state[TUNING]
        else:
            world.operator_state[TUNING] = before


def _problem(world: World, methods: Methods, method: str, tuning: Tuning) -> str | None:
    """Return why there is no plan with a Tuning, or None where there is one."""
    shape, choice = methods.shape, CHOICES[method]
    with _tuned(world, tuning):
        try:
            GemvPlan(
                world,
                shape.rows,
                shape.columns,
                shape.vectors,
                DTYPE,
                torch.float32,
                None,
                choice.algorithm,
                methods.is_aligned,
                choice.prefetch_weight,
            )
        except (ValueError, RuntimeError, CompileError) as error:
            return f"{type(error).__name__}: {gist(str(error))}"
    return None
