// The sums of the PEs' tiles meet: packets that carry data and flag together, from every PE to those that want a tile.
//
// One shot: a tile's sums go to every PE, and each adds them up. Two phases: they go to the tile's owner, which adds them
// up and sends every PE the rounded results. Sums are added in rank order. Packets lie at (parity of the epoch, sender,
// tile), so a packet is there when its flag is, and nobody waits for credit (cuda/DESIGN.md, rows 17 and 19, which also
// says why no packet is overwritten unread). What goes to a PE that is not reachable is put from this PE's own copy, and
// a sliceRdy word says that it has come.
#pragma once

#include "comm/launch.cuh"
#include "kernels/gemv/tile_output.cuh"
#include "sched/row_tiles.cuh"

namespace po::gemv_all_reduce {

// A part of the plan. Offsets are in every PE's heap.
struct PacketPlan {
  uint64_t partials_offset;  // Packet[2 parities][size senders][num_tiles][...]
  uint64_t partials_bytes;   // of one parity
  uint64_t results_offset;   // Packet[2][num_tiles][...]; two phases only
  uint64_t results_bytes;
  int64_t all_reachable;
  uint64_t heaps[kMaxPes];  // Team.peer_heaps, within reach
};

// Waits for the packet of this launch and returns it, or one with another flag where the launch was given up. Out of line:
// the first look often finds it.
PO_NOINLINE inline Packet packet_when_there(const Team& team, const Packet* place, Phase phase, int sender,
                                            uint64_t tile) {
  Packet packet{};
  await(team, phase, sender, tile, [&](uint64_t* seen) {
    packet = packet_load_sys(place, launch_flag(team));
    *seen = packet.flag;
    return packet.flag == launch_flag(team);
  });
  return packet;
}

template <class Config, class Call>
class PacketExchange {
 public:
  using SumScalar = typename Config::SumScalar;
  using Output = TileOutput<Config, Call>;
  using Results = typename Output::Results;

  struct Shared {
    uint64_t takes_part;  // 0: this launch is behind an aborted one
    uint64_t is_missing;  // a packet did not come
  };

  // `room_bytes`: at the beginning of the arena, for the data of incoming packets; a tile's from all PEs must fit.
  PO_FN PacketExchange(const WorkGroup& wg, Shared& shared, const Team& team, const PacketPlan& plan,
                       const RowTiles& tiles, const Output& output, const Call& call, int room_bytes)
      : wg_(wg),
        shared_(shared),
        team_(team),
        plan_(plan),
        tiles_(tiles),
        output_(output),
        call_(call),
        room_bytes_(room_bytes) {}

  // Adds the parts of a tile up and sends the sums. One warp.
  template <class Parts>
  PO_FN void send(int tile, const Parts& parts, const Warp& warp) {
    if (team_.size == 1) return finish_alone(tile, parts, warp);
    if (shared_.takes_part == 0) return;
    const uint64_t offset = partial_offset(team_.rank, tile);
    const int num_receivers = Config::kTwoPhase ? 1 : team_.size;
    const int num_packets = packets_per_tile();
    if (num_packets * num_receivers <= warp.size()) {
      // Each lane has a packet for one receiver.
      const int hop = warp.rank() / num_packets;
      const int q = warp.rank() % num_packets;
      if (hop < num_receivers) send_packet(receiver(tile, hop), offset, q, sums_of(parts, q));
    } else {
      for (int q = warp.rank(); q < num_packets; q += warp.size()) {
        const Packet packet = sums_of(parts, q);
        for (int hop = 0; hop < num_receivers; ++hop) send_packet(receiver(tile, hop), offset, q, packet);
      }
    }
    if (plan_.all_reachable != 0) return;
    warp.sync();
    if (warp.rank() == 0) {
      for (int hop = 0; hop < num_receivers; ++hop) {
        const int pe = receiver(tile, hop);
        if (!is_near(pe)) put_packets(pe, offset, num_packets, tile);
      }
    }
  }

  // Waits for what peers send of this WG's tiles, and finishes them. All threads, behind a sync that follows the last
  // `send`.
  PO_FN void receive() {
    if (team_.size == 1) return;
    const int num_own = Config::kTwoPhase ? tiles_.num_own() : tiles_.count;
    const int num_others = tiles_.count - num_own;
    const int tiles_per_pass = room_bytes_ / (team_.size * packets_per_tile() * kDataBytes);
    for (int first = 0; first < num_own; first += tiles_per_pass) {
      const int num_tiles = min_of(tiles_per_pass, num_own - first);
      if (first != 0) wg_.sync();
      take_partials(num_others + first, num_tiles);
      wg_.sync();
      for (int i = wg_.rank(); i < num_tiles * items_per_tile(); i += wg_.size()) {
        reduce_item(num_others + first, i / items_per_tile(), i % items_per_tile());
      }
    }
    if constexpr (Config::kTwoPhase) {
      if (plan_.all_reachable == 0) put_results(num_others);
      // From the other end of the WG: its first threads may still be at the items above.
      for (int i = wg_.size() - 1 - wg_.rank(); i < num_others * items_per_tile(); i += wg_.size()) {
        take_result(tiles_.tile_at(i / items_per_tile()), i % items_per_tile());
      }
    }
  }

