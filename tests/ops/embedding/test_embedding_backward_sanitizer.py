"""The backward pass of embedding_all_to_all under ThreadSanitizer: no error, but one for each mutation."""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, Before, Condition, Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of embedding_backward with all PEs as threads of one process, and checks every row.
#include <cmath>
#include <numeric>

#include "driver.h"
#include "kernels/embedding_backward.cuh"

namespace {

#ifndef STEP
#define STEP kSgd
#endif

using namespace po::embedding_backward;
#ifndef DRIVER_WIRE
#define DRIVER_WIRE kFloat32
#endif
#ifndef DRIVER_LANES
#define DRIVER_LANES 32
#endif
#ifndef DRIVER_ROW_CHUNKS
#define DRIVER_ROW_CHUNKS 32
#endif
#ifndef DRIVER_POOLING
#define DRIVER_POOLING kSum
#endif
#ifndef DRIVER_ALIGNED
#define DRIVER_ALIGNED false
#endif

constexpr Config kConfig{.scalar = po::DType::kFloat32,
                         .wire = po::DType::DRIVER_WIRE,
                         .step = Step::STEP,
                         .pooling = Pooling::DRIVER_POOLING,
                         .aligned = DRIVER_ALIGNED,
                         .lanes = DRIVER_LANES,
                         .row_chunks = DRIVER_ROW_CHUNKS,
                         .wide_rows = false};
constexpr bool kUpdates = kConfig.step != Step::kGradient;
constexpr bool kHasFactors = kConfig.pooling == Pooling::kWeightedSum;
using Wire = po::ScalarOf<kConfig.wire>;
using Backward = Kernel<kConfig>;

constexpr uint64_t kReadyStride = 64;
constexpr int64_t kLookups = 3;       // of a bag
constexpr int64_t kOtherColumns = 8;  // of the tensor that has the gradient

driver::Options options({{"--tables", "2"},
                         {"--rows", "5"},
                         {"--width", "6"},
                         {"--batch", "4"},  // of a PE
                         {"--pushing", "1"},
                         {"--pushing-wg-lookups", "0"},
                         {"--slice", "2"},
                         {"--empty-pe", "-1"},    // has no samples
                         {"--idle-table", "-1"},  // all its lookups are skipped
                         {"--credit-ahead", "0"},  // behind a launch that was given up, as of PEs that have ended it
                         {"--alternate", "0"}},   // launches lie at other places in turn, as those of two plans do
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

// Small whole numbers: they and their sums are exact.
float gradient_value(int64_t sample, int64_t column, int64_t launch) {
  return static_cast<float>((sample * 7 + column * 5 + launch * 11) % 9 - 4);
}

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    batch_start.push_back(0);
    for (int pe = 0; pe < size; ++pe) {
      batch_start.push_back(batch_start.back() + (pe == options.number("--empty-pe") ? 0 : options.number("--batch")));
    }
    const uint64_t table_bytes = static_cast<uint64_t>(batch_start.back() * width) * sizeof(Wire::Storage);
    plan.staging_offset = take(static_cast<uint64_t>(num_tables + 1) * table_bytes);
    for (int64_t t = 0; t < num_tables; ++t) {
      tables.push_back({(rank * num_tables + t) * width, static_cast<uint64_t>(t) * table_bytes});
      members.push_back(t);
      rows.emplace_back(static_cast<size_t>(num_rows * width), 1.0f);
      groups.push_back({reinterpret_cast<uint8_t*>(rows.back().data()), nullptr, nullptr, num_rows, width,
                        t * num_rows, t, 1, t * num_rows * width});
      const auto first = static_cast<int64_t>(pushes.size());
      for (int hop = 1; hop < size && samples() != 0; ++hop) {
        const int owner = (rank + hop) % size;
        const uint64_t outgoing = take(static_cast<uint64_t>(samples() * width) * sizeof(Wire::Storage));
        pushes.push_back({owner, t, width, (owner * num_tables + t) * width, static_cast<uint64_t>(t) * table_bytes,
                          outgoing, first, size - 1});
      }
    }
    for (size_t i = 0; i < pushes.size(); ++i) {
      other_pushes.push_back(pushes[i]);
      other_pushes.back().outgoing_offset = pushes[(i + 1) % pushes.size()].outgoing_offset;
    }
    expected = rows;
    pushed.resize(pushes.size() + 1);
    num_slots = static_cast<size_t>(num_tables * batch_start.back() * kLookups / kSlotLookups + 2);
    chunks_done.resize(num_slots);
    allocate_heap();
    plan.groups = groups.data();
    plan.members = members.data();
    plan.tables = tables.data();
    plan.pushes = pushes.data();
    plan.num_groups = num_tables;
    plan.num_tables = num_tables;
    plan.num_pushes = static_cast<int64_t>(pushes.size());
    plan.slice_samples = options.number("--slice");
    plan.num_slices = po::ceil_div(samples(), plan.slice_samples);
    plan.pushing_wgs = pushes.empty() ? 0 : std::min(options.number("--pushing"), options.number("--wgs"));
    plan.pushing_wg_lookups = options.number("--pushing-wg-lookups");
    plan.pushed = pushed.data();
    plan.batch_start = batch_start.data();
    plan.batch = batch_start.back();
    plan.first_sample = batch_start[static_cast<size_t>(rank)];
    plan.num_samples = samples();
    plan.sum_elements = width;
  }

