"""Join the world of a job: find the launcher or group that names the peers, and the backend."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import torch

from . import pe_threads, timeouts
from .backend import Backend
from .bootstrap import launchers
from .bootstrap.connection import Bootstrap, connect, from_group
from .compile.description import COMM, describe
from .errors import BackendUnavailableError, BootstrapError
from .heap import whole_pages
from .host import HostBackend
from .pe_failure import text_of
from .world import World, adopt, refuse_second

__all__ = ["init"]

_log = logging.getLogger("persistent_ops")
_DEFAULT_HEAP_BYTES = {"host": 1 << 30, "cuda": 4 << 30}


def init(
    backend: str = "auto",
    group: Any = None,
    timeout: float | None = None,
    *,
    operator_timeout: float | None = None,
    heap_size: int | None = None,
    transport: str = "auto",
    host_options: dict[str, int] | None = None,
) -> None:
    """Join the world of this job; collective. See `persistent_ops.init`."""
    timeout = timeouts.for_joining(timeout)
    operator_timeout = timeouts.for_operators(operator_timeout)
    _check_choices(backend, transport, heap_size, host_options)
    refuse_second()
    describe(COMM)  # before PEs meet: the first time it is compiled
    bootstrap = _meet_peers(group, timeout)
    made: Backend | None = None
    try:
        made = _make_backend(backend, bootstrap, timeout, heap_size, transport, host_options)
        world = World(bootstrap, made, operator_timeout)
    except BaseException as error:
        message = f"{type(error).__name__}: {text_of(error)}"
        try:
            if made is None:
                bootstrap.fail(message)
            else:
                made.close(is_alone=not bootstrap.fail_and_meet(message))
        finally:
            bootstrap.close()
        raise
    adopt(world, of_thread=bootstrap is pe_threads.thread_bootstrap())
    if backend == "auto":
        level = logging.INFO if world.rank == 0 else logging.DEBUG
        plural = "" if world.size == 1 else "s"
        _log.log(level, "persistent_ops: %d PE%s on backend '%s'", world.size, plural, world.backend.name)


def _check_choices(backend: str, transport: str, heap_size: Any, host_options: Any) -> None:
    if backend not in ("auto", "cuda", "host"):
        raise ValueError(f"backend: expected 'auto', 'cuda' or 'host', got {backend!r}")
    if transport not in ("auto", "staged") and not re.fullmatch(r"nodes:[1-9]\d*", str(transport)):
        raise ValueError(f"transport: expected 'auto', 'staged' or 'nodes:N', got {transport!r}")
    if heap_size is not None and (not isinstance(heap_size, int) or isinstance(heap_size, bool)):
        raise TypeError(f"heap_size: expected a whole number of bytes, got {heap_size!r}")
    if not isinstance(host_options, (dict, type(None))):
        raise TypeError(f"host_options: expected a dict, got {host_options!r}")
    unknown = set(host_options or {}) - {"network_delay_us", "wg_size"}
    if unknown:
        raise TypeError(
            f"host_options: expected network_delay_us and wg_size, got {', '.join(sorted(map(str, unknown)))}"
        )


def _meet_peers(group: Any, timeout: float) -> Bootstrap:
    """Return the connection to the peers: of a PE that is a thread, over a process group, or through a launcher."""
    bootstrap = pe_threads.thread_bootstrap()
    if bootstrap is not None:
        if bootstrap.is_closed:
            raise RuntimeError(
                "a PE that is a thread has one world in a launch: call po.launch() again, or use processes"
            )
        bootstrap.timeout = timeout
        return bootstrap
    if group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return from_group(group, timeout)
    return connect(launchers.detect(os.environ), timeout)


def _make_backend(
    name: str,
    bootstrap: Bootstrap,
    timeout: float,
    heap_size: int | None,
    transport: str,
    host_options: dict[str, int] | None,
) -> Backend:
    if bootstrap.world_size > (most := describe(COMM).constants["kMostPes"]):
        raise BootstrapError(f"a world has at most {most} PEs, this job has {bootstrap.world_size}")
    chosen = name
    if name == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "host"
    everyone = [raw.decode() for raw in bootstrap.exchange("backend", chosen.encode())]
    if len(set(everyone)) > 1:
        listed = ", ".join(f"PE {pe}: {other}" for pe, other in enumerate(everyone))
        raise BackendUnavailableError(
            f"the PEs chose different backends ({listed}); pass backend='host' or 'cuda' on all"
        )
    if heap_size is not None and heap_size <= 0:
        raise ValueError(f"heap_size: expected bytes above 0, got {heap_size}")
    heap_bytes = whole_pages(heap_size or _DEFAULT_HEAP_BYTES[chosen])
    sizes = [int(raw) for raw in bootstrap.exchange("heap-size", str(heap_bytes).encode())]
    if len(set(sizes)) > 1:
        raise BootstrapError(f"heap_size differs between PEs: {sizes} bytes")
    if chosen == "host":
        return HostBackend(bootstrap, heap_bytes, transport, **(host_options or {}))
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "backend='cuda' needs a GPU that torch can use, and torch.cuda.is_available() is False here "
            f"(torch {torch.__version__}). Use backend='host', or install a CUDA build of torch; "
            "`persistent-ops doctor` shows what is missing."
        )
    try:
        from .gpu import GpuBackend
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend='cuda' needs nvshmem4py and cuda.core ({error}): pip install 'persistent-ops[cuda13]'"
        ) from error
    return GpuBackend(bootstrap, heap_bytes, transport, timeout)
