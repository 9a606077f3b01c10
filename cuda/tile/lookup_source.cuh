// The lookups that one PE has brought for this PE's tables, where a kernel finds them: embedding_inputs leaves an array of these
// in device memory, one per PE, and what reads lookups by source takes its address.
#pragma once

#include "platform/describe.cuh"

namespace po {

// Bag (slot, sample), where slots are the tables of this PE in its order and samples those of the source, has the lookups
// indices[offsets[slot * samples + sample]] to indices[offsets[slot * samples + sample + 1] - 1].
struct LookupSource {
  const void* indices;     // [capacity], int32_t or int64_t, the same for all sources; -1: a lookup that is skipped
  const int32_t* offsets;  // [slots * samples + 1]; 0 first, not falling; all 0 where nothing has come
  const float* weights;    // [capacity], or null
  int64_t first_sample;    // of the source's samples in the global batch
  int64_t samples;         // 0 where the launch was given up
  int64_t count;           // lookups that are here
  int64_t capacity;
  int64_t
      left_out;  // lookups that the source has, where these are more than `capacity` and so none of them is here; else 0
};
PO_DESCRIBE(LookupSource, indices, offsets, weights, first_sample, samples, count, capacity, left_out)

}  // namespace po
