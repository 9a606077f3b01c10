// GEMV + AllReduce: every PE gets y = sum over PEs of weight_r * x_r (+ bias, + residual), for 1 to 16 vectors.
//
// A WG has the same tiles of rows on every PE. Teams of warps share a tile's columns. Two more warps add the parts of a
// tile up as soon as they are there and send the sums at once, as packets that carry data and flag together. Packets go
// to every PE, this one included (one shot), or to the tile's owner (two shots), which adds the PEs' sums up in rank
// order and sends every PE the rounded result. In the end each WG waits for the packets of its own tiles. No WG waits
// for credit on its way: areas of packets alternate with the epoch's parity, and a PE is in launch e + 1 only when all
// PEs have ended e - 1 (cuda/DESIGN.md, "Packets").
//
// This file has a launch's arguments and the division of work. kernels/gemv/ has the three stages: tiles pass through a
// WG's warps (tile_pipeline), the PEs' sums meet (packet_exchange), and sums become results (tile_output).
#pragma once

#include "comm/launch.cuh"
#include "kernels/gemv/geometry.cuh"
#include "kernels/gemv/packet_exchange.cuh"
#include "kernels/gemv/tile_output.cuh"
#include "kernels/gemv/tile_pipeline.cuh"
#include "platform/entry.cuh"
#include "sched/row_tiles.cuh"
#include "sched/succession.cuh"
#include "tile/weight_stream.cuh"

namespace po::gemv_all_reduce {

struct Config {
  DType scalar = DType::kBFloat16;     // of weight, vectors, bias, residual and result
  DType sum_scalar = DType::kFloat32;  // of the partial sums in packets
  int vectors = 1;                     // 1, 8 or 16
  int depth = 8;                       // steps of the weights that a warp loads ahead
  int warps = 8;                       // that multiply
  bool aligned = true;                 // all rows begin at multiples of 16 bytes
  bool resident = true;                // the vectors find room in shared memory
  bool two_shot = false;
  bool prefetches = false;  // loads weights before the previous kernel has ended
  LetsIn lets_in = LetsIn::kAtOnce;
  int pes = kPeStep;  // a multiple of kPeStep, at least the team's size
};

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  using SumScalar = ScalarOf<kConfig.sum_scalar>;
  static constexpr int kVectors = kConfig.vectors;
  static constexpr bool kAligned = kConfig.aligned;
  static constexpr bool kResident = kConfig.resident;
  static constexpr int kDepth = kConfig.depth;
  static constexpr bool kTwoShot = kConfig.two_shot;
  static constexpr int kPes = kConfig.pes;
  static constexpr int kSumsPerPacket = 8 / static_cast<int>(sizeof(typename SumScalar::Storage));
  // Results that one thread finishes: as many as one packet brings, or, if a packet carries results on, as many as fill
  // one.
  static constexpr int kItem = kTwoShot ? 8 / static_cast<int>(sizeof(typename Scalar::Storage)) : kSumsPerPacket;
  static constexpr int kComputing = kConfig.warps;
  static constexpr int kServing = kServingWarps;  // kSlots is a multiple, so a slot always meets the same serving warp
  static constexpr int kPacketsPerItem = kItem / kSumsPerPacket;
  static constexpr int kItemsPerVector = kTileRows / kItem;  // of a tile
  static constexpr bool kPrefetches = kConfig.prefetches;
  static constexpr LetsIn kLetsIn = kConfig.lets_in;
  static constexpr bool kSharesSm = kResident && shares_sm(kVectors, kPrefetches);  // with the successor
  // Fewer than 100 registers per thread: two WGs share an SM, or a WG has more than four warps for each scheduler of
  // the SM.
  static constexpr bool kHasFewRegisters = kSharesSm || kComputing + kServing > 16;
  // Steps that a warp multiplies at once. This number and the next are as large as the registers allow.
  static constexpr int kStepsAtOnce = kVectors > 1 && sizeof(typename Scalar::Storage) == 2 &&
                                              (kSharesSm ? !kTwoShot : !kHasFewRegisters)
                                          ? kMostStepsAtOnce
                                          : 1;
  // Senders whose packets are read together.
  static constexpr int kSendersAtOnce = kSharesSm          ? (kTwoShot ? 2 : 8)
                                        : kHasFewRegisters ? (kTwoShot ? 1 : 4)
                                                           : 8 / kPacketsPerItem;
  static constexpr int kSlots = slots_of(kVectors);  // tiles of a WG in flight in shared memory
  static_assert(kSlots >= WarpShare<Scalar>::kMaxTeams && kSlots % kServing == 0,
                "with fewer slots a team would wait two rounds ahead, which a Handover does not allow");
  static_assert(kPacketsPerItem >= 1, "sums travel in fp32 or in the scalar's own type");
};

