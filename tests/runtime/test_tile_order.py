"""A litmus test: tiles that are copied to a peer's memory, and a flag after them, arrive in this order."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
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
GRIDS = {"host": 8, "cuda": 128}  # so many on a GPU that the copies queue: a flag can overtake them
TIMEOUT_NS = 20 * 10**9  # of one wait; PEs that share a GPU with others take turns
# In each round every WG sends a tile of 8 boxes to the same WG of the peer, which has two buffers for them. A flag of
# round r also says that its sender has read the tile of round r - 1, so the flag of round r - 1 lets a PE send round r:
# it goes to the buffer of round r - 2. No mutation drops `see_in_tile_copies`: the PTX ISA asks for it ("Async proxy"),
# and hardware may do without.
HEADER = """
#pragma once
#include "platform/counters.cuh"
#include "platform/entry.cuh"
#include "platform/tensor_map.cuh"

namespace po::tile_order {

struct Config {
  bool is_flag_early = false;
};

struct Plan {
  uint64_t unused;
};
PO_DESCRIBE(Plan, unused)

struct Call {
  uint64_t rounds;
  uint64_t timeout_ns;
  uint64_t pe;
  uint64_t* flags;  // [wgs]
  uint64_t* flags_of_peer;
  uint64_t* finished;  // [wgs], rounds
  uint32_t* wrong;     // words
  TensorMap tiles;     // [wgs][2][64] rows of 8 boxes
  TensorMap tiles_of_peer;
};
PO_DESCRIBE(Call, rounds, timeout_ns, pe, flags, flags_of_peer, finished, wrong, tiles, tiles_of_peer)

struct Shared {
  Plan plan;
  Handover landed;
  bool is_there;
};

template <Config kConfig>
struct Kernel {
  using Plan = tile_order::Plan;
  using Call = tile_order::Call;
  using Shared = tile_order::Shared;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kBoxes = 8;
  static constexpr int kBoxBytes = 64 * 64 * 2;
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kHostArenaBytes = 2 * kTileBytes;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    auto* sent = reinterpret_cast<uint32_t*>(wg.arena());
    auto* received = reinterpret_cast<uint32_t*>(wg.arena() + kTileBytes);
    if (wg.rank() == 0) Cluster(wg).start(shared.landed, 1);
    uint64_t round = 1;
    for (; round <= call.rounds; ++round) {
      for (int i = wg.rank(); i < kTileBytes / 4; i += wg.size()) sent[i] = word(round, call.pe, wg, i);
      show_to_copies();
      wg.sync();
      if (wg.rank() == 0) {
        send(wg, call, round);
        shared.is_there = await_flag(wg, call, round);
        if (shared.is_there) receive(wg, shared, call, round);
      }
      wg.sync();
      if (!shared.is_there) break;
      shared.landed.await(static_cast<uint32_t>(round - 1));
      uint32_t wrong = 0;
      for (int i = wg.rank(); i < kTileBytes / 4; i += wg.size()) {
        wrong += received[i] != word(round, 1 - call.pe, wg, i);
      }
      if (wrong != 0) count_add_relaxed_gpu(call.wrong, wrong);
    }
    if (wg.rank() == 0) call.finished[wg.index()] = round - 1;
  }

 private:
  // At a place, different for all rounds.
  static PO_FN uint32_t word(uint64_t round, uint64_t pe, const WorkGroup& wg, int i) {
    const auto place = static_cast<uint32_t>(pe << 31 | static_cast<uint64_t>(wg.index()) << 16);
    return static_cast<uint32_t>(round * 0x9e3779b9u) ^ (place | static_cast<uint32_t>(i));
  }

  static PO_FN int row(const WorkGroup& wg, uint64_t round) {
    return (wg.index() * 2 + static_cast<int>(round % 2)) * 64;
  }

  static PO_FN void send(const WorkGroup& wg, const Call& call, uint64_t round) {
    for (int box = 0; box < kBoxes; ++box) {
      copy_tile_back_async(call.tiles_of_peer, row(wg, round), box * 64, wg.arena() + box * kBoxBytes);
    }
    if (!kConfig.is_flag_early) await_tiles_written();
    flag_store_release_sys(call.flags_of_peer + wg.index(), round);
    if (kConfig.is_flag_early) await_tiles_written();
  }

