"""PEs that are processes and are kept from one program to the next. To start one takes longer than most programs.

For programs that leave no state: each has its own world, which it finalizes, as under `po.launch`. Tests of how
processes begin, fail or end use `po.launch`. torch.distributed's default group and GPUs need processes.

On GPUs, worlds of each size have PEs of their own, in which NVSHMEM stays started (kept_nvshmem.py). So have programs
whose kernels Triton's interpreter runs (interpreters.py).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from kept_nvshmem import keep

import persistent_ops as po
from persistent_ops.runtime import joining
from persistent_ops.runtime.bootstrap.mailbox import Worker, serve_store
from persistent_ops.runtime.nvshmem_end import runs_on

__all__ = ["in_processes"]

_NOT_STARTED = "NVSHMEM did not initialize"
_JOINED = "joined"  # what a PE sends when it has opened a world
_SIZES = (1, 2, 3, 4)  # of most worlds
_Pes = list[tuple[BaseProcess, Connection]]
_kept: dict[int | str, _Pes] = {}  # on GPUs by the world's size


def in_processes(program: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    """Run `program(*args)` as `po.launch` does, and return the results in rank order.

    Args:
        program: opens its world and closes it; importable.
        world: number of PEs.
        args: of the program.
        timeout: seconds for the whole.

    Raises:
        AssertionError: a PE raised, ended, or took more than `timeout` seconds; all are ended then.

    If many worlds start at once, NVSHMEM sometimes fails to start in one of them, or crashes. That world is started
    again once.
    """
    try:
        return _in_processes(program, world, *args, timeout=timeout)
    except AssertionError as error:
        if _NOT_STARTED not in str(error):
            raise
    return _in_processes(program, world, *args, timeout=timeout)


def _in_processes(program: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    worker = Worker()
    store, port = serve_store("127.0.0.1", worker, deadline)
    job = secrets.token_hex(16)
    has_gpus = torch.cuda.is_available()
    if has_gpus and not _kept and "PYTEST_XDIST_WORKER" in os.environ:
        for size in _SIZES:  # all sizes will be asked for, and start meanwhile
            _kept[size] = [_started() for _ in range(size)]
    kept = _kept.setdefault("interpreters" if "TRITON_INTERPRET" in os.environ else world if has_gpus else 0, [])
    is_whole = False
    task = pickle.dumps((program, args))
    try:
        while len(kept) < world:
            kept.append(_started())
        for rank, (_, connection) in enumerate(kept[:world]):
            environment = {
                "PERSISTENT_OPS_RANK": str(rank),
                "PERSISTENT_OPS_WORLD_SIZE": str(world),
                "PERSISTENT_OPS_STORE": f"127.0.0.1:{port}",
                "PERSISTENT_OPS_JOB": job,
            }
            connection.send((environment, sys.path, task))
        results = _collected(kept[:world], deadline, timeout)
        is_whole = not any(is_worn for _, is_worn in results)
        return [result for result, _ in results]
    finally:
        if not is_whole:
            _end(kept)
        del store
        worker.close()


def _collected(pes: _Pes, deadline: float, timeout: float) -> list[tuple[Any, bool]]:
    world = len(pes)
    ranks = {connection: rank for rank, (_, connection) in enumerate(pes)}
    results: dict[int, tuple[Any, bool]] = {}
    joined = set()
    while len(results) < world:
        ready = wait([c for c, rank in ranks.items() if rank not in results], max(0.0, deadline - time.monotonic()))
        assert ready, f"PE {sorted(set(range(world)) - set(results))} took more than {timeout} s"
        for connection in ready:
            rank = ranks[connection]  # type: ignore[index]
            try:
                told = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                process = pes[rank][0]
                process.join(10)  # it closes its end of the connection a moment before it ends
                ended = f"PE {rank} of {world} ended with {process.exitcode}"
                if rank not in joined and process.exitcode == -signal.SIGSEGV:
                    ended = f"{_NOT_STARTED}: {ended}"
                raise AssertionError(ended) from None
            if told == _JOINED:
                joined.add(rank)
                continue
            result, trace, is_worn = told
            assert trace is None, f"PE {rank} of {world}:\n{trace}"
            results[rank] = (result, is_worn)
    return [results[rank] for rank in range(world)]


def _started() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _end(pes: _Pes) -> None:
    for process, connection in pes:
        process.kill()
        process.join()
        connection.close()
    pes.clear()


def _serve(connection: Connection) -> None:
    """Be a PE of one world after the other, until the parent process is gone."""
    threads = torch.get_num_threads()
    join = joining.init

    def init(*args: Any, **options: Any) -> None:
        join(*args, **options)
        connection.send(_JOINED)

    joining.init = init
    has_nvshmem = keep()
    while True:
        try:
            environment, sys.path[:], task = connection.recv()
        except EOFError:
            if has_nvshmem():
                os._exit(0)  # a normal exit would wait for the other PEs
            return
        os.environ.update(environment)
        try:
            program, args = pickle.loads(task)
            answer = (program(*args), None, _is_worn())
            assert not po.is_initialized() and not torch.distributed.is_initialized(), "the program has left a world"
        except BaseException:
            answer = (None, traceback.format_exc(), True)
        for name in environment:
            del os.environ[name]
        torch.set_num_threads(threads)
        if torch.cuda.is_initialized():
            _give_back_memory()
        connection.send(answer)


def _is_worn() -> bool:
    """Return whether anything of a world remains in this process that would affect the next one."""
    return runs_on() or any(thread.name.startswith("persistent_ops ") for thread in threading.enumerate())


def _give_back_memory() -> None:
    """Free memory that other PEs of this GPU need. After a CUDA error this raises too; the first error counts."""
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
