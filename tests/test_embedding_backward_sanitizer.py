"""The backward pass of embedding_all_to_all under ThreadSanitizer: silent, and loud without parts of its protocol."""

from __future__ import annotations

from typing import ClassVar

from mutations import Condition, Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of embedding_backward with all PEs as threads of one process, and checks every row.
#include "driver.h"
#include "kernels/embedding_backward.cuh"

namespace {

using namespace po::embedding_backward;
constexpr Config kConfig{.scalar = po::DType::kFloat32, .aligned = false};
using Backward = Kernel<kConfig>;

constexpr uint64_t kReadyStride = 64;
constexpr int64_t kLookups = 3;  // of a bag

driver::Options options({{"--pes", "2"},          {"--tables", "2"},
                         {"--rows", "5"},         {"--width", "6"},
                         {"--batch", "4"},        // of a PE
                         {"--wgs", "2"},          {"--threads", "2"},
                         {"--pushing", "1"},      {"--slice", "2"},
                         {"--epochs", "8"},       {"--staged", "0"},
                         {"--node", "1"},         // so many PEs in a row reach each other
                         {"--delay-us", "0"},     {"--empty-pe", "-1"},  // has no samples
                         {"--idle-table", "-1"},  // all its lookups are skipped
                         {"--alternate", "0"},    // launches lie at other places in turn, as those of two plans do
                         {"--slow-pe", "-1"},     {"--slow-us", "2000"},
                         {"--timeout-ms", "60000"},
                         {"--stop-pe", "-1"},     // does not launch, or ...
                         {"--other-pe", "-1"},    // ... launches under another contract, at ...
                         {"--trouble-at", "-1"},  // ... this launch (from 0); then all recover and go on
                         {"--queued", "0"}});     // launches behind it that do not look at errors

using driver::World;

// Small whole numbers: sums are exact.
float gradient_value(int64_t sample, int64_t column, int64_t launch) {
  return static_cast<float>((sample * 7 + column * 5 + launch * 11) % 9 - 4);
}

struct Pe {
  Pe(World& world_in, int rank_in, int size_in) : world(world_in), rank(rank_in), size(size_in) {
    batch_start.push_back(0);
    for (int pe = 0; pe < size; ++pe) {
      batch_start.push_back(batch_start.back() + (pe == options.number("--empty-pe") ? 0 : options.number("--batch")));
    }
    uint64_t bytes = 0;
    auto take = [&](uint64_t length) {
      const uint64_t offset = bytes;
      bytes += (length + 127) / 128 * 128;
      return offset;
    };
    const auto pes = static_cast<uint64_t>(size);
    const uint64_t table_bytes = static_cast<uint64_t>(batch_start.back() * width) * sizeof(float);
    po::Team& team = plan.team;
    team.grants_offset = take((pes + 2) * sizeof(po::Grant));
    team.ready_offset = take(pes * kReadyStride * 8);
    team.abort_offset = take(pes * 8);
    plan.staging_offset = take(static_cast<uint64_t>(num_tables + 1) * table_bytes);
    for (int64_t t = 0; t < num_tables; ++t) {
      tables.push_back({(rank * num_tables + t) * width, static_cast<uint64_t>(t) * table_bytes});
      members.push_back(t);
      rows.emplace_back(static_cast<size_t>(num_rows * width), 1.0f);
      groups.push_back({reinterpret_cast<uint8_t*>(rows.back().data()), nullptr, nullptr, num_rows, width,
                        t * (num_rows + 1), t, 1});
      for (int hop = 1; hop < size && samples() != 0; ++hop) {
        const int owner = (rank + hop) % size;
        const uint64_t outgoing = take(static_cast<uint64_t>(samples() * width) * sizeof(float));
        pushes.push_back({owner, t, width, (owner * num_tables + t) * width, static_cast<uint64_t>(t) * table_bytes,
                          outgoing});
      }
    }
    for (size_t i = 0; i < pushes.size(); ++i) {
      other_pushes.push_back(pushes[i]);
      other_pushes.back().outgoing_offset = pushes[(i + 1) % pushes.size()].outgoing_offset;
    }
    expected = rows;
    pushed.resize(pushes.size() + 1);
    heap = static_cast<uint8_t*>(std::aligned_alloc(128, bytes));
    std::memset(heap, 0, bytes);
    team.rank = rank;
    team.size = size;
    team.heap = heap;
    team.ready_stride = kReadyStride;
    team.local = &local;
    team.error = &error;
    team.input_error = &input_error;
    team.contract_hash = 0x5a5a;
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
    plan.pushed = pushed.data();
    plan.batch_start = batch_start.data();
    plan.batch = batch_start.back();
    plan.row_elements = size * num_tables * width;
  }

