// The sum by slices, for tensors whose time the links decide: elements travel without flags, once to their owner and
// back.
//
// A slice is a WG's: kVectors blocks of each of its working warps. A step has a slice for each owner. WGs of the same
// number, one on each PE, work in turns. In turn t they send the elements of step t, add up step t - kLag, and take the
// results of step t - 2 kLag. One word per peer ends a turn for all three. The last warp of a WG, its keeper, awaits the
// peers' words and sends its own WG's; the other warps go on with the next turn meanwhile, since that needs nothing that
// is younger than kLag turns (kernels/all_reduce.md, rows 3 and 4).
#pragma once

#include "comm/launch.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSlice = make_phase(kFirstPhase + 2);
inline constexpr int kLag = 2;                   // turns from a store to its use: 2 or more
inline constexpr int kStepsUnderWay = 2 * kLag;  // steps in flight, each with places of its own
inline constexpr int kMaxSteps =
    (1 << kEpochShift) - 2 * kLag;         // of a launch: turns are counted in the bits below the epoch
inline constexpr int kMaxSliceWgs = 1024;  // the WGs' words have fixed places in every launch
PO_CONSTANT(kPhaseSlice)
PO_CONSTANT(kStepsUnderWay)
PO_CONSTANT(kMaxSteps)
PO_CONSTANT(kMaxSliceWgs)

// What the warps of a WG hand to each other.
struct Turns {
  Handover begun[2];       // by the keeper; of even and odd turns
  Handover ended[2];       // by the other warps
  uint64_t is_missing[2];  // 1: a peer did not come to the turn

  // One thread; a sync of the WG must follow.
  PO_FN void start(const WorkGroup& wg) {
    for (int i = 0; i < 2; ++i) {
      begun[i].start(1);
      ended[i].start(max_of(wg.num_warps() - 1, 1));
    }
  }
};

template <class Traits, class Plan, class Call>
class SliceReduce {
 public:
  using Output = BlockOutput<Traits, Plan, Call>;
  using Block = typename Traits::Block;
  using Chunk = typename Block::Chunk;
  using Chunks = typename Block::Chunks;
  static constexpr int kLaneChunks = Block::kLaneChunks;
  static constexpr int kVectors = Traits::kVectors;

  PO_FN SliceReduce(const Plan& plan, const Call& call, const WorkGroup& wg, bool takes_part, Turns& turns)
      : plan_(plan),
        team_(plan.team),
        call_(call),
        wg_(wg),
        output_(plan, call),
        turns_(turns),
        is_alone_(wg.num_warps() == 1),
        has_given_up_(!takes_part) {}

  // `count_out`: called by the keeper, once the first turn has begun. A lone warp (host) is keeper and worker.
  template <class CountOut>
  PO_FN void run(const CountOut& count_out) {
    const int steps = num_steps();
    const int last_turn = steps == 0 ? 0 : steps - 1 + 2 * kLag;  // without steps: turn 0 alone, which awaits credit
    const bool keeps = wg_.warp_index() == wg_.num_warps() - 1;
    PO_NO_UNROLL
    for (int turn = 0; turn <= last_turn; ++turn) {
      if (keeps) {
        await_turn(turn);  // @turn-await
        hand_over(turns_.begun[turn % 2]);
        if (turn == 0) count_out();
      }
      if (!keeps || is_alone_) work(turn, steps);
      if (keeps && turn > 0) end_turn(turn - 1);
    }
    if constexpr (Traits::kNorms) {
      if (!keeps || is_alone_) norm_through(steps - 1, true);
    }
  }

 private:
  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int blocks_per_slice() const { return (is_alone_ ? 1 : wg_.num_warps() - 1) * kVectors; }
  PO_FN int first_block(int step, int owner, int warp) const {
    return ((step * wg_.count() + wg_.index()) * team_.size + owner) * blocks_per_slice() + warp * kVectors;
  }
  PO_FN int first_block(int step, int owner) const { return first_block(step, owner, wg_.warp_index()); }

  // Number of steps in which this WG has blocks.
  PO_FN int num_steps() const {
    const int per_step = wg_.count() * team_.size * blocks_per_slice();
    return ceil_div(max_of(call_.rows.num_blocks - first_block(0, 0, 0), 0), per_step);
  }

