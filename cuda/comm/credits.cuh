// The credits of peers to which the same threads store in turn.
#pragma once

#include "comm/launch.cuh"

namespace po {

// Who has granted this epoch's credit to a group of threads that store in turn to one PE and another. Each thread remembers
// kPesOfThread of them; the credit of PEs beyond those of all threads is looked at each time.
class Credits {
 public:
  // Returns true when `receiver` has; waits for it the first time. One thread decides for the group: after an abort they may
  // find different answers.
  template <class Group>
  PO_FN bool await(const Team& team, const Group& group, int receiver) {
    const auto number = static_cast<uint32_t>(receiver);
    const auto keeper = static_cast<int>(number / kPesOfThread);
    const uint32_t bit = 1u << number % kPesOfThread;
    const bool is_kept = keeper < group.size();  // @credit-kept
    if (is_kept && group.shuffle((granted_ & bit) != 0, keeper)) return true;
    const bool is_granted = group.rank() == 0 ? await_credit(team, receiver) : false;
    if (!group.shuffle(is_granted, 0)) return false;
    group.sync();  // the first thread's acquire is before what all of them store
    if (group.rank() == keeper) granted_ |= bit;
    return true;
  }

 private:
  static constexpr uint32_t kPesOfThread = 32;

  uint32_t granted_ = 0;  // bit p: PE p of this thread's has
};

}  // namespace po
