"""The input exchange under ThreadSanitizer: silent, and loud without parts of its protocol."""

from __future__ import annotations

from typing import ClassVar

from mutations import Condition, Drop, Relaxed, Swap
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
constexpr uint64_t kGuardBytes = 256;

driver::Options options({{"--pes", "2"},        {"--features", "3"},
                         {"--slots", "4"},      {"--batch", "5"},
                         {"--wgs", "2"},        {"--threads", "2"},
                         {"--chunk", "2"},      {"--piece", "4"},
                         {"--epochs", "8"},     {"--staged", "0"},
                         {"--node", "1"},       // so many PEs in a row reach each other
                         {"--delay-us", "0"},   {"--empty-pe", "-1"},  // has no samples
                         {"--bare-pe", "-1"},   // has no slots
                         {"--full", "0"},       // PE 0 has no room for what PE 1 sends
                         {"--offsets", "0"},    // instead of lengths
                         {"--slow-pe", "-1"},   {"--slow-us", "2000"},
                         {"--read-us", "0"},    // that a reader waits before it reads
                         {"--timeout-ms", "60000"},
                         {"--stop-pe", "-1"},   // does not launch, or ...
                         {"--other-pe", "-1"},  // ... launches under another contract, at ...
                         {"--trouble-at", "-1"},  // ... this launch (from 0); then all recover and go on
                         {"--queued", "0"}});   // launches behind it that do not look at errors

using driver::World;

struct Pe {
  Pe(World& world_in, int rank_in, int size_in) : world(world_in), rank(rank_in), size(size_in) {
    uint64_t bytes = 0;
    auto take = [&](uint64_t length) {
      const uint64_t offset = bytes;
      bytes += (length + 127) / 128 * 128;
      return offset;
    };
    const auto pes = static_cast<uint64_t>(size);
    po::Team& team = plan.team;
    team.grants_offset = take((pes + 2) * sizeof(po::Grant));
    team.ready_offset = take(pes * kReadyStride * 8);
    team.abort_offset = take(pes * 8);
    int64_t first_slot = 0;
    for (int pe = 0; pe < size; ++pe) {
      for (int64_t slot = 0; slot < num_slots(pe); ++slot) slots.push_back({feature_of(pe, slot), 1000});
      uint64_t offset = 0;
      for (int source = 0; source < size; ++source) {
        const uint64_t length = region(pe, source).end + kGuardBytes;
        if (source == rank) owners.push_back({first_slot, num_slots(pe), capacity(source, pe), offset, take(length)});
        if (pe == rank) senders.push_back({offset, capacity(source, pe)});
        offset += length;
      }
      if (pe == rank) regions_bytes = offset;
      first_slot += num_slots(pe);
    }
    for (int i = 0; i < kRegions; ++i) regions[i] = take(regions_bytes);
    heap = static_cast<uint8_t*>(std::aligned_alloc(128, bytes));
    std::memset(heap, 0, bytes);
    const auto wgs = static_cast<size_t>(options.number("--wgs"));
    chunks.resize(static_cast<size_t>(num_features * (max_batch / chunk + 1) + 1));
    slot_begins.resize(slots.size() + pes);
    longest.resize(kNumLongest);
    added_up.resize(wgs + 1);
    sent.resize(pes);
    no_offsets.resize(static_cast<size_t>(num_slots(rank) * max_batch + 1));
    for (auto& each : sources) each.resize(pes);
    team.rank = rank;
    team.size = size;
    team.heap = heap;
    team.ready_stride = kReadyStride;
    team.local = &local;
    team.error = &error;
    team.input_error = &input_error;
    plan.slots = slots.data();
    plan.owners = owners.data();
    plan.senders = senders.data();
    plan.num_features = num_features;
    plan.max_samples = max_batch;
    plan.chunk_bags = chunk;
    plan.piece_lookups = options.number("--piece");
    plan.contract_word = 2;
    plan.reports_bad_input = 1;
    plan.chunks = chunks.data();
    plan.slot_begins = slot_begins.data();
    plan.longest = longest.data();
    plan.added_up = added_up.data();
    plan.sent = sent.data();
    plan.no_offsets = no_offsets.data();
  }

  // ---- what there is -----------------------------------------------------------------------------------------------

