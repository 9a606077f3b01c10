// When the next launch may begin if it begins before this one has ended (a programmatic dependent launch).
//
// The successor's WGs first load as much data as their shared memory holds. This helps most while this launch ends: its
// last WGs compute, send and wait, and global memory would be idle. So a WG lets the successor in shortly before it
// loads its own last data, by about the time that a launch takes. If it did so earlier, the successor's requests would
// only compete.
//
// The successor's WGs come when all WGs have let it in, and must find one place on each multiprocessor. If a WG has
// left, its multiprocessor has two places and another one has none, in this launch and all later ones. So a finished WG
// stays until all have loaded everything. Correctness does not depend on this: the wait is about speed alone, and has a
// bound.
#pragma once

#include "platform/counters.cuh"
#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

enum class LetsIn {
  kAtOnce,  // if it has room beside this launch; or if this one prefetches, and has little to do or leaves no room
  kLate,    // if it has room, and makes use of it: see Succession
  kAtEnd    // if it has none: WGs of a smaller one would take in twos the first multiprocessors to be left
};

class Succession {
 public:
  // The first warp of each WG counts `num_steps` steps, and has asked for everything when `steps_ahead` of them are left.
  // Other warps have no steps. `asked` is 0 before the first launch. Only launches with the same number of WGs share it:
  // those that overlap count together and still come out at 0.
  PO_FN Succession(uint32_t* asked, const WorkGroup& wg, int num_steps, int steps_ahead)
      : asked_(asked),
        last_(static_cast<uint32_t>(wg.count()) - 1),
        steps_left_(wg.warp_index() == 0 ? num_steps : 0),  // @one-warp-counts
        has_asked_at_(min_of(steps_ahead, max_of(num_steps - 1, 0))),
        lets_in_at_(min_of(steps_ahead + kStepsOfLaunch, max_of(num_steps - 1, 0))) {}

  // All warps, before their steps.
  PO_FN void begin(const WorkGroup& wg) {
    if (wg.warp_index() != 0 || steps_left_ != 0) return;  // @wg-without-steps
    release_successor();
    count();
  }

  // Called in each step, after its request.
  PO_FN void step() {
    --steps_left_;
    if (steps_left_ == lets_in_at_) release_successor();
    if (steps_left_ == has_asked_at_) count();
  }

  // Called by one thread, when the WG is done.
  PO_FN void await_others() const {
    constexpr int kLooks = 4096;
    for (int i = 0; i < kLooks && count_load_relaxed_gpu(asked_) != 0; ++i) {
    }
  }

 private:
  PO_FN void count() {
    if (Warp().rank() == 0) count_up_relaxed_gpu(asked_, last_);
  }

  static constexpr int kStepsOfLaunch = 6;  // during which a launch begins: 1.5 us on H200, 8 KB per step and SM
  uint32_t* const asked_;
  const uint32_t last_;  // count of a launch's last WG
  int steps_left_;
  const int has_asked_at_;
  const int lets_in_at_;
};

}  // namespace po
