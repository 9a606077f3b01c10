// All-gather and products: every PE gets every PE's matrix, one under the other, and multiplies what it has gathered with
// matrices of its own. Each PE pushes: a WG stores its piece of the PE's own matrix into all outputs, which lie in the
// symmetric heap.
//
//   sender's WG i                              receiver
//   store the piece into the own output        grant credit: its output may be written, and where it lies
//   await credit                      <-----
//   store the piece into its output   ----->
//   sync; release sliceRdy word i     ----->   every WG awaits the words of all senders, then multiplies
//
// A peer that is not reachable gets the piece by a put from the own output, which has it already. The two WGs of a cluster
// multiply different rows with the same columns: each brings half of a tile of these to both. cuda/DESIGN.md says why
// this is enough, from "One launch" on; the tags are of tests/ops/test_all_gather_matmul.py, where a mutation takes each
// of them out.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "platform/scalar.cuh"
#include "platform/tensor_map.cuh"

namespace po::all_gather_matmul {

inline constexpr int kThreads = 256;  // on the GPU
inline constexpr int kCluster = 2;    // WGs
inline constexpr int kMaxProducts = 7;
// A tile of a matrix that is multiplied with: rows, and bytes of each.
inline constexpr int kTileDepth = 16;
inline constexpr int kTileRowBytes = 128;
inline constexpr int kBoxRows = kTileDepth / kCluster;  // that a WG brings
inline constexpr int kTileBytes = kTileDepth * kTileRowBytes;
inline constexpr int kRows = 16;  // of a product, that a WG makes at a time
inline constexpr int kArenaBytes = kTileBytes + kRows * kTileRowBytes / 2 * static_cast<int>(sizeof(float));
inline constexpr Phase kPhasePiece = make_phase(kFirstPhase);
PO_CONSTANT(kThreads)
PO_CONSTANT(kCluster)
PO_CONSTANT(kMaxProducts)
PO_CONSTANT(kTileRowBytes)
PO_CONSTANT(kBoxRows)
PO_CONSTANT(kArenaBytes)
PO_CONSTANT(kPhasePiece)

struct Config {
  DType scalar = DType::kFloat32;
  int vector_bytes = 16;  // of one load or store: every PE's matrix begins at a multiple of it, and ends at one
};

struct Plan {
  Team team;
  int64_t part_bytes;  // of each PE's matrix
  int64_t rows;        // of it
  int64_t depth;       // columns of it, and rows of what it is multiplied with
  int64_t num_products;
  int64_t columns[kMaxProducts];
};
PO_DESCRIBE(Plan, team, part_bytes, rows, depth, num_products, columns)

struct Call {
  const uint8_t* a;
  uint64_t output_offset;  // of [size][part_bytes] in this PE's heap
  uint8_t* products[kMaxProducts];
  TensorMap matrices[kMaxProducts];  // in boxes of kBoxRows rows
};
PO_DESCRIBE(Call, a, output_offset, products, matrices)

struct Shared {
  Plan plan;
  uint64_t is_last;
  Handover landed;
};

// What a WG has of the PE's own matrix, on its way to all outputs.
template <Config kConfig>
class Piece {
 public:
  PO_FN Piece(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), team_(plan.team), a_(call.a), output_(call.output_offset), part_(plan.team.rank * plan.part_bytes) {
    const int64_t vectors = plan.part_bytes / kBytes;
    begin_ = vectors * wg.index() / wg.count() * kBytes;
    end_ = vectors * (wg.index() + 1) / wg.count() * kBytes;
  }

  PO_FN void store_own() const { store(team_.rank, output_); }

  // After their credit. Each PE begins with another peer, so that not all store to the same one.
  PO_FN void store_to_peers() const {
    for (int hop = 1; hop < team_.size; ++hop) {
      const int peer = (team_.rank + hop) % team_.size;
      if (is_reachable(team_, peer)) store(peer, granted_output(team_, peer));
    }
  }

