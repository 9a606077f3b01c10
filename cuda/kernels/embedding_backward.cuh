// Backward of embedding_all_to_all together with the optimizer's step, one persistent launch: gradients travel to the tables'
// owners, those of a row are summed over the global batch, and the row is updated.
//
// Each PE has the gradient of its part of the batch, for all tables, and the lookups of the global batch in its own tables,
// sorted by row. Protocol: (1) WG 0 grants every peer credit to write this PE's staging, [table][batch][columns]. (2) The first
// WGs push: a table's columns of some samples to the table's owner, table by table, owners in turn; who has brought a table's
// last piece releases one sliceRdy word there. (3) Warps take ranges of the sorted lookups from a ticket counter, and have the
// rows whose lookups begin there. Before the first of them they await every peer's credit, before the first of a table its
// words. This PE's own samples are read where they are.
//
// A row's gradients are added in fp32 in the order of its lookups, 256 at a time, and these sums in their order: the same bits
// whatever the grid, the number of PEs, and who comes first.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "tile/row_block.cuh"

namespace po::embedding_backward {

enum class Step { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };
enum class Pooling { kSum, kWeightedSum, kMean };

struct Config {
  DType scalar = DType::kFloat32;
  Step step = Step::kSgd;
  Pooling pooling = Pooling::kSum;
  bool aligned = true;  // all rows of tables, gradient and staging begin at multiples of 16 bytes
  int threads = 256;
  int blocks_per_sm = 2;
};

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  using Block = RowBlock<Scalar, kConfig.aligned>;
  static constexpr Step kStep = kConfig.step;
  static constexpr Pooling kPooling = kConfig.pooling;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = kConfig.blocks_per_sm;
  static constexpr int kLookupsAtOnce = 4;  // whose gradients are loaded together
};

inline constexpr Phase kPhaseGradients = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseGradients)

inline constexpr int kChunkLookups = 256;                                  // of a run, that are added up by themselves
inline constexpr int kRangeLookups = kWarpSize * (PO_ON_DEVICE ? 1 : 32);  // of a ticket
enum DecayMode : int64_t { kNoDecay = 0, kL2 = 1, kDecoupled = 2 };
PO_CONSTANT(kNoDecay)
PO_CONSTANT(kL2)
PO_CONSTANT(kDecoupled)

// ---- arguments ------------------------------------------------------------------------------------------------------

// Rows that are updated together: a tensor, which may be several of this PE's tables.
struct Group {
  uint8_t* rows;
  float* state;   // [num_rows] or [num_rows, width]
  float* second;  // [num_rows, width]; Adam
  int64_t num_rows;
  int64_t width;  // elements
  int64_t first_key;
  int64_t first_member;
  int64_t num_members;
};
PO_DESCRIBE(Group, rows, state, second, num_rows, width, first_key, first_member, num_members)

struct Table {
  int64_t column;          // element of a row of this PE's gradient where its columns begin
  uint64_t staged_offset;  // of its gradients, from the staging's begin
};
PO_DESCRIBE(Table, column, staged_offset)

// A table's columns, as they go to its owner.
struct Push {
  int64_t owner;
  int64_t table;  // the owner's number of it
  int64_t width;
  int64_t column;
  uint64_t staged_offset;
  uint64_t outgoing_offset;  // in this PE's own heap, where the owner is not reachable
};
PO_DESCRIBE(Push, owner, table, width, column, staged_offset, outgoing_offset)

struct Plan {
  Team team;
  const Group* groups;
  const int64_t* members;  // tables of groups
  const Table* tables;
  const Push* pushes;
  int64_t num_groups;
  int64_t num_tables;
  int64_t num_pushes;
  int64_t slice_samples;  // of a piece that is pushed
  int64_t num_slices;
  int64_t pushing_wgs;
  uint64_t* pushed;  // [num_pushes]: pieces that are on their way; 0 after every launch
  const int64_t* batch_start;
  int64_t batch;
  int64_t row_elements;  // of this PE's gradient
  uint64_t staging_offset;
  float eps;
  float weight_decay;
  float beta1;
  float beta2;
  int64_t decay_mode;
};
PO_DESCRIBE(Plan, team, groups, members, tables, pushes, num_groups, num_tables, num_pushes, slice_samples, num_slices,
            pushing_wgs, pushed, batch_start, batch, row_elements, staging_offset, eps, weight_decay, beta1, beta2,
            decay_mode)

