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
  // Vectors that are loaded together; more would not fit the registers.
  static constexpr bool kHasRoom = Tile::kRows * Tile::kColumns <= 128 * 256 && sizeof(Vectors) == 16;
  static constexpr int kTogether = (kHasRoom ? 64 : 32) / static_cast<int>(sizeof(Vectors));

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
      if (carrier.is_inline() || warp_.count(there.is_over(turn.round())) != warp_.size()) return;
      has_begun_ = true;
    }
    if (carrier.is_inline()) {
      carrier.await_partials(block);
    } else {
      there.await(turn.round());  // @partials-there
    }
    is_missing_ = flag_load_relaxed_wg(&shared_.is_missing) != 0;
    first_ = plan_.team.heap + Traits::partial_offset(plan_, first_peer(), rank_, block);
    next_ = first_;
    next_pe_ = first_peer();
    next_eight_ = 0;
    if (is_missing_ || size_ == 1) return;
    load_next(tile, part, held_);
    load_next(tile, part, later_);
  }

  // Adds them, in rank order, to this PE's sums, which are rounded as theirs are.
  PO_FN void add(Tile& tile, int part, Slots::Turn& turn, const Carrier<Traits>& carrier) {
    if (!is_missing_) {
      tile.template for_each_eight<kTogether>(part, [&](int, int count, float (&sums)[kTogether][8]) {
        Vectors own[kTogether];
        PO_UNROLL
        for (int j = 0; j < count; ++j) own[j] = rounded_eight<Wire>(sums[j]);
        PO_UNROLL
        for (int j = 0; j < count; ++j) set_eight<Wire>(sums[j], own[j]);
        if (rank_ != 0) {
          PO_UNROLL
          for (int j = 0; j < count; ++j) set_eight<Wire>(sums[j], held_[j]);
          advance(tile, part);
        }
        PO_NO_UNROLL
        for (int pe = 1; pe < size_; ++pe) {
          if (pe == rank_) {
            PO_UNROLL
            for (int j = 0; j < count; ++j) add_eight<Wire>(sums[j], own[j]);
          } else {
            PO_UNROLL
            for (int j = 0; j < count; ++j) add_eight<Wire>(sums[j], held_[j]);
            advance(tile, part);
          }
        }
      });
    }
    if (carrier.is_inline()) return;
    hand_over(const_cast<Shared&>(shared_).slots.taken[turn.slot()]);
    turn.advance();
  }

 private:
  PO_FN int first_peer() const { return rank_ == 0 ? 1 : 0; }

  // Goes on to what is added next.
  PO_FN void advance(const Tile& tile, int part) {
    PO_UNROLL
    for (int j = 0; j < kTogether; ++j) held_[j] = later_[j];
    load_next(tile, part, later_);
  }

  // Loads what is added after what has been loaded before, if there is more.
  PO_FN void load_next(const Tile& tile, int part, Vectors (&vectors)[kTogether]) {
    const int last = tile.num_eights(part) - 1;
    if (next_eight_ > last) return;
    PO_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      const int place = tile.place_of_eight(part, min_of(next_eight_ + j, last));
      vectors[j] = load_shared_vector<sizeof(Vectors)>(next_ + place * sizeof(typename Wire::Storage));
    }
    next_ += plan_.blocks_per_part * Traits::kSlotBytes;
    if (++next_pe_ == rank_) ++next_pe_;
    if (next_pe_ < size_) return;
    next_pe_ = first_peer();
    next_ = first_;
    next_eight_ += kTogether;
  }

  const Shared& shared_;
  const Plan& plan_;
  const int rank_, size_;
  const Warp warp_{};
  bool has_begun_ = false;  // before the end of the tile
  bool is_missing_ = false;
  Vectors held_[kTogether], later_[kTogether];
  // What is loaded next.
  const uint8_t* first_ = nullptr;
  const uint8_t* next_ = nullptr;
  int next_pe_ = 0, next_eight_ = 0;
};

}  // namespace po::gemm_exchange
