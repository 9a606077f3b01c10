// Sends gradients to the owners of their tables.
#pragma once

#include "comm/credits.cuh"
#include "kernels/embedding_backward/plan.cuh"
#include "platform/streaming.cuh"

namespace po::embedding_backward {

// One of the warps that push.
template <class Traits>
class Pusher {
 public:
  using Storage = typename Traits::Wire::Storage;

  PO_FN Pusher(const Plan& plan, const Call& call) : plan_(plan), team_(plan.team), call_(call) {}

  // Takes pieces in turn. Some WGs begin while lookups are still being sorted, others after the sort.
  PO_FN void run() {
    // After a launch that was given up there may still be credit, from a PE that is ahead. One lane decides for the
    // warp.
    if (warp_.shuffle(is_aborted(team_), 0)) return;  // @pushes-unless-aborted
    const int64_t num_pieces = plan_.num_pushes * plan_.num_slices;
    int64_t piece = warp_.shuffle(ticket(), 0);
    PO_NO_UNROLL
    while (piece < num_pieces) {
      const TaskTrace trace(true);
      const int64_t next = ticket();  // fetched while this piece is copied
      const Piece at = piece_at(piece);
      const Push& push = plan_.pushes[at.push];
      if (!credits_.await(team_, warp_, static_cast<int>(push.owner))) break;  // @credit-before-pushes
      copy(push, at.slice);
      finish(push, plan_.pushed + at.push);
      piece = warp_.shuffle(next, 0);
    }
  }

 private:
  static constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Storage));  // of a chunk
  static constexpr int kChunksAtOnce = 4;

  // The next piece's number, in the first lane.
  PO_FN int64_t ticket() const {
    if (warp_.rank() != 0) return 0;
    return static_cast<int64_t>(atomic_fetch_add_relaxed_gpu(plan_.pushed + plan_.num_pushes, 1));
  }

  struct Piece {
    int64_t push;
    int64_t slice;
  };

  // Pieces of tables with the same number alternate, so that all their owners receive, whatever the progress of each
  // sender.
  PO_FN Piece piece_at(int64_t number) const {
    const Push& among = plan_.pushes[number / plan_.num_slices];
    const int64_t rest = number - among.first * plan_.num_slices;
    return {among.first + rest % among.count, rest / among.count};
  }

  PO_FN uint64_t row_bytes(const Push& push) const { return static_cast<uint64_t>(push.width) * sizeof(Storage); }
  // Offset of this PE's samples of a table, in the owner's staging.
  PO_FN uint64_t staged_offset(const Push& push) const {
    return plan_.staging_offset + push.staged_offset + static_cast<uint64_t>(plan_.first_sample) * row_bytes(push);
  }

  // A lane's way through a piece: every 32nd chunk, rows in turn.
  struct Place {
    int row;
    int chunk;
  };

  PO_FN void copy(const Push& push, int64_t slice) const {
    const int64_t first = slice * plan_.slice_samples;
    const int count = static_cast<int>(min_of(plan_.slice_samples, plan_.num_samples - first));
    const auto owner = static_cast<int>(push.owner);
    uint8_t* target = is_reachable(team_, owner) ? peer_address(team_, owner, staged_offset(push))
                                                 : team_.heap + push.outgoing_offset;
    const int width = static_cast<int>(push.width);
    const int per_row = ceil_div(width, kElements);
    const Place stride{warp_.size() / per_row, warp_.size() % per_row};
    Place at{warp_.rank() / per_row, warp_.rank() % per_row};
    PO_NO_UNROLL
    while (at.row < count) {
      Vector<kChunkBytes> chunks[kChunksAtOnce];
      Place places[kChunksAtOnce];
      PO_UNROLL
      for (int i = 0; i < kChunksAtOnce; ++i) {
        places[i] = at;
        if (at.row < count) {
          const int64_t source = (first + at.row) * call_.gradient_stride + push.column + at.chunk * kElements;
          chunks[i] = load_once<Storage, Traits::kIsAligned>(call_.gradient, source, width - at.chunk * kElements);
        }
        at.row += stride.row;
        at.chunk += stride.chunk;
        if (at.chunk >= per_row) {
          at.chunk -= per_row;
          ++at.row;
        }
      }
      PO_UNROLL
      for (int i = 0; i < kChunksAtOnce; ++i) {
        if (places[i].row >= count) continue;
        const int64_t element = (first + places[i].row) * push.width + places[i].chunk * kElements;
        store_chunk<Storage, Traits::kIsAligned>(target, element, width - places[i].chunk * kElements, chunks[i]);
      }
    }
  }

  // Counts a piece. The warp that brings the last piece signals the owner.
  PO_FN void finish(const Push& push, uint64_t* pushed) {
    // @pieces-of-lanes
    warp_.sync();  // orders the pieces of all lanes before the count
    if (warp_.rank() != 0) return;
    if (atomic_add_fetch_acq_rel_gpu(pushed, 1) != static_cast<uint64_t>(plan_.num_slices)) return;  // @table-pushed
    *pushed = 0;
    const auto owner = static_cast<int>(push.owner);
    if (!is_reachable(team_, owner)) {
      fence_acq_rel_sys();  // publishes what all warps have copied, acquired through the count, to the network
    }
    const uint64_t word = ready_word_offset(team_, team_.rank, static_cast<uint64_t>(push.table));
    put_signal(team_, owner, staged_offset(push), team_.heap + push.outgoing_offset,
               static_cast<uint64_t>(plan_.num_samples) * row_bytes(push), word, launch_flag(team_));
  }

  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Warp warp_{};
  Credits credits_;
};

// Whether a WG after the first ones pushes too. With few lookups per pushed byte, rows are done early and wait for
// gradients.
PO_FN bool pushes_behind_sort(const Plan& plan, int64_t num_lookups, int wg) {
  return wg * num_lookups < plan.pushing_wg_lookups;
}

}  // namespace po::embedding_backward
