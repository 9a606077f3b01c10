"""The programs of launch/triton_operators: as a user starts them, without a GPU; and how long the short ones are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import INTERPRETER
from pe_processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "launch" / "triton_operators").glob("*.py"))


@pytest.mark.host
@pytest.mark.parametrize("launcher", [[], ["launch/torchrun.sh", "3"]], ids=["alone", "torchrun"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_runs_on_the_host(program: Path, launcher: list[str]) -> None:
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join(filter(None, [INTERPRETER, str(ROOT), os.environ.get("PYTHONPATH")])),
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        CUDA_VISIBLE_DEVICES="",
    )
    command = [*launcher, sys.executable, str(program)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{program.stem}: ") and ran.stdout.count("\n") == 1


def test_all_are_short() -> None:
    assert len(PROGRAMS) == 4
    assert all(len(program.read_text().splitlines()) < 60 for program in PROGRAMS)
