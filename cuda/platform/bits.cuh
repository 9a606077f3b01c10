// Counting and finding bits of 64-bit words.
#pragma once

#include "platform/platform.cuh"

namespace po {

PO_FN int count_bits(uint64_t word) {
#if PO_ON_DEVICE
  return __popcll(static_cast<unsigned long long>(word));
#else
  return __builtin_popcountll(word);
#endif
}

// Number of the lowest bit that is set; `word` is not 0.
PO_FN int lowest_bit(uint64_t word) {
#if PO_ON_DEVICE
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// Number of the highest bit that is set; `word` is not 0.
PO_FN int highest_bit(uint32_t word) {
#if PO_ON_DEVICE
  return 31 - __clz(static_cast<int>(word));
#else
  return 31 - __builtin_clz(word);
#endif
}

PO_FN uint64_t bits_below(int bit) { return (1ull << bit) - 1; }

}  // namespace po
