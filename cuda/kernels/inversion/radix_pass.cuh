// One pass of the sort: each entry goes after all entries with a smaller digit, and after the entries with the same
// digit before it.
//
// The number of entries per digit is known for the whole. So a tile only needs to know how many entries of each digit
// the tiles before it have. It publishes its own numbers as soon as it has counted them. Then it adds up the numbers of
// the tiles before it, backwards, until one of them has published the sum of all tiles up to its own (decoupled
// look-back: Merrill and Garland 2016; Adinets and Merrill 2022). A number and its kind share one 32-bit word, so
// nothing has to be ordered. A WG has every count()-th tile, in ascending order, and all WGs are resident. So the first
// tile that is not done is some WG's current one, and waits for no other.
#pragma once

#include "kernels/inversion/entries.cuh"
#include "platform/ballots.cuh"
#include "platform/bits.cuh"
#include "platform/counters.cuh"

namespace po::embedding_inversion {

inline constexpr uint32_t kOfTile = 1u << 30;     // kind, above the number: entries of the tile
inline constexpr uint32_t kOfAll = 2u << 30;      // kind: entries of all tiles up to it
inline constexpr uint32_t kNumber = kOfTile - 1;  // bits of the number, and the largest number of lookups
PO_CONSTANT(kNumber)

template <class Traits>
class RadixPass {
 public:
  using Entry = typename Traits::Entry;
  static constexpr int kItems = Traits::kItems;
  static constexpr int kDigits = Traits::kDigits;
  static constexpr int kDigitWarps = min_of(ceil_div(kDigits, 32), Traits::kThreads / 32);  // whose threads own digits

  PO_FN RadixPass(const Group<Traits>& group, int pass)
      : group_(group),
        wg_(group.wg),
        pass_(pass),
        is_last_(pass + 1 == group.plan.num_passes),
        tile_words_(group.tile_words(pass)) {}

  // Returns the number of entries in the result. All threads.
  PO_FN int32_t place_digits() {
    for (int i = wg_.rank(); pass_ == 0 && i < group_.call.num_sources; i += group_.num_threads()) {
      group_.shared.made_tiles[i] = static_cast<int32_t>(group_.words().num_tiles[i]);  // a sync follows
    }
    const uint32_t* histogram = group_.words().histograms + pass_ * kDigits;
    uint32_t own = 0;
    PO_NO_UNROLL
    for (int digit = first_digit(); digit < end_digit(); ++digit) own += histogram[digit];
    uint32_t total;
    uint32_t place = sum_before_in_first<kDigitWarps>(wg_, group_.shared.scratch, own, &total);
    PO_NO_UNROLL
    for (int digit = first_digit(); digit < end_digit(); ++digit) {
      group_.shared.first_places[digit] = place;
      place += histogram[digit];
    }
    return static_cast<int32_t>(total);
  }

  // Sorts this WG's tiles of entries. In the first pass entries lie as they were made, later side by side. Returns
  // false if the launch was given up.
  PO_FN bool sort(int32_t num_entries) {
    int32_t num_tiles = ceil_div(num_entries, group_.tile_items());
    if (pass_ == 0) {
      num_tiles = 0;
      for (int i = 0; i < group_.call.num_sources; ++i) num_tiles += group_.shared.made_tiles[i];
    }
    Entry entries[kItems];
    if (wg_.index() < num_tiles) load(wg_.index(), num_entries, entries);
    PO_NO_UNROLL
    for (int32_t tile = wg_.index(); tile < num_tiles; tile += wg_.count()) {
      const TaskTrace trace(false);
      const auto count = static_cast<int>(order(tile, entries));
      const int32_t next = tile + wg_.count();
      if (next < num_tiles) load(next, num_entries, entries);  // loaded meanwhile
      if (!find_shifts(tile)) group_.give_up();
      if (!group_.goes_on()) return false;
      store(count);
    }
    return true;
  }

 private:
  // The first digit of this thread.
  PO_FN int first_digit() const { return min_of(wg_.rank() * ceil_div(kDigits, group_.num_threads()), kDigits); }
  PO_FN int end_digit() const { return min_of((wg_.rank() + 1) * ceil_div(kDigits, group_.num_threads()), kDigits); }