struct Plan {
  Team team;
  OutputPlan output;
  PacketPlan packets;
  uint32_t* asked;  // WGs that have loaded all their weights; 0 once all have (sched/succession.cuh)
};
PO_DESCRIBE(Plan, team, output, packets, asked)

// Follows the launch's other fields in the plan's memory.
template <int kPes>
struct PlanWithHeaps : Plan {
  uint64_t heaps[kPes];  // Team.peer_heaps; null where not reachable
};

// What the kernel needs before its plan is there. A kernel of a few microseconds has it in the call.
inline constexpr int64_t kMaxColumns = (1 << 30) - 1;
struct Shape {
  uint64_t packed;
  int32_t rank;
  int32_t size;

  static PO_FN Shape of(int64_t rows, int64_t vectors, int64_t columns, int32_t rank, int32_t size) {
    return {static_cast<uint64_t>(rows | (vectors - 1) << 17 | columns << 34), rank, size};
  }
  PO_FN int num_rows() const { return static_cast<int>(packed & 0x1ffff); }
  PO_FN int num_vectors() const { return static_cast<int>(packed >> 17 & 0xf) + 1; }
  PO_FN int num_columns() const { return static_cast<int>(packed >> 34); }
};
PO_DESCRIBE(Shape, packed, rank, size)
PO_QUERY(packed_shape, (int64_t rows, int64_t vectors, int64_t columns), Shape::of(rows, vectors, columns, 0, 1).packed)
static_assert(kMaxRows <= 0x1ffff, "a Shape has room for them");
PO_CONSTANT(kMaxColumns)

struct Call {
  const uint8_t* weight;
  const uint8_t* vectors;
  uint8_t* output;
  const uint8_t* residual;  // may be the output; null: none
  const uint8_t* bias;      // of this launch's first row; null: none
  Shape shape;              // `begin` needs it before the plan is there
};
PO_DESCRIBE(Call, weight, vectors, output, residual, bias, shape)

template <class Traits>
struct Shared {
  PlanWithHeaps<Traits::kPes> plan;
  typename TilePipeline<Traits>::Shared pipeline;
  Handover told;  // from the first serving warp to all: the epoch, and whether this PE takes part
  typename PacketExchange<Traits, Call>::Shared exchange;
};

template <Config kConfig>
struct Kernel {
  using Traits = gemv_all_reduce::Traits<kConfig>;
  using Pipeline = TilePipeline<Traits>;
  using Plan = PlanWithHeaps<Traits::kPes>;
  using Call = gemv_all_reduce::Call;
  using Exchange = PacketExchange<Traits, Call>;
  using Shared = gemv_all_reduce::Shared<Traits>;
  static constexpr int kThreads = (Traits::kComputing + Traits::kServing) * 32;
  static constexpr int kBlocksPerSm = Traits::kSharesSm ? 2 : 1;
  static constexpr size_t kHostArenaBytes = 64ull * Traits::kSlots * Traits::kVectors * kTileRows * sizeof(float);

#if PO_ON_DEVICE
  static_assert(sizeof(Shared) <= static_bytes(Traits::kPes) &&
                    Pipeline::Stream::kBytesPerWarp * Traits::kComputing ==
                        ring_step_bytes(Traits::kComputing) * Traits::kDepth,
                "the host plans a WG's memory by kernels/gemv/geometry.cuh");
#endif

  struct Begun {
    typename Pipeline::Vectors vectors;
    typename Pipeline::Stream stream;
  };