struct Call {
  const uint8_t* gradient;  // [samples of this PE, columns of all PEs]
  // Of the lookups in this PE's tables, sorted by key, which is a row of a group; those that are skipped have none's.
  const int64_t* keys;
  const int32_t* bags;     // table * batch + sample
  const int64_t* lookups;  // which it was before; for what follows
  const float* factors;
  float* factor_gradients;  // null: not wanted
  const float* counts;      // by bag: its lookups that are not skipped
  int64_t num_lookups;
  const float* rate;
  const float* scale;  // of gradients; null: 1
  float* steps;        // that have been made, and beta1 and beta2 to this power
};
PO_DESCRIBE(Call, gradient, keys, bags, lookups, factors, factor_gradients, counts, num_lookups, rate, scale, steps)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

// ---- pushing --------------------------------------------------------------------------------------------------------

// One warp of those that push.
template <class Traits>
class Pusher {
 public:
  using Block = typename Traits::Block;
  using Storage = typename Traits::Scalar::Storage;

  PO_FN Pusher(const Plan& plan, const Call& call) : plan_(plan), team_(plan.team), call_(call) {}

  PO_FN void run(int number, int count) {
    const int64_t num_tasks = plan_.num_pushes * plan_.num_slices;
    PO_NO_UNROLL
    for (int64_t task = number; task < num_tasks; task += count) {
      const TaskTrace trace(true);
      const Push& push = plan_.pushes[task / plan_.num_slices];
      if (!has_credit(static_cast<int>(push.owner))) return;
      copy(push, task % plan_.num_slices);
      finish(push, plan_.pushed + task / plan_.num_slices);
    }
  }

  // What was put from may be overwritten after this.
  PO_FN void complete_puts() const {
    if (has_put_) put_quiet(team_);  // @outgoing-quiet
  }

 private:
  // One lane decides for the warp: after an abort the lanes may see different credits.
  PO_FN bool has_credit(int owner) {
    if ((credited_ >> owner & 1) != 0) return true;  // @credit-before-pushes
    const bool granted = warp_.rank() == 0 ? await_credit(team_, owner) : false;
    if (!warp_.shuffle(granted, 0)) return false;
    warp_.sync();
    credited_ |= 1ull << owner;
    return true;
  }

  PO_FN int64_t num_samples() const { return plan_.batch_start[team_.rank + 1] - plan_.batch_start[team_.rank]; }
  PO_FN uint64_t row_bytes(const Push& push) const { return static_cast<uint64_t>(push.width) * sizeof(Storage); }
  // Of this PE's samples of a table, in the owner's staging.
  PO_FN uint64_t staged_offset(const Push& push) const {
    return plan_.staging_offset + push.staged_offset +
           static_cast<uint64_t>(plan_.batch_start[team_.rank]) * row_bytes(push);
  }

  PO_FN void copy(const Push& push, int64_t slice) const {
    const int64_t first = slice * plan_.slice_samples;
    const int64_t count = min_of(plan_.slice_samples, num_samples() - first);
    const auto owner = static_cast<int>(push.owner);
    uint8_t* target = is_reachable(team_, owner) ? peer_address(team_, owner, staged_offset(push))
                                                 : team_.heap + push.outgoing_offset;
    const int64_t per_row = ceil_div<int64_t>(push.width, Block::kElements);
    for (int64_t i = warp_.rank(); i < count * per_row; i += warp_.size()) {
      const int64_t sample = first + i / per_row;
      const int64_t element = i % per_row * Block::kElements;
      const int elements = static_cast<int>(min_of<int64_t>(Block::kElements, push.width - element));
      const auto chunk = Block::load(call_.gradient, sample * plan_.row_elements + push.column + element, elements);
      Block::store(target, sample * push.width + element, elements, chunk);
    }
  }

