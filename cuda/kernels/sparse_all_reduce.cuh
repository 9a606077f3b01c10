// Sparse all-reduce: every PE has some rows of a tensor, and all get the sum over PEs of the rows that any of them has,
// sorted. One persistent launch.
//
// (1) WG 0 grants every peer credit, with the place of this PE's result. (2) The PEs tell each other which rows they have,
// and every row of the union gets its slot (comm/row_union.cuh). (3) Warps take blocks of slots, the same on every PE. A
// row that one PE alone has goes straight from it to its slot on every PE. A row that several have is left by each of
// them in its own slot, where the row's owner, one of them, fetches it; the owner adds up in rank order and stores the
// sum into the slot on every PE: no room but the result's, and no atomics. Or, for few rows, all of them go to every PE
// at once and each adds up for itself. (4) Each warp tells its counterparts that its rows are stored, and waits for theirs.
#pragma once

#include "comm/row_union.cuh"
#include "platform/entry.cuh"
#include "tile/row_chunk.cuh"

#ifndef PO_SCALAR
#define PO_SCALAR Float32
#define PO_INDEX int64_t
#define PO_GATHERS false
#define PO_LANES 32
#define PO_BYTES 16
#endif
#ifndef PO_THREADS
#define PO_THREADS 256
#endif
#ifndef PO_BLOCKS_PER_SM
#define PO_BLOCKS_PER_SM 2
#endif

namespace po::sparse_all_reduce {

struct Config {
  using Scalar = PO_SCALAR;
  using Index = PO_INDEX;
  static constexpr bool kGathers = PO_GATHERS;  // every PE adds up itself
  static constexpr int kThreads = PO_THREADS;
  static constexpr int kBlocksPerSm = PO_BLOCKS_PER_SM;
  static constexpr int kMostWarps = kWarpSize == 1 ? kMaxWarps : kThreads / kWarpSize;
  static constexpr int64_t kMaxBlocks = 65000;  // of a warp; progress has 16 bits beside the epoch
  static constexpr uint64_t kAllBlocks = 0xffff;
  // A lane has up to 16 values of a row under way; more would not stay in registers.
  static constexpr int kVectors =
      PO_LANES == 32 ? min_of(16 * static_cast<int>(sizeof(Scalar::Storage)) / PO_BYTES, 4) : 1;
  using Chunk = RowChunk<Scalar, PO_LANES, kVectors, PO_BYTES>;
};

// Host-visible.
struct Report {
  uint64_t state;  // the host clears it before a launch; set last
  int64_t num_rows;
  int64_t num_shares;    // rows of all PEs together, those that several have counted for each
  uint64_t phase_ns[4];  // when WG 0 began, knew all row sets, had the rows listed, was done
};

static_assert(sizeof(Report) == 56, "Report in persistent_ops/ops/sparse_plan.py mirrors it");

struct Plan {
  Team team;
  RowSets sets;
  int64_t row_bytes;
  int64_t capacity;            // rows that the result has room for
  uint64_t progress_offset;    // in every heap: uint64_t[size][workers], by sender
  int64_t num_workers;         // warps of all WGs
  uint64_t gather_offset;      // in every heap: float[size][capacity][columns], by contributor; "allgather" only
  uint64_t low_offset;         // in this PE's heap, or 0: room for low halves, [capacity][row_bytes]
  int64_t* rows_out;           // [capacity], or null: behind the values
  int64_t* num_rows_out;       // or null
  const int64_t* num_entries;  // null, or how many of the entries are valid
  Report* report;
  int64_t splits_partials;   // this PE's sums of duplicates need more than their 16 bits
  int64_t reports_overflow;  // as an error; otherwise the host asks for the count
  int64_t divisor;
  int64_t all_reachable;
};

struct Call {
  const Config::Index* rows;  // ascending
  const int64_t* order;       // which of the values belongs to an entry; null: the entry's own number
  const uint8_t* values;
  int64_t num_entries;
  uint64_t output_offset;
};

struct Slot {
  uint64_t contributors;
  int64_t first_entry;
  int64_t num_entries;
};

struct Shared {
  Plan plan;
  UnionShared rows;
  uint8_t* outputs[kMaxPes];  // each PE's result as mapped here; null: not within reach
  uint64_t output_offsets[kMaxPes];
  Slot window[Config::kMostWarps][kWarpSize];
  uint64_t is_last;
};

// ---- one warp's work ------------------------------------------------------------------------------------------------

class Worker {
 public:
  using Chunk = Config::Chunk;
  using Group = Chunk::Group;

