// Fused embedding pooling + All-to-All in one persistent launch (the operator of the SC24 paper on fused
// computation-collective operations, sections III-A and III-B's zero-copy form).
//
// Each PE owns tables and holds the lookups of the global batch for them: side by side, or in a region per source PE as
// an input exchange has left them (already checked). Each PE receives the pooled rows of its part of the batch.
// Protocol: (1) WG 0 grants every peer credit for this epoch, with the place of the output. (2) Warps take tasks (a
// slice of samples of one table) from a ticket counter, in the order of sched/exchange_order.cuh, and store each pooled
// row directly into its destination's output. For a destination that is not load/store reachable they fill the staged
// slice; the warp that sets the last WG_Done bit puts the slice, with its signal, to the receiver's landing area. (3)
// After its last task for other PEs a WG releases one sliceRdy word at every reachable peer, then works on the
// remaining local tasks. (4) Each WG waits for its own subset of the arriving words, and copies landed slices to the
// output. Measured on H200 (docs/results.md); compiles for sm_80 and later, and for the host.
#pragma once

#include "comm/credits.cuh"
#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "sched/exchange_order.cuh"
#include "tile/bag_stream.cuh"
#include "tile/lookup_source.cuh"

namespace po::embedding_all_to_all {

// ---- configuration --------------------------------------------------------------------------------------------------

struct Config {
  DType scalar = DType::kFloat32;  // of the tables
  DType wire = scalar;             // of pooled rows in transit and in the output
  IndexType index = IndexType::kInt64;
  IndexType offset = IndexType::kInt64;
  Pooling pooling = Pooling::kSum;
  bool sources = false;    // lookups lie in the regions of an input exchange
  int shapes = 0x3f;       // of the tables, a bit per RowShape
  int rows_in_flight = 8;  // of a table, loaded ahead by a group of lanes
  int threads = 256;
  int blocks_per_sm = 2;
};

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  using Wire = ScalarOf<kConfig.wire>;
  using Index = IndexOf<kConfig.index>;
  using Offset = IndexOf<kConfig.offset>;
  static constexpr bool kSources = kConfig.sources;
  static constexpr int kShapes = kConfig.shapes;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = kConfig.blocks_per_sm;
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Scalar::Storage));
  static constexpr int kVectorBytes = 16;  // of a row, loaded by a lane at a time
  static_assert(kThreads % 32 == 0, "a WG consists of whole warps");

  template <int kLanes, int kVectors, int kBytes>
  using Shape =
      BagShape<Scalar, Wire, Index, Offset, kConfig.pooling, kLanes, kVectors, kBytes, kConfig.rows_in_flight>;
};

// How a warp divides over a table's rows (`shape` of a Table). The plan picks the narrowest shape that holds a row.
enum RowShape : int32_t { kElementwise = 0, kLanes32x2 = 1, kLanes32 = 2, kLanes16 = 3, kLanes8 = 4, kLanes4 = 5 };
PO_CONSTANT(kElementwise)
PO_CONSTANT(kLanes32x2)
PO_CONSTANT(kLanes32)
PO_CONSTANT(kLanes16)
PO_CONSTANT(kLanes8)
PO_CONSTANT(kLanes4)

// Codes of waits, for reports.
inline constexpr Phase kPhaseReady = make_phase(kFirstPhase);
inline constexpr Phase kPhaseSlice = make_phase(kFirstPhase + 1);
PO_CONSTANT(kPhaseReady)
PO_CONSTANT(kPhaseSlice)

// ---- arguments ------------------------------------------------------------------------------------------------------

struct Table {
  const uint8_t* rows;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t column_bytes;  // where its columns begin in a row of output
  int64_t staged_bytes;  // where its columns begin in a row of the staging area
  int64_t shape;
};
PO_DESCRIBE(Table, rows, num_rows, row_bytes, column_bytes, staged_bytes, shape)

// Columns of one PE that lie side by side both in a row of output and in a row of the staging area.
struct ColumnRange {
  int64_t column_bytes;
  int64_t staged_bytes;
  int64_t bytes;
};
PO_DESCRIBE(ColumnRange, column_bytes, staged_bytes, bytes)

