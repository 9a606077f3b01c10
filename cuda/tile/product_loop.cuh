// The main loop of a matrix product. WGs take tiles of the result in turn. In each, one thread loads: it brings tiles
// of the factors to stages of shared memory. The other warps multiply what has come, and give the stage back. WGs of a
// cluster have tiles below each other, and each brings a part of the tile of b to all of them.
//
//   loader                                      warps that multiply (of all WGs that share b)
//   await that the stage is empty      <-----   release the stage after its products
//   bring its part of b to all, then a  ----->  await that all bytes have come
//                                               start the products of this step; await those of the step before
//
// Where tiles are too few for the GPU, two WGs add up halves of a tile's sums, and each finishes half of the tile.
//
// These waits are for threads of the cluster, so they have no bound. Whoever must wait for a peer does so in the
// loader's gate, with a bound. After a launch is given up the gate lets everything pass: loader and warps make all
// steps of all tiles, so that no wait of the cluster lacks its other side. Nobody leaves before the cluster has met.
#pragma once

#include "sched/product_tiles.cuh"
#include "tile/product_tile.cuh"

namespace po {

// What is multiplied.
struct Product {
  TensorMap a;          // in boxes of a tile's rows, or of a step's depth if M-major
  TensorMap b;          // in boxes of the part of a tile that a WG brings
  ProductTiles tiles;   // `rows`: of clusters
  ProductRows rows;     // of a
  uint32_t step_bytes;  // of the boxes of a step
};
PO_DESCRIBE(Product, a, b, tiles, rows, step_bytes)

inline constexpr int kProductThreads = 384;  // on GPUs: two warpgroups that multiply, and one whose first thread loads
inline constexpr int kProductWarps = 8;      // that multiply
inline constexpr int kPieces = 2;            // of each of these, that are stored at the same time
PO_CONSTANT(kProductThreads)

constexpr int stage_bytes(int rows, int columns, int depth, bool a_k_major, bool b_k_major) {
  return factor_bytes(rows, depth, a_k_major) + factor_bytes(columns, depth, b_k_major);
}

// Bytes of a WG's memory on GPUs beside its stages, with room for the handovers of 16 stages.
constexpr int rest_bytes(int columns, int parts) {
  return kProductWarps * kPieces * 16 * piece_columns(columns, parts) * 2 + 34 * static_cast<int>(sizeof(uint64_t));
}
PO_QUERY(stage_bytes, (int64_t rows, int64_t columns, int64_t depth, int64_t a_k_major, int64_t b_k_major),
         stage_bytes(static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(depth), a_k_major != 0,
                     b_k_major != 0))
PO_QUERY(rest_bytes, (int64_t columns, int64_t parts), rest_bytes(static_cast<int>(columns), static_cast<int>(parts)))
PO_QUERY(piece_columns, (int64_t columns, int64_t parts),
         piece_columns(static_cast<int>(columns), static_cast<int>(parts)))

template <class Tile_, int kNumStages, int kNumParts>
struct ProductTraits {
  using Tile = Tile_;
  static constexpr int kStages = kNumStages;
  static constexpr int kParts = kNumParts;                  // of the sums
  static constexpr int kSharing = Cluster::kSize / kParts;  // WGs that share tiles of b
  static constexpr int kStageBytes = Tile::kABytes + Tile::kBBytes;
  static constexpr int kPieceBytes = Tile::kPieceRows * Tile::kPieceColumns * 2;

  // How a WG's memory is divided.
  struct Arena {
    uint8_t stages[kStages][kStageBytes];
    uint8_t pieces[PO_ON_DEVICE ? kProductWarps : kMaxWarps][kPieces][kPieceBytes];
    Handover full[kStages];
    Handover empty[kStages];
    Handover has_room;  // the other part's WG has multiplied, and its stages are free
    Handover has_half;

    static PO_FN Arena& of(const WorkGroup& wg) { return *reinterpret_cast<Arena*>(wg.arena()); }
  };
  static_assert(kStages >= 2, "a stage is given back after the next step has come");
  static_assert((kParts == 1 || kParts == 2) && Cluster::kSize % kParts == 0);
  static_assert(Tile::kColumns % kSharing == 0 && Tile::kDepth % kSharing == 0, "each WG brings as much of b");
  static_assert(!PO_ON_DEVICE || sizeof(Arena) <= kStages * kStageBytes + rest_bytes(Tile::kColumns, kParts));
  static_assert(kParts == 1 || Tile::kRows * Tile::kColumns * 2 <= kStages * kStageBytes, "half a tile, in fp32");