  // Puts it to peers that are not reachable, and signals its arrival to all of them: one thread per peer.
  PO_FN void send() const {
    const auto word = static_cast<uint64_t>(wg_.index());
    for (int peer = wg_.rank(); peer < team_.size; peer += wg_.size()) {
      if (peer == team_.rank) continue;
      if (!is_reachable(team_, peer)) fence_acq_rel_sys();  // the network sees what all threads have stored
      put_signal(team_, peer, granted_output(team_, peer) + place(), team_.heap + output_ + place(),
                 static_cast<uint64_t>(end_ - begin_), ready_word_offset(team_, team_.rank, word), launch_flag(team_));
    }
  }

 private:
  static constexpr int kBytes = kConfig.vector_bytes;

  PO_FN uint64_t place() const { return static_cast<uint64_t>(part_ + begin_); }  // in every output

  PO_FN void store(int pe, uint64_t output) const {
    const TaskTrace trace(pe != team_.rank);
    uint8_t* part = peer_address(team_, pe, output) + part_;
    for (int64_t i = begin_ + wg_.rank() * kBytes; i < end_; i += wg_.size() * kBytes) {
      store_vector<kBytes>(part + i, load_vector<kBytes>(a_ + i));
    }
  }

  const WorkGroup& wg_;
  const Team& team_;
  const uint8_t* a_;
  const uint64_t output_;
  const int64_t part_;  // where this PE's part begins in an output
  int64_t begin_;       // in the part
  int64_t end_;
};

// Every WG needs the pieces of all: it multiplies rows of each PE. Threads share the words.
PO_FN void await_pieces(const Team& team, const WorkGroup& wg) {
  for (int i = wg.rank(); i < team.size * wg.count(); i += wg.size()) {
    const int peer = i / wg.count();
    const auto word = static_cast<uint64_t>(i % wg.count());
    if (peer == team.rank) continue;
    await_epoch(team, local_word(team, ready_word_offset(team, peer, word)), kPhasePiece, peer, word);
  }
}

// A WG's share of the products.
template <Config kConfig>
class Products {
  using Scalar = ScalarOf<kConfig.scalar>;
  using Storage = typename Scalar::Storage;
  static constexpr int kColumns = kTileRowBytes / static_cast<int>(sizeof(Storage));  // of a tile

 public:
  PO_FN Products(const WorkGroup& wg, Shared& shared, const Call& call)
      : wg_(wg),
        cluster_(wg),
        plan_(shared.plan),
        call_(call),
        landed_(shared.landed),
        tile_(wg.arena()),
        sums_(reinterpret_cast<float*>(tile_ + kTileBytes)) {
    static_assert(Cluster::kSize == kCluster && kArenaAlignment<> % 1024 == 0, "see the launch's shape");
    if (wg.rank() == 0) cluster_.start(landed_, 1);
    cluster_.sync();  // all threads know what each of them has awaited
  }

  // WGs of a cluster do the same work for different rows, some of them rows that do not exist: they meet as often.
  PO_FN void run() {
    constexpr int kGroup = kRows * kCluster;
    const int64_t num_rows = plan_.team.size * plan_.rows, row_groups = ceil_div<int64_t>(num_rows, kGroup);
    for (int product = 0; product < plan_.num_products; ++product) {
      const int64_t tiles = row_groups * ceil_div<int64_t>(plan_.columns[product], kColumns);
      for (int64_t i = wg_.index() / kCluster; i < tiles; i += wg_.count() / kCluster) {
        const int64_t first_row = i % row_groups * kGroup + cluster_.rank() * kRows;
        multiply(product, first_row, i / row_groups * kColumns, num_rows);
      }
    }
    cluster_.sync();  // nobody leaves while it brings something to another WG
  }

