// Backward pass of embedding_all_to_all with the optimizer's step, in one persistent launch. Gradients travel to the
// tables' owners, the gradients of a row are summed over the global batch, and the row is updated. With kGradient the
// sum itself is written, for a later step.
//
// Each PE has the gradient of its part of the batch, for all tables, and the lookups of the global batch in its own
// tables, sorted by row. Protocol: (1) WG 0 grants every peer credit to write this PE's staging,
// [table][batch][columns]. (2) The first WGs push (more of them if there are few lookups): a table's columns of some
// samples to the table's owner, table by table, a piece for each owner in turn. The warp that brings a table's last
// piece releases one sliceRdy word there. (3) Warps take ranges of the sorted lookups from a ticket counter, and own
// the rows whose lookups begin there. A warp awaits every peer's credit before its first row, and a table's words
// before the table's first row. This PE's own samples are read in place. A row with more than 256 lookups is cut into
// chunks of 256. A chunk belongs to the warp in whose range it begins; the warp that finishes the last chunk adds up
// the sums of all chunks.
//
// A row's gradients are added in fp32 in the order of its lookups, 256 at a time, and these sums in their order. So the
// bits do not depend on the grid, the number of PEs, or the order of arrival.
#pragma once

#include "comm/call_number.cuh"
#include "kernels/embedding_backward/gradient_push.cuh"
#include "kernels/embedding_backward/row_update.cuh"
#include "platform/entry.cuh"
#include "platform/prefetch.cuh"

namespace po::embedding_backward {

template <class Traits>
struct SharedOf {
  Plan plan;
  uint64_t is_last;
  LookupWindow<Traits> windows[PO_ON_DEVICE ? Traits::kThreads / kWarpSize : kMaxWarps];
};

// ---- all rows -------------------------------------------------------------------------------------------------------

// One warp's share of the reducing work.
template <class Traits>
class Reducer {
 public:
  using Window = LookupWindow<Traits>;
  using Key = typename Traits::Key;
  using Row = RowUpdate<Traits, typename Traits::Tile, true>;
  using LongRow = RowUpdate<Traits, Warp, false>;
  using LongSums = GradientSums<Traits, Warp, Traits::kShare>;
  using LongColumns = typename LongSums::Columns;

  PO_FN Reducer(const Plan& plan, const Call& call, Window& window)
      : plan_(plan),
        team_(plan.team),
        call_(call),
        window_(window),
        count_(static_cast<int>(*call.count)),
        filler_(plan, call, window, count_),
        row_(plan, call),
        long_row_(plan, call) {}

  // Reduces as one of `num_warps` warps that share the lookups.
  PO_FN void run(int num_warps) {
    // After a launch that was given up, the sorted lookups may be anything. One lane decides for the warp.
    if (warp_.shuffle(is_aborted(team_), 0)) return;
    if (warp_.rank() == 0) window_.range = range_of(count_, num_warps);
    // One span for all ranges: a span per range would cost more than a range.
    const TaskTrace trace(false);
    for (;;) {
      int begin = 0;
      if (warp_.rank() == 0) {
        const auto ticket = static_cast<int32_t>(atomic_fetch_add_relaxed_gpu(&team_.local->ticket, 1));
        begin = ticket * window_.range;
      }
      begin = warp_.shuffle(begin, 0);
      if (begin >= count_) return;
      if (warp_.rank() == 0) window_.end = min_of(begin + window_.range, count_);
      warp_.sync();  // @range-known-to-lanes
      if (!reduce(begin)) return;
    }
  }

 private:
  // Lookups of a ticket. With few lookups per warp the ticket is small, since a tile works through its rows one after
  // the other.
  static PO_FN int range_of(int count, int num_warps) {
    return max_of(min_of(ceil_div(count, num_warps * kLeastRounds), kRangeLookups), kLeastRange);
  }

  // Reduces the rows that begin in a range. Returns false if the launch was given up.
  PO_FN bool reduce(int begin) {
    if (!add_chunk_that_begins(begin)) return false;
    PO_NO_UNROLL
    for (int at = begin; at < window_.end;) {
      if (!enter_group_of(key_at(at))) return false;
      const Filled filled = filler_.fill(at);
      update_rows(filled, at);
      if (filled.is_open) update_open_row(filled.num_rows - 1, at);
      at = filled.next;
    }
    return true;
  }

  // Updates the rows whose lookups are all in the window, one row per tile.
  PO_FN void update_rows(const Filled& filled, int begin) const {
    const GroupView view = window_.group;
    const int count = filled.num_rows - (filled.is_open ? 1 : 0);
    if constexpr (Traits::Tile::kPerWarp != 1) filler_.order_rows(count);
    PO_NO_UNROLL
    for (int i = row_.lanes().index(); i < count; i += Traits::Tile::kPerWarp) {
      const int number = Traits::Tile::kPerWarp != 1 ? window_.order[i] : i;
      const int64_t row = window_.rows[number];
      const int first = window_.begins[number];
      const int last = window_.begins[number + 1];
      if constexpr (Traits::kPooling == Pooling::kWeightedSum) {
        if (call_.factor_gradients != nullptr) row_.differentiate_factors(view, row, window_, begin, first, last, 1);
      }
      row_.finish(view, row, begin + first,
                  [&](int part, auto& sums) { row_.sums().add_few(view, window_, part, first, last, sums); });
    }
  }

