"""The sort by row of an embedding batch under ThreadSanitizer: no error, but one for each mutation."""

from __future__ import annotations

from typing import ClassVar

from mutations import Condition, Drop, Relaxed, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

_DRIVER = r"""
// Runs the host build of embedding_inversion, launch after launch on the same memory, and checks every lookup.
#include "driver.h"
#include "kernels/embedding_inversion.cuh"

namespace {

using namespace po::embedding_inversion;
#ifndef WIDE
#define WIDE false
#endif
// Small digits, so that there are few of them and several passes.
constexpr Config kConfig{.wide = WIDE, .lookups = WIDE, .counts = !WIDE, .digit_bits = 4, .items = 2};
using Inversion = Kernel<kConfig>;
using EntryOf = Inversion::Traits::Entry;
using Words = Group<Inversion::Traits>::Words;
constexpr int kPasses = WIDE ? 8 : 3;

driver::Options options({{"--pes", "1"},
                         {"--tables", "3"},
                         {"--rows", "400"},
                         {"--batch", "9"},
                         {"--lookups", "5"},  // of a bag, at most
                         {"--sources", "1"},  // share the samples
                         {"--falling", "0"},
                         {"--empty", "0"},        // one bag in so many has lookups
                         {"--aborted-at", "-1"},  // this launch finds that one was given up
                         {"--abort-us", "-1"}},   // or each is given up after a time
                        {driver::kLaunches, driver::kWorld});

class Pe final : public driver::BasePe<Plan> {
 public:
  Pe(driver::World& world_in, int rank_in) : BasePe(world_in, rank_in, 1) {
    allocate_heap();
    for (int64_t t = 0; t < num_tables; ++t) {
      first_keys.push_back((WIDE ? int64_t{1} << 29 : 0) * (t / 2) + t / 2 * num_rows);  // two have the same rows
      rows.push_back(num_rows);
      members.push_back(static_cast<int32_t>(t % 2));
    }
    if (num_sources > 1) {
      plan.members = members.data();
      plan.member_bits = 1;
    }
    plan.first_keys = first_keys.data();
    plan.num_rows = rows.data();
    plan.num_tables = num_tables;
    plan.batch = batch;
    plan.num_passes = kPasses;
    plan.words = reinterpret_cast<uint64_t*>(&words);
    auto most = static_cast<size_t>(num_tables * batch * options.number("--lookups") + 64 * 2 * num_sources);
    most *= 3;  // room for mutants
    keys.resize(most);
    bags.resize(most);
    lookups.resize(most);
    counts.resize(static_cast<size_t>(num_tables * batch));
    entries.resize(2 * most * sizeof(EntryOf));
    // Sums of all tiles: who reads what no tile has told is wrong.
    const int64_t bytes = tile_words_bytes(kPasses, static_cast<int64_t>(most), int64_t{1} << kConfig.digit_bits);
    tile_words.resize(static_cast<size_t>(bytes) / sizeof(uint32_t), kOfAll | 1);
  }

 private:
  void before_launch(int64_t launch) override {
    make_lookups(launch);
    local.abort = launch == number("--aborted-at") ? 1 : 0;
    count = -1;
  }

  std::vector<uint64_t> zero_words() const {
    const auto* begin = reinterpret_cast<const uint64_t*>(&words);
    return {begin, begin + sizeof(Words) / sizeof(uint64_t)};
  }

  void make_lookups(int64_t launch) {
    lookups_of.assign(static_cast<size_t>(num_sources), {});
    sources.clear();
    int64_t first_lookup = 0;
    for (int64_t s = 0; s < num_sources; ++s) {
      Lookups& own = lookups_of[static_cast<size_t>(s)];
      const int64_t first = batch * s / num_sources;
      const int64_t samples = batch * (s + 1) / num_sources - first;
      own.offsets.assign(1, 0);
      for (int64_t i = 0; i < num_tables * samples; ++i) {
        const int64_t bag = i / samples * batch + first + i % samples;
        const int64_t empty = options.number("--empty");
        int64_t length = (bag * 7 + launch * 3) % (options.number("--lookups") + 1);
        if (empty != 0 && bag % empty != 0) length = 0;
        for (int64_t l = 0; l < length; ++l) {
          own.indices.push_back((bag * bag + l * 13 + launch * 101) % (num_rows + num_rows / 5));  // some are no rows
        }
        own.offsets.push_back(static_cast<int64_t>(own.indices.size()));
      }
      if (options.number("--falling") != 0) {
        for (size_t i = 0; i < own.offsets.size(); i += 5) own.offsets[i] += static_cast<int64_t>(i * 29 % 23) - 11;
      }
      for (int64_t i = 0; i < 30 * s + 1; ++i) own.indices.push_back(1);  // of no bag
      const auto capacity = static_cast<int64_t>(own.indices.size());
      sources.push_back(
          {own.indices.data(), own.offsets.data(), nullptr, first, samples, capacity, capacity, 0, first_lookup});
      first_lookup += capacity;
    }
  }

  void run_kernel(int64_t launch) override {
    Call call{};
    call.num_sources = num_sources;
    if (num_sources == 1) {
      call.source = sources[0];
    } else {
      call.sources = sources.data();
    }
    call.entries[0] = entries.data();
    call.entries[1] = entries.data() + entries.size() / 2;
    call.tile_words = tile_words.data();
    call.keys = keys.data();
    call.bags = bags.data();
    call.lookups = lookups.data();
    call.counts = counts.data();
    call.count = &count;
    std::thread killer;
    if (number("--abort-us") >= 0) {
      killer = std::thread([this, us = number("--abort-us") * (launch + 1)] {
        usleep(static_cast<useconds_t>(us));
        po::flag_store_relaxed_sys(&local.abort, 1);
      });
    }
    launch_on_host<Inversion>(plan_of(launch), call);
    if (killer.joinable()) killer.join();
  }

  void check(int64_t launch) override {
    if (local.epoch != static_cast<uint64_t>(number("--first-epoch") + launch)) {
      driver::fail(driver::kWrongRemains, "launch %ld: the epoch is %lu", launch, local.epoch);
    }
    for (const uint64_t word : zero_words()) {
      if (word != 0) driver::fail(driver::kWrongRemains, "launch %ld: left %lu behind", launch, word);
    }
    if (launch == number("--aborted-at") && count != 0) {
      driver::fail(driver::kTookPart, "launch %ld: has %ld lookups", launch, count);
    }
    if (local.abort == 0 || count != 0) check_lookups(launch);
  }

  void check_lookups(int64_t launch) const {
    struct Lookup {
      int64_t key;
      int64_t bag;
      int64_t place;
    };
    std::vector<Lookup> wants;
    std::vector<float> of_bag(counts.size());
    for (size_t s = 0; s < sources.size(); ++s) {
      const Lookups& own = lookups_of[s];
      for (size_t place = 0; place < own.indices.size(); ++place) {
        // The bag, as a binary search has it.
        size_t begin = 0;
        size_t end = own.offsets.size() - 1;
        while (begin < end) {
          const size_t middle = (begin + end) / 2;
          if (own.offsets[middle + 1] <= static_cast<int64_t>(place)) {
            begin = middle + 1;
          } else {
            end = middle;
          }
        }
        const int64_t index = own.indices[place];
        if (begin + 1 == own.offsets.size() || static_cast<int64_t>(place) < own.offsets[0]) continue;
        if (index >= num_rows) continue;
        const auto samples = static_cast<size_t>(sources[s].samples);
        const size_t table = begin / samples;
        const auto sample = sources[s].first_sample + static_cast<int64_t>(begin % samples);
        const int64_t bag = static_cast<int64_t>(table) * batch + sample;
        wants.push_back({first_keys[table] + index, bag, sources[s].first_lookup + static_cast<int64_t>(place)});
        of_bag[static_cast<size_t>(bag)] += 1;
      }
    }
    std::stable_sort(wants.begin(), wants.end(), [](const Lookup& a, const Lookup& b) {
      return std::pair(a.key, a.bag) < std::pair(b.key, b.bag);
    });
    if (count != static_cast<int64_t>(wants.size())) {
      driver::fail(driver::kWrongOutput, "launch %ld: %ld lookups, not %zu", launch, count, wants.size());
    }
    for (size_t i = 0; i < wants.size(); ++i) {
      if (static_cast<int64_t>(keys[i]) != wants[i].key || bags[i] != wants[i].bag ||
          (WIDE && lookups[i] != wants[i].place)) {
        driver::fail(driver::kWrongOutput, "launch %ld: wrong from the %zuth on", launch, i);
      }
    }
    for (size_t bag = 0; bag < of_bag.size() && !WIDE; ++bag) {
      if (po::bits_float(counts[bag]) != of_bag[bag]) {
        driver::fail(driver::kWrongOutput, "launch %ld: bag %zu has not %g lookups", launch, bag, of_bag[bag]);
      }
    }
  }

  const int64_t num_tables = options.number("--tables");
  const int64_t num_rows = options.number("--rows");
  const int64_t batch = options.number("--batch");
  const int64_t num_sources = options.number("--sources");
  struct Lookups {
    std::vector<int64_t> indices;
    std::vector<int64_t> offsets;
  };
  std::vector<Lookups> lookups_of;
  std::vector<po::LookupSource> sources;
  std::vector<int64_t> first_keys;
  std::vector<int64_t> rows;
  std::vector<int32_t> members;
  std::vector<Inversion::Traits::Key> keys;
  std::vector<int32_t> bags;
  std::vector<int32_t> lookups;
  std::vector<uint32_t> counts;
  std::vector<uint8_t> entries;
  std::vector<uint32_t> tile_words;
  int64_t count = 0;
  Words words{};
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
"""

