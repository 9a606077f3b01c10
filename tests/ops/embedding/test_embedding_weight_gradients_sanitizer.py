"""Gradients of lookups' weights on their way back, under ThreadSanitizer: no error, but one for each mutation."""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, Condition, Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of embedding_weight_gradients with all PEs as threads of one process, and checks every gradient.
#include <cmath>

#include "driver.h"
#include "kernels/embedding_weight_gradients.cuh"

namespace {

using namespace po::embedding_weight_gradients;

constexpr uint64_t kReadyStride = 4;
constexpr int64_t kNoRoom = 6;  // lookups that PE 0 has room for, of PE 1 and with --full=1: the first slot's

driver::Options options({{"--features", "3"},
                         {"--slots", "4"},  // of a PE
                         {"--piece", "4"},
                         {"--length", "5"},      // values of a feature, at most
                         {"--empty-pe", "-1"},   // has no values
                         {"--bare-pe", "-1"},    // has no slots
                         {"--full", "0"},        // PE 0 has had no room for what PE 1 sent
                         {"--alternate", "0"}},  // launches lie at other places in turn, as those of two plans do
                        {driver::kLaunches, driver::kWorld, driver::kTroubles});

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    const auto pes = static_cast<uint64_t>(size);
    staging = take(kVariants * pes * part_bytes());
    outgoing = take(pes * part_bytes());
    allocate_heap();
    for (uint64_t i = 0; i < kVariants * pes * part_bytes() / sizeof(float); ++i) {
      reinterpret_cast<float*>(heap + staging)[i] = 1000.0f;  // of earlier launches
    }
    int64_t first_slot = 0;
    for (int pe = 0; pe < size; ++pe) {
      const auto other = static_cast<uint64_t>(pe);
      peers.push_back({capacity(rank, pe), first_slot + pe + num_slots(pe), other * part_bytes(),
                       static_cast<uint64_t>(rank) * part_bytes(), outgoing + other * part_bytes()});
      other_peers.push_back(peers.back());
      other_peers.back().outgoing_offset = outgoing + (other + 1) % pes * part_bytes();
      first_slot += num_slots(pe);
    }
    feature_slots.push_back(0);
    for (int64_t feature = 0; feature < num_features; ++feature) {
      int64_t first = 0;
      for (int pe = 0; pe < size; ++pe) {
        for (int64_t slot = 0; slot < num_slots(pe); ++slot) {
          if (feature_of(pe, slot) == feature) slots.push_back({pe, first + pe + slot});
        }
        first += num_slots(pe);
      }
      feature_slots.push_back(static_cast<int64_t>(slots.size()));
    }
    sent.resize(pes);
    plan.peers = peers.data();
    plan.slots = slots.data();
    plan.feature_slots = feature_slots.data();
    plan.num_features = num_features;
    plan.piece_lookups = number("--piece");
    plan.staging_offset = staging;
    plan.sent = sent.data();
  }

 private:
  static constexpr uint64_t kVariants = 2;

  // ---- what there is -----------------------------------------------------------------------------------------------

  uint64_t part_bytes() const {
    return (static_cast<uint64_t>(number("--slots") * number("--length")) * sizeof(float) + 127) / 128 * 128;
  }
  int64_t num_slots(int pe) const { return pe == number("--bare-pe") ? 0 : number("--slots"); }
  int64_t feature_of(int pe, int64_t slot) const { return (pe + slot * 2) % num_features; }
  int64_t length(int pe, int64_t feature, int64_t launch) const {
    const int64_t most = number("--length");
    return pe == number("--empty-pe") ? 0 : most - (feature + launch + pe) % std::min<int64_t>(most, 4);
  }
  bool is_full(int source, int owner) const { return number("--full") != 0 && source == 1 && owner == 0; }
  int64_t capacity(int source, int owner) const {
    return is_full(source, owner) ? kNoRoom : num_slots(owner) * number("--length");
  }
  int64_t count(int source, int owner, int64_t launch) const {
    int64_t total = 0;
    for (int64_t slot = 0; slot < num_slots(owner); ++slot) total += length(source, feature_of(owner, slot), launch);
    return total;
  }
  // Small whole numbers: they and their sums are exact.
  float product(int owner, int source, int64_t slot, int64_t place, int64_t launch) const {
    return static_cast<float>((owner * 5 + source * 3 + slot * 7 + place * 11 + launch * 13) % 17 - 8);
  }

  // ---- launches ----------------------------------------------------------------------------------------------------

  void run_kernel(int64_t launch) override {
    const int64_t part_floats = static_cast<int64_t>(part_bytes() / sizeof(float));
    std::vector<float> products(static_cast<size_t>(size * part_floats), std::nanf(""));
    std::vector<po::LookupSource> sources(static_cast<size_t>(size));
    for (int pe = 0; pe < size; ++pe) {
      po::LookupSource& source = sources[static_cast<size_t>(pe)];
      source.first_lookup = pe * part_floats;
      source.count = is_full(pe, rank) ? 0 : count(pe, rank, launch);
      int64_t at = source.first_lookup;
      for (int64_t slot = 0; slot < num_slots(rank) && source.count != 0; ++slot) {
        for (int64_t i = 0; i < length(pe, feature_of(rank, slot), launch); ++i, ++at) {
          products[static_cast<size_t>(at)] = product(rank, pe, slot, i, launch);
        }
      }
    }
    // Nobody's values come before and behind those of features.
    std::vector<int64_t> value_begins{first_value()};
    for (int64_t feature = 0; feature < num_features; ++feature) {
      value_begins.push_back(value_begins.back() + length(rank, feature, launch));
    }
    std::vector<int64_t> slot_begins;
    for (int owner = 0; owner < size; ++owner) {
      slot_begins.push_back(0);
      for (int64_t slot = 0; slot < num_slots(owner); ++slot) {
        slot_begins.push_back(slot_begins.back() + length(rank, feature_of(owner, slot), launch));
      }
    }
    gradient.assign(static_cast<size_t>(value_begins.back() + first_value()), 77.0f);
    Plan used = plan_of(launch);
    if (number("--alternate") != 0 && launch % 2 == 1) {
      used.staging_offset += static_cast<uint64_t>(size) * part_bytes();
      used.peers = other_peers.data();
    }
    Call call{};
    call.products = products.data();
    call.sources = sources.data();
    call.value_begins = value_begins.data();
    call.slot_begins = slot_begins.data();
    call.gradient = gradient.data();
    call.num_values = static_cast<int64_t>(gradient.size());
    launch_on_host<Kernel>(used, call);
  }

  int64_t first_value() const { return rank == number("--empty-pe") ? 0 : 2; }

  void check(int64_t launch) override {
    std::vector<float> expected(static_cast<size_t>(first_value()), 0.0f);
    for (int64_t feature = 0; feature < num_features; ++feature) {
      for (int64_t i = 0; i < length(rank, feature, launch); ++i) {
        float total = 0.0f;
        for (int owner = 0; owner < size; ++owner) {
          for (int64_t slot = 0; slot < num_slots(owner) && !is_full(rank, owner); ++slot) {
            if (feature_of(owner, slot) == feature) total += product(owner, rank, slot, i, launch);
          }
        }
        expected.push_back(total);
      }
    }
    expected.resize(expected.size() + static_cast<size_t>(first_value()), 0.0f);
    if (expected.size() != gradient.size()) driver::fail(driver::kWrongOutput, "PE %d: another size", rank);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (gradient[i] != expected[i]) {
        driver::fail(driver::kWrongOutput, "PE %d, launch %ld, value %zu: %g, not %g", rank, launch, i, gradient[i],
                     expected[i]);
      }
    }
    for (const uint64_t pieces : sent) {
      if (pieces != 0) driver::fail(driver::kWrongRemains, "PE %d, launch %ld: %lu pieces", rank, launch, pieces);
    }
  }

  void check_given_up(int64_t launch) override {
    for (const float value : gradient) {
      if (!std::isnan(value)) driver::fail(driver::kWrongOutput, "PE %d, launch %ld: not poisoned", rank, launch);
    }
  }

  void clear() override { std::fill(sent.begin(), sent.end(), 0); }

  const int64_t num_features = number("--features");
  uint64_t staging = 0;
  uint64_t outgoing = 0;
  std::vector<Peer> peers;
  std::vector<Peer> other_peers;
  std::vector<Slot> slots;
  std::vector<int64_t> feature_slots;
  std::vector<uint64_t> sent;
  std::vector<float> gradient;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""

