"""Identity of a process among the processes of this host and of others, including containers that share a host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "boot_id", "identify", "pid_space", "start_of"]


@dataclass(frozen=True)
class ProcessIdentity:
    """The report of a process about itself."""

    host: str  # host name and boot id: equal on two PEs that share memory, whatever the host name alone says
    pid_space: str
    pid: int
    started: str

    @property
    def kernel(self) -> tuple[str, str]:
        """The running kernel and the PID namespace: equal on processes that see each other."""
        return self.host.rpartition("/")[2] or self.host, self.pid_space

    def is_seen_dead_by(self, other: ProcessIdentity) -> bool:
        """Return whether this process has ended, as far as `other`, which asks, can see it."""
        if self.kernel != other.kernel or not self.started:
            return False
        return start_of(self.pid) != self.started


def identify() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(f"{socket.gethostname()}/{boot_id()}", pid_space(), pid, start_of(pid))


def boot_id() -> str:
    """Return the identity of this host, the same in all of its containers; "" if the kernel does not give it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_space() -> str:
    """Return the identity of this process' PID namespace on this host; "" if the kernel does not give it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start time of a process, which identifies it among processes with its PID; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")
