// How a WG's shared memory is divided. The host needs these numbers before there is a kernel: it chooses the depth of
// the ring, and whether the vectors stay.
//
// The arena holds the ring of the weights, then the vectors or a ring for them, then the warps' parts of the sums in
// flight.
#pragma once

#include "platform/describe.cuh"
#include "tile/weight_stream.cuh"

namespace po::gemv_all_reduce {

inline constexpr int kMaxRows = 65536;      // of one launch
inline constexpr int kServingWarps = 2;     // of a WG: they send
inline constexpr int kMostStepsAtOnce = 2;  // that a warp multiplies
PO_CONSTANT(kMaxRows)
PO_CONSTANT(kServingWarps)
PO_CONSTANT(kMostStepsAtOnce)

// Upper bound of a WG's shared memory outside of its arena.
PO_FN constexpr int64_t static_bytes(int64_t pes) { return 1024 + pes * static_cast<int64_t>(sizeof(uint64_t)); }

// Tiles of a WG that may be in flight in shared memory.
PO_FN constexpr int slots_of(int vectors) { return vectors == 1 ? 8 : 4; }

// Whether two launches find room on one SM: with one vector, or with up to 8 and prefetched weights. More vectors take
// too many registers.
PO_FN constexpr bool shares_sm(int vectors, bool prefetches) { return vectors == 1 || (prefetches && vectors <= 8); }

PO_FN constexpr int64_t ring_step_bytes(int64_t warps) { return warps * 2 * kLanesOfGpu * 16; }
PO_FN constexpr int64_t vectors_bytes(int64_t vectors, int64_t row_bytes) {
  return ceil_div<int64_t>(row_bytes, kStepBytes) * vectors * kStepBytes + (vectors == 1 ? kDeliveryBytes : 0);
}
PO_FN constexpr int64_t vector_ring_step_bytes(int64_t warps, int64_t vectors) {
  return warps / num_teams_of(static_cast<int>(warps)) * vectors * kStepBytes;
}
PO_FN constexpr int64_t parts_bytes(int64_t warps, int64_t vectors) {
  return warps / num_teams_of(static_cast<int>(warps)) * vectors * kTileRows * int64_t{sizeof(float)} *
         slots_of(static_cast<int>(vectors));
}
PO_QUERY(static_bytes, (int64_t pes), static_bytes(pes))
PO_QUERY(num_teams, (int64_t warps), num_teams_of(static_cast<int>(warps)))
PO_QUERY(shares_sm, (int64_t vectors, int64_t prefetches), shares_sm(static_cast<int>(vectors), prefetches != 0))
PO_QUERY(ring_step_bytes, (int64_t warps), ring_step_bytes(warps))
PO_QUERY(vectors_bytes, (int64_t vectors, int64_t row_bytes), vectors_bytes(vectors, row_bytes))
PO_QUERY(vector_ring_step_bytes, (int64_t warps, int64_t vectors), vector_ring_step_bytes(warps, vectors))
PO_QUERY(parts_bytes, (int64_t warps, int64_t vectors), parts_bytes(warps, vectors))

}  // namespace po::gemv_all_reduce
