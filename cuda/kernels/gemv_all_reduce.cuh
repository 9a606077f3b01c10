// GEMV + AllReduce: y = sum over PEs of weight_r * x_r (+ bias, + residual), for 1 to 16 vectors, on every PE.
//
// A WG has the same tiles of rows on every PE. Teams of warps share a tile's columns; two more warps add the parts of a tile
// up as soon as they are there and send it at once, as packets that carry data and flag together: to every PE, itself too
// (one shot), or to the tile's owner (two phases), which adds the PEs' sums up in rank order and sends every PE the
// rounded result. In the end each WG waits for the packets of its own tiles. Nobody waits for credit: areas of packets
// take turns by the epoch's parity, and a PE is in launch e + 1 only when all have ended e - 1 (cuda/DESIGN.md).
//
// Here is what a launch is given and who does what in it. kernels/gemv/ has the three stories: how the tiles pass through a
// WG's warps (tile_pipeline), how the PEs' sums meet (packet_exchange), and what becomes of them (tile_output).
#pragma once

#include "comm/launch.cuh"
#include "kernels/gemv/packet_exchange.cuh"
#include "kernels/gemv/tile_output.cuh"
#include "kernels/gemv/tile_pipeline.cuh"
#include "platform/entry.cuh"
#include "sched/row_tiles.cuh"
#include "sched/succession.cuh"
#include "tile/weight_stream.cuh"

#ifndef PO_SCALAR
#define PO_SCALAR BFloat16
#define PO_SUM_SCALAR Float32
#define PO_VECTORS 1
#define PO_DEPTH 8
#define PO_ALIGNED true
#define PO_RESIDENT true
#define PO_TWO_PHASE false
#define PO_PREFETCHES false
#define PO_LETS_IN kAtOnce
#define PO_WARPS 8
#endif
namespace po::gemv_all_reduce {

struct Config {
  using Scalar = PO_SCALAR;         // of weight, vectors, bias, residual and result
  using SumScalar = PO_SUM_SCALAR;  // of the partial sums as they travel
  static constexpr int kVectors = PO_VECTORS;
  static constexpr bool kAligned = PO_ALIGNED;    // all rows begin at multiples of 16 bytes
  static constexpr bool kResident = PO_RESIDENT;  // the vectors find room in a WG's own memory
  static constexpr int kDepth = PO_DEPTH;         // steps of the weights that a warp asks for ahead
  static constexpr bool kTwoPhase = PO_TWO_PHASE;
  static constexpr int kSumsPerPacket = 8 / static_cast<int>(sizeof(SumScalar::Storage));
  // Results that one thread finishes: what one packet brings, or, where a packet carries them on, what fills one.
  static constexpr int kItem = kTwoPhase ? 8 / static_cast<int>(sizeof(Scalar::Storage)) : kSumsPerPacket;
  static constexpr int kComputing = PO_WARPS;
  static constexpr int kServing = 2;  // warps of a WG that send; kSlots is a multiple, so a slot always meets the same
  static constexpr int kPacketsPerItem = kItem / kSumsPerPacket;
  static constexpr int kItemsPerVector = kTileRows / kItem;  // of a tile
  static constexpr bool kPrefetches = PO_PREFETCHES;         // asks for weights before the kernel before it has ended
  static constexpr LetsIn kLetsIn = LetsIn::PO_LETS_IN;      // its successor
  static constexpr bool kSharesSm =
      kResident && (kVectors == 1 || (kPrefetches && kVectors <= 8));  // with its successor
  // Fewer than 100 for a thread: two WGs share an SM, or one has more warps than four for each of its schedulers.
  static constexpr bool kHasFewRegisters = kSharesSm || kComputing + kServing > 16;
  // That a warp multiplies at once; like the next one, as many as there are registers for.
  static constexpr int kStepsAtOnce = kVectors > 1 && sizeof(typename Scalar::Storage) == 2 &&
                                              (kSharesSm ? !kTwoPhase : !kHasFewRegisters)
                                          ? 2
                                          : 1;
  // Senders whose packets are looked at together.
  static constexpr int kSendersAtOnce = kSharesSm          ? (kTwoPhase ? 2 : 8)
                                        : kHasFewRegisters ? (kTwoPhase ? 1 : 4)
                                                           : 8 / kPacketsPerItem;
  static constexpr int kSlots = kVectors == 1 ? 8 : 4;  // tiles of a WG that may be under way in its own memory
  static_assert(kSlots >= WarpShare<Scalar>::kMaxTeams && kSlots % kServing == 0,
                "with fewer slots a team would wait two rounds ahead, which a Handover does not allow");
  static_assert(kPacketsPerItem >= 1, "sums travel in fp32 or in the scalar's own type");
};

using Pipeline = TilePipeline<Config>;

struct Plan {
  Team team;
  OutputPlan output;
  PacketPlan packets;
  uint32_t* asked;  // WGs that have asked for all their weights; 0 when all have (sched/succession.cuh)
};

struct Call {
  const uint8_t* weight;
  const uint8_t* vectors;
  uint8_t* output;
  const uint8_t* residual;  // may be the output; null: none
  uint64_t shape;           // what `begin` has no plan for: see below

