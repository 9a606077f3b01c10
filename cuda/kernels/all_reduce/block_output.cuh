// From a block's sums to its results: bias, residual, the one rounding, and the norm of the block's row.
//
// A row's blocks may be with many warps. Each warp leaves the sum of its block's squares as a packet in memory of this
// PE. A warp that needs the row's sum takes all squares and adds them up in the order of the blocks. So rows need no
// owner, and no two warps meet for the norm (kernels/all_reduce.md, row 5).
#pragma once

#include "comm/launch.cuh"
#include "tile/row_block.cuh"

namespace po::all_reduce {

// How the elements of the PEs come together.
enum class Algorithm { kOneShot, kTwoShot, kSlices };

// One of the warps that reduce packets. It takes every `count`-th block, the same on every PE.
struct Worker {
  int number;
  int count;
};

// Blocks of a warp that are in flight together: loads one after the other would wait for memory one after the other.
template <int kCount>
struct BlockBatch {
  int numbers[kCount];  // -1: no block

  PO_FN int& operator[](int v) { return numbers[v]; }
  PO_FN int operator[](int v) const { return numbers[v]; }
  PO_FN bool has(int v) const { return numbers[v] >= 0; }
};

template <class Traits, class Plan, class Call>
class BlockOutput {
 public:
  using Block = typename Traits::Block;
  using Chunk = typename Block::Chunk;
  using Chunks = typename Block::Chunks;
  static constexpr int kElements = Block::kElements;
  static constexpr int kLaneChunks = Block::kLaneChunks;

  PO_FN BlockOutput(const Plan& plan, const Call& call) : plan_(plan), call_(call) {}

  PO_FN ChunkPlace place(int block, int i) const {
    return call_.rows.chunk(block, Block::chunk_of(warp_, i), kElements);
  }

  // ---- sums ----------------------------------------------------------------------------------------------------------

  // Values that are added to a chunk's sums.
  struct Addends {
    Chunk bias;
    Chunk residual;
  };

  PO_FN Addends addends(const ChunkPlace& at) const {
    Addends found = {};
    if (call_.bias != nullptr) found.bias = Block::load(call_.bias, at.column, at.count);
    if (call_.residual != nullptr) found.residual = Block::load(call_.residual, at.element, at.count);
    return found;
  }

  // Adds the addends to the sum over the PEs, and rounds; the same in every algorithm.
  PO_FN Chunk finished(float (&sums)[kElements], const Addends& addends) const {
    if (call_.bias != nullptr) Block::add_to(sums, addends.bias);
    if (call_.residual != nullptr) Block::add_to(sums, addends.residual);
    return Block::rounded(sums);
  }

  PO_FN void store(const ChunkPlace& at, const Chunk& result) const {
    Block::store(call_.output, at.element, at.count, result);
  }

  // All bits set: NaN in fp32, fp16 and bf16.
  PO_FN void poison(const ChunkPlace& at) const {
    Chunk chunk;
    PO_UNROLL
    for (uint32_t& word : chunk.words) word = 0xffffffffu;
    Block::store(call_.output, at.element, at.count, chunk);
  }

  // ---- the norm ------------------------------------------------------------------------------------------------------

  // Publishes the squares of a block whose results are stored, for the warps that norm a part of the row. `is_whole`:
  // whether this lane's results are right. All lanes.
  PO_FN void tell_squares(int block, const Chunks& results, bool is_whole) {
    if constexpr (!Traits::kNorms) return;
    if (call_.weight == nullptr) return;
    float squares[kLaneChunks];
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) squares[i] = Block::squares_of(results[i], place(block, i).count);
    const float sum = tree_sum(warp_, squares);
    if (warp_.count(is_whole) != warp_.size() || warp_.rank() != 0) return;
    Packet packet{};
    packet.data[0] = float_bits(sum);
    packet.flag = launch_flag(plan_.team);
    packet_store_sys(plan_.squares + block, packet);
  }