  // Starts the handovers, for all WGs of the cluster; all threads.
  static PO_FN void start(const WorkGroup& wg) {
    const Cluster cluster(wg);
    if (wg.rank() == 0) {
      Arena& arena = Arena::of(wg);
      const int warps = Tile::num_warps(wg);
      for (int stage = 0; stage < kStages; ++stage) {
        arena.full[stage].start(1);
        arena.empty[stage].start(warps * kSharing);
      }
      arena.has_room.start(warps);
      cluster.start(arena.has_half, 1);  // which shows all of them
    }
    wg.sync();
    if constexpr (Cluster::kSize > 1) cluster.meet();
  }

  // Whether this thread loads: the first one after those that multiply, or the only one.
  static PO_FN bool loads(const WorkGroup& wg) {
    return wg.rank() == (wg.size() == 1 ? 0 : Tile::num_warps(wg) * kWarpSize);
  }
};

// A WG's place in the product, and the stage that a thread of it has come to.
template <class Traits>
class ProductPosition {
 public:
  PO_FN ProductPosition(const WorkGroup& wg, const ProductTiles& tiles)
      : rank_(Cluster(wg).rank()), number_(wg.index() / Cluster::kSize), stride_(wg.count() / Cluster::kSize) {
    begin_ = tiles.steps * part() / Traits::kParts;
    end_ = tiles.steps * (part() + 1) / Traits::kParts;
    step_ = begin_;
  }

  PO_FN int part() const { return rank_ / Traits::kSharing; }
  PO_FN int sharer() const { return rank_ % Traits::kSharing; }  // which of the WGs that share b
  PO_FN int first_sharer() const { return part() * Traits::kSharing; }
  PO_FN int other_part() const { return (1 - part()) * Traits::kSharing + sharer(); }

  PO_FN bool is_over(const ProductTiles& tiles) const { return number_ >= tiles.count(); }
  PO_FN int number() const { return number_; }
  PO_FN void skip_tile() { number_ += stride_; }
  PO_FN bool is_last(const ProductTiles& tiles) const { return number_ + stride_ >= tiles.count(); }

  // The rows of this WG's tile, and its column of tiles.
  PO_FN ProductRows::Place rows(const Product& product, ProductTiles::Place place) const {
    return product.rows.place_of(place.row * Traits::kSharing + sharer(), Traits::Tile::kRows);
  }
  PO_FN int step() const { return step_; }
  PO_FN bool is_first() const { return step_ == begin_; }
  PO_FN bool is_near_end() const { return step_ == end_ - 3; }
  PO_FN int stage() const { return stage_; }
  PO_FN uint32_t round() const { return round_; }

  // Goes to the next step, which may be in the next tile.
  PO_FN void advance() {
    if (++stage_ == Traits::kStages) {
      stage_ = 0;
      ++round_;
    }
    if (++step_ == end_) {
      step_ = begin_;
      number_ += stride_;
    }
  }

  // Steps of this WG from here on.
  PO_FN int remaining(const ProductTiles& tiles) const {
    return ceil_div(max_of(0, tiles.count() - number_), stride_) * (end_ - begin_);
  }

 private:
  int rank_, number_, stride_, begin_, end_, step_, stage_ = 0;
  uint32_t round_ = 0;
};

// Brings tiles to the stages; one thread.
template <class Traits>
class ProductLoader {
  using Tile = typename Traits::Tile;

 public:
  PO_FN ProductLoader(const WorkGroup& wg, const Product& product)
      : wg_(wg), product_(product), arena_(Traits::Arena::of(wg)), at_(wg, product.tiles) {}

  // Brings those of the next step, when its stage is free; returns false after the last step. gate(place) is called
  // before the first step of each tile.
  template <class Gate>
  PO_FN bool load(const Gate& gate) {
    if (at_.is_over(product_.tiles)) return false;
    if (at_.is_first()) {
      const ProductTiles::Place place = product_.tiles.place_of(at_.number());
      row_ = at_.rows(product_, place).row;
      column_ = place.column * Tile::kColumns;
      gate(place);  // @product-gate
    }
    const int k = at_.step() * Tile::kDepth;
    uint8_t* a = arena_.stages[at_.stage()];
    Handover& full = arena_.full[at_.stage()];
    arena_.empty[at_.stage()].await(at_.round() - 1);  // @stage-empty: at first all are
    full.arrive_behind_tiles(product_.step_bytes);
    load_b(k, a + Tile::kABytes, full);  // first: with few rows it comes from further away
    if constexpr (Tile::kIsAKMajor) {
      copy_tile_async(product_.a, row_, k, a, full);
    } else {
      PO_UNROLL
      for (int box = 0; box < Tile::kABytes / Tile::kBoxBytes; ++box) {
        copy_tile_async(product_.a, k, row_ + box * Tile::kDepth, a + box * Tile::kBoxBytes, full);
      }
    }
    at_.advance();
    return true;
  }

