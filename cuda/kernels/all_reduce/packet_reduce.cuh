// The sum by packets. A packet needs no credit and no fence: the receiver sees from the packet itself that it has
// arrived.
//
// One shot: a block's elements go to every PE, and each PE adds them up. Two shots: they go to the block's owner, which
// adds them up and sends every PE the results. Packets lie at (parity of the epoch, sender, block);
// kernels/all_reduce.md, rows 1 and 2. A block's elements have a flag that names their launch. Results need none: they
// come only from an owner that has seen this PE's.
#pragma once

#include "kernels/all_reduce/bare_packets.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSums = make_phase(kFirstPhase);
// A PE that owes a result may itself wait for others, so missing elements are reported first.
inline constexpr Phase kPhaseResult = make_phase(kFirstPhase + 1, 9);
PO_CONSTANT(kPhaseSums)
PO_CONSTANT(kPhaseResult)

static_assert(sizeof(BarePacket) == kChunkBytes, "a chunk is a packet");

template <class Traits, class Plan, class Call>
class PacketReduce {
 public:
  using Output = BlockOutput<Traits, Plan, Call>;
  using Block = typename Traits::Block;
  using Chunk = typename Block::Chunk;
  using Chunks = typename Block::Chunks;
  static constexpr int kLaneChunks = Block::kLaneChunks;
  static constexpr bool kTwoShot = Traits::kAlgorithm == Algorithm::kTwoShot;
  static constexpr int kVectors = Traits::kVectors;
  using Batch = BlockBatch<kVectors>;

  PO_FN PacketReduce(const Plan& plan, const Call& call, const Worker& worker, bool takes_part)
      : plan_(plan), team_(plan.team), call_(call), worker_(worker), takes_part_(takes_part), output_(plan, call) {}

  // `held`: the elements of this warp's first block. `serve`: called after everything is sent.
  template <class Serve>
  PO_FN void run(const Chunks& held, const Serve& serve) {
    const auto is_sent = [&](int block) { return !kTwoShot || !is_own(block); };
    const auto is_added_up = [&](int block) { return !kTwoShot || is_own(block); };
    for_each_batch<kVectors>(is_sent, [&](const Batch& blocks) { send(blocks, held); });
    serve();
    for_each_batch<1>(is_added_up, [&](const BlockBatch<1>& block) { reduce(block[0], elements(block[0], held)); });
    if constexpr (kTwoShot) {
      for_each_batch<kVectors>(is_sent, [&](const Batch& blocks) { take(blocks); });
    }
    if constexpr (Traits::kNorms) {
      for_each_batch<kVectors>([](int) { return true; },
                               [&](const Batch& blocks) { output_.norm(blocks, true, last_, results_); });
    }
  }

 private:
  // Calls use(blocks) for the wanted ones of this warp's blocks, kCount at a time.
  template <int kCount, class Wants, class Use>
  PO_FN void for_each_batch(const Wants& wants, const Use& use) const {
    if constexpr (kCount == 1) {
      PO_NO_UNROLL
      for (int block = worker_.number; block < call_.rows.num_blocks; block += worker_.count) {
        if (wants(block)) use(BlockBatch<1>{{block}});
      }
      return;
    }
    int next = worker_.number;
    PO_NO_UNROLL
    for (;;) {
      BlockBatch<kCount> blocks;
      PO_UNROLL
      for (int v = 0; v < kCount; ++v) {
        PO_NO_UNROLL
        while (next < call_.rows.num_blocks && !wants(next)) next += worker_.count;
        blocks[v] = next < call_.rows.num_blocks ? next : -1;
        next += worker_.count;
      }
      if (!blocks.has(0)) return;
      use(blocks);
    }
  }