  // Puts a tile's entries in the order of their digits, in shared memory. Returns their number.
  PO_FN uint32_t order(int32_t tile, const Entry (&entries)[kItems]) const {
    uint32_t ranks[kItems];  // among the entries of the warp that have the digit
    rank(entries, ranks);
    wg_.sync();  // @inversion-ranked
    const uint32_t count = count_digits(tile);
    wg_.sync();  // @inversion-counted
    stage(entries, ranks);
    return count;
  }

  PO_FN void load(int32_t tile, int32_t num_entries, Entry (&entries)[kItems]) const {
    constexpr int kBytes = sizeof(Entry);
    const uint8_t* source = group_.entries(pass_);
    const int32_t first = (pass_ == 0 ? made_tile(tile) : tile) * group_.tile_items();
    const int32_t end = pass_ == 0 ? first + group_.tile_items() : num_entries;
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      const int32_t place = first + group_.place_of(u);
      entries[u].key = kNoKey<Entry>;
      if (place >= end) continue;
      const Vector<kBytes> words = load_shared_vector<kBytes>(source + static_cast<int64_t>(place) * kBytes);
      __builtin_memcpy(&entries[u], &words, kBytes);
    }
  }

  // The place of tile `number` among the tiles that were made.
  PO_FN int32_t made_tile(int32_t number) const {
    const Shared<Traits>& shared = group_.shared;
    int source = 0;
    for (; number >= shared.made_tiles[source]; ++source) number -= shared.made_tiles[source];
    return shared.first_tiles[source] + number;
  }

