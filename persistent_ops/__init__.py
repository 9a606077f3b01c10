"""Persistent CUDA kernels over NVSHMEM that compute and communicate in one launch.

    import persistent_ops as po
    po.init()
    rows = po.embedding_all_to_all(tables, indices, offsets)

Importing the package touches no GPU, no NVSHMEM and no environment variable.
"""

from . import heap_bytes as heap_bytes, nn as nn, ops as ops
from .api import (
    backend as backend,
    barrier as barrier,
    check as check,
    device as device,
    empty as empty,
    finalize as finalize,
    free as free,
    init as init,
    is_initialized as is_initialized,
    local_world_size as local_world_size,
    peer_view as peer_view,
    process_group as process_group,
    rank as rank,
    recover as recover,
    to_symmetric as to_symmetric,
    world_size as world_size,
)
from .ops import (
    all_reduce as all_reduce,
    embedding_all_to_all as embedding_all_to_all,
    gemm as gemm,
    gemm_all_reduce as gemm_all_reduce,
    gemm_all_to_all as gemm_all_to_all,
    gemm_reduce_scatter as gemm_reduce_scatter,
    gemv as gemv,
    gemv_all_reduce as gemv_all_reduce,
    sparse_all_reduce as sparse_all_reduce,
)
from .ops.all_reduce import all_reduce_rms_norm as all_reduce_rms_norm
from .ops.embedding.backward import EmbeddingOptimizer as EmbeddingOptimizer
from .ops.embedding.inputs import EmbeddingInputs as EmbeddingInputs
from .ops.embedding.lookups import Lookups as Lookups, LookupSource as LookupSource
from .ops.sparse_all_reduce import sparse_all_reduce_into as sparse_all_reduce_into
from .ops.sparse_buffers import sparse_all_reduce_buffers as sparse_all_reduce_buffers
from .runtime.errors import (
    BackendUnavailableError as BackendUnavailableError,
    BootstrapError as BootstrapError,
    CapacityError as CapacityError,
    CompileError as CompileError,
    ContractMismatchError as ContractMismatchError,
    NotSymmetricError as NotSymmetricError,
    PeerLostError as PeerLostError,
    PeerTimeoutError as PeerTimeoutError,
    PersistentOpsError as PersistentOpsError,
    SymmetricHeapError as SymmetricHeapError,
)
from .runtime.spawn import launch as launch
from .runtime.work import Work as Work
from .timeline import LaunchSummary as LaunchSummary, Timeline as Timeline, trace as trace

__version__ = "0.1.0"
