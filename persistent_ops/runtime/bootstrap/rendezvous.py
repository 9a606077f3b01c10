"""Pass the address of rank 0's store to the other ranks, for each launcher.

If all ranks are on one host, the store listens on the loopback interface only. Rank 0 hands out its port over an
abstract Unix socket. The socket's name follows from the job's name, the kernel reports the user of each end to the
other, and the socket disappears with the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persistent_ops.runtime.bootstrap import pmi
from persistent_ops.runtime.bootstrap.launchers import LaunchEnvironment
from persistent_ops.runtime.bootstrap.mailbox import (
    Mailbox,
    StoreMailbox,
    Worker,
    connect_store,
    serve_store,
    tcp_store,
)
from persistent_ops.runtime.bootstrap.process_identity import identify
from persistent_ops.runtime.errors import BootstrapError

__all__ = ["Meeting", "meet", "own_address", "store_over"]

_SEND_S = 1.0  # for one process of this host to take the address

# Stores at a port that was agreed beforehand. They serve until the process ends, because another init() finds the
# port again, and a socket that is closed and opened in between could be taken.
_fixed: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True)
class Meeting:
    """The mailbox that the ranks of a job have found.

    Args:
        mailbox: The mailbox.
        serves: Whether this process serves the store, and must not leave before the others.
        stop: Stops handing out the address; called when all ranks are there, or the attempt has failed.
    """

    mailbox: Mailbox
    serves: bool
    stop: Callable[[], None]


def meet(environment: LaunchEnvironment, attempt: int, deadline: float) -> Meeting:
    """Find the mailbox of the job; serve it if this process is rank 0 and no other process serves it.

    Args:
        environment: What the launcher set.
        attempt: How many times this process has connected before; keeps one init() apart from the next.
        deadline: `time.monotonic()` at which to give up.
    """
    worker = Worker()
    try:
        return _meet(environment, attempt, worker, deadline)
    except BaseException:
        worker.close()
        raise


def _meet(environment: LaunchEnvironment, attempt: int, worker: Worker, deadline: float) -> Meeting:
    kind, job = environment.rendezvous, f"{environment.job}/{attempt}"
    if kind == "store":
        store = connect_store(environment.host, environment.port, worker, deadline)
        return _meeting(store, job, worker, serves=False)
    if kind == "tcp":
        store, serves = _meet_at_fixed_port(environment, worker, deadline)
        return _meeting(store, job, worker, serves=serves)
    if kind == "local":
        return _meet_locally(environment.rank, job, worker, deadline)
    communicator = _communicator(worker, deadline, start=kind == "mpi")
    one_host = environment.local_world_size == environment.world_size
    if kind == "pmi" and communicator is None:
        assert environment.pmi_fd is not None  # detect() has seen to that.
        hydra = pmi.client(environment.pmi_fd, deadline)
        if one_host:
            return _meet_locally(environment.rank, f"hydra/{hydra.kvsname}/{attempt}", worker, deadline)
        store = text = None
        key = f"persistent_ops-{attempt}"
        if environment.rank == 0:
            store, text = _serve(own_address(), worker, deadline)
            hydra.put(key, text, deadline)
        hydra.barrier(deadline)
        text = text or hydra.get(key, deadline)
    elif kind in ("pmi", "mpi") and communicator is not None:
        store = text = None
        _same_numbers(communicator, environment)
        if environment.rank == 0:
            store, text = _serve("127.0.0.1" if one_host else own_address(), worker, deadline)
        text = _broadcast(communicator, text, deadline)
    else:
        raise BootstrapError(f"the rendezvous {kind!r} is unknown; take a LaunchEnvironment from launchers.detect()")
    host, port, token = _parse(text)
    if store is None:
        store = connect_store(host, port, worker, deadline)
    return _meeting(store, token, worker, serves=environment.rank == 0)


def _meeting(store: Any, job: str, worker: Worker, *, serves: bool, stop: Callable[[], None] | None = None) -> Meeting:
    mailbox = StoreMailbox(store, f"persistent_ops/{job}/", worker)
    return Meeting(mailbox, serves, stop or (lambda: None))


def _serve(host: str, worker: Worker, deadline: float) -> tuple[Any, str]:
    """Serve a store, and return it with the text by which the others find it."""
    store, port = serve_store(host, worker, deadline)
    # The token distinguishes this job's ranks from ranks of an older job that still have an address given out again.
    return store, f"{host}|{port}|{secrets.token_hex(16)}"


def _parse(text: str) -> tuple[str, int, str]:
    host, _, rest = text.partition("|")
    port, _, token = rest.partition("|")
    if not host or not port.isdecimal() or not token:
        raise BootstrapError("what came in place of rank 0's address is not one; do all ranks run the same version?")
    return host, int(port), token


def _meet_at_fixed_port(environment: LaunchEnvironment, worker: Worker, deadline: float) -> tuple[Any, bool]:
    address = (environment.host, environment.port)
    if environment.rank != 0:
        return connect_store(*address, worker, deadline), False
    if address in _fixed:
        return _fixed[address], True

    def serve() -> Any:
        # multi_tenant: torch.distributed.init_process_group of this process may serve its own keys at the same port.
        return tcp_store(*address, deadline, is_master=True, multi_tenant=True)

    try:
        _fixed[address] = worker.call(serve, deadline - time.monotonic())
    except TimeoutError:
        raise BootstrapError("rank 0 could not serve the job's store at MASTER_PORT within the time-out") from None
    except (RuntimeError, OSError):
        # The port is taken. If by another process that thinks it is rank 0, the ranks' claims there show it.
        return connect_store(*address, worker, deadline), False
    return _fixed[address], True


def _meet_locally(rank: int, job: str, worker: Worker, deadline: float) -> Meeting:
    digest = hashlib.sha256(job.encode()).hexdigest()[:32]
    name = f"\0persistent_ops/{os.getuid()}/{digest}"
    if rank == 0:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
        except OSError:
            # Another process has the name. If it is ours, it thinks that it is rank 0, and the claims show it.
            listener.close()
        else:
            try:
                store, text = _serve("127.0.0.1", worker, deadline)
                stop = _hand_out(listener, text)
            except BaseException:
                listener.close()
                raise
            return _meeting(store, _parse(text)[2], worker, serves=True, stop=stop)
    host, port, token = _parse(_ask_locally(name, deadline))
    return _meeting(connect_store(host, port, worker, deadline), token, worker, serves=False)


def _hand_out(listener: socket.socket, text: str) -> Callable[[], None]:
    """Send `text` to every process of this user that connects, until the returned function is called."""
    listener.listen(1024)
    stopped = threading.Event()

    def run() -> None:
        with listener:
            while not stopped.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_SEND_S)
                    if _peer_uid(connection) == os.getuid():
                        connection.sendall(text.encode())

    thread = threading.Thread(target=run, name="persistent_ops address", daemon=True)

    def stop() -> None:
        stopped.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # Wakes accept(); close() alone does not.
        thread.join(_SEND_S)

    thread.start()
    return stop


def _ask_locally(name: str, deadline: float) -> str:
    while True:
        remaining = deadline - time.monotonic()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(remaining, 0.05))
            try:
                connection.connect(name)
                uid = _peer_uid(connection)
                if uid != os.getuid():
                    raise BootstrapError(
                        f"user {uid} holds the name under which this job's rank 0 should be found; end that process, "
                        "or set another MASTER_PORT, or start the job again"
                    )
                text = b""
                while part := connection.recv(512):
                    text += part
                    if len(text) > 512:
                        break
                if text:
                    return text.decode("ascii", "replace")
            except OSError:
                pass  # Rank 0 is not there yet, or was just leaving.
        if remaining <= 0:
            raise BootstrapError(
                "rank 0 is missing: it did not appear on this host within the time-out; did it start, did it fail, and "
                "is it on this host?"
            )
        time.sleep(0.02)


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def own_address() -> str:
    """Return the address at which other hosts reach this one: MASTER_ADDR if set, else the default route's address."""
    name = os.environ.get("MASTER_ADDR", "")
    if name:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            raise BootstrapError("MASTER_ADDR cannot be resolved; set it to an address of rank 0's host") from None
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Connecting a datagram socket sends nothing; it only makes the kernel choose the interface.
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    raise BootstrapError(
        "this job spans several hosts and this one has no default route; set MASTER_ADDR to rank 0's address"
    )


