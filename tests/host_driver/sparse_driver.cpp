// Runs the host build of sparse_all_reduce with all PEs as threads of one process, launch after launch, each with other
// rows, and checks every output. Built with -fsanitize=thread, as embedding_driver.cpp: what is not ordered by the protocol
// is a data race.
//
// exits.h says how it ends.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "driver.h"
#include "kernels/sparse_all_reduce.cuh"

namespace {

using po::sparse_all_reduce::Call;
using po::sparse_all_reduce::Config;
constexpr Config kConfig DRIVER_CONFIG;  // the compile names it
using Kernel = po::sparse_all_reduce::Kernel<kConfig>;
using Traits = Kernel::Traits;
using po::sparse_all_reduce::Plan;
using po::sparse_all_reduce::Report;
using Storage = Traits::Scalar::Storage;

constexpr uint64_t kReadyStride = 64;

// --overlap: of 8 rows, how many all PEs may have; the others belong to one each. --repeats: the most times that a row
// occurs on a PE; 1: entries are said to be the values in order.
driver::Options options({{"--rows", "300"},
                         {"--columns", "12"},
                         {"--capacity", "300"},
                         {"--threads", "1"},
                         {"--overlap", "4"},
                         {"--repeats", "2"},
                         {"--empty-pe", "-1"},
                         {"--slow-us", "3000"}},
                        {driver::kLaunches, driver::kWorld});

uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 31) * 0x7fb5d329728ea185ull;
  x = (x ^ x >> 27) * 0x81dadef4bc2dd44dull;
  return x ^ x >> 33;
}

// Whether a PE has a row in a launch, and how often.
int64_t times(int pe, int64_t row, int64_t launch, int64_t size) {
  if (pe == options.number("--empty-pe")) return 0;
  const uint64_t chance = mixed(static_cast<uint64_t>(row * 1000003 + launch * 7919));
  if (chance % 3 == 0) return 0;
  const bool may_be_shared = static_cast<int64_t>(chance / 8 % 8) < options.number("--overlap");
  const bool has = may_be_shared ? mixed(chance + static_cast<uint64_t>(pe)) % 4 != 0
                                 : static_cast<int64_t>(chance / 64 % static_cast<uint64_t>(size)) == pe;
  return has ? 1 + static_cast<int64_t>(mixed(chance * 31 + static_cast<uint64_t>(pe)) %
                                        static_cast<uint64_t>(options.number("--repeats")))
             : 0;
}