// A PE as the sender of slices that are put.
struct Sender {
  int64_t first_range;  // in Plan::ranges
  int64_t num_ranges;
  int64_t bytes_before;  // of an output row, of the PEs before it
};
PO_DESCRIBE(Sender, first_range, num_ranges, bytes_before)

struct Plan {
  Team team;
  ExchangeOrder order;
  const Table* tables;
  const int64_t* pe_bytes;  // [size]: bytes of an output row that each PE's tables fill
  const ColumnRange* ranges;
  const Sender* senders;  // [size]
  int64_t batch;
  int64_t output_row_bytes;
  uint64_t staging_offset;  // [batch, own columns] in the symmetric heap; used for peers that are not reachable
  int64_t reports_bad_input;
  uint64_t* wg_done;  // bitmasks of the slices for peers that are not reachable; 0 after every launch
};
PO_DESCRIBE(Plan, team, order, tables, pe_bytes, ranges, senders, batch, output_row_bytes, staging_offset,
            reports_bad_input, wg_done)

// Words of a slice's bitmasks for `num_tables` tables: the first has a bit per further word, the others have a bit per
// table.
PO_FN constexpr int64_t done_words(int64_t num_tables) { return 1 + ceil_div<int64_t>(num_tables, 64); }
inline constexpr int kMaxStagedTables = 64 * 64;  // so many that their words fit the first word's bits
PO_CONSTANT(kMaxStagedTables)
PO_QUERY(done_words, (int64_t num_tables), done_words(num_tables))

struct Call {
  const void* indices;
  const void* offsets;
  const float* weights;
  int64_t num_indices;
  uint64_t output_offset;
  const LookupSource* sources;  // [size], in place of the lookups of the global batch; read only with Config::sources
  uint64_t landing_offset;      // [samples, own columns] of each sender that is not reachable, in this PE's heap
};
PO_DESCRIBE(Call, indices, offsets, weights, num_indices, output_offset, sources, landing_offset)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

// ---- bad input ------------------------------------------------------------------------------------------------------

enum InputErrorKind : uint64_t { kBadIndex = 1, kBadOffset = 2 };
PO_CONSTANT(kBadIndex)
PO_CONSTANT(kBadOffset)

PO_FN void report_bad_input(const Plan& plan, InputErrorKind kind, int64_t table, int64_t bag, int64_t value,
                            int64_t limit) {
  if (plan.reports_bad_input) report_input_error(plan.team, kind, table, bag, value, limit);
}

// The bags of one task, or the part of them that one of the warp's `num_parts` groups of lanes takes.
struct BagRange {
  int64_t first;
  int32_t count;
};

PO_FN BagRange bags_of(const ExchangeOrder& order, const Task& task, int part, int num_parts) {
  const int64_t begin = order.batch_start[task.destination] + task.slice * order.slice_samples;
  const int64_t end = min_of(begin + order.slice_samples, order.batch_start[task.destination + 1]);
  const auto total = static_cast<int32_t>(end - begin);
  const int32_t share = ceil_div(total, num_parts);
  const int32_t skipped = min_of(part * share, total);
  return {begin + skipped, min_of(share, total - skipped)};
}

// Looks up what a stream found wrong. Errors are rare, so the hot loop keeps only their places.
template <class Traits>
PO_NOINLINE void report_findings(const Plan& plan, BagFindings findings, int32_t position, int part, int num_parts,
                                 const void* all_offsets, const void* indices, int64_t num_indices) {
  Task task;
  plan.order.task_at(position, &task);
  const BagRange bags = bags_of(plan.order, task, part, num_parts);
  const auto* offsets = static_cast<const typename Traits::Offset*>(all_offsets) + task.table * plan.batch + bags.first;
  if (findings.bad_bag >= 0) {
    report_bad_input(plan, kBadOffset, task.table, bags.first + findings.bad_bag,
                     static_cast<int64_t>(offsets[findings.bad_bag + 1]), num_indices);
  }
  if (findings.bad_index >= 0) {
    const int64_t place = min_of(max_of<int64_t>(offsets[0], 0), num_indices) + findings.bad_index;
    int32_t bag = 0;
    while (bag + 1 < bags.count && static_cast<int64_t>(offsets[bag + 1]) <= place) ++bag;
    report_bad_input(plan, kBadIndex, task.table, bags.first + bag,
                     static_cast<int64_t>(static_cast<const typename Traits::Index*>(indices)[place]),
                     plan.tables[task.table].num_rows);
  }
}

