"""Benchmark of the embedding part of a DLRM's training step: persistent-ops bench dlrm_embedding [OPTIONS].

See README.md beside it. A step sends the lookups of each PE's own samples to MLPerf's 26 tables and pools them. It
updates rows by a gradient of the pooled rows. It runs through `po.nn.ShardedEmbeddingBagCollection`, and, with the same
placement, through torch's or FBGEMM's tables and torch.distributed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
from embedding.backward_inputs import EPS, RATE
from embedding.options import available, without_fbgemm
from embedding_step.cases import CASES, Case, Sizes, sizes_of
from embedding_step.lookups import NUM_SETS
from embedding_step.report import draw, tables
from embedding_step.tables import Memory, StepTables, layout_for, room_of
from embedding_step.trial import StepTrial
from harness.command import at_least, names, run_benchmark
from harness.experiment import Experiment
from harness.world import chosen_backend

from persistent_ops.nn import TablePlacement
from persistent_ops.nn.table_layout import Layout
from persistent_ops.testing.exchanged_embedding import ExchangedEmbedding, own_slots
from persistent_ops.testing.fbgemm_embedding import FbgemmEmbedding, fbgemm_version, fused_tables
from persistent_ops.testing.pes import agree, gather
from persistent_ops.testing.row_update import RowUpdate

LABELS = {
    "fused": "fused",
    "fused_eager": "fused, eager",
    "fused_ahead": "fused, eager, lookups ahead",
    "fbgemm": "{collective} + FBGEMM",
    "fbgemm_eager": "{collective} + FBGEMM, eager",
    "torch_eager": "{collective} + torch, eager",
}
METHODS = tuple(LABELS)
_OTHERS = ("fbgemm", "fbgemm_eager", "torch_eager")
BASELINES = {"fused": _OTHERS, "fused_eager": _OTHERS, "fused_ahead": _OTHERS}
PLACEMENTS = ("auto", "table_wise", "model")
_MODEL_SLICES = {20: 4}  # of launch/dlrm_train.py: 100 of 214 lookups are in this table
_QUICK_ROWS = 100_000
_TORCH_COPIES = 6  # of the gradients of all lookups, which its update has at a time


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help.

    Attributes:
        replicated_rows: tables of at most so many are on every PE, whatever the placement.
        is_beside: whether exchanges run beside other launches, where there is room.
        smallest_world: of those that are run.
    """

    methods: tuple[str, ...] = METHODS
    calls: int = 4
    cases: tuple[str, ...] = tuple(CASES)
    batch: int | None = None
    max_rows: int | None = None
    placement: str = "auto"
    replicated_rows: int = 0
    is_beside: bool = False
    smallest_world: int = 1