  // ---- rows whose lookups no window has: the whole warp ---------------------------------------------------------------

  PO_FN void update_open_row(int number, int window_begin) const {
    const int64_t row = window_.rows[number];
    const int begin = window_begin + window_.begins[number];
    const int end = end_of(begin, window_.group.first_key + row);
    if (end - begin > kChunkLookups) return add_chunk(row, begin, end, 0);
    differentiate(row, begin, end);
    finish_long(row, begin, [&](int part, LongColumns& sums) { add_streamed(part, begin, end, sums); });
  }

  // If a later chunk of a row begins in the range, adds that chunk up. Returns false if the launch was given up.
  PO_FN bool add_chunk_that_begins(int begin) {
    constexpr int kBefore = kChunkLookups - kRangeLookups + 1;  // the row's lookups before the range, at least
    const Key key = key_at(begin);
    if (begin < kBefore || key_at(begin - kBefore) != key) return true;
    const int first = lower_bound_near(keys(), 0, begin, key, begin, warp_);
    const int number = ceil_div(begin - first, kChunkLookups);
    const int chunk = first + number * kChunkLookups;
    if (chunk >= window_.end || key_at(chunk) != key) return true;  // @chunk-of-the-row
    if (!enter_group_of(key)) return false;
    add_chunk(key - window_.group.first_key, first, end_of(chunk, key), number);
    return true;
  }

  // Adds up one chunk of a row with several. The warp that finishes the last chunk adds up all sums and updates the
  // row.
  PO_FN void add_chunk(int64_t row, int begin, int end, int number) const {
    const int first = begin + number * kChunkLookups;
    const int last = min_of(first + kChunkLookups, end);
    const int slot = begin / kSlotLookups;
    PO_NO_UNROLL
    for (int part = 0; part < LongSums::num_parts(window_.group); ++part) {
      LongColumns sums = {};
      add_streamed(part, first, last, sums);
      long_sums_.store_sums(window_.group, part, sums_of(slot + number), sums);
    }
    differentiate(row, first, last);
    const int num_chunks = ceil_div(end - begin, kChunkLookups);
    if (!is_last_chunk(slot, num_chunks)) return;
    const int ahead = kSumBytesAhead / sum_bytes();
    finish_long(row, begin, [&](int part, LongColumns& sums) {
      PO_NO_UNROLL
      for (int i = 0; i < num_chunks; ++i) {
        if (ahead > 1 && i % ahead == 0) {
          const int bytes = min_of(ahead, num_chunks - i) * sum_bytes();
          prefetch_by_lanes<Cache::kOfMultiprocessor>(warp_, sums_of(slot + i), bytes);
        }
        long_sums_.add_stored(window_.group, part, sums_of(slot + i), sums);
      }
    });
  }

  PO_FN bool is_last_chunk(int slot, int num_chunks) const {
    // @sums-of-lanes
    warp_.sync();  // orders the sums of all lanes before the count
    bool is_last = false;
    if (warp_.rank() == 0) {
      uint64_t* done = call_.chunks_done + slot;
      is_last = atomic_add_fetch_acq_rel_gpu(done, 1) == static_cast<uint64_t>(num_chunks);  // @chunk-done
      if (is_last) *done = 0;                                                                // @chunks-reset
    }
    is_last = warp_.shuffle(is_last, 0);
    warp_.sync();  // hands what the lane has acquired to all lanes
    return is_last;
  }

  PO_FN float* sums_of(int slot) const { return call_.chunk_sums + slot * plan_.sum_elements; }
  PO_FN int sum_bytes() const { return static_cast<int>(plan_.sum_elements) * static_cast<int>(sizeof(float)); }

  PO_FN void add_streamed(int part, int begin, int end, LongColumns& sums) const {
    PO_NO_UNROLL
    for (int at = begin; at < end; at += Window::kCapacity) {
      const int count = min_of(Window::kCapacity, end - at);
      filler_.refill(at, count);
      long_sums_.add_many(window_.group, window_, part, 0, count, sums);
    }
  }

  // `sum_of(part, shares)` adds up a part's gradients, each lane its share of the columns. The update takes them in
  // chunks.
  template <class SumOf>
  PO_FN void finish_long(int64_t row, int first, const SumOf& sum_of) const {
    long_row_.finish(window_.group, row, first, [&](int part, typename LongRow::Columns& sums) {
      LongColumns shares = {};
      sum_of(part, shares);
      long_sums_.gather(shares, sums);
    });
  }