// Checks that the first offset is 0 and the last one the number of indices; pool_bags checks the offsets in between.
template <class Traits>
PO_FN void check_outer_offsets(const Plan& plan, const Call& call) {
  const auto* offsets = static_cast<const typename Traits::Offset*>(call.offsets);
  const int64_t last = plan.order.num_tables * plan.batch;
  if (last == 0) return;
  if (offsets[0] != 0) report_bad_input(plan, kBadOffset, 0, 0, static_cast<int64_t>(offsets[0]), call.num_indices);
  if (offsets[last] != call.num_indices) {
    report_bad_input(plan, kBadOffset, plan.order.num_tables - 1, plan.batch - 1, static_cast<int64_t>(offsets[last]),
                     call.num_indices);
  }
}

// ---- store: where a task's rows go ----------------------------------------------------------------------------------

// One object per group of lanes. Rows leave in the order of their bags.
class RowStore {
 public:
  PO_FN RowStore(const Plan& plan, uint64_t own_output) : plan_(plan), own_output_(own_output) {}

  // Sets the target of the next rows: bags [first_bag, ...) of `destination`, `piece_bytes` of each, from column
  // `column_bytes` on of the output, or of the staging area if the destination is not reachable.
  PO_FN void aim(int destination, int64_t first_bag, int64_t column_bytes, int32_t piece_bytes) {
    destination_ = destination;
    first_bag_ = first_bag;
    column_bytes_ = column_bytes;
    piece_bytes_ = piece_bytes;
  }

  // Finds the target's address, after the loads of the first rows. Awaits the destination's credit the first time.
  // Returns false if the launch was given up.
  template <class Group>
  PO_FN bool open(const Group& group) {
    const Team& team = plan_.team;
    if (!is_reachable(team, destination_)) {
      stride_ = static_cast<int32_t>(plan_.pe_bytes[team.rank]);
      target_ = team.heap + plan_.staging_offset + first_bag_ * static_cast<int64_t>(stride_) + column_bytes_;
      return true;
    }
    uint64_t output = own_output_;
    if (destination_ != team.rank) {
      if (!credits_.await(team, group, destination_)) return false;  // @credit-before-stores
      output = granted_output(team, destination_);
    }
    stride_ = static_cast<int32_t>(plan_.output_row_bytes);
    target_ = peer_address(team, destination_, output) +
              (first_bag_ - plan_.order.batch_start[destination_]) * stride_ + column_bytes_;
    return true;
  }

  template <class Shape>
  PO_FN void emit(const float (&sums)[Shape::kVectors][Shape::Elements::kCount]) {
    const int first = typename Shape::Group{}.rank() * Shape::kOutputBytes;
    PO_UNROLL
    for (int v = 0; v < Shape::kVectors; ++v) {
      const int offset = v * (Shape::kStrideBytes / Shape::kNarrowing) + first;
      if (offset < piece_bytes_) store_vector<Shape::kOutputBytes>(target_ + offset, Shape::Output::round(sums[v]));
    }
    target_ += stride_;
  }

 private:
  const Plan& plan_;
  uint64_t own_output_;
  Credits credits_;
  int destination_ = 0;
  int32_t piece_bytes_ = 0;
  int64_t first_bag_ = 0;
  int64_t column_bytes_ = 0;
  uint8_t* target_ = nullptr;
  int32_t stride_ = 0;  // a row of output has less than 2 GiB
};

// Where a row from `sender` lands, from the begin of the receiver's landing area. `row`: of the receiver's output.
PO_FN uint64_t landing_place(const Plan& plan, int sender, int receiver, int64_t row) {
  return static_cast<uint64_t>(plan.order.num_samples(receiver) * plan.senders[sender].bytes_before +
                               row * plan.pe_bytes[sender]);
}