  // Counts a piece. Who brings the last one tells the owner.
  PO_FN void finish(const Push& push, uint64_t* pushed) {
    // @pieces-of-lanes
    warp_.sync();  // the pieces of all lanes are before the count
    if (warp_.rank() != 0) return;
    if (atomic_add_fetch_acq_rel_gpu(pushed, 1) != static_cast<uint64_t>(plan_.num_slices)) return;  // @table-pushed
    *pushed = 0;
    const auto owner = static_cast<int>(push.owner);
    if (!is_reachable(team_, owner)) {
      fence_acq_rel_sys();  // what all warps have copied, acquired through the count, is out for the network
      put_nbi(team_, owner, staged_offset(push), team_.heap + push.outgoing_offset,
              static_cast<uint64_t>(num_samples()) * row_bytes(push));
      put_fence(team_);  // @pushes-fence
      has_put_ = true;
    }
    signal(team_, owner, ready_word_offset(team_, team_.rank, static_cast<uint64_t>(push.table)), launch_flag(team_));
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Warp warp_{};
  uint64_t credited_ = 0;  // bit p: PE p has granted this epoch's credit
  bool has_put_ = false;
};

// ---- one row --------------------------------------------------------------------------------------------------------

// The lookups of one row, which lie side by side.
struct Run {
  int64_t begin;
  int64_t end;
  int64_t row;
  const Group* group;
};

template <class Traits>
class RowUpdate {
 public:
  using Scalar = typename Traits::Scalar;
  using Block = typename Traits::Block;
  using Chunk = typename Block::Chunk;
  static constexpr int kElements = Block::kElements;
  static constexpr int kLaneChunks = Block::kLaneChunks;
  static constexpr bool kIsWeighted = Traits::kPooling == Pooling::kWeightedSum;
  static constexpr bool kIsMean = Traits::kPooling == Pooling::kMean;
  static constexpr bool kIsRowwise = Traits::kStep == Step::kRowwiseAdagrad;

  PO_FN RowUpdate(const Plan& plan, const Call& call) : plan_(plan), call_(call) {
    rate_ = *call.rate;
    scale_ = call.scale == nullptr ? 1.0f : *call.scale;
    if constexpr (Traits::kStep == Step::kAdam) {
      correction1_ = 1 - rounded_product(call.steps[1], plan.beta1);
      correction2_ = 1 - rounded_product(call.steps[2], plan.beta2);
    }
  }

  PO_FN void update(const Run& run) const {
    if constexpr (kIsWeighted) {
      if (call_.factor_gradients != nullptr) differentiate_factors(run);
    }
    const int num_blocks = ceil_div(static_cast<int>(run.group->width), kBlockElements);
    Columns sums;
    float multiplier = 0.0f;
    if constexpr (kIsRowwise) {
      float squares = 0.0f;
      for (int block = 0; block < num_blocks; ++block) {
        add_up(run, block, sums);
        squares += squares_of(run, block, sums);
      }
      multiplier = row_rate(run, squares);
    }
    for (int block = 0; block < num_blocks; ++block) {
      if (!kIsRowwise || num_blocks > 1) add_up(run, block, sums);
      step(run, block, sums, multiplier);
    }
  }

 private:
  static constexpr int kBlockElements = kBlockChunks * kElements;

  // A lane's columns of a block.
  struct Columns {
    float values[kLaneChunks][kElements];
  };

  PO_FN int element_of(int block, int i) const {
    return block * kBlockElements + Block::chunk_of(warp_, i) * kElements;
  }
  // Of a chunk, that are columns.
  PO_FN int count_of(const Run& run, int element) const {
    return max_of(min_of(static_cast<int>(run.group->width) - element, kElements), 0);
  }

