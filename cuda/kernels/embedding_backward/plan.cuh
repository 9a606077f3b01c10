// The inputs of a launch of embedding_backward: configuration, plan, call.
#pragma once

#include <type_traits>

#include "comm/launch.cuh"
#include "platform/groups.cuh"
#include "platform/scalar.cuh"
#include "sched/row_blocks.cuh"

namespace po::embedding_backward {

// kGradient: a row's sum is written to Call::sums; rows are read only for the gradients of per-sample weights
// (factors).
enum class Step { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kGradient };
enum class Pooling { kSum, kWeightedSum, kMean };
enum class Decay { kNone, kL2, kDecoupled };
enum class Rounding { kNearest, kStochastic };  // of rows of 16 bits

struct Config {
  DType scalar = DType::kFloat32;  // of the tables
  DType wire = scalar;             // of the gradient
  Step step = Step::kSgd;
  Pooling pooling = Pooling::kSum;
  Decay decay = Decay::kNone;
  Rounding rounding = Rounding::kNearest;
  bool has_max_norm = false;  // row-wise Adagrad only
  bool aligned = true;        // all rows of tables, states, gradient and staging begin at multiples of 16 bytes
  bool wide_keys = true;      // keys have 64 bits
  int lanes = 32;             // of a warp that hold a row: a tile
  int row_chunks = 32;        // chunks of 16 bytes of a row that a tile holds in registers
  bool wide_rows = true;      // some rows have more
  int threads = 256;
  int blocks_per_sm = 2;
};

template <Config kConfig>
struct Traits {
  using Scalar = ScalarOf<kConfig.scalar>;
  using Wire = ScalarOf<kConfig.wire>;
  using Key = std::conditional_t<kConfig.wide_keys, int64_t, int32_t>;
  using Tile = Lanes<kConfig.lanes>;
  static constexpr Step kStep = kConfig.step;
  static constexpr Pooling kPooling = kConfig.pooling;
  static constexpr Decay kDecay = kConfig.decay;
  static constexpr Rounding kRounding = kConfig.rounding;
  static constexpr bool kHasMaxNorm = kConfig.has_max_norm;
  static constexpr bool kIsAligned = kConfig.aligned;
  static constexpr bool kHasFactors = kPooling != Pooling::kSum;
  static constexpr bool kHasWideRows = kConfig.wide_rows;
  static constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(typename Scalar::Storage));  // of a chunk
  static constexpr int kRowChunks = kConfig.row_chunks;
  // Columns of a long row that a lane of its warp adds up side by side: a chunk, or a part of one if there are fewer
  // chunks than lanes.
  static constexpr int kShare = kRowChunks < kWarpSize ? kElements * kRowChunks / kWarpSize : kElements;
  static constexpr int kThreads = kConfig.threads;
  static constexpr int kBlocksPerSm = kConfig.blocks_per_sm;
  static_assert(kShare > 0 && kElements % kShare == 0, "lanes share a chunk equally");
  static_assert(kShare == kElements || !kHasWideRows, "a row in several parts has a chunk for each lane");
  static_assert(!kHasMaxNorm || kStep == Step::kRowwiseAdagrad, "other optimizers bound no norm");
  static_assert(kRounding == Rounding::kNearest || kElements == 8,
                "a draw's 128 bits are 16 for each element of a chunk");
};

inline constexpr Phase kPhaseGradients = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseGradients)

// Places of sorted lookups are 32-bit numbers.
inline constexpr int kChunkLookups = 256;  // of a row, that are added up on their own
inline constexpr int kRangeLookups = 64;   // of a ticket, at most; rows whose lookups begin there belong to its warp
inline constexpr int kLeastRange = 8;      // of a ticket, at least
inline constexpr int kLeastRounds = 4;     // tickets per warp, if there are enough lookups
// Lookups for which there is one slot of a chunk's sums. A row with more than kChunkLookups lookups has as many slots
// as chunks, from the slot of its first lookup on. A later row begins at a later slot.
inline constexpr int kSlotLookups = 128;
PO_CONSTANT(kSlotLookups)
inline constexpr int kSumBytesAhead = 8192;  // of chunks' sums, in flight while a row's sums are added up

// ---- plan -----------------------------------------------------------------------------------------------------------

