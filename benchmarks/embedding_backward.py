"""Benchmark of the backward pass of embedding_all_to_all: persistent-ops bench embedding_backward [OPTIONS].

See README.md beside it. "fused" is the backward pass alone, without autograd: sort by row and launch, in a graph of its
own (`embedding.backward_methods` says how); "forward_backward" goes through autograd, both passes in one graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
from embedding.backward_baselines import Exchange, Fbgemm, TorchUpdate
from embedding.backward_check import Reference, digest
from embedding.backward_configs import CONFIGS, OPTIMIZERS, Case, backward_moves, forward_moves, limit
from embedding.backward_inputs import Touched, Training, count_touched, draw_gradient
from embedding.backward_methods import OPERATOR, OurBackward
from embedding.backward_report import draw, tables
from embedding.configs import Config
from embedding.inputs import DISTRIBUTIONS, LookupSet, draw_lookups, num_sets
from embedding.options import (
    add_options,
    available,
    check_batches,
    distributions_of,
    sized,
    wires_of,
    without_fbgemm,
)
from harness.ceilings import H200, Ceilings
from harness.command import names, run_benchmark
from harness.experiment import Experiment, LeftOut, Trial
from harness.timing import Subject, on_stream, plain, record
from harness.tuning import tuned
from harness.world import chosen_backend

from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import agree, gather

BACKWARD = ("fused", "fused_eager", "kernel", "kernel_alone", "unfused_torch", "fbgemm", "fbgemm_eager")
STEP = ("forward_backward", "fbgemm_step", "fbgemm_step_eager")
LABELS = {
    "fused": "fused",
    "fused_eager": "fused, eager",
    "unfused_torch": "{collective} + torch",
    "fbgemm": "{collective} + FBGEMM",
    "fbgemm_eager": "{collective} + FBGEMM, eager",
    "forward_backward": "fused step",
    "fbgemm_step": "{collective} + FBGEMM step",
    "fbgemm_step_eager": "{collective} + FBGEMM step, eager",
    "sort": "sort by row alone",
    "kernel": "kernel alone",
    "kernel_alone": "kernel without exchange",
    "exchange": "reorder + {collective} alone",
}
METHODS = tuple(LABELS)
BASELINES = {
    "fused": ("unfused_torch", "fbgemm", "fbgemm_eager"),
    "forward_backward": ("fbgemm_step", "fbgemm_step_eager"),
}
_OURS = ("fused", "fused_eager", "forward_backward", "kernel", "kernel_alone")
_QUICK_ROWS = 20_000
_SAMPLE = 16  # tables of which the replay of a baseline is compared
_ROOM_GROWTH = 1.5  # of the operator's areas


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help.

    Attributes:
        optimizers: of every config; none for each config's own.
    """

    methods: tuple[str, ...] = METHODS
    configs: tuple[str, ...] = tuple(CONFIGS)
    optimizers: tuple[str, ...] = ()
    distributions: tuple[str, ...] = DISTRIBUTIONS
    rows: int | None = None
    wires: tuple[str, ...] = ("fp32",)

    def shapes(self, backend: str) -> list[Config]:
        """Return the configs in the sizes of a backend."""
        return list(dict.fromkeys(case.config for case in self.cases(backend)))

    def cases(self, backend: str) -> list[Case]:
        """Return the cases: cases of one config and optimizer, which share memory, follow one another."""
        return [
            Case(shape, optimizer, distribution)
            for name in self.configs
            for shape in sized(CONFIGS[name][0], backend, self.rows, self.wires)
            for optimizer in self.optimizers or CONFIGS[name][1]
            for distribution in self.distributions
        ]


