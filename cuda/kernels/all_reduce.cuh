// All-reduce: every PE gets the sum of the PEs' tensors, plus bias and residual, and optionally the RMS norm of the
// sum's rows.
//
// Small tensors travel as packets, which need no credit and no separate flag: to every PE (one shot), or to a block's
// owner and back (two shots). Areas of packets alternate with the epoch's parity, and warps work independently
// (packet_reduce). Large tensors travel as slices of packets, each to its owner and back, in places that many of them
// use: with credit, and with words that say which places are empty (slice_reduce). The last warp of a WG counts the WG,
// so that the epoch closes early; in the last WG it also grants this PE's credit. With packets it awaits the peers'
// credit there, and has no blocks; with slices it awaits credit and words in every WG. Each PE computes
// the norm itself: warps leave the squares of their blocks to each other (block_output). Elements are added in fp32 in
// rank order, then bias, then residual, and rounded once.
//
// This file has a launch's arguments and the division of work. kernels/all_reduce/ has the rest; kernels/all_reduce.md
// explains the protocol.
#pragma once

#include "comm/call_number.cuh"
#include "comm/launch.cuh"
#include "kernels/all_reduce/block_output.cuh"
#include "kernels/all_reduce/packet_reduce.cuh"
#include "kernels/all_reduce/slice_reduce.cuh"
#include "platform/entry.cuh"
#include "sched/divisor.cuh"
#include "sched/row_blocks.cuh"

namespace po::all_reduce {

struct Config {
  DType scalar = DType::kBFloat16;
  Algorithm algorithm = Algorithm::kOneShot;
  bool norms = false;   // whether the call has a weight
  bool aligned = true;  // all rows of all tensors begin at multiples of 16 bytes
  int vectors = 1;      // blocks of a warp in flight together, 1 or 2: more would take registers and code
  int threads = 128;
  int pes = kPeStep;  // a multiple of kPeStep, at least the team's size
};

inline constexpr int kMaxSharingThreads = 256;  // of a WG of packets: two such WGs fit an SM

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  static constexpr Algorithm kAlgorithm = kConfig.algorithm;
  static constexpr bool kNorms = kConfig.norms;
  static constexpr int kVectors = kConfig.vectors;
  static constexpr int kThreads = kConfig.threads;
  static constexpr bool kSendsPackets = kAlgorithm != Algorithm::kSlices;
  using Block = RowBlock<Scalar, kConfig.aligned, kSendsPackets>;  // slices take all registers
  // The SM is shared with the successor, which begins when this launch lets it in. Larger WGs have too many registers.
  static constexpr bool kSharesSm = kSendsPackets && kThreads <= kMaxSharingThreads;
  // There may be more blocks than warps. Then only one warp of a launch, the one that awaits credit, has no blocks.
  static constexpr bool kLastWarpsReduce = kSendsPackets && !kSharesSm;
  // Senders whose elements are loaded together.
  static constexpr int kSendersAtOnce = 4;
};

struct Plan {
  Team team;
  // Offsets are the same in every PE's heap.
  uint64_t sums_offset;      // BarePacket[2 parities][size senders][blocks that are added up there][kBlockChunks]
  uint64_t sums_bytes;       // of one parity
  uint64_t flags_offset;     // uint64_t[2 parities][size senders][as many blocks]: the launch of each block
  uint64_t flags_bytes;      // of one parity
  uint64_t results_offset;   // BarePacket[2 parities][num_blocks][kBlockChunks]
  uint64_t results_bytes;    // of one parity
  int64_t blocks_per_adder;  // from one sender, added up at one PE
  uint64_t copies_offset;    // BarePacket[elements, results][num_blocks][kBlockChunks]: the sources of puts
  // Slices of packets, one per WG: BarePacket[kPlaces][size][WGs][workers][kBlockChunks].
  uint64_t slices_offset;    // from a sender, to this PE as the owner
  uint64_t returned_offset;  // from an owner, the results
  uint64_t staging_offset;   // the sources of puts: elements for a PE, results as this PE's; never empty
  uint64_t turns_offset;     // uint64_t[size][kMaxSliceWgs]: turns that a peer's WG has ended
  Packet* squares;           // [num_blocks], private to the PE
  Divisor size;              // of the team, to divide by
  Divisor num_wgs;
  int64_t all_reachable;
};
PO_DESCRIBE(Plan, team, sums_offset, sums_bytes, flags_offset, flags_bytes, results_offset, results_bytes,
            blocks_per_adder, copies_offset, slices_offset, returned_offset, staging_offset, turns_offset, squares,
            size, num_wgs, all_reachable)

struct Call {
  const uint8_t* x;
  const uint8_t* residual;  // null: none; may be an output, like x
  const uint8_t* bias;      // null: none
  uint8_t* output;
  const uint8_t* weight;  // null: no norm
  uint8_t* norm_output;
  const float* scale;  // null: the norm has the scalar's type; otherwise it is float8_e4m3fn, divided by this scale
  float eps;
  float weight_bias;
  RowBlocks rows;           // of this launch
  const LocalState* local;  // the team's; `begin` needs it before the plan is there
  uint64_t forward_pass;    // the number of the forward pass whose gradients are added up, or 0
};
PO_DESCRIBE(Call, x, residual, bias, output, weight, norm_output, scale, eps, weight_bias, rows, local, forward_pass)