class DlrmEmbedding(Experiment[Case]):
    """Exchange, forward pass, backward pass and update, by optimizer, dtype and distribution of the indices."""

    name = "dlrm_embedding"
    labels = LABELS
    quick_help = f"few rounds, the first case, tables of at most {_QUICK_ROWS} rows"
    correct = (
        "correct: pooled rows, updated rows and states are what fp64 gives, at most {worst_share:.2g} of what rounding "
        "explains away (the baselines' {worst_share_of_baselines:.2g}); the package leaves the same bits eager, ahead "
        "and in a graph"
    )
    preparing = "ceilings"
    store_bytes: ClassVar[Mapping[str, int]] = {"cuda": 512 << 20, "host": 1 << 20}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", help=f"comma-separated, of {','.join(CASES)} (default: all)")
        parser.add_argument("--max-rows", type=int, help="most rows of a table (default: MLPerf's; quick, host fewer)")
        parser.add_argument("--batch", type=int, help="samples of the global batch (default 65536; host fewer)")
        parser.add_argument("--placement", choices=PLACEMENTS, default="auto", help="of tables, also for the baselines")
        parser.add_argument("--replicated-rows", type=int, default=0, help="replicate tables of at most this many rows")
        parser.add_argument(
            "--beside", action="store_true", help="lookups ahead travel beside other launches, if both fit"
        )
        parser.add_argument(
            "--calls", type=int, default=Options.calls, help="least number of steps in a replay (default 4)"
        )

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        at_least("--max-rows, --batch, --calls", [arguments.max_rows, arguments.batch, arguments.calls])
        cases, rows = names("--cases", arguments.cases, CASES), arguments.max_rows
        if arguments.quick:
            cases = cases if arguments.cases else cases[:1]
            rows = _QUICK_ROWS if rows is None and chosen_backend(arguments.backend) == "cuda" else rows
        if arguments.replicated_rows and any(CASES[name].dtype == "fp16" for name in cases):
            raise ValueError("--replicated-rows: tables of fp16 cannot be on every PE; leave it, or their --cases, out")
        if arguments.beside and len({CASES[name].of_tables for name in cases}) > 1:
            raise ValueError(
                "--beside: expected --cases of one optimizer and dtype: it is agreed on for kernels so far"
            )
        return Options(
            **common,
            replicated_rows=arguments.replicated_rows,
            is_beside=arguments.beside,
            calls=arguments.calls,
            cases=cases,
            batch=arguments.batch,
            max_rows=rows,
            placement=arguments.placement,
            smallest_world=min(worlds),
        )

    @classmethod
    def result_bytes(cls, options: Options, backend: str) -> int:
        """Return room for lookups and gradients on their way, and for results, which graphs keep."""
        sizes = sizes_of(backend, options.batch, options.max_rows)
        cases = [CASES[name] for name in options.cases]
        need = 0
        for case in {case.of_tables: case for case in cases}.values():
            result = sizes.batch * len(sizes.rows) * sizes.dim * case.wire_dtype().itemsize
            lookups = 8 * sizes.batch * (sum(sizes.hotness) + len(sizes.rows))
            need += 2 * lookups + 2 * result
        for case in cases:
            result = sizes.batch * len(sizes.rows) * sizes.dim * case.wire_dtype().itemsize
            need += (max(NUM_SETS, options.calls) + 2) * -(-result // options.smallest_world)
        return need

    # ---- on a PE -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        options = self.options
        self._sizes: Sizes = sizes_of(self.backend, options.batch, options.max_rows)
        self._methods = available(self, options.methods)
        if self._methods != without_fbgemm(self._methods):
            self.write("library", name="FBGEMM", version=fbgemm_version())
        self._made: tuple[Case, StepTables] | None = None
        self._memory: Memory | None = None

    def updated_rows(self) -> Sequence[int]:
        return (4 * self._sizes.dim,)

    def cases(self) -> Iterator[Case]:
        """Yield the cases that fit into memory; cases of the same tables follow one another."""
        self._layouts: dict[Case, Layout] = {}
        rooms, fit = [(0, 0)], []
        for case in [CASES[name] for name in self.options.cases]:
            if case.of_tables not in self._layouts:
                self._layouts[case.of_tables] = layout_for(self.world, case, self._sizes, self._placement(case))
                self._tell_placement(case, self._layouts[case.of_tables])
            room = room_of(self._layouts[case.of_tables], case, self.world.rank)
            problem = agree(self._why_no_room(room))
            if problem is None:
                rooms.append(room)
                fit.append(case)
            else:
                self.write("left_out", what=case.name, problem=problem)
        self._memory = Memory(max(room[0] for room in rooms), max(room[1] for room in rooms), self.device)
        yield from fit

    def _placement(self, case: Case) -> dict[str, TablePlacement]:
        chosen = {}
        for number, config in enumerate(case.tables(self._sizes)):
            if config.num_embeddings <= self.options.replicated_rows:
                chosen[config.name] = TablePlacement("replicated")
            elif self.options.placement == "model" and number in _MODEL_SLICES:
                chosen[config.name] = TablePlacement("column_wise", _MODEL_SLICES[number])
            else:
                chosen[config.name] = TablePlacement("auto" if self.options.placement == "auto" else "table_wise")
        return chosen

    def _tell_placement(self, case: Case, layout: Layout) -> None:
        kinds: dict[str, list[str]] = {}
        for number, (config, placement) in enumerate(zip(layout.configs, layout.placements, strict=True)):
            sliced = f" x {placement.num_slices}" if placement.num_slices > 1 else ""
            owners = "" if layout.is_replicated(number) else f" on {','.join(map(str, layout.owners[number]))}"
            kinds.setdefault(f"{placement.kind}{sliced}{owners}", []).append(config.name)
        text = "; ".join(f"{kind}: {' '.join(tables)}" for kind, tables in kinds.items())
        told = case.of_tables.name.rpartition("_")[0]
        rooms = gather(sum(room_of(layout, case, self.world.rank)))
        self.write("placement", tables_of=told, text=text, bytes=rooms, loads=layout.loads, unit=layout.costs.unit)
        self.progress(f"  {told}: {text}; {', '.join(f'{room / 1e9:.1f}' for room in rooms)} GB of each PE")

    def _why_no_room(self, room: tuple[int, int]) -> str | None:
        """Return why tables do not fit into this GPU's memory, or None."""
        if self.backend != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info()
        sizes = self._sizes
        result = sizes.batch * len(sizes.rows) * sizes.dim * 4 / self.world.size
        lookups = sizes.batch * sum(sizes.hotness) / self.world.size
        has_torch = any(name.startswith("torch") for name in self._methods)
        need = sum(room) + 12 * result + 40 * lookups + has_torch * _TORCH_COPIES * lookups * sizes.dim * 4
        if need <= free:
            return None
        return (
            f"needs about {need / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free; fewer --max-rows or --methods "
            "(torch_eager takes the most) help"
        )

    def prepare(self, case: Case) -> StepTrial:
        if self._made is None or self._made[0] != case.of_tables:
            self._made = None
            self._free()
            assert self._memory is not None
            made = StepTables(self.world, case, self._sizes, self._layouts[case.of_tables], self._memory)
            self._made = (case.of_tables, made)
            made.reset()
        step = self._made[1]
        methods, baselines = self._methods, {}
        for name, make in (("fbgemm", self._fbgemm), ("torch", self._torch)):
            if not any(method.startswith(name) for method in methods):
                continue
            embedding, problem = self.attempt(partial(make, case, step))
            if problem is None:
                baselines[name] = embedding
            else:
                methods = tuple(method for method in methods if not method.startswith(name))
                self.write("left_out", what=f"{case.name}, {name}", problem=problem)
        is_beside = self.options.is_beside
        return StepTrial(self.world, case, self._sizes, methods, step, baselines, self.ceilings, is_beside=is_beside)

    def _fbgemm(self, case: Case, step: StepTables) -> FbgemmEmbedding:
        spread, _ = own_slots(step.layout, self.world.rank)
        fused = fused_tables(
            [(step.layout.configs[slot.table].num_embeddings, slot.width) for slot in spread],
            case.optimizer,
            RATE,
            eps=EPS,
            dtype=case.torch_dtype(),
            wire_dtype=case.wire_dtype(),
            device=self.device,
            memory=step.vectors,
        )
        made = FbgemmEmbedding(step.collection, fused, RATE, self._update(case, {}), wire_dtype=case.wire_dtype())
        made.try_out()
        return made

    def _torch(self, case: Case, step: StepTables) -> ExchangedEmbedding:
        update = self._update(case, step.states_by_address())
        return ExchangedEmbedding(step.collection, update, wire_dtype=case.wire_dtype(), shares_memory=True)

    def _update(self, case: Case, states: Mapping[int, torch.Tensor]) -> Any:
        return partial(RowUpdate, optimizer=case.optimizer, lr=RATE, eps=EPS, width=self._sizes.dim, states=states)

    def after_times(self, trial: StepTrial, us: Mapping[str, float]) -> None:
        """Measure the phases of each method's steps, once for graphs and eager ones."""
        for name in ("fused_eager", "fbgemm_eager", "torch_eager"):
            if name in us:
                self.write(
                    "phases",
                    case=trial.fields["case"],
                    method=name,
                    label=self.label_on(name, self.backend),
                    us=trial.phases(name, self.options.rounds),
                )

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return tables(lines, BASELINES)

    @classmethod
    def draw(cls, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw the shares of the bound that each method reaches."""
        draw(lines, path)


main = partial(run_benchmark, DlrmEmbedding)