  static PO_FN bool await_flag(const WorkGroup& wg, const Call& call, uint64_t round) {
    const uint64_t started = clock_ns();
    for (uint32_t spins = 1; flag_load_acquire_sys(call.flags + wg.index()) < round; ++spins) {
      if (clock_ns() - started > call.timeout_ns) return false;
      spin_pause(spins);
    }
    return true;
  }

  static PO_FN void receive(const WorkGroup& wg, Shared& shared, const Call& call, uint64_t round) {
    see_in_tile_copies();
    shared.landed.arrive_behind_tiles(kTileBytes);
    for (int box = 0; box < kBoxes; ++box) {
      uint8_t* tile = wg.arena() + kTileBytes + box * kBoxBytes;
      copy_tile_async(call.tiles, row(wg, round), box * 64, tile, shared.landed);
    }
  }
};

}  // namespace po::tile_order
"""
_loading = threading.Lock()  # PEs of the host are threads


def _request(*, is_flag_early: bool) -> KernelRequest:
    shape = LaunchShape(256, arena_bytes=2 * 8 * 64 * 64 * 2)
    return KernelRequest.of("tile_order", {"is_flag_early": is_flag_early}, shape)


def _exchanged(root: Path, rounds: int, is_flag_early: bool) -> tuple[list[int], int]:
    """Return how many rounds each WG has finished, and how many words were wrong."""
    backend, peer = current().backend, 1 - po.rank()
    with _loading, mock.patch.object(jit, "kernel_source_root", return_value=root):
        kernel = backend.load(_request(is_flag_early=is_flag_early))
        structs = description_of("tile_order").structs
    grid = GRIDS[backend.name]
    check_resident(kernel, grid)
    tiles, flags = po.empty(grid * 2 * 64, 8 * 64, dtype=torch.bfloat16), po.empty(grid, dtype=torch.int64)
    tiles.zero_()
    flags.zero_()
    found = torch.zeros(grid + 1, dtype=torch.int64, device=backend.device)
    plan = upload(backend, structs["Plan"]())
    call = structs["Call"](
        rounds=rounds,
        timeout_ns=TIMEOUT_NS,
        pe=po.rank(),
        flags=flags.data_ptr(),
        flags_of_peer=po.peer_view(flags, peer).data_ptr(),
        finished=found.data_ptr(),
        wrong=found[grid:].data_ptr(),
        tiles=backend.tensor_map(tiles, (64, 64)),
        tiles_of_peer=backend.tensor_map(po.peer_view(tiles, peer), (64, 64)),
    )
    po.barrier()
    kernel.launch(grid, plan.data_ptr(), call)
    po.barrier()
    *finished, wrong = found.tolist()
    return finished, wrong


def _wrong_words(backend: str, root: Path, *, is_flag_early: bool) -> int:
    if backend == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs the copy engine of sm_90")
    rounds = 20 if backend == "host" else 300
    results = in_world(_exchanged, 2, backend, root, rounds, is_flag_early, host_options={"wg_size": 3})
    assert [finished for finished, _ in results] == [[rounds] * GRIDS[backend]] * 2, "a wait has timed out"
    return sum(wrong for _, wrong in results)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The kernels' sources together with the source of the test's own."""
    shutil.copytree(CUDA, tmp_path / "cuda")
    (tmp_path / "cuda/kernels/tile_order.cuh").write_text(HEADER)
    return tmp_path / "cuda"


@pytest.mark.parametrize("gpus", ["any", pytest.param("apart", marks=[pytest.mark.gpu, pytest.mark.apart])])
def test_a_flag_comes_after_the_tiles_before_it(gpus: str, backend: str, root: Path) -> None:
    assert _wrong_words(backend, root, is_flag_early=False) == 0


@pytest.mark.gpu
@pytest.mark.apart
def test_a_flag_that_does_not_wait_for_the_tiles_comes_before_them(backend: str, root: Path) -> None:
    wrong = _wrong_words(backend, root, is_flag_early=True)
    if torch.cuda.device_count() < 2:
        pytest.skip("PEs that share a GPU take turns: a tile may come before the other PE looks")
    assert wrong > 0


@pytest.mark.host
@pytest.mark.parametrize("is_flag_early", [False, True])
def test_both_compile_for_gpus(root: Path, is_flag_early: bool) -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    with mock.patch.object(jit, "kernel_source_root", return_value=root):
        used = jit.compile_cuda(_request(is_flag_early=is_flag_early).source(), arch="sm_90").kernels["tile_order"]
    assert used.registers > 16 and used.spill_store_bytes == used.stack_bytes == 0
