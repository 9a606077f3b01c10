// The sum by slices, for what is bound by the links: elements without flags beside them, each once to its owner and back.
//
// A slice is kVectors blocks. In a step a warp has a slice for each owner, and in every heap one place for each counterpart: it
// stores its elements of a slice into the owner's place and tells it how far it has come; the owner adds up what the others
// have left with it, and stores the results into all PEs' places; from there they go to the output. The next step uses the same
// places, and what comes back is what says that they are free (cuda/DESIGN.md, rows 31 and 32).
#pragma once

#include "comm/launch.cuh"
#include "kernels/all_reduce/block_output.cuh"

namespace po::all_reduce {

inline constexpr Phase kPhaseSlice = make_phase(kFirstPhase + 2);
inline constexpr Phase kPhaseSliceResult = make_phase(kFirstPhase + 3, 9);
inline constexpr int kMaxSteps = (1 << kEpochShift) - 1;  // of a launch: they are counted below the epoch
PO_CONSTANT(kPhaseSlice)
PO_CONSTANT(kPhaseSliceResult)
PO_CONSTANT(kMaxSteps)
inline constexpr int kMaxWorkers = 4096;  // their words keep their places, whatever the launch
PO_CONSTANT(kMaxWorkers)

template <class Traits, class Plan, class Call>
class SliceReduce {
 public:
  using Output = BlockOutput<Traits, Plan, Call>;
  using Block = typename Traits::Block;
  using Chunk = typename Block::Chunk;
  using Chunks = typename Block::Chunks;
  static constexpr int kLaneChunks = Block::kLaneChunks;
  static constexpr int kVectors = Traits::kVectors;
  static constexpr uint64_t kSliceBytes = kVectors * kBlockBytes;

  PO_FN SliceReduce(const Plan& plan, const Call& call, const Worker& worker, bool takes_part)
      : plan_(plan), team_(plan.team), call_(call), worker_(worker), output_(plan, call), has_given_up_(!takes_part) {}

  // `meet`: called first.
  template <class Meet>
  PO_FN void run(const Meet& meet) {
    meet();
    if (worker_.number >= worker_.count) return;
    if (!has_given_up_) has_given_up_ = !have_granted();  // @slices-credit, without which nothing is stored
    PO_NO_UNROLL
    for (int step = 0; first_block(step, 0) < call_.rows.num_blocks(); ++step) {
      if (!has_given_up_) send(step);  // @step-send
      reduce(step);                    // @step-reduce
      take(step);
      // Most rows are whole a step later.
      if (Traits::kNorms && step > 0) norm_through(step - 1, false);
    }
    if constexpr (Traits::kNorms) norm_through(INT32_MAX, true);
  }

 private:
  // ---- places --------------------------------------------------------------------------------------------------------

  PO_FN bool is_near(int pe) const { return plan_.heaps[pe] != 0; }
  PO_FN int first_block(int step, int owner) const {
    return ((step * worker_.count + worker_.number) * team_.size + owner) * kVectors;
  }
  // Blocks of a slice.
  PO_FN int num_blocks(int step, int owner) const {
    return max_of(min_of(kVectors, call_.rows.num_blocks() - first_block(step, owner)), 0);
  }

  // Of this warp's place for a PE, in every heap: what a sender, or an owner, stores there; what is put to an owner.
  PO_FN uint64_t place(uint64_t area, int pe) const {
    return area + (static_cast<uint64_t>(pe) * static_cast<uint64_t>(plan_.max_workers) +
                   static_cast<uint64_t>(worker_.number)) *
                      kSliceBytes;
  }
  PO_FN uint64_t word(uint64_t words, int pe) const {
    return words + (static_cast<uint64_t>(pe) * kMaxWorkers + static_cast<uint64_t>(worker_.number)) * sizeof(uint64_t);
  }
  PO_FN Chunk* chunk_at(int pe, uint64_t offset, int v, int i) const {
    return reinterpret_cast<Chunk*>(plan_.heaps[pe] + offset) + v * kBlockChunks + Block::chunk_of(warp_, i);
  }