  PO_FN Chunks elements(int block, const Chunks& held) const {
    return block == worker_.number ? held : Block::load_block(call_.x, call_.rows, warp_, block);
  }

  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int owner_of(int block) const { return RowBlocks::owner_of(block, plan_.num_wgs, plan_.size); }
  PO_FN bool is_own(int block) const { return owner_of(block) == team_.rank; }
  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }

  // Number of a block's place among the blocks of all senders that are added up at the same PE.
  PO_FN int64_t sums_number(int sender, int block) const {
    return sender * plan_.blocks_per_adder + (kTwoShot ? block / plan_.size : block);
  }
  // Offset of a block's packets, the same in every heap.
  PO_FN uint64_t sums_offset(int sender, int block) const {
    // @sums-areas
    return plan_.sums_offset + parity() * plan_.sums_bytes +
           static_cast<uint64_t>(sums_number(sender, block)) * kBlockBytes;
  }
  PO_FN uint64_t flag_offset(int sender, int block) const {
    return plan_.flags_offset + parity() * plan_.flags_bytes +
           static_cast<uint64_t>(sums_number(sender, block)) * sizeof(uint64_t);
  }
  PO_FN uint64_t results_offset(int block) const {
    // @results-areas
    return plan_.results_offset + parity() * plan_.results_bytes + static_cast<uint64_t>(block) * kBlockBytes;
  }
  PO_FN uint64_t parity() const { return team_.epoch % 2; }

  // A place of packets in every heap, and in this PE's copy, from which packets are put to PEs that are not reachable.
  struct Places {
    uint64_t offset;
    uint64_t copy_offset;
  };
  PO_FN Places sums_places(int block) const { return {sums_offset(team_.rank, block), copy_offset(block)}; }
  PO_FN Places results_places(int block) const {
    return {results_offset(block), copy_offset(call_.rows.num_blocks + block)};
  }
  PO_FN uint64_t copy_offset(int number) const {
    uint64_t offset = plan_.copies_offset + static_cast<uint64_t>(number) * kBlockBytes;
    if constexpr (kPuts) offset += parity() * (plan_.sums_bytes + plan_.results_bytes);  // @copies-alternate
    return offset;
  }

  // A lane's packets lie as its chunks do, so that a warp's stores fill lines.
  PO_FN uint64_t chunk_offset(int i) const {
    return static_cast<uint64_t>(Block::chunk_of(warp_, i)) * sizeof(BarePacket);
  }

  // ---- sending -------------------------------------------------------------------------------------------------------

  PO_FN void send_packet(int pe, const Places& places, int i, const BarePacket& packet) const {
    const uint64_t place = is_near(pe) ? plan_.heaps[pe] + places.offset : copy_of(places);
    bare_packet_store_sys(reinterpret_cast<BarePacket*>(place + chunk_offset(i)), packet);
  }
  PO_FN uint64_t copy_of(const Places& places) const { return plan_.heaps[team_.rank] + places.copy_offset; }

  // Puts send whole blocks. Where this launch sends nothing, no packet of an older launch may leave.
  PO_FN void send_none(const Places& places, int i) const {
    if (plan_.all_reachable != 0) return;
    bare_packet_empty_sys(reinterpret_cast<BarePacket*>(copy_of(places) + chunk_offset(i)));  // @none-is-put
  }

  PO_FN void send(const Batch& blocks, const Chunks& held) const {
    if (!takes_part_) return;  // @elements-take-part
    const TaskTrace trace(true);
    Chunks loaded[kVectors];
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (blocks.has(v)) loaded[v] = elements(blocks[v], held);
    }
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (blocks.has(v)) send_block(blocks[v], loaded[v]);
    }
  }

  PO_FN void send_block(int block, const Chunks& chunks) const {
    const Places places = sums_places(block);
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      if (output_.place(block, i).count == 0) {
        send_none(places, i);
        continue;
      }
      const BarePacket packet = bare_packet_of(chunks[i]);
      for_each_adder(block, [&](int pe) { send_packet(pe, places, i, packet); });
    }
    const uint64_t flag = flag_offset(team_.rank, block);
    if (warp_.rank() == 0) {
      for_each_adder(block, [&](int pe) {
        if (is_near(pe))
          flag_store_relaxed_sys(reinterpret_cast<uint64_t*>(plan_.heaps[pe] + flag), packet_flag(team_));
      });
    }
    if (plan_.all_reachable != 0) return;
    put(places, block, flag, [&](int pe) { return !kTwoShot || pe == owner_of(block); });
  }

  // Calls `use` with this PE's elements of a block.
  template <class Use>
  PO_FN void for_each_adder(int block, const Use& use) const {
    if constexpr (kTwoShot) {
      use(owner_of(block));
    } else {
      for_each_peer(use);
    }
  }

  // The next PE comes first.
  template <class Use>
  PO_FN void for_each_peer(const Use& use) const {
    PO_NO_UNROLL
    for (int hop = 1; hop < team_.size; ++hop) {
      const int pe = team_.rank + hop;
      use(pe < team_.size ? pe : pe - team_.size);
    }
  }

  // Puts a block's packets, and their flag if they have one, to the wanted PEs that are not reachable. All lanes.
  template <class Wants>
  PO_FN void put(const Places& places, int ready_index, uint64_t flag, const Wants& wants) const {
    fence_acq_rel_sys();  // publishes each lane's packets to the network
    warp_.sync();         // @packets-of-lanes
    if (warp_.rank() != 0) return;
    for_each_peer([&](int pe) {
      if (is_near(pe) || !wants(pe)) return;
      if (flag != 0) signal(team_, pe, flag, packet_flag(team_));
      put_packets(team_, pe, places.offset, team_.heap + places.copy_offset, kBlockChunks, ready_index);
    });
  }

  // ---- waiting -------------------------------------------------------------------------------------------------------

  // A staged packet is read only after its word has come: the network may still be writing the packet.
  PO_FN bool is_announced(int sender, Phase phase, int block, int ready_index) const {
    if (is_near(sender)) return true;  // @packets-behind-word
    const uint64_t* word = local_word(team_, packets_word_offset(team_, sender, ready_index));
    return await_epoch(team_, word, phase, sender, static_cast<uint64_t>(block), has_given_up_);
  }

  PO_FN bool are_announced(int block) const {
    if (plan_.all_reachable != 0) return true;
    bool all = true;
    for_each_peer([&](int pe) { all = is_announced(pe, kPhaseSums, block, block) && all; });
    return all;
  }

  // ---- receiving -----------------------------------------------------------------------------------------------------

  // Adds up a block in rank order and finishes it; as the block's owner, sends the results to the others. `own`: this
  // PE's elements.
  PO_FN void reduce(int block, const Chunks& own) {
    const TaskTrace trace(kTwoShot);
    bool is_whole = true;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = output_.place(block, i);
      if (kTwoShot && takes_part_) send_none(results_places(block), i);
      if (at.count == 0) continue;
      const auto addends = output_.addends(at);  // loaded while the packets are awaited
      float sums[Block::kElements];
      // After an aborted launch anything may lie there.
      if (!takes_part_ || !are_announced(block) || !add_up(block, i, own[i], sums)) {
        has_given_up_ = true;
        is_whole = false;
        output_.poison(at);
        continue;
      }
      const BarePacket packet = bare_packet_of(output_.finished(sums, addends));
      results_[i] = chunk_of(packet);
      if (kTwoShot && takes_part_) {
        for_each_peer([&](int pe) { send_packet(pe, results_places(block), i, packet); });
      }
      output_.store(at, results_[i]);
    }
    // If chunks failed nothing is put, since their places hold nothing.
    if (kTwoShot && takes_part_ && plan_.all_reachable == 0) {  // @put-takes-part
      put(results_places(block), call_.rows.num_blocks + block, 0, [](int) { return true; });
    }
    last_ = block;
    output_.tell_squares(block, results_, is_whole);
  }

  PO_FN bool add_up(int block, int i, const Chunk& own, float (&sums)[Block::kElements]) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_UNROLL
    for (float& sum : sums) sum = -0.0f;  // -0.0 changes nothing added to it, not even a zero's sign
    const uint64_t stride = sums_offset(1, 0) - sums_offset(0, 0);
    const uint64_t flag_stride = flag_offset(1, 0) - flag_offset(0, 0);
    const Chunk sent = chunk_of(bare_packet_of(own));  // the elements as the other PEs receive them
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      BarePlaces<kBatch> at = {team_.heap + sums_offset(first, block) + chunk_offset(i),
                               stride,
                               team_.heap + flag_offset(first, block),
                               flag_stride,
                               {},
                               static_cast<uint64_t>(block),
                               0};
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        at.senders[k] = first + k < team_.size && first + k != team_.rank ? first + k : -1;
      }
      BarePacket packets[kBatch] = {};
      if (!take_bare_packets(team_, kPhaseSums, at, has_given_up_, packets)) return false;
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < team_.size) Block::add_to(sums, first + k == team_.rank ? sent : chunk_of(packets[k]));
      }
    }
    return true;
  }

  // Takes the results that the blocks' owners have sent.
  PO_FN void take(const Batch& blocks) {
    const TaskTrace trace(false);
    Chunks results[kVectors] = {};
    bool is_whole = true;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const auto stride = static_cast<uint64_t>(blocks[kVectors - 1] - blocks[0]);  // to the second block, if any
      BarePlaces<kVectors> from = {team_.heap + results_offset(blocks[0]) + chunk_offset(i),
                                   stride * kBlockBytes,
                                   nullptr,
                                   0,
                                   {},
                                   static_cast<uint64_t>(blocks[0]),
                                   stride};
      ChunkPlace at[kVectors] = {};
      bool is_there = takes_part_;
      PO_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        from.senders[v] = -1;
        if (!blocks.has(v)) continue;
        at[v] = output_.place(blocks[v], i);
        if (at[v].count == 0) continue;
        from.senders[v] = owner_of(blocks[v]);
        const int ready_index = call_.rows.num_blocks + blocks[v];
        is_there = is_there && is_announced(from.senders[v], kPhaseResult, blocks[v], ready_index);
      }
      BarePacket packets[kVectors] = {};
      is_there = is_there && take_bare_packets(team_, kPhaseResult, from, has_given_up_, packets);
      PO_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        if (at[v].count == 0) continue;
        if (is_there) {
          results[v][i] = chunk_of(packets[v]);
          output_.store(at[v], results[v][i]);
        } else {
          has_given_up_ = true;
          is_whole = false;
          output_.poison(at[v]);
        }
      }
    }
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (!blocks.has(v)) continue;
      last_ = blocks[v];
      results_ = results[v];
      output_.tell_squares(last_, results_, is_whole);
    }
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Worker worker_;
  const bool takes_part_;
  Output output_;
  const Warp warp_{};
  Chunks results_ = {};        // of the last finished block
  int last_ = -1;              // the number of that block
  bool has_given_up_ = false;  // of this thread: packets that are not there at its first look will not come
};

}  // namespace po::all_reduce
