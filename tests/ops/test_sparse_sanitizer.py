"""sparse_all_reduce under ThreadSanitizer.

Not covered, because it has no effect on the host: data that a lane of a warp leaves to another lane, and the order
between a GPU's memory and its network.
"""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, After, Before, Condition, Drop, Initial, Relaxed, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

CASES = {
    "alone": "--pes=1 --threads=3",
    "two": "--pes=2",
    "three": "--pes=3 --threads=2",
    "four_share_all": "--pes=4 --overlap=8",
    "four_share_none": "--pes=4 --overlap=0",
    "capacity_too_small": "--pes=2 --capacity=100",
    "one_has_none": "--pes=3 --empty-pe=1",
    "coalesced": "--pes=3 --threads=2 --repeats=1",
    "coalesced_staged": "--pes=2 --repeats=1 --staged=1 --delay-us=100",
    "many_occurrences": "--pes=2 --repeats=9 --wgs=3",
    "many_occurrences_of_shared_rows": "--pes=3 --repeats=9 --threads=2 --overlap=8 --columns=72",
    "many_occurrences_staged": "--pes=2 --repeats=9 --staged=1 --delay-us=100",
    "epoch_passes_2^32": "--pes=2 --first-epoch=4294967293",
    "late_pe": "--pes=3 --slow-pe=1",
    "staged": "--pes=3 --staged=1 --delay-us=100",
    "staged_late": "--pes=3 --threads=2 --staged=1 --delay-us=100 --slow-pe=0",
    "staged_epoch_passes_2^32": "--pes=2 --staged=1 --delay-us=100 --first-epoch=4294967293",
}
FOR_OTHER_BUILDS = {name: CASES[name] for name in ("three", "coalesced", "many_occurrences", "staged_late")}

PLAIN = "--pes=3 --threads=2 --epochs=12"
ONE_WG = "--pes=2 --wgs=1 --threads=4 --epochs=12"
LATE = "--pes=2 --threads=2 --slow-pe=1 --slow-us=2000 --epochs=12"
HOT = "--pes=2 --threads=2 --repeats=9 --epochs=12"
SHARED = "--pes=4 --overlap=8 --threads=2 --slow-pe=2 --slow-us=2000 --epochs=12"
STAGED = "--pes=2 --threads=2 --staged=1 --delay-us=300 --epochs=12"
MUTATIONS = {
    "bits_are_sent_before_they_are_set": Mutation((Drop("bits-set"),), ONE_WG, RACE),
    "sets_are_announced_before_they_are_stored": Mutation((Drop("sets-before-ready"),), PLAIN, RACE),
    "sets_are_not_awaited": Mutation((Condition("sets-await", "true"),), LATE, RACE),
    "any_total_will_do": Mutation((Swap("totals-flag", "packet.flag == flag", "packet.flag != 1"),), PLAIN, RACE),
    # At most three threads: ThreadSanitizer remembers four accesses to a word.
    # Alone: a PE that counts wrong would wait for rows that no other PE knows.
    "sums_are_overwritten_before_they_are_read": Mutation(
        (Drop("sums-read"),), "--pes=1 --wgs=1 --threads=3 --epochs=12", RACE
    ),
    "rows_are_announced_before_they_are_listed": Mutation((Drop("meet-sync"),), HOT, RACE),
    "listed_rows_are_not_awaited": Mutation(
        (Swap("meet-await", "epoch_of(flag_load_acquire_gpu(flags + other)) >= team_.epoch", "true"),), PLAIN, RACE
    ),
    "hot_rows_are_summed_before_all_are_found": Mutation((Drop("hot-found"),), HOT, RACE),
    "hot_rows_are_sent_before_they_are_summed": Mutation((Drop("hot-summed"),), HOT, RACE),
    "hot_list_is_not_cleared": Mutation((Drop("hot-clear"),), HOT, RACE | {Exit.WRONG_REMAINS}),
    "rows_without_credit": Mutation((Drop("rows-credit"),), LATE, RACE),
    "shares_are_not_awaited": Mutation(
        (Swap("shares-await", "static_cast<uint64_t>(block) + 1", "static_cast<uint64_t>(block)"),), SHARED, RACE
    ),
    # Peers read in between, independent of the order of threads.
    "shares_are_announced_before_they_are_left": Mutation(
        (After("shares-contribute", "tell_progress(all_pes(), static_cast<uint64_t>(block) + 1); usleep(300);"),),
        SHARED,
        RACE,
    ),
    "rows_are_not_awaited": Mutation(
        (Swap("rows-await", "await_progress(all_pes(), kAllBlocks, kPhaseRows)", "true"),), LATE, RACE
    ),
    "done_before_the_last_sums": Mutation(
        (Before("block-contribute", "if (block == blocks_.count) tell_progress(all_pes(), kAllBlocks);"),), SHARED, RACE
    ),
    "progress_does_not_release": Mutation(
        (Relaxed("flag-release"),),
        PLAIN,
        RACE,
    ),
    "progress_does_not_acquire": Mutation((Relaxed("flag-acquire"),), PLAIN, RACE),
    "put_shares_are_not_awaited": Mutation((Drop("put-shares-await"),), STAGED, RACE),
    "put_rows_are_not_awaited": Mutation((Drop("put-rows-await"),), STAGED, RACE | {Exit.WRONG_OUTPUT}),
    "signals_overtake_put_sets": Mutation((OVERTAKES,), STAGED, RACE),
    "put_headers_are_not_awaited": Mutation((Drop("header-await"),), f"{STAGED} --delay-us=2000", RACE, "bfloat16"),
    "leaves_with_puts_under_way": Mutation((Drop("last-quiet"),), STAGED, RACE),
}


def _build(*edits: Initial, algorithm: str = "owner", scalar: str = "Float32", access: int = 16) -> Build:
    gathers = str(algorithm == "allgather").lower()
    config = f".scalar = po::DType::k{scalar}, .index = po::IndexType::kInt32, .gathers = {gathers}, .bytes = {access}"
    return Build((f"-DDRIVER_CONFIG={{{config}, .hot_entries = 3}}",), edits)  # so that few occurrences make a row hot


BUILDS = {
    "owner": _build(),
    "allgather": _build(algorithm="allgather"),
    "bfloat16": _build(scalar="BFloat16", access=2),
    # Several chunks, and blocks of several windows, as when few WGs have far larger unions.
    "small_chunks": _build(Initial("chunk-words", "1"), Initial("slot-window", "2"), Initial("most-blocks", "5")),
    # Warps have several blocks, and WGs several chunks. The first chunk is assembled before credits are awaited.
    "small_windows": _build(Initial("slot-window", "4"), Initial("chunk-words", "1")),
}


class TestSparseAllReduce(SanitizerSuite):
    cases: ClassVar = {build: CASES if build in ("owner", "allgather") else FOR_OTHER_BUILDS for build in BUILDS}
    driver: ClassVar = Driver("sparse_driver.cpp", BUILDS, cases, MUTATIONS, "small_windows")
