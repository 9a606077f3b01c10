// Sorted lookups that a warp has in hand: where their gradients lie, and which rows begin among them.
#pragma once

#include "kernels/embedding_backward/plan.cuh"
#include "platform/ballots.cuh"
#include "platform/scan.cuh"

namespace po::embedding_backward {

// In a WG's own memory, one for each warp.
template <class Traits>
struct LookupWindow {
  // Behind a ticket's lookups there is room for the rest of the last row that begins among them.
  static constexpr int kCapacity = kRangeLookups + kRangeLookups / 2;

  const uint8_t* gradients[kCapacity];  // where the lookup's bag has its columns
  int64_t rows[kRangeLookups];          // that begin here
  float factors[Traits::kHasFactors ? kCapacity : 1];
  int32_t begins[kRangeLookups + 1];  // of these rows' lookups, and the end of the last one's
};

// A group as a warp that is at work in it needs it.
struct GroupView {
  const Group* group;
  uint8_t* rows;
  int64_t first_key;
  int64_t end_key;
  int width;
  float inverse_width;
};

// What a window holds.
struct Filled {
  int num_rows;
  bool is_open;  // the last row's lookups go on behind the window
  int64_t next;  // lookup behind those looked at
};

template <class Traits>
class WindowFiller {
 public:
  using Window = LookupWindow<Traits>;
  using Key = typename Traits::Key;
  using Storage = typename Traits::Scalar::Storage;

  PO_FN WindowFiller(const Plan& plan, const Call& call, Window& window, int64_t count)
      : plan_(plan), call_(call), window_(window), count_(count), keys_(static_cast<const Key*>(call.keys)) {
    const Team& team = plan.team;
    own_begin_ = static_cast<int32_t>(plan.batch_start[team.rank]);
    num_own_ = static_cast<int32_t>(plan.batch_start[team.rank + 1]) - own_begin_;
  }

  PO_FN const Key* keys() const { return keys_; }

  // Looks at the lookups from `begin` on that are the group's; rows that begin before `end` are found.
  PO_FN Filled fill(const GroupView& view, int64_t begin, int64_t end) const {
    Filled filled{0, false, end};
    warp_.sync();  // the last ones have been read
    PO_NO_UNROLL
    for (int first = 0; first < Window::kCapacity; first += warp_.size()) {
      const int i = first + warp_.rank();
      const int64_t at = begin + i;
      const bool is_here = i < Window::kCapacity;
      const int64_t key = is_here ? key_at(at, view) : view.end_key;
      const bool begins =
          is_here && key < view.end_key && at < end && (at == 0 || keys_[at - 1] != key);  // @run-begins
      if (is_here && key < view.end_key) place(view, at, i);
      const int number = filled.num_rows + warp_.count_below(begins);
      if (begins) {
        window_.rows[number] = key - view.first_key;
        window_.begins[number] = i;
      }
      filled.num_rows += warp_.count(begins);
      // The first lookup of another row that does not begin here: the last one that does ends before it.
      const bool ends = is_here && !begins && at != 0 && key_at(at - 1, view) != key;  // @run-ends
      const int stop = warp_.first(ends);
      if (stop < warp_.size()) {
        if (begin + first + stop < end) filled.next = begin + first + stop;  // the group ends there
        if (warp_.rank() == 0) window_.begins[filled.num_rows] = first + stop;
        warp_.sync();
        return filled;
      }
    }
    filled.is_open = filled.num_rows != 0;
    warp_.sync();
    return filled;
  }

  // Takes so many lookups of one row from `begin` on.
  PO_FN void refill(const GroupView& view, int64_t begin, int count) const {
    warp_.sync();  // the last ones have been read
    for (int i = warp_.rank(); i < count; i += warp_.size()) place(view, begin + i, i);
    warp_.sync();
  }

 private:
  // Behind the last lookup, and behind the group's, one that no row has.
  PO_FN int64_t key_at(int64_t at, const GroupView& view) const {
    return at < count_ ? min_of(static_cast<int64_t>(keys_[at]), view.end_key) : view.end_key;
  }

  // Notes where a lookup's gradient is: in this PE's own, or in the staging.
  PO_FN void place(const GroupView& view, int64_t at, int i) const {
    const int32_t bag = call_.bags[at];
    const auto batch = static_cast<int32_t>(plan_.batch);
    const int32_t number =
        view.group->num_members == 1 ? static_cast<int32_t>(plan_.members[view.group->first_member]) : bag / batch;
    const Table& table = plan_.tables[number];
    const int32_t sample = bag - number * batch;
    const int32_t own = sample - own_begin_;
    window_.gradients[i] =
        own >= 0 && own < num_own_
            ? call_.gradient + (own * plan_.row_elements + table.column) * sizeof(Storage)
            : plan_.team.heap + plan_.staging_offset + table.staged_offset +
                  static_cast<uint64_t>(sample) * static_cast<uint64_t>(view.width) * sizeof(Storage);
    if constexpr (Traits::kPooling == Pooling::kWeightedSum) window_.factors[i] = call_.factors[call_.lookups[at]];
    if constexpr (Traits::kPooling == Pooling::kMean) window_.factors[i] = 1.0f / call_.counts[bag];
  }

  const Plan& plan_;
  const Call& call_;
  Window& window_;
  const int64_t count_;
  const Key* keys_;
  int32_t own_begin_;
  int32_t num_own_;
  const BallotWarp warp_{};
};

}  // namespace po::embedding_backward
