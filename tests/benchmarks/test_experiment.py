"""The harness of the benchmarks: a short benchmark of a separate operator, and what all benchmarks have."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmark_runs import lines_of, run as run_benchmark
from harness.kernels import draw_kernels, kernels_in
from harness.trial import LeftOut

import persistent_ops as po
from persistent_ops.testing.record import read_lines

SOURCE = """
import dataclasses

import torch
from harness.check import bits_differ, poisoned, replay_differs
from harness.command import run_benchmark
from harness.experiment import Experiment, Options, Trial
from persistent_ops.testing.record import select, us_text
from harness.report import case_table


class Doubling(Trial):
    def __init__(self, world, options, elements):
        self.fields, self.methods, self.moved = {"case": f"{elements} numbers"}, options.methods, (4 * elements, 0)
        self.world = world
        self.inputs = [torch.full((elements,), float(number + world.rank)) for number in (1, 2)]
        self.out = torch.empty(elements)

    def run(self, name, x):
        return torch.add(x, x, out=self.out) if name == "add" else torch.mul(x, FACTOR, out=self.out)

    def calls(self, name):
        return [lambda x=x: self.run(name, x) for x in self.inputs]

    def check(self):
        wrong = [
            f"{name}, input {number}"
            for name in self.methods
            for number, call in enumerate(self.calls(name))
            if bits_differ(poisoned(self.world, self.out, call), 2 * self.inputs[number])
        ]
        return {"failures": wrong, "rank": self.world.rank}

    def check_replays(self, subjects):
        last = {name: self.calls(name)[-1] for name in subjects}
        return [
            f"{name}, replay"
            for name, subject in subjects.items()
            if replay_differs(self.world, self.out, last[name], subject)
        ]


class Toy(Experiment):
    name, labels, is_fresh = "toy", {"add": "x + x", "multiply": "2 x"}, True

    @classmethod
    def read_options(cls, arguments, worlds, common):
        return Options(**common, calls=3)

    def cases(self):
        return [5, 7]

    def prepare(self, case):
        return Doubling(self.world, self.options, case)

    def after_times(self, trial, us):
        self.write_spread(trial, us, 4)

    @classmethod
    def tables(cls, lines):
        times = select(lines, "time", pes=2)
        blocks = [([line["case"]], [[line["label"], us_text(line["us"])]]) for line in times]
        yield case_table("2 PEs", ("case", "method"), ("us",), blocks)

    @classmethod
    def draw(cls, lines, path):
        path.write_text("a figure")


def main(argv):
    return run_benchmark(Toy, argv)
"""

pytestmark = pytest.mark.host


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs it, with a factor for its second method, and returns exit code and record."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run_it(factor: float, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        (tmp_path / "toy_benchmark.py").write_text(SOURCE.replace("FACTOR", str(factor)))
        sys.modules.pop("toy_benchmark", None)
        importlib.invalidate_caches()
        code = importlib.import_module("toy_benchmark").main(["--backend", "host", "--out", str(tmp_path), *arguments])
        return int(code), read_lines(tmp_path / "toy.jsonl")

    yield run_it
    sys.modules.pop("toy_benchmark", None)


def test_the_flow_is_the_harness_s(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(2.0, "--worlds", "2,1", "--quick")
    assert code == 0
    case = ["check", "time", "time", "spread", "spread"]
    assert [line["kind"] for line in lines] == ["run", "ceilings", *case, *case] * 2
    runs = [line for line in lines if line["kind"] == "run"]
    assert [line["pes"] for line in runs] == [2, 1]
    assert all("commit" in line and line["command"].startswith("persistent-ops bench toy") for line in runs)
    assert all(line["backend"] == "host" and line["torch"] == torch.__version__ and line["date"] for line in runs)
    ceilings = {line["pes"]: line for line in lines if line["kind"] == "ceilings"}
    for line in lines:
        if line["kind"] == "time":
            rounds = line["seconds_by_pe_and_round"]
            assert [len(each) for each in rounds] == [3] * line["pes"]
            assert line["us"] == pytest.approx(max(sorted(each)[1] for each in rounds) * 1e6)
            assert line["us_p95"] == pytest.approx(max(max(each) for each in rounds) * 1e6)
            numbers = int(line["case"].split()[0])
            assert line["limit_us"] == pytest.approx(4 * numbers / ceilings[line["pes"]]["read"] * 1e6)
        if line["kind"] == "check":
            assert (line["failures"], line["rank"]) == ([], line["pes"] - 1)  # the largest over the PEs
        if line["kind"] == "spread":
            assert line["replays"] == 4 and 0 < line["us_median"] <= line["us_p99"]
    assert (tmp_path / "toy.png").read_text() == "a figure"
    printed = capsys.readouterr().out
    assert "correct" in printed and "7 numbers" in printed


def test_a_record_is_replaced_by_what_is_measured_alone(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of a world replaces it, not the first line of the next world. Without a world it stays."""
    old = {"kind": "run", "pes": 9, "backend": "of an earlier run"}
    (tmp_path / "toy.jsonl").write_text(json.dumps(old) + "\n")
    importlib.import_module("harness.command")
    with monkeypatch.context() as patch:
        patch.setattr("harness.command.run_on_pes", lambda *_, **__: 1 / 0)
        assert run(2.0, "--pes", "2", "--quick") == (1, [old])
    told = capsys.readouterr()
    assert "ZeroDivisionError" in told.err and "of an earlier run" not in told.out
    assert told.out == "NOT FINISHED: nothing was measured\n"
    code, lines = run(2.0, "--worlds", "2,1", "--quick")
    assert code == 0 and [line["pes"] for line in lines if line["kind"] == "run"] == [2, 1]


