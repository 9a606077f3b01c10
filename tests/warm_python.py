"""New Python processes that have already imported torch and the package. The import takes longer than most programs.

A server (`warm_server`) forks them. Each one becomes a child of the process that asked for it, as if that process had
started it. It has its own `__main__`, environment, folder, file descriptors and exit, and one thread. Differences:
modules are already imported, and str hashes are equal in all of them. Tests of an import or of an interpreter's start
use `subprocess`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing.util
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from folders import FOLDERS, INTERPRETER, TESTS

__all__ = ["Popen", "fork_launches", "servers"]

_PR_SET_CHILD_SUBREAPER = 36
# Variables that may be read when the interpreter starts or libraries are loaded, which is too late after a fork.
_READ_EARLY = re.compile(
    r"PYTHON(?!PATH$)|LD_|LC_|LANG|MALLOC_|(OMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|CUDA|NVIDIA|TRITON)_(?!SYMM_MEM_)"
)

_spawn = multiprocessing.util.spawnv_passfds
_lock = threading.Lock()
_servers: dict[bool, _Server] = {}  # by whether their programs run Triton's interpreter
_is_on = False  # whether processes are forked


class _Server:
    """A process that forks others, for the process that started it.

    Args:
        interprets: whether their kernels of Triton are interpreted.
    """

    def __init__(self, *, interprets: bool) -> None:
        self._parent = os.getpid()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folders = [*([INTERPRETER] if interprets else []), str(TESTS.parent), *FOLDERS]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join(folders), **({"TRITON_INTERPRET": "1"} if interprets else {})}
        with theirs:
            command = [sys.executable, str(TESTS / "warm_server.py"), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._early = _read_early(environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_mine(self) -> bool:
        return os.getpid() == self._parent

    def serves(self, environment: dict[str, str]) -> bool:
        return _read_early(environment) == self._early

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        descriptors: dict[int, int],
        *,
        environment: dict[str, str],
        folder: str,
        new_session: bool = False,
        leaves_early: bool = False,
    ) -> int:
        """Start a program, and return the number of its process.

        Args:
            program: Python.
            arguments: the rest of its sys.argv, after "-c".
            descriptors: its file descriptors, each with the corresponding descriptor of this process.
            environment: its variables.
            folder: its working directory.
            new_session: whether it leads a session.
            leaves_early: whether it ends after its exit handlers, without releasing its modules.
        """
        request = {
            "program": program,
            "arguments": list(arguments),
            "numbers": list(descriptors),
            "environment": environment,
            "folder": folder,
            "new_session": new_session,
            "leaves_early": leaves_early,
        }
        reader, writer = os.pipe()
        with _lock, open(reader, "rb") as report:
            _be_subreaper(True)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], [writer, *descriptors.values()])
                os.close(writer)
                number = report.read()  # until the process has been adopted, or has ended
            finally:
                _be_subreaper(False)
        assert number, "a program could not be forked; its server has said why"
        return int(number)


class Popen(subprocess.Popen[str]):
    """subprocess.Popen of [sys.executable, "-c", program, ...], forked where its environment allows that."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        # The platform-dependent part of subprocess.Popen. The order of arguments is the same in Python 3.10 to 3.14.
        folder, given_environment = more[4:6]
        streams, new_session = more[9:15], more[20]
        environment = dict(os.environ if given_environment is None else given_environment)
        server = _server_for(environment) if _is_on else None
        if server is None or list(args[:2]) != [sys.executable, "-c"]:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        try:
            given = enumerate([streams[0], streams[3], streams[5]])
            self.pid = server.start(
                args[2],
                args[3:],
                {number: number if descriptor == -1 else descriptor for number, descriptor in given},
                environment=environment,
                folder=str(folder or os.getcwd()),
                new_session=new_session,
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def fork_launches(*, at_once: bool = False) -> None:
    """Let `Popen`, multiprocessing's spawn, and thereby po.launch, fork their processes from now on.

    Args:
        at_once: start the server now, and not with the first process.
    """
    global _is_on
    _is_on = True
    multiprocessing.util.spawnv_passfds = _fork  # type: ignore[attr-defined]
    if at_once:
        _server_for(dict(os.environ))


def _fork(path: Any, arguments: list[str], descriptors: Sequence[int]) -> int:
    environment = dict(os.environ)
    # Not for the resource tracker. It is started with signals blocked, and the server would inherit that.
    server = _server_for(environment) if arguments[-1] == "--multiprocessing-fork" else None
    if server is None:
        return int(_spawn(path, arguments, descriptors))
    program = arguments[arguments.index("-c") + 1]
    given = {int(number): int(number) for number in (0, 1, 2, *descriptors)}
    return server.start(program, arguments[-1:], given, environment=environment, folder=os.getcwd(), leaves_early=True)


def servers() -> set[int]:
    """Return the numbers of this process' servers. A server is a child that stays."""
    return {server.pid for server in _servers.values() if server.is_mine()}


def _server_for(environment: dict[str, str]) -> _Server | None:
    """Return the server of this process, or None if its processes would not match the environment."""
    interprets = environment.get("TRITON_INTERPRET") == "1"
    with _lock:
        server = _servers.get(interprets)
        if server is None or not server.is_mine():
            server = _servers[interprets] = _Server(interprets=interprets)
    return server if server.serves(environment) else None


def _be_subreaper(whether: bool) -> None:
    """Start or stop adopting the processes that children of this process leave."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _read_early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_EARLY.match(name)}
