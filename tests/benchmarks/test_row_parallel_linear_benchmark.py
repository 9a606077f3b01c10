"""The benchmark of RowParallelLinear, small, on the host backend."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import benchmark_runs
import pytest
import torch

pytestmark = pytest.mark.host


run, lines_of = (
    functools.partial(each, "row_parallel_linear") for each in (benchmark_runs.run, benchmark_runs.lines_of)
)


def test_measures_every_method_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--layers", "2048x1024", "--vectors", "8,17", "--out", str(tmp_path)) == 0
    times = lines_of(tmp_path, "time")
    methods = ["layer", "product", "nccl"]
    assert [(line["shape"], line["method"]) for line in times] == [
        (shape, method) for shape in ("32x64_N8", "32x64_N17") for method in methods
    ]
    assert [line["path"] for line in times if line["method"] == "layer"] == ["fused", "all_reduce"]
    assert all(line["us"] > 0 and line["limit_us"] > 0 for line in times)
    assert [line["failures"] for line in lines_of(tmp_path, "check")] == [[], []]
    assert (tmp_path / "row_parallel_linear.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "correct" in printed and "speedup" in printed and "say nothing about GPUs" in printed


@pytest.mark.parametrize("method", ["layer", "product"])
def test_a_wrong_result_gives_exit_code_1(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layer, and of a method that does nothing."""
    products = importlib.import_module("row_parallel_linear").Products
    right = products.run

    def wrong(self: Any, name: str, number: int) -> torch.Tensor:
        if name == "product" == method:
            return self._out  # type: ignore[no-any-return]
        result: torch.Tensor = right(self, name, number)
        if name == "layer" == method:
            result.view(-1).view(torch.int16)[7] += 4
        return result

    monkeypatch.setattr(products, "run", wrong)
    # A world of one PE alone runs in this process, where the patch is.
    assert run("--layers", "2048x1024", "--vectors", "17", "--pes", "1", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert f"PE 0, {method}, weight 0, farther from the fp64 result than rounding explains" in check["failures"]
