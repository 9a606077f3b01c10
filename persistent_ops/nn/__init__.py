"""Modules that drop into a model: tensor-parallel linear layers for decoding."""

from .parallel_linear import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from .parallel_linear import (
    RowParallelLinear as RowParallelLinear,
)
from .parallel_linear import (
    balanced_splits as balanced_splits,
)
