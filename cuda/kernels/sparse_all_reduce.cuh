// Sparse all-reduce: every PE has some rows of a tensor, and every PE gets the union of these rows, sorted, each row
// summed over the PEs that have it. One persistent launch.
//
// (1) WG 0 grants every peer credit, with the place of this PE's result. (2) The PEs exchange sets of their rows, and
// every row of the union gets its slot (kernels/sparse/row_union.cuh). (3) Warps take blocks of slots, the same on
// every PE. A row that one PE alone has goes directly from it to its slot on every PE. A row that several PEs have is
// left by each of them in its own slot. The row's owner, one of them, fetches these sums, adds them up in rank order
// and stores the result into the slot on every PE. This needs no room but the result's, and no atomics. With few rows,
// all sums go to every PE at once instead, and each PE adds them up. (4) Each warp signals its counterparts on the
// other PEs that its rows are stored, and waits for theirs.
#pragma once

#include <initializer_list>

#include "kernels/sparse/row_union.cuh"
#include "kernels/sparse/hot_rows.cuh"
#include "kernels/sparse/row_exchange.cuh"
#include "platform/entry.cuh"
#include "tile/row_chunk.cuh"

namespace po::sparse_all_reduce {

struct Config {
  DType scalar = DType::kFloat32;
  IndexType index = IndexType::kInt64;
  bool gathers = false;  // every PE adds up all sums itself
  int lanes = 32;        // of a group that has a row
  int bytes = 16;        // of an access
  int threads = 256;
  int blocks_per_sm = 2;
  int hot_entries = 32;  // of a row on a PE: from so many on, all its warps share the row
  int pes = kPeStep;     // a multiple of kPeStep, at least the team's size
};

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  using Index = IndexOf<kConfig.index>;
  static constexpr bool kGathers = kConfig.gathers;
  static constexpr int64_t kHotEntries = kConfig.hot_entries;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = kConfig.blocks_per_sm;
  static constexpr int kMostWarps = kWarpSize == 1 ? kMaxWarps : kThreads / kWarpSize;
  // A lane has up to 16 values of a row in flight; more would not stay in registers.
  static constexpr int kVectors =
      kConfig.lanes == 32 ? min_of(16 * static_cast<int>(sizeof(typename Scalar::Storage)) / kConfig.bytes, 4) : 1;
  using Chunk = RowChunk<Scalar, kConfig.lanes, kVectors, kConfig.bytes>;
  using Piece = RowChunk<Scalar, kConfig.lanes, 1, kConfig.bytes>;
  using Entries = RowEntries<Index>;
  static constexpr int kPes = kConfig.pes;
  using Slot = po::Slot<kPes>;
};

inline constexpr int kNumPhases = 4;

// Host-visible.
struct Report {
  uint64_t state;  // the host clears it before a launch; set last
  int64_t num_rows;
  int64_t num_shares;             // rows of all PEs together; a row that several PEs have counts for each
  uint64_t phase_ns[kNumPhases];  // when WG 0 began, knew all row sets, had the rows listed, was done
};
PO_DESCRIBE(Report, state, num_rows, num_shares, phase_ns)

struct Plan {
  Team team;
  RowSets sets;
  int64_t row_bytes;
  int64_t capacity;          // rows that the result has room for
  uint64_t progress_offset;  // in every heap: uint64_t[size][workers], by sender; flags of what is put (RowTransfer)
  int64_t num_workers;       // warps of all WGs
  uint64_t gather_offset;    // in every heap: float[size][capacity][columns], by contributor; "allgather" only
  uint64_t low_offset;       // in this PE's heap, or 0: room for low halves, [capacity][row_bytes]
  HotList* hot;
  Report* report;
  int64_t splits_partials;   // this PE's sums of duplicates need more than the scalar's 16 bits
  int64_t reports_overflow;  // reports a lack of room as an error; otherwise the host reads the count
  int64_t divisor;
  int64_t all_reachable;
};
PO_DESCRIBE(Plan, team, sets, row_bytes, capacity, progress_offset, num_workers, gather_offset, low_offset, hot, report,
            splits_partials, reports_overflow, divisor, all_reachable)

