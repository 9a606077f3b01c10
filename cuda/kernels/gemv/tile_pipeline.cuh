// The way of a WG's tiles through its warps. A team of warps multiplies a tile, and each of its warps leaves a part of
// the sums in the tile's slot. A serving warp adds the parts up, sends the sums and frees the slot.
//
// The only waits are the two handovers of a slot (kernels/gemv_all_reduce.md, rows 1 and 2). A lone warp (host) does
// everything in turn.
#pragma once

#include "platform/groups.cuh"
#include "sched/row_tiles.cuh"
#include "tile/weight_stream.cuh"

namespace po::gemv_all_reduce {

// The results of a team's warps for one tile: a part each.
template <int kVectors>
struct TileParts {
  float* slots;  // [Traits::kSlots][count][kVectors][kTileRows]
  int slot;
  int count;

  PO_FN float* part(int index) const { return slots + (slot * count + index) * (kVectors * kTileRows); }

  // Adds up the warps' parts of some values of the tile, in the warps' order.
  template <int kCount>
  PO_FN void add_up(int first_value, float (&sums)[kCount]) const {
    constexpr int kBatch = 4;  // parts that are loaded together
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) sums[i] = 0;
    for (int first = 0; first < count; first += kBatch) {
      float parts[kBatch][kCount];
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const float* values = part(min_of(first + i, count - 1)) + first_value;
        PO_UNROLL
        for (int j = 0; j < kCount; ++j) parts[i][j] = first + i < count ? values[j] : 0.0f;
      }
      PO_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        PO_UNROLL
        for (int j = 0; j < kCount; ++j) sums[j] += parts[i][j];
      }
    }
  }
};

template <class Traits>
class TilePipeline {
 public:
  using Share = WarpShare<typename Traits::Scalar>;
  using Stream = WeightStream<Traits>;
  using Vectors = typename Stream::VectorsOf;
  using Parts = TileParts<Traits::kVectors>;

  struct Shared {
    Handover stored[Traits::kSlots];  // from all warps of a team to the sending warp: their parts are in the slot
    Handover sent[Traits::kSlots];    // back to the team: the slot is free
  };

  PO_FN TilePipeline(const WorkGroup& wg, Shared& shared, const RowTiles& tiles, const Vectors& vectors)
      : wg_(wg),
        shared_(shared),
        tiles_(tiles),
        slots_(reinterpret_cast<float*>(vectors.own +
                                        vectors.own_bytes(share(wg, vectors.num_columns), vectors.num_columns))),
        share_(share(wg, vectors.num_columns)) {}

  // The last warps send and multiply nothing; the first of them also grants and awaits credit. A lone warp does
  // everything.
#if PO_ON_DEVICE
  static PO_FN int num_serving(const WorkGroup&) { return Traits::kServing; }
  static PO_FN int num_computing(const WorkGroup&) { return Traits::kComputing; }
#else
  static int num_serving(const WorkGroup& wg) { return min_of(Traits::kServing, max_of(wg.num_warps() - 1, 1)); }
  static int num_computing(const WorkGroup& wg) { return max_of(wg.num_warps() - num_serving(wg), 1); }
#endif
  // 0 is the first serving warp; below 0, the warp multiplies.
  static PO_FN int serving_index(const WorkGroup& wg) {
    return wg.num_warps() == 1 ? 0 : wg.warp_index() - num_computing(wg);
  }
  static PO_FN Share share(const WorkGroup& wg, int num_columns) {
    return Share::of_warp(num_columns, wg.warp_index(), num_computing(wg));
  }

  // The arena: the ring of the weights, the vectors, and the warps' parts.
  static PO_FN int ring_bytes(const WorkGroup& wg) { return num_computing(wg) * Stream::kBytesPerWarp; }

  // A sync must follow. Different warps start handovers: the threads of one warp would start theirs one after the
  // other.
  PO_FN void start_handovers() {
    for (int i = wg_.warp_index(); i < Traits::kSlots && Warp().rank() == 0; i += wg_.num_warps()) {
      shared_.stored[i].start(share_.num_parts);
      shared_.sent[i].start(1);
    }
  }

  // Multiplies all tiles of the WG and sends each, by exchange.send(exchange.prepare(tile, warp), parts, warp), as soon
  // as its team of warps has stored all parts of it. The teams wait only for slots to be free again. `is_first_busy`:
  // the other serving warps, if there are any, take the turns of the first one. `in_step`: see WeightStream.
  template <class Exchange, class InStep>
  PO_FN void run(Stream& stream, const Exchange& exchange, bool is_first_busy, const InStep& in_step) {
    const Warp warp;
    const bool serves = serving_index(wg_) >= 0;
    const bool computes = share_.team < share_.num_teams && wg_.warp_index() < num_computing(wg_);
    const Turn turn = this->turn(is_first_busy);
    if (computes) stream.await_vectors();
    for (int position = turn.first; position < tiles_.count; position += turn.num) {
      const int slot = position % Traits::kSlots;
      const auto round = static_cast<uint32_t>(position / Traits::kSlots);
      if (computes) {
        const TaskTrace trace(exchange.has_peers());
        const auto sums = stream.multiply(in_step);
        if (round != 0) shared_.sent[slot].await(round - 1);
        sums.store(parts_of(slot).part(share_.part));
        warp.sync();
        if (warp.rank() == 0) shared_.stored[slot].arrive();
      }
      if (serves) {
        const auto outgoing = exchange.prepare(tiles_.tile_at(position), warp);
        shared_.stored[slot].await(round);              // @parts-await
        exchange.send(outgoing, parts_of(slot), warp);  // @parts-send
        warp.sync();
        if (warp.rank() == 0) shared_.sent[slot].arrive();  // @slot-free
      }
    }
  }

 private:
  // The tiles that a warp sees: every num-th from the first one on.
  struct Turn {
    int first;
    int num;
  };

  // A multiplying warp goes from tile to tile of its team, a serving warp takes its share of all tiles, a lone warp all
  // of them.
  PO_FN Turn turn(bool is_first_busy) const {
    const int served = serving_index(wg_);
    if (served < 0) return {share_.team, share_.num_teams};
    const int num = num_serving(wg_);
    if (!is_first_busy || num == 1) return {served, num};
    return {served == 0 ? tiles_.count : served - 1, num - 1};
  }

  PO_FN Parts parts_of(int slot) const { return {slots_, slot, share_.num_parts}; }

  const WorkGroup& wg_;
  Shared& shared_;
  const RowTiles tiles_;
  float* const slots_;
  const Share share_;
};

}  // namespace po::gemv_all_reduce
