"""all_reduce under ThreadSanitizer: no error, but one for each mutation."""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, Before, Condition, Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of all_reduce with all PEs as threads of one process, and checks every output.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "driver.h"
#include "kernels/all_reduce.cuh"

namespace {

using namespace po::all_reduce;
constexpr Config kConfig DRIVER_CONFIG;  // the compile names it; fp32
using AllReduce = Kernel<kConfig>;
using Plan = AllReduce::Plan;

constexpr uint64_t kReadyStride = 256;
constexpr uint64_t kPacketBlocks = 64;
constexpr uint64_t kMostWarps = 8;

driver::Options options({{"--rows", "5"},
                         {"--width", "200"},
                         {"--empty-between", "0"},
                         {"--nans", "0"},    // elements that look like empty places
                         {"--varied", "0"}}, // width and grid
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

// Small whole numbers: sums are exact.
float x_value(int pe, int64_t i, int64_t launch) { return static_cast<float>((i * 7 + pe * 5 + launch * 11) % 9 - 4); }

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    const auto pes = static_cast<uint64_t>(size);
    plan.sums_bytes = pes * kPacketBlocks * po::kBlockBytes;
    plan.sums_offset = take(2 * plan.sums_bytes);
    plan.results_bytes = kPacketBlocks * po::kBlockBytes;
    plan.results_offset = take(2 * plan.results_bytes);
    plan.copies_offset = take(2 * (plan.sums_bytes + plan.results_bytes));
    plan.flags_bytes = pes * kPacketBlocks * sizeof(uint64_t);
    plan.flags_offset = take(2 * plan.flags_bytes);
    plan.slices_offset = take(3 * way_bytes());
    plan.staging_offset = take(way_bytes());
    plan.turns_offset = take(pes * kMaxSliceWgs * kPutWords * 8);
    allocate_heap();
    empty_packets();
    plan.squares = squares.data();
    plan.all_reachable = !is_staged();
  }

  void connect() override {
    BasePe::connect();
    std::copy(peer_heaps.begin(), peer_heaps.end(), plan.heaps);
  }

 private:
  uint64_t way_bytes() const { return kPlaces * static_cast<uint64_t>(size) * kMostWarps * po::kBlockBytes; }

  int64_t rows_of(int64_t launch) const {
    if (options.number("--empty-between") != 0 && launch % 2 == 1) return 0;
    return options.number("--rows") + launch % 3;
  }

  void run_kernel(int64_t launch) override {
    const int64_t rows = rows_of(launch);
    const int64_t width = width_of(launch);
    std::vector<float> x;
    residual.clear();
    for (int64_t i = 0; i < rows * width; ++i) {
      x.push_back(is_nan_at(i) ? po::bits_float(0xffffffffu) : x_value(rank, i, launch));
    }
    for (int64_t i = 0; i < rows * width; ++i) residual.push_back(static_cast<float>(i % 5));
    std::vector<float> weight(static_cast<size_t>(width), 2.0f);
    norm.assign(x.size(), -1e9f);
    Plan used = plan_of(launch);
    // Slices lie at other places from launch to launch, as those of other plans do.
    const uint64_t shift = launch % 3 * way_bytes();
    used.slices_offset = plan.slices_offset + shift;
    used.returned_offset = plan.slices_offset + (shift + way_bytes()) % (3 * way_bytes());
    Call call{};
    call.x = reinterpret_cast<const uint8_t*>(x.data());
    call.residual = reinterpret_cast<const uint8_t*>(residual.data());
    call.output = reinterpret_cast<uint8_t*>(residual.data());  // the sum takes the residual's place
    call.weight = reinterpret_cast<const uint8_t*>(weight.data());
    call.norm_output = reinterpret_cast<uint8_t*>(norm.data());
    call.eps = 0.5f;
    const auto per_row = static_cast<int32_t>(po::ceil_div<int64_t>(width, 128));
    call.rows = {width, static_cast<int32_t>(rows), static_cast<int32_t>(rows) * per_row, po::divisor_of(per_row)};
    call.local = &local;
    call.forward_pass = call_of(launch);
    const int64_t more_wgs = launch % 3 * options.number("--varied");
    const int adders = kConfig.algorithm == Algorithm::kTwoShot ? size : 1;
    used.blocks_per_adder = po::ceil_div(call.rows.num_blocks, adders);
    used.size = po::divisor_of(size);
    used.num_wgs = po::divisor_of(static_cast<int32_t>(options.number("--wgs") + more_wgs));
    launch_on_host<AllReduce>(used, call, more_wgs);
  }

