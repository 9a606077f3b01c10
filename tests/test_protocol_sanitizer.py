"""The flag protocol under ThreadSanitizer: silent as it is, and loud with any part of it taken out.

All PEs of a world run as threads of one program (tests/host_driver), so whatever one PE reads before the other's
release and its own acquire have ordered it is a data race that the sanitizer sees, also where the values happen to be
right.

Not covered, because it has no effect on the host: what orders a GPU's memory with its network (`fence_acq_rel_sys`
before a put, `put_acquire` after a wait), and whatever a lane of a warp leaves to another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from host_driver.build import CUDA
from mutations import Edit, mutated
from sanitizer import Exit, Mutation, assert_caught, assert_silent, compile_sanitized, run_driver

KERNEL = "kernels/embedding_all_to_all.cuh"
LAUNCH = "comm/launch.cuh"
PUT = "comm/put.cuh"
MEMORY = "platform/memory.cuh"


def compile_driver(cuda: Path, program: Path, *flags: str) -> None:
    compile_sanitized("embedding_driver.cpp", program, *flags, cuda=cuda)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    compile_driver(CUDA, program, "-Werror")
    return program


# ---- as it is ------------------------------------------------------------------------------------------------------

WORLDS = {
    1: "--tables=3 --batch=7",
    2: "--tables=2,1 --batch=7,4",
    3: "--tables=2,1,3 --batch=5,7,4",
    4: "--tables=2,1,3,2 --batch=5,3,1,4",
}
GRIDS = ("--wgs=1 --threads=1", "--wgs=3 --threads=1", "--wgs=1 --threads=3", "--wgs=2 --threads=2")
TRANSPORTS = {
    "direct": "--transport=direct",
    "staged": "--transport=staged --delay-us=300 --first-epoch=4294967293",  # a flag's low 32 bits wrap around
    "mixed": "--transport=mixed --delay-us=300",
}
CASES = {
    "epoch_passes_2^32": "--tables=2,1 --batch=7,4 --wgs=2 --first-epoch=4294967293",
    "epoch_near_its_end": "--tables=2,1 --batch=7,4 --wgs=2 --first-epoch=281474976710640",
    "local_tasks_last": "--tables=2,1,2 --batch=5,5,5 --local-delay=-1 --wgs=2 --threads=2",
    "any_width": "--tables=2,1,3 --batch=5,7,4 --dims=odd --wgs=2 --threads=2",
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


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", ["aware", "oblivious"])
@pytest.mark.parametrize("world", WORLDS)
def test_no_race_and_right_values(driver: Path, world: int, schedule: str, transport: str) -> None:
    for grid in GRIDS if world < 4 else GRIDS[-1:]:
        assert_silent(run_driver(driver, f"{WORLDS[world]} --schedule={schedule} {TRANSPORTS[transport]} {grid}"))


@pytest.mark.parametrize("case", CASES)
def test_no_race_in(driver: Path, case: str) -> None:
    assert_silent(run_driver(driver, CASES[case]))


STOPPED = "--tables=2,1 --batch=4,3 --stop-pe=1 --trouble-at=1 --epochs=4 --timeout-ms=1500 --wgs=2 --threads=2"
# PE 1 gives up on PE 0, and PE 2 hears of it long before it would give up itself.
REPORTED = (
    "--tables=2,1,2 --batch=4,3,5 --stop-pe=0 --trouble-at=1 --epochs=3 --timeout-ms=1500 --threads=2 --patient-pe=2 "
    "--expect-reported=2"
)
# PE 1 begins when PE 0 has given up on it. PE 0's credit is there, so only a sliceRdy word that never comes makes PE 1
# look at the abort words.
LATE = (
    "--tables=2,1 --batch=4,3 --late-pe=1 --trouble-at=1 --epochs=3 --timeout-ms=1500 --wgs=2 --threads=2 "
    "--expect-reported=1"
)
MISMATCH = "--tables=2,1,2 --batch=4,3,5 --mismatch-pe=1 --trouble-at=1 --epochs=4"
# PE 0 is still at work when PE 1, which gets nothing from it, has given up and gone on.
QUEUED = "--tables=2,0 --batch=4,0 --mismatch-pe=1 --trouble-at=1 --epochs=4 --heavy-pe=0 --queued=2"
# PE 3 and PE 4 do not match. PE 0, which waits for PE 1, is told; PE 1 comes when PE 0 has left, waits for PE 2, which
# comes when PE 1 has left, and looks at what PE 0 says first.
PASSED_ON = "--tables=1,1,1,1,1 --batch=2,2,2,2,2 --mismatch-pe=4 --trouble-at=1 --epochs=2 --in-turn=0,1,2"
TROUBLES = {
    "stopped_pe": STOPPED,
    "stopped_pe_staged": f"{STOPPED} --transport=staged --delay-us=2000",
    "stopped_pe_of_three": "--tables=2,1,2 --batch=4,3,5 --stop-pe=1 --trouble-at=2 --timeout-ms=1500 --wgs=2",
    "peers_leave_at_once": REPORTED,
    "launched_after_the_peer_gave_up": LATE,
    "launched_after_the_peer_gave_up_staged": f"{LATE} --transport=staged --delay-us=2000",
    "launched_after_both_peers_gave_up": (
        "--tables=2,1,2 --batch=4,3,5 --late-pe=1 --trouble-at=2 --epochs=4 --timeout-ms=1500 --wgs=2 "
        "--expect-reported=1"
    ),
    "mismatch": MISMATCH,
    "mismatch_of_two": "--tables=2,1 --batch=4,3 --mismatch-pe=1 --trouble-at=1 --epochs=4 --wgs=2 --threads=2",
    "mismatch_staged": f"{MISMATCH} --transport=staged --delay-us=3000",
    "mismatch_seen_by_a_late_pe": f"{MISMATCH} --slow-pes=2 --slow-us=60000",
    "mismatch_is_passed_on": PASSED_ON,
    "mismatch_by_a_late_pe": f"{MISMATCH} --slow-pes=1 --slow-us=60000",
    "mismatch_with_launches_behind": QUEUED,
}


@pytest.mark.parametrize("case", TROUBLES)
def test_trouble_ends_on_every_pe_and_is_recovered_from(driver: Path, case: str) -> None:
    assert_silent(run_driver(driver, TROUBLES[case]))


# ---- mutations -----------------------------------------------------------------------------------------------------


DIRECT = "--tables=2,1 --batch=7,4 --wgs=2 --threads=2"
STAGED = f"{DIRECT} --transport=staged --delay-us=500"

MUTATIONS = {
    "signal_does_not_release": Mutation(
        (
            Edit(
                PUT,
                "flag_store_release_sys(reinterpret_cast<uint64_t*>(peer_address",
                "flag_store_relaxed_sys(reinterpret_cast<uint64_t*>(peer_address",
            ),
        ),
        DIRECT,
        {Exit.RACE},
    ),
    "wait_does_not_acquire": Mutation(
        (Edit(LAUNCH, "seen = flag_load_acquire_sys(flag);", "seen = flag_load_relaxed_sys(flag);"),),
        DIRECT,
        {Exit.RACE},
    ),
    "stores_without_credit": Mutation(
        (Edit(KERNEL, "if (!group.shuffle(credited_ >> destination_ & 1, 0)) {", "if (false) {"),),
        f"{DIRECT} --slow-pes=0 --slow-us=20000",
        {Exit.RACE},
    ),
    "puts_without_credit": Mutation(
        (Edit(KERNEL, "if (await_credit(plan_.team, task.destination)) put_slice(task);", "put_slice(task);"),),
        f"{STAGED} --slow-pes=0 --slow-us=20000",
        {Exit.RACE},
    ),
    "equal_for_at_least": Mutation(
        (
            Edit(
                LAUNCH,
                "return epoch_of(*seen) >= ",
                "return epoch_of(*seen) == ",
            ),
        ),
        "--tables=2,0 --batch=4,0 --heavy-pe=0 --timeout-ms=1000",
        {Exit.TIMED_OUT},
    ),
    "no_sync_before_signal_ready": Mutation(
        (Edit(KERNEL, "    wg.sync();  // the rows of all warps", "    // the rows of all warps"),),
        "--tables=2,1 --batch=7,4 --wgs=1 --threads=3",
        {Exit.RACE},
    ),
    "ready_before_the_rows": Mutation(
        (
            Edit(
                KERNEL,
                "    worker.run_until(plan.order.num_leading());",
                "    signal_ready(plan.team, wg);\n    worker.run_until(plan.order.num_leading());",
            ),
        ),
        DIRECT,
        {Exit.RACE, Exit.WRONG_OUTPUT},
    ),
    "ready_from_an_aborted_launch": Mutation(
        (
            Edit(
                KERNEL,
                "!is_reachable(team, peer) || is_aborted(team)) continue;",
                "!is_reachable(team, peer)) continue;",
            ),
        ),
        LATE,
        {Exit.WRONG_OUTPUT},
    ),
    "waits_for_one_sender_less": Mutation(
        (
            Edit(
                KERNEL,
                "for (int sender = wg.rank(); sender < team.size; sender += wg.size()) {",
                "for (int sender = wg.rank(); sender < team.size - 1; sender += wg.size()) {",
            ),
        ),
        DIRECT,
        {Exit.RACE, Exit.WRONG_OUTPUT},
    ),
    "does_not_meet_every_peer": Mutation(
        (Edit(KERNEL, "    if (wg.index() == 0) await_all_credits(plan.team, wg);\n", ""),),
        "--tables=2,0 --batch=4,0 --stop-pe=1 --trouble-at=1 --epochs=4 --timeout-ms=1000",
        {Exit.WRONG_REPORT},
    ),
    "place_of_output_behind_the_flag": Mutation(
        (
            Edit(LAUNCH, "    grant->output_offset = output_offset;\n", ""),
            Edit(
                LAUNCH,
                "    signal(team, peer, grant_offset(team, team.rank), launch_flag(team));\n",
                "    signal(team, peer, grant_offset(team, team.rank), launch_flag(team));\n"
                "    auto* late = peer_address(team, peer, grant_offset(team, team.rank));\n"
                "    reinterpret_cast<Grant*>(late)->output_offset = output_offset;\n",
            ),
        ),
        DIRECT,
        {Exit.RACE},
    ),
    "wg_done_does_not_release": Mutation(
        (
            Edit(
                MEMORY,
                "__atomic_or_fetch(word, bits, __ATOMIC_ACQ_REL)",
                "__atomic_or_fetch(word, bits, __ATOMIC_RELAXED)",
            ),
        ),
        "--tables=3,3 --batch=5,5 --wgs=3 --threads=2 --transport=staged",
        {Exit.RACE},
    ),
    "first_task_sends_the_slice": Mutation(
        (Edit(KERNEL, "all_bits(order.num_tables - word * 64)) {", "(1ull << task.table % 64)) {"),),
        STAGED,
        {Exit.RACE},
    ),
    "last_task_is_not_awaited": Mutation(
        (
            Edit(
                KERNEL,
                "all_bits(order.num_tables - word * 64)) {",
                "all_bits(max_of<int64_t>(order.num_tables - word * 64 - 1, 1))) {",
            ),
        ),
        f"{STAGED} --timeout-ms=5000",
        {Exit.RACE, Exit.TIMED_OUT},
    ),
    "wg_done_is_not_cleared": Mutation(
        (Edit(KERNEL, "for (int64_t i = 0; i <= num_words; ++i) done[i] = 0;", ""),),
        STAGED,
        {Exit.RACE, Exit.WRONG_REMAINS},
    ),
    "no_fence_behind_puts": Mutation((Edit(PUT, "  team.network->fence();\n", ""),), STAGED, {Exit.RACE}),
    "leaves_with_puts_under_way": Mutation(
        (Edit(KERNEL, "    if (has_put_) put_quiet(plan_.team);\n", ""),),
        "--tables=2,0 --batch=4,4 --transport=staged --delay-us=3000",
        {Exit.RACE},
    ),
    "one_staging_copy_of_the_grant": Mutation(
        (Edit(LAUNCH, "team.size + static_cast<int>(team.epoch % 2)", "team.size"),),
        CASES["no_tables_staged"],
        {Exit.RACE},
    ),
    "departure_does_not_release": Mutation(
        (
            Edit(
                MEMORY,
                "__atomic_add_fetch(word, value, __ATOMIC_ACQ_REL)",
                "__atomic_add_fetch(word, value, __ATOMIC_RELAXED)",
            ),
        ),
        "--tables=3 --batch=7 --wgs=4",
        {Exit.RACE},
    ),
    "departs_before_its_threads": Mutation(
        (Edit(LAUNCH, "  wg.sync();  // all of this WG's waits", "  // all of this WG's waits"),),
        "--tables=3 --batch=7 --wgs=2 --threads=3",
        {Exit.RACE},
    ),
    "last_wg_not_known_to_its_threads": Mutation(
        (Edit(LAUNCH, "  wg.sync();\n  if (*last_flag == 0) return;", "  if (*last_flag == 0) return;"),),
        "--tables=3 --batch=7 --wgs=2 --threads=3",
        {Exit.RACE},
    ),
    "ticket_is_not_reset": Mutation((Edit(LAUNCH, "    team.local->ticket = 0;\n", ""),), DIRECT, {Exit.WRONG_OUTPUT}),
    "departures_are_not_reset": Mutation((Edit(LAUNCH, "    team.local->departed = 0;\n", ""),), DIRECT, {Exit.RACE}),
    "epoch_is_not_advanced": Mutation(
        (Edit(LAUNCH, "    flag_store_relaxed_sys(&team.local->epoch, team.epoch);\n", ""),), DIRECT, {Exit.RACE}
    ),
    "no_poison": Mutation(
        (Edit(LAUNCH, "  if (is_aborted(team)) {\n", "  if (false) {\n"),), STOPPED, {Exit.WRONG_OUTPUT}
    ),
    "peers_are_not_told": Mutation(
        (
            Edit(
                LAUNCH,
                "      if (other == team.rank) continue;\n      signal(",
                "      if (true) continue;\n      signal(",
            ),
        ),
        REPORTED,
        {Exit.WRONG_REPORT},
    ),
    "contracts_are_not_compared": Mutation(
        (Edit(LAUNCH, " && low_bits_of(seen) != team.contract_hash) {", " && false) {"),), MISMATCH, {Exit.WRONG_REPORT}
    ),
    "report_passed_on_without_its_reason": Mutation(
        (Edit(LAUNCH, "? low_bits_of(seen)", "? low_bits_of(seen) & ((1u << kBlameKindShift) - 1)"),),
        PASSED_ON,
        {Exit.WRONG_REPORT},
    ),
    "credit_behind_an_aborted_launch": Mutation(
        (Edit(LAUNCH, "  if (!takes_part(team, flag_load_relaxed_sys(&team.local->abort))) return;\n", ""),),
        QUEUED,
        {Exit.WRONG_REPORT},
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    program = tmp_path / "driver"
    compile_driver(mutated(tmp_path, mutation.edits), program)
    assert_caught(program, mutation)
