// Which rows of a result a WG computes, and in which order: pure functions of numbers that every PE knows.
//
// Rows come in tiles of kTileRows. The WGs take them in turn, the same on every PE, so at any time they read rows that
// lie close together. If every tile has an owner (the PE that sums it up), a WG begins with the tiles of the next PE
// and ends with its own PE's. So tiles that must travel go first, and no two PEs begin with the same receiver.
#pragma once

#include "platform/describe.cuh"

namespace po {

inline constexpr int kTileRows = 8;
PO_CONSTANT(kTileRows)

struct RowTiles {
  int32_t wg;
  int32_t num_wgs;
  int32_t count;  // of this WG
  int32_t rank;
  int32_t size;  // PEs that own a WG's tiles in turn; 1: tiles have no owner, and the order is ascending

  static PO_FN RowTiles of_wg(int wg, int num_wgs, int num_tiles, int rank, int size) {
    return {wg, num_wgs, wg < num_tiles ? (num_tiles - 1 - wg) / num_wgs + 1 : 0, rank, size};
  }

  static PO_FN int owner_of(int tile, int num_wgs, int size) { return (tile % num_wgs + tile / num_wgs) % size; }
  PO_FN int owner_of(int tile) const { return owner_of(tile, num_wgs, size); }

  // Index of this PE's first own tile among the WG's; `count` or more if it owns none.
  PO_FN int first_own() const {
    const int index = (rank - wg) % size;
    return index < 0 ? index + size : index;
  }

  PO_FN int num_own() const {
    const int own = first_own();
    return own < count ? (count - 1 - own) / size + 1 : 0;
  }

  // The tile at a position, 0 to count - 1: first the others', from after the first own tile around to it, then the own
  // ones.
  PO_FN int tile_at(int position) const { return wg + index_at(position) * num_wgs; }

 private:
  PO_FN int index_at(int position) const {
    if (size == 1) return position;
    const int own = first_own();
    if (own >= count) return position;
    const int num_others = count - num_own();
    if (position >= num_others) return own + (position - num_others) * size;
    const int num_behind = num_others - own;  // others' tiles after the first own one
    if (position >= num_behind) return position - num_behind;
    return own + 1 + position / (size - 1) * size + position % (size - 1);
  }
};

}  // namespace po
