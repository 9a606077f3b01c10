"""Keep collective calls in a compiled graph as they are written: each call once, in program order.

A compiler may drop a pure call whose result is unused, merge two equal calls, and move calls. Each PE compiles for
itself, so its peers would then wait for a call that never comes, or take part in another call. So the schema of each
collective operator declares an argument that the operator changes, and all calls on a device get the same tensor for
it. Each call then depends on the call before it. No kernel reads the tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ARGUMENT", "keep_order_on", "order_of", "order_of_graph", "ordered_by"]

ARGUMENT = "Tensor(order!)? order=None"
"""The argument in torch's schema language, passed by its name. None where nothing compiles: calls run as they come."""

_tensors: dict[torch.device, torch.Tensor] = {}  # of this process; never replaced, as graphs keep them


_of_graph: torch.Tensor | None = None  # while a compiler traces a backward pass


def keep_order_on(device: torch.device) -> None:
    """Let compiled calls on a device be ordered from now on."""
    if device not in _tensors:
        with torch.inference_mode(False):
            tensor = torch.zeros(1, dtype=torch.int32, device=device)
        # The same as torch._dynamo.mark_static_address, without the import of the compiler: CUDA graphs of
        # torch.compile take no tensor that changes unless its address is static.
        tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        _tensors[device] = tensor


def order_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that orders the calls on its device; None before there is a world, where calls raise."""
    return _tensors.get(tensor.device) if _of_graph is None else _of_graph


def order_of_graph() -> torch.Tensor | None:
    """Return what `ordered_by` says: a compiler that traces a backward pass may not say that it compiles."""
    return _of_graph


@contextlib.contextmanager
def ordered_by(order: torch.Tensor | None) -> Iterator[None]:
    """Order calls by what a forward pass was called with, which in a compiler's graph stands for the tensor."""
    global _of_graph
    before, _of_graph = _of_graph, order
    try:
        yield
    finally:
        _of_graph = before
