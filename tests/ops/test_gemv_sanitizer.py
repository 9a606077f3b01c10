"""gemv_all_reduce under ThreadSanitizer."""

from __future__ import annotations

from typing import ClassVar

from mutations import OVERTAKES, After, Condition, Drop, Relaxed, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite

# A PE stays away from a launch. The others give up, and run launches after it as a GPU's queue would.
TROUBLE = "--stop-pe=1 --trouble-at=3 --queued=3 --epochs=6 --timeout-ms=1500"
BEHIND_TROUBLE = f"--pes=3 --threads=3 --rows=30 {TROUBLE}"
BEHIND_TROUBLE_STAGED = f"{BEHIND_TROUBLE} --staged=1 --delay-us=100"

NO_ROWS_BETWEEN = "--pes=3 --threads=2 --rows=16 --epochs=40 --empty-between=1 --slow-pe=1 --slow-us=300"
OTHER_CONTRACT = "--pes=3 --threads=3 --rows=30 --other-pe=1 --trouble-at=3 --epochs=6"

CASES = {
    "alone": "--pes=1 --threads=3",
    "lone_warp": "--pes=3",
    "served": "--pes=2 --threads=2 --wgs=2",
    "two_serve": "--pes=2 --threads=4",
    "teams": "--pes=2 --threads=10 --columns=5",
    "epoch_passes_2^32": "--pes=2 --threads=3 --first-epoch=4294967293",
    "late_pe": "--pes=3 --threads=2 --slow-pe=1",
    "no_columns": "--pes=2 --threads=3 --columns=0",
    "staged": "--pes=2 --threads=2 --rows=30 --staged=1 --delay-us=100",
    "staged_late": "--pes=2 --rows=30 --staged=1 --delay-us=100 --slow-pe=0",
    "many_threads_finish": "--pes=2 --threads=5",
    "many_vectors": "--pes=3 --threads=5 --wgs=2 --vectors=7",
    "some_are_near": "--pes=4 --threads=2 --rows=30 --staged=1 --node=2 --delay-us=100",
    "some_are_near_late": "--pes=5 --threads=4 --rows=30 --staged=1 --node=2 --delay-us=100 --slow-pe=3",
    "launches_without_rows": NO_ROWS_BETWEEN,
    "a_wg_without_tiles": "--pes=2 --threads=3 --rows=24 --wgs=4",
    # The other PE's packets have arrived when the long one begins.
    "own_sums_come_late": "--pes=2 --threads=4 --rows=8 --vectors=1 --epochs=1 --long-pe=0 --long-columns=100000 "
    "--long-timeout-ms=1",
    "behind_an_aborted_launch": BEHIND_TROUBLE,
    "behind_an_aborted_launch_staged": BEHIND_TROUBLE_STAGED,
    "behind_an_aborted_launch_some_are_near": f"{BEHIND_TROUBLE_STAGED} --pes=4 --node=2",
    "another_contract": OTHER_CONTRACT,
    "another_contract_staged": f"{OTHER_CONTRACT} --staged=1 --delay-us=100",
}

SERVED = "--pes=2 --threads=4 --wgs=1"
FEW_TILES = "--pes=2 --threads=4 --rows=16"  # so few that no warp and serving warp use the same slot
STAGED = "--pes=2 --threads=2 --rows=30 --staged=1 --delay-us=300 --slow-pe=0"
MUTATIONS = {
    "parts_are_not_awaited": Mutation(
        (Drop("parts-await"), After("parts-send", "shared_.stored[slot].await(round);")), SERVED, RACE
    ),
    "slot_is_free_before_it_is_read": Mutation(
        (Drop("slot-free"), After("parts-await", "if (warp.rank() == 0) shared_.sent[slot].arrive();")), SERVED, RACE
    ),
    "handover_does_not_release": Mutation(
        (Relaxed("handover-release"),),
        SERVED,
        RACE,
    ),
    "handover_does_not_acquire": Mutation(
        (Relaxed("handover-acquire"),),
        SERVED,
        RACE,
    ),
    "packet_does_not_release": Mutation(
        (Relaxed("packet-release"),),
        SERVED,
        RACE,
    ),
    "packet_does_not_acquire": Mutation(
        (Relaxed("packet-acquire"),),
        SERVED,
        RACE,
    ),
    "one_area_for_all_epochs": Mutation((Swap("packet-parity", "team_.epoch % 2", "0"),), SERVED, RACE),
    "any_packet_will_do": Mutation(
        (Swap("packet-is-there", "packets[i][j].flag == expected", "packets[i][j].flag != 1"),),
        SERVED,
        {Exit.WRONG_OUTPUT},
    ),
    "epoch_is_not_awaited": Mutation((Drop("epoch-told"),), FEW_TILES, RACE),
    "staged_packets_before_their_word": Mutation((Condition("staged-behind-word", "true"),), STAGED, RACE),
    "signals_overtake_put_packets": Mutation((OVERTAKES,), STAGED, RACE),
    "results_are_put_before_they_are_there": Mutation(
        (Drop("results-sync"),), f"{STAGED} --threads=5", RACE, build="two_shot"
    ),
    "each_warp_counts_its_wg": Mutation(
        (Swap("one-warp-counts", "wg.warp_index() == 0 ? num_steps : 0", "num_steps"),),
        "--pes=2 --threads=10 --wgs=2 --rows=24 --columns=20",
        {Exit.WRONG_REMAINS},  # one WG has tiles for two teams, the other for one
    ),
    "a_wg_without_tiles_is_not_counted": Mutation(
        (Condition("wg-without-steps", "true"),), CASES["a_wg_without_tiles"], {Exit.WRONG_REMAINS}
    ),
    "credits_are_not_awaited": Mutation((Drop("gemv-credits"),), NO_ROWS_BETWEEN, RACE),
    "packets_of_another_contract_will_do": Mutation(
        (Swap("packet-flag", "launch_flag(team)", "flag_value(team.epoch, 0)"),), OTHER_CONTRACT, {Exit.WRONG_OUTPUT}
    ),
    "one_area_for_all_epochs_results": Mutation(
        (Swap("results-parity", "parity() * plan_.results_bytes", "0"),),
        BEHIND_TROUBLE_STAGED,
        RACE,
        build="two_shot",
    ),
    "own_sums_are_late_like_a_peer_s": Mutation(
        (Swap("wait-bound", "peer != team.rank", "true"),), CASES["own_sums_come_late"], {Exit.TIMED_OUT}
    ),
    "takes_part_behind_an_aborted_launch": Mutation(
        (Swap("takes-part", "aborted == 0 || aborted >= team.epoch", "true"),), BEHIND_TROUBLE, RACE
    ),
    "sends_behind_an_aborted_launch": Mutation((Drop("sums-take-part"),), BEHIND_TROUBLE, RACE),
    "puts_results_behind_an_aborted_launch": Mutation(
        (Swap("results-take-part", "shared_.takes_part == 0", "false"),),
        BEHIND_TROUBLE_STAGED,
        RACE | {Exit.TOOK_PART},
        build="two_shot",
    ),
}


def _build(two_shot: str) -> Build:
    config = f".vectors = 8, .depth = 1, .two_shot = {two_shot}, .lets_in = po::LetsIn::kLate"
    return Build((f"-DDRIVER_CONFIG={{.scalar = po::DType::kFloat32, {config}}}",))


class TestGemvAllReduce(SanitizerSuite):
    builds: ClassVar = {"one_shot": _build("false"), "two_shot": _build("true")}
    driver: ClassVar = Driver("gemv_driver.cpp", builds, dict.fromkeys(builds, CASES), MUTATIONS, "one_shot")
