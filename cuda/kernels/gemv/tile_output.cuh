// From a tile's sums to its results: bias, residual, the one rounding, and the place of each element in the output.
//
// An item is what one thread finishes: kItem rows of one vector.
#pragma once

#include "platform/describe.cuh"
#include "sched/row_tiles.cuh"

namespace po::gemv_all_reduce {

// A part of the plan.
struct OutputPlan {
  int64_t num_tiles;  // of this launch's rows
  int64_t stride;     // elements from one vector of the output (or residual) to the next
};
PO_DESCRIBE(OutputPlan, num_tiles, stride)

template <class Traits, class Call>
class TileOutput {
 public:
  using Scalar = typename Traits::Scalar;
  using Storage = typename Scalar::Storage;
  using Results = Storage[Traits::kItem];

  PO_FN TileOutput(const OutputPlan& plan, const Call& call) : plan_(plan), call_(call) {}
  PO_FN int64_t num_tiles() const { return plan_.num_tiles; }

  // Values that are added to an item's sums.
  struct Addends {
    Storage bias[Traits::kItem];
    Storage residual[Traits::kItem];
  };

  PO_FN Addends addends(int tile, int item) const {
    Addends found = {};
    const auto* bias = reinterpret_cast<const Storage*>(call_.bias);
    const auto* residual = reinterpret_cast<const Storage*>(call_.residual);
    for_each_element(tile, item, [&](int i, int64_t row, int64_t place) {
      if (bias != nullptr) found.bias[i] = bias[row];
      if (residual != nullptr) found.residual[i] = residual[place];
    });
    return found;
  }

  // Stores an item's results, and returns them.
  PO_FN void finish(int tile, int item, const float (&sums)[Traits::kItem], const Addends& addends,
                    Results& results) const {
    for_each_element(tile, item, [&](int i, int64_t, int64_t place) {
      float sum = sums[i];
      if (call_.bias != nullptr) sum += Scalar::to_float(addends.bias[i]);
      if (call_.residual != nullptr) sum += Scalar::to_float(addends.residual[i]);
      results[i] = Scalar::from_float(sum);
      output()[place] = results[i];
    });
  }

  // Stores results that the tile's owner has finished.
  PO_FN void store(int tile, int item, const Results& results) const {
    for_each_element(tile, item, [&](int i, int64_t, int64_t place) { output()[place] = results[i]; });
  }

  // All bits set: NaN in fp32, fp16 and bf16.
  PO_FN void poison(int tile, int item) const {
    for_each_element(tile, item, [&](int, int64_t, int64_t place) { output()[place] = static_cast<Storage>(-1); });
  }

 private:
  PO_FN Storage* output() const { return reinterpret_cast<Storage*>(call_.output); }

  // Calls use(i, row, place in output and residual) for the item's elements that are rows of the weight.
  template <class Use>
  PO_FN void for_each_element(int tile, int item, const Use& use) const {
    const int64_t first_row = static_cast<int64_t>(tile) * kTileRows + item % Traits::kItemsPerVector * Traits::kItem;
    const int64_t place = item / Traits::kItemsPerVector * plan_.stride + first_row;
    PO_UNROLL
    for (int i = 0; i < Traits::kItem; ++i) {
      if (first_row + i < call_.shape.num_rows()) use(i, first_row + i, place + i);
    }
  }

  const OutputPlan& plan_;
  const Call& call_;
};

}  // namespace po::gemv_all_reduce