// ---- one warp's work ------------------------------------------------------------------------------------------------

template <class Traits>
class Worker {
 public:
  PO_FN Worker(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), plan_(plan), call_(call), store_(plan, call.output_offset) {
    // The first position is the worker's own number; the counter hands out the later ones.
    position_ = wg.warp_index() * wg.count() + wg.index();
  }

  // Runs the tasks at positions below `limit`, in order of tickets.
  PO_FN void run_until(int32_t limit) {
    while (position_ < limit) {
      int32_t ticket = 0;
      if (warp_.rank() == 0) {
        ticket = static_cast<int32_t>(atomic_fetch_add_relaxed_gpu(&plan_.team.local->ticket, 1));
      }
      if (Task task; plan_.order.task_at(position_, &task)) {
        const TaskTrace trace(task.destination != plan_.team.rank);
        const bool is_staged = !is_reachable(plan_.team, task.destination);
        pool(task);
        if (is_staged) finish_staged();
      }
      position_ = wg_.num_warps() * wg_.count() + warp_.shuffle(ticket, 0);  // @ticket-of-lanes
    }
  }

 private:
  PO_FN void pool(const Task& task) {
    const Table& table = plan_.tables[task.table];
    const auto shape = static_cast<int32_t>(table.shape);
    if constexpr ((Traits::kShapes & 1 << kElementwise) != 0) {
      if (shape == kElementwise) pool_as<typename Traits::template Shape<32, 2, Traits::kElementBytes>>(task, table);
    }
    if constexpr ((Traits::kShapes & 1 << kLanes32x2) != 0) {
      if (shape == kLanes32x2) pool_as<typename Traits::template Shape<32, 2, Traits::kVectorBytes>>(task, table);
    }
    if constexpr ((Traits::kShapes & 1 << kLanes32) != 0) {
      if (shape == kLanes32) pool_as<typename Traits::template Shape<32, 1, Traits::kVectorBytes>>(task, table);
    }
    if constexpr ((Traits::kShapes & 1 << kLanes16) != 0) {
      if (shape == kLanes16) pool_as<typename Traits::template Shape<16, 1, Traits::kVectorBytes>>(task, table);
    }
    if constexpr ((Traits::kShapes & 1 << kLanes8) != 0) {
      if (shape == kLanes8) pool_as<typename Traits::template Shape<8, 1, Traits::kVectorBytes>>(task, table);
    }
    if constexpr ((Traits::kShapes & 1 << kLanes4) != 0) {
      if (shape == kLanes4) pool_as<typename Traits::template Shape<4, 1, Traits::kVectorBytes>>(task, table);
    }
    warp_.sync();
  }

  // The groups of the warp divide the task's bags into contiguous parts.
  template <class Shape>
  PO_FN void pool_as(const Task& task, const Table& table) {
    using Group = typename Shape::Group;
    const BagRange bags = bags_of(plan_.order, task, Group{}.index(), Group::kPerWarp);
    const BagInputs inputs = inputs_of(task, table, bags);
    const int64_t column = is_reachable(plan_.team, task.destination) ? table.column_bytes : table.staged_bytes;
    for (int32_t chunk = 0; chunk < inputs.row_bytes; chunk += Shape::kChunkBytes) {
      store_.aim(task.destination, bags.first, column + chunk / Shape::kNarrowing,
                 min_of(inputs.row_bytes - chunk, Shape::kChunkBytes) / Shape::kNarrowing);
      const BagFindings findings = pool_bags<Shape>(inputs, chunk, store_);
      if (!Traits::kSources && (findings.bad_index >= 0 || findings.bad_bag >= 0)) {
        report_findings<Traits>(plan_, findings, position_, Group{}.index(), Group::kPerWarp, call_.offsets,
                                call_.indices, call_.num_indices);
      }
    }
  }

