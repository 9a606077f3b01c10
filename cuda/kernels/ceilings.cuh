// The ceilings of the hardware: plain loops whose rates benchmarks measure beside an operator's.
//
// Read: every byte of a buffer once, by 16-byte loads. Update: rows of a buffer are read, changed and written in place,
// ascending and with gaps, like an optimizer's pass over the rows that a batch has touched. Store: each PE fills its
// segment of every peer's buffer, all peers in turn, by 16-byte stores. There are no flags. The end of the stream means
// that a PE's own stores are done; a reader of the peers' stores calls a barrier first.
#pragma once

#include "comm/team.cuh"
#include "platform/entry.cuh"
#include "platform/memory.cuh"

namespace po::ceilings {

enum class Ceiling { kRead, kUpdate, kStore };

struct Config {
  Ceiling ceiling = Ceiling::kRead;
  int threads = 512;
};

struct Plan {
  Team team;
};
PO_DESCRIBE(Plan, team)

struct Call {
  uint64_t place;     // kStore: the buffer's offset in the symmetric heap; else its address
  int64_t bytes;      // of the buffer
  uint32_t* sink;     // kRead: never written, which the compiler cannot know
  int64_t row_shift;  // kUpdate: a row has 16 bytes << row_shift, so that no thread has to divide
  int64_t gap;        // kUpdate: one row of every `gap` rows is updated, at a hashed place; at most 2^16
};
PO_DESCRIBE(Call, place, bytes, sink, row_shift, gap)

inline constexpr int64_t kTileBytes = 4096;  // of a segment, stored by one WG to one peer at a time
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

// The row that is updated among the `gap` rows of group i.
PO_FN int64_t updated_row(int64_t i, int64_t gap) {
  const uint32_t mixed = static_cast<uint32_t>(i) * 0x9e3779b9u;
  return i * gap + ((mixed >> 16) * gap >> 16);
}

// Adds 1 to every word of the updated rows.
PO_FN void update_rows(const WorkGroup& wg, const Call& call) {
  constexpr int kVectors = 4;  // in flight per thread
  auto* target = reinterpret_cast<uint8_t*>(call.place);
  const int64_t row_vectors = int64_t{1} << call.row_shift;
  const int64_t num_vectors = call.bytes / (row_vectors * 16 * call.gap) * row_vectors;
  const int64_t stride = wg.size();
  for (int64_t first = wg.index() * stride * kVectors; first < num_vectors; first += wg.count() * stride * kVectors) {
    Vector<16> vectors[kVectors];
    uint8_t* places[kVectors];
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t vector = first + v * stride + wg.rank();
      const int64_t row = updated_row(vector >> call.row_shift, call.gap);
      places[v] = target + (row * row_vectors + (vector & (row_vectors - 1))) * 16;
      if (vector >= num_vectors) places[v] = nullptr;
      if (places[v] != nullptr) vectors[v] = load_shared_vector<16>(places[v]);
    }
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (places[v] == nullptr) continue;
      PO_UNROLL
      for (uint32_t& word : vectors[v].words) ++word;
      store_vector<16>(places[v], vectors[v]);
    }
  }
}

// Tile i in this PE's order: neighboring tiles go to different peers, and each PE begins with a different peer.
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
    } else if constexpr (kConfig.ceiling == Ceiling::kUpdate) {
      update_rows(wg, call);
    } else {
      store_all(wg, shared.plan.team, call);
    }
  }
};

}  // namespace po::ceilings
