"""Modules for models: linear layers for decoding, embedding tables spread over PEs, sparse gradients under DDP."""

from .ddp import allow_unused_sparse as allow_unused_sparse, ddp_sparse_hook as ddp_sparse_hook
from .embedding_bag_collection import (
    ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection,
)
from .embedding_bag_optimizer import EmbeddingBagOptimizer as EmbeddingBagOptimizer
from .embedding_features import KeyedEmbeddings as KeyedEmbeddings
from .embedding_tables import TableConfig as TableConfig
from .forward_passes import SentFeatures as SentFeatures
from .ignored_tables import ignore_sharded_tables as ignore_sharded_tables
from .leave_room import leave_room as leave_room
from .order_all_reduce import order_all_reduce as order_all_reduce
from .parallel_linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
    balanced_splits as balanced_splits,
)
from .step_watchdog import StepWatchdog as StepWatchdog
from .table_placements import TablePlacement as TablePlacement
from .table_shards import TableShards as TableShards