  PO_FN BagInputs inputs_of(const Task& task, const Table& table, const BagRange& bags) const {
    using Offset = typename Traits::Offset;
    const auto row_bytes = static_cast<int32_t>(table.row_bytes);
    if constexpr (Traits::kSources) {
      // A source from which nothing has come has no samples, but offsets for the largest number of samples that it may
      // have.
      const LookupSource& source = call_.sources[task.destination];
      const int64_t first = bags.first - plan_.order.batch_start[task.destination];
      const int64_t bag = task.table * plan_.order.num_samples(task.destination) + first;
      return {table.rows,     table.num_rows, row_bytes,
              source.indices, source.count,   static_cast<const Offset*>(source.offsets) + bag,
              source.weights, bags.count};
    } else {
      return {table.rows,        table.num_rows,
              row_bytes,         call_.indices,
              call_.num_indices, static_cast<const Offset*>(call_.offsets) + task.table * plan_.batch + bags.first,
              call_.weights,     bags.count};
    }
  }

  // Sets the task's WG_Done bit. The warp that completes the slice sends it.
  PO_FN void finish_staged() {
    const ExchangeOrder& order = plan_.order;
    warp_.sync();  // orders the rows of all lanes before the bit
    if (warp_.rank() != 0) return;
    Task task;
    order.task_at(position_, &task);
    int64_t slice = task.slice;
    for (int destination = 0; destination < task.destination; ++destination) slice += order.num_slices(destination);
    const int64_t num_words = done_words(order.num_tables) - 1;
    uint64_t* done = plan_.wg_done + slice * done_words(order.num_tables);
    const int64_t word = task.table / 64;
    // @slice-complete
    if (atomic_or_fetch_acq_rel_gpu(done + 1 + word, 1ull << task.table % 64) !=
        all_bits(order.num_tables - word * 64)) {
      return;
    }
    if (atomic_or_fetch_acq_rel_gpu(done, 1ull << word) != all_bits(num_words)) return;
    for (int64_t i = 0; i <= num_words; ++i) done[i] = 0;             // @wg-done-reset
    if (await_credit(plan_.team, task.destination)) put_slice(task);  // @credit-before-puts
  }

  // Puts the slice, with its sliceRdy word.
  PO_FN void put_slice(const Task& task) {
    const Team& team = plan_.team;
    const uint64_t landing = granted_output(team, task.destination);
    const BagRange bags = bags_of(plan_.order, task, 0, 1);
    fence_acq_rel_sys();  // publishes the staged rows of all the slice's warps, acquired through WG_Done, to the network
    const int64_t row_bytes = plan_.pe_bytes[team.rank];
    put_signal(team, task.destination,
               landing + landing_place(plan_, team.rank, task.destination,
                                       bags.first - plan_.order.batch_start[task.destination]),
               team.heap + plan_.staging_offset + bags.first * row_bytes, static_cast<uint64_t>(bags.count * row_bytes),
               ready_word_offset(team, team.rank, static_cast<uint64_t>(task.slice)), launch_flag(team));
  }

  static PO_FN uint64_t all_bits(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

  const WorkGroup& wg_;
  const Plan& plan_;
  const Call& call_;
  RowStore store_;
  Warp warp_;
  int32_t position_;
};

// ---- arrival --------------------------------------------------------------------------------------------------------

// Releases one sliceRdy word at each reachable peer: this WG has no more rows for them.
PO_FN void signal_ready(const Team& team, const WorkGroup& wg) {
  for (int peer = wg.rank(); peer < team.size; peer += wg.size()) {
    if (peer == team.rank || !is_reachable(team, peer) || is_aborted(team)) continue;  // @ready-unless-aborted
    signal(team, peer, ready_word_offset(team, team.rank, static_cast<uint64_t>(wg.index())), launch_flag(team));
  }
}

// Awaits this WG's share of the arriving words: the word of the WG with the same number at each reachable sender, and
// every count()-th slice of the other senders.
PO_FN void await_ready(const WorkGroup& wg, const Plan& plan) {
  const Team& team = plan.team;
  if (plan.order.num_samples(team.rank) == 0) return;
  for (int sender = wg.rank(); sender < team.size; sender += wg.size()) {  // @await-senders
    if (sender == team.rank || plan.pe_bytes[sender] == 0) continue;
    if (is_reachable(team, sender)) {
      const auto index = static_cast<uint64_t>(wg.index());
      if (!await_epoch(team, local_word(team, ready_word_offset(team, sender, index)), kPhaseReady, sender, index)) {
        return;
      }
      continue;
    }
    for (int64_t slice = wg.index(); slice < plan.order.num_slices(team.rank); slice += wg.count()) {
      const auto index = static_cast<uint64_t>(slice);
      if (!await_epoch(team, local_word(team, ready_word_offset(team, sender, index)), kPhaseSlice, sender, index)) {
        return;
      }
    }
  }
}

// Copies columns of a row that came during the launch, in units of 16 bytes, or of 2 where addresses do not allow that.
PO_FN void copy_columns(const Warp& warp, uint8_t* target, const uint8_t* source, int64_t bytes) {
  const auto copy = [&]<int kBytes>() {
    for (int64_t at = warp.rank() * kBytes; at < bytes; at += warp.size() * kBytes) {
      store_vector<kBytes>(target + at, load_shared_vector<kBytes>(source + at));
    }
  };
  const uint64_t places = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source);
  if ((places | static_cast<uint64_t>(bytes)) % 16 == 0) {
    copy.template operator()<16>();
  } else {
    copy.template operator()<2>();
  }
}