  PO_FN Worker(const WorkGroup& wg, Shared& shared, const Call& call, int64_t num_entries, int64_t num_union,
               const int64_t* rows_of_slots)
      : plan_(shared.plan),
        team_(shared.plan.team),
        shared_(shared),
        call_(call),
        num_entries_(num_entries),
        num_union_(num_union),
        rows_of_slots_(rows_of_slots),
        window_(shared.window[wg.warp_index()]),
        number_(static_cast<int64_t>(wg.warp_index()) * wg.count() + wg.index()) {
    // A few blocks for each warp, so that the last ones end together; few enough for progress to count.
    const int64_t num_workers = static_cast<int64_t>(wg.count()) * wg.num_warps();
    const int64_t few = min_of<int64_t>(max_of<int64_t>(num_union / (4 * num_workers), 1), 32);
    block_slots_ = max_of(few, ceil_div(num_union, num_workers * Config::kMaxBlocks));
    stride_ = num_workers * block_slots_;
  }

  // A block behind: what peers have left of it, they have left by then.
  PO_FN bool run() {
    const int64_t first = number_ * block_slots_;
    const int64_t num_blocks = first < num_union_ ? (num_union_ - 1 - first) / stride_ + 1 : 0;
    for (int64_t block = 0; block <= num_blocks; ++block) {
      if (block < num_blocks) contribute(first + block * stride_, static_cast<uint64_t>(block));
      if (block > 0 && !reduce(first + (block - 1) * stride_, static_cast<uint64_t>(block - 1))) return false;
    }
    tell_progress(all_pes(), Config::kAllBlocks);
    return await_progress(all_pes(), Config::kAllBlocks, kPhaseRows);
  }

 private:
  static constexpr int64_t kFloatsPerScalar = 4 / static_cast<int64_t>(sizeof(Config::Scalar::Storage));

  PO_FN uint64_t bit_of(int pe) const { return 1ull << pe; }
  PO_FN uint64_t all_pes() const { return team_.size == 64 ? ~0ull : bit_of(team_.size) - 1; }
  PO_FN bool is_mine(const Slot& slot) const { return slot.contributors >> team_.rank & 1; }
  static PO_FN bool is_shared(const Slot& slot) { return (slot.contributors & (slot.contributors - 1)) != 0; }

  // Contributors own the rows that they share in turn.
  static PO_FN int owner_of(const Slot& slot, int64_t number) {
    uint64_t rest = slot.contributors;
    for (auto skipped = static_cast<int>(number % count_bits(rest)); skipped > 0; --skipped) rest &= rest - 1;
    return lowest_bit(rest);
  }

  // Of the slots of a block: each is looked at by a lane, look(slot, number); a group of lanes works on those that `want`
  // wants, work(slot, number); then a single lane puts what has to go where nobody can store to, put(number, peer).
  template <class Look, class Want, class Work, class Put>
  PO_FN void for_each_slot(int64_t first, const Look& look, const Want& want, const Work& work, const Put& put) {
    const int64_t end = min_of(first + block_slots_, num_union_);
    for (int64_t base = first; base < end; base += kWarpSize) {
      const auto count = static_cast<int>(min_of<int64_t>(kWarpSize, end - base));
      warp_.sync();  // the window has been read
      if (warp_.rank() < count) {
        const Slot slot = slot_of(base + warp_.rank());
        look(slot, base + warp_.rank());
        window_[warp_.rank()] = slot;
      }
      warp_.sync();
      for (int i = Group{}.index(); i < count; i += Group::kPerWarp) {
        if (want(window_[i], base + i)) work(window_[i], base + i);
      }
      if (plan_.all_reachable != 0) continue;
      fence_acq_rel_sys();  // each lane's stores are out for the network
      warp_.sync();
      for (int i = 0; i < count && warp_.rank() == 0; ++i) {
        if (!want(window_[i], base + i)) continue;
        for (int hop = 1; hop < team_.size; ++hop) {
          const int pe = (team_.rank + hop) % team_.size;
          if (!is_reachable(team_, pe)) put(window_[i], base + i, pe);
        }
      }
    }
    warp_.sync();
  }

