// The lookups that one PE has brought for this PE's tables. embedding_inputs leaves an array of these in device memory,
// one per PE; kernels that read lookups by source take its address. Lookups of the global batch that lie side by side
// are read as one source.
#pragma once

#include "platform/describe.cuh"

namespace po {

// A bag is (slot, sample). Slots are this PE's tables in its order, samples the source's. The bag's lookups
// are indices[offsets[slot * samples + sample]] to indices[offsets[slot * samples + sample + 1] - 1].
struct LookupSource {
  const void* indices;  // [capacity], int32_t or int64_t, the same for all sources; -1: a lookup that is skipped
  const void*
      offsets;  // [slots * samples + 1], int32_t from embedding_inputs; 0 first, not falling; all 0: nothing has come
  const float* weights;  // [capacity], or null
  int64_t first_sample;  // of the source's samples in the global batch
  int64_t samples;       // 0 if the launch was given up
  int64_t count;         // lookups that are here; those after the last offset belong to no bag
  int64_t capacity;
  int64_t left_out;  // lookups of the source if they exceed `capacity`, so that none is here; else 0
  // Lookup i of the source is number first_lookup + i among all sources' lookups. weights[i] has the same number among
  // the floats from where the PE's regions begin, so one address reaches all weights.
  int64_t first_lookup;
};
PO_DESCRIBE(LookupSource, indices, offsets, weights, first_sample, samples, count, capacity, left_out, first_lookup)

}  // namespace po
