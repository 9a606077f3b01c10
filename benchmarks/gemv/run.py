"""What one PE of the benchmark does."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import harness.world
import torch
from harness.ceilings import H200, Ceilings, measure_ceilings
from harness.pes import agree, gather
from harness.record import Recorder, describe_run, progress
from harness.timing import Subject, quantile, record, time_interleaved, time_replays
from harness.world import chosen_backend

from persistent_ops.ops.gemv_plan import Tuning
from persistent_ops.runtime.world import World

from .check import check_graph, check_methods
from .methods import CHOICES, LABELS, UNFUSED, Methods, symmetric_buffer
from .options import Options
from .plans import compile_together
from .shapes import DTYPE

__all__ = ["Bench", "calls_of", "joined_world", "run_pe"]

_STORE_CEILING_BYTES = {"cuda": 256 << 20, "host": 1 << 20}
_READ_CEILING_BYTES = {"cuda": 4 << 30, "host": 4 << 20}
_HEAP_MARGIN = 256 << 20  # flags, the operator's packets, alignment
_DRAWN_AT_A_TIME = 1 << 28  # a generator's call takes fewer than 2^31 elements


def joined_world(options: Options) -> AbstractContextManager[World]:
    """Join the world, and make torch's process group beside it."""
    backend = chosen_backend(options.backend)
    heap = _STORE_CEILING_BYTES[backend] + _HEAP_MARGIN
    return harness.world.joined_world(backend=backend, timeout=options.timeout, heap_bytes=heap)


class Bench:
    """What all shapes of one world share; made collectively.

    Args:
        world: of this PE.
        options: of the run.
    """

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options
        self.sizes = options.sizes(world.backend.name)
        self.recorder = Recorder(Path(options.record_path) if options.record_path and world.rank == 0 else None)
        self.recorder.write(
            "run",
            pes=world.size,
            options=dataclasses.asdict(options),
            **describe_run(
                world.rank, command=options.command, backend=world.backend.name, device=world.backend.device
            ),
        )
        largest = max(shape.copies * shape.weight_bytes for shape in self.sizes.values())
        elements = max(largest, _READ_CEILING_BYTES[world.backend.name]) // DTYPE.itemsize
        self.storage = torch.empty(elements, dtype=DTYPE, device=world.backend.device)
        generator = torch.Generator(world.backend.device).manual_seed(1000 + world.rank)
        for part in self.storage.split(_DRAWN_AT_A_TIME):
            part.uniform_(-1, 1, generator=generator)
        most = max(shape.vectors * shape.rows for shape in self.sizes.values())
        self.symmetric, problem = symmetric_buffer(world, most)
        if problem is not None:
            progress(world.rank, f"  no torch symmetric memory: {problem}")
            self.recorder.write("left_out", pes=world.size, what="torch symmetric memory", problem=problem)

    def methods(self, name: str) -> Methods:
        """Return the buffers and methods of a shape."""
        return Methods(self.world, self.sizes[name], self.storage, self.symmetric, seed=77 + self.world.rank)


def run_pe(options: Options) -> bool:
    """Measure on this PE; collective. Rank 0 writes the record. Returns whether all checks passed, on every PE."""
    with joined_world(options) as world:
        backend = world.backend.name
        progress(world.rank, f"{world.size} PEs on {backend}: weights and ceilings")
        bench = Bench(world, options)
        ceilings, ways = measure_ceilings(
            world,
            bench.storage,
            store_bytes=_STORE_CEILING_BYTES[backend],
            rounds=5,
            burst_seconds=options.burst_ms * 4e-3,
        )
        bench.recorder.write("ceilings", pes=world.size, **ways)
        progress(world.rank, "  " + ", ".join(f"{way} {rate / 1e9:.0f} GB/s" for way, rate in ways["ways"].items()))
        # Without prefetching, "auto" takes the kernel of one of the other two.
        wanted = [
            (bench.methods(name), CHOICES[choice], Tuning())
            for choice in ("one_shot", "two_phase", "prefetch")
            for name in bench.sizes
        ]
        for number, problem in compile_together(world, wanted).items():
            progress(world.rank, f"  does not compile: {wanted[number][1]}: {problem}")
        del wanted
        passed = True
        for name in bench.sizes:
            passed &= _measure(bench, name, ceilings)
        del bench  # torch's symmetric memory goes before its process group
        gc.collect()
        return passed


