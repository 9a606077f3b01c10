"""What one PE of the benchmark does."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import harness.world
import torch
import torch.distributed as dist
from harness.ceilings import H200, Ceilings, measure_ceilings
from harness.pes import agree, gather
from harness.record import Recorder, describe_run, progress
from harness.timing import Subject, quantile, record, time_interleaved, time_replays
from harness.world import chosen_backend

from persistent_ops.runtime.errors import SymmetricHeapError
from persistent_ops.runtime.world import World

from .cases import Case, num_sets
from .check import check_graphs, check_methods, survey
from .inputs import draw_set
from .limits import Traffic, extra_room, sent_rows
from .memory import MemoryMeter
from .methods import EAGER, GRAPHS, INTO, OURS, SCHEMES, SWEPT, Methods, label_of
from .options import Options
from .phases import time_phases

__all__ = ["Bench", "joined_world", "run_pe"]

_STORE_CEILING_BYTES = {"cuda": 256 << 20, "host": 1 << 20}
_READ_CEILING_BYTES = {"cuda": 2 << 30, "host": 4 << 20}
_HEAP_MARGIN = 256 << 20  # flags, small buffers, alignment
_MOST_PES = 8  # of a host, whose heap must be made before the world's size is known
_DENSE_MARGIN = 4 << 30  # left free beside a dense gradient
_SLOW_SECONDS = 0.05  # calls this long are timed a few times only, and not one by one
_SLOW_ROUNDS = 2
_SPREAD_SECONDS = {"cuda": 1.5, "host": 0.3}
_MOST_REPLAYS = 1000
_PHASE_TRIALS = 5


def joined_world(options: Options) -> AbstractContextManager[World]:
    """Join the world with room for the largest case, and make torch's process group beside it."""
    backend = chosen_backend(options.backend)
    heap = _heap_bytes(options, backend)
    return harness.world.joined_world(backend=backend, timeout=options.timeout, heap_bytes=heap)


def _heap_bytes(options: Options, backend: str) -> int:
    """Return room for results and the preallocated one, and for what algorithms need beside them."""
    most = _STORE_CEILING_BYTES[backend]
    for cases in options.groups(backend).values():
        for case in cases:
            union = case.union_at_most(_MOST_PES)
            sizes = {"rows": case.rows, "union": union, "row_bytes": case.row_bytes, "world_size": _MOST_PES}
            # What "allgather" keeps grows by doubling; a smaller world may have room for it where a larger one has not.
            extra = 2 * min(extra_room("allgather", **sizes), options.room_bytes)
            dense = extra_room("dense", **sizes)
            extra += 2 * dense if dense <= options.room_bytes else 0
            most = max(most, int(4 * case.sparse_bytes(union)) + extra)
    return most + _HEAP_MARGIN


