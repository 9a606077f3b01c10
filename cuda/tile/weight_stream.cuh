// Rows of a weight times a few vectors, one WG: each warp has a share of the columns and streams it, tile after tile,
// through a ring in the WG's own memory that is always being refilled.
//
// A lane copies exactly the pieces that it will use itself, so the ring needs no barrier; eight lanes read 128 bytes of a
// row. The order in which a vector's products are added depends on the columns and the warps alone: not on how many vectors
// share the pass, and not on the vectors beside it.
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

// A warp's part in a WG's tiles. Warps form teams of kTeam or a few more; a tile is a team's, and its warps share the
// columns. A step is kStep elements of each row of a tile, 128 bytes.
template <class Scalar>
struct WarpShare {
  static constexpr int kPiece =
      16 / static_cast<int>(sizeof(typename Scalar::Storage));  // elements of a row that a lane has in a step
  static constexpr int kStep = 8 * kPiece;
  static constexpr int kTeam = 4;
  static constexpr int kMaxTeams = 4;
  int num_parts;  // warps in a team
  int num_teams;
  int part;
  int team;  // num_teams: this warp is in none
  int first_step;
  int num_steps;

  static PO_FN int num_steps_of(int num_columns) { return ceil_div(num_columns, kStep); }

  // On the GPU `num_warps` is a constant, and so is every divisor here.
  static PO_FN WarpShare of_warp(int num_columns, int warp, int num_warps) {
    const int num_teams = num_warps >= 4 * kTeam ? 4 : num_warps >= 2 * kTeam ? 2 : 1;  // powers of two: see Handover
    const int num_parts = num_warps / num_teams;
    const int total = num_steps_of(num_columns);
    const int each = ceil_div(total, num_parts);
    const int first = min_of(warp % num_parts * each, total);
    return {num_parts,
            num_teams,
            warp % num_parts,
            min_of(warp / num_parts, num_teams),
            first,
            min_of(each, total - first)};
  }

  // Of this warp, in all tiles of its team.
  PO_FN int num_steps_of_all(const RowTiles& tiles) const {
    return max_of(ceil_div(tiles.count - team, num_teams), 0) * num_steps;
  }
};

#if PO_ON_DEVICE

// The vectors, as they are in memory, one behind the other in the WG's own; or, where there is no room, in global memory.
// Between two vectors 64 bytes are left free, so that lanes that read 64 bytes of each of two find them in other banks.
//
// Several come by bulk copies of one thread: single ones would keep all threads from asking for weights. A lone vector comes
// sooner by single copies. `kLate`: it is asked for behind the weights, and by some threads alone, so that nobody who waits
// for it waits for weights.
template <class Scalar, int kVectors, bool kAligned, bool kResident, bool kLate>
struct Vectors {
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  static constexpr bool kDelivered = kAligned && kResident && kHasBulkCopies && (kVectors > 1 || kLate);
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

  static PO_FN int stride(int num_columns) { return Share::num_steps_of(num_columns) * 128 + 64; }
  static PO_FN int own_bytes(int num_columns) {
    return kResident ? kVectors * stride(num_columns) + static_cast<int>(sizeof(Delivery)) * 2 : 0;
  }

  // All threads. A sync must follow.
  PO_FN void expect(const WorkGroup& wg, int first_thread) const {
    if (kDelivered && !kInBulk && wg.rank() == first_thread) delivery().start_counting(wg.size() - first_thread);
  }

