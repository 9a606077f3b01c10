// Pools consecutive bags of one table: the rows of all the bags form one stream, kRows of them always in flight, and a
// row of output leaves whenever the stream crosses the end of a bag. Sums are in fp32 and in index order.
//
// A group of lanes takes one bag at a time; each lane holds kVectors vectors of kBytes of every row. Rows that are wider
// than the group are pooled in several passes over their columns.
#pragma once

#include "platform/scalar.cuh"
#include "tile/window.cuh"

namespace po {

enum class Pooling { kSum, kWeightedSum, kMean };

template <class Scalar_, class Index_, class Offset_, Pooling kPooling_, int kLanes_, int kVectors_, int kBytes_,
          int kRows_>
struct BagShape {
  using Scalar = Scalar_;
  using Index = Index_;
  using Offset = Offset_;
  using Group = Lanes<kLanes_>;
  using Elements = VectorOf<Scalar, kBytes_>;
  static constexpr Pooling kPooling = kPooling_;
  // One host thread does the work of all lanes.
  static constexpr int kVectors = PO_ON_DEVICE ? kVectors_ : 8;
  static constexpr int kBytes = kBytes_;
  static constexpr int kRows = kRows_;
  static constexpr int kStrideBytes = Group::kSize * kBytes;    // from a lane's vector to its next one
  static constexpr int kChunkBytes = kStrideBytes * kVectors;  // of a row, per pass
  static_assert(kRows <= 32, "the rows in flight are marked in one 32-bit mask");
};

struct BagInputs {
  const uint8_t* rows;
  int64_t num_rows;
  int32_t row_bytes;
  const void* indices;
  int64_t num_indices;
  const void* offsets;  // of the first bag; one more than there are bags
  const float* weights;
  int32_t num_bags;
};

// What is wrong with the input of a stream, for a report when the registers are free; what is wrong was skipped.
struct BagFindings {
  int32_t bad_index = -1;  // place in the stream of an index outside the table
  int32_t bad_bag = -1;    // a bag whose end is before its begin, outside the indices, or too far away
};

// `sink.open()` runs once the first rows are in flight; false gives the stream up. `sink.emit<Shape>(sums)` takes the
// pooled piece of each bag in turn.
template <class Shape, class Sink>
PO_FN BagFindings pool_bags(const BagInputs& in, int32_t chunk_begin, Sink& sink) {
  using Group = typename Shape::Group;
  constexpr int kRows = Shape::kRows;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kCount = Shape::Elements::kCount;
  constexpr int64_t kMaxLength = 0x7fffffff;  // places in a stream are 32-bit numbers
  constexpr uint32_t kBadRow = 0xffffffffu;   // tables have fewer rows than this
  const Group group;
  BagFindings findings;

  // Offsets are sanitised as they are read: within the stream, and never falling.
  const auto* offsets = static_cast<const typename Shape::Offset*>(in.offsets);
  int64_t begin = 0;
  int32_t length = 0;
  if (in.num_bags > 0) {
    begin = min_of(max_of<int64_t>(offsets[0], 0), in.num_indices);
    const int64_t end = min_of<int64_t>(offsets[in.num_bags], in.num_indices);
    length = static_cast<int32_t>(min_of(max_of<int64_t>(end - begin, 0), kMaxLength));
  }
  const auto* first_index = static_cast<const typename Shape::Index*>(in.indices) + begin;
  const float* first_weight = Shape::kPooling == Pooling::kWeightedSum ? in.weights + begin : nullptr;
  // Places are relative to `begin`; -1 stands for an offset that no valid input has.
  auto ends = make_window<Group>(in.num_bags, [=](int32_t bag) {
    const int64_t place = static_cast<int64_t>(offsets[bag + 1]) - begin;
    return place < 0 || place > length ? -1 : static_cast<int32_t>(place);
  });
  auto row_numbers = make_window<Group>(length, [=, num_rows = in.num_rows](int32_t place) {
    const auto index = static_cast<int64_t>(first_index[place]);
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(num_rows) ? static_cast<uint32_t>(index) : kBadRow;
  });
  auto weights = make_window<Group>(Shape::kPooling == Pooling::kWeightedSum ? length : 0,
                                    [=](int32_t place) { return first_weight[place]; });

  int32_t bag = 0;
  int32_t bag_end = 0;
  auto enter_bag = [&] {
    const int32_t end = ends.at(bag);
    if (end < bag_end) findings.bad_bag = bag;
    // The last bag ends the stream whatever its offset says, so no row is left without a bag.
    bag_end = bag + 1 == in.num_bags ? length : max_of(bag_end, end);
  };

  Vector<Shape::kBytes> ring[kRows][kVectors] = {};
  float scales[kRows] = {};
  uint32_t held = 0;  // bit k: ring[k] holds a row (and not a bad index)
  const int32_t lane_offset = group.rank() * Shape::kBytes;
  const uint8_t* lane_rows = in.rows + chunk_begin + lane_offset;
  const int32_t lane_bytes = in.row_bytes - chunk_begin - lane_offset;

  auto fetch = [&](int slot, int32_t place) {
    held &= ~(1u << slot);
    if (place >= length) return;
    const uint32_t row_number = row_numbers.at(place);
    if constexpr (Shape::kPooling == Pooling::kWeightedSum) scales[slot] = weights.at(place);
    if (row_number == kBadRow) {
      findings.bad_index = place;
      return;
    }
    held |= 1u << slot;
    const uint8_t* row = lane_rows + static_cast<uint64_t>(row_number) * static_cast<uint32_t>(in.row_bytes);
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (v * Shape::kStrideBytes < lane_bytes) ring[slot][v] = load_vector<Shape::kBytes>(row + v * Shape::kStrideBytes);
    }
  };

  float sums[kVectors][kCount];
  int32_t num_summed = 0;
  auto clear = [&] {
    num_summed = 0;
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) sums[v][i] = 0.0f;
    }
  };
  auto finish_bag = [&] {
    if (Shape::kPooling == Pooling::kMean && num_summed > 1) {
      const float scale = 1.0f / static_cast<float>(num_summed);
      PO_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        PO_UNROLL
        for (int i = 0; i < kCount; ++i) sums[v][i] *= scale;
      }
    }
    sink.template emit<Shape>(sums);
    clear();
    ++bag;
    if (bag < in.num_bags) enter_bag();
  };

  clear();
  PO_UNROLL
  for (int k = 0; k < kRows; ++k) fetch(k, k);
  if (!sink.open(group)) return findings;
  if (in.num_bags > 0) enter_bag();
  for (int32_t place = 0; place < length; place += kRows) {
    PO_UNROLL
    for (int k = 0; k < kRows; ++k) {
      if (place + k < length) {
        while (place + k >= bag_end) finish_bag();
        if (held >> k & 1u) {
          ++num_summed;
          PO_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            if constexpr (Shape::kPooling == Pooling::kWeightedSum) {
              Shape::Elements::add_scaled_to(sums[v], ring[k][v], scales[k]);
            } else {
              Shape::Elements::add_to(sums[v], ring[k][v]);
            }
          }
        }
        fetch(k, place + k + kRows);
      }
    }
  }
  while (bag < in.num_bags) finish_bag();
  return findings;
}

}  // namespace po
