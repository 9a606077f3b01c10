"""The process that `warm_python` forks programs from. It has imported the slow modules, and has done nothing else.

Its argument is the number of a socket for requests: JSON with file descriptors. A forked process that is to run a
program leaves the loop and reaches the end of this file. So it begins with one thread and ends like an interpreter,
including exit handlers. A PE of multiprocessing skips what comes after the exit handlers, as in multiprocessing's own
forks: to release every module of torch takes longer than the programs of most PEs.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import json
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch._dynamo
import torch.distributed

import persistent_ops

# Imported for the forked processes. torch's optimizers import torch._dynamo, which takes about two seconds.
__all__ = ["persistent_ops", "pytest", "torch"]


_CUDA_ERROR_NOT_INITIALIZED = 3


def _has_used_cuda() -> bool:
    """Return whether the driver is initialized in this process. Then forked processes cannot use it."""
    with contextlib.suppress(OSError):
        return bool(
            ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED
        )
    return False  # there is no driver


def _folders() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _next_program(connection: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. In that process, return the request."""
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # po.launch may have started this process with SIGINT blocked
    installed = [folder for folder in sys.path[1:] if folder not in _folders()]
    gc.collect()
    gc.freeze()  # otherwise a child's first collection would copy all of it
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if not message:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:  # until `parent` adopts this process
            time.sleep(0.0005)
        if os.getppid() != parent:  # the parent has ended
            os._exit(1)
        connection.close()
        request: dict[str, Any] = json.loads(message)
        _become(request, descriptors, installed)
        return request


def _become(request: dict[str, Any], descriptors: list[int], installed: list[str]) -> None:
    """Give this process the folder, environment and descriptors of the request."""
    spare = max(request["numbers"]) + 1  # copies from here on do not collide with requested numbers
    report, *given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, spare) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(given, request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = ["", *_folders(), *installed]
    sys.argv[:] = ["-c", *request["arguments"]]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    os.write(report, str(os.getpid()).encode())
    os.close(report)


def _leave(code: int) -> None:
    """End this process after its threads, exit handlers and output, without releasing its modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code & 0xFF)


assert not _has_used_cuda(), "an import has initialized CUDA, so PEs on GPUs cannot be forked behind it"
_request = _next_program(socket.socket(fileno=int(sys.argv[1])))
_code = 0
try:
    exec(compile(_request["program"], "<string>", "exec"), sys.modules["__main__"].__dict__)
except SystemExit as end:
    if not isinstance(end.code, (int, type(None))):
        raise
    _code = end.code or 0
if _request["leaves_early"]:
    _leave(_code)
sys.exit(_code)
