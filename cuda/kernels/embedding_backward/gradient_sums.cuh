// Adds up the gradients of a row's lookups, in fp32 and in the order of the lookups. A group of lanes holds the row, or
// a part of a wide row, in registers, each lane some chunks of its columns. The lane that holds a column adds up all
// its gradients.
#pragma once

#include "kernels/embedding_backward/lookup_window.cuh"
#include "platform/streaming.cuh"

namespace po::embedding_backward {

// A lane's columns of a part of a row.
template <int kLaneChunks, int kElements>
struct LaneColumns {
  float values[kLaneChunks][kElements];
};

template <class Type, class Source, int kElements>
PO_FN void to_floats(const Source& source, float (&floats)[kElements]) {
  typename Type::Storage values[kElements];
  static_assert(sizeof(values) == sizeof(source));
  __builtin_memcpy(values, &source, sizeof(source));
  PO_UNROLL
  for (int e = 0; e < kElements; ++e) floats[e] = Type::to_float(values[e]);
}

// `Lanes` is the group that holds the row, in chunks of `kElements` columns.
template <class Traits, class Lanes, int kElements>
class GradientSums {
 public:
  using Window = LookupWindow<Traits>;
  static constexpr int kLaneChunks = max_of(Traits::kRowChunks / Lanes::kSize, 1);
  using Columns = LaneColumns<kLaneChunks, kElements>;

  static PO_FN int num_parts(const GroupView& view) {
    return Traits::kHasWideRows ? ceil_div(view.width, kPartElements) : 1;
  }

  // The first column of a lane's chunk.
  PO_FN int element_of(int part, int i) const {
    return (Traits::kHasWideRows ? part : 0) * kPartElements + (lanes_.rank() + i * Lanes::kSize) * kElements;
  }

  // Adds the gradients of the window's lookups first, ..., last - 1, in this order, a few at a time: a tile has the row
  // in registers, too. Tiles of a warp go through their rows together.
  PO_FN void add_few(const GroupView& view, const Window& window, int part, int first, int last, Columns& sums) const {
    PO_NO_UNROLL
    for (int at = first; at < last; at += kFew) add_some<kFew, true>(view, window, part, at, last, sums);
  }

  // The same, with more gradients at a time: a warp without the row has registers for them.
  PO_FN void add_many(const GroupView& view, const Window& window, int part, int first, int last, Columns& sums) const {
    int at = first;
    PO_NO_UNROLL
    for (; at + kMany <= last; at += kMany) add_some<kMany, false>(view, window, part, at, last, sums);
    add_rest<kMany / 2>(view, window, part, at, last, sums);
  }

