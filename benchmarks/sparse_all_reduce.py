"""Benchmark of sparse_all_reduce: persistent-ops bench sparse_all_reduce [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
import torch.distributed as dist
from harness.ceilings import H200
from harness.command import names, run_benchmark
from harness.experiment import Experiment, Trial
from harness.timing import Subject, plain, record
from sparse import figures, report
from sparse.cases import CASES, SWEEPS, Case, num_sets, swept
from sparse.check import check_graphs, check_methods, survey
from sparse.host_time import time_host
from sparse.inputs import draw_set
from sparse.limits import Traffic, extra_room, sent_rows
from sparse.memory import MemoryMeter
from sparse.methods import EAGER, GRAPHS, INTO, LABELS, METHODS, OURS, SCHEMES, SWEPT, Methods
from sparse.phases import time_phases

from persistent_ops.ops.sparse_plan import OPERATOR
from persistent_ops.runtime.errors import SymmetricHeapError
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import agree, gather

_MOST_PES = 8  # of a host, whose heap must be made before the world's size is known
_DENSE_MARGIN = 4 << 30  # left free beside a dense gradient
_SLOW_SECONDS = 0.05  # calls this long are timed a few times only, and not one by one
_SLOW_ROUNDS = 2
_SPREAD_SECONDS = {"cuda": 1.5, "host": 0.3}
_MOST_REPLAYS = 1000
_PHASE_TRIALS = 5
_HOST_TRIALS = 21
_Case = tuple[str, Case]


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help.

    Attributes:
        cases: keys of CASES.
        sweeps: of SWEEPS.
        sweep_rounds: the most times that a method is timed in the sweeps.
        replays: timed one by one for the spread; None for as many as fit a second or two.
        gloo_bytes: that all PEs' inputs may have together where Gloo is measured.
        room_bytes: of the symmetric heap that "allgather" and "dense" may take each beside the result; where they need
            more, they are not measured.
    """

    methods: tuple[str, ...] = METHODS
    rounds: int = 9
    cases: tuple[str, ...] = tuple(CASES)
    sweeps: tuple[str, ...] = SWEEPS
    sweep_rounds: int = 5
    replays: int | None = None
    quick: bool = False
    gloo_bytes: int = 500_000_000
    room_bytes: int = 4_300_000_000

    def groups(self, backend: str) -> dict[str, list[Case]]:
        """Return what is measured in the sizes of a backend: "cases", and each sweep.

        The cases with the smallest results come first: what the operator keeps from one is then never more than the
        next one needs.
        """
        groups = {"cases": [CASES[name] for name in self.cases]}
        groups |= {sweep: swept(sweep, quick=self.quick) for sweep in self.sweeps}
        if backend != "cuda":
            groups = {name: [case.for_host() for case in cases] for name, cases in groups.items()}
        return {name: sorted(cases, key=_expected_result_bytes) for name, cases in groups.items()}


def _expected_result_bytes(case: Case) -> float:
    """Return a number that orders cases as their results' sizes do."""
    alike = {"uniform": 0.1, "zipf": 0.5, "overlap": case.shared}[case.distribution]
    return case.rows_per_rank * case.row_bytes * (2 - alike)


