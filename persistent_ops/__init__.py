"""Persistent CUDA kernels over NVSHMEM that compute and communicate in one launch.

    import persistent_ops as po
    po.init()
    rows = po.embedding_all_to_all(tables, indices, offsets)

Importing the package touches no GPU, no NVSHMEM and no environment variable.
"""

from __future__ import annotations

from . import nn as nn
from . import ops as ops
from .api import (
    backend as backend,
)
from .api import (
    barrier as barrier,
)
from .api import (
    check as check,
)
from .api import (
    device as device,
)
from .api import (
    empty as empty,
)
from .api import (
    finalize as finalize,
)
from .api import (
    free as free,
)
from .api import (
    init as init,
)
from .api import (
    is_initialized as is_initialized,
)
from .api import (
    peer_view as peer_view,
)
from .api import (
    rank as rank,
)
from .api import (
    recover as recover,
)
from .api import (
    to_symmetric as to_symmetric,
)
from .api import (
    world_size as world_size,
)
from .nn.ddp import ddp_sparse_hook as ddp_sparse_hook
from .ops import all_reduce as all_reduce
from .ops import embedding_all_to_all as embedding_all_to_all
from .ops import gemv as gemv
from .ops import gemv_all_reduce as gemv_all_reduce
from .ops import sparse_all_reduce as sparse_all_reduce
from .ops.all_reduce import all_reduce_rms_norm as all_reduce_rms_norm
from .ops.embedding_backward import EmbeddingOptimizer as EmbeddingOptimizer
from .ops.embedding_inputs import EmbeddingInputs as EmbeddingInputs
from .ops.embedding_inputs_lookups import Lookups as Lookups
from .ops.embedding_inputs_lookups import LookupSource as LookupSource
from .ops.sparse_all_reduce import SparseWork as SparseWork
from .ops.sparse_all_reduce import sparse_all_reduce_into as sparse_all_reduce_into
from .ops.sparse_buffers import sparse_all_reduce_buffers as sparse_all_reduce_buffers
from .runtime.errors import (
    BackendUnavailableError as BackendUnavailableError,
)
from .runtime.errors import (
    BootstrapError as BootstrapError,
)
from .runtime.errors import (
    CapacityError as CapacityError,
)
from .runtime.errors import (
    CompileError as CompileError,
)
from .runtime.errors import (
    ContractMismatchError as ContractMismatchError,
)
from .runtime.errors import (
    NotSymmetricError as NotSymmetricError,
)
from .runtime.errors import (
    PeerLostError as PeerLostError,
)
from .runtime.errors import (
    PeerTimeoutError as PeerTimeoutError,
)
from .runtime.errors import (
    PersistentOpsError as PersistentOpsError,
)
from .runtime.errors import (
    SymmetricHeapError as SymmetricHeapError,
)
from .runtime.spawn import launch as launch
from .timeline import trace as trace

__version__ = "0.1.0"
