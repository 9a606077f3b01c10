// GEMV + AllReduce: y = sum over PEs of weight_r * x_r (+ bias, + residual), for 1 to 16 vectors, on every PE.
//
// A WG has the same tiles of rows on every PE. Its warps share the columns; the warp that is the last to finish a tile adds
// the warps' parts up and sends the tile at once, as packets that carry data and flag together: to every PE, itself too
// (one shot), or to the tile's owner (two phases), which adds the PEs' sums up in rank order and sends every PE the rounded
// result. In the end each WG waits for the packets of its own tiles. Nobody waits for credit: areas of packets take turns
// by the epoch's parity, and a PE is in launch e + 1 only when all have ended e - 1 (cuda/DESIGN.md, section 4).
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "sched/row_tiles.cuh"
#include "tile/weight_stream.cuh"

#ifndef PO_SCALAR
#define PO_SCALAR BFloat16
#define PO_SUM_SCALAR Float32
#define PO_VECTORS 1
#define PO_DEPTH 16
#define PO_ALIGNED true
#define PO_RESIDENT true
#define PO_TWO_PHASE false
#define PO_WARPS 8
#endif

namespace po::gemv_all_reduce {

struct Config {
  using Scalar = PO_SCALAR;         // of weight, vectors, bias, residual and result
  using SumScalar = PO_SUM_SCALAR;  // of the partial sums as they travel
  static constexpr int kVectors = PO_VECTORS;
  static constexpr bool kTwoPhase = PO_TWO_PHASE;
  static constexpr int kSumsPerPacket = 8 / static_cast<int>(sizeof(SumScalar::Storage));
  static constexpr int kItem = 8 / static_cast<int>(sizeof(Scalar::Storage));  // results that one thread finishes
  static constexpr int kPacketsPerItem = kItem / kSumsPerPacket;
  static constexpr int kItemsPerVector = kTileRows / kItem;  // of a tile
  static constexpr int kMaxSlots = 8;
  static_assert(kPacketsPerItem >= 1, "sums travel in fp32 or in the scalar's own type");
  using Stream = WeightStream<Scalar, kVectors, PO_DEPTH, PO_ALIGNED, PO_RESIDENT>;
};

struct Plan {
  Team team;
  int64_t num_vectors;
  int64_t num_tiles;
  int64_t output_stride;     // elements from one vector of the output, or the residual, to the next
  const uint8_t* bias;       // null, or the bias of this launch's first row
  uint64_t partials_offset;  // in the heap: Packet[2 parities][size senders][num_tiles][...]
  uint64_t partials_bytes;   // of one parity
  uint64_t results_offset;   // Packet[2][num_tiles][...]; two phases only
  uint64_t results_bytes;
  int64_t num_slots;  // tiles of a WG that may be under way in its own memory
  int64_t all_reachable;
};

struct Call {
  const uint8_t* weight;
  const uint8_t* vectors;
  uint8_t* output;
  const uint8_t* residual;  // may be the output; null: none
  uint64_t shape;           // rows, rank, size and columns in 20, 7, 7 and 30 bits: what `begin` has no plan for

  PO_FN int num_rows() const { return static_cast<int>(shape & 0xfffff); }
  PO_FN int rank() const { return static_cast<int>(shape >> 20 & 0x7f); }
  PO_FN int size() const { return static_cast<int>(shape >> 27 & 0x7f); }
  PO_FN int num_columns() const { return static_cast<int>(shape >> 34); }
};

struct Shared {
  Plan plan;
  uint64_t heaps[kMaxPes];              // where each PE's heap is mapped; 0: not reachable
  uint64_t arrived[Config::kMaxSlots];  // warps that have stored their part of the tile in this slot, over all rounds
  uint64_t sent[Config::kMaxSlots];     // rounds in which the slot's tile has been sent
  uint64_t takes_part;
};

class Worker {
 public:
  using Scalar = Config::Scalar;
  using Storage = Scalar::Storage;
  using SumScalar = Config::SumScalar;
  using Share = ColumnShare<Scalar>;

