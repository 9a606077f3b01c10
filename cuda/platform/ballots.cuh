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

// The sum of values of which a tile's lanes have kCount each; value i of a lane is number rank + i * lanes. Added up as a tree of
// neighbours within 32 of them, and these sums to `total` in their order, so that it does not matter how many lanes a tile has.
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
