"""The benchmark of RowParallelLinear, small, on the host backend."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import persistent_ops as po
from persistent_ops.testing.record import read_lines, select

pytestmark = pytest.mark.host


def run(*arguments: str) -> int:
    return int(importlib.import_module("row_parallel_linear").main(["--quick", "--backend", "host", *arguments]))


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return select(read_lines(folder / "row_parallel_linear.jsonl"), kind)


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
    assert "correct" in printed and "x best other" in printed and "say nothing about GPUs" in printed


def test_a_wrong_result_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = po.nn.RowParallelLinear.forward

    def wrong(layer: po.nn.RowParallelLinear, x: torch.Tensor, **options: Any) -> torch.Tensor:
        result = right(layer, x, **options)
        result.view(-1).view(torch.int16)[7] += 4
        return result

    monkeypatch.setattr(po.nn.RowParallelLinear, "forward", wrong)
    # A world of one PE alone runs in this process, where the patch is.
    assert run("--layers", "2048x1024", "--vectors", "17", "--pes", "1", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert "PE 0, layer, weight 0, farther from the fp64 result than rounding explains" in check["failures"]


def test_a_method_that_does_nothing_gives_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products = importlib.import_module("row_parallel_linear").Products
    right = products.run
    monkeypatch.setattr(
        products, "run", lambda self, name, number: self._out if name == "product" else right(self, name, number)
    )
    assert run("--layers", "2048x1024", "--vectors", "17", "--pes", "1", "--out", str(tmp_path)) == 1
    (check,) = lines_of(tmp_path, "check")
    assert "PE 0, product, weight 0, farther from the fp64 result than rounding explains" in check["failures"]


@pytest.mark.parametrize(
    "arguments",
    [("--layers", "17K"), ("--layers", "8x0"), ("--vectors", "x"), ("--vectors", "0"), ("--methods", "ring")],
)
def test_wrong_options_give_exit_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert arguments[0] in capsys.readouterr().err
