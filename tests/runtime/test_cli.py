"""The command line: what each command runs, exit codes, and errors without a traceback."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import persistent_ops
from persistent_ops import cli
from persistent_ops.testing.output_files import check_outputs

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_list_of_benchmarks_says_which_one_times_an_operator() -> None:
    code, output = run("bench", "gemv")
    (line,) = [line for line in output.splitlines() if "bench gemv_all_reduce" in line]
    assert code == 2 and line.endswith("  gemv_all_reduce and gemv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "steps must be at least 1, got 0"),
        (("--dtype", "int8"), "dtype must be one of fp32, bf16, fp16, got 'int8'"),
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
    assert code == 2
    assert "error: " in output
    assert "torch.cuda.is_available() is False" in output


# ---- what is looked at before a PE starts ----------------------------------------------------------------------------

PROGRAMS = ("dlrm_train", "decode_loop", "sparse_embedding_train")
MISSING = "expected a file that can be written, got 'nowhere/x': there is no folder '{here}/nowhere'"
WRONG = {
    "--pes 0": "--pes: expected at least 1, got 0",
    "--limit nan": "--limit: expected seconds above 0 and below infinity, got nan",
    "--trace nowhere/x": f"--trace: {MISSING}",
    "--json nowhere/x": f"--json: {MISSING}",
    "--json .": "--json: expected a file that can be written, got '.': that is a folder",
    "--json link": "--json: expected a file that can be written, got 'link': there is no folder '{here}/nowhere'",
    "--json x --trace ./x": "--trace: expected another file than that of --json, got './x'",
    "--output file/in/it": "--output: expected a folder that can be written, got 'file/in/it': 'file' is no folder",
    "--output link": "--output: expected a folder that can be written, got 'link': 'link' is no folder",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a file and a broken link, and start no PE."""

    def no_launch(*_: object, **__: object) -> None:
        raise AssertionError("PEs were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(persistent_ops, "launch", no_launch)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/x")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "wrong"),
    [(each, wrong) for each in PROGRAMS for wrong in WRONG if "--output" not in wrong or each != "decode_loop"],
)
def test_wrong_options_of_the_examples(
    program: str, wrong: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.import_module(program).main(["--backend", "host", *wrong.split()]) == 2
    assert capsys.readouterr().err == f"error: {WRONG[wrong].format(here=here)}\n"
    assert sorted(path.name for path in here.iterdir()) == ["file", "link"]


CONTRADICTION = "RANK=5 and WORLD_SIZE=2 contradict each other"


@pytest.fixture
def contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("here", "contradiction")
@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_variables_of_a_launcher(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(program).main(["--backend", "host"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {CONTRADICTION}") and told.count("\n") == 1


@pytest.mark.usefixtures("contradiction")
@pytest.mark.parametrize("command", ["demo", "bench gemv_all_reduce", "trace gemv_all_reduce"])
def test_wrong_variables_of_a_launcher_to_commands(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, output = run(*command.split(), "--backend", "host")
    told = output + capsys.readouterr().err
    assert code == 2 and told.startswith(f"error: {CONTRADICTION}") and told.count("\n") == 1
    assert sorted(path.name for path in here.iterdir()) == ["file", "link"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--data nowhere", "data: expected a file, got 'nowhere'"),
        ("--data .", "data: expected a file, got '.'"),
        ("--trace nowhere/x", f"trace: {MISSING}"),
        ("--trace .", "trace: expected a file that can be written, got '.': that is a folder"),
    ],
)
def test_files_of_the_demo_that_cannot_be_used(options: str, told: str, here: Path) -> None:
    assert run("demo", "--backend", "host", *options.split()) == (2, f"error: {told.format(here=here)}\n")


def test_only_the_first_process_looks_at_what_it_writes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSISTENT_OPS_WORLD_SIZE", "2")
    monkeypatch.setenv("PERSISTENT_OPS_STORE", "127.0.0.1:9")
    monkeypatch.setenv("PERSISTENT_OPS_JOB", "of this test")
    for rank in (0, 1):
        monkeypatch.setenv("PERSISTENT_OPS_RANK", str(rank))
        with pytest.raises(ValueError, match="^f: expected") if rank == 0 else contextlib.nullcontext():
            check_outputs(files={"f": here})
    check_outputs(files={"f": None, "g": "file", "h": "/dev/null"}, folders={"i": None, "j": ".", "k": "new/one"})


@pytest.mark.parametrize("command", ["bench", "trace"])
def test_help_of_commands_that_take_an_operator(command: str, folder: Path) -> None:
    for arguments in ((), ("--help",)):
        code, output = run(command, *arguments)
        assert code == 0 and output.startswith(f"Usage: persistent-ops {command} OP")
        assert f"  persistent-ops {command} toy_op\n" in output and "_helper" not in output
        assert {"bench": "Run the benchmark", "trace": "Record a timeline"}[command] in output
    code, output = run(command, "gone_op")
    assert code == 2 and "no benchmark is called 'gone_op'" in output
    assert output.endswith(f"  persistent-ops {command} toy_op\n")
    code, output = run(command, "toy_op", "--help")
    assert "arguments: ['--help'" in output and ("--trace" in output) == (command == "trace")


def test_the_version_has_one_definition() -> None:
    code, output = run("--version")
    assert (code, output) == (0, f"persistent-ops {persistent_ops.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?\w+)?", persistent_ops.__version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]$', project, re.MULTILINE)
    assert not re.search(r"^version =", project, re.MULTILINE)


def test_names_that_the_terminal_cannot_say_are_spelled_out(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "XDG_CACHE_HOME": str(tmp_path / "caché")}
    command = [sys.executable, "-m", "persistent_ops", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert r"cach\xe9" in re.sub(r"\s", "", done.stdout), done.stdout


@pytest.mark.slow
def test_the_wheel_carries_kernels_and_benchmarks(tmp_path: Path) -> None:
    """Build with the environment's own hatchling if there is one, so that no package index is asked."""
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


def test_a_file_may_lie_where_the_run_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("out/x", "out/run/x"):
        check_outputs(files={"--json": file}, folders={"--output": "out/run"})
    for file in ("out/other/x", "elsewhere/x"):
        with pytest.raises(ValueError, match="--json: .*there is no folder"):
            check_outputs(files={"--json": file}, folders={"--output": "out/run"})
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="no folder"):
        check_outputs(files={"--json": "taken/x"}, folders={"--output": "taken/run"})


def test_looking_leaves_nothing_behind(here: Path) -> None:
    check_outputs(files={"f": "new"}, folders={"g": "folder/in/it"})
    assert sorted(path.name for path in here.iterdir()) == ["file", "link"]
