"""One case of the embedding part of a step: all methods use the same tables."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from embedding.backward_configs import limit
from harness.ceilings import H200, Ceilings
from harness.check import bits_differ
from harness.timing import Subject, on_stream, plain, record
from harness.trial import LeftOut, Trial

from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import agree, gather

from .cases import Case, Sizes
from .check import StepReference
from .lookups import NUM_SETS, draw_batch, draw_step_gradient
from .methods import PHASES, BaselineStep, Clock, OurStep, Step
from .moves import step_moves
from .tables import StepTables

__all__ = ["StepTrial"]


class StepTrial(Trial):
    """The methods of one case, each with every batch in turn; they update the same tables.

    Args:
        world: of this PE.
        case, sizes: what is measured.
        methods: that are wanted, and can be had here.
        tables: with the package's collection.
        baselines: others with these tables, by the first word of methods' names.
        ceilings: of this run.
        is_beside: whether lookups ahead travel beside other launches, where there is room.
    """

    def __init__(
        self,
        world: World,
        case: Case,
        sizes: Sizes,
        methods: Sequence[str],
        tables: StepTables,
        baselines: Mapping[str, Any],
        ceilings: Ceilings,
        *,
        is_beside: bool,
    ) -> None:
        self._world, self._case, self._tables, self._ceilings = world, case, tables, ceilings
        self.methods, self._is_beside = list(methods), is_beside
        self.fields = {
            "case": case.name,
            "optimizer": case.optimizer,
            "distribution": case.distribution,
            "shape": {"batch": sizes.batch, "dim": sizes.dim, "rows": sizes.rows, "dtype": case.dtype},
        }
        device, self._is_gpu = world.backend.device, world.backend.name == "cuda"
        self._batches = [
            draw_batch(sizes, case.distribution, rank=world.rank, world_size=world.size, number=number, device=device)
            for number in range(NUM_SETS)
        ]
        gradient = draw_step_gradient(
            sizes, rank=world.rank, world_size=world.size, dtype=case.wire_dtype(), device=device
        )
        self._ours = OurStep(tables, self._batches, gradient)
        self._baselines = {name: BaselineStep(each, self._batches, gradient) for name, each in baselines.items()}
        self._reference = StepReference(world, case, sizes, tables, self._batches)
        moves = step_moves(world, case, sizes, tables, self._batches)
        limits = gather(limit(ceilings, moves.phases)[0])
        slowest = limits.index(max(limits))
        # All PEs report the values of the PE with the most to do.
        self._moved: dict[str, Any] = gather(
            {
                "unique_rows": moves.unique_rows,
                "lookups": moves.lookups,
                "sent_bytes": sum(part.sent for part in moves.phases),
                "memory_bytes": sum(part.read + part.updated for part in moves.phases),
                **{
                    f"{prefix}limit_{unit}": told
                    for prefix, each in (("", ceilings), ("h200_", H200))
                    for unit, told in zip(("us", "by"), limit(each, moves.phases), strict=True)
                },
                "phases_limit_us": [limit(ceilings, [part])[0] for part in moves.phases],
            },
        )[slowest]
        self._own_stream = torch.cuda.Stream() if self._is_gpu else None
        self._taken: dict[int, list[torch.Tensor]] = {}  # the package's rows, by passes over the sets

    # ---- methods -----------------------------------------------------------------------------------------------------

    def _step(self, name: str) -> Step:
        return self._baselines.get(name.split("_")[0], self._ours)

    def _is_ours(self, name: str) -> bool:
        return self._step(name) is self._ours

    def run(self, name: str, number: int) -> torch.Tensor:
        """Make a step by a method that has no graph of its own kind; return what was pooled."""
        step = self._step(name)
        if isinstance(step, BaselineStep) and not name.endswith("_eager"):
            return step.run_told(number)
        return step.run(number)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self.run, name, number) for number in range(NUM_SETS)]

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        """Return a graph of the calls, or plain calls of an eager method; those ahead go through all calls at once."""
        if name == "fused_ahead":
            numbers = [number % NUM_SETS for number in range(len(calls))]
            return Subject(lambda: self._ours.run_ahead(numbers), len(calls))
        if name.endswith("_eager"):
            return plain(calls[:NUM_SETS] if name.startswith("torch") else calls)  # whose steps take long
        try:
            return record(world, calls, stream=self._own_stream)
        except RuntimeError as error:
            if self._is_ours(name):
                raise
            raise LeftOut(f"it was not captured: {str(error).splitlines()[0]}") from error

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Compare what a step pools, and the rows after a step with each set in turn."""
        failures: list[str] = []
        runs_beside = False
        worst = {True: 0.0, False: 0.0}
        for name in list(self.methods):
            if f"{name}_eager" in self.methods:
                continue  # the same calls; the graph is compared when it is there
            act = self._ahead if name == "fused_ahead" else functools.partial(self._once, name)
            told, share = self._compare(name, act, 1, is_replay=False)
            failures += told
            worst[self._is_ours(name)] = max(worst[self._is_ours(name)], share)
            if self._is_beside and not runs_beside:  # all kernels have been launched by now, and no graph captured
                runs_beside = self._world.agree_to_run_beside()
        return {
            "worst_share": worst[True],
            "worst_share_of_baselines": worst[False],
            "runs_beside": int(runs_beside),
            "failures": failures,
        }

    def _once(self, name: str) -> torch.Tensor:
        with on_stream(None if name.endswith("_eager") else self._own_stream):
            first, *_ = [self.run(name, number) for number in range(NUM_SETS)]
        return first

    def _ahead(self) -> torch.Tensor:
        return self._ours.run_ahead(range(NUM_SETS))

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare the rows after a replay."""
        failures: list[str] = []
        for name, subject in subjects.items():
            if not name.endswith("_eager"):
                failures += self._compare(name, subject.replay, subject.calls // NUM_SETS, is_replay=True)[0]
        return failures

    def _compare(self, name: str, act: Callable[[], Any], passes: int, *, is_replay: bool) -> tuple[list[str], float]:
        """Run on tables as they were at first; collective. Returns failures, and the share of what rounding explains.

        The package's methods must all leave the same bits; the first is compared with the reference.
        """
        is_ours, what = self._is_ours(name), f"{name}, " + ("a replay: " if is_replay else "")
        step = self._step(name)
        self._tables.reset()
        if isinstance(step, BaselineStep):
            step.embedding.take_over(self._tables.collection)
        self._world.barrier()
        result, problem = _attempted(act)
        self._world.check()
        if (problem := agree(problem)) is not None:
            self.methods = [each for each in self.methods if self._step(each) is not step]
            return [f"{name}, {problem}; fewer --max-rows, or --methods without it, help"], 0.0
        failures, worst = [], 0.0
        if not is_replay:
            worst = self._reference.pooled_off(result, is_ours=is_ours)
            if not worst <= 1:
                failures.append(f"{what}pooled rows are {_far(worst)}")
        parts = step.parts()
        if is_ours:
            taken = self._reference.taken(parts)
            if passes in self._taken:
                pairs = zip(taken, self._taken[passes], strict=True)
                if any(bits_differ(one, other) for one, other in pairs):
                    failures.append(f"{what}other bits in tables or states than the package's first method")
                return failures, worst
            self._taken[passes] = taken
        share, where = self._reference.rows_off(parts, [*range(NUM_SETS)] * passes)
        if not share <= 1:
            failures.append(f"{what}{where} is {_far(share)}")
        return failures, max(worst, share)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        return dict(self._moved)

    def phases(self, name: str, rounds: int) -> dict[str, float]:
        """Return the microseconds of a method's phases in eager steps, medians, of the slowest PE; collective."""
        step = self._step(name)
        seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        step.run(0)
        for turn in range(rounds):
            clock = Clock(is_gpu=self._is_gpu)
            self._world.barrier()
            step.run_timed(turn % NUM_SETS, clock)
            self._world.check()
            for phase in PHASES:
                seconds[phase].append(clock.seconds(phase))
        own = {phase: statistics.median(each) for phase, each in seconds.items()}
        own["backward"] -= own["sort"]
        if not self._is_ours(name):
            del own["sort"]
        everyone = gather(own)
        return {phase: 1e6 * max(each[phase] for each in everyone) for phase in own}


def _attempted(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what comes of it, or that there is too little memory for it."""
    try:
        return act(), None
    except torch.OutOfMemoryError as error:
        return None, str(error).splitlines()[0]


def _far(share: float) -> str:
    return f"{share:.3g} times as far from the fp64 reference as rounding explains"
