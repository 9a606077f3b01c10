// The sorted lookups that a warp works on: where their gradients lie, and which rows begin among them.
#pragma once

#include "kernels/embedding_backward/plan.cuh"
#include "platform/ballots.cuh"
#include "platform/scan.cuh"

namespace po::embedding_backward {

// Values of a launch's steps that all rows share.
struct Rates {
  float rate;
  float scale;  // of gradients
  float correction1;
  float correction2;
  uint32_t number;  // number of the step; for stochastic rounding
};

// A group, as needed by a warp that works on it.
struct GroupView {
  uint8_t* rows;
  float* state;  // kGradient: where its sums are, or the states of all touched rows
  float* second;
  int64_t first_key;
  int64_t end_key;
  int32_t width;
  float inverse_width;
  int32_t only_member;  // the group's table, or -1 if it has several
  Rates rates;
  uint64_t seed;
};

// In shared memory, one per warp.
template <class Traits>
struct LookupWindow {
  // There is room for a ticket's lookups and for the rest of the last row that begins among them.
  static constexpr int kCapacity = kRangeLookups + kRangeLookups / 2;

  GroupView group;
  int32_t range;                             // lookups of a ticket
  int32_t end;                               // end of the lookups of the current group
  const uint8_t* gradients[kCapacity];       // where the lookup's bag has its columns
  typename Traits::Key rows[kRangeLookups];  // rows that begin here
  float factors[Traits::kHasFactors ? kCapacity : 1];
  int32_t begins[kRangeLookups + 1];  // of these rows' lookups; then the end of the last row's
  // The order in which tiles take the rows. A lone tile takes them as they are.
  uint8_t order[Traits::Tile::kPerWarp != 1 ? kRangeLookups : 1];
};

// The contents of a window.
struct Filled {
  int num_rows;
  bool is_open;  // the last row's lookups continue after the window
  int next;      // the first lookup that was not examined
};

template <class Traits>
class WindowFiller {
 public:
  using Window = LookupWindow<Traits>;
  using Key = typename Traits::Key;
  using Storage = typename Traits::Wire::Storage;

  PO_FN WindowFiller(const Plan& plan, const Call& call, Window& window, int count)
      : plan_(plan), call_(call), window_(window), count_(count) {}

