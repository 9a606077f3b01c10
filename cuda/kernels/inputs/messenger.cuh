// Writes messages into the owners' regions.
#pragma once

#include "comm/credits.cuh"
#include "kernels/inputs/finder.cuh"
#include "platform/prefetch.cuh"

namespace po::embedding_inputs {

// Examines lookups from `source` on once more, to report errors. Errors are rare, so the loop that copies keeps
// nothing.
template <class Value>
PO_NOINLINE void report_index(const Plan& plan, const Value* values, int64_t source, int32_t count, const Slot& slot) {
  for (int32_t i = 0; i < count; ++i) {
    const auto value = static_cast<int64_t>(values[i]);
    if (value >= 0 && value < slot.num_rows) continue;
    return report_bad_input(plan, kBadIndex, slot.feature, source + i, value, slot.num_rows);
  }
}

// Where the parts of a message lie. A message that is put has no gaps, so that it is one put.
template <class Traits>
PO_FN Region parts_of(const Plan& plan, const Call& call, const Message& message) {
  constexpr auto kIndexBytes = static_cast<int64_t>(sizeof(typename Traits::Index));
  const Owner& owner = message.owner;
  if constexpr (kPuts) {
    if (!is_reachable(plan.team, static_cast<int>(&owner - plan.owners))) {  // @message-without-gaps
      return region_of(owner.num_slots, call.samples, message.count(), kIndexBytes, Traits::kWeighted);
    }
  }
  return region_of(owner.num_slots, plan.max_samples, owner.capacity, kIndexBytes, Traits::kWeighted);
}

// Puts a message from this PE's heap, with its signal, to an owner that is not reachable and has granted credit.
template <class Traits>
PO_NOINLINE void put_message([[maybe_unused]] const Plan& plan, [[maybe_unused]] const Call& call,
                             [[maybe_unused]] const Message& message, [[maybe_unused]] int owner_number) {
  fence_acq_rel_sys();  // publishes what all warps have copied, acquired through the count, to the network
  if constexpr (kPuts) {
    const Team& team = plan.team;
    const Owner& owner = message.owner;
    const uint64_t bytes = message.is_left_out() ? sizeof(Header) : parts_of<Traits>(plan, call, message).end;
    put_signal(team, owner_number, granted_output(team, owner_number) + owner.region_offset,
               team.heap + owner.outgoing_offset, bytes, ready_word_offset(team, team.rank, 0), launch_flag(team));
  }
}

// One warp's share of all messages.
template <class Traits>
class Messenger {
 public:
  using Value = typename Traits::Value;
  using Index = typename Traits::Index;
  // Elements that a lane loads together, as registers allow.
  static constexpr int kElementsAtOnce = sizeof(Index) == sizeof(int32_t) ? 12 : 6;

  PO_FN Messenger(const WorkGroup& wg, const Shared& shared, const Call& call)
      : wg_(wg), plan_(shared.plan), team_(shared.plan.team), call_(call), bags_(shared, call) {}

  PO_FN void run() {
    const int32_t end = static_cast<int32_t>(plan_.longest[kPieces]) * team_.size;
    const int32_t stride = wg_.num_warps() * wg_.count();
    int owner = team_.rank;
    int32_t written = 0;  // pieces for the owner that are not counted yet
    PO_NO_UNROLL
    for (int32_t at = wg_.warp_index() * wg_.count() + wg_.index(); at < end; at += stride) {
      const int next = (team_.rank + 1 + at % team_.size) % team_.size;  // this PE last
      if (next != owner) {
        finish(owner, written);
        owner = next;
        written = 0;
      }
      const Message message(plan_, bags_.chunks_per_feature(), owner);
      const int32_t piece = at / team_.size;
      if (piece >= message.num_pieces) continue;
      const TaskTrace trace(owner != team_.rank);
      const bool is_stored = owner != team_.rank && is_reachable(team_, owner);
      if (is_stored && !credits_.await(team_, warp_, owner)) return;  // @credit-before-inputs
      write_piece(message, place(message.owner, owner), piece);
      ++written;
    }
    finish(owner, written);
  }

 private:
  PO_FN uint8_t* place(const Owner& owner, int number) const {
    if (!is_reachable(team_, number)) return team_.heap + owner.outgoing_offset;
    const uint64_t regions = number == team_.rank ? call_.regions_offset : granted_output(team_, number);
    return peer_address(team_, number, regions + owner.region_offset);
  }

  PO_FN void write_piece(const Message& message, uint8_t* region, int32_t piece) const {
    auto* offsets = reinterpret_cast<int32_t*>(region + sizeof(Header));
    if (piece == 0) {
      if (warp_.rank() == 0) write_header(message, region, offsets);
    } else if (piece <= message.num_chunks) {
      write_offsets(message, offsets, piece - 1);
    } else {
      write_lookups(message, region, (piece - 1 - message.num_chunks) * static_cast<int32_t>(plan_.piece_lookups));
    }
  }

  PO_FN void write_header(const Message& message, uint8_t* region, int32_t* offsets) const {
    auto* header = reinterpret_cast<Header*>(region);
    header->samples = call_.samples;
    header->count = message.count();
    header->left_out = message.is_left_out() ? message.count() : 0;
    header->full_owner = plan_.longest[kFullOwner];
    header->full_count = plan_.longest[kFullCount];
    header->full_capacity = plan_.longest[kFullCapacity];
    if (message.is_left_out()) return;
    offsets[message.owner.num_slots * call_.samples] = static_cast<int32_t>(message.count());
  }