 private:
  PO_FN void multiply(int product, int64_t first_row, int64_t first_column, int64_t num_rows) {
    const int64_t columns = plan_.columns[product];
    auto* output = reinterpret_cast<Storage*>(call_.products[product]);
    for (int i = wg_.rank(); i < kRows * kColumns; i += wg_.size()) sums_[i] = 0;
    for (int64_t first = 0; first < plan_.depth; first += kTileDepth) {
      bring(call_.matrices[product], static_cast<int>(first), static_cast<int>(first_column));
      const auto depth = static_cast<int>(min_of<int64_t>(kTileDepth, plan_.depth - first));
      for_each(
          [&](int i, int64_t row, int column) {
            const Storage* a = row_of(row) + first;
            float sum = sums_[i];
            for (int k = 0; k < depth; ++k) {
              const auto place = static_cast<uint32_t>(k * kTileRowBytes + column * static_cast<int>(sizeof(Storage)));
              const Storage b = *reinterpret_cast<const Storage*>(tile_ + swizzled(place, kTileRowBytes));
              sum += rounded_product(Scalar::to_float(a[k]), Scalar::to_float(b));
            }
            sums_[i] = sum;
          },
          first_row, first_column, num_rows, columns);
    }
    for_each([&](int i, int64_t row,
                 int column) { output[row * columns + first_column + column] = Scalar::from_float(sums_[i]); },
             first_row, first_column, num_rows, columns);
  }

  // Calls it for each of this thread's elements that exist: its sum's number, its row, its column in the tile.
  template <class Body>
  PO_FN void for_each(const Body& body, int64_t first_row, int64_t first_column, int64_t num_rows, int64_t columns) {
    for (int i = wg_.rank(); i < kRows * kColumns; i += wg_.size()) {
      const int64_t row = first_row + i / kColumns;
      if (row < num_rows && first_column + i % kColumns < columns) body(i, row, i % kColumns);
    }
  }

  // Brings a tile to all WGs of the cluster, when they are done with the one before.
  PO_FN void bring(const TensorMap& matrix, int row, int column) {
    cluster_.sync();  // @tile-free
    if (wg_.rank() == 0) {
      const int first = cluster_.rank() * kBoxRows;
      multicast_tile_async(cluster_, matrix, row + first, column, tile_ + first * kTileRowBytes, landed_);
      landed_.arrive_behind_tiles(kTileBytes);
    }
    landed_.await(round_++);  // @tile-landed
  }

  // This PE's row need not be in the output yet: other WGs store it there.
  PO_FN const Storage* row_of(int64_t row) const {
    const Team& team = plan_.team;
    const int64_t first_own = team.rank * plan_.rows;
    const bool is_own = first_own <= row && row < first_own + plan_.rows;
    const uint8_t* rows = is_own ? call_.a : team.heap + call_.output_offset;
    return reinterpret_cast<const Storage*>(rows) + (is_own ? row - first_own : row) * plan_.depth;
  }

  const WorkGroup& wg_;
  const Cluster cluster_;
  const Plan& plan_;
  const Call& call_;
  Handover& landed_;
  uint8_t* tile_;
  float* sums_;  // [kRows][kColumns]
  uint32_t round_ = 0;
};

template <Config kConfig>
struct Kernel {
  using Plan = all_gather_matmul::Plan;
  using Call = all_gather_matmul::Call;
  using Shared = all_gather_matmul::Shared;
  static constexpr int kThreads = all_gather_matmul::kThreads;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kHostArenaBytes = kArenaBytes;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    Team& team = shared.plan.team;
    begin_launch(team, wg);
    if (wg.index() == 0) grant_credit(team, wg, call.output_offset);
    const Piece<kConfig> piece(wg, plan, call);
    piece.store_own();            // which hides some of the wait
    await_all_credits(team, wg);  // @piece-credits
    wg.sync();                    // @piece-credits-sync: threads share the peers, and each stores to all of them
    // A thread that finds the launch given up leaves its share out. After the sync all threads know, and signal nobody.
    if (!is_aborted(team)) piece.store_to_peers();
    wg.sync();  // @piece-stored
    if (!is_aborted(team)) piece.send();
    await_pieces(team, wg);  // @piece-await
    Products<kConfig>(wg, shared, call).run();
    leave_launch(team, wg, &shared.is_last, call.output_offset, static_cast<uint64_t>(team.size * plan.part_bytes));
    if (shared.is_last == 0 || !is_aborted(team)) return;
    for (int i = 0; i < plan.num_products; ++i) {
      const int64_t words = team.size * plan.rows * plan.columns[i] * (kConfig.scalar == DType::kFloat32 ? 2 : 1);
      poison(wg, reinterpret_cast<uint16_t*>(call.products[i]), words);  // @products-poison
    }
  }
};

}  // namespace po::all_gather_matmul
