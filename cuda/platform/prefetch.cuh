// What a warp is to read soon, asked for without a register that waits for it.
#pragma once

#include "platform/groups.cuh"

namespace po {

// Brings bytes into the L2 cache, line by line, a line per lane. What lies about them may come, too; nothing waits.
template <class Group>
PO_FN void prefetch_by_lanes([[maybe_unused]] const Group& lanes, [[maybe_unused]] const void* begin,
                             [[maybe_unused]] int32_t bytes) {
#if PO_ON_DEVICE
  constexpr int32_t kLine = 128;
  const auto* first = static_cast<const uint8_t*>(begin);
  PO_NO_UNROLL
  for (int32_t at = lanes.rank() * kLine; at < bytes; at += lanes.size() * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + at));
  }
#endif
}

// The same into the multiprocessor's own cache, sector by sector; what others write during the launch, behind the acquire that
// makes it visible.
template <class Group>
PO_FN void prefetch_near_by_lanes([[maybe_unused]] const Group& lanes, [[maybe_unused]] const void* begin,
                                  [[maybe_unused]] int32_t bytes) {
#if PO_ON_DEVICE
  constexpr int32_t kSector = 32;
  const auto* first = static_cast<const uint8_t*>(begin);
  PO_NO_UNROLL
  for (int32_t at = lanes.rank() * kSector; at < bytes; at += lanes.size() * kSector) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(first + at));
  }
#endif
}

}  // namespace po