// Follows the launch's other fields in the plan's memory.
template <int kPes>
struct PlanWithHeaps : Plan {
  uint64_t heaps[kPes];  // Team.peer_heaps; null where not reachable
};

template <int kPes>
struct Shared {
  PlanWithHeaps<kPes> plan;
  uint64_t takes_part;  // 0: an earlier launch was aborted, so this one takes part in nothing
  Turns turns;          // of slices
};

template <Config kConfig>
struct Kernel {
  using Traits = all_reduce::Traits<kConfig>;
  using Plan = all_reduce::PlanWithHeaps<kConfig.pes>;
  using Call = all_reduce::Call;
  using Shared = all_reduce::Shared<kConfig.pes>;
  using Block = typename Traits::Block;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kSharesSm ? 2 : 1;
  static_assert(sizeof(Plan) / sizeof(uint64_t) <= kThreads || kConfig.pes != kPeStep,
                "the plan comes with one load of each thread");
  static_assert(Traits::kVectors <= 2, "what a warp takes together lies in equal distances");

  struct Begun {
    typename Block::Chunks held;  // of this warp's first block
    uint64_t last_epoch;          // both from the WG's first thread
    uint64_t aborted;
  };

  // Loads the elements and the epoch together with the plan, since they take longest to come.
  static PO_FN Begun begin(const WorkGroup& wg, const Call& call) {
    await_predecessor();
    Begun begun = {};
    const Worker worker = worker_of(wg);
    if constexpr (Traits::kSendsPackets) {
      if (reduces(wg) && worker.number < call.rows.num_blocks) {
        begun.held = Block::load_block(call.x, call.rows, Warp(), worker.number);
      }
    }
    if (wg.rank() == 0) {
      begun.last_epoch = flag_load_relaxed_sys(&call.local->epoch);
      begun.aborted = flag_load_relaxed_sys(&call.local->abort);
    }
    return begun;
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, const Begun& begun) {
    if (wg.rank() == 0) {
      shared.plan.team.epoch = begun.last_epoch + 1;
      name_call(shared.plan.team, call.forward_pass);  // @sum-named
      shared.takes_part = takes_part(shared.plan.team, begun.aborted);
      if constexpr (!Traits::kSendsPackets) shared.turns.start(wg);
    }
    wg.sync();  // @epoch-known
    if constexpr (Traits::kSharesSm) release_successor();
    if (serves(wg)) {
      if (keeps_credits(wg)) grant_credit(shared.plan.team, Warp(), 0);
      if constexpr (Traits::kSendsPackets && !Traits::kLastWarpsReduce) count_out(wg, shared);
    }
    if constexpr (Traits::kSendsPackets) {
      exchange_packets(wg, shared, call, begun);
    } else {
      SliceReduce<Traits, Plan, Call>(shared.plan, call, wg, shared.takes_part != 0, shared.turns).run([&] {
        count_out(wg, shared);
      });
    }
  }

 private:
  // The last warp of a WG serves. With packets it has no blocks, if there are enough warps or if it awaits credits; a
  // lone warp (host) has blocks too.
  static PO_FN bool serves(const WorkGroup& wg) { return wg.warp_index() == wg.num_warps() - 1; }
  static PO_FN bool keeps_credits(const WorkGroup& wg) { return wg.index() == wg.count() - 1; }
  static PO_FN bool reduces(const WorkGroup& wg) {
    return wg.num_warps() == 1 || !serves(wg) || (Traits::kLastWarpsReduce && !keeps_credits(wg));
  }

  // Workers are numbered along the WGs first, so that a small number of blocks spreads over many SMs.
  static PO_FN Worker worker_of(const WorkGroup& wg) {
    const int idle = wg.num_warps() == 1 ? 0 : Traits::kLastWarpsReduce ? 1 : wg.count();
    return {wg.warp_index() * wg.count() + wg.index(), wg.num_warps() * wg.count() - idle};
  }

  // Counts this WG, all threads of which know the epoch.
  static PO_FN void count_out(const WorkGroup& wg, const Shared& shared) {
    if (Warp().rank() == 0) close_epoch(shared.plan.team, wg);
  }

  static PO_FN void exchange_packets(const WorkGroup& wg, const Shared& shared, const Call& call, const Begun& begun) {
    const auto serve = [&] {
      if (!serves(wg)) return;
      if constexpr (Traits::kLastWarpsReduce) count_out(wg, shared);
      if (keeps_credits(wg)) await_all_credits(shared.plan.team, Warp());  // @packets-credits
    };
    if (!reduces(wg)) return serve();
    // A warp that both serves and has blocks serves after it has sent and before it waits, so that neither delays
    // others.
    PacketReduce<Traits, Plan, Call>(shared.plan, call, worker_of(wg), shared.takes_part != 0).run(begun.held, [&] {
      if constexpr (kDoesBoth) serve();
    });
  }
  static constexpr bool kDoesBoth = Traits::kLastWarpsReduce || kThreads == kWarpSize || kWarpSize == 1;
};

}  // namespace po::all_reduce