  int64_t num_slots(int pe) const { return pe == options.number("--bare-pe") ? 0 : options.number("--slots"); }
  int64_t feature_of(int pe, int64_t slot) const { return (pe + slot * 2) % num_features; }
  int64_t samples(int pe, int64_t launch) const {
    return pe == options.number("--empty-pe") ? 0 : max_batch - (launch + pe) % 3;
  }
  int64_t length(int pe, int64_t bag, int64_t launch) const { return (bag * 5 + launch * 3 + pe) % 4; }
  int64_t value(int pe, int64_t place, int64_t launch) const { return (place * 7 + launch * 31 + pe * 11) % 997; }
  bool is_full(int source, int owner) const { return options.number("--full") != 0 && source == 1 && owner == 0; }
  int64_t capacity(int source, int owner) const {
    return is_full(source, owner) ? 1 : num_slots(owner) * max_batch * 3;
  }
  Region region(int owner, int source) const {
    return region_of(num_slots(owner), max_batch, capacity(source, owner), sizeof(int32_t), true);
  }

  void connect(const std::vector<std::unique_ptr<Pe>>& all) {
    std::vector<uint64_t> bases;
    const bool is_staged = size > 1 && options.number("--staged") != 0;
    for (int pe = 0; pe < size; ++pe) {
      bases.push_back(reinterpret_cast<uint64_t>(all[static_cast<size_t>(pe)]->heap));
      const int64_t node = options.number("--node");
      heaps.push_back(!is_staged || pe / node == rank / node ? bases.back() : 0);
    }
    plan.team.peer_heaps = heaps.data();
    network = std::make_unique<po::DelayedNetwork>(
        bases.data(), size, static_cast<uint64_t>(options.number("--delay-us")), static_cast<uint64_t>(rank + 1));
    plan.team.network = network.get();
  }

  // ---- launches ----------------------------------------------------------------------------------------------------

  void run() {
    for (int64_t launch = 0; launch < options.number("--epochs"); ++launch) {
      const bool is_trouble = launch == options.number("--trouble-at");
      // On a busy machine a PE may be late by more than a wait for one that never comes should last.
      const int64_t ms = is_trouble || options.number("--trouble-at") < 0 ? options.number("--timeout-ms") : 60000;
      plan.team.timeout_ns = static_cast<uint64_t>(ms) * 1000000;
      if (is_trouble && options.number("--stop-pe") >= 0) world.start.arrive_and_wait();
      if (rank == options.number("--slow-pe")) usleep(static_cast<useconds_t>(options.number("--slow-us")));
      std::optional<std::thread>& reader = readers[launch % kRegions];
      if (reader) reader->join();  // the region's last readers have done
      reader.reset();
      if (is_trouble) {
        if (rank != options.number("--stop-pe")) run_into_trouble(launch);
        driver::recover(*this, options.number("--queued"));
        std::fill(sent.begin(), sent.end(), 0);
        continue;
      }
      run_kernel(launch);
      if (error.state != 0) {
        driver::fail(driver::exit_of_aborted(error), "PE %d, launch %ld: aborted, phase %lu, peer %lu", rank, launch,
                     error.phase, error.peer);
      }
      check_report(launch);
      reader.emplace([this, launch] {
        usleep(static_cast<useconds_t>(options.number("--read-us")));
        read(launch);
      });
    }
    for (auto& reader : readers) {
      if (reader) reader->join();
    }
  }

  void run_kernel(int64_t launch) {
    std::vector<int64_t> values;
    std::vector<int32_t> narrow_values;
    std::vector<int32_t> lengths;
    std::vector<int64_t> offsets{0};
    std::vector<float> weights;
    for (int64_t bag = 0; bag < num_features * samples(rank, launch); ++bag) {
      lengths.push_back(static_cast<int32_t>(length(rank, bag, launch)));
      offsets.push_back(offsets.back() + lengths.back());
    }
    for (int64_t place = 0; place < offsets.back(); ++place) {
      values.push_back(value(rank, place, launch));
      narrow_values.push_back(static_cast<int32_t>(values.back()));
      weights.push_back(static_cast<float>(values.back()) / 2);
    }
    const bool is_other = launch == options.number("--trouble-at") && rank == options.number("--other-pe");
    const bool has_offsets = options.number("--offsets") != 0;
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
    call.contract_hash = is_other ? 0x5a5b : 0x5a5a;
    call.contract_word = launch;
    const auto wgs = static_cast<int>(options.number("--wgs"));
    const auto threads = static_cast<int>(options.number("--threads"));
    if (has_offsets) {
      po::run_on_host<Kernel<kOffsets>>(&plan, call, wgs, threads);
    } else {
      po::run_on_host<Kernel<kConfig>>(&plan, call, wgs, threads);
    }
  }

