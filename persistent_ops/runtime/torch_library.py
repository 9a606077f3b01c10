"""Registering an operator with torch: schema, implementation for every device, fake kernel, refusal of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define_operator"]

_library = torch.library.Library("persistent_ops", "FRAGMENT")


def define_operator(
    name: str,
    signature: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    no_gradient: str | None = None,
) -> None:
    """Define torch.ops.persistent_ops.<name>.

    Args:
        name: of the operator.
        signature: arguments and results in torch's schema language, mutation declared: "(Tensor x) -> Tensor".
        run: what it does, whatever the device.
        fake: the same for fake tensors; None where the results' shapes depend on data.
        no_gradient: for an operator that returns a result: what a backward pass through it raises.
    """
    qualified = f"persistent_ops::{name}"
    _library.define(f"{name}{signature}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(qualified, fake, lib=_library)
    if no_gradient is not None:

        def refuse(context: object, *gradients: torch.Tensor) -> None:
            raise NotImplementedError(no_gradient)

        torch.library.register_autograd(qualified, refuse, lib=_library)
