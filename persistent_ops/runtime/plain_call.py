"""Plain tensors: what every public function takes, and which calls may go to the kernel at once."""

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

__all__ = ["PLAIN", "PlainCalls", "is_plain", "is_watched", "require_plain", "require_plain_list", "refuse_transforms"]

PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: a subclass may have a __torch_function__ of its own
_EXPECTED = {torch.strided: "a plain dense tensor", torch.sparse_coo: "a plain sparse COO tensor, as of to_sparse(1)"}
_is_recording = torch.is_grad_enabled
_NO_TABLES: tuple[torch.Tensor, ...] = ()  # which is one object: who passes another one loses a little time
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
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        found = (_watcher(tensor) if watched else None) or _kind_of(tensor, layout, may_be_fake=may_be_fake)
        if found is not None:
            _refuse(name, found, layout)


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


def _refuse(name: str, found: str, layout: torch.layout) -> None:
    raise TypeError(
        f"{name}: expected {_EXPECTED[layout]}, got {found}. Pass a torch.Tensor that is not a subclass or lazy view, "
        "outside of torch.func, forward-mode AD and torch.jit.trace."
    )


def _watcher(tensor: torch.Tensor) -> str | None:
    """Return who wants a part in what is done with a tensor, as an error says it."""
    if function_transform() is not None:
        return "one inside of torch.func"
    if tracing_state() is not None:
        return "one under torch.jit.trace"
    if dual_level() >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "one with a tangent of forward-mode AD"
    return None


def _kind_of(tensor: torch.Tensor, layout: torch.layout, *, may_be_fake: bool) -> str | None:
    """Return what a tensor is that is not plain, as an error says it; None for a plain one."""
    if type(tensor) not in PLAIN:  # before anything that a subclass may answer
        return None if may_be_fake and isinstance(tensor, STAND_INS) else f"a {type(tensor).__name__}"
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


# ---- calls that nobody watches -------------------------------------------------------------------------------------


def is_plain(
    tensors: tuple[torch.Tensor, ...],
    optional: tuple[torch.Tensor | None, ...] = (),
    tables: Sequence[torch.Tensor] = (),
    layout: torch.layout = torch.strided,
) -> bool:
    """Return whether nobody but the kernel wants to see a call, all of whose tensors are plain.

    There is no autograd, of either mode, no dispatch mode, transform or tracer. Such a call by-passes the dispatcher,
    which saves most of the host's share of an eager call.

    Args:
        tensors: that the call must have. What is no tensor makes it not plain: the slow path checks and complains.
        optional: that it may have.
        tables: of which there may be many: asked for gradients alone, and only where they are recorded. Who takes them
            looks at each when it is new (table_set.py).
        layout: of the tensors.
    """
    if num_dispatch_modes() or is_watched():
        return False
    is_recording = _is_recording()
    for tensor in (*tensors, *(other for other in optional if other is not None)):
        if type(tensor) not in PLAIN or (is_recording and tensor.requires_grad):
            return False
        if _kind_of(tensor, layout, may_be_fake=False) is not None:
            return False
    return not is_recording or not _any_requires_grad(tables)


def _any_requires_grad(tables: Sequence[torch.Tensor]) -> bool:
    """Return whether one does, or is no tensor."""
    try:
        for table in tables:
            if table.requires_grad:
                return True
    except (AttributeError, TypeError):
        return True
    return False


class PlainCalls:
    """What `is_plain` says of the calls of one operator, for most of them by one look at all tensors together.

    Calls are of a kind if their tensors are alike in type, dispatch keys (layouts, the negative bit and zeros without
    memory are some), dtype, device, dimensions and `requires_grad`: in all that `is_plain` asks of a tensor, and in
    more. What was plain once is plain again, unless gradients are recorded now and a tensor requires one. Torch
    compares all tensors in one call, which costs what two or three answers of one tensor cost.

    Args:
        layout: of the tensors.
    """

    def __init__(self, layout: torch.layout = torch.strided) -> None:
        self._layout = layout
        # By the number of different tensors: what compares a kind, and whether one of them requires a gradient.
        self._kinds: dict[int, list[tuple[Callable[..., bool], bool]]] = {}

    def has(
        self,
        tensors: tuple[torch.Tensor, ...],
        optional: tuple[torch.Tensor | None, ...] = (),
        tables: Sequence[torch.Tensor] = _NO_TABLES,
    ) -> bool:
        """Return what `is_plain` does."""
        if num_dispatch_modes() or function_transform() is not None or dual_level() >= 0 or tracing_state() is not None:
            return False
        given, first = tensors, tensors[0]
        for other in optional:
            # A result may be an input, and what compares takes no tensor twice.
            if other is not None and other is not first and other is not given[-1]:
                given += (other,)
        for tensor in given:
            if type(tensor) not in PLAIN or tensor.is_nested:  # torch ends the process where it compares strides
                return False
        for is_of_kind, requires_grad in self._kinds.get(len(given), ()):
            if is_of_kind(*given):
                if requires_grad or tables is not _NO_TABLES:
                    return not _is_recording() or not (requires_grad or _any_requires_grad(tables))
                return True
        if not is_plain(tensors, optional, tables, self._layout):
            return False
        self._learn(given)
        return True

    def _learn(self, given: tuple[torch.Tensor, ...]) -> None:
        kinds = self._kinds.setdefault(len(given), [])
        if TensorGuards is None or len(kinds) == _MOST_KINDS or len(set(map(id, given))) < len(given):
            return
        open_sizes: list[Any] = [[None] * tensor.dim() for tensor in given]
        guards = TensorGuards(*given, dynamic_dims_sizes=open_sizes, dynamic_dims_strides=open_sizes)
        kinds.append((guards.check, _any_requires_grad(given)))
