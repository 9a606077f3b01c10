// GEMM and an exchange of its result between the PEs, in one launch: all-to-all, reduce-scatter or all-reduce.
//
// The rows of the product a @ b are in parts, one for each PE. A WG makes tiles of the peers' parts first, then tiles of
// its own PE's part. Warps that multiply never wait for a peer. Other warps, the carriers, send what these have staged in
// this PE's memory, and await what peers send:
//
//   warps that multiply          carriers                        peer
//   tile of a peer's part
//   stage it, rounded     --->   await credit
//                                store it to the peer    --->
//                                release the tile's flag --->    its carriers await the flag
//   tile of the own part  <---   await the flags of all peers
//   add the peers' partial sums
//   store the result
//
// All-to-all: tiles travel as rows, straight to their place in the peer's output. Reduce-scatter: tiles of partial sums
// travel in the order of the registers, to a place of their own in the peer's heap. All-reduce: a reduce-scatter whose
// results carriers send to all peers. Partial sums are rounded to the type in which they travel, the own ones as well,
// added in fp32 in rank order, and the sum is rounded once. kernels/gemm_exchange.md explains the protocol.
#pragma once

#include "comm/credits.cuh"
#include "kernels/gemm_exchange/carrier.cuh"
#include "kernels/gemm_exchange/partial_sums.cuh"
#include "platform/entry.cuh"

namespace po::gemm_exchange {

struct Config {
  DType scalar = DType::kBFloat16;
  DType wire = DType::kBFloat16;  // of partial sums that travel
  Exchange exchange = Exchange::kReduceScatter;
  bool is_mean = false;  // of the PEs' products, in place of their sum
  bool bias = false;
  bool residual = false;
  int rows = 128;  // see gemm::Config
  int columns = 256;
  int depth = 64;
  int stages = 4;
  int parts = 1;
  bool a_k_major = true;
  bool b_k_major = true;
};

template <Config kConfig>
struct Kernel {
  using Plan = gemm_exchange::Plan;
  using Call = gemm_exchange::Call;
  using Shared = gemm_exchange::Shared;
  using Element = ScalarOf<kConfig.scalar>;
  using Wire = ScalarOf<kConfig.wire>;
  using Tile = ProductTile<Element, kConfig.rows, kConfig.columns, kConfig.depth, kConfig.a_k_major, kConfig.b_k_major,
                           kConfig.parts, 2>;
  using Product = ProductTraits<Tile, kConfig.stages, kConfig.parts>;
  using Traits = ExchangeTraits<kConfig.exchange, Product, Element, Wire>;
  using Carrier = gemm_exchange::Carrier<Traits>;
  static constexpr int kThreads = kProductThreads;
  static constexpr int kBlocksPerSm = 1;
  static constexpr size_t kHostArenaBytes = sizeof(typename Product::Arena);

  // Brings the first tiles before the plan is there.
  static PO_FN ProductLoader<Product> begin(const WorkGroup& wg, const Call& call) {
    if (wg.rank() == 0) {
      prefetch_map(call.product.a);
      prefetch_map(call.product.b);
    }
    Product::start(wg);
    release_successor();
    await_predecessor();
    ProductLoader<Product> loader(wg, call.product);
    if (Product::loads(wg) && wg.size() > 1) {
      for (int stage = 0; stage < Product::kStages; ++stage) loader.load(no_gate);
    }
    return loader;
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, ProductLoader<Product>& loader) {
    Team& team = shared.plan.team;
    if (wg.rank() == 0) {
      shared.slots.start(Tile::num_warps(wg));
      shared.is_missing = 0;
    }
    begin_launch(team, wg);
    Carrier carrier(wg, shared, call);
    if (wg.warp_index() < Tile::num_warps(wg)) {
      Tile::take_room();
      multiply(wg, shared, call, loader, carrier);
    } else {
      Tile::leave_room();
      if (carrier.carries()) {
        carrier.run();
      } else {
        while (Product::loads(wg) && loader.load(no_gate)) {
        }
      }
    }
    if constexpr (Cluster::kSize > 1) Cluster(wg).meet();  // a neighbor may still bring tiles here
    leave_launch(team, wg, &shared.is_last, 0, 0);
    if (shared.is_last != 0 && is_aborted(team)) {
      poison(wg, reinterpret_cast<uint16_t*>(call.output), shared.plan.output_words);  // @product-poison
    }
  }

 private:
  static PO_FN void no_gate(ProductTiles::Place) {}

