"""torch's process group of a world's PEs, for code beside the operators: references, baselines, DDP's gradients."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..bounded import within
from ..torch_private import abort_groups
from .connection import Bootstrap
from .mailbox import Worker, connect_store, serve_store
from .rendezvous import own_address

__all__ = ["abort_process_group", "only_tensor", "process_group"]


@contextlib.contextmanager
def process_group(
    bootstrap: Bootstrap, *, backend: str, device: torch.device, timeout: float, max_ctas: int | None = None
) -> Iterator[None]:
    """Make a process group of all PEs that lives as long as the context, whatever launcher started them.

    The PEs meet in a store at the host of rank 0, which listens on the loopback interface alone where that is the only
    host. Nothing lies on disk, so nothing is left there however a PE ends.

    Args:
        bootstrap: of this PE.
        backend: "gloo" or "nccl".
        device: of this PE.
        timeout: seconds that any collective may take.
        max_ctas: of NCCL's kernels, which then have no clusters either (`po.nn.leave_room`); None for NCCL's choice.

    Yields:
        Nothing: the group is torch's default group meanwhile.

    Raises:
        RuntimeError: this process has a default group already.
    """
    if dist.is_initialized():
        raise RuntimeError("torch.distributed already has a default process group; destroy it first")
    limit = datetime.timedelta(seconds=timeout)
    deadline = time.monotonic() + timeout
    worker, store, together = Worker(), None, False
    try:
        address = b""
        if bootstrap.rank == 0:
            host = "127.0.0.1" if bootstrap.single_host else own_address()
            store, port = serve_store(host, worker, deadline)
            address = json.dumps([host, port]).encode()
        host, port = json.loads(bootstrap.exchange("process_group/rendezvous", address)[0])
        if bootstrap.single_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if store is None:
            store = connect_store(host, port, worker, deadline)
        dist.init_process_group(
            backend,
            store=store,
            rank=bootstrap.rank,
            world_size=bootstrap.world_size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
            pg_options=None if max_ctas is None else _nccl_options(max_ctas, limit),
        )
        yield
        bootstrap.exchange("process_group/done", b"")  # no PE destroys the group while another still uses it
        together = True
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if together:
            bootstrap.exchange("process_group/left", b"")  # nor the store
        store = None
        worker.close()


def abort_process_group(seconds: float) -> None:
    """End this PE's process group, and what NCCL has under way in it: no peer is waited for.

    Args:
        seconds: for it.

    Raises:
        BootstrapError: it has not returned in time; another call is refused then.
    """
    if dist.is_initialized() and abort_groups is not None:
        within(seconds, abort_groups, "torch's abort of the process group")


def _nccl_options(max_ctas: int, limit: datetime.timedelta) -> object:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options.config.cga_cluster_size = max_ctas, 1
    options._timeout = limit  # which torch compares with its own, and warns
    return options


def only_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    """Return the result of a group's all-reduce of one tensor, as DDP takes it."""
    (tensor,) = future.value()
    return tensor
