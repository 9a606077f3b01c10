"""Kernels on the host backend: Triton's interpreter runs them, work-group by work-group."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime.pe_threads import thread_bootstrap
from ..runtime.residency import Footprint
from ..runtime.world import World

__all__ = ["InterpretedKernel", "is_interpreted", "refuse_threads"]

_MOST_WORK_GROUPS = 64


def is_interpreted() -> bool:
    """Return whether `triton.jit` makes kernels for the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuse_threads(world: World) -> None:
    """Raise where PEs are threads: the interpreter changes triton.language for the whole process."""
    if thread_bootstrap() is not None:
        raise NotImplementedError(
            f"PE {world.rank} is a thread, and Triton's interpreter serves one PE of a process: start processes "
            "(po.launch(..., threads=False))"
        )


class _Call(NamedTuple):
    arguments: tuple[Any, ...]


class InterpretedKernel:
    """See `Kernel` of runtime/backend.py.

    Args:
        kernel: of triton.jit.
        meta: its constexpr arguments, and options that have no meaning here.
    """

    def __init__(self, kernel: Any, meta: Mapping[str, Any]) -> None:
        self._kernel, self._meta = kernel, dict(meta)
        self._sink: ctypes.Structure | None = None
        self.admitted_grid = 0

    def footprint(self) -> Footprint:
        return Footprint(1, 0, 0, _MOST_WORK_GROUPS)

    def resident_work_groups(self) -> int:
        return _MOST_WORK_GROUPS

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        self._sink, self._memory = sink, memory

    def sink_bytes(self) -> bytes:
        """Return what follows the Team in a plan."""
        return b"" if self._sink is None else bytes(self._sink)

    def call(self, team: torch.Tensor, out: torch.Tensor, values: Sequence[Any]) -> _Call:
        """Return what a launch takes."""
        return _Call((_pointer(team), _pointer(out), *map(_pointer, values)))

    def launch(self, grid: int, plan: int, call: _Call, *, begins_early: bool = False) -> None:
        self._kernel[(grid,)](*call.arguments, **self._meta)


def _pointer(value: Any) -> Any:
    """Return a tensor's address as a Triton pointer; the interpreter would copy the tensor back after the launch."""
    if not isinstance(value, torch.Tensor):
        return value
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import mangle_type

    kind = tl.str_to_ty(mangle_type(value), None)
    return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), kind), kind)
