// Rows of a weight times a few vectors, one WG: each warp has a share of the columns and streams it, tile after tile,
// through a ring in the WG's own memory that is always being refilled.
//
// A lane copies exactly the pieces that it will use itself (16 bytes of row g, in lane 4 g + t), so the ring needs no
// barrier. The order in which a vector's products are added depends on the columns and the warps alone: not on how many
// vectors share the pass, and not on the vectors beside it.
#pragma once

#include "platform/groups.cuh"
#include "platform/matrix.cuh"
#include "platform/memory.cuh"
#include "platform/scalar.cuh"
#include "sched/row_tiles.cuh"

namespace po {

struct Weight {
  const uint8_t* elements;  // [num_rows][num_columns]
  int num_rows;
  int num_columns;
};

// A warp's part in a WG's tiles: it has some of the columns of every so many tiles. A step is kStep elements of each row of
// a tile, 64 bytes. Warps form teams, and a team shares a tile's columns; with few columns there are several small teams,
// because a warp should find some steps to do before it turns to its next tile.
template <class Scalar>
struct WarpShare {
  static constexpr int kPiece =
      16 / static_cast<int>(sizeof(typename Scalar::Storage));  // elements of a lane in a step
  static constexpr int kStep = 4 * kPiece;
  static constexpr int kFewestSteps = 8;
  static constexpr int kMaxTeams = 4;
  int num_parts;  // warps in a team
  int num_teams;
  int part;
  int team;  // num_teams: this warp is in none
  int first_step;
  int num_steps;

  static PO_FN int num_steps_of(int num_columns) { return ceil_div(num_columns, kStep); }

  static PO_FN WarpShare of_warp(int num_columns, int warp, int num_warps) {
    const int total = num_steps_of(num_columns);
    int num_teams = 1;  // a power of two: see Handover
    while (num_teams < kMaxTeams && 2 * num_teams <= num_warps && total < num_warps / num_teams * kFewestSteps) {
      num_teams *= 2;
    }
    const int num_parts = num_warps / num_teams;
    const int each = ceil_div(total, num_parts);
    const int first = min_of(warp % num_parts * each, total);
    return {num_parts,
            num_teams,
            warp % num_parts,
            min_of(warp / num_parts, num_teams),
            first,
            min_of(each, total - first)};
  }
};

#if PO_ON_DEVICE

// The vectors, where lanes find them: piece t of step s of vector n at ((s * kVectors + n) * 4 + t) * 16 bytes of the WG's
// own memory, so that a warp reads 512 bytes in a row; or, where there is no room, in global memory.
template <class Scalar, int kVectors, bool kAligned, bool kResident>
struct Vectors {
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  const uint8_t* elements;  // [count][num_columns]
  int count;
  int num_columns;
  uint8_t* own;

  // Elements k to k + kPiece of a vector, zeros behind its end.
  PO_FN Vector<16> from_memory(int n, int piece) const {
    Vector<16> value{};
    const int k = piece * Share::kPiece;
    if (n >= count || k >= num_columns) return value;
    const auto* source = reinterpret_cast<const Storage*>(elements) + static_cast<int64_t>(n) * num_columns + k;
    if constexpr (kAligned) {
      value = *reinterpret_cast<const Vector<16>*>(source);
    } else {
      Storage x[Share::kPiece];
      PO_UNROLL
      for (int i = 0; i < Share::kPiece; ++i) x[i] = k + i < num_columns ? source[i] : Storage{0};
      __builtin_memcpy(&value, x, 16);
    }
    return value;
  }

  static PO_FN int own_bytes(int num_columns) {
    return kResident ? Share::num_steps_of(num_columns) * kVectors * 64 : 0;
  }

  // Starts bringing all vectors into the WG's own memory, as one batch of copies. All threads; each must await it, and a
  // sync follow.
  PO_FN void fetch(const WorkGroup& wg) const {
    if constexpr (kResident) {
      const int num_pieces = Share::num_steps_of(num_columns) * 4;
      for (int n = 0; n < kVectors; ++n) {
        for (int piece = wg.rank(); piece < num_pieces; piece += wg.size()) {
          uint8_t* target = own + ((piece / 4 * kVectors + n) * 4 + piece % 4) * 16;
          if constexpr (kAligned) {
            const bool is_there = n < count && piece * Share::kPiece < num_columns;
            const int64_t element = is_there ? static_cast<int64_t>(n) * num_columns + piece * Share::kPiece : 0;
            copy_async(target, elements + element * static_cast<int64_t>(sizeof(Storage)), is_there ? 16 : 0);
          } else {
            *reinterpret_cast<Vector<16>*>(target) = from_memory(n, piece);
          }
        }
      }
    }
    copy_async_commit();
  }

