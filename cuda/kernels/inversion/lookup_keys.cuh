// Makes entries from indices and offsets, and counts for every pass how many keys have which digit.
//
// A tile is some lookups that lie side by side. Two searches find its bags: one for its first place, one for the place
// after its last. Marks in shared memory say where the bags in between begin; a lookup has the bag of the last mark
// up to it. If the ends of these bags rise, a search among all ends has the same answer: all other ends send every
// place of the tile the same way.
#pragma once

#include "kernels/inversion/bag_search.cuh"
#include "kernels/inversion/entries.cuh"
#include "platform/bits.cuh"
#include "platform/counters.cuh"

namespace po::embedding_inversion {

template <class Traits>
class LookupKeys {
 public:
  using Entry = typename Traits::Entry;
  using Key = typename Entry::Key;
  using Index = typename Traits::Index;
  using Offset = typename Traits::Offset;
  static constexpr int kItems = Traits::kItems % 8 == 0 ? 8 : min_of(Traits::kItems, 4);  // of a thread, at a time
  static_assert(Traits::kItems % kItems == 0, "a tile is whole numbers of these");
  static constexpr int kDigits = Traits::kDigits;

  PO_FN explicit LookupKeys(const Group<Traits>& group) : group_(group), wg_(group.wg) {}

  // Makes the entries of this WG's tiles.
  PO_FN void make() {
    const auto num_counters = static_cast<int>(group_.plan.num_passes) * kDigits;
    uint32_t* counters = group_.arena.counters(0);
    for (int i = wg_.rank(); i < num_counters; i += group_.num_threads()) counters[i] = 0;
    if (wg_.rank() == 0) group_.shared.falling_tile = 0;
    const int32_t stride = wg_.count();
    for (int32_t first = wg_.index(); first < group_.most_tiles; first += stride * Traits::kTilesAtOnce) {
      find_bags(first, stride);
      PO_NO_UNROLL
      for (int i = 0; i < Traits::kTilesAtOnce; ++i) {
        const int32_t tile = first + stride * i;
        if (tile >= group_.most_tiles) break;
        const int source = enter(tile);
        const int32_t first_bag = group_.shared.first_bags[i];
        if (first_bag == num_bags_) continue;  // no tile of the next source has a lookup of a bag, either
        make_tile(first_bag, group_.shared.end_bags[i]);
        if (wg_.rank() == 0) atomic_fetch_add_relaxed_gpu(&group_.words().num_tiles[source], 1);
      }
    }
    wg_.sync();  // all threads have counted their digits
    for (int i = wg_.rank(); i < num_counters; i += group_.num_threads()) {
      if (counters[i] != 0) count_add_relaxed_gpu(group_.words().histograms + i, counters[i]);
    }
  }

 private:
  // Continues with a tile. Returns the number of its source.
  PO_FN int enter(int32_t tile) {
    int number = 0;
    while (tile >= group_.shared.first_tiles[number + 1]) ++number;
    source_ = &Group<Traits>::source_of(group_.call, number);
    num_bags_ = static_cast<int32_t>(group_.plan.num_tables * source_->samples);
    tables_per_bag_ = ~0u / max_of(static_cast<uint32_t>(source_->samples), 1u);
    begin_ = (tile - group_.shared.first_tiles[number]) * group_.tile_items();
    entries_ = group_.entries(0) + static_cast<int64_t>(tile) * group_.tile_items() * static_cast<int>(sizeof(Entry));
    return number;
  }

  PO_FN const Offset* ends() const { return static_cast<const Offset*>(source_->offsets) + 1; }

  // Finds the bags of the first place in each tile, and of the place after its last.
  PO_FN void find_bags(int32_t first, int32_t stride) {
    const Warp warp;
    wg_.sync();  // all threads have read the last results
    for (int i = wg_.warp_index(); i < 2 * Traits::kTilesAtOnce; i += group_.num_warps()) {
      const int32_t tile = first + stride * (i / 2);
      if (tile >= group_.most_tiles) break;
      enter(tile);
      const int32_t bag = find_bag(ends(), num_bags_, begin_ + i % 2 * group_.tile_items(), warp);
      if (warp.rank() == 0) (i % 2 == 0 ? group_.shared.first_bags : group_.shared.end_bags)[i / 2] = bag;
    }
    wg_.sync();  // @inversion-bags-found
  }

