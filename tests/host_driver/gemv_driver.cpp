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
using Plan = Kernel::Plan;

constexpr uint64_t kReadyStride = 64;

driver::Options options({{"--rows", "85"},
                         {"--columns", "40"},
                         {"--vectors", "3"},
                         {"--wgs", "1"},
                         {"--threads", "1"},
                         {"--slow-us", "3000"},
                         {"--long-pe", "-1"},  // has so many columns, and this time-out of one wait
                         {"--long-columns", "0"},
                         {"--long-timeout-ms", "0"},
                         {"--empty-between", "0"}},  // every second launch has no rows
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

// Small whole numbers: sums are exact in fp32.
float weight_value(int pe, int64_t row, int64_t k) { return static_cast<float>((row * 7 + k * 3 + pe) % 9 - 4); }
float x_value(int pe, int64_t n, int64_t k, int64_t launch) {
  return static_cast<float>((n * 5 + k + pe * 2 + launch * 11) % 7 - 3);
}

int64_t columns_of(int pe) {
  return options.number(pe == options.number("--long-pe") ? "--long-columns" : "--columns");
}

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < columns; ++k) weight.push_back(weight_value(rank, row, k));
    }
    plan.packets.partials_bytes =
        static_cast<uint64_t>(size * tiles * items * Traits::kPacketsPerItem) * sizeof(po::Packet);
    plan.packets.partials_offset = take(2 * plan.packets.partials_bytes);
    plan.packets.results_bytes = static_cast<uint64_t>(tiles * items) * sizeof(po::Packet);
    plan.packets.results_offset = take(2 * plan.packets.results_bytes);
    allocate_heap();
    plan.asked = &asked;
    plan.output.num_tiles = tiles;
    plan.output.stride = rows;
    plan.packets.all_reachable = !is_staged();
  }

  void connect() override {
    BasePe::connect();
    std::copy(peer_heaps.begin(), peer_heaps.end(), plan.heaps);
  }

 private:
  int64_t timeout_ms(bool is_trouble) const override {
    return rank == options.number("--long-pe") ? options.number("--long-timeout-ms") : BasePe::timeout_ms(is_trouble);
  }

  void before_launch(int64_t launch) override {
    BasePe::before_launch(launch);
    if (rank == options.number("--long-pe")) await_others();
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
    po::Team next = plan.team;
    next.epoch = epoch;
    for (int sender = 0; sender < size; ++sender) {
      if (sender == rank) continue;
      driver::wait_until([&] { return has_come(*po::local_word(next, po::grant_offset(next, sender))); });
      for (int64_t i = sender * per_sender; i < (sender + 1) * per_sender; ++i) {
        driver::wait_until([&] { return has_come(sums[i].flag); });
      }
    }
  }

  void run_kernel(int64_t launch) override {
    std::vector<float> x;
    for (int64_t n = 0; n < vectors; ++n) {
      for (int64_t k = 0; k < columns; ++k) x.push_back(x_value(rank, n, k, launch));
    }
    output.assign(static_cast<size_t>(vectors * rows), -1e9f);
    Plan used = plan_of(launch);
    if (is_empty(launch)) used.output.num_tiles = 0;
    const Call call{reinterpret_cast<const uint8_t*>(weight.data()),
                    reinterpret_cast<const uint8_t*>(x.data()),
                    reinterpret_cast<uint8_t*>(output.data()),
                    nullptr,
                    nullptr,
                    po::gemv_all_reduce::Shape::of(is_empty(launch) ? 0 : rows, vectors, columns, rank, size)};
    launch_on_host<Kernel>(used, call);
    if (asked != 0) driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %u WGs stay counted", rank, launch, asked);
  }

  // No row has a value, as every row needs the PE that stays away.
  void check_given_up(int64_t launch) override {
    for (size_t place = 0; place < output.size(); ++place) {
      if (po::float_bits(output[place]) != 0xffffffffu) {
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: element %zu is %g, not poisoned", rank, launch, place,
                     output[place]);
      }
    }
  }

  void check_traces() const override {
    BasePe::check_traces();
    for (uint64_t parity = 0; parity < 2; ++parity) {
      const auto* sums = reinterpret_cast<const po::Packet*>(heap + plan.packets.partials_offset +
                                                             parity * plan.packets.partials_bytes);
      const auto* results =
          reinterpret_cast<const po::Packet*>(heap + plan.packets.results_offset + parity * plan.packets.results_bytes);
      const int64_t per_sender = tiles * items * Traits::kPacketsPerItem;
      for (int64_t i = 0; i < size * per_sender; ++i) {
        check_trace("sum", static_cast<int>(i / per_sender), sums[i].flag);
      }
      for (int64_t i = 0; i < tiles * items; ++i) {
        check_trace("result", owner_of(i / items), results[i].flag);
      }
    }
  }

  int owner_of(int64_t tile) const {
    return po::RowTiles::owner_of(static_cast<int>(tile), static_cast<int>(options.number("--wgs")), size);
  }

  static bool is_empty(int64_t launch) { return options.number("--empty-between") != 0 && launch % 2 == 1; }

  void check(int64_t launch) override {
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

  const int64_t rows = options.number("--rows");
  const int64_t columns = columns_of(rank);
  const int64_t vectors = options.number("--vectors");
  const int64_t tiles = po::ceil_div<int64_t>(rows, po::kTileRows);
  const int64_t items = vectors * Traits::kItemsPerVector;  // of a tile
  std::vector<float> weight;
  std::vector<float> output;
  uint32_t asked = 0;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