  void run_into_trouble(int64_t launch) {
    for (int64_t i = 0; i <= options.number("--queued"); ++i) {
      run_kernel(launch + i * kRegions);  // into the same region: nobody reads it
      if (error.state == 0 || error.epoch != local.abort || error.epoch + static_cast<uint64_t>(i) != local.epoch) {
        driver::fail(driver::kWrongReport, "PE %d, launch %ld: did not notice the trouble, or not as it should", rank,
                     launch + i);
      }
      if (report.state != static_cast<uint64_t>(launch + i * kRegions) + 7 || report.is_aborted != 1) {
        driver::fail(driver::kWrongReport, "PE %d, launch %ld: the host is not told", rank, launch + i);
      }
      for (const po::LookupSource& source : sources[launch % kRegions]) {
        if (source.samples != 0 || source.count != 0 || source.offsets != no_offsets.data()) {
          driver::fail(driver::kWrongOutput, "PE %d, launch %ld: lookups in an aborted launch", rank, launch + i);
        }
      }
    }
  }

  // Nothing in this PE's heap is from a launch behind the one that its sender gave up.
  void check_traces() const { driver::check_words(*this); }

  void check_report(int64_t launch) const {
    const bool is_told = report.full_source == 1 && report.full_owner == 0 && report.full_capacity == 1;
    const bool is_right = options.number("--full") != 0 ? is_told : report.full_source < 0;
    if (report.state != static_cast<uint64_t>(launch) + 7 || !is_right) {
      driver::fail(driver::kWrongReport, "PE %d, launch %ld: told of PE %ld's message to PE %ld", rank, launch,
                   report.full_source, report.full_owner);
    }
    for (const uint64_t pieces : sent) {
      if (pieces != 0) driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %lu pieces", rank, launch, pieces);
    }
    if (input_error.state != 0) driver::fail(driver::kWrongReport, "PE %d: bad input", rank);
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
    const bool is_left_out = is_full(pe, rank);
    int64_t at = 0;
    for (int64_t slot = 0; slot < num_slots(rank); ++slot) {
      for (int64_t sample = 0; sample < samples(pe, launch); ++sample) {
        const int64_t bag = feature_of(rank, slot) * samples(pe, launch) + sample;
        expect(launch, pe, "offset", source.offsets[slot * samples(pe, launch) + sample], is_left_out ? 0 : at);
        for (int64_t i = 0; i < length(pe, bag, launch) && !is_left_out; ++i, ++at) {
          const int64_t wanted = value(pe, begins[static_cast<size_t>(bag)] + i, launch);
          expect(launch, pe, "index", static_cast<const int32_t*>(source.indices)[at], wanted);
          expect(launch, pe, "weight", static_cast<int64_t>(source.weights[at] * 2), wanted);
        }
      }
    }
    expect(launch, pe, "last offset", source.offsets[num_slots(rank) * samples(pe, launch)], at);
    expect(launch, pe, "count", source.count, at);
  }

  // Nobody writes behind a region.
  void check_guard(int64_t launch, int pe) const {
    const Sender& sender = senders[static_cast<size_t>(pe)];
    const uint8_t* guard = heap + regions[launch % kRegions] + sender.region_offset + region(rank, pe).end;
    for (uint64_t i = 0; i < kGuardBytes; ++i) expect(launch, pe, "byte behind the region", guard[i], 0);
  }

  void expect(int64_t launch, int pe, const char* what, int64_t found, int64_t wanted) const {
    if (found == wanted) return;
    driver::fail(driver::kWrongOutput, "PE %d, launch %ld, from PE %d: %s %ld, not %ld", rank, launch, pe, what, found,
                 wanted);
  }

  World& world;
  const int rank;
  const int size;
  const int64_t num_features = options.number("--features");
  const int64_t max_batch = options.number("--batch");
  const int64_t chunk = options.number("--chunk");
  uint64_t regions_bytes = 0;
  uint64_t regions[kRegions];
  std::vector<Slot> slots;
  std::vector<Owner> owners;
  std::vector<Sender> senders;
  std::vector<int64_t> chunks;
  std::vector<int64_t> slot_begins;
  std::vector<int64_t> longest;
  std::vector<uint64_t> added_up;
  std::vector<uint64_t> sent;
  std::vector<int32_t> no_offsets;
  std::vector<po::LookupSource> sources[kRegions];
  std::optional<std::thread> readers[kRegions];
  std::vector<uint64_t> heaps;
  Report report{};
  Plan plan{};
  uint8_t* heap = nullptr;
  po::LocalState local{};
  po::ErrorRecord error{};
  po::InputErrorRecord input_error{};
  std::unique_ptr<po::DelayedNetwork> network;
};

}  // namespace

