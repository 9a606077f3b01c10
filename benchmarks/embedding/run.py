"""What one PE of the benchmark does."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import harness.world
import torch
from harness.ceilings import H200, Ceilings, measure_ceilings
from harness.pes import agree, gather
from harness.record import Recorder, describe_run, progress
from harness.timing import Subject, quantile, record, time_aligned, time_interleaved
from harness.world import chosen_backend

import persistent_ops as po
from persistent_ops.runtime.world import World

from .check import check_graph, check_methods
from .configs import Config
from .inputs import Tables, draw_lookups, num_sets
from .methods import EXCHANGING, LABELS, Methods
from .options import Options

__all__ = ["joined_world", "prepare", "run_pe"]

_STORE_CEILING_BYTES = {"cuda": 512 << 20, "host": 1 << 20}
_HEAP_MARGIN = 128 << 20  # flags, small results, alignment
_HOST_COST_CALLS = 200


def joined_world(options: Options) -> AbstractContextManager[World]:
    """Join the world with room for the largest config's result, and make torch's process group beside it."""
    backend = chosen_backend(options.backend)
    largest = max(shape.output_bytes for shape in options.shapes(backend))
    heap = max(largest, _STORE_CEILING_BYTES[backend]) + _HEAP_MARGIN
    return harness.world.joined_world(backend=backend, timeout=options.timeout, heap_bytes=heap)


def prepare(world: World, config: Config, distribution: str, tables: Tables) -> Methods:
    """Draw the lookups and allocate the buffers of a config; collective. `po.free(methods.out)` gives the heap back."""
    if config.batch % world.size:
        raise ValueError(f"{config.name}: the batch of {config.batch} does not divide over {world.size} PEs")
    device = world.backend.device
    sets = [
        draw_lookups(config, distribution, seed=1_000_003 * world.rank + 101 * number + 7, device=device)
        for number in range(num_sets(config))
    ]
    out = po.empty(config.batch // world.size, world.size * config.tables * config.dim, dtype=config.torch_dtype)
    return Methods(world, config, tables.of(config), sets, out)


def run_pe(options: Options) -> bool:
    """Measure on this PE; collective. Rank 0 writes the record. Returns whether all checks passed, on every PE."""
    with joined_world(options) as world:
        backend = world.backend.name
        recorder = Recorder(Path(options.record_path) if options.record_path and world.rank == 0 else None)
        recorder.write(
            "run",
            pes=world.size,
            options=dataclasses.asdict(options),
            **describe_run(world.rank, command=options.command, backend=backend, device=world.backend.device),
        )
        shapes = options.shapes(backend)
        tables = Tables(shapes, world.backend.device, world.rank)
        progress(world.rank, f"{world.size} PEs on {backend}: tables and ceilings")
        widest = tables.of(max(shapes, key=lambda shape: shape.tables * shape.rows * shape.row_bytes))
        ceilings, ways = measure_ceilings(
            world, widest, store_bytes=_STORE_CEILING_BYTES[backend], rounds=5, burst_seconds=options.burst_ms * 4e-3
        )
        recorder.write("ceilings", pes=world.size, **ways)
        progress(world.rank, "  " + ", ".join(f"{way} {rate / 1e9:.0f} GB/s" for way, rate in ways["ways"].items()))
        passed = True
        for distribution in options.distributions:
            for config in shapes:
                passed &= _measure(world, options, config, distribution, tables, ceilings, recorder)
        if backend == "cuda":
            recorder.write("host_cost", pes=world.size, us_per_call=_host_cost(world))
        return passed


def _measure(
    world: World,
    options: Options,
    config: Config,
    distribution: str,
    tables: Tables,
    ceilings: Ceilings,
    recorder: Recorder,
) -> bool:
    """Check and time one config; collective."""
    began = time.monotonic()
    common = {
        "pes": world.size,
        "config": config.name,
        "shape": dataclasses.asdict(config),
        "distribution": distribution,
    }
    methods = prepare(world, config, distribution, tables)
    checked = check_methods(world, methods)
    subjects: dict[str, Subject] = {}
    for name in options.methods:
        problem = None
        try:
            subjects[name] = _subject(world, methods, name)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(world.bootstrap, problem)
        if problem is not None:
            subjects.pop(name, None)
            checked["failures"].append(f"{name} could not be prepared: {problem}")
    if "fused" in subjects:
        checked["failures"] += check_graph(world, methods, subjects["fused"])
    recorder.write("check", **common, sets=len(methods.sets), **checked)
    for failure in checked["failures"]:
        progress(world.rank, f"  WRONG: {config.name}, {distribution}: {failure}")

    times = time_interleaved(world, subjects, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3)
    world.check()
    limit, bound = ceilings.limit_seconds(read_bytes=config.read_bytes, sent_bytes=config.sent_bytes(world.size))
    h200_limit, h200_bound = H200.limit_seconds(read_bytes=config.read_bytes, sent_bytes=config.sent_bytes(world.size))
    for name, own in times.items():
        everyone = gather(world.bootstrap, own)
        recorder.write(
            "time",
            **common,
            method=name,
            label=LABELS[name].format(collective="NCCL" if world.backend.name == "cuda" else "gloo"),
            us=max(statistics.median(each) for each in everyone) * 1e6,
            us_p95=max(quantile(each, 0.95) for each in everyone) * 1e6,
            sent_bytes=config.sent_bytes(world.size) if name in EXCHANGING else 0,
            read_bytes=config.read_bytes,
            limit_us=limit * 1e6,
            limit_by=bound,
            h200_limit_us=h200_limit * 1e6,
            h200_limit_by=h200_bound,
            seconds_by_pe_and_round=everyone,
        )
    for name in ("fused", "oblivious"):
        if name in subjects and options.skew_trials:
            _skew(world, methods, name, options, recorder, common)
    del subjects
    gc.collect()  # graphs hold memory, and NCCL's must be gone before its communicator
    world.barrier()
    po.free(methods.out)
    del methods
    if world.backend.name == "cuda":
        torch.cuda.empty_cache()
    progress(world.rank, f"  {config.name}, {distribution}: {time.monotonic() - began:.1f} s")
    return not checked["failures"]


def _subject(world: World, methods: Methods, name: str, num_sets: int | None = None) -> Subject:
    return record(world, [lambda s=s: methods.run(name, s) for s in methods.sets[:num_sets]])  # type: ignore[misc]


def _skew(
    world: World,
    methods: Methods,
    name: str,
    options: Options,
    recorder: Recorder,
    common: dict[str, Any],
) -> None:
    """Record how far the PEs' times of single launches are apart when all begin together."""
    subject = _subject(world, methods, name, 1)
    own = time_aligned(world, subject.replay, trials=options.skew_trials)
    everyone = gather(world.bootstrap, own)
    trials = list(zip(*everyone, strict=True))
    recorder.write(
        "skew",
        **common,
        method=name,
        us=statistics.median(max(trial) for trial in trials) * 1e6,
        skew=statistics.median((max(trial) - min(trial)) / statistics.median(trial) for trial in trials),
        us_by_pe=[statistics.median(each) * 1e6 for each in everyone],
        seconds_by_pe_and_trial=everyone,
    )


def _host_cost(world: World) -> dict[str, float]:
    """Return the host's microseconds per plain call, by number of tables; the slowest PE's. Nothing waits meanwhile."""
    costs = {}
    batch = 4 * world.size
    for num_tables in (4, 26):
        weights = [torch.randn(100, 64, device=world.backend.device) for _ in range(num_tables)]
        indices = torch.zeros(num_tables * batch, dtype=torch.int64, device=world.backend.device)
        offsets = torch.arange(num_tables * batch + 1, dtype=torch.int64, device=world.backend.device)
        samples = []
        for _ in range(4):  # the first one warms up
            world.barrier()
            begin = time.perf_counter()
            for _ in range(_HOST_COST_CALLS):
                po.embedding_all_to_all(weights, indices, offsets)
            samples.append((time.perf_counter() - begin) / _HOST_COST_CALLS * 1e6)
            world.check()
        costs[f"T={num_tables}"] = max(gather(world.bootstrap, statistics.median(samples[1:])))
    return costs