 private:
  static constexpr int kDataBytes = sizeof(Packet::data);

  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int num_vectors() const { return Config::kVectors == 1 ? 1 : call_.num_vectors(); }
  PO_FN int items_per_tile() const { return num_vectors() * Config::kItemsPerVector; }
  PO_FN int packets_per_tile() const { return items_per_tile() * Config::kPacketsPerItem; }
  PO_FN uint64_t parity() const { return team_.epoch % 2; }
  PO_FN uint64_t flag() const { return launch_flag(team_); }
  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }

  // Places of a tile's packets, as offsets in every heap.
  PO_FN uint64_t partial_offset(int sender, int tile) const {
    const int64_t first = (sender * output_.num_tiles() + tile) * packets_per_tile();
    return plan_.partials_offset + parity() * plan_.partials_bytes + static_cast<uint64_t>(first) * sizeof(Packet);
  }
  PO_FN uint64_t result_offset(int tile, int item) const {
    const int64_t place = static_cast<int64_t>(tile) * items_per_tile() + item;
    return plan_.results_offset + parity() * plan_.results_bytes + static_cast<uint64_t>(place) * sizeof(Packet);
  }
  PO_FN Packet* packet_at(int pe, uint64_t offset) const { return reinterpret_cast<Packet*>(plan_.heaps[pe] + offset); }

  PO_FN int ready_index_of_result(int tile) const { return static_cast<int>(output_.num_tiles()) + tile; }

  // ---- sums: from this PE to who adds them up ------------------------------------------------------------------------

  // Who gets this PE's sums of a tile: its owner, or all PEs, the next one first and this one last.
  PO_FN int receiver(int tile, int hop) const {
    if constexpr (Config::kTwoPhase) return RowTiles::owner_of(tile, team_.size);
    const int pe = team_.rank + 1 + hop;
    return pe < team_.size ? pe : pe - team_.size;
  }

  template <class Parts>
  PO_FN Packet sums_of(const Parts& parts, int q) const {
    float exact[Config::kSumsPerPacket];
    typename SumScalar::Storage sums[Config::kSumsPerPacket];
    parts.add_up(q * Config::kSumsPerPacket, exact);
    PO_UNROLL
    for (int i = 0; i < Config::kSumsPerPacket; ++i) sums[i] = SumScalar::from_float(exact[i]);
    return packet_of(sums);
  }

  template <class Values>
  PO_FN Packet packet_of(const Values& values) const {
    Packet packet;
    static_assert(sizeof(values) == sizeof(packet.data), "a packet is full");
    __builtin_memcpy(packet.data, values, sizeof(packet.data));
    packet.flag = flag();
    return packet;
  }