def _communicator(worker: Worker, deadline: float, *, start: bool) -> Any:
    """Return mpi4py's world communicator where MPI runs in this process, or where `start` asks for it; else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD
    if not start:
        return None

    def load() -> Any:
        from mpi4py import MPI  # type: ignore[import-not-found]

        return MPI.COMM_WORLD

    try:
        return worker.call(load, deadline - time.monotonic())
    except TimeoutError:
        raise BootstrapError("MPI was not initialized within the time-out; is one of the ranks missing?") from None
    except (ImportError, RuntimeError) as error:
        raise BootstrapError(
            "Open MPI started this job on several hosts and rank 0's address is unknown; set MASTER_ADDR and "
            "MASTER_PORT (mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500), or install mpi4py"
        ) from error


def _same_numbers(communicator: Any, environment: LaunchEnvironment) -> None:
    rank, size = communicator.Get_rank(), communicator.Get_size()
    if (rank, size) != (environment.rank, environment.world_size):
        raise BootstrapError(
            f"mpi4py's MPI says rank {rank} of {size}, {environment.launcher} says rank {environment.rank} of "
            f"{environment.world_size}: mpi4py is built for another MPI than the launcher's; install the matching one"
        )


def _broadcast(communicator: Any, text: str | None, deadline: float) -> str:
    buffer = bytearray((text or "").encode().ljust(256, b"\0"))
    request = communicator.Ibcast(buffer, root=0)
    while True:
        is_over = time.monotonic() >= deadline
        if request.Test():
            break
        if is_over:
            raise BootstrapError("rank 0's address did not arrive over MPI within the time-out; is a rank missing?")
        time.sleep(0.001)
    return bytes(buffer).rstrip(b"\0").decode("ascii", "replace")


def store_over(group: Any, worker: Worker, deadline: float) -> Any:
    """Serve a store from rank 0 of a group of torch.distributed, for groups that do not show theirs; collective."""
    import torch.distributed as dist

    rank = dist.get_rank(group)

    def gather(mine: Any) -> list[Any]:
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
        return answers

    try:
        seconds = max(deadline - time.monotonic(), 0.001)
        hosts = worker.call(lambda: gather(identify().host), seconds)
        store = address = None
        if rank == 0:
            host = "127.0.0.1" if len(set(hosts)) == 1 else own_address()
            store, port = serve_store(host, worker, deadline)
            address = (host, port)
        host, port = worker.call(lambda: gather(address), max(deadline - time.monotonic(), 0.001))[0]
    except TimeoutError:
        raise BootstrapError("not all ranks of the group came within the time-out; is one missing or dead?") from None
    return connect_store(host, port, worker, deadline) if store is None else store
