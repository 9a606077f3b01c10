// GEMM and an exchange of its result between the PEs, in one launch: all-to-all, reduce-scatter or all-reduce.
//
// The rows of the product a @ b are in parts, one for each PE. A WG makes tiles of the peers' parts first, then tiles of
// its own PE's part, unless the links cannot keep up (`ProductRows::lag`). Warps that multiply never wait for a peer. Other warps, the carriers, send what these have staged in
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

  struct Begun {
    ProductLoader<Product> loader;
    uint64_t last_epoch;  // from the WG's first thread
  };

  // Brings the first tiles before the plan is there.
  static PO_FN Begun begin(const WorkGroup& wg, const Call& call) {
    if (wg.rank() == 0) {
      prefetch_map(call.product.a);
      prefetch_map(call.product.b);
    }
    Product::start(wg);
    release_successor();
    await_predecessor();
    Begun begun{ProductLoader<Product>(wg, call.product), 0};
    if (wg.rank() == 0) begun.last_epoch = flag_load_relaxed_sys(&call.local->epoch);
    if (Product::loads(wg) && wg.size() > 1) {
      for (int stage = 0; stage < Product::kStages; ++stage) begun.loader.load(no_gate);
    }
    return begun;
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, Begun& begun) {
    if (wg.rank() == 0) {
      shared.plan.team.epoch = begun.last_epoch + 1;
      shared.slots.start(Tile::num_warps(wg));
      shared.is_missing = 0;
    }
    wg.sync();  // @exchange-epoch-known
    Carrier carrier(wg, shared, call);
    if (wg.warp_index() < Tile::num_warps(wg)) {
      Tile::take_room();
      multiply(wg, shared, call, begun.loader, carrier);
    } else {
      Tile::leave_room();
      if (carrier.carries()) {
        carrier.run();
      } else {
        while (Product::loads(wg) && begun.loader.load(no_gate)) {
        }
      }
    }
    if constexpr (Cluster::kSize > 1) Cluster(wg).meet();  // a neighbor may still bring tiles here
    wg.sync();                                             // @exchange-done
    if (flag_load_relaxed_wg(&shared.is_missing) != 0) poison_share(wg, shared, call);  // @exchange-poison
  }

 private:
  static PO_FN void no_gate(ProductTiles::Place) {}

  // Fills with NaN what this WG stores, and what the same WG of each peer stores here.
  static PO_FN void poison_share(const WorkGroup& wg, const Shared& shared, const Call& call) {
    const int rank = shared.plan.team.rank, size = shared.plan.team.size;
    const ProductTiles& tiles = call.product.tiles;
    for (int pe = 0; pe < size; ++pe) {
      for (ProductPosition<Product> at(wg, tiles); !at.is_over(tiles); at.skip_tile()) {
        const Block block = Traits::block_of(call, at, (pe + 1) % size);
        if (block.rows <= 0 || block.pe != (Traits::kReturns ? pe : rank)) continue;
        if (!Traits::kSendsRows && pe != rank) continue;
        uint8_t* output = call.output + Traits::output_place(pe, call, block);
        const int columns = min_of(block.columns, Tile::kFinishedColumns);
        for (int row = 0; row < block.rows; ++row) {
          poison(wg, reinterpret_cast<uint16_t*>(output + row * call.row_bytes), columns);
        }
      }
    }
  }

  static PO_FN void multiply(const WorkGroup& wg, Shared& shared, const Call& call,
                             [[maybe_unused]] ProductLoader<Product>& loader, Carrier& carrier) {
    const int rank = shared.plan.team.rank;
    if (carrier.is_inline()) carrier.begin();
    ProductAdder<Product> adder(wg, call.product);
    ProductRowStore<Product> rows(wg);
    PartialSums<Traits> partials(shared);
    Slots::Turn sent, received;
    while (!adder.is_over()) {
      const Block block = Traits::block_of(call, adder.position());
      const bool is_last = adder.position().is_last(call.product.tiles);
      const TaskTrace trace(block.pe != rank);
      const bool is_added = Traits::kAdds && block.pe == rank && block.rows > 0;
      adder.add_up(
          [&] {
            if constexpr (!PO_ON_DEVICE) {
              if (wg.size() == 1) loader.load(no_gate);
            }
          },
          [&](bool is_last_step) {
            if (is_added) partials.begin(adder.tile(), adder.part(), block, received, carrier, is_last_step);
          });
      if (block.rows <= 0) continue;
      Tile& tile = adder.tile();
      if (block.pe != rank) {
        const bool is_direct = is_last && received.is_first() && !carrier.is_inline();
        stage(shared, call, tile, adder.part(), block, is_direct, sent, rows, carrier);
      } else {
        if constexpr (Traits::kAdds) {
          partials.add(tile, adder.part(), block, received, carrier);
          add_epilogue(shared, call, tile, adder.part(), block);
        }
        finish(shared, call, tile, adder.part(), block, sent, rows, carrier);
      }
    }
    if (carrier.is_inline()) carrier.end();
  }

  // Leaves a tile of a peer's part to the carriers. With `is_direct` it is stored to the peer at once.
  static PO_FN void stage(Shared& shared, const Call& call, Tile& tile, int part, const Block& block, bool is_direct,
                          Slots::Turn& turn, ProductRowStore<Product>& rows, Carrier& carrier) {
    uint8_t* place = Traits::slot(shared.plan, carrier.wg(), turn.slot());
    if (is_direct) {
      shared.slots.there[0].await(0);  // @peer-opened
      place = shared.peer_place;
    } else {
      shared.slots.sent[turn.slot()].await(turn.round() - 1);  // @tile-slot: at first all are
    }
    if (place == nullptr) {
      // The launch has been given up.
    } else if constexpr (Traits::kAdds) {
      constexpr int64_t kBytes = sizeof(typename Wire::Storage);
      place += tile.place_of_first_eight(part) * kBytes;
      tile.template for_each_eight<1>(part, [&](int i, int, const float (&values)[1][8]) {
        if (tile.row_of_eight(part, i) >= block.rows) return;
        const Eight<Wire> eight = rounded_eight<Wire>(values[0]);
        store_vector<sizeof(eight)>(place + tile.way_to_eight(i) * kBytes, eight);
      });
    } else {
      rows.store(tile, part, place, is_direct ? call.row_bytes : Traits::kSlotRowBytes, block.rows, block.columns);
    }
    if (carrier.is_inline()) return carrier.send(block, Traits::slot(shared.plan, carrier.wg(), turn.slot()));
    hand_over(shared.slots.staged[turn.slot()]);  // @tile-staged
    turn.advance();
  }

  // Adds bias and residual to sums of the own part.
  static PO_FN void add_epilogue(const Shared& shared, const Call& call, Tile& tile, int part, const Block& block) {
    if constexpr (kConfig.is_mean) {
      tile.template for_each_eight<1>(part, [&](int, int, float (&values)[1][8]) {
        PO_UNROLL
        for (float& value : values[0]) value = rounded_product(value, call.scale);
      });
    }
    if constexpr (kConfig.bias) {
      const auto* bias = reinterpret_cast<const typename Element::Storage*>(call.bias);
      const int first = block.column - Tile::first_column(part);
      tile.add_to_columns(
          [&](int column) { return first + column < call.columns ? Element::to_float(bias[first + column]) : 0.0f; });
    }
    if constexpr (kConfig.residual) {
      const uint8_t* residual = call.residual + Traits::output_place(shared.plan.team.rank, call, block);
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
    uint8_t* output = call.output + Traits::output_place(shared.plan.team.rank, call, block);
    if constexpr (Traits::kReturns) shared.slots.sent[turn.slot()].await(turn.round() - 1);
    rows.store(tile, part, output, call.row_bytes, block.rows, block.columns);  // @result-store
    if constexpr (Traits::kReturns) {
      if (carrier.is_inline()) return carrier.send_result(block);
      hand_over(shared.slots.staged[turn.slot()]);  // @result-stored
      turn.advance();
    }
  }
};

}  // namespace po::gemm_exchange
