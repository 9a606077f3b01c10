"""The operators, one file each; importing a file registers its torch operator."""

from .all_reduce import all_reduce as all_reduce
from .embedding.all_to_all import embedding_all_to_all as embedding_all_to_all
from .embedding.backward import EmbeddingOptimizer as EmbeddingOptimizer
from .embedding.inputs import EmbeddingInputs as EmbeddingInputs
from .gemm import gemm as gemm
from .gemm_exchange import (
    gemm_all_reduce as gemm_all_reduce,
    gemm_all_to_all as gemm_all_to_all,
    gemm_reduce_scatter as gemm_reduce_scatter,
)
from .gemv import gemv as gemv
from .gemv_all_reduce import gemv_all_reduce as gemv_all_reduce
from .sparse_all_reduce import sparse_all_reduce as sparse_all_reduce
