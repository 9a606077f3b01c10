// Brings gradients of lookups' weights to the PEs that passed the lookups. One persistent launch after
// embedding_backward.
//
// The owner of a table has, for each lookup that an input exchange has brought, the product of its bag's gradient and
// its row. Products lie where the lookups' weights lie in the owner's regions, but in memory of their own. Protocol:
// (1) WG 0 grants every peer credit to write this PE's staging, which has a part for each owner. (2) Warps take pieces
// of the products, PEs in turn from the next one on. The warp that brings a PE's last piece releases one sliceRdy word
// there. (3) Warps await the words of all owners. For each of this PE's values they add up what the slots of its
// feature have sent, in the order of the plan. A PE without values receives nothing and need not wait. (4) WG 0 awaits
// all credits.
//
// Products come back in the order of the messages that brought the lookups, so both sides know each lookup's place and
// only products travel. A message that found no room brought nothing and brings nothing back: its lookups have no
// gradient.
#pragma once

#include "comm/credits.cuh"
#include "comm/launch.cuh"
#include "platform/entry.cuh"
#include "tile/lookup_source.cuh"

namespace po::embedding_weight_gradients {

inline constexpr Phase kPhaseReturns = make_phase(kFirstPhase);
PO_CONSTANT(kPhaseReturns)

// ---- arguments ------------------------------------------------------------------------------------------------------

// A PE (another or this one), both as an owner of tables and as a source of lookups.
struct Peer {
  int64_t capacity;          // of this PE's messages to the PE
  int64_t count_number;      // in Call::slot_begins: where the number of this PE's lookups for the PE stands
  uint64_t returned_offset;  // of the PE's products for this PE, from the staging's begin
  uint64_t target_offset;    // of this PE's products for the PE, from its staging's begin
  uint64_t outgoing_offset;  // in this PE's own heap, if the PE is not reachable
};
PO_DESCRIBE(Peer, capacity, count_number, returned_offset, target_offset, outgoing_offset)

// A feature looked up in a table.
struct Slot {
  int64_t owner;
  int64_t number;  // in Call::slot_begins
};
PO_DESCRIBE(Slot, owner, number)

struct Plan {
  Team team;
  const Peer* peers;
  const Slot* slots;             // feature by feature, in the order in which their products are added
  const int64_t* feature_slots;  // [features + 1]: where a feature's slots begin
  int64_t num_features;
  int64_t piece_lookups;  // that a warp sends or adds up at a time; a multiple of 4
  uint64_t staging_offset;
  uint64_t* sent;  // by PE: pieces sent so far; 0 after every launch
};
PO_DESCRIBE(Plan, team, peers, slots, feature_slots, num_features, piece_lookups, staging_offset, sent)

struct Call {
  const float* products;        // of the lookups in this PE's tables: lookup i of a source is number first_lookup + i
  const LookupSource* sources;  // [size]
  const int64_t*
      value_begins;  // [features + 1]: where a feature's values begin among this PE's, as the exchange found it
  const int64_t* slot_begins;  // by owner, its slots and one more: where they begin in this PE's message
  float* gradient;             // [num_values]
  int64_t num_values;
};
PO_DESCRIBE(Call, products, sources, value_begins, slot_begins, gradient, num_values)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

inline constexpr int kThreads = 256;    // on the GPU
inline constexpr int kChunkFloats = 4;  // loaded by a thread at a time; a piece is a multiple
PO_CONSTANT(kThreads)
PO_CONSTANT(kChunkFloats)

// ---- to the PEs that brought the lookups ----------------------------------------------------------------------------

// One warp's share of the sending.
class Returner {
 public:
  PO_FN Returner(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), plan_(plan), team_(plan.team), call_(call) {}

  PO_FN void run() {
    // After a launch that was given up the products may be anything. One lane decides for the warp.
    if (warp_.shuffle(is_aborted(team_), 0)) return;
    const int32_t end = most_pieces() * (team_.size - 1);
    const int32_t stride = wg_.num_warps() * wg_.count();
    PO_NO_UNROLL
    for (int32_t at = wg_.warp_index() * wg_.count() + wg_.index(); at < end; at += stride) {
      const int target = (team_.rank + 1 + at % (team_.size - 1)) % team_.size;
      const int32_t piece = at / (team_.size - 1);
      if (piece >= num_pieces(target)) continue;
      const TaskTrace trace(true);
      if (!credits_.await(team_, warp_, target)) return;  // @credit-before-returns
      copy(target, piece);
      finish(target);
    }
  }

