"""Times the fused operator under other values of its Tuning."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness.tuning
import torch
from harness.ceilings import H200
from harness.pes import agree, gather
from harness.record import Recorder, describe_run, progress
from harness.timing import record, time_interleaved
from harness.tuning import gist

import persistent_ops as po
from persistent_ops.ops.embedding_plan import EmbeddingPlan, Tuning
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.world import World

from .check import bits_differ
from .configs import Config
from .inputs import Tables
from .methods import Methods
from .options import Options
from .run import joined_world, prepare

__all__ = ["combinations", "tune_pe"]

_COMPILE_TIMEOUT_S = 500.0


def combinations(grid: Sequence[tuple[str, Sequence[Any]]], mode: str) -> Iterator[Tuning]:
    """Yield the Tunings of a grid; see `harness.tuning.combinations`."""
    return harness.tuning.combinations(Tuning, grid, mode)


def tune_pe(options: Options) -> bool:
    """Time every combination on every config; collective. Rank 0 writes the record.

    Returns:
        Whether every combination that ran gave the bits of the default one.
    """
    with joined_world(options) as world:
        recorder = Recorder(Path(options.record_path) if options.record_path and world.rank == 0 else None)
        recorder.write(
            "run",
            pes=world.size,
            options=dataclasses.asdict(options),
            **describe_run(
                world.rank, command=options.command, backend=world.backend.name, device=world.backend.device
            ),
        )
        shapes = options.shapes(world.backend.name)
        tables = Tables(shapes, world.backend.device, world.rank)
        candidates = list(combinations(options.tune, options.tune_mode))
        passed = True
        for distribution in options.distributions:
            for config in shapes:
                methods = prepare(world, config, distribution, tables)
                passed &= _tune_config(world, options, methods, distribution, candidates, recorder)
                world.barrier()
                po.free(methods.out)
                del methods
        return passed


def _tune_config(
    world: World,
    options: Options,
    methods: Methods,
    distribution: str,
    candidates: Sequence[Tuning],
    recorder: Recorder,
) -> bool:
    config = methods.config
    progress(world.rank, f"{config.name}, {distribution}: {len(candidates)} combinations")
    # Each PE compiles its share first; a plan launches nothing. GPUs are alike: what fails on one is left out.
    own: list[tuple[int, str]] = []
    for number in range(world.rank, len(candidates), world.size):
        plan = _plan(world, methods, candidates[number])
        if isinstance(plan, str):
            own.append((number, plan))
    problems = dict(item for items in gather(world.bootstrap, own, timeout=_COMPILE_TIMEOUT_S) for item in items)
    expected = methods.fused(methods.sets[0]).clone()
    world.check()
    passed = True
    for number, tuning in enumerate(candidates):
        plan = problems[number] if number in problems else _plan(world, methods, tuning)
        problem = agree(world.bootstrap, plan if isinstance(plan, str) else None)
        row: dict[str, Any] = {"pes": world.size, "config": config.name, "distribution": distribution}
        row["tuning"] = dataclasses.asdict(tuning)
        if problem is not None or isinstance(plan, str):
            recorder.write("tune", **row, us=None, problem=problem)
            continue
        wrong, times = _time(world, options, methods, plan, expected)
        passed &= not wrong
        recorder.write(
            "tune",
            **row,
            us=max(statistics.median(each) for each in times) * 1e6,
            problem="other bits than the default's" if wrong else None,
            h200_limit_us=_h200_limit(config, world.size) * 1e6,
            seconds_by_pe_and_round=times,
        )
        if wrong:
            progress(world.rank, f"  WRONG: {tuning}")
    return passed


def _plan(world: World, methods: Methods, tuning: Tuning) -> EmbeddingPlan | str:
    """Return the plan, or why there is none."""
    lookups = methods.sets[0]
    width = methods.config.tables * methods.config.dim
    share = methods.config.batch // world.size
    try:
        return EmbeddingPlan(
            world,
            world.team,
            tuning,
            methods.weights,
            lookups.indices,
            lookups.offsets,
            None,
            (width,) * world.size,
            (share,) * world.size,
            methods.config.torch_dtype,
            "sum",
            "fatal",
            "communication_aware",
        )
    except (ValueError, CompileError) as error:
        return f"{type(error).__name__}: {gist(str(error))}"


def _time(
    world: World, options: Options, methods: Methods, plan: EmbeddingPlan, expected: torch.Tensor
) -> tuple[bool, list[list[float]]]:
    """Return whether any PE's result is wrong, and seconds per call by PE and round."""
    offset = world.heap.offset_of(methods.out, "out")

    def call(number: int) -> None:
        lookups = methods.sets[number]
        plan.launch(world, lookups.indices, lookups.offsets, None, offset)

    methods.out.fill_(float("nan"))
    world.barrier()
    call(0)
    world.check()
    wrong = any(gather(world.bootstrap, bits_differ(methods.out, expected)))
    subject = record(world, [lambda n=n: call(n) for n in range(len(methods.sets))])  # type: ignore[misc]
    times = time_interleaved(world, {"fused": subject}, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3)
    everyone = gather(world.bootstrap, times["fused"])
    del subject
    gc.collect()
    return wrong, everyone


def _h200_limit(config: Config, world_size: int) -> float:
    return H200.limit_seconds(read_bytes=config.read_bytes, sent_bytes=config.sent_bytes(world_size))[0]
