// The exchange of a batch's lookups, one persistent launch of few WGs in a workspace of its own, so that it runs beside others.
//
// Each PE has the lookups of its own samples for all features; each owner of tables gets, from every PE, those of its tables,
// in a region per PE of its symmetric heap. Protocol: (1) WG 0 grants every peer credit for the regions that this launch
// fills. (2) Warps add up bags, chunk by chunk; WG 0 waits for all of them and finds where each feature begins, and so each
// slot in each message. (3) Warps take pieces of messages, owners in turn from the next PE on, and store them in the owner's
// region; who brings the last piece releases one sliceRdy word there. A message that is too long for its region is its header
// alone. (4) WG 0 awaits all words and credits; the last WG to leave says where the lookups lie (LookupSource).
//
// Bags are never where the caller says, but where they are in a running sum of lengths, or a running maximum of offsets, cut off
// at the number of values: neither falls, so nothing is written outside of a region, whatever was passed.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "platform/scalar.cuh"
#include "tile/lookup_source.cuh"

namespace po::embedding_inputs {

// ---- configuration --------------------------------------------------------------------------------------------------

struct Config {
  IndexType value = IndexType::kInt64;  // of the lookups as they are passed
  IndexType index = IndexType::kInt64;  // and as owners get them
  IndexType bound = IndexType::kInt64;  // of lengths or offsets
  bool lengths = true;                  // of bags; else where they begin
  bool weighted = false;
  int threads = 64;
};

template <Config kConfig>
struct Traits {
  using Value = IndexOf<kConfig.value>;
  using Index = IndexOf<kConfig.index>;
  using Bound = IndexOf<kConfig.bound>;
  static constexpr bool kLengths = kConfig.lengths;
  static constexpr bool kWeighted = kConfig.weighted;
  static constexpr int kThreads = kConfig.threads;
  // At most 64 registers per thread: with two warps a WG finds room beside two of the largest ones on an SM.
  static constexpr int kBlocksPerSm = 1024 / kThreads;
};

inline constexpr Phase kPhaseLookups = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseLookups)

enum InputErrorKind : uint64_t { kBadIndex = 1, kBadOffset = 2, kBadLength = 3, kBadTotal = 4, kNoRoom = 5 };
PO_CONSTANT(kBadIndex)
PO_CONSTANT(kBadOffset)
PO_CONSTANT(kBadLength)
PO_CONSTANT(kBadTotal)
PO_CONSTANT(kNoRoom)

// ---- regions --------------------------------------------------------------------------------------------------------

// What a message begins with. That some other message of the same PE found no room, every PE learns from it.
struct alignas(128) Header {
  int64_t samples;
  int64_t count;     // lookups for this owner
  int64_t left_out;  // as many where they are more than the region has room for, and none of them came; else 0
  int64_t full_owner;  // of the PE's longest message that was left out; -1: there is none
  int64_t full_count;
  int64_t full_capacity;
};

inline constexpr uint64_t kRegionAlignment = 128;