 private:
  // Brings this WG's part to all that share it: some of the columns, or some of the step's elements of each.
  PO_FN void load_b(int k, uint8_t* b, Handover& full) {
    if constexpr (Tile::kIsBKMajor) {
      constexpr int kColumns = Tile::kColumns / Traits::kSharing;
      const int first = at_.sharer() * kColumns;
      bring(column_ + first, k, b + first * Tile::kDepth * 2, full);
    } else {
      constexpr int kDepth = Tile::kDepth / Traits::kSharing;
      const int first = at_.sharer() * kDepth;
      PO_UNROLL
      for (int box = 0; box < Tile::kBBytes / Tile::kBoxBytes; ++box) {
        bring(k + first, column_ + box * Tile::kDepth, b + box * Tile::kBoxBytes + first * Tile::kDepth * 2, full);
      }
    }
  }

  PO_FN void bring(int row, int column, uint8_t* tile, Handover& full) {
    if constexpr (Traits::kSharing == 1) {
      copy_tile_async(product_.b, row, column, tile, full);
    } else {
      multicast_tile_async(Cluster(wg_), at_.first_sharer(), Traits::kSharing, product_.b, row, column, tile, full);
    }
  }

  const WorkGroup& wg_;
  const Product& product_;
  typename Traits::Arena& arena_;
  ProductPosition<Traits> at_;
  int row_ = 0, column_ = 0;  // of the tile
};

// Adds up the tiles of a WG, one after the other, from what the loader brings; the warps that multiply.
template <class Traits>
class ProductAdder {
  using Tile = typename Traits::Tile;

 public:
  PO_FN ProductAdder(const WorkGroup& wg, const Product& product)
      : wg_(wg),
        cluster_(wg),
        product_(product),
        tiles_(product.tiles),
        arena_(Traits::Arena::of(wg)),
        at_(wg, product.tiles),
        awaited_(at_.remaining(product.tiles) - Traits::kStages),
        tile_(wg) {}

  PO_FN bool is_over() const { return at_.is_over(tiles_); }
  PO_FN int part() const { return at_.part(); }
  PO_FN Tile& tile() { return tile_; }
  PO_FN const ProductPosition<Traits>& position() const { return at_; }

  // The first row and column of the next tile.
  PO_FN ProductTiles::Place begin() const {
    const ProductTiles::Place place = tiles_.place_of(at_.number());
    return {at_.rows(product_, place).row, place.column * Tile::kColumns};
  }

  // Adds up the next tile. `load()`: called before each step, by a thread that also loads. `ahead(is_last)`: called
  // while products are under way, once a few steps before the end, if there are more, and once after the last one.
  template <class Load, class Ahead>
  PO_FN void add_up(const Load& load, const Ahead& ahead) {
    int before = 0;
    do {
      load();
      const uint8_t* a = arena_.stages[at_.stage()];
      const bool is_first = at_.is_first();
      arena_.full[at_.stage()].await(at_.round());  // @stage-full
      tile_.multiply(a, a + Tile::kABytes, !is_first);
      if (!is_first) {
        tile_.template settle<1>();
        release(before);
        if (at_.is_near_end()) ahead(false);
      }
      before = at_.stage();
      at_.advance();
    } while (!at_.is_first());
    ahead(true);
    tile_.template settle<0>();
    release(before);
    if constexpr (Traits::kParts == 2) add_other_part();
  }

  template <class Load>
  PO_FN void add_up(const Load& load) {
    add_up(load, [](bool) {});
  }

 private:
  // Gives a stage back to all that bring something there. What nobody awaits is not sent: the WG may have left.
  PO_FN void release(int stage) {
    if (awaited_-- <= 0) return;
    if constexpr (Traits::kSharing == 1) {
      if (warp_.rank() == 0) arena_.empty[stage].arrive();
    } else {
      for (int i = warp_.rank(); i < Traits::kSharing; i += warp_.size()) {
        cluster_.arrive(arena_.empty[stage], at_.first_sharer() + i);
      }
    }
  }

