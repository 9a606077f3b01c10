"""Models with sharded embedding tables under DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch

from .embedding_bag_collection import ShardedEmbeddingBagCollection

__all__ = ["ignore_sharded_tables"]

_COMPILED = "_orig_mod."  # torch.compile's name of the module that it has compiled


def ignore_sharded_tables(model: torch.nn.Module) -> None:
    """Let DistributedDataParallel leave the tables of all `ShardedEmbeddingBagCollection`s in a model alone.

    Otherwise it would write rank 0's part over the others'. Of replicated tables every PE gets PE 0's rows, as it gets
    PE 0's dense part from DistributedDataParallel (`sync_replicas`). Call it before ``DistributedDataParallel(model)``,
    or ``DistributedDataParallel(torch.compile(model))``, on all PEs; where the collection itself is wrapped, it is not
    needed.

    Raises:
        NotImplementedError: the model is in DistributedModelParallel.
    """
    for module in model.modules():
        if any(kind.__name__ == "DistributedModelParallel" for kind in type(module).__mro__):
            raise NotImplementedError(
                "model: DistributedModelParallel spreads tables by itself; put the dense part under "
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