@pytest.mark.parametrize(("failing", "told"), [(5, "nothing was checked"), (7, "correct")])
def test_a_run_that_is_cut_off_says_so(
    failing: int,
    told: str,
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment = importlib.import_module("harness.experiment").Experiment
    measure_case = experiment._measure_case

    def fail(self: Any, case: int) -> bool:
        if case == failing:
            raise OSError("cut off")
        return bool(measure_case(self, case))

    monkeypatch.setattr(experiment, "_measure_case", fail)
    code, _ = run(2.0, "--pes", "1", "--quick")
    printed = capsys.readouterr().out
    assert code == 1 and told in printed
    assert printed.endswith(f"NOT FINISHED: what was measured before is in {tmp_path / 'toy.jsonl'}\n")


def test_failures_name_pe_and_method(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(3.0, "--pes", "2", "--rounds", "1")
    assert code == 1
    failures = [line["failures"] for line in lines if line["kind"] == "check"]
    assert failures == [[f"PE {pe}, multiply, input {number}" for pe in range(2) for number in range(2)]] * 2
    assert "WRONG: 8 checks failed; the first: 2 PEs, 5 numbers: PE 0, multiply, input 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (LeftOut("not on this machine"), "left_out", "PE 0: not on this machine"),
        (RuntimeError("no graph"), "check", ["add, could not be prepared: PE 0: RuntimeError: no graph"]),
    ],
)
def test_what_cannot_be_prepared_is_a_failure_unless_a_trial_leaves_it_out(
    error: Exception, kind: str, told: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A world of one PE alone runs in this process, where the patch is.
    monkeypatch.setattr("harness.trial.record", mock.Mock(side_effect=error))
    code, lines = run(2.0, "--pes", "1", "--methods", "add")
    assert code == (kind == "check")
    assert [line.get("problem", line.get("failures")) for line in lines if line["kind"] == kind] == [told] * 2
    assert not [line for line in lines if line["kind"] == "time"]


def test_a_commit_is_that_of_the_package_and_of_no_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        name = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "lib" / "persistent_ops"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "mine.py").touch()
    git("init", "-q")
    git("add", "mine.py")
    git("commit", "-qm", "mine")
    monkeypatch.setattr(po, "__file__", str(package / "__init__.py"))
    what_ran = importlib.import_module("persistent_ops.testing.record").what_ran
    assert what_ran("command")["commit"] is None
    git("add", ".")
    git("commit", "-qm", "the package too")
    assert what_ran("command")["commit"] == git("rev-parse", "HEAD").strip()
    (package / "__init__.py").write_text("# changed")
    assert what_ran("command")["commit"].endswith(" with changes")


# ---- in every benchmark ----------------------------------------------------------------------------------------------