  // Number of this warp's blocks in a slice.
  PO_FN int num_blocks(int step, int owner) const {
    return max_of(min_of(kVectors, call_.rows.num_blocks - first_block(step, owner)), 0);
  }

  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }
  PO_FN uint64_t slice_bytes() const { return static_cast<uint64_t>(blocks_per_slice()) * kBlockBytes; }

  // Offset, in every heap, of this WG's slice of a step with a PE: where the sender or the owner stores, or the source
  // of a put.
  PO_FN uint64_t place(uint64_t area, int step, int pe) const {
    const int alternate = step % kStepsUnderWay;  // @slices-alternate
    return area + static_cast<uint64_t>((alternate * team_.size + pe) * wg_.count() + wg_.index()) * slice_bytes();
  }
  // Offset of the word that counts turns of a PE's WG.
  PO_FN uint64_t word(int pe) const {
    return plan_.turns_offset + static_cast<uint64_t>(pe * kMaxSliceWgs + wg_.index()) * sizeof(uint64_t);
  }
  PO_FN Chunk* chunk_at(int pe, uint64_t offset, int v, int i) const {
    return reinterpret_cast<Chunk*>(plan_.heaps[pe] + offset) + (wg_.warp_index() * kVectors + v) * kBlockChunks +
           Block::chunk_of(warp_, i);
  }

  // Calls use(v, i, place) for this lane's chunks of a slice.
  template <class Use>
  PO_FN void for_each_chunk(int step, int owner, const Use& use) const {
    const int first = first_block(step, owner);
    const int count = num_blocks(step, owner);
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        if (v >= count) continue;
        const ChunkPlace at = output_.place(first + v, i);
        if (at.count != 0) use(v, i, at);
      }
    }
  }

  // A lane's chunks of a slice.
  struct Slice {
    Chunks blocks[kVectors];
  };

  // Loads a slice for each peer with `load(pe, v, i, place)`, a few peers at a time, and passes them to use(pe, slice).
  template <class Load, class Use>
  PO_FN void for_each_peer(int step, const Load& load, const Use& use) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_NO_UNROLL
    for (int first = 1; first < team_.size; first += kBatch) {
      Slice slices[kBatch] = {};
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k >= team_.size) continue;
        const int pe = behind(first + k);
        for_each_chunk(step, pe,
                       [&](int v, int i, const ChunkPlace& at) { slices[k].blocks[v][i] = load(pe, v, i, at); });
      }
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < team_.size) use(behind(first + k), slices[k]);
      }
    }
  }
  PO_FN int behind(int hops) const {
    const int pe = team_.rank + hops;
    return pe < team_.size ? pe : pe - team_.size;
  }

  // ---- turns ---------------------------------------------------------------------------------------------------------

  // The keeper: waits until all peers have ended the turn kLag turns before. Before the first turn: the previous launch,
  // with the same contract.
  PO_FN void await_turn(int turn) {
    if (!has_given_up_) {
      bool all = true;
      for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {  // a lane for each peer
        if (pe != team_.rank) all = has_ended(pe, turn - kLag) && all;
      }
      has_given_up_ = warp_.count(all) != warp_.size();
    }
    if (warp_.rank() == 0) turns_.is_missing[turn % 2] = has_given_up_ ? 1 : 0;
  }

  PO_FN bool has_ended(int pe, int turn) const {
    if (turn == -kLag) return await_credit(team_, pe);  // @slices-credit
    if (turn < 0) return true;
    const uint64_t* ended = local_word(team_, word(pe));
    return await_step(team_, ended, static_cast<uint64_t>(turn) + 1, kPhaseSlice, pe,
                      static_cast<uint64_t>(wg_.index()));
  }

  // A worker: a turn, from its begin to its end.
  PO_FN void work(int turn, int steps) {
    turns_.begun[turn % 2].await(static_cast<uint32_t>(turn / 2));  // @turn-begins
    has_given_up_ = has_given_up_ || turns_.is_missing[turn % 2] != 0;
    if (turn >= 2 * kLag) take(turn - 2 * kLag);                   // @turn-take
    if (turn >= kLag && turn < steps + kLag) reduce(turn - kLag);  // @turn-reduce
    if (turn < steps) send(turn);                                  // @turn-send
    if (plan_.all_reachable == 0) fence_acq_rel_sys();             // publishes each thread's stores to the network
    hand_over(turns_.ended[turn % 2]);
    // Most rows are whole one turn after their results were taken.
    if (Traits::kNorms && turn > 2 * kLag) norm_through(turn - 2 * kLag - 1, false);
  }

  // The keeper: signals the peers that this WG has ended a turn: its stores are in their places, and it has read what lay
  // in its own places. Puts the turn's slices to unreachable peers first.
  PO_FN void end_turn(int turn) const {
    turns_.ended[turn % 2].await(static_cast<uint32_t>(turn / 2));  // @turn-done
    if (has_given_up_) return;
    const uint64_t value = flag_value(team_.epoch, static_cast<uint64_t>(turn) + 1);
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank) continue;
      if (is_near(pe)) {
        trace_send(pe, word(team_.rank));
        // @turn-release
        flag_store_release_sys(reinterpret_cast<uint64_t*>(plan_.heaps[pe] + word(team_.rank)), value);
        continue;
      }
      const auto put_slice = [&](int step, int owner, uint64_t target, uint64_t source) {
        if (step < 0 || first_block(step, owner, 0) >= call_.rows.num_blocks) return;
        put_nbi(team_, pe, place(target, step, team_.rank), team_.heap + source, slice_bytes());
      };
      put_slice(turn, pe, plan_.slices_offset, place(plan_.staging_offset, turn, pe));
      const int returned = turn - kLag;
      put_slice(returned, team_.rank, plan_.returned_offset, place(plan_.returned_offset, returned, team_.rank));
      put_fence(team_);  // @slices-fence
      signal(team_, pe, word(team_.rank), value);
    }
  }

  // ---- a step --------------------------------------------------------------------------------------------------------

  // Sends this PE's elements to their owners.
  PO_FN void send(int step) const {
    if (has_given_up_) return;
    const TaskTrace trace(true);
    for_each_peer(
        step, [&](int, int, int, const ChunkPlace& at) { return Block::load(call_.x, at.element, at.count); },
        [&](int pe, const Slice& slice) {
          // Elements for a PE that is not reachable are put from this PE's own memory.
          const bool is_stored = is_near(pe);
          const uint64_t offset =
              is_stored ? place(plan_.slices_offset, step, team_.rank) : place(plan_.staging_offset, step, pe);
          for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace&) {
            store_vector<kChunkBytes>(chunk_at(is_stored ? pe : team_.rank, offset, v, i), slice.blocks[v][i]);
          });
        });
  }

  // Adds up all PEs' elements of the own slice, and sends the results to every PE.
  PO_FN void reduce(int step) {
    if (has_given_up_) return poison(step, team_.rank);
    const TaskTrace trace(true);
    // All vectors together: loads one after the other would wait for memory one after the other.
    typename Output::Addends addends[kVectors][kLaneChunks];
    for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) { addends[v][i] = output_.addends(at); });
    float sums[kVectors][kLaneChunks][Block::kElements];
    add_up(step, sums);
    Slice results = {};
    const uint64_t offset = place(plan_.returned_offset, step, team_.rank);
    for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) {
      results.blocks[v][i] = output_.finished(sums[v][i], addends[v][i]);
      PO_NO_UNROLL
      for (int hops = 1; hops < team_.size; ++hops) {
        const int pe = is_near(behind(hops)) ? behind(hops) : team_.rank;
        store_vector<kChunkBytes>(chunk_at(pe, offset, v, i), results.blocks[v][i]);
      }
      output_.store(at, results.blocks[v][i]);
    });
    tell_squares(step, team_.rank, results);
  }

  // Adds in rank order; this PE's elements come at its rank.
  PO_FN void add_up(int step, float (&sums)[kVectors][kLaneChunks][Block::kElements]) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        PO_UNROLL
        for (float& sum : sums[v][i]) sum = -0.0f;  // -0.0 changes nothing added to it, not even a zero's sign
      }
    }
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      Slice slices[kBatch] = {};
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        const int pe = first + k;
        if (pe >= team_.size) continue;
        const uint64_t offset = place(plan_.slices_offset, step, pe);
        for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) {
          slices[k].blocks[v][i] = pe == team_.rank
                                       ? Block::load(call_.x, at.element, at.count)
                                       : load_shared_vector<kChunkBytes>(chunk_at(team_.rank, offset, v, i));
        });
      }
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k >= team_.size) continue;
        for_each_chunk(step, team_.rank,
                       [&](int v, int i, const ChunkPlace&) { Block::add_to(sums[v][i], slices[k].blocks[v][i]); });
      }
    }
  }

  // Takes the other owners' results.
  PO_FN void take(int step) {
    if (has_given_up_) {
      for (int hops = 1; hops < team_.size; ++hops) poison(step, behind(hops));
      return;
    }
    const TaskTrace trace(false);
    for_each_peer(
        step,
        [&](int pe, int v, int i, const ChunkPlace&) {
          const uint64_t offset = place(plan_.returned_offset, step, pe);
          return load_shared_vector<kChunkBytes>(chunk_at(team_.rank, offset, v, i));
        },
        [&](int pe, const Slice& slice) {
          for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace& at) { output_.store(at, slice.blocks[v][i]); });
          tell_squares(step, pe, slice);
        });
  }

  PO_FN void tell_squares(int step, int owner, const Slice& results) {
    const int count = num_blocks(step, owner);
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) output_.tell_squares(first_block(step, owner) + v, results.blocks[v], true);
    }
  }

  PO_FN void poison(int step, int owner) const {
    for_each_chunk(step, owner, [&](int, int, const ChunkPlace& at) { output_.poison(at); });
  }

  // Norms the remaining rows of the steps up to `last_step`. With `waits` it norms all of them; otherwise only rows
  // that need no waiting. Another WG may have to come to its next turn first, and its peers wait for it there.
  PO_FN void norm_through(int last_step, bool waits) {
    for (; norm_step_ <= last_step; ++norm_step_) {
      for (; norm_owner_ < team_.size; ++norm_owner_) {
        const int count = num_blocks(norm_step_, norm_owner_);
        BlockBatch<kVectors> blocks;
        PO_UNROLL
        for (int v = 0; v < kVectors; ++v) blocks[v] = v < count ? first_block(norm_step_, norm_owner_) + v : -1;
        if (!output_.norm(blocks, waits, -1, {})) return;
      }
      norm_owner_ = 0;
    }
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const WorkGroup& wg_;
  Output output_;
  const Warp warp_{};
  Turns& turns_;
  const bool is_alone_;
  int norm_step_ = 0;  // the next blocks to norm: of this step, of this owner
  int norm_owner_ = 0;
  bool has_given_up_;  // this WG sends and takes nothing any more
};

}  // namespace po::all_reduce
