// A tile's sums over the PEs: those of this PE are in registers, those of the peers in its heap.
//
// Peers' sums are loaded ahead, the first ones while the last products of the tile are under way.
#pragma once

#include "kernels/gemm_exchange/carrier.cuh"

namespace po::gemm_exchange {

template <class Traits>
class PartialSums {
  using Tile = typename Traits::Tile;
  using Wire = typename Traits::Wire;
  using Vectors = Eight<Wire>;
  // Vectors that are added together, and how many times as many are loaded ahead. More would not fit the registers.
  static constexpr bool kHasRoom = Tile::kRows * Tile::kColumns <= 128 * 256;
  static constexpr int kTogether = 32 / static_cast<int>(sizeof(Vectors));
  static constexpr int kAhead = sizeof(Vectors) == 32 ? 1 : kHasRoom ? 4 : 2;

 public:
  PO_FN explicit PartialSums(const Shared& shared)
      : shared_(shared), plan_(shared.plan), rank_(plan_.team.rank), size_(plan_.team.size) {}

  // Starts to load the peers' sums of a block, if they have come; awaits them if `must`.
  PO_FN void begin(const Tile& tile, int part, const Block& block, const Slots::Turn& turn, Carrier<Traits>& carrier,
                   bool must) {
    const Handover& there = shared_.slots.there[turn.slot()];
    if (has_begun_) {
      has_begun_ = !must;
      return;
    }
    if (!must) {
      if (carrier.is_inline()) return;
      if (warp_.count(there.is_over(turn.round())) != warp_.size()) return;
      has_begun_ = true;
    }
    if (carrier.is_inline()) {
      carrier.await_partials(block);
    } else {
      there.await(turn.round());  // @partials-there
    }
    is_missing_ = flag_load_relaxed_wg(&shared_.is_missing) != 0;  // @partials-left-out
    if (is_missing_ || size_ == 1) return;
    first_ = sums_of(first_peer(), tile, part, block);
    PO_UNROLL
    for (int i = 0; i < kAhead; ++i) load(tile, part, first_, i * kTogether, held_[i]);
  }

  // Adds them, in rank order, to this PE's sums, which are rounded as theirs are.
  PO_FN void add(Tile& tile, int part, const Block& block, Slots::Turn& turn, const Carrier<Traits>& carrier) {
    if (!is_missing_) {
      tile.template for_each_eight<kTogether>(part, [&](int first, int count, float (&sums)[kTogether][8]) {
        Vectors own[kTogether];
        PO_UNROLL
        for (int j = 0; j < count; ++j) {
          own[j] = rounded_eight<Wire>(sums[j]);
          set_eight<Wire>(sums[j], own[j]);
        }
        if (size_ == 1) return;
        Vectors(&held)[kTogether] = held_[first / kTogether % kAhead];
        // Two PEs' sums may be added in either order.
        PO_UNROLL
        for (int j = 0; j < count; ++j) {
          if (rank_ <= 1) {
            add_eight<Wire>(sums[j], held[j]);
          } else {
            set_eight<Wire>(sums[j], held[j]);
          }
        }
        load(tile, part, first_, first + kAhead * kTogether, held);
        PO_NO_UNROLL
        for (int pe = rank_ <= 1 ? 2 : 1; pe < size_; ++pe) {
          if (pe == rank_) {
            PO_UNROLL
            for (int j = 0; j < count; ++j) add_eight<Wire>(sums[j], own[j]);
            continue;
          }
          Vectors others[kTogether];
          load(tile, part, sums_of(pe, tile, part, block), first, others);
          PO_UNROLL
          for (int j = 0; j < count; ++j) add_eight<Wire>(sums[j], others[j]);
        }
      });
    }
    if (carrier.is_inline()) return;
    hand_over(const_cast<Shared&>(shared_).slots.taken[turn.slot()]);
    turn.advance();
  }

 private:
  PO_FN int first_peer() const { return rank_ == 0 ? 1 : 0; }

  // Where a peer's sums for this thread begin.
  PO_FN const uint8_t* sums_of(int pe, const Tile& tile, int part, const Block& block) const {
    return plan_.team.heap + Traits::partial_offset(plan_, pe, rank_, block) +
           tile.place_of_first_eight(part) * static_cast<int>(sizeof(typename Wire::Storage));
  }

  PO_FN void load(const Tile& tile, int part, const uint8_t* sums, int first, Vectors (&vectors)[kTogether]) const {
    PO_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (first + j >= tile.num_eights(part)) continue;
      const int way = tile.way_to_eight(first + j) * static_cast<int>(sizeof(typename Wire::Storage));
      vectors[j] = load_shared_vector<sizeof(Vectors)>(sums + way);
    }
  }

  const Shared& shared_;
  const Plan& plan_;
  const int rank_, size_;
  const Warp warp_{};
  bool has_begun_ = false;  // before the end of the tile
  bool is_missing_ = false;
  const uint8_t* first_ = nullptr;  // the first peer's sums for this thread
  Vectors held_[kAhead][kTogether];
};

}  // namespace po::gemm_exchange
