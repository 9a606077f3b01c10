// Sorts the lookups of an embedding batch by table row, as a backward pass needs them. One persistent launch of this PE
// alone.
//
// (1) Each lookup's bag is found and its key formed, and all digits of all keys are counted
// (inversion/lookup_keys.cuh). Lookups that do not count are left out from here on. (2) A stable sort by digits
// follows, the lowest first (inversion/radix_pass.cuh). A key travels with its bag, and with the lookup's own place if
// the caller wants it. All WGs meet after (1) and between passes. Words that must be zero are zero before a launch; the
// last WG to leave zeroes them.
#pragma once

#include "kernels/inversion/lookup_keys.cuh"
#include "kernels/inversion/radix_pass.cuh"
#include "platform/entry.cuh"

namespace po::embedding_inversion {

struct Config {
  IndexType index = IndexType::kInt64;
  IndexType offset = IndexType::kInt64;
  bool wide = false;     // keys do not fit 31 bits
  bool lookups = false;  // whether the lookups' places are wanted
  bool counts = false;   // whether counts of bags are wanted
  int digit_bits = 8;
  int items = 8;  // of a thread, in a tile
  int threads = 512;
  int blocks_per_sm = 2;
  int pes = kPeStep;  // a multiple of kPeStep, at least the number of PEs whose lookups are sorted
};

template <Config kConfig>
struct Traits {
  using Index = IndexOf<kConfig.index>;
  using Offset = IndexOf<kConfig.offset>;
  using Entry = std::conditional_t<kConfig.wide || kConfig.lookups, LargeEntry, SmallEntry>;
  using Key = std::conditional_t<kConfig.wide, int64_t, int32_t>;  // of the result
  static constexpr bool kLookups = kConfig.lookups;
  static constexpr bool kCounts = kConfig.counts;
  static constexpr int kDigitBits = kConfig.digit_bits;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr int kItems = kConfig.items;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = kConfig.blocks_per_sm;
  static constexpr int kPes = kConfig.pes;
  static constexpr int kTilesAtOnce = 8;  // whose bags are searched together
  static_assert(kDigitBits <= kMaxDigitBits, "the histograms have no room for more");

  static PO_FN uint32_t digit_of(typename Entry::Key key, int pass) {
    return static_cast<uint32_t>(key >> (pass * kDigitBits)) & (kDigits - 1);
  }
};

// Python needs this to size the arena.
PO_QUERY(arena_bytes, (int64_t num_warps, int64_t tile_items, int64_t num_digits, int64_t bytes_of_entry),
         arena_bytes(num_warps, tile_items, num_digits, bytes_of_entry))
PO_QUERY(tile_words_bytes, (int64_t num_passes, int64_t num_tiles, int64_t num_digits),
         tile_words_bytes(num_passes, num_tiles, num_digits))

template <Config kConfig>
struct Kernel {
  using Traits = embedding_inversion::Traits<kConfig>;
  using Plan = embedding_inversion::Plan;
  using Call = embedding_inversion::Call;
  using Shared = embedding_inversion::Shared<Traits>;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;
  static constexpr size_t kHostArenaBytes = static_cast<size_t>(
      arena_bytes(kMaxWarps, kMaxWarps* Traits::kItems, Traits::kDigits, sizeof(typename Traits::Entry)));

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Team& team = shared.plan.team;
    release_successor();  // all WGs are resident; a backward pass may push on what is left of the GPU
    if (wg.rank() == 0) {
      shared.gave_up = is_aborted(team);
      Group<Traits>::number_tiles(wg, shared, call);
    }
    begin_launch(shared.plan.team, wg);
    const Group<Traits> group(wg, shared, call);
    if (shared.gave_up == 0) sort(group);
    leave_launch(team, wg, &shared.is_last, 0, 0);
    if (shared.is_last != 0) clear(group);
  }

 private:
  static PO_FN void sort(const Group<Traits>& group) {
    const auto num_passes = static_cast<int>(group.plan.num_passes);
    int num_meetings = 0;
    if constexpr (Traits::kCounts) {
      each_of_grid(group, num_bags(group.plan), [&](int64_t bag) { group.call.counts[bag] = 0; });
      group.come_to_meeting();
      if (!group.await_meeting(++num_meetings)) return;  // @inversion-counts-zeroed
    }
    each_of_grid(group, tile_words_bytes(num_passes, group.most_tiles, Traits::kDigits) / 16, [&](int64_t i) {
      store_vector<16>(group.call.tile_words + 4 * i, Vector<16>{});  // @inversion-words-zeroed
    });
    LookupKeys<Traits>(group).make();
    PO_NO_UNROLL
    for (int pass = 0; pass < num_passes; ++pass) {
      group.come_to_meeting();
      RadixPass<Traits> radix(group, pass);
      int32_t total = 0;
      if (pass != 0) total = radix.place_digits();       // all have counted, so this waits for nothing
      if (!group.await_meeting(++num_meetings)) return;  // @inversion-meets
      if (pass == 0) {
        total = radix.place_digits();
        if (group.wg.index() == 0 && group.wg.rank() == 0) *group.call.count = total;
        if constexpr (Traits::kCounts) make_counts_float(group);
      }
      if (!radix.sort(total)) return;
    }
  }

  static PO_FN int64_t num_bags(const Plan& plan) { return plan.num_tables * plan.batch; }

  // Calls use(i) for all i below `count`, by all threads of the grid.
  template <class Use>
  static PO_FN void each_of_grid(const Group<Traits>& group, int64_t count, const Use& use) {
    const WorkGroup& wg = group.wg;
    const auto stride = static_cast<int64_t>(wg.count()) * wg.size();
    for (int64_t i = static_cast<int64_t>(wg.index()) * wg.size() + wg.rank(); i < count; i += stride) use(i);
  }

  static PO_FN void make_counts_float(const Group<Traits>& group) {
    each_of_grid(group, num_bags(group.plan), [&](int64_t bag) {
      uint32_t& count = group.call.counts[bag];
      count = float_bits(static_cast<float>(count));
    });
  }

  // Zeroes the words. The last WG to leave, after the work of all WGs.
  static PO_FN void clear(const Group<Traits>& group) {
    auto* words = reinterpret_cast<uint64_t*>(&group.words());
    constexpr int kCount = sizeof(typename Group<Traits>::Words) / sizeof(uint64_t);
    // @inversion-cleared
    for (int i = group.wg.rank(); i < kCount; i += group.wg.size()) words[i] = 0;
    if (group.wg.rank() == 0 && is_aborted(group.plan.team)) *group.call.count = 0;  // @inversion-aborted
  }
};

}  // namespace po::embedding_inversion
