// What the drivers of matrix products share.
#pragma once

#include "driver.h"
#include "tile/product_loop.cuh"

namespace driver {

using Element = po::BFloat16;
using Storage = Element::Storage;

// All rows are one PE's.
inline po::ProductRows rows_of_one_pe(int64_t rows, int64_t tile_rows) {
  const auto count = static_cast<int32_t>(rows);
  return {count, 1, 0, 1, count, static_cast<int32_t>(po::ceil_div(rows, tile_rows)), 0};
}

// Numbers of a row of a matrix in memory: rows begin at multiples of 16 bytes.
inline int64_t stride_of(int64_t columns) { return po::ceil_div<int64_t>(columns, 8) * 8; }

inline po::TensorMap map_of(const Storage* matrix, int64_t rows, int64_t columns, int64_t box_rows,
                            int64_t box_columns) {
  const po::HostTensorMap host{reinterpret_cast<const uint8_t*>(matrix),
                               rows,
                               columns * 2,
                               stride_of(columns) * 2,
                               box_rows,
                               box_columns * 2,
                               2,
                               0};
  po::TensorMap map{};
  std::memcpy(&map, &host, sizeof(host));
  return map;
}

// A matrix. Its rows have more elements in memory than it has columns, and these are NaN.
struct Matrix {
  Matrix() = default;
  Matrix(int64_t rows_in, int64_t columns_in)
      : rows(rows_in), columns(columns_in), elements(static_cast<size_t>(rows * stride_of(columns)), kNan) {}

  Storage& at(int64_t row, int64_t column) { return elements[static_cast<size_t>(row * stride_of(columns) + column)]; }

  po::TensorMap map(int64_t box_rows, int64_t box_columns) const {
    return map_of(elements.data(), rows, columns, box_rows, box_columns);
  }

  static constexpr Storage kNan = 0xffff;

  int64_t rows = 0, columns = 0;
  std::vector<Storage> elements;
};

// Small whole numbers: sums are exact in fp32.
inline float a_value(int64_t row, int64_t k, int64_t launch) {
  return static_cast<float>((row * 7 + k * 3 + launch * 5) % 9 - 4);
}
inline float b_value(int64_t k, int64_t column) { return static_cast<float>((column * 5 + k * 2) % 7 - 3); }

// Ends the process if a product of these has a wrong element, or the memory beside it has changed.
inline void check_product(Matrix& product, int64_t depth, int rank, int64_t launch) {
  for (int64_t row = 0; row < product.rows; ++row) {
    for (int64_t column = 0; column < stride_of(product.columns); ++column) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += a_value(row, k, launch) * b_value(k, column);
      const Storage expected = column < product.columns ? Element::from_float(sum) : Matrix::kNan;
      if (product.at(row, column) == expected) continue;
      fail(kWrongOutput, "PE %d, launch %ld: row %ld, column %ld is 0x%x, not 0x%x", rank, launch, row, column,
           product.at(row, column), expected);
    }
  }
}

}  // namespace driver
