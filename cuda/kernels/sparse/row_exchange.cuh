// Brings the rows of a union from the PEs that have them to every PE: one warp's work.
//
// Warps take blocks of slots, the same on every PE. For each block, a warp first sends or leaves this PE's rows and
// signals its counterparts on the other PEs. Then it adds up this PE's share of the previous block. In the end it
// signals that its rows are stored, and waits for the others' (kernels/sparse_all_reduce.md, rows 4 to 7).
#pragma once

#include "kernels/sparse/row_transfer.cuh"
#include "sched/slot_blocks.cuh"

namespace po {

inline constexpr Phase kPhaseShare = make_phase(kFirstPhase + 1);
inline constexpr Phase kPhaseRows = make_phase(kFirstPhase + 2);
PO_CONSTANT(kPhaseShare)
PO_CONSTANT(kPhaseRows)

template <class Traits, class Plan>
class RowExchange {
 public:
  using Transfer = RowTransfer<Traits, Plan>;
  using Chunk = Traits::Chunk;
  using Group = Chunk::Group;
  using Slot = Traits::Slot;
  using Pes = BitSet<Traits::kPes>;
  // Slots that a warp looks up at once. With room for many PEs a slot is large.
  static constexpr int kWindow = min_of(SlotBlocks::kWindow, 128 / Pes::kWords);

  struct Shared {
    Outputs<Traits::kPes> outputs;
    Slot windows[Traits::kMostWarps][2][kWindow];  // of the current block and the previous one
  };

  // `rows_of_slots`: the rows of the result, `num_union` of them. `num_shares`: rows of all PEs together.
  // `hot_entries`: see RowTransfer.
  PO_FN RowExchange(const WorkGroup& wg, const Plan& plan, Shared& shared, const Traits::Entries& entries,
                    const int64_t* rows_of_slots, int64_t num_union, int64_t num_shares, int64_t hot_entries)
      : plan_(plan),
        team_(plan.team),
        entries_(entries),
        transfer_(plan, shared.outputs, entries, hot_entries),
        rows_of_slots_(rows_of_slots),
        num_union_(num_union),
        windows_(shared.windows[wg.warp_index()]),
        number_(wg.warp_index() * wg.count() + wg.index()),
        blocks_(SlotBlocks::of_worker(static_cast<uint32_t>(number_),
                                      static_cast<uint32_t>(wg.count() * wg.num_warps()),
                                      static_cast<uint32_t>(num_union), num_shares, plan.row_bytes)) {}

  // The reduction is one block later than the contribution, so peers have had time to leave their sums.
  PO_FN bool run() {
    for (int64_t block = 0; block <= blocks_.count; ++block) {
      if (block < blocks_.count) contribute(block);  // @block-contribute
      if (block > 0 && !reduce(block - 1)) return false;
    }
    tell_progress(all_pes(), kAllBlocks);
    if constexpr (kPuts) {
      if (plan_.all_reachable == 0 && !await_put_rows()) return false;
    }
    return await_progress(all_pes(), kAllBlocks, kPhaseRows);  // @rows-await
  }

 private:
  static constexpr uint64_t kAllBlocks = 0xffff;

  PO_FN Pes all_pes() const { return Pes::below(team_.size); }
  // With gathers, every PE adds up the rows that several PEs have.
  PO_FN bool adds_up(const Slot& slot, int64_t number) const {
    return slot.is_shared() && (Traits::kGathers || owner_in_turn(slot.contributors, number) == team_.rank);
  }

  // Whether this PE has to send the row, or to leave it for another PE.
  PO_FN bool gives(const Slot& slot, int64_t number) const {
    return slot.is_of(team_.rank) && (Traits::kGathers || !adds_up(slot, number));
  }

  // Calls use(window, first slot, count) for the slots of a block. They are looked up if the block is new, or has more
  // slots than a window.
  template <class Use>
  PO_FN void for_each_window(int64_t block, bool is_new, const Use& use) {
    Slot* window = windows_[block % 2];
    const int64_t end = min_of(blocks_.begin(block) + blocks_.slots, num_union_);
    for (int64_t base = blocks_.begin(block); base < end; base += kWindow) {
      const auto count = static_cast<int>(min_of<int64_t>(kWindow, end - base));
      if (is_new || blocks_.slots > kWindow) {
        warp_.sync();  // all lanes have read the window
        for (int i = warp_.rank(); i < count; i += warp_.size()) window[i] = slot_of(base + i);
        warp_.sync();
      }
      use(window, base, count);
    }
    warp_.sync();
  }