  // Norms the blocks whose rows have all squares; results are in the output, or still in `held`. With `waits` it waits
  // for the squares, and poisons the blocks if they never come. Returns false if blocks are left for later. All lanes.
  template <int kCount>
  PO_FN bool norm(const BlockBatch<kCount>& blocks, bool waits, int held_block, const Chunks& held) {
    if constexpr (!Traits::kNorms) return true;
    if (call_.weight == nullptr) return true;
    // The loads are in flight while the squares are awaited. A lane reads what it has stored itself.
    Chunks weights[kCount] = {};
    Chunks results[kCount] = {};
    PO_UNROLL
    for (int v = 0; v < kCount; ++v) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        if (!blocks.has(v)) continue;
        const ChunkPlace at = place(blocks[v], i);
        weights[v][i] = Block::load(call_.weight, at.column, at.count);
        results[v][i] = blocks[v] == held_block ? held[i] : Block::load(call_.output, at.element, at.count);
      }
    }
    const float scale = call_.scale == nullptr ? 1.0f : *call_.scale;
    float factors[kCount];
    bool is_there[kCount];
    if (!find_factors(blocks, waits, factors, is_there) && !waits) return false;
    PO_UNROLL
    for (int v = 0; v < kCount; ++v) {
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) {
        if (!blocks.has(v)) continue;
        const ChunkPlace at = place(blocks[v], i);
        if (at.count == 0) continue;
        if (is_there[v]) {
          store_norm(at, results[v][i], weights[v][i], factors[v], scale);
        } else {
          poison_norm(at);
        }
      }
    }
    return true;
  }

 private:
  // Computes 1 / sqrt(mean of the row's squares + eps) of each block's row, and whether all of the row's squares are
  // there. Returns whether all rows' squares are. All lanes.
  template <int kCount>
  PO_FN bool find_factors(const BlockBatch<kCount>& blocks, bool waits, float (&factors)[kCount],
                          bool (&is_there)[kCount]) {
    const uint64_t flag = launch_flag(plan_.team);
    const auto has_come = [&](const Packet& packet) { return packet.flag == flag; };  // @squares-flag
    int rows[kCount];
    float sums[kCount][kLaneChunks] = {};
    bool is_known = true;
    PO_UNROLL
    for (int v = 0; v < kCount; ++v) {
      rows[v] = blocks.has(v) ? call_.rows.row_of(blocks[v]) : row_;
      is_there[v] = true;
      is_known = is_known && rows[v] == row_;
    }
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int num_blocks = is_known ? 0 : call_.rows.blocks_per_row.value;
      for (int number = Block::chunk_of(warp_, i); number < num_blocks; number += kBlockChunks) {
        Packet packets[kCount] = {};
        const auto look = [&] {
          bool all = true;
          PO_UNROLL
          for (int v = 0; v < kCount; ++v) {
            if (rows[v] == row_) continue;
            packets[v] = packet_load_sys(plan_.squares + call_.rows.first_block_of(rows[v]) + number, flag);
          }
          PO_UNROLL
          for (int v = 0; v < kCount; ++v) all = (rows[v] == row_ || has_come(packets[v])) && all;
          return all;
        };
        const bool all = waits ? await_own(plan_.team, look) : look();
        PO_UNROLL
        for (int v = 0; v < kCount; ++v) {
          is_there[v] = (all || rows[v] == row_ || has_come(packets[v])) && is_there[v];
          sums[v][i] += bits_float(packets[v].data[0]);
        }
      }
    }
    bool all = true;
    int known = row_;
    float known_factor = factor_;
    PO_UNROLL
    for (int v = 0; v < kCount; ++v) {
      factors[v] = factor_;
      if (rows[v] == row_) continue;
      const float squares = tree_sum(warp_, sums[v]);
      is_there[v] = warp_.count(is_there[v]) == warp_.size();
      all = is_there[v] && all;
      factors[v] = 1.0f / square_root(squares / static_cast<float>(call_.rows.width) + call_.eps);
      if (!is_there[v]) continue;
      known = rows[v];
      known_factor = factors[v];
    }
    row_ = known;
    factor_ = known_factor;
    return all;
  }

  PO_FN void store_norm(const ChunkPlace& at, const Chunk& result, const Chunk& weights, float factor,
                        float scale) const {
    float values[kElements];
    float factors[kElements];
    Block::to_floats(result, values);
    Block::to_floats(weights, factors);
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) values[i] = values[i] * factor * (call_.weight_bias + factors[i]);
    if (call_.scale == nullptr) {
      return Block::store(call_.norm_output, at.element, at.count, Block::rounded(values));
    }
    uint8_t bytes[kElements];
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) bytes[i] = Float8E4M3::from_float(values[i] / scale);
    Block::store_elements(call_.norm_output + at.element, at.count, bytes);
  }

  PO_FN void poison_norm(const ChunkPlace& at) const {
    const int bytes = call_.scale == nullptr ? static_cast<int>(sizeof(typename Block::Storage)) : 1;
    fill_ones(call_.norm_output + at.element * bytes, at.count * bytes);
  }

  // Ones are NaN in float8_e4m3fn too.
  static PO_NOINLINE void fill_ones(uint8_t* target, int count) {
    PO_NO_UNROLL
    for (int i = 0; i < count; ++i) target[i] = 0xff;
  }

  const Plan& plan_;
  const Call& call_;
  const Warp warp_{};
  int row_ = -1;  // whose factor is known
  float factor_ = 0;
};

}  // namespace po::all_reduce
