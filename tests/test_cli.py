"""The command line: which command runs what, exit codes, and errors without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import persistent_ops
from persistent_ops import cli

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = """
from helper_of_the_benchmark import OFFSET

def main(argv: list[str]) -> int:
    print("arguments:", argv)
    return OFFSET + len(argv)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_op.py").write_text(BENCHMARK)
    (tmp_path / "_helper.py").write_text("")
    helpers = tmp_path / "helper_of_the_benchmark.py"
    helpers.write_text("OFFSET = 4\n")
    monkeypatch.setattr(cli, "benchmark_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("toy_op", "helper_of_the_benchmark"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_bench_passes_the_arguments_on_and_returns_the_exit_code(folder: Path) -> None:
    code, output = run("bench", "toy_op", "--batch", "5", "--help")
    assert "arguments: ['--batch', '5', '--help']" in output
    assert code == 7


@pytest.mark.parametrize(("arguments", "expected"), [(("gone_op",), 2), ((), 0), (("--help",), 0)])
def test_bench_lists_what_there_is(folder: Path, arguments: tuple[str, ...], expected: int) -> None:
    code, output = run("bench", *arguments)
    assert code == expected
    assert "persistent-ops bench toy_op" in output
    assert "_helper" not in output
    if expected == 2:
        assert "there is no benchmark of 'gone_op'" in output


def test_benchmarks_are_found_in_the_checkout() -> None:
    assert cli.benchmark_folder() == ROOT / "benchmarks"
    assert "embedding_all_to_all" in cli.benchmarks()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "steps must be at least 1, got 0"),
        (("--dtype", "int8"), "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        (("--data", "/nowhere/day_0"), "/nowhere/day_0"),
    ],
)
def test_wrong_demo_options_exit_with_two_and_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, output = run("demo", "--backend", "host", *arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_a_malformed_data_file_exits_with_two_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("1\t2\t3\n")
    code, output = run("demo", "--backend", "host", "--data", str(path))
    assert code == 2
    assert f"error: {path}, line 1: expected 40 columns" in output


def test_demo_without_a_gpu_refuses_the_cuda_backend() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, output = run("demo", "--backend", "cuda", "--pes", "1", "--steps", "1")
    assert code == 1
    assert "error: " in output
    assert "torch.cuda.is_available() is False" in output


def test_help_names_the_three_commands() -> None:
    code, output = run("--help")
    assert code == 0
    for command in ("demo", "bench", "doctor"):
        assert command in output


def test_the_version_has_one_definition() -> None:
    code, output = run("--version")
    assert (code, output) == (0, f"persistent-ops {persistent_ops.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?\w+)?", persistent_ops.__version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]$', project, re.MULTILINE)
    assert not re.search(r"^version =", project, re.MULTILINE)


def test_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "persistent_ops", "bench"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "persistent-ops bench embedding_all_to_all" in done.stdout


@pytest.mark.slow
def test_the_wheel_carries_kernels_and_benchmarks(tmp_path: Path) -> None:
    """Build with the environment's own hatchling where it has one, so that no index is asked."""
    pytest.importorskip("hatchling", reason="hatchling is not installed here")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"persistent_ops-{persistent_ops.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in (ROOT / "cuda").rglob("*.cuh"):
        assert f"persistent_ops/_cuda/{source.relative_to(ROOT / 'cuda')}" in names
    for source in (ROOT / "benchmarks").glob("*.py"):
        assert f"persistent_ops/_benchmarks/{source.name}" in names
    for source in (ROOT / "persistent_ops").rglob("*.py"):
        assert str(source.relative_to(ROOT)) in names