  // Exchanges halves with the WG of the other part. Both have no other tile: the stages are free.
  PO_FN void add_other_part() {
    const int part = at_.part(), other = at_.other_part();
    auto* sums = reinterpret_cast<float*>(arena_.stages);
    if (wg_.rank() == 0) arena_.has_half.arrive_behind_tiles(Tile::kRows * Tile::kColumns * 2);
    warp_.sync();
    if (warp_.rank() == 0) cluster_.arrive(arena_.has_room, other);
    arena_.has_room.await(0);  // @half-room
    tile_.for_each_four_of_half(1 - part, [&](int place, float (&values)[4]) {
      cluster_.store_async(sums + place, other, values, arena_.has_half);
    });
    arena_.has_half.await(0);  // @half-there
    tile_.for_each_four_of_half(part, [&](int place, float (&values)[4]) {
      PO_UNROLL
      for (int i = 0; i < 4; ++i) values[i] += sums[place + i];
    });
  }

  const WorkGroup& wg_;
  const Cluster cluster_;
  const Warp warp_{};
  const Product& product_;
  const ProductTiles& tiles_;
  typename Traits::Arena& arena_;
  ProductPosition<Traits> at_;
  int awaited_;  // releases that a loader still awaits
  Tile tile_;
};

// Stores what a WG finishes of its tiles, rounded, row by row, by ordinary stores; the warps that multiply. No barrier is
// wider than a warp.
template <class Traits>
class ProductRowStore {
  using Tile = typename Traits::Tile;

 public:
  PO_FN explicit ProductRowStore(const WorkGroup& wg) : pieces_(Traits::Arena::of(wg).pieces[wg.warp_index()]) {}

  // `part`: of the adder. `target`: of the first element that the WG finishes; `stride`: bytes from row to row; so many
  // rows and columns exist.
  PO_FN void store(Tile& tile, int part, uint8_t* target, int64_t stride, int rows, int columns) {
    constexpr int kRowBytes = Tile::kPieceColumns * 2, kUnits = kRowBytes / 16, kLines = kWarpSize / kUnits;
    constexpr int kTimes = Tile::kPieceRows / max_of(kLines, 1);
    static_assert(kTimes * kLines == Tile::kPieceRows, "all lanes store as often");
    // A lane stores 16 bytes of every kLines-th row of a piece.
    const int line = warp_.rank() / kUnits, unit = warp_.rank() % kUnits;
    target += line * stride + unit * 16;
    tile.for_each_piece(part, [&](int row, int column, const auto& round) {
      row -= Tile::first_row(part);
      column -= Tile::first_column(part);
      uint8_t* piece = pieces_[next_];
      next_ = (next_ + 1) % kPieces;
      round(piece);
      warp_.sync();  // the piece before the last one has been read before this
      Vector<16> values[kTimes];
      PO_UNROLL
      for (int i = 0; i < kTimes; ++i) {
        const auto place = static_cast<uint32_t>((line + i * kLines) * kRowBytes + unit * 16);
        values[i] = load_shared_vector<16>(piece + swizzled(place, kRowBytes > 16 ? kRowBytes : 0));
      }
      if (column + unit * 8 >= columns) return;
      uint8_t* place = target + row * stride + column * 2;
      PO_UNROLL
      for (int i = 0; i < kTimes; ++i) {
        if (row + line + i * kLines < rows) store_vector<16>(place + i * kLines * stride, values[i]);
      }
    });
  }

 private:
  const Warp warp_{};
  uint8_t (*pieces_)[Traits::kPieceBytes];
  int next_ = 0;
};

// Stores tiles of a WG, rounded; the warps that multiply. Each warp has rows of its own: no barrier is wider than a
// warp.
template <class Traits>
class ProductStore {
 public:
  PO_FN ProductStore(const WorkGroup& wg, const TensorMap& output)
      : output_(output), pieces_(Traits::Arena::of(wg).pieces[wg.warp_index()]) {}

  // `part`: of the adder. `output` lies in pieces (tile/product_tile.cuh).
  PO_FN void store(typename Traits::Tile& tile, int part, ProductTiles::Place begin) {
    tile.for_each_piece(part, [&](int row, int column, const auto& round) {
      uint8_t* piece = pieces_[next_];
      if (warp_.rank() == 0) await_tiles_read<kPieces - 1>();
      warp_.sync();
      round(piece);
      show_to_copies();
      warp_.sync();
      if (warp_.rank() == 0) copy_tile_back_async(output_, begin.row + row, begin.column + column, piece);
      next_ = (next_ + 1) % kPieces;
    });
  }

  // Shared memory must outlive the copies.
  PO_FN void end() const {
    if (warp_.rank() == 0) await_tiles_read<0>();
  }

 private:
  const Warp warp_{};
  const TensorMap& output_;
  uint8_t (*pieces_)[Traits::kPieceBytes];
  int next_ = 0;
};

}  // namespace po
