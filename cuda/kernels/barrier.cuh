// A barrier over all PEs on the stream: every PE grants the others this epoch's credit and awaits theirs. This is the
// smallest operator: the protocol of comm/launch.cuh and nothing else.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"

namespace po::barrier {

struct Plan {
  Team team;
};
PO_DESCRIBE(Plan, team)

struct Call {};
PO_DESCRIBE(Call)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

inline constexpr int kThreads = 64;  // on the GPU
PO_CONSTANT(kThreads)

struct Kernel {
  using Plan = barrier::Plan;
  using Call = barrier::Call;
  using Shared = barrier::Shared;
  static constexpr int kThreads = barrier::kThreads;
  static constexpr int kBlocksPerSm = 1;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call&) {
    Team& team = shared.plan.team;
    begin_launch(team, wg);
    grant_credit(team, wg, 0);
    await_all_credits(team, wg);
    leave_launch(team, wg, &shared.is_last, 0, 0);
  }
};

}  // namespace po::barrier