// Copies the slices that this WG has awaited from the landing area to the output. Senders lay their columns side by
// side.
PO_FN void unpack_slices(const WorkGroup& wg, const Plan& plan, const Call& call) {
  const Team& team = plan.team;
  const Warp warp;
  if (is_aborted(team)) return;
  const int64_t samples = plan.order.num_samples(team.rank);
  for (int sender = 0; sender < team.size; ++sender) {
    if (is_reachable(team, sender)) continue;
    const Sender& from = plan.senders[sender];
    const uint8_t* landed = team.heap + call.landing_offset + landing_place(plan, sender, team.rank, 0);
    for (int64_t slice = wg.index(); slice < plan.order.num_slices(team.rank); slice += wg.count()) {
      const int64_t begin = slice * plan.order.slice_samples;
      const int64_t end = min_of(begin + plan.order.slice_samples, samples);
      for (int64_t row = begin + wg.warp_index(); row < end; row += wg.num_warps()) {
        uint8_t* target = team.heap + call.output_offset + row * plan.output_row_bytes;
        for (int64_t i = 0; i < from.num_ranges; ++i) {  // @unpack-ranges
          const ColumnRange& range = plan.ranges[from.first_range + i];
          copy_columns(warp, target + range.column_bytes, landed + row * plan.pe_bytes[sender] + range.staged_bytes,
                       range.bytes);
        }
      }
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <Config kConfig>
struct Kernel {
  using Traits = embedding_all_to_all::Traits<kConfig>;
  using Plan = embedding_all_to_all::Plan;
  using Call = embedding_all_to_all::Call;
  using Shared = embedding_all_to_all::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, call.output_offset, call.landing_offset);

    Worker<Traits> worker(wg, plan, call);
    // In a loop, the code of tasks is compiled once. It is most of the kernel.
    PO_NO_UNROLL
    for (int round = 0; round < 2; ++round) {
      if (round != 0) {
        // @rows-before-ready
        wg.sync();  // orders the rows of all warps before the words that announce them
        signal_ready(plan.team, wg);
      }
      worker.run_until(round == 0 ? plan.order.num_leading() : plan.order.num_positions());  // @leading-tasks
    }

    if (!Traits::kSources && wg.index() == 0 && wg.rank() == 0) check_outer_offsets<Traits>(plan, call);
    if (wg.index() == 0) await_all_credits(plan.team, wg);  // @meet-every-peer
    await_ready(wg, plan);
    if (has_far_peers(plan.team)) {
      // @landed-known
      wg.sync();  // hands what each thread has acquired to all
      unpack_slices(wg, plan, call);
    }
    const auto rows = static_cast<uint64_t>(plan.order.num_samples(plan.team.rank));
    leave_launch(plan.team, wg, &shared.is_last, call.output_offset,
                 rows * static_cast<uint64_t>(plan.output_row_bytes));
  }
};

}  // namespace po::embedding_all_to_all
