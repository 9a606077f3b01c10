// GEMV + AllReduce: y = sum over PEs of weight_r * x_r (+ bias, + residual), for 1 to 16 vectors, on every PE.
//
// A WG has the same tiles of rows on every PE. Teams of warps share a tile's columns; two more warps add the parts of a tile
// up as soon as they are there and send it at once, as packets that carry data and flag together: to every PE, itself too
// (one shot), or to the tile's owner (two phases), which adds the PEs' sums up in rank order and sends every PE the
// rounded result. In the end each WG waits for the packets of its own tiles. Nobody waits for credit: areas of packets
// take turns by the epoch's parity, and a PE is in launch e + 1 only when all have ended e - 1 (cuda/DESIGN.md).
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "sched/row_tiles.cuh"
#include "tile/weight_stream.cuh"

#ifndef PO_SCALAR
#define PO_SCALAR BFloat16
#define PO_SUM_SCALAR Float32
#define PO_VECTORS 1
#define PO_DEPTH 4
#define PO_ALIGNED true
#define PO_RESIDENT true
#define PO_TWO_PHASE false
#define PO_OVERLAPS false
#define PO_WARPS 12
#endif

namespace po::gemv_all_reduce {

struct Config {
  using Scalar = PO_SCALAR;         // of weight, vectors, bias, residual and result
  using SumScalar = PO_SUM_SCALAR;  // of the partial sums as they travel
  static constexpr int kVectors = PO_VECTORS;
  static constexpr bool kTwoPhase = PO_TWO_PHASE;
  static constexpr int kSumsPerPacket = 8 / static_cast<int>(sizeof(SumScalar::Storage));
  static constexpr int kItem = 8 / static_cast<int>(sizeof(Scalar::Storage));  // results that one thread finishes
  static constexpr int kServing = 2;  // warps of a WG that send; kSlots is a multiple, so a slot always meets the same
  static constexpr int kPacketsPerItem = kItem / kSumsPerPacket;
  static constexpr int kItemsPerVector = kTileRows / kItem;  // of a tile
  static constexpr bool kOverlaps = PO_OVERLAPS;             // starts before the kernel before it has ended
  static constexpr int kSlots = 4;                           // tiles of a WG that may be under way in its own memory
  static constexpr int kHostRoom = 64 << 10;                 // for incoming packets, on the host
  static_assert(kSlots >= WarpShare<Scalar>::kMaxTeams && kSlots % kServing == 0,
                "with fewer slots a team would wait two rounds ahead, which a Handover does not allow");
  static_assert(kPacketsPerItem >= 1, "sums travel in fp32 or in the scalar's own type");
  using Stream = WeightStream<Scalar, kVectors, PO_DEPTH, PO_ALIGNED, PO_RESIDENT>;
};

struct Plan {
  Team team;
  int64_t num_tiles;
  int64_t output_stride;     // elements from one vector of the output, or the residual, to the next
  const uint8_t* bias;       // null, or the bias of this launch's first row
  uint64_t partials_offset;  // in the heap: Packet[2 parities][size senders][num_tiles][...]
  uint64_t partials_bytes;   // of one parity
  uint64_t results_offset;   // Packet[2][num_tiles][...]; two phases only
  uint64_t results_bytes;
  int64_t all_reachable;
  uint64_t heaps[kMaxPes];  // Team.peer_heaps, within reach
};

struct Call {
  const uint8_t* weight;
  const uint8_t* vectors;
  uint8_t* output;
  const uint8_t* residual;  // may be the output; null: none
  uint64_t shape;           // what `begin` has no plan for: see below