  PO_FN Slot slot_of(int64_t number) const {
    const int64_t row = rows_of_slots_[number];
    const RowPlace place = find_row(team_, plan_.sets, call_.rows, num_entries_, row);
    Slot slot{place.contributors, place.first_entry, 0};
    if (is_mine(slot)) {
      const int64_t end = lower_bound_near(call_.rows, slot.first_entry + 1, num_entries_, row + 1);
      slot.num_entries = end - slot.first_entry;
    }
    return slot;
  }

  // Sends this PE's rows of a block: to all where nobody else has the row, else to who adds up.
  PO_FN void contribute(int64_t first, uint64_t block) {
    uint64_t adders = 0;
    for_each_slot(
        first,
        [&](const Slot& slot, int64_t number) {
          if (!is_mine(slot) || !is_shared(slot)) return;
          adders |= Config::kGathers ? all_pes() : bit_of(owner_of(slot, number));
        },
        [&](const Slot& slot, int64_t number) {
          return is_mine(slot) && (!is_shared(slot) || Config::kGathers || owner_of(slot, number) != team_.rank);
        },
        [&](const Slot& slot, int64_t number) {
          for_each_chunk([&](Chunk& chunk, int64_t) {
            sum_own(slot, chunk);
            if (is_shared(slot)) return Config::kGathers ? gather(chunk, number) : leave(chunk, number);
            chunk.divide_by(static_cast<float>(plan_.divisor));
            store_everywhere(chunk, number);
          });
        },
        [&](const Slot& slot, int64_t number, int pe) {
          if (!is_shared(slot)) return put_row(number, pe);
          if (Config::kGathers) put_gathered(number, pe);
        });
    tell_progress(warp_.union_of(adders), block + 1);
  }

  // Adds up the shared rows of a block, as their owner or, gathering, as everybody.
  PO_FN bool reduce(int64_t first, uint64_t block) {
    uint64_t senders = 0;
    auto adds = [&](const Slot& slot, int64_t number) {
      return is_shared(slot) && (Config::kGathers || owner_of(slot, number) == team_.rank);
    };
    auto collect = [&](const Slot& slot, int64_t number) {
      if (adds(slot, number)) senders |= slot.contributors;
    };
    for (int64_t number = first + warp_.rank(); number < min_of(first + block_slots_, num_union_);
         number += warp_.size()) {
      collect(slot_of(number), number);
    }
    senders = warp_.union_of(senders);
    if (senders == 0) return true;
    if (!await_progress(senders, block + 1, kPhaseShare)) return false;
    for_each_slot(
        first, [](const Slot&, int64_t) {}, adds,
        [&](const Slot& slot, int64_t number) {
          for_each_chunk([&](Chunk& chunk, int64_t offset) {
            uint64_t rest = slot.contributors;
            take(slot, number, lowest_bit(rest), offset, chunk);
            for (rest &= rest - 1; rest != 0; rest &= rest - 1) {
              Chunk addend(offset, plan_.row_bytes);
              take(slot, number, lowest_bit(rest), offset, addend);
              chunk.add(addend);
            }
            chunk.divide_by(static_cast<float>(plan_.divisor));
            if constexpr (Config::kGathers) {
              chunk.store(place_at(team_.rank, number));
            } else {
              store_everywhere(chunk, number);
            }
          });
        },
        [&](const Slot&, int64_t number, int pe) {
          if constexpr (!Config::kGathers) put_row(number, pe);
        });
    return true;
  }

  // ---- progress ---------------------------------------------------------------------------------------------------

  PO_FN uint64_t progress_offset(int sender) const {
    return plan_.progress_offset + static_cast<uint64_t>(sender * plan_.num_workers + number_) * sizeof(uint64_t);
  }

