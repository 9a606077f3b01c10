// Which slots of a result belong to a worker, and who adds up a row that several PEs have: pure functions of numbers that
// every PE knows.
//
// Blocks of slots belong to the workers in turn, so that rows which lie close together, or belong to one PE, spread over
// all of them. Contributors own the rows that they share in turn, too.
#pragma once

#include "platform/bits.cuh"

namespace po {

struct SlotBlocks {
  // @slot-window
  static constexpr int kWindow = 32;       // slots that a warp looks up at once
  static constexpr int64_t kBytes = 8192;  // of a block's rows, where most rows have several contributors
  // @most-blocks
  static constexpr int64_t kMost = 65000;  // of a worker; its progress has 16 bits beside the epoch

  int64_t first;   // slot of the worker's first block
  int64_t stride;  // from one of its blocks to the next
  int64_t slots;   // of a block
  int64_t count;   // blocks of the worker

  // `num_shares`: rows of all PEs together.
  static PO_FN SlotBlocks of_worker(int64_t worker, int64_t num_workers, int64_t num_slots, int64_t num_shares,
                                    int64_t row_bytes) {
    // Where rows are left for others to fetch, blocks are small, so that the links do not idle meanwhile; where few are,
    // counterparts had better not wait for each other often. Equally many blocks for each worker.
    const int64_t few = max_of<int64_t>(kBytes / max_of<int64_t>(row_bytes, 1), 1);
    const int64_t fitting = num_shares >= 2 * num_slots ? min_of<int64_t>(kWindow, few) : kWindow;
    const int64_t most = max_of<int64_t>(fitting, ceil_div(num_slots, num_workers * kMost));
    const int64_t rounds = max_of<int64_t>(ceil_div(num_slots, num_workers * most), 1);
    const int64_t slots = max_of<int64_t>(ceil_div(num_slots, num_workers * rounds), 1);
    const int64_t first = worker * slots;
    const int64_t stride = num_workers * slots;
    return {first, stride, slots, first < num_slots ? (num_slots - 1 - first) / stride + 1 : 0};
  }

  PO_FN int64_t begin(int64_t block) const { return first + block * stride; }
};

// `contributors`: a bit per PE.
PO_FN int owner_in_turn(uint64_t contributors, int64_t slot) {
  uint64_t rest = contributors;
  auto skipped = static_cast<uint32_t>(slot) % static_cast<uint32_t>(count_bits(contributors));
  for (; skipped > 0; --skipped) rest &= rest - 1;
  return lowest_bit(rest);
}

}  // namespace po
