// Runs the host build of gemm_exchange with all PEs as threads of one process, launch after launch, and checks every
// output. Built with -fsanitize=thread: what is not ordered by the protocol is a data race. exits.h says how it ends.

#include "platform/platform.cuh"
template <>
inline constexpr int po::kClusterSize<> = DRIVER_CLUSTER;
template <>
inline constexpr int po::kArenaAlignment<> = 1024;

#include "driver.h"
#include "kernels/gemm_exchange.cuh"
#include "product.h"

namespace {

using driver::Element;
using driver::Matrix;
using driver::Storage;
using po::gemm_exchange::Call;
using po::gemm_exchange::Config;
using po::gemm_exchange::Exchange;
constexpr Config kConfig DRIVER_CONFIG;  // the compile names it
using Kernel = po::gemm_exchange::Kernel<kConfig>;
using Plan = Kernel::Plan;
using Wire = Kernel::Wire;
constexpr int kSharing = Kernel::Product::kSharing;
constexpr int64_t kTile = 8;  // rows, columns and depth
constexpr int64_t kCarriers = po::gemm_exchange::kCarriers;
constexpr int64_t kSlotBytes = Kernel::Traits::kSlotBytes;
constexpr uint64_t kReadyStride = 64;
constexpr Storage kStale = 0x7b7b;     // of an output before its launch
constexpr Storage kPoisoned = 0xffff;  // of one that was given up

// --rows, --columns: of the product; several: of launches in turn. --segments: of the rows of each PE. --blamed-pe: whom
// all PEs name when they give up.
driver::Options options({{"--rows", "42"},
                         {"--columns", "24"},
                         {"--segments", "1"},
                         {"--depth", "21"},
                         {"--band", "3"},
                         {"--lag", "2"},
                         {"--threads", "3"},
                         {"--epochs", "4"},
                         {"--blamed-pe", "-1"}},
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

// What a launch multiplies, whose rows these are, and how they are divided.
struct Shape {
  Shape(int64_t launch, int64_t size_in) : size(size_in) {
    rows = in_turn("--rows", launch);
    columns = in_turn("--columns", launch);
    segment_rows = po::ceil_div(rows, size * segments);
    segment_tiles = po::ceil_div(segment_rows, kTile);
    blocks = segments * segment_tiles * po::ceil_div(columns, kTile) * kConfig.parts;
    output_rows = kConfig.exchange == Exchange::kAllReduce       ? rows
                  : kConfig.exchange == Exchange::kReduceScatter ? segments * segment_rows
                                                                 : size * segment_rows;
  }

  static int64_t in_turn(const char* option, int64_t launch) {
    const std::vector<int64_t> all = options.list(option);
    return all[static_cast<size_t>(launch) % all.size()];
  }

  // The row of the product that is in a row of a PE's output. Not below `rows`: there is none.
  int64_t row_of(int64_t output_row, int rank) const {
    if (kConfig.exchange == Exchange::kAllReduce) return output_row;
    const int64_t segment = kConfig.exchange == Exchange::kAllToAll ? 0 : output_row / segment_rows;
    return (segment * size + rank) * segment_rows + output_row % segment_rows;
  }

  const int64_t size, segments = options.number("--segments");
  int64_t rows, columns, segment_rows, segment_tiles, blocks, output_rows;
};

// Small whole numbers: sums are exact in fp32.
float a_of(int pe, int64_t row, int64_t k, int64_t launch) { return driver::a_value(row + pe * 2, k, launch); }
float b_of(int pe, int64_t k, int64_t column) { return driver::b_value(k + pe, column); }
float bias_of(int64_t column) { return static_cast<float>(column % 5 - 2); }
float residual_of(int64_t row, int64_t column) { return static_cast<float>((row * 3 + column) % 11 - 5); }

float product_of(int pe, int64_t row, int64_t column, int64_t launch) {
  float sum = 0;
  for (int64_t k = 0; k < options.number("--depth"); ++k) sum += a_of(pe, row, k, launch) * b_of(pe, k, column);
  return sum;
}

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    int64_t blocks = 0, words = 0;
    for (int64_t launch = 0; launch < number("--epochs"); ++launch) {
      const Shape shape(launch, size);
      blocks = std::max(blocks, shape.blocks);
      words = std::max(words, shape.output_rows * shape.columns);
    }
    plan.partials_offset = take(static_cast<uint64_t>((size - 1) * blocks * kSlotBytes));
    plan.flags_offset = take(static_cast<uint64_t>(size * blocks * kCarriers) * sizeof(uint64_t));
    take(static_cast<uint64_t>(rank) * 128);  // each PE's output lies elsewhere
    output_words = static_cast<size_t>(words);
    output_offset = take(static_cast<uint64_t>(words) * sizeof(Storage));
    allocate_heap();
    slots.resize(static_cast<size_t>(number("--wgs") * po::gemm_exchange::kSlots * kSlotBytes));
    plan.slots = slots.data();
  }

 private:
  Storage* output() const { return reinterpret_cast<Storage*>(heap + output_offset); }

  void before_launch(int64_t launch) override {
    std::fill_n(output(), output_words, kStale);
    BasePe::before_launch(launch);
  }

