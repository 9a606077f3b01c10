// The transfer of a row: from this PE's entries to its slot on every PE, or to the PE that adds it up.
//
// A row that several PEs have is left by each in its own slot, in its own heap, and its owner fetches it from there. A
// PE's sum of several 16-bit entries is an fp32 number: its upper half lies in the slot, its lower half in a second
// area. With gathers, fp32 sums go to an area in every heap instead.
#pragma once

#include "kernels/sparse/row_union.cuh"
#include "tile/row_chunk.cuh"

namespace po {

// One PE's part of a sum.
template <class Index>
struct RowEntries {
  const Index* rows;     // ascending
  const int64_t* order;  // which value belongs to an entry; null: the value of the entry's own number
  const uint8_t* values;
  int64_t count;
};

// The contributors of a row of the result, and this PE's first entry of it.
template <int kPes>
struct Slot {
  BitSet<kPes> contributors;
  int64_t first_entry;  // of this PE, if it has the row
  int64_t num_entries;

  PO_FN bool is_of(int pe) const { return contributors.has(pe); }
  PO_FN bool is_shared() const { return contributors.has_several(); }
};

// The place of each PE's result.
template <int kPes>
struct Outputs {
  uint8_t* mapped[kPes];  // as mapped here; null: not reachable
  uint64_t offsets[kPes];
};

// `number`: of a slot. `offset`: where a chunk begins in its row.
template <class Traits, class Plan>
class RowTransfer {
 public:
  using Chunk = Traits::Chunk;
  using Group = Chunk::Group;
  using Slot = Traits::Slot;
  using Outputs = po::Outputs<Traits::kPes>;

  // Rows with `hot_entries` or more have been summed already (`store_hot`).
  PO_FN RowTransfer(const Plan& plan, const Outputs& outputs, const Traits::Entries& entries, int64_t hot_entries)
      : plan_(plan), team_(plan.team), outputs_(outputs), entries_(entries), hot_entries_(hot_entries) {}

  // Sets the chunk to the sum of this PE's entries, in order of occurrence.
  PO_FN void sum_own(const Slot& slot, int64_t number, Chunk& chunk) const {
    if (slot.num_entries >= hot_entries_) return load_hot(number, chunk);
    chunk.load(values_of(slot.first_entry));
    for (int64_t i = 1; i < slot.num_entries; ++i) chunk.add(values_of(slot.first_entry + i));
  }

  PO_FN const uint8_t* values_of(int64_t entry) const {
    const int64_t number = entries_.order == nullptr ? entry : entries_.order[entry];
    return entries_.values + number * plan_.row_bytes;
  }

  // Stores a hot row's sum where it waits for its turn: where it is left for other PEs anyway.
  template <class AnyChunk>
  PO_FN void store_hot(const AnyChunk& chunk, int64_t number) const {
    if constexpr (Traits::kGathers) {
      chunk.store_floats(team_.heap + gathered_offset(team_.rank, number));
    } else {
      leave(chunk, number);
    }
  }

  // Stores to every PE, the next one first and this one last.
  PO_FN void store_everywhere(const Chunk& chunk, int64_t number) const {
    for (int hop = 1; hop <= team_.size; ++hop) {
      const int pe = team_.rank + hop < team_.size ? team_.rank + hop : team_.rank + hop - team_.size;
      if (outputs_.mapped[pe] != nullptr) chunk.store(place_at(pe, number));
    }
  }

  // Puts a row to a PE that is not reachable, from this PE's own slot. One thread.
  PO_FN void put_row(int64_t number, int pe) const {
    const auto bytes = static_cast<uint64_t>(plan_.row_bytes);
    put_signal(team_, pe, outputs_.offsets[pe] + static_cast<uint64_t>(number) * bytes, place_at(team_.rank, number),
               bytes, flag_offset(team_.size, number), launch_flag(team_));
  }

  // Signals the owner of a row, which is not reachable, that this PE has left its sum.
  PO_FN void tell_left(int64_t number, int owner) const {
    signal(team_, owner, flag_offset(team_.rank, number), launch_flag(team_));
  }

  // Waits for a contributor's sum, or for a row of the result (`contributor`: the number of PEs), from a PE that is not
  // reachable. `index`: for reports.
  PO_FN bool await_put(int contributor, int64_t number, int pe, Phase phase, uint64_t index) const {
    return await_epoch(team_, local_word(team_, flag_offset(contributor, number)), phase, pe, index);
  }

  // Leaves this PE's sum in its own slot, for the owner to fetch.
  template <class AnyChunk>
  PO_FN void leave(const AnyChunk& chunk, int64_t number) const {
    uint8_t* place = place_at(team_.rank, number);
    if constexpr (Chunk::kIsNarrow) {
      if (plan_.splits_partials != 0) {
        return chunk.store_split(place, team_.heap + plan_.low_offset + number * plan_.row_bytes);
      }
    }
    chunk.store(place);
  }

