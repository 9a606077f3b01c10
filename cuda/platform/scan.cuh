// Sums over the threads of a WG, and binary search by a warp.
#pragma once

#include "platform/describe.cuh"
#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

PO_CONSTANT(kMaxWarps)

union SumScratch {
  uint64_t warps[kMaxWarps];
  uint32_t first_warps[kMaxWarps];
};

// The sum of `value` over the threads before this one; `*total`: over all of the WG. All threads.
PO_FN uint64_t sum_before(const WorkGroup& wg, SumScratch& scratch, uint64_t value, uint64_t* total) {
  const Warp warp;
  const uint64_t through = warp.sum_through(value);
  // @sums-read
  wg.sync();  // all threads have read the last sums
  if (warp.rank() == warp.size() - 1) scratch.warps[wg.warp_index()] = through;
  wg.sync();
  uint64_t before = through - value;
  uint64_t all = 0;
  for (int i = 0; i < wg.num_warps(); ++i) {
    const uint64_t sum = scratch.warps[i];
    if (i < wg.warp_index()) before += sum;
    all += sum;
  }
  *total = all;
  return before;
}

// The same for small numbers; on the GPU only the threads of the first kWarps warps have them.
template <int kWarps>
PO_FN uint32_t sum_before_in_first(const WorkGroup& wg, SumScratch& scratch, uint32_t value, uint32_t* total) {
  const Warp warp;
  const int num_warps = PO_ON_DEVICE ? kWarps : wg.num_warps();
  const uint32_t through = warp.sum_through(value);
  wg.sync();  // all threads have read the last sums
  if (warp.rank() == warp.size() - 1 && wg.warp_index() < num_warps) scratch.first_warps[wg.warp_index()] = through;
  wg.sync();
  uint32_t before = through - value;
  uint32_t all = 0;
  PO_UNROLL
  for (int i = 0; i < num_warps; ++i) {
    const uint32_t sum = scratch.first_warps[i];
    if (i < wg.warp_index()) before += sum;
    all += sum;
  }
  *total = all;
  return before;
}

// The first place in [begin, end) of an ascending array whose element is `bound` or more, or `end`. All lanes of a
// warp, which look at as many places at a time.
template <class Place, class Element>
PO_FN Place lower_bound(const Element* elements, Place begin, Place end, int64_t bound, const Warp& warp) {
  while (begin < end) {
    const Place step = ceil_div<Place>(end - begin, warp.size() + 1);
    const Place place = begin + step * (warp.rank() + 1) - 1;
    const bool is_below = place < end && static_cast<int64_t>(elements[place]) < bound;
    const int num_below = warp.count(is_below);  // true for the first lanes only
    if (num_below < warp.size()) end = min_of(end, begin + step * (num_below + 1) - 1);
    begin += step * num_below;
  }
  return begin;
}

// The same for a place that is likely near `from`: the lanes first look on either side of it, each twice as far as the
// previous one.
template <class Element>
PO_FN int lower_bound_near(const Element* elements, int begin, int end, int64_t bound, int from, const Warp& warp) {
  constexpr int kNear = 32;
  const int middle = warp.size() / 2;
  const auto place_of = [&](int lane) {
    return lane < middle ? from - (kNear << (middle - 1 - lane)) : from + (kNear << (lane - middle));
  };
  const int place = place_of(warp.rank());
  const bool is_below = place < begin || (place < end && static_cast<int64_t>(elements[place]) < bound);
  const int num_below = warp.count(is_below);  // true for the first lanes only
  if (num_below < warp.size()) end = min_of(end, place_of(num_below));
  if (num_below > 0) begin = max_of(begin, place_of(num_below - 1) + 1);
  return lower_bound<int>(elements, begin, end, bound, warp);
}

// The same by one thread, for a place that is likely near `begin`.
template <class Element>
PO_FN int64_t lower_bound_near(const Element* elements, int64_t begin, int64_t end, int64_t bound) {
  int64_t step = 1;
  int64_t below = begin;  // all elements before it are below the bound
  while (below < end && static_cast<int64_t>(elements[min_of(below + step, end) - 1]) < bound) {
    below = min_of(below + step, end);
    step *= 2;
  }
  int64_t last = min_of(below + step, end);  // the element at last - 1 is not below the bound, unless below == end
  while (below < last) {
    const int64_t middle = below + (last - below) / 2;
    if (static_cast<int64_t>(elements[middle]) < bound) {
      below = middle + 1;
    } else {
      last = middle;
    }
  }
  return below;
}

}  // namespace po