// Bytes of the result's values for `capacity` rows; the rows' numbers follow.
PO_FN constexpr uint64_t values_bytes(int64_t capacity, int64_t row_bytes) {
  return static_cast<uint64_t>(ceil_div<int64_t>(capacity * row_bytes, 8) * 8);
}
PO_QUERY(values_bytes, (int64_t capacity, int64_t row_bytes), values_bytes(capacity, row_bytes))

struct Call {
  const void* rows;      // ascending
  const int64_t* order;  // which value belongs to an entry; null: the value of the entry's own number
  const uint8_t* values;
  int64_t num_entries;
  uint64_t output_offset;
  int64_t* rows_out;         // [capacity], or null: they follow the values
  int64_t* num_rows_out;     // or null
  const int64_t* num_valid;  // null, or how many of the entries are valid
};
PO_DESCRIBE(Call, rows, order, values, num_entries, output_offset, rows_out, num_rows_out, num_valid)

template <class Traits>
struct Shared {
  Plan plan;
  UnionShared rows;
  typename RowExchange<Traits, Plan>::Shared exchange;
  uint64_t is_last;
  uint64_t phase_ns[kNumPhases];  // copied to the report at the end: a release would wait for a store to the host
};

// ---- input ----------------------------------------------------------------------------------------------------------

enum InputErrorKind : uint64_t { kBadRow = 1, kBadCount = 2, kTooManyRows = 3, kNotAscending = 4 };
PO_CONSTANT(kBadRow)
PO_CONSTANT(kBadCount)
PO_CONSTANT(kTooManyRows)
PO_CONSTANT(kNotAscending)

// The number of valid entries.
PO_FN int64_t count_entries(const WorkGroup& wg, const Plan& plan, const Call& call) {
  if (call.num_valid == nullptr) return call.num_entries;
  const int64_t given = *call.num_valid;
  const int64_t count = min_of(max_of<int64_t>(given, 0), call.num_entries);
  if (wg.index() == 0 && wg.rank() == 0 && given != count) {
    report_input_error(plan.team, kBadCount, 0, 0, given, call.num_entries);
  }
  return count;
}

