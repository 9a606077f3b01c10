"""Keeps DistributedDataParallel from broadcasting tables of which PEs have different parts."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["spare_under_ddp"]

_MARK = "_persistent_ops_is_sharded"  # attribute of a parameter


def spare_under_ddp(weights: Iterable[torch.nn.Parameter]) -> None:
    """Let every DistributedDataParallel that is made around these parameters leave them alone.

    Args:
        weights: tables of which PEs have different parts.
    """
    _watch_constructors()
    for weight in weights:
        setattr(weight, _MARK, True)


@functools.cache
def _watch_constructors() -> None:
    register_module_module_registration_hook(_ignore_tables)


def _ignore_tables(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Extend the names that a DistributedDataParallel ignores, when it takes its module and before it broadcasts."""
    if child is None or name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    tables = {path for path, parameter in child.named_parameters() if hasattr(parameter, _MARK)}
    parent.parameters_to_ignore.update(tables)