  PO_FN Vector<16> piece(int n, int step, int t) const {
    if constexpr (!kResident) return from_memory(n, step * 4 + t);
    return *reinterpret_cast<const Vector<16>*>(own + ((step * kVectors + n) * 4 + t) * 16);
  }
};

template <class Scalar, int kVectors, int kDepth, bool kAligned, bool kResident>
class WeightStream {
 public:
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Scalar, kVectors, kAligned, kResident>;
  static constexpr int kBatch = 2;  // steps that are copied and awaited together
  static constexpr int kBytesPerWarp = kDepth * kBatch * kWarpSize * 16;
  static constexpr int kBatchesAhead = kDepth;

  // Starts the first copies, of the tiles at the positions of this warp's team. `ring` has kBytesPerWarp for each warp.
  PO_FN WeightStream(const Weight& weight, const RowTiles& tiles, const Share& share, uint8_t* ring, int warp)
      : weight_(weight), tiles_(tiles), share_(share), position_(share.team) {
    const Warp lanes;
    row_in_tile_ = lanes.rank() / 4;
    t_ = lanes.rank() % 4;
    slots_ = ring + warp * kBytesPerWarp + lanes.rank() * 16;
    begin_tile();
    for (int batch = 0; batch < kDepth; ++batch) copy_next(batch);
  }

  // Multiplies the next tile, and stores this warp's part of its results: partial[n * kTileRows + row].
  PO_FN void multiply(const VectorsOf& vectors, float* partial) {
    if constexpr (sizeof(Storage) == 2) {
      float even[4] = {};
      float odd[4] = {};
      for_each_step([&](const Vector<16>& w, int step) {
        Vector<16> low{};
        Vector<16> high{};
        if (kVectors > 1 || row_in_tile_ == 0) low = vectors.piece(row_in_tile_, step, t_);
        if constexpr (kVectors > 8) high = vectors.piece(row_in_tile_ + 8, step, t_);
        multiply_accumulate<Scalar>(even, {low.words[0], high.words[0], low.words[1], high.words[1]}, w.words[0],
                                    w.words[1]);
        multiply_accumulate<Scalar>(odd, {low.words[2], high.words[2], low.words[3], high.words[3]}, w.words[2],
                                    w.words[3]);
      });
      PO_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int n = row_in_tile_ + i / 2 * 8;
        if (n < kVectors) partial[n * kTileRows + 2 * t_ + i % 2] = even[i] + odd[i];
      }
    } else {
      float sums[kVectors] = {};
      for_each_step([&](const Vector<16>& w, int step) {
        PO_UNROLL
        for (int n = 0; n < kVectors; ++n) {
          const Vector<16> x = vectors.piece(n, step, t_);
          PO_UNROLL
          for (int i = 0; i < 4; ++i) sums[n] = __fmaf_rn(bits_float(w.words[i]), bits_float(x.words[i]), sums[n]);
        }
      });
      const Lanes<4> quad;
      PO_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const float sum = quad.add_across(quad.add_across(sums[n], 1), 2);
        if (t_ == 0) partial[n * kTileRows + row_in_tile_] = sum;
      }
    }
  }

 private:
  template <class Use>
  PO_FN void for_each_step(const Use& use) {
    for (int step = 0; step < share_.num_steps; step += kBatch) {
      copy_async_wait<kDepth - 1>();
      Vector<16> w[kBatch];
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) w[i] = *reinterpret_cast<const Vector<16>*>(slot(batch_, i));
      copy_next(batch_);
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (step + i < share_.num_steps) use(w[i], share_.first_step + step + i);
      }
      batch_ = batch_ + 1 == kDepth ? 0 : batch_ + 1;
    }
  }

  PO_FN uint8_t* slot(int batch, int i) const { return slots_ + (batch * kBatch + i) * kWarpSize * 16; }

  PO_FN void begin_tile() {
    if (position_ >= tiles_.count) return;
    const int row = tiles_.tile_at(position_) * kTileRows + row_in_tile_;
    const int k = share_.first_step * Share::kStep + t_ * Share::kPiece;
    source_ = reinterpret_cast<const Storage*>(weight_.elements) + static_cast<int64_t>(row) * weight_.num_columns + k;
    left_ = row < weight_.num_rows ? weight_.num_columns - k : 0;
    step_ = 0;
  }

  // Starts the next batch of copies, of whichever tile they are.
  PO_FN void copy_next(int batch) {
    if (position_ < tiles_.count && share_.num_steps != 0) {
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (step_ + i < share_.num_steps)
          copy_piece(slot(batch, i), source_ + i * Share::kStep, left_ - i * Share::kStep);
      }
      step_ += kBatch;
      source_ += kBatch * Share::kStep;
      left_ -= kBatch * Share::kStep;
      if (step_ >= share_.num_steps) {
        position_ += share_.num_teams;
        begin_tile();
      }
    }
    copy_async_commit();
  }

  // `left`: elements from the source to the end of its row; not above 0 where there is nothing to read.
  PO_FN void copy_piece(uint8_t* target, const Storage* source, int left) const {
    left = max_of(min_of(left, Share::kPiece), 0);
    if constexpr (kAligned) {
      const auto* from = left == 0 ? weight_.elements : reinterpret_cast<const uint8_t*>(source);
      copy_async(target, from, left * static_cast<int>(sizeof(Storage)));
    } else {
      Storage elements[Share::kPiece];
      PO_UNROLL
      for (int i = 0; i < Share::kPiece; ++i) elements[i] = i < left ? source[i] : Storage{0};
      __builtin_memcpy(target, elements, 16);
    }
  }

  const Weight weight_;
  const RowTiles tiles_;
  const Share share_;
  int row_in_tile_;
  int t_;
  uint8_t* slots_;
  int batch_ = 0;  // that is used next
  int position_;   // of the tile, and step in it, that is copied next
  int step_ = 0;
  const Storage* source_ = nullptr;  // this lane's piece of that step
  int left_ = 0;
};