  // The gradient of the bag that a lookup is of, from this PE's own or from the staging.
  PO_FN Chunk gradient(const Run& run, int32_t bag, int element) const {
    const Team& team = plan_.team;
    const int64_t table = bag / plan_.batch;
    const int64_t sample = bag % plan_.batch;
    const int64_t own = sample - plan_.batch_start[team.rank];
    const int count = count_of(run, element);
    if (own >= 0 && sample < plan_.batch_start[team.rank + 1]) {
      return Block::load(call_.gradient, own * plan_.row_elements + plan_.tables[table].column + element, count);
    }
    const uint8_t* staged = team.heap + plan_.staging_offset + plan_.tables[table].staged_offset;
    return Block::load(staged, sample * run.group->width + element, count);
  }

  PO_FN void add_up(const Run& run, int block, Columns& totals) const {
    constexpr int kBatch = Traits::kLookupsAtOnce;
    totals = {};
    for (int64_t chunk = run.begin; chunk < run.end; chunk += kChunkLookups) {
      const int64_t chunk_end = min_of(chunk + kChunkLookups, run.end);
      Columns sums = {};
      PO_NO_UNROLL
      for (int64_t first = chunk; first < chunk_end; first += kBatch) {
        Chunk loaded[kBatch][kLaneChunks] = {};
        float factors[kBatch] = {};
        PO_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          if (first + k >= chunk_end) continue;
          const int32_t bag = call_.bags[first + k];
          if constexpr (kIsWeighted) factors[k] = call_.factors[call_.lookups[first + k]];
          if constexpr (kIsMean) factors[k] = call_.counts[bag];
          PO_UNROLL
          for (int i = 0; i < kLaneChunks; ++i) loaded[k][i] = gradient(run, bag, element_of(block, i));
        }
        PO_UNROLL
        for (int k = 0; k < kBatch; ++k) {
          if (first + k < chunk_end) add(loaded[k], factors[k], sums);
        }
      }
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        PO_UNROLL
        for (int e = 0; e < kElements; ++e) totals.values[i][e] += sums.values[i][e];
      }
    }
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      PO_UNROLL
      for (float& value : totals.values[i]) value *= scale_;
    }
  }

  static PO_FN void add(const Chunk (&chunks)[kLaneChunks], float factor, Columns& sums) {
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      float values[kElements];
      Block::to_floats(chunks[i], values);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        const float value = kIsWeighted ? rounded_product(values[e], factor) : kIsMean ? values[e] / factor : values[e];
        sums.values[i][e] += value;
      }
    }
  }

  // ---- the step ------------------------------------------------------------------------------------------------------

  PO_FN Chunk load_row(const Run& run, int element) const {
    return Block::load(run.group->rows, run.row * run.group->width + element, count_of(run, element));
  }

  // Of the block's columns, with weight decay where that is a part of the gradient; over the warp.
  PO_FN float squares_of(const Run& run, int block, const Columns& sums) const {
    float squares[kLaneChunks];
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      squares[i] = 0.0f;
      const int element = element_of(block, i);
      const int count = count_of(run, element);
      float rows[kElements] = {};
      if (plan_.decay_mode == kL2) Block::to_floats(load_row(run, element), rows);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        const float value =
            sums.values[i][e] + (plan_.decay_mode == kL2 ? rounded_product(plan_.weight_decay, rows[e]) : 0.0f);
        if (e < count) squares[i] += rounded_product(value, value);
      }
    }
    return tree_sum(warp_, squares);
  }

  // Adds to the row's state; returns by what its gradient is to be multiplied.
  PO_FN float row_rate(const Run& run, float squares) const {
    float* state = run.group->state + run.row;
    const float before = *state;
    warp_.sync();  // all lanes have read it
    const float sum = before + squares / static_cast<float>(run.group->width);
    if (warp_.rank() == 0) *state = sum;
    return rate_ / (square_root(sum) + plan_.eps);
  }

  PO_FN void step(const Run& run, int block, const Columns& sums, float multiplier) const {
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int element = element_of(block, i);
      const int count = count_of(run, element);
      if (count == 0) continue;
      const int64_t place = run.row * run.group->width + element;
      float rows[kElements];
      Block::to_floats(load_row(run, element), rows);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        if (e < count) rows[e] = stepped(run, place + e, rows[e], sums.values[i][e], multiplier);
      }
      Block::store(run.group->rows, place, count, Block::rounded(rows));
    }
  }

  PO_FN float stepped(const Run& run, int64_t place, float row, float gradient, float multiplier) const {
    if constexpr (Traits::kStep == Step::kSgd) return row - rounded_product(rate_, gradient);
    if constexpr (kIsRowwise) {
      const float decay = plan_.decay_mode == kNoDecay ? 0.0f
                          : plan_.decay_mode == kL2    ? rounded_product(multiplier, plan_.weight_decay)
                                                       : rounded_product(rate_, plan_.weight_decay);
      return rounded_product(1.0f - decay, row) - rounded_product(multiplier, gradient);
    }
    if constexpr (Traits::kStep == Step::kAdagrad) {
      float& state = run.group->state[place];
      state += rounded_product(gradient, gradient);
      return row - rounded_product(rate_, gradient) / (square_root(state) + plan_.eps);
    }
    if constexpr (Traits::kStep == Step::kAdam) {
      float& first = run.group->state[place];
      float& second = run.group->second[place];
      first = rounded_product(plan_.beta1, first) + rounded_product(1 - plan_.beta1, gradient);
      second =
          rounded_product(plan_.beta2, second) + rounded_product(rounded_product(1 - plan_.beta2, gradient), gradient);
      const float spread = square_root(second / correction2_) + plan_.eps;
      const float change = first / correction1_ / spread + rounded_product(plan_.weight_decay, row);
      return row - rounded_product(rate_, change);
    }
  }

  // Of each lookup: its bag's gradient times the row, before the row changes.
  PO_FN void differentiate_factors(const Run& run) const {
    PO_NO_UNROLL
    for (int64_t at = run.begin; at < run.end; ++at) {
      float total = 0.0f;
      for (int block = 0; block * kBlockElements < run.group->width; ++block) {
        float sums[kLaneChunks];
        PO_UNROLL
        for (int i = 0; i < kLaneChunks; ++i) {
          sums[i] = 0.0f;
          const int element = element_of(block, i);
          float rows[kElements];
          float gradients[kElements];
          Block::to_floats(load_row(run, element), rows);
          Block::to_floats(gradient(run, call_.bags[at], element), gradients);
          PO_UNROLL
          for (int e = 0; e < kElements; ++e) {
            if (e < count_of(run, element)) sums[i] += rounded_product(rows[e], gradients[e]);
          }
        }
        total += tree_sum(warp_, sums);
      }
      if (warp_.rank() == 0) call_.factor_gradients[call_.lookups[at]] = total;
    }
  }

  const Plan& plan_;
  const Call& call_;
  const Warp warp_{};
  float rate_;
  float scale_;
  float correction1_ = 1;
  float correction2_ = 1;
};

