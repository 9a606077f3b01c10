// A tile of a matrix product: a WG's warps add it up in fp32, step by step, from tiles of the factors in shared memory,
// and store it as rounded elements. On GPUs by the tensor cores of two warpgroups (platform/warpgroup.cuh); on the host
// each thread has some of the rows.
//
// A factor's tile is made of boxes, as `copy_tile_async` brings them. A box has kDepth elements in a row, on GPUs with
// a swizzle of 128 bytes. The tile of a K-major factor is one box: its row i is row i of A (column i of B). Otherwise
// (A is M-major, B is N-major) a row of a box is one element of the sum, and boxes of kDepth rows (columns) follow each
// other.
#pragma once

#include "platform/groups.cuh"
#include "platform/tensor_map.cuh"
#include "platform/warpgroup.cuh"

namespace po {

// Bytes of a factor's tile of so many rows (columns).
constexpr int factor_bytes(int rows, int depth, bool is_k_major) {
  return (is_k_major ? rows : ceil_div(rows, depth) * depth) * depth * 2;
}

// Columns of a piece of a tile (see below) on GPUs.
constexpr int piece_columns(int columns, int parts) {
  return columns / parts % 64 == 0 ? 64 : columns / parts % 32 == 0 ? 32 : 16;
}

// Eight numbers, rounded to a scalar type.
template <class Scalar>
using Eight = Vector<8 * static_cast<int>(sizeof(typename Scalar::Storage))>;

template <class Scalar>
PO_FN Eight<Scalar> rounded_eight(const float (&values)[8]) {
  Eight<Scalar> result;
#if PO_ON_DEVICE
  if constexpr (sizeof(typename Scalar::Storage) == 2) {
    PO_UNROLL
    for (int i = 0; i < 4; ++i) result.words[i] = rounded_pair<Scalar>(values[2 * i], values[2 * i + 1]);
  } else
#endif
  {
    typename Scalar::Storage rounded[8];
    PO_UNROLL
    for (int i = 0; i < 8; ++i) rounded[i] = Scalar::from_float(values[i]);
    __builtin_memcpy(&result, rounded, sizeof(result));
  }
  return result;
}

template <class Scalar>
PO_FN void set_eight(float (&numbers)[8], const Eight<Scalar>& values) {
  typename Scalar::Storage elements[8];
  __builtin_memcpy(elements, &values, sizeof(elements));
  PO_UNROLL
  for (int i = 0; i < 8; ++i) numbers[i] = Scalar::to_float(elements[i]);
}

template <class Scalar>
PO_FN void add_eight(float (&sums)[8], const Eight<Scalar>& values) {
  float numbers[8];
  set_eight<Scalar>(numbers, values);
  PO_UNROLL
  for (int i = 0; i < 8; ++i) sums[i] += numbers[i];
}

// `kParts`: WGs that add up different parts of a tile's sums (1 or 2). Each then finishes its own half of the tile.
// `kHelpers`: kinds of helpers, which do not multiply: one loads. On the host each is a thread, where there are others.
template <class Element, int kTileRows, int kTileColumns, int kTileDepth, bool kAKMajor, bool kBKMajor, int kParts,
          int kHelpers = 1>
class ProductTile {
  using Storage = typename Element::Storage;
  static_assert(sizeof(Storage) == 2);

 public:
  struct Pair {
    float first;
    float second;
  };

  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kDepth = kTileDepth;  // of a step
  static constexpr bool kIsAKMajor = kAKMajor;
  static constexpr bool kIsBKMajor = kBKMajor;
  static constexpr int kBoxBytes = kDepth * kDepth * 2;  // of one that is not K-major
  static constexpr int kABytes = factor_bytes(kRows, kDepth, kIsAKMajor);
  static constexpr int kBBytes = factor_bytes(kColumns, kDepth, kIsBKMajor);

#if PO_ON_DEVICE

