"""What a kernel's launch shape asks for is what it gets, or the kernel is refused."""

from __future__ import annotations

import pytest
from worlds import in_world

from persistent_ops.runtime.backend import KernelRequest, LaunchShape, check_resident
from persistent_ops.runtime.world import current

pytestmark = pytest.mark.host


def _barrier(**shape: object) -> KernelRequest:
    return KernelRequest("barrier", None, LaunchShape(64, **shape))  # type: ignore[arg-type]


def _loaded_without_nvshmem() -> bool:
    world, request = current(), _barrier(links_nvshmem=False)
    with pytest.raises(NotImplementedError, match="barrier: its kernel stores to peers directly.*transport='auto'"):
        world.load(request)
    return world.load(request, world.alone).footprint().cluster == 1


def test_a_kernel_that_cannot_put_refuses_peers_that_are_not_reachable() -> None:
    assert in_world(_loaded_without_nvshmem, 2, "host", transport="staged") == [True, True]


def _grids() -> None:
    kernel = current().load(_barrier(cluster=4))
    check_resident(kernel, 64)
    with pytest.raises(ValueError, match="work_groups: expected a multiple of 4, the WGs of a cluster, got 6"):
        check_resident(kernel, 6)
    with pytest.raises(ValueError, match="work_groups: 64 WGs of this kernel fit"):
        check_resident(kernel, 68)


def test_a_grid_has_whole_clusters() -> None:
    in_world(_grids, 1, "host")
