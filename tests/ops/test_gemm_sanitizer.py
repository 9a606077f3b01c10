"""The main loop of matrix products under ThreadSanitizer: gemm, and a loop that awaits what peers bring."""

from __future__ import annotations

from typing import ClassVar

from mutations import Before, Drop
from sanitizer import RACE, Build, Driver, Mutation, SanitizerSuite


def _build(cluster: int, config: str) -> Build:
    return Build((f"-DDRIVER_CLUSTER={cluster}", f"-DDRIVER_CONFIG={{.rows = 8, .columns = 8, .depth = 8, {config}}}"))


BUILDS = {
    "alone": _build(1, ".stages = 2"),
    "sharing": _build(2, ".stages = 2"),
    "parts": _build(2, ".stages = 3, .parts = 2"),
    "sharing_and_parts": _build(4, ".stages = 2, .parts = 2"),
    "across": _build(2, ".stages = 3, .a_k_major = false, .b_k_major = false"),
}


def _cases(wgs: int) -> dict[str, str]:
    """Return cases of so many WGs, which are fewer than the tiles."""
    return {
        "two_threads": f"--wgs={wgs} --threads=2",
        "one_thread": f"--wgs={wgs} --threads=1",
        "three_threads": f"--wgs={wgs} --threads=3",
        "more_threads_than_rows": f"--wgs={wgs} --threads=11 --epochs=2",
        "one_step": f"--wgs={wgs} --threads=3 --depth=5",
        "one_step_one_thread": f"--wgs={wgs} --threads=1 --depth=5",
        "two_steps": f"--wgs={wgs} --threads=2 --depth=16",
        "several_wgs": f"--wgs={3 * wgs} --threads=3",
        "more_wgs_than_tiles": f"--wgs={3 * wgs} --threads=2 --rows=3 --columns=11",
        "bands_that_do_not_fit": f"--wgs={wgs} --threads=2 --rows=81 --columns=40 --band=3 --epochs=2",
    }


def _cases_of_parts(wgs: int) -> dict[str, str]:
    """Return cases of two parts: each tile has a cluster."""
    small = f"--wgs={wgs} --rows=12 --columns=12"
    return {
        "two_threads": f"{small} --threads=2",
        "one_thread": f"{small} --threads=1",
        "three_threads": f"{small} --threads=3",
        "four_threads": f"{small} --threads=4",
        "one_step_each": f"{small} --threads=3 --depth=11",
        "one_step_each_one_thread": f"{small} --threads=1 --depth=11",
        "parts_of_different_length": f"{small} --threads=2 --depth=17",
        "many_steps": f"{small} --threads=3 --depth=93",
        "more_wgs_than_tiles": f"--wgs={wgs} --rows=7 --columns=6 --threads=3",
    }


CASES = {
    "sharing": _cases(2),
    "alone": _cases(1),
    "parts": _cases_of_parts(8),
    "sharing_and_parts": _cases_of_parts(8),
    "across": _cases(2),
}

# A thread that pauses in place of a wait finds that the others have come, but in no order. Without the pause it can be
# rounds ahead of the others. Then they wait for a round that is over, and nobody reports that.
_PAUSE = "usleep(50000);"
_ONCE = "--wgs=2 --threads=3 --epochs=1"
_PARTS = f"{_ONCE} --wgs=4 --rows=15 --columns=7"
MUTATIONS = {
    "brings_a_tile_over_one_in_use": Mutation((Before("stage-empty", _PAUSE), Drop("stage-empty")), _ONCE, RACE),
    "multiplies_tiles_that_have_not_come": Mutation((Before("stage-full", _PAUSE), Drop("stage-full")), _ONCE, RACE),
    "sends_a_half_over_tiles_in_use": Mutation((Drop("half-room"),), _PARTS, RACE, build="parts"),
    "adds_a_half_that_has_not_come": Mutation((Drop("half-there"),), _PARTS, RACE, build="parts"),
}


class TestGemm(SanitizerSuite):
    driver: ClassVar = Driver("gemm_driver.cpp", BUILDS, CASES, MUTATIONS, "sharing")


# ---- a loop that awaits peers ----------------------------------------------------------------------------------------

_LATE = "--pes=2 --threads=3 --slow-pe=1"
_TROUBLE = "--pes=3 --wgs=4 --threads=3 --stop-pe=1 --trouble-at=3 --queued=3 --epochs=6 --timeout-ms=3000"
GATE_CASES = {
    "late": _LATE,
    "alone": "--pes=1",
    "one_thread": "--pes=2 --threads=1",
    "several": "--pes=3 --wgs=4 --threads=3",
    "a_row_of_tiles_is_of_two_pes": "--pes=3 --wgs=4 --tiles=1",
    "epoch_passes_2^32": "--pes=2 --first-epoch=4294967293",
    "behind_an_aborted_launch": _TROUBLE,
    "behind_an_aborted_launch_one_thread": f"{_TROUBLE} --threads=1",
    "behind_an_aborted_launch_many_tiles": f"{_TROUBLE} --threads=2 --tiles=5 --columns=30",
}
GATE_MUTATIONS = {"brings_rows_that_have_not_come": Mutation((Drop("product-gate"),), _LATE, RACE)}


class TestGate(SanitizerSuite):
    driver: ClassVar = Driver(
        "product_gate_driver.cpp", {"plain": Build()}, {"plain": GATE_CASES}, GATE_MUTATIONS, "plain"
    )