  static constexpr int kWarps = 8;            // that add up
  static constexpr int kSlabs = kRows / 128;  // of 64 rows, of each warpgroup
  // A warp rounds and stores so many rows and columns at a time.
  static constexpr int kPieceRows = 16;
  static constexpr int kPieceColumns = piece_columns(kColumns, kParts);
  static_assert(kDepth == 64 && kRows % 128 == 0 && kColumns / kParts % 16 == 0);
  // What a WG finishes of a tile.
  static constexpr int kFinishedRows = kRows;
  static constexpr int kFinishedColumns = kColumns / kParts;
  static PO_FN int first_row(int) { return 0; }
  static PO_FN int first_column(int part) { return part * kFinishedColumns; }

  PO_FN explicit ProductTile(const WorkGroup& wg) : warp_(wg.warp_index()), lane_(Warp().rank()) {}

  static PO_FN int num_warps(const WorkGroup&) { return kWarps; }

  // Divides the registers of 12 warps, at the beginning: four of them do not add up.
  static PO_FN void take_room() { take_registers<kHelpers == 1 ? 232 : 216>(); }
  static PO_FN void leave_room() { leave_registers<kHelpers == 1 ? 40 : 72>(); }

  // Starts to add a step; `is_added`: to earlier ones.
  PO_FN void multiply(const uint8_t* a, const uint8_t* b, bool is_added) {
    const uint64_t a_tile = tile_descriptor(a + warp_ / 4 * kSlabs * kSlabBytes, 0);
    const uint64_t b_tile = tile_descriptor(b, kIsBKMajor ? 0 : kBoxBytes);
    begin_products();
    PO_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) {
      PO_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        WarpgroupProduct<kColumns>::template add<Element, !kIsAKMajor, !kIsBKMajor>(
            sums_[slab], a_tile + ((slab * kSlabBytes + k * (kIsAKMajor ? 32 : 2048)) >> 4),
            b_tile + ((k * (kIsBKMajor ? 32 : 2048)) >> 4), is_added || k > 0);
      }
    }
    commit_products();
  }

  // Returns when the tiles of all steps but the last `kPending` have been read; with 0, the sums are there.
  template <int kPending>
  PO_FN void settle() {
    await_products<kPending>();
  }

  // Adds value(column) to each column.
  template <class Value>
  PO_FN void add_to_columns(const Value& value) {
    PO_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) {
      const float added = value(i / 2 * 8 + lane_ % 4 * 2 + i % 2);
      PO_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        sums_[slab][i / 2 * 4 + i % 2] += added;
        sums_[slab][i / 2 * 4 + i % 2 + 2] += added;
      }
    }
  }

  // Calls body(row, column, round) for each of this warp's pieces, which the WG with this part finishes. round(bytes)
  // writes the piece to shared memory, rounded, as a box with a swizzle of its rows' bytes.
  template <class Body>
  PO_FN void for_each_piece(int part, const Body& body) {
    PO_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      PO_UNROLL
      for (int first = 0; first < kColumns; first += kPieceColumns) {
        if (kParts > 1 && first * kParts / kColumns != part) continue;
        body(first_row_of(slab), first, [&](uint8_t* piece) {
          PO_UNROLL
          for (int column = 0; column < kPieceColumns; column += 16) {
            const int byte = lane_ % 16 * kPieceColumns * 2 + column * 2 + lane_ / 16 * 16;
            store_rounded<Element>(piece + swizzled(static_cast<uint32_t>(byte), kPieceColumns * 2),
                                   &sums_[slab][(first + column) / 2]);
          }
        });
      }
    }
  }

  // What a thread finishes, eight sums at a time. Threads of different WGs that have the same number have the same sums
  // at the same place. The places of each kPieceRows rows follow each other.
  static constexpr int kEights = kSlabs * kFinishedColumns / 16;
  PO_FN int num_eights(int) const { return kEights; }
  PO_FN int row_of_eight(int, int i) const { return first_row_of(i * 16 / kFinishedColumns); }
  PO_FN int place_of_first_eight(int) const { return first_row_of(0) * kFinishedColumns + lane_ * 8; }
  // From the place of the first ones.
  PO_FN int way_to_eight(int i) const {
    constexpr int kOfSlab = kFinishedColumns / 16;
    return i / kOfSlab * 64 * kFinishedColumns + i % kOfSlab * kWarpSize * 8;
  }

  // Calls body(first, count, values) for kTogether times eight sums at a time, the last time perhaps for fewer.
  template <int kTogether, class Body>
  PO_FN void for_each_eight(int part, const Body& body) {
    constexpr int kOfSlab = kFinishedColumns / 16;
    PO_UNROLL
    for (int first = 0; first < kEights; first += kTogether) {
      const int count = min_of(kTogether, kEights - first);
      float values[kTogether][8];
      PO_UNROLL
      for (int j = 0; j < count; ++j) {
        PO_UNROLL
        for (int i = 0; i < 8; ++i) {
          values[j][i] = finished((first + j) / kOfSlab, part, (first + j) % kOfSlab * 8 + i);
        }
      }
      body(first, count, values);
      PO_UNROLL
      for (int j = 0; j < count; ++j) {
        PO_UNROLL
        for (int i = 0; i < 8; ++i) {
          set_finished((first + j) / kOfSlab, part, (first + j) % kOfSlab * 8 + i, values[j][i]);
        }
      }
    }
  }

  // Adds values(row, column), two columns at a time, to what the WG with this part finishes in the first `rows` of its
  // rows.
  template <class Values>
  PO_FN void add_to_pairs(int part, int rows, const Values& values) {
    PO_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      PO_UNROLL
      for (int i = 0; i < kFinishedColumns / 4; ++i) {
        const int row = first_row_of(slab) + lane_ / 4 + i % 2 * 8;
        if (row >= rows) continue;
        const Pair added = values(row, i / 2 * 8 + lane_ % 4 * 2);
        set_finished(slab, part, i * 2, finished(slab, part, i * 2) + added.first);
        set_finished(slab, part, i * 2 + 1, finished(slab, part, i * 2 + 1) + added.second);
      }
    }
  }

  // Calls body(place, values) for each four sums of a half of the tile's columns. Threads of different WGs that have
  // the same number have the same sums at the same place.
  template <class Body>
  PO_FN void for_each_four_of_half(int half, const Body& body) {
    static_assert(kSlabs == 1);
    PO_UNROLL
    for (int i = 0; i < kColumns / 4; i += 4) {
      const int place = i * kWarps * kWarpSize + (warp_ * kWarpSize + lane_) * 4;
      float values[4];
      PO_UNROLL
      for (int j = 0; j < 4; ++j) values[j] = half == 0 ? sums_[0][i + j] : sums_[0][kColumns / 4 + i + j];
      body(place, values);
      PO_UNROLL
      for (int j = 0; j < 4; ++j) (half == 0 ? sums_[0][i + j] : sums_[0][kColumns / 4 + i + j]) = values[j];
    }
  }

 private:
  PO_FN int first_row_of(int slab) const { return (warp_ / 4 * kSlabs + slab) * 64 + warp_ % 4 * kPieceRows; }
  PO_FN float finished(int slab, int part, int i) const {
    return kParts == 1 || part == 0 ? sums_[slab][i] : sums_[slab][kColumns / 4 + i];
  }
  PO_FN void set_finished(int slab, int part, int i, float value) {
    if (kParts == 1 || part == 0) {
      sums_[slab][i] = value;
    } else {
      sums_[slab][kColumns / 4 + i] = value;
    }
  }

  static constexpr int kSlabBytes = 64 * kDepth * 2;

  float sums_[kSlabs][kColumns / 2];
  int warp_, lane_;

