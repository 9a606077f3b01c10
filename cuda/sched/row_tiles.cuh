// Which rows of a result a WG computes, and in which order: pure functions of numbers that every PE knows.
//
// Rows come in tiles of kTileRows; a WG has a contiguous range of tiles, the same on every PE. Where every tile has an
// owner (the PE that sums it up), a WG begins with the tiles of the next PE and ends with its own PE's: what must travel
// goes first, and no two PEs begin with the same receiver.
#pragma once

#include "platform/platform.cuh"

namespace po {

inline constexpr int kTileRows = 8;

struct RowTiles {
  int32_t first;  // tile of the range
  int32_t count;
  int32_t rank;
  int32_t size;  // PEs that own tiles in turn; 1: nobody does, and the order is ascending

  static PO_FN RowTiles of_wg(int wg_index, int num_wgs, int64_t num_tiles, int rank, int size) {
    const int64_t first = wg_index * num_tiles / num_wgs;
    const int64_t last = (wg_index + 1) * num_tiles / num_wgs;
    return {static_cast<int32_t>(first), static_cast<int32_t>(last - first), rank, size};
  }

  static PO_FN int owner_of(int tile, int size) { return tile % size; }

  // Place of this PE's first own tile in the range; not below `count` where it owns none.
  PO_FN int first_own() const {
    const int place = (rank - first) % size;
    return place < 0 ? place + size : place;
  }

  PO_FN int num_own() const {
    const int own = first_own();
    return own < count ? (count - 1 - own) / size + 1 : 0;
  }

  // The tile at a position, 0 to count - 1: the others' first, from behind the first own one round to it, then the own.
  PO_FN int tile_at(int position) const {
    if (size == 1) return first + position;
    const int own = first_own();
    if (own >= count) return first + position;
    const int num_others = count - num_own();
    if (position >= num_others) return first + own + (position - num_others) * size;
    const int num_behind = num_others - own;  // others' tiles behind the first own one
    if (position >= num_behind) return first + position - num_behind;
    return first + own + 1 + position / (size - 1) * size + position % (size - 1);
  }
};

}  // namespace po
