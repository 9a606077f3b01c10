"""Shared behavior of the programs of launch/: what they refuse, how a run ends, and the folder that it writes to."""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import program
import pytest
import sparse_embedding_train
import torch

import persistent_ops as po

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]

SMALL = "--backend host --pes 2 --steps 40 --check-steps 0 --overlap-steps 0 --max-bytes 200000"


def _raises(error: BaseException) -> int:
    @program.command
    def main(argv: list[str]) -> int:
        raise error

    return main([])


ENDS = {
    "wrong option": (ValueError("--x: expected 1, got 2"), 2, "error: --x: expected 1, got 2\n"),
    "no backend": (po.BackendUnavailableError("no GPU"), 2, "error: no GPU\n"),
    "small heap": (po.SymmetricHeapError("too small"), 2, "error: too small\n"),
    "killed PE": (po.PersistentOpsError("PE 1 was killed"), 1, "error: PE 1 was killed\n"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "interrupted\n"),
    "help": (SystemExit(0), 0, ""),
    "unknown option": (SystemExit(2), 2, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_with_a_line_and_a_code(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, code, line = ENDS[end]
    assert _raises(error) == code
    assert capsys.readouterr() == ("", line)


def test_what_goes_wrong_within_a_pe_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a PE that was started here it is the cause; a launcher's PE raises it itself."""
    error = po.PeerTimeoutError("PE 1 is missing")
    error.__cause__ = RuntimeError("traceback of PE 0")
    with pytest.raises(po.PeerTimeoutError):
        _raises(error)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(po.PeerTimeoutError):
        _raises(po.PeerTimeoutError("PE 1 is missing"))


REFUSED = {
    "decode_loop": {
        "--model nowhere": "model must be one of tiny, 8B, 70B, 405B or a model folder, got 'nowhere'",
        "--tokens 0": "tokens must be at least 1, got 0",
        "--batch 17": "batch must be at most 16",
        "--prompt a,b": "--prompt: expected whole numbers with commas, got 'a,b'",
        "--prompt 1,259": "prompt: expected tokens from 0 to 258, got [1, 259]",
        "--model 8B --reference": "reference needs weights that do not depend on the number of PEs",
        "--pes 5": "tiny has 4 key and value heads, which 5 PEs cannot share; run it on at most 4",
        "--cut 3": "cut: 4 key and value heads and a SwiGLU of 176 do not divide by 3",
        "--cut 0": "cut must be at least 1, got 0",
        "--layers 4": "layers: tiny has 3, got 4",
        "--seed -1": "--seed: expected 0 to 4294967295, got -1",
    },
    "dlrm_train": {
        "--batch 0": "batch must be at least 1, got 0",
        "--replicated-rows -1": "replicated_rows must be at least 0, got -1",
        "--learning-rate nan": "learning_rate must be above 0 and below infinity, got nan",
        "--warmup-steps 5 --decay-steps 3": "decay_start must be at least warmup_steps, which is 5, got 0",
        "--heap-gib 1e300": "heap_gib must be at most 1048576, got 1e+300",
        "--heap-gib 0.0001 --pes 1": "pass heap_size >= ",
        "--resume": "there is no checkpoint in",
        "--format raw": "data: format raw takes a file (--data)",
        "--data x": "data: format synthetic takes no file or folder",
        "--format npy --data nowhere": "data: nowhere has neither",
        "--format raw --data nowhere": "No such file or directory: 'nowhere'",
        "--format criteo --data nowhere": "data: expected a file, got 'nowhere'",
    },
    "sparse_embedding_train": {
        "--steps 0": "steps must be at least 1, got 0",
        "--max-words 1": "max_words must be at least 2, got 1",
        "--keep -1": "keep must be at least 0, got -1",
        "--learning-rate nan": "learning_rate must be above 0 and below infinity, got nan",
        "--text nowhere": "text: expected a file, or a folder",
        "--max-bytes 10": "pass a longer text, a smaller --min-count, or more --max-bytes",
        "--resume": "--resume: there is no checkpoint",
    },
}


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name, refused in REFUSED.items() for arguments in refused]
)
def test_what_cannot_be_is_refused(
    name: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # for what a program writes by default
    assert importlib.import_module(name).main(["--backend", "host", *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and REFUSED[name][arguments] in told and told.count("\n") == 1


def test_a_run_that_takes_too_long_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "never"
    assert sparse_embedding_train.main([*SMALL.split(), "--limit", "0.2", "--output", str(output)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: launch() ran longer than 0.2 s") and told.count("\n") == 1
    assert not output.exists()  # nothing came of it


def test_ctrl_c_ends_a_training_with_a_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch/sparse_embedding_train.py"), *SMALL.split()]
    command += ["--steps", "1000000", "--checkpoint-every", "5", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as training:
        limit = threading.Timer(240, training.kill)
        limit.start()
        try:
            while training.poll() is None and not (tmp_path / "checkpoint.pt").exists():
                threading.Event().wait(0.05)
            os.killpg(training.pid, signal.SIGINT)  # as a terminal does
            out, told = training.communicate()
        finally:
            limit.cancel()
    assert (training.returncode, out, told) == (130, "", "interrupted\n")


def test_a_record_that_cannot_be_written_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not program.append_record(Path("/dev/full"), "x", [], {"losses": [1.0]})
    assert capsys.readouterr().err == "error: --json: [Errno 28] No space left on device\n"


def _traced(path: str) -> int:
    po.init("host")
    try:
        with program.traced(path):
            po.all_reduce(torch.ones(8))
        return 7
    finally:
        po.finalize()


def test_a_timeline_that_cannot_be_written_costs_no_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert po.launch(_traced, 2, "/dev/full", timeout=120) == [7, 7]
    assert "no timeline: [Errno 28] No space left on device" in capfd.readouterr().err
    assert po.launch(_traced, 2, str(tmp_path / "t.json"), timeout=120) == [7, 7]
    assert (tmp_path / "t.json").stat().st_size > 0


def test_a_training_that_diverges_keeps_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL.split(), "--output", str(tmp_path), "--checkpoint-every", "1", "--learning-rate"]
    assert sparse_embedding_train.main([*arguments, "1e30"]) == 2
    assert "the training has diverged; lower the learning rate" in capsys.readouterr().err
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(math.isfinite(loss) for loss in kept["losses"])


def test_a_folder_is_one_run_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    with program.own_folder(folder):
        with pytest.raises(ValueError, match=f"--output: another run writes to '{folder}'"), program.own_folder(folder):
            pass
        with program.own_folder(tmp_path / "c"):
            pass
    assert list(tmp_path.iterdir()) == []
    kept = folder / "latest"
    with program.own_folder(folder, checkpoint=kept):
        kept.write_text("")
    assert capsys.readouterr().err == ""
    with program.own_folder(folder, checkpoint=kept):
        pass
    assert kept.exists()
    assert (
        capsys.readouterr().err
        == f"note: {kept} will be replaced by this run's first checkpoint; --resume goes on from it\n"
    )