// Checks valid entries. They are sorted, so rows out of range are the first or the last ones.
template <class Traits>
PO_FN void check_entries(const WorkGroup& wg, const Plan& plan, const Call& call, int64_t count) {
  const auto* rows = static_cast<const typename Traits::Index*>(call.rows);
  // The caller promises sorted entries. A broken promise must not become a wrong sum.
  const auto stride = static_cast<int64_t>(wg.count()) * wg.size();
  for (int64_t entry = 1 + static_cast<int64_t>(wg.index()) * wg.size() + wg.rank();
       call.order == nullptr && entry < count; entry += stride) {
    const auto row = static_cast<int64_t>(rows[entry]);
    if (row > static_cast<int64_t>(rows[entry - 1])) continue;
    report_input_error(plan.team, kNotAscending, 0, entry, row, static_cast<int64_t>(rows[entry - 1]));
  }
  if (wg.index() != 0 || wg.rank() != 0 || count == 0) return;
  for (const int64_t entry : {int64_t{0}, count - 1}) {
    const auto row = static_cast<int64_t>(rows[entry]);
    if (row >= 0 && row < plan.sets.num_rows) continue;
    report_input_error(plan.team, kBadRow, 0, call.order == nullptr ? entry : call.order[entry], row,
                       plan.sets.num_rows);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <Config kConfig>
struct Kernel {
  using Traits = sparse_all_reduce::Traits<kConfig>;
  using Plan = sparse_all_reduce::Plan;
  using Exchange = RowExchange<Traits, Plan>;
  using Hot = HotRows<Traits, Plan>;
  using Call = sparse_all_reduce::Call;
  using Shared = sparse_all_reduce::Shared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    const Team& team = plan.team;
    for (int i = wg.rank(); i < kNumChecks; i += wg.size()) shared.rows.failed[i] = 0;
    begin_launch(shared.plan.team, wg);
    mark(wg, shared, 0);
    if (wg.index() == 0) grant_credit(team, wg, call.output_offset);
    exchange(wg, shared, call, count_entries(wg, plan, call));
    mark(wg, shared, 3);
    leave_launch(team, wg, &shared.is_last, call.output_offset, static_cast<uint64_t>(plan.capacity * plan.row_bytes));
    if (wg.index() == 0 && wg.rank() == 0) tell_phases(shared);
  }

 private:
  // The part of the work that a launch leaves out when it is given up.
  static PO_FN void exchange(const WorkGroup& wg, Shared& shared, const Call& call, int64_t num_entries) {
    const Plan& plan = shared.plan;
    const Team& team = plan.team;
    const auto* numbers = static_cast<const typename Traits::Index*>(call.rows);
    RowUnion<typename Traits::Index> rows(wg, shared.rows, team, plan.sets, numbers, num_entries);
    rows.prepare();
    if (!rows.all_threads(kCheckCredits, find_outputs(wg, shared, call))) return;
    rows.tell(plan.splits_partials != 0 ? plan.low_offset : 0);
    check_entries<Traits>(wg, plan, call, num_entries);  // while the peers' sets are on their way
    if (!rows.count() || !rows.place()) return;
    mark(wg, shared, 1);
    int64_t* listed = call.rows_out;
    if (listed == nullptr)
      listed = reinterpret_cast<int64_t*>(team.heap + call.output_offset + values_bytes(plan.capacity, plan.row_bytes));
    if (wg.index() == 0 && wg.rank() == 0) Hot::clear(plan);  // @hot-clear
    const bool has_room = rows.num_union() <= plan.capacity;  // on every PE, or on none
    if (has_room) rows.list(listed);
    if (!rows.meet(kMeetListed)) return;
    mark(wg, shared, 2);
    // A thread of the warp with the fewest rows reports, since a release to the host takes long.
    const bool tells_host = wg.index() == wg.count() - 1 && wg.rank() == wg.size() - 1;
    if (tells_host) tell_host(plan, call, rows.num_union(), rows.num_shares());
    if (!has_room) return;
    const typename Traits::Entries entries{numbers, call.order, call.values, num_entries};
    const int64_t hot_entries = Hot::least_entries(plan, entries);
    if (hot_entries != Hot::kNever) {
      const typename Hot::Transfer transfer(plan, shared.exchange.outputs, entries, hot_entries);
      const Hot hot(wg, plan, entries, transfer, hot_entries);
      hot.find(listed, rows.num_union());
      if (!rows.meet(kMeetFound)) return;  // @hot-found
      hot.sum();
      if (!rows.meet(kMeetSummed)) return;  // @hot-summed
    }
    Exchange(wg, plan, shared.exchange, entries, listed, rows.num_union(), rows.num_shares(), hot_entries).run();
  }

  // Awaits every peer's credit and notes where its result is.
  static PO_FN bool find_outputs(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Team& team = shared.plan.team;
    // After a launch that was given up, its peers may not be in this launch.
    bool is_granted = wg.rank() != wg.size() - 1 || !is_aborted(team);
    for (int pe = wg.rank(); pe < team.size; pe += wg.size()) {
      if (pe != team.rank && !await_credit(team, pe)) is_granted = false;  // @rows-credit
      const uint64_t offset = pe == team.rank ? call.output_offset : granted_output(team, pe);
      shared.exchange.outputs.offsets[pe] = offset;
      shared.exchange.outputs.mapped[pe] = is_reachable(team, pe) ? peer_address(team, pe, offset) : nullptr;
    }
    return is_granted;
  }

  static PO_FN void tell_host(const Plan& plan, const Call& call, int64_t num_rows, int64_t num_shares) {
    if (call.num_rows_out != nullptr) *call.num_rows_out = num_rows;
    if (plan.reports_overflow != 0 && num_rows > plan.capacity) {
      report_input_error(plan.team, kTooManyRows, 0, 0, num_rows, plan.capacity);
    }
    if (plan.report == nullptr) return;
    plan.report->num_rows = num_rows;
    plan.report->num_shares = num_shares;
    flag_store_release_sys(&plan.report->state, 1);
  }

  // Notes that a phase of WG 0 begins. The later phases begin with it, in case the launch is given up.
  static PO_FN void mark(const WorkGroup& wg, Shared& shared, int phase) {
    if (wg.index() != 0 || wg.rank() != 0) return;
    const uint64_t now = clock_ns();
    for (int i = phase; i < kNumPhases; ++i) shared.phase_ns[i] = now;
  }

  static PO_FN void tell_phases(const Shared& shared) {
    if (shared.plan.report == nullptr) return;
    for (int i = 0; i < kNumPhases; ++i) shared.plan.report->phase_ns[i] = shared.phase_ns[i];
  }
};

}  // namespace po::sparse_all_reduce