  PO_FN void differentiate(int64_t row, int begin, int end) const {
    if constexpr (Traits::kPooling == Pooling::kWeightedSum) {
      if (call_.factor_gradients == nullptr) return;
      PO_NO_UNROLL
      for (int at = begin; at < end; at += Window::kCapacity) {
        const int count = min_of(Window::kCapacity, end - at);
        filler_.refill(at, count);
        row_.differentiate_factors(window_.group, row, window_, at, row_.lanes().index(), count,
                                   Traits::Tile::kPerWarp);
      }
      warp_.sync();  // the row has been read by all lanes
    }
  }

  PO_FN const Key* keys() const { return static_cast<const Key*>(call_.keys); }
  PO_FN Key key_at(int at) const { return keys()[at]; }
  PO_FN int end_of(int begin, int64_t key) const {
    return lower_bound_near(keys(), begin, count_, key + 1, begin, warp_);
  }

  // ---- groups --------------------------------------------------------------------------------------------------------

  // Makes the key's group the current one, and awaits its gradients. Returns false if the launch was given up.
  PO_FN bool enter_group_of(int64_t key) {
    GroupView& view = window_.group;
    if (is_in_group_ && key >= view.first_key && key < view.end_key) return true;
    const int64_t number = group_of(key);
    if (!await_gradients(number)) return false;
    const Group& group = plan_.groups[number];
    if (warp_.rank() == 0) {
      const auto width = static_cast<int32_t>(group.width);
      view = {group.rows,
              Traits::kStep == Step::kGradient ? row_sums_of(group) : group.state,
              group.second,
              group.first_key,
              group.first_key + group.num_rows,
              width,
              1.0f / static_cast<float>(width),
              group.num_members == 1 ? static_cast<int32_t>(plan_.members[group.first_member]) : -1,
              row_.rates(plan_, call_),
              seed_of(group)};
    }
    warp_.sync();
    is_in_group_ = true;
    return true;
  }

  PO_FN uint64_t seed_of([[maybe_unused]] const Group& group) const {
    if constexpr (Traits::kRounding == Rounding::kStochastic) return call_.seeds[plan_.members[group.first_member]];
    return 0;
  }

  PO_FN float* row_sums_of(const Group& group) const {
    return call_.places == nullptr ? call_.sums + group.first_sum : call_.sums;
  }

  // The last group that begins at or before the key.
  PO_FN int64_t group_of(int64_t key) const {
    int64_t low = 0;
    int64_t high = plan_.num_groups;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plan_.groups[middle].first_key <= key ? low : high) = middle;
    }
    return low;
  }

  // Awaits all credits, and all gradients of a group's tables.
  PO_FN bool await_gradients(int64_t number) const {
    bool all = true;
    // @credits-before-updates
    if (!is_in_group_) {
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
    warp_.sync();  // hands what a lane has acquired to all lanes
    return true;
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  Window& window_;
  const int count_;
  const WindowFiller<Traits> filler_;
  const Row row_;
  const LongRow long_row_;
  const LongSums long_sums_{};
  const BallotWarp warp_{};
  bool is_in_group_ = false;
};

// The launch ends only when everything that peers push has arrived, whether or not a row needs it. The next launch may
// have other tables at these places, and its credit promises that no peer still stores there.
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
  using Shared = SharedOf<Traits>;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    if (wg.rank() == 0) name_call(shared.plan.team, call.forward_pass);  // @call-named
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, 0);  // @credit-of-backward
    const bool pushes_early = wg.index() < plan.pushing_wgs;
    if (!pushes_early) await_predecessor();  // @count-is-there
    if (pushes_early || pushes_behind_sort(plan, *call.count, wg.index())) Pusher<Traits>(plan, call).run();
    if (pushes_early) await_predecessor();  // @sort-has-ended
    if (plan.num_groups != 0) {
      Reducer<Traits>(plan, call, shared.windows[wg.warp_index()]).run(wg.count() * wg.num_warps());
    }
    if (wg.index() == 0) await_all_credits(plan.team, wg);
    if (wg.index() == 0) await_all_gradients(wg, plan);  // @all-gradients
    leave_launch(plan.team, wg, &shared.is_last, 0, 0);
    if (shared.is_last == 0) return;
    const bool has_given_up = is_aborted(plan.team);
    if constexpr (Traits::kPooling == Pooling::kWeightedSum) {
      if (has_given_up)
        poison(wg, reinterpret_cast<uint32_t*>(call.factor_gradients), call.num_factors);  // @factors-poison
    }
    if (wg.rank() != 0) return;
    if (plan.num_pushes != 0) plan.pushed[plan.num_pushes] = 0;  // @pieces-reset
    if (has_given_up) return;
    if constexpr (Traits::kStep != Step::kGradient) {
      *call.step_count += 1;  // after all reads of the count
      call.beta_powers[0] *= plan.beta1;
      call.beta_powers[1] *= plan.beta2;
    }
  }
};

}  // namespace po::embedding_backward
