"""The flag protocol, and embedding_all_to_all, under ThreadSanitizer.

All PEs of a world are threads of one program (tests/host_driver). If a PE reads data before the other PE's release and
its own acquire have ordered the access, the sanitizer reports a data race, even if the values happen to be right.

Not covered, because it has no effect on the host: the order between a GPU's memory and its network
(`fence_acq_rel_sys` before a put, `put_acquire` after a wait), and data that a lane of a warp leaves to another lane.
"""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, After, Before, Condition, Drop, Relaxed, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

# ---- as it is ------------------------------------------------------------------------------------------------------

WORLDS = {
    1: "--tables=3 --batch=7",
    2: "--tables=2,1 --batch=7,4",
    3: "--tables=2,1,3 --batch=5,7,4",
    4: "--tables=2,1,3,2 --batch=5,3,1,4",
}
GRIDS = {
    "1x1": "--wgs=1 --threads=1",
    "3x1": "--wgs=3 --threads=1",
    "1x3": "--wgs=1 --threads=3",
    "2x2": "--wgs=2 --threads=2",
}
TRANSPORTS = {
    "direct": "--transport=direct",
    "staged": "--transport=staged --delay-us=300 --first-epoch=4294967293",  # a flag's low 32 bits wrap around
    "mixed": "--transport=mixed --delay-us=300",
}
RANGES = "--tables=2,1,3 --batch=5,7,4 --columns=in-turn --wgs=2 --threads=2 --transport=staged --delay-us=300"
# PE 0 stores to more PEs than the number of credits that a thread remembers. One of the PEs comes late.
MANY = f"--tables=1{',0' * 33} --batch=0,1{',0' * 31},1 --slow-pes=33 --slow-us=20000"
SPECIAL = {
    "credits_that_are_not_remembered": MANY,
    "epoch_passes_2^32": "--tables=2,1 --batch=7,4 --wgs=2 --first-epoch=4294967293",
    "epoch_near_its_end": "--tables=2,1 --batch=7,4 --wgs=2 --first-epoch=281474976710640",
    "local_tasks_last": "--tables=2,1,2 --batch=5,5,5 --local-delay=-1 --wgs=2 --threads=2",
    "any_width": "--tables=2,1,3 --batch=5,7,4 --dims=odd --wgs=2 --threads=2",
    "columns_in_turn": "--tables=2,1,3 --batch=5,7,4 --dims=odd --columns=in-turn --wgs=2 --threads=2",
    "columns_in_turn_staged": RANGES,
    "columns_in_turn_mixed": "--tables=3,2,3 --batch=5,7,4 --columns=in-turn --transport=mixed --delay-us=300 --wgs=2",
    "many_tables_staged": "--tables=70,1 --batch=3,2 --dims=odd --transport=staged --wgs=2 --threads=2",
    "one_owner": "--tables=0,2,0 --batch=3,0,2 --wgs=2 --threads=2",
    "one_owner_staged": "--tables=0,2,0 --batch=3,0,2 --wgs=2 --transport=staged --delay-us=300",
    "no_tables_staged": "--tables=0,0 --batch=3,2 --transport=staged --delay-us=2000",
    "no_samples_staged": "--tables=2,2 --batch=0,0 --transport=staged --delay-us=2000",
    "sender_runs_ahead": "--tables=2,0 --batch=4,4 --transport=staged --delay-us=1000 --epochs=12",
    "receiver_runs_ahead": "--tables=2,0 --batch=4,0 --heavy-pe=0",
    "late_pe": "--tables=2,1,2 --batch=5,5,5 --slow-pes=1 --slow-us=30000 --wgs=2",
    "late_pe_staged": "--tables=2,1,2 --batch=5,5,5 --slow-pes=1 --slow-us=30000 --transport=staged --delay-us=300",
}

