// The inputs of a launch of embedding_inputs, and the layout of regions and messages.
#pragma once

#include "comm/launch.cuh"
#include "tile/lookup_source.cuh"

namespace po::embedding_inputs {

inline constexpr Phase kPhaseLookups = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseLookups)

enum InputErrorKind : uint64_t { kBadIndex = 1, kBadOffset = 2, kBadLength = 3, kBadTotal = 4, kNoRoom = 5 };
PO_CONSTANT(kBadIndex)
PO_CONSTANT(kBadOffset)
PO_CONSTANT(kBadLength)
PO_CONSTANT(kBadTotal)
PO_CONSTANT(kNoRoom)

// ---- regions --------------------------------------------------------------------------------------------------------

// The beginning of a message. Its last fields report, to every PE, that another message of the same PE found no room.
struct alignas(128) Header {
  int64_t samples;
  int64_t count;       // lookups for this owner
  int64_t left_out;    // the number of lookups if they exceed the region's room, so that none of them came; else 0
  int64_t full_owner;  // of the PE's longest message that was left out; -1 if none was
  int64_t full_count;
  int64_t full_capacity;
};

inline constexpr uint64_t kRegionAlignment = 128;

PO_FN constexpr uint64_t aligned(uint64_t bytes) {
  return (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// The places of a region's parts, from its begin: header, offsets, indices, weights.
struct Region {
  uint64_t indices;
  uint64_t weights;
  uint64_t end;
};

PO_FN constexpr Region region_of(int64_t slots, int64_t max_samples, int64_t capacity, int64_t index_bytes,
                                 bool is_weighted) {
  Region region{};
  const auto lookups = static_cast<uint64_t>(capacity);
  region.indices = sizeof(Header) + aligned(static_cast<uint64_t>(slots * max_samples + 1) * sizeof(int32_t));
  region.weights = region.indices + aligned(lookups * static_cast<uint64_t>(index_bytes));
  region.end = region.weights + (is_weighted ? aligned(lookups * sizeof(float)) : 0);
  return region;
}
PO_QUERY(region_bytes, (int64_t slots, int64_t max_samples, int64_t capacity, int64_t index_bytes, int64_t is_weighted),
         po::embedding_inputs::region_of(slots, max_samples, capacity, index_bytes, is_weighted != 0).end)

// ---- arguments ------------------------------------------------------------------------------------------------------

// One of an owner's tables.
struct Slot {
  int64_t feature;
  int64_t num_rows;
};
PO_DESCRIBE(Slot, feature, num_rows)

// A PE as the receiver of a message.
struct Owner {
  int64_t first_slot;  // in Plan::slots; plus the PE's number, in Plan::slot_begins
  int64_t num_slots;
  int64_t capacity;          // of this PE's messages
  uint64_t region_offset;    // of this PE's region, from where the owner's regions begin
  uint64_t outgoing_offset;  // in this PE's own heap, if the owner is not reachable
};
PO_DESCRIBE(Owner, first_slot, num_slots, capacity, region_offset, outgoing_offset)

// A PE as the sender of a message.
struct Sender {
  uint64_t region_offset;  // from where this PE's regions begin
  int64_t capacity;
};
PO_DESCRIBE(Sender, region_offset, capacity)

struct Plan {
  Team team;
  const Slot* slots;
  const Owner* owners;
  const Sender* senders;
  int64_t num_features;
  int64_t max_samples;
  int64_t chunk_bags;     // of a feature: a warp adds up so many at once
  int64_t piece_lookups;  // of a message: a warp sends so many at once
  int64_t contract_word;  // the word that stands for the samples of all PEs
  int64_t reports_bad_input;
  // Private scratch, used by one launch at a time:
  int64_t*
      chunks;  // [features * chunks of a feature + 1]: sums, then what is before each; last: what is before the end
  int64_t* slot_begins;       // by owner, its slots and one more: where they begin in the message
  int64_t* longest;           // see Longest
  uint64_t* added_up;         // [WGs + 1] flags: a WG's sums are there; last: WG 0's results are there
  uint64_t* sent;             // by owner: pieces sent so far; 0 after every launch
  const int32_t* no_offsets;  // [slots * max_samples + 1] zeros
};
PO_DESCRIBE(Plan, team, slots, owners, senders, num_features, max_samples, chunk_bags, piece_lookups, contract_word,
            reports_bad_input, chunks, slot_begins, longest, added_up, sent, no_offsets)

// Plan::longest: pieces of the longest message that is sent; owner, lookups and capacity of the longest one that is
// not.
enum Longest : int { kPieces = 0, kFullOwner = 1, kFullCount = 2, kFullCapacity = 3, kNumLongest = 4 };
PO_CONSTANT(kNumLongest)

// A launch's report to the host. `state` is set last, to a number by which the host knows the launch.
struct Report {
  uint64_t state;
  uint64_t is_aborted;
  int64_t full_source;  // the first PE with a message that found no room; -1 if there is none
  int64_t full_owner;
  int64_t full_count;
  int64_t full_capacity;
};
PO_DESCRIBE(Report, state, is_aborted, full_source, full_owner, full_count, full_capacity)

struct Call {
  const void* values;  // feature by feature, sample by sample
  const void* bounds;  // lengths [features * samples], or offsets with one more
  const float* weights;
  int64_t num_values;
  int64_t samples;
  uint64_t regions_offset;        // of this PE's regions, in its heap
  LookupSource* sources;          // [size]
  Report* report;                 // null: a lack of room is bad input
  InputErrorRecord* input_error;  // of this exchange's caller alone; null: the workspace's
  uint64_t report_number;         // what `state` becomes
  uint64_t contract_hash;
  int64_t contract_word;
};
PO_DESCRIBE(Call, values, bounds, weights, num_values, samples, regions_offset, sources, report, input_error,
            report_number, contract_hash, contract_word)

enum Check : int { kCheckAddedUp = 0, kCheckFound = 1, kNumChecks = 2 };

struct Shared {
  Plan plan;
  int32_t chunks_per_feature;
  uint64_t failed[kNumChecks];
  uint64_t gave_up;
  uint64_t is_last;
};

// ---- messages -------------------------------------------------------------------------------------------------------

// What goes to one owner, in pieces: the header; its slots' offsets, a chunk of bags each; its lookups.
struct Message {
  PO_FN Message(const Plan& plan, int32_t chunks_per_feature, int owner_number)
      : owner(plan.owners[owner_number]), begins(plan.slot_begins + owner.first_slot + owner_number) {
    if (is_left_out()) return;  // the header alone
    num_chunks = static_cast<int32_t>(owner.num_slots) * chunks_per_feature;
    num_pieces = 1 + num_chunks + ceil_div(static_cast<int32_t>(count()), static_cast<int32_t>(plan.piece_lookups));
  }
  PO_FN int64_t count() const { return begins[owner.num_slots]; }
  PO_FN bool is_left_out() const {
    return count() > owner.capacity;  // @capacity
  }

  const Owner& owner;
  const int64_t* begins;
  int32_t num_chunks = 0;
  int32_t num_pieces = 1;
};

}  // namespace po::embedding_inputs