  // Counts the digits of the warp's entries, in their order.
  PO_FN void rank(const Entry (&entries)[kItems], uint32_t (&ranks)[kItems]) const {
    const Warp warp;
    const auto before = static_cast<uint32_t>(bits_below(warp.rank()));
    uint32_t* counters = group_.arena.counters(wg_.warp_index());
    for (int digit = warp.rank(); digit < kDigits; digit += warp.size()) counters[digit] = 0;
    warp.sync();
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      const bool is_there = entries[u].key != kNoKey<Entry>;
      const uint32_t digit = Traits::digit_of(entries[u].key, pass_);
      const uint32_t same = lanes_with(warp, digit, is_there);
      const uint32_t earlier = counters[digit];
      ranks[u] = earlier + static_cast<uint32_t>(count_bits(same & before));
      warp.sync();  // @inversion-counters-read
      if (is_there && (same & before) == 0) counters[digit] = earlier + static_cast<uint32_t>(count_bits(same));
      warp.sync();
    }
  }

  // The lanes with an entry of the same digit as this lane's.
  static PO_FN uint32_t lanes_with(const Warp& warp, uint32_t digit, bool is_there) {
    uint32_t same = warp.ballot(is_there);
    if constexpr (kWarpSize == 1) return same;
    PO_UNROLL
    for (int bit = 0; bit < Traits::kDigitBits; ++bit) same = lanes_alike(warp, same, digit, bit);
    return same;
  }

  // Turns the counters of each warp into the number of entries of earlier warps with the digit. Publishes how many
  // entries of each digit the tile has, and finds their places in the tile. Returns the number of entries. A thread
  // owns some digits.
  PO_FN uint32_t count_digits(int32_t tile) const {
    uint32_t own = 0;
    PO_NO_UNROLL
    for (int digit = first_digit(); digit < end_digit(); ++digit) {
      uint32_t count = 0;
      PO_UNROLL
      for (int warp = 0; warp < group_.num_warps(); ++warp) {
        uint32_t& counter = group_.arena.counters(warp)[digit];
        const uint32_t of_warp = counter;
        counter = count;
        count += of_warp;
      }
      // @inversion-tells-tile
      count_store_relaxed_gpu(tile_word(tile, digit), (tile == 0 ? kOfAll : kOfTile) | count);
      group_.shared.shifts[digit] = count;  // until find_shifts; for this thread alone
      own += count;
    }
    uint32_t total;
    uint32_t place = sum_before_in_first<kDigitWarps>(wg_, group_.shared.scratch, own, &total);
    PO_NO_UNROLL
    for (int digit = first_digit(); digit < end_digit(); ++digit) {
      group_.shared.staged_places[digit] = place;
      place += group_.shared.shifts[digit];
    }
    return total;
  }

  PO_FN void stage(const Entry (&entries)[kItems], const uint32_t (&ranks)[kItems]) const {
    const uint32_t* earlier = group_.arena.counters(wg_.warp_index());
    Entry* staged = group_.arena.tile();
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      if (entries[u].key == kNoKey<Entry>) continue;
      const uint32_t digit = Traits::digit_of(entries[u].key, pass_);
      staged[group_.shared.staged_places[digit] + earlier[digit] + ranks[u]] = entries[u];
    }
  }

  // Finds where the entries of this thread's digits go. Returns false if the launch was given up.
  PO_FN bool find_shifts(int32_t tile) const {
    PO_NO_UNROLL
    for (int digit = first_digit(); digit < end_digit(); ++digit) {
      uint32_t earlier = 0;
      if (tile != 0) {
        if (!look_back(tile, digit, earlier)) return false;
      }
      group_.shared.shifts[digit] = group_.shared.first_places[digit] + earlier - group_.shared.staged_places[digit];
    }
    return true;
  }

  PO_FN uint32_t* tile_word(int32_t tile, int digit) const {
    return tile_words_ + static_cast<int64_t>(tile) * kDigits + digit;
  }

  // Adds up how many entries of the tiles before have the digit, and publishes the sum up to this tile. Loads the words
  // of several tiles at a time; before the first tile's words there are some that hold nothing.
  PO_FN bool look_back(int32_t tile, int digit, uint32_t& sum) const {
    const Team& team = group_.plan.team;
    int32_t next = tile - 1;
    const auto look = [&] {
      const uint32_t* last = tile_word(next, digit);
      uint32_t words[kWordsAtOnce];
      PO_UNROLL
      for (int k = 0; k < kWordsAtOnce; ++k) words[k] = count_load_relaxed_gpu(last - k * kDigits);
      PO_UNROLL
      for (int k = 0; k < kWordsAtOnce; ++k) {
        if (words[k] < kOfTile) return false;  // @inversion-told
        sum += words[k] & kNumber;
        --next;
        if (words[k] >= kOfAll) return true;  // always true of tile 0
      }
      return false;
    };
    WaitTrace trace(0);
    for (uint32_t spins = 1; !look(); ++spins) {  // not await_own: waits of all threads would fill a timeline
      if (wg_.rank() == 0) {
        trace.looked_in_vain(team.rank, 0);
      }
      if (looks_up(spins) && is_aborted(team)) return false;
      spin_pause(spins);
    }
    count_store_relaxed_gpu(tile_word(tile, digit), kOfAll | (sum + group_.shared.shifts[digit]));
    return true;
  }

  PO_FN void store(int count) const {
    const Call& call = group_.call;
    if (!is_last_) {
      uint8_t* target = group_.entries(pass_ + 1);
      return for_each_staged(count, [&](const Entry& entry, uint32_t place) {
        constexpr int kBytes = sizeof(Entry);
        Vector<kBytes> words;
        __builtin_memcpy(&words, &entry, kBytes);
        store_vector<kBytes>(target + static_cast<uint64_t>(place) * kBytes, words);
      });
    }
    const auto member_bits = static_cast<int>(group_.plan.member_bits);
    for_each_staged(count, [&](const Entry& entry, uint32_t place) {
      static_cast<typename Traits::Key*>(call.keys)[place] =
          static_cast<typename Traits::Key>(entry.key >> member_bits);
      call.bags[place] = entry.bag;
      if constexpr (Traits::kLookups) call.lookups[place] = entry.lookup;
    });
  }

  // Calls use(entry, place in the result) for this thread's entries of a tile.
  template <class Use>
  PO_FN void for_each_staged(int count, const Use& use) const {
    const Entry* staged = group_.arena.tile();
    PO_UNROLL
    for (int u = 0; u < kItems; ++u) {
      const int i = u * group_.num_threads() + wg_.rank();
      if (i >= count) continue;
      const Entry entry = staged[i];
      use(entry, static_cast<uint32_t>(i) + group_.shared.shifts[Traits::digit_of(entry.key, pass_)]);
    }
  }

  const Group<Traits>& group_;
  const WorkGroup& wg_;
  const int pass_;
  const bool is_last_;
  uint32_t* const tile_words_;
};

}  // namespace po::embedding_inversion