  // For each slot that `want` accepts, a group of lanes calls work(slot, number). Then a single lane calls put(slot,
  // number, peer) for the peers that are not reachable.
  template <class Want, class Work, class Put>
  PO_FN void for_each_slot(const Slot* window, int64_t base, int count, const Want& want, const Work& work,
                           const Put& put) {
    for (int i = Group{}.index(); i < count; i += Group::kPerWarp) {
      if (want(window[i], base + i)) work(window[i], base + i);
    }
    if (plan_.all_reachable != 0) return;
    fence_acq_rel_sys();  // publishes each lane's stores to the network
    warp_.sync();
    if constexpr (kPuts) {
      for (int i = 0; i < count && warp_.rank() == 0; ++i) {
        if (!want(window[i], base + i)) continue;
        for (int hop = 1; hop < team_.size; ++hop) {
          const int pe = (team_.rank + hop) % team_.size;
          if (!is_reachable(team_, pe)) put(window[i], base + i, pe);
        }
      }
    }
  }

  PO_FN Slot slot_of(int64_t number) const {
    const int64_t row = rows_of_slots_[number];
    const auto place = find_row<Traits::kPes>(team_, plan_.sets, row);
    Slot slot{place.contributors, min_of(place.first_entry, entries_.count - 1), 1};  // valid if this PE has it
    if (entries_.order != nullptr && slot.is_of(team_.rank)) {                        // else a row has one entry
      slot.first_entry = lower_bound_near(entries_.rows, slot.first_entry, entries_.count, row);
      slot.num_entries =
          lower_bound_near(entries_.rows, slot.first_entry + 1, entries_.count, row + 1) - slot.first_entry;
    }
    return slot;
  }

  // Sends this PE's rows of a block: to all PEs if no other PE has the row, otherwise to the PEs that add it up.
  PO_FN void contribute(int64_t block) {
    const TaskTrace trace(true);
    Pes adders{};  // @shares-contribute
    for_each_window(block, true, [&](const Slot* window, int64_t base, int count) {
      for (int i = warp_.rank(); i < count; i += warp_.size()) {
        if (!window[i].is_of(team_.rank) || !window[i].is_shared()) continue;
        if constexpr (Traits::kGathers) {
          adders = all_pes();
        } else {
          adders.add(owner_in_turn(window[i].contributors, base + i));
        }
      }
      for_each_slot(
          window, base, count, [&](const Slot& slot, int64_t number) { return gives(slot, number); },
          [&](const Slot& slot, int64_t number) {
            for_each_chunk([&](Chunk& chunk, int64_t) {
              transfer_.sum_own(slot, number, chunk);
              if (!slot.is_shared()) return send(chunk, number);
              Traits::kGathers ? transfer_.gather(chunk, number) : transfer_.leave(chunk, number);
            });
          },
          [&](const Slot& slot, int64_t number, int pe) {
            if (!slot.is_shared()) return transfer_.put_row(number, pe);
            if (Traits::kGathers) return transfer_.put_gathered(number, pe);
            if (owner_in_turn(slot.contributors, number) == pe) transfer_.tell_left(number, pe);
          });
    });
    tell_progress(union_of(adders), static_cast<uint64_t>(block) + 1);
  }

  // Adds up the rows of a block that fall to this PE.
  PO_FN bool reduce(int64_t block) {
    Pes givers{};
    for_each_window(block, false, [&](const Slot* window, int64_t base, int count) {
      for (int i = warp_.rank(); i < count; i += warp_.size()) {
        if (adds_up(window[i], base + i)) givers.add(window[i].contributors);
      }
    });
    givers = union_of(givers);
    if (givers.is_empty()) return true;
    if (!await_progress(givers, static_cast<uint64_t>(block) + 1, kPhaseShare)) return false;  // @shares-await
    if constexpr (kPuts) {
      if (plan_.all_reachable == 0 && !await_put_shares(block)) return false;
    }
    const TaskTrace trace(!Traits::kGathers);
    for_each_window(block, false, [&](const Slot* window, int64_t base, int count) {
      for_each_slot(
          window, base, count, [&](const Slot& slot, int64_t number) { return adds_up(slot, number); },
          [&](const Slot& slot, int64_t number) {
            for_each_chunk([&](Chunk& chunk, int64_t offset) {
              Pes rest = slot.contributors;
              transfer_.take(slot, number, rest.lowest(), offset, chunk);
              for (rest.drop_lowest(); !rest.is_empty(); rest.drop_lowest()) {
                transfer_.add(slot, number, rest.lowest(), offset, chunk);
              }
              send(chunk, number, Traits::kGathers);
            });
          },
          [&](const Slot&, int64_t number, int pe) {
            if (!Traits::kGathers) transfer_.put_row(number, pe);
          });
    });
    return true;
  }

  template <class Use>
  PO_FN void for_each_chunk(const Use& use) const {
    for (int64_t offset = 0; offset < plan_.row_bytes; offset += Chunk::kChunkBytes) {
      Chunk chunk(offset, plan_.row_bytes);
      use(chunk, offset);
    }
  }