// Rows that are updated together: a tensor, which may hold several of this PE's tables.
struct Group {
  uint8_t* rows;
  float* state;   // [num_rows] or [num_rows, width]
  float* second;  // [num_rows, width]; Adam
  int64_t num_rows;
  int64_t width;  // elements of a row
  int64_t first_key;
  int64_t first_member;
  int64_t num_members;
  int64_t first_sum;  // in Call::sums, if that has all rows
};
PO_DESCRIBE(Group, rows, state, second, num_rows, width, first_key, first_member, num_members, first_sum)

struct Table {
  int64_t column;          // element of a row of this PE's gradient where its columns begin
  uint64_t staged_offset;  // of its gradients, from the staging's begin
};
PO_DESCRIBE(Table, column, staged_offset)

// A table's columns, on their way to its owner.
struct Push {
  int64_t owner;
  int64_t table;  // the owner's number of the table
  int64_t width;
  int64_t column;
  uint64_t staged_offset;
  uint64_t outgoing_offset;  // in this PE's own heap, if the owner is not reachable
  int64_t first;             // first push of those with the same table number, whose pieces alternate
  int64_t count;             // how many these are
};
PO_DESCRIBE(Push, owner, table, width, column, staged_offset, outgoing_offset, first, count)

struct Plan {
  Team team;
  const Group* groups;
  const int64_t* members;  // tables of groups
  const Table* tables;
  const Push* pushes;
  int64_t num_groups;
  int64_t num_tables;
  int64_t num_pushes;
  int64_t slice_samples;  // of a pushed piece
  int64_t num_slices;
  int64_t pushing_wgs;         // that push at least, and those that push under the sort
  int64_t pushing_wg_lookups;  // with n lookups, this / n WGs push
  uint64_t* pushed;            // [num_pushes + 1]: pieces sent so far; pieces taken. 0 after every launch
  const int64_t* batch_start;
  int64_t batch;
  int64_t first_sample;  // of this PE
  int64_t num_samples;
  uint64_t staging_offset;
  int64_t sum_elements;  // of a chunk's sums: as many as the widest row has
  float eps;
  float weight_decay;
  float max_norm;
  float beta1;
  float beta2;
};
PO_DESCRIBE(Plan, team, groups, members, tables, pushes, num_groups, num_tables, num_pushes, slice_samples, num_slices,
            pushing_wgs, pushing_wg_lookups, pushed, batch_start, batch, first_sample, num_samples, staging_offset,
            sum_elements, eps, weight_decay, max_norm, beta1, beta2)

// ---- call -----------------------------------------------------------------------------------------------------------

struct Call {
  const uint8_t* gradient;  // [samples of this PE, columns of all PEs]
  int64_t gradient_stride;  // elements from one sample to the next
  // The lookups in this PE's tables, sorted by key. A key is a row of a group.
  const void* keys;        // int32 or int64
  const int32_t* bags;     // table * batch + sample
  const int32_t* lookups;  // their places before the sort; for embedding_weight_gradients
  const float* factors;
  float* factor_gradients;  // null: not wanted
  int64_t num_factors;      // of the gradients; 0 if they are not wanted
  const float* counts;      // by bag: its number of lookups that are not skipped
  const int64_t* count;     // of lookups
  const float* rate;
  const float* scale;     // of gradients; null: 1
  int64_t* step_count;    // steps so far
  float* beta_powers;     // [2]: beta1 and beta2 to this power
  const uint64_t* seeds;  // [tables]: of stochastic rounding; a group uses its first table's
  float* chunk_sums;      // [lookups / kSlotLookups + 2, sum_elements]
  uint64_t* chunks_done;  // [lookups / kSlotLookups + 2]: at the first slot of a row with several; 0 after every launch
  // For kGradient:
  float* sums;            // of all rows, group after group; or of those that have lookups
  const int64_t* places;  // by a row's first lookup, where its sums begin; null: sums are of all rows
  float* touched;         // by key: 1 is written if a row has lookups; null: not wanted
  uint64_t forward_pass;  // the number of the forward pass; 0 if no peer takes part
};
PO_DESCRIBE(Call, gradient, gradient_stride, keys, bags, lookups, factors, factor_gradients, num_factors, counts, count,
            rate, scale, step_count, beta_powers, seeds, chunk_sums, chunks_done, sums, places, touched, forward_pass)

}  // namespace po::embedding_backward