PLAIN = "--wgs=3 --threads=2 --epochs=12"
# Bags too many to go through their ends, and ends that fall, use a separate path.
EMPTY = "--wgs=2 --threads=3 --batch=60 --empty=9"
ABORTED = "--wgs=3 --threads=2 --aborted-at=2 --epochs=5"
CASES = {
    "lone_warps": "--wgs=1 --threads=1",
    "plain": PLAIN,
    "many_work_groups": "--wgs=7 --threads=1",
    "more_threads_than_digits": "--wgs=1 --threads=19 --epochs=3",
    "no_lookups": "--lookups=0",
    "three_sources": "--sources=3 --batch=17 --wgs=3 --threads=2",
    "as_many_sources_as_samples": "--sources=8 --batch=8 --tables=4 --wgs=2 --threads=3",
    "sources_whose_offsets_fall": "--sources=2 --batch=20 --falling=1 --lookups=2",
    "offsets_fall": "--falling=1 --wgs=2 --threads=3",
    "bags_without_lookups": EMPTY,
    "behind_an_aborted_launch": ABORTED,
    "aborted_on_the_way": "--wgs=3 --threads=2 --abort-us=150 --epochs=30",
}

MUTATIONS = {
    "work_groups_do_not_meet": Mutation((Condition("inversion-meets", "false"),), PLAIN, RACE),
    "meetings_are_not_awaited": Mutation((Condition("inversion-meet-await", "false"),), PLAIN, RACE),
    "meetings_are_counted_before_all_have_written": Mutation((Drop("inversion-meet-sync"),), PLAIN, RACE),
    "meetings_do_not_release": Mutation((Relaxed("add-acq-rel"),), PLAIN, RACE),
    "meetings_do_not_acquire": Mutation((Relaxed("flag-acquire"),), PLAIN, RACE),
    "counts_are_added_before_they_are_zero": Mutation((Condition("inversion-counts-zeroed", "false"),), PLAIN, RACE),
    "words_of_tiles_are_those_of_the_last_launch": Mutation((Drop("inversion-words-zeroed"),), PLAIN, RACE),
    "a_tile_that_has_told_nothing_is_passed_over": Mutation(
        (Swap("inversion-told", "kOfTile", "next == 0 ? kOfTile : 0"),), PLAIN, RACE
    ),
    "a_tile_s_number_is_taken_for_the_sum": Mutation(
        (Swap("inversion-tells-tile", "(tile == 0 ? kOfAll : kOfTile)", "kOfAll"),), PLAIN, RACE
    ),
    "meetings_of_the_last_launch_count": Mutation((Drop("inversion-cleared"),), PLAIN, RACE | {Exit.WRONG_REMAINS}),
    "lookups_of_an_aborted_launch_count": Mutation(
        (Condition("inversion-aborted", "false"),), ABORTED, {Exit.TOOK_PART}
    ),
    "ranks_are_used_before_all_are_there": Mutation((Drop("inversion-ranked"),), PLAIN, RACE),
    "entries_are_staged_before_all_are_counted": Mutation((Drop("inversion-counted"),), PLAIN, RACE),
    "entries_leave_before_all_are_staged": Mutation((Drop("inversion-all-done"),), PLAIN, RACE),
    "bags_are_used_before_they_are_found": Mutation((Drop("inversion-bags-found"),), PLAIN, RACE),
    "marks_are_used_before_they_are_there": Mutation((Drop("inversion-marked"),), PLAIN, RACE),
    "bags_are_marked_before_the_last_marks_are_gone": Mutation((Drop("inversion-marks-cleared"),), PLAIN, RACE),
    "marks_go_before_they_are_used": Mutation((Drop("inversion-marks-read"),), PLAIN, RACE),
}


class TestEmbeddingInversion(SanitizerSuite):
    builds: ClassVar = {"narrow": Build(), "wide": Build(("-DWIDE=true",))}
    cases: ClassVar = {
        "narrow": CASES,
        "wide": {name: CASES[name] for name in ("plain", "offsets_fall", "three_sources")},
    }
    driver: ClassVar = Driver(_DRIVER, builds, cases, MUTATIONS, "narrow")
