// Exchanges between a warp's lanes: the first lane, the lanes before one, and sums over a row's chunks.
#pragma once

#include "platform/bits.cuh"
#include "platform/groups.cuh"

namespace po {

// A warp that can count.
struct BallotWarp : Warp {
  // Number of lanes before this one whose `condition` is true.
  PO_FN int count_below(bool condition) const { return count_bits(ballot(condition) & bits_below(rank())); }

  // The first lane whose `condition` is true, or size().
  PO_FN int first(bool condition) const {
    const uint32_t lanes = ballot(condition);
    return lanes == 0 ? size() : lowest_bit(lanes);
  }
};

// The lanes of `lanes` whose bit of their word equals this lane's. All lanes.
PO_FN uint32_t lanes_alike([[maybe_unused]] const Warp& warp, uint32_t lanes, uint32_t word, int bit) {
#if PO_ON_DEVICE
  // In C++ nvcc 13.0 makes twice as many instructions of this: it computes the bit twice, once for the ballot.
  asm volatile(
      "{ .reg .pred is_set; .reg .b32 same; and.b32 same, %1, %2; setp.ne.u32 is_set, same, 0;"
      " vote.sync.ballot.b32 same, is_set, %3; @!is_set not.b32 same, same; and.b32 %0, %0, same; }"
      : "+r"(lanes)
      : "r"(word), "r"(1u << bit), "r"(warp.mask()));
#else
  const bool is_set = (word >> bit & 1) != 0;
  const uint32_t set = warp.ballot(is_set);
  lanes &= is_set ? set : ~set;
#endif
  return lanes;
}

// The sum of values of which a tile's lanes have kCount each; value i of a lane is number rank + i * lanes. Groups of
// 32 values are added as trees of neighbors, and their sums are added to `total` in order. So the result does not
// depend on the number of lanes in a tile. All lanes get it.
template <class Tile, int kCount>
PO_FN float sum_by_trees([[maybe_unused]] const Tile& tile, float (&values)[kCount], float total) {
  constexpr int kTree = kCount * Tile::kSize < 32 ? kCount : 32 / Tile::kSize;  // a lane's values in a tree
  if constexpr (Tile::kSize > 1) {
    PO_UNROLL
    for (int distance = 1; distance < Tile::kSize; distance *= 2) {
      PO_UNROLL
      for (float& value : values) value = tile.add_across(value, distance);
    }
  }
  PO_UNROLL
  for (int tree = 0; tree < kCount; tree += kTree) {
    PO_UNROLL
    for (int distance = 1; distance < kTree; distance *= 2) {
      PO_UNROLL
      for (int i = 0; i < kTree; i += 2 * distance) values[tree + i] += values[tree + i + distance];
    }
    total += values[tree];
  }
  return total;
}

}  // namespace po