  // Starts bringing all vectors into the WG's own memory. All threads from `first_thread` on, which are some warps. Each must
  // await its copies, a sync must follow, and then whoever reads the vectors must await the delivery.
  PO_FN void fetch(const WorkGroup& wg, int first_thread) const {
    if constexpr (kResident) {
      const int rank = wg.rank() - first_thread;
      const int size = wg.size() - first_thread;
      const int num_pieces = Share::num_steps_of(num_columns) * 8;
      if constexpr (kInBulk) {
        const int row_bytes = num_columns * static_cast<int>(sizeof(Storage));
        if (wg.rank() == wg.size() - kWarpSize) {  // of a warp that has no weights to ask for
          delivery().start(count * row_bytes);
          PO_NO_UNROLL
          for (int n = 0; n < count && row_bytes != 0; ++n) {
            delivery().copy(place(n, 0), elements + static_cast<int64_t>(n) * row_bytes, row_bytes);
          }
        }
        const int first = row_bytes / 16;  // piece behind the row's end
        for (int i = rank; i < kVectors * (num_pieces - first); i += size) {
          *reinterpret_cast<Vector<16>*>(place(i % kVectors, first + i / kVectors)) = Vector<16>{};
        }
      } else {
        for (int n = 0; n < kVectors; ++n) {
          for (int piece = rank; piece < num_pieces; piece += size) {
            if constexpr (kAligned) {
              const bool is_there = n < count && piece * Share::kPiece < num_columns;
              const int64_t element = is_there ? static_cast<int64_t>(n) * num_columns + piece * Share::kPiece : 0;
              copy_async(place(n, piece), elements + element * static_cast<int64_t>(sizeof(Storage)),
                         is_there ? 16 : 0);
            } else {
              *reinterpret_cast<Vector<16>*>(place(n, piece)) = from_memory(n, piece);
            }
          }
        }
      }
    }
    if constexpr (!kDelivered) {
      copy_async_commit();
    } else if constexpr (!kInBulk) {
      delivery().arrive_behind_copies();
    }
  }

  // kBehind: batches of copies that this thread has started behind the vectors.
  template <int kBehind>
  PO_FN void await_copies() const {
    if constexpr (!kDelivered) copy_async_wait<kBehind>();
  }
  PO_FN void await_delivery() const {
    if constexpr (kDelivered) delivery().await();
  }

  PO_FN Vector<16> piece(int n, int step, int half, int t) const {
    if constexpr (!kResident) return from_memory(n, (2 * step + half) * 4 + t);
    return *reinterpret_cast<const Vector<16>*>(place(n, (2 * step + half) * 4 + t));
  }

 private:
  static constexpr bool kInBulk = kDelivered && kVectors > 1;

  PO_FN uint8_t* place(int n, int piece) const { return own + n * stride(num_columns) + piece * 16; }
  PO_FN Delivery& delivery() const { return *reinterpret_cast<Delivery*>(own + kVectors * stride(num_columns)); }
};

template <class Scalar, int kVectors, int kDepth, bool kAligned, bool kResident, bool kLateVectors>
class WeightStream {
 public:
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Scalar, kVectors, kAligned, kResident, kLateVectors>;
  static constexpr bool kOnTensorCores = sizeof(Storage) == 2;
  static constexpr int kQuad = kTileRows / 2;  // rows that a warp reads at once: two quads make a tile
  static constexpr int kBytesPerStep = 2 * kWarpSize * 16;
  static constexpr int kBytesPerWarp = kDepth * kBytesPerStep;
  static constexpr int kStepsAhead = kDepth;

  // Starts the first copies, of the tiles at the positions of this warp's team. `ring` has kBytesPerWarp for each warp.
  PO_FN WeightStream(const Weight& weight, const RowTiles& tiles, const Share& share, uint8_t* ring, int warp)
      : weight_(weight),
        tiles_(tiles),
        share_(share),
        ring_(ring + warp * kBytesPerWarp + Warp().rank() * 16),
        next_(ring_),
        position_(share.num_steps != 0 ? share.team : tiles.count) {
    begin_tile();
    PO_NO_UNROLL  // little code is there sooner
        for (int step = 0; step < kDepth; ++step) copy_next();
  }

  PO_FN int num_steps() const { return share_.num_steps_of_all(tiles_); }