class Bench:
    """What all cases of one world share; made collectively.

    Args:
        world: of this PE.
        options: of the run.
    """

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options
        self.groups = options.groups(world.backend.name)
        self.recorder = Recorder(Path(options.record_path) if options.record_path and world.rank == 0 else None)
        self.recorder.write(
            "run",
            pes=world.size,
            options=dataclasses.asdict(options),
            **describe_run(
                world.rank, command=options.command, backend=world.backend.name, device=world.backend.device
            ),
        )
        self.gloo, self.no_gloo = self._gloo_group()
        self.ceilings = self._ceilings()
        if world.backend.name == "cuda":
            torch.cuda.empty_cache()
        self.memory = MemoryMeter(world)

    def _gloo_group(self) -> tuple[Any, str | None]:
        """Return a group for Gloo beside the default one of NCCL, or None and, where there should be one, why not."""
        if self.world.backend.name != "cuda" or "gloo" not in self.options.methods:
            return None, None
        group, problem = None, None
        try:
            group = dist.new_group(backend="gloo")
        except (RuntimeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(self.world.bootstrap, problem)
        return (group, None) if problem is None else (None, problem)

    def _ceilings(self) -> Ceilings:
        backend = self.world.backend.name
        source = torch.zeros(_READ_CEILING_BYTES[backend] // 4, device=self.world.backend.device)
        ceilings, ways = measure_ceilings(
            self.world,
            source,
            store_bytes=_STORE_CEILING_BYTES[backend],
            rounds=5,
            burst_seconds=self.options.burst_ms * 4e-3,
        )
        self.recorder.write("ceilings", pes=self.world.size, **ways)
        rates = ", ".join(f"{way} {rate / 1e9:.0f} GB/s" for way, rate in ways["ways"].items())
        progress(self.world.rank, f"  {rates}")
        return ceilings


def run_pe(options: Options) -> bool:
    """Measure on this PE; collective. Rank 0 writes the record. Returns whether all checks passed, on every PE."""
    with joined_world(options) as world:
        progress(world.rank, f"{world.size} PEs on {world.backend.name}: ceilings")
        bench = Bench(world, options)
        passed = True
        for group, cases in bench.groups.items():
            for case in cases:
                passed &= _measure(bench, group, case)
        del bench
        gc.collect()
        return passed


@dataclasses.dataclass(frozen=True)
class _Situation:
    """One case with its inputs and buffers."""

    group: str
    case: Case
    common: dict[str, Any]
    methods: Methods
    unions: list[torch.Tensor]
    union: float
    lacked: float
    unicast: float


def _measure(bench: Bench, group: str, case: Case) -> bool:
    """Check and time one case; collective."""
    began = time.monotonic()
    world = bench.world
    bench.memory.case_begins()
    with _prepared(bench, group, case) as (situation, chosen):
        chosen = _warm_up(bench, situation, chosen)
        unions = situation.unions if group == "cases" else situation.unions[:1]
        checked = check_methods(world, situation.methods, chosen, unions)
        subjects = _subjects(bench, situation, chosen, checked["failures"])
        if group == "cases":
            graphs = {name: subject for name, subject in subjects.items() if name in INTO}
            checked["failures"] += check_graphs(world, situation.methods, graphs, situation.unions[-1])
        bench.recorder.write("check", **situation.common, **checked)
        for failure in checked["failures"]:
            progress(world.rank, f"  WRONG: {case.name}: {failure}")
        used = _write_phases(bench, situation, [name for name in subjects if name in OURS])
        us = _write_times(bench, situation, subjects, used)
        del subjects
        if group == "cases":
            _write_spread(bench, situation, us)
        gc.collect()  # graphs hold memory, and NCCL's must be gone before its communicator
        world.barrier()
    del situation
    gc.collect()
    world.heap.reclaim()
    if world.backend.name == "cuda":
        torch.cuda.empty_cache()
    progress(world.rank, f"  {case.name}: {time.monotonic() - began:.1f} s")
    return not checked["failures"]


@contextmanager
def _prepared(bench: Bench, group: str, case: Case) -> Iterator[tuple[_Situation, list[str]]]:
    """Draw the inputs, survey and record them, and allocate the buffers; collective. The end gives them back."""
    world, device = bench.world, bench.world.backend.device
    common = {"pes": world.size, "group": group, "case": case.name, "shape": dataclasses.asdict(case)}
    sets = [
        draw_set(case, rank=world.rank, world_size=world.size, number=number, device=device)
        for number in range(num_sets(case, world.backend.name))
    ]
    surveys = [survey(world, rows) for rows in sets]
    unions = [union for union, _ in surveys]
    traffic = [found for _, found in surveys]
    lacked = max(gather(world.bootstrap, statistics.mean(each.lacked for each in traffic)))
    union, unicast = (statistics.mean(getattr(each, field) for each in traffic) for field in ("union", "unicast"))
    _write_case(bench, common, case, traffic, lacked, unicast)

    chosen = []
    capacity = max(each.numel() for each in unions)
    for name in bench.options.methods:
        if group == "cases" or name in SWEPT:
            reason = _unsuited(bench, case, name, capacity)
            if reason is None:
                chosen.append(name)
            else:
                _skip(bench, common, name, reason)
    methods = Methods(world, case, sets, capacity=capacity, chosen=chosen, gloo=bench.gloo)
    bench.memory.case_ready()
    yield _Situation(group, case, common, methods, unions, union, lacked, unicast), chosen
    world.check()
    methods.close()


def _write_case(
    bench: Bench, common: dict[str, Any], case: Case, traffic: list[Traffic], lacked: float, unicast: float
) -> None:
    store = bench.ceilings.store
    least = max(lacked, unicast) * case.row_bytes
    bench.recorder.write(
        "case",
        **common,
        sets=len(traffic),
        row_bytes=case.row_bytes,
        union_rows=statistics.mean(each.union for each in traffic),
        rows_with_several=statistics.mean(each.several for each in traffic),
        lacked_rows=lacked,
        unicast_rows=unicast,
        limit_us=lacked * case.row_bytes / store * 1e6 if store else None,
        unicast_us=least / store * 1e6 if store else None,
        h200_limit_us=lacked * case.row_bytes / H200.store * 1e6 if H200.store else None,
        h200_unicast_us=least / H200.store * 1e6 if H200.store else None,
        input_bytes=case.input_bytes,
        result_bytes=case.sparse_bytes(statistics.mean(each.union for each in traffic)),
    )


def _unsuited(bench: Bench, case: Case, name: str, union: int) -> str | None:
    """Return why a method is not measured with a case, or None; the same on every PE."""
    world, options = bench.world, bench.options
    if name == "gloo":
        if bench.no_gloo is not None:
            return bench.no_gloo
        together = world.size * case.input_bytes
        if together > options.gloo_bytes:
            return f"{_gb(together)} through the CPU of every PE; at most {_gb(options.gloo_bytes)} (--gloo-gb)"
    algorithm = {**EAGER, **INTO}.get(name, "")
    room = extra_room(algorithm, rows=case.rows, union=union, row_bytes=case.row_bytes, world_size=world.size)
    if room > options.room_bytes:
        return f"{_gb(room)} of the symmetric heap beside the result; at most {_gb(options.room_bytes)} (--room-gb)"
    if name == "dense_reduce" and world.backend.name == "cuda":
        free = min(gather(world.bootstrap, torch.cuda.mem_get_info(world.backend.device)[0]))
        others = 4 * case.union_at_most(world.size) * case.row_bytes  # what the other methods have beside it
        if free < case.dense_bytes + others + _DENSE_MARGIN:
            return f"a dense gradient of {_gb(case.dense_bytes)} does not fit beside the rest: {_gb(free)} are free"
    return None


def _warm_up(bench: Bench, situation: _Situation, chosen: list[str]) -> list[str]:
    """Run each method for the first time, and measure its memory; collective.

    Returns:
        Those that had enough memory.
    """
    world, methods, case = bench.world, situation.methods, situation.case
    able = []
    for name in chosen:
        problem, nbytes = None, None
        # The operator must not fail; a library that cannot do this here is named with its reason.
        lacks: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, SymmetricHeapError)
        lacks = lacks if name in OURS else (*lacks, RuntimeError)
        try:
            methods.run(name, 0)
            if world.backend.name == "cuda" and name != "gloo":
                nbytes = bench.memory.measure(methods, name, lambda name=name: methods.run(name, 0))  # type: ignore[misc]
        except lacks as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(world.bootstrap, problem)
        if problem is not None:
            _skip(bench, situation.common, name, problem)
            continue
        able.append(name)
        if nbytes is not None:
            held = max(gather(world.bootstrap, nbytes))
            needed = case.input_bytes + case.sparse_bytes(situation.unions[0].numel())
            bench.recorder.write(
                "memory",
                **situation.common,
                method=name,
                held_bytes=held,
                input_bytes=case.input_bytes,
                ratio=(held + case.input_bytes) / needed,
            )
    return able


def _subjects(bench: Bench, situation: _Situation, chosen: list[str], failures: list[str]) -> dict[str, Subject]:
    """Return what is timed: a graph of one call per input, or plain calls where a method waits for the host."""
    world = bench.world
    subjects: dict[str, Subject] = {}
    for name in chosen:
        problem = None
        try:
            subjects[name] = _subject(world, name, _calls(situation, name))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            problem = f"{type(error).__name__}: {error}"
        problem = agree(world.bootstrap, problem)
        if problem is not None:
            subjects.pop(name, None)
            failures.append(f"{name} could not be prepared: {problem}")
    return subjects


def _subject(world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
    if name in GRAPHS:
        return record(world, calls)

    def run_all() -> None:
        for call in calls:
            call()

    return Subject(run_all, len(calls))


def _calls(situation: _Situation, name: str) -> list[Callable[[], object]]:
    """Return a call per input; one alone where it takes long and its time does not depend on the input."""
    count = 1 if name in ("dense_reduce", "gloo") else len(situation.methods.sets)
    return [lambda number=number: situation.methods.run(name, number) for number in range(count)]  # type: ignore[misc]


def _write_phases(bench: Bench, situation: _Situation, names: list[str]) -> dict[str, str]:
    """Record the phases of the operator's plain calls; collective. Returns the algorithm that each used."""
    used = {}
    for name in names:
        if name == "dense":  # several launches, none of which is the sum's alone
            continue
        phases, used[name] = time_phases(
            bench.world,
            lambda name=name: situation.methods.run(name, 0),  # type: ignore[misc]
            trials=_PHASE_TRIALS,
        )
        us = {phase: seconds * 1e6 for phase, seconds in phases.items()}
        bench.recorder.write("phases", **situation.common, method=name, algorithm=used[name], us=us)
    return used


def _write_times(
    bench: Bench, situation: _Situation, subjects: dict[str, Subject], used: dict[str, str]
) -> dict[str, float]:
    """Time and record; collective. Returns microseconds by method, the same on every PE."""
    world, options = bench.world, bench.options
    rounds = options.rounds if situation.group == "cases" else min(options.rounds, options.sweep_rounds)
    burst = options.burst_ms * 1e-3
    times = time_interleaved(world, subjects, rounds=min(rounds, _SLOW_ROUNDS), burst_seconds=burst)
    medians = gather(world.bootstrap, {name: statistics.median(own) for name, own in times.items()})
    fast = {name: subjects[name] for name in times if max(each[name] for each in medians) < _SLOW_SECONDS}
    if rounds > _SLOW_ROUNDS:
        more = time_interleaved(world, fast, rounds=rounds - _SLOW_ROUNDS, burst_seconds=burst)
        for name, own in more.items():
            times[name] += own
    world.check()
    us = {}
    for name, own in times.items():
        everyone = gather(world.bootstrap, own)
        us[name] = max(statistics.median(each) for each in everyone) * 1e6
        bench.recorder.write(
            "time",
            **situation.common,
            method=name,
            label=label_of(name, backend=world.backend.name),
            us=us[name],
            us_p95=max(quantile(each, 0.95) for each in everyone) * 1e6,
            in_graph=name in GRAPHS and world.backend.name == "cuda",
            algorithm=used.get(name),
            sent_value_bytes=_sent_bytes(world, situation, used.get(name, name)),
            calls_per_replay=subjects[name].calls,
            seconds_by_pe_and_round=everyone,
        )
    return us


def _sent_bytes(world: World, situation: _Situation, name: str) -> float:
    """Return the bytes of values that a PE sends on average."""
    rows = sent_rows(
        SCHEMES[name],
        rows=situation.case.rows,
        rows_per_pe=situation.case.rows_per_pe,
        union=situation.union,
        unicast=situation.unicast,
        world_size=world.size,
    )
    return rows * situation.case.row_bytes


def _write_spread(bench: Bench, situation: _Situation, us: dict[str, float]) -> None:
    """Time single calls one by one; collective."""
    world = bench.world
    backend = world.backend.name
    names = [name for name in us if us[name] < _SLOW_SECONDS * 1e6]
    replays = bench.options.replays
    if replays is None:
        together = sum(us[name] for name in names) * 1e-6
        replays = min(_MOST_REPLAYS, max(20, math.floor(_SPREAD_SECONDS[backend] / max(together, 1e-9))))
    if not replays or not names:
        return
    singles: dict[str, list[Callable[[], object]]] = {
        name: [_subject(world, name, [call]).replay for call in _calls(situation, name)] for name in names
    }
    for name, own in time_replays(world, singles, replays=replays).items():
        shares = {"us_median": 0.5, "us_p90": 0.9, "us_p99": 0.99}
        everyone = gather(world.bootstrap, [quantile(own, share) * 1e6 for share in shares.values()])
        bench.recorder.write(
            "spread",
            **situation.common,
            method=name,
            label=label_of(name, backend=backend),
            replays=len(own),
            **{field: max(each[i] for each in everyone) for i, field in enumerate(shares)},
        )


def _skip(bench: Bench, common: dict[str, Any], name: str, reason: str) -> None:
    bench.recorder.write(
        "skipped", **common, method=name, label=label_of(name, backend=bench.world.backend.name), reason=reason
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
