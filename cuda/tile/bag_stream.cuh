// Pools consecutive bags of one table. The rows of all the bags form one stream, and a row of output leaves whenever
// the stream crosses the end of a bag. Sums are in fp32 and in index order, and rounded once, to the scalar of the
// output.
//
// A group of lanes takes one bag at a time; each lane holds kVectors vectors of kBytes of every row. Rows come in two
// alternating batches: while one is added up, the other is in flight. A batch's loads are straight-line code: a load
// after a branch of its own would make the next wait cover it too. Rows that are wider than the group are pooled in
// several passes over their columns. A lone lane, as in a host's warp, uses another body, below.
#pragma once

#include "platform/scalar.cuh"
#include "tile/window.cuh"

namespace po {

enum class Pooling { kSum, kWeightedSum, kMean };

template <class Scalar_, class Output_, class Index_, class Offset_, Pooling kPooling_, int kLanes_, int kVectors_,
          int kBytes_, int kRows_>
struct BagShape {
  using Scalar = Scalar_;
  using Index = Index_;
  using Offset = Offset_;
  using Group = Lanes<kLanes_>;
  using Elements = VectorOf<Scalar, kBytes_>;
  // Width of a table's element divided by the width of an output's.
  static constexpr int kNarrowing =
      static_cast<int>(sizeof(typename Scalar::Storage) / sizeof(typename Output_::Storage));
  static constexpr int kOutputBytes = kBytes_ / kNarrowing;
  using Output = VectorOf<Output_, kOutputBytes>;
  static constexpr Pooling kPooling = kPooling_;
  // A host thread does the work of all lanes, on up to 512 bytes of a row at a time.
  static constexpr int kVectors = PO_ON_DEVICE ? kVectors_ : 512 / kBytes_;
  static constexpr int kBytes = kBytes_;
  // Rows per batch; the window of row numbers advances by whole batches.
  static constexpr int kBatch = PO_ON_DEVICE ? min_of(kRows_ / 2, kLanes_) : 1;
  static constexpr int kStrideBytes = Group::kSize * kBytes;   // from a lane's vector to its next one
  static constexpr int kChunkBytes = kStrideBytes * kVectors;  // of a row, per pass
  static_assert(!PO_ON_DEVICE || kLanes_ % kBatch == 0, "a batch must not straddle two windows");
  static_assert(Output::kCount == Elements::kCount, "an element becomes one that is no wider");
};

struct BagInputs {
  const uint8_t* rows;
  int64_t num_rows;
  int32_t row_bytes;
  const void* indices;
  int64_t num_indices;
  const void* offsets;  // of the first bag; one more than there are bags
  const float* weights;
  int32_t num_bags;  // at most the lanes of a group, on the GPU
};

// What is wrong with a stream's input, for a report when the registers are free; the errors themselves were skipped.
struct BagFindings {
  int32_t bad_index = -1;  // place in the stream of an index outside the table
  int32_t bad_bag = -1;    // a bag whose end is before its begin, outside the indices, or too far away
};

// `sink.open()` runs once the first rows are in flight; if it returns false, the stream is given up.
// `sink.emit<Shape>(sums)` takes the pooled piece of each bag in turn.
template <class Shape, class Sink>
PO_FN BagFindings pool_bags(const BagInputs& in, int32_t chunk_begin, Sink& sink) {
  using Group = typename Shape::Group;
  constexpr bool kIsWeighted = Shape::kPooling == Pooling::kWeightedSum;
  constexpr int kBatch = Shape::kBatch;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kCount = Shape::Elements::kCount;
  constexpr int32_t kMaxLength = 0x7fffffff - 2 * kBatch;  // places in a stream are 32-bit numbers
  constexpr uint32_t kNoRow = 0xfffffffeu;                 // no table has more rows
  const Group group;
  BagFindings findings;

  // Offsets are sanitized when they are read: within the stream, and never falling.
  const auto* offsets = static_cast<const typename Shape::Offset*>(in.offsets);
  int64_t begin = 0;
  int32_t length = 0;
  if (in.num_bags > 0) {
    begin = min_of(max_of<int64_t>(offsets[0], 0), in.num_indices);
    const int64_t end = max_of(min_of<int64_t>(offsets[in.num_bags], in.num_indices), begin);
    length = static_cast<int32_t>(min_of<int64_t>(end - begin, kMaxLength));
  }
  const auto* first_index = static_cast<const typename Shape::Index*>(in.indices) + begin;
  const float* first_weight = kIsWeighted ? in.weights + begin : nullptr;
  // Places are relative to `begin`; -1 stands for an offset that no valid input has.
  const auto ends = make_lane_array<Group>(in.num_bags, [=](int32_t bag) {
    const auto offset = static_cast<int64_t>(offsets[bag + 1]);  // any number, so it is compared before the subtraction
    return offset < begin || offset > begin + length ? -1 : static_cast<int32_t>(offset - begin);
  });
  auto row_numbers = make_window<Group>(length, kNoRow, [=, &findings, num_rows = in.num_rows](int32_t place) {
    const auto index = static_cast<int64_t>(first_index[place]);
    if (static_cast<uint64_t>(index) < static_cast<uint64_t>(num_rows)) return static_cast<uint32_t>(index);
    findings.bad_index = place;
    return kNoRow;
  });
  auto weights = make_window<Group>(kIsWeighted ? length : 0, 0.0f, [=](int32_t place) { return first_weight[place]; });

  // A lane beyond the end of the row reads the row's beginning; its sums are never stored.
  const int32_t lane_offset = group.rank() * Shape::kBytes;
  const int32_t chunk_bytes = min_of(in.row_bytes - chunk_begin, Shape::kChunkBytes);
  const uint8_t* lane_rows = in.rows + chunk_begin + (lane_offset < chunk_bytes ? lane_offset : 0);
  int32_t vector_offset[kVectors];
  PO_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    vector_offset[v] = v * Shape::kStrideBytes + lane_offset < chunk_bytes ? v * Shape::kStrideBytes : 0;
  }
  // On the GPU all vectors are summed up, so that loops over them unroll. The host sums only the row's vectors.
  const int num_vectors = PO_ON_DEVICE ? kVectors : ceil_div(chunk_bytes, Shape::kStrideBytes);

