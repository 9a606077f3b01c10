"""Compiling the C++ programs beside this file against the kernel sources."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CUDA = HERE.parent.parent / "cuda"
_FLAGS = ("-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off")
_SCRATCH = tempfile.TemporaryDirectory(prefix="host_driver-")  # of this process, for as long as it lives


@functools.cache
def standard_headers(*flags: str) -> tuple[str, ...]:
    """Precompile what drivers take of the C++ library: a third of their time to compile.

    Args:
        flags: of the drivers, as far as they say what code is made.

    Returns:
        Flags that let a driver begin with it; a compiler that cannot use it reads the headers themselves.
    """
    folder = Path(tempfile.mkdtemp(dir=_SCRATCH.name))
    header = folder / "standard.h"
    users = (HERE / "driver.h", CUDA / "platform" / "host_network.h")
    header.write_text("".join(re.findall(r"(?m)^#include <.*\n", "".join(user.read_text() for user in users))))
    command = [_compiler(), *_FLAGS, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, capture_output=True)  # the compilation of a driver reports errors
    return ("-include", str(header))


def _compiler() -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "no C++ compiler: install g++"
    return compiler


def compile_source(name: str, target: Path, *flags: str, cuda: Path = CUDA) -> Path:
    """Compile a source of this folder; skip the test where the compiler lacks the sanitizer that `flags` ask for."""
    compiler = _compiler()
    command = [compiler, *_FLAGS, *flags, "-I", str(cuda), str(HERE / name), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0 and "tsan" in result.stderr and "cannot find" in result.stderr:
        pytest.skip(f"{compiler} comes without ThreadSanitizer's library: {result.stderr.strip()[-200:]}")
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-4000:]}"
    return target


def load_shim(name: str, folder: Path) -> ctypes.CDLL:
    """Compile a source of this folder to a shared library and load it."""
    library = compile_source(name, folder / f"{name}.so", "-shared", "-fPIC", "-Werror")
    return ctypes.CDLL(str(library))