  // What this warp has stored so far is there for the PEs in `receivers`.
  PO_FN void tell_progress(uint64_t receivers, uint64_t progress) {
    warp_.sync();  // the stores of all lanes are before
    if (plan_.all_reachable == 0) return tell_progress_by_put(receivers, progress);
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || (receivers >> pe & 1) == 0) continue;
      signal(team_, pe, progress_offset(team_.rank), flag_value(team_.epoch, progress));
    }
  }

  // By the lane whose puts must come first.
  PO_FN void tell_progress_by_put(uint64_t receivers, uint64_t progress) {
    if (warp_.rank() != 0) return;
    fence_acq_rel_sys();  // what peers fetch from here is out as well
    put_fence(team_);
    for (int hop = 1; hop < team_.size; ++hop) {
      const int pe = (team_.rank + hop) % team_.size;
      if ((receivers >> pe & 1) == 0) continue;
      signal(team_, pe, progress_offset(team_.rank), flag_value(team_.epoch, progress));
    }
  }

  // Waits until the counterparts of this warp on the PEs in `senders` have come so far.
  PO_FN bool await_progress(uint64_t senders, uint64_t progress, Phase phase) {
    const uint64_t expected = flag_value(team_.epoch, progress);
    bool is_there = true;
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || (senders >> pe & 1) == 0) continue;
      const uint64_t* word = local_word(team_, progress_offset(pe));
      const bool has_come = await(team_, phase, pe, static_cast<uint64_t>(number_), [&](uint64_t* seen) {
        *seen = flag_load_acquire_sys(word);
        return *seen >= expected;
      });
      if (has_come && !is_reachable(team_, pe)) put_acquire(word, expected);
      is_there = is_there && has_come;
    }
    const int num_there = warp_.count(is_there);
    warp_.sync();  // what a lane has acquired is there for all
    return num_there == warp_.size();
  }

  // ---- rows -------------------------------------------------------------------------------------------------------

  template <class Use>
  PO_FN void for_each_chunk(const Use& use) const {
    for (int64_t offset = 0; offset < plan_.row_bytes; offset += Chunk::kChunkBytes) {
      Chunk chunk(offset, plan_.row_bytes);
      use(chunk, offset);
    }
  }

  PO_FN const uint8_t* values_of(int64_t entry) const {
    const int64_t number = call_.order == nullptr ? entry : call_.order[entry];
    return call_.values + number * plan_.row_bytes;
  }

  PO_FN void sum_own(const Slot& slot, Chunk& chunk) const {
    chunk.load(values_of(slot.first_entry));
    for (int64_t i = 1; i < slot.num_entries; ++i) chunk.add(values_of(slot.first_entry + i));
  }

  PO_FN uint8_t* place_at(int pe, int64_t number) const { return shared_.outputs[pe] + number * plan_.row_bytes; }

  // The next PE first and this one last.
  PO_FN void store_everywhere(const Chunk& chunk, int64_t number) const {
    for (int hop = 1; hop <= team_.size; ++hop) {
      const int pe = team_.rank + hop < team_.size ? team_.rank + hop : team_.rank + hop - team_.size;
      if (shared_.outputs[pe] != nullptr) chunk.store(place_at(pe, number));
    }
  }

  // From this PE's own slot.
  PO_FN void put_row(int64_t number, int pe) const {
    const auto bytes = static_cast<uint64_t>(plan_.row_bytes);
    put_nbi(team_, pe, shared_.output_offsets[pe] + static_cast<uint64_t>(number) * bytes, place_at(team_.rank, number),
            bytes);
  }

  // ---- rows that several PEs have -----------------------------------------------------------------------------------

  PO_FN uint64_t low_offset_of(int pe) const {
    return *local_word(team_, plan_.sets.headers_offset + static_cast<uint64_t>(pe) * sizeof(uint64_t));
  }

  // Leaves this PE's sum in its own slot, for the owner to fetch.
  PO_FN void leave(const Chunk& chunk, int64_t number) const {
    uint8_t* place = place_at(team_.rank, number);
    if constexpr (Chunk::kIsNarrow) {
      if (plan_.splits_partials != 0) {
        return chunk.store_split(place, team_.heap + plan_.low_offset + number * plan_.row_bytes);
      }
    }
    chunk.store(place);
  }

  // A contributor's sum of its entries.
  PO_FN void take(const Slot& slot, int64_t number, int pe, int64_t offset, Chunk& chunk) const {
    if constexpr (Config::kGathers) {
      chunk.load_floats(team_.heap + gathered_offset(pe, number));
    } else if (pe == team_.rank) {
      sum_own(slot, chunk);
    } else if (is_reachable(team_, pe)) {
      const uint64_t low = Chunk::kIsNarrow ? low_offset_of(pe) : 0;
      chunk.load_shared(place_at(pe, number),
                        low == 0 ? nullptr : peer_address(team_, pe, low) + number * plan_.row_bytes);
    } else {
      fetch(number, pe, offset, chunk);
    }
  }

  // From a PE that is not within reach, by way of this PE's own slot, which is free until the sum comes.
  PO_FN void fetch(int64_t number, int pe, int64_t offset, Chunk& chunk) const {
    const auto bytes = static_cast<uint64_t>(min_of(Chunk::kChunkBytes, plan_.row_bytes - offset));
    const uint64_t skipped = static_cast<uint64_t>(number * plan_.row_bytes + offset);
    const uint64_t low = Chunk::kIsNarrow ? low_offset_of(pe) : 0;
    uint8_t* own_low = low == 0 ? nullptr : team_.heap + plan_.low_offset + number * plan_.row_bytes;
    Group{}.sync();  // the last piece has been read
    if (warp_.rank() == Group{}.index() * Group::kSize || Group::kSize == 1) {
      get(team_, pe, shared_.output_offsets[pe] + skipped, place_at(team_.rank, number) + offset, bytes);
      if (own_low != nullptr) get(team_, pe, low + skipped, own_low + offset, bytes);
    }
    Group{}.sync();
    chunk.load_shared(place_at(team_.rank, number), own_low);
    Group{}.sync();
  }

  PO_FN uint64_t gathered_offset(int contributor, int64_t number) const {
    const int64_t row = contributor * plan_.capacity + number;
    return plan_.gather_offset + static_cast<uint64_t>(row * plan_.row_bytes * kFloatsPerScalar);
  }

  PO_FN void gather(const Chunk& chunk, int64_t number) const {
    for (int hop = 1; hop <= team_.size; ++hop) {
      const int pe = (team_.rank + hop) % team_.size;
      if (is_reachable(team_, pe)) chunk.store_floats(peer_address(team_, pe, gathered_offset(team_.rank, number)));
    }
  }

  PO_FN void put_gathered(int64_t number, int pe) const {
    const uint64_t offset = gathered_offset(team_.rank, number);
    put_nbi(team_, pe, offset, team_.heap + offset, static_cast<uint64_t>(plan_.row_bytes * kFloatsPerScalar));
  }

  const Plan& plan_;
  const Team& team_;
  Shared& shared_;
  const Call& call_;
  const int64_t num_entries_;
  const int64_t num_union_;
  const int64_t* rows_of_slots_;
  Slot* window_;
  const int64_t number_;  // of this warp, the same on every PE
  int64_t block_slots_;
  int64_t stride_;
  Warp warp_;
};

