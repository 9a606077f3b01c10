// The exchange of a batch's lookups, in one persistent launch in a workspace of its own; with few WGs if it runs beside
// other launches.
//
// Each PE has the lookups of its own samples for all features. Each owner of tables receives lookups of its tables from
// every PE, in a region per PE of its symmetric heap. Protocol: (1) WG 0 grants every peer credit for the regions that
// this launch fills. (2) Warps add up bags, chunk by chunk. WG 0 waits for all of them and finds where each feature
// begins, and so each slot in each message. (3) Warps take pieces of messages, owners in turn from the next PE on, and
// store them in the owner's region. The warp that brings the last pieces releases one sliceRdy word there. A message
// that exceeds its region is its header alone. (4) WG 0 awaits all words and credits. The last WG to leave writes where
// the lookups lie (LookupSource).
//
// The kernel does not trust the caller's bounds of bags. It uses a running sum of lengths, or a running maximum of
// offsets, cut off at the number of values. Neither falls, so nothing is written outside of a region, whatever was
// passed.
#pragma once

#include "kernels/inputs/messenger.cuh"
#include "platform/entry.cuh"
#include "platform/scalar.cuh"

namespace po::embedding_inputs {

// ---- configuration --------------------------------------------------------------------------------------------------

struct Config {
  IndexType value = IndexType::kInt64;  // type of the lookups that are passed
  IndexType index = IndexType::kInt64;  // type of the lookups that owners receive
  IndexType bound = IndexType::kInt64;  // type of lengths or offsets
  bool lengths = true;                  // bounds are lengths of bags; else they are where bags begin
  bool weighted = false;
  int threads = 64;
};

template <Config kConfig>
struct Traits {
  using Value = IndexOf<kConfig.value>;
  using Index = IndexOf<kConfig.index>;
  using Bound = IndexOf<kConfig.bound>;
  static constexpr bool kLengths = kConfig.lengths;
  static constexpr bool kWeighted = kConfig.weighted;
  static constexpr int kThreads = kConfig.threads;
  // At most 64 registers per thread. With two warps, a WG finds room beside others on an SM (embedding_inputs.md).
  // NVSHMEM's puts need more.
  static constexpr int kBlocksPerSm = (kPuts ? 512 : 1024) / kThreads;
};

// ---- arrival --------------------------------------------------------------------------------------------------------

// Awaits one word from every PE, this one included.
PO_FN void await_lookups(const WorkGroup& wg, const Team& team) {
  for (int sender = wg.rank(); sender < team.size; sender += wg.size()) {
    await_epoch(team, local_word(team, ready_word_offset(team, sender, 0)), kPhaseLookups, sender, 0);  // @inputs-await
  }
}

// Writes where the lookups are: none if the launch was given up. One thread, after all others of the launch.
template <class Traits>
PO_FN void publish(const Plan& plan, const Call& call) {
  const Team& team = plan.team;
  const bool aborted = is_aborted(team);
  const Owner& self = plan.owners[team.rank];
  int64_t first_sample = 0;
  int64_t full[4] = {-1, -1, 0, 0};
  for (int pe = 0; pe < team.size; ++pe) {
    const Sender& sender = plan.senders[pe];
    const uint8_t* region = team.heap + call.regions_offset + sender.region_offset;
    const auto* header = reinterpret_cast<const Header*>(region);
    Region parts =
        region_of(self.num_slots, plan.max_samples, sender.capacity, sizeof(typename Traits::Index), Traits::kWeighted);
    const bool is_here = !aborted && header->left_out == 0;
    if constexpr (kPuts) {
      if (!is_reachable(team, pe)) {  // see parts_of
        parts = region_of(self.num_slots, is_here ? header->samples : 0, is_here ? header->count : 0,
                          sizeof(typename Traits::Index), Traits::kWeighted);
      }
    }
    const int64_t samples = aborted ? 0 : header->samples;
    LookupSource& source = call.sources[pe];
    source.indices = region + parts.indices;
    source.offsets = is_here ? static_cast<const void*>(region + sizeof(Header)) : plan.no_offsets;
    source.weights = Traits::kWeighted ? reinterpret_cast<const float*>(region + parts.weights) : nullptr;
    source.first_sample = first_sample;
    source.samples = samples;
    source.count = is_here ? header->count : 0;
    source.capacity = sender.capacity;
    source.left_out = aborted ? 0 : header->left_out;
    source.first_lookup =
        Traits::kWeighted ? static_cast<int64_t>((sender.region_offset + parts.weights) / sizeof(float)) : 0;
    first_sample += samples;
    if (aborted || header->full_owner < 0 || full[0] >= 0) continue;
    full[0] = pe;
    full[1] = header->full_owner;
    full[2] = header->full_count;
    full[3] = header->full_capacity;
  }
  if (call.report == nullptr) {
    if (full[0] >= 0) report_input_error(team, kNoRoom, full[0], full[1], full[2], full[3]);
    return;
  }
  Report& report = *call.report;
  report.is_aborted = aborted ? 1 : 0;
  report.full_source = full[0];
  report.full_owner = full[1];
  report.full_count = full[2];
  report.full_capacity = full[3];
  flag_store_release_sys(&report.state, call.report_number);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <Config kConfig>
struct Kernel {
  using Traits = embedding_inputs::Traits<kConfig>;
  using Plan = embedding_inputs::Plan;
  using Call = embedding_inputs::Call;
  using Shared = embedding_inputs::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    if (wg.rank() == 0) {
      shared.plan.team.contract_hash = call.contract_hash;
      shared.plan.team.contract[plan.contract_word] = call.contract_word;
      if (call.input_error != nullptr) shared.plan.team.input_error = call.input_error;
      const auto samples = static_cast<int32_t>(call.samples);
      shared.chunks_per_feature = max_of(ceil_div(samples, static_cast<int32_t>(plan.chunk_bags)), 1);
      for (uint64_t& failed : shared.failed) failed = 0;
      // An aborted launch has left counts of pieces. They are not added to.
      shared.gave_up = is_aborted(shared.plan.team);  // @inputs-give-up
    }
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, call.regions_offset);
    if (shared.gave_up == 0 && Finder<Traits>(wg, shared, call).run()) {
      Messenger<Traits>(wg, shared, call).run();
    }
    if (wg.index() == 0) await_all_credits(plan.team, wg);
    if (wg.index() == 0) await_lookups(wg, plan.team);
    leave_launch(plan.team, wg, &shared.is_last, 0, 0);
    if (shared.is_last != 0 && wg.rank() == 0) publish<Traits>(plan, call);
  }
};

}  // namespace po::embedding_inputs