  PO_FN int num_rows() const { return static_cast<int>(shape & 0x1ffff); }
  PO_FN int rank() const { return static_cast<int>(shape >> 17 & 0x3f); }
  PO_FN int size() const { return static_cast<int>(shape >> 23 & 0x7f); }
  PO_FN int num_vectors() const { return static_cast<int>(shape >> 30 & 0xf) + 1; }
  PO_FN int num_columns() const { return static_cast<int>(shape >> 34); }
};

struct Shared {
  Plan plan;
  Handover stored[Config::kSlots];  // from all warps to the one that sends a tile: their parts are in the slot
  Handover sent[Config::kSlots];    // back: the slot is free
  Handover told;                    // among the serving warps: the epoch, and whether this PE takes part
  uint64_t takes_part;
  uint64_t is_missing;  // a packet did not come
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

class Worker {
 public:
  using Scalar = Config::Scalar;
  using Storage = Scalar::Storage;
  using SumScalar = Config::SumScalar;
  using Share = WarpShare<Scalar>;

  PO_FN Worker(const WorkGroup& wg, Shared& shared, const Call& call, const Config::Stream::VectorsOf& vectors)
      : wg_(wg),
        shared_(shared),
        team_(shared.plan.team),
        plan_(shared.plan),
        call_(call),
        tiles_(tiles(wg, call)),
        vectors_(vectors),
        partials_(reinterpret_cast<float*>(vectors.own + vectors.own_bytes(call.num_columns()))),
        share_(share(wg, call)) {}

  // The last warps send and multiply nothing; the first of them also grants and awaits credit. A lone warp does all.
  static PO_FN int num_serving(const WorkGroup& wg) { return min_of(Config::kServing, max_of(wg.num_warps() - 1, 1)); }
  static PO_FN int num_computing(const WorkGroup& wg) { return max_of(wg.num_warps() - num_serving(wg), 1); }
  // 0 is the first serving warp; below 0: this one multiplies.
  static PO_FN int serving_index(const WorkGroup& wg) { return wg.warp_index() - (wg.num_warps() - num_serving(wg)); }
  static PO_FN Share share(const WorkGroup& wg, const Call& call) {
    return Share::of_warp(call.num_columns(), wg.warp_index(), num_computing(wg));
  }

  static PO_FN RowTiles tiles(const WorkGroup& wg, const Call& call) {
    return RowTiles::of_wg(wg.index(), wg.count(), ceil_div(call.num_rows(), kTileRows), call.rank(),
                           Config::kTwoPhase ? call.size() : 1);
  }

  // The arena: the ring of the weights, which is the room for incoming packets later; the vectors; the warps' parts.
  static PO_FN int ring_bytes([[maybe_unused]] const WorkGroup& wg) {
#if PO_ON_DEVICE
    return num_computing(wg) * Config::Stream::kBytesPerWarp;
#else
    return Config::kHostRoom;
#endif
  }
  static PO_FN Config::Stream::VectorsOf vectors(const WorkGroup& wg, const Call& call) {
    return {call.vectors, call.num_vectors(), call.num_columns(), wg.arena() + ring_bytes(wg)};
  }

  // A sync must follow.
  PO_FN void start_handovers() {
    for (int i = wg_.rank(); i < Config::kSlots; i += wg_.size()) {
      shared_.stored[i].start(share_.num_parts);
      shared_.sent[i].start(1);
    }
    if (wg_.rank() == 0) {
      shared_.told.start(1);
      shared_.is_missing = 0;
    }
  }

  // The first serving warp tells the others the epoch, and the WG's other threads, for behind their next sync; in WG 0 it
  // grants credit.
  PO_FN void begin() {
    const Warp warp;
    if (serving_index(wg_) != 0) return shared_.told.await(0);
    const uint64_t aborted = flag_load_relaxed_sys(&team_.local->abort);
    begin_launch(team_, warp);
    if (warp.rank() == 0) {
      shared_.takes_part = po::takes_part(team_, aborted);
      shared_.told.arrive();
    }
    warp.sync();
    if (wg_.index() == 0) grant_credit(team_, warp, 0);
    if (warp.rank() == 0) close_epoch(team_, wg_);
  }

