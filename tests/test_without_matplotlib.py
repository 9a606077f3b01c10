"""Benchmarks and examples without matplotlib, or whose figure fails: one line says so, and the run goes on."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm_python import Popen

ROOT = Path(__file__).resolve().parent.parent
REMEDY = "matplotlib is not installed (pip install 'persistent-ops[plot]')"

pytestmark = pytest.mark.host


@dataclass
class Options:
    record_path: str = ""


def measure(options: Options) -> bool:
    Path(options.record_path).write_text(json.dumps({"kind": "run", "backend": "host", "pes": 1}) + "\n")
    return True


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, draw: Any) -> int:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    command = importlib.import_module("harness.command")

    def add_options(parser: argparse.ArgumentParser) -> None:
        command.add_common(parser, worlds="1", limit=10.0)

    toy = command.Benchmark(
        name="toy",
        description=None,
        add_options=add_options,
        options=lambda arguments, argv: (Options(), [1]),
        measure=measure,
        draw=draw,
        print_tables=lambda lines, console: console.print(f"tables of {len(lines)} lines"),
    )
    return int(command.run_benchmark(toy, ["--out", str(folder)]))


@pytest.mark.parametrize(
    ("module", "function"),
    [("embedding.report", "draw_figure"), ("gemv.report", "draw_figure"), ("sparse.figures", "draw_figures")],
)
def test_a_benchmark_prints_its_tables_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, function: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    def draw(lines: Any, path: Path) -> None:
        getattr(importlib.import_module(module), function)(lines, path)

    assert run(monkeypatch, tmp_path, draw) == 0
    output = capsys.readouterr()
    assert output.err == f"no figure: {REMEDY}\n"
    assert output.out == "tables of 1 lines\n"


def test_a_figure_that_fails_costs_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(lines: Any, path: Path) -> None:
        raise ValueError("nothing to draw")

    assert run(monkeypatch, tmp_path, draw) == 0
    output = capsys.readouterr()
    assert (output.err, output.out) == ("no figure: ValueError: nothing to draw\n", "tables of 1 lines\n")


def test_the_training_example_goes_on_without_matplotlib(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away from it\n" * 200)
    program = (
        "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv[0] = sys.argv[1]; del sys.argv[1];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--backend", "host", "--pes", "1", "--steps", "3", "--batch", "16"]
    options += ["--text", str(text), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-c", program, str(ROOT / "launch/sparse_embedding_train.py"), *options]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        out, err = started.communicate(timeout=200)
    assert started.returncode == 0, out + err
    assert f"no loss curve: {REMEDY}" in err.splitlines()
    assert "correct" in out
    assert not list((tmp_path / "out").glob("*.png"))


def test_the_extra_is_declared_and_nothing_needs_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (dependencies,) = re.findall(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert "matplotlib" not in dependencies
    assert re.search(r'^plot = \["matplotlib', text, re.MULTILINE)
    assert not [file for file in (ROOT / "persistent_ops").rglob("*.py") if "matplotlib" in file.read_text()]