int main(int argc, char** argv) {
  std::unique_ptr<World> world;
  return driver::run(argc, argv, options, [&](int rank, int size) {
    if (!world) world = std::make_unique<World>(size);
    return std::make_unique<Pe>(*world, rank, size);
  });
}
"""

PLAIN = "--pes=2 --wgs=3 --threads=2"
LONE = "--pes=2 --wgs=3 --threads=1"
AHEAD = "--pes=3 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=500"
# Regions are read until the launch but one behind begins, and no credit says sooner that they may be filled.
SLOW_READERS = "--pes=3 --wgs=2 --threads=2 --epochs=20 --read-us=1500 --slow-pe=2 --slow-us=1000"
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0 --epochs=12"
FULL = "--pes=3 --full=1 --wgs=2 --threads=2"
# A PE stays away from a launch; the others give up, and run launches behind it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=2 --stop-pe=1 --trouble-at=3 --queued=2 --epochs=6 --timeout-ms=1500"
ABSENT_FOR_ONE_PIECE = f"{TROUBLE} --bare-pe=0"  # what PE 0 has for itself is a header
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
    "staged_slow_readers": f"{SLOW_READERS} --staged=1 --delay-us=200",
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": f"{TROUBLE} --staged=1 --delay-us=100",
    "absent_for_one_piece": ABSENT_FOR_ONE_PIECE,
    "another_contract": "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6",
}

MUTATIONS = {
    "chunks_are_told_before_all_warps_have_added_up": Mutation((Drop("sums-sync"),), PLAIN, RACE),
    "chunks_are_not_awaited": Mutation((Drop("sums-await"),), LONE, RACE),
    "chunks_are_told_without_a_release": Mutation((Relaxed("flag-release"),), LONE, RACE),
    "chunks_are_taken_before_they_are_scanned": Mutation((Drop("chunks-sync"),), PLAIN, RACE),
    "slots_are_taken_before_they_are_scanned": Mutation(
        (Drop("slots-sync"),), "--pes=3 --wgs=1 --threads=3", RACE | {Exit.WRONG_REPORT, Exit.WRONG_REMAINS}
    ),
    "slots_are_told_before_all_warps_have_found_them": Mutation((Drop("found-sync"),), PLAIN, RACE),
    "slots_are_not_awaited": Mutation(
        (Drop("found-await"),), LONE, RACE | {Exit.WRONG_REPORT, Exit.WRONG_REMAINS, Exit.TIMED_OUT}
    ),
    "inputs_are_stored_without_credit": Mutation((Condition("credit-before-inputs", "true"),), SLOW_READERS, RACE),
    "inputs_are_put_without_credit": Mutation(
        (Drop("credit-before-input-puts"),), f"{SLOW_READERS} --staged=1 --delay-us=200", RACE
    ),
    "inputs_are_not_awaited": Mutation((Drop("inputs-await"),), PLAIN, RACE),
    "a_message_is_told_with_its_first_piece": Mutation(
        (Swap("message-complete", "num_pieces", "1"),), PLAIN, RACE | {Exit.WRONG_REMAINS}
    ),
    "messages_that_find_no_room_are_sent": Mutation(
        (Swap("capacity", "count() > owner.capacity", "false"),), FULL, RACE | {Exit.WRONG_REPORT}
    ),
    "messages_behind_an_aborted_launch": Mutation(
        (Condition("inputs-unless-aborted", "false"),), ABSENT_FOR_ONE_PIECE, {Exit.TOOK_PART}
    ),
    "no_fence_behind_inputs": Mutation((Drop("inputs-fence"),), STAGED, RACE),
    "outgoing_inputs_are_overwritten": Mutation((Drop("inputs-quiet"),), f"{STAGED} --delay-us=1500", RACE),
}


class TestEmbeddingInputs(SanitizerSuite):
    builds: ClassVar = {"inputs": Build()}
    cases: ClassVar = {"inputs": CASES}
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "inputs")