  // Multiplies all tiles of the WG and sends each as soon as its team of warps has stored all parts of it. The teams wait
  // for nobody, except for a slot to be free again.
  PO_FN void run_tiles(Config::Stream& stream) {
    const Warp warp;
    const int served = serving_index(wg_);
    const bool serves = served >= 0;
    const bool computes = share_.team < share_.num_teams && wg_.warp_index() < num_computing(wg_);
    // A warp that multiplies goes from tile to tile of its team, one that serves to every so many; a lone one sees all.
    const int stride = serves ? num_serving(wg_) : share_.num_teams;
    for (int position = serves ? served : share_.team; position < tiles_.count; position += stride) {
      const int slot = position % Config::kSlots;
      const auto round = static_cast<uint32_t>(position / Config::kSlots);
      if (computes) {
        if (round != 0) shared_.sent[slot].await(round - 1);
        stream.multiply(vectors_, part_of(slot, share_.part));
        warp.sync();
        if (warp.rank() == 0) shared_.stored[slot].arrive();
      }
      if (serves) {
        shared_.stored[slot].await(round);
        send(tiles_.tile_at(position), slot, warp);
        warp.sync();
        if (warp.rank() == 0) shared_.sent[slot].arrive();
      }
    }
  }

  // Waits for what peers send of this WG's tiles, and finishes them. All threads, behind a sync that follows run_tiles.
  PO_FN void receive() {
    if (team_.size == 1) return;
    const int num_own = Config::kTwoPhase ? tiles_.num_own() : tiles_.count;
    const int num_others = tiles_.count - num_own;
    const int tiles_per_pass = ring_bytes(wg_) / (team_.size * packets_per_tile() * kDataBytes);
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

  PO_FN int num_vectors() const { return Config::kVectors == 1 ? 1 : call_.num_vectors(); }
  PO_FN int items_per_tile() const { return num_vectors() * Config::kItemsPerVector; }
  PO_FN int packets_per_tile() const { return items_per_tile() * Config::kPacketsPerItem; }
  PO_FN uint64_t parity() const { return team_.epoch % 2; }
  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }

  PO_FN float* part_of(int slot, int part) const {
    return partials_ + (slot * share_.num_parts + part) * (Config::kVectors * kTileRows);
  }

  // Places of a tile's packets, as offsets in every heap.
  PO_FN uint64_t partial_offset(int sender, int tile) const {
    const int64_t first = (sender * plan_.num_tiles + tile) * packets_per_tile();
    return plan_.partials_offset + parity() * plan_.partials_bytes + static_cast<uint64_t>(first) * sizeof(Packet);
  }
  PO_FN uint64_t result_offset(int tile, int item) const {
    const int64_t place = static_cast<int64_t>(tile) * items_per_tile() + item;
    return plan_.results_offset + parity() * plan_.results_bytes + static_cast<uint64_t>(place) * sizeof(Packet);
  }
  PO_FN Packet* packet_at(int pe, uint64_t offset) const { return reinterpret_cast<Packet*>(plan_.heaps[pe] + offset); }

