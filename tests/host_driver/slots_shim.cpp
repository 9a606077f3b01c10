// sched/slot_blocks.cuh for the tests.
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

EXPORT int owner(uint64_t contributors, int64_t slot) { return po::owner_in_turn(contributors, slot); }
