"""The whole DLRM training: against one process, in another world, with other tables, from the command line."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import dlrm_train
import numpy as np
import pytest
import tables
import torch
from dlrm.batches import Batches
from dlrm.compare import disagreements
from dlrm.data import open_data
from dlrm.embedding import PlainEmbedding
from dlrm.model import DenseModel
from dlrm.options import MODELS, Options
from dlrm.schedule import Schedule
from dlrm.summary import print_summary, problems
from dlrm.table_memory import check_memory, table_bytes
from dlrm.training import Plan, Training
from dlrm.way import placement_of
from dlrm.workload import run_pe
from dlrm_cases import drawn_log, write_day, write_raw_bytes
from kept_pes import in_processes
from PIL import Image
from rich.console import Console
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.nn import TablePlacement
from persistent_ops.testing.dlrm_batch import DLRM_POOLING, DLRM_ROWS
from persistent_ops.testing.fbgemm_embedding import why_no_fbgemm
from persistent_ops.testing.machine import available_memory
from persistent_ops.testing.record import append_line, what_ran

CPU = torch.device("cpu")
RATES = {"learning_rate": 0.02, "table_learning_rate": 0.1}

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def options_of(output: Path, **changes: Any) -> Options:
    """Return options of a small training whose batches no number of PEs divides; 11 of them in an epoch."""
    small = {"batch": 61, "samples": 661, "evaluation_samples": 300, "evaluate_every": 4, "checkpoint_every": 3}
    given = {**MODELS["small"].defaults, **RATES, **small, "output": str(output), "backend": "host", **changes}
    return Options(**given)


def one_process(options: Options, **more: Any) -> Training:
    """Return the same training with embedding_bag and torch.optim alone."""
    data, dim = open_data(options), options.preset.dim
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, eps=1e-8),
    }
    make, rows = kinds[options.optimizer], data.train.num_rows
    tables = PlainEmbedding(
        rows, (dim,) * len(rows), lambda each: make(each, lr=options.table_learning_rate), seed=options.seed
    )
    model = DenseModel(options.sizes(len(rows), data.train.num_dense), seed=options.seed)
    return Training(
        model,
        tables,
        make(model.parameters(), lr=options.learning_rate),
        Batches(data.train, batch_size=options.batch, seed=options.seed),
        evaluation=Batches(data.evaluation, batch_size=options.batch),
        **more,
    )


# ---- against one process -------------------------------------------------------------------------------------------


@pytest.mark.host
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"replicated_rows": 20, "precision": "bf16"}),  # pooled rows travel in bf16 too
        (2, {"placement": "auto"}),
        (3, {"replicated_rows": 50, "interaction": "dot", "optimizer": "sgd"}),
    ],
    ids=["bf16", "auto", "dot"],
)
def test_losses_are_those_of_one_process(world: int, changes: dict[str, Any], tmp_path: Path) -> None:
    options = options_of(tmp_path, steps=10, **changes)
    report = in_processes(run_pe, world, options, timeout=200)[0]
    expected = one_process(options, precision=options.dense_dtype).run(Plan(most_steps=10, evaluate_every=4))
    assert len(report["losses"]) == 10 and len(set(report["losses"])) == 10
    tolerance = 1e-5 if options.precision == "fp32" else 2e-2
    assert report["losses"] == pytest.approx(expected.losses, rel=tolerance)
    assert [each["step"] for each in report["evaluations"]] == [4, 8, 10]
    assert report["evaluations"][-1]["auc"] == pytest.approx(expected.evaluations[-1]["auc"], abs=1e-3)
    best = open_data(options).best_auc()
    assert best is not None and report["best_auc"] == best
    kinds = [each["kind"] for each in report["placements"].values()]
    if options.placement == "model":
        rows = open_data(options).train.num_rows
        assert kinds == ["replicated" if each <= options.replicated_rows else "table_wise" for each in rows]
    else:
        assert len(kinds) == 4 and "auto" not in kinds


def test_placements(tmp_path: Path) -> None:
    rows = (3, 8192, 8193, *(10_000,) * 17, 50_000)
    whole, copy = TablePlacement(), TablePlacement("replicated")
    for changes, expected in (
        ({}, [whole] * 20 + [TablePlacement("column_wise", 2)]),
        ({"replicated_rows": 8192}, [copy] * 2 + [whole] * 18 + [TablePlacement("column_wise", 2)]),
        ({"replicated_rows": 50_000}, [copy] * 21),
        ({"placement": "table_wise"}, [whole] * 21),
        ({"placement": "auto", "replicated_rows": 3}, [copy] + [TablePlacement("auto")] * 20),
    ):
        found = placement_of(options_of(tmp_path, model="mlperf", **changes), rows)
        assert list(found) == [f"t{number}" for number in range(21)] and list(found.values()) == expected
    assert list(placement_of(options_of(tmp_path, model="mlperf"), rows[:2]).values()) == [whole] * 2


@pytest.mark.host
def test_rows_that_travel_in_the_dense_parts_dtype_lose_nothing(tmp_path: Path) -> None:
    wide, narrow, rounded = (
        in_processes(run_pe, 2, options_of(tmp_path, steps=4, evaluate_every=0, **changes), timeout=200)[0]["losses"]
        for changes in ({"precision": "bf16", "wire": "fp32"}, {"precision": "bf16"}, {"wire": "bf16"})
    )
    assert narrow == wide
    exact = one_process(options_of(tmp_path)).run(Plan(most_steps=4)).losses
    assert rounded == pytest.approx(exact, rel=2e-2)
    assert all(abs(one - other) > 1e-6 for one, other in zip(rounded, exact, strict=True))


@pytest.mark.host
def test_another_number_of_pes_goes_on_under_the_schedule(tmp_path: Path) -> None:
    """Rates rise and fall in a run that is interrupted; both optimizers follow."""
    options = options_of(tmp_path, schedule=Schedule(warmup_steps=3, decay_start=6, decay_steps=6), batch=73)
    in_processes(run_pe, 3, dataclasses.replace(options, steps=5), timeout=200)
    second = in_processes(run_pe, 2, dataclasses.replace(options, steps=12, is_resumed=True), timeout=200)[0]
    assert second["first_step"] == 5 and len(list(tmp_path.glob("step-12.*"))) == 1
    alone = one_process(options)
    groups = [*alone._optimizer.param_groups, *alone._embedding.optimizer.param_groups]
    bases = [group["lr"] for group in groups]
    factors = [1 / 3, 2 / 3, 1, 1, 1, 1, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36, 1 / 36]
    batches = ((alone.batches.read(*divmod(n, 10)), alone.batches.size(n % 10)) for n in range(12))
    steps, losses = alone.steps(batches), []
    for factor in factors:
        for group, base in zip(groups, bases, strict=True):
            group["lr"] = base * factor
        losses.append(float(next(steps)))
    assert second["losses"] == pytest.approx(losses, rel=2e-5)


def test_the_schedule() -> None:
    schedule = Schedule(warmup_steps=4, decay_start=6, decay_steps=4)
    rates = [schedule.rate(2.0, step) for step in range(12)]
    assert rates == pytest.approx([0.5, 1, 1.5, 2, 2, 2, 1.125, 0.5, 0.125, 0.125, 0.125, 0.125])
    assert Schedule().rate(0.3, 10**9) == 0.3
    assert Schedule(decay_steps=10_000).rate(0.001, 20_000) == 1e-7


def test_bf16_and_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = options_of(tmp_path, learning_rate=0.005, table_learning_rate=0.02)
    plan = Plan(most_steps=12, evaluate_every=6)
    exact = one_process(options).run(plan)
    rounded = one_process(options, precision=torch.bfloat16).run(plan)
    assert rounded.losses == pytest.approx(exact.losses, rel=2e-2)
    assert all(abs(one - other) > 1e-6 for one, other in zip(rounded.losses, exact.losses, strict=True))
    assert rounded.evaluations[-1]["loss"] == pytest.approx(exact.evaluations[-1]["loss"], rel=2e-2)
    seen: list[torch.nn.Module] = []

    def without_code(module: torch.nn.Module) -> Any:
        seen.append(module)
        return compiles(module, backend="aot_eager")  # the whole way but for making kernels, which takes a minute

    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", without_code)
    compiled = one_process(options, is_compiled=True)
    assert compiled.run(plan).losses == pytest.approx(exact.losses, rel=1e-5)
    assert [type(each) for each in seen] == [DenseModel]


# ---- order ---------------------------------------------------------------------------------------------------------


class _Noting(PlainEmbedding):
    """Notes what it is asked for, and when its backward pass comes."""

    def __init__(self, rows: Any, dims: Any) -> None:
        super().__init__(rows, dims, lambda tables: torch.optim.SGD(tables, lr=0.1))
        self.calls: list[str] = []

    def input_dist(self, values: torch.Tensor, lengths: torch.Tensor, **more: Any) -> Any:
        self.calls.append("send")
        return super().input_dist(values, lengths, **more)

    def forward(self, features: Any) -> torch.Tensor:
        self.calls.append("pool" if self.training else "evaluate")
        pooled = super().forward(features)
        if pooled.requires_grad:
            pooled.register_hook(lambda _: self.calls.append("update"))
        return pooled


def test_lookups_travel_while_the_dense_part_computes(tmp_path: Path) -> None:
    options = options_of(tmp_path, evaluation_samples=61)
    data = open_data(options)
    rows = data.train.num_rows
    embedding, model = _Noting(rows, (16,) * len(rows)), DenseModel(options.sizes(len(rows), data.train.num_dense))
    batches = [Batches(part, batch_size=61) for part in (data.train, data.evaluation)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, embedding, optimizer, batches[0], evaluation=batches[1])
    training.run(Plan(most_steps=4, evaluate_every=3))
    step, last, evaluation = ["pool", "send", "update"], ["pool", "update"], ["send", "evaluate"]
    assert embedding.calls == ["send", *step, *step, *last, *evaluation, "send", *last, *evaluation]


def test_what_order_refuses() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        po.nn.order_all_reduce(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


# ---- beside other tables -------------------------------------------------------------------------------------------


@pytest.mark.host
def test_other_tables_have_the_same_losses(tmp_path: Path) -> None:
    """At rates that make losses leap: in 30 steps from first rows alone they would come to differ by more than 1e-5."""
    rates = {"learning_rate": 0.15, "table_learning_rate": 0.15}
    options = options_of(tmp_path, compare_steps=30, replicated_rows=20, **rates)
    report = in_processes(run_pe, 2, options, timeout=200)[0]
    compared = report["compared"]
    assert "torch + gloo" in compared["losses"] and not problems(report)
    assert compared["steps"] == 24, "but for the first round"
    assert all(len(set(each)) == 15 and max(each) > 10 for each in compared["losses"].values())
    assert disagreements(compared)["torch + gloo"] < 3e-6
    assert set(compared["seconds"]) == set(compared["losses"])
    assert len(compared["losses"]) + len(compared["left_out"]) == 3
    for line in compared["left_out"]:
        assert line.startswith("FBGEMM + gloo is left out: PE 0: it cannot be imported (ModuleNotFoundError")
    text = _printed(report)
    assert "the losses of 15 steps agree" in text and "torch + gloo" in text
    assert "24 steps of each way are timed, eager" in text
    _check_documents_table(report, tmp_path)
    compared["losses"]["torch + gloo"][3] *= 1.1
    assert "losses of torch + gloo differ from persistent_ops's by 0.1 (tolerance 1e-05)" in problems(report)
    assert "WRONG" in _printed(report)


def _check_documents_table(report: dict[str, Any], folder: Path) -> None:
    """A record of the comparison, as --json appends it, becomes a table of the documents."""
    append_line(folder / "compared.jsonl", {**what_ran("python launch/dlrm_train.py --compare 30 --json x"), **report})
    (found,) = tables.read_runs(folder)
    assert (found.subject, found.command) == ("dlrm_train", "python launch/dlrm_train.py --compare 30")
    assert tables.problems(found) == ["ran without a GPU"]
    shown = tables._show([found], folder)
    assert "| torch + gloo |" in shown and "ms per step" in shown and "batch 61" in shown
    report["compared"]["losses"]["torch + gloo"][3] *= 1.1
    append_line(folder / "compared.jsonl", {**what_ran("python launch/dlrm_train.py"), **report})
    assert "losses of torch + gloo differ" in [
        text for run in tables.read_runs(folder) for text in tables.problems(run)
    ]
    report["compared"]["losses"]["torch + gloo"][3] /= 1.1


# ---- data ----------------------------------------------------------------------------------------------------------


def test_formats(tmp_path: Path) -> None:
    log = drawn_log(40, DLRM_POOLING)
    for day in (0, 1):
        write_day(tmp_path, day, log)
    write_raw_bytes(tmp_path / "log.bin", log)
    fields = [["1", *["2"] * 13, *[f"{n:x}" for n in range(26)]], ["0", *["3"] * 13, *["ff"] * 26]]
    (tmp_path / "log.txt").write_text("".join("\t".join(line) + "\n" for line in fields * 20))
    rows = tuple(min(each, 50) for each in DLRM_ROWS)
    for options, sizes, hotness in (
        ({"format": "npy", "data": str(tmp_path), "days": 2}, (40, 20), DLRM_POOLING),
        ({"format": "raw", "data": str(tmp_path / "log.bin")}, (30, 10), DLRM_POOLING),
        ({"format": "criteo", "data": str(tmp_path / "log.txt")}, (30, 10), (1,) * 26),
    ):
        data = open_data(options_of(tmp_path, evaluation_samples=10, max_rows=50, **options))
        assert (data.train.num_samples, data.evaluation.num_samples) == sizes
        assert data.train.hotness == data.evaluation.hotness == hotness and data.train.num_rows == rows
        assert data.best_auc() is None
        found = data.evaluation.read(np.arange(3)).labels
        expected = log.labels[30:33] if options["format"] == "raw" else log.labels[:3]
        assert found.tolist() == ([1, 0, 1] if options["format"] == "criteo" else expected.tolist())


@pytest.mark.host
def test_the_default_training_comes_within_a_hundredth_of_the_best_auc(tmp_path: Path) -> None:
    options = Options(**{**MODELS["small"].defaults, "output": str(tmp_path), "backend": "host", "evaluate_every": 0})
    report = in_processes(run_pe, 2, options, timeout=280)[0]
    assert not problems(report)
    (evaluation,) = report["evaluations"]
    assert report["best_auc"] - 0.01 < evaluation["auc"] < report["best_auc"] + 0.003, (
        "none knows more than the teacher"
    )


# ---- the verdict and the command line ------------------------------------------------------------------------------


def _printed(report: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_summary(report, console)
    return " ".join(console.export_text().split())


def test_an_auc_below_the_best_is_wrong(tmp_path: Path) -> None:
    report: dict[str, Any] = {
        "options": dataclasses.asdict(options_of(tmp_path)),
        "source": "a log",
        "num_rows": [5, 6],
        "hotness": [1, 2],
        "num_samples": 900,
        "num_evaluated": 100,
        "batches": "9 batches",
        "backend": "cuda",
        "hardware": ["a GPU", "a GPU"],
        "shares_gpu": False,
        "losses": [0.7, 0.6, 0.5],
        "first_step": 1,
        "evaluations": [{"step": 3, "auc": 0.8, "loss": 0.5}],
        "best_auc": 0.809,
        "timed_steps": 2,
        "seconds": 0.5,
    }
    assert not problems(report)
    for part in (
        "2 x a GPU",
        "900 samples train",
        "3 lookups a sample",
        "244 samples/s, 250.00 ms per step",
        "correct",
    ):
        assert part in _printed(report)
    captured = report | {"options": report["options"] | {"is_captured": True}, "num_replays": 7}
    assert "7 of this run's steps were replays of a CUDA graph" in _printed(captured)
    assert "replays" not in _printed(report)
    low = report | {"evaluations": [{"step": 3, "auc": 0.798, "loss": 0.5}]}
    assert problems(low) == ["AUC 0.7980 is more than 0.01 below the best possible one, 0.8090"]
    assert "WRONG: AUC 0.7980" in _printed(low)
    assert not problems(low | {"options": report["options"] | {"steps": 3}})
    nothing = report | {"evaluations": [{"step": 3, "auc": math.nan, "loss": 0.5}], "best_auc": math.nan}
    assert not problems(nothing)
    assert "no AUC: what evaluates has clicks alone" in _printed(nothing) and "correct" not in _printed(nothing)
    append_line(tmp_path / "record.jsonl", nothing)
    told = json.loads((tmp_path / "record.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert told["best_auc"] is None and told["evaluations"] == [{"step": 3, "auc": None, "loss": 0.5}]
    assert not problems(low | {"best_auc": None}) and "best possible" not in _printed(low | {"best_auc": None})


@pytest.mark.host
def test_prints_records_and_draws(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, output = tmp_path / "training.jsonl", tmp_path / "out"
    command = ["--backend", "host", "--pes", "2", "--samples", "4000", "--evaluation-samples", "500", "--steps", "3"]
    command += ["--placement", "auto", "--replicated-rows", "3", "--wire", "bf16"]
    assert dlrm_train.main([*command, "--output", str(output), "--json", str(record)]) == 0
    printed = capfd.readouterr()
    assert "Warning" not in printed.err, printed.err  # of any PE
    text = " ".join(printed.out.split())
    for part in (
        "us per step",  # of the tables
        "DLRM-DCNv2 on the host backend: 2 x CPU process",
        "4,000 samples train",
        "in 3 steps",
        "best possible",
    ):
        assert part in text, text
    (line,) = [json.loads(each) for each in record.read_text().splitlines()]
    assert line["placements"]["t1"]["kind"] == "replicated" and line["options"]["wire"] == "bf16"
    assert len(line["losses"]) == 3 and line["command"].startswith("python launch/dlrm_train.py --backend host")
    with Image.open(output / "curves.png") as image:
        assert image.format == "PNG" and image.size[0] > 1000
    assert (output / "latest").read_text().startswith("step-3.")


def _without_room(folder: str) -> list[Any]:
    seen = []
    for changes in ({}, {"optimizer": "rowwise_adagrad"}, {"optimizer": "sgd", "compare_steps": 5}):
        options = options_of(Path(folder), **changes)
        check = functools.partial(check_memory, options, [10, 5])
        needed = table_bytes(options, [10, 5])
        ways = 1 if not options.compare_steps else 2 + (why_no_fbgemm() is None)
        check(available=lambda needed=needed * ways: needed)
        check(available=lambda: None)
        of_one = needed * ways - 1 if po.rank() else None
        seen.append([needed, *error_of(lambda check=check, left=of_one: check(available=lambda: left))[:2]])
    return seen


@pytest.mark.host
def test_tables_without_room_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By all PEs, if one has too little; before the tables are made, as the host's process would be killed."""
    dim = options_of(tmp_path).preset.dim
    of_pes = in_world(_without_room, 2, "host", str(tmp_path))
    assert of_pes[0] == of_pes[1]
    assert [needed for needed, *_ in of_pes[0]] == [15 * dim * 8, 15 * (dim * 4 + 4), 15 * dim * 4]
    for _, kind, told in of_pes[0]:
        assert kind == "ValueError" and "pass a smaller --max-rows, which is 10 now" in told
    needed, left = table_bytes(options_of(tmp_path, model="mlperf"), DLRM_ROWS), available_memory()
    if left is not None and left < needed:
        assert dlrm_train.main(["--backend", "host", "--pes", "1", "--output", str(tmp_path), "--model", "mlperf"]) == 2
        assert "take 209.1 GB where this machine has" in capsys.readouterr().err
