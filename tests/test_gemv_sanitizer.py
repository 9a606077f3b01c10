"""gemv_all_reduce under ThreadSanitizer: silent as it is, and loud with a part of its protocol taken out."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_driver.build import CUDA
from mutations import Edit, mutated
from sanitizer import Exit, Mutation, assert_caught, assert_silent, compile_sanitized, run_driver

KERNEL = "kernels/gemv_all_reduce.cuh"
PIPELINE = "kernels/gemv/tile_pipeline.cuh"
EXCHANGE = "kernels/gemv/packet_exchange.cuh"
LAUNCH = "comm/launch.cuh"
PACKETS = "comm/packets.cuh"
SUCCESSION = "sched/succession.cuh"
GROUPS = "platform/groups.cuh"
MEMORY = "platform/memory.cuh"
ALGORITHMS = ("one_shot", "two_phase")


def _compile(cuda: Path, program: Path, algorithm: str) -> None:
    two_phase = str(algorithm == "two_phase").lower()
    config = f".vectors = 8, .depth = 1, .two_phase = {two_phase}, .lets_in = po::LetsIn::kLate"
    flags = (f"-DDRIVER_CONFIG={{.scalar = po::DType::kFloat32, {config}}}",)
    compile_sanitized("gemv_driver.cpp", program, *flags, cuda=cuda)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gemv_driver")
    for algorithm in ALGORITHMS:
        _compile(CUDA, folder / algorithm, algorithm)
    return {algorithm: folder / algorithm for algorithm in ALGORITHMS}


# A PE stays away from a launch; the others give up, and run launches behind it as a GPU's queue would.
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
    # The other PE's are there when the long one begins.
    "own_sums_come_late": "--pes=2 --threads=4 --rows=8 --vectors=1 --epochs=1 --long-pe=0 --long-columns=100000 "
    "--long-timeout-ms=1",
    "behind_an_aborted_launch": BEHIND_TROUBLE,
    "behind_an_aborted_launch_staged": BEHIND_TROUBLE_STAGED,
    "behind_an_aborted_launch_some_are_near": f"{BEHIND_TROUBLE_STAGED} --pes=4 --node=2",
    "another_contract": OTHER_CONTRACT,
    "another_contract_staged": f"{OTHER_CONTRACT} --staged=1 --delay-us=100",
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
def test_no_race(drivers: dict[str, Path], case: str, algorithm: str) -> None:
    assert_silent(run_driver(drivers[algorithm], CASES[case]))


SERVED = "--pes=2 --threads=4 --wgs=1"
FEW_TILES = "--pes=2 --threads=4 --rows=16"  # so few that no warp has met the serving ones over a slot
STAGED = "--pes=2 --threads=2 --rows=30 --staged=1 --delay-us=300 --slow-pe=0"
MUTATIONS = {
    "parts_are_not_awaited": Mutation(
        (
            Edit(PIPELINE, "shared_.stored[slot].await(round);\n        exchange.send(", "exchange.send("),
            Edit(PIPELINE, "slot), warp);\n", "slot), warp);\n        shared_.stored[slot].await(round);\n"),
        ),
        SERVED,
        {Exit.RACE},
    ),
    "slot_is_free_before_it_is_read": Mutation(
        (
            Edit(PIPELINE, "        warp.sync();\n        if (warp.rank() == 0) shared_.sent[slot].arrive();\n", ""),
            Edit(
                PIPELINE,
                "shared_.stored[slot].await(round);\n",
                "shared_.stored[slot].await(round);\n        if (warp.rank() == 0) shared_.sent[slot].arrive();\n",
            ),
        ),
        SERVED,
        {Exit.RACE},
    ),
    "handover_does_not_release": Mutation(
        (Edit(GROUPS, "__atomic_add_fetch(&word_, 1, __ATOMIC_ACQ_REL)", "__atomic_add_fetch(&word_, 1, 0)"),),
        SERVED,
        {Exit.RACE},
    ),
    "handover_does_not_acquire": Mutation(
        (Edit(GROUPS, "__atomic_load_n(&word_, __ATOMIC_ACQUIRE)", "__atomic_load_n(&word_, __ATOMIC_RELAXED)"),),
        SERVED,
        {Exit.RACE},
    ),
    "packet_does_not_release": Mutation(
        (Edit(MEMORY, "packet.flag, __ATOMIC_RELEASE", "packet.flag, __ATOMIC_RELAXED"),), SERVED, {Exit.RACE}
    ),
    "packet_does_not_acquire": Mutation(
        (
            Edit(
                MEMORY,
                "packet.flag = __atomic_load_n(&place->flag, __ATOMIC_ACQUIRE)",
                "packet.flag = __atomic_load_n(&place->flag, __ATOMIC_RELAXED)",
            ),
        ),
        SERVED,
        {Exit.RACE},
    ),
    "one_area_for_all_epochs": Mutation((Edit(EXCHANGE, "return team_.epoch % 2;", "return 0;"),), SERVED, {Exit.RACE}),
    "any_packet_will_do": Mutation(
        (Edit(PACKETS, "packets[i][j].flag == expected", "packets[i][j].flag != 1"),), SERVED, {Exit.WRONG_OUTPUT}
    ),
    "epoch_is_not_awaited": Mutation(
        (Edit(KERNEL, "    shared.told.await(0);\n    if (Pipeline", "    if (Pipeline"),), FEW_TILES, {Exit.RACE}
    ),
    "staged_packets_before_their_word": Mutation(
        (Edit(EXCHANGE, "    if (is_near(sender)) return true;\n", "    if (sender >= 0) return true;\n"),),
        STAGED,
        {Exit.RACE},
    ),
    "no_fence_behind_put_packets": Mutation((Edit(PACKETS, "  put_fence(team);\n", ""),), STAGED, {Exit.RACE}),
    "results_are_put_before_they_are_there": Mutation(
        (Edit(EXCHANGE, "    wg_.sync();\n    if (wg_.rank() != 0 ||", "    if (wg_.rank() != 0 ||"),),
        f"{STAGED} --threads=5",
        {Exit.RACE},
        build="two_phase",
    ),
    "each_warp_counts_its_wg": Mutation(
        (Edit(SUCCESSION, "steps_left_(wg.warp_index() == 0 ? num_steps : 0)", "steps_left_(num_steps)"),),
        "--pes=2 --threads=10 --wgs=2 --rows=24 --columns=20",
        {Exit.WRONG_REMAINS},  # one WG has tiles for two teams, the other for one
    ),
    "a_wg_without_tiles_is_not_counted": Mutation(
        (Edit(SUCCESSION, "    release_successor();\n    count();\n", ""),),
        CASES["a_wg_without_tiles"],
        {Exit.WRONG_REMAINS},
    ),
    "credits_are_not_awaited": Mutation(
        (Edit(KERNEL, "await_all_credits(plan.team, Warp());", "{}"),), NO_ROWS_BETWEEN, {Exit.RACE}
    ),
    "packets_of_another_contract_will_do": Mutation(
        (Edit(PACKETS, "return launch_flag(team);", "return flag_value(team.epoch, 0);"),),
        OTHER_CONTRACT,
        {Exit.WRONG_OUTPUT},
    ),
    "one_area_for_all_epochs_results": Mutation(
        (Edit(EXCHANGE, "plan_.results_offset + parity() * plan_.results_bytes", "plan_.results_offset"),),
        BEHIND_TROUBLE_STAGED,
        {Exit.RACE},
        build="two_phase",
    ),
    "own_sums_are_late_like_a_peer_s": Mutation(
        (Edit(LAUNCH, " && peer != team.rank)", ")"),), CASES["own_sums_come_late"], {Exit.TIMED_OUT}
    ),
    "takes_part_behind_an_aborted_launch": Mutation(
        (Edit(LAUNCH, "return aborted == 0 || aborted >= team.epoch;", "return true;"),),
        BEHIND_TROUBLE,
        {Exit.RACE},
    ),
    "sends_behind_an_aborted_launch": Mutation(
        (
            Edit(
                EXCHANGE,
                "    if (shared_.takes_part == 0) return;\n    if (has_packet_per_lane(",
                "    if (has_packet_per_lane(",
            ),
        ),
        BEHIND_TROUBLE,
        {Exit.RACE},
    ),
    "puts_results_behind_an_aborted_launch": Mutation(
        (Edit(EXCHANGE, "if (wg_.rank() != 0 || shared_.takes_part == 0) return;", "if (wg_.rank() != 0) return;"),),
        BEHIND_TROUBLE_STAGED,
        {Exit.RACE, Exit.TOOK_PART},
        build="two_phase",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    _compile(mutated(tmp_path, mutation.edits), tmp_path / "driver", mutation.build or "one_shot")
    assert_caught(tmp_path / "driver", mutation)
