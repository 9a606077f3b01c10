// Which PE has which rows of a sparse tensor, and the place of every row in the sorted union of all, without a sort, a
// hash or a search.
//
// Each PE keeps a plane per PE in its heap: a bit per row of the tensor. A WG has the same range of words on every PE.
// It finds its entries among the sorted ones of this PE, sets their bits and stores the words into all PEs' planes.
// Once the same range has come from every PE, it counts the bits of the union. The counts of all WGs give each WG the
// place of its first row, and it lists its rows' numbers. The planes are then final for the launch.
#pragma once

#include "comm/launch.cuh"
#include "platform/bits.cuh"
#include "platform/scan.cuh"

namespace po {

inline constexpr Phase kPhaseRowSet = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseRowSet)

inline constexpr int kRowsPerWord = 64;
PO_CONSTANT(kRowsPerWord)
// @chunk-words
inline constexpr int kChunkWords = 1024;  // words of a plane that a WG assembles at a time

struct RowSets {
  int64_t num_rows;
  int64_t num_words;        // of a plane
  uint64_t planes_offset;   // in every heap: uint64_t[size][num_words]
  uint64_t headers_offset;  // in every heap: uint64_t[size], a word from each PE to all others
  uint32_t* first_entry;    // private, [num_words]: this PE's first entry in a word, if it has any
  Packet* totals;           // private, [WGs]
  uint64_t* met;            // private, [kNumMeetings][WGs]: flags
};
PO_DESCRIBE(RowSets, num_rows, num_words, planes_offset, headers_offset, first_entry, totals, met)

enum Check { kCheckCredits, kCheckSets, kCheckTotals, kCheckMet, kNumChecks = kCheckMet + 3 };
enum Meeting { kMeetListed, kMeetFound, kMeetSummed, kNumMeetings };
PO_CONSTANT(kNumMeetings)
static_assert(static_cast<int>(kNumChecks) - static_cast<int>(kCheckMet) == static_cast<int>(kNumMeetings),
              "each meeting has a check of its own");

struct UnionShared {
  uint64_t words[kChunkWords];
  uint64_t failed[kNumChecks];  // a word per check: no thread may write a word that another thread still reads
  int64_t first_entry;
  int64_t last_entry;
  SumScratch scratch;
};

template <class Index>
class RowUnion {
 public:
  // `rows`: of this PE's entries, ascending. Rows out of range have no bit.
  PO_FN RowUnion(const WorkGroup& wg, UnionShared& shared, const Team& team, const RowSets& sets, const Index* rows,
                 int64_t num_entries)
      : wg_(wg), shared_(shared), team_(team), sets_(sets), rows_(rows), num_entries_(num_entries) {
    const auto num_words = static_cast<uint32_t>(sets.num_words);  // of at most 2^31 rows
    const auto num_wgs = static_cast<uint32_t>(wg.count());
    const auto index = static_cast<uint32_t>(wg.index());
    const uint32_t share = num_words / num_wgs;
    const uint32_t longer = num_words - share * num_wgs;  // WGs with one word more
    first_word_ = int64_t{index} * share + min_of(index, longer);
    last_word_ = first_word_ + share + (index < longer ? 1 : 0);
  }

  // The work that needs no credit from the receivers.
  PO_FN void prepare() {
    if (first_word_ < last_word_) assemble(first_word_, chunk_from(first_word_));
  }

  // Sets this PE's bits in all PEs' planes. Every receiver has granted credit. `header`: WG 0 publishes it to all PEs.
  PO_FN void tell(uint64_t header) {
    for (int64_t first = first_word_; first < last_word_; first += kChunkWords) {
      const int count = chunk_from(first);
      if (first != first_word_) assemble(first, count);
      send(first, count);
    }
    if (wg_.index() == 0) send_header(header);
    // @sets-before-ready
    wg_.sync();  // orders the words of all threads before the flags that announce them
    for (int peer = wg_.rank(); peer < team_.size; peer += wg_.size()) {
      if (peer == team_.rank) continue;
      const uint64_t range = word_offset(team_.rank, first_word_), header = header_offset(team_.rank);
      if (!is_reachable(team_, peer)) {
        fence_acq_rel_sys();  // publishes the words of all threads to the network
        if (kPuts && wg_.index() == 0) {
          put_signal(team_, peer, header, team_.heap + header, sizeof(uint64_t), header_word(team_.rank),
                     launch_flag(team_));
        }
      }
      put_signal(team_, peer, range, team_.heap + range,
                 static_cast<uint64_t>(last_word_ - first_word_) * sizeof(uint64_t),
                 ready_word_offset(team_, team_.rank, static_cast<uint64_t>(wg_.index())), launch_flag(team_));
    }
  }

