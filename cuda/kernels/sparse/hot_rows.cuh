// Rows of which one PE has so many entries that one warp would keep all others waiting while it adds them up.
//
// Before the exchange, all warps of the PE share the columns of such rows. Each piece of columns is added up by one
// group of lanes, in order of occurrence as everywhere, so no bit depends on the division.
#pragma once

#include "kernels/sparse/row_transfer.cuh"

namespace po {

// Private memory of a PE.
struct HotList {
  static constexpr int64_t kMost = 8192;

  uint64_t count;
  uint64_t places[kMost];  // first entry; the slot in the bits above it
};
PO_CONSTANT(sizeof(HotList))

template <class Traits, class Plan>
class HotRows {
 public:
  using Chunk = Traits::Piece;
  using Group = Chunk::Group;
  using Transfer = RowTransfer<Traits, Plan>;
  static constexpr int64_t kNever = INT64_MAX;

  // Entries from which on a row is hot on this PE: at least so many that the list has room for all hot rows.
  static PO_FN int64_t least_entries(const Plan& plan, const Traits::Entries& entries) {
    // If peers are not reachable, their sums use the place in which a hot row's sum would wait.
    if (entries.order == nullptr || plan.all_reachable == 0) return kNever;
    return max_of<int64_t>(Traits::kHotEntries, ceil_div(entries.count, HotList::kMost));
  }

  PO_FN HotRows(const WorkGroup& wg, const Plan& plan, const Traits::Entries& entries, const Transfer& transfer,
                int64_t least)
      : wg_(wg), plan_(plan), entries_(entries), transfer_(transfer), least_(least) {}

  // One thread, before the WGs of this PE have met.
  static PO_FN void clear(const Plan& plan) { plan.hot->count = 0; }

  // All threads of all WGs, each with entries of its own.
  PO_FN void find(const int64_t* rows_of_slots, int64_t num_union) const {
    const auto stride = static_cast<int64_t>(wg_.count()) * wg_.size();
    const int64_t end = entries_.count - least_ + 1;
    for (int64_t entry = static_cast<int64_t>(wg_.index()) * wg_.size() + wg_.rank(); entry < end; entry += stride) {
      const auto row = static_cast<int64_t>(entries_.rows[entry]);
      if (static_cast<int64_t>(entries_.rows[entry + least_ - 1]) != row) continue;
      if (entry > 0 && static_cast<int64_t>(entries_.rows[entry - 1]) == row) continue;
      if (row < 0 || row >= plan_.sets.num_rows) continue;
      const auto slot = static_cast<uint64_t>(lower_bound_near(rows_of_slots, 0, num_union, row));
      const uint64_t place = atomic_fetch_add_relaxed_gpu(&plan_.hot->count, 1);
      plan_.hot->places[place] = slot << 32 | static_cast<uint64_t>(entry);
    }
  }

  // After a meeting of the WGs.
  PO_FN void sum() const {
    const int64_t pieces = ceil_div(plan_.row_bytes, Chunk::kChunkBytes);
    const int64_t total = static_cast<int64_t>(plan_.hot->count) * pieces;
    const auto groups = static_cast<int64_t>(wg_.count()) * wg_.num_warps() * Group::kPerWarp;
    const int64_t first = (static_cast<int64_t>(wg_.warp_index()) * wg_.count() + wg_.index()) * Group::kPerWarp;
    for (int64_t work = first + Group{}.index(); work < total; work += groups) {
      const uint64_t place = plan_.hot->places[work / pieces];
      const auto entry = static_cast<int64_t>(place & 0xffffffff);
      const auto row = static_cast<int64_t>(entries_.rows[entry]);
      const int64_t end = lower_bound_near(entries_.rows, entry + least_, entries_.count, row + 1);
      Chunk chunk(work % pieces * Chunk::kChunkBytes, plan_.row_bytes);
      chunk.load(transfer_.values_of(entry));
      chunk.template add_all<kTogether>(entry + 1, end, [&](int64_t i) { return transfer_.values_of(i); });
      transfer_.store_hot(chunk, static_cast<int64_t>(place >> 32));
    }
  }

 private:
  static constexpr int kTogether = 8;

  const WorkGroup& wg_;
  const Plan& plan_;
  const Traits::Entries& entries_;
  const Transfer& transfer_;
  const int64_t least_;
};

}  // namespace po
