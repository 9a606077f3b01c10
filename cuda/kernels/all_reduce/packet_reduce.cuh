// The sum by packets: data that is itself seen to be there, so nobody waits for credit or for a fence.
//
// One shot: a block's elements go to every PE, and each adds them up. Two shots: they go to the block's owner, which adds them
// up and sends every PE the results. Packets lie at (parity of the epoch, sender, block); kernels/all_reduce.md, rows 1 and 2.
// With a block's elements goes a flag, which says of which launch they are; results come only from who has met ours.
#pragma once

#include "kernels/all_reduce/bare_packets.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSums = make_phase(kFirstPhase);
// Who owes a result may itself wait for others: whose elements are missing should be told first.
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

  PO_FN PacketReduce(const Plan& plan, const Call& call, const Worker& worker, bool takes_part)
      : plan_(plan), team_(plan.team), call_(call), worker_(worker), takes_part_(takes_part), output_(plan, call) {}

  // `held`: the elements of this warp's first block. `serve`: called when all is sent.
  template <class Serve>
  PO_FN void run(const Chunks& held, const Serve& serve) {
    for_each_block([&](int block) {
      if (!(kTwoShot && is_own(block))) send(block, elements(block, held));
    });
    serve();
    for_each_block([&](int block) {
      if (!kTwoShot || is_own(block)) reduce(block, elements(block, held));
    });
    if constexpr (kTwoShot) {
      for_each_block([&](int block) {
        if (!is_own(block)) take(block);
      });
    }
    if constexpr (Traits::kNorms) {
      for_each_block([&](int block) {
        const Chunks held[1] = {results_};
        output_.norm(block, 1, true, block == last_, held);
      });
    }
  }

 private:
  template <class Use>
  PO_FN void for_each_block(const Use& use) const {
    PO_NO_UNROLL
    for (int block = worker_.number; block < call_.rows.num_blocks(); block += worker_.count) use(block);
  }

  PO_FN Chunks elements(int block, const Chunks& held) const {
    return block == worker_.number ? held : Block::load_block(call_.x, call_.rows, warp_, block);
  }

  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int owner_of(int block) const { return RowBlocks::owner_of(block, worker_.num_wgs, team_.size); }
  PO_FN bool is_own(int block) const { return owner_of(block) == team_.rank; }
  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }

  // Of a block among those of all senders that are added up at the same PE.
  PO_FN int64_t sums_number(int sender, int block) const {
    const int share = kTwoShot ? team_.size : 1;
    return static_cast<int64_t>(sender) * ceil_div(call_.rows.num_blocks(), share) + block / share;
  }
  // Of a block's packets, in every heap.
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

  // A place of packets in every heap, and of this PE's copy, from which they are put to PEs that are not reachable.
  struct Places {
    uint64_t offset;
    uint64_t copy_offset;
  };
  PO_FN Places sums_places(int block) const { return {sums_offset(team_.rank, block), copy_offset(block)}; }
  PO_FN Places results_places(int block) const {
    return {results_offset(block), copy_offset(call_.rows.num_blocks() + block)};
  }
  PO_FN uint64_t copy_offset(int number) const {
    return plan_.copies_offset + static_cast<uint64_t>(number) * kBlockBytes;
  }

  // A lane's packets lie as its chunks do: a store of a warp fills lines.
  PO_FN uint64_t chunk_offset(int i) const {
    return static_cast<uint64_t>(Block::chunk_of(warp_, i)) * sizeof(BarePacket);
  }

  // ---- sending -------------------------------------------------------------------------------------------------------

  PO_FN void send_packet(int pe, const Places& places, int i, const BarePacket& packet) const {
    const uint64_t place = is_near(pe) ? plan_.heaps[pe] + places.offset : copy_of(places);
    bare_packet_store_sys(reinterpret_cast<BarePacket*>(place + chunk_offset(i)), packet);
  }
  PO_FN uint64_t copy_of(const Places& places) const { return plan_.heaps[team_.rank] + places.copy_offset; }

  // Blocks are put whole: where this launch sends nothing, nothing of an older one may go.
  PO_FN void send_none(const Places& places, int i) const {
    if (plan_.all_reachable != 0) return;
    bare_packet_empty_sys(reinterpret_cast<BarePacket*>(copy_of(places) + chunk_offset(i)));  // @none-is-put
  }

  PO_FN void send(int block, const Chunks& chunks) const {
    if (!takes_part_) return;  // @elements-take-part
    const TaskTrace trace(true);
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

  // Of this PE's elements of a block.
  template <class Use>
  PO_FN void for_each_adder(int block, const Use& use) const {
    if constexpr (kTwoShot) {
      use(owner_of(block));
    } else {
      for_each_peer(use);
    }
  }

  // The next PE first.
  template <class Use>
  PO_FN void for_each_peer(const Use& use) const {
    PO_NO_UNROLL
    for (int hop = 1; hop < team_.size; ++hop) {
      const int pe = team_.rank + hop;
      use(pe < team_.size ? pe : pe - team_.size);
    }
  }

  // Puts a block's packets, and their flag if they have one, to the PEs that are not reachable and wanted. All lanes.
  template <class Wants>
  PO_FN void put(const Places& places, int ready_index, uint64_t flag, const Wants& wants) const {
    fence_acq_rel_sys();  // each lane's packets are out for the network
    warp_.sync();         // @packets-of-lanes
    if (warp_.rank() != 0) return;
    for_each_peer([&](int pe) {
      if (is_near(pe) || !wants(pe)) return;
      if (flag != 0) signal(team_, pe, flag, packet_flag(team_));
      put_packets(team_, pe, places.offset, team_.heap + places.copy_offset, kBlockChunks, ready_index);
    });
  }

  // ---- waiting -------------------------------------------------------------------------------------------------------

  // A staged packet is read only behind its word: the network may still be writing it.
  PO_FN bool is_announced(int sender, Phase phase, int block, int ready_index) const {
    if (is_near(sender)) return true;  // @packets-behind-word
    const uint64_t* word = local_word(team_, ready_word_offset(team_, sender, static_cast<uint64_t>(ready_index)));
    return await_epoch(team_, word, phase, sender, static_cast<uint64_t>(block), has_given_up_);
  }

  PO_FN bool are_announced(int block) const {
    if (plan_.all_reachable != 0) return true;
    bool all = true;
    for_each_peer([&](int pe) { all = is_announced(pe, kPhaseSums, block, block) && all; });
    return all;
  }

  static PO_FN Chunk chunk_of(const BarePacket& packet) {
    Chunk chunk;
    __builtin_memcpy(&chunk, &packet, sizeof(chunk));
    return chunk;
  }

  // ---- receiving -----------------------------------------------------------------------------------------------------

  // Adds up a block in rank order and finishes it; as its owner, tells the others. `own`: this PE's elements.
  PO_FN void reduce(int block, const Chunks& own) {
    const TaskTrace trace(kTwoShot);
    bool is_whole = true;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = output_.place(block, i);
      if (kTwoShot && takes_part_) send_none(results_places(block), i);
      if (at.count == 0) continue;
      const auto addends = output_.addends(at);  // on their way while the packets are
      float sums[Block::kElements];
      // Behind an aborted launch anything may lie there.
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
    // Where chunks failed nothing is put, as nothing lies there.
    if (kTwoShot && takes_part_ && plan_.all_reachable == 0) {  // @put-takes-part
      put(results_places(block), call_.rows.num_blocks() + block, 0, [](int) { return true; });
    }
    last_ = block;
    output_.tell_squares(block, results_, is_whole);
  }

  PO_FN bool add_up(int block, int i, const Chunk& own, float (&sums)[Block::kElements]) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_UNROLL
    for (float& sum : sums) sum = -0.0f;  // changes nothing that is added to it, not even a zero's sign
    const uint64_t stride = sums_offset(1, 0) - sums_offset(0, 0);
    const uint64_t flag_stride = flag_offset(1, 0) - flag_offset(0, 0);
    const Chunk sent = chunk_of(bare_packet_of(own));  // what the others have of it
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      const int count = min_of(kBatch, team_.size - first);
      BarePacket packets[kBatch] = {};
      const BarePlaces at = {team_.heap + sums_offset(first, block) + chunk_offset(i), stride,
                             team_.heap + flag_offset(first, block), flag_stride};
      if (!take_bare_packets(team_, at, kPhaseSums, first, count, team_.rank, static_cast<uint64_t>(block),
                             has_given_up_, packets)) {
        return false;
      }
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (k < count) Block::add_to(sums, first + k == team_.rank ? sent : chunk_of(packets[k]));
      }
    }
    return true;
  }

  // Takes the results that a block's owner sent.
  PO_FN void take(int block) {
    const TaskTrace trace(false);
    const int owner = owner_of(block);
    bool is_whole = true;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = output_.place(block, i);
      if (at.count == 0) continue;
      BarePacket packets[1] = {};
      const BarePlaces from = {team_.heap + results_offset(block) + chunk_offset(i), 0, nullptr, 0};
      const int ready_index = call_.rows.num_blocks() + block;
      if (!takes_part_ || !is_announced(owner, kPhaseResult, block, ready_index) ||
          !take_bare_packets(team_, from, kPhaseResult, owner, 1, team_.rank, static_cast<uint64_t>(block),
                             has_given_up_, packets)) {
        has_given_up_ = true;
        is_whole = false;
        output_.poison(at);
        continue;
      }
      results_[i] = chunk_of(packets[0]);
      output_.store(at, results_[i]);
    }
    last_ = block;
    output_.tell_squares(block, results_, is_whole);
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Worker worker_;
  const bool takes_part_;
  Output output_;
  const Warp warp_{};
  Chunks results_ = {};        // of the last block that was finished
  int last_ = -1;              // which one that was
  bool has_given_up_ = false;  // of this thread: what is not there at its first look will not come
};

}  // namespace po::all_reduce