  // Examines the group's lookups from `begin` on, and finds the rows that begin among the ticket's lookups.
  PO_FN Filled fill(int begin) const {
    const auto end_key = static_cast<Key>(window_.group.end_key);
    Filled filled{0, false, window_.end};
    warp_.sync();  // all lanes have read the last contents
    PO_NO_UNROLL
    for (int batch = 0; batch < Window::kCapacity; batch += kAtOnce * warp_.size()) {
      Queue<Key> keys;
      Queue<Key> befores;
      Queue<int32_t> bags;
      PO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = batch + k * warp_.size() + warp_.rank();
        const int at = begin + i;
        keys[k] = key_at(at, end_key);
        befores[k] = at == 0 ? -1 : key_at(at - 1, end_key);  // @row-begins
        bags[k] = bag_at(at);
      }
      PO_NO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int first = batch + k * warp_.size();
        const int i = first + warp_.rank();
        const int at = begin + i;
        const Key key = keys.take();
        const Key before = befores.take();
        const int32_t bag = bags.take();
        const bool begins = key != end_key && at < window_.end && key != before;
        if (key != end_key) place(bag, at, i);
        const int number = filled.num_rows + warp_.count_below(begins);
        if (begins) {
          window_.rows[number] = key - static_cast<Key>(window_.group.first_key);
          window_.begins[number] = i;
        }
        filled.num_rows += warp_.count(begins);
        // The first lookup of another row that does not begin here. The last row that begins here ends before it.
        const int stop = warp_.first(!begins && key != before);
        if (stop < warp_.size()) {
          filled.next = min_of(filled.next, begin + first + stop);                // the group may end there
          if (warp_.rank() == 0) window_.begins[filled.num_rows] = first + stop;  // @row-ends
          warp_.sync();
          return filled;
        }
      }
    }
    filled.is_open = filled.num_rows != 0;
    warp_.sync();
    return filled;
  }

  // Orders the first `count` rows by their number of lookups, so that tiles that take rows side by side have about as
  // many lookups each. It does so if there are no more rows than lanes. With more, most rows have a lookup or two, and
  // stay in their order.
  PO_FN void order_rows(int count) const {
    static_assert(kRangeLookups <= 256, "a row's number is a byte");
    constexpr int kMost = 6;  // so many lookups or more count alike
    const int row = warp_.rank();
    if (count > warp_.size()) {
      for (int other = row; other < count; other += warp_.size()) window_.order[other] = static_cast<uint8_t>(other);
    } else {
      const int lookups = row < count ? min_of(window_.begins[row + 1] - window_.begins[row], kMost) : 0;
      int place = 0;
      int before = 0;
      PO_UNROLL
      for (int number = kMost; number > 0; --number) {
        const uint32_t rows = warp_.ballot(lookups == number);
        if (lookups == number) place = before + count_bits(rows & bits_below(warp_.rank()));
        before += count_bits(rows);
      }
      if (row < count) window_.order[place] = static_cast<uint8_t>(row);
    }
    // @rows-ordered
    warp_.sync();
  }

  // Takes `count` lookups of one row from `begin` on.
  PO_FN void refill(int begin, int count) const {
    // @window-read-by-lanes
    warp_.sync();  // all lanes have read the last contents
    PO_NO_UNROLL
    for (int i = warp_.rank(); i < count; i += warp_.size()) place(call_.bags[begin + i], begin + i, i);
    warp_.sync();
  }

 private:
  // Lookups of a lane that are loaded together, since a warp can do nothing before it knows them. A loop that is not
  // unrolled processes them one by one, since fetching code takes time too.
  static constexpr int kAtOnce = 3;
  static_assert(Window::kCapacity % (kAtOnce * kWarpSize) == 0, "whole batches");

  template <class T>
  struct Queue {
    T values[kAtOnce];

    PO_FN T& operator[](int k) { return values[k]; }
    PO_FN T take() {
      const T first = values[0];
      PO_UNROLL
      for (int k = 1; k < kAtOnce; ++k) values[k - 1] = values[k];
      return first;
    }
  };

  // After the last lookup and after the group's, a key that no row has.
  PO_FN Key key_at(int at, Key end_key) const {
    return at < count_ ? min_of(static_cast<const Key*>(call_.keys)[at], end_key) : end_key;
  }

  PO_FN int32_t bag_at(int at) const { return at < count_ ? call_.bags[at] : 0; }

  // Notes where the gradient of a lookup's bag is: in this PE's own gradient, or in the staging.
  PO_FN void place(int32_t bag, [[maybe_unused]] int at, int i) const {
    const auto batch = static_cast<int32_t>(plan_.batch);
    const GroupView& group = window_.group;
    const int32_t number = group.only_member >= 0 ? group.only_member : bag / batch;
    const Table& table = plan_.tables[number];
    const int32_t sample = bag - number * batch;
    const int64_t own = sample - plan_.first_sample;
    const int64_t element = own >= 0 && own < plan_.num_samples ? own * call_.gradient_stride + table.column
                                                                : static_cast<int64_t>(sample) * group.width;
    const uint8_t* tensor = own >= 0 && own < plan_.num_samples
                                ? call_.gradient
                                : plan_.team.heap + plan_.staging_offset + table.staged_offset;
    window_.gradients[i] = tensor + element * static_cast<int64_t>(sizeof(Storage));
    if constexpr (Traits::kPooling == Pooling::kWeightedSum) window_.factors[i] = call_.factors[call_.lookups[at]];
    if constexpr (Traits::kPooling == Pooling::kMean) window_.factors[i] = 1.0f / call_.counts[bag];
  }

  const Plan& plan_;
  const Call& call_;
  Window& window_;
  const int count_;
  const BallotWarp warp_{};
};

}  // namespace po::embedding_backward