  int64_t samples() const {
    return batch_start[static_cast<size_t>(rank) + 1] - batch_start[static_cast<size_t>(rank)];
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

  void run() {
    for (int64_t launch = 0; launch < options.number("--epochs"); ++launch) {
      const bool is_trouble = launch == options.number("--trouble-at");
      // On a busy machine a PE may be late by more than a wait for one that never comes should last.
      const int64_t ms = is_trouble || options.number("--trouble-at") < 0 ? options.number("--timeout-ms") : 60000;
      plan.team.timeout_ns = static_cast<uint64_t>(ms) * 1000000;
      if (is_trouble && options.number("--stop-pe") >= 0) world.start.arrive_and_wait();
      if (rank == options.number("--slow-pe")) usleep(static_cast<useconds_t>(options.number("--slow-us")));
      if (is_trouble) {
        if (rank != options.number("--stop-pe")) run_into_trouble(launch);
        driver::recover(*this, options.number("--queued"));
        std::fill(pushed.begin(), pushed.end(), 0);
        continue;
      }
      run_kernel(launch);
      if (error.state != 0) {
        driver::fail(driver::exit_of_aborted(error), "PE %d, launch %ld: aborted, phase %lu, peer %lu", rank, launch,
                     error.phase, error.peer);
      }
      expect(launch);
      check(launch);
    }
  }

  int64_t index_of(int64_t table, int64_t sample, int64_t lookup, int64_t launch) const {
    if (table == options.number("--idle-table")) return num_rows;
    return (sample * 3 + table + lookup * lookup + launch) % (num_rows + 1);  // the last one is skipped
  }

  void run_kernel(int64_t launch) {
    std::vector<std::pair<int64_t, int32_t>> lookups;
    for (int64_t t = 0; t < num_tables; ++t) {
      for (int64_t b = 0; b < plan.batch; ++b) {
        for (int64_t l = 0; l < kLookups; ++l) {
          const int64_t key = t * (num_rows + 1) + index_of(t, b, l, launch);
          lookups.emplace_back(key, static_cast<int32_t>(t * plan.batch + b));
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
    std::vector<float> gradient;
    for (int64_t b = 0; b < samples(); ++b) {
      for (int64_t c = 0; c < plan.row_elements; ++c) {
        gradient.push_back(gradient_value(batch_start[static_cast<size_t>(rank)] + b, c, launch));
      }
    }
    const float rate = 0.5f;
    Plan used = plan;
    if (launch == options.number("--trouble-at") && rank == options.number("--other-pe")) ++used.team.contract_hash;
    if (options.number("--alternate") != 0 && launch % 2 == 1) {  // one PE's rows are another one's
      used.staging_offset += static_cast<uint64_t>(options.number("--batch") * width) * sizeof(float);
      used.pushes = other_pushes.data();
    }
    Call call{};
    call.gradient = reinterpret_cast<const uint8_t*>(gradient.data());
    call.keys = keys.data();
    call.bags = bags.data();
    call.num_lookups = static_cast<int64_t>(keys.size());
    call.rate = &rate;
    call.steps = steps;
    po::run_on_host<Backward>(&used, call, static_cast<int>(options.number("--wgs")),
                              static_cast<int>(options.number("--threads")));
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

  // A PE that has not come, or under another contract, has granted no credit: no row has changed.
  void run_into_trouble(int64_t launch) {
    for (int64_t i = 0; i <= options.number("--queued"); ++i) {
      run_kernel(launch + i);
      if (error.state == 0 || error.epoch != local.abort || error.epoch + static_cast<uint64_t>(i) != local.epoch) {
        driver::fail(driver::kWrongReport, "PE %d, launch %ld: did not notice the trouble, or not as it should", rank,
                     launch + i);
      }
      check(launch);
    }
  }

  // Nothing in this PE's heap is from a launch behind the one that its sender gave up.
  void check_traces() const { driver::check_words(*this); }

  void check(int64_t launch) const {
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
  }

  World& world;
  const int rank;
  const int size;
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
  std::vector<uint64_t> heaps;
  float steps[3] = {0, 1, 1};
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
AHEAD = "--pes=3 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=500"
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0"
# Nobody needs the table; the next launch has another PE's rows at its place.
ALTERNATING = (
    "--pes=3 --alternate=1 --tables=1 --idle-table=0 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=300"
)
ALTERNATING_STAGED = "--pes=3 --alternate=1 --idle-table=0 --staged=1 --delay-us=500 --epochs=12"
OTHER_CONTRACT = "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6"
# A PE stays away from a launch; the others give up, and run launches behind it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=2 --stop-pe=1 --trouble-at=3 --queued=2 --epochs=6 --timeout-ms=1500"
ABSENT_WITHOUT_SAMPLES = f"{TROUBLE} --empty-pe=1"
CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warps": "--pes=3 --threads=1 --wgs=1",
    "plain": PLAIN,
    "long_runs": "--pes=2 --rows=1 --batch=30 --threads=3",
    "all_push": "--pes=3 --wgs=2 --threads=2 --pushing=2 --slice=1",
    "a_pe_without_samples": "--pes=3 --empty-pe=1 --threads=2",
    "epochs_with_a_late_pe": AHEAD,
    "staged": STAGED,
    "alternating": ALTERNATING,
    "alternating_staged": ALTERNATING_STAGED,
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": f"{TROUBLE} --staged=1 --delay-us=100",
    "absent_without_samples": ABSENT_WITHOUT_SAMPLES,
    "another_contract": OTHER_CONTRACT,
}

MUTATIONS = {
    "gradients_are_pushed_without_credit": Mutation((Condition("credit-before-pushes", "true"),), AHEAD, RACE),
    "gradients_are_not_awaited": Mutation((Drop("gradients-await"),), PLAIN, RACE),
    "a_table_is_told_with_its_first_piece": Mutation(
        (Swap("table-pushed", "static_cast<uint64_t>(plan_.num_slices)", "1"),), PLAIN, RACE | {Exit.WRONG_REMAINS}
    ),
    "rows_change_before_all_credits": Mutation(
        (Condition("credits-before-updates", "false"),), ABSENT_WITHOUT_SAMPLES, {Exit.WRONG_OUTPUT}
    ),
    "a_run_begins_anew_in_each_range": Mutation(
        (Swap("run-begins", "at == 0", "at == begin"),), "--pes=2 --rows=1 --batch=30 --threads=1", RACE
    ),
    "a_run_ends_early": Mutation((Swap("run-ends", "same != warp_.size()", "true"),), PLAIN, {Exit.WRONG_OUTPUT}),
    "no_fence_behind_pushes": Mutation((Drop("pushes-fence"),), STAGED, RACE),
    "outgoing_gradients_are_overwritten": Mutation((Drop("outgoing-quiet"),), ALTERNATING_STAGED, RACE),
    "a_launch_ends_before_all_gradients_are_here": Mutation((Drop("all-gradients"),), ALTERNATING, RACE),
}


class TestEmbeddingBackward(SanitizerSuite):
    builds: ClassVar = {"sgd": Build()}
    cases: ClassVar = {"sgd": CASES}
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "sgd")
