"""Benchmark of embedding_all_to_all: persistent-ops bench embedding_all_to_all [OPTIONS]. See README.md beside it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import harness.experiment
import torch
from embedding.backward_configs import forward_moves
from embedding.backward_inputs import count_touched
from embedding.check import check_methods
from embedding.configs import CONFIGS, Config
from embedding.inputs import DISTRIBUTIONS, Tables, draw_lookups, num_sets
from embedding.methods import EXCHANGING, LABELS, METHODS, UNFUSED, Methods, make_plan, plan_key
from embedding.options import add_options, check_batches, distributions_of, sized, wires_of
from harness.check import bits_differ, poisoned, replay_differs
from harness.command import names, run_benchmark
from harness.experiment import Experiment, Trial
from harness.figures import draw_bars, figure, legend
from harness.report import SPEEDUP, case_table, fastest, times_as_long
from harness.timing import Subject
from harness.tuning import refusal, tuned
from harness.world import chosen_backend

import persistent_ops as po
from persistent_ops.ops.embedding.plan import OPERATOR
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather
from persistent_ops.testing.record import pes_text, select, unique, us_text
from persistent_ops.testing.timing import seconds_of

_HOST_COST_CALLS = 200
_SCHEDULES = {"fused": "communication-aware", "oblivious": "oblivious"}
_Line = dict[str, Any]
_Case = tuple[str, Config]


@dataclass(frozen=True)
class Options(harness.experiment.Options):
    """The options of a run; see the command line's help."""

    methods: tuple[str, ...] = METHODS
    configs: tuple[str, ...] = tuple(CONFIGS)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    skew_trials: int = 15
    rows: int | None = None
    wires: tuple[str, ...] = ("fp32",)

    def shapes(self, backend: str) -> list[Config]:
        """Return the configs in the sizes of a backend."""
        return [shape for name in self.configs for shape in sized(CONFIGS[name], backend, self.rows, self.wires)]