  // Adds the parts of a tile up in the warps' order and sends the sums. One warp.
  PO_FN void send(int tile, int slot, const Warp& warp) {
    if (team_.size == 1) return finish_alone(tile, slot, warp);
    if (shared_.takes_part == 0) return;
    const uint64_t offset = partial_offset(team_.rank, tile);
    const int num_receivers = Config::kTwoPhase ? 1 : team_.size;
    const int num_packets = packets_per_tile();
    if (num_packets * num_receivers <= warp.size()) {
      // Each lane has a packet for one receiver.
      const int hop = warp.rank() / num_packets;
      const int q = warp.rank() % num_packets;
      if (hop < num_receivers) send_packet(receiver(tile, hop), offset, q, sums_of(slot, q));
    } else {
      for (int q = warp.rank(); q < num_packets; q += warp.size()) {
        const Packet packet = sums_of(slot, q);
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

  // Who gets this PE's sums of a tile: its owner, or all PEs, the next one first and this one last.
  PO_FN int receiver(int tile, int hop) const {
    if constexpr (Config::kTwoPhase) return RowTiles::owner_of(tile, team_.size);
    const int pe = team_.rank + 1 + hop;
    return pe < team_.size ? pe : pe - team_.size;
  }

  PO_FN Packet sums_of(int slot, int q) const {
    float exact[Config::kSumsPerPacket];
    typename SumScalar::Storage sums[Config::kSumsPerPacket];
    add_parts(slot, q * Config::kSumsPerPacket, exact);
    PO_UNROLL
    for (int i = 0; i < Config::kSumsPerPacket; ++i) sums[i] = SumScalar::from_float(exact[i]);
    Packet packet;
    __builtin_memcpy(packet.data, sums, sizeof(packet.data));
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

  // The warps' parts of some values of a tile, added up in the warps' order.
  template <int kCount>
  PO_FN void add_parts(int slot, int first_value, float (&sums)[kCount]) const {
    constexpr int kBatch = 4;  // parts that are loaded together
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) sums[i] = 0;
    for (int first = 0; first < share_.num_parts; first += kBatch) {
      float parts[kBatch][kCount];
      PO_UNROLL
      for (int part = 0; part < kBatch; ++part) {
        const float* values = part_of(slot, min_of(first + part, share_.num_parts - 1)) + first_value;
        PO_UNROLL
        for (int i = 0; i < kCount; ++i) parts[part][i] = first + part < share_.num_parts ? values[i] : 0.0f;
      }
      PO_UNROLL
      for (int part = 0; part < kBatch; ++part) {
        PO_UNROLL
        for (int i = 0; i < kCount; ++i) sums[i] += parts[part][i];
      }
    }
  }

  PO_FN void finish_alone(int tile, int slot, const Warp& warp) {
    for (int item = warp.rank(); item < items_per_tile(); item += warp.size()) {
      float sums[Config::kItem];
      add_parts(slot, item * Config::kItem, sums);
      PO_UNROLL
      for (int i = 0; i < Config::kItem; ++i) sums[i] = SumScalar::to_float(SumScalar::from_float(sums[i]));
      finish(tile, item, sums);
    }
  }

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

  PO_FN uint8_t* kept(int index) const { return wg_.arena() + index * kDataBytes; }

  // Adds up what all PEs sent of an item, in rank order, and finishes it; as its owner, tells the others.
  PO_FN void reduce_item(int first_position, int tile_index, int item) {
    const int tile = tiles_.tile_at(first_position + tile_index);
    if (flag_load_relaxed_wg(&shared_.is_missing) != 0) return poison(tile, item);
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
    const Packet result = finish(tile, item, sums);
    if constexpr (Config::kTwoPhase) {
      if (shared_.takes_part == 0) return;
      const uint64_t offset = result_offset(tile, item);
      for (int hop = 1; hop < team_.size; ++hop) {
        const int pe = (team_.rank + hop) % team_.size;
        packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, offset), result);
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

  PO_FN uint64_t flag() const { return launch_flag(team_); }

  PO_FN int ready_index_of_result(int tile) const { return static_cast<int>(plan_.num_tiles) + tile; }

  // Takes the result that a tile's owner sent.
  PO_FN void take_result(int tile, int item) {
    const int owner = RowTiles::owner_of(tile, team_.size);
    const Packet* place = packet_at(team_.rank, result_offset(tile, item));
    Packet packet{};
    const bool is_there = is_announced(owner, kPhaseResult, tile, ready_index_of_result(tile)) &&
                          await_packet(place, kPhaseResult, owner, tile, packet);
    if (!is_there) return poison(tile, item);
    Storage results[Config::kItem];
    __builtin_memcpy(results, packet.data, sizeof(results));
    for_each_element(tile, item,
                     [&](int i, int64_t, int64_t place_in_output) { output()[place_in_output] = results[i]; });
  }

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

  PO_FN Storage* output() const { return reinterpret_cast<Storage*>(call_.output); }

  // use(i, row, place in output and residual) for the item's elements that are rows of the weight.
  template <class Use>
  PO_FN void for_each_element(int tile, int item, const Use& use) const {
    const int64_t first_row = static_cast<int64_t>(tile) * kTileRows + item % Config::kItemsPerVector * Config::kItem;
    const int64_t place = item / Config::kItemsPerVector * plan_.output_stride + first_row;
    PO_UNROLL
    for (int i = 0; i < Config::kItem; ++i) {
      if (first_row + i < call_.num_rows()) use(i, first_row + i, place + i);
    }
  }

  // Bias, residual, the one rounding. Returns the results as they travel.
  PO_FN Packet finish(int tile, int item, const float (&sums)[Config::kItem]) {
    const auto* bias = reinterpret_cast<const Storage*>(plan_.bias);
    const auto* residual = reinterpret_cast<const Storage*>(call_.residual);
    Storage results[Config::kItem] = {};
    for_each_element(tile, item, [&](int i, int64_t row, int64_t place_in_output) {
      float sum = sums[i];
      if (bias != nullptr) sum += Scalar::to_float(bias[row]);
      if (residual != nullptr) sum += Scalar::to_float(residual[place_in_output]);
      results[i] = Scalar::from_float(sum);
      output()[place_in_output] = results[i];
    });
    Packet packet;
    __builtin_memcpy(packet.data, results, sizeof(packet.data));
    packet.flag = flag();
    return packet;
  }

  // All bits set: NaN in fp32, fp16 and bf16.
  PO_FN void poison(int tile, int item) const {
    for_each_element(tile, item, [&](int, int64_t, int64_t place_in_output) {
      output()[place_in_output] = static_cast<Storage>(-1);
    });
  }

  const WorkGroup& wg_;
  Shared& shared_;
  Team& team_;
  const Plan& plan_;
  const Call& call_;
  const RowTiles tiles_;
  const Config::Stream::VectorsOf vectors_;
  float* const partials_;  // [kSlots][num_parts][kVectors][kTileRows]
  const Share share_;
};

struct Kernel {
  using Plan = gemv_all_reduce::Plan;
  using Call = gemv_all_reduce::Call;
  using Shared = gemv_all_reduce::Shared;
  static constexpr int kThreads = (PO_WARPS + Config::kServing) * 32;
  static constexpr int kBlocksPerSm = Config::kVectors == 1 ? 2 : 1;  // beside one WG, a successor's may begin
  static constexpr size_t kHostArenaBytes =
      Config::kHostRoom + 64ull * Config::kSlots * Config::kVectors * kTileRows * sizeof(float);

  struct Begun {
    Config::Stream::VectorsOf vectors;
    Config::Stream stream;
  };

  // Neither vectors nor weights wait for the plan. The vectors go first: behind the weights they would wait for all that
  // are under way. In a launch that overlaps its predecessor, which may still be making the vectors, weights go alone.
  static PO_FN Begun begin(const WorkGroup& wg, const Call& call) {
    const auto vectors = Worker::vectors(wg, call);
    if constexpr (!Config::kOverlaps) vectors.fetch(wg);
    RowTiles tiles = Worker::tiles(wg, call);
    if (wg.warp_index() >= Worker::num_computing(wg)) tiles.count = 0;
    return {vectors, Config::Stream({call.weight, call.num_rows(), call.num_columns()}, tiles, Worker::share(wg, call),
                                    wg.arena(), wg.warp_index())};
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, Begun& begun) {
    if constexpr (Config::kOverlaps) {
      await_predecessor();
      begun.vectors.fetch(wg);
    }
    release_successor();
    Team& team = shared.plan.team;
    Worker worker(wg, shared, call, begun.vectors);
    worker.start_handovers();
    copy_async_wait<Config::kOverlaps ? 0 : Config::Stream::kBatchesAhead>();  // the vectors
    wg.sync();
    const int served = Worker::serving_index(wg);
    if (served >= 0) worker.begin();
    worker.run_tiles(begun.stream);
    wg.sync();
    if (served == 0 && wg.index() == 0) await_all_credits(team, Warp());
    worker.receive();
    if (shared.plan.all_reachable == 0) put_quiet(team);  // what was put is written again two epochs on
  }
};

}  // namespace po::gemv_all_reduce

PO_ENTRY(gemv_all_reduce, po::gemv_all_reduce::Kernel)