STOPPED = "--tables=2,1 --batch=4,3 --stop-pe=1 --trouble-at=1 --epochs=4 --timeout-ms=1500 --wgs=2 --threads=2"
# PE 1 gives up on PE 0. PE 2 learns of it long before it would give up itself.
REPORTED = (
    "--tables=2,1,2 --batch=4,3,5 --stop-pe=0 --trouble-at=1 --epochs=3 --timeout-ms=1500 --threads=2 --patient-pe=2 "
    "--expect-reported=2"
)
# PE 1 begins when PE 0 has given up on it. PE 0's credit is there, so only a sliceRdy word that never comes makes PE 1
# check the abort words.
LATE = (
    "--tables=2,1 --batch=4,3 --late-pe=1 --trouble-at=1 --epochs=3 --timeout-ms=1500 --wgs=2 --threads=2 "
    "--expect-reported=1"
)
MISMATCH = "--tables=2,1,2 --batch=4,3,5 --other-pe=1 --trouble-at=1 --epochs=4"
# PE 0 still works when PE 1, which gets nothing from it, has given up and continued.
QUEUED = "--tables=2,0 --batch=4,0 --other-pe=1 --trouble-at=1 --epochs=4 --heavy-pe=0 --queued=2"
# PE 4 does not match, and blames PE 0: PE 3 comes later. PE 0 waits for PE 1 and gets the report. PE 1 comes when PE 0
# has left. It waits for PE 2 and reads PE 0's report first. PE 2 comes when PE 1 has left.
PASSED_ON = (
    "--tables=1,1,1,1,1 --batch=2,2,2,2,2 --other-pe=4 --trouble-at=1 --epochs=2 --in-turn=0,1,2 --slow-pes=3 "
    "--slow-us=60000"
)
TROUBLES = {
    "stopped_pe": STOPPED,
    "stopped_pe_staged": f"{STOPPED} --transport=staged --delay-us=2000",
    "stopped_pe_with_columns_in_turn": f"{STOPPED} --columns=in-turn --transport=staged --delay-us=2000",
    "stopped_pe_of_three": "--tables=2,1,2 --batch=4,3,5 --stop-pe=1 --trouble-at=2 --timeout-ms=1500 --wgs=2",
    "peers_leave_at_once": REPORTED,
    "launched_after_the_peer_gave_up": LATE,
    "launched_after_the_peer_gave_up_staged": f"{LATE} --transport=staged --delay-us=2000",
    "launched_after_both_peers_gave_up": (
        "--tables=2,1,2 --batch=4,3,5 --late-pe=1 --trouble-at=2 --epochs=4 --timeout-ms=1500 --wgs=2 "
        "--expect-reported=1"
    ),
    "mismatch": MISMATCH,
    "mismatch_of_two": "--tables=2,1 --batch=4,3 --other-pe=1 --trouble-at=1 --epochs=4 --wgs=2 --threads=2",
    "mismatch_staged": f"{MISMATCH} --transport=staged --delay-us=3000",
    "mismatch_seen_by_a_late_pe": f"{MISMATCH} --slow-pes=2 --slow-us=60000",
    "mismatch_is_passed_on": PASSED_ON,
    "mismatch_by_a_late_pe": f"{MISMATCH} --slow-pes=1 --slow-us=60000",
    "mismatch_with_launches_behind": QUEUED,
}

CASES = (
    {
        f"{world} PEs, {schedule}, {transport}, {grid}": (
            f"{WORLDS[world]} --schedule={schedule} {TRANSPORTS[transport]} {GRIDS[grid]}"
        )
        for world in WORLDS
        for schedule in ("aware", "oblivious")
        for transport in TRANSPORTS
        for grid in (GRIDS if world < 4 else ["2x2"])
    }
    | SPECIAL
    | TROUBLES
)

# ---- mutations -----------------------------------------------------------------------------------------------------


DIRECT = "--tables=2,1 --batch=7,4 --wgs=2 --threads=2"
STAGED = f"{DIRECT} --transport=staged --delay-us=500"
ORDERED = "--tables=3 --batch=7 --wgs=2 --threads=3"

