// The lookups that one PE has brought for this PE's tables, where a kernel finds them: embedding_inputs leaves an array of these
// in device memory, one per PE, and what reads lookups by source takes its address. Who has the lookups of the global batch side
// by side reads them as one source.
#pragma once

#include "platform/describe.cuh"

namespace po {

// Bag (slot, sample), where slots are the tables of this PE in its order and samples those of the source, has the lookups
// indices[offsets[slot * samples + sample]] to indices[offsets[slot * samples + sample + 1] - 1].
struct LookupSource {
  const void* indices;  // [capacity], int32_t or int64_t, the same for all sources; -1: a lookup that is skipped
  const void*
      offsets;  // [slots * samples + 1], int32_t from embedding_inputs; 0 first, not falling; all 0: nothing has come
  const float* weights;  // [capacity], or null
  int64_t first_sample;  // of the source's samples in the global batch
  int64_t samples;       // 0 where the launch was given up
  int64_t count;         // lookups that are here; those behind the last offset are of no bag
  int64_t capacity;
  int64_t left_out;  // lookups that the source has, where there are more than `capacity` and so none is here; else 0
  // Lookup i of the source is number first_lookup + i among those of all sources, and so is weights[i] among the floats from
  // where the PE's regions begin: one address reaches all weights.
  int64_t first_lookup;
};
PO_DESCRIBE(LookupSource, indices, offsets, weights, first_sample, samples, count, capacity, left_out, first_lookup)

}  // namespace po
