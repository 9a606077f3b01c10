// 32-bit counters that many threads add to, and bits of a warp's lanes.
#pragma once

#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

// Bit l: `condition` of lane l. All lanes.
PO_FN uint32_t ballot([[maybe_unused]] const Warp& warp, bool condition) {
#if PO_ON_DEVICE
  return __ballot_sync(warp.mask(), condition);
#else
  return condition ? 1 : 0;
#endif
}

PO_FN void count_store_relaxed_gpu(uint32_t* word, uint32_t value) {
#if PO_ON_DEVICE
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

PO_FN void count_add_relaxed_gpu(uint32_t* word, uint32_t value) {
#if PO_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
#endif
}

// In shared memory, where several threads of the WG may store.
PO_FN void count_store_relaxed_wg(uint32_t* word, uint32_t value) {
#if PO_ON_DEVICE
  *static_cast<volatile uint32_t*>(word) = value;
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// In shared memory.
PO_FN void count_add_relaxed_wg(uint32_t* word, uint32_t value) {
#if PO_ON_DEVICE
  atomicAdd(word, value);
#else
  __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
#endif
}

}  // namespace po