  // Sends a complete sum. A row that every PE has added up stays here.
  PO_FN void send(Chunk& chunk, int64_t number, bool is_everywhere = false) const {
    if (plan_.divisor != 1) chunk.divide_by(static_cast<float>(plan_.divisor));
    is_everywhere ? transfer_.store_here(chunk, number) : transfer_.store_everywhere(chunk, number);
  }

  // ---- progress ---------------------------------------------------------------------------------------------------

  PO_FN uint64_t progress_offset(int sender) const {
    return plan_.progress_offset + static_cast<uint64_t>(sender * plan_.num_workers + number_) * sizeof(uint64_t);
  }

  // The union of the PEs of all lanes.
  PO_FN Pes union_of(Pes pes) const {
    for (uint64_t& word : pes.words) word = warp_.union_of(word);
    return pes;
  }

  // Waits for the sums of a block that PEs which are not reachable have put or left.
  PO_FN bool await_put_shares(int64_t block) {
    bool all = true;
    for_each_window(block, false, [&](const Slot* window, int64_t base, int count) {
      for (int i = warp_.rank(); i < count; i += warp_.size()) {
        if (!adds_up(window[i], base + i)) continue;
        for (Pes rest = window[i].contributors; !rest.is_empty(); rest.drop_lowest()) {
          const int pe = rest.lowest();
          if (is_far(pe))
            all = transfer_.await_put(pe, base + i, pe, kPhaseShare, index()) && all;  // @put-shares-await
        }
      }
    });
    return all_lanes(all);
  }

  // Waits for the rows of all blocks that such PEs have put.
  PO_FN bool await_put_rows() {
    bool all = true;
    for (int64_t block = 0; block < blocks_.count; ++block) {
      for_each_window(block, true, [&](const Slot* window, int64_t base, int count) {
        for (int i = warp_.rank(); i < count; i += warp_.size()) {
          const Pes& pes = window[i].contributors;
          if (window[i].is_shared() && Traits::kGathers) continue;  // added up here
          const int pe = window[i].is_shared() ? owner_in_turn(pes, base + i) : pes.lowest();
          if (is_far(pe))
            all = transfer_.await_put(team_.size, base + i, pe, kPhaseRows, index()) && all;  // @put-rows-await
        }
      });
    }
    return all_lanes(all);
  }

  PO_FN bool is_far(int pe) const { return kPuts && pe != team_.rank && !is_reachable(team_, pe); }
  PO_FN uint64_t index() const { return static_cast<uint64_t>(number_); }

  // Whether all lanes have what they have awaited; hands what a lane has acquired to all lanes.
  PO_FN bool all_lanes(bool is_there) const {
    const int num_there = warp_.count(is_there);  // @lanes-there
    warp_.sync();
    return num_there == warp_.size();
  }

  // Signals the reachable PEs in `receivers` that this warp's stores so far are there for them.
  PO_FN void tell_progress(const Pes& receivers, uint64_t progress) {
    warp_.sync();  // orders the stores of all lanes before the signals
    if (plan_.all_reachable == 0) return tell_progress_by_put(receivers, progress);
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || !receivers.has(pe)) continue;
      signal(team_, pe, progress_offset(team_.rank), flag_value(team_.epoch, progress));
    }
  }

  // The same where some PEs are not reachable.
  PO_FN void tell_progress_by_put(const Pes& receivers, uint64_t progress) {
    if (warp_.rank() != 0) return;
    fence_acq_rel_sys();
    for (int hop = 1; hop < team_.size; ++hop) {
      const int pe = (team_.rank + hop) % team_.size;
      if (is_far(pe) || !receivers.has(pe)) continue;
      signal(team_, pe, progress_offset(team_.rank), flag_value(team_.epoch, progress));
    }
  }

  // Waits until the counterparts of this warp on the reachable PEs in `senders` have come to `progress`.
  PO_FN bool await_progress(const Pes& senders, uint64_t progress, Phase phase) {
    bool is_there = true;
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank || is_far(pe) || !senders.has(pe)) continue;
      const uint64_t* word = local_word(team_, progress_offset(pe));
      is_there = await_step(team_, word, progress, phase, pe, static_cast<uint64_t>(number_)) && is_there;
    }
    return all_lanes(is_there);
  }

  const Plan& plan_;
  const Team& team_;
  const Traits::Entries& entries_;
  const Transfer transfer_;
  const int64_t* rows_of_slots_;
  const int64_t num_union_;
  Slot (*windows_)[kWindow];
  const int32_t number_;  // of this warp, the same on every PE
  const SlotBlocks blocks_;
  Warp warp_;
};

}  // namespace po