PLAIN = "--pes=2 --wgs=3 --threads=2"
AHEAD = "--pes=3 --wgs=2 --threads=2 --length=40 --epochs=30 --slow-pe=1 --slow-us=500"
STAGED = "--pes=2 --staged=1 --delay-us=300 --slow-pe=0 --epochs=12"
# The next launch fills, for another PE, memory that the network may still read for a first PE.
SLOW_NETWORK = "--pes=3 --alternate=1 --staged=1 --delay-us=5000 --epochs=12"
FULL = "--pes=3 --full=1 --wgs=2 --threads=2"
# A PE stays away from a launch. The others give up, and run launches after it as a GPU's queue would.
TROUBLE = "--pes=3 --threads=2 --stop-pe=1 --trouble-at=3 --queued=2 --epochs=6 --timeout-ms=1500"
CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warps": "--pes=3 --threads=1 --wgs=1",
    "plain": PLAIN,
    "four_pes": "--pes=4 --wgs=2 --threads=2",
    "several_chunks": "--pes=3 --wgs=2 --threads=2 --length=90 --piece=32",
    "a_pe_without_values": "--pes=3 --empty-pe=1 --threads=2",
    "a_pe_without_tables": "--pes=3 --bare-pe=0 --threads=2",
    "late_pe": AHEAD,
    "no_room": FULL,
    "no_room_staged": f"{FULL} --staged=1 --delay-us=200",
    "staged": STAGED,
    "slow_network": SLOW_NETWORK,
    "alternating": "--pes=3 --alternate=1 --wgs=2 --threads=2 --epochs=30 --slow-pe=1 --slow-us=300",
    "some_are_near": "--pes=4 --staged=1 --node=2 --delay-us=100 --epochs=5",
    "behind_an_aborted_launch": TROUBLE,
    "behind_an_aborted_launch_staged": f"{TROUBLE} --staged=1 --delay-us=100",
    "another_contract": "--pes=3 --threads=3 --other-pe=1 --trouble-at=3 --epochs=6",
}

