// The credits of peers to which the same threads store in turn.
#pragma once

#include "comm/launch.cuh"

namespace po {

// Who has granted this epoch's credit to a group of threads that store in turn to one PE and another.
class Credits {
 public:
  // Returns true when `receiver` has; waits for it the first time. One thread decides for the group: after an abort they may
  // find different answers.
  template <class Group>
  PO_FN bool await(const Team& team, const Group& group, int receiver) {
    if (group.shuffle((granted_ >> receiver & 1) != 0, 0)) return true;
    const bool is_granted = group.rank() == 0 ? await_credit(team, receiver) : false;
    if (!group.shuffle(is_granted, 0)) return false;
    group.sync();  // the first thread's acquire is before what all of them store
    granted_ |= 1ull << receiver;
    return true;
  }

 private:
  uint64_t granted_ = 0;  // bit p: PE p has
};

}  // namespace po
