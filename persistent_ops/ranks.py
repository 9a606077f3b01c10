"""The ranks of a job beside one another: what must be alike on all of their hosts, and what must differ."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
from collections.abc import Callable, Sequence

from .findings import Finding
from .rdma import devices
from .runtime import timeouts
from .runtime.bootstrap.connection import connect
from .runtime.bootstrap.launchers import detect
from .runtime.bootstrap.process_identity import boot_id
from .runtime.bootstrap.route import meeting_interface

__all__ = ["Seen", "compare", "gather"]

_SECTION = "Ranks"
_PACKAGES = ("persistent-ops", "torch", "nvidia-nvshmem-cu13", "nvshmem4py-cu13")


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank reports.

    Attributes:
        host: its host name.
        machine: the identity of the running system, which differs from machine to machine.
        interface: through which it reaches rank 0, and the address family; "unknown" without a route.
        ports: of RDMA devices, such as "mlx5_0/1 400 Gb/sec"; "none".
        versions: of the packages.
    """

    host: str
    machine: str
    interface: str
    ports: str
    versions: str


def gather() -> tuple[list[Seen], int]:
    """Meet the other ranks of the job that a launcher started; return what all report, and this rank. Collective.

    Raises:
        BootstrapError: a rank is missing, or cannot be reached.
    """
    bootstrap = connect(detect(os.environ), timeouts.for_joining(None))
    try:
        interface = meeting_interface(bootstrap)
        mine = Seen(
            socket.gethostname(),
            boot_id(),
            "unknown" if interface is None else " ".join(interface).strip(),
            ", ".join(f"{each.name}/{each.port} {each.rate}" for each in devices()) or "none",
            ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        )
        told = bootstrap.exchange("doctor", json.dumps(dataclasses.asdict(mine)).encode())
    finally:
        bootstrap.close()
    return [Seen(**json.loads(raw)) for raw in told], bootstrap.rank


def compare(ranks: Sequence[Seen]) -> list[Finding]:
    """Return what all ranks have in common, and where they differ."""
    listed = "; ".join(f"{host} (ranks {numbers})" for host, numbers in _ranks(ranks, lambda each: each.host).items())
    findings = [Finding(_SECTION, "hosts", "ok", listed)]
    machines: dict[str, set[str]] = {}
    for each in ranks:
        machines.setdefault(each.host, set()).add(each.machine)
    twice = ", ".join(host for host, of_name in machines.items() if len(of_name) > 1)
    if twice:
        text = f"several machines are called {twice}, and NVSHMEM takes them for one host"
        findings.append(Finding(_SECTION, "host names", "warning", text, "hostnamectl set-hostname NAME"))
    return [
        *findings,
        _alike(ranks, "interface to rank 0", lambda each: each.interface, "set MASTER_ADDR to rank 0's address"),
        _alike(ranks, "RDMA ports", lambda each: each.ports, "compare ibv_devinfo of the hosts"),
        _alike(ranks, "packages", lambda each: each.versions, "install the same versions on all hosts"),
    ]


def _alike(ranks: Sequence[Seen], name: str, value: Callable[[Seen], str], remedy: str) -> Finding:
    found = _ranks(ranks, value)
    if len(found) == 1:
        return Finding(_SECTION, name, "ok", f"all: {next(iter(found))}")
    text = "; ".join(f"ranks {numbers}: {each}" for each, numbers in found.items())
    return Finding(_SECTION, name, "warning", text, remedy)


def _ranks(ranks: Sequence[Seen], value: Callable[[Seen], str]) -> dict[str, str]:
    """Return the numbers of the ranks that have each value."""
    found: dict[str, list[str]] = {}
    for number, each in enumerate(ranks):
        found.setdefault(value(each), []).append(str(number))
    return {each: ", ".join(numbers) for each, numbers in found.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"
