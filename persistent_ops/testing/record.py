"""Results as JSON lines, with the identity of the run that made them."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import persistent_ops

__all__ = [
    "Recorder",
    "append_line",
    "describe_run",
    "pes_text",
    "read_lines",
    "select",
    "unique",
    "us_text",
    "what_ran",
]

_PACKAGES = ("nvidia-nvshmem-cu13", "nvshmem4py-cu13", "cuda-core", "nvidia-nccl-cu13")


class Recorder:
    """Appends JSON lines to a file, each at once, so that a run that is cut off keeps what it measured.

    Args:
        path: of the file; None for no record.
        replaces: whether the first line takes the place of all that the file had.
    """

    def __init__(self, path: Path | None, *, replaces: bool = False) -> None:
        self._path = path
        self._replaces = replaces

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line; nothing on PEs without a file."""
        if self._path is not None:
            if self._replaces:
                self._path.write_text("")
                self._replaces = False
            append_line(self._path, {"kind": kind, **fields})


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append JSON types to a file, as one line; numbers that JSON has not, such as NaN, become null."""
    with path.open("a") as file:
        file.write(json.dumps(_finite(line), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that a Recorder wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def select(lines: Sequence[dict[str, Any]], kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the lines of a kind whose fields have the wanted values."""
    return [
        line
        for line in lines
        if line["kind"] == kind and all(line.get(name) == value for name, value in wanted.items())
    ]


def unique(lines: Sequence[dict[str, Any]], field: str) -> list[Any]:
    """Return the values of a field, each once, in the order of the lines."""
    return list(dict.fromkeys(line[field] for line in lines))


def pes_text(count: int) -> str:
    """Return so many PEs in words."""
    return "1 PE" if count == 1 else f"{count} PEs"


def us_text(value: float) -> str:
    """Return microseconds with as many decimals as mean something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def describe_run(rank: int, *, command: str, backend: str, device: torch.device) -> dict[str, Any]:
    """Return the machine, versions, date, command and, in a checkout, the commit; nothing on ranks above 0."""
    if rank != 0:
        return {}
    found: dict[str, Any] = {
        **what_ran(command),
        "backend": backend,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if backend == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    else:
        found["processor"] = platform.processor() or platform.machine()
    return found


def what_ran(command: str) -> dict[str, Any]:
    """Return the date, the command and the commit of the package that runs; None for that where it is no checkout's."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "command": command, "commit": _commit()}


def _commit() -> str | None:
    folder = str(Path(persistent_ops.__file__).resolve().parent)
    if _output("git", "-C", folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed, maybe inside a repository of something else
    commit = _output("git", "-C", folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + (" with changes" if _output("git", "-C", folder, "status", "--porcelain", "-uno") else "")


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
