// The sum by packets, while it is small: data and flag in one store, so nobody waits for credit or for a fence.
//
// One shot: a block's elements go to every PE, and each adds them up. Two shots: they go to the block's owner, which adds them
// up and sends every PE the results. Packets lie at (parity of the epoch, sender, block); kernels/all_reduce.md, rows 1 and 2.
#pragma once

#include "comm/packets.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSums = make_phase(kFirstPhase);
// Who owes a result may itself wait for others: whose elements are missing should be told first.
inline constexpr Phase kPhaseResult = make_phase(kFirstPhase + 1, 9);
PO_CONSTANT(kPhaseSums)
PO_CONSTANT(kPhaseResult)

inline constexpr int kPacketsPerChunk = kChunkBytes / 8;
inline constexpr int kBlockPackets = kBlockChunks * kPacketsPerChunk;
inline constexpr int kBlockPacketBytes = kBlockPackets * static_cast<int>(sizeof(Packet));
PO_CONSTANT(kBlockPacketBytes)

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

  // Of a block's packets, in every heap.
  PO_FN uint64_t sums_offset(int sender, int block) const {
    const int64_t number = static_cast<int64_t>(sender) * call_.rows.num_blocks() + block;
    // @sums-areas
    return plan_.sums_offset + parity() * plan_.sums_bytes + static_cast<uint64_t>(number) * kBlockPacketBytes;
  }
  PO_FN uint64_t results_offset(int block) const {
    // @results-areas
    return plan_.results_offset + parity() * plan_.results_bytes + static_cast<uint64_t>(block) * kBlockPacketBytes;
  }
  PO_FN uint64_t parity() const { return team_.epoch % 2; }

  // A chunk's first packet; the second one lies kBlockChunks behind it, so that lanes that store side by side fill lines.
  PO_FN Packet* packet_at(int pe, uint64_t offset, int i) const {
    return reinterpret_cast<Packet*>(plan_.heaps[pe] + offset) + Block::chunk_of(warp_, i);
  }

  // ---- sending -------------------------------------------------------------------------------------------------------

  // To a PE that is not reachable what is put from this PE's own copy goes.
  PO_FN void send_chunk(int pe, uint64_t offset, int i, const Chunk& chunk) const {
    Packet* place = packet_at(is_near(pe) ? pe : team_.rank, offset, i);
    PO_UNROLL
    for (int q = 0; q < kPacketsPerChunk; ++q) {
      packet_store_sys(place + q * kBlockChunks, {{chunk.words[2 * q], chunk.words[2 * q + 1]}, packet_flag(team_)});
    }
  }

  PO_FN void send(int block, const Chunks& chunks) const {
    if (!takes_part_) return;  // @elements-take-part
    const TaskTrace trace(true);
    const uint64_t offset = sums_offset(team_.rank, block);
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      if (output_.place(block, i).count == 0) continue;
      if constexpr (kTwoShot) {
        send_chunk(owner_of(block), offset, i, chunks[i]);
      } else {
        for_each_peer([&](int pe) { send_chunk(pe, offset, i, chunks[i]); });
      }
    }
    if (plan_.all_reachable != 0) return;
    put(offset, block, [&](int pe) { return !kTwoShot || pe == owner_of(block); });
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

  // Puts a block's packets to the PEs that are not reachable and wanted. All lanes.
  template <class Wants>
  PO_FN void put(uint64_t offset, int ready_index, const Wants& wants) const {
    fence_acq_rel_sys();  // each lane's packets are out for the network
    warp_.sync();         // @packets-of-lanes
    if (warp_.rank() != 0) return;
    for_each_peer([&](int pe) {
      if (!is_near(pe) && wants(pe)) put_packets(team_, pe, offset, kBlockPackets, ready_index);
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

  template <int kSenders>
  PO_FN bool take_packets(const Packet* place, uint64_t stride, Phase phase, int first_sender, int count, int block,
                          Packet (&packets)[kSenders][kPacketsPerChunk]) const {
    return await_packets<true, kBlockChunks>(team_, reinterpret_cast<const uint8_t*>(place), stride, phase,
                                             first_sender, count, static_cast<uint64_t>(block), has_given_up_, packets,
                                             team_.rank);
  }

  static PO_FN Chunk chunk_of(const Packet (&packets)[kPacketsPerChunk]) {
    Chunk chunk;
    PO_UNROLL
    for (int q = 0; q < kPacketsPerChunk; ++q) {
      chunk.words[2 * q] = packets[q].data[0];
      chunk.words[2 * q + 1] = packets[q].data[1];
    }
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
      if (at.count == 0) continue;
      const auto addends = output_.addends(at);  // on their way while the packets are
      float sums[Block::kElements];
      if (!are_announced(block) || !add_up(block, i, own[i], sums)) {
        has_given_up_ = true;
        is_whole = false;
        output_.poison(at);
        continue;
      }
      results_[i] = output_.finished(sums, addends);
      if (kTwoShot && takes_part_) {
        for_each_peer([&](int pe) { send_chunk(pe, results_offset(block), i, results_[i]); });
      }
      output_.store(at, results_[i]);
    }
    // Where chunks failed, older packets lie in their places: they are put, and as their flags are older nobody takes them.
    if (kTwoShot && takes_part_ && plan_.all_reachable == 0) {  // @put-takes-part
      put(results_offset(block), call_.rows.num_blocks() + block, [](int) { return true; });
    }
    last_ = block;
    output_.tell_squares(block, results_, is_whole);
  }

  PO_FN bool add_up(int block, int i, const Chunk& own, float (&sums)[Block::kElements]) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_UNROLL
    for (float& sum : sums) sum = -0.0f;  // changes nothing that is added to it, not even a zero's sign
    const uint64_t stride = sums_offset(1, 0) - sums_offset(0, 0);
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      const int count = min_of(kBatch, team_.size - first);
      Packet packets[kBatch][kPacketsPerChunk] = {};
      const Packet* place = packet_at(team_.rank, sums_offset(first, block), i);
      if (!take_packets(place, stride, kPhaseSums, first, count, block, packets)) return false;
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (k < count) Block::add_to(sums, first + k == team_.rank ? own : chunk_of(packets[k]));
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
      Packet packets[1][kPacketsPerChunk] = {};
      const Packet* place = packet_at(team_.rank, results_offset(block), i);
      const int ready_index = call_.rows.num_blocks() + block;
      if (!is_announced(owner, kPhaseResult, block, ready_index) ||
          !take_packets(place, 0, kPhaseResult, owner, 1, block, packets)) {
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
