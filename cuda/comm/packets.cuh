// Packets between PEs. A packet is data whose arrival the receiver detects without a separate flag (as in NCCL's LL and
// TensorRT-LLM's Lamport protocols), so it needs neither credit nor an order.
//
// A packet lies at a place that its receiver has for it, in areas that alternate with the epoch's parity
// (cuda/DESIGN.md, "Packets": why none is overwritten unread). A `Packet` is there when its flag is the launch's. A
// `BarePacket` has no flag; it is there when its place is no longer empty. Puts may tear packets, so packets from a PE
// that is not reachable are read only after a sliceRdy word.
#pragma once

#include "comm/launch.cuh"

namespace po {

// The flag of this launch's packets. Packets of another launch or contract have a different flag.
PO_FN uint64_t packet_flag(const Team& team) {
  return launch_flag(team);  // @packet-flag
}

// Offset of the sliceRdy word that announces packets. Puts of two launches have no order, and packets need no credit,
// so words alternate as packets do.
PO_FN uint64_t packets_word_offset(const Team& team, int sender, int index) {
  if (has_far_peers(team)) index = 2 * index + static_cast<int>(team.epoch % 2);  // @packets-words
  return ready_word_offset(team, sender, static_cast<uint64_t>(index));
}

// Puts packets of 16 bytes from `source` in this PE's heap to `offset` in a peer's heap. The network may tear a packet,
// so a sliceRdy word announces all of them. One thread, after its warp's stores. Out of line, since it is not called
// within a node.
PO_NOINLINE inline void put_packets(const Team& team, int pe, uint64_t offset, const uint8_t* source, int count,
                                    int index) {
  put_signal(team, pe, offset, source, static_cast<uint64_t>(count) * sizeof(Packet),
             packets_word_offset(team, team.rank, index), launch_flag(team));
}

}  // namespace po