  // Waits for all PEs' bits in this WG's range and publishes the number of rows there to the other WGs. Returns false
  // if the launch was given up.
  PO_FN bool count() {
    bool is_there = true;
    for (int sender = wg_.rank(); sender < team_.size; sender += wg_.size()) {
      if (sender == team_.rank) continue;  // @sets-await
      const auto index = static_cast<uint64_t>(wg_.index());
      const uint64_t* flag = local_word(team_, ready_word_offset(team_, sender, index));
      is_there = await_epoch(team_, flag, kPhaseRowSet, sender, index) && is_there;
      if (kPuts && index == 0 && !is_reachable(team_, sender)) {
        flag = local_word(team_, header_word(sender));
        is_there = await_epoch(team_, flag, kPhaseRowSet, sender, index) && is_there;  // @header-await
      }
    }
    if (!all_threads(kCheckSets, is_there)) return false;
    uint64_t rows = 0;
    uint64_t shares = 0;
    for (int64_t word = first_word_ + wg_.rank(); word < last_word_; word += wg_.size()) {
      uint64_t bits = 0;
      for (int pe = 0; pe < team_.size; ++pe) {
        const uint64_t own = plane_word(pe, word);
        bits |= own;
        shares += static_cast<uint64_t>(count_bits(own));
      }
      rows += static_cast<uint64_t>(count_bits(bits));
      if (word == first_word_ + wg_.rank()) first_bits_ = bits;
    }
    uint64_t total_rows;
    uint64_t total_shares;
    sum_before(wg_, shared_.scratch, rows, &total_rows);
    sum_before(wg_, shared_.scratch, shares, &total_shares);
    if (wg_.rank() == 0) {
      Packet packet{};
      packet.data[0] = static_cast<uint32_t>(total_rows);
      packet.data[1] = static_cast<uint32_t>(min_of<uint64_t>(total_shares, 0xffffffff));
      packet.flag = launch_flag(team_);
      packet_store_sys(sets_.totals + wg_.index(), packet);
    }
    return true;
  }

  // Waits for all WGs' counts. Returns false if the launch was given up.
  PO_FN bool place() {
    const uint64_t flag = launch_flag(team_);
    bool is_there = true;
    uint64_t sums = 0;  // rows before this WG's; in the upper half the rows of all WGs: both stay below 2^32
    uint64_t shares = 0;
    for (int other = wg_.rank(); other < wg_.count(); other += wg_.size()) {
      Packet packet{};
      is_there = await_own(team_,
                           [&] {
                             packet = packet_load_sys(sets_.totals + other, flag);
                             return packet.flag == flag;  // @totals-flag
                           }) &&
                 is_there;
      const uint64_t count = packet.data[0];
      sums += count << 32 | (other < wg_.index() ? count : 0);
      shares += packet.data[1];
    }
    if (!all_threads(kCheckTotals, is_there)) return false;
    uint64_t total;
    sum_before(wg_, shared_.scratch, sums, &total);
    num_union_ = static_cast<int64_t>(total >> 32);
    first_slot_ = static_cast<int64_t>(total & 0xffffffff);
    sum_before(wg_, shared_.scratch, shares, &total);
    num_shares_ = static_cast<int64_t>(total);
    return true;
  }

  PO_FN int64_t num_union() const { return num_union_; }
  PO_FN int64_t num_shares() const { return num_shares_; }  // rows of all PEs together

  // Lists the rows of this WG's range.
  PO_FN void list(int64_t* listed_rows) {
    int64_t slot = first_slot_;
    for (int64_t first = first_word_; first < last_word_; first += wg_.size()) {
      const int64_t word = first + wg_.rank();
      uint64_t bits = first == first_word_ ? first_bits_ : 0;
      if (first != first_word_ && word < last_word_) bits = union_word(word);
      uint64_t count;
      int64_t* place =
          listed_rows + slot +
          static_cast<int64_t>(sum_before(wg_, shared_.scratch, static_cast<uint64_t>(count_bits(bits)), &count));
      for (; bits != 0; bits &= bits - 1) *place++ = word * kRowsPerWord + lowest_bit(bits);
      slot += static_cast<int64_t>(count);
    }
  }

  // Waits for all WGs of this PE. Each WG then sees what all WGs have written, and what they have acquired from peers.
  // Returns false if the launch was given up.
  PO_FN bool meet(Meeting meeting) const {
    uint64_t* flags = sets_.met + static_cast<int>(meeting) * wg_.count();
    // @meet-sync
    wg_.sync();  // orders what all threads have written and acquired before the flag
    if (wg_.rank() == 0) flag_store_release_gpu(flags + wg_.index(), launch_flag(team_));
    bool is_there = true;
    for (int other = wg_.rank(); other < wg_.count(); other += wg_.size()) {
      is_there =
          // @meet-await
          await_own(team_, [&] { return epoch_of(flag_load_acquire_gpu(flags + other)) >= team_.epoch; }) && is_there;
    }
    return all_threads(static_cast<Check>(static_cast<int>(kCheckMet) + static_cast<int>(meeting)), is_there);
  }

  // Whether all threads of the WG pass `is_good`.
  PO_FN bool all_threads(Check check, bool is_good) const {
    if (!is_good) flag_store_relaxed_wg(&shared_.failed[check], 1);
    wg_.sync();
    return flag_load_relaxed_wg(&shared_.failed[check]) == 0;
  }

