// Finds where bags are in a PE's own lookups, and where slots begin in its messages.
#pragma once

#include "kernels/inputs/message.cuh"

namespace po::embedding_inputs {

// ---- where bags are -------------------------------------------------------------------------------------------------

// Combines sums of lengths, or maxima of offsets; both of numbers from 0 up.
template <class Traits>
PO_FN int64_t combined(int64_t before, int64_t value) {
  return Traits::kLengths ? before + value : max_of(before, value);
}

// Over the lanes up to this one.
template <class Traits>
PO_FN int64_t combined_through(const Warp& warp, int64_t value) {
  PO_UNROLL
  for (int distance = 1; distance < warp.size(); distance *= 2) {
    const int64_t before = warp.shuffle(value, max_of(warp.rank() - distance, 0));
    if (warp.rank() >= distance) value = combined<Traits>(before, value);
  }
  return value;
}

// Bounds that a lane loads together. A warp computes little and waits for memory, so it waits once for all of them. A
// host's thread finds them in its caches.
inline constexpr int kBoundsAtOnce = PO_ON_DEVICE ? 8 : 2;

// Calls `take(i, before)` for the numbers below `count`, where `before` combines the numbers before i. Returns the
// combination of all.
template <class Traits, class Load, class Take>
PO_FN int64_t scan(const Warp& warp, int64_t before, int32_t count, const Load& load, const Take& take) {
  PO_NO_UNROLL
  for (int32_t first = warp.rank(); first - warp.rank() < count; first += kBoundsAtOnce * warp.size()) {
    int64_t values[kBoundsAtOnce];
    PO_UNROLL
    for (int k = 0; k < kBoundsAtOnce; ++k) {
      const int32_t i = first + k * warp.size();
      values[k] = i < count ? load(i) : 0;
    }
    PO_UNROLL
    for (int k = 0; k < kBoundsAtOnce; ++k) {
      const int32_t i = first + k * warp.size();
      const int64_t through = combined<Traits>(before, combined_through<Traits>(warp, values[k]));
      const int64_t last = warp.shuffle(through, max_of(warp.rank() - 1, 0));
      if (i < count) take(i, warp.rank() == 0 ? before : last);
      before = warp.shuffle(through, warp.size() - 1);
    }
  }
  return before;
}

// A PE's bags, by number: feature * samples + sample. Chunks of them: feature * chunks of a feature + chunk.
template <class Traits>
class Bags {
 public:
  using Bound = typename Traits::Bound;

  PO_FN Bags(const Shared& shared, const Call& call) : shared_(shared), call_(call) {}

  PO_FN int32_t chunks_per_feature() const { return shared_.chunks_per_feature; }
  PO_FN int32_t first_bag(int32_t feature, int32_t part) const { return feature * samples() + part * chunk_bags(); }
  PO_FN int32_t num_bags(int32_t part) const { return min_of(chunk_bags(), samples() - part * chunk_bags()); }
  // The start value: 0 of sums, the begin of the first bag of maxima.
  PO_FN int64_t seed() const { return Traits::kLengths || samples() == 0 ? 0 : cut(begin(0)); }
  PO_FN int64_t length_or_end(int32_t bag) const { return bounds()[Traits::kLengths ? bag : bag + 1]; }
  PO_FN int64_t begin(int32_t bag) const { return bounds()[bag]; }
  PO_FN int64_t cut(int64_t bound) const { return min_of(max_of<int64_t>(bound, 0), call_.num_values); }
  PO_FN int32_t samples() const { return static_cast<int32_t>(call_.samples); }

 private:
  PO_FN const Bound* bounds() const { return static_cast<const Bound*>(call_.bounds); }
  PO_FN int32_t chunk_bags() const { return static_cast<int32_t>(shared_.plan.chunk_bags); }

