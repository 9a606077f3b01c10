// The number of a call in a launch's contract: it tells launches of one plan apart, which is for backward passes, each of which
// belongs to a forward pass. A plan's contract has 0 in that word.
#pragma once

#include "comm/team.cuh"

namespace po {

inline constexpr int kCallWord = kContractWords - 1;
PO_CONSTANT(kCallWord)

// Puts the number into this WG's copy of the contract. By one thread, before the sync behind which the WG knows its epoch: all
// that carries or compares the contract comes behind that. 0 changes nothing. Numbers near each other never have one hash, since
// multiples of this factor lie as far apart as can be.
PO_FN void name_call(Team& team, uint64_t number) {
  team.contract[kCallWord] = static_cast<int64_t>(number);
  team.contract_hash ^= number * 0x9e3779b97f4a7c15ull >> (64 - kEpochShift);  // @call-hash
}

}  // namespace po