  // What goes to a PE that is not reachable is put from this PE's own copy.
  PO_FN void send_packet(int pe, uint64_t offset, int q, const Packet& packet) const {
    packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, offset) + q, packet);
  }

  // The network may tear a packet, so a sliceRdy word says when all have come. One thread, behind its warp's stores.
  PO_FN void put_packets(int pe, uint64_t offset, int count, int ready_index) const {
    put_nbi(team_, pe, offset, team_.heap + offset, static_cast<uint64_t>(count) * sizeof(Packet));
    put_fence(team_);
    signal(team_, pe, ready_word_offset(team_, team_.rank, static_cast<uint64_t>(ready_index)), flag());
  }

  template <class Parts>
  PO_FN void finish_alone(int tile, const Parts& parts, const Warp& warp) {
    for (int item = warp.rank(); item < items_per_tile(); item += warp.size()) {
      float sums[Config::kItem];
      Results results = {};
      parts.add_up(item * Config::kItem, sums);
      PO_UNROLL
      for (int i = 0; i < Config::kItem; ++i) sums[i] = SumScalar::to_float(SumScalar::from_float(sums[i]));
      output_.finish(tile, item, sums, results);
    }
  }

  // ---- waiting -------------------------------------------------------------------------------------------------------

  PO_FN bool is_announced(int sender, Phase phase, int tile, int ready_index) const {
    if (is_near(sender)) return true;
    const uint64_t* word = local_word(team_, ready_word_offset(team_, sender, static_cast<uint64_t>(ready_index)));
    return await_epoch(team_, word, phase, sender, static_cast<uint64_t>(tile));
  }

  // `packet`: what a first look found there.
  PO_FN bool await_packet(const Packet* place, Phase phase, int sender, int tile, Packet& packet) const {
    if (packet.flag == flag()) return true;
    packet = packet_when_there(team_, place, phase, sender, static_cast<uint64_t>(tile));
    return packet.flag == flag();
  }

  // ---- own tiles: all PEs' sums become results -----------------------------------------------------------------------

  // Waits for all PEs' packets of some own tiles and keeps their data. All threads, each with packets of its own.
  PO_FN void take_partials(int first_position, int num_tiles) {
    constexpr int kBatch = Config::kVectors == 1 ? 1 : 4;  // packets that a thread looks at together
    const int num_packets = num_tiles * team_.size * packets_per_tile();
    for (int first = wg_.rank(); first < num_packets; first += kBatch * wg_.size()) {
      const Packet* places[kBatch];
      Packet packets[kBatch];
      int senders[kBatch];
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int index = min_of(first + i * wg_.size(), num_packets - 1);
        const int tile = tiles_.tile_at(first_position + index / packets_per_tile() / team_.size);
        senders[i] = index / packets_per_tile() % team_.size;
        places[i] = packet_at(team_.rank, partial_offset(senders[i], tile)) + index % packets_per_tile();
        // A staged packet is read only behind its word: the network may still be writing it.
        if (!is_announced(senders[i], kPhasePartial, tile, tile)) flag_store_relaxed_wg(&shared_.is_missing, 1);
        packets[i] = packet_load_sys(places[i], flag());
      }
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * wg_.size();
        if (index >= num_packets) break;
        if (!await_packet(places[i], kPhasePartial, senders[i], tiles_.tile_at(first_position), packets[i])) {
          flag_store_relaxed_wg(&shared_.is_missing, 1);
        }
        __builtin_memcpy(kept(index), packets[i].data, kDataBytes);
      }
    }
  }

  // Where the weights were: all of them have been used.
  PO_FN uint8_t* kept(int index) const { return wg_.arena() + index * kDataBytes; }

  // Adds up what all PEs sent of an item, in rank order, and finishes it; as its owner, tells the others.
  PO_FN void reduce_item(int first_position, int tile_index, int item) {
    const int tile = tiles_.tile_at(first_position + tile_index);
    if (flag_load_relaxed_wg(&shared_.is_missing) != 0) return output_.poison(tile, item);
    float sums[Config::kItem] = {};
    for (int sender = 0; sender < team_.size; ++sender) {
      const int first = (tile_index * team_.size + sender) * packets_per_tile() + item * Config::kPacketsPerItem;
      typename SumScalar::Storage values[Config::kItem];
      __builtin_memcpy(values, kept(first), sizeof(values));
      PO_UNROLL
      for (int i = 0; i < Config::kItem; ++i) {
        const float value = SumScalar::to_float(values[i]);
        sums[i] = sender == 0 ? value : sums[i] + value;
      }
    }
    Results results = {};
    output_.finish(tile, item, sums, results);
    if constexpr (Config::kTwoPhase) {
      const Packet packet = packet_of(results);
      if (shared_.takes_part == 0) return;
      const uint64_t offset = result_offset(tile, item);
      for (int hop = 1; hop < team_.size; ++hop) {
        const int pe = (team_.rank + hop) % team_.size;
        packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, offset), packet);
      }
    }
  }

  // Sends the results of the own tiles to the peers that are not reachable. All threads, behind their items.
  PO_FN void put_results(int num_others) const {
    wg_.sync();
    if (wg_.rank() != 0 || shared_.takes_part == 0) return;
    for (int position = num_others; position < tiles_.count; ++position) {
      const int tile = tiles_.tile_at(position);
      for (int pe = 0; pe < team_.size; ++pe) {
        if (!is_near(pe)) put_packets(pe, result_offset(tile, 0), items_per_tile(), ready_index_of_result(tile));
      }
    }
  }

  // ---- others' tiles: their results ----------------------------------------------------------------------------------

  // Takes the result that a tile's owner sent.
  PO_FN void take_result(int tile, int item) {
    const int owner = RowTiles::owner_of(tile, team_.size);
    const Packet* place = packet_at(team_.rank, result_offset(tile, item));
    Packet packet{};
    const bool is_there = is_announced(owner, kPhaseResult, tile, ready_index_of_result(tile)) &&
                          await_packet(place, kPhaseResult, owner, tile, packet);
    if (!is_there) return output_.poison(tile, item);
    Results results;
    __builtin_memcpy(results, packet.data, sizeof(results));
    output_.store(tile, item, results);
  }

  const WorkGroup& wg_;
  Shared& shared_;
  const Team& team_;
  const PacketPlan& plan_;
  const RowTiles tiles_;
  const Output output_;
  const Call& call_;
  const int room_bytes_;
};

}  // namespace po::gemv_all_reduce