  // Loads vectors and weights before the plan is there. A lone vector goes first: after the weights it would wait for
  // all loads in flight. If weights are prefetched before the predecessor's end, they go alone, since the predecessor
  // may still be writing the vectors.
  static PO_FN Begun begin(const WorkGroup& wg, const Call& call) {
    static_assert(Traits::kResident || !Traits::kPrefetches, "a ring of vectors begins with that of the weights");
    const typename Pipeline::Vectors vectors{call.vectors, call.shape.num_vectors(), call.shape.num_columns(),
                                             wg.arena() + Pipeline::ring_bytes(wg)};
    if constexpr (Traits::kPrefetches) {
      vectors.expect(wg, first_fetching(wg));
    } else {
      await_predecessor();
      vectors.fetch(wg, 0);
    }
    RowTiles tiles = tiles_of(wg, call);
    if (wg.warp_index() >= Pipeline::num_computing(wg)) tiles.count = 0;
    return {vectors,
            typename Pipeline::Stream({call.weight, call.shape.num_rows(), call.shape.num_columns()}, vectors, tiles,
                                      Pipeline::share(wg, call.shape.num_columns()), wg.arena(), wg.warp_index())};
  }

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call, Begun& begun) {
    if constexpr (Traits::kPrefetches) {
      // If weights are prefetched, some threads bring a lone vector. Through it, or the sync below, the others know
      // that the predecessor has ended.
      if (!Pipeline::Vectors::kComeAtOnce || wg.rank() >= first_fetching(wg)) {
        await_predecessor();
        begun.vectors.fetch(wg, first_fetching(wg));
        begun.stream.fetch_vectors();
      }
    }
    const Plan& plan = shared.plan;
    const RowTiles tiles = tiles_of(wg, call);
    Pipeline pipeline(wg, shared.pipeline, tiles, begun.vectors);
    Exchange exchange(wg, shared.exchange, plan.team, plan.packets, plan.heaps, tiles, {plan.output, call}, call);
    pipeline.start_handovers();
    if (wg.rank() == 0) shared.told.start(1);
    begun.vectors.template await_copies<Pipeline::Stream::kStepsAhead>();
    wg.sync();
    if constexpr (Traits::kLetsIn == LetsIn::kAtOnce) release_successor();
    const int served = Pipeline::serving_index(wg);
    if (served >= 0) open(wg, shared, served);
    Succession succession(plan.asked, wg, begun.stream.num_steps(), Pipeline::Stream::kStepsAhead);
    if constexpr (Traits::kLetsIn == LetsIn::kLate) succession.begin(wg);
    pipeline.run(begun.stream, exchange, keeps_credits(wg), [&] {
      if constexpr (Traits::kLetsIn == LetsIn::kLate) succession.step();
    });
    if (plan.team.size != 1) finish(wg, shared, exchange);  // in a world of one the serving warps finish the tiles
    if constexpr (Traits::kLetsIn == LetsIn::kLate) {
      if (wg.rank() == 0) succession.await_others();
    }
  }

 private:
  static PO_FN RowTiles tiles_of(const WorkGroup& wg, const Call& call) {
    return RowTiles::of_wg(wg.index(), wg.count(), ceil_div(call.shape.num_rows(), kTileRows), call.shape.rank,
                           Traits::kTwoShot ? call.shape.size : 1);
  }

  // The first of the threads that bring a lone vector, if weights are prefetched.
  static PO_FN int first_fetching(const WorkGroup& wg) { return Pipeline::num_computing(wg) * kWarpSize; }

  // The last WG grants the PE's credit and awaits the others': it has one tile less if tiles do not come out even.
  static PO_FN bool keeps_credits(const WorkGroup& wg) { return wg.index() == wg.count() - 1; }

  // The rest of a warp's work after its last tile.
  static PO_FN void finish(const WorkGroup& wg, Shared& shared, Exchange& exchange) {
    const Plan& plan = shared.plan;
    shared.told.await(0);                                                                             // @epoch-told
    if (Pipeline::serving_index(wg) == 0 && keeps_credits(wg)) await_all_credits(plan.team, Warp());  // @gemv-credits
    exchange.receive();
  }

  // The first serving warp publishes the epoch to the others; in one WG it grants credit. Serving warps only.
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
    // A PE alone counts no WGs: its replays may overlap, and WGs of different grids cannot be counted together.
    if (warp.rank() == 0 && team.size != 1) close_epoch(team, wg);
  }
};

}  // namespace po::gemv_all_reduce
