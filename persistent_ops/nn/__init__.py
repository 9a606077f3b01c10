"""What drops into a model: tensor-parallel linear layers for decoding, sparse gradients under DDP."""

from .ddp import allow_unused_sparse as allow_unused_sparse
from .parallel_linear import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from .parallel_linear import (
    RowParallelLinear as RowParallelLinear,
)
from .parallel_linear import (
    balanced_splits as balanced_splits,
)
