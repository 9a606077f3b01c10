"""The benchmark of products whose results are exchanged, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_runs
import pytest
import tables
import torch
import torch.distributed as dist

import persistent_ops as po

pytestmark = pytest.mark.host

SMALL = ("--shapes", "16x32x24", "--rounds", "1")
# A world of one PE alone runs in this process, where a patch is.
ALONE = (*SMALL, "--pes", "1")

run, lines_of = (functools.partial(each, "gemm_exchange") for each in (benchmark_runs.run, benchmark_runs.lines_of))


def module() -> Any:
    return importlib.import_module("gemm_exchange")


def test_measures_every_exchange_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--pes", "2", "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    exchanges = ("reduce_scatter", "all_to_all", "all_reduce")
    methods = ("fused", "auto", "unfused", "gemm", "cublas", "nccl")  # symm_mem is for GPUs alone
    assert [(line["exchange"], line["method"]) for line in times] == [(e, m) for e in exchanges for m in methods]
    (ceilings,) = lines_of(tmp_path, "ceilings")
    for line in times:
        sent = 16 * 24 * 2 // 2 * (1 + (line["exchange"] == "all_reduce"))
        assert line["limit_us"] == pytest.approx(sent / ceilings["store"] * 1e6)
        assert ("choice" in line) == (line["method"] == "auto")
    assert {line["choice"]["reason"] for line in times if "choice" in line} == {"the host backend"}
    checks = lines_of(tmp_path, "check")
    assert len(checks) == 3
    assert all(line["failures"] == [] and 0 < line["largest_error"] < 6e-3 for line in checks)
    (measured,) = tables.read_runs(tmp_path)
    shown = tables._TABLES["gemm_exchange"](measured)
    assert len(shown) == 6
    assert shown[2].startswith("| us, gemm_all_to_all, 2 PEs | GEMM alone | cuBLAS alone | cuBLAS + NCCL | fused |")
    assert "\n| `16x32x24` | " in shown[2] and shown[3].endswith(" | fused |")
    assert (tmp_path / "gemm_exchange.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct: exact for whole numbers" in printed and "us, gemm_all_reduce, 2 PEs" in printed


def test_a_sweep_has_rising_numbers_of_rows(tmp_path: Path) -> None:
    options = ("--sweep", "--exchanges", "all_to_all", "--methods", "fused,gemm")
    assert run(*options, "--pes", "1", "--out", str(tmp_path)) == 0
    swept = lines_of(tmp_path, "time")
    assert [line["shape_name"] for line in swept[::2]] == ["16x32x24", "32x32x24", "64x32x24"]


# ---- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["reduce_scatter", "all_to_all", "all_reduce"])
def test_wrong_bits_give_exit_code_1(exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(po, f"gemm_{exchange}")

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, algorithm: str) -> torch.Tensor:
        right(a, b, out=out, algorithm=algorithm)
        wrong.last_choice = right.last_choice  # type: ignore[attr-defined]
        if algorithm == "unfused":
            out.view(-1).view(torch.int16)[7] ^= 1
        return out

    monkeypatch.setattr(po, f"gemm_{exchange}", wrong)
    assert run(*ALONE, "--exchanges", exchange, "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert check["failures"] == ["PE 0, unfused, whole numbers: other bits than the exact ones"]


@pytest.mark.parametrize(
    ("exchange", "function"),
    [("reduce_scatter", "reduce_scatter_tensor"), ("all_to_all", "all_to_all_single")],
)
def test_a_library_that_exchanges_nothing_gives_exit_code_1(
    exchange: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, function, lambda out, product: None)
    assert run(*ALONE, "--exchanges", exchange, "--methods", "nccl", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert check["failures"][0].startswith("PE 0, nccl, copy 0: nan from the fp32 result")


# ---- torch's symmetric memory ----------------------------------------------------------------------------------------


def test_why_there_is_no_symm_mem_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module(), "symmetric_buffer", lambda elements, dtype: (None, "PE 0: no peer access"))
    assert run(*ALONE, "--methods", "gemm,symm_mem", "--out", str(tmp_path)) == 0
    assert [line["method"] for line in lines_of(tmp_path, "time")] == ["gemm"] * 3
    assert "left out, 1 PE: symm_mem: PE 0: no peer access" in capsys.readouterr().out


@pytest.mark.parametrize("is_able", [True, False])
def test_symm_mem_takes_part_in_reduce_scatter_where_it_multiplies(
    is_able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if is_able:
            return a @ b
        raise RuntimeError("no such operator")

    monkeypatch.setattr(module(), "symmetric_buffer", lambda elements, dtype: (torch.empty(1), None))
    monkeypatch.setattr(module(), "matmul_reduce_scatter", multiply)
    assert run(*ALONE, "--methods", "symm_mem,nccl", "--out", str(tmp_path)) == 0
    timed = [line["exchange"] for line in lines_of(tmp_path, "time") if line["method"] == "symm_mem"]
    assert timed == ["reduce_scatter"] * is_able
    problems = [line["problem"] for line in lines_of(tmp_path, "left_out")]
    assert problems == [] if is_able else ["PE 0: RuntimeError: no such operator"]


def test_the_gpu_sleeps_before_a_burst_of_a_subject_that_the_host_queues_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = importlib.import_module("harness.timing")
    done: list[str] = []
    monkeypatch.setattr(timing, "sleep_on_gpu", lambda cycles: done.append(f"{cycles / timing._CYCLES_PER_SECOND} s"))
    monkeypatch.setattr(timing, "gather", lambda value: [value])
    world = SimpleNamespace(backend=SimpleNamespace(name="host"), barrier=lambda: done.append("barrier"))
    subject = timing.Subject(lambda: done.append("replay"), 4, queue_seconds=2.0)
    times = timing.time_interleaved(world, {"eager": subject}, rounds=1, burst_seconds=1e3)
    assert len(times["eager"]) == 1
    assert done == ["barrier", "2.0 s", "replay", "replay"] * 2  # to find the length of a burst, and the burst


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _line(us: float, **more: Any) -> dict[str, Any]:
    return {"us": us, "label": "a method", "limit_us": 25.0, **more}


def _times(fused: float, unfused: float, taken: str) -> dict[str, dict[str, Any]]:
    choice = {"algorithm": taken, "fused_us": 61.0, "unfused_us": None}
    times = {"gemm": _line(50.0), "nccl": _line(90.0), "symm_mem": _line(80.0)}
    times |= {"fused": _line(fused, method="fused"), "unfused": _line(unfused), "auto": _line(fused, choice=choice)}
    return {name: {**line, "method": name} for name, line in times.items()}


def test_a_row_compares_the_methods_and_has_the_prediction() -> None:
    times = _times(64.0, 72.0, "fused")
    assert module().time_cells(times) == ["50.0", "", "90.0", "80.0", "64.0", "64.0", "25.0", "1.28", "1.25"]
    assert module().model_cells(times) == ["64.0", "61.0", "72.0", "", "64.0", "fused"]
    assert module().time_cells({"cublas": _line(51.0, method="cublas")})[-2:] == ["", ""]


def test_a_figure_marks_where_unfused_becomes_faster_and_where_auto_takes_it() -> None:
    marks: list[tuple[float, str]] = []
    axes = SimpleNamespace(plot=lambda *points, **style: None)
    axes.axvline = lambda x, label, **style: marks.append((x, label))
    times = {128: _times(10.0, 20.0, "fused"), 256: _times(30.0, 25.0, "fused"), 512: _times(60.0, 50.0, "unfused")}
    module()._draw_times(axes, times)
    assert marks == [
        (math.sqrt(128 * 256), "faster: fused | unfused"),
        (math.sqrt(256 * 512), "auto takes: fused | unfused"),
    ]