  PO_FN void make_tile(int32_t first_bag, int32_t end_bag) {
    const TaskTrace trace(false);
    first_place_ = in_tile(static_cast<const Offset*>(source_->offsets)[0]);
    Key rows[kItems];
    load(0, rows);  // loaded together with the ends
    const bool is_marked = mark_bags(first_bag, end_bag - first_bag);
    int32_t bag = first_bag;  // of the previous place
    if (is_marked) bag += static_cast<int32_t>(group_.shared.bags_before[wg_.warp_index()]);
    PO_NO_UNROLL
    for (int item = 0; item < Traits::kItems; item += kItems) {
      if (item != 0) load(item, rows);
      int32_t bags[kItems];
      if (is_marked) {
        find_marked(item, first_bag, bag, bags);
      } else {
        search(item, bags);
      }
      finish(item, rows, bags);
    }
  }

  PO_FN void load(int item, Key (&rows)[kItems]) const {
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) rows[u] = row_at(group_.place_of(item + u));
  }

  // The row of a lookup of the tile. An index that does not fit becomes one that no table has.
  PO_FN Key row_at(int32_t place) const {
    if (begin_ + place >= source_->count) return kNoKey<Entry>;
    const Index index = static_cast<const Index*>(source_->indices)[begin_ + place];
    const auto row = static_cast<uint64_t>(static_cast<int64_t>(index));
    return row < kNoKey<Entry> ? static_cast<Key>(row) : kNoKey<Entry>;
  }

  // The offset, counted from the tile's first place, and clamped if all places of the tile are on one side of it.
  PO_FN int32_t in_tile(Offset offset) const {
    const auto place = static_cast<int64_t>(offset);
    if (place <= begin_) return 0;
    return static_cast<int32_t>(min_of<int64_t>(place - begin_, group_.tile_items()));
  }

  // Marks where bags begin that have lookups in the tile. Each begins at one of the ends from `first_bag` on; its mark
  // is the number of ends up to it. Returns false if these ends do not rise, or are too many to go through.
  PO_FN bool mark_bags(int32_t first_bag, int num_ends) const {
    constexpr int kMostEnds = sizeof(Entry) / 4;             // per place of the tile
    const auto tile = reinterpret_cast<uint64_t>(entries_);  // identifies the tile
    uint32_t* marks = group_.arena.marks();
    // @inversion-marks-read
    wg_.sync();  // the marks of the last tile have been read, and the bags of this one
    if (num_ends > kMostEnds * group_.tile_items()) return false;
    for (int i = wg_.rank(); i < group_.tile_items(); i += group_.num_threads()) marks[i] = 0;
    for (int i = wg_.rank(); i < group_.num_warps(); i += group_.num_threads()) group_.shared.bags_before[i] = 0;
    wg_.sync();  // @inversion-marks-cleared
    for (int i = wg_.rank(); i < num_ends; i += group_.num_threads()) {
      const Offset* last = ends() + first_bag + i;
      const int begin = in_tile(*last);  // of the next bag
      const int end = i + 1 < num_ends ? in_tile(last[1]) : group_.tile_items();
      const auto number = static_cast<uint32_t>(i + 1);
      if (end < begin) flag_store_relaxed_wg(&group_.shared.falling_tile, tile);
      if (end > begin) count_store_relaxed_wg(marks + begin, number);
      const int behind = min_of(end / group_.places_of_warp(), group_.num_warps() - 1);
      for (int warp = begin / group_.places_of_warp() + 1; warp <= behind; ++warp) {
        count_store_relaxed_wg(group_.shared.bags_before + warp, number);
      }
    }
    wg_.sync();  // @inversion-marked
    return flag_load_relaxed_wg(&group_.shared.falling_tile) != tile;
  }

