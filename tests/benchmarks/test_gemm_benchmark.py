"""The benchmark of gemm, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import tables
import torch

import persistent_ops as po

pytestmark = pytest.mark.host

run, lines_of = (functools.partial(each, "gemm") for each in (benchmark_runs.run, benchmark_runs.lines_of))


def test_measures_every_method_under_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ("16x32x24", "24x16x40_N")
    assert run("--shapes", ",".join(shapes), "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    assert [(line["pes"], line["shape"], line["load"], line["method"]) for line in times] == [
        (1, shape, load, method)
        for shape in shapes
        for load in ("sustained", "paused")
        for method in ("gemm", "cublas")
    ]
    assert times[0]["tflops"] == pytest.approx(2 * 16 * 32 * 24 / times[0]["us"] / 1e6)
    checks = lines_of(tmp_path, "check")
    assert all(line["failures"] == [] and 0 < line["largest_error"] < 4e-3 for line in checks)
    (measured,) = tables.read_runs(tmp_path)
    for load, table in zip(("sustained", "paused"), tables._gemm_tables(measured), strict=True):
        assert table.startswith(f"| us, {load}, 1 PE | cuBLAS | gemm |") and "\n| `24x16x40_N` | " in table
    assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct: exact for whole numbers" in printed and "cuBLAS / gemm" in printed and "24x16x40_N" in printed


def test_wrong_bits_and_torchs_product_give_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.mm(a, b, out=out).view(-1).view(torch.int16)[7] ^= 1
        return out

    wrong.last_path = "torch"  # type: ignore[attr-defined]
    monkeypatch.setattr(po, "gemm", wrong)
    assert run("--shapes", "16x32x24", "--loads", "sustained", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    told = ["PE 0, gemm, whole numbers: other bits than the exact ones", "PE 0, gemm, takes torch's product"]
    assert check["failures"] == told


@pytest.mark.parametrize(("module", "function", "method"), [(po, "gemm", "gemm"), (torch, "mm", "cublas")])
def test_a_product_that_drops_work_gives_exit_code_1(
    module: Any, function: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, function, lambda a, b, out: torch.matmul(a[:, 8:], b[8:], out=out))
    po.gemm.last_path = "kernel"  # type: ignore[attr-defined]
    arguments = ("--shapes", "16x32x24_N", "--loads", "sustained", "--methods", method)
    assert run(*arguments, "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert [f"PE 0, {method}, copy {n}: 0." in text for n, text in enumerate(check["failures"][-2:])] == [True, True]


def test_a_row_compares_the_methods_and_has_the_tile() -> None:
    tile = {"rows": 128, "columns": 96, "sharing": 2, "parts": 2, "stages": 7}
    by_method = {"gemm": {"us": 50.0, "tflops": 700.4, "tile": tile}, "cublas": {"us": 51.0}}
    cells = importlib.import_module("gemm").cells
    assert cells(by_method) == ["51.0", "50.0", "102.0 %", "700", "128x96, multicast, split-K 2"]
    assert cells({"cublas": {"us": 51.0}}) == ["51.0", "", "", "", ""]
