// The tiles of a matrix product, in the order in which they are made: in bands of a few tiles of rows, column by
// column. Tiles that are made at the same time share rows and columns of the factors, which so come from the L2 cache.
#pragma once

#include "platform/describe.cuh"

namespace po {

struct ProductTiles {
  int32_t rows;     // of tiles
  int32_t columns;  // of tiles
  int32_t band;     // rows of tiles
  int32_t steps;    // in which a tile is added up

  struct Place {
    int row;
    int column;
  };

  PO_FN int count() const { return rows * columns; }

  PO_FN Place place_of(int number) const {
    const int per_band = band * columns, first = number / per_band * band, rest = number % per_band;
    const int height = min_of(band, rows - first);
    return {first + rest % height, rest / height};
  }
};
PO_DESCRIBE(ProductTiles, rows, columns, band, steps)

}  // namespace po
