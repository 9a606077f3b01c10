// What a warp is to read soon, asked for without a register that waits for it.
#pragma once

#include "platform/groups.cuh"

namespace po {

enum class Cache { kL2, kOfMultiprocessor };

// Brings bytes into a cache, by lines or sectors, one per lane. What lies about them may come, too; nothing waits. Into the
// multiprocessor's own: what others write during the launch, behind the acquire that makes it visible.
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
