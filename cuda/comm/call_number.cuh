// The number of a call in a launch's contract. It distinguishes launches of one plan, as backward passes need: each
// belongs to a forward pass. A plan's contract has 0 in that word.
#pragma once

#include "comm/team.cuh"

namespace po {

inline constexpr int kCallWord = kContractWords - 1;
PO_CONSTANT(kCallWord)

// Puts the number into this WG's copy of the contract. Called by one thread before the sync after which the WG knows
// its epoch; everything that carries or compares the contract follows that sync. 0 changes nothing. Numbers near each
// other never have the same hash, since multiples of this factor lie as far apart as possible.
PO_FN void name_call(Team& team, uint64_t number) {
  team.contract[kCallWord] = static_cast<int64_t>(number);
  team.contract_hash ^= number * 0x9e3779b97f4a7c15ull >> (64 - kEpochShift);  // @call-hash
}

}  // namespace po
