"""sparse_all_reduce under ThreadSanitizer: silent as it is, and loud with a part of its protocol taken out.

Not covered, because it has no effect on the host: what a lane of a warp leaves to another one, and what orders a GPU's
memory with its network.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from host_driver.build import CUDA
from mutations import Edit, mutated
from sanitizer import Exit, Mutation, assert_caught, assert_silent, compile_sanitized, run_driver

KERNEL = "kernels/sparse_all_reduce.cuh"
UNION = "kernels/sparse/row_union.cuh"
EXCHANGE = "kernels/sparse/row_exchange.cuh"
SCAN = "platform/scan.cuh"
SLOTS = "sched/slot_blocks.cuh"
MEMORY = "platform/memory.cuh"
ALGORITHMS = ("owner", "allgather")
SMALL_CHUNKS = Edit(UNION, "inline constexpr int kChunkWords = 1024;", "inline constexpr int kChunkWords = 1;")


def _window(slots: int) -> Edit:
    return Edit(SLOTS, "kWindow = 32;", f"kWindow = {slots};")


def _compile(cuda: Path, program: Path, algorithm: str, scalar: str = "Float32") -> None:
    gathers, access = str(algorithm == "allgather").lower(), 16 if scalar == "Float32" else 2
    config = f".scalar = po::DType::k{scalar}, .index = po::IndexType::kInt32, .gathers = {gathers}, .bytes = {access}"
    flags = (f"-DDRIVER_CONFIG={{{config}, .hot_entries = 3}}",)  # so that few occurrences make a row hot
    compile_sanitized("sparse_driver.cpp", program, *flags, cuda=cuda)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sparse_driver")
    for algorithm in ALGORITHMS:
        _compile(CUDA, folder / algorithm, algorithm)
    _compile(CUDA, folder / "bfloat16", "owner", "BFloat16")
    # More chunks than one, and, as few WGs with far larger unions have them, blocks of several windows.
    several = (SMALL_CHUNKS, _window(2), Edit(SLOTS, "kMost = 65000;", "kMost = 5;"))
    _compile(mutated(folder, several), folder / "small_chunks", "owner")
    return {name: folder / name for name in (*ALGORITHMS, "bfloat16", "small_chunks")}


CASES = {
    "alone": "--pes=1 --threads=3",
    "two": "--pes=2",
    "three": "--pes=3 --threads=2",
    "four_share_all": "--pes=4 --overlap=8",
    "four_share_none": "--pes=4 --overlap=0",
    "capacity_too_small": "--pes=2 --capacity=100",
    "one_has_none": "--pes=3 --empty-pe=1",
    "many_occurrences": "--pes=2 --repeats=9 --wgs=3",
    "many_occurrences_of_shared_rows": "--pes=3 --repeats=9 --threads=2 --overlap=8 --columns=72",
    "many_occurrences_staged": "--pes=2 --repeats=9 --staged=1 --delay-us=100",
    "epoch_passes_2^32": "--pes=2 --first-epoch=4294967293",
    "late_pe": "--pes=3 --slow-pe=1",
    "staged": "--pes=3 --staged=1 --delay-us=100",
    "staged_late": "--pes=3 --threads=2 --staged=1 --delay-us=100 --slow-pe=0",
    "staged_epoch_passes_2^32": "--pes=2 --staged=1 --delay-us=100 --first-epoch=4294967293",
}


OTHER_BUILDS = ("three", "many_occurrences", "staged_late")


@pytest.mark.parametrize(
    ("driver", "case"),
    [(algorithm, case) for algorithm in ALGORITHMS for case in CASES]
    + [(build, case) for build in ("bfloat16", "small_chunks") for case in OTHER_BUILDS],
)
def test_no_race(drivers: dict[str, Path], case: str, driver: str) -> None:
    assert_silent(run_driver(drivers[driver], CASES[case]))


PLAIN = "--pes=3 --threads=2 --epochs=12"
ONE_WG = "--pes=2 --wgs=1 --threads=4 --epochs=12"
LATE = "--pes=2 --threads=2 --slow-pe=1 --slow-us=2000 --epochs=12"
HOT = "--pes=2 --threads=2 --repeats=9 --epochs=12"
SHARED = "--pes=4 --overlap=8 --threads=2 --slow-pe=2 --slow-us=2000 --epochs=12"
STAGED = "--pes=2 --threads=2 --staged=1 --delay-us=300 --epochs=12"
MUTATIONS = {
    "bits_are_sent_before_they_are_set": Mutation(
        (Edit(UNION, "entry);\n    }\n    wg_.sync();\n  }", "entry);\n    }\n  }"),),
        ONE_WG,
        {Exit.RACE, Exit.WRONG_OUTPUT},
    ),
    "sets_are_announced_before_they_are_stored": Mutation(
        (Edit(UNION, "    wg_.sync();  // the words of all threads are before the flags that announce them\n", ""),),
        PLAIN,
        {Exit.RACE},
    ),
    "sets_are_not_awaited": Mutation(
        (Edit(UNION, "if (sender == team_.rank) continue;", "if (sender >= 0) continue;"),), LATE, {Exit.RACE}
    ),
    "any_total_will_do": Mutation(
        (Edit(UNION, "return packet.flag == flag;", "return packet.flag != 1;"),), PLAIN, {Exit.RACE, Exit.WRONG_OUTPUT}
    ),
    "sums_are_overwritten_before_they_are_read": Mutation(
        (Edit(SCAN, "  wg.sync();  // the last sums have been read\n", ""),),
        ONE_WG,
        {Exit.RACE, Exit.WRONG_OUTPUT},
    ),
    "rows_are_announced_before_they_are_listed": Mutation(
        (Edit(UNION, "    wg_.sync();  // what all threads have written and seen is before the flag\n", ""),),
        HOT,
        {Exit.RACE},
    ),
    "listed_rows_are_not_awaited": Mutation(
        (Edit(UNION, "flag_load_acquire_sys(flags + other)) >= team_.epoch", "team_.epoch) >= 0"),), PLAIN, {Exit.RACE}
    ),
    "hot_rows_are_summed_before_all_are_found": Mutation(
        (Edit(KERNEL, "      if (!rows.meet(kMeetFound)) return;\n", ""),), HOT, {Exit.RACE}
    ),
    "hot_rows_are_sent_before_they_are_summed": Mutation(
        (Edit(KERNEL, "      if (!rows.meet(kMeetSummed)) return;\n", ""),), HOT, {Exit.RACE}
    ),
    "hot_list_is_not_cleared": Mutation(
        (Edit(KERNEL, "if (wg.index() == 0 && wg.rank() == 0) Hot::clear(plan);", ""),),
        HOT,
        {Exit.RACE, Exit.WRONG_REMAINS},
    ),
    "rows_without_credit": Mutation(
        (Edit(KERNEL, "if (pe != team.rank && !await_credit(team, pe)) is_granted = false;", ""),), LATE, {Exit.RACE}
    ),
    "shares_are_not_awaited": Mutation(
        (Edit(EXCHANGE, "(block) + 1, kPhaseShare", "(block), kPhaseShare"),),
        SHARED,
        {Exit.RACE},
    ),
    "shares_are_announced_before_they_are_left": Mutation(
        (
            Edit(
                EXCHANGE,
                "    uint64_t adders = 0;\n",
                "    tell_progress(all_pes(), static_cast<uint64_t>(block) + 1);\n    uint64_t adders = 0;\n",
            ),
        ),
        SHARED,
        {Exit.RACE},
    ),
    "rows_are_not_awaited": Mutation(
        (Edit(EXCHANGE, "return await_progress(all_pes(), kAllBlocks, kPhaseRows);", "return true;"),),
        LATE,
        {Exit.RACE},
    ),
    "done_before_the_last_sums": Mutation(
        (
            Edit(
                EXCHANGE,
                "    for (int64_t block = 0; block <= blocks_.count; ++block) {\n",
                "    for (int64_t block = 0; block <= blocks_.count; ++block) {\n"
                "      if (block == blocks_.count) tell_progress(all_pes(), kAllBlocks);\n",
            ),
        ),
        SHARED,
        {Exit.RACE},
    ),
    "progress_does_not_release": Mutation(
        (Edit(MEMORY, "__atomic_store_n(flag, value, __ATOMIC_RELEASE)", "__atomic_store_n(flag, value, 0)"),),
        PLAIN,
        {Exit.RACE},
    ),
    "progress_does_not_acquire": Mutation(
        (Edit(MEMORY, "return __atomic_load_n(flag, __ATOMIC_ACQUIRE);", "return __atomic_load_n(flag, 0);"),),
        PLAIN,
        {Exit.RACE},
    ),
    "progress_before_what_was_put": Mutation(
        (Edit(EXCHANGE, "    put_fence(team_);\n    for (int hop", "    for (int hop"),),
        f"{STAGED} --timeout-ms=5000",
        {Exit.RACE, Exit.WRONG_OUTPUT, Exit.TIMED_OUT},
    ),
    "sets_before_what_was_put": Mutation(
        (Edit(UNION, "sizeof(uint64_t));\n    put_fence(team_);\n", "sizeof(uint64_t));\n"),), STAGED, {Exit.RACE}
    ),
    "leaves_with_puts_under_way": Mutation(
        (Edit(KERNEL, "if (plan.all_reachable == 0) put_quiet(team);", ""),), STAGED, {Exit.RACE}
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    # Small windows, so that warps have several blocks.
    _compile(mutated(tmp_path, (*mutation.edits, _window(4))), tmp_path / "driver", "owner")
    assert_caught(tmp_path / "driver", mutation)
