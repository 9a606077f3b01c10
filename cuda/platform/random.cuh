// Random numbers by counter: a draw depends only on the counter and the key, not on the thread, the time or the order
// of draws.
#pragma once

#include "platform/platform.cuh"

namespace po {

struct RandomWords {
  uint32_t words[4];

  // Part i of eight, of 16 bits each.
  PO_FN uint32_t half(int i) const { return words[i / 2] >> (i % 2 * 16) & 0xffffu; }
};

// Philox4x32-10: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
PO_FN RandomWords philox(const RandomWords& counter, uint64_t key) {
  constexpr uint64_t kMultipliers[] = {0xd2511f53u, 0xcd9e8d57u};
  RandomWords x = counter;
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
  PO_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultipliers[0] * x.words[0];
    const uint64_t product1 = kMultipliers[1] * x.words[2];
    x = {{static_cast<uint32_t>(product1 >> 32) ^ x.words[1] ^ key0, static_cast<uint32_t>(product1),
          static_cast<uint32_t>(product0 >> 32) ^ x.words[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return x;
}

}  // namespace po