// ---- input ----------------------------------------------------------------------------------------------------------

PO_NOINLINE inline void report_input_error(const Plan& plan, InputErrorKind kind, int64_t entry, int64_t value,
                                           int64_t limit) {
  if (atomic_exchange_acq_rel_gpu(&plan.team.local->input_error_claimed, 1) != 0) return;
  InputErrorRecord& record = *plan.team.input_error;
  record.kind = kind;
  record.table = 0;
  record.bag = entry;
  record.value = value;
  record.limit = limit;
  flag_store_release_sys(&record.state, 1);  // the host reads `state` first (Workspace.raise_pending)
}

// How many of the entries are valid. They are sorted, so rows out of range are the first or the last ones.
PO_FN int64_t check_entries(const WorkGroup& wg, const Plan& plan, const Call& call) {
  const bool reports = wg.index() == 0 && wg.rank() == 0;
  int64_t count = call.num_entries;
  if (plan.num_entries != nullptr) {
    const int64_t given = *plan.num_entries;
    count = min_of(max_of<int64_t>(given, 0), call.num_entries);
    if (reports && given != count) report_input_error(plan, kBadCount, 0, given, call.num_entries);
  }
  // Nobody has sorted them: a wrong promise must not become a wrong sum.
  const auto stride = static_cast<int64_t>(wg.count()) * wg.size();
  for (int64_t entry = 1 + static_cast<int64_t>(wg.index()) * wg.size() + wg.rank();
       call.order == nullptr && entry < count; entry += stride) {
    const auto row = static_cast<int64_t>(call.rows[entry]);
    if (row > static_cast<int64_t>(call.rows[entry - 1])) continue;
    report_input_error(plan, kNotAscending, entry, row, static_cast<int64_t>(call.rows[entry - 1]));
  }
  if (!reports || count == 0) return count;
  for (const int64_t entry : {int64_t{0}, count - 1}) {
    const auto row = static_cast<int64_t>(call.rows[entry]);
    if (row >= 0 && row < plan.sets.num_rows) continue;
    report_input_error(plan, kBadRow, call.order == nullptr ? entry : call.order[entry], row, plan.sets.num_rows);
  }
  return count;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

struct Kernel {
  using Plan = sparse_all_reduce::Plan;
  using Call = sparse_all_reduce::Call;
  using Shared = sparse_all_reduce::Shared;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    const Team& team = plan.team;
    for (int i = wg.rank(); i < kNumChecks; i += wg.size()) shared.rows.failed[i] = 0;
    begin_launch(shared.plan.team, wg);
    mark(wg, plan, 0);
    if (wg.index() == 0) grant_credit(team, wg, call.output_offset);
    const int64_t num_entries = check_entries(wg, plan, call);
    exchange(wg, shared, call, num_entries);
    mark(wg, plan, 3);
    if (plan.all_reachable == 0) put_quiet(team);  // what was put from may be written again
    leave_launch(team, wg, &shared.is_last, call.output_offset, static_cast<uint64_t>(plan.capacity * plan.row_bytes));
  }

 private:
  // Everything that a launch which is given up leaves out.
  static PO_FN void exchange(const WorkGroup& wg, Shared& shared, const Call& call, int64_t num_entries) {
    const Plan& plan = shared.plan;
    const Team& team = plan.team;
    RowUnion<Config::Index> rows(wg, shared.rows, team, plan.sets, call.rows, num_entries);
    // Behind a launch that was given up: its peers may not be in this one.
    if (!rows.all_threads(kCheckAborted, wg.rank() != 0 || !is_aborted(team))) return;
    if (!rows.all_threads(kCheckCredits, find_outputs(wg, shared, call))) return;
    rows.tell(plan.splits_partials != 0 ? plan.low_offset : 0);
    if (!rows.count() || !rows.place()) return;
    mark(wg, plan, 1);
    if (wg.index() == 0 && wg.rank() == 0) tell_host(plan, rows.num_union(), rows.num_shares());
    if (rows.num_union() > plan.capacity) return;  // on every PE
    int64_t* listed = plan.rows_out;
    if (listed == nullptr) listed = reinterpret_cast<int64_t*>(team.heap + call.output_offset + values_bytes(plan));
    if (!rows.list(listed)) return;
    mark(wg, plan, 2);
    Worker(wg, shared, call, num_entries, rows.num_union(), listed).run();
  }

  static PO_FN uint64_t values_bytes(const Plan& plan) {
    return static_cast<uint64_t>(ceil_div<int64_t>(plan.capacity * plan.row_bytes, 8) * 8);
  }

  // Waits for every peer's credit and notes where its result is.
  static PO_FN bool find_outputs(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Team& team = shared.plan.team;
    bool is_granted = true;
    for (int pe = wg.rank(); pe < team.size; pe += wg.size()) {
      if (pe != team.rank && !await_credit(team, pe)) is_granted = false;
      const uint64_t offset = pe == team.rank ? call.output_offset : granted_output(team, pe);
      shared.output_offsets[pe] = offset;
      shared.outputs[pe] = is_reachable(team, pe) ? peer_address(team, pe, offset) : nullptr;
    }
    return is_granted;
  }

  static PO_FN void tell_host(const Plan& plan, int64_t num_rows, int64_t num_shares) {
    if (plan.num_rows_out != nullptr) *plan.num_rows_out = num_rows;
    if (plan.reports_overflow != 0 && num_rows > plan.capacity) {
      report_input_error(plan, kTooManyRows, 0, num_rows, plan.capacity);
    }
    if (plan.report == nullptr) return;
    plan.report->num_rows = num_rows;
    plan.report->num_shares = num_shares;
    flag_store_release_sys(&plan.report->state, 1);
  }

  static PO_FN void mark(const WorkGroup& wg, const Plan& plan, int phase) {
    if (wg.index() != 0 || wg.rank() != 0 || plan.report == nullptr) return;
    plan.report->phase_ns[phase] = clock_ns();
  }
};

}  // namespace po::sparse_all_reduce

PO_ENTRY(sparse_all_reduce, po::sparse_all_reduce::Kernel)
