"""Properties of a forked program: file descriptors under the requested numbers, interrupts, an unused driver."""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import python_path

from persistent_ops.runtime.compile.toolchain import find_cxx

pytestmark = pytest.mark.host

_COUNT = 20


def _pipes(first: int) -> dict[int, int]:
    """Open pipes; return the reading end's number by the writing end's number, which is at least `first`."""
    found = {}
    for _ in range(_COUNT):
        reader, writer = os.pipe()
        found[fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, first)] = reader
        os.close(writer)
    return found


@pytest.mark.parametrize("first", [3, 50, 200, 500])
@pytest.mark.parametrize("step", [1, -1])
def test_descriptors_keep_their_numbers(first: int, step: int) -> None:
    pipes = _pipes(first)
    numbers = list(pipes)[::step]
    program = f"import os\nfor number in {numbers}: os.write(number, str(number).encode())"
    arguments = [sys.executable, "-c", program, "--multiprocessing-fork"]
    process = multiprocessing.util.spawnv_passfds(os.fsencode(sys.executable), arguments, numbers)
    for writer in numbers:
        os.close(writer)
    said = {}
    for writer, reader in pipes.items():
        with open(reader, "rb") as pipe:
            said[writer] = pipe.read().decode()
    assert said == {number: str(number) for number in numbers}
    assert os.waitpid(process, 0)[1] == 0


_HELD_BACK = """
import signal, subprocess, sys
import warm_python

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as po.launch does where it starts a process
warm_python.fork_launches()
program = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
print(warm_python.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True).communicate()[0], end="")
print(len(warm_python.servers()))
"""


def test_programs_take_interrupts_whoever_has_started_their_server(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_HELD_BACK)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, str(tmp_path / "program.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.stdout == "False\n1\n", ran.stderr


_DRIVER = """
extern "C" int cuDeviceGetCount(int *) { return %d; }
"""
_FORKS = """
import subprocess, sys
import warm_python

warm_python.fork_launches(at_once=True)
print(warm_python.Popen([sys.executable, "-c", "print('forked')"], stdout=subprocess.PIPE, text=True).communicate()[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_used"), [(3, False), (0, True), (100, True)])
def test_nothing_is_forked_behind_a_driver_that_is_in_use(answer: int, is_used: bool, tmp_path: Path) -> None:
    """A driver that is not initialized returns 3. A driver without GPUs returns 100, and then always in a child."""
    (tmp_path / "driver.cpp").write_text(_DRIVER % answer)
    command = [*find_cxx().command, "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "program.py").write_text(_FORKS)
    environment = {**os.environ, "PYTHONPATH": python_path(), "LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ("an import has initialized CUDA" in ran.stderr) == is_used, ran.stderr
    assert ran.stdout.strip() == ("" if is_used else "forked"), ran.stderr