  // use(v, i, block, where) for this lane's chunks of a slice.
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

  template <class Use>
  PO_FN void for_each_peer(const Use& use) const {
    PO_NO_UNROLL
    for (int hop = 1; hop < team_.size; ++hop) {
      const int pe = team_.rank + hop;
      use(pe < team_.size ? pe : pe - team_.size);
    }
  }

  // ---- telling and waiting -------------------------------------------------------------------------------------------

  // A lane for each peer.
  template <class Use>
  PO_FN bool all_peers(const Use& use) const {
    bool all = true;
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe != team_.rank) all = use(pe) && all;
    }
    const int num_there = warp_.count(all);
    warp_.sync();  // what a lane has acquired is there for all
    return num_there == warp_.size();
  }

  PO_FN bool have_granted() const {
    return all_peers([&](int pe) { return await_credit(team_, pe); });
  }

  // Tells the peers for which `has` holds that this warp's stores of a step are in their places. To those that are not
  // reachable puts them first, from `source(pe)`. All lanes.
  template <class Has, class Source>
  PO_FN void tell(uint64_t words, uint64_t area, int step, const Has& has, const Source& source) const {
    const uint64_t value = flag_value(team_.epoch, static_cast<uint64_t>(step) + 1);
    if (plan_.all_reachable == 0) fence_acq_rel_sys();  // each lane's stores are out for the network
    warp_.sync();                                       // all lanes' stores are before the releases
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || !has(pe)) continue;
      if (is_near(pe)) {
        // @step-release
        flag_store_release_sys(reinterpret_cast<uint64_t*>(plan_.heaps[pe] + word(words, team_.rank)), value);
      } else {
        put_nbi(team_, pe, place(area, team_.rank), team_.heap + source(pe), kSliceBytes);
        put_fence(team_);  // @slices-fence
        signal(team_, pe, word(words, team_.rank), value);
      }
    }
  }

  template <class Has>
  PO_FN bool await_peers(uint64_t words, Phase phase, int step, const Has& has) const {
    return all_peers([&](int pe) {
      return !has(pe) || await_step(team_, local_word(team_, word(words, pe)), static_cast<uint64_t>(step) + 1, phase,
                                    pe, static_cast<uint64_t>(worker_.number));
    });
  }

  // ---- a step --------------------------------------------------------------------------------------------------------

  // This PE's elements to their owners.
  PO_FN void send(int step) const {
    for_each_peer([&](int pe) {
      Chunk chunks[kVectors][kLaneChunks];
      for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace& at) {
        chunks[v][i] = Block::load(call_.x, at.element, at.count);
      });
      // What goes to a PE that is not reachable is put from this PE's own memory.
      const bool is_stored = is_near(pe);
      const uint64_t offset = is_stored ? place(plan_.slices_offset, team_.rank) : place(plan_.staging_offset, pe);
      for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace&) {
        store_vector<kChunkBytes>(chunk_at(is_stored ? pe : team_.rank, offset, v, i), chunks[v][i]);
      });
    });
    tell(
        plan_.sent_offset, plan_.slices_offset, step, [&](int pe) { return num_blocks(step, pe) != 0; },
        [&](int pe) { return place(plan_.staging_offset, pe); });
  }

  // All PEs' elements of the own slice become results, on every PE.
  PO_FN void reduce(int step) {
    const int count = num_blocks(step, team_.rank);
    if (count == 0) return;
    const auto everybody = [](int) { return true; };
    // @slices-await
    if (has_given_up_ || !await_peers(plan_.sent_offset, kPhaseSlice, step, everybody)) {
      return give_up(step, team_.rank);
    }
    // All vectors side by side: what is loaded in turn waits for memory in turn.
    float sums[kVectors][kLaneChunks][Block::kElements];
    add_up(step, sums);
    typename Output::Addends addends[kVectors][kLaneChunks];
    for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) { addends[v][i] = output_.addends(at); });
    Chunks results[kVectors] = {};
    const uint64_t offset = place(plan_.returned_offset, team_.rank);
    for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) {
      results[v][i] = output_.finished(sums[v][i], addends[v][i]);
      for_each_peer([&](int pe) {
        store_vector<kChunkBytes>(chunk_at(is_near(pe) ? pe : team_.rank, offset, v, i), results[v][i]);
      });
      output_.store(at, results[v][i]);
    });
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (v < count) output_.tell_squares(first_block(step, team_.rank) + v, results[v], true);
    }
    tell(plan_.done_offset, plan_.returned_offset, step, everybody,
         [&](int) { return place(plan_.returned_offset, team_.rank); });
  }

  // In rank order, this PE's in its turn.
  PO_FN void add_up(int step, float (&sums)[kVectors][kLaneChunks][Block::kElements]) const {
    constexpr int kBatch = Traits::kSendersAtOnce;
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        PO_UNROLL
        for (float& sum : sums[v][i]) sum = -0.0f;  // changes nothing that is added to it, not even a zero's sign
      }
    }
    PO_NO_UNROLL
    for (int first = 0; first < team_.size; first += kBatch) {
      Chunks chunks[kBatch][kVectors] = {};
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        const int pe = first + k;
        if (pe >= team_.size) continue;
        for_each_chunk(step, team_.rank, [&](int v, int i, const ChunkPlace& at) {
          chunks[k][v][i] =
              pe == team_.rank
                  ? Block::load(call_.x, at.element, at.count)
                  : load_shared_vector<kChunkBytes>(chunk_at(team_.rank, place(plan_.slices_offset, pe), v, i));
        });
      }
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (first + k >= team_.size) continue;
        for_each_chunk(step, team_.rank,
                       [&](int v, int i, const ChunkPlace&) { Block::add_to(sums[v][i], chunks[k][v][i]); });
      }
    }
  }

  // The other owners' results.
  PO_FN void take(int step) {
    const auto has = [&](int pe) { return num_blocks(step, pe) != 0; };
    // @returned-await
    const bool is_there = !has_given_up_ && await_peers(plan_.done_offset, kPhaseSliceResult, step, has);
    for_each_peer([&](int pe) {
      if (!is_there) return give_up(step, pe);
      const int count = num_blocks(step, pe);
      Chunks results[kVectors] = {};
      for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace&) {
        const uint64_t offset = place(plan_.returned_offset, pe);
        results[v][i] = load_shared_vector<kChunkBytes>(chunk_at(team_.rank, offset, v, i));
      });
      for_each_chunk(step, pe, [&](int v, int i, const ChunkPlace& at) { output_.store(at, results[v][i]); });
      PO_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        if (v < count) output_.tell_squares(first_block(step, pe) + v, results[v], true);
      }
    });
  }

  PO_FN void give_up(int step, int owner) {
    has_given_up_ = true;
    for_each_chunk(step, owner, [&](int, int, const ChunkPlace& at) { output_.poison(at); });
  }

  // Norms what is left of the steps up to one. With `waits` all of it, else what needs no waiting: another warp may have to
  // come to its next step first, and wait for this one there.
  PO_FN void norm_through(int last_step, bool waits) {
    for (; norm_step_ <= last_step && first_block(norm_step_, 0) < call_.rows.num_blocks(); ++norm_step_) {
      for (; norm_index_ < team_.size * kVectors; ++norm_index_) {
        const int block = first_block(norm_step_, 0) + norm_index_;
        if (block < call_.rows.num_blocks() && !output_.norm(block, waits, false, {})) return;
      }
      norm_index_ = 0;
    }
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Worker worker_;
  Output output_;
  const Warp warp_{};
  int norm_step_ = 0;  // the next block to be normed: of this step, the one of this number
  int norm_index_ = 0;
  bool has_given_up_;  // nothing is sent or taken any more
};

}  // namespace po::all_reduce
