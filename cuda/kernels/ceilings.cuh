// What the hardware gives at best, as plain loops: the two ceilings that benchmarks measure beside an operator.
//
// Read: every byte of a buffer once, by 16-byte loads. Store: each PE fills its segment of every peer's buffer, all
// peers in turn, by 16-byte stores. No flags: the stream's end means that a PE's
// own stores are done, and who looks at what peers stored calls a barrier first.
#pragma once

#include "comm/team.cuh"
#include "platform/entry.cuh"
#include "platform/memory.cuh"

namespace po::ceilings {

enum class Ceiling { kRead, kStore };

struct Config {
  Ceiling ceiling = Ceiling::kRead;
  int threads = 512;
};

struct Plan {
  Team team;
};
PO_DESCRIBE(Plan, team)

struct Call {
  uint64_t place;  // kRead: address of the buffer; else its offset in the symmetric heap
  int64_t bytes;   // of the buffer
  uint32_t* sink;  // kRead: never written, but the compiler cannot know
};
PO_DESCRIBE(Call, place, bytes, sink)

inline constexpr int64_t kTileBytes = 4096;  // of a segment, from one WG to one peer at a time
PO_CONSTANT(kTileBytes)

struct Shared {
  Plan plan;
};

PO_FN void read_all(const WorkGroup& wg, const Call& call) {
  constexpr int kVectors = 8;  // loads in flight per thread
  const auto* source = reinterpret_cast<const uint8_t*>(call.place);
  const int64_t stride = wg.size() * int64_t{16};
  const int64_t num_tiles = call.bytes / (stride * kVectors);
  uint32_t mixed = 0;
  for (int64_t tile = wg.index(); tile < num_tiles; tile += wg.count()) {
    const uint8_t* first = source + tile * stride * kVectors + wg.rank() * 16;
    Vector<16> vectors[kVectors];
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) vectors[v] = load_vector<16>(first + v * stride);
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      mixed ^= vectors[v].words[0] ^ vectors[v].words[1] ^ vectors[v].words[2] ^ vectors[v].words[3];
    }
  }
  if (call.sink != nullptr) *call.sink = mixed;
}

// Tile i of this PE's order: neighbouring tiles go to different peers, and each PE begins with another one.
PO_FN uint8_t* tile_target(const Team& team, const Call& call, int64_t i) {
  const int num_peers = team.size - 1;
  const int hop = team.rank + 1 + static_cast<int>(i % num_peers);
  const int64_t segment = call.bytes / team.size / kTileBytes * kTileBytes;
  return peer_address(team, hop < team.size ? hop : hop - team.size, call.place) + team.rank * segment +
         i / num_peers * kTileBytes;
}

PO_FN int64_t num_tiles(const Team& team, const Call& call) {
  return call.bytes / team.size / kTileBytes * (team.size - 1);
}

PO_FN Vector<16> stamp(const Team& team) {
  const auto mark = static_cast<uint32_t>(team.rank) + 1;
  return Vector<16>{{mark, ~mark, mark * 0x9e3779b9u, mark << 16}};
}

PO_FN void store_all(const WorkGroup& wg, const Team& team, const Call& call) {
  const Vector<16> value = stamp(team);
  for (int64_t i = wg.index(); i < num_tiles(team, call); i += wg.count()) {
    uint8_t* target = tile_target(team, call, i);
    for (int64_t byte = wg.rank() * 16; byte < kTileBytes; byte += wg.size() * 16) {
      store_vector<16>(target + byte, value);
    }
  }
}

template <Config kConfig>
struct Kernel {
  using Plan = ceilings::Plan;
  using Call = ceilings::Call;
  using Shared = ceilings::Shared;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = 2;

  static PO_FN void run(const WorkGroup& wg, [[maybe_unused]] Shared& shared, const Call& call) {
    if constexpr (kConfig.ceiling == Ceiling::kRead) {
      read_all(wg, call);
    } else {
      store_all(wg, shared.plan.team, call);
    }
  }
};

}  // namespace po::ceilings
