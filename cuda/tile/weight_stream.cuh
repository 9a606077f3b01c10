// Multiplies rows of a weight by a few vectors, in one WG. Each warp has a share of the columns and streams it, tile
// after tile, through a ring in shared memory that is always being refilled.
//
// A lane copies exactly the pieces of weights that it will use itself, so their ring needs no barrier; eight lanes read
// 128 bytes of a row. The order in which a vector's products are added depends on the columns and the warps alone: not
// on the number of vectors in the pass, and not on the vectors beside it.
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

inline constexpr int kStepBytes = 128;     // of a row, in a step
inline constexpr int kDeliveryBytes = 16;  // of the handover that says that a lone vector has arrived
inline constexpr int kLanesOfGpu = 32;

// Number of teams that a WG's warps form: a power of two (see Handover), of four warps or a few more.
PO_FN constexpr int num_teams_of(int num_warps) { return num_warps >= 16 ? 4 : num_warps >= 8 ? 2 : 1; }

// A warp's part of a WG's tiles. A tile belongs to a team, whose warps share the columns. A step is kStep elements of
// each row of a tile, 128 bytes.
template <class Scalar>
struct WarpShare {
  static constexpr int kPiece =
      16 / static_cast<int>(sizeof(typename Scalar::Storage));  // elements of a row that a lane has in a step
  static constexpr int kStep = 8 * kPiece;
  static constexpr int kMaxTeams = 4;
  int num_parts;  // warps in a team
  int num_teams;
  int part;
  int team;  // num_teams: this warp is in no team
  int first_step;
  int num_steps;

  static PO_FN int num_steps_of(int num_columns) { return ceil_div(num_columns, kStep); }

  // On the GPU `num_warps` is a constant, and so is every divisor here.
  static PO_FN WarpShare of_warp(int num_columns, int warp, int num_warps) {
    const int num_teams = num_teams_of(num_warps);
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

  // Steps of this warp in all tiles of its team.
  PO_FN int num_steps_of_all(const RowTiles& tiles) const {
    return max_of(ceil_div(tiles.count - team, num_teams), 0) * num_steps;
  }
};

#if PO_ON_DEVICE

// Starts copying 16 bytes of a row, which has `left` more elements; zeros follow its end.
template <class Traits, bool kOnce>
PO_FN void copy_piece(uint8_t* target, const typename Traits::Scalar::Storage* source, int left) {
  using Storage = typename Traits::Scalar::Storage;
  if constexpr (Traits::kAligned) {
    const int bytes = left > 0 ? 16 : 0;
    if constexpr (kOnce) {
      copy_async_once(target, reinterpret_cast<const uint8_t*>(source), bytes);
    } else {
      copy_async(target, reinterpret_cast<const uint8_t*>(source), bytes);
    }
  } else {
    constexpr int kPiece = WarpShare<typename Traits::Scalar>::kPiece;
    Storage elements[kPiece];
    PO_UNROLL
    for (int i = 0; i < kPiece; ++i) elements[i] = i < left ? source[i] : Storage{0};
    Vector<16> piece;  // otherwise every element would be a store of its own
    __builtin_memcpy(&piece, elements, 16);
    *reinterpret_cast<Vector<16>*>(target) = piece;
  }
}

// The vectors in shared memory, step by step: 128 bytes of each. Every other vector has the halves of its 128 bytes
// exchanged, so that lanes that read 64 bytes of each of two find them in different banks.
//
// A lone vector comes as a whole, before the weights. Several vectors are much more to read. They come step by step,
// beside the weights of the teams' first tiles; or of all tiles, through a ring, if there is no room to keep them.
// Warps with the same part of the columns, one of each team, each bring some pieces of a step.
template <class Traits>
struct Vectors {
  using Scalar = typename Traits::Scalar;
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  static constexpr bool kComeAtOnce = Traits::kVectors == 1 && Traits::kResident;
  static constexpr int kBytesOfStep = Traits::kVectors * kStepBytes;
  // @ring-steps
  static constexpr int kRingSteps = Traits::kDepth + Traits::kStepsAtOnce;  // steps in flight, and steps in use
  const uint8_t* elements;                                                  // [count][num_columns]
  int count;
  int num_columns;
  uint8_t* own;

