"""PEs that are processes and are kept from one program to the next: to start one takes longer than most programs do.

For programs that leave nothing behind: each has its own world, which it finalizes, as under `po.launch`. Tests of how
processes begin, fail or end start them with `po.launch`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

import persistent_ops as po
from persistent_ops.runtime.board import Worker, serve_store

__all__ = ["run_on_kept_pes"]

_kept: list[tuple[BaseProcess, Connection]] = []


def run_on_kept_pes(program: Callable[..., Any], world: int, *args: Any, timeout: float) -> list[Any]:
    """Run `program(*args)` as `po.launch` does, and return the results in rank order.

    Raises:
        AssertionError: a PE raised, ended, or took more than `timeout` seconds; all are ended then.
    """
    deadline = time.monotonic() + timeout
    worker = Worker()
    store, port = serve_store("127.0.0.1", worker, deadline)
    job = secrets.token_hex(16)
    is_whole = False
    task = pickle.dumps((program, args))
    try:
        while len(_kept) < world:
            _kept.append(_started())
        for rank, (_, connection) in enumerate(_kept[:world]):
            environment = {
                "PERSISTENT_OPS_RANK": str(rank),
                "PERSISTENT_OPS_WORLD_SIZE": str(world),
                "PERSISTENT_OPS_STORE": f"127.0.0.1:{port}",
                "PERSISTENT_OPS_JOB": job,
            }
            connection.send((environment, sys.path, task))
        results = _collected(world, deadline, timeout)
        is_whole = True
        return results
    finally:
        if not is_whole:
            _end()
        del store
        worker.close()


def _collected(world: int, deadline: float, timeout: float) -> list[Any]:
    ranks = {connection: rank for rank, (_, connection) in enumerate(_kept[:world])}
    results: dict[int, Any] = {}
    while len(results) < world:
        ready = wait([c for c, rank in ranks.items() if rank not in results], max(0.0, deadline - time.monotonic()))
        assert ready, f"PE {sorted(set(range(world)) - set(results))} took more than {timeout} s"
        for connection in ready:
            rank = ranks[connection]  # type: ignore[index]
            try:
                results[rank], trace = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"PE {rank} of {world} ended with {_kept[rank][0].exitcode}") from None
            assert trace is None, f"PE {rank} of {world}:\n{trace}"
    return [results[rank] for rank in range(world)]


def _started() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _end() -> None:
    for process, connection in _kept:
        process.kill()
        process.join()
        connection.close()
    _kept.clear()


def _serve(connection: Connection) -> None:
    """Be a PE of one world after the other, until nobody is there to ask for more."""
    threads = torch.get_num_threads()
    while True:
        try:
            environment, sys.path[:], task = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            program, args = pickle.loads(task)
            answer = (program(*args), None)
            assert not po.is_initialized() and not torch.distributed.is_initialized(), "the program has left a world"
        except BaseException:
            answer = (None, traceback.format_exc())
        for name in environment:
            del os.environ[name]
        torch.set_num_threads(threads)
        connection.send(answer)