 private:
  int64_t samples() const {
    return batch_start[static_cast<size_t>(rank) + 1] - batch_start[static_cast<size_t>(rank)];
  }

  int64_t index_of(int64_t table, int64_t sample, int64_t lookup, int64_t launch) const {
    if (table == options.number("--idle-table")) return num_rows;
    return (sample * 3 + table + lookup * lookup + launch) % (num_rows + 1);  // the last one is skipped
  }

  void run_kernel(int64_t launch) override {
    std::vector<std::pair<int64_t, int32_t>> lookups;
    for (int64_t t = 0; t < num_tables; ++t) {
      for (int64_t b = 0; b < plan.batch; ++b) {
        for (int64_t l = 0; l < kLookups; ++l) {
          const int64_t row = index_of(t, b, l, launch);
          if (row < num_rows) lookups.emplace_back(t * num_rows + row, static_cast<int32_t>(t * plan.batch + b));
        }
      }
    }
    std::stable_sort(lookups.begin(), lookups.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<int64_t> keys;
    std::vector<int32_t> bags;
    for (const auto& [key, bag] : lookups) {
      keys.push_back(key);
      bags.push_back(bag);
    }
    const int64_t columns = size * num_tables * width;
    std::vector<Wire::Storage> gradient;  // columns of a larger one
    for (int64_t b = 0; b < samples(); ++b) {
      for (int64_t c = 0; c < columns; ++c) {
        const float value = gradient_value(batch_start[static_cast<size_t>(rank)] + b, c, launch);
        gradient.push_back(Wire::from_float(value));
      }
      gradient.insert(gradient.end(), kOtherColumns, Wire::from_float(std::nanf("")));
    }
    const float rate = 0.5f;
    Plan used = plan_of(launch);
    if (options.number("--alternate") != 0 && launch % 2 == 1) {  // one PE's rows are another one's
      used.staging_offset += static_cast<uint64_t>(options.number("--batch") * width) * sizeof(Wire::Storage);
      used.pushes = other_pushes.data();
    }
    Call call{};
    call.gradient = reinterpret_cast<const uint8_t*>(gradient.data());
    call.gradient_stride = columns + kOtherColumns;
    call.keys = keys.data();
    call.bags = bags.data();
    const auto count = static_cast<int64_t>(keys.size());
    call.count = &count;
    call.forward_pass = call_of(launch);
    std::vector<float> chunk_sums(num_slots * static_cast<size_t>(width), std::nanf(""));
    call.chunk_sums = chunk_sums.data();
    call.chunks_done = chunks_done.data();
    call.rate = &rate;
    call.step_count = &step_count;
    std::vector<float> factors(keys.size(), 1.0f);
    std::vector<int32_t> places_of_factors(keys.size());
    std::iota(places_of_factors.begin(), places_of_factors.end(), 0);
    factor_gradients.assign(keys.size(), 0.0f);
    if (kHasFactors) {
      call.factors = factors.data();
      call.lookups = places_of_factors.data();
      call.factor_gradients = factor_gradients.data();
      call.num_factors = static_cast<int64_t>(keys.size());
    }
    call.beta_powers = beta_powers;
    // Sums of all rows, or, in every second launch, of those that lookups have.
    std::vector<float> sums(static_cast<size_t>(num_tables * num_rows * width), 0.0f);
    std::vector<int64_t> places;
    for (size_t i = 0; i < keys.size(); ++i) {
      places.push_back(i == 0 ? 0 : places.back() + (keys[i] != keys[i - 1] ? width : 0));
    }
    if (!kUpdates) {
      call.sums = sums.data();
      call.places = launch % 2 == 1 ? places.data() : nullptr;
    }
    if (number("--credit-ahead") != 0 && error.state != 0) {
      const uint64_t credit = credit_of(launch);
      const std::vector<uint64_t> before = grant_ahead(credit);
      launch_on_host<Backward>(used, call);
      take_back(before, credit);
    } else {
      launch_on_host<Backward>(used, call);
    }
    if (!kUpdates) make_step(keys, sums, call.places);
  }

  // This launch's credit, as it would come of peers that had not given up. Returns what was there.
  std::vector<uint64_t> grant_ahead(uint64_t credit) const {
    std::vector<uint64_t> before;
    for (int pe = 0; pe < size; ++pe) before.push_back(__atomic_exchange_n(grant_of(pe), credit, __ATOMIC_ACQ_REL));
    return before;
  }

  // What has come since stays.
  void take_back(const std::vector<uint64_t>& before, uint64_t credit) const {
    for (int pe = 0; pe < size; ++pe) {
      uint64_t expected = credit;
      __atomic_compare_exchange_n(grant_of(pe), &expected, before[static_cast<size_t>(pe)], false, __ATOMIC_ACQ_REL,
                                  __ATOMIC_ACQUIRE);
    }
  }

  uint64_t credit_of(int64_t launch) const {
    po::Team team = plan_of(launch).team;
    po::name_call(team, call_of(launch));
    return po::flag_value(local.epoch + 1, team.contract_hash);
  }

  // Of the next launch.
  uint64_t* grant_of(int pe) const {
    po::Team next = plan.team;
    next.epoch = local.epoch + 1;
    return po::local_word(next, po::grant_offset(next, pe));
  }

  // What a step with the kernel's sums makes of the rows.
  void make_step(const std::vector<int64_t>& keys, const std::vector<float>& sums, const int64_t* places) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (i != 0 && keys[i] == keys[i - 1]) continue;
      const int64_t first = places == nullptr ? keys[i] * width : places[i];
      for (int64_t c = 0; c < width; ++c) {
        rows[static_cast<size_t>(keys[i] / num_rows)][static_cast<size_t>(keys[i] % num_rows * width + c)] -=
            0.5f * sums[static_cast<size_t>(first + c)];
      }
    }
  }

  void expect(int64_t launch) {
    for (int64_t t = 0; t < num_tables; ++t) {
      for (int64_t b = 0; b < plan.batch; ++b) {
        for (int64_t l = 0; l < kLookups; ++l) {
          const int64_t row = index_of(t, b, l, launch);
          for (int64_t c = 0; c < width && row < num_rows; ++c) {
            const float value = gradient_value(b, (rank * num_tables + t) * width + c, launch);
            expected[static_cast<size_t>(t)][static_cast<size_t>(row * width + c)] -= 0.5f * value;
          }
        }
      }
    }
  }

  void check(int64_t launch) override {
    expect(launch);
    check_rows(launch);
    check_factors(launch, false);
  }

  // A PE that has not come, or under another contract, has granted no credit: no row has changed.
  void check_given_up(int64_t launch) override {
    check_rows(launch);
    check_factors(launch, kHasFactors);
  }

  void check_factors(int64_t launch, bool are_poisoned) const {
    for (const float value : factor_gradients) {
      if (std::isnan(value) != are_poisoned) {
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: gradient of a factor: %g", rank, launch, value);
      }
    }
  }

  void clear() override {
    std::fill(pushed.begin(), pushed.end(), 0);
    std::fill(chunks_done.begin(), chunks_done.end(), 0);
  }

  void check_rows(int64_t launch) const {
    for (size_t t = 0; t < rows.size(); ++t) {
      for (size_t i = 0; i < rows[t].size(); ++i) {
        if (rows[t][i] != expected[t][i]) {
          driver::fail(driver::kWrongOutput, "PE %d, launch %ld, table %zu, element %zu: %g, not %g", rank, launch, t,
                       i, rows[t][i], expected[t][i]);
        }
      }
    }
    for (const uint64_t count : pushed) {
      if (count != 0 && error.state == 0) {
        driver::fail(driver::kWrongRemains, "PE %d, launch %ld: a table has %lu pieces", rank, launch, count);
      }
    }
    for (const uint64_t count : chunks_done) {
      if (count != 0 && error.state == 0) {
        driver::fail(driver::kWrongRemains, "PE %d, launch %ld: a row has %lu chunks", rank, launch, count);
      }
    }
  }

  const int64_t num_tables = options.number("--tables");
  const int64_t num_rows = options.number("--rows");
  const int64_t width = options.number("--width");
  std::vector<int64_t> batch_start;
  std::vector<std::vector<float>> rows;
  std::vector<std::vector<float>> expected;
  std::vector<Table> tables;
  std::vector<Group> groups;
  std::vector<int64_t> members;
  std::vector<Push> pushes;
  std::vector<Push> other_pushes;
  std::vector<uint64_t> pushed;
  size_t num_slots = 0;
  std::vector<uint64_t> chunks_done;
  std::vector<float> factor_gradients;
  int64_t step_count = 0;
  float beta_powers[2] = {1, 1};
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""

