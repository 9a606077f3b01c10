// Prefetches data that a warp will read soon, without registers that wait for it.
#pragma once

#include "platform/groups.cuh"

namespace po {

enum class Cache { kL2, kOfMultiprocessor };

// Brings bytes into a cache, by lines or sectors, one per lane. Neighboring bytes may come, too; nothing waits. Data
// that others write during the launch may go into the multiprocessor's own cache only after the acquire that makes it
// visible.
template <Cache kCache, class Group>
PO_FN void prefetch_by_lanes([[maybe_unused]] const Group& lanes, [[maybe_unused]] const void* begin,
                             [[maybe_unused]] int32_t bytes) {
#if PO_ON_DEVICE
  constexpr int32_t kUnit = kCache == Cache::kL2 ? 128 : 32;
  const auto* first = static_cast<const uint8_t*>(begin);
  PO_NO_UNROLL
  for (int32_t at = lanes.rank() * kUnit; at < bytes; at += lanes.size() * kUnit) {
    if constexpr (kCache == Cache::kL2) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(first + at));
    } else {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(first + at));
    }
  }
#endif
}

}  // namespace po
