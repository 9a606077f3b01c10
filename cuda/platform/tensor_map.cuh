// Tensor maps: how a matrix lies in memory, and the size of the boxes in which it is copied to shared memory, a tile at
// a time. `Backend.tensor_map` makes a map for a `Call`. On GPUs it is a CUtensorMap, which the copy engine (TMA)
// reads.
#pragma once

#include "platform/cluster.cuh"
#include "platform/describe.cuh"
#include "platform/memory.cuh"

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
// Calls it for each 16 bytes of a box: with their place in the tile, those of the matrix, and how many of them are
// inside of it.
template <class Body>
void for_each_unit_of_box(const TensorMap& map, int64_t row, int64_t column, const Body& body) {
  HostTensorMap host;
  __builtin_memcpy(&host, &map, sizeof(host));
  const int64_t first = column * host.element_bytes;
  if (first % 16 != 0) __builtin_trap();  // an illegal instruction for the copy engine
  for (int64_t i = 0; i < host.box_rows; ++i) {
    const bool is_inside = 0 <= row + i && row + i < host.rows;
    const uint8_t* line = host.base + (row + i) * host.row_stride;
    for (int64_t at = 0; at < host.box_row_bytes; at += 16) {
      const int64_t x = first + at, rest = is_inside && x >= 0 ? host.row_bytes - x : 0;
      const auto place = static_cast<uint32_t>(i * host.box_row_bytes + at);
      body(swizzled(place, static_cast<uint32_t>(host.swizzle_bytes)), line + x,
           static_cast<size_t>(max_of<int64_t>(0, min_of<int64_t>(16, rest))));
    }
  }
}
#endif

// Lets tile copies that this thread starts see what it has acquired from other threads. Copies go through the async
// proxy, and accesses to one place through two proxies are ordered by a proxy fence alone (PTX ISA, "Async proxy").
PO_FN void see_in_tile_copies() {
#if PO_ON_DEVICE
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

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
  uint32_t bytes = 0;
  for_each_unit_of_box(map, row, column, [&](uint32_t place, const uint8_t* unit, size_t count) {
    memset(tile + place, 0, 16);
    memcpy(tile + place, unit, count);
    bytes += 16;
  });
  landed.tile_has_come(bytes);
#endif
}

// The same to `count` WGs of the cluster, from rank `first` on: to the same place in each, and in a round of the same
// handover.
PO_FN void multicast_tile_async([[maybe_unused]] const Cluster& cluster, int first, int count, const TensorMap& map,
                                int row, int column, uint8_t* tile, Handover& landed) {
#if PO_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(tile))),
      "l"(&map), "r"(column), "r"(row), "r"(landed.address()), "h"(static_cast<uint16_t>(((1 << count) - 1) << first))
      : "memory");
#else
  for (int rank = first; rank < first + count; ++rank) {
    copy_tile_async(map, row, column, cluster.of(tile, rank), *cluster.of(&landed, rank));
  }
#endif
}

PO_FN void multicast_tile_async(const Cluster& cluster, const TensorMap& map, int row, int column, uint8_t* tile,
                                Handover& landed) {
  multicast_tile_async(cluster, 0, Cluster::kSize, map, row, column, tile, landed);
}

// Brings a map to the copy engine's cache.
PO_FN void prefetch_map([[maybe_unused]] const TensorMap& map) {
#if PO_ON_DEVICE
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Lets copies from shared memory to a matrix see what this thread has stored there. A sync with the thread that starts
// them must follow.
PO_FN void show_to_copies() {
#if PO_ON_DEVICE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts to copy a box from `tile` in this WG's shared memory to a matrix. Parts outside of the matrix are left out. One
// thread, which has seen what others stored. The copy is a batch of its own.
PO_FN void copy_tile_back_async(const TensorMap& map, int row, int column, const uint8_t* tile) {
#if PO_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n cp.async.bulk.commit_group;" ::"l"(
          &map),
      "r"(column), "r"(row), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(tile)))
      : "memory");
#else
  for_each_unit_of_box(map, row, column, [&](uint32_t place, const uint8_t* unit, size_t count) {
    memcpy(const_cast<uint8_t*>(unit), tile + place, count);
  });
#endif
}

// Returns when all but this thread's last `kPending` copies to a matrix have read shared memory. The end of the kernel
// completes them.
template <int kPending>
PO_FN void await_tiles_read() {
#if PO_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// Returns when this thread's copies to a matrix are complete. They are then visible to this thread, so a flag that it
// releases covers them, in a peer's memory too.
PO_FN void await_tiles_written() {
#if PO_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace po
