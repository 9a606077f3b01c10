"""PEs that Hydra, torchrun and Open MPI start find each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pe_processes import clean_environment, host_address

PROGRAM = """
import os, sys
from persistent_ops.runtime.bootstrap import connection as bootstrap, launchers
pe = bootstrap.connect(launchers.detect(os.environ), float(sys.argv[1]))
values = pe.exchange("t", str(pe.rank * pe.rank).encode())
assert values == [str(r * r).encode() for r in range(pe.world_size)], values
local = f"local {pe.local_rank} of {pe.local_world_size}"
os.write(1, f"PE {pe.rank} of {pe.world_size}, {local}, {pe.single_host} {pe.launcher}\\n".encode())
if "leave" not in sys.argv:
    pe.close()
"""
ABSENT = """
import os, pathlib, sys, time
if os.environ["PMI_RANK"] == "1":
    time.sleep(1000)
from persistent_ops.runtime.bootstrap import connection as bootstrap, launchers
import torch.distributed
here = pathlib.Path(sys.argv[1])
(here / os.environ["PMI_RANK"]).touch()
while not ((here / "0").exists() and (here / "2").exists()):
    time.sleep(0.01)
try:
    bootstrap.connect(launchers.detect(os.environ), 2.0)
except bootstrap.BootstrapError as error:
    os.write(1, f"{os.environ['PMI_RANK']}: {error}\\n".encode())
    time.sleep(1)
    sys.exit(3)
"""


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean_environment(**more), capture_output=True, text=True, timeout=60)


def hydra() -> str:
    found = shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec.hydra")
    if found is None:
        pytest.skip("mpiexec.hydra is not installed (pip install mpich)")
    return found


def test_hydra_on_several_hosts(tmp_path: Path) -> None:
    """Two names of this machine make two hosts of it, as far as Hydra knows. Without close(): the exit does it."""
    host_address()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    hosts = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-ppn", "1"]
    done = run([hydra(), *hosts, "-n", "2", sys.executable, str(program), "20", "leave"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"PE {r} of 2, local 0 of 1, True hydra" for r in range(2)]


@pytest.mark.slow
def test_hydra_with_an_absent_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ABSENT)
    done = run([hydra(), "-n", "3", sys.executable, str(program), str(tmp_path)])
    assert done.returncode != 0
    lines = sorted(line for line in done.stdout.splitlines() if line[:2] in ("0:", "2:"))
    assert [line[:2] for line in lines] == ["0:", "2:"]
    assert all("rank 1 of 3" in line for line in lines)


def test_openmpi(tmp_path: Path) -> None:
    mpirun = next((found for name in ("mpirun.openmpi", "mpirun") if (found := shutil.which(name))), None)
    if mpirun is None or "(Open" not in run([mpirun, "--version"]).stdout:
        pytest.skip("Open MPI's mpirun is not installed (apt-get install openmpi-bin)")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run([mpirun, "--oversubscribe", "-n", "2", sys.executable, str(program), "20"], **root)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"PE {r} of 2, local {r} of 2, True openmpi" for r in range(2)]
