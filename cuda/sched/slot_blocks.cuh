// The slots of a result that belong to a worker, and the PE that adds up a row of several PEs: pure functions of
// numbers that every PE knows.
//
// Blocks of slots belong to the workers in turn, so rows that lie close together, or belong to one PE, spread over all
// workers. Contributors own the rows that they share in turn, too.
#pragma once

#include "platform/bits.cuh"

namespace po {

struct SlotBlocks {
  // @slot-window
  static constexpr int kWindow = 32;       // slots that a warp looks up at once
  static constexpr int64_t kBytes = 8192;  // of a block's rows, if most rows have several contributors
  // @most-blocks
  static constexpr uint32_t kMost = 65000;  // of a worker; its progress has 16 bits beside the epoch

  int64_t first;   // slot of the worker's first block
  int64_t stride;  // from one of its blocks to the next
  int64_t slots;   // of a block
  int64_t count;   // blocks of the worker

  // `num_slots`: 2^31 at most, so that a GPU need not divide numbers of 64 bits. `num_shares`: rows of all PEs
  // together.
  static PO_FN SlotBlocks of_worker(uint32_t worker, uint32_t num_workers, uint32_t num_slots, int64_t num_shares,
                                    int64_t row_bytes) {
    // If many rows are left for others to fetch, blocks are small, so that the links do not idle meanwhile. If few are,
    // large blocks let counterparts wait for each other less often. Each worker has equally many blocks.
    const auto known_bytes = static_cast<uint32_t>(min_of(max_of<int64_t>(row_bytes, 1), kBytes));
    const uint32_t few = static_cast<uint32_t>(kBytes) / known_bytes;
    const uint32_t fitting = num_shares >= 2 * int64_t{num_slots} ? min_of<uint32_t>(kWindow, few) : kWindow;
    const uint32_t own = ceil_div(num_slots, num_workers);
    const uint32_t most = max_of(fitting, ceil_div(own, kMost));
    const uint32_t rounds = max_of(ceil_div(own, most), 1u);
    const uint32_t slots = max_of(ceil_div(own, rounds), 1u);
    const uint32_t first = worker * slots;
    const uint32_t stride = num_workers * slots;
    return {first, stride, slots, first < num_slots ? (num_slots - 1 - first) / stride + 1 : 0};
  }

  PO_FN int64_t begin(int64_t block) const { return first + block * stride; }
};

template <int kPes>
PO_FN int owner_in_turn(const BitSet<kPes>& contributors, int64_t slot) {
  BitSet<kPes> rest = contributors;
  auto skipped = static_cast<uint32_t>(slot) % static_cast<uint32_t>(contributors.count());
  PO_NO_UNROLL
  for (; skipped > 0; --skipped) rest.drop_lowest();
  return rest.lowest();
}

}  // namespace po