 private:
  static constexpr int kChunksAtOnce = 4;

  PO_FN int32_t count(int target) const { return static_cast<int32_t>(call_.sources[target].count); }
  // A PE that has brought no lookups gets one empty piece, which releases its word.
  PO_FN int32_t num_pieces(int target) const {
    return max_of(ceil_div(count(target), static_cast<int32_t>(plan_.piece_lookups)), 1);
  }
  PO_FN int32_t most_pieces() const {
    int32_t most = 1;
    for (int pe = 0; pe < team_.size; ++pe) {
      if (pe != team_.rank) most = max_of(most, num_pieces(pe));
    }
    return most;
  }

  PO_FN uint64_t offset_at(int target) const { return plan_.staging_offset + plan_.peers[target].target_offset; }

  // Source and target begin at multiples of 16 bytes, as pieces do. The last floats of a piece are copied one by one.
  PO_FN void copy(int target, int32_t piece) const {
    const auto first = piece * static_cast<int32_t>(plan_.piece_lookups);
    const int32_t length = min_of(static_cast<int32_t>(plan_.piece_lookups), count(target) - first);
    const float* source = call_.products + call_.sources[target].first_lookup + first;
    uint8_t* begin = is_reachable(team_, target) ? peer_address(team_, target, offset_at(target))
                                                 : team_.heap + plan_.peers[target].outgoing_offset;
    float* to = reinterpret_cast<float*>(begin) + first;
    const int32_t num_chunks = length / kChunkFloats;
    PO_NO_UNROLL
    for (int32_t at = warp_.rank(); at < num_chunks; at += kChunksAtOnce * warp_.size()) {
      Vector<16> chunks[kChunksAtOnce];
      PO_UNROLL
      for (int k = 0; k < kChunksAtOnce; ++k) {
        const int32_t chunk = at + k * warp_.size();
        if (chunk < num_chunks) chunks[k] = load_vector<16>(source + chunk * kChunkFloats);
      }
      PO_UNROLL
      for (int k = 0; k < kChunksAtOnce; ++k) {
        const int32_t chunk = at + k * warp_.size();
        if (chunk < num_chunks) store_vector<16>(to + chunk * kChunkFloats, chunks[k]);
      }
    }
    for (int32_t i = num_chunks * kChunkFloats + warp_.rank(); i < length; i += warp_.size()) to[i] = source[i];
  }

  // Counts a piece. The warp that brings the last piece signals the PE.
  PO_FN void finish(int target) {
    // @returns-of-lanes
    warp_.sync();  // orders the stores of all lanes before the count
    if (warp_.rank() != 0) return;
    const auto pieces = static_cast<uint64_t>(num_pieces(target));
    if (atomic_add_fetch_acq_rel_gpu(plan_.sent + target, 1) != pieces) return;  // @returns-complete
    plan_.sent[target] = 0;                                                      // @returns-reset
    if (!is_reachable(team_, target)) {
      fence_acq_rel_sys();  // makes what all warps have copied, acquired through the count, visible to the network
    }
    put_signal(team_, target, offset_at(target), team_.heap + plan_.peers[target].outgoing_offset,
               static_cast<uint64_t>(count(target)) * sizeof(float), ready_word_offset(team_, team_.rank, 0),
               launch_flag(team_));
  }

  const WorkGroup& wg_;
  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Warp warp_{};
  Credits credits_;
};

// ---- what has come back ---------------------------------------------------------------------------------------------

// One warp's share of the adding, over this PE's values.
class Adder {
 public:
  PO_FN Adder(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), plan_(plan), team_(plan.team), call_(call) {}

  PO_FN void run() const {
    const int64_t stride = static_cast<int64_t>(wg_.num_warps()) * wg_.count() * plan_.piece_lookups;
    const int64_t own = (static_cast<int64_t>(wg_.warp_index()) * wg_.count() + wg_.index()) * plan_.piece_lookups;
    if (own >= call_.num_values || !are_here()) return;
    PO_NO_UNROLL
    for (int64_t first = own; first < call_.num_values; first += stride) {
      const TaskTrace trace(false);
      const int64_t end = min_of(first + plan_.piece_lookups, call_.num_values);
      add_up(static_cast<int32_t>(first), static_cast<int32_t>(end));
    }
  }

 private:
  static constexpr int kAtOnce = 4;  // held by a lane in registers

