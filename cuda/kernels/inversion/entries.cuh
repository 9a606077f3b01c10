// What is sorted, and the memory of a launch that all its WGs share.
#pragma once

#include "comm/launch.cuh"
#include "platform/scalar.cuh"
#include "platform/scan.cuh"
#include "tile/lookup_source.cuh"

#include <type_traits>

namespace po::embedding_inversion {

inline constexpr int kMaxPasses = 8;
inline constexpr int kMaxDigitBits = 8;
PO_CONSTANT(kMaxDigitBits)
static_assert(kMaxPasses * kMaxDigitBits >= 64, "the bits of a key");

// A lookup on its way to its place, in 8 bytes.
struct alignas(8) SmallEntry {
  using Key = uint32_t;
  static constexpr bool kHasLookup = false;
  Key key;
  int32_t bag;
};

struct alignas(16) LargeEntry {
  using Key = uint64_t;
  static constexpr bool kHasLookup = true;
  Key key;
  int32_t bag;
  int32_t lookup;  // place among the indices
};
PO_CONSTANT(sizeof(SmallEntry))
PO_CONSTANT(sizeof(LargeEntry))

// The key of a lookup that does not count: no row has it.
template <class Entry>
inline constexpr auto kNoKey = static_cast<typename Entry::Key>(-1);

struct Plan {
  Team team;
  const int64_t* first_keys;  // [num_tables]
  const int64_t* num_rows;    // [num_tables]
  int64_t num_tables;
  int64_t batch;           // bags of a table
  const int32_t* members;  // [num_tables]: number of a table among those that share its rows; null: with one source
  int64_t member_bits;     // bits of these numbers; lookups of a row come by them first
  int64_t num_passes;
  uint64_t* words;  // see Words
};
PO_DESCRIBE(Plan, team, first_keys, num_rows, num_tables, batch, members, member_bits, num_passes, words)

struct Call {
  LookupSource source;          // used if there is one
  const LookupSource* sources;  // one per PE, whose samples follow one another; null: `source` is the only one
  int64_t num_sources;
  // Scratch, with any contents:
  uint8_t* entries[2];   // each with room for whole tiles
  uint32_t* tile_words;  // [num_passes][kWordsAtOnce - 1 + tiles][digits]; see tile_words_bytes
  // Results; null if not wanted:
  void* keys;
  int32_t* bags;
  int32_t* lookups;
  uint32_t* counts;  // [num_tables * batch]; converted to floats in the end
  int64_t* count;
};
PO_DESCRIBE(Call, source, sources, num_sources, entries, tile_words, keys, bags, lookups, counts, count)

// Zero before and after every launch.
struct Words {
  alignas(128) uint64_t num_met;  // arrivals of WGs at all meetings so far
  alignas(128) uint32_t histograms[kMaxPasses << kMaxDigitBits];
};
PO_DESCRIBE(Words, num_met, histograms)

// Follows Words in memory.
template <int kSources>
struct WordsOfSources : Words {
  uint64_t num_tiles[kSources];  // of each source: its first tiles, those that have a lookup of a bag
};

inline constexpr int kWordsAtOnce = 4;  // loaded by a look-back at once

PO_FN constexpr int64_t tile_words_bytes(int64_t num_passes, int64_t num_tiles, int64_t num_digits) {
  return num_passes * (kWordsAtOnce - 1 + num_tiles) * num_digits * static_cast<int64_t>(sizeof(uint32_t));
}

// ---- one WG ---------------------------------------------------------------------------------------------------------

template <class Traits>
struct Shared {
  Plan plan;
  uint64_t is_last;
  uint64_t gave_up;
  uint64_t falling_tile;  // the tile in which the ends of bags were last seen to fall, by the address of its entries
  SumScratch scratch;
  int32_t first_tiles[Traits::kPes + 1];  // of each source
  int32_t made_tiles[Traits::kPes];
  uint32_t bags_before[kMaxWarps];  // of a tile's bags, those that begin before the warp's places
  int32_t first_bags[Traits::kTilesAtOnce];
  int32_t end_bags[Traits::kTilesAtOnce];
  uint32_t first_places[Traits::kDigits];   // of each digit, in the result of the pass
  uint32_t staged_places[Traits::kDigits];  // of each digit, in a tile
  uint32_t shifts[Traits::kDigits];         // from places in a tile to places in the result
};

// Bytes of a WG's arena: counters of each warp, one per digit, and a tile of entries. While lookups are read: counters
// of each pass, and marks where bags begin.
PO_FN constexpr int64_t arena_bytes(int64_t num_warps, int64_t tile_items, int64_t num_digits, int64_t bytes_of_entry) {
  return max_of<int64_t>(num_warps, kMaxPasses) * num_digits * 4 + tile_items * bytes_of_entry;
}

template <class Traits>
class Arena {
 public:
  using Entry = typename Traits::Entry;