MUTATIONS = {
    "signal_does_not_release": Mutation(
        (Swap("signal-release", "flag_store_release_sys", "flag_store_relaxed_sys"),), DIRECT, RACE
    ),
    "wait_does_not_acquire": Mutation(
        (Swap("wait-acquire", "flag_load_acquire_sys", "flag_load_relaxed_sys"),), DIRECT, RACE
    ),
    "stores_without_credit": Mutation(
        (Condition("credit-before-stores", "false"),), f"{DIRECT} --slow-pes=0 --slow-us=20000", RACE
    ),
    "puts_without_credit": Mutation(
        (Condition("credit-before-puts", "true"),), f"{STAGED} --slow-pes=0 --slow-us=20000", RACE
    ),
    "equal_for_at_least": Mutation(
        (Swap("wait-passes", "epoch_of(*seen) >= team.epoch", "epoch_of(*seen) == team.epoch"),),
        "--tables=2,0 --batch=4,0 --heavy-pe=0 --timeout-ms=1000",
        {Exit.TIMED_OUT},
    ),
    "no_sync_before_signal_ready": Mutation(
        (Drop("rows-before-ready"),), "--tables=2,1 --batch=7,4 --wgs=1 --threads=3", RACE
    ),
    "ready_before_the_rows": Mutation((Before("leading-tasks", "signal_ready(plan.team, wg);"),), DIRECT, RACE),
    "ready_from_an_aborted_launch": Mutation(
        (Swap("ready-unless-aborted", "is_aborted(team)", "false"),), LATE, {Exit.WRONG_OUTPUT}
    ),
    "waits_for_one_sender_less": Mutation(
        (Swap("await-senders", "sender < team.size", "sender < team.size - 1"),), DIRECT, RACE
    ),
    "does_not_meet_every_peer": Mutation(
        (Drop("meet-every-peer"),),
        "--tables=2,0 --batch=4,0 --stop-pe=1 --trouble-at=1 --epochs=4 --timeout-ms=1000",
        {Exit.WRONG_REPORT},
    ),
    "place_of_output_behind_the_flag": Mutation(
        (
            Drop("grant-output"),
            After(
                "grant-signal",
                "auto* late = peer_address(team, peer, grant_offset(team, team.rank));"
                "reinterpret_cast<Grant*>(late)->output_offset = output_offset;",
            ),
        ),
        DIRECT,
        RACE,
    ),
    "wg_done_does_not_release": Mutation(
        (Relaxed("or-acq-rel"),),
        "--tables=3,3 --batch=5,5 --wgs=3 --threads=2 --transport=staged",
        RACE,
    ),
    "first_task_sends_the_slice": Mutation(
        (Swap("slice-complete", "all_bits(order.num_tables - word * 64)", "(1ull << task.table % 64)"),), STAGED, RACE
    ),
    "last_task_is_not_awaited": Mutation(
        (
            Swap(
                "slice-complete",
                "all_bits(order.num_tables - word * 64)",
                "all_bits(max_of<int64_t>(order.num_tables - word * 64 - 1, 1))",
            ),
        ),
        f"{STAGED} --timeout-ms=5000",
        RACE | {Exit.TIMED_OUT},
    ),
    "wg_done_is_not_cleared": Mutation((Drop("wg-done-reset"),), STAGED, RACE | {Exit.WRONG_REMAINS}),
    "signals_overtake_their_puts": Mutation((OVERTAKES,), STAGED, RACE),
    "slices_are_unpacked_before_they_are_known": Mutation(
        (Drop("landed-known"),), "--tables=2,1 --batch=16,16 --threads=4 --transport=staged", RACE
    ),
    "the_first_range_alone_is_unpacked": Mutation(
        (Swap("unpack-ranges", "i < from.num_ranges", "i < 1"),), RANGES, {Exit.WRONG_OUTPUT}
    ),
    "leaves_with_puts_under_way": Mutation(
        (Drop("last-quiet"),), "--tables=2,0 --batch=4,4 --transport=staged --delay-us=3000", RACE
    ),
    "departure_does_not_release": Mutation(
        (Relaxed("add-acq-rel"),),
        "--tables=3 --batch=7 --wgs=4",
        RACE,
    ),
    "departs_before_its_threads": Mutation((Drop("depart-sync"),), ORDERED, RACE),
    "last_wg_not_known_to_its_threads": Mutation((Drop("last-wg-known"),), ORDERED, RACE),
    "ticket_is_not_reset": Mutation((Drop("ticket-reset"),), DIRECT, {Exit.WRONG_OUTPUT}),
    "departures_are_not_reset": Mutation((Drop("departed-reset"),), DIRECT, RACE),
    "epoch_is_not_advanced": Mutation((Drop("epoch-advance"),), DIRECT, RACE),
    "no_poison": Mutation((Condition("poison", "false"),), STOPPED, {Exit.WRONG_OUTPUT}),
    "peers_are_not_told": Mutation((Condition("abort-tells-peers", "true"),), REPORTED, {Exit.WRONG_REPORT}),
    "contracts_are_not_compared": Mutation((Condition("contracts-compared", "false"),), MISMATCH, {Exit.WRONG_REPORT}),
    "report_passed_on_without_its_reason": Mutation(
        (Swap("abort-report", "seen", "seen & ~(3ull << kBlameKindShift)"),),
        PASSED_ON,
        {Exit.WRONG_REPORT},
    ),
    "credit_of_a_pe_taken_for_that_of_another": Mutation(
        (Swap("credit-kept", "keeper < group.size()", "true"),), MANY, RACE
    ),
    "report_passed_on_in_ones_own_place": Mutation(
        (Swap("abort-place", "static_cast<int>(index)", "team.rank"),), PASSED_ON, {Exit.WRONG_REPORT}
    ),
    # The first PE to notice reports it: the peer that the credit misleads, or the PE that checks the granted credit.
    "credit_behind_an_aborted_launch": Mutation(
        (Drop("grant-takes-part"),), QUEUED, {Exit.WRONG_REPORT, Exit.TOOK_PART}
    ),
}


class TestEmbeddingAllToAll(SanitizerSuite):
    driver: ClassVar = Driver("embedding_driver.cpp", {"plain": Build()}, {"plain": CASES}, MUTATIONS, "plain")