#else

// Host: everything is read where it lies.
template <class Scalar, int kVectors, bool kAligned, bool kResident>
struct Vectors {
  const uint8_t* elements;
  int count;
  int num_columns;
  uint8_t* own;

  static int own_bytes(int) { return 0; }
  void fetch(const WorkGroup&) const {}
};

template <class Scalar, int kVectors, int kDepth, bool kAligned, bool kResident>
class WeightStream {
 public:
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Scalar, kVectors, kAligned, kResident>;
  static constexpr int kBytesPerWarp = 0;
  static constexpr int kBatchesAhead = 0;

  WeightStream(const Weight& weight, const RowTiles& tiles, const Share& share, uint8_t*, int)
      : weight_(weight), tiles_(tiles), share_(share), position_(share.team) {}

  void multiply(const VectorsOf& vectors, float* partial) {
    const int first_row = tiles_.tile_at(position_) * kTileRows;
    position_ += share_.num_teams;
    const int first = share_.first_step * Share::kStep;
    const int last = min_of(first + share_.num_steps * Share::kStep, weight_.num_columns);
    for (int row = 0; row < kTileRows; ++row) {
      for (int n = 0; n < vectors.count; ++n) {
        float* sum = &partial[n * kTileRows + row];
        *sum = first_row + row < weight_.num_rows ? dot(vectors, first_row + row, n, first, last) : 0.0f;
      }
    }
  }

 private:
  // Eight sums in turn, which the compiler makes one vector.
  float dot(const VectorsOf& vectors, int row, int n, int first, int last) const {
    const auto* w = reinterpret_cast<const Storage*>(weight_.elements) + int64_t{row} * weight_.num_columns;
    const auto* x = reinterpret_cast<const Storage*>(vectors.elements) + int64_t{n} * vectors.num_columns;
    float sums[8] = {};
    int k = first;
    for (; k + 8 <= last; k += 8) {
      for (int i = 0; i < 8; ++i) sums[i] += Scalar::to_float(w[k + i]) * Scalar::to_float(x[k + i]);
    }
    for (int i = 0; k + i < last; ++i) sums[i] += Scalar::to_float(w[k + i]) * Scalar::to_float(x[k + i]);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }

  const Weight weight_;
  const RowTiles tiles_;
  const Share share_;
  int position_;
};

#endif

}  // namespace po