_SMALL = {
    "all_reduce": ("--sizes", "16K", "--calls", "3"),
    "embedding_all_to_all": ("--configs", "B512_T32_P10"),
    "embedding_backward": ("--configs", "B512_T32_P10"),
    "gemm": ("--shapes", "16x32x24", "--loads", "sustained"),
    "gemm_exchange": ("--shapes", "16x32x24", "--exchanges", "reduce_scatter"),
    "gemv_all_reduce": ("--shapes", "8192x1024"),
    "sparse_all_reduce": ("--cases", "100kx512_4k_zipf", "--sweeps", "none"),
}


@pytest.mark.parametrize(
    ("benchmark", "method", "told"),
    [
        ("all_reduce", "auto", "a replay leaves other bits than its calls"),
        ("embedding_all_to_all", "fused", "a replay gives other bits than a call"),
        ("embedding_backward", "fused", "a replay: "),
        ("embedding_backward", "unfused_torch", "a replay: "),
        ("gemm", "gemm", "a replay gives other bits than a call"),
        ("gemm_exchange", "fused", "a replay gives other bits than a call"),
        ("gemv_all_reduce", "gemv_alone", "a replay gives other bits than a call"),
    ],
)
def test_a_graph_that_does_nothing_gives_exit_code_1(
    benchmark: str, method: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output stays as it was poisoned, or its tables as they were."""
    place = "embedding_backward" if benchmark == "embedding_backward" else "harness.trial"
    subject = importlib.import_module("harness.timing").Subject
    monkeypatch.setattr(f"{place}.record", lambda world, calls, stream=None: subject(lambda: None, len(calls)))
    # A world of one PE alone runs in this process, where the patch is.
    assert run_benchmark(benchmark, *_SMALL[benchmark], "--pes", "1", "--methods", method, "--out", str(tmp_path)) == 1
    (check,) = lines_of(benchmark, tmp_path, "check")
    (failure,) = check["failures"]
    assert failure.startswith(f"PE 0, {method}, {told}")


@pytest.mark.parametrize(
    ("benchmark", "knob", "method", "field", "values"),
    [
        ("all_reduce", "occupancy", "slices", "work_groups", [1, 2, 4, 8]),
        ("embedding_backward", "slice", "fused", "slice_samples", [1, 2, 4, 8, 16, 32]),
        ("sparse_all_reduce", "occupancy", "into", "work_groups", [1, 2, 4, 8]),
    ],
)
def test_a_sweep_over_a_knob_is_recorded_and_drawn(
    benchmark: str,
    knob: str,
    method: str,
    field: str,
    values: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--sweep", knob, "--rounds", "2", "--methods", method, "--pes", "2")
    assert run_benchmark(benchmark, *_SMALL[benchmark], *options, "--out", str(tmp_path)) == 0
    tried = lines_of(benchmark, tmp_path, "tune", of=f"sweep_{knob}")
    assert [line["tuning"][field] for line in tried] == [None, *values]
    assert all(line["us"] > 0 and line["problem"] is None for line in tried)
    assert (tmp_path / f"{benchmark}_sweep_{knob}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{field}=None (default)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        ("embedding_backward", (*_SMALL["embedding_backward"], "--methods", "fused,fbgemm,fbgemm_step")),
        ("dlrm_embedding", ("--calls", "2", "--methods", "fused,fbgemm,fbgemm_eager")),
    ],
)
def test_without_fbgemm_its_methods_are_left_out(
    benchmark: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("fbgemm_gpu", *[name for name in sys.modules if name.startswith("fbgemm_gpu.")]):
        monkeypatch.setitem(sys.modules, name, None)
    assert run_benchmark(benchmark, *arguments, "--pes", "1", "--out", str(tmp_path)) == 0
    assert [line["method"] for line in lines_of(benchmark, tmp_path, "time")] == ["fused"]
    (line,) = lines_of(benchmark, tmp_path, "left_out")
    assert line["what"] == "FBGEMM" and "fbgemm_gpu" in line["problem"]
    assert "left out, 1 PE: FBGEMM" in capsys.readouterr().out


def test_kernels_that_the_profiler_has_seen(tmp_path: Path) -> None:
    events = [
        ("kernel", "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 3>(float*)", 7.0, 2.0),
        ("cuda_runtime", "cudaLaunchKernel", 1.0, 1.0),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 9.5, 0.5),
        ("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 4.0, 2.5),
        ("kernel", "void reorder<float>(float*)", 10.5, 1.0),
    ]
    listed = [{"cat": kind, "name": name, "ts": begin, "dur": us} for kind, name, begin, us in events]
    found = kernels_in({"baseTimeNanoseconds": 2000, "traceEvents": [{"ph": "M", "name": "process_name"}, *listed]})
    assert found == [
        ("ncclDevKernel_SendRecv", 6.0, 8.5),
        ("CatArrayBatchedCopy", 9.0, 11.0),
        ("Memcpy DtoD", 11.5, 12.0),
        ("reorder", 12.5, 13.5),
    ]
    draw_kernels([found, found[1:]], tmp_path / "kernels.png", "a call")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


_WRONG = {
    "all_reduce": {
        "--sizes 17K": "--sizes: expected multiples of 16K",
        "--sizes x": "--sizes: expected multiples of 16K",
        "--tune threads=64 --sweep occupancy": "--sweep, --tune, --trace: expected one of them",
    },
    "embedding_all_to_all": {
        "--configs B1_T1": "there is no B1_T1",
        "--methods fused,nccl": "there is no nccl",
        "--wire-dtype fp16": "there is no fp16",
        "--pes 7": "which 7 does not divide",
        "--tune warps=8": "expected FIELD=VALUE",
        "--tune threads=many": "invalid literal",
        "--tune work_groups=4:0": "--tune: 'work_groups=4:0': work_groups: expected an int of at least 1",
        "--tune rows_in_flight=none": "rows_in_flight: expected an int of at least 1, got None",
        "--nonsense": "unrecognized arguments",
        "--worlds 2,two": "--worlds: expected whole numbers with commas, got '2,two'",
        "--pes 0": "--pes, --worlds: expected numbers of at least 1, got [0]",
        "--rounds 0": "--rounds: expected numbers of at least 1",
        "--limit -1": "--limit: expected seconds above 0 and below infinity, got -1",
        "--limit nan": "--limit: expected seconds above 0 and below infinity, got nan",
    },
    "embedding_backward": {"--optimizers adam": "there is no adam", "--pes 7": "which 7 does not divide"},
    "dlrm_embedding": {
        "--cases adagrad": "--cases: there is no adagrad",
        "--max-rows 0": "--max-rows, --batch, --calls: expected numbers of at least 1",
        "--cases adagrad_zipf,rowwise_adagrad_zipf --beside": "--beside: expected --cases of one optimizer",
        "--cases rowwise_adagrad_fp16_zipf --replicated-rows 9": "--replicated-rows: tables of fp16",
    },
    "gemm": {
        "--shapes 8x8": "--shapes: expected MxKxN or MxKxN_N",
        "--shapes 8x12x8": "with multiples of 8 for K and N, got 8x12x8",
        "--loads idle": "--loads: there is no idle",
    },
    "gemm_exchange": {
        "--shapes 8x8": "--shapes: expected MxKxN",
        "--shapes 16x8x8,6x8x8 --worlds 2,4": "expected a multiple of 4, the number of PEs, for M, got 6x8x8",
        "--exchanges broadcast": "--exchanges: there is no broadcast",
        "--sweep --shapes 8x8x8": "not allowed with argument",
    },
    "gemv_all_reduce": {
        "--shapes 1by1": "there is no 1by1",
        "--shapes 64x64,8x8_N17": "there is no 8x8_N17",
        "--shapes 0x8": "there is no 0x8",
        "--calls 0": "--calls: expected numbers of at least 1",
    },
    "row_parallel_linear": {
        "--layers 17K": "--layers: expected sizes such as",
        "--layers 8x0": "--layers: expected numbers of at least 1",
        "--vectors x": "--vectors: expected whole numbers, got x",
        "--vectors 0": "--vectors: expected numbers of at least 1",
    },
    "sparse_all_reduce": {
        "--cases 1x1": "there is no 1x1",
        "--sweeps width": "there is no width",
        "--worlds 2,1": "expected numbers of at least 2",
    },
}


@pytest.mark.parametrize(
    ("benchmark", "arguments"), [(name, arguments) for name, wrong in _WRONG.items() for arguments in wrong]
)
def test_a_wrong_option_gives_exit_code_2(
    benchmark: str, arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / f"{benchmark}.jsonl"
    record.write_text("of an earlier run")
    assert run_benchmark(benchmark, "--out", str(tmp_path), *arguments.split()) == 2
    assert _WRONG[benchmark][arguments] in capsys.readouterr().err
    assert record.read_text() == "of an earlier run"
