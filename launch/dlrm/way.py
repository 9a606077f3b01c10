"""The module that trains the tables, and the model around it, made from the options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement

from .batches import Batches
from .data import Data
from .dense_optimizer import DENSE_OPTIMIZERS, EPS, make_capturable
from .embedding import EmbeddingModule
from .model import DenseModel
from .options import Options
from .training import Training

__all__ = ["make_collection", "make_training", "most_samples", "placement_of"]


def make_collection(options: Options, data: Data) -> po.nn.ShardedEmbeddingBagCollection:
    """Make this package's tables; collective."""
    source = data.train
    return po.nn.ShardedEmbeddingBagCollection(
        [
            TableConfig(f"t{number}", rows, options.preset.dim, [f"f{number}"])
            for number, rows in enumerate(source.num_rows)
        ],
        max_batch=most_samples(options, po.world_size()),
        lookups_per_sample={f"f{number}": hotness for number, hotness in enumerate(source.hotness)},
        placement=placement_of(options, source.num_rows),
        optimizer=options.optimizer,
        lr=options.table_learning_rate,
        eps=EPS,
        wire_dtype=options.wire_dtype,
        seed=options.seed,
        # A graph's buffers are longer than a batch's lookups, and errors of a replay are not looked at. Readers have
        # checked that every row is one of its table.
        bounds="ignore" if options.is_captured else "fatal",
    )


def placement_of(options: Options, num_rows: Sequence[int]) -> dict[str, TablePlacement]:
    """Return the placement of tables of these sizes, by name."""
    kind = "auto" if options.placement == "auto" else "table_wise"
    chosen = {f"t{number}": TablePlacement(kind) for number in range(len(num_rows))}
    if options.placement == "model":
        sliced = {f"t{number}": TablePlacement("column_wise", count) for number, count in options.preset.slices.items()}
        chosen |= {name: placement for name, placement in sliced.items() if name in chosen}
    small = [number for number, rows in enumerate(num_rows) if rows <= options.replicated_rows]
    return chosen | {f"t{number}": TablePlacement("replicated") for number in small}


def most_samples(options: Options, world_size: int) -> int:
    """Return the most samples that a PE has of a batch."""
    return -(-options.batch // world_size)


def make_training(options: Options, data: Data, embedding: EmbeddingModule) -> Training:
    """Make the dense part around the tables, and the batches; collective."""
    source, device = data.train, po.device()
    model = DenseModel(options.sizes(len(source.num_rows), source.num_dense), seed=options.seed, device=device)
    rate = options.learning_rate
    if options.is_captured:
        optimizer = make_capturable(options.optimizer, model.parameters(), rate, device)
    else:
        optimizer = DENSE_OPTIMIZERS[options.optimizer](model.parameters(), lr=rate)
    shared: dict[str, Any] = {
        "batch_size": options.batch,
        "rank": po.rank(),
        "world_size": po.world_size(),
        "index_dtype": torch.int32 if max(source.num_rows) <= 2**31 else torch.int64,
        "num_readers": options.readers,
    }
    beside_launches: Callable[..., Any] | None = None
    if isinstance(embedding, po.nn.ShardedEmbeddingBagCollection):
        beside_launches = po.nn.order_all_reduce
        if options.num_sms_of_nccl is not None:
            beside_launches = functools.partial(po.nn.leave_room, num_sms=options.num_sms_of_nccl)
    return Training(
        model,
        embedding,
        optimizer,
        Batches(source, seed=options.seed, shuffle_block=data.shuffle_block, **shared),
        evaluation=Batches(data.evaluation, **shared),
        device=device,
        identity=options.identity(),
        schedule=options.schedule,
        precision=options.dense_dtype,
        is_compiled=options.is_compiled,
        is_captured=options.is_captured,
        watch=po.nn.StepWatchdog() if options.is_captured else None,
        beside_launches=beside_launches,
    )
