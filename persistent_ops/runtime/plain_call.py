"""Plain tensors, which every public function takes, and plain calls, which go to the kernel directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .torch_private import (
    STAND_INS,
    TensorGuards,
    dual_level,
    function_transform,
    num_dispatch_modes,
    tracing_state,
)

__all__ = ["PLAIN", "PlainCalls", "is_watched", "require_plain", "require_plain_list", "refuse_transforms"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: a subclass may have a __torch_function__ of its own
_EXPECTED = {torch.strided: "a plain dense tensor", torch.sparse_coo: "a plain sparse COO tensor, as of to_sparse(1)"}
_is_recording = torch.is_grad_enabled
_MOST_KINDS = 4  # of calls with so many tensors: what follows is looked at tensor by tensor


# ---- the gate ------------------------------------------------------------------------------------------------------


def require_plain(
    tensors: Mapping[str, Any], *, layout: torch.layout = torch.strided, may_be_fake: bool = False
) -> None:
    """Raise TypeError for an argument that is not a plain tensor, before anything looks at what is in it.

    Args:
        tensors: the arguments, by name.
        layout: that they must have.
        may_be_fake: whether torch's stand-ins for plain tensors, as in torch.compile, may come here.
    """
    watched = is_watched()
    for name, tensor in tensors.items():
        if type(tensor) in PLAIN:
            found = (_watcher(tensor) if watched else None) or _property_of(tensor, layout)
        elif not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        elif may_be_fake and isinstance(tensor, STAND_INS):
            found = _watcher(tensor) if watched else None
        else:  # what it has it may answer as it likes
            found = f"a {type(tensor).__name__}"
        if found:
            raise TypeError(
                f"{name}: expected {_EXPECTED[layout]}, got {found}. Pass a torch.Tensor that is not a subclass or "
                "lazy view, outside of torch.func, forward-mode AD and torch.jit.trace."
            )


def require_plain_list(name: str, tensors: Any, *, may_be_fake: bool = False) -> None:
    """Raise TypeError for an argument that is not a list or tuple of plain dense tensors."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name}: expected a sequence of tensors, got {type(tensors).__name__}")
    require_plain({f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)}, may_be_fake=may_be_fake)


def refuse_transforms(name: str) -> None:
    """Raise TypeError for a function without tensor arguments that is called inside of torch.func."""
    if function_transform() is not None:
        raise TypeError(f"{name}: cannot be called inside of torch.func. Call it outside of the transform.")


def is_watched() -> bool:
    """Return whether torch.func, forward-mode AD or torch.jit.trace may want a part in what is called now."""
    return function_transform() is not None or dual_level() >= 0 or tracing_state() is not None


def _watcher(tensor: torch.Tensor) -> str | None:
    """Return who wants a part in what is done with a tensor, as an error says it."""
    if function_transform() is not None:
        return "one inside of torch.func"
    if tracing_state() is not None:
        return "one under torch.jit.trace"
    if dual_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "one with a tangent of forward-mode AD"
    return None


def _property_of(tensor: torch.Tensor, layout: torch.layout) -> str | None:
    """Return what makes a tensor of a plain type not plain, as an error says it; None for a plain one."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout is not layout:
        return f"layout {tensor.layout}"
    if tensor.is_neg():
        return "a tensor with the negative bit"
    try:
        has_memory = layout is not torch.strided or tensor.data_ptr() or not tensor.numel() or tensor.is_meta
    except RuntimeError:  # as of is_grads_batched
        has_memory = False
    return None if has_memory else "a tensor without memory"


# ---- plain calls ---------------------------------------------------------------------------------------------------


def are_plain(tensors: Sequence[torch.Tensor], layout: torch.layout = torch.strided) -> bool:
    """Return whether all are plain tensors, asking one after the other."""
    return all(type(tensor) in PLAIN and _property_of(tensor, layout) is None for tensor in tensors)


class PlainCalls:
    """Finds an operator's plain calls, most of them by one comparison of all tensors.

    All their tensors are plain, and there is no autograd, of either mode, no dispatch mode, transform or tracer. Such a
    call by-passes the dispatcher, which saves most of the host's share of an eager call.

    Calls are of a kind if their tensors are alike in type, dispatch keys (layouts, the negative bit and zeros without
    memory are some), dtype, device, dimensions and `requires_grad`: in all that `are_plain` asks of a tensor, and in
    more. What was plain once is plain again. Torch compares all tensors in one call, which costs what two or three
    answers of one tensor cost.

    Args:
        layout: of the tensors.
    """

    def __init__(self, layout: torch.layout = torch.strided) -> None:
        self._layout = layout
        # By the number of different tensors: what compares a kind, and whether one of them requires a gradient.
        self._kinds: dict[int, list[tuple[Callable[..., bool], bool]]] = {}

    def has(self, tensors: tuple[torch.Tensor, ...], optional: tuple[torch.Tensor | None, ...] = ()) -> bool | None:
        """Return whether it has a call.

        Args:
            tensors: that the call must have. What is no tensor makes it none of these: the slow path complains.
            optional: that it may have. Lists of tensors are not among these: who takes one looks at each of its tensors
                when it is new (table_set.py).

        Returns:
            None where it is one but for gradients that are recorded: there is nothing for the gate to refuse.
        """
        if num_dispatch_modes() or function_transform() is not None or dual_level() >= 0 or tracing_state() is not None:
            return False
        given, first = tensors, tensors[0]
        for other in optional:
            # A result may be an input, and what compares takes no tensor twice.
            if other is not None and other is not first and other is not given[-1]:
                given += (other,)
        for tensor in given:
            if getattr(tensor, "is_nested", False):  # torch ends the process where it compares strides
                return False
        for is_of_kind, has_gradient in self._kinds.get(len(given), ()):
            if is_of_kind(*given):
                requires_grad = has_gradient
                break
        else:
            if not are_plain(given, self._layout):
                return False
            requires_grad = self._learn(given)
        return None if requires_grad and _is_recording() else True

    def _learn(self, given: tuple[torch.Tensor, ...]) -> bool:
        """Return whether one requires a gradient."""
        requires_grad = any(tensor.requires_grad for tensor in given)
        kinds = self._kinds.setdefault(len(given), [])
        if TensorGuards is not None and len(kinds) < _MOST_KINDS and len(set(map(id, given))) == len(given):
            open_sizes: list[Any] = [[None] * tensor.dim() for tensor in given]
            guards = TensorGuards(*given, dynamic_dims_sizes=open_sizes, dynamic_dims_strides=open_sizes)
            kinds.append((guards.check, requires_grad))
        return requires_grad
