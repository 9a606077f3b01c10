"""PEs that run Triton's interpreter: processes in which TRITON_INTERPRET is set before Triton is imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from folders import INTERPRETER
from kept_pes import in_processes
from worlds import run_pes

__all__ = ["hasten", "interpreting", "run_interpreters"]


@contextlib.contextmanager
def interpreting(backend: str = "host") -> Iterator[None]:
    """Let PEs of the host backend that start meanwhile interpret; on GPUs nothing changes."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "host":
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setattr(sys, "path", [INTERPRETER, *sys.path])  # which a process that starts takes over
        yield


def run_interpreters(program: Callable[..., Any], world: int, backend: str, *args: Any, timeout: float) -> list[Any]:
    """Run a program as `run_pes` does, on the host in processes that interpret and are kept (kept_pes.py)."""
    if backend != "host":
        return run_pes(program, world, backend, *args, timeout=timeout)
    with interpreting():
        return in_processes(program, world, backend, *args, timeout=timeout)


def hasten() -> None:
    """Where this process interprets, change triton.language once for each function, as the interpreter does per call.

    Two thirds of the time of a launch go there.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    changed = set()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn not in changed:
            changed.add(self.fn)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **options)

    InterpretedFunction.__call__ = call