class Exchange(Trial):
    """One config with one distribution of its indices: the methods, each with every set of lookups in turn."""

    def __init__(self, world: World, options: Options, case: _Case, tables: Tables) -> None:
        distribution, config = case
        if config.batch % world.size:
            raise ValueError(f"{config.name}: the batch of {config.batch} does not divide over {world.size} PEs")
        self._world = world
        self.fields = {"config": config.name, "shape": dataclasses.asdict(config), "distribution": distribution}
        self.methods = options.methods
        device = world.backend.device
        sets = [
            draw_lookups(config, distribution, seed=1_000_003 * world.rank + 101 * number + 7, device=device)
            for number in range(num_sets(config))
        ]
        self._moves = forward_moves(config, world.size, rows=count_touched(config, sets).rows)
        self.moved = (self._moves.read, self._moves.sent)
        out = po.empty(config.batch // world.size, world.size * config.tables * config.dim, dtype=config.wire_dtype)
        self._shaped = Methods(world, config, tables.of(config), sets, out)

    def calls(self, name: str) -> list[Callable[[], Any]]:
        return [functools.partial(self._shaped.run, name, lookups) for lookups in self._shaped.sets]

    def check(self) -> dict[str, Any]:
        return {"sets": len(self._shaped.sets), **check_methods(self._world, self._shaped)}

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare the graph of the fused operator with its plain call on the last set."""
        call = functools.partial(self._shaped.run, "fused", self._shaped.sets[-1])
        if "fused" in subjects and replay_differs(self._world, self._shaped.out, call, subjects["fused"]):
            return ["fused, a replay gives other bits than a call"]
        return []

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        config = self._shaped.config
        sent = config.sent_bytes(self._world.size) if name in EXCHANGING else 0
        return {"sent_bytes": sent, "read_bytes": config.read_bytes, "memory_bytes": self._moves.read}

    def problem_of(self, name: str, tuning: Any) -> str | None:
        shaped, world, schedule = self._shaped, self._world, _SCHEDULES[name].replace("-", "_")
        inputs = (shaped.config, shaped.weights, shaped.sets[0])
        key = plan_key(world, world.team, *inputs, tuning=tuning, schedule=schedule)
        return refusal(lambda: make_plan(world, key, shaped.weights))

    def check_tuned(self, name: str) -> list[str]:
        """Compare the bits with those under the default Tuning."""
        call = functools.partial(self._shaped.run, name, self._shaped.sets[0])
        with tuned(self._world, OPERATOR, None):
            expected = poisoned(self._world, self._shaped.out, call)
        is_wrong = bits_differ(poisoned(self._world, self._shaped.out, call), expected)
        return [f"{name}, other bits than the default's"] if is_wrong else []

    def close(self) -> None:
        po.free(self._shaped.out)


class EmbeddingAllToAll(Experiment[_Case]):
    """Pooling and exchange, by config and distribution of the indices."""

    name = "embedding_all_to_all"
    labels = LABELS
    case_field = "config"
    quick_help = "few rounds, and uniform indices"
    operator = OPERATOR
    tuned_methods = ("fused",)
    tunable = tuple(_SCHEDULES)
    knobs: ClassVar = {"occupancy": ("work_groups", ()), "slice": ("slice_samples", (1, 2, 4, 8, 16, 32))}
    correct = (
        "correct: fused agrees with unfused (largest relative difference {largest_difference:.2g}); its bits repeat, "
        "also in the oblivious order, in graphs and without the exchange"
    )
    preparing = "tables and ceilings"
    store_bytes: ClassVar[Mapping[str, int]] = {"cuda": 512 << 20, "host": 1 << 20}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add_options(parser, CONFIGS, "100000; host 1000")

    @classmethod
    def read_options(cls, arguments: argparse.Namespace, worlds: Sequence[int], common: dict[str, Any]) -> Options:
        options = Options(
            **common,
            configs=names("--configs", arguments.configs, CONFIGS),
            distributions=distributions_of(arguments),
            skew_trials=5 if arguments.quick else 15,
            rows=arguments.rows,
            wires=wires_of(arguments),
        )
        check_batches(options.shapes(chosen_backend(arguments.backend)), worlds)
        return options

    @classmethod
    def result_bytes(cls, options: Options, backend: str) -> int:
        return max(shape.output_bytes for shape in options.shapes(backend))

    # ---- on a PE -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        self._shapes = self.options.shapes(self.backend)
        self._tables = Tables(self._shapes, self.device, self.world.rank)

    def source(self) -> torch.Tensor:
        return self._tables.of(max(self._shapes, key=lambda shape: shape.tables * shape.rows * shape.row_bytes))

    def cases(self) -> Iterable[_Case]:
        return [(distribution, config) for distribution in self.options.distributions for config in self._shapes]

    def prepare(self, case: _Case) -> Exchange:
        return Exchange(self.world, self.options, case, self._tables)

    def after_times(self, trial: Exchange, us: Mapping[str, float]) -> None:
        """Record how far the PEs' times of single launches are apart when all begin together."""
        for name in _SCHEDULES if self.options.skew_trials else ():
            if name not in us:
                continue
            subject = trial.subject(self.world, name, trial.calls(name)[:1])
            own = [seconds_of(subject.replay) for _ in range(self.options.skew_trials)]
            everyone = gather(own)
            trials = list(zip(*everyone, strict=True))
            self.write(
                "skew",
                **trial.fields,
                method=name,
                us=statistics.median(max(each) for each in trials) * 1e6,
                skew=statistics.median((max(each) - min(each)) / statistics.median(each) for each in trials),
                us_by_pe=[statistics.median(each) * 1e6 for each in everyone],
                seconds_by_pe_and_trial=everyone,
            )

    def end(self) -> None:
        if self.backend == "cuda":
            self.write("host_cost", us_per_call=self._host_cost())

    def _host_cost(self) -> dict[str, float]:
        """Return the host's microseconds per plain call, by number of tables; the slowest PE's. Nothing waits."""
        costs, world = {}, self.world
        batch = 4 * world.size
        for num_tables in (4, 26):
            weights = [torch.randn(100, 64, device=self.device) for _ in range(num_tables)]
            indices = torch.zeros(num_tables * batch, dtype=torch.int64, device=self.device)
            offsets = torch.arange(num_tables * batch + 1, dtype=torch.int64, device=self.device)
            samples = []
            for _ in range(4):  # the first one warms up
                world.barrier()
                begin = time.perf_counter()
                for _ in range(_HOST_COST_CALLS):
                    po.embedding_all_to_all(weights, indices, offsets)
                samples.append((time.perf_counter() - begin) / _HOST_COST_CALLS * 1e6)
                world.check()
            costs[f"T={num_tables}"] = max(gather(statistics.median(samples[1:])))
        return costs

    # ---- what is shown -----------------------------------------------------------------------------------------------

    @classmethod
    def tables(cls, lines: Sequence[_Line]) -> Iterable[Any]:
        for line in select(lines, "host_cost"):
            costs = ", ".join(f"{name}: {us:.1f}" for name, us in line["us_per_call"].items())
            yield f"host time of a plain call, {pes_text(line['pes'])} (us): {costs}"
        if select(lines, "skew"):
            yield _schedule_table(lines)
        pes = max(unique(select(lines, "run"), "pes"))
        for distribution in unique(select(lines, "time"), "distribution"):
            yield _time_table(lines, distribution, pes)

    @classmethod
    def draw(cls, lines: Sequence[_Line], path: Path) -> None:
        """Draw the normalized times, and the two schedules with their skew, as the paper's figures 8 and 14 do."""
        pes = max(unique(select(lines, "run"), "pes"))
        times, skews = _groups(select(lines, "time", pes=pes)), _groups(select(lines, "skew"))
        width = 1.4 * max(6, len(_groups(select(lines, "time"))), len(skews))
        with figure(lines, path, size=(width, 9.0), rows=2) as (_, (top, bottom)):
            _draw_times(top, times, pes)
            _draw_schedules(bottom, skews)


def _time_table(lines: Sequence[_Line], distribution: str, pes: int) -> Any:
    is_gpu = any(line["backend"] == "cuda" for line in select(lines, "run"))
    blocks = []
    for config in unique(select(lines, "time", distribution=distribution, pes=pes), "config"):
        rows = select(lines, "time", distribution=distribution, pes=pes, config=config)
        unfused, cells = fastest(rows, UNFUSED), []
        for row in rows:
            limits = ("limit_us", "h200_limit_us") if is_gpu else ("limit_us",)
            cells.append(
                [
                    row["label"],
                    us_text(row["us"]),
                    us_text(row["us_p95"]),
                    f"{row['sent_bytes'] / 1e6:.3g}" if row["sent_bytes"] else "-",
                    *[f"{row['us'] / row[limit]:.2f}" for limit in limits],
                    times_as_long(unfused if row["sent_bytes"] else None, row),
                ]
            )
        blocks.append(([config, f"{us_text(rows[0]['limit_us'])} us {rows[0]['limit_by']}"], cells))
    return case_table(
        f"{distribution} indices, {pes_text(pes)}: time per call, sent per PE, and the limit of this run's ceilings"
        + (" and of those measured on 8x H200" if is_gpu else ""),
        ("config", "method"),
        ("us", "p95", "MB sent", "time /\nlimit", *(("time /\nH200's",) if is_gpu else ()), SPEEDUP),
        blocks,
    )


def _schedule_table(lines: Sequence[_Line]) -> Any:
    heads, rows = [], []
    for aware in select(lines, "skew", method="fused"):
        key = {name: aware[name] for name in ("pes", "distribution", "config")}
        cells = [aware["distribution"], aware["config"], us_text(aware["us"]), f"{aware['skew']:.1%}"]
        for other in select(lines, "skew", method="oblivious", **key):
            cells += [us_text(other["us"]), f"{other['skew']:.1%}", times_as_long(other, aware)]
        heads.append(str(aware["pes"]))
        rows.append(cells)
    return case_table(
        "communication-aware (ca) against oblivious (ob) order: single launches that all PEs begin together",
        ("PEs", "indices", "config"),
        ("ca us", "ca skew", "ob us", "ob skew", "ob / ca"),
        [(heads, rows)],
    )


def _groups(lines: Sequence[_Line]) -> dict[tuple[str, str, int], dict[str, _Line]]:
    """Return the lines by (config, distribution, PEs), then by method."""
    groups: dict[tuple[str, str, int], dict[str, _Line]] = {}
    for line in lines:
        groups.setdefault((line["config"], line["distribution"], line["pes"]), {})[line["method"]] = line
    return groups


def _draw_times(axes: Any, groups: Mapping[tuple[str, str, int], dict[str, _Line]], pes: int) -> None:
    series: dict[str, dict[int, float]] = {}
    # The others are divided by this one.
    bases = [
        fastest(r.values(), UNFUSED[:1]) or fastest(r.values(), UNFUSED[1:]) or next(iter(r.values()))
        for r in groups.values()
    ]
    for name in ("fused", *UNFUSED):
        for place, (rows, base) in enumerate(zip(groups.values(), bases, strict=True)):
            if name in rows:
                series.setdefault(rows[name]["label"], {})[place] = rows[name]["us"] / base["us"]
    draw_bars(axes, [f"{config}\n{distribution}" for config, distribution, _ in groups], series, width=0.8)
    for place, base in enumerate(bases):
        axes.hlines(base["limit_us"] / base["us"], place - 0.4, place + 0.4, "black", "dotted")
    axes.set_ylabel("time / unfused with the same kernel")
    axes.set_title(f"Fused and unfused on {pes_text(pes)} (dotted: limit of the hardware)")
    legend(axes)


def _draw_schedules(axes: Any, groups: Mapping[tuple[str, str, int], dict[str, _Line]]) -> None:
    series: dict[str, dict[int, float]] = {}
    whiskers: dict[str, list[list[float]]] = {}
    for name, label in _SCHEDULES.items():
        series[label], whiskers[label] = {}, [[], []]
        for place, rows in enumerate(groups.values()):
            if name in rows:
                base = rows.get("oblivious", rows[name])["us"]
                by_pe = [us / base for us in rows[name]["us_by_pe"]]
                height = series[label][place] = rows[name]["us"] / base
                whiskers[label][0].append(max(0.0, height - min(by_pe)))
                whiskers[label][1].append(max(0.0, max(by_pe) - height))
    places = [f"{config}\n{distribution}, {pes_text(pes)}" for config, distribution, pes in groups]
    draw_bars(axes, places, series, width=0.8, errors=whiskers, rotation=0 if len(groups) < 13 else 90)
    axes.set_ylabel("time / oblivious order")
    axes.set_title("Order of the tasks; whiskers: the fastest and the slowest PE of a launch that all begin together")
    legend(axes)


main = functools.partial(run_benchmark, EmbeddingAllToAll)
