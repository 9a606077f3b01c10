"""Compiling the C++ programs beside this file against the kernel sources."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CUDA = HERE.parent.parent / "cuda"
_FLAGS = ("-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off")


def compile_source(name: str, target: Path, *flags: str, cuda: Path = CUDA) -> Path:
    """Compile a source of this folder; skip the test where the compiler lacks the sanitizer that `flags` ask for."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "no C++ compiler: install g++"
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