  // This warp's part of a tile's results, spread over its lanes.
  class Sums {
   public:
    // partial[n * kTileRows + row]
    PO_FN void store(float* partial) const {
      const int lane = Warp().rank();
      PO_UNROLL
      for (int quad = 0; quad < 2; ++quad) {
        if constexpr (kOnTensorCores) {
          PO_UNROLL
          for (int group = 0; group < kGroups; ++group) {
            const int n = 8 * group + lane / 4;
            const float (&d)[4] = values_[quad][group];
            if (n < kVectors) partial[n * kTileRows + quad * kQuad + lane % 4] = d[0] + d[3];
          }
        } else {
          const Lanes<8> row;
          PO_UNROLL
          for (int n = 0; n < kVectors; ++n) {
            float sum = values_[quad][n / 4][n % 4];
            PO_UNROLL
            for (int distance = 1; distance < row.size(); distance *= 2) sum = row.add_across(sum, distance);
            if (row.rank() == 0) partial[n * kTileRows + quad * kQuad + row.index()] = sum;
          }
        }
      }
    }

   private:
    friend WeightStream;
    // On tensor cores, of eight vectors each: see multiply_step. Else of four, a sum each.
    static constexpr int kGroups = ceil_div(kVectors, kOnTensorCores ? 8 : 4);
    float values_[2][kGroups][4] = {};
  };

  // Multiplies the next tile. in_step() is called in each step, behind the request for the one kStepsAhead further on.
  template <class InStep>
  PO_FN Sums multiply(const VectorsOf& vectors, const InStep& in_step) {
    Sums sums;
    for (int step = 0; step < share_.num_steps; ++step) {
      copy_async_wait<kDepth - 1>();
      const Vector<16> w[2] = {*piece_of(0), *piece_of(1)};
      copy_next();
      in_step();
      multiply_step(vectors, share_.first_step + step, w, sums);
    }
    return sums;
  }

 private:
  // Lane i has piece i % 8 of row i / 8 of each quad. For the tensor cores that lane is column i / 4 of B, so an even column is the
  // first half of a row's step and the odd one beside it the second; rows 0 to 7 of A are the vectors' first halves, rows 8
  // to 15 their second. Of D that leaves d[0], vector and row with the first halves, and d[3], the same with the second.
  PO_FN void multiply_step(const VectorsOf& vectors, int step, const Vector<16> (&w)[2], Sums& sums) const {
    const int lane = Warp().rank();
    if constexpr (kOnTensorCores) {
      PO_UNROLL
      for (int group = 0; group < Sums::kGroups; ++group) {
        const int n = kVectors == 1 ? 0 : 8 * group + lane / 4;  // a lone vector may stand in all rows
        const Vector<16> first = vectors.piece(n, step, 0, lane % 4);
        const Vector<16> second = vectors.piece(n, step, 1, lane % 4);
        PO_UNROLL
        for (int i = 0; i < 4; i += 2) {
          PO_UNROLL
          for (int quad = 0; quad < 2; ++quad) {
            multiply_accumulate<Scalar>(sums.values_[quad][group],
                                        {first.words[i], second.words[i], first.words[i + 1], second.words[i + 1]},
                                        w[quad].words[i], w[quad].words[i + 1]);
          }
        }
      }
    } else {
      PO_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const Vector<16> x = vectors.piece(n, step, lane % 8 / 4, lane % 4);
        PO_UNROLL
        for (int quad = 0; quad < 2; ++quad) {
          float& sum = sums.values_[quad][n / 4][n % 4];
          PO_UNROLL
          for (int i = 0; i < 4; ++i) sum = __fmaf_rn(bits_float(w[quad].words[i]), bits_float(x.words[i]), sum);
        }
      }
    }
  }

  // Of the oldest step in the ring, which the next one will replace.
  PO_FN Vector<16>* piece_of(int quad) const { return reinterpret_cast<Vector<16>*>(next_ + quad * kWarpSize * 16); }

  // Rows behind the last are read as the last one: nobody looks at their sums.
  PO_FN void begin_tile() {
    if (position_ >= tiles_.count) return;
    const int lane = Warp().rank();
    const int row = min_of(tiles_.tile_at(position_) * kTileRows + lane / 8, weight_.num_rows - 1);
    const int k = share_.first_step * Share::kStep + lane % 8 * Share::kPiece;
    source_ = reinterpret_cast<const Storage*>(weight_.elements) + static_cast<int64_t>(row) * weight_.num_columns + k;
    to_second_quad_ = static_cast<int64_t>(min_of(kQuad, weight_.num_rows - 1 - row)) * weight_.num_columns;
    left_ = weight_.num_columns - k;
    steps_left_ = share_.num_steps;
  }

  // Starts the copies of the next step, of whichever tile it is.
  PO_FN void copy_next() {
    if (position_ < tiles_.count) {
      copy_piece(piece_of(0), source_);
      copy_piece(piece_of(1), source_ + to_second_quad_);
      source_ += Share::kStep;
      left_ -= Share::kStep;
      if (--steps_left_ == 0) {
        position_ += share_.num_teams;
        begin_tile();
      }
    }
    copy_async_commit();
    next_ += kBytesPerStep;
    if (next_ == ring_ + kBytesPerWarp) next_ = ring_;
  }

  // Zeros behind the row's end.
  PO_FN void copy_piece(Vector<16>* target, const Storage* source) const {
    if constexpr (kAligned) {
      copy_async_once(reinterpret_cast<uint8_t*>(target), reinterpret_cast<const uint8_t*>(source), left_ > 0 ? 16 : 0);
    } else {
      Storage elements[Share::kPiece];
      PO_UNROLL
      for (int i = 0; i < Share::kPiece; ++i) elements[i] = i < left_ ? source[i] : Storage{0};
      Vector<16> piece;  // else every element would be a store of its own
      __builtin_memcpy(&piece, elements, 16);
      *target = piece;
    }
  }

  const Weight weight_;
  const RowTiles tiles_;
  const Share share_;
  uint8_t* const ring_;
  uint8_t* next_;                    // step of the ring that is used, and then replaced, next
  int position_;                     // of the tile that is copied
  int steps_left_ = 0;               // in it
  const Storage* source_ = nullptr;  // this lane's piece of that step in the tile's first quad
  int64_t to_second_quad_ = 0;
  int left_ = 0;  // elements from there to the row's end
};

