"""Benchmarks and examples without matplotlib, or with a failing figure: one line reports it, and the run continues."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_python import Popen
from worlds import python_path

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "matplotlib is not installed (pip install 'persistent-ops[plot]')"

pytestmark = pytest.mark.host


def measure(measure: Any, world_size: int, experiment: Any, options: Any, **others: Any) -> bool:
    line = {"kind": "run", "backend": "host", "pes": 1, "torch": "2", "commit": None, "processor": "a processor"}
    Path(options.record_path).write_text(json.dumps(line) + "\n")
    return True


def _fail(lines: Any, path: Path) -> None:
    raise ValueError("nothing to draw")


@pytest.mark.parametrize("has_matplotlib", [False, True])
def test_a_benchmark_whose_figure_fails_prints_its_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_matplotlib: bool
) -> None:
    module = importlib.import_module("all_reduce")
    monkeypatch.setattr("harness.command.run_on_pes", measure)
    monkeypatch.setattr(module.AllReduce, "draw", _fail)
    monkeypatch.setattr("harness.command.select", lambda lines, kind: lines)  # as if there were times to draw
    if not has_matplotlib:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert module.main(["--pes", "2", "--backend", "host", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.err == f"no figure: {'ValueError: nothing to draw' if has_matplotlib else REMEDY}\n"
    assert output.out.startswith("a processor, torch 2")


def test_the_training_example_goes_on_without_matplotlib(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away from it\n" * 200)
    program = (
        "import pathlib, runpy, sys; sys.modules['matplotlib'] = None; del sys.argv[0];"
        "sys.path[0] = str(pathlib.Path(sys.argv[0]).parent); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--backend", "host", "--pes", "1", "--steps", "3", "--batch", "16"]
    options += ["--text", str(text), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-c", program, str(ROOT / "launch/sparse_embedding_train.py"), *options]
    environment = os.environ | {"PYTHONPATH": python_path()}
    pipe = subprocess.PIPE
    with Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            out, err = started.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
    assert started.returncode == 0, out + err
    assert f"no loss curve: {REMEDY}" in err.splitlines()
    assert "correct" in out
    assert not list((tmp_path / "out").glob("*.png"))


def test_the_extra_is_declared_and_nothing_needs_it() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (dependencies,) = re.findall(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert "matplotlib" not in dependencies
    assert re.search(r'^plot = \["matplotlib', text, re.MULTILINE)
    sources = [(file, file.read_text()) for file in (ROOT / "persistent_ops").rglob("*.py")]
    assert not [file for file, source in sources if re.search(r"^(import|from) matplotlib", source, re.MULTILINE)]
    assert {file.name for file, source in sources if "matplotlib" in source} == {"timeline.py", "figures.py"}
