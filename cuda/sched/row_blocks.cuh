// Rows of elements in blocks, and the owner of each block: pure functions of numbers that every PE knows.
//
// A block is 32 chunks of 16 bytes of one row; the last block of a row may have fewer. A warp works on a block, a chunk
// per lane. Blocks depend on the width of the rows alone, so sums by blocks have the same order whatever the grid.
#pragma once

#include "platform/describe.cuh"
#include "sched/divisor.cuh"

namespace po {

inline constexpr int kChunkBytes = 16;
inline constexpr int kBlockChunks = 32;
inline constexpr int kBlockBytes = kBlockChunks * kChunkBytes;
PO_CONSTANT(kBlockBytes)

// A chunk's place.
struct ChunkPlace {
  int64_t column;   // of its first element
  int64_t element;  // of its first element, counted from the first row's first element
  int32_t count;    // of its elements; 0: the row has ended
};

struct RowBlocks {
  int64_t width;  // elements of a row
  int32_t num_rows;
  int32_t num_blocks;
  Divisor blocks_per_row;

  PO_FN int row_of(int block) const { return num_rows == 1 ? 0 : block / blocks_per_row; }
  PO_FN int first_block_of(int row) const { return row * blocks_per_row.value; }

  // `elements`: of a chunk.
  PO_FN ChunkPlace chunk(int block, int number, int elements) const {
    const int row = row_of(block);
    const int64_t column = (static_cast<int64_t>(block - first_block_of(row)) * kBlockChunks + number) * elements;
    const int64_t left = width - column;
    return {column, row * width + column, static_cast<int32_t>(left >= elements ? elements : left > 0 ? left : 0)};
  }

  // The owner of a block: each PE owns one of `size` blocks from a multiple of `size` on. Owners alternate along the
  // WGs. They alternate along the warps of a WG, too, unless the number of PEs divides the number of WGs plus one.
  static PO_FN int owner_of(int block, const Divisor& num_wgs, const Divisor& size) {
    return (block + block / size * size.value / num_wgs) % size;
  }
};
PO_DESCRIBE(RowBlocks, width, num_rows, num_blocks, blocks_per_row)

}  // namespace po