  static PO_FN int own_bytes(const Share& share, int num_columns) {
    if (!Traits::kResident) return share.num_parts * kRingSteps * kBytesOfStep;
    return Share::num_steps_of(num_columns) * kBytesOfStep + (kComeAtOnce ? kDeliveryBytes : 0);
  }

  // Starts bringing a lone vector. All threads. If weights are prefetched, only the last warps bring it, on a handover
  // of their own, so that no thread that waits for the vector waits for weights. All must await their copies, a sync
  // must follow, and then each reader must await the delivery.
  PO_FN void expect(const WorkGroup& wg, int first_thread) const {
    if (kComeAtOnce && Traits::kPrefetches && wg.rank() == first_thread) delivery().start(wg.size() - first_thread);
  }
  PO_FN void fetch(const WorkGroup& wg, int first_thread) const {
    if constexpr (kComeAtOnce) {
      const int num_pieces = Share::num_steps_of(num_columns) * 8;
      for (int i = wg.rank() - first_thread; i < num_pieces; i += wg.size() - first_thread) {
        const int k = i * Share::kPiece;
        copy_piece<Traits, false>(own + i * 16, row(0, k < num_columns ? k : 0), num_columns - k);
      }
      if constexpr (!Traits::kPrefetches) {
        copy_async_commit();
      } else if constexpr (Traits::kAligned) {
        delivery().arrive_behind_copies();
      } else {
        delivery().arrive();
      }
    }
  }
  // `kBehind`: batches of copies that this thread has started after the vector.
  template <int kBehind>
  PO_FN void await_copies() const {
    if constexpr (kComeAtOnce && !Traits::kPrefetches) copy_async_wait<kBehind>();
  }
  PO_FN void await_delivery() const {
    if constexpr (kComeAtOnce && Traits::kPrefetches) delivery().await(0);
  }

  // Starts copying the share of one of `num` warps in some steps of several vectors, to consecutive places. `left`:
  // elements from this lane's piece of the first step to a vector's end.
  PO_FN void copy_steps(uint8_t* target, int left, int num_steps, int index, int num) const {
    const int lane = Warp().rank();
    const int place = (lane % 8 ^ lane / 8 % 2 * 4) * 16;  // n is odd in each round, or in none
    for (int n = lane / 8 + index * 4; n < Traits::kVectors; n += num * 4) {
      const Storage* source = row(n < count ? n : 0, num_columns - left);
      uint8_t* own_piece = target + n * 128 + place;
      int own_left = n < count ? left : 0;
      for (int step = 0; step < num_steps; ++step) {
        copy_piece<Traits, false>(own_piece, source, own_left);
        source += Share::kStep;
        own_piece += kBytesOfStep;
        own_left -= Share::kStep;
      }
    }
  }

  // The place of a step of a warp's part.
  PO_FN uint8_t* resident(const Share& share, int step) const { return own + (share.first_step + step) * kBytesOfStep; }
  PO_FN uint8_t* in_ring(const Share& share, int place) const {
    return own + (share.part * kRingSteps + place) * kBytesOfStep;
  }

  // 16 bytes of a vector's step.
  static PO_FN Vector<16> piece(const uint8_t* step, int n, int half, int t) {
    return *reinterpret_cast<const Vector<16>*>(step + n * 128 + ((half ^ n % 2) * 4 + t) * 16);
  }

 private:
  PO_FN const Storage* row(int n, int k) const {
    return reinterpret_cast<const Storage*>(elements) + static_cast<int64_t>(n) * num_columns + k;
  }
  PO_FN Handover& delivery() const {
    return *reinterpret_cast<Handover*>(own + Share::num_steps_of(num_columns) * kBytesOfStep);
  }
};

template <class Traits>
class WeightStream {
 public:
  using Scalar = typename Traits::Scalar;
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Traits>;
  static constexpr bool kOnTensorCores = sizeof(Storage) == 2;
  static constexpr int kQuad = kTileRows / 2;  // rows that a warp reads at once: two quads make a tile
  static constexpr int kBytesPerStep = 2 * kWarpSize * 16;
  static constexpr int kBytesPerWarp = Traits::kDepth * kBytesPerStep;
  static constexpr int kStepsAhead = Traits::kDepth;
  static_assert(Traits::kDepth >= Traits::kStepsAtOnce);

