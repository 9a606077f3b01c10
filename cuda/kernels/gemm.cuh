// GEMM: output = a @ b (+ bias), on one PE. Products are added in fp32 and rounded once (tile/product_loop.cuh).
// Nothing here waits for a peer.
#pragma once

#include "comm/team.cuh"
#include "platform/entry.cuh"
#include "tile/product_loop.cuh"

namespace po::gemm {

struct Config {
  DType scalar = DType::kBFloat16;
  int rows = 128;  // of a tile
  int columns = 256;
  int depth = 64;         // of a step
  int stages = 4;         // steps whose tiles are in shared memory at the same time
  int parts = 1;          // of the sums, each added up by another WG of the cluster
  bool a_k_major = true;  // elements that are multiplied follow each other in memory
  bool b_k_major = true;
  bool bias = false;
};

struct Plan {
  Team team;
};
PO_DESCRIBE(Plan, team)

struct Call {
  Product product;
  TensorMap output;
  const uint8_t* bias;
  int64_t columns;  // of the output
};
PO_DESCRIBE(Call, product, output, bias, columns)

struct Shared {
  Plan plan;
};

template <Config kConfig>
struct Kernel {
  using Plan = gemm::Plan;
  using Call = gemm::Call;
  using Shared = gemm::Shared;
  using Element = ScalarOf<kConfig.scalar>;
  using Tile = ProductTile<Element, kConfig.rows, kConfig.columns, kConfig.depth, kConfig.a_k_major, kConfig.b_k_major,
                           kConfig.parts>;
  using Traits = ProductTraits<Tile, kConfig.stages, kConfig.parts>;
  static constexpr int kThreads = kProductThreads;
  static constexpr int kBlocksPerSm = 1;
  static constexpr size_t kHostArenaBytes = sizeof(typename Traits::Arena);

  // Brings the first tiles before the plan is there.
  static PO_FN ProductLoader<Traits> begin(const WorkGroup& wg, const Call& call) {
    if (wg.rank() == 0) {
      prefetch_map(call.product.a);
      prefetch_map(call.product.b);
    }
    Traits::start(wg);
    release_successor();
    await_predecessor();
    ProductLoader<Traits> loader(wg, call.product);
    if (Traits::loads(wg) && wg.size() > 1) {
      for (int stage = 0; stage < Traits::kStages; ++stage) loader.load(no_gate);
    }
    return loader;
  }

  static PO_FN void run(const WorkGroup& wg, Shared&, const Call& call, ProductLoader<Traits>& loader) {
    if (wg.warp_index() < Tile::num_warps(wg)) {
      Tile::take_room();
      multiply(wg, call, loader);
    } else {
      Tile::leave_room();
      while (Traits::loads(wg) && loader.load(no_gate)) {
      }
    }
    if constexpr (Cluster::kSize > 1) Cluster(wg).meet();  // a neighbor may still bring tiles here
  }

 private:
  static PO_FN void no_gate(ProductTiles::Place) {}

  static PO_FN void multiply(const WorkGroup& wg, const Call& call, [[maybe_unused]] ProductLoader<Traits>& loader) {
    ProductAdder<Traits> adder(wg, call.product);
    ProductStore<Traits> output(wg, call.output);
    while (!adder.is_over()) {
      const TaskTrace trace(false);
      const ProductTiles::Place begin = adder.begin();
      adder.add_up([&] {
        if constexpr (!PO_ON_DEVICE) {
          if (wg.size() == 1) loader.load(no_gate);
        }
      });
      if constexpr (kConfig.bias) add_bias(adder.tile(), call, begin.column);
      output.store(adder.tile(), adder.part(), begin);
    }
    output.end();
  }

  static PO_FN void add_bias(Tile& tile, const Call& call, int first_column) {
    const auto* bias = reinterpret_cast<const typename Element::Storage*>(call.bias) + first_column;
    const int64_t columns = call.columns - first_column;
    tile.add_to_columns([&](int column) { return column < columns ? Element::to_float(bias[column]) : 0.0f; });
  }
};

}  // namespace po::gemm
