"""Models with sharded embedding tables under DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch

from .embedding_bag_collection import ShardedEmbeddingBagCollection

__all__ = ["ignore_sharded_tables"]

_COMPILED = "_orig_mod."  # torch.compile's name of the module that it has compiled


def ignore_sharded_tables(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel leave the tables of all `ShardedEmbeddingBagCollection`s in a model alone.

    DistributedDataParallel writes rank 0's parameters over the others' when it is made. It leaves alone, also without
    this call, the tables of which PEs have different parts. With this call it leaves replicated tables alone, too: they
    get PE 0's rows here (`sync_replicas`). Call it before ``DistributedDataParallel(model)``, or
    ``DistributedDataParallel(torch.compile(model))``, on all PEs.

    Raises:
        NotImplementedError: the model is in DistributedModelParallel.
    """
    for module in model.modules():
        if any(kind.__name__ == "DistributedModelParallel" for kind in type(module).__mro__):
            raise NotImplementedError(
                "model: DistributedModelParallel distributes tables on its own; put the dense part under "
                "DistributedDataParallel instead"
            )
    sharded = [
        (path, module) for path, module in model.named_modules() if isinstance(module, ShardedEmbeddingBagCollection)
    ]
    for _, module in sharded:
        module.sync_replicas()
    names = [f"{path}.{name}" if path else name for path, module in sharded for name in module.table_names()]
    compiled = [f"{_COMPILED}{name}" for name in names]  # where torch.compile(model) is what is wrapped
    ignored: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = sorted({*ignored, *names, *compiled})  # type: ignore[assignment]