  PO_FN Worker(const WorkGroup& wg, Shared& shared, const Call& call)
      : wg_(wg), shared_(shared), team_(shared.plan.team), plan_(shared.plan), call_(call), tiles_(tiles(wg, call)) {}

  // The last warp grants and awaits credit and computes nothing, so no tile is late for it. A lone warp does both.
  static PO_FN int num_computing(const WorkGroup& wg) { return max_of(wg.num_warps() - 1, 1); }
  static PO_FN bool computes(const WorkGroup& wg) { return wg.warp_index() < num_computing(wg); }
  static PO_FN bool serves(const WorkGroup& wg) { return wg.warp_index() == wg.num_warps() - 1; }

  static PO_FN RowTiles tiles(const WorkGroup& wg, const Call& call) {
    return RowTiles::of_wg(wg.index(), wg.count(), ceil_div(call.num_rows(), kTileRows), call.rank(),
                           Config::kTwoPhase ? call.size() : 1);
  }

  // All threads: the vectors, the peers' heaps, and the counters of this WG.
  PO_FN void prepare() {
    for (int pe = wg_.rank(); pe < team_.size; pe += wg_.size()) shared_.heaps[pe] = team_.peer_heaps[pe];
    for (int i = wg_.rank(); i < Config::kMaxSlots; i += wg_.size()) shared_.arrived[i] = shared_.sent[i] = 0;
    const int ring_bytes = num_computing(wg_) * Config::Stream::kBytesPerWarp;
    vectors_ = {call_.vectors, static_cast<int>(plan_.num_vectors), call_.num_columns(), wg_.arena() + ring_bytes};
    partials_ = reinterpret_cast<float*>(vectors_.own + decltype(vectors_)::own_bytes(call_.num_columns()));
    num_parts_ = Share::num_warps_with_share(call_.num_columns(), num_computing(wg_));
    vectors_.fetch(wg_);
    const uint64_t aborted = wg_.rank() == 0 ? flag_load_relaxed_sys(&team_.local->abort) : 0;
    begin_launch(team_, wg_);
    if (wg_.rank() == 0) shared_.takes_part = takes_part(team_, aborted);
    wg_.sync();
  }

  // Multiplies all tiles of the WG. No warp waits for another one's tile, except for a slot to be free again.
  PO_FN void compute(Config::Stream& stream) {
    const int warp_index = wg_.warp_index();
    if (warp_index >= num_parts_) return;
    const Warp warp;
    const auto num_slots = static_cast<int>(plan_.num_slots);
    for (int position = 0; position < tiles_.count; ++position) {
      const int slot = position % num_slots;
      const auto round = static_cast<uint64_t>(position / num_slots);
      if (round != 0) {
        for (uint32_t spins = 1; flag_load_acquire_wg(&shared_.sent[slot]) < round; ++spins) spin_pause(spins);
      }
      stream.multiply(vectors_, part_of(slot, warp_index));
      warp.sync();
      uint64_t arrived = 0;
      if (warp.rank() == 0) arrived = atomic_add_fetch_acq_rel_wg(&shared_.arrived[slot], 1);
      arrived = warp.shuffle(arrived, 0);
      warp.sync();
      if (arrived != (round + 1) * static_cast<uint64_t>(num_parts_)) continue;
      send(tiles_.tile_at(position), slot, warp);
      warp.sync();
      if (warp.rank() == 0) flag_store_release_wg(&shared_.sent[slot], round + 1);
    }
  }

  // Waits for what peers send of this WG's tiles, and finishes them. All threads, each with items of its own.
  PO_FN void receive() {
    if (team_.size == 1) return;
    const int num_own = Config::kTwoPhase ? tiles_.num_own() : tiles_.count;
    const int num_others = tiles_.count - num_own;
    for (int i = wg_.rank(); i < num_own * items_per_tile(); i += wg_.size()) {
      reduce_item(tiles_.tile_at(num_others + i / items_per_tile()), i % items_per_tile());
    }
    if constexpr (Config::kTwoPhase) {
      if (plan_.all_reachable == 0) put_results(num_others);
      // From the other end of the WG, so that waiting for a result does not hold up the items above.
      for (int i = wg_.size() - 1 - wg_.rank(); i < num_others * items_per_tile(); i += wg_.size()) {
        take_result(tiles_.tile_at(i / items_per_tile()), i % items_per_tile());
      }
    }
  }

