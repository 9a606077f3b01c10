// The PEs' sums of tiles meet here, as packets that carry data and flag together, from every PE to those that want a
// tile.
//
// One shot: a tile's sums go to every PE, and each PE adds them up. Two shots: they go to the tile's owner, which adds
// them up and sends every PE the rounded results. Sums are added in rank order. Packets lie at (parity of the epoch,
// sender, tile). A packet has arrived when its flag has, so no thread waits for credit (cuda/DESIGN.md, rows 14 and 15,
// which also says why no packet is overwritten unread). Packets for a PE that is not reachable are put from this PE's
// own copy, and a sliceRdy word announces them.
#pragma once

#include "comm/packets.cuh"
#include "kernels/gemv/tile_output.cuh"
#include "sched/row_tiles.cuh"

namespace po::gemv_all_reduce {

inline constexpr Phase kPhasePartial = make_phase(kFirstPhase);
// A PE that owes a result may itself wait for sums, so missing sums are reported first.
inline constexpr Phase kPhaseResult = make_phase(kFirstPhase + 1, 9);
PO_CONSTANT(kPhasePartial)
PO_CONSTANT(kPhaseResult)

// A part of the plan. Offsets are the same in every PE's heap.
struct PacketPlan {
  uint64_t partials_offset;  // Packet[2 parities][size senders][num_tiles][...]
  uint64_t partials_bytes;   // of one parity
  uint64_t results_offset;   // Packet[2][num_tiles][...]; two shots only
  uint64_t results_bytes;
  int64_t all_reachable;
};
PO_DESCRIBE(PacketPlan, partials_offset, partials_bytes, results_offset, results_bytes, all_reachable)

template <class Traits, class Call>
class PacketExchange {
 public:
  using SumScalar = typename Traits::SumScalar;
  using Output = TileOutput<Traits, Call>;
  using Results = typename Output::Results;

  struct Shared {
    uint64_t takes_part;  // 0: an earlier launch was aborted, so this one takes part in nothing
  };

  // `heaps`: Team.peer_heaps; null where not reachable.
  PO_FN PacketExchange(const WorkGroup& wg, const Shared& shared, const Team& team, const PacketPlan& plan,
                       const uint64_t* heaps, const RowTiles& tiles, const Output& output, const Call& call)
      : wg_(wg),
        shared_(shared),
        team_(team),
        plan_(plan),
        heaps_(heaps),
        tiles_(tiles),
        output_(output),
        call_(call) {}

  PO_FN bool has_peers() const { return team_.size != 1; }

  // What a warp that will send a tile computes before the sums are there.
  struct Outgoing {
    int tile;
    uint64_t offset;                   // of the tile's packets
    Packet* place;                     // of this lane's packet, if each lane has at most one
    typename Output::Addends addends;  // for this lane's item, in a world of one
  };

  PO_FN Outgoing prepare(int tile, const Warp& warp) const {
    Outgoing outgoing{tile, partial_offset(team_.rank, tile), nullptr, {}};
    if (team_.size == 1) {
      if (warp.rank() < items_per_tile()) outgoing.addends = output_.addends(tile, warp.rank());
    } else if (has_packet_per_lane(warp) && warp.rank() < packets_per_tile() * num_receivers()) {
      const int pe = receiver(tile, warp.rank() / packets_per_tile());
      if (sends_to(pe))
        outgoing.place = packet_at(is_near(pe) ? pe : team_.rank, outgoing.offset) + packet_of_lane(warp);
    }
    return outgoing;
  }

