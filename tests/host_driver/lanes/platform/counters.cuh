// The ballot of 32 lanes (groups.cuh beside this).
#pragma once

#define ballot ballot_of_one_lane
#include_next "platform/counters.cuh"
#undef ballot

namespace po {

PO_FN uint32_t ballot(const Warp& warp, bool condition) { return warp.ballot(condition); }

}  // namespace po