  struct Batch {
    Vector<Shape::kBytes> rows[kBatch][kVectors];
    float scales[kBatch];
    uint32_t present;  // bit k: rows[k] counts in a mean
  };
  Batch batches[2];

  auto fetch = [&](Batch& batch, int32_t place) {
    row_numbers.advance_to(place);
    if constexpr (kIsWeighted) weights.advance_to(place);
    uint32_t numbers[kBatch];
    uint32_t largest = 0;
    PO_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      numbers[k] = row_numbers.at(place + k);
      largest = max_of(largest, numbers[k]);
      if constexpr (kIsWeighted) batch.scales[k] = weights.at(place + k);
    }
    if constexpr (!PO_ON_DEVICE) {
      constexpr int kLookahead = 16;  // rows; the distance has about as many cache misses as a core keeps in flight
      const uint32_t ahead = row_numbers.at(place + kLookahead);
      if (ahead < kNoRow) {
        prefetch(lane_rows + static_cast<uint64_t>(ahead) * static_cast<uint32_t>(in.row_bytes), chunk_bytes);
      }
    }
    batch.present = ~0u;
    if (largest < kNoRow) {
      PO_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        const uint8_t* row = lane_rows + static_cast<uint64_t>(numbers[k]) * static_cast<uint32_t>(in.row_bytes);
        PO_UNROLL
        for (int v = 0; v < num_vectors; ++v) batch.rows[k][v] = load_vector<Shape::kBytes>(row + vector_offset[v]);
      }
      return;
    }
    // At the end of the stream, or after a bad index, missing rows add +0.0 to a sum that is never -0.0.
    PO_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      const uint8_t* row = lane_rows + static_cast<uint64_t>(numbers[k]) * static_cast<uint32_t>(in.row_bytes);
      PO_UNROLL
      for (int v = 0; v < num_vectors; ++v) {
        batch.rows[k][v] = {};
        if (numbers[k] < kNoRow) batch.rows[k][v] = load_vector<Shape::kBytes>(row + vector_offset[v]);
      }
      if (numbers[k] < kNoRow) continue;
      batch.present &= ~(1u << k);
      if constexpr (kIsWeighted) batch.scales[k] = 0.0f;
    }
  };

  float sums[kVectors][kCount];
  int32_t num_summed = 0;
  auto clear = [&] {
    num_summed = 0;
    PO_UNROLL
    for (int v = 0; v < num_vectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) sums[v][i] = 0.0f;
    }
  };
  int32_t bag = 0;
  int32_t bag_end = 0;
  auto enter_bag = [&] {
    if (bag >= in.num_bags) {
      bag_end = 0x7fffffff;  // no bag is left to finish
      return;
    }
    const int32_t end = ends.at(bag);
    if (end < bag_end) findings.bad_bag = bag;
    // The last bag ends the stream whatever its offset says, so no row is left without a bag.
    bag_end = bag + 1 == in.num_bags ? length : max_of(bag_end, end);
  };
  auto finish_bag = [&] {
    if (Shape::kPooling == Pooling::kMean && num_summed > 1) {
      const float scale = 1.0f / static_cast<float>(num_summed);
      PO_UNROLL
      for (int v = 0; v < num_vectors; ++v) {
        PO_UNROLL
        for (int i = 0; i < kCount; ++i) sums[v][i] *= scale;
      }
    }
    sink.template emit<Shape>(sums);
    clear();
    ++bag;
    enter_bag();
  };
  auto consume = [&](const Batch& batch, int32_t place) {
    PO_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      while (place + k >= bag_end) finish_bag();
      if constexpr (Shape::kPooling == Pooling::kMean) num_summed += static_cast<int32_t>(batch.present >> k & 1u);
      if constexpr (kIsWeighted) {
        Shape::Elements::add_scaled_to(sums, batch.rows[k], batch.scales[k], num_vectors);
      } else {
        Shape::Elements::add_to(sums, batch.rows[k], num_vectors);
      }
    }
  };

  clear();
  fetch(batches[0], 0);
  if (!sink.open(group)) return findings;
  enter_bag();
  for (int32_t place = 0; place < length; place += 2 * kBatch) {
    fetch(batches[1], place + kBatch);
    consume(batches[0], place);
    fetch(batches[0], place + 2 * kBatch);
    consume(batches[1], place + kBatch);
  }
  while (bag < in.num_bags) finish_bag();
  return findings;
}

