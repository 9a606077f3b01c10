// The credits of peers to which the same threads store in turn.
#pragma once

#include "comm/launch.cuh"

namespace po {

// Remembers which peers have granted this epoch's credit to a group of threads that store to several PEs in turn. Each
// thread remembers kPesOfThread of them. For the PEs beyond, credit is read each time.
class Credits {
 public:
  // Returns true if `receiver` has granted credit; waits for it the first time. One thread decides for the group, since
  // after an abort threads may find different answers.
  template <class Group>
  PO_FN bool await(const Team& team, const Group& group, int receiver) {
    const auto number = static_cast<uint32_t>(receiver);
    const auto keeper = static_cast<int>(number / kPesOfThread);
    const uint32_t bit = 1u << number % kPesOfThread;
    const bool is_kept = keeper < group.size();  // @credit-kept
    if (is_kept && group.shuffle((granted_ & bit) != 0, keeper)) return true;
    const bool is_granted = group.rank() == 0 ? await_credit(team, receiver) : false;
    if (!group.shuffle(is_granted, 0)) return false;
    group.sync();  // orders the first thread's acquire before the stores of all
    if (group.rank() == keeper) granted_ |= bit;
    return true;
  }

 private:
  static constexpr uint32_t kPesOfThread = 32;

  uint32_t granted_ = 0;  // bit p: this thread's PE number p has granted credit
};

}  // namespace po
