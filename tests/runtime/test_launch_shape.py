"""A kernel gets what its launch shape asks for, or is refused; clusters, and tiles shared in a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.runtime.backend import KernelRequest, LaunchShape, check_resident
from persistent_ops.runtime.compile import jit
from persistent_ops.runtime.compile.description import description_of
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.world import current, upload

CUDA = Path(__file__).resolve().parents[2] / "cuda"
# Every WG of a cluster sends a box of 8 rows to all WGs, twice, and reports what its neighbor has of all boxes.
HEADER = """
#pragma once
#include "platform/entry.cuh"
#include "platform/tensor_map.cuh"

namespace po::tile_probe {

struct Plan {
  uint64_t unused;
};
PO_DESCRIBE(Plan, unused)

struct Call {
  float* found;  // [rounds][wgs][boxes][8][32]
  int32_t row;
  int32_t column;
  TensorMap map;
};
PO_DESCRIBE(Call, found, row, column, map)

struct Shared {
  Plan plan;
  Handover landed;
};

struct Kernel {
  using Plan = tile_probe::Plan;
  using Call = tile_probe::Call;
  using Shared = tile_probe::Shared;
  static constexpr int kThreads = 64;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kBoxBytes = 1024;
  static constexpr int kHostArenaBytes = Cluster::kSize * kBoxBytes;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Cluster cluster(wg);
    uint8_t* arena = wg.arena();
    if (wg.rank() == 0) cluster.start(shared.landed, 1);
    for (int round = 0; round < 2; ++round) {
      cluster.sync();
      if (wg.rank() == 0) {
        const int box = cluster.rank(), row = call.row + 8 * box, column = call.column + round * 32;
        multicast_tile_async(cluster, call.map, row, column, arena + box * kBoxBytes, shared.landed);
        shared.landed.arrive_behind_tiles(kHostArenaBytes);
      }
      shared.landed.await(static_cast<uint32_t>(round));
      cluster.sync();
      const uint8_t* neighbor = cluster.of(arena, (cluster.rank() + 1) % Cluster::kSize);
      float* found = call.found + (round * wg.count() + wg.index()) * (kHostArenaBytes / 4);
      for (int i = wg.rank(); i < kHostArenaBytes / 4; i += wg.size()) {
        const bool is_aligned = reinterpret_cast<uint64_t>(arena) % kArenaAlignment<> == 0;
        const auto place = swizzled(static_cast<uint32_t>(i) * 4, 128);
        found[i] = is_aligned ? *reinterpret_cast<const float*>(neighbor + place) : -1;
      }
      cluster.sync();
    }
  }
};

}  // namespace po::tile_probe
"""


def _probe(size: int, **options: Any) -> KernelRequest:
    shape = LaunchShape(64, "a", cluster=size, arena_bytes=1024 * size, arena_alignment=1024)
    return KernelRequest("tile_probe", None, shape, **options)


def _copied(root: Path, size: int, row: int, column: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the actual and the expected matrix."""
    backend, grid = current().backend, 2 * size
    with mock.patch.object(jit, "kernel_source_root", return_value=root):
        kernel, structs = backend.load(_probe(size)), description_of("tile_probe").structs
    check_resident(kernel, grid)
    whole = torch.randn(29, 80, generator=torch.Generator().manual_seed(3)).to(backend.device)
    matrix = whole[2:, 4:73]
    found = torch.full((2, grid, size, 8, 32), torch.nan, device=backend.device)
    plan = upload(backend, structs["Plan"]())
    call = structs["Call"](found=found.data_ptr(), row=row, column=column, map=backend.tensor_map(matrix, (8, 32), 128))
    kernel.launch(grid, plan.data_ptr(), call)
    po.check()
    above, left = 50, 50
    wide = torch.zeros(200, 300)
    wide[above : above + matrix.shape[0], left : left + matrix.shape[1]] = matrix.cpu()
    tile = wide[above + row :, left + column :][: 8 * size, :64]
    wanted = tile.view(size, 8, 2, 32).permute(2, 0, 1, 3)[:, None].expand(2, grid, size, 8, 32)
    return found.cpu(), wanted.contiguous()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The kernels' sources together with the source of the probe."""
    shutil.copytree(CUDA, tmp_path / "cuda")
    (tmp_path / "cuda/kernels/tile_probe.cuh").write_text(HEADER)
    return tmp_path / "cuda"