  PO_FN int num_rows() const { return static_cast<int>(shape & 0x1ffff); }
  PO_FN int rank() const { return static_cast<int>(shape >> 17 & 0x3f); }
  PO_FN int size() const { return static_cast<int>(shape >> 23 & 0x7f); }
  PO_FN int num_vectors() const { return static_cast<int>(shape >> 30 & 0xf) + 1; }
  PO_FN int num_columns() const { return static_cast<int>(shape >> 34); }
};

using Exchange = PacketExchange<Config, Call>;

struct Shared {
  Plan plan;
  Pipeline::Shared pipeline;
  Handover told;  // from the first serving warp to all: the epoch, and whether this PE takes part
  Exchange::Shared exchange;
};

struct Kernel {
  using Plan = gemv_all_reduce::Plan;
  using Call = gemv_all_reduce::Call;
  using Shared = gemv_all_reduce::Shared;
  static constexpr int kThreads = (Config::kComputing + Config::kServing) * 32;
  static constexpr int kBlocksPerSm = Config::kSharesSm ? 2 : 1;
  static constexpr size_t kHostArenaBytes = 64ull * Config::kSlots * Config::kVectors * kTileRows * sizeof(float);

  struct Begun {
    Pipeline::Vectors vectors;
    Pipeline::Stream stream;
  };

  // Neither vectors nor weights wait for the plan. A lone vector goes first: behind the weights it would wait for all that
  // are under way. Where weights are asked for before the predecessor has ended, which may still be making the vectors, they
  // go alone.
  static PO_FN Begun begin(const WorkGroup& wg, const Call& call) {
    static_assert(Config::kResident || !Config::kPrefetches, "a ring of vectors begins with that of the weights");
    const Pipeline::Vectors vectors{call.vectors, call.num_vectors(), call.num_columns(),
                                    wg.arena() + Pipeline::ring_bytes(wg)};
    if constexpr (Config::kPrefetches) {
      vectors.expect(wg, first_fetching(wg));
    } else {
      await_predecessor();
      vectors.fetch(wg, 0);
    }
    RowTiles tiles = tiles_of(wg, call);
    if (wg.warp_index() >= Pipeline::num_computing(wg)) tiles.count = 0;
    return {vectors, Pipeline::Stream({call.weight, call.num_rows(), call.num_columns()}, vectors, tiles,
                                      Pipeline::share(wg, call.num_columns()), wg.arena(), wg.warp_index())};
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, Begun& begun) {
    if constexpr (Config::kPrefetches) {
      // A lone vector is brought by some, and through it, or the sync below, the others know that it has ended.
      if (!Pipeline::Vectors::kComeAtOnce || wg.rank() >= first_fetching(wg)) {
        await_predecessor();
        begun.vectors.fetch(wg, first_fetching(wg));
        begun.stream.fetch_vectors();
      }
    }
    const Plan& plan = shared.plan;
    const RowTiles tiles = tiles_of(wg, call);
    Pipeline pipeline(wg, shared.pipeline, tiles, begun.vectors);
    Exchange exchange(wg, shared.exchange, plan.team, plan.packets, tiles, {plan.output, call}, call);
    pipeline.start_handovers();
    if (wg.rank() == 0) shared.told.start(1);
    begun.vectors.template await_copies<Pipeline::Stream::kStepsAhead>();
    wg.sync();
    if constexpr (Config::kLetsIn == LetsIn::kAtOnce) release_successor();
    const int served = Pipeline::serving_index(wg);
    if (served >= 0) open(wg, shared, served);
    Succession succession(plan.asked, wg, begun.stream.num_steps(), Pipeline::Stream::kStepsAhead);
    if constexpr (Config::kLetsIn == LetsIn::kLate) succession.begin(wg);
    pipeline.run(begun.stream, exchange, keeps_credits(wg), [&] {
      if constexpr (Config::kLetsIn == LetsIn::kLate) succession.step();
    });
    if (plan.team.size != 1) finish(wg, shared, exchange);  // in a world of one the serving warps have
    if constexpr (Config::kLetsIn == LetsIn::kLate) {
      if (wg.rank() == 0) succession.await_others();
    }
  }

 private:
  static PO_FN RowTiles tiles_of(const WorkGroup& wg, const Call& call) {
    return RowTiles::of_wg(wg.index(), wg.count(), ceil_div(call.num_rows(), kTileRows), call.rank(),
                           Config::kTwoPhase ? call.size() : 1);
  }

  // Where weights are prefetched, the threads that bring a lone vector.
  static PO_FN int first_fetching(const WorkGroup& wg) { return Pipeline::num_computing(wg) * kWarpSize; }

  // The last WG grants the PE's credit and awaits the others': where tiles do not come out even it has one less.
  static PO_FN bool keeps_credits(const WorkGroup& wg) { return wg.index() == wg.count() - 1; }

  // What is left when a warp has no more tiles.
  static PO_FN void finish(const WorkGroup& wg, Shared& shared, Exchange& exchange) {
    const Plan& plan = shared.plan;
    shared.told.await(0);
    if (Pipeline::serving_index(wg) == 0 && keeps_credits(wg)) await_all_credits(plan.team, Warp());
    exchange.receive();
    if (plan.packets.all_reachable == 0) put_quiet(plan.team);  // what was put is written again two epochs on
  }

  // The first serving warp tells the others the epoch, and in one WG it grants credit. The serving warps alone.
  static PO_FN void open(const WorkGroup& wg, Shared& shared, int served) {
    const Warp warp;
    Team& team = shared.plan.team;
    if (served != 0) return shared.told.await(0);
    const uint64_t aborted = flag_load_relaxed_sys(&team.local->abort);
    begin_launch(team, warp);
    if (warp.rank() == 0) {
      shared.exchange.takes_part = takes_part(team, aborted);
      shared.told.arrive();
    }
    warp.sync();
    if (keeps_credits(wg)) grant_credit(team, warp, 0);
    if (warp.rank() == 0) close_epoch(team, wg);
  }
};

}  // namespace po::gemv_all_reduce

PO_ENTRY(gemv_all_reduce, po::gemv_all_reduce::Kernel)