// ---- all rows -------------------------------------------------------------------------------------------------------

// One warp's share.
template <class Traits>
class Reducer {
 public:
  PO_FN Reducer(const Plan& plan, const Call& call) : plan_(plan), team_(plan.team), call_(call), row_(plan, call) {}

  PO_FN void run() {
    for (;;) {
      int32_t ticket = 0;
      if (warp_.rank() == 0) {
        ticket = static_cast<int32_t>(atomic_fetch_add_relaxed_gpu(&team_.local->ticket, 1));
      }
      const int64_t begin = int64_t{warp_.shuffle(ticket, 0)} * kRangeLookups;
      if (begin >= call_.num_lookups || !reduce(begin, min_of(begin + kRangeLookups, call_.num_lookups))) return;
    }
  }

 private:
  // The runs that begin there. Returns false where the launch was given up.
  PO_FN bool reduce(int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += warp_.size()) {
      const int64_t at = first + warp_.rank();
      const int64_t key = at < end ? call_.keys[at] : 0;
      const bool begins = at < end && (at == 0 || call_.keys[at - 1] != key);  // @run-begins
      for (int lane = 0; lane < warp_.size(); ++lane) {
        if (!warp_.shuffle(begins, lane)) continue;  // @begins-of-lanes
        const int64_t run_key = warp_.shuffle(key, lane);
        const int64_t number = group_of(run_key);
        const Group& group = plan_.groups[number];
        const int64_t row = run_key - group.first_key;
        if (row >= group.num_rows) continue;
        if (!is_ready(number)) return false;
        row_.update({first + lane, end_of(first + lane, run_key), row, &group});
      }
    }
    return true;
  }

  // The last one that begins at the key or before.
  PO_FN int64_t group_of(int64_t key) const {
    int64_t low = 0;
    int64_t high = plan_.num_groups;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plan_.groups[middle].first_key <= key ? low : high) = middle;
    }
    return low;
  }

  PO_FN int64_t end_of(int64_t begin, int64_t key) const {
    int64_t end = begin + 1;
    for (;;) {
      const int64_t at = end + warp_.rank();
      const int same = warp_.count(at < call_.num_lookups && call_.keys[at] == key);
      end += same;
      if (same != warp_.size()) return end;  // @run-ends
    }
  }

  // Whether all credits are here, and all gradients of a group's tables; waits for them.
  PO_FN bool is_ready(int64_t number) {
    if (number == ready_group_) return true;
    bool all = true;
    // @credits-before-updates
    if (ready_group_ < 0) {
      for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
        if (pe != team_.rank) all = await_credit(team_, pe) && all;
      }
    }
    const Group& group = plan_.groups[number];
    for (int64_t i = warp_.rank(); i < group.num_members * team_.size; i += warp_.size()) {
      const int64_t table = plan_.members[group.first_member + i / team_.size];
      const auto sender = static_cast<int>(i % team_.size);
      if (sender == team_.rank || plan_.batch_start[sender] == plan_.batch_start[sender + 1]) continue;
      const auto index = static_cast<uint64_t>(table);
      const uint64_t* word = local_word(team_, ready_word_offset(team_, sender, index));
      all = await_epoch(team_, word, kPhaseGradients, sender, index) && all;  // @gradients-await
    }
    if (warp_.count(all) != warp_.size()) return false;
    warp_.sync();  // what a lane has acquired is there for all
    ready_group_ = number;
    return true;
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const RowUpdate<Traits> row_;
  const Warp warp_{};
  int64_t ready_group_ = -1;
};