  const Shared& shared_;
  const Call& call_;
};

PO_FN void report_bad_input(const Plan& plan, InputErrorKind kind, int64_t outer, int64_t inner, int64_t value,
                            int64_t limit) {
  if (plan.reports_bad_input != 0) report_input_error(plan.team, kind, outer, inner, value, limit);
}

// Whether no thread of the WG has given up.
PO_FN bool all_threads(const WorkGroup& wg, Shared& shared, Check check, bool is_good) {
  if (!is_good) flag_store_relaxed_wg(&shared.failed[check], 1);
  wg.sync();
  return flag_load_relaxed_wg(&shared.failed[check]) == 0;
}

// The work of one launch that finds places of bags and slots.
template <class Traits>
class Finder {
 public:
  PO_FN Finder(const WorkGroup& wg, Shared& shared, const Call& call)
      : wg_(wg), shared_(shared), plan_(shared.plan), call_(call), bags_(shared, call) {}

  // Returns false if the launch was given up.
  PO_FN bool run() const {
    const int32_t num_chunks = static_cast<int32_t>(plan_.num_features) * bags_.chunks_per_feature();
    const int32_t stride = wg_.num_warps() * wg_.count();
    PO_NO_UNROLL
    for (int32_t chunk = wg_.warp_index() * wg_.count() + wg_.index(); chunk < num_chunks; chunk += stride) {
      add_up(chunk);
    }
    // @sums-sync
    wg_.sync();  // orders the sums of all warps before the flag
    if (wg_.rank() == 0) flag_store_release_sys(plan_.added_up + wg_.index(), launch_flag(plan_.team));
    if (wg_.index() == 0) {
      if (!await_sums()) return false;
      find(num_chunks);
      // @found-sync
      wg_.sync();
      if (wg_.rank() == 0) flag_store_release_sys(plan_.added_up + wg_.count(), launch_flag(plan_.team));
      return true;
    }
    bool is_there = true;
    if (wg_.rank() == 0) is_there = await_flag(wg_.count());  // @found-await
    return all_threads(wg_, shared_, kCheckFound, is_there);
  }

 private:
  PO_FN bool await_flag(int number) const {
    const uint64_t* flag = plan_.added_up + number;
    return await_own(plan_.team, [&] { return epoch_of(flag_load_acquire_sys(flag)) >= plan_.team.epoch; });
  }

  PO_FN bool await_sums() const {
    bool are_there = true;
    for (int other = wg_.rank(); other < wg_.count(); other += wg_.size()) {
      are_there = await_flag(other) && are_there;  // @sums-await
    }
    return all_threads(wg_, shared_, kCheckAddedUp, are_there);
  }

  PO_FN void add_up(int32_t chunk) const {
    const TaskTrace trace(false);
    const int32_t part = chunk % bags_.chunks_per_feature();
    const int32_t first = bags_.first_bag(chunk / bags_.chunks_per_feature(), part);
    const int32_t count = bags_.num_bags(part);
    int64_t value = 0;
    int32_t bad = -1;
    PO_NO_UNROLL
    for (int32_t i = warp_.rank(); i < count; i += kBoundsAtOnce * warp_.size()) {
      int64_t bounds[kBoundsAtOnce];
      PO_UNROLL
      for (int k = 0; k < kBoundsAtOnce; ++k) {
        const int32_t bag = i + k * warp_.size();
        bounds[k] = bag < count ? bags_.length_or_end(first + bag) : 0;
      }
      PO_UNROLL
      for (int k = 0; k < kBoundsAtOnce; ++k) {
        const int32_t bag = i + k * warp_.size();
        if (bag >= count) continue;
        if (bounds[k] != bags_.cut(bounds[k]) || (!Traits::kLengths && bounds[k] < bags_.begin(first + bag))) {
          bad = first + bag;
        }
        value = combined<Traits>(value, bags_.cut(bounds[k]));
      }
    }
    if (bad >= 0) report(bad);
    warp_.sync();
    value = combined_through<Traits>(warp_, value);
    if (warp_.rank() == warp_.size() - 1) plan_.chunks[chunk] = value;
  }

  PO_FN void report(int32_t bag) const {
    report_bad_input(plan_, Traits::kLengths ? kBadLength : kBadOffset, bag / bags_.samples(), bag % bags_.samples(),
                     bags_.length_or_end(bag), call_.num_values);
  }