MUTATIONS = {
    "returns_are_stored_without_credit": Mutation((Condition("credit-before-returns", "false"),), AHEAD, RACE),
    "returns_are_not_awaited": Mutation((Drop("returns-await"),), PLAIN, RACE),
    "returns_are_told_with_their_first_piece": Mutation(
        (Swap("returns-complete", "pieces", "1"),), PLAIN, RACE | {Exit.WRONG_REMAINS}
    ),
    "returned_pieces_are_not_reset": Mutation(
        (Drop("returns-reset"),), f"{PLAIN} --timeout-ms=5000", {Exit.WRONG_REMAINS, Exit.TIMED_OUT}
    ),
    "signals_overtake_returns": Mutation((OVERTAKES,), STAGED, RACE),
    "outgoing_returns_are_overwritten": Mutation((Drop("last-quiet"),), SLOW_NETWORK, RACE),
    "what_found_no_room_is_added_up": Mutation(
        (Swap("returns-of-no-room", "call_.slot_begins[owner.count_number] > owner.capacity", "false"),),
        FULL,
        {Exit.WRONG_OUTPUT},
    ),
    "returns_of_an_aborted_launch_count": Mutation((Drop("returns-poison"),), TROUBLE, {Exit.WRONG_OUTPUT}),
}


class TestEmbeddingWeightGradients(SanitizerSuite):
    builds: ClassVar = {"returns": Build()}
    cases: ClassVar = {"returns": CASES}
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "returns")