PLAIN = "--pes=2 --wgs=3 --threads=2"
PIECES = f"{PLAIN} --slice=1 --batch=40"  # of one sample, so that many are on their way when the first one arrives
AHEAD = "--pes=3 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=500"
SEVERAL_RANGES = "--pes=2 --rows=1 --batch=50 --threads=3"
CHUNKS = "--pes=2 --rows=1 --batch=200 --threads=3 --epochs=4"
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0"
# Nobody needs the table. The next launch has another PE's rows in its place.
ALTERNATING = (
    "--pes=3 --alternate=1 --tables=1 --idle-table=0 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=300"
)
ALTERNATING_STAGED = "--pes=3 --alternate=1 --idle-table=0 --staged=1 --delay-us=500 --epochs=12"
OTHER_CONTRACT = "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6"
OTHER_CALL = f"{OTHER_CONTRACT} --other-call=1"
# A PE stays away from a launch. The others give up, and run launches after it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=2 --stop-pe=1 --trouble-at=3 --queued=2 --epochs=6 --timeout-ms=1500"
CREDIT_AHEAD = f"{TROUBLE} --credit-ahead=1"
ABSENT_WITHOUT_SAMPLES = f"{TROUBLE} --empty-pe=1"
CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warps": "--pes=3 --threads=1 --wgs=1",
    "plain": PLAIN,
    "rows_in_several_ranges": SEVERAL_RANGES,
    "rows_of_chunks": CHUNKS,
    "rows_of_chunks_behind_others": "--pes=3 --rows=2 --tables=3 --batch=130 --threads=2 --epochs=4",
    "all_push": "--pes=3 --wgs=2 --threads=2 --pushing=2 --slice=1",
    "all_push_behind_the_sort": "--pes=3 --wgs=3 --threads=2 --pushing-wg-lookups=1000 --slice=1",
    "all_push_behind_the_sort_staged": f"{STAGED} --wgs=3 --pushing-wg-lookups=1000",
    "a_pe_without_samples": "--pes=3 --empty-pe=1 --threads=2",
    "epochs_with_a_late_pe": AHEAD,
    "staged": STAGED,
    "alternating": ALTERNATING,
    "alternating_staged": ALTERNATING_STAGED,
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": f"{TROUBLE} --staged=1 --delay-us=100",
    "credit_behind_an_aborted_launch": CREDIT_AHEAD,
    "absent_without_samples": ABSENT_WITHOUT_SAMPLES,
    "another_contract": OTHER_CONTRACT,
    "another_call": OTHER_CALL,
    "another_call_staged": f"{OTHER_CALL} --staged=1 --delay-us=100",
}