#if !PO_ON_DEVICE

namespace detail {

// The same by one lane, as on the host: bag by bag, rows are added up in place. `kWidth`: vectors of the chunk if that
// is a constant, so that the compiler unrolls loops over them; otherwise 0.
template <class Shape, int kWidth, class Sink>
BagFindings pool_bags_of_width(const BagInputs& in, int32_t chunk_begin, Sink& sink) {
  using Elements = typename Shape::Elements;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kCount = Elements::kCount;
  constexpr int64_t kLookahead = 16;  // rows; the distance has about as many cache misses as a core keeps in flight
  const int num_vectors = kWidth != 0 ? kWidth : min_of(in.row_bytes - chunk_begin, Shape::kChunkBytes) / Shape::kBytes;
  BagFindings findings;

  const auto* offsets = static_cast<const typename Shape::Offset*>(in.offsets);
  int64_t begin = 0;
  int32_t length = 0;
  if (in.num_bags > 0) {
    begin = min_of(max_of<int64_t>(offsets[0], 0), in.num_indices);
    const int64_t end = max_of(min_of<int64_t>(offsets[in.num_bags], in.num_indices), begin);
    length = static_cast<int32_t>(min_of<int64_t>(end - begin, 0x7fffffff));
  }
  const auto* first_index = static_cast<const typename Shape::Index*>(in.indices) + begin;
  const auto row_at = [&](int64_t place) -> const uint8_t* {
    const auto index = static_cast<int64_t>(first_index[place]);
    if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(in.num_rows)) return nullptr;
    return in.rows + chunk_begin + index * in.row_bytes;
  };
  // Indices after the stream's are mostly indices of this table's next task.
  const int64_t num_ahead = in.num_indices - begin - kLookahead;

  if (!sink.open(typename Shape::Group{})) return findings;
  int32_t place = 0;
  int32_t bag_end = 0;
  for (int32_t bag = 0; bag < in.num_bags; ++bag) {
    const auto offset = static_cast<int64_t>(offsets[bag + 1]);
    const int32_t end = offset < begin || offset > begin + length ? -1 : static_cast<int32_t>(offset - begin);
    if (end < bag_end) findings.bad_bag = bag;
    bag_end = bag + 1 == in.num_bags ? length : max_of(bag_end, end);
    float sums[kVectors][kCount] = {};
    int32_t num_summed = 0;
    for (; place < bag_end; ++place) {
      if (place < num_ahead) {
        const uint8_t* ahead = row_at(place + kLookahead);
        if (ahead != nullptr) prefetch(ahead, num_vectors * Shape::kBytes);
      }
      const uint8_t* row = row_at(place);
      if (row == nullptr) {
        findings.bad_index = place;
        continue;
      }
      ++num_summed;
      const auto& vectors = *reinterpret_cast<const Vector<Shape::kBytes>(*)[kVectors]>(row);
      if constexpr (Shape::kPooling == Pooling::kWeightedSum) {
        Elements::add_scaled_to(sums, vectors, in.weights[begin + place], num_vectors);
      } else {
        Elements::add_to(sums, vectors, num_vectors);
      }
    }
    if (Shape::kPooling == Pooling::kMean && num_summed > 1) {
      Elements::scale(sums, 1.0f / static_cast<float>(num_summed), num_vectors);
    }
    sink.template emit<Shape>(sums);
  }
  return findings;
}

}  // namespace detail

template <class Shape, class Sink>
  requires(Shape::Group::kSize == 1)
BagFindings pool_bags(const BagInputs& in, int32_t chunk_begin, Sink& sink) {
  constexpr int kMost = Shape::kVectors;
  switch (min_of(in.row_bytes - chunk_begin, Shape::kChunkBytes) / Shape::kBytes) {
    case kMost:
      return detail::pool_bags_of_width<Shape, kMost>(in, chunk_begin, sink);
    case kMost / 2:
      return detail::pool_bags_of_width<Shape, kMost / 2>(in, chunk_begin, sink);
    case kMost / 4:
      return detail::pool_bags_of_width<Shape, kMost / 4>(in, chunk_begin, sink);
    default:
      return detail::pool_bags_of_width<Shape, 0>(in, chunk_begin, sink);
  }
}

#endif

}  // namespace po