  // Awaits the words of all owners, a lane for each.
  PO_FN bool are_here() const {
    bool all = true;
    for (int owner = warp_.rank(); owner < team_.size; owner += warp_.size()) {
      if (owner == team_.rank) continue;
      const uint64_t* word = local_word(team_, ready_word_offset(team_, owner, 0));
      all = await_epoch(team_, word, kPhaseReturns, owner, 0) && all;  // @returns-await
    }
    if (warp_.count(all) != warp_.size()) return false;
    warp_.sync();  // hands what a lane has acquired to all lanes
    return true;
  }

  // Adds up values, feature by feature. Values of no feature come first or last.
  PO_FN void add_up(int32_t first, int32_t end) const {
    const auto num_features = static_cast<int32_t>(plan_.num_features);
    int32_t feature = feature_of(first);
    PO_NO_UNROLL
    while (first < end) {
      int32_t run_end = end;
      if (feature < num_features) run_end = min_of(end, static_cast<int32_t>(call_.value_begins[feature + 1]));
      if (run_end > first) {
        const bool is_one = feature >= 0 && feature < num_features;
        add_run(is_one ? feature : -1, first, run_end - first);
        first = run_end;
      }
      ++feature;
    }
  }

  // The last feature that begins at or before a value; -1 if none does; the number of features if all end before it.
  PO_FN int32_t feature_of(int32_t value) const {
    int32_t low = -1;
    auto high = static_cast<int32_t>(plan_.num_features) + 1;
    PO_NO_UNROLL
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (call_.value_begins[middle] <= value ? low : high) = middle;
    }
    return low;
  }

  // Adds up `length` values from `first` on, all of one feature, or of none if `feature` is -1.
  PO_FN void add_run(int32_t feature, int32_t first, int32_t length) const {
    const int64_t begin = feature < 0 ? 0 : plan_.feature_slots[feature];
    const int64_t end = feature < 0 ? 0 : plan_.feature_slots[feature + 1];
    const int64_t shift = feature < 0 ? 0 : first - call_.value_begins[feature];
    PO_NO_UNROLL
    for (int32_t at = warp_.rank(); at < length; at += kAtOnce * warp_.size()) {
      float totals[kAtOnce] = {};
      bool is_first = true;
      PO_NO_UNROLL
      for (int64_t slot = begin; slot < end; ++slot) {
        const float* returned = returned_of(plan_.slots[slot], shift, length);
        if (returned == nullptr) continue;
        PO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          const int32_t i = at + k * warp_.size();
          if (i < length) totals[k] = is_first ? returned[i] : totals[k] + returned[i];
        }
        is_first = false;
      }
      PO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int32_t i = at + k * warp_.size();
        if (i < length) call_.gradient[first + i] = totals[k];
      }
    }
  }

  // Where `length` lookups of a slot lie, from its lookup number `shift` on; null if the message found no room. After
  // an exchange that was given up the begins may be anything; nothing is read outside of the part.
  PO_FN const float* returned_of(const Slot& slot, int64_t shift, int32_t length) const {
    const Peer& owner = plan_.peers[slot.owner];
    const int64_t begin = call_.slot_begins[slot.number] + shift;
    const bool is_left_out = call_.slot_begins[owner.count_number] > owner.capacity;  // @returns-of-no-room
    if (is_left_out || begin < 0 || begin + length > owner.capacity) return nullptr;
    if (slot.owner == team_.rank) return call_.products + call_.sources[team_.rank].first_lookup + begin;
    return reinterpret_cast<const float*>(team_.heap + plan_.staging_offset + owner.returned_offset) + begin;
  }

  const WorkGroup& wg_;
  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  const Warp warp_{};
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

struct Kernel {
  using Plan = embedding_weight_gradients::Plan;
  using Call = embedding_weight_gradients::Call;
  using Shared = embedding_weight_gradients::Shared;
  static constexpr int kThreads = embedding_weight_gradients::kThreads;
  static constexpr int kBlocksPerSm = 2;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    const Plan& plan = shared.plan;
    begin_launch(shared.plan.team, wg);
    if (wg.index() == 0) grant_credit(plan.team, wg, 0);
    if (plan.team.size > 1) {
      Returner(wg, plan, call).run();
    }
    Adder(wg, plan, call).run();
    if (wg.index() == 0) await_all_credits(plan.team, wg);
    leave_launch(plan.team, wg, &shared.is_last, 0, 0);
    if (shared.is_last == 0 || !is_aborted(plan.team)) return;
    poison(wg, reinterpret_cast<uint32_t*>(call.gradient), call.num_values);  // @returns-poison
  }
};

}  // namespace po::embedding_weight_gradients
