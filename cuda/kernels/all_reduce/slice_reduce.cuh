// The sum by slices, for tensors whose time the links decide: packets to their owner and back, in places that many
// packets use in turn.
//
// A slice is a WG's: a block of each of its working warps. A step has a slice for each owner. WGs of the same number,
// one on each PE, work in turns. In turn t they send the elements of step t, add up step t - lag, and take the results
// of step t - 2 lag. A packet arrives by itself, like those of packet_reduce. Only the next packet at its place needs a
// word, one per peer and turn: the places that this WG has read are empty. The last warp of a WG, its keeper, awaits the
// peers' words and sends its own WG's; the other warps work on meanwhile (kernels/all_reduce.md, rows 3 and 4).
#pragma once

#include "kernels/all_reduce/bare_packets.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSlice = make_phase(kFirstPhase + 2);
// A PE that owes results or a word may itself wait for others, so missing elements are reported first.
inline constexpr Phase kPhaseTurn = make_phase(kFirstPhase + 3, 9);
inline constexpr int kMaxLag = 2;  // turns from a packet to its use, if it is put; otherwise 1
inline constexpr int kPlaces = 4;  // of a counterpart; more of them would not stay in the L2 cache
inline constexpr int kMaxSteps = (1 << kEpochShift) - 2 * kMaxLag;  // of a launch: turns are counted below the epoch
inline constexpr int kMaxSliceWgs = 1024;                           // the WGs' words have fixed places in every launch
inline constexpr int kPutWords = 2 * kPlaces;  // of a WG, if slices are put to it: of elements, of results
PO_CONSTANT(kPhaseSlice)
PO_CONSTANT(kPhaseTurn)
PO_CONSTANT(kPlaces)
PO_CONSTANT(kMaxSteps)
PO_CONSTANT(kMaxSliceWgs)
PO_CONSTANT(kPutWords)

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
  static constexpr int kBatch = 2;  // PEs whose packets are loaded together

  PO_FN SliceReduce(const Plan& plan, const Call& call, const WorkGroup& wg, bool takes_part, Turns& turns)
      : plan_(plan),
        team_(plan.team),
        call_(call),
        wg_(wg),
        output_(plan, call),
        turns_(turns),
        num_workers_(max_of(wg.num_warps() - 1, 1)),
        lag_(plan.all_reachable != 0 ? 1 : kMaxLag),  // @slices-lag
        num_steps_(steps()),
        has_given_up_(!takes_part) {}

  // `count_out`: called by the keeper, once the first turn has begun. A lone warp (host) is keeper and worker.
  template <class CountOut>
  PO_FN void run(const CountOut& count_out) {
    const bool keeps = wg_.warp_index() == wg_.num_warps() - 1;
    const bool works = wg_.warp_index() < num_workers_;
    PO_NO_UNROLL
    for (int turn = 0; turn < num_turns(); ++turn) {
      if (keeps) {
        await_turn(turn);
        hand_over(turns_.begun[turn % 2]);
        if (turn == 0) count_out();
        if (turn == num_steps_) release_successor();  // begins as the WGs of this launch end
      }
      if (works) work(turn);
      if (keeps && turn > 0) end_turn(turn - 1);
    }
    if constexpr (Traits::kNorms) {
      if (works) norm_through(num_steps_ - 1, true);
    }
  }

 private:
  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN int first_block(int step, int owner) const {
    return ((step * wg_.count() + wg_.index()) * team_.size + owner) * num_workers_;
  }
  // This warp's block of a slice; there may be none of that number.
  PO_FN int block(int step, int owner) const { return first_block(step, owner) + wg_.warp_index(); }

  // Number of steps in which this WG has blocks.
  PO_FN int steps() const {
    const int per_step = wg_.count() * team_.size * num_workers_;
    return ceil_div(max_of(call_.rows.num_blocks - first_block(0, 0), 0), per_step);
  }
  // Without steps: turn 0 alone, which awaits the peers' credit.
  PO_FN int num_turns() const { return num_steps_ == 0 ? 1 : num_steps_ + 2 * lag_; }

  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }
  PO_FN uint64_t slice_bytes() const { return static_cast<uint64_t>(num_workers_) * kBlockBytes; }

  // Offset, in every heap, of this WG's slice of a step with a PE: where the sender or the owner stores, or the source
  // of a put.
  PO_FN uint64_t slice_place(uint64_t area, int step, int pe) const {
    const int place = step % kPlaces;  // @slices-alternate
    return area + static_cast<uint64_t>((place * team_.size + pe) * wg_.count() + wg_.index()) * slice_bytes();
  }
  // Offset of a lane's packet in a slice.
  PO_FN uint64_t packet_place(uint64_t area, int step, int pe, int i) const {
    return slice_place(area, step, pe) + static_cast<uint64_t>(wg_.warp_index()) * kBlockBytes +
           static_cast<uint64_t>(Block::chunk_of(warp_, i)) * sizeof(BarePacket);
  }
  // Offset of the word that counts turns of a PE's WG.
  PO_FN uint64_t word(int pe) const {
    return plan_.turns_offset + static_cast<uint64_t>(pe * kMaxSliceWgs + wg_.index()) * sizeof(uint64_t);
  }
  // The same of what is put in a turn. Puts have no order, so elements and results of the last kPlaces turns have words
  // of their own.
  PO_FN uint64_t put_word(int pe, int turn, bool are_results) const {
    if constexpr (!kPuts) return word(pe);
    const int number = turn % kPlaces + (are_results ? kPlaces : 0);  // @put-words
    return word(pe) + static_cast<uint64_t>(number * team_.size * kMaxSliceWgs) * sizeof(uint64_t);
  }
  PO_FN int after(int hops) const {
    const int pe = team_.rank + hops;
    return pe < team_.size ? pe : pe - team_.size;
  }
  PO_FN ChunkPlace chunk(int step, int owner, int i) const {
    const int number = block(step, owner);
    return number < call_.rows.num_blocks ? output_.place(number, i) : ChunkPlace{};
  }

  // ---- turns ---------------------------------------------------------------------------------------------------------

  // From the turn that a word ends to the one that needs it: 2 or more (run).
  PO_FN int word_turns() const { return kPlaces - lag_; }
  // Whether a turn stores to places that were read before, word_turns() ago at the latest.
  PO_FN bool stores_again(int turn) const {
    return (turn >= kPlaces && turn < num_steps_) || (turn >= kPlaces + lag_ && turn < num_steps_ + lag_);
  }
  // Whether a PE waits for the end of a turn: a near one for places, another one for what is put.
  PO_FN bool is_told(int pe, int turn) const {
    const int then = turn + word_turns();
    return turn >= 0 && (is_near(pe) ? stores_again(then) : then < num_turns());
  }

  // The keeper: waits until this turn's places are empty, and what was put has come. Before the first turn: until the
  // peers have ended the previous launch, and have the same contract.
  PO_FN void await_turn(int turn) {
    if (!has_given_up_) {
      bool all = true;
      for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {  // a lane for each peer
        if (pe != team_.rank) all = may_begin(pe, turn) && all;
      }
      has_given_up_ = warp_.count(all) != warp_.size();
    }
    if (warp_.rank() == 0) turns_.is_missing[turn % 2] = has_given_up_ ? 1 : 0;
  }

  PO_FN bool may_begin(int pe, int turn) const {
    if (turn == 0) return await_credit(team_, pe);  // @slices-credit
    const int ended = turn - word_turns();
    if (!is_told(pe, ended)) return true;
    if constexpr (kPuts) {
      if (!is_near(pe))
        return await_turn(pe, put_word(pe, ended, false), ended) && await_turn(pe, put_word(pe, ended, true), ended);
    }
    return await_turn(pe, word(pe), ended);
  }

  PO_FN bool await_turn(int pe, uint64_t word, int ended) const {
    return await_step(team_, local_word(team_, word), static_cast<uint64_t>(ended) + 1, kPhaseTurn, pe,
                      static_cast<uint64_t>(wg_.index()));
  }

  // The keeper: signals the peers that this WG has ended a turn: the places that it has read are empty. Puts the turn's
  // slices to unreachable peers first.
  PO_FN void end_turn(int turn) const {
    turns_.ended[turn % 2].await(static_cast<uint32_t>(turn / 2));  // @turn-done
    // A worker that has given up in this turn has not filled what would be put. It has seen the abort, or set it.
    if (has_given_up_ || (has_far_peers(team_) && is_aborted(team_))) return;  // @slices-of-a-given-up-turn
    const uint64_t value = flag_value(team_.epoch, static_cast<uint64_t>(turn) + 1);
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || !is_told(pe, turn)) continue;
      if (is_near(pe)) {
        trace_send(pe, word(team_.rank));
        // @turn-release
        flag_store_release_sys(reinterpret_cast<uint64_t*>(plan_.heaps[pe] + word(team_.rank)), value);
        continue;
      }
      // A slice of elements for the peer, and one of results for all.
      const auto put_slice = [&](int step, int owner, uint64_t area, bool are_results) {
        const bool is_there = step >= 0 && first_block(step, owner) < call_.rows.num_blocks;
        put_signal(team_, pe, slice_place(area, step, team_.rank),
                   team_.heap + slice_place(plan_.staging_offset, step, owner), is_there ? slice_bytes() : 0,
                   put_word(team_.rank, turn, are_results), value);
      };
      if constexpr (kPuts) put_slice(turn - lag_, team_.rank, plan_.returned_offset, true);
      put_slice(turn, pe, plan_.slices_offset, false);
    }
  }

  // A worker: a turn, from its begin to its end. What this PE has itself is loaded before.
  PO_FN void work(int turn) {
    const Elements elements = load_elements(turn, 1);
    const Own own = load_own(turn - lag_);
    turns_.begun[turn % 2].await(static_cast<uint32_t>(turn / 2));  // @turn-begins
    has_given_up_ = has_given_up_ || turns_.is_missing[turn % 2] != 0;
    if (turn < num_steps_) send(turn, elements);  // @turn-send
    if (turn >= lag_ && turn < num_steps_ + lag_) reduce(turn - lag_, own);
    // While results are on their way. Most rows are whole one turn after their results were taken.
    if (Traits::kNorms && turn > 2 * lag_) norm_through(turn - 2 * lag_ - 1, false);
    if (turn >= 2 * lag_) take(turn - 2 * lag_);
    empty_places(plan_.slices_offset, turn - lag_);        // @elements-emptied
    empty_places(plan_.returned_offset, turn - 2 * lag_);  // @results-emptied
    if (plan_.all_reachable == 0) fence_acq_rel_sys();     // publishes each thread's stores to the network
    hand_over(turns_.ended[turn % 2]);
  }

  // ---- a step --------------------------------------------------------------------------------------------------------

  // Stores a packet to a PE, or to the source of the put to it. `copy`: of that source.
  PO_FN void send_packet(int pe, uint64_t area, int step, int i, int copy, const BarePacket& packet) const {
    const uint64_t place = is_near(pe) ? plan_.heaps[pe] + packet_place(area, step, team_.rank, i)
                                       : plan_.heaps[team_.rank] + packet_place(plan_.staging_offset, step, copy, i);
    bare_packet_store_sys(reinterpret_cast<BarePacket*>(place), packet);
  }

  // This PE's elements for kBatch owners.
  struct Elements {
    Chunks of[kBatch];
  };
  PO_FN Elements load_elements(int step, int first) const {
    Elements elements = {};
    for_each_chunk(step, first, [&](int k, int i, int, const ChunkPlace& at) {
      elements.of[k][i] = Block::load(call_.x, at.element, at.count);
    });
    return elements;
  }

  // Sends this PE's elements to their owners. `elements`: of the first ones.
  PO_FN void send(int step, Elements elements) const {
    if (has_given_up_) return;
    const TaskTrace trace(true);
    PO_NO_UNROLL
    for (int first = 1; first < team_.size;) {
      for_each_chunk(step, first, [&](int k, int i, int pe, const ChunkPlace&) {
        send_packet(pe, plan_.slices_offset, step, i, pe, bare_packet_of(elements.of[k][i]));
      });
      first += kBatch;
      elements = load_elements(step, first);
    }
  }

  // Calls use(k, i, owner, place) for this lane's chunks with kBatch owners, as of the one after `first` hops.
  template <class Use>
  PO_FN void for_each_chunk(int step, int first, const Use& use) const {
    PO_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      if (step >= num_steps_ || first + k >= team_.size) continue;
      const int owner = after(first + k);
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        const ChunkPlace at = chunk(step, owner, i);
        if (at.count != 0) use(k, i, owner, at);
      }
    }
  }

  // What this PE itself adds to its slice.
  struct Own {
    Chunks elements;
    typename Output::Addends addends[kLaneChunks];
  };
  PO_FN Own load_own(int step) const {
    Own own = {};
    if (step < 0 || step >= num_steps_) return own;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = chunk(step, team_.rank, i);
      if (at.count == 0) continue;
      own.elements[i] = Block::load(call_.x, at.element, at.count);
      own.addends[i] = output_.addends(at);
    }
    return own;
  }

  // Adds up all PEs' elements of the own slice, and sends the results to every PE.
  PO_FN void reduce(int step, const Own& own) {
    const TaskTrace trace(true);
    Chunks results = {};
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = chunk(step, team_.rank, i);
      float sums[Block::kElements];
      if (!add_up(step, i, at.count != 0, own.elements[i], sums)) {
        if (at.count != 0) output_.poison(at);
        continue;
      }
      if (at.count == 0) continue;
      const BarePacket packet = bare_packet_of(output_.finished(sums, own.addends[i]));
      PO_NO_UNROLL
      for (int hops = 1; hops < team_.size; ++hops) {
        send_packet(after(hops), plan_.returned_offset, step, i, team_.rank, packet);
      }
      results[i] = chunk_of(packet);
      output_.store(at, results[i]);
    }
    tell_squares(step, team_.rank, results);
  }

  // Adds in rank order; `own` comes at this PE's rank. Returns false if elements did not come.
  PO_FN bool add_up(int step, int i, bool is_there, const Chunk& own, float (&sums)[Block::kElements]) {
    PO_UNROLL
    for (float& sum : sums) sum = -0.0f;               // -0.0 changes nothing added to it, not even a zero's sign
    const Chunk sent = chunk_of(bare_packet_of(own));  // the elements as the other PEs receive them
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      BarePacket packets[kBatch] = {};
      const auto is_sent = [&](int) { return is_there; };
      if (!read_packets(kPhaseSlice, plan_.slices_offset, step, first, i, is_sent, packets)) return false;
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < team_.size) Block::add_to(sums, first + k == team_.rank ? sent : chunk_of(packets[k]));
      }
    }
    return true;
  }

  // Takes the other owners' results.
  PO_FN void take(int step) {
    const TaskTrace trace(false);
    const uint64_t returned = plan_.returned_offset;
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      Chunks results[kBatch] = {};
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        BarePacket packets[kBatch] = {};
        const auto is_sent = [&](int pe) { return chunk(step, pe, i).count != 0; };
        const bool is_whole = read_packets(kPhaseTurn, returned, step, first, i, is_sent, packets);  // @results-read
        PO_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          if (first + k >= team_.size || first + k == team_.rank) continue;
          const ChunkPlace at = chunk(step, first + k, i);
          if (at.count == 0) continue;
          results[k][i] = chunk_of(packets[k]);
          if (is_whole) {
            output_.store(at, results[k][i]);
          } else {
            output_.poison(at);
          }
        }
      }
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < team_.size && first + k != team_.rank) tell_squares(step, first + k, results[k]);
      }
    }
  }

  // Reads a lane's packets from kBatch PEs, as of `first`. `is_sent`: whether a PE sends one.
  template <class IsSent>
  PO_FN bool read_packets(Phase phase, uint64_t area, int step, int first, int i, const IsSent& is_sent,
                          BarePacket (&packets)[kBatch]) {
    if (has_given_up_) return false;
    BarePlaces<kBatch> at = {team_.heap + packet_place(area, step, first, i),
                             static_cast<uint64_t>(wg_.count()) * slice_bytes(),
                             nullptr,  // all have granted credit to this launch
                             0,
                             {},
                             static_cast<uint64_t>(wg_.index()),
                             0};
    PO_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const int pe = first + k;
      at.senders[k] = pe < team_.size && pe != team_.rank && is_sent(pe) ? pe : -1;
    }
    has_given_up_ = !await_bare_packets(team_, phase, at, false, packets);
    return !has_given_up_;
  }

  // Empties the places of a lane's packets from all PEs. Puts bring whole slices, so nothing may lie beside them either.
  PO_FN void empty_places(uint64_t area, int step) const {
    if (has_given_up_ || step < 0 || step >= num_steps_) return;
    PO_NO_UNROLL
    for (int hops = 1; hops < team_.size; ++hops) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        bare_packet_empty_sys(reinterpret_cast<BarePacket*>(team_.heap + packet_place(area, step, after(hops), i)));
      }
    }
  }

  PO_FN void tell_squares(int step, int owner, const Chunks& results) {
    const int number = block(step, owner);
    if (number < call_.rows.num_blocks) output_.tell_squares(number, results, !has_given_up_);
  }

  // Norms the remaining rows of the steps up to `last_step`. With `waits` it norms all of them; otherwise only rows
  // that need no waiting. Another WG may have to come to its next turn first, and its peers wait for it there.
  PO_FN void norm_through(int last_step, bool waits) {
    for (; norm_step_ <= last_step; ++norm_step_) {
      for (; norm_owner_ < team_.size; ++norm_owner_) {
        const int number = block(norm_step_, norm_owner_);
        if (!output_.norm(BlockBatch<1>{{number < call_.rows.num_blocks ? number : -1}}, waits, -1, {})) return;
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
  const int num_workers_;
  const int lag_;
  const int num_steps_;
  int norm_step_ = 0;  // the next block to norm: of this step, of this owner
  int norm_owner_ = 0;
  bool has_given_up_;  // of this thread: it sends and takes nothing any more
};

}  // namespace po::all_reduce
