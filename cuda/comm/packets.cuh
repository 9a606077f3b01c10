// Packets between PEs: data that brings its own flag, so that nobody waits for credit and nothing is ordered.
//
// A packet lies at a place that its receiver has for it in areas that take turns by the epoch's parity, and is there when
// its flag is that of the launch (cuda/DESIGN.md, "Packets": why no packet is overwritten unread). Puts may tear packets: what
// goes to a PE that is not reachable is read only behind a sliceRdy word.
#pragma once

#include "comm/launch.cuh"

namespace po {

// What a packet of this launch has: one of another launch, or contract, has another flag.
PO_FN uint64_t packet_flag(const Team& team) {
  return launch_flag(team);  // @packet-flag
}

// The network may tear a packet, so a sliceRdy word says when all have come. One thread, behind its warp's stores. Out of
// line: within a node nobody calls it.
PO_NOINLINE inline void put_packets(const Team& team, int pe, uint64_t offset, int count, int ready_index) {
  put_nbi(team, pe, offset, team.heap + offset, static_cast<uint64_t>(count) * sizeof(Packet));
  put_fence(team);  // @packets-fence
  signal(team, pe, ready_word_offset(team, team.rank, static_cast<uint64_t>(ready_index)), launch_flag(team));
}

// Waits until packets of this launch lie at `place` and every `stride` bytes behind it, one row of each of `count` senders,
// and reads them; the packets of a row lie `kStep` apart. With `kLeavesOneOut` those of the sender `left_out` are neither
// read nor awaited. `index`: for the report. What this PE sent to itself comes without a bound (`await`).
template <bool kLeavesOneOut = false, int kStep = 1, int kRow, int kSenders>
PO_FN bool await_packets(const Team& team, const uint8_t* place, uint64_t stride, Phase phase, int first_sender,
                         int count, uint64_t index, bool has_given_up, Packet (&packets)[kSenders][kRow],
                         int left_out = -1) {
  int missing = team.rank;
  const auto is_awaited = [&](int i) { return i < count && !(kLeavesOneOut && first_sender + i == left_out); };
  const auto look = [&](uint64_t* seen) {
    const uint8_t* base = derived_anew(place);
    PO_UNROLL
    for (int i = 0; i < kSenders; ++i) {
      const auto* row = reinterpret_cast<const Packet*>(base + static_cast<uint64_t>(i) * stride);
      PO_UNROLL
      for (int j = 0; j < kRow; ++j) {
        if (is_awaited(i)) packets[i][j] = packet_load_sys(row + j * kStep, packet_flag(team));
      }
    }
    const uint64_t expected = packet_flag(team);
    missing = team.rank;
    *seen = expected;
    PO_UNROLL
    for (int i = 0; i < kSenders; ++i) {
      PO_UNROLL
      for (int j = 0; j < kRow; ++j) {
        if (!is_awaited(i) || packets[i][j].flag == expected) continue;  // @packet-is-there
        if (first_sender + i != team.rank) missing = first_sender + i;
        *seen = packets[i][j].flag;
      }
    }
    return *seen == expected;
  };
  return await(team, phase, missing, index, look, has_given_up);
}

}  // namespace po