def _measure(bench: Bench, shape_name: str, ceilings: Ceilings) -> bool:
    """Check and time one shape; collective."""
    began = time.monotonic()
    world, options, shape = bench.world, bench.options, bench.sizes[shape_name]
    common = {"pes": world.size, "shape_name": shape_name, "shape": dataclasses.asdict(shape)}
    methods = bench.methods(shape_name)
    chosen = methods.available(world, options.methods)
    tried = methods.choose_product(world, rounds=5, burst_seconds=options.burst_ms * 1e-3)
    bench.recorder.write("product", **common, chosen=methods.product, us=tried)
    checked = check_methods(world, methods, chosen)

    subjects: dict[str, Subject] = {}
    for name in chosen:
        problem = None
        try:
            subjects[name] = record(world, calls_of(methods, name, options.calls))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(world.bootstrap, problem)
        if problem is not None:
            subjects.pop(name, None)
            checked["failures"].append(f"{name} could not be prepared: {problem}")
    for name in CHOICES:
        if name in subjects:
            checked["failures"] += check_graph(world, methods, name, subjects[name])
    bench.recorder.write("check", **common, **checked)
    for failure in checked["failures"]:
        progress(world.rank, f"  WRONG: {shape_name}: {failure}")

    times = time_interleaved(world, subjects, rounds=options.rounds, burst_seconds=options.burst_ms * 1e-3)
    world.check()
    us = _write_times(bench, methods, common, subjects, times, ceilings)
    del subjects
    _write_spread(bench, methods, common, us)
    gc.collect()  # graphs hold memory, and NCCL's must be gone before its communicator
    world.barrier()
    del methods
    if world.backend.name == "cuda":
        torch.cuda.empty_cache()
    progress(world.rank, f"  {shape_name}: {time.monotonic() - began:.1f} s")
    return not checked["failures"]


def _write_times(
    bench: Bench,
    methods: Methods,
    common: dict[str, Any],
    subjects: dict[str, Subject],
    times: dict[str, list[float]],
    ceilings: Ceilings,
) -> dict[str, float]:
    """Record the times; collective. Returns microseconds by method, the same on every PE."""
    world, shape = bench.world, methods.shape
    us = {}
    for name, own in times.items():
        everyone = gather(world.bootstrap, own)
        us[name] = max(statistics.median(each) for each in everyone) * 1e6
        bench.recorder.write(
            "time",
            **common,
            method=name,
            label=_label(world, methods, name),
            us=us[name],
            us_p95=max(quantile(each, 0.95) for each in everyone) * 1e6,
            weight_bytes=shape.weight_bytes,
            limit_us=shape.weight_bytes / ceilings.read * 1e6,
            h200_limit_us=shape.weight_bytes / H200.read * 1e6,
            calls_per_graph=subjects[name].calls,
            seconds_by_pe_and_round=everyone,
        )
    return us


def _write_spread(bench: Bench, methods: Methods, common: dict[str, Any], us: dict[str, float]) -> None:
    """Time single calls one by one: of the operator, and of the fastest that it is compared with; collective."""
    world = bench.world
    replays = bench.options.replays_on(world.backend.name)
    peers = [name for name in us if name in (*UNFUSED, "cublas_alone")]
    if world.size > 1:
        peers = [name for name in peers if name in UNFUSED]
    names = [name for name in ("fused", "gemv_alone") if name in us]
    names += sorted(peers, key=lambda name: us[name])[:1]
    if not replays or not names:
        return
    singles: dict[str, list[Callable[[], object]]] = {
        name: [record(world, [call]).replay for call in calls_of(methods, name)] for name in names
    }
    for name, own in time_replays(world, singles, replays=replays).items():
        shares = {"us_median": 0.5, "us_p90": 0.9, "us_p99": 0.99, "us_p999": 0.999}
        everyone = gather(world.bootstrap, [quantile(own, share) * 1e6 for share in shares.values()])
        bench.recorder.write(
            "spread",
            **common,
            method=name,
            label=_label(world, methods, name),
            replays=len(own),
            **{field: max(each[i] for each in everyone) for i, field in enumerate(shares)},
        )


def calls_of(methods: Methods, name: str, fewest: int = 1) -> list[Callable[[], object]]:
    """Return calls of a method that take every copy of the weight in turn, each equally often."""
    copies = methods.shape.copies
    count = math.ceil(fewest / copies) * copies
    return [lambda copy=i % copies: methods.run(name, copy) for i in range(count)]  # type: ignore[misc]


def _label(world: World, methods: Methods, name: str) -> str:
    on_gpu = world.backend.name == "cuda"
    return LABELS[name].format(product="cuBLAS" if on_gpu else "torch", collective="NCCL" if on_gpu else "gloo")
