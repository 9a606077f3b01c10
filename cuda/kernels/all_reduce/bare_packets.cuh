// Packets without flags: they carry twice the data. A place is empty until this launch's packet comes; the thread that
// reads the packet empties the place (cuda/DESIGN.md, "Packets").
#pragma once

#include "comm/packets.cuh"

namespace po::all_reduce {

// The packet for 16 bytes of elements. Half a chunk of ones would look like an empty place. Such a half is NaNs, of
// every type, so other NaNs travel in its place.
PO_FN BarePacket bare_packet_of(const Vector<16>& chunk) {
  BarePacket packet;
  __builtin_memcpy(&packet, &chunk, sizeof(packet));
  PO_UNROLL
  for (uint64_t& half : packet.halves) {
    if (half == BarePacket::kEmpty) half = 0x7fff7fff7fff7fffull;  // @empty-travels
  }
  return packet;
}

PO_FN Vector<16> chunk_of(const BarePacket& packet) {
  Vector<16> chunk;
  __builtin_memcpy(&chunk, &packet, sizeof(chunk));
  return chunk;
}

// Places of packets at equal distances.
template <int kCount>
struct BarePlaces {
  uint8_t* place;   // the first one
  uint64_t stride;  // bytes to the next one
  // Identifies the launch of the packets: packets of a launch with another contract are not taken. Null: no other
  // launch's packets can come.
  const uint8_t* flag;
  uint64_t flag_stride;
  int senders[kCount];  // -1: no packet is awaited
  uint64_t index;       // of the first packet, for the report
  uint64_t index_stride;
};

// Waits until a packet of this launch lies in each place where one is awaited, and reads the packets.
template <int kCount>
PO_FN bool await_bare_packets(const Team& team, Phase phase, const BarePlaces<kCount>& at, bool has_given_up,
                              BarePacket (&packets)[kCount]) {
  int missing = team.rank;
  uint64_t index = at.index;
  const auto is_awaited = [&](int i) { return at.senders[i] >= 0; };
  const uint64_t expected = packet_flag(team);
  const auto look = [&](uint64_t* seen) {
    const uint8_t* base = derived_anew(at.place);
    const uint8_t* flag = derived_anew(at.flag);
    uint64_t flags[kCount];
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) {
      flags[i] = expected;
      if (!is_awaited(i)) continue;
      packets[i] =
          bare_packet_load_sys(reinterpret_cast<const BarePacket*>(base + static_cast<uint64_t>(i) * at.stride));
      if (flag == nullptr) continue;
      flags[i] =
          flag_load_relaxed_sys(reinterpret_cast<const uint64_t*>(flag + static_cast<uint64_t>(i) * at.flag_stride));
    }
    missing = team.rank;
    *seen = expected;
    bool all = true;
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (!is_awaited(i) || (packets[i].is_there() && flags[i] == expected)) continue;  // @bare-packet-is-there
      all = false;
      missing = at.senders[i];
      index = at.index + static_cast<uint64_t>(i) * at.index_stride;
      *seen = flags[i] == expected ? flag_value(team.epoch - 1, 0) : flags[i];
    }
    return all;
  };
  return await(team, phase, missing, index, look, has_given_up);
}

// The same, and empties the places.
template <int kCount>
PO_FN bool take_bare_packets(const Team& team, Phase phase, const BarePlaces<kCount>& at, bool has_given_up,
                             BarePacket (&packets)[kCount]) {
  if (!await_bare_packets(team, phase, at, has_given_up, packets)) return false;
  PO_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (at.senders[i] < 0) continue;
    bare_packet_empty_sys(reinterpret_cast<BarePacket*>(at.place + static_cast<uint64_t>(i) * at.stride));  // @emptied
  }
  return true;
}

}  // namespace po::all_reduce