class Backward(Trial):
    """One case: the methods, each with every set of lookups and gradients in turn; they update the same tables.

    Args:
        world: of this PE.
        case: what is measured.
        methods: that are wanted, and can be had here.
        training: the tables.
        sets: the lookups.
        fbgemm: with these tables; None where it is not among the methods.
        ceilings: of this run.
    """

    def __init__(
        self,
        world: World,
        case: Case,
        methods: Sequence[str],
        training: Training,
        sets: list[LookupSet],
        fbgemm: Fbgemm | None,
        ceilings: Ceilings,
    ) -> None:
        config = case.config
        self._world, self._case, self._training, self._ceilings = world, case, training, ceilings
        self.fields = {
            "config": config.name,
            "optimizer": case.optimizer,
            "distribution": case.distribution,
            "shape": dataclasses.asdict(config),
        }
        self.methods = methods
        device, is_gpu = world.backend.device, world.backend.name == "cuda"
        self._sets, self._fbgemm = sets, fbgemm
        self._order = range(len(sets))
        self._gradients = [
            draw_gradient(config, world.size, rank=world.rank, number=number, device=device) for number in self._order
        ]
        touched = count_touched(config, self._sets)
        self._touched = Touched(*(max(gather(number)) for number in touched))
        storage = training.storage(config)
        self._state = None if fbgemm is None else fbgemm.state
        if self._state is None and "unfused_torch" in methods and case.optimizer != "sgd":
            width = config.dim if case.optimizer == "adagrad" else 1
            self._state = torch.zeros(storage.shape[0], width, device=device)
            self._state = self._state.view(-1) if width == 1 else self._state
        self._tables, optimizer = training.optimizer(config, case.optimizer)
        self._ours = OurBackward(world, config, self._tables, optimizer, self._sets, self._gradients)
        if any(name in methods for name in ("sort", "kernel", "kernel_alone")):
            self._ours.take_apart()
        self._exchange = Exchange(world, config, device)
        self._torch: TorchUpdate | None = None
        if "unfused_torch" in methods:
            self._torch = TorchUpdate(config, case.optimizer, storage, self._state, self._sets)
        self._reference = Reference(world, config, case.optimizer, self._sets)
        self._own_stream = torch.cuda.Stream() if is_gpu else None
        self._digests: dict[int, list[int]] = {}  # by passes over the sets

    @property
    def title(self) -> str:
        return self._case.title

    # ---- methods -----------------------------------------------------------------------------------------------------

    def run(self, name: str, number: int) -> None:
        """Run a method with one set on the current stream."""
        if name.startswith("fbgemm"):
            assert self._fbgemm is not None
            if name.startswith("fbgemm_step"):
                pooled = self._fbgemm.forward(number)
                self._exchange.pooled(pooled.detach())
                pooled.backward(self._exchange.gradient(self._gradients[number]))
            else:
                self._fbgemm.backward(self._exchange.gradient(self._gradients[number]), number)
        elif name == "unfused_torch":
            assert self._torch is not None
            self._torch.update(self._exchange.gradient(self._gradients[number]), number)
        elif name == "exchange":
            self._exchange.gradient(self._gradients[number])
        elif name == "kernel_alone":
            self._ours.kernel_alone(number, self._exchange.received)
        else:
            {
                "fused": self._ours.backward,
                "fused_eager": self._ours.backward,
                "forward_backward": self._ours.forward_backward,
                "sort": self._ours.sort,
                "kernel": self._ours.kernel,
            }[name](number)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self.run, name, number) for number in self._order]

    def _stream(self, name: str) -> torch.cuda.Stream | None:
        """Return the stream of a method that goes through autograd."""
        if name.startswith("fbgemm"):
            return None if self._fbgemm is None else self._fbgemm.stream
        return self._own_stream if name == "forward_backward" else None

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        """Return a graph of the calls, or plain calls of an eager method."""
        stream = self._stream(name)
        if name.endswith("_eager"):
            return plain(calls, stream=stream)
        if name == "kernel_alone":  # the numbers do not matter, but must be finite
            self._exchange.gradient(self._gradients[0])
        try:
            return record(world, calls, stream=stream)
        except RuntimeError as error:
            if name.startswith("fbgemm"):
                raise LeftOut(f"FBGEMM was not captured: {str(error).splitlines()[0]}") from error
            raise

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Compare tables and states after one pass with each set in turn."""
        failures: list[str] = []
        worst = {True: 0.0, False: 0.0}
        for name in self.methods:
            if name in ("sort", "exchange"):
                continue  # the kernel shows the one, the baselines the other
            if f"{name}_eager" in self.methods:
                continue  # the same calls; the graph is compared when it is there

            def once(name: str = name) -> None:
                with on_stream(self._stream(name)):
                    for number in self._order:
                        if name == "kernel_alone":
                            self._exchange.gradient(self._gradients[number])
                        self.run(name, number)

            failures_of, share = self._compare(name, once, 1, is_replay=False)
            failures += failures_of
            worst[name in _OURS] = max(worst[name in _OURS], share)
        return {
            "sets": len(self._sets),
            "worst_share": worst[True],
            "worst_share_of_baselines": worst[False],
            "failures": failures,
        }

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare tables and states after a replay."""
        failures: list[str] = []
        for name, subject in subjects.items():
            # In a graph, the kernel without an exchange gets the gradient of one set for all sets.
            if name not in ("sort", "exchange", "kernel_alone") and not name.endswith("_eager"):
                passes = subject.calls // len(self._sets)
                failures += self._compare(name, subject.replay, passes, is_replay=True)[0]
        return failures

    def check_tuned(self, name: str) -> list[str]:
        """Compare the bits with those under the default Tuning."""
        with tuned(self._world, OPERATOR, None):
            expected = self._digest_of(name)
        return [] if self._digest_of(name) == expected else [f"{name}, other bits than the default's"]

    def _digest_of(self, name: str) -> list[int]:
        self._training.reset(self._case.config, self._ours.states)
        for call in self.calls(name):
            call()
        self._world.check()
        return digest([*self._tables, *self._ours.states])

    def _compare(
        self, name: str, act: Callable[[], object], passes: int, *, is_replay: bool
    ) -> tuple[list[str], float]:
        """Run on tables as they were at first; collective. Returns failures, and the share of what rounding explains.

        The operator's methods must all leave the same bits; the first is compared with the reference.
        """
        is_ours, what = name in _OURS, f"{name}, " + ("a replay: " if is_replay else "")
        states = self._ours.states if is_ours else self._baseline_states()
        self._training.reset(self._case.config, states)
        self._world.barrier()
        act()
        self._world.check()
        tensors = [*self._tables, *states]
        if is_ours and passes in self._digests:
            failed = digest(tensors) != self._digests[passes]
            return ([f"{what}other bits in tables or states than the operator's first method"] if failed else []), 0.0
        if is_ours:
            self._digests[passes] = digest(tensors)
        looked_at = None
        if is_replay:
            count = self._case.config.tables
            looked_at = sorted({round(i * (count - 1) / (_SAMPLE - 1)) for i in range(_SAMPLE)})
        order = [*self._order] * passes
        share, where = self._reference.difference(self._tables, states, order, looked_at=looked_at)
        wrong = f"{what}{where} is {share:.3g} times as far from the fp64 reference as rounding explains"
        return ([] if share <= 1 else [wrong]), share

    def _baseline_states(self) -> list[torch.Tensor]:
        return [] if self._state is None else list(self._state.split(self._case.config.rows))

    # ---- reports -----------------------------------------------------------------------------------------------------

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        config, size = self._case.config, self._world.size
        found: dict[str, Any] = {"unique_rows": self._touched.rows, "lookups": config.lookups}
        exchanging = 1 if name == "kernel_alone" else size
        backward = backward_moves(
            config, self._case.optimizer, exchanging, rows=self._touched.rows, sectors=self._touched.sectors
        )
        if name in BACKWARD:
            parts = [backward]
        elif name in STEP:  # one pass begins when the other has ended
            parts = [forward_moves(config, size, rows=self._touched.rows), backward]
        else:
            return {**found, "sent_bytes": backward.sent if name == "exchange" else 0.0, "memory_bytes": None}
        found["sent_bytes"] = sum(part.sent for part in parts)
        found["memory_bytes"] = sum(part.read + part.updated for part in parts)
        for prefix, ceilings in (("", self._ceilings), ("h200_", H200)):
            found[f"{prefix}limit_us"], found[f"{prefix}limit_by"] = limit(ceilings, parts)
        if self._ceilings.store:
            found["sending_us"] = backward.sent / self._ceilings.store * 1e6
        return found


