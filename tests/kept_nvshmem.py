"""NVSHMEM that stays started in kept PEs, from one world to the next.

A start takes one to three seconds, and where PEs share GPUs, one job starts at a time. Without kept PEs, starts would
dominate the time of worlds on GPUs. Tests of starts and ends use worlds whose PEs are started for them (`po.launch`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import torch

from persistent_ops.runtime.nvshmem_variables import NvshmemVariables

__all__ = ["LEAST_BYTES", "Keeper", "keep"]

LEAST_BYTES = 256 << 20  # of a heap. Most worlds fit; a larger one is not kept, as many PEs share a GPU


class Keeper:
    """Starts and ends NVSHMEM in a PE's process, in place of the backend's own methods.

    Args:
        start, close: of the backend.

    Attributes:
        is_started: whether NVSHMEM runs, with or without a world.
    """

    def __init__(self, start: Callable[..., None], close: Callable[..., None]) -> None:
        self._start, self._close = start, close
        self._first: Any = None  # the backend that has started it
        self._token, self._nbytes, self._most = "", 0, 0

    @property
    def is_started(self) -> bool:
        return self._first is not None

    def start(self, backend: Any, bootstrap: Any, timeout: float) -> None:
        """Take over NVSHMEM if all PEs have it from one start, on their devices, with room for their heaps.

        Collective. Otherwise the PEs that have NVSHMEM end it, and it starts again.
        """
        first, nbytes = self._first, backend.heap_bytes
        fits = first is not None and first.device == backend.device and nbytes <= self._nbytes
        mine = json.dumps([self._token, fits, nbytes])
        told = [json.loads(raw) for raw in bootstrap.exchange("kept", mine.encode())]
        assert all(token == self._token for token, *_ in told), "they come from different worlds"
        self._most = max(nbytes for *_, nbytes in told)
        if all(fits for _, fits, _ in told):
            for name in ("_nvshmem", "_bindings", "_buffer"):
                setattr(backend, name, getattr(first, name))
            backend.tensor_at(int(first._buffer.handle), nbytes).zero_()  # as at the start of a heap
            backend.synchronize()
        else:
            if first is not None:
                self._first, self._token = None, ""
                self._close(first)
            backend.heap_bytes = max(nbytes, LEAST_BYTES)
            self._start(backend, bootstrap, timeout)
            self._first, self._nbytes = backend, backend.heap_bytes
            backend.heap_bytes = nbytes
            self._token = secrets.token_hex(8) if bootstrap.rank == 0 else ""
        self._token = bootstrap.exchange("kept-ready", self._token.encode())[0].decode()

    def close(self, backend: Any, *, is_alone: bool = False) -> None:
        """Leave NVSHMEM started. End it if peers are missing or a PE's heap is large."""
        if is_alone or self._first is None or self._most > LEAST_BYTES:
            self._first, self._token = None, ""
            self._close(backend, is_alone=is_alone)
            return
        backend.waits.close()
        for code in backend._libraries:
            backend._bindings.culibrary_finalize(int(code.handle))
        backend._libraries.clear()


def keep() -> Callable[[], bool]:
    """Let worlds of this process keep NVSHMEM started on GPUs. Return a function that says whether it is started."""
    if not torch.cuda.is_available():
        return lambda: False
    from persistent_ops.runtime import gpu

    keeper = Keeper(gpu.GpuBackend._start, gpu.GpuBackend.close)
    gpu.GpuBackend._start = lambda *arguments: keeper.start(*arguments)  # type: ignore[method-assign]
    gpu.GpuBackend.close = lambda *arguments, **how: keeper.close(*arguments, **how)  # type: ignore[method-assign]
    gpu.NvshmemVariables = lambda heap_bytes, on: NvshmemVariables(max(heap_bytes, LEAST_BYTES), on)  # type: ignore[misc, assignment]
    return lambda: keeper.is_started
