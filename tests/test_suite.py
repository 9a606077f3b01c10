"""What `make test-gpu` runs, as far as a machine without GPUs can tell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def _commands() -> list[list[str]]:
    """Return the calls of pytest that make would make."""
    environment = {**os.environ, "MAKEFLAGS": ""}
    made = ["make", "-n", "test-gpu", f"PERSISTENT_OPS_PYTHON={sys.executable}"]
    lines = subprocess.run(made, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line.partition("||")[0]) for line in lines.splitlines() if "pytest" in line]


def test_what_runs_on_gpus_is_collected() -> None:
    """An option that pytest does not know, or takes for a folder, would stop it at once."""
    rehearsal, side_by_side, apart = _commands()
    assert rehearsal == [argument.replace("cuda", "rehearsal") for argument in side_by_side]
    assert apart == [*side_by_side[:4], "-m", "apart", *side_by_side[4:]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [*side_by_side, "-n", "0", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    expected = {"tests/test_protocol.py", "tests/test_gemv_protocol.py", "tests/test_sparse_protocol.py"}
    assert expected <= found, sorted(found)
    assert "tests/test_jit.py" not in found, "the same on every backend"
