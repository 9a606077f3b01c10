// Finds the bag of a place among the lookups: a binary search among the bags' ends, halved like torch.searchsorted. So
// ends that fall, for which no search has a right answer, have the same answer here and there.
//
// The answers rise with the place whatever the ends are: where the searches for two places part, the search for the
// lower place goes left.
#pragma once

#include "platform/groups.cuh"

namespace po {

// A step of the search: continues with the part of [begin, end) after its middle, or before it.
PO_FN void halve(int32_t& begin, int32_t& end, bool goes_behind) {
  if (begin >= end) return;
  const int32_t middle = begin + (end - begin) / 2;
  if (goes_behind) {
    begin = middle + 1;
  } else {
    end = middle;
  }
}

// Number of ends that the search finds at or before the place: the place's bag, or `count` if it has none. One thread.
template <class Offset>
PO_FN int32_t find_bag(const Offset* ends, int32_t count, int64_t place) {
  int32_t begin = 0;
  int32_t end = count;
  while (begin < end) halve(begin, end, static_cast<int64_t>(ends[begin + (end - begin) / 2]) <= place);
  return begin;
}

// The same by a warp, in a fifth of the rounds: lanes look at all ends that the next halvings can reach. All lanes.
template <class Offset>
PO_FN int32_t find_bag(const Offset* ends, int32_t count, int64_t place, const Warp& warp) {
  constexpr int kHalvings = kWarpSize == 1 ? 1 : 5;
  // Node 1 is the next middle. From node n the search continues at 2n (before n) or 2n + 1 (after n).
  const auto node = static_cast<uint32_t>(warp.rank() + 1);
  int32_t begin = 0;
  int32_t end = count;
  PO_NO_UNROLL
  while (begin < end) {
    int32_t own_begin = begin;
    int32_t own_end = end;
    PO_UNROLL
    for (int level = kHalvings - 1; level >= 0; --level) {
      if (node >> level > 1) halve(own_begin, own_end, (node >> level & 1) != 0);
    }
    const int32_t middle = own_begin + (own_end - own_begin) / 2;
    const uint32_t behind = warp.ballot(own_begin < own_end && static_cast<int64_t>(ends[middle]) <= place);
    uint32_t at = 1;
    PO_UNROLL
    for (int level = 0; level < kHalvings; ++level) {
      const uint32_t goes_behind = behind >> (at - 1) & 1;
      halve(begin, end, goes_behind != 0);
      at = 2 * at + goes_behind;
    }
  }
  return begin;
}

}  // namespace po
