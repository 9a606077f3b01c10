"""po.launch of code that no other process can import: python -c, standard input, a notebook, a package's __main__.

Each program runs once, in an interpreter of its own. Its PEs are forked (see `warm_python`), except for the PEs of the
notebook's first launch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from warm_python import Popen
from worlds import python_path

import persistent_ops as po
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES

pytestmark = pytest.mark.host

PROGRAM = """
import torch
import persistent_ops as po

class Found:
    def __init__(self, rank, sums):
        self.rank, self.sums = rank, sums

class Refused(Exception):
    pass

scale = 3.0

def product(x):
    return (lambda y: scale * y)(x)

def program(weight, refusing=None):
    po.init("host", timeout=20.0, heap_size=16 << 20)
    rank = po.rank()
    if rank == refusing:
        raise Refused(f"rank {rank}")
    found = Found(rank, po.gemv_all_reduce(weight, product(torch.full((4,), rank + 1.0))).tolist())
    po.finalize()
    return found

weight = torch.ones(2, 4)
"""
WITH = """
found = po.launch(program, 2, weight, timeout=100)
assert all(type(one) is Found for one in found), found
print([(one.rank, one.sums) for one in found], flush=True)
"""
REFUSED = """
try:
    po.launch(program, 2, weight, 1, timeout=100)
except Refused as error:
    print("Refused:", error, flush=True)
"""
WITHOUT = """
import sys
print("without", flush=True)
sys.modules["cloudpickle"] = None
for call in (lambda: po.launch(program, 2, weight), lambda: po.launch(print, 2, Found(0, []))):
    try:
        call()
    except ValueError as error:
        print(error, flush=True)
print(po.launch(abs, 2, -3, timeout=100))  # nothing of __main__
print([one.sums for one in po.launch(program, 2, weight, threads=True, timeout=100)])
"""
# Its PEs are forked. The code that sets this up is not part of __main__.
FORKED = """
__import__("warm_python").fork_launches()
"""
# As IPython runs a cell: in a __main__ of its own, which is not a file.
NOTEBOOK = """
import sys
import __main__

source = open(sys.argv[1]).read()
del __main__.__file__
exec(compile(source, "<ipython-input-1>", "exec"), __main__.__dict__)
"""


def run(how: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable]
    if how == "-c":
        command += ["-c", program]
    elif how == "stdin":
        command += ["-"]
    elif how == "notebook":
        (folder / "cell").write_text(program)
        (folder / "kernel.py").write_text(NOTEBOOK)
        command += [str(folder / "kernel.py"), str(folder / "cell")]
    elif how == "package":
        (folder / "package").mkdir()
        (folder / "package/__main__.py").write_text(program)
        command += ["-m", "package"]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ["PYTHONPATH"] = f"{folder}{os.pathsep}{python_path()}"
    return subprocess.run(
        command,
        env=environ,
        cwd=folder,
        input=program if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


WAYS = ["-c", "stdin", "notebook", "package"]
HAS_CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None


@functools.cache
def printed(how: str) -> tuple[list[str], list[str]]:
    """Return the lines of launches with cloudpickle, if it is installed, and of launches without it."""
    parts = [PROGRAM, *([WITH, REFUSED] if HAS_CLOUDPICKLE else []), WITHOUT]
    parts.insert(2 if how == "notebook" else 0, FORKED)
    program = "".join(parts)
    with tempfile.TemporaryDirectory() as folder:
        done = run(how, program, Path(folder))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    middle = lines.index("without")
    return lines[:middle], lines[middle + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_fn_of_a_main_that_is_no_file(how: str) -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed (pip install 'persistent-ops[notebook]')")
    sums = [36.0, 36.0]
    assert printed(how)[0] == [str([(0, sums), (1, sums)]), "Refused: rank 1"]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_without_cloudpickle_the_remedies_are_named(how: str) -> None:
    of_fn, of_args, numbers, sums = printed(how)[1]
    for name, text in (("program", of_fn), ("Found", of_args)):
        assert text.startswith(f"fn and args: {name} is defined in __main__"), text
        assert "pip install 'persistent-ops[notebook]'" in text
        assert "threads=True" in text and "module" in text
    assert (numbers, sums) == ("[3, 3]", "[[36.0, 36.0], [36.0, 36.0]]")


def test_what_a_fresh_process_does_not_find_is_named(tmp_path: Path) -> None:
    """As at the prompt of `python -i script.py`: __main__ is a file, which does not define the function."""
    (tmp_path / "script.py").write_text(
        "import persistent_ops as po\n"
        "if __name__ == '__main__':\n"
        "    exec('def program(): pass')\n"
        "    po.launch(program, 1, timeout=100)\n"
    )
    run_script = "import __main__; __main__.__file__ = 'script.py'; exec(open('script.py').read())"
    environ = {**os.environ, "PYTHONPATH": str(Path(po.__file__).resolve().parents[1])}
    command = [sys.executable, "-c", run_script]
    with Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
        _, told = program.communicate(timeout=100)
    assert program.returncode == 1
    last = told.splitlines()[-1]
    assert "PersistentOpsError" in last and "'program'" in last and "cannot be found by a PE's process" in last