constexpr uint64_t aligned(uint64_t bytes) {
  return (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// Where the parts of a region are, from its begin: header, offsets, indices, weights.
struct Region {
  uint64_t indices;
  uint64_t weights;
  uint64_t end;
};

constexpr Region region_of(int64_t slots, int64_t max_samples, int64_t capacity, int64_t index_bytes, bool is_weighted) {
  Region region{};
  const auto lookups = static_cast<uint64_t>(capacity);
  region.indices = sizeof(Header) + aligned(static_cast<uint64_t>(slots * max_samples + 1) * sizeof(int32_t));
  region.weights = region.indices + aligned(lookups * static_cast<uint64_t>(index_bytes));
  region.end = region.weights + (is_weighted ? aligned(lookups * sizeof(float)) : 0);
  return region;
}
PO_QUERY(region_bytes,
         (int64_t slots, int64_t max_samples, int64_t capacity, int64_t index_bytes, int64_t is_weighted),
         po::embedding_inputs::region_of(slots, max_samples, capacity, index_bytes, is_weighted != 0).end)

// ---- arguments ------------------------------------------------------------------------------------------------------

// One of the tables of an owner.
struct Slot {
  int64_t feature;
  int64_t num_rows;
};
PO_DESCRIBE(Slot, feature, num_rows)

// A PE, as the one that a message is for.
struct Owner {
  int64_t first_slot;  // in Plan::slots, and plus the PE's number in Plan::slot_begins
  int64_t num_slots;
  int64_t capacity;           // of this PE's messages
  uint64_t region_offset;     // of this PE's region, from where the owner's regions begin
  uint64_t outgoing_offset;   // where it is filled in this PE's own heap, if the owner is not reachable
};
PO_DESCRIBE(Owner, first_slot, num_slots, capacity, region_offset, outgoing_offset)

// A PE, as the one that a message is from.
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
  int64_t chunk_bags;     // of a feature, that a warp adds up at once
  int64_t piece_lookups;  // of a message, that a warp sends at once
  int64_t contract_word;  // which one stands for the samples of all PEs
  int64_t reports_bad_input;
  // Private, for one launch at a time:
  int64_t* chunks;       // [features * chunks of a feature + 1]: sums, then what is before each; last: what is before the end
  int64_t* slot_begins;  // by owner, its slots and one more: where they begin in the message
  int64_t* longest;      // see Longest
  uint64_t* added_up;    // [WGs + 1] flags: of each WG's sums; of what WG 0 has made of them
  uint64_t* sent;        // by owner: pieces that are on their way; 0 after every launch
  const int32_t* no_offsets;  // [slots * max_samples + 1] zeros
};
PO_DESCRIBE(Plan, team, slots, owners, senders, num_features, max_samples, chunk_bags, piece_lookups, contract_word,
            reports_bad_input, chunks, slot_begins, longest, added_up, sent, no_offsets)

// Plan::longest: pieces of the longest message that is sent; of the longest one that is not: owner, lookups, capacity.
enum Longest : int { kPieces = 0, kFullOwner = 1, kFullCount = 2, kFullCapacity = 3, kNumLongest = 4 };
PO_CONSTANT(kNumLongest)

// What a launch tells the host; `state` last.
struct Report {
  uint64_t state;
  uint64_t is_aborted;
  int64_t full_source;  // the first PE with a message that found no room; -1: there is none
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
  uint64_t regions_offset;  // of this PE's regions, in its heap
  LookupSource* sources;    // [size]
  Report* report;           // null: that there is no room is bad input
  uint64_t contract_hash;
  int64_t contract_word;
};
PO_DESCRIBE(Call, values, bounds, weights, num_values, samples, regions_offset, sources, report, contract_hash,
            contract_word)

enum Check : int { kCheckAddedUp = 0, kCheckFound = 1, kNumChecks = 2 };

struct Shared {
  Plan plan;
  uint64_t failed[kNumChecks];
  uint64_t is_last;
};

// ---- where bags are -------------------------------------------------------------------------------------------------

// Sums of lengths, or maxima of offsets; both of numbers from 0 up.
template <class Traits>
PO_FN int64_t combined(int64_t before, int64_t value) {
  return Traits::kLengths ? before + value : max_of(before, value);
}

// Of the lanes up to this one.
template <class Traits>
PO_FN int64_t combined_through(const Warp& warp, int64_t value) {
  PO_UNROLL
  for (int distance = 1; distance < warp.size(); distance *= 2) {
    const int64_t before = warp.shuffle(value, max_of(warp.rank() - distance, 0));
    if (warp.rank() >= distance) value = combined<Traits>(before, value);
  }
  return value;
}

// A PE's bags, by number: feature * samples + sample.
template <class Traits>
class Bags {
 public:
  using Bound = typename Traits::Bound;

  PO_FN Bags(const Plan& plan, const Call& call)
      : bounds_(static_cast<const Bound*>(call.bounds)),
        samples_(call.samples),
        limit_(call.num_values),
        chunk_bags_(plan.chunk_bags),
        chunks_per_feature_(max_of<int64_t>(ceil_div(call.samples, plan.chunk_bags), 1)) {}

  PO_FN int64_t chunks_per_feature() const { return chunks_per_feature_; }
  PO_FN int64_t first_bag(int64_t chunk) const {
    return chunk / chunks_per_feature_ * samples_ + chunk % chunks_per_feature_ * chunk_bags_;
  }
  PO_FN int64_t num_bags(int64_t chunk) const {
    return min_of(chunk_bags_, samples_ - chunk % chunks_per_feature_ * chunk_bags_);
  }
  PO_FN int64_t limit() const { return limit_; }
  // Of the first bag of all: what its begin is a sum or maximum of.
  PO_FN int64_t seed() const { return Traits::kLengths || samples_ == 0 ? 0 : cut(bounds_[0]); }
  PO_FN int64_t length_or_end(int64_t bag) const { return bounds_[Traits::kLengths ? bag : bag + 1]; }
  PO_FN int64_t begin(int64_t bag) const { return bounds_[bag]; }
  PO_FN int64_t cut(int64_t bound) const { return min_of(max_of<int64_t>(bound, 0), limit_); }

 private:
  const Bound* bounds_;
  int64_t samples_;
  int64_t limit_;
  int64_t chunk_bags_;
  int64_t chunks_per_feature_;
};

PO_FN void report_bad_input(const Plan& plan, InputErrorKind kind, int64_t outer, int64_t inner, int64_t value,
                            int64_t limit) {
  if (plan.reports_bad_input != 0) report_input_error(plan.team, kind, outer, inner, value, limit);
}

// Whether WG 0's threads, or this WG's, have all come through.
PO_FN bool all_threads(const WorkGroup& wg, Shared& shared, Check check, bool is_good) {
  if (!is_good) flag_store_relaxed_wg(&shared.failed[check], 1);
  wg.sync();
  return flag_load_relaxed_wg(&shared.failed[check]) == 0;
}

// One launch's work to find out what is where.
template <class Traits>
class Finder {
 public:
  PO_FN Finder(const WorkGroup& wg, Shared& shared, const Call& call)
      : wg_(wg), shared_(shared), plan_(shared.plan), call_(call), bags_(shared.plan, call) {}

  // Returns false where the launch was given up.
  PO_FN bool run() const {
    const int64_t num_chunks = plan_.num_features * bags_.chunks_per_feature();
    const int64_t stride = int64_t{wg_.num_warps()} * wg_.count();
    for (int64_t chunk = int64_t{wg_.warp_index()} * wg_.count() + wg_.index(); chunk < num_chunks; chunk += stride) {
      add_up(chunk);
    }
    // @sums-sync
    wg_.sync();  // the sums of all warps are before the flag
    const uint64_t flag = launch_flag(plan_.team);
    if (wg_.rank() == 0) flag_store_release_sys(plan_.added_up + wg_.index(), flag);  // @sums-release
    if (wg_.index() == 0) {
      if (!await_sums()) return false;
      find(num_chunks);
      // @found-sync
      wg_.sync();
      if (wg_.rank() == 0) flag_store_release_sys(plan_.added_up + wg_.count(), flag);
      return true;
    }
    const bool is_there = wg_.rank() != 0 || await_flag(wg_.count());  // @found-await
    return all_threads(wg_, shared_, kCheckFound, is_there);
  }

 private:
  PO_FN bool await_flag(int number) const {
    const uint64_t* flag = plan_.added_up + number;
    return await_own(plan_.team, [&] { return epoch_of(flag_load_acquire_sys(flag)) >= plan_.team.epoch; });
  }

  PO_FN bool await_sums() const {
    bool are_there = true;
    for (int other = wg_.rank(); other < wg_.count(); other += wg_.size()) {
      are_there = await_flag(other) && are_there;  // @sums-await
    }
    return all_threads(wg_, shared_, kCheckAddedUp, are_there);
  }

  PO_FN void add_up(int64_t chunk) const {
    const TaskTrace trace(false);
    const int64_t first = bags_.first_bag(chunk);
    const int64_t count = bags_.num_bags(chunk);
    int64_t value = 0;
    for (int64_t i = warp_.rank(); i < count; i += warp_.size()) {
      const int64_t bound = bags_.length_or_end(first + i);
      if (bound != bags_.cut(bound) || (!Traits::kLengths && bound < bags_.begin(first + i))) {
        report(first + i, bound);
      }
      value = combined<Traits>(value, bags_.cut(bound));
    }
    value = combined_through<Traits>(warp_, value);
    if (warp_.rank() == warp_.size() - 1) plan_.chunks[chunk] = value;
  }

  PO_NOINLINE void report(int64_t bag, int64_t bound) const {
    report_bad_input(plan_, Traits::kLengths ? kBadLength : kBadOffset, bag / call_.samples, bag % call_.samples, bound,
                     call_.num_values);
  }

  // WG 0: where chunks begin, and from that where slots begin in messages.
  PO_FN void find(int64_t num_chunks) const {
    if (wg_.warp_index() == 0) scan_chunks(num_chunks);
    // @chunks-sync
    wg_.sync();
    for (int owner = wg_.warp_index(); owner < plan_.team.size; owner += wg_.num_warps()) scan_slots(owner);
    // @slots-sync
    wg_.sync();
    if (wg_.rank() == 0) find_longest();
  }

  PO_FN void scan_chunks(int64_t num_chunks) const {
    int64_t before = bags_.seed();
    int64_t next = warp_.rank() < num_chunks ? plan_.chunks[warp_.rank()] : 0;
    for (int64_t first = 0; first < num_chunks; first += warp_.size()) {
      const int64_t chunk = first + warp_.rank();
      const int64_t value = next;
      if (chunk + warp_.size() < num_chunks) next = plan_.chunks[chunk + warp_.size()];
      const int64_t through = combined<Traits>(before, combined_through<Traits>(warp_, chunk < num_chunks ? value : 0));
      const int64_t last = warp_.shuffle(through, max_of(warp_.rank() - 1, 0));
      if (chunk < num_chunks) plan_.chunks[chunk] = bags_.cut(warp_.rank() == 0 ? before : last);
      before = warp_.shuffle(through, warp_.size() - 1);
    }
    if (warp_.rank() != 0) return;
    plan_.chunks[num_chunks] = bags_.cut(before);
    check_ends(before);
  }

  // The first bag begins at 0, and the last one ends with the values.
  PO_FN void check_ends(int64_t total) const {
    const int64_t num_bags = plan_.num_features * call_.samples;
    if (Traits::kLengths || call_.samples == 0) {
      if (total != call_.num_values) report_bad_input(plan_, kBadTotal, 0, 0, total, call_.num_values);
      return;
    }
    const int64_t first = bags_.begin(0);
    const int64_t last = bags_.begin(num_bags);
    if (first != 0) report_bad_input(plan_, kBadOffset, 0, 0, first, call_.num_values);
    if (last != call_.num_values) {
      report_bad_input(plan_, kBadOffset, plan_.num_features - 1, call_.samples - 1, last, call_.num_values);
    }
  }

  PO_FN void scan_slots(int owner_number) const {
    const Owner& owner = plan_.owners[owner_number];
    int64_t* begins = plan_.slot_begins + owner.first_slot + owner_number;
    int64_t before = 0;
    for (int64_t first = 0; first < owner.num_slots; first += warp_.size()) {
      const int64_t slot = first + warp_.rank();
      int64_t count = 0;
      if (slot < owner.num_slots) {
        const int64_t* feature =
            plan_.chunks + plan_.slots[owner.first_slot + slot].feature * bags_.chunks_per_feature();
        count = feature[bags_.chunks_per_feature()] - feature[0];
      }
      const auto through = before + static_cast<int64_t>(warp_.sum_through(static_cast<uint64_t>(count)));
      if (slot < owner.num_slots) begins[slot] = through - count;
      before = warp_.shuffle(through, warp_.size() - 1);
    }
    if (warp_.rank() == 0) begins[owner.num_slots] = before;
  }

  PO_FN void find_longest() const;

  const WorkGroup& wg_;
  Shared& shared_;
  const Plan& plan_;
  const Call& call_;
  const Bags<Traits> bags_;
  const Warp warp_{};
};

// ---- messages -------------------------------------------------------------------------------------------------------

// What goes to one owner, in pieces: the header; its slots' offsets, a chunk of bags each; its lookups.
struct Message {
  PO_FN Message(const Plan& plan, int64_t chunks_per_feature, int owner_number)
      : owner(plan.owners[owner_number]), begins(plan.slot_begins + owner.first_slot + owner_number) {
    count = begins[owner.num_slots];
    // @capacity
    if (count > owner.capacity) return;  // the header alone
    num_chunks = owner.num_slots * chunks_per_feature;
    num_pieces = 1 + num_chunks + ceil_div(count, plan.piece_lookups);
  }
  PO_FN bool is_left_out() const { return count > owner.capacity; }

  const Owner& owner;
  const int64_t* begins;
  int64_t count;
  int64_t num_chunks = 0;
  int64_t num_pieces = 1;
};

template <class Traits>
PO_FN void Finder<Traits>::find_longest() const {
  int64_t* longest = plan_.longest;
  for (int i = 0; i < kNumLongest; ++i) longest[i] = 0;
  longest[kFullOwner] = -1;
  for (int owner = 0; owner < plan_.team.size; ++owner) {
    const Message message(plan_, bags_.chunks_per_feature(), owner);
    longest[kPieces] = max_of(longest[kPieces], message.num_pieces);
    if (!message.is_left_out() || message.count <= longest[kFullCount]) continue;
    longest[kFullOwner] = owner;
    longest[kFullCount] = message.count;
    longest[kFullCapacity] = message.owner.capacity;
  }
}

// One warp's share of all messages.
template <class Traits>
class Messenger {
 public:
  using Value = typename Traits::Value;
  using Index = typename Traits::Index;
  static constexpr int kVectorBytes = 16;
  static constexpr int kVectorsAtOnce = 4;  // whose values a lane loads together

  PO_FN Messenger(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), plan_(plan), team_(plan.team), call_(call), bags_(plan, call) {}

  PO_FN void run() {
    const int64_t end = plan_.longest[kPieces] * team_.size;
    const int64_t stride = int64_t{wg_.num_warps()} * wg_.count();
    PO_NO_UNROLL
    for (int64_t at = int64_t{wg_.warp_index()} * wg_.count() + wg_.index(); at < end; at += stride) {
      const auto owner = static_cast<int>((team_.rank + 1 + at % team_.size) % team_.size);  // this PE last
      const Message message(plan_, bags_.chunks_per_feature(), owner);
      if (at / team_.size >= message.num_pieces) continue;
      const TaskTrace trace(owner != team_.rank);
      if (is_reachable(team_, owner) && !has_credit(owner)) return;
      uint8_t* region = place(message.owner, owner);
      write_piece(message, region, at / team_.size);
      finish(message, owner);
    }
  }

  // What was put from may be overwritten after this.
  PO_FN void complete_puts() const {
    if (has_put_) put_quiet(team_);  // @inputs-quiet
  }

 private:
  // One lane decides for the warp: after an abort the lanes may see different credits.
  PO_FN bool has_credit(int owner) {
    if (owner == team_.rank || (credited_ >> owner & 1) != 0) return true;  // @credit-before-inputs
    const bool granted = warp_.rank() == 0 ? await_credit(team_, owner) : false;
    if (!warp_.shuffle(granted, 0)) return false;
    warp_.sync();  // the first lane's acquire is before what all lanes store
    credited_ |= 1ull << owner;
    return true;
  }

  PO_FN uint64_t granted_regions(int owner) const {
    return owner == team_.rank ? call_.regions_offset : granted_output(team_, owner);
  }

  PO_FN uint8_t* place(const Owner& owner, int number) const {
    if (!is_reachable(team_, number)) return team_.heap + owner.outgoing_offset;
    return peer_address(team_, number, granted_regions(number) + owner.region_offset);
  }

  PO_FN Region parts_of(const Owner& owner) const {
    return region_of(owner.num_slots, plan_.max_samples, owner.capacity, sizeof(Index), Traits::kWeighted);
  }

  PO_FN void write_piece(const Message& message, uint8_t* region, int64_t piece) const {
    auto* offsets = reinterpret_cast<int32_t*>(region + sizeof(Header));
    if (piece == 0) {
      if (warp_.rank() == 0) write_header(message, region, offsets);
    } else if (piece <= message.num_chunks) {
      write_offsets(message, offsets, piece - 1);
    } else {
      write_lookups(message, region, (piece - 1 - message.num_chunks) * plan_.piece_lookups);
    }
  }

  PO_FN void write_header(const Message& message, uint8_t* region, int32_t* offsets) const {
    auto* header = reinterpret_cast<Header*>(region);
    header->samples = call_.samples;
    header->count = message.count;
    header->left_out = message.is_left_out() ? message.count : 0;
    header->full_owner = plan_.longest[kFullOwner];
    header->full_count = plan_.longest[kFullCount];
    header->full_capacity = plan_.longest[kFullCapacity];
    if (message.is_left_out()) return;
    offsets[message.owner.num_slots * call_.samples] = static_cast<int32_t>(message.count);
  }

  // A chunk of the bags of a slot: where they begin in the message.
  PO_FN void write_offsets(const Message& message, int32_t* offsets, int64_t piece) const {
    const int64_t slot = piece / bags_.chunks_per_feature();
    const int64_t part = piece % bags_.chunks_per_feature();
    const int64_t first_chunk = plan_.slots[message.owner.first_slot + slot].feature * bags_.chunks_per_feature();
    const int64_t chunk = first_chunk + part;
    const int64_t moved = message.begins[slot] - plan_.chunks[first_chunk];
    const int64_t count = bags_.num_bags(chunk);
    const int64_t first_bag = bags_.first_bag(chunk);
    int32_t* target = offsets + slot * call_.samples + part * plan_.chunk_bags;
    int64_t before = plan_.chunks[chunk];
    int64_t next = warp_.rank() < count ? bags_.length_or_end(first_bag + warp_.rank()) : 0;
    for (int64_t first = 0; first < count; first += warp_.size()) {
      const int64_t i = first + warp_.rank();
      const int64_t value = bags_.cut(next);
      if (i + warp_.size() < count) next = bags_.length_or_end(first_bag + i + warp_.size());
      const int64_t through = combined<Traits>(before, combined_through<Traits>(warp_, i < count ? value : 0));
      const int64_t last = warp_.shuffle(through, max_of(warp_.rank() - 1, 0));
      if (i < count) target[i] = static_cast<int32_t>(moved + bags_.cut(warp_.rank() == 0 ? before : last));
      before = warp_.shuffle(through, warp_.size() - 1);
    }
  }

  // Lookups from `first` on: of the slots that have some of them.
  PO_FN void write_lookups(const Message& message, uint8_t* region, int64_t first) const {
    const int64_t end = min_of(first + plan_.piece_lookups, message.count);
    const Region parts = parts_of(message.owner);
    auto* indices = reinterpret_cast<Index*>(region + parts.indices);
    int64_t slot = slot_of(message, first);
    while (first < end) {
      while (message.begins[slot + 1] <= first) ++slot;
      const int64_t run = min_of(message.begins[slot + 1], end) - first;
      const Slot& to = plan_.slots[message.owner.first_slot + slot];
      const int64_t source =
          plan_.chunks[to.feature * bags_.chunks_per_feature()] + first - message.begins[slot];
      const auto* values = static_cast<const Value*>(call_.values) + source;
      copy<Index>(indices + first, run, [&](int64_t i) { return checked(values[i], to, source + i); });
      if constexpr (Traits::kWeighted) {
        const float* weights = call_.weights + source;
        copy<float>(reinterpret_cast<float*>(region + parts.weights) + first, run, [&](int64_t i) { return weights[i]; });
      }
      first += run;
    }
  }

  // The last one that begins at a lookup or before.
  PO_FN int64_t slot_of(const Message& message, int64_t lookup) const {
    int64_t low = 0;
    int64_t high = message.owner.num_slots;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (message.begins[middle] <= lookup ? low : high) = middle;
    }
    return low;
  }

  PO_FN Index checked(Value value, const Slot& slot, int64_t place) const {
    if (value >= 0 && static_cast<int64_t>(value) < slot.num_rows) return static_cast<Index>(value);
    report_bad_input(plan_, kBadIndex, slot.feature, place, static_cast<int64_t>(value), slot.num_rows);
    return -1;
  }

  // target[i] = element(i), in vectors where the target is aligned.
  template <class Element, class Make>
  PO_FN void copy(Element* target, int64_t count, const Make& element) const {
    constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(Element));
    const auto behind = static_cast<int64_t>(reinterpret_cast<uint64_t>(target) / sizeof(Element) % kElements);
    const int64_t head = min_of((kElements - behind) % kElements, count);
    const int64_t vectors = (count - head) / kElements;
    for (int64_t i = warp_.rank(); i < head; i += warp_.size()) target[i] = element(i);
    PO_NO_UNROLL
    for (int64_t first = warp_.rank(); first < vectors; first += warp_.size() * kVectorsAtOnce) {
      union {
        Element elements[kElements];
        Vector<kVectorBytes> vector;
      } loaded[kVectorsAtOnce];
      PO_UNROLL
      for (int k = 0; k < kVectorsAtOnce; ++k) {
        const int64_t vector = first + k * warp_.size();
        PO_UNROLL
        for (int e = 0; e < kElements; ++e) {
          if (vector < vectors) loaded[k].elements[e] = element(head + vector * kElements + e);
        }
      }
      PO_UNROLL
      for (int k = 0; k < kVectorsAtOnce; ++k) {
        const int64_t vector = first + k * warp_.size();
        if (vector < vectors) store_vector(target + head + vector * kElements, loaded[k].vector);
      }
    }
    for (int64_t i = head + vectors * kElements + warp_.rank(); i < count; i += warp_.size()) target[i] = element(i);
  }

  // Counts a piece. Who brings the last one sends the message, or says that it is there.
  PO_FN void finish(const Message& message, int owner) {
    warp_.sync();  // what all lanes have stored is before the count
    if (warp_.rank() != 0) return;
    const auto num_pieces = static_cast<uint64_t>(message.num_pieces);
    if (atomic_add_fetch_acq_rel_gpu(plan_.sent + owner, 1) != num_pieces) return;  // @message-complete
    plan_.sent[owner] = 0;
    if (is_aborted(team_)) return;  // @inputs-unless-aborted
    if (!is_reachable(team_, owner)) {
      if (!await_credit(team_, owner)) return;  // @credit-before-input-puts
      put(message, owner);
    }
    signal(team_, owner, ready_word_offset(team_, team_.rank, 0), launch_flag(team_));
  }

  PO_FN void put(const Message& message, int owner) {
    const Owner& to = message.owner;
    const Region parts = parts_of(to);
    const uint64_t region = granted_output(team_, owner) + to.region_offset;
    const auto part = [&](uint64_t offset, int64_t bytes) {
      if (bytes == 0) return;
      put_nbi(team_, owner, region + offset, team_.heap + to.outgoing_offset + offset, static_cast<uint64_t>(bytes));
    };
    fence_acq_rel_sys();  // what all warps have copied, acquired through the count, is out for the network
    const int64_t num_offsets = message.is_left_out() ? 0 : to.num_slots * call_.samples + 1;
    const int64_t count = message.is_left_out() ? 0 : message.count;
    part(0, static_cast<int64_t>(sizeof(Header)) + num_offsets * static_cast<int64_t>(sizeof(int32_t)));
    part(parts.indices, count * static_cast<int64_t>(sizeof(Index)));
    if constexpr (Traits::kWeighted) part(parts.weights, count * static_cast<int64_t>(sizeof(float)));
    put_fence(team_);  // @inputs-fence
    has_put_ = true;
  }

  const WorkGroup& wg_;
  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Bags<Traits> bags_;
  const Warp warp_{};
  uint64_t credited_ = 0;  // bit p: PE p has granted this epoch's credit
  bool has_put_ = false;
};