@pytest.mark.parametrize(("size", "row", "column"), [(1, 3, 4), (2, 0, 0), (2, 14, 40), (4, -3, -8)])
def test_a_cluster_shares_tiles(size: int, row: int, column: int, root: Path, backend: str) -> None:
    """Completely inside of the matrix, and across each of its edges."""
    if backend == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("clusters and tensor maps are compiled for sm_90a here")
    ((found, wanted),) = in_world(_copied, 1, backend, root, size, row, column, host_options={"wg_size": 3})
    assert torch.equal(found, wanted)


@pytest.mark.host
def test_a_map_does_not_go_into_registers(root: Path) -> None:
    source = mock.patch.object(jit, "kernel_source_root", return_value=root)
    with source, pytest.raises(CompileError, match="registers cannot use a tensor map"):
        jit.compile_host(_probe(2, holds_call=True).source())


@pytest.mark.host
def test_tiles_and_clusters_compile_for_gpus(root: Path) -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    with mock.patch.object(jit, "kernel_source_root", return_value=root):
        used = jit.compile_cuda(_probe(2).source(), arch="sm_90a").kernels["tile_probe"]
        assert used.registers > 16 and used.spill_store_bytes == used.stack_bytes == 0
        with pytest.raises(CompileError, match="clusters need sm_90"):
            jit.compile_cuda(_probe(2).source(), arch="sm_80")


def _refused_maps() -> None:
    find = current().backend.tensor_map
    matrix = torch.zeros(64, 64)
    kept = find(matrix, (8, 32), 128)
    assert find(matrix, (8, 32), 128) is kept
    others = [(torch.zeros(64, 64), (8, 32), 128), (matrix[:9], (8, 32), 128)]
    others += [(matrix, (8, 16), 128), (matrix, (8, 32), 0)]
    assert all(bytes(find(*other)) != bytes(kept) for other in others)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "matrix: expected float32", (matrix.double(), (8, 32))),
        (ValueError, "matrix: expected two dimensions", (matrix.t(), (8, 32))),
        (ValueError, "matrix: expected two dimensions", (matrix[:0], (8, 32))),
        (ValueError, "matrix: expected rows that begin", (matrix[:, 1:], (8, 32))),
        (ValueError, "matrix: expected rows that begin", (torch.zeros(4, 63), (8, 32))),
        (ValueError, "box: expected 1 to 256", (matrix, (257, 32))),
        (ValueError, "box: expected 1 to 256", (matrix, (8, 31))),
        (ValueError, "swizzle: expected", (matrix, (8, 64), 128)),
        (ValueError, "swizzle: expected", (matrix, (8, 4), 16)),
    ]
    for kind, text, given in wrong:
        with pytest.raises(kind, match=text):
            find(*given)
    for number in range(5000):
        find(matrix[: 1 + number % 64], (1 + number // 64, 32))
    assert len(current().backend._tensor_maps._maps) == 4096  # type: ignore[attr-defined]


@pytest.mark.host
def test_maps_are_kept_and_checked() -> None:
    in_world(_refused_maps, 1, "host")


# ---- the rest of a shape -------------------------------------------------------------------------------------------


def _barrier(**shape: object) -> KernelRequest:
    return KernelRequest("barrier", None, LaunchShape(64, **shape))  # type: ignore[arg-type]


def _loaded_without_nvshmem() -> bool:
    world, request = current(), _barrier(links_nvshmem=False)
    with pytest.raises(NotImplementedError, match="barrier: its kernel stores to peers directly.*transport='auto'"):
        world.load(request)
    return world.load(request, world.alone).footprint().cluster == 1


@pytest.mark.host
def test_a_kernel_that_cannot_put_refuses_peers_that_are_not_reachable() -> None:
    assert in_world(_loaded_without_nvshmem, 2, "host", transport="staged") == [True, True]


def _grids() -> None:
    kernel = current().load(_barrier(cluster=4))
    check_resident(kernel, 64)
    with pytest.raises(ValueError, match="work_groups: expected a multiple of 4, the WGs of a cluster, got 6"):
        check_resident(kernel, 6)
    with pytest.raises(ValueError, match="work_groups: 64 WGs of this kernel fit"):
        check_resident(kernel, 68)


@pytest.mark.host
def test_a_grid_has_whole_clusters() -> None:
    in_world(_grids, 1, "host")
