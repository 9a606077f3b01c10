// Tensor maps: how a matrix lies in memory, and the size of the boxes in which it is copied to shared memory, a tile at
// a time. `Backend.tensor_map` makes a map for a `Call`. On GPUs it is a CUtensorMap, which the copy engine (TMA)
// reads.
#pragma once

#include "platform/cluster.cuh"
#include "platform/describe.cuh"

namespace po {

struct alignas(64) TensorMap {
  uint64_t words[16];
};
PO_DESCRIBE(TensorMap, words)

// The words of a map on the host.
struct HostTensorMap {
  const uint8_t* base;
  int64_t rows;
  int64_t row_bytes;   // of the matrix, without gaps between rows
  int64_t row_stride;  // bytes
  int64_t box_rows;
  int64_t box_row_bytes;
  int64_t element_bytes;
  uint64_t swizzle_bytes;  // 0: no swizzle
};
PO_DESCRIBE(HostTensorMap, base, rows, row_bytes, row_stride, box_rows, box_row_bytes, element_bytes, swizzle_bytes)

// The place, in its tile, of the byte at `offset` of a box. A tile begins at a multiple of 1024. A swizzle lets lanes
// that read one column of several rows find them in different banks.
PO_FN constexpr uint32_t swizzled(uint32_t offset, uint32_t swizzle_bytes) {
  return swizzle_bytes == 0 ? offset : offset ^ ((offset >> 7 & (swizzle_bytes / 16 - 1)) << 4);
}

#if !PO_ON_DEVICE
inline void copy_box(const HostTensorMap& map, int64_t row, int64_t column, uint8_t* tile) {
  if (column * map.element_bytes % 16 != 0) __builtin_trap();  // an illegal instruction for the copy engine
  for (int64_t i = 0; i < map.box_rows * map.box_row_bytes; ++i) {
    const int64_t y = row + i / map.box_row_bytes, x = column * map.element_bytes + i % map.box_row_bytes;
    const bool is_inside = 0 <= y && y < map.rows && 0 <= x && x < map.row_bytes;
    tile[swizzled(static_cast<uint32_t>(i), static_cast<uint32_t>(map.swizzle_bytes))] =
        is_inside ? map.base[y * map.row_stride + x] : 0;
  }
}
#endif

// Starts to copy a box to `tile` in this WG's shared memory. The box begins at (row, column) of the map's matrix; parts
// outside of the matrix become zero. The column is at a multiple of 16 bytes, and may be negative. The tile begins at a
// multiple of 128, with a swizzle of 1024. The bytes arrive in a round of `landed`, which `Cluster::start` has started.
// One thread. The map lies in the `Call`.
PO_FN void copy_tile_async(const TensorMap& map, int row, int column, uint8_t* tile, Handover& landed) {
#if PO_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(tile))),
      "l"(&map), "r"(column), "r"(row), "r"(landed.address())
      : "memory");
#else
  HostTensorMap host;
  __builtin_memcpy(&host, &map, sizeof(host));
  copy_box(host, row, column, tile);
  landed.tile_has_come(static_cast<uint32_t>(host.box_rows * host.box_row_bytes));
#endif
}

// The same to all WGs of the cluster: to the same place in each, and in a round of the same handover.
PO_FN void multicast_tile_async([[maybe_unused]] const Cluster& cluster, const TensorMap& map, int row, int column,
                                uint8_t* tile, Handover& landed) {
#if PO_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(tile))),
      "l"(&map), "r"(column), "r"(row), "r"(landed.address()), "h"(static_cast<uint16_t>((1 << Cluster::kSize) - 1))
      : "memory");
#else
  for (int rank = 0; rank < Cluster::kSize; ++rank) {
    copy_tile_async(map, row, column, cluster.of(tile, rank), *cluster.of(&landed, rank));
  }
#endif
}

}  // namespace po