  void run_kernel(int64_t launch) override {
    const Shape shape(launch, size);
    const int64_t depth = number("--depth");
    Matrix a(shape.rows, depth), b(shape.columns, depth);
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t row = 0; row < shape.rows; ++row) a.at(row, k) = Element::from_float(a_of(rank, row, k, launch));
      for (int64_t column = 0; column < shape.columns; ++column) {
        b.at(column, k) = Element::from_float(b_of(rank, k, column));
      }
    }
    std::vector<Storage> bias, residual;
    for (int64_t column = 0; column < shape.columns; ++column) bias.push_back(Element::from_float(bias_of(column)));
    for (int64_t row = 0; row < shape.output_rows; ++row) {
      for (int64_t column = 0; column < shape.columns; ++column) {
        residual.push_back(Element::from_float(residual_of(shape.row_of(row, rank), column)));
      }
    }
    Plan used = plan_of(launch);
    used.blocks_per_part = shape.blocks;
    const po::Product product{a.map(kTile, kTile), b.map(kTile / kSharing, kTile), tiles_of(shape), rows_of(shape),
                              static_cast<uint32_t>(Kernel::Product::kStageBytes)};
    launch_on_host<Kernel>(
        used, {product, heap + output_offset, output_offset, reinterpret_cast<const uint8_t*>(bias.data()),
               reinterpret_cast<const uint8_t*>(residual.data()), shape.columns, shape.columns * 2, used.team.local,
               1.0f / static_cast<float>(size)});
  }

  po::ProductTiles tiles_of(const Shape& shape) const {
    const auto count = [](int64_t all, int64_t each) { return static_cast<int32_t>(po::ceil_div(all, each)); };
    const po::ProductTiles tiles{count(size * shape.segments * shape.segment_tiles, kSharing),
                                 count(shape.columns, kTile), static_cast<int32_t>(number("--band")),
                                 count(number("--depth"), kTile)};
    const int64_t clusters = number("--wgs") / DRIVER_CLUSTER;
    if (number("--wgs") % DRIVER_CLUSTER != 0 || tiles.steps < kConfig.parts ||
        (kConfig.parts > 1 && clusters < tiles.count())) {
      driver::fail(driver::kBadOption, "not for this many WGs or steps");
    }
    return tiles;
  }

  po::ProductRows rows_of(const Shape& shape) const {
    return {static_cast<int32_t>(shape.rows),
            size,
            (rank + 1) % size,
            static_cast<int32_t>(shape.segments),
            static_cast<int32_t>(shape.segment_rows),
            static_cast<int32_t>(shape.segment_tiles),
            static_cast<int32_t>(std::min(number("--lag"), shape.segments * shape.segment_tiles))};
  }

  void check(int64_t launch) override {
    const Shape shape(launch, size);
    const auto words = static_cast<size_t>(shape.output_rows * shape.columns);
    for (size_t i = 0; i < output_words; ++i) {
      const int64_t output_row = static_cast<int64_t>(i) / shape.columns, row = shape.row_of(output_row, rank);
      const int64_t column = static_cast<int64_t>(i) % shape.columns;
      const Storage expected =
          i < words && row < shape.rows ? result_of(shape, output_row, row, column, launch) : kStale;
      if (output()[i] == expected) continue;
      driver::fail(driver::kWrongOutput, "PE %d, launch %ld: row %ld, column %ld is 0x%x, not 0x%x", rank, launch,
                   output_row, column, output()[i], expected);
    }
  }

  // Partial sums are rounded to the type in which they travel, those of this PE too.
  Storage result_of(const Shape& shape, int64_t output_row, int64_t row, int64_t column, int64_t launch) const {
    if (kConfig.exchange == Exchange::kAllToAll) {
      const auto sender = static_cast<int>(output_row / shape.segment_rows);
      return Element::from_float(product_of(sender, row, column, launch));
    }
    float sum = 0;
    for (int pe = 0; pe < size; ++pe) {
      sum += Wire::to_float(Wire::from_float(product_of(pe, row, column, launch)));
    }
    if (kConfig.is_mean) sum *= 1.0f / static_cast<float>(size);
    if (kConfig.bias) sum += bias_of(column);
    if (kConfig.residual) sum += residual_of(row, column);
    return Element::from_float(sum);
  }

  // Rows of an all-to-all need their sender alone, which may be late and still store them. All other rows need the PE
  // that is not there.
  void check_given_up(int64_t launch) override {
    const int64_t blamed = number("--blamed-pe");
    if (blamed >= 0 && static_cast<int64_t>(error.peer) != blamed) fail_with_record(driver::kWrongReport, launch);
    const Shape shape(launch, size);
    for (int64_t row = 0; row < shape.output_rows; ++row) {
      const int64_t sender = row / shape.segment_rows;
      const bool is_away = sender == number("--stop-pe") || sender == number("--other-pe");
      if (kConfig.exchange == Exchange::kAllToAll && (sender == rank || !is_away)) continue;
      if (shape.row_of(row, rank) >= shape.rows) continue;
      for (int64_t column = 0; column < shape.columns; ++column) {
        if (output()[row * shape.columns + column] == kPoisoned) continue;
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld: row %ld of a launch that was given up is not poisoned",
                     rank, launch, row);
      }
    }
  }

  void check_traces() const override {
    BasePe::check_traces();
    const int64_t per_sender = Shape(0, size).blocks * kCarriers;
    for (int64_t i = 0; i < size * per_sender; ++i) {
      const uint64_t place = plan.flags_offset + static_cast<uint64_t>(i) * sizeof(uint64_t);
      check_trace("flag of partial sums", static_cast<int>(i / per_sender), *po::local_word(plan.team, place));
    }
  }

  uint64_t output_offset;
  size_t output_words;
  std::vector<uint8_t> slots;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
