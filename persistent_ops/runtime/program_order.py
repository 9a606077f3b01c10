"""What keeps collective calls in a compiled graph as they are written: each made once, and in program order.

A compiler may drop a pure call whose result is unused, merge two equal calls, and move any of them. Each PE compiles
for itself, so its peers then wait for a call that never comes, or take part in another one. So the schema of each
collective operator has an argument that the operator says it changes, and all calls on a device get the same tensor for
it. Each call then depends on the call before it. No kernel reads the tensor.
"""

from __future__ import annotations

import torch

__all__ = ["ARGUMENT", "keep_order_on", "order_of"]

ARGUMENT = "Tensor(order!)? order=None"
"""The argument in torch's schema language, passed by its name. None where nothing compiles: calls run as they come."""

_tensors: dict[torch.device, torch.Tensor] = {}  # of this process; never replaced, as graphs keep them


def keep_order_on(device: torch.device) -> None:
    """Let compiled calls on a device be ordered from now on."""
    if device not in _tensors:
        with torch.inference_mode(False):
            tensor = torch.zeros(1, dtype=torch.int32, device=device)
        # What torch._dynamo.mark_static_address says, without the import of the compiler: CUDA graphs of torch.compile
        # take no tensor that changes unless it stays where it is.
        tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        _tensors[device] = tensor


def order_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what orders the calls on a tensor's device; None before there is a world, where calls raise."""
    return _tensors.get(tensor.device)