  // Starts the first copies, of the tiles at the positions of this warp's team. `ring` has kBytesPerWarp for each warp.
  PO_FN WeightStream(const Weight& weight, const VectorsOf& vectors, const RowTiles& tiles, const Share& share,
                     uint8_t* ring, int warp)
      : weight_(weight),
        vectors_(vectors),
        tiles_(tiles),
        share_(share),
        ring_(ring + warp * kBytesPerWarp + Warp().rank() * 16),
        position_(share.num_steps != 0 && share.team < share.num_teams ? share.team : tiles.count),
        used_position_(share.team) {
    begin_tile();
    PO_NO_UNROLL  // less code is fetched sooner
        for (int step = 0; step < Traits::kDepth; ++step) copy_next<!Traits::kPrefetches>();
  }

  // If weights are prefetched, several vectors are loaded after the predecessor's end: the steps whose weights are in
  // flight.
  PO_FN void fetch_vectors() const {
    if constexpr (Traits::kPrefetches && !VectorsOf::kComeAtOnce) {
      if (vectors_asked_ == 0) return;
      copy_vectors(vectors_.resident(share_, 0), left_at_start(), vectors_asked_, share_.team);
      copy_async_commit();
    }
  }
  // Called before the first step.
  PO_FN void await_vectors() const {
    vectors_.await_delivery();
    if constexpr (Traits::kPrefetches && !VectorsOf::kComeAtOnce) copy_async_wait<0>();  // @prefetched-await
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
            if (n < Traits::kVectors) partial[n * kTileRows + quad * kQuad + lane % 4] = d[0] + d[3];
          }
        } else {
          const Lanes<8> row;
          PO_UNROLL
          for (int n = 0; n < Traits::kVectors; ++n) {
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
    // On tensor cores, of eight vectors each (see multiply_step); otherwise of four, a sum each.
    static constexpr int kGroups = ceil_div(Traits::kVectors, kOnTensorCores ? 8 : 4);
    float values_[2][kGroups][4] = {};
  };

  // Multiplies the next tile. in_step() is called in each step, after the request for the step kStepsAhead later.
  template <class InStep>
  PO_FN Sums multiply(const InStep& in_step) {
    Sums sums;
    int step = 0;
    for (; step + Traits::kStepsAtOnce <= share_.num_steps; step += Traits::kStepsAtOnce) {
      multiply_steps<Traits::kStepsAtOnce>(step, sums, in_step);
    }
    if constexpr (Traits::kStepsAtOnce > 1) {
      PO_NO_UNROLL
      for (; step < share_.num_steps; ++step) multiply_steps<1>(step, sums, in_step);
    }
    used_position_ += share_.num_teams;
    // Teams without another tile do not meet the others again. The others' next copies would replace what such a team
    // may still be reading.
    const int num_next = tiles_.count - (used_position_ - share_.team);
    if (!Traits::kResident && num_next > 0 && num_next < share_.num_teams) meet(share_.num_teams);  // @teams-leave
    return sums;
  }

 private:
  template <int kSteps, class InStep>
  PO_FN void multiply_steps(int step, Sums& sums, const InStep& in_step) {
    copy_async_wait<Traits::kDepth - kSteps>();
    // Comes after all copies of these steps of the vectors, and after all uses of the previous ones, whose places come
    // next.
    if (bring_vectors(used_position_)) meet(num_bringing(used_position_));  // @warps-meet
    Vector<16> w[kSteps][2];
    PO_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      w[i][0] = *piece_of(0);
      w[i][1] = *piece_of(1);
      copy_next<true>();
      in_step();
    }
    // @multiply-steps
    PO_UNROLL
    for (int i = 0; i < kSteps; ++i) multiply_step(place_to_use(step + i), w[i], sums);
  }

  // The warps of the first `num` teams that have this part of the columns.
  PO_FN void meet(int num) const { sync_warps(1 + share_.part, num * kWarpSize); }

