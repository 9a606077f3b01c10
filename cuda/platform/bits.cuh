// Counting and finding bits of 64-bit words, and sets of small numbers as such words.
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

// Number of the lowest set bit; `word` is not 0.
PO_FN int lowest_bit(uint64_t word) {
#if PO_ON_DEVICE
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// Number of the highest set bit; `word` is not 0.
PO_FN int highest_bit(uint32_t word) {
#if PO_ON_DEVICE
  return 31 - __clz(static_cast<int>(word));
#else
  return 31 - __builtin_clz(word);
#endif
}

PO_FN uint64_t bits_below(int bit) { return (1ull << bit) - 1; }

// A set of numbers from 0 to kCount - 1. With one word its operations are the word's operations.
template <int kCount>
struct BitSet {
  static constexpr int kWords = kCount / 64;
  static_assert(kCount % 64 == 0, "whole words");

  uint64_t words[kWords];

  static PO_FN BitSet below(int count) {
    BitSet set;
    for (int w = 0; w < kWords; ++w) {
      const int rest = count - 64 * w;
      set.words[w] = rest >= 64 ? ~0ull : rest <= 0 ? 0 : bits_below(rest);
    }
    return set;
  }

  // Adds a number if `bit` is 1; `bit` is 0 or 1.
  PO_FN void add(int number, uint64_t bit = 1) { words[word_of(number)] |= bit << bit_of(number); }
  PO_FN void add(const BitSet& other) {
    for (int w = 0; w < kWords; ++w) words[w] |= other.words[w];
  }

  PO_FN bool has(int number) const { return (words[word_of(number)] >> bit_of(number) & 1) != 0; }
  PO_FN bool is_empty() const {
    uint64_t all = 0;
    for (int w = 0; w < kWords; ++w) all |= words[w];
    return all == 0;
  }
  PO_FN bool has_several() const {
    uint64_t first = words[0];
    uint64_t others = first & (first - 1);
    for (int w = 1; w < kWords; ++w) {
      others |= words[w] & (words[w] - 1);
      if (first != 0) others |= words[w];
      first |= words[w];
    }
    return others != 0;
  }
  PO_FN int count() const {
    int count = 0;
    for (int w = 0; w < kWords; ++w) count += count_bits(words[w]);
    return count;
  }

  // The lowest number; the set is not empty.
  PO_FN int lowest() const {
    const int w = first_word();
    return 64 * w + lowest_bit(words[w]);
  }
  PO_FN void drop_lowest() {
    uint64_t& word = words[first_word()];
    word &= word - 1;
  }

 private:
  static PO_FN int word_of(int number) { return kWords == 1 ? 0 : number / 64; }
  static PO_FN int bit_of(int number) { return kWords == 1 ? number : number & 63; }

  // The first word that has a number; the last word if no other has one.
  PO_FN int first_word() const {
    int w = 0;
    while (w < kWords - 1 && words[w] == 0) ++w;
    return w;
  }
};

}  // namespace po
