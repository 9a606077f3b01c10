// Runs the main loop of matrix products with a gate, as an operator with an exchange does: the rows of `a` of all PEs lie
// in each PE's heap, and each PE stores its own ones there during the launch. exits.h says how it ends.
//
//   sender's WG                                   receiver
//   await credit                        <-----    grant credit: its rows may be written
//   store this PE's rows into its heap  ----->
//   sync; release a word for each tile  ----->    the loader's gate awaits the word of a tile, with a bound

#include "platform/platform.cuh"
template <>
inline constexpr int po::kClusterSize<> = 2;
template <>
inline constexpr int po::kArenaAlignment<> = 1024;

#include "driver.h"

#include "comm/launch.cuh"
#include "product.h"

namespace {

using driver::Matrix;
using driver::Storage;
constexpr int kTile = 8;                                              // rows, columns and depth
constexpr po::Phase kPhaseRows = po::make_phase(po::kFirstPhase, 4);  // the gate gives up before others do
constexpr uint64_t kReadyStride = 16;

struct Plan {
  po::Team team;
  int64_t tiles;      // of rows of each PE
  int64_t row_bytes;  // of a
};

struct Call {
  po::Product product;
  po::TensorMap output;
  uint64_t a_offset;  // of all rows, in every heap
  Storage* elements;  // of the output
  int64_t num_elements;
};

struct Shared {
  Plan plan;
  uint64_t is_last;
};

struct Kernel {
  using Plan = ::Plan;
  using Call = ::Call;
  using Shared = ::Shared;
  using Tile = po::ProductTile<driver::Element, kTile, kTile, kTile, true, true, 1>;
  using Traits = po::ProductTraits<Tile, 2, 1>;
  static constexpr size_t kHostArenaBytes = sizeof(Traits::Arena);

  static void run(const po::WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    po::Team& team = shared.plan.team;
    begin_launch(team, wg);
    if (wg.index() == 0) grant_credit(team, wg, call.a_offset);
    Traits::start(wg);
    for (int hop = 1 + wg.index(); hop < team.size; hop += wg.count()) {
      send(wg, plan, call, (team.rank + hop) % team.size);
    }
    // After the launch is given up it looks once: what has come is ordered before the copies.
    const auto gate = [&](po::ProductTiles::Place place) {
      const int64_t tile = place.row * Traits::kSharing + po::Cluster(wg).rank();
      const auto sender = static_cast<int>(tile / plan.tiles);
      if (sender >= team.size || sender == team.rank) return;
      const auto word = static_cast<uint64_t>(tile % plan.tiles);
      await_epoch(team, local_word(team, ready_word_offset(team, sender, word)), kPhaseRows, sender, word,
                  is_aborted(team));
    };
    po::ProductLoader<Traits> loader(wg, call.product);
    if (wg.warp_index() < Tile::num_warps(wg)) {
      multiply(wg, call, [&] {
        if (wg.size() == 1) loader.load(gate);
      });
    } else {
      while (loader.load(gate)) {
      }
    }
    po::Cluster(wg).meet();
    leave_launch(team, wg, &shared.is_last, call.a_offset, 0);
    if (shared.is_last != 0 && is_aborted(team)) poison(wg, call.elements, call.num_elements);
  }

 private:
  // A thread that finds the launch given up leaves its share out. After the sync all threads know, and signal nothing.
  static void send(const po::WorkGroup& wg, const Plan& plan, const Call& call, int peer) {
    const po::Team& team = plan.team;
    if (wg.rank() == 0) await_credit(team, peer);
    wg.sync();
    if (!is_aborted(team)) {
      const auto part = static_cast<uint64_t>(team.rank * plan.tiles * kTile * plan.row_bytes);
      const uint8_t* own = team.heap + call.a_offset + part;
      uint8_t* there = peer_address(team, peer, granted_output(team, peer)) + part;
      for (int64_t row = wg.rank(); row < plan.tiles * kTile; row += wg.size()) {
        memcpy(there + row * plan.row_bytes, own + row * plan.row_bytes, static_cast<size_t>(plan.row_bytes));
      }
    }
    wg.sync();
    if (is_aborted(team)) return;
    for (int64_t tile = wg.rank(); tile < plan.tiles; tile += wg.size()) {
      const uint64_t word = ready_word_offset(team, team.rank, static_cast<uint64_t>(tile));
      signal(team, peer, word, launch_flag(team));
    }
  }

  template <class Load>
  static void multiply(const po::WorkGroup& wg, const Call& call, const Load& load) {
    po::ProductAdder<Traits> adder(wg, call.product);
    po::ProductStore<Traits> output(wg, call.output);
    while (!adder.is_over()) {
      const po::ProductTiles::Place begin = adder.begin();
      adder.add_up(load);
      output.store(adder.tile(), adder.part(), begin);
    }
    output.end();
  }
};

driver::Options options({{"--tiles", "3"}, {"--columns", "13"}, {"--depth", "21"}},
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    plan.tiles = options.number("--tiles");
    plan.row_bytes = driver::stride_of(depth) * 2;
    a_offset = take(static_cast<uint64_t>(rows * plan.row_bytes));
    allocate_heap();
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t k = 0; k < depth; ++k) b.at(column, k) = driver::Element::from_float(driver::b_value(k, column));
    }
  }

 private:
  void run_kernel(int64_t launch) override {
    auto* a = reinterpret_cast<Storage*>(heap + a_offset);
    const int64_t part = plan.tiles * kTile;
    for (int64_t row = rank * part; row < (rank + 1) * part; ++row) {
      for (int64_t k = 0; k < depth; ++k) {
        a[row * driver::stride_of(depth) + k] = driver::Element::from_float(driver::a_value(row, k, launch));
      }
    }
    output = Matrix(rows, columns);
    const auto count = [](int64_t size, int64_t each) { return static_cast<int32_t>(po::ceil_div(size, each)); };
    constexpr int kSharing = Kernel::Traits::kSharing;
    const po::Product product{driver::map_of(a, rows, depth, kTile, kTile),
                              b.map(kTile / kSharing, kTile),
                              {count(rows, kTile * kSharing), count(columns, kTile), 2, count(depth, kTile)},
                              driver::rows_of_one_pe(rows, kTile),
                              static_cast<uint32_t>(Kernel::Traits::kStageBytes)};
    launch_on_host<Kernel>(plan_of(launch), {product, output.map(1, kTile), a_offset, output.elements.data(),
                                             static_cast<int64_t>(output.elements.size())});
  }

  void check(int64_t launch) override { driver::check_product(output, depth, rank, launch); }

  void check_given_up(int64_t launch) override {
    if (error.kind == po::kTimeout && error.phase != po::kFirstPhase) {
      driver::fail(driver::kWrongReport, "PE %d, launch %ld: gave up in phase %lu", rank, launch, error.phase);
    }
    for (const Storage element : output.elements) {
      if (element == Matrix::kNan) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: not poisoned", rank, launch);
    }
  }

  const int64_t rows = size * options.number("--tiles") * kTile;
  const int64_t columns = options.number("--columns");
  const int64_t depth = options.number("--depth");
  uint64_t a_offset;
  Matrix b{columns, depth};
  Matrix output;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