  // Adds the parts of a tile up and sends the sums. One warp.
  template <class Parts>
  PO_FN void send(const Outgoing& outgoing, const Parts& parts, const Warp& warp) const {
    const int tile = outgoing.tile;
    if (team_.size == 1) return finish_alone(outgoing, parts, warp);
    if (shared_.takes_part == 0) return;  // @sums-take-part
    if (has_packet_per_lane(warp)) {
      if (outgoing.place != nullptr) packet_store_sys(outgoing.place, sums_of(parts, packet_of_lane(warp)));
    } else {
      for (int q = warp.rank(); q < packets_per_tile(); q += warp.size()) {
        const Packet packet = sums_of(parts, q);
        for (int hop = 0; hop < num_receivers(); ++hop) {
          const int pe = receiver(tile, hop);
          if (sends_to(pe)) packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, outgoing.offset) + q, packet);
        }
      }
    }
    if (plan_.all_reachable != 0) return;
    fence_acq_rel_sys();  // publishes each lane's packets to the network
    warp.sync();
    if (warp.rank() == 0) {
      PO_NO_UNROLL
      for (int hop = 0; hop < num_receivers(); ++hop) {
        const int pe = receiver(tile, hop);
        if (!is_near(pe)) put(pe, outgoing.offset, packets_per_tile(), tile);
      }
    }
  }

  // Waits for the peers' packets of this WG's tiles, and finishes the tiles. All threads, once they know the epoch. No
  // thread waits for another one of the WG, except before results are put.
  PO_FN void receive() {
    const int num_own = Traits::kTwoShot ? tiles_.num_own() : tiles_.count;
    const int num_others = tiles_.count - num_own;
    PO_NO_UNROLL
    for (int i = wg_.rank(); i < num_own * items_per_tile(); i += wg_.size()) {
      reduce_item(tiles_.tile_at(num_others + i / items_per_tile()), i % items_per_tile());
    }
    if constexpr (Traits::kTwoShot) {
      if (plan_.all_reachable == 0) put_results(num_others);
      // Starts from the other end of the WG, since its first threads may still be at the items above.
      for (int i = wg_.size() - 1 - wg_.rank(); i < num_others * items_per_tile(); i += wg_.size()) {
        take_result(tiles_.tile_at(i / items_per_tile()), i % items_per_tile());
      }
    }
  }

 private:
  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int num_vectors() const { return Traits::kVectors == 1 ? 1 : call_.shape.num_vectors(); }
  PO_FN int items_per_tile() const { return num_vectors() * Traits::kItemsPerVector; }
  PO_FN int packets_per_tile() const { return items_per_tile() * Traits::kPacketsPerItem; }
  PO_FN uint64_t parity() const {
    return team_.epoch % 2;  // @packet-parity
  }
  PO_FN uint64_t flag() const { return packet_flag(team_); }
  PO_FN bool is_near(int pe) const { return heaps_[pe] != 0; }

  // Places of a tile's packets, as offsets that are the same in every heap.
  PO_FN uint64_t partial_offset(int sender, int tile) const {
    const int64_t first = (sender * output_.num_tiles() + tile) * packets_per_tile();
    return plan_.partials_offset + parity() * plan_.partials_bytes + static_cast<uint64_t>(first) * sizeof(Packet);
  }
  PO_FN uint64_t result_offset(int tile, int item) const {
    const int64_t place = static_cast<int64_t>(tile) * items_per_tile() + item;
    // @results-parity
    return plan_.results_offset + parity() * plan_.results_bytes + static_cast<uint64_t>(place) * sizeof(Packet);
  }
  PO_FN Packet* packet_at(int pe, uint64_t offset) const { return reinterpret_cast<Packet*>(heaps_[pe] + offset); }

  // Puts packets from this PE's own copy.
  PO_FN void put(int pe, uint64_t offset, int count, int ready_index) const {
    put_packets(team_, pe, offset, team_.heap + offset, count, ready_index);
  }

  PO_FN int ready_index_of_result(int tile) const { return static_cast<int>(output_.num_tiles()) + tile; }

  // ---- sums: from this PE to who adds them up ------------------------------------------------------------------------

  // The receiver of this PE's sums of a tile: the tile's owner, or each PE in turn, the next one first and this one
  // last.
  PO_FN int receiver(int tile, int hop) const {
    if constexpr (Traits::kTwoShot) return tiles_.owner_of(tile);
    const int pe = team_.rank + 1 + hop;
    return pe < team_.size ? pe : pe - team_.size;
  }

  PO_FN int num_receivers() const { return Traits::kTwoShot ? 1 : team_.size; }

  // Sums for a PE that is not reachable are put from this PE's own copy. In one shot this PE is a receiver itself.
  PO_FN bool sends_to(int pe) const { return Traits::kTwoShot || is_near(pe); }

  PO_FN bool has_packet_per_lane(const Warp& warp) const { return packets_per_tile() * num_receivers() <= warp.size(); }
  PO_FN int packet_of_lane(const Warp& warp) const { return warp.rank() % packets_per_tile(); }

  template <class Parts>
  PO_FN Packet sums_of(const Parts& parts, int q) const {
    float exact[Traits::kSumsPerPacket];
    typename SumScalar::Storage sums[Traits::kSumsPerPacket];
    parts.add_up(q * Traits::kSumsPerPacket, exact);
    PO_UNROLL
    for (int i = 0; i < Traits::kSumsPerPacket; ++i) sums[i] = SumScalar::from_float(exact[i]);
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

  template <class Parts>
  PO_FN void finish_alone(const Outgoing& outgoing, const Parts& parts, const Warp& warp) const {
    auto addends = outgoing.addends;
    for (int item = warp.rank(); item < items_per_tile(); item += warp.size()) {
      if (item >= warp.size()) addends = output_.addends(outgoing.tile, item);
      float sums[Traits::kItem];
      Results results = {};
      parts.add_up(item * Traits::kItem, sums);
      PO_UNROLL
      for (int i = 0; i < Traits::kItem; ++i) sums[i] = SumScalar::to_float(SumScalar::from_float(sums[i]));
      output_.finish(outgoing.tile, item, sums, addends, results);
    }
  }

  // ---- waiting -------------------------------------------------------------------------------------------------------

  // A staged packet is read only after its word has come: the network may still be writing the packet.
  PO_FN bool is_announced(int sender, Phase phase, int tile, int ready_index) const {
    if (is_near(sender)) return true;  // @staged-behind-word
    const uint64_t* word = local_word(team_, packets_word_offset(team_, sender, ready_index));
    return await_epoch(team_, word, phase, sender, static_cast<uint64_t>(tile), has_given_up_);
  }

  PO_FN bool are_announced(int tile) const {
    if (plan_.all_reachable != 0) return true;
    bool all = true;
    PO_NO_UNROLL
    for (int sender = 0; sender < team_.size; ++sender) all &= is_announced(sender, kPhasePartial, tile, tile);
    return all;
  }

  // Waits until packets of this launch lie at `place` and every `stride` bytes after it, one row from each of `count`
  // senders, and reads them. Packets that this PE sent to itself are awaited without a bound (`await`).
  template <int kRow, int kSenders>
  PO_FN bool take(const uint8_t* place, uint64_t stride, Phase phase, int first_sender, int count, int tile,
                  Packet (&packets)[kSenders][kRow]) const {
    const int own = team_.rank - first_sender;  // constants name the senders: their ranks would fill registers
    int missing = team_.rank;
    const auto look = [&](uint64_t* seen) {
      const uint8_t* base = derived_anew(place);
      const uint64_t expected = flag();
      PO_UNROLL
      for (int i = 0; i < kSenders; ++i) {
        const auto* row = reinterpret_cast<const Packet*>(base + static_cast<uint64_t>(i) * stride);
        PO_UNROLL
        for (int j = 0; j < kRow; ++j) {
          if (i < count) packets[i][j] = packet_load_sys(row + j, expected);
        }
      }
      int late = own;
      *seen = expected;
      PO_UNROLL
      for (int i = 0; i < kSenders; ++i) {
        PO_UNROLL
        for (int j = 0; j < kRow; ++j) {
          if (i >= count || packets[i][j].flag == expected) continue;  // @packet-is-there
          if (i != own) late = i;
          *seen = packets[i][j].flag;
        }
      }
      missing = first_sender + late;
      return *seen == expected;
    };
    return await(team_, phase, missing, static_cast<uint64_t>(tile), look, has_given_up_);
  }

  PO_FN void give_up(int tile, int item) {
    has_given_up_ = true;
    output_.poison(tile, item);
  }

  // ---- own tiles: all PEs' sums become results -----------------------------------------------------------------------

  // Waits for all PEs' sums of an item, adds them up in rank order, and finishes the item; as its owner, sends the
  // results.
  PO_FN void reduce_item(int tile, int item) {
    constexpr int kBatch = Traits::kSendersAtOnce;
    const auto addends = output_.addends(tile, item);  // loaded while the packets are awaited
    if (!are_announced(tile)) return give_up(tile, item);
    const uint64_t stride = partial_offset(1, 0) - partial_offset(0, 0);
    float sums[Traits::kItem];
    PO_UNROLL
    for (float& sum : sums) sum = -0.0f;  // -0.0 changes nothing added to it, not even a zero's sign
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      const int count = min_of(kBatch, team_.size - first);
      const Packet* place = packet_at(team_.rank, partial_offset(first, tile)) + item * Traits::kPacketsPerItem;
      Packet packets[kBatch][Traits::kPacketsPerItem] = {};
      if (!take(reinterpret_cast<const uint8_t*>(place), stride, kPhasePartial, first, count, tile, packets)) {
        return give_up(tile, item);
      }
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i < count) add(packets[i], sums);
      }
    }
    Results results = {};
    output_.finish(tile, item, sums, addends, results);
    if constexpr (Traits::kTwoShot) {
      const Packet packet = packet_of(results);
      if (shared_.takes_part == 0) return;
      const uint64_t offset = result_offset(tile, item);
      for (int hop = 1; hop < team_.size; ++hop) {
        const int pe = (team_.rank + hop) % team_.size;
        packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, offset), packet);
      }
    }
  }

  static PO_FN void add(const Packet (&packets)[Traits::kPacketsPerItem], float (&sums)[Traits::kItem]) {
    typename SumScalar::Storage values[Traits::kItem];
    PO_UNROLL
    for (int j = 0; j < Traits::kPacketsPerItem; ++j) {
      __builtin_memcpy(&values[j * Traits::kSumsPerPacket], packets[j].data, sizeof(packets[j].data));
    }
    PO_UNROLL
    for (int i = 0; i < Traits::kItem; ++i) {
      sums[i] += SumScalar::to_float(values[i]);
    }
  }

  // Sends the results of the own tiles to the peers that are not reachable. All threads, after their items. If items
  // failed, older packets lie in their places. They are sent too, and no PE takes them, since their flags are older.
  PO_FN void put_results(int num_others) const {
    fence_acq_rel_sys();                                     // publishes each thread's packets to the network
    wg_.sync();                                              // @results-sync
    if (wg_.rank() != 0 || shared_.takes_part == 0) return;  // @results-take-part
    for (int position = num_others; position < tiles_.count; ++position) {
      const int tile = tiles_.tile_at(position);
      PO_NO_UNROLL
      for (int pe = 0; pe < team_.size; ++pe) {
        if (!is_near(pe)) put(pe, result_offset(tile, 0), items_per_tile(), ready_index_of_result(tile));
      }
    }
  }

  // ---- others' tiles: their results ----------------------------------------------------------------------------------

  // Takes the result that a tile's owner has sent.
  PO_FN void take_result(int tile, int item) {
    const int owner = tiles_.owner_of(tile);
    const Packet* place = packet_at(team_.rank, result_offset(tile, item));
    Packet packets[1][1] = {};
    const bool is_there = is_announced(owner, kPhaseResult, tile, ready_index_of_result(tile)) &&
                          take(reinterpret_cast<const uint8_t*>(place), 0, kPhaseResult, owner, 1, tile, packets);
    if (!is_there) return give_up(tile, item);
    Results results;
    __builtin_memcpy(results, packets[0][0].data, sizeof(results));
    output_.store(tile, item, results);
  }

  const WorkGroup& wg_;
  const Shared& shared_;
  const Team& team_;
  const PacketPlan& plan_;
  const uint64_t* heaps_;
  const RowTiles tiles_;
  const Output output_;
  const Call& call_;
  bool has_given_up_ = false;  // of this thread: packets that are not there at its first look will not come
};

}  // namespace po::gemv_all_reduce
