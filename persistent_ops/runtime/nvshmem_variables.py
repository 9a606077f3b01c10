"""The environment variables that NVSHMEM reads when it starts, for settings without another interface."""

from __future__ import annotations

import logging
import os
from types import TracebackType

from .bootstrap.route import Interface

__all__ = ["NvshmemVariables"]

_log = logging.getLogger("persistent_ops")
_NO_MULTICAST = "NVSHMEM_DISABLE_NVLS"
_INTERFACE = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
_OWN_BYTES = 64 << 20  # of the symmetric heap, for NVSHMEM itself


class NvshmemVariables:
    """Sets what one start of NVSHMEM needs, and restores what was there on the way out, however that is.

    NVSHMEM's own thread spins on a core. It has work only where there is a network, or where device code calls
    nvshmem_global_exit, which nothing here does: NVSHMEM_DISABLE_LOCAL_ONLY_PROXY leaves it out where there is none.

    What the user has set stands. NVSHMEM_DISABLE_NVLS alone is set whatever was there, and stays: NVLink multicast can
    take a shared host's GPUs out of service, nothing here needs it, and a start that has timed out may go on later.

    Args:
        heap_bytes: of this PE's heap.
        interface: over which PEs find each other; None: NVSHMEM chooses.
    """

    def __init__(self, heap_bytes: int, interface: Interface | None) -> None:
        self._wanted = {
            "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes + _OWN_BYTES),
            "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
        }
        if interface is not None and _INTERFACE not in os.environ:
            self._wanted[_INTERFACE] = interface.name
            if interface.family:
                self._wanted["NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"] = interface.family
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> NvshmemVariables:
        asked = os.environ.get(_NO_MULTICAST, "1")
        if asked != "1":
            _log.warning("persistent_ops: %s=%s becomes 1: NVLink multicast is never used", _NO_MULTICAST, asked)
        os.environ[_NO_MULTICAST] = "1"
        self._before = {name: os.environ.get(name) for name in self._wanted}
        for name, value in self._wanted.items():
            os.environ.setdefault(name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
