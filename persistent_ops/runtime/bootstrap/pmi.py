"""PMI-1, the line protocol between a process and Hydra (mpiexec.hydra, nvshmrun), over PMI_FD.

Hydra ends the job if a process that has sent `init` leaves without `finalize`. After `finalize`, Hydra waits for the
other processes, whatever the exit status is. So `finalize` is sent when the interpreter exits normally, and not before:
`init` is accepted once, and a program may connect several times. A process that failed leaves without `finalize`, so
that Hydra ends the others.
"""

from __future__ import annotations

import atexit
import os
import select
import stat
import sys
import time

from persistent_ops.runtime.errors import BootstrapError

__all__ = ["PmiClient", "client", "set_failed"]

_clients: dict[int, PmiClient] = {}


def client(fd: int, deadline: float) -> PmiClient:
    """Return this process' connection to Hydra, made at the first call.

    Args:
        fd: The descriptor that PMI_FD names.
        deadline: `time.monotonic()` at which to give up.
    """
    found = _clients.get(fd)
    if found is None or found.pid != os.getpid():
        found = _clients[fd] = PmiClient(fd, deadline)
        atexit.register(found.finalize)
    return found


def set_failed(failed: bool) -> None:
    """Note whether this process could not take part in its job; Hydra ends the job when it leaves."""
    for found in _clients.values():
        found.failed = failed


class PmiClient:
    """One process' connection to Hydra."""

    def __init__(self, fd: int, deadline: float) -> None:
        try:
            usable = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            usable = False
        if not usable:
            raise BootstrapError(
                f"PMI_FD={fd} is not an open connection to Hydra: a program between mpiexec and this process closed "
                "it; start Python directly, or pass the descriptor on (subprocess: pass_fds, close_fds=False)"
            )
        self.pid = os.getpid()
        self._fd = fd
        self.failed = True  # until connected
        self._open = True
        self._rest = b""
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init", deadline)
        self.kvsname = self._ask("get_my_kvsname", "my_kvsname", deadline)["kvsname"]

    def put(self, key: str, value: str, deadline: float) -> None:
        """Store a value (no blanks) that the other ranks can read after the next `barrier`."""
        self._ask(f"put kvsname={self.kvsname} key={key} value={value}", "put_result", deadline)

    def get(self, key: str, deadline: float) -> str:
        """Return the value that some rank stored before the last `barrier`."""
        return self._ask(f"get kvsname={self.kvsname} key={key}", "get_result", deadline)["value"]

    def barrier(self, deadline: float) -> None:
        """Wait until all ranks of the job are here."""
        self._ask("barrier_in", "barrier_out", deadline)

    def finalize(self) -> None:
        """Inform Hydra that this process may leave; the job is then not killed."""
        mpi = sys.modules.get("mpi4py.MPI")
        if not self._open or self.pid != os.getpid() or (mpi is not None and mpi.Is_initialized()):
            return  # An MPI that was initialized later shares the connection and finalizes it itself.
        if self.failed or getattr(sys, "last_type", None) is not None:  # the latter: an exception ended the program
            return
        self._open = False
        try:
            self._ask("finalize", "finalize_ack", time.monotonic() + 2.0)
        except BootstrapError:
            return  # The interpreter is exiting; Hydra notices the closed connection.

    def _ask(self, request: str, answer: str, deadline: float) -> dict[str, str]:
        command = request.split(" ", 1)[0]
        try:
            os.write(self._fd, f"cmd={request}\n".encode())
            while b"\n" not in self._rest:
                ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise BootstrapError(
                        f"Hydra did not answer PMI {command!r} within the time-out; is a rank missing or dead?"
                    )
                data = os.read(self._fd, 4096)
                if not data:
                    raise BootstrapError(f"Hydra closed its connection at PMI {command!r}; is the job being killed?")
                self._rest += data
        except OSError as error:
            raise BootstrapError(f"the connection to Hydra (PMI_FD={self._fd}) broke at PMI {command!r}") from error
        line, _, self._rest = self._rest.partition(b"\n")
        fields = dict(part.partition("=")[::2] for part in line.decode("utf-8", "replace").split())
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0":
            raise BootstrapError(f"Hydra refused PMI {command!r}: it answered {line[:80]!r} in place of {answer!r}")
        return fields