class EmbeddingBackward(Experiment[Case]):
    """Exchange, reduction and update of gradients, by config, optimizer and distribution of the indices."""

    name = "embedding_backward"
    labels = LABELS
    case_field = "config"
    quick_help = f"few rounds, uniform indices, tables of {_QUICK_ROWS} rows"
    operator = OPERATOR
    tuned_methods = ("fused",)
    tunable = ("fused",)
    knobs: ClassVar = {"occupancy": ("work_groups", ()), "slice": ("slice_samples", (1, 2, 4, 8, 16, 32))}
    correct = (
        "correct: tables and states are what fp64 gives, at most {worst_share:.2g} of what rounding explains away (the "
        "baselines' {worst_share_of_baselines:.2g}); the operator leaves the same bits with and without autograd, in "
        "graphs, by its kernel alone and without the exchange"
    )
    preparing = "tables and ceilings"
    store_bytes: ClassVar[Mapping[str, int]] = {"cuda": 512 << 20, "host": 1 << 20}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add_options(parser, CONFIGS, f"100000; quick {_QUICK_ROWS}, host 1000")
        every = ",".join(OPTIMIZERS)
        parser.add_argument("--optimizers", help=f"comma-separated, of {every} (default: the first config's all)")

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        backend = chosen_backend(arguments.backend)
        rows = arguments.rows
        if rows is None and arguments.quick and backend == "cuda":
            rows = _QUICK_ROWS
        options = Options(
            **common,
            configs=names("--configs", arguments.configs, CONFIGS),
            optimizers=names("--optimizers", arguments.optimizers, OPTIMIZERS) if arguments.optimizers else (),
            distributions=distributions_of(arguments),
            rows=rows,
            wires=wires_of(arguments),
        )
        check_batches(options.shapes(backend), worlds)
        return options

    @classmethod
    def result_bytes(cls, options: Options, backend: str) -> int:
        """Return room for gradients on their way, and for the results of forward passes, which graphs keep."""
        shapes, cases = options.shapes(backend), options.cases(backend)
        staged = sum(_ROOM_GROWTH * shape.output_bytes for shape in shapes)
        kept = 0
        if "forward_backward" in options.methods and backend == "cuda":
            kept = sum(num_sets(case.config) * case.config.output_bytes for case in cases)
        return int(staged) + kept + 4 * max(shape.output_bytes for shape in shapes)

    # ---- on a PE -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        self._shapes = self.options.shapes(self.backend)
        self._training = Training(self._shapes, self.device, self.world.rank)
        self._methods = available(self, self.options.methods)

    def source(self) -> torch.Tensor:
        largest = max(self._shapes, key=lambda shape: shape.tables * shape.rows * shape.row_bytes)
        self._training.reset(largest, [])
        return self._training.storage(largest)

    def updated_rows(self) -> Sequence[int]:
        sizes = {shape.row_bytes for shape in self._shapes}
        return sorted(size for size in sizes if size & (size - 1) == 0)

    def cases(self) -> Iterator[Case]:
        for case in self.options.cases(self.backend):
            problem = agree(self._why_no_room(case))
            if problem is None:
                yield case
            else:
                self.write("left_out", what=case.title, problem=problem)

    def _why_no_room(self, case: Case) -> str | None:
        """Return why a case does not fit into this GPU's memory beside what graphs hold, or None."""
        if self.backend != "cuda":
            return None
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        gradients = num_sets(case.config) * 2 * case.config.output_bytes  # and the reference's
        need = self._training.room(case.config, case.optimizer, self._methods) + gradients
        if need <= free:
            return None
        return (
            f"needs about {need / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free; fewer --rows or --methods help"
        )

    def prepare(self, case: Case) -> Backward:
        config, world = case.config, self.world
        sets = [
            draw_lookups(config, case.distribution, seed=1_000_003 * world.rank + 101 * number + 7, device=self.device)
            for number in range(num_sets(config))
        ]
        # FBGEMM comes first: what it allocates for tables is given up before others need room for states.
        methods, fbgemm = self._methods, None
        if any(name.startswith("fbgemm") for name in methods):
            given = (config, case.optimizer, self._training.storage(config), sets)
            fbgemm, problem = self.attempt(lambda: Fbgemm(*given, is_gpu=self.backend == "cuda"))
            if problem is not None:
                methods, fbgemm = without_fbgemm(methods), None
                self.write("left_out", what=f"{case.title}, FBGEMM", problem=problem)
        return Backward(world, case, methods, self._training, sets, fbgemm, self.ceilings)

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return tables(lines, BASELINES)

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the shares of the bound that each method reaches."""
        draw(lines, path)


main = functools.partial(run_benchmark, EmbeddingBackward)