class Gradients(Trial):
    """One case, with its inputs and buffers.

    Args:
        world: of this PE.
        fields: that name the case.
        methods: with the buffers.
        unions: of each input, the rows of the result.
        sent: rows of the result, and those that a PE sends at least.

    Attributes:
        is_swept: whether the case is a point of a sweep, of which less is checked and reported.
        used: by method of the operator, the algorithm that it took.
    """

    def __init__(
        self,
        world: World,
        fields: dict[str, Any],
        methods: Methods,
        unions: list[torch.Tensor],
        sent: tuple[float, float],
    ) -> None:
        self.fields = fields
        self.is_swept = fields["group"] != "cases"
        self.used: dict[str, str] = {}
        self._world = world
        self._shaped = methods
        self._unions = unions
        self._union, self._unicast = sent

    def run(self, name: str) -> object:
        """Call a method with the first input."""
        return self._shaped.run(name, 0)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        """Return a call per input; one alone where it takes long and its time does not depend on the input."""
        count = 1 if name in ("dense_reduce", "gloo") else len(self._shaped.sets)
        return [functools.partial(self._shaped.run, name, number) for number in range(count)]

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        """Return a graph of the calls, or plain calls where a method waits for the host."""
        return record(world, calls) if name in GRAPHS else plain(calls)

    def check(self) -> dict[str, Any]:
        unions = self._unions[:1] if self.is_swept else self._unions
        return check_methods(self._world, self._shaped, self.methods, unions)

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        graphs = {name: subject for name, subject in subjects.items() if name in INTO and not self.is_swept}
        return check_graphs(self._world, self._shaped, graphs, self._unions[-1])

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        case, used = self._shaped.case, self.used.get(name)
        rows = sent_rows(
            SCHEMES[used or name],
            rows=case.rows,
            rows_per_rank=case.rows_per_rank,
            union=self._union,
            unicast=self._unicast,
            world_size=self._world.size,
        )
        return {
            "in_graph": name in GRAPHS and self._world.backend.name == "cuda",
            "algorithm": used,
            "sent_value_bytes": rows * case.row_bytes,
            "calls_per_replay": calls,
        }

    def close(self) -> None:
        self._shaped.close()