  // Writes where the bags of one chunk of a slot begin in the message.
  PO_FN void write_offsets(const Message& message, int32_t* offsets, int32_t piece) const {
    const int32_t slot = piece / bags_.chunks_per_feature();
    const int32_t part = piece % bags_.chunks_per_feature();
    const auto feature = static_cast<int32_t>(plan_.slots[message.owner.first_slot + slot].feature);
    const int64_t* chunks = plan_.chunks + feature * bags_.chunks_per_feature();
    const int64_t moved = message.begins[slot] - chunks[0];
    const int32_t count = bags_.num_bags(part);
    const int32_t first_bag = bags_.first_bag(feature, part);
    int32_t* target = offsets + int64_t{slot} * bags_.samples() + (first_bag - feature * bags_.samples());
    scan<Traits>(
        warp_, chunks[part], count, [&](int32_t i) { return bags_.cut(bags_.length_or_end(first_bag + i)); },
        [&](int32_t i, int64_t begin) { target[i] = static_cast<int32_t>(moved + bags_.cut(begin)); });
  }

  // Writes the lookups from `first` on, of all slots that have some of them.
  PO_FN void write_lookups(const Message& message, uint8_t* region, int32_t first) const {
    const auto end = static_cast<int32_t>(min_of(first + plan_.piece_lookups, message.count()));
    const Region parts = parts_of<Traits>(plan_, call_, message);
    int32_t slot = slot_of(message, first);
    PO_NO_UNROLL
    while (first < end) {
      const auto slot_end = static_cast<int32_t>(message.begins[slot + 1]);
      const int32_t run = min_of(slot_end, end) - first;
      if (run > 0) {
        const Slot& to = plan_.slots[message.owner.first_slot + slot];
        const int64_t source = plan_.chunks[to.feature * bags_.chunks_per_feature()] + first - message.begins[slot];
        copy_indices(reinterpret_cast<Index*>(region + parts.indices) + first, source, run, to);
        if constexpr (Traits::kWeighted) {
          const float* weights = call_.weights + source;
          prefetch_by_lanes<Cache::kL2>(warp_, weights, run * static_cast<int32_t>(sizeof(float)));
          auto* target = reinterpret_cast<float*>(region + parts.weights) + first;
          copy(target, run, [&](int32_t i) { return weights[i]; });
        }
        first += run;
      }
      ++slot;
    }
  }

  // The last slot that begins at or before a lookup.
  PO_FN int32_t slot_of(const Message& message, int32_t lookup) const {
    int32_t low = 0;
    auto high = static_cast<int32_t>(message.owner.num_slots);
    PO_NO_UNROLL
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (message.begins[middle] <= lookup ? low : high) = middle;
    }
    return low;
  }

  // An index that is outside of the table becomes -1.
  PO_FN void copy_indices(Index* target, int64_t source, int32_t count, const Slot& slot) const {
    const auto* values = static_cast<const Value*>(call_.values) + source;
    const auto num_rows = static_cast<uint64_t>(slot.num_rows);
    // The prefetch keeps more bytes in flight than the lanes' registers have room for.
    prefetch_by_lanes<Cache::kL2>(warp_, values, count * static_cast<int32_t>(sizeof(Value)));
    bool is_bad = false;
    copy(target, count, [&](int32_t i) {
      const auto value = static_cast<int64_t>(values[i]);
      const bool is_row = static_cast<uint64_t>(value) < num_rows;
      is_bad |= !is_row;
      return is_row ? static_cast<Index>(value) : Index{-1};
    });
    if (is_bad) report_index(plan_, values, source, count, slot);
    warp_.sync();
  }

  // Stores target[i] = element(i). A lane's elements lie a warp apart, so that a warp's stores fill lines, whatever the
  // alignment.
  template <class Element, class Make>
  PO_FN void copy(Element* target, int32_t count, const Make& element) const {
    const int32_t at_once = warp_.size() * kElementsAtOnce;
    const int32_t whole = count - count % at_once;
    PO_NO_UNROLL
    for (int32_t i = warp_.rank(); i < whole; i += at_once) {
      Element loaded[kElementsAtOnce];
      PO_UNROLL
      for (int k = 0; k < kElementsAtOnce; ++k) loaded[k] = element(i + k * warp_.size());
      PO_UNROLL
      for (int k = 0; k < kElementsAtOnce; ++k) target[i + k * warp_.size()] = loaded[k];
    }
    PO_NO_UNROLL
    for (int32_t i = whole + warp_.rank(); i < count; i += warp_.size()) target[i] = element(i);
  }

  // Counts `written` pieces together, since each count waits for all stores before it. The warp that brings the last
  // piece sends the message, or signals that it is there.
  PO_FN void finish(int owner, int32_t written) {
    if (written == 0) return;
    // @inputs-of-lanes
    warp_.sync();  // orders the stores of all lanes before the count
    if (warp_.rank() != 0) return;
    const Message message(plan_, bags_.chunks_per_feature(), owner);
    const auto num_pieces = static_cast<uint64_t>(message.num_pieces);
    const auto more = static_cast<uint64_t>(written);
    if (atomic_add_fetch_acq_rel_gpu(plan_.sent + owner, more) < num_pieces) return;  // @message-complete
    plan_.sent[owner] = 0;
    if (!is_reachable(team_, owner)) {
      if (!await_credit(team_, owner)) return;  // @credit-before-input-puts
      put_message<Traits>(plan_, call_, message, owner);
      if constexpr (kPuts) return;
    }
    signal(team_, owner, ready_word_offset(team_, team_.rank, 0), launch_flag(team_));
  }

  const WorkGroup& wg_;
  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Bags<Traits> bags_;
  const Warp warp_{};
  Credits credits_;
};

}  // namespace po::embedding_inputs
