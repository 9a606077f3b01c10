// sched/slot_blocks.cuh for the tests.
#include <algorithm>

#include "sched/slot_blocks.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void blocks_of_worker(uint32_t worker, uint32_t num_workers, uint32_t num_slots, int64_t num_shares,
                             int64_t row_bytes, int64_t* found) {
  const auto blocks = po::SlotBlocks::of_worker(worker, num_workers, num_slots, num_shares, row_bytes);
  found[0] = blocks.first;
  found[1] = blocks.stride;
  found[2] = blocks.slots;
  found[3] = blocks.count;
}

// The contributors in `words`, 64 to a word, as a kernel with room for so many PEs has them.
template <int kPes>
int owner_among(const uint64_t* words, int64_t slot) {
  po::BitSet<kPes> contributors;
  std::copy_n(words, contributors.kWords, contributors.words);
  return po::owner_in_turn(contributors, slot);
}

EXPORT int owner(const uint64_t* words, int num_words, int64_t slot) {
  return num_words == 1 ? owner_among<64>(words, slot) : owner_among<192>(words, slot);
}
