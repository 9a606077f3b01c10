"""What the programs of launch/ share: how a run ends, and whose folder it writes to."""

from __future__ import annotations

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
