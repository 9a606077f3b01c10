// A warp's block of a row (sched/row_blocks.cuh): reads and writes its elements, and sums their squares in one fixed
// order.
#pragma once

#include "platform/groups.cuh"
#include "platform/scalar.cuh"
#include "sched/row_blocks.cuh"

namespace po {

// `kIsAligned`: all rows of all tensors begin at multiples of 16 bytes. `kHasEndsApart`: the elements of a row's
// incomplete last chunk are loaded and stored out of line, since fetching unused code takes time; but calls take
// registers.
template <class ScalarType, bool kIsAligned, bool kHasEndsApart>
struct RowBlock {
  using Scalar = ScalarType;
  using Storage = typename Scalar::Storage;
  static constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Storage));  // of a chunk
  static constexpr int kLaneChunks = kBlockChunks / kWarpSize;                       // of a lane: 1 on the GPU
  using Chunk = Vector<kChunkBytes>;

  // A lane's chunks, in the order of their numbers.
  struct Chunks {
    Chunk chunks[kLaneChunks];

    PO_FN Chunk& operator[](int i) { return chunks[i]; }
    PO_FN const Chunk& operator[](int i) const { return chunks[i]; }
  };

  // Number of a lane's chunk within the block.
  static PO_FN int chunk_of(const Warp& warp, int i) { return warp.rank() + i * kWarpSize; }

  static PO_FN Chunk load(const uint8_t* tensor, int64_t element, int count) {
    const auto* source = reinterpret_cast<const Storage*>(tensor) + element;
    if (kIsAligned && count == kElements) return load_shared_vector<kChunkBytes>(source);
    if constexpr (kIsAligned && kHasEndsApart) return load_end(source, count);
    return load_first(source, count);
  }

  // Loads a whole block, of which each lane gets its chunks.
  static PO_FN Chunks load_block(const uint8_t* tensor, const RowBlocks& rows, const Warp& warp, int block) {
    Chunks loaded;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const ChunkPlace at = rows.chunk(block, chunk_of(warp, i), kElements);
      loaded[i] = load(tensor, at.element, at.count);
    }
    return loaded;
  }

  static PO_FN void store(uint8_t* tensor, int64_t element, int count, const Chunk& chunk) {
    Storage values[kElements];
    __builtin_memcpy(values, &chunk, sizeof(chunk));
    store_elements(reinterpret_cast<Storage*>(tensor) + element, count, values);
  }

  // The same for elements of another type.
  template <class Element>
  static PO_FN void store_elements(Element* target, int count, const Element (&values)[kElements]) {
    Vector<sizeof(values)> vector;
    __builtin_memcpy(&vector, values, sizeof(values));
    if (kIsAligned && count == kElements) return store_vector<sizeof(values)>(target, vector);
    if constexpr (kIsAligned && kHasEndsApart) return store_end(target, count, vector);
    store_first(target, count, vector);
  }

  static PO_FN void to_floats(const Chunk& chunk, float (&floats)[kElements]) {
    Storage values[kElements];
    __builtin_memcpy(values, &chunk, sizeof(chunk));
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) floats[i] = Scalar::to_float(values[i]);
  }

  static PO_FN void add_to(float (&sums)[kElements], const Chunk& chunk) {
    float addends[kElements];
    to_floats(chunk, addends);
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) sums[i] += addends[i];
  }

  static PO_FN Chunk rounded(const float (&sums)[kElements]) {
    Storage values[kElements];
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) values[i] = Scalar::from_float(sums[i]);
    Chunk chunk;
    __builtin_memcpy(&chunk, values, sizeof(chunk));
    return chunk;
  }

  // The sum of a chunk's squares, in the elements' order; product and sum are rounded separately.
  static PO_FN float squares_of(const Chunk& chunk, int count) {
    float values[kElements];
    to_floats(chunk, values);
    float sum = 0.0f;
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) sum += rounded_product(values[i], values[i]);
    }
    return sum;
  }

 private:
  // The first `count` elements of a chunk, one by one.
  static PO_FN Chunk load_first(const Storage* source, int count) {
    Storage values[kElements] = {};
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) values[i] = source[i];
    }
    Chunk chunk;
    __builtin_memcpy(&chunk, values, sizeof(chunk));
    return chunk;
  }
  static PO_NOINLINE Chunk load_end(const Storage* source, int count) { return load_first(source, count); }

  template <class Element>
  static PO_FN void store_first(Element* target, int count, const Vector<kElements * sizeof(Element)>& vector) {
    Element values[kElements];
    __builtin_memcpy(values, &vector, sizeof(values));
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) target[i] = values[i];
    }
  }
  template <class Element>
  static PO_NOINLINE void store_end(Element* target, int count, Vector<kElements * sizeof(Element)> vector) {
    store_first(target, count, vector);
  }
};

}  // namespace po