#else

  static constexpr int kPieceRows = 1;
  static constexpr int kPieceColumns = kColumns;
  static_assert(kColumns == kDepth && kColumns == 8);
  static constexpr int kFinishedRows = kRows / kParts;
  static constexpr int kFinishedColumns = kColumns;
  static int first_row(int part) { return part * kFinishedRows; }
  static int first_column(int) { return 0; }

  explicit ProductTile(const WorkGroup& wg) : thread_(wg.rank()), num_threads_(num_warps(wg)) {}

  // Helpers do not multiply, unless the WG has no other threads.
  static int num_warps(const WorkGroup& wg) { return max_of(1, wg.size() - kHelpers); }

  static void take_room() {}
  static void leave_room() {}

  void multiply(const uint8_t* a, const uint8_t* b, bool is_added) {
    for (int row = thread_; row < kRows; row += num_threads_) {
      for (int column = 0; column < kColumns; ++column) {
        float sum = is_added ? sums_[row][column] : 0;
        for (int k = 0; k < kDepth; ++k) {
          sum += element(a, kIsAKMajor, row, k) * element(b, kIsBKMajor, column, k);
        }
        sums_[row][column] = sum;
      }
    }
  }

  template <int kPending>
  void settle() {}

  template <class Value>
  void add_to_columns(const Value& value) {
    for (int row = thread_; row < kRows; row += num_threads_) {
      for (int column = 0; column < kColumns; ++column) sums_[row][column] += value(column);
    }
  }

  template <class Body>
  void for_each_piece(int part, const Body& body) {
    for (int row = thread_; row < kRows; row += num_threads_) {
      if (row * kParts / kRows != part) continue;
      body(row, 0, [&](uint8_t* piece) {
        for (int column = 0; column < kColumns; ++column) {
          const Storage rounded = Element::from_float(sums_[row][column]);
          memcpy(piece + column * 2, &rounded, 2);
        }
      });
    }
  }

  int num_eights(int part) const {
    return ceil_div(max_of(0, first_row(part) + kFinishedRows - begin(part)), num_threads_);
  }
  int row_of_eight(int part, int i) const { return begin(part) - first_row(part) + i * num_threads_; }
  int place_of_first_eight(int part) const { return row_of_eight(part, 0) * kColumns; }
  int way_to_eight(int i) const { return i * num_threads_ * kColumns; }

  template <int kTogether, class Body>
  void for_each_eight(int part, const Body& body) {
    const int all = num_eights(part);
    for (int first = 0; first < all; first += kTogether) {
      const int count = min_of(kTogether, all - first);
      float values[kTogether][8];
      for (int j = 0; j < count; ++j)
        memcpy(values[j], sums_[begin(part) + (first + j) * num_threads_], sizeof(values[j]));
      body(first, count, values);
      for (int j = 0; j < count; ++j)
        memcpy(sums_[begin(part) + (first + j) * num_threads_], values[j], sizeof(values[j]));
    }
  }

  template <class Values>
  void add_to_pairs(int part, int rows, const Values& values) {
    for (int i = 0; i < num_eights(part); ++i) {
      const int row = row_of_eight(part, i);
      float (&sums)[kColumns] = sums_[first_row(part) + row];
      for (int column = 0; row < rows && column < kColumns; column += 2) {
        const Pair added = values(row, column);
        sums[column] += added.first;
        sums[column + 1] += added.second;
      }
    }
  }

  template <class Body>
  void for_each_four_of_half(int half, const Body& body) {
    for (int row = thread_; row < kRows; row += num_threads_) {
      if (row * 2 / kRows != half) continue;
      for (int column = 0; column < kColumns; column += 4) {
        float values[4];
        memcpy(values, &sums_[row][column], sizeof(values));
        body(row % (kRows / 2) * kColumns + column, values);
        memcpy(&sums_[row][column], values, sizeof(values));
      }
    }
  }

 private:
  // This thread's first row of those that the part finishes.
  int begin(int part) const {
    return thread_ + ceil_div(max_of(0, first_row(part) - thread_), num_threads_) * num_threads_;
  }

  static float element(const uint8_t* tile, bool is_k_major, int number, int k) {
    const int box = is_k_major ? 0 : number / kDepth, row = is_k_major ? number : k,
              column = is_k_major ? k : number % kDepth;
    Storage value;
    memcpy(&value, tile + box * kBoxBytes + (row * kDepth + column) * 2, 2);
    return Element::to_float(value);
  }

  float sums_[kRows][kColumns];
  int thread_, num_threads_;

#endif
};

}  // namespace po