// The launch does not end before all that peers push is here, whether or not a row needs it: the next one may have other tables
// at these places, and credit for it says that nobody stores there any more.
PO_FN void await_all_gradients(const WorkGroup& wg, const Plan& plan) {
  const Team& team = plan.team;
  for (int64_t i = wg.rank(); i < plan.num_tables * team.size; i += wg.size()) {
    const auto sender = static_cast<int>(i % team.size);
    if (sender == team.rank || plan.batch_start[sender] == plan.batch_start[sender + 1]) continue;
    const auto table = static_cast<uint64_t>(i / team.size);
    const uint64_t* word = local_word(team, ready_word_offset(team, sender, table));
    if (!await_epoch(team, word, kPhaseGradients, sender, table)) return;
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <Config kConfig>
struct Kernel {
  using Traits = embedding_backward::Traits<kConfig>;
  using Plan = embedding_backward::Plan;
  using Call = embedding_backward::Call;
  using Shared = embedding_backward::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, 0);
    if (wg.index() < plan.pushing_wgs) {
      Pusher<Traits> pusher(plan, call);
      const auto pushing = static_cast<int>(plan.pushing_wgs);
      pusher.run(wg.warp_index() * pushing + wg.index(), wg.num_warps() * pushing);
      pusher.complete_puts();
    }
    if (call.num_lookups != 0) Reducer<Traits>(plan, call).run();
    if (wg.index() == 0) await_all_credits(plan.team, wg);
    if (wg.index() == 0) await_all_gradients(wg, plan);  // @all-gradients
    leave_launch(plan.team, wg, &shared.is_last, 0, 0);
    if (shared.is_last == 0 || wg.rank() != 0 || is_aborted(plan.team)) return;
    call.steps[0] += 1;  // behind all who read them
    call.steps[1] *= plan.beta1;
    call.steps[2] *= plan.beta2;
  }
};

}  // namespace po::embedding_backward