#else

// Host: everything is read where it lies.
template <class Scalar, int kVectors, bool kAligned, bool kResident, bool kLate>
struct Vectors {
  static constexpr bool kDelivered = false;
  const uint8_t* elements;
  int count;
  int num_columns;
  uint8_t* own;

  static int own_bytes(int) { return 0; }
  void expect(const WorkGroup&, int) const {}
  void fetch(const WorkGroup&, int) const {}
  template <int>
  void await_copies() const {}
  void await_delivery() const {}
};

template <class Scalar, int kVectors, int kDepth, bool kAligned, bool kResident, bool kLateVectors>
class WeightStream {
 public:
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Scalar, kVectors, kAligned, kResident, kLateVectors>;
  static constexpr int kBytesPerWarp = 0;
  static constexpr int kStepsAhead = 0;

  WeightStream(const Weight& weight, const RowTiles& tiles, const Share& share, uint8_t*, int)
      : weight_(weight), tiles_(tiles), share_(share), position_(share.team) {}

  int num_steps() const { return share_.num_steps_of_all(tiles_); }

  struct Sums {
    float values[kVectors][kTileRows];
    void store(float* partial) const { memcpy(partial, values, sizeof(values)); }
  };

  template <class InStep>
  Sums multiply(const VectorsOf& vectors, const InStep& in_step) {
    Sums sums = {};
    for (int step = 0; step < share_.num_steps; ++step) in_step();  // it has nothing to ask for
    const int first_row = tiles_.tile_at(position_) * kTileRows;
    position_ += share_.num_teams;
    const int first = share_.first_step * Share::kStep;
    const int last = min_of(first + share_.num_steps * Share::kStep, weight_.num_columns);
    for (int row = 0; row < kTileRows && first_row + row < weight_.num_rows; ++row) {
      for (int n = 0; n < vectors.count; ++n) sums.values[n][row] = dot(vectors, first_row + row, n, first, last);
    }
    return sums;
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
