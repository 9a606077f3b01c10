// Runs the host build of gemm, launch after launch, and checks every output. exits.h says how it ends.

#include "platform/platform.cuh"
template <>
inline constexpr int po::kClusterSize<> = DRIVER_CLUSTER;
template <>
inline constexpr int po::kArenaAlignment<> = 1024;

#include "driver.h"
#include "kernels/gemm.cuh"
#include "product.h"

namespace {

using driver::Matrix;
using po::gemm::Call;
using po::gemm::Config;
constexpr Config kConfig DRIVER_CONFIG;  // the compile names it
using Kernel = po::gemm::Kernel<kConfig>;
using Traits = Kernel::Traits;
constexpr int64_t kTile = 8;  // rows, columns and depth

driver::Options options(
    {{"--rows", "44"}, {"--columns", "21"}, {"--depth", "37"}, {"--band", "2"}, {"--pes", "1"}, {"--epochs", "4"}},
    {driver::kLaunches, driver::kWorld});

class Pe final : public driver::BasePe<Kernel::Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, 1) { allocate_heap(); }

 private:
  void run_kernel(int64_t launch) override {
    const int64_t rows = number("--rows"), columns = number("--columns"), depth = number("--depth");
    Matrix a = kConfig.a_k_major ? Matrix(rows, depth) : Matrix(depth, rows);
    Matrix b = kConfig.b_k_major ? Matrix(columns, depth) : Matrix(depth, columns);
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t row = 0; row < rows; ++row) {
        (kConfig.a_k_major ? a.at(row, k) : a.at(k, row)) =
            driver::Element::from_float(driver::a_value(row, k, launch));
      }
      for (int64_t column = 0; column < columns; ++column) {
        (kConfig.b_k_major ? b.at(column, k) : b.at(k, column)) =
            driver::Element::from_float(driver::b_value(k, column));
      }
    }
    output = Matrix(rows, columns);
    const auto count = [](int64_t size, int64_t each) { return static_cast<int32_t>(po::ceil_div(size, each)); };
    const po::ProductTiles tiles{count(rows, kTile * Traits::kSharing), count(columns, kTile),
                                 static_cast<int32_t>(number("--band")), count(depth, kTile)};
    const int64_t clusters = number("--wgs") / DRIVER_CLUSTER;
    if (number("--wgs") % DRIVER_CLUSTER != 0 || tiles.steps < kConfig.parts ||
        (kConfig.parts > 1 && clusters < tiles.count())) {
      driver::fail(driver::kBadOption, "not for this many WGs or steps");
    }
    const po::Product product{a.map(kTile, kTile), b.map(kTile / Traits::kSharing, kTile), tiles,
                              driver::rows_of_one_pe(rows, kTile), static_cast<uint32_t>(Traits::kStageBytes)};
    launch_on_host<Kernel>(plan, {product, output.map(1, kTile), nullptr, columns});
  }

  void check(int64_t launch) override { driver::check_product(output, number("--depth"), rank, launch); }

  Matrix output;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