  // Lane i has piece i % 8 of row i / 8 of each quad. For the tensor cores that lane is column i / 4 of B, so an even
  // column is the first half of a row's step and the odd one beside it the second. Rows 0 to 7 of A are the vectors'
  // first halves, rows 8 to 15 their second. Of D, d[0] is the sum of vector and row over the first halves, and d[3]
  // that over the second.
  PO_FN void multiply_step(const uint8_t* vectors, const Vector<16> (&w)[2], Sums& sums) const {
    const int lane = Warp().rank();
    if constexpr (kOnTensorCores) {
      PO_UNROLL
      for (int group = 0; group < Sums::kGroups; ++group) {
        const int n = Traits::kVectors == 1 ? 0 : 8 * group + lane / 4;  // a lone vector may be in all rows
        const Vector<16> first = VectorsOf::piece(vectors, n, 0, lane % 4);
        const Vector<16> second = VectorsOf::piece(vectors, n, 1, lane % 4);
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
      for (int n = 0; n < Traits::kVectors; ++n) {
        const Vector<16> x = VectorsOf::piece(vectors, n, lane % 8 / 4, lane % 4);
        PO_UNROLL
        for (int quad = 0; quad < 2; ++quad) {
          float& sum = sums.values_[quad][n / 4][n % 4];
          PO_UNROLL
          for (int i = 0; i < 4; ++i) sum = __fmaf_rn(bits_float(w[quad].words[i]), bits_float(x.words[i]), sum);
        }
      }
    }
  }

  // The piece of the oldest step in the ring, which the next step will replace.
  PO_FN Vector<16>* piece_of(int quad) const {
    return reinterpret_cast<Vector<16>*>(ring_ + next_ + quad * kWarpSize * 16);
  }

  // Whether the vectors come with the tile at a position, and how many warps bring each part of them.
  PO_FN bool bring_vectors(int position) const {
    return !VectorsOf::kComeAtOnce && (!Traits::kResident || position < share_.num_teams);
  }
  PO_FN int num_bringing(int position) const {
    return min_of(share_.num_teams, tiles_.count - (position - share_.team));
  }
  PO_FN void copy_vectors(uint8_t* target, int left, int num_steps, int position) const {
    vectors_.copy_steps(target, left, num_steps, share_.team, num_bringing(position));
  }
  // Elements from this lane's first piece to a row's end.
  PO_FN int left_at_start() const {
    return weight_.num_columns - share_.first_step * Share::kStep - Warp().rank() % 8 * Share::kPiece;
  }
  PO_FN const uint8_t* place_to_use(int step) {
    if constexpr (Traits::kResident) return vectors_.resident(share_, step);
    const uint8_t* place = vectors_.in_ring(share_, vectors_used_);
    if (++vectors_used_ == VectorsOf::kRingSteps) vectors_used_ = 0;
    return place;
  }

  // Rows after the last are read as the last one; their sums are not used.
  PO_FN void begin_tile() {
    if (position_ >= tiles_.count) return;
    const int lane = Warp().rank();
    const int row = min_of(tiles_.tile_at(position_) * kTileRows + lane / 8, weight_.num_rows - 1);
    left_ = left_at_start();
    source_ = reinterpret_cast<const Storage*>(weight_.elements) +
              (static_cast<int64_t>(row + 1) * weight_.num_columns - left_);
    to_second_quad_ = static_cast<int64_t>(min_of(kQuad, weight_.num_rows - 1 - row)) * weight_.num_columns;
    steps_left_ = share_.num_steps;
  }

  // Starts the copies of the next step, of this tile or the next one.
  template <bool kWithVectors>
  PO_FN void copy_next() {
    if (position_ < tiles_.count) {
      if (bring_vectors(position_)) {
        if constexpr (!Traits::kResident) {
          copy_vectors(vectors_.in_ring(share_, vectors_asked_), left_, 1, position_);
          if (++vectors_asked_ == VectorsOf::kRingSteps) vectors_asked_ = 0;
        } else if constexpr (kWithVectors) {
          copy_vectors(vectors_.resident(share_, share_.num_steps - steps_left_), left_, 1, position_);
        } else {
          ++vectors_asked_;
        }
      }
      copy_piece<Traits, true>(ring_ + next_, source_, left_);
      copy_piece<Traits, true>(ring_ + next_ + kWarpSize * 16, source_ + to_second_quad_, left_);
      source_ += Share::kStep;
      left_ -= Share::kStep;
      if (--steps_left_ == 0) {
        position_ += share_.num_teams;
        begin_tile();
      }
    }
    copy_async_commit();
    next_ += kBytesPerStep;
    if (next_ == kBytesPerWarp) next_ = 0;
  }

  const Weight weight_;
  const VectorsOf vectors_;
  const RowTiles tiles_;
  const Share share_;
  uint8_t* const ring_;
  int next_ = 0;           // byte of the ring with the step that is used next, and then replaced
  int position_;           // of the tile that is copied
  int used_position_;      // of the tile that is multiplied
  int steps_left_ = 0;     // in the tile that is copied
  int vectors_asked_ = 0;  // steps: in their ring, or among those left to fetch_vectors()
  int vectors_used_ = 0;
  const Storage* source_ = nullptr;  // this lane's piece of that step in the tile's first quad
  int64_t to_second_quad_ = 0;
  int left_ = 0;  // elements from there to the row's end
};

#else

// Host: everything is read in place.
template <class Traits>
struct Vectors {
  using Share = WarpShare<typename Traits::Scalar>;
  static constexpr bool kComeAtOnce = true;
  const uint8_t* elements;
  int count;
  int num_columns;
  uint8_t* own;

