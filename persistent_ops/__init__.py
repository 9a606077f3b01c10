"""Persistent CUDA kernels over NVSHMEM that compute and communicate in one launch.

    import persistent_ops as po
    po.init()
    rows = po.embedding_all_to_all(tables, indices, offsets)

Importing the package touches no GPU, no NVSHMEM and no environment variable.
"""

from __future__ import annotations

from . import ops as ops
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
    peer_view as peer_view,
    rank as rank,
    recover as recover,
    to_symmetric as to_symmetric,
    world_size as world_size,
)
from .ops import embedding_all_to_all as embedding_all_to_all
from .runtime.errors import (
    BackendUnavailableError as BackendUnavailableError,
    BootstrapError as BootstrapError,
    CompileError as CompileError,
    ContractMismatchError as ContractMismatchError,
    NotSymmetricError as NotSymmetricError,
    PeerTimeoutError as PeerTimeoutError,
    PersistentOpsError as PersistentOpsError,
    SymmetricHeapError as SymmetricHeapError,
)
from .runtime.spawn import launch as launch

__version__ = "0.1.0"