  // Finds the bags of this thread's items. `bag`: of the warp's last place before them; afterwards, of the last of
  // them.
  PO_FN void find_marked(int item, int32_t first_bag, int32_t& bag, int32_t (&bags)[kItems]) const {
    const Warp warp;
    uint32_t marks[kItems];
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) marks[u] = group_.arena.marks()[group_.place_of(item + u)];
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      const auto through = static_cast<uint32_t>(bits_below(warp.rank() + 1));
      const uint32_t before = warp.ballot(marks[u] != 0) & through;  // @inversion-marked-lanes
      const uint32_t mark = warp.shuffle(marks[u], before == 0 ? 0 : highest_bit(before));
      bags[u] = before == 0 ? bag : first_bag + static_cast<int32_t>(mark);
      bag = warp.shuffle(bags[u], warp.size() - 1);
    }
  }

  // The same without marks. One search at a time; bags pass through the memory of the marks, so that they stay in
  // registers.
  PO_FN void search(int item, int32_t (&bags)[kItems]) const {
    uint32_t* marks = group_.arena.marks();
    PO_NO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      const int32_t place = group_.place_of(item + u);
      marks[place] = static_cast<uint32_t>(find_bag(ends(), num_bags_, begin_ + place));
    }
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) bags[u] = static_cast<int32_t>(marks[group_.place_of(item + u)]);
  }

  // Writes entries and counts digits, of rows and bags of the source; as many at a time as there are registers for.
  PO_FN void finish(int item, const Key (&rows)[kItems], const int32_t (&bags)[kItems]) const {
    constexpr int kMost = 32 / static_cast<int>(sizeof(Entry));
    constexpr int kAtOnce = kItems % kMost == 0 ? kMost : kItems;
    constexpr int kBytes = sizeof(Entry);
    PO_UNROLL
    for (int first = 0; first < kItems; first += kAtOnce) {
      Entry made[kAtOnce];
      PO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        made[u] = entry_of(group_.place_of(item + first + u), rows[first + u], bags[first + u]);
      }
      PO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        Vector<kBytes> words;
        __builtin_memcpy(&words, made + u, kBytes);
        store_vector<kBytes>(entries_ + group_.place_of(item + first + u) * kBytes, words);
      }
      PO_NO_UNROLL
      for (int pass = 0; pass < static_cast<int>(group_.plan.num_passes); ++pass) {
        PO_UNROLL
        for (const Entry& entry : made) {
          if (entry.key == kNoKey<Entry>) continue;
          count_add_relaxed_wg(group_.arena.counters(pass) + Traits::digit_of(entry.key, pass), 1);
        }
      }
      if constexpr (Traits::kCounts) {
        PO_UNROLL
        for (const Entry& entry : made) count_bag(entry.bag, entry.key != kNoKey<Entry>);
      }
    }
  }

  // `place`: in the tile. `bag`: of the source.
  PO_FN Entry entry_of(int32_t place, Key row, int32_t bag) const {
    const Plan& plan = group_.plan;
    Entry entry{};
    entry.key = kNoKey<Entry>;
    entry.bag = -1;
    if constexpr (Entry::kHasLookup) entry.lookup = static_cast<int32_t>(source_->first_lookup) + begin_ + place;
    if (bag >= num_bags_ || place < first_place_) return entry;
    const uint32_t table = table_of(static_cast<uint32_t>(bag));
    const uint32_t more_samples = static_cast<uint32_t>(plan.batch) - static_cast<uint32_t>(source_->samples);
    entry.bag = static_cast<int32_t>(static_cast<uint32_t>(source_->first_sample) + table * more_samples) + bag;
    if (row < static_cast<Key>(plan.num_rows[table])) {
      entry.key = static_cast<Key>(plan.first_keys[table]) + row;
      if (plan.members != nullptr) entry.key = entry.key << plan.member_bits | static_cast<Key>(plan.members[table]);
    }
    return entry;
  }

  // The bag divided by the samples. The reciprocal is rounded down, so the quotient is too small by one at most: bags
  // are below 2^31.
  PO_FN uint32_t table_of(uint32_t bag) const {
    const auto samples = static_cast<uint32_t>(source_->samples);
    const auto table = static_cast<uint32_t>(uint64_t{bag} * tables_per_bag_ >> 32);
    return bag - table * samples < samples ? table : table + 1;
  }

  // Lookups of a bag lie side by side. The first lane of each bag counts for the others.
  PO_FN void count_bag(int32_t bag, bool counts) const {
    const Warp warp;
    const int32_t before = warp.shuffle(bag, max_of(warp.rank() - 1, 0));
    const bool begins = warp.rank() == 0 || bag != before;
    const uint64_t beginning = warp.ballot(begins);
    const uint64_t counted = warp.ballot(counts);
    if (!begins || bag < 0) return;
    const uint64_t later = beginning & ~bits_below(warp.rank() + 1);
    const int end = later == 0 ? warp.size() : lowest_bit(later);
    const int count = count_bits(counted & bits_below(end) & ~bits_below(warp.rank()));
    if (count != 0) count_add_relaxed_gpu(group_.call.counts + bag, static_cast<uint32_t>(count));
  }

  const Group<Traits>& group_;
  const WorkGroup& wg_;
  // The current tile:
  const LookupSource* source_ = nullptr;
  int32_t num_bags_ = 0;         // of the source
  uint32_t tables_per_bag_ = 0;  // in parts of 2^32
  int32_t begin_ = 0;            // in the source
  int32_t first_place_ = 0;      // place in the tile from which on lookups may have a bag
  uint8_t* entries_ = nullptr;
};

}  // namespace po::embedding_inversion