// ---- arrival --------------------------------------------------------------------------------------------------------

// One word from every PE, this one included.
PO_FN void await_lookups(const WorkGroup& wg, const Team& team) {
  for (int sender = wg.rank(); sender < team.size; sender += wg.size()) {
    await_epoch(team, local_word(team, ready_word_offset(team, sender, 0)), kPhaseLookups, sender, 0);  // @inputs-await
  }
}

// One thread, behind all others of the launch: says where the lookups are. Where the launch was given up there are none.
template <class Traits>
PO_FN void publish(const Plan& plan, const Call& call) {
  const Team& team = plan.team;
  const bool aborted = is_aborted(team);
  const Owner& self = plan.owners[team.rank];
  int64_t first_sample = 0;
  int64_t full[4] = {-1, -1, 0, 0};
  for (int pe = 0; pe < team.size; ++pe) {
    const Sender& sender = plan.senders[pe];
    const uint8_t* region = team.heap + call.regions_offset + sender.region_offset;
    const auto* header = reinterpret_cast<const Header*>(region);
    const Region parts =
        region_of(self.num_slots, plan.max_samples, sender.capacity, sizeof(typename Traits::Index), Traits::kWeighted);
    const bool is_here = !aborted && header->left_out == 0;
    const int64_t samples = aborted ? 0 : header->samples;
    LookupSource& source = call.sources[pe];
    source.indices = region + parts.indices;
    source.offsets = is_here ? reinterpret_cast<const int32_t*>(region + sizeof(Header)) : plan.no_offsets;
    source.weights = Traits::kWeighted ? reinterpret_cast<const float*>(region + parts.weights) : nullptr;
    source.first_sample = first_sample;
    source.samples = samples;
    source.count = is_here ? header->count : 0;
    source.capacity = sender.capacity;
    source.left_out = aborted ? 0 : header->left_out;
    first_sample += samples;
    if (aborted || header->full_owner < 0 || full[0] >= 0) continue;
    full[0] = pe;
    full[1] = header->full_owner;
    full[2] = header->full_count;
    full[3] = header->full_capacity;
  }
  if (call.report == nullptr) {
    if (full[0] >= 0) report_input_error(team, kNoRoom, full[0], full[1], full[2], full[3]);
    return;
  }
  Report& report = *call.report;
  report.is_aborted = aborted ? 1 : 0;
  report.full_source = full[0];
  report.full_owner = full[1];
  report.full_count = full[2];
  report.full_capacity = full[3];
  flag_store_release_sys(&report.state, 1);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <Config kConfig>
struct Kernel {
  using Traits = embedding_inputs::Traits<kConfig>;
  using Plan = embedding_inputs::Plan;
  using Call = embedding_inputs::Call;
  using Shared = embedding_inputs::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kBlocksPerSm = Traits::kBlocksPerSm;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    if (wg.rank() == 0) {
      shared.plan.team.contract_hash = call.contract_hash;
      shared.plan.team.contract[plan.contract_word] = call.contract_word;
      for (uint64_t& failed : shared.failed) failed = 0;
    }
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, call.regions_offset);
    if (Finder<Traits>(wg, shared, call).run()) {
      Messenger<Traits> messenger(wg, plan, call);
      messenger.run();
      messenger.complete_puts();
    }
    if (wg.index() == 0) await_all_credits(plan.team, wg);
    if (wg.index() == 0) await_lookups(wg, plan.team);
    leave_launch(plan.team, wg, &shared.is_last, 0, 0);
    if (shared.is_last != 0 && wg.rank() == 0) publish<Traits>(plan, call);
  }
};

}  // namespace po::embedding_inputs
