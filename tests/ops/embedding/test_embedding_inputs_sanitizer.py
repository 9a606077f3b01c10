"""The input exchange under ThreadSanitizer: no error, but one for each mutation."""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, Condition, Drop, Relaxed, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of embedding_inputs with all PEs as threads of one process. What has arrived is read and checked
// by a thread of its own, beside the next launch: that is what two regions in turn are for.
#include <optional>

#include "driver.h"
#include "kernels/embedding_inputs.cuh"

namespace {

using namespace po::embedding_inputs;
constexpr Config kConfig{.value = po::IndexType::kInt64,
                         .index = po::IndexType::kInt32,
                         .bound = po::IndexType::kInt32,
                         .lengths = true,
                         .weighted = true};
constexpr Config kOffsets{.value = po::IndexType::kInt32,
                          .index = po::IndexType::kInt32,
                          .bound = po::IndexType::kInt64,
                          .lengths = false,
                          .weighted = true};

constexpr uint64_t kReadyStride = 4;
constexpr int kRegions = 2;
constexpr uint64_t kGapBytes = 256;
constexpr size_t kMostValues = 1 << 12;

driver::Options options({{"--features", "3"},
                         {"--slots", "4"},
                         {"--batch", "5"},
                         {"--chunk", "2"},
                         {"--piece", "4"},
                         {"--empty-pe", "-1"},  // has no samples
                         {"--bare-pe", "-1"},   // has no slots
                         {"--full", "0"},       // PE 0 has no room for what PE 1 sends
                         {"--offsets", "0"},    // instead of lengths
                         {"--read-us", "0"}},   // that a reader waits before it reads
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

class Pe : public driver::BasePe<Plan> {
 public:
  Pe(World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    const auto pes = static_cast<uint64_t>(size);
    int64_t first_slot = 0;
    uint64_t own_bytes = 0;
    for (int pe = 0; pe < size; ++pe) {
      for (int64_t slot = 0; slot < num_slots(pe); ++slot) slots.push_back({feature_of(pe, slot), 1000});
      uint64_t offset = 0;
      for (int source = 0; source < size; ++source) {
        const uint64_t length = region(pe, source).end + kGapBytes;
        if (source == rank) owners.push_back({first_slot, num_slots(pe), capacity(source, pe), offset, take(length)});
        if (pe == rank) senders.push_back({offset, capacity(source, pe)});
        offset += length;
      }
      if (pe == rank) own_bytes = offset;
      first_slot += num_slots(pe);
    }
    for (uint64_t& each : regions) each = take(own_bytes);
    allocate_heap();
    chunks.resize(static_cast<size_t>(num_features * (max_batch / chunk + 1) + 1));
    slot_begins.resize(slots.size() + pes);
    longest.resize(kNumLongest);
    added_up.resize(static_cast<size_t>(number("--wgs")) + 1);
    sent.resize(pes);
    no_offsets.resize(static_cast<size_t>(num_slots(rank) * max_batch + 1));
    for (auto& each : sources) each.resize(pes);
    // Mutants may read behind the end: there is memory.
    values.reserve(kMostValues);
    narrow_values.reserve(kMostValues);
    weights.reserve(kMostValues);
    plan.slots = slots.data();
    plan.owners = owners.data();
    plan.senders = senders.data();
    plan.num_features = num_features;
    plan.max_samples = max_batch;
    plan.chunk_bags = chunk;
    plan.piece_lookups = number("--piece");
    plan.contract_word = 2;
    plan.reports_bad_input = 1;
    plan.chunks = chunks.data();
    plan.slot_begins = slot_begins.data();
    plan.longest = longest.data();
    plan.added_up = added_up.data();
    plan.sent = sent.data();
    plan.no_offsets = no_offsets.data();
  }

  void run() {
    BasePe::run();
    for (auto& reader : readers) join(reader);
  }

 private:
  // ---- what there is -----------------------------------------------------------------------------------------------

  int64_t num_slots(int pe) const { return pe == number("--bare-pe") ? 0 : number("--slots"); }
  int64_t feature_of(int pe, int64_t slot) const { return (pe + slot * 2) % num_features; }
  int64_t samples(int pe, int64_t launch) const {
    return pe == number("--empty-pe") ? 0 : max_batch - (launch + pe) % 3;
  }
  int64_t length(int pe, int64_t bag, int64_t launch) const { return (bag * 5 + launch * 3 + pe) % 4; }
  int64_t value(int pe, int64_t place, int64_t launch) const { return (place * 7 + launch * 31 + pe * 11) % 997; }
  bool is_full(int source, int owner) const { return number("--full") != 0 && source == 1 && owner == 0; }
  int64_t capacity(int source, int owner) const {
    return is_full(source, owner) ? 1 : num_slots(owner) * max_batch * 3;
  }
  Region region(int owner, int source) const {
    return region_of(num_slots(owner), max_batch, capacity(source, owner), sizeof(int32_t), true);
  }

  // ---- launches ----------------------------------------------------------------------------------------------------

  static void join(std::optional<std::thread>& reader) {
    if (reader) reader->join();
    reader.reset();
  }

  void before_launch(int64_t launch) override {
    BasePe::before_launch(launch);
    join(readers[launch % kRegions]);  // the region's last readers have done
    if (is_trouble_at(launch)) {
      for (auto& reader : readers) join(reader);  // launches behind it fill the others
    }
  }

  void run_kernel(int64_t launch) override {
    values.clear();
    narrow_values.clear();
    weights.clear();
    std::vector<int32_t> lengths;
    std::vector<int64_t> offsets{0};
    for (int64_t bag = 0; bag < num_features * samples(rank, launch); ++bag) {
      lengths.push_back(static_cast<int32_t>(length(rank, bag, launch)));
      offsets.push_back(offsets.back() + lengths.back());
    }
    for (int64_t place = 0; place < offsets.back(); ++place) {
      values.push_back(value(rank, place, launch));
      narrow_values.push_back(static_cast<int32_t>(values.back()));
      weights.push_back(static_cast<float>(values.back()) / 2);
    }
    sums_before = added_up;
    sent_before = sent;
    const Plan used = plan_of(launch);
    const bool has_offsets = number("--offsets") != 0;
    Call call{};
    call.values = has_offsets ? static_cast<const void*>(narrow_values.data()) : values.data();
    call.bounds = has_offsets ? static_cast<const void*>(offsets.data()) : lengths.data();
    call.weights = weights.data();
    call.num_values = offsets.back();
    call.samples = samples(rank, launch);
    call.regions_offset = regions[launch % kRegions];
    call.sources = sources[launch % kRegions].data();
    call.report = &report;
    call.report_number = static_cast<uint64_t>(launch) + 7;
    call.contract_hash = used.team.contract_hash;
    call.contract_word = used.team.contract[plan.contract_word];
    if (has_offsets) {
      launch_on_host<Kernel<kOffsets>>(used, call);
    } else {
      launch_on_host<Kernel<kConfig>>(used, call);
    }
  }

  void check(int64_t launch) override {
    check_report(launch);
    readers[launch % kRegions].emplace([this, launch] {
      usleep(static_cast<useconds_t>(number("--read-us")));
      read(launch);
    });
  }

  void check_given_up(int64_t launch) override {
    if (report.state != static_cast<uint64_t>(launch) + 7 || report.is_aborted != 1) {
      driver::fail(driver::kWrongReport, "PE %d, launch %ld: the host is not told", rank, launch);
    }
    for (const po::LookupSource& source : sources[launch % kRegions]) {
      if (source.samples != 0 || source.count != 0 || source.offsets != no_offsets.data()) {
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: lookups in an aborted launch", rank, launch);
      }
    }
    // A launch behind an aborted one adds nothing up, and counts nothing on top of what that one has left.
    if (!is_trouble_at(launch) && (added_up != sums_before || sent != sent_before)) {
      driver::fail(driver::kWrongRemains, "PE %d, launch %ld: sums or pieces behind an aborted launch", rank, launch);
    }
  }

  void clear() override { std::fill(sent.begin(), sent.end(), 0); }

  void check_report(int64_t launch) const {
    const bool is_told = report.full_source == 1 && report.full_owner == 0 && report.full_capacity == 1;
    const bool is_right = number("--full") != 0 ? is_told : report.full_source < 0;
    if (report.state != static_cast<uint64_t>(launch) + 7 || !is_right) {
      driver::fail(driver::kWrongReport, "PE %d, launch %ld: told of PE %ld's message to PE %ld", rank, launch,
                   report.full_source, report.full_owner);
    }
    for (const uint64_t pieces : sent) {
      if (pieces != 0) driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %lu pieces", rank, launch, pieces);
    }
  }

  // ---- what has arrived ------------------------------------------------------------------------------------------

  void read(int64_t launch) const {
    int64_t first_sample = 0;
    for (int pe = 0; pe < size; ++pe) {
      const po::LookupSource& source = sources[launch % kRegions][static_cast<size_t>(pe)];
      expect(launch, pe, "samples", source.samples, samples(pe, launch));
      expect(launch, pe, "first sample", source.first_sample, first_sample);
      first_sample += samples(pe, launch);
      read_bags(launch, pe, source);
      check_guard(launch, pe);
    }
  }

  void read_bags(int64_t launch, int pe, const po::LookupSource& source) const {
    std::vector<int64_t> begins{0};
    for (int64_t bag = 0; bag < num_features * samples(pe, launch); ++bag) {
      begins.push_back(begins.back() + length(pe, bag, launch));
    }
    const auto* offsets = static_cast<const int32_t*>(source.offsets);
    const bool is_left_out = is_full(pe, rank);
    int64_t at = 0;
    for (int64_t slot = 0; slot < num_slots(rank); ++slot) {
      for (int64_t sample = 0; sample < samples(pe, launch); ++sample) {
        const int64_t bag = feature_of(rank, slot) * samples(pe, launch) + sample;
        expect(launch, pe, "offset", offsets[slot * samples(pe, launch) + sample], is_left_out ? 0 : at);
        for (int64_t i = 0; i < length(pe, bag, launch) && !is_left_out; ++i, ++at) {
          const int64_t wanted = value(pe, begins[static_cast<size_t>(bag)] + i, launch);
          expect(launch, pe, "index", static_cast<const int32_t*>(source.indices)[at], wanted);
          expect(launch, pe, "weight", static_cast<int64_t>(source.weights[at] * 2), wanted);
        }
      }
    }
    expect(launch, pe, "last offset", offsets[num_slots(rank) * samples(pe, launch)], at);
    expect(launch, pe, "count", source.count, at);
  }

  // Nobody writes behind a region.
  void check_guard(int64_t launch, int pe) const {
    const Sender& sender = senders[static_cast<size_t>(pe)];
    const uint8_t* guard = heap + regions[launch % kRegions] + sender.region_offset + region(rank, pe).end;
    for (uint64_t i = 0; i < kGapBytes; ++i) expect(launch, pe, "byte behind the region", guard[i], 0);
  }

  void expect(int64_t launch, int pe, const char* what, int64_t found, int64_t wanted) const {
    if (found == wanted) return;
    driver::fail(driver::kWrongOutput, "PE %d, launch %ld, from PE %d: %s %ld, not %ld", rank, launch, pe, what, found,
                 wanted);
  }

  const int64_t num_features = number("--features");
  const int64_t max_batch = number("--batch");
  const int64_t chunk = number("--chunk");
  uint64_t regions[kRegions];
  std::vector<int64_t> values;
  std::vector<int32_t> narrow_values;
  std::vector<float> weights;
  std::vector<Slot> slots;
  std::vector<Owner> owners;
  std::vector<Sender> senders;
  std::vector<int64_t> chunks;
  std::vector<int64_t> slot_begins;
  std::vector<int64_t> longest;
  std::vector<uint64_t> added_up;
  std::vector<uint64_t> sent;
  std::vector<uint64_t> sums_before;  // the launch
  std::vector<uint64_t> sent_before;
  std::vector<int32_t> no_offsets;
  std::vector<po::LookupSource> sources[kRegions];
  std::optional<std::thread> readers[kRegions];
  Report report{};
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""

PLAIN = "--pes=2 --wgs=3 --threads=2"
LONE = "--pes=2 --wgs=3 --threads=1"
AHEAD = "--pes=3 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=500"
# Regions are read until the second launch after this one, and no credit permits to fill them earlier.
SLOW_READERS = "--pes=3 --wgs=2 --threads=2 --epochs=20 --read-us=1500 --slow-pe=2 --slow-us=1000"
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0 --epochs=12"
# Puts take longer than a launch. PE 1 gets headers alone: it has them, and continues, before its own puts are out.
SLOW_NETWORK = "--pes=2 --staged=1 --bare-pe=1 --delay-us=20000"
FULL = "--pes=3 --full=1 --wgs=2 --threads=2"
# A PE stays away from a launch. The others give up, and run launches after it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=2 --stop-pe=1 --trouble-at=3 --queued=2 --epochs=6 --timeout-ms=1500"
TROUBLE_STAGED = f"{TROUBLE} --staged=1 --delay-us=100"
CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warps": "--pes=3 --threads=1 --wgs=1",
    "plain": PLAIN,
    "four_pes": "--pes=4 --wgs=2 --threads=2",
    "small_pieces": "--pes=2 --wgs=4 --threads=2 --chunk=1 --piece=1",
    "offsets": "--pes=3 --wgs=2 --threads=2 --offsets=1",
    "a_pe_without_samples": "--pes=3 --empty-pe=1 --threads=2",
    "a_pe_without_tables": "--pes=3 --bare-pe=0 --threads=2",
    "late_pe": AHEAD,
    "slow_readers": SLOW_READERS,
    "no_room": FULL,
    "no_room_staged": f"{FULL} --staged=1 --delay-us=200",
    "staged": STAGED,
    "slow_network": SLOW_NETWORK,
    "staged_slow_readers": f"{SLOW_READERS} --staged=1 --delay-us=200",
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": TROUBLE_STAGED,
    "absent_for_one_piece": f"{TROUBLE} --bare-pe=0",  # PE 0's own part is a header
    "another_contract": "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6",
}

# A PE that takes sums or a header too early may report a wrong error, and wait for data that never comes.
_COUNTS = RACE | {Exit.WRONG_REPORT, Exit.WRONG_REMAINS, Exit.TIMED_OUT}
_SOON = "--timeout-ms=5000"

MUTATIONS = {
    "chunks_are_told_before_all_warps_have_added_up": Mutation((Drop("sums-sync"),), f"{PLAIN} {_SOON}", _COUNTS),
    "chunks_are_not_awaited": Mutation((Drop("sums-await"),), f"{LONE} {_SOON}", _COUNTS),
    "chunks_are_told_without_a_release": Mutation((Relaxed("flag-release"),), f"{LONE} {_SOON}", _COUNTS),
    "chunks_are_taken_before_they_are_scanned": Mutation((Drop("chunks-sync"),), f"{PLAIN} {_SOON}", _COUNTS),
    "slots_are_taken_before_they_are_scanned": Mutation(
        (Drop("slots-sync"),), f"--pes=3 --wgs=1 --threads=3 {_SOON}", _COUNTS
    ),
    "slots_are_told_before_all_warps_have_found_them": Mutation((Drop("found-sync"),), f"{PLAIN} {_SOON}", _COUNTS),
    "slots_are_not_awaited": Mutation((Drop("found-await"),), f"{LONE} {_SOON}", _COUNTS),
    "inputs_are_stored_without_credit": Mutation((Condition("credit-before-inputs", "false"),), SLOW_READERS, RACE),
    "inputs_are_put_without_credit": Mutation(
        (Drop("credit-before-input-puts"),), f"{SLOW_READERS} --staged=1 --delay-us=200", RACE
    ),
    "inputs_are_not_awaited": Mutation((Drop("inputs-await"),), PLAIN, RACE | {Exit.WRONG_REPORT}),
    "a_message_is_told_with_its_first_piece": Mutation(
        (Swap("message-complete", "num_pieces", "1"),), f"{PLAIN} {_SOON}", _COUNTS
    ),
    "messages_that_find_no_room_are_sent": Mutation(
        (Swap("capacity", "count() > owner.capacity", "false"),), FULL, RACE | {Exit.WRONG_REPORT}
    ),
    "messages_behind_an_aborted_launch": Mutation(
        (Swap("inputs-give-up", "is_aborted(shared.plan.team)", "0"),), TROUBLE_STAGED, {Exit.WRONG_REMAINS}
    ),
    "signals_overtake_inputs": Mutation((OVERTAKES,), STAGED, RACE | {Exit.WRONG_REPORT}),
    "outgoing_inputs_are_overwritten": Mutation((Drop("last-quiet"),), SLOW_NETWORK, RACE),
    "messages_that_are_put_have_gaps": Mutation(
        (Condition("message-without-gaps", "false"),), STAGED, RACE | {Exit.WRONG_REPORT, Exit.WRONG_OUTPUT}
    ),
}


class TestEmbeddingInputs(SanitizerSuite):
    builds: ClassVar = {"inputs": Build()}
    cases: ClassVar = {"inputs": CASES}
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "inputs")