  // WG 0: finds where chunks begin, and from that where slots begin in messages.
  PO_FN void find(int32_t num_chunks) const {
    if (wg_.warp_index() == 0) scan_chunks(num_chunks);
    // @chunks-sync
    wg_.sync();
    for (int owner = wg_.warp_index(); owner < plan_.team.size; owner += wg_.num_warps()) scan_slots(owner);
    // @slots-sync
    wg_.sync();
    if (wg_.rank() == 0) find_longest();
  }

  PO_FN void scan_chunks(int32_t num_chunks) const {
    const int64_t before = scan<Traits>(
        warp_, bags_.seed(), num_chunks, [&](int32_t chunk) { return plan_.chunks[chunk]; },
        [&](int32_t chunk, int64_t begin) { plan_.chunks[chunk] = bags_.cut(begin); });
    if (warp_.rank() != 0) return;
    plan_.chunks[num_chunks] = bags_.cut(before);
    check_ends(before);
  }

  // Checks that the first bag begins at 0, and that the last one ends with the values.
  PO_FN void check_ends(int64_t total) const {
    if (Traits::kLengths || bags_.samples() == 0) {
      if (total != call_.num_values) report_bad_input(plan_, kBadTotal, 0, 0, total, call_.num_values);
      return;
    }
    const auto num_features = static_cast<int32_t>(plan_.num_features);
    const int64_t first = bags_.begin(0);
    const int64_t last = bags_.begin(num_features * bags_.samples());
    if (first != 0) report_bad_input(plan_, kBadOffset, 0, 0, first, call_.num_values);
    if (last != call_.num_values) {
      report_bad_input(plan_, kBadOffset, num_features - 1, bags_.samples() - 1, last, call_.num_values);
    }
  }

  PO_FN void scan_slots(int owner_number) const {
    const Owner& owner = plan_.owners[owner_number];
    const auto num_slots = static_cast<int32_t>(owner.num_slots);
    int64_t* begins = plan_.slot_begins + owner.first_slot + owner_number;
    int64_t before = 0;
    PO_NO_UNROLL
    for (int32_t first = 0; first < num_slots; first += warp_.size()) {
      const int32_t slot = first + warp_.rank();
      int64_t count = 0;
      if (slot < num_slots) {
        const int64_t* feature =
            plan_.chunks + plan_.slots[owner.first_slot + slot].feature * bags_.chunks_per_feature();
        count = feature[bags_.chunks_per_feature()] - feature[0];
      }
      const auto through = before + static_cast<int64_t>(warp_.sum_through(static_cast<uint64_t>(count)));
      if (slot < num_slots) begins[slot] = through - count;
      before = warp_.shuffle(through, warp_.size() - 1);
    }
    if (warp_.rank() == 0) begins[num_slots] = before;
  }

  PO_FN void find_longest() const;

  const WorkGroup& wg_;
  Shared& shared_;
  const Plan& plan_;
  const Call& call_;
  const Bags<Traits> bags_;
  const Warp warp_{};
};

template <class Traits>
PO_FN void Finder<Traits>::find_longest() const {
  int64_t pieces = 0;
  int64_t full_owner = -1;
  int64_t full_count = 0;
  int64_t full_capacity = 0;
  PO_NO_UNROLL
  for (int owner = 0; owner < plan_.team.size; ++owner) {
    const Message message(plan_, bags_.chunks_per_feature(), owner);
    pieces = max_of<int64_t>(pieces, message.num_pieces);
    if (!message.is_left_out() || message.count() <= full_count) continue;
    full_owner = owner;
    full_count = message.count();
    full_capacity = message.owner.capacity;
  }
  plan_.longest[kPieces] = pieces;
  plan_.longest[kFullOwner] = full_owner;
  plan_.longest[kFullCount] = full_count;
  plan_.longest[kFullCapacity] = full_capacity;
}

}  // namespace po::embedding_inputs