  // Stores a chunk's sums for the warp that adds up the row's.
  PO_FN void store_sums(const GroupView& view, int part, float* target, const Columns& sums) const {
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) store_as<false>(view, part, i, target, 0, sums.values[i]);
  }
  PO_FN void add_stored(const GroupView& view, int part, const float* source, Columns& sums) const {
    Columns stored;
    load(view, part, source, 0, stored);
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) sums.values[i][e] += stored.values[i][e];
    }
  }

  // Returns these sums in chunks of kWhole columns. If such a chunk is larger, the first lanes get the chunks, each
  // from the lanes that have a piece of it; the other lanes' results belong to no column. All lanes.
  template <int kWhole>
  PO_FN void gather(const Columns& sums, LaneColumns<kLaneChunks, kWhole>& gathered) const {
    if constexpr (kWhole == kElements) {
      gathered = sums;
    } else {
      constexpr int kPieces = kWhole / kElements;
      static_assert(kLaneChunks == 1 && kPieces * kElements == kWhole, "a chunk is of whole pieces");
      PO_UNROLL
      for (int e = 0; e < kWhole; ++e) {
        const int source = (lanes_.rank() * kPieces + e / kElements) % Lanes::kSize;  // @columns-of-lanes
        gathered.values[0][e] = lanes_.shuffle(sums.values[0][e % kElements], source);
      }
    }
  }

  // ---- a lane's columns in memory: of a row of floats that begins at `first`, or of a lookup's gradient ---------------

  PO_FN void load(const GroupView& view, int part, const float* source, int64_t first, Columns& columns) const {
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      PO_UNROLL
      for (int offset = 0; offset < kElements; offset += kFloats) {
        const int element = element_of(part, i) + offset;
        const auto floats = load_chunk<uint32_t, Traits::kIsAligned, kFloatBytes>(
            reinterpret_cast<const uint8_t*>(source), first + element, view.width - element);
        __builtin_memcpy(columns.values[i] + offset, &floats, sizeof(floats));
      }
    }
  }

  // Stores one chunk that is not read again soon.
  PO_FN void store_once(const GroupView& view, int part, int i, float* target, int64_t first,
                        const float (&values)[kElements]) const {
    store_as<true>(view, part, i, target, first, values);
  }

  // `left`: columns from the chunk's first one to the row's end.
  static PO_FN auto load_gradient(const uint8_t* gradient, int element, int left) {
    return load_chunk<WireStorage, Traits::kIsAligned, kWireBytes>(gradient, element, left);
  }

 private:
  using Wire = typename Traits::Wire;
  using WireStorage = typename Wire::Storage;
  static constexpr int kPartElements = kLaneChunks * Lanes::kSize * kElements;
  static constexpr int kWireBytes = kElements * static_cast<int>(sizeof(WireStorage));  // of a gradient's chunk
  static_assert(kWireBytes <= kChunkBytes, "a gradient's scalar is no wider than the table's");
  // Floats that are loaded or stored together.
  static constexpr int kFloats = min_of(kElements, kChunkBytes / static_cast<int>(sizeof(float)));
  static constexpr int kFloatBytes = kFloats * static_cast<int>(sizeof(float));
  // Lookups whose gradients are loaded together. kMany depends on whether loads are of whole chunks, or of elements
  // (rows that are not aligned).
  static constexpr int kFew = kLaneChunks != 1 ? 2 : 4;
  static constexpr int kManyWhole = kElements > 4 ? 4 : kWireBytes > 8 ? 8 : 16;
  static constexpr int kManyByElements = kElements > 4 ? 4 : 16 / kElements;
  static constexpr int kMany = kLaneChunks != 1 ? 2 : Traits::kIsAligned ? kManyWhole : kManyByElements;

  // Adds the gradients of fewer than 2 * kCount lookups.
  template <int kCount>
  PO_FN void add_rest(const GroupView& view, const Window& window, int part, int at, int last, Columns& sums) const {
    if (at + kCount <= last) {
      add_some<kCount, false>(view, window, part, at, last, sums);
      at += kCount;
    }
    if constexpr (kCount > 1) add_rest<kCount / 2>(view, window, part, at, last, sums);
  }

  // Adds the gradients of kCount lookups, loaded together. `kMayEnd`: there may be fewer.
  template <int kCount, bool kMayEnd>
  PO_FN void add_some(const GroupView& view, const Window& window, int part, int at, int last, Columns& sums) const {
    Vector<kWireBytes> loaded[kCount][kLaneChunks];
    PO_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if (kMayEnd && at + k >= last) continue;
      const uint8_t* gradient = window.gradients[at + k];
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        const int element = element_of(part, i);
        loaded[k][i] = load_gradient(gradient, element, view.width - element);
      }
    }
    PO_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if (kMayEnd && at + k >= last) continue;
      const float factor = Traits::kHasFactors ? window.factors[at + k] : 1.0f;
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        float values[kElements];
        to_floats<Wire>(loaded[k][i], values);
        PO_UNROLL
        for (int e = 0; e < kElements; ++e) {
          sums.values[i][e] += Traits::kHasFactors ? rounded_product(values[e], factor) : values[e];
        }
      }
    }
  }

  template <bool kOnce>
  PO_FN void store_as(const GroupView& view, int part, int i, float* target, int64_t first,
                      const float (&values)[kElements]) const {
    PO_UNROLL
    for (int offset = 0; offset < kElements; offset += kFloats) {
      const int element = element_of(part, i) + offset;
      Vector<kFloatBytes> floats;
      __builtin_memcpy(&floats, values + offset, sizeof(floats));
      store_chunk<uint32_t, Traits::kIsAligned, kOnce>(reinterpret_cast<uint8_t*>(target), first + element,
                                                       view.width - element, floats);
    }
  }

  const Lanes lanes_{};
};

}  // namespace po::embedding_backward
