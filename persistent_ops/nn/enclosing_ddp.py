"""Check that a DistributedDataParallel around sharded tables ignores these tables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["EnclosingDdp"]


class EnclosingDdp:
    """Refuses forward passes within a DistributedDataParallel that may have written rank 0's rows over the others'.

    Args:
        weights: the parameters of tables of which PEs have different parts.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter]) -> None:
        self._weights = list(weights)
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def check(self, ddp: DistributedDataParallel) -> None:
        """Look at the one whose forward pass this is a part of.

        Raises:
            RuntimeError: it has not ignored the tables.
        """
        if ddp in self._known or ddp.process_group.size() == 1:
            return
        ours = {id(weight) for weight in self._weights}
        names = {name for name, parameter in ddp.module.named_parameters() if id(parameter) in ours}
        if taken := sorted(names - set(ddp.parameters_to_ignore)):
            raise RuntimeError(
                f"{', '.join(taken)}: DistributedDataParallel was not told to ignore these tables, and writes rank 0's "
                "part over the others'; call po.nn.ignore_sharded_tables(model) before it is made, with tables "
                "that are drawn or loaded anew"
            )
        self._known.add(ddp)