  static PO_FN void multiply(const WorkGroup& wg, Shared& shared, const Call& call,
                             [[maybe_unused]] ProductLoader<Product>& loader, Carrier& carrier) {
    const int rank = shared.plan.team.rank;
    ProductAdder<Product> adder(wg, call.product);
    ProductRowStore<Product> rows(wg);
    PartialSums<Traits> partials(shared);
    Slots::Turn sent, received;
    while (!adder.is_over()) {
      const Block block = Traits::block_of(call, adder.position());
      const TaskTrace trace(block.pe != rank);
      const bool is_added = Traits::kAdds && block.pe == rank && block.rows > 0;
      adder.add_up(
          [&] {
            if constexpr (!PO_ON_DEVICE) {
              if (wg.size() == 1) loader.load(no_gate);
            }
          },
          [&] {
            if (is_added) partials.begin(adder.tile(), adder.part(), block, received, carrier);
          });
      if (block.rows <= 0) continue;
      Tile& tile = adder.tile();
      if (block.pe != rank) {
        stage(shared, tile, adder.part(), block, sent, rows, carrier);
      } else {
        if constexpr (Traits::kAdds) {
          partials.add(tile, adder.part(), received, carrier);
          add_epilogue(shared, call, tile, adder.part(), block);
        }
        finish(shared, call, tile, adder.part(), block, sent, rows, carrier);
      }
    }
    if (carrier.is_inline()) carrier.end();
  }

  // Leaves a tile of a peer's part to the carriers.
  static PO_FN void stage(Shared& shared, Tile& tile, int part, const Block& block, Slots::Turn& turn,
                          ProductRowStore<Product>& rows, Carrier& carrier) {
    uint8_t* slot = Traits::slot(shared.plan, carrier.wg(), turn.slot());
    shared.slots.sent[turn.slot()].await(turn.round() - 1);  // @slot-free: at first all are
    if constexpr (Traits::kAdds) {
      tile.template for_each_eight<1>(part, [&](int i, int, const float (&values)[1][8]) {
        if (tile.row_of_eight(part, i) >= block.rows) return;
        const Eight<Wire> eight = rounded_eight<Wire>(values[0]);
        store_vector<sizeof(eight)>(slot + tile.place_of_eight(part, i) * sizeof(typename Wire::Storage), eight);
      });
    } else {
      rows.store(tile, part, slot, Traits::kSlotRowBytes, block.rows, block.columns);
    }
    if (carrier.is_inline()) return carrier.send(block, slot);
    hand_over(shared.slots.staged[turn.slot()]);  // @tile-staged
    turn.advance();
  }

  // Adds bias and residual to sums of the own part.
  static PO_FN void add_epilogue(const Shared& shared, const Call& call, Tile& tile, int part, const Block& block) {
    if constexpr (kConfig.is_mean) {
      tile.template for_each_eight<1>(part, [&](int, int, float (&values)[1][8]) {
        PO_UNROLL
        for (float& value : values[0]) value /= static_cast<float>(shared.plan.team.size);
      });
    }
    if constexpr (kConfig.bias) {
      const auto* bias = reinterpret_cast<const typename Element::Storage*>(call.bias);
      const int first = block.column - Tile::first_column(part);
      tile.add_to_columns(
          [&](int column) { return first + column < call.columns ? Element::to_float(bias[first + column]) : 0.0f; });
    }
    if constexpr (kConfig.residual) {
      const uint8_t* residual = call.residual + Traits::output_place(shared.plan.team, call, block);
      tile.add_to_pairs(part, block.rows, [&](int row, int column) -> typename Tile::Pair {
        if (column >= block.columns) return {0, 0};
        typename Element::Storage pair[2];
        __builtin_memcpy(pair, residual + row * call.row_bytes + column * 2, sizeof(pair));
        return {Element::to_float(pair[0]), Element::to_float(pair[1])};
      });
    }
  }

  // Stores a tile of the own part.
  static PO_FN void finish(Shared& shared, const Call& call, Tile& tile, int part, const Block& block,
                           Slots::Turn& turn, ProductRowStore<Product>& rows, Carrier& carrier) {
    uint8_t* output = call.output + Traits::output_place(shared.plan.team, call, block);
    if constexpr (Traits::kReturns) shared.slots.sent[turn.slot()].await(turn.round() - 1);
    rows.store(tile, part, output, call.row_bytes, block.rows, block.columns);
    if constexpr (Traits::kReturns) {
      if (carrier.is_inline()) return carrier.send_result(block);
      hand_over(shared.slots.staged[turn.slot()]);  // @result-stored
      turn.advance();
    }
  }
};

}  // namespace po::gemm_exchange
