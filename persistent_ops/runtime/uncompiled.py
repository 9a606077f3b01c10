"""Functions of the package that torch.compile must not trace: they launch, wait on the host and meet other PEs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .torch_private import behind_a_break, frame_compiler

__all__ = ["uncompiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Let torch.compile break its graph around a function, and call it as it is; other calls cost next to nothing.

    Where torch.compile passes a frame over, as those with sparse tensors, it compiles what that one calls in turn; what
    this function calls stays as it is then too.
    """
    broken = behind_a_break(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        chosen = broken if torch.compiler.is_compiling() or frame_compiler() is not None else function
        return chosen(*arguments, **options)

    return call  # type: ignore[return-value]