  // Stores this PE's sum to every PE's gather area.
  PO_FN void gather(const Chunk& chunk, int64_t number) const {
    const uint64_t offset = gathered_offset(team_.rank, number);
    for (int hop = 1; hop <= team_.size; ++hop) {
      const int pe = (team_.rank + hop) % team_.size;
      if (is_reachable(team_, pe)) chunk.store_floats(peer_address(team_, pe, offset));
    }
  }

  PO_FN void put_gathered(int64_t number, int pe) const {
    const uint64_t offset = gathered_offset(team_.rank, number);
    put_signal(team_, pe, offset, team_.heap + offset, static_cast<uint64_t>(plan_.row_bytes * kFloatsPerScalar),
               flag_offset(team_.rank, number), launch_flag(team_));
  }

  // Sets the chunk to a contributor's sum of its entries.
  PO_FN void take(const Slot& slot, int64_t number, int pe, int64_t offset, Chunk& chunk) const {
    if constexpr (Traits::kGathers) {
      chunk.load_floats(team_.heap + gathered_offset(pe, number));
    } else if (pe == team_.rank) {
      sum_own(slot, number, chunk);
    } else if (is_reachable(team_, pe)) {
      const uint64_t low = Chunk::kIsNarrow ? low_offset_of(pe) : 0;
      chunk.load_shared(place_at(pe, number),
                        low == 0 ? nullptr : peer_address(team_, pe, low) + number * plan_.row_bytes);
    } else {
      fetch(number, pe, offset, chunk);
    }
  }

  // Adds a contributor's sum to the chunk.
  PO_FN void add(const Slot& slot, int64_t number, int pe, int64_t offset, Chunk& chunk) const {
    if constexpr (Traits::kGathers) {
      chunk.add_floats(team_.heap + gathered_offset(pe, number));
    } else {
      Chunk addend(offset, plan_.row_bytes);
      take(slot, number, pe, offset, addend);
      chunk.add(addend);
    }
  }

  // Stores a row that every PE adds up.
  PO_FN void store_here(const Chunk& chunk, int64_t number) const { chunk.store(place_at(team_.rank, number)); }

 private:
  static constexpr int64_t kFloatsPerScalar = 4 / static_cast<int64_t>(sizeof(typename Traits::Scalar::Storage));

  PO_FN void load_hot(int64_t number, Chunk& chunk) const {
    if constexpr (Traits::kGathers) {
      chunk.load_floats(team_.heap + gathered_offset(team_.rank, number));
    } else {
      const bool is_split = Chunk::kIsNarrow && plan_.splits_partials != 0;
      chunk.load_shared(place_at(team_.rank, number),
                        is_split ? team_.heap + plan_.low_offset + number * plan_.row_bytes : nullptr);
    }
  }

  PO_FN uint8_t* place_at(int pe, int64_t number) const { return outputs_.mapped[pe] + number * plan_.row_bytes; }

  // The flag of a contributor's sum, or of a row of the result (`contributor`: the number of PEs). Puts and signals to
  // a PE have no order, so each has a flag of its own.
  PO_FN uint64_t flag_offset(int contributor, int64_t number) const {
    const int64_t flag = team_.size * plan_.num_workers + contributor * plan_.capacity + number;
    return plan_.progress_offset + static_cast<uint64_t>(flag) * sizeof(uint64_t);
  }

  PO_FN uint64_t low_offset_of(int pe) const {
    return *local_word(team_, plan_.sets.headers_offset + static_cast<uint64_t>(pe) * sizeof(uint64_t));
  }

  PO_FN uint64_t gathered_offset(int contributor, int64_t number) const {
    const int64_t row = contributor * plan_.capacity + number;
    return plan_.gather_offset + static_cast<uint64_t>(row * plan_.row_bytes * kFloatsPerScalar);
  }

  // Fetches from a PE that is not reachable, through this PE's own slot, which is free until the sum comes.
  PO_FN void fetch(int64_t number, int pe, int64_t offset, Chunk& chunk) const {
    const auto bytes = static_cast<uint64_t>(min_of(Chunk::kChunkBytes, plan_.row_bytes - offset));
    const uint64_t skipped = static_cast<uint64_t>(number * plan_.row_bytes + offset);
    const uint64_t low = Chunk::kIsNarrow ? low_offset_of(pe) : 0;
    uint8_t* own_low = low == 0 ? nullptr : team_.heap + plan_.low_offset + number * plan_.row_bytes;
    Group{}.sync();  // all lanes have read the last piece
    if (Group{}.rank() == 0) {
      get(team_, pe, outputs_.offsets[pe] + skipped, place_at(team_.rank, number) + offset, bytes);
      if (own_low != nullptr) get(team_, pe, low + skipped, own_low + offset, bytes);
    }
    Group{}.sync();
    chunk.load_shared(place_at(team_.rank, number), own_low);
    Group{}.sync();
  }

  const Plan& plan_;
  const Team& team_;
  const Outputs& outputs_;
  const Traits::Entries& entries_;
  const int64_t hot_entries_;
};

}  // namespace po
