"""The benchmark of all_reduce, small, on the host backend."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import persistent_ops as po
from persistent_ops.testing.record import read_lines, select

pytestmark = pytest.mark.host


def run(*arguments: str) -> int:
    return int(importlib.import_module("all_reduce").main(["--quick", "--backend", "host", *arguments]))


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return select(read_lines(folder / "all_reduce.jsonl"), kind)


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sizes", "16K,64K", "--calls", "3", "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    own = ["auto", "one_shot", "two_shot", "slices"]
    methods = [*own, "nccl", *(f"norm_{name}" for name in own), "norm_nccl"]
    assert [(line["size"], line["method"]) for line in times] == [(s, m) for s in ("16K", "64K") for m in methods]
    for line in times:
        rounds = line["seconds_by_pe_and_round"]
        assert [len(each) for each in rounds] == [3, 3] and line["calls_per_graph"] == 3
        assert line["us"] == pytest.approx(max(sorted(each)[1] for each in rounds) * 1e6)
        assert line["limit_us"] > 0
    assert [line["failures"] for line in lines_of(tmp_path, "check")] == [[], []]
    assert (tmp_path / "all_reduce.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct" in printed and "x best other" in printed and "say nothing about GPUs" in printed


def test_timelines_and_what_they_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", "--sizes", "16K", "--methods", "auto,slices", "--calls", "2", "--rounds", "2")
    assert run(*arguments, "--out", str(tmp_path)) == 0
    lines = read_lines(tmp_path / "all_reduce_timeline.jsonl")
    found = [line for line in lines if line["kind"] == "timeline" and line["operator"] == "all_reduce"]
    assert [(line["method"], line["pe"]) for line in found] == [("auto", 0), ("auto", 1), ("slices", 0), ("slices", 1)]
    assert all(line["launches"] >= 2 and line["us"] > 0 and line["clock_error_us"] >= 0 for line in found)
    for method in ("auto", "slices"):
        assert json.loads((tmp_path / f"all_reduce_{method}_timeline.json").read_text())["traceEvents"]
        assert (tmp_path / f"all_reduce_{method}_timeline.png").read_bytes().startswith(b"\x89PNG")
    costs = [line for line in lines if line["kind"] == "tracing_cost"]
    assert [(line["method"], line["dropped"]) for line in costs] == [("auto", 0), ("slices", 0)]
    assert all(line["us"] > 0 and line["us_traced"] > 0 for line in costs)
    printed = capsys.readouterr().out
    assert "longest waits" in printed and "aligned to" in printed and "us where its kernels trace" in printed


@pytest.mark.parametrize(("knob", "field", "values"), [("occupancy", "work_groups", 4), ("slice", "warp_blocks", 2)])
def test_a_sweep_over_a_knob_is_recorded_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], knob: str, field: str, values: int
) -> None:
    sizes = ("--sizes", "64K", "--calls", "2", "--rounds", "2")
    assert run("--sweep", knob, *sizes, "--methods", "slices", "--out", str(tmp_path)) == 0
    lines = read_lines(tmp_path / f"all_reduce_sweep_{knob}.jsonl")
    tried = [line for line in lines if line["kind"] == "tune"]
    assert tried[0]["tuning"][field] is None and len(tried) == values + 1
    assert all(line["us"] > 0 and line["problem"] is None for line in tried)
    assert (tmp_path / f"all_reduce_sweep_{knob}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{field}=None (default)" in capsys.readouterr().out


def test_what_a_tuning_cannot_be_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    sizes = ("--sizes", "16K", "--calls", "2", "--rounds", "2")
    assert run("--tune", "threads=100:64", *sizes, "--out", str(tmp_path)) == 0
    lines = read_lines(tmp_path / "all_reduce_tuning.jsonl")
    problems = {line["tuning"]["threads"]: line["problem"] for line in lines if line["kind"] == "tune"}
    assert problems[64] is None and problems[None] is None and "multiple of 32" in problems[100]
    assert run("--tune", "threads=64", "--sweep", "slice", *sizes, "--out", str(tmp_path)) == 2


def test_a_wrong_result_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = po.all_reduce

    def wrong(x: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(x, **options)
        if options["algorithm"] == "slices":
            result.view(-1).view(torch.int16)[7] += 4
        return result

    monkeypatch.setattr(po, "all_reduce", wrong)
    # A world of one PE alone runs in this process, where the patch is.
    assert run("--sizes", "16K", "--pes", "1", "--methods", "auto,slices", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert "PE 0, slices, other bits than the algorithm before it" in check["failures"]


def test_a_method_that_does_nothing_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the method before it has left is no result."""
    right = po.all_reduce

    def idle(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return options["out"] if options["algorithm"] == "slices" else right(x, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(po, "all_reduce", idle)
    sizes = ("--sizes", "16K", "--pes", "1", "--methods", "auto,slices", "--out", str(tmp_path))
    assert run(*sizes) == 1
    (check,) = lines_of(tmp_path, "check")
    assert "PE 0, slices, farther from the fp64 sum than rounding explains" in check["failures"]


def test_a_graph_that_differs_from_its_calls_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, trial = (importlib.import_module(f"harness.{name}") for name in ("timing", "trial"))
    monkeypatch.setattr(trial, "record", lambda world, calls: timing.Subject(lambda: None, len(calls)))
    assert run("--sizes", "16K", "--pes", "1", "--methods", "auto", "--calls", "3", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert check["failures"] == ["PE 0, auto, a replay leaves other bits than its calls"]


@pytest.mark.parametrize("arguments", [("--sizes", "17K"), ("--sizes", "x"), ("--methods", "ring"), ("--rounds", "0")])
def test_wrong_options_give_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert arguments[0] in capsys.readouterr().err