 private:
  // Number of words of this WG's range that are assembled together, from `first` on.
  PO_FN int chunk_from(int64_t first) const {
    return static_cast<int>(min_of<int64_t>(kChunkWords, last_word_ - first));
  }

  PO_FN uint64_t word_offset(int pe, int64_t word) const {
    return sets_.planes_offset + static_cast<uint64_t>(pe * sets_.num_words + word) * sizeof(uint64_t);
  }

  PO_FN uint64_t union_word(int64_t word) const {
    uint64_t bits = 0;
    for (int pe = 0; pe < team_.size; ++pe) bits |= plane_word(pe, word);
    return bits;
  }

  PO_FN uint64_t plane_word(int pe, int64_t word) const { return *local_word(team_, word_offset(pe, word)); }

  PO_FN void assemble(int64_t first, int count) {
    const Warp warp;
    for (int i = wg_.rank(); i < count; i += wg_.size()) shared_.words[i] = 0;
    const int64_t first_row = first * kRowsPerWord;
    const int64_t end_row = min_of(first_row + count * kRowsPerWord, sets_.num_rows);
    if (wg_.warp_index() == 0) {
      const int64_t entry = lower_bound<int64_t>(rows_, 0, num_entries_, first_row, warp);
      if (warp.rank() == 0) shared_.first_entry = entry;
    }
    if (wg_.warp_index() == wg_.num_warps() - 1) {
      const int64_t entry = lower_bound<int64_t>(rows_, 0, num_entries_, end_row, warp);
      if (warp.rank() == 0) shared_.last_entry = entry;
    }
    wg_.sync();
    const int64_t last = shared_.last_entry;
    for (int64_t entry = shared_.first_entry + wg_.rank(); entry < last; entry += wg_.size()) {
      const auto row = static_cast<int64_t>(rows_[entry]);
      const int64_t before = entry > shared_.first_entry ? static_cast<int64_t>(rows_[entry - 1]) : -1;
      if (row == before) continue;
      const int64_t word = row / kRowsPerWord;
      if (row < first_row || row >= end_row) continue;  // the rows are not sorted, which is reported
      atomic_or_relaxed_wg(&shared_.words[word - first], 1ull << row % kRowsPerWord);
      if (before < 0 || before / kRowsPerWord != word) sets_.first_entry[word] = static_cast<uint32_t>(entry);
    }
    wg_.sync();  // @bits-set
  }

  // Stores to the planes of this PE and of reachable PEs; the others' planes are put from the own one. A thread
  // sends the words that it clears for the next chunk.
  PO_FN void send(int64_t first, int count) {
    for (int hop = 0; hop < team_.size; ++hop) {
      const int pe = (team_.rank + 1 + hop) % team_.size;
      if (!is_reachable(team_, pe)) continue;
      auto* words = reinterpret_cast<uint64_t*>(peer_address(team_, pe, word_offset(team_.rank, first)));
      for (int i = wg_.rank(); i < count; i += wg_.size()) words[i] = shared_.words[i];
    }
  }

  PO_FN void send_header(uint64_t header) {
    const uint64_t offset = header_offset(team_.rank);
    for (int pe = wg_.rank(); pe < team_.size; pe += wg_.size()) {
      if (is_reachable(team_, pe)) *reinterpret_cast<uint64_t*>(peer_address(team_, pe, offset)) = header;
    }
  }

  PO_FN uint64_t header_offset(int pe) const {
    return sets_.headers_offset + static_cast<uint64_t>(pe) * sizeof(uint64_t);
  }
  // The sliceRdy word of a header that is put: one more than the WGs have.
  PO_FN uint64_t header_word(int sender) const {
    return ready_word_offset(team_, sender, static_cast<uint64_t>(wg_.count()));
  }

  const WorkGroup& wg_;
  UnionShared& shared_;
  const Team& team_;
  const RowSets& sets_;
  const Index* rows_;
  const int64_t num_entries_;
  int64_t first_word_;
  int64_t last_word_;
  int64_t num_union_ = 0;
  int64_t num_shares_ = 0;
  int64_t first_slot_ = 0;
  uint64_t first_bits_ = 0;  // of the union, in the first word that this thread counts
};

// Reads from the planes which PEs have a row.
template <int kPes>
struct RowPlace {
  BitSet<kPes> contributors;
  int64_t first_entry;  // of this PE, if it has the row: this entry, if no lower row of the same word has several
};

template <int kPes>
PO_FN RowPlace<kPes> find_row(const Team& team, const RowSets& sets, int64_t row) {
  const int64_t word = row / kRowsPerWord;
  const auto bit = static_cast<int>(row % kRowsPerWord);
  const uint64_t* plane = local_word(team, sets.planes_offset) + word;
  const int64_t first_of_word = sets.first_entry[word];  // loaded before it is known whether it is valid
  BitSet<kPes> contributors{};
  uint64_t own = 0;
  for (int pe = 0; pe < team.size; ++pe) {
    const uint64_t bits = plane[pe * sets.num_words];
    if (pe == team.rank) own = bits;
    contributors.add(pe, bits >> bit & 1);
  }
  return {contributors, first_of_word + count_bits(own & bits_below(bit))};
}

}  // namespace po