# With gradients of bfloat16, in transit and in the staging memory.
NARROW = ("alone", "plain", "rows_of_chunks", "a_pe_without_samples", "staged", "alternating_staged", "some_are_near")

MUTATIONS = {
    "gradients_are_pushed_without_credit": Mutation((Condition("credit-before-pushes", "false"),), AHEAD, RACE),
    "gradients_are_pushed_behind_an_aborted_launch": Mutation(
        (Drop("pushes-unless-aborted"),), CREDIT_AHEAD, RACE | {Exit.TOOK_PART}
    ),
    "gradients_of_factors_of_an_aborted_launch_count": Mutation(
        (Drop("factors-poison"),), TROUBLE, {Exit.WRONG_OUTPUT}, "weighted"
    ),
    "gradients_are_not_awaited": Mutation((Drop("gradients-await"),), PLAIN, RACE),
    "a_table_is_told_with_its_first_piece": Mutation(
        (Swap("table-pushed", "static_cast<uint64_t>(plan_.num_slices)", "1"),), PIECES, RACE | {Exit.WRONG_REMAINS}
    ),
    "pieces_are_not_handed_out_again": Mutation((Drop("pieces-reset"),), PLAIN, {Exit.TIMED_OUT, Exit.WRONG_REMAINS}),
    "rows_change_before_all_credits": Mutation(
        (Condition("credits-before-updates", "false"),), ABSENT_WITHOUT_SAMPLES, {Exit.WRONG_OUTPUT}
    ),
    "a_row_begins_anew_in_each_range": Mutation((Swap("row-begins", "at == 0", "i == 0"),), SEVERAL_RANGES, RACE),
    "a_row_ends_early": Mutation((Swap("row-ends", "first + stop", "first + stop - 1"),), PLAIN, {Exit.WRONG_OUTPUT}),
    "chunks_are_not_awaited": Mutation(
        (Swap("chunk-done", "static_cast<uint64_t>(num_chunks)", "1"),), CHUNKS, RACE | {Exit.WRONG_OUTPUT}
    ),
    "a_chunk_is_left_out": Mutation((Condition("chunk-of-the-row", "true"),), CHUNKS, {Exit.WRONG_OUTPUT}),
    "chunks_are_not_reset": Mutation((Drop("chunks-reset"),), CHUNKS, {Exit.WRONG_REMAINS}),
    "signals_overtake_pushes": Mutation((OVERTAKES,), STAGED, RACE),
    "outgoing_gradients_are_overwritten": Mutation((Drop("last-quiet"),), ALTERNATING_STAGED, RACE),
    "a_launch_ends_before_all_gradients_are_here": Mutation((Drop("all-gradients"),), ALTERNATING, RACE),
    "backward_passes_name_no_forward_pass": Mutation((Drop("call-named"),), OTHER_CALL, {Exit.WRONG_REPORT}),
    "the_number_of_a_call_is_not_compared": Mutation((Drop("call-hash"),), OTHER_CALL, {Exit.WRONG_REPORT}),
    "a_call_is_named_while_it_is_told": Mutation(
        (
            Drop("call-named"),
            Before("credit-of-backward", "if (wg.rank() == 0) name_call(shared.plan.team, call.forward_pass);"),
        ),
        PLAIN.replace("--pes=2", "--pes=3"),
        RACE | {Exit.MISMATCHED},  # a credit that left before its number is another call's to who compares it
    ),
    "rows_have_one_place": Mutation(
        (Swap("place-of-the-row", "call_.places[first]", "call_.places[0]"),), PLAIN, RACE, "gradient"
    ),
}


class TestEmbeddingBackward(SanitizerSuite):
    builds: ClassVar = {
        "sgd": Build(),
        "narrow": Build(("-DDRIVER_WIRE=kBFloat16",)),
        "gradient": Build(("-DSTEP=kGradient",)),
        "weighted": Build(("-DDRIVER_POOLING=kWeightedSum",)),
    }
    cases: ClassVar = {
        "sgd": CASES,
        "narrow": {name: CASES[name] for name in NARROW},
        "gradient": {
            name: CASES[name] for name in ("plain", "alone", "rows_in_several_ranges", "rows_of_chunks", "staged")
        },
        "weighted": {name: CASES[name] for name in ("plain", "rows_of_chunks", "staged", "behind_an_aborted_launch")},
    }
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "sgd")
