"""Shared by tests of processes that find each other: environment, sockets, and patience."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persistent_ops.runtime.bootstrap.connection import Bootstrap
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.bootstrap.rendezvous import own_address
from persistent_ops.runtime.errors import BootstrapError

__all__ = ["LOOPBACK", "SLACK", "clean_environment", "host_address", "listening", "wait_for"]

# The folder that contains the package: a checkout on sys.path is enough, nothing needs to be installed.
_ROOT = Path(sys.modules[Bootstrap.__module__].__file__ or "").parents[3]
SLACK = 5.0  # seconds past a time-out that a busy machine with two cores may take
LOOPBACK = "0100007F"  # in the notation of the kernel's tables


def clean_environment(**more: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**environ, "PYTHONPATH": str(_ROOT), **more}


def host_address() -> str:
    try:
        return own_address()
    except BootstrapError:
        pytest.skip("this machine has no address but the loopback's")


def listening(pid: int) -> list[tuple[str, int]]:
    """Return (kernel's hexadecimal address, port) of the TCP sockets on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found
