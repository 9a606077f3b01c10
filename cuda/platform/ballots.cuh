// What a warp's lanes know of one another: who is first, how many come before, and sums over a row's chunks.
#pragma once

#include "platform/bits.cuh"
#include "platform/groups.cuh"

namespace po {

// A warp that counts.
struct BallotWarp : Warp {
  // Lanes before this one of which `condition` is true.
  PO_FN int count_below(bool condition) const { return count_bits(ballot(condition) & bits_below(rank())); }

  // The first lane of which `condition` is true, or size().
  PO_FN int first(bool condition) const {
    const uint32_t lanes = ballot(condition);
    return lanes == 0 ? size() : lowest_bit(lanes);
  }
};

// Of some lanes of a warp those whose bit of a word is this lane's. All lanes.
PO_FN uint32_t lanes_alike([[maybe_unused]] const Warp& warp, uint32_t lanes, uint32_t word, int bit) {
#if PO_ON_DEVICE
  // Of what C++ can say here nvcc 13.0 makes twice as many instructions: it works out the bit once for the ballot and once more.
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

// The sum of values of which a tile's lanes have kCount each; value i of a lane is number rank + i * lanes. Added up as a tree of
// neighbors within 32 of them, and these sums to `total` in their order, so that it does not matter how many lanes a tile has.
// All lanes get it.
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
