"""What a worker of pytest-xdist had to say when it crashed, in the failure of the test that it was at.

pytest-xdist tells only which test that was; where all threads were stands somewhere between the lines of progress, and
by which signal the worker ended nowhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

__all__ = ["register"]

_FOLDER = "PO_TEST_CRASHES"  # variable: where workers write
_END_S = 10.0  # for a worker that is gone to be reaped


class _Worker:
    """Has a crash of this process written to a file, in place of the terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self) -> Iterator[None]:  # pytest's own plugin has chosen the terminal by then
        faulthandler.enable(self._descriptor)
        return (yield)


class _Controller:
    """Adds it to the failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._killed_before = _killed_for_memory()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        worker: WorkerController = report.node  # type: ignore[attr-defined]
        name = worker.gateway.id
        with contextlib.suppress(OSError):
            trace = (self._folder / name).read_text(errors="replace")
            killed = _killed_for_memory() - self._killed_before
            memory = f"processes that the system has killed for want of memory since the tests began: {killed}"
            report.longrepr = f"{report.longrepr}\n{_how_it_ended(worker)}\n{memory}\n{trace}"


def _killed_for_memory() -> int:
    counters = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", counters.read_text() if counters.exists() else "", re.MULTILINE)
    return int(found[1]) if found else 0


def _how_it_ended(worker: WorkerController) -> str:
    process = getattr(getattr(worker.gateway, "_io", None), "popen", None)  # execnet tells nobody
    if process is None:
        return "how it ended is not known"
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "its process is still there"
    return f"it ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def register(config: pytest.Config) -> None:
    """Watch this process where it is a worker; else the workers that it will start."""
    if hasattr(config, "workerinput"):
        path = Path(os.environ[_FOLDER], config.workerinput["workerid"])
        config.pluginmanager.register(_Worker(os.open(path, os.O_WRONLY | os.O_CREAT)), "crash_reports")
        return
    folder = tempfile.TemporaryDirectory(prefix="crashes")
    config.add_cleanup(folder.cleanup)
    os.environ[_FOLDER] = folder.name
    config.pluginmanager.register(_Controller(Path(folder.name)), "crash_reports")