  void check_given_up(int64_t launch) override {
    for (size_t place = 0; place < norm.size(); ++place) {
      if (po::float_bits(residual[place]) != 0xffffffffu || po::float_bits(norm[place]) != 0xffffffffu) {
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: element %zu is %g, %g, not poisoned", rank, launch,
                     place, residual[place], norm[place]);
      }
    }
  }

  void check_traces() const override {
    BasePe::check_traces();
    const uint64_t* flags = po::local_word(plan.team, plan.flags_offset);
    const auto last = std::max_element(world.epochs.begin(), world.epochs.end()) - world.epochs.begin();
    for (uint64_t i = 0; i < 2 * plan.flags_bytes / 8; ++i) check_trace("flag", static_cast<int>(last), flags[i]);
    const uint64_t* turns = po::local_word(plan.team, plan.turns_offset);
    for (int i = 0; i < kPutWords * size * kMaxSliceWgs; ++i) check_trace("turn", i / kMaxSliceWgs % size, turns[i]);
  }

  void clear() override { empty_packets(); }

  void empty_packets() {
    std::memset(heap + plan.sums_offset, 0xff, 2 * plan.sums_bytes);
    std::memset(heap + plan.results_offset, 0xff, 2 * plan.results_bytes);
    std::memset(heap + plan.slices_offset, 0xff, 3 * way_bytes());
  }

  void check(int64_t launch) override {
    const int64_t width = width_of(launch);
    for (int64_t row = 0; row < rows_of(launch); ++row) {
      float squares_sum = 0;
      std::vector<float> expected;
      for (int64_t i = row * width; i < (row + 1) * width; ++i) {
        float sum = 0;
        for (int pe = 0; pe < size; ++pe) sum += x_value(pe, i, launch);
        if (is_nan_at(i)) sum = po::bits_float(0x7fffffffu);
        expected.push_back(sum + static_cast<float>(i % 5));
        squares_sum += expected.back() * expected.back();
      }
      const float factor = 1.0f / std::sqrt(squares_sum / static_cast<float>(width) + 0.5f);
      for (int64_t i = 0; i < width; ++i) {
        const auto place = static_cast<size_t>(row * width + i);
        const float sum = expected[static_cast<size_t>(i)];
        if (options.number("--nans") != 0) {
          if (residual[place] != sum && !(std::isnan(residual[place]) && std::isnan(sum))) {
            driver::fail(driver::kWrongOutput, "PE %d, launch %ld, row %ld, column %ld: %g, not %g", rank, launch, row,
                         i, residual[place], sum);
          }
          continue;
        }
        if (residual[place] != sum || norm[place] != sum * factor * 2.0f) {
          driver::fail(driver::kWrongOutput, "PE %d, launch %ld, row %ld, column %ld: %g, not %g; norm %g, not %g",
                       rank, launch, row, i, residual[place], sum, norm[place], sum * factor * 2.0f);
        }
      }
    }
  }

  // Of all PEs: each chunk's last elements are the NaN that an empty place has.
  static bool is_nan_at(int64_t i) { return options.number("--nans") != 0 && i % 4 >= 2; }

  int64_t width_of(int64_t launch) const {
    return options.number("--width") + launch % 3 * 100 * options.number("--varied");
  }

  std::vector<float> residual;  // and what takes its place
  std::vector<float> norm;
  std::vector<po::Packet> squares = std::vector<po::Packet>(kPacketBlocks);
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""


PLAIN = "--pes=2 --threads=3"
STEPS = "--pes=2 --threads=3 --rows=24"  # several rows for each warp
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0"
AHEAD_STAGED = "--pes=3 --rows=3 --staged=1 --delay-us=3000 --epochs=60 --empty-between=1 --timeout-ms=5000"
NO_ROWS_BETWEEN = "--pes=3 --threads=2 --rows=3 --epochs=40 --empty-between=1 --slow-pe=1 --slow-us=300"
OTHER_CONTRACT = "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6"
OTHER_CALL = f"{OTHER_CONTRACT} --other-call=1"
# A PE stays away from a launch. The others give up, and run launches after it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=3 --stop-pe=1 --trouble-at=3 --queued=3 --epochs=6 --timeout-ms=1500"
TROUBLE_STAGED = f"{TROUBLE} --staged=1 --delay-us=100"
TROUBLE_NEAR = f"{TROUBLE_STAGED} --pes=4 --node=2"
# Launches of several widths and grids. A place belongs at times to a near PE, at times to a PE that puts whole blocks.
VARIED = "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=24 --varied=1"
NANS = "--pes=3 --threads=3 --nans=1"
CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warps": "--pes=3 --threads=1 --wgs=1",
    "plain": PLAIN,
    "steps": f"{STEPS} --pes=3",
    "many": "--pes=4 --threads=2 --wgs=3 --epochs=5",
    "wide": "--pes=2 --width=1000 --rows=4 --threads=3",
    "epochs_with_a_late_pe": "--pes=3 --slow-pe=1",
    "nans": NANS,
    "staged": STAGED,
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "some_are_near_varied": VARIED,
    "launches_without_rows": NO_ROWS_BETWEEN,
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": TROUBLE_STAGED,
    "behind_an_aborted_launch_some_are_near": TROUBLE_NEAR,
    "another_contract": OTHER_CONTRACT,
    "another_contract_staged": f"{OTHER_CONTRACT} --staged=1 --delay-us=100",
    "another_call": OTHER_CALL,
}