  static int own_bytes(const Share&, int) { return 0; }
  void expect(const WorkGroup&, int) const {}
  void fetch(const WorkGroup&, int) const {}
  template <int>
  void await_copies() const {}
};

template <class Traits>
class WeightStream {
 public:
  using Scalar = typename Traits::Scalar;
  using Storage = typename Scalar::Storage;
  using Share = WarpShare<Scalar>;
  using VectorsOf = Vectors<Traits>;
  static constexpr int kBytesPerWarp = 0;
  static constexpr int kStepsAhead = 0;

  WeightStream(const Weight& weight, const VectorsOf& vectors, const RowTiles& tiles, const Share& share, uint8_t*, int)
      : weight_(weight), vectors_(vectors), tiles_(tiles), share_(share), position_(share.team) {}

  int num_steps() const { return share_.num_steps_of_all(tiles_); }
  void fetch_vectors() const {}
  void await_vectors() const {}

  struct Sums {
    float values[Traits::kVectors][kTileRows];
    void store(float* partial) const { memcpy(partial, values, sizeof(values)); }
  };

  template <class InStep>
  Sums multiply(const InStep& in_step) {
    Sums sums = {};
    for (int step = 0; step < share_.num_steps; ++step) in_step();  // this warp has nothing to load
    const int first_row = tiles_.tile_at(position_) * kTileRows;
    position_ += share_.num_teams;
    const int first = share_.first_step * Share::kStep;
    const int last = min_of(first + share_.num_steps * Share::kStep, weight_.num_columns);
    for (int row = 0; row < kTileRows && first_row + row < weight_.num_rows; ++row) {
      for (int n = 0; n < vectors_.count; ++n) sums.values[n][row] = dot(first_row + row, n, first, last);
    }
    return sums;
  }

 private:
  // Eight interleaved sums, which the compiler turns into one vector.
  float dot(int row, int n, int first, int last) const {
    const auto* w = reinterpret_cast<const Storage*>(weight_.elements) + int64_t{row} * weight_.num_columns;
    const auto* x = reinterpret_cast<const Storage*>(vectors_.elements) + int64_t{n} * vectors_.num_columns;
    float sums[8] = {};
    int k = first;
    for (; k + 8 <= last; k += 8) {
      for (int i = 0; i < 8; ++i) sums[i] += Scalar::to_float(w[k + i]) * Scalar::to_float(x[k + i]);
    }
    for (int i = 0; k + i < last; ++i) sums[i] += Scalar::to_float(w[k + i]) * Scalar::to_float(x[k + i]);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }

  const Weight weight_;
  const VectorsOf vectors_;
  const RowTiles tiles_;
  const Share share_;
  int position_;
};

#endif

}  // namespace po