// Small whole numbers: sums are exact, in bfloat16 too.
float value(int pe, int64_t row, int64_t column, int64_t time, int64_t launch) {
  return static_cast<float>((row * 7 + column * 3 + pe + time * 5 + launch) % 9 - 4);
}

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    const auto pes = static_cast<uint64_t>(size);
    plan.sets.num_rows = rows;
    plan.sets.num_words = po::ceil_div<int64_t>(rows, po::kRowsPerWord);
    plan.sets.planes_offset = take(pes * static_cast<uint64_t>(plan.sets.num_words) * 8);
    plan.sets.headers_offset = take(pes * 8);
    plan.row_bytes = columns * static_cast<int64_t>(sizeof(Storage));
    plan.capacity = capacity;
    plan.num_workers = options.number("--wgs") * options.number("--threads");
    const auto flags = (pes + 1) * static_cast<uint64_t>(number("--capacity"));
    plan.progress_offset = take((pes * static_cast<uint64_t>(plan.num_workers) + flags) * 8);
    plan.gather_offset = take(pes * static_cast<uint64_t>(capacity * columns) * 4);
    plan.low_offset = take(static_cast<uint64_t>(capacity * plan.row_bytes));
    // Each PE's output lies elsewhere.
    take(static_cast<uint64_t>(rank) * 128);
    output_offset = take(static_cast<uint64_t>(capacity * plan.row_bytes));
    allocate_heap();
    // Of the same size in each launch: what is left of a larger one must not lead out of them.
    const auto most = static_cast<size_t>(rows * options.number("--repeats"));
    entries.resize(most);
    order.resize(most);
    values.resize(most * static_cast<size_t>(columns));
    first_entry.resize(static_cast<size_t>(plan.sets.num_words));
    totals.resize(static_cast<size_t>(options.number("--wgs")));
    met.resize(totals.size() * po::kNumMeetings);
    rows_out.resize(static_cast<size_t>(capacity));
    plan.sets.first_entry = first_entry.data();
    plan.sets.totals = totals.data();
    plan.sets.met = met.data();
    plan.hot = &hot;
    plan.report = &report;
    plan.splits_partials = sizeof(Storage) == 2;
    plan.divisor = 1;
    plan.all_reachable = !is_staged();
  }

 private:
  void run_kernel(int64_t launch) override {
    int64_t count = 0;
    num_hot = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t occurrences = times(rank, row, launch, size);
      num_hot += occurrences >= Traits::kHotEntries;
      for (int64_t time = 0; time < occurrences; ++time, ++count) {
        order[static_cast<size_t>(count)] = count;
        entries[static_cast<size_t>(count)] = static_cast<Traits::Index>(row);
        for (int64_t column = 0; column < columns; ++column) {
          values[static_cast<size_t>(count * columns + column)] =
              Traits::Scalar::from_float(value(rank, row, column, time, launch));
        }
      }
    }
    const int64_t* given_order = options.number("--repeats") == 1 ? nullptr : order.data();
    const Call call{entries.data(), given_order,   reinterpret_cast<const uint8_t*>(values.data()),
                    count,          output_offset, rows_out.data(),
                    &num_rows_out,  nullptr};
    launch_on_host<Kernel>(plan, call);
  }

  void check(int64_t launch) override {
    check_output(launch);
    if (plan.all_reachable && num_rows_out <= capacity && hot.count != static_cast<uint64_t>(num_hot)) {
      driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %lu rows listed as hot, not %ld", rank, launch, hot.count,
                   num_hot);
    }
    std::memset(heap + output_offset, 0xff, static_cast<size_t>(capacity * plan.row_bytes));  // it is the user's now
  }

  void check_output(int64_t launch) const {
    int64_t slot = 0;
    std::vector<int64_t> expected_rows;
    for (int64_t row = 0; row < rows; ++row) {
      bool is_there = false;
      for (int pe = 0; pe < size; ++pe) is_there = is_there || times(pe, row, launch, size) != 0;
      if (is_there) expected_rows.push_back(row);
    }
    if (num_rows_out != static_cast<int64_t>(expected_rows.size())) fail(launch, "rows", num_rows_out);
    if (num_rows_out > capacity) return;
    const auto* output = reinterpret_cast<const Storage*>(heap + output_offset);
    for (const int64_t row : expected_rows) {
      if (rows_out[static_cast<size_t>(slot)] != row) fail(launch, "row at slot", slot);
      for (int64_t column = 0; column < columns; ++column) {
        float sum = 0;
        for (int pe = 0; pe < size; ++pe) {
          for (int64_t time = 0; time < times(pe, row, launch, size); ++time) {
            sum += value(pe, row, column, time, launch);
          }
        }
        if (Traits::Scalar::to_float(output[slot * columns + column]) != sum) fail(launch, "value at slot", slot);
      }
      ++slot;
    }
  }

  void fail(int64_t launch, const char* what, int64_t where) const {
    driver::fail(driver::kWrongOutput, "PE %d, launch %ld: wrong %s %ld", rank, launch, what, where);
  }

  const int64_t rows = options.number("--rows");
  const int64_t columns = options.number("--columns");
  const int64_t capacity = options.number("--capacity");
  uint64_t output_offset = 0;
  std::vector<Traits::Index> entries;
  std::vector<int64_t> order;
  std::vector<Storage> values;
  std::vector<uint32_t> first_entry;
  std::vector<po::Packet> totals;
  std::vector<uint64_t> met;
  po::HotList hot{};
  int64_t num_hot = 0;  // that this PE's rows make
  std::vector<int64_t> rows_out;
  int64_t num_rows_out = -1;
  Report report{};
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