  PO_FN explicit Arena(const WorkGroup& wg)
      : counters_(reinterpret_cast<uint32_t*>(wg.arena())),
        tile_(wg.arena() +
              arena_bytes(PO_ON_DEVICE ? Traits::kThreads / kWarpSize : wg.num_warps(), 0, Traits::kDigits, 0)) {}

  PO_FN uint32_t* counters(int number) const { return counters_ + number * Traits::kDigits; }
  PO_FN Entry* tile() const { return reinterpret_cast<Entry*>(tile_); }
  PO_FN uint32_t* marks() const { return reinterpret_cast<uint32_t*>(tile_); }

 private:
  uint32_t* counters_;
  uint8_t* tile_;
};

// The common state of the kernel's parts. There are fewer than 2^30 lookups, so places and tiles are 32-bit numbers.
template <class Traits>
struct Group {
  const WorkGroup& wg;
  Shared<Traits>& shared;
  const Plan& plan;
  const Call& call;
  Arena<Traits> arena;
  int32_t most_tiles;

  PO_FN Group(const WorkGroup& wg_in, Shared<Traits>& shared_in, const Call& call_in)
      : wg(wg_in), shared(shared_in), plan(shared_in.plan), call(call_in), arena(wg_in) {
    most_tiles = shared.first_tiles[call.num_sources];
  }

  // One thread, before any thread has a group.
  static PO_FN void number_tiles(const WorkGroup& wg, Shared<Traits>& shared, const Call& call) {
    const int32_t tile_items = wg.size() * Traits::kItems;
    int32_t first = 0;
    for (int i = 0; i < call.num_sources; ++i) {
      shared.first_tiles[i] = first;
      first += ceil_div(static_cast<int32_t>(source_of(call, i).count), tile_items);
    }
    shared.first_tiles[call.num_sources] = first;
  }

  static PO_FN const LookupSource& source_of(const Call& call, int number) {
    return call.sources == nullptr ? call.source : call.sources[number];
  }

  // On the GPU the compiler knows the number.
  PO_FN int num_threads() const { return PO_ON_DEVICE ? Traits::kThreads : wg.size(); }
  PO_FN int num_warps() const { return num_threads() / kWarpSize; }
  PO_FN int32_t tile_items() const { return num_threads() * Traits::kItems; }

  using Words = WordsOfSources<Traits::kPes>;
  PO_FN Words& words() const { return *reinterpret_cast<Words*>(plan.words); }

  // Places of a warp, in a tile.
  PO_FN int places_of_warp() const { return Traits::kItems * Warp().size(); }

  // The place of this thread's item in a tile. Items of a warp lie side by side.
  PO_FN int32_t place_of(int item) const {
    const Warp warp;
    return (wg.warp_index() * Traits::kItems + item) * warp.size() + warp.rank();
  }

  PO_FN uint8_t* entries(int pass) const { return call.entries[pass % 2]; }

  // [tiles][digits]
  PO_FN uint32_t* tile_words(int pass) const {
    const int64_t rows = static_cast<int64_t>(pass) * (kWordsAtOnce - 1 + most_tiles) + kWordsAtOnce - 1;
    return call.tile_words + rows * Traits::kDigits;
  }

  PO_FN void give_up() const { flag_store_relaxed_wg(&shared.gave_up, 1); }

  // Whether no thread of the WG has given up before this call. A sync lies between two calls, so all threads have the
  // same answer.
  PO_FN bool goes_on() const {
    wg.sync();  // @inversion-all-done
    return flag_load_relaxed_wg(&shared.gave_up) == 0;
  }

  // Arrives at a meeting of all WGs. After the meeting, each WG sees what all WGs have written before it.
  PO_FN void come_to_meeting() const {
    // @inversion-meet-sync
    wg.sync();  // orders what all threads have written before the count
    if (wg.rank() == 0) atomic_add_fetch_acq_rel_gpu(&words().num_met, 1);
  }

  // Waits until all WGs have arrived at the meeting of this number, from 1. Returns false if the launch was given up.
  PO_FN bool await_meeting(int number) const {
    if (wg.rank() == 0) {
      const auto expected = static_cast<uint64_t>(number) * static_cast<uint64_t>(wg.count());
      const uint64_t* met = &words().num_met;
      // @inversion-meet-await
      if (!await_own(plan.team, [&] { return flag_load_acquire_sys(met) >= expected; })) give_up();
    }
    return goes_on();
  }
};

}  // namespace po::embedding_inversion
