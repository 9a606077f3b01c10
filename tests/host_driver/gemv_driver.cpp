// Runs the host build of gemv_all_reduce with all PEs as threads of one process, launch after launch, and checks every
// output. Built with -fsanitize=thread, as embedding_driver.cpp: what is not ordered by the protocol is a data race.
//
// exits.h says how it ends.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "driver.h"

#include "kernels/gemv_all_reduce.cuh"

namespace {

using po::gemv_all_reduce::Call;
using po::gemv_all_reduce::Config;
constexpr Config kConfig DRIVER_CONFIG;  // the compile names it
using Kernel = po::gemv_all_reduce::Kernel<kConfig>;
using Traits = Kernel::Traits;
using po::gemv_all_reduce::Plan;

constexpr uint64_t kReadyStride = 64;

driver::Options options(
    {{"--pes", "2"},           {"--rows", "85"},
     {"--columns", "40"},      {"--vectors", "3"},
     {"--wgs", "1"},           {"--threads", "1"},
     {"--epochs", "8"},        {"--first-epoch", "1"},
     {"--staged", "0"},        {"--node", "1"},  // so many PEs in a row reach each other where others are staged
     {"--long-pe", "-1"},                        // has so many columns, and this time-out of one wait
     {"--long-columns", "0"},  {"--long-timeout-ms", "0"},
     {"--empty-between", "0"},                             // every second launch has no rows
     {"--delay-us", "0"},                                  // longest delay of an operation of the network
     {"--slow-pe", "-1"},                                  // sleeps before each of its launches ...
     {"--slow-us", "3000"},    {"--timeout-ms", "60000"},  // of one wait; if there is trouble, from then until recovery
     {"--stop-pe", "-1"},                                  // does not launch, or ...
     {"--other-pe", "-1"},                                 // ... launches under another contract, at ...
     {"--trouble-at", "-1"},                               // ... this launch (from 0); then all recover and go on
     {"--queued", "0"}});  // launches behind that one that do not look at errors, as in a GPU's queue

// Small whole numbers: sums are exact in fp32.
float weight_value(int pe, int64_t row, int64_t k) { return static_cast<float>((row * 7 + k * 3 + pe) % 9 - 4); }
float x_value(int pe, int64_t n, int64_t k, int64_t launch) {
  return static_cast<float>((n * 5 + k + pe * 2 + launch * 11) % 7 - 3);
}

int64_t columns_of(int pe) {
  return options.number(pe == options.number("--long-pe") ? "--long-columns" : "--columns");
}

// What the PEs tell each other on the host.
using driver::World;

struct Pe {
  Pe(World& world_in, int rank_in, int size_in) : world(world_in), rank(rank_in), size(size_in) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < columns; ++k) weight.push_back(weight_value(rank, row, k));
    }
    uint64_t bytes = 0;
    auto take = [&](uint64_t length) {
      const uint64_t offset = bytes;
      bytes += (length + 127) / 128 * 128;
      return offset;
    };
    po::Team& team = plan.team;
    team.grants_offset = take(static_cast<uint64_t>(size + 2) * sizeof(po::Grant));
    team.ready_offset = take(static_cast<uint64_t>(size) * kReadyStride * 8);
    team.abort_offset = take(static_cast<uint64_t>(size) * 8);
    plan.packets.partials_bytes =
        static_cast<uint64_t>(size * tiles * items * Traits::kPacketsPerItem) * sizeof(po::Packet);
    plan.packets.partials_offset = take(2 * plan.packets.partials_bytes);
    plan.packets.results_bytes = static_cast<uint64_t>(tiles * items) * sizeof(po::Packet);
    plan.packets.results_offset = take(2 * plan.packets.results_bytes);
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
    plan.asked = &asked;
    plan.output.num_tiles = tiles;
    plan.output.stride = rows;
    plan.packets.all_reachable = size == 1 || options.number("--staged") == 0;
    local.epoch = static_cast<uint64_t>(options.number("--first-epoch")) - 1;
  }

  void connect(const std::vector<std::unique_ptr<Pe>>& all) {
    std::vector<uint64_t> heaps;
    for (int pe = 0; pe < size; ++pe) {
      heaps.push_back(reinterpret_cast<uint64_t>(all[static_cast<size_t>(pe)]->heap));
      const int64_t node = options.number("--node");
      plan.packets.heaps[pe] = plan.packets.all_reachable || pe / node == rank / node ? heaps.back() : 0;
    }
    plan.team.peer_heaps = plan.packets.heaps;
    network = std::make_unique<po::DelayedNetwork>(
        heaps.data(), size, static_cast<uint64_t>(options.number("--delay-us")), static_cast<uint64_t>(rank + 1));
    plan.team.network = network.get();
  }

  void run() {
    for (int64_t launch = 0; launch < options.number("--epochs"); ++launch) {
      const bool is_trouble = launch == options.number("--trouble-at");
      set_timeout(is_trouble);
      if (is_trouble && options.number("--stop-pe") >= 0) world.start.arrive_and_wait();
      if (rank == options.number("--slow-pe")) usleep(static_cast<useconds_t>(options.number("--slow-us")));
      if (rank == options.number("--long-pe")) await_others();
      if (launch == options.number("--trouble-at")) {
        if (rank != options.number("--stop-pe")) run_into_trouble(launch);
        driver::recover(*this, options.number("--queued"));
        continue;
      }
      const std::vector<float> output = run_kernel(launch);
      if (asked != 0)
        driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %u WGs stay counted", rank, launch, asked);
      if (error.state != 0) {
        driver::fail(driver::exit_of_aborted(error), "PE %d, launch %ld: aborted, phase %lu, peer %lu", rank, launch,
                     error.phase, error.peer);
      }
      check(output, launch);
    }
  }

  // On a busy machine a PE may be late by more than a wait for one that never comes should last.
  void set_timeout(bool is_trouble) {
    constexpr int64_t kMinute = 60000;
    int64_t ms = is_trouble || options.number("--trouble-at") < 0 ? options.number("--timeout-ms") : kMinute;
    if (rank == options.number("--long-pe")) ms = options.number("--long-timeout-ms");
    plan.team.timeout_ns = static_cast<uint64_t>(ms) * 1000000;
  }

  // Until all that the other PEs send in the next launch is there: their credit and, of each tile, their sums.
  void await_others() const {
    const uint64_t epoch = local.epoch + 1;
    const auto* sums = reinterpret_cast<const po::Packet*>(heap + plan.packets.partials_offset +
                                                           epoch % 2 * plan.packets.partials_bytes);
    const int64_t per_sender = tiles * items * Traits::kPacketsPerItem;
    const auto has_come = [&](const uint64_t& flag) {
      return po::epoch_of(__atomic_load_n(&flag, __ATOMIC_RELAXED)) >= epoch;
    };
    for (int sender = 0; sender < size; ++sender) {
      if (sender == rank) continue;
      driver::wait_until([&] { return has_come(*po::local_word(plan.team, po::grant_offset(plan.team, sender))); });
      for (int64_t i = sender * per_sender; i < (sender + 1) * per_sender; ++i) {
        driver::wait_until([&] { return has_come(sums[i].flag); });
      }
    }
  }

  std::vector<float> run_kernel(int64_t launch) {
    std::vector<float> x;
    for (int64_t n = 0; n < vectors; ++n) {
      for (int64_t k = 0; k < columns; ++k) x.push_back(x_value(rank, n, k, launch));
    }
    std::vector<float> output(static_cast<size_t>(vectors * rows), -1e9f);
    Plan used = plan;
    if (is_empty(launch)) used.output.num_tiles = 0;
    if (launch == options.number("--trouble-at") && rank == options.number("--other-pe")) ++used.team.contract_hash;
    const Call call{reinterpret_cast<const uint8_t*>(weight.data()),
                    reinterpret_cast<const uint8_t*>(x.data()),
                    reinterpret_cast<uint8_t*>(output.data()),
                    nullptr,
                    nullptr,
                    po::gemv_all_reduce::Shape::of(is_empty(launch) ? 0 : rows, rank, size, vectors, columns)};
    po::run_on_host<Kernel>(&used, call, static_cast<int>(options.number("--wgs")),
                            static_cast<int>(options.number("--threads")));
    return output;
  }

  // A launch that a PE stays away from, and some behind it: all end, and no row has a value, as every row needs that PE.
  void run_into_trouble(int64_t launch) {
    for (int64_t i = 0; i <= options.number("--queued"); ++i) {
      const std::vector<float> output = run_kernel(launch + i);
      if (error.state == 0 || error.epoch != local.abort || error.epoch + static_cast<uint64_t>(i) != local.epoch) {
        driver::fail(driver::kWrongReport, "PE %d, launch %ld: did not notice the trouble, or not as it should", rank,
                     launch + i);
      }
      for (size_t place = 0; place < output.size(); ++place) {
        if (po::float_bits(output[place]) != 0xffffffffu) {
          driver::fail(driver::kWrongOutput, "PE %d, launch %ld: element %zu is %g, not poisoned", rank, launch + i,
                       place, output[place]);
        }
      }
    }
  }

  // Nothing in this PE's heap is from a launch behind the one that its sender gave up.
  void check_traces() const {
    driver::check_words(*this);
    for (uint64_t parity = 0; parity < 2; ++parity) {
      const auto* sums = reinterpret_cast<const po::Packet*>(heap + plan.packets.partials_offset +
                                                             parity * plan.packets.partials_bytes);
      const auto* results =
          reinterpret_cast<const po::Packet*>(heap + plan.packets.results_offset + parity * plan.packets.results_bytes);
      const int64_t per_sender = tiles * items * Traits::kPacketsPerItem;
      for (int64_t i = 0; i < size * per_sender; ++i) {
        driver::check_trace(*this, "sum", static_cast<int>(i / per_sender), sums[i].flag);
      }
      for (int64_t i = 0; i < tiles * items; ++i) {
        driver::check_trace(*this, "result", owner_of(i / items), results[i].flag);
      }
    }
  }

  int owner_of(int64_t tile) const {
    return po::RowTiles::owner_of(static_cast<int>(tile), static_cast<int>(options.number("--wgs")), size);
  }

  static bool is_empty(int64_t launch) { return options.number("--empty-between") != 0 && launch % 2 == 1; }

  void check(const std::vector<float>& output, int64_t launch) const {
    if (is_empty(launch)) return;
    for (int64_t n = 0; n < vectors; ++n) {
      for (int64_t row = 0; row < rows; ++row) {
        float expected = 0;
        for (int pe = 0; pe < size; ++pe) {
          for (int64_t k = 0; k < columns_of(pe); ++k) expected += weight_value(pe, row, k) * x_value(pe, n, k, launch);
        }
        const float found = output[static_cast<size_t>(n * rows + row)];
        if (found != expected) {
          driver::fail(driver::kWrongOutput, "PE %d, launch %ld: vector %ld, row %ld is %g, not %g", rank, launch, n,
                       row, found, expected);
        }
      }
    }
  }

  World& world;
  const int rank;
  const int size;
  const int64_t rows = options.number("--rows");
  const int64_t columns = columns_of(rank);
  const int64_t vectors = options.number("--vectors");
  const int64_t tiles = po::ceil_div<int64_t>(rows, po::kTileRows);
  const int64_t items = vectors * Traits::kItemsPerVector;  // of a tile
  std::vector<float> weight;
  Plan plan{};
  uint8_t* heap = nullptr;
  po::LocalState local{};
  uint32_t asked = 0;
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
