// The tiles of a matrix product, in the order in which they are made: in bands of a few tiles of rows, column by
// column. Tiles that are made at the same time share rows and columns of the factors, which so come from the L2 cache.
// Rows may belong to several PEs: then the tiles of one PE's rows follow those of another's.
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

// The rows of a product in parts, one for each PE. A part is made of segments, and a segment of consecutive rows. The
// first segments of all parts follow each other in the product, then all second ones. No tile has rows of two segments.
//
// The n-th tiles of all parts but the last follow each other, in the order of the parts from `first_part` on. The n-th
// tile of the last part, which is this PE's own, comes after the (n + lag)-th ones.
struct ProductRows {
  int32_t count;  // of the product; the last segments may lack rows
  int32_t parts;
  int32_t first_part;
  int32_t segments;       // of a part
  int32_t segment_rows;   // of a segment
  int32_t segment_tiles;  // of a segment
  int32_t lag;            // tiles, at most those of a part

  // A tile's rows.
  struct Place {
    int part;
    int number;       // among the part's tiles
    int row;          // the first one, in the product; behind it where none exists, so that none is stored
    int row_of_part;  // the same, in its part
    int count;        // of those that exist; 0 or less: none
  };

  PO_FN Place place_of(int tile, int tile_rows) const {
    const int of_part = segments * segment_tiles, others = parts - 1, before = lag * others;
    if (tile >= parts * of_part) return {0, 0, ceil_div(count, tile_rows) * tile_rows, 0, 0};
    int hops, number;
    if (tile < before) {
      hops = tile % others;
      number = tile / others;
    } else {
      const int turn = (tile - before) / parts, last_turn = of_part - lag;
      hops = turn < last_turn ? (tile - before) % parts : others;
      number = turn >= last_turn ? tile - before - last_turn * others : hops < others ? lag + turn : turn;
    }
    const int part = first_part + hops < parts ? first_part + hops : first_part + hops - parts;
    const int segment = number / segment_tiles, first = number % segment_tiles * tile_rows;
    const int row = (segment * parts + part) * segment_rows + first;
    const int rest = min_of(min_of(tile_rows, segment_rows - first), count - row);
    return {part, number, row, segment * segment_rows + first, rest};
  }
};
PO_DESCRIBE(ProductRows, count, parts, first_part, segments, segment_rows, segment_tiles, lag)

}  // namespace po
