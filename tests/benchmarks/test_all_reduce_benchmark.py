"""The benchmark of all_reduce, small, on the host backend."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import torch

import persistent_ops as po
from persistent_ops.testing.record import read_lines

pytestmark = pytest.mark.host


run, lines_of = (functools.partial(each, "all_reduce") for each in (benchmark_runs.run, benchmark_runs.lines_of))


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sizes", "16K,64K", "--calls", "3", "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    own = ["auto", "one_shot", "two_shot", "slices"]
    methods = [*own, "nccl", *(f"norm_{name}" for name in own), "norm_nccl"]
    assert [(line["size"], line["method"]) for line in times] == [(s, m) for s in ("16K", "64K") for m in methods]
    for line in times:
        assert line["calls_per_graph"] == 3 and line["limit_us"] > 0
    assert [line["failures"] for line in lines_of(tmp_path, "check")] == [[], []]
    assert (tmp_path / "all_reduce.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct" in printed and "speedup" in printed and "say nothing about GPUs" in printed


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


@pytest.mark.parametrize(
    ("is_idle", "told"),
    [
        (False, "other bits than the algorithm before it"),
        (True, "farther from the fp64 sum than rounding explains"),  # what the method before it has left is no result
    ],
)
def test_a_wrong_result_gives_exit_code_1(
    is_idle: bool, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = po.all_reduce

    def wrong(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if options["algorithm"] != "slices":
            return right(x, **options)
        result: torch.Tensor = options["out"] if is_idle else right(x, **options)
        if not is_idle:
            result.view(-1).view(torch.int16)[7] += 4
        return result

    monkeypatch.setattr(po, "all_reduce", wrong)
    # A world of one PE alone runs in this process, where the patch is.
    assert run("--sizes", "16K", "--pes", "1", "--methods", "auto,slices", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert f"PE 0, slices, {told}" in check["failures"]
