// Packets between PEs: data that is itself seen to be there, so that nobody waits for credit and nothing is ordered.
//
// A packet lies at a place that its receiver has for it in areas that take turns by the epoch's parity (cuda/DESIGN.md,
// "Packets": why none is overwritten unread). A `Packet` is there when its flag is that of the launch, a `BarePacket`, which has
// none, when its place is no longer empty. Puts may tear packets: what goes to a PE that is not reachable is read only behind a
// sliceRdy word.
#pragma once

#include "comm/launch.cuh"

namespace po {

// The flag of this launch's packets: that of another launch, or contract, is another one.
PO_FN uint64_t packet_flag(const Team& team) {
  return launch_flag(team);  // @packet-flag
}

// Puts packets of 16 bytes from `source` in this PE's heap to `offset` in another one's. The network may tear a packet, so a
// sliceRdy word says when all have come. One thread, behind its warp's stores. Out of line: within a node nobody calls it.
PO_NOINLINE inline void put_packets(const Team& team, int pe, uint64_t offset, const uint8_t* source, int count,
                                    int ready_index) {
  put_nbi(team, pe, offset, source, static_cast<uint64_t>(count) * sizeof(Packet));
  put_fence(team);  // @packets-fence
  signal(team, pe, ready_word_offset(team, team.rank, static_cast<uint64_t>(ready_index)), launch_flag(team));
}

}  // namespace po