class SparseAllReduce(Experiment[_Case]):
    """Sums of sparse gradients: cases, and sweeps over sparsity and overlap."""

    name = "sparse_all_reduce"
    labels = LABELS
    worlds_help = "8,4,2 (default: one PE per GPU; host 2)"
    smallest_world = 2
    smallest_why = ": one PE has nothing to send"
    time_limit = 600.0
    rounds = 9
    rounds_help = "(default 9, sweeps 5; quick 3)"
    quick_help = "few rounds, replays and points of the sweeps"
    correct = (
        "correct: the operator's values have the bits of sums in the order of the PEs, on all PEs, with every "
        "algorithm, when repeated and in graphs; the others' are at most {largest_difference:.2g} away"
    )
    operator = OPERATOR
    tuned_methods = ("into",)
    tunable = OURS
    knobs: ClassVar = {"occupancy": ("work_groups", ())}
    note = "; fp32"
    read_bytes: ClassVar[Mapping[str, int]] = {"cuda": 2 << 30, "host": 4 << 20}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", help=f"comma-separated, of {','.join(CASES)} (default: all), or none")
        parser.add_argument("--sweeps", help=f"comma-separated, of {','.join(SWEEPS)} (default: all), or none")
        parser.add_argument(
            "--replays", type=int, help="single calls that show the spread (default: 20 to 1000, by time)"
        )
        gloo = "most that all PEs have together for Gloo to be timed (default 0.5)"
        parser.add_argument("--gloo-gb", type=float, default=0.5, help=gloo)
        room = "most of the symmetric heap that allgather and dense may take beside the result (default 4.3)"
        parser.add_argument("--room-gb", type=float, default=4.3, help=room)

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        return Options(
            **common,
            cases=names("--cases", arguments.cases, CASES, or_none=True),
            sweeps=names("--sweeps", arguments.sweeps, SWEEPS, or_none=True),
            replays=20 if arguments.replays is None and arguments.quick else arguments.replays,
            quick=arguments.quick,
            gloo_bytes=round(arguments.gloo_gb * 1e9),
            room_bytes=round(arguments.room_gb * 1e9),
        )

    @classmethod
    def result_bytes(cls, options: Options, backend: str) -> int:
        """Return room for results and the preallocated one, and for what algorithms need beside them."""
        most = 0
        for cases in options.groups(backend).values():
            for case in cases:
                union = case.union_at_most(_MOST_PES)
                sizes = {"rows": case.rows, "union": union, "row_bytes": case.row_bytes, "world_size": _MOST_PES}
                # What "allgather" keeps grows by doubling; a smaller world may have room for it where a larger one has
                # not.
                extra = 2 * min(extra_room("allgather", **sizes), options.room_bytes)
                dense = extra_room("dense", **sizes)
                extra += 2 * dense if dense <= options.room_bytes else 0
                most = max(most, int(4 * case.sparse_bytes(union)) + extra)
        return most

    @classmethod
    def label_on(cls, name: str, backend: str) -> str:
        label = super().label_on(name, backend)
        return label if backend == "cuda" else label.replace(", graph", ", no sync").replace(", through CPU", "")

    # ---- on a PE -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Make a group for Gloo beside the default one of NCCL, or find out why there is none."""
        self._memory = MemoryMeter(self.world)  # begin() makes it again, after the ceilings' buffers
        self._gloo: Any = None
        self._no_gloo: str | None = None
        if self.backend != "cuda" or "gloo" not in self.options.methods:
            return
        try:
            self._gloo = dist.new_group(backend="gloo")
        except (RuntimeError, ValueError) as error:
            self._no_gloo = f"{type(error).__name__}: {error}"
        self._no_gloo = agree(self._no_gloo)

    def begin(self) -> None:
        self._memory = MemoryMeter(self.world)

    def cases(self) -> Iterable[_Case]:
        return [(group, case) for group, cases in self.options.groups(self.backend).items() for case in cases]

    def prepare(self, case: _Case) -> Gradients:
        """Draw the inputs, survey and record them, allocate the buffers, and call what can run for the first time."""
        group, shape = case
        world = self.world
        self._memory.case_begins()
        fields = {"group": group, "case": shape.name, "shape": dataclasses.asdict(shape)}
        sets = [
            draw_set(shape, rank=world.rank, world_size=world.size, number=number, device=self.device)
            for number in range(num_sets(shape, self.backend))
        ]
        surveys = [survey(world, rows) for rows in sets]
        unions = [union for union, _ in surveys]
        capacity = max(union.numel() for union in unions)
        chosen = []
        sent = self._write_case(fields, shape, [traffic for _, traffic in surveys])
        for name in self.options.methods:
            if group == "cases" or name in SWEPT:
                reason = self._unsuited(shape, name, capacity)
                if reason is None:
                    chosen.append(name)
                else:
                    self._skip(fields, name, reason)
        methods = Methods(world, shape, sets, capacity=capacity, chosen=chosen, gloo=self._gloo)
        self._memory.case_ready()
        trial = Gradients(world, fields, methods, unions, sent)
        trial.methods = self._warm_up(trial, methods, chosen, shape.sparse_bytes(unions[0].numel()))
        return trial

    def _write_case(self, fields: dict[str, Any], case: Case, traffic: Sequence[Traffic]) -> tuple[float, float]:
        """Record what must travel; collective. Returns the rows of the result, and those that a PE sends at least."""
        store = self.ceilings.store
        union, several, unicast, own = (
            statistics.mean(getattr(each, field) for each in traffic)
            for field in ("union", "several", "unicast", "lacked")
        )
        lacked = max(gather(own))
        least = max(lacked, unicast) * case.row_bytes
        self.write(
            "case",
            **fields,
            sets=len(traffic),
            row_bytes=case.row_bytes,
            union_rows=union,
            rows_with_several=several,
            lacked_rows=lacked,
            unicast_rows=unicast,
            limit_us=lacked * case.row_bytes / store * 1e6 if store else None,
            unicast_us=least / store * 1e6 if store else None,
            h200_limit_us=lacked * case.row_bytes / H200.store * 1e6 if H200.store else None,
            h200_unicast_us=least / H200.store * 1e6 if H200.store else None,
            input_bytes=case.input_bytes,
            result_bytes=case.sparse_bytes(union),
        )
        return union, unicast

    def _unsuited(self, case: Case, name: str, union: int) -> str | None:
        """Return why a method is not measured with a case, or None; the same on every PE."""
        world, options = self.world, self.options
        if name == "gloo":
            if self._no_gloo is not None:
                return self._no_gloo
            together = world.size * case.input_bytes
            if together > options.gloo_bytes:
                return f"{_gb(together)} through the CPU of every PE; at most {_gb(options.gloo_bytes)} (--gloo-gb)"
        algorithm = {**EAGER, **INTO}.get(name, "")
        room = extra_room(algorithm, rows=case.rows, union=union, row_bytes=case.row_bytes, world_size=world.size)
        if room > options.room_bytes:
            return f"{_gb(room)} of the symmetric heap beside the result; at most {_gb(options.room_bytes)} (--room-gb)"
        if name == "dense_reduce" and self.backend == "cuda":
            free = min(gather(torch.cuda.mem_get_info(self.device)[0]))
            others = 4 * case.union_at_most(world.size) * case.row_bytes  # what the other methods have beside it
            if free < case.dense_bytes + others + _DENSE_MARGIN:
                return f"a dense gradient of {_gb(case.dense_bytes)} does not fit beside the rest: {_gb(free)} are free"
        return None

    def _warm_up(self, trial: Gradients, methods: Methods, chosen: Sequence[str], result_bytes: float) -> list[str]:
        """Run each method for the first time, and measure its memory; collective.

        Returns:
            Those that had enough memory.
        """
        able = []
        for name in chosen:
            problem, nbytes = None, None
            # The operator must not fail; a library that cannot do this here is named with its reason.
            lacks: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, SymmetricHeapError)
            lacks = lacks if name in OURS else (*lacks, RuntimeError)
            call = functools.partial(trial.run, name)
            try:
                call()
                if self.backend == "cuda" and name != "gloo":
                    nbytes = self._memory.measure(methods, name, call)
            except lacks as error:
                problem = f"{type(error).__name__}: {error}"
            problem = agree(problem)
            if problem is not None:
                self._skip(trial.fields, name, problem)
                continue
            able.append(name)
            if nbytes is not None:
                held, own = max(gather(nbytes)), methods.case.input_bytes
                ratio = (held + own) / (own + result_bytes)
                self.write("memory", **trial.fields, method=name, held_bytes=held, input_bytes=own, ratio=ratio)
        return able

    def time(self, trial: Gradients, subjects: Mapping[str, Subject]) -> dict[str, list[float]]:
        """Record phases and host time of the operator's calls, then time; what is slow is timed a few times only."""
        for name in subjects:
            if name in OURS and name != "dense":  # "dense": several launches, none of which is the sum's alone
                call = functools.partial(trial.run, name)
                phases, trial.used[name] = time_phases(self.world, call, trials=_PHASE_TRIALS)
                us = {phase: seconds * 1e6 for phase, seconds in phases.items()}
                self.write("phases", **trial.fields, method=name, algorithm=trial.used[name], us=us)
                if name in EAGER and not trial.is_swept:
                    host_us = time_host(self.world, call, trials=_HOST_TRIALS) * 1e6
                    self.write("host", **trial.fields, method=name, us=host_us)
        options = self.options
        rounds = min(options.rounds, options.sweep_rounds) if trial.is_swept else options.rounds
        times = self.interleave(subjects, min(rounds, _SLOW_ROUNDS))
        medians = gather({name: statistics.median(own) for name, own in times.items()})
        fast = {name: subjects[name] for name in times if max(each[name] for each in medians) < _SLOW_SECONDS}
        if rounds > _SLOW_ROUNDS:
            for name, own in self.interleave(fast, rounds - _SLOW_ROUNDS).items():
                times[name] += own
        return times

    def after_times(self, trial: Gradients, us: Mapping[str, float]) -> None:
        """Time single calls of what is not slow."""
        fast = [name for name in us if us[name] < _SLOW_SECONDS * 1e6]
        replays = self.options.replays
        if replays is None:
            together = sum(us[name] for name in fast) * 1e-6
            replays = min(_MOST_REPLAYS, max(20, math.floor(_SPREAD_SECONDS[self.backend] / max(together, 1e-9))))
        if replays and fast and not trial.is_swept:
            self.write_spread(trial, fast, replays)

    def _skip(self, fields: dict[str, Any], name: str, reason: str) -> None:
        self.write("skipped", **fields, method=name, label=self.label_on(name, self.backend), reason=reason)

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return report.tables(lines)

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        figures.draw_figures(lines, path)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


main = functools.partial(run_benchmark, SparseAllReduce)
