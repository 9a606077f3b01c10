"""One experiment: an operator's cases are made, checked, recorded, timed in turn and written down, on every PE.

An operator's benchmark is a subclass of Experiment. It lists cases and makes a Trial of each: the methods as calls, the
expected results, and the least traffic. Everything else is in this module.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import agree, gather
from persistent_ops.testing.record import Recorder, describe_run, pes_text

from .ceilings import H200, Ceilings, measure_ceilings
from .check import everyones
from .kernels import kernels_of
from .timing import Subject, quantile, time_interleaved, time_replays
from .tracing import timeline_of, tracing_cost, write_kernels, write_timeline
from .trial import LeftOut, Trial
from .tuning import Grid, combinations, compile_together, gist, tuned
from .world import chosen_backend, joined_world

__all__ = ["Experiment", "LeftOut", "Options", "Trial", "measure"]

_HEAP_MARGIN = 256 << 20  # flags, the operators' packets, small buffers, alignment
_CEILING_ROUNDS = 5
_Case = TypeVar("_Case")


@dataclass(frozen=True)
class Options:
    """What a run was asked to do; a benchmark's own are a subclass.

    Attributes:
        backend: "auto", "cuda" or "host".
        methods: names, of the experiment's labels.
        rounds: times each method is timed.
        calls: in a graph, at least.
        burst_ms: length of one time.
        record_path: of the JSON lines; None for no record.
        replaces_record: whether the first of them takes the place of an older run's.
        command: that one would type again.
        timeout: seconds that a PE waits for another.
        tune: fields of the operator's Tuning and the values to try; nothing is tried where it is empty.
        tune_mode: "product" or "star".
        traces: whether the first case's launches are recorded as timelines, beside the record, and what that costs is
            all that is timed.
    """

    backend: str = "auto"
    methods: tuple[str, ...] = ()
    rounds: int = 15
    calls: int = 1
    burst_ms: float = 3.0
    record_path: str | None = None
    replaces_record: bool = False
    command: str = ""
    timeout: float = 20.0
    tune: Grid = ()
    tune_mode: str = "product"
    traces: bool = False


class Experiment(ABC, Generic[_Case]):
    """One operator's benchmark, and its run in one world on this PE.

    Args:
        world: of this PE.
        options: the same on every PE.

    Attributes:
        name: of the operator and of the command.
        labels: what tables call the methods, by name; "{collective}" and "{product}" are the libraries'.
        case_field: of the record's lines, with the case's name.
        worlds_help: what the help says of --worlds.
        smallest_world: that makes sense; `smallest_why` is for who asks for a smaller one.
        time_limit: default of --limit, in seconds.
        rounds: default of --rounds.
        rounds_help, quick_help: what the help says of them.
        is_fresh: whether a world of one gets a process of its own where several worlds are run.
        operator: whose Tuning --tune changes; None where there is none.
        tuned_methods: that --tune times where no methods are asked for; `tunable` are all that it can.
        traced_methods: that --trace records where no methods are asked for; none: the first one.
        knobs: what --sweep can go through: a field of the Tuning and its values; none for shares of the GPU's SMs.
        correct: what is printed where no check failed; the largest numbers of the checks stand for their names.
        note: printed after the description of the run, such as the dtype.
        preparing: what is done before the ceilings are measured.
        read_bytes, store_bytes: of the ceilings' buffers, by backend.
        shares: of single calls, whose spread is reported, by the field of the record.
    """

    name: ClassVar[str]
    labels: ClassVar[Mapping[str, str]]
    case_field: ClassVar[str] = "case"
    worlds_help: ClassVar[str] = "2,4,8 (default: one PE per GPU; host 2)"
    smallest_world: ClassVar[int] = 1
    smallest_why: ClassVar[str] = ""
    time_limit: ClassVar[float] = 900.0
    rounds: ClassVar[int] = 15
    rounds_help: ClassVar[str] = "(default 15; quick 3)"
    quick_help: ClassVar[str] = "few rounds"
    is_fresh: ClassVar[bool] = False
    operator: ClassVar[Operator | None] = None
    tuned_methods: ClassVar[tuple[str, ...]] = ()
    traced_methods: ClassVar[tuple[str, ...]] = ()
    tunable: ClassVar[Sequence[str]] = ()
    knobs: ClassVar[Mapping[str, tuple[str, tuple[int, ...]]]] = {}
    correct: ClassVar[str] = "correct"
    note: ClassVar[str] = ""
    preparing: ClassVar[str] = "ceilings"
    read_bytes: ClassVar[Mapping[str, int]] = {"cuda": 4 << 30, "host": 4 << 20}
    store_bytes: ClassVar[Mapping[str, int]] = {"cuda": 256 << 20, "host": 1 << 20}
    shares: ClassVar[Mapping[str, float]] = {"us_median": 0.5, "us_p90": 0.9, "us_p99": 0.99}

    def __init__(self, world: World, options: Any) -> None:
        self.world = world
        self.options = options
        self.backend = world.backend.name
        self.device = world.backend.device
        self.ceilings = Ceilings(math.inf, None)
        path = Path(options.record_path) if options.record_path and world.rank == 0 else None
        self._recorder = Recorder(path, replaces=options.replaces_record)

    # ---- the operator's ----------------------------------------------------------------------------------------------

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add options of the command that not every benchmark has."""

    @classmethod
    @abstractmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        """Return the options of a run; ValueError for what does not fit. `common`: those that all benchmarks have."""

    @classmethod
    def default_worlds(cls, pes: int) -> list[int]:
        """Return the worlds to run where nothing was asked for; `pes`: the number of GPUs, or 2 on the host."""
        return [pes]

    @classmethod
    def result_bytes(cls, options: Any, backend: str) -> int:
        """Return the room in the symmetric heap that the cases' results and buffers need."""
        return 0

    def set_up(self) -> None:
        """Make the parts that all cases share; collective."""

    def source(self) -> torch.Tensor:
        """Return the read ceiling's buffer, which is much larger than the L2 cache."""
        return torch.zeros(self.read_bytes[self.backend] // 4, dtype=torch.int32, device=self.device)

    def updated_rows(self) -> Sequence[int]:
        """Return the bytes of rows in `source` that the update ceiling changes; none where it is not measured."""
        return ()

    def begin(self) -> None:
        """Do what comes between the ceilings and the first case; collective, and not where a Tuning is sought."""

    @abstractmethod
    def cases(self) -> Iterable[_Case]:
        """Return the cases in order."""

    @abstractmethod
    def prepare(self, case: _Case) -> Trial:
        """Make a case ready; collective."""

    def time(self, trial: Any, subjects: Mapping[str, Subject]) -> dict[str, list[float]]:
        """Return this PE's seconds per call in every round, by method; collective."""
        return self.interleave(subjects, self.options.rounds)

    def after_times(self, trial: Any, us: Mapping[str, float]) -> None:
        """Measure what else there is of a case, given each method's microseconds; collective."""

    def end(self) -> None:
        """Measure what belongs to no case; collective."""

    @classmethod
    @abstractmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        """Return the tables and texts of a record."""

    @classmethod
    @abstractmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw a record that has times; `path`: of the (first) figure."""

    # ---- of all ------------------------------------------------------------------------------------------------------

    @classmethod
    def label_on(cls, name: str, backend: str) -> str:
        """Return the name of a method in tables, on a backend."""
        is_gpu = backend == "cuda"
        return cls.labels[name].format(collective="NCCL" if is_gpu else "gloo", product="cuBLAS" if is_gpu else "torch")

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line of the record."""
        self._recorder.write(kind, pes=self.world.size, **fields)

    def progress(self, text: str) -> None:
        """Say on rank 0 how far it is."""
        if self.world.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def attempt(self, make: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return what is made, or why some PE has none; collective."""
        made, problem = None, None
        try:
            made = make()
        except Exception as error:  # another library's, of any version; or no memory
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return made, agree(problem)

    def interleave(self, subjects: Mapping[str, Subject], rounds: int) -> dict[str, list[float]]:
        """Time subjects in turn; see `time_interleaved`."""
        return time_interleaved(self.world, subjects, rounds=rounds, burst_seconds=self.options.burst_ms * 1e-3)

    def run(self) -> bool:
        """Measure, or seek a Tuning; collective. Rank 0 writes the record.

        Returns:
            Whether all checks passed, on every PE.
        """
        options, world = self.options, self.world
        self.write(
            "run",
            options=dataclasses.asdict(options),
            **describe_run(world.rank, command=options.command, backend=self.backend, device=self.device),
        )
        self.progress(f"{pes_text(world.size)} on {self.backend}: {self.preparing}")
        self.set_up()
        passed = True
        if options.tune:
            for case in self.cases():
                passed &= self._tune_case(case)
            return passed
        if options.traces:
            return self._trace_case(next(iter(self.cases())))
        self._measure_ceilings()
        self.begin()
        for case in self.cases():
            passed &= self._measure_case(case)
        self.end()
        return passed

    def _measure_ceilings(self) -> None:
        source = self.source()
        self.ceilings, ways = measure_ceilings(
            self.world,
            source,
            updated_rows=self.updated_rows(),
            store_bytes=self.store_bytes[self.backend],
            rounds=_CEILING_ROUNDS,
            burst_seconds=self.options.burst_ms * 4e-3,
        )
        del source
        self.write("ceilings", **ways)
        self.progress("  " + ", ".join(f"{way} {rate / 1e9:.0f} GB/s" for way, rate in ways["ways"].items()))
        if self.backend == "cuda":
            torch.cuda.empty_cache()

    def _measure_case(self, case: _Case) -> bool:
        """Check and time one case; collective."""
        began, world = time.monotonic(), self.world
        trial = self.prepare(case)
        checked = trial.check()
        # A number that is not finite has no place in JSON.
        largest = {key: gather(value) for key, value in checked.items() if key != "failures"}
        checked |= {key: max(v if math.isfinite(v) else 1e300 for v in values) for key, values in largest.items()}
        checked["failures"] = everyones(checked["failures"])
        subjects = self._subjects(trial, checked["failures"])
        checked["failures"] += everyones(trial.check_replays(subjects))
        self.write("check", **trial.fields, **checked)
        for failure in checked["failures"]:
            self.progress(f"  WRONG: {trial.title}: {failure}")
        times = self.time(trial, subjects)
        world.check()
        us = self._write_times(trial, subjects, times)
        del subjects
        self.after_times(trial, us)
        title = trial.title
        self._close(trial)
        del trial
        self._free()
        self.progress(f"  {title}: {time.monotonic() - began:.1f} s")
        return not checked["failures"]

    def _close(self, trial: Trial) -> None:
        gc.collect()  # graphs hold memory, and NCCL's must be gone before its communicator
        self.world.barrier()
        self.world.check()
        trial.close()

    def _free(self) -> None:
        gc.collect()
        self.world.heap.reclaim()
        if self.backend == "cuda":
            torch.cuda.empty_cache()

    def _subjects(self, trial: Trial, failures: list[str]) -> dict[str, Subject]:
        """Record the methods; what cannot be is one of the failures."""
        subjects: dict[str, Subject] = {}
        for name in trial.methods:
            problem, reason = None, None
            try:
                subjects[name] = trial.subject(self.world, name, self._repeated(trial.calls(name)))
            except LeftOut as error:
                reason = str(error)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                problem = f"{type(error).__name__}: {error}"
            problem, reason = agree(problem), agree(reason)
            if problem is not None or reason is not None:
                subjects.pop(name, None)
            if reason is not None:
                self.write("left_out", what=f"{trial.title}, {name}", problem=reason)
            if problem is not None:
                failures.append(f"{name}, could not be prepared: {problem}")
        return subjects

    def _repeated(self, calls: list[Callable[[], object]]) -> list[Callable[[], object]]:
        """Return at least as many calls as a graph shall have, each equally often."""
        copies: int = math.ceil(self.options.calls / len(calls))
        return calls * copies

    def _limits(self, trial: Trial) -> dict[str, Any]:
        if trial.moved is None:
            return {}
        read, sent = trial.moved
        limit, by = self.ceilings.limit_seconds(read_bytes=read, sent_bytes=sent)
        h200_limit, h200_by = H200.limit_seconds(read_bytes=read, sent_bytes=sent)
        return {
            "limit_us": limit * 1e6,
            "limit_by": by,
            "h200_limit_us": h200_limit * 1e6,
            "h200_limit_by": h200_by,
        }

    def _write_times(
        self, trial: Trial, subjects: Mapping[str, Subject], times: Mapping[str, list[float]]
    ) -> dict[str, float]:
        """Record the times; collective. Returns microseconds by method, the same on every PE."""
        us, limits = {}, self._limits(trial)
        for name, own in times.items():
            everyone = gather(own)
            us[name] = max(statistics.median(each) for each in everyone) * 1e6
            self.write(
                "time",
                **trial.fields,
                method=name,
                label=self.label_on(name, self.backend),
                us=us[name],
                us_p95=max(quantile(each, 0.95) for each in everyone) * 1e6,
                **limits,
                **trial.measured(name, subjects[name].calls),
                seconds_by_pe_and_round=everyone,
            )
        return us

    def write_spread(self, trial: Trial, names: Iterable[str], replays: int) -> None:
        """Time so many single calls of methods one by one, each set of inputs in a graph of its own; collective."""
        singles: dict[str, list[Callable[[], object]]] = {
            name: [trial.subject(self.world, name, [call]).replay for call in trial.calls(name)] for name in names
        }
        for name, own in time_replays(self.world, singles, replays=replays).items():
            everyone = gather([quantile(own, share) * 1e6 for share in self.shares.values()])
            self.write(
                "spread",
                **trial.fields,
                method=name,
                label=self.label_on(name, self.backend),
                replays=len(own),
                **{field: max(each[i] for each in everyone) for i, field in enumerate(self.shares)},
            )

    # ---- timelines ---------------------------------------------------------------------------------------------------

    def _trace_case(self, case: _Case) -> bool:
        """Check one case, record its launches, and time what that costs; collective."""
        trial = self.prepare(case)
        failures = everyones(trial.check()["failures"])
        self.write("check", **trial.fields, failures=failures)
        for name in trial.methods:
            path = Path(self.options.record_path or ".").parent / f"{self.name}_{name}_timeline.json"
            record = partial(trial.subject, self.world, name)
            timeline = timeline_of(self.world, trial.calls(name), record, path=path)
            write_timeline(self.world, timeline, path, self.write, {**trial.fields, "method": name})
            if self.backend == "cuda":
                figure = path.with_name(f"{self.name}_{name}_kernels.png")
                kernels = kernels_of(trial.calls(name)[0])
                write_kernels(self.world, kernels, figure, self.write, {**trial.fields, "method": name})
            times = {"rounds": self.options.rounds, "burst_seconds": self.options.burst_ms * 1e-3}
            if cost := tracing_cost(self.world, self._repeated(trial.calls(name)), record, **times):
                self.write("tracing_cost", **trial.fields, method=name, **cost)
        self._close(trial)
        return not failures

    # ---- tuning ------------------------------------------------------------------------------------------------------

    def _tune_case(self, case: _Case) -> bool:
        """Time one case under every combination of the grid; collective."""
        assert self.operator is not None
        options = self.options
        candidates = list(combinations(type(self.operator.default_tuning), options.tune, options.tune_mode))
        trial, passed = self.prepare(case), True
        for method in trial.methods:
            if method in self.tunable:
                self.progress(f"{trial.title}, {method}: {len(candidates)} combinations")
                passed &= self._tune_method(trial, method, candidates)
        self._close(trial)
        del trial
        self._free()
        return passed

    def _tune_method(self, trial: Trial, method: str, candidates: Sequence[Any]) -> bool:
        # Each PE compiles its share first. GPUs are alike: what fails on one is left out.
        problems = compile_together(self.world, [partial(trial.problem_of, method, each) for each in candidates])
        passed = True
        for number, tuning in enumerate(candidates):
            refused = problems[number] if number in problems else trial.problem_of(method, tuning)
            refused = agree(refused)
            row = {**trial.fields, "method": method, "tuning": dataclasses.asdict(tuning)}
            if refused is not None:
                self.write("tune", **row, us=None, problem=refused)
                continue
            try:
                times, wrong = self._time_tuned(trial, method, tuning)
            except (ValueError, CompileError) as error:  # what suits no PE is refused by all, and nothing is launched
                self.write("tune", **row, us=None, problem=gist(str(error)))
                continue
            passed &= not wrong
            self.write(
                "tune",
                **row,
                us=max(statistics.median(each) for each in times) * 1e6,
                problem="; ".join(wrong[:3]) or None,
                h200_limit_us=self._limits(trial).get("h200_limit_us"),
                seconds_by_pe_and_round=times,
            )
            for text in wrong:
                self.progress(f"  WRONG: {tuning}: {text}")
        return passed

    def _time_tuned(self, trial: Trial, method: str, tuning: Any) -> tuple[list[list[float]], list[str]]:
        """Return seconds per call by PE and round, and what is wrong with the results; collective."""
        assert self.operator is not None
        with tuned(self.world, self.operator, tuning):
            failures = everyones(trial.check_tuned(method))
            subject = trial.subject(self.world, method, self._repeated(trial.calls(method)))
            times = self.interleave({method: subject}, self.options.rounds)[method]
        del subject
        gc.collect()  # the graph holds memory
        return gather(times), failures


def measure(experiment: type[Experiment[Any]], options: Any) -> bool:
    """Run an experiment on this PE, in a world with torch's process group beside it; collective.

    Returns:
        Whether all checks passed, on every PE.
    """
    backend = chosen_backend(options.backend)
    heap = max(experiment.result_bytes(options, backend), experiment.store_bytes[backend]) + _HEAP_MARGIN
    with joined_world(backend=backend, timeout=options.timeout, heap_bytes=heap) as world:
        one = experiment(world, options)
        passed = one.run()
        del one  # torch's symmetric memory goes before its process group
        gc.collect()
        return passed
