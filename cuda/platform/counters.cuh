// 32-bit counters that many threads add to.
#pragma once

#include "platform/memory.cuh"

namespace po {

PO_FN uint32_t count_load_relaxed_gpu(const uint32_t* word) {
#if PO_ON_DEVICE
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
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

// Counts up to `last`, and then wraps to 0.
PO_FN void count_up_relaxed_gpu(uint32_t* word, uint32_t last) {
#if PO_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(word), "r"(last) : "memory");
#else
  uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(word, &old, old >= last ? 0 : old + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// In shared memory; several threads of the WG may store to the word.
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