 private:
  PO_FN int items_per_tile() const { return static_cast<int>(plan_.num_vectors) * Config::kItemsPerVector; }
  PO_FN int packets_per_tile() const { return items_per_tile() * Config::kPacketsPerItem; }
  PO_FN uint64_t parity() const { return team_.epoch % 2; }
  PO_FN bool is_near(int pe) const { return shared_.heaps[pe] != 0; }

  PO_FN float* part_of(int slot, int warp) const {
    return partials_ + (slot * num_parts_ + warp) * (Config::kVectors * kTileRows);
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
  PO_FN Packet* packet_at(int pe, uint64_t offset) const {
    return reinterpret_cast<Packet*>(shared_.heaps[pe] + offset);
  }

  // A warp that has seen all parts of a tile adds them up in the warps' order and sends the sums.
  PO_FN void send(int tile, int slot, const Warp& warp) {
    if (team_.size == 1) return finish_alone(tile, slot, warp);
    if (shared_.takes_part == 0) return;
    const int owner = RowTiles::owner_of(tile, team_.size);
    const uint64_t offset = partial_offset(team_.rank, tile);
    for (int q = warp.rank(); q < packets_per_tile(); q += warp.size()) {
      typename SumScalar::Storage sums[Config::kSumsPerPacket];
      PO_UNROLL
      for (int i = 0; i < Config::kSumsPerPacket; ++i) {
        sums[i] = SumScalar::from_float(sum_of_parts(slot, q * Config::kSumsPerPacket + i));
      }
      Packet packet;
      __builtin_memcpy(packet.data, sums, sizeof(packet.data));
      packet.flag = launch_flag(team_);
      for_each_receiver(owner, [&](int pe) {
        // What goes to a PE that is not reachable is put from this PE's own copy.
        packet_store_sys(packet_at(is_near(pe) ? pe : team_.rank, offset) + q, packet);
      });
    }
    warp.sync();
    if (warp.rank() == 0) {
      for_each_receiver(owner, [&](int pe) {
        if (!is_near(pe)) put_packets(pe, offset, packets_per_tile(), tile);
      });
    }
  }

  template <class Send>
  PO_FN void for_each_receiver(int owner, const Send& send) const {
    if constexpr (Config::kTwoPhase) {
      send(owner);
    } else {
      int pe = team_.rank;
      for (int hop = 0; hop < team_.size; ++hop) {
        pe = pe + 1 < team_.size ? pe + 1 : 0;
        send(pe);
      }
    }
  }

  // The network may tear a packet, so a sliceRdy word says when all have come. One thread, behind its warp's stores.
  PO_FN void put_packets(int pe, uint64_t offset, int count, int ready_index) const {
    put_nbi(team_, pe, offset, team_.heap + offset, static_cast<uint64_t>(count) * sizeof(Packet));
    put_fence(team_);
    signal(team_, pe, ready_word_offset(team_, team_.rank, static_cast<uint64_t>(ready_index)), launch_flag(team_));
  }

  PO_FN float sum_of_parts(int slot, int value) const {
    float sum = part_of(slot, 0)[value];
    for (int part = 1; part < num_parts_; ++part) sum += part_of(slot, part)[value];
    return sum;
  }

  PO_FN void finish_alone(int tile, int slot, const Warp& warp) {
    for (int item = warp.rank(); item < items_per_tile(); item += warp.size()) {
      float sums[Config::kItem];
      PO_UNROLL
      for (int i = 0; i < Config::kItem; ++i) {
        sums[i] = SumScalar::to_float(SumScalar::from_float(sum_of_parts(slot, item * Config::kItem + i)));
      }
      finish(tile, item, sums);
    }
  }

  // Adds up what all PEs sent of an item, in rank order, and finishes it; as its owner, tells the others.
  PO_FN void reduce_item(int tile, int item) {
    constexpr int kPacketsPerItem = Config::kPacketsPerItem;
    constexpr int kBatch = 4;  // senders whose packets are looked at together
    float sums[Config::kItem];
    bool is_there = true;
    for (int first = 0; first < team_.size && is_there; first += kBatch) {
      Packet packets[kBatch][kPacketsPerItem];
      PO_UNROLL
      for (int s = 0; s < kBatch; ++s) {
        const int sender = min_of(first + s, team_.size - 1);
        is_there = is_there && is_announced(sender, kPhasePartial, tile, tile);
        PO_UNROLL
        for (int p = 0; p < kPacketsPerItem; ++p) packets[s][p] = packet_load_sys(place(sender, tile, item, p), flag());
      }
      PO_UNROLL
      for (int s = 0; s < kBatch; ++s) {
        const int sender = first + s;
        if (sender >= team_.size) break;
        PO_UNROLL
        for (int p = 0; p < kPacketsPerItem; ++p) {
          is_there = is_there && await_packet(place(sender, tile, item, p), kPhasePartial, sender, tile, packets[s][p]);
          typename SumScalar::Storage values[Config::kSumsPerPacket];
          __builtin_memcpy(values, packets[s][p].data, sizeof(values));
          PO_UNROLL
          for (int i = 0; i < Config::kSumsPerPacket; ++i) {
            float& sum = sums[p * Config::kSumsPerPacket + i];
            const float value = SumScalar::to_float(values[i]);
            sum = sender == 0 ? value : sum + value;
          }
        }
      }
    }
    if (!is_there) return poison(tile, item);
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

  PO_FN const Packet* place(int sender, int tile, int item, int p) const {
    return packet_at(team_.rank, partial_offset(sender, tile)) + item * Config::kPacketsPerItem + p;
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
    return await(team_, phase, sender, static_cast<uint64_t>(tile), [&](uint64_t* seen) {
      packet = packet_load_sys(place, flag());
      *seen = packet.flag;
      return packet.flag == flag();
    });
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
  Config::Stream::VectorsOf vectors_;
  float* partials_;
  int num_parts_;  // warps that have columns
};

struct Kernel {
  using Plan = gemv_all_reduce::Plan;
  using Call = gemv_all_reduce::Call;
  using Shared = gemv_all_reduce::Shared;
  static constexpr int kThreads = (PO_WARPS + 1) * 32;
  static constexpr int kBlocksPerSm = 1;
  static constexpr size_t kHostArenaBytes = 64ull * Config::kMaxSlots * Config::kVectors * kTileRows * sizeof(float);

  // The weights do not wait for the plan, nor, in a programmatic dependent launch, for the kernel that makes x.
  static PO_FN Config::Stream begin(const WorkGroup& wg, const Call& call) {
    const bool computes = Worker::computes(wg);
    RowTiles tiles = Worker::tiles(wg, call);
    if (!computes) tiles.count = 0;
    return {{call.weight, call.num_rows(), call.num_columns()},
            tiles,
            wg.arena(),
            wg.warp_index(),
            Worker::num_computing(wg)};
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, Config::Stream& stream) {
    Team& team = shared.plan.team;
    await_predecessor();
    Worker worker(wg, shared, call);
    worker.prepare();
    release_successor();
    const Warp warp;
    const bool serves_all = Worker::serves(wg) && wg.index() == 0;
    if (serves_all) grant_credit(team, warp, 0);
    if (Worker::serves(wg) && warp.rank() == 0) close_epoch(team, wg);
    if (Worker::computes(wg)) worker.compute(stream);
    if (serves_all) await_all_credits(team, warp);
    worker.receive();
    if (shared.plan.all_reachable == 0) put_quiet(team);  // the packets that were put are written again two epochs on
  }
};

}  // namespace po::gemv_all_reduce

PO_ENTRY(gemv_all_reduce, po::gemv_all_reduce::Kernel)