LARGE = ("alone", "lone_warps", "many", "launches_without_rows", "behind_an_aborted_launch", "another_contract")

# On the host, results also order what their sender did before them, which they do not on the GPU. A PE that reads none
# has words alone.
_READ_RESULTS = "read_packets(kPhaseTurn, returned, step, first, i, is_sent, packets)"
NO_RESULTS = (Swap("results-read", _READ_RESULTS, "true"), Drop("results-emptied"))

MUTATIONS = {
    "sums_in_one_area_for_all_epochs": Mutation(
        (Swap("sums-areas", "parity() * plan_.sums_bytes", "0"),), PLAIN, RACE, "one_shot"
    ),
    "results_in_one_area_for_all_epochs": Mutation(
        (Swap("results-areas", "parity() * plan_.results_bytes", "0"),), TROUBLE_NEAR, RACE, "two_shot"
    ),
    "credits_are_not_awaited": Mutation((Drop("packets-credits"),), NO_ROWS_BETWEEN, RACE, "one_shot"),
    "packets_of_another_contract_will_do": Mutation(
        (Swap("packet-flag", "launch_flag(team)", "flag_value(team.epoch, 0)"),),
        OTHER_CONTRACT,
        {Exit.WRONG_OUTPUT},
        "one_shot",
    ),
    "sums_name_no_forward_pass": Mutation((Drop("sum-named"),), OTHER_CALL, {Exit.WRONG_REPORT}, "one_shot"),
    "any_packet_will_do": Mutation(
        (Swap("bare-packet-is-there", "packets[i].is_there()", "true"),),
        PLAIN,
        RACE,
        "two_shot",
    ),
    "places_are_not_emptied": Mutation((Drop("emptied"),), PLAIN, {Exit.WRONG_OUTPUT}, "two_shot"),
    "ones_travel_as_they_are": Mutation(
        (Condition("empty-travels", "false"),), f"{NANS} --timeout-ms=1500", {Exit.TIMED_OUT}, "one_shot"
    ),
    # One PE adds up slowly. Data put to the places of its results is taken before the results come.
    "older_packets_are_put": Mutation(
        (
            Drop("none-is-put"),
            Before("packets-behind-word", "if (team_.rank == 1 && phase == kPhaseSums) usleep(100);"),
        ),
        VARIED,
        RACE,
        "two_shot",
    ),
    "sends_behind_an_aborted_launch": Mutation((Drop("elements-take-part"),), TROUBLE, RACE, "one_shot"),
    "puts_results_behind_an_aborted_launch": Mutation(
        (Swap("put-takes-part", "takes_part_", "true"),), TROUBLE_STAGED, RACE | {Exit.TOOK_PART}, "two_shot"
    ),
    "staged_packets_before_their_word": Mutation((Condition("packets-behind-word", "true"),), STAGED, RACE, "two_shot"),
    "epoch_is_told_behind_its_use": Mutation((Drop("epoch-known"),), PLAIN, RACE, "one_shot"),
    "squares_are_not_awaited": Mutation(
        (Swap("squares-flag", "packet.flag == flag", "packet.flag != 1"),), PLAIN, {Exit.WRONG_OUTPUT}, "two_shot"
    ),
    "slices_without_credit": Mutation(
        (Swap("slices-credit", "await_credit(team_, pe)", "true"),), f"{STEPS} --pes=3 --epochs=20", RACE
    ),
    "results_are_not_read": Mutation(NO_RESULTS, STEPS, {Exit.WRONG_OUTPUT}),  # no race
    "turns_are_not_awaited": Mutation((*NO_RESULTS, Condition("slices-credit", "true")), STEPS, RACE),
    "steps_lie_in_the_same_places": Mutation(
        (Swap("slices-alternate", "step % kPlaces", "0"),), STEPS, RACE | {Exit.TIMED_OUT}
    ),
    "elements_are_sent_before_the_turn": Mutation(
        (Drop("turn-send"), Before("turn-begins", "if (turn < num_steps_) send(turn, elements);")), STEPS, RACE
    ),
    "a_turn_ends_before_all_warps_have_ended_it": Mutation((Drop("turn-done"),), STEPS, RACE),
    "a_turn_begins_before_it_is_awaited": Mutation((Drop("turn-begins"),), STEPS, RACE),
    "turns_do_not_release": Mutation(
        (*NO_RESULTS, Swap("turn-release", "flag_store_release_sys", "flag_store_relaxed_sys")), STEPS, RACE
    ),
    "turns_do_not_acquire": Mutation(
        (*NO_RESULTS, Swap("step-acquire", "flag_load_acquire_sys", "flag_load_relaxed_sys")), STEPS, RACE
    ),
    "any_turn_will_do": Mutation((*NO_RESULTS, Swap("step-expected", "step", "step != 0")), STEPS, RACE),
    "grants_of_all_epochs_in_one_place": Mutation(
        (Condition("grants-alternate", "false"),), AHEAD_STAGED, RACE | {Exit.TIMED_OUT}, build="one_shot"
    ),
    "one_staging_copy_of_the_grant": Mutation(
        (Swap("grant-copies", "static_cast<int>(team.epoch % kGrantCopies)", "0"),),
        AHEAD_STAGED,
        RACE,
        build="one_shot",
    ),
    "packets_of_all_epochs_have_one_word": Mutation(
        (Condition("packets-words", "false"),), f"{AHEAD_STAGED} --empty-between=0", RACE, build="one_shot"
    ),
    "copies_of_all_epochs_in_one_place": Mutation((Drop("copies-alternate"),), STAGED, RACE, build="one_shot"),
    "signals_overtake_put_packets": Mutation((OVERTAKES,), STAGED, RACE, build="one_shot"),
    "signals_overtake_put_slices": Mutation((OVERTAKES,), STAGED, RACE),
    "turns_of_puts_have_one_word": Mutation(
        (Swap("put-words", "turn % kPlaces", "0"),), STAGED, RACE | {Exit.TIMED_OUT}
    ),
    "elements_and_results_have_one_word": Mutation((Swap("put-words", "are_results", "false"),), STAGED, RACE),
    "put_slices_are_read_before_their_word": Mutation((Swap("slices-lag", "kMaxLag", "1"),), STAGED, RACE),
    # A worker of PE 0 gives up while it waits for PE 1, which comes right after. PE 0's keeper, and the far PEs, see no
    # abort yet.
    "a_turn_that_was_given_up_is_put": Mutation(
        (
            Before("turn-begins", "if (team_.rank == 1 && team_.epoch == 3 && turn == 1) usleep(1600000);"),
            Condition("abort-tells-peers", "other == team.rank || !is_reachable(team, other)"),
            Condition(
                "wait-sees-abort",
                "(phase & ((1u << kCodeBits) - 1)) != kFirstPhase + 3 && (is_aborted(team) || peer_gave_up(team))",
            ),
            Condition("slices-of-a-given-up-turn", "has_given_up_"),
        ),
        "--pes=4 --node=2 --staged=1 --threads=4 --wgs=1 --rows=12 --timeout-ms=1500 --report-after-ms=2000",
        {Exit.WRONG_OUTPUT},
    ),
    "elements_stay_in_their_places": Mutation((Drop("elements-emptied"),), STEPS, {Exit.WRONG_OUTPUT}),
    "results_stay_in_their_places": Mutation((Drop("results-emptied"),), STEPS, RACE | {Exit.WRONG_OUTPUT}),
}


def _build(algorithm: str, vectors: int = 1, threads: int = 128) -> Build:
    config = f".algorithm = Algorithm::{algorithm}, .norms = true, .vectors = {vectors}, .threads = {threads}"
    return Build((f"-DDRIVER_CONFIG={{.scalar = po::DType::kFloat32, {config}}}",))


class TestAllReduce(SanitizerSuite):
    builds: ClassVar = {
        "one_shot": _build("kOneShot"),
        "two_shot": _build("kTwoShot", vectors=2),
        "two_shot_large": _build("kTwoShot", vectors=2, threads=512),  # last warps have blocks too
        "slices": _build("kSlices"),
    }
    cases: ClassVar = {**dict.fromkeys(builds, CASES), "two_shot_large": {name: CASES[name] for name in LARGE}}
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "slices")
