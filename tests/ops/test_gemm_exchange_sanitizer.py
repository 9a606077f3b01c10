"""Products whose results PEs exchange, under ThreadSanitizer: all-to-all, reduce-scatter and all-reduce."""

from __future__ import annotations

from typing import ClassVar

from mutations import After, Before, Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite


def _build(cluster: int, exchange: str, epilogue: str = "", wire: str = "kBFloat16", parts: int = 1) -> Build:
    config = (
        f".wire = po::DType::{wire}, .exchange = po::gemm_exchange::Exchange::{exchange}, {epilogue}"
        f".rows = 8, .columns = 8, .depth = 8, .stages = {parts + 1}, .parts = {parts}"
    )
    return Build((f"-DDRIVER_CLUSTER={cluster}", f"-DDRIVER_CONFIG={{{config}}}"))


BUILDS = {
    "reduce_scatter": _build(1, "kReduceScatter", ".bias = true, .residual = true, "),
    "reduce_scatter_sharing": _build(2, "kReduceScatter", ".is_mean = true, .bias = true, "),
    "reduce_scatter_parts": _build(2, "kReduceScatter", ".residual = true, ", "kFloat32", 2),
    "all_to_all": _build(1, "kAllToAll"),
    "all_to_all_sharing": _build(2, "kAllToAll"),
    "all_to_all_parts": _build(2, "kAllToAll", parts=2),
    "all_reduce": _build(1, "kAllReduce", ".bias = true, .residual = true, "),
    "all_reduce_sharing": _build(2, "kAllReduce", ".residual = true, ", "kFloat32"),
    "all_reduce_sharing_and_parts": _build(4, "kAllReduce", ".bias = true, ", parts=2),
}

# A PE stays away from a launch. The others give up, and run launches behind it as a GPU's queue would.
_TROUBLE = "--stop-pe=1 --trouble-at=2 --queued=3 --epochs=4 --timeout-ms=2000"
_OTHER = "--other-pe=1 --trouble-at=2 --queued=1"


def _cases(wgs: int) -> dict[str, str]:
    """Return cases of so many WGs, which are fewer than the tiles."""
    return {
        "three_threads": f"--wgs={wgs}",
        "one_thread": f"--wgs={wgs} --threads=1",
        "two_threads": f"--wgs={2 * wgs} --threads=2",
        "five_threads": f"--wgs={2 * wgs} --threads=5",
        "alone": f"--pes=1 --wgs={wgs}",
        "three_pes": f"--pes=3 --wgs={2 * wgs}",
        "four_pes": f"--pes=4 --rows=56 --wgs={wgs}",
        "four_pes_one_thread": f"--pes=4 --rows=56 --wgs={wgs} --threads=1",
        "tiles_of_no_pe": f"--pes=3 --rows=63 --wgs={wgs}",  # an odd number of rows of tiles, where WGs share columns
        "late_pe": f"--pes=3 --wgs={2 * wgs} --slow-pe=1 --slow-us=20000",
        "late_pe_one_thread": f"--pes=3 --wgs={2 * wgs} --threads=1 --slow-pe=2 --slow-us=20000",
        "epoch_passes_2^32": f"--wgs={wgs} --first-epoch=4294967294",
        "a_band_is_of_two_pes": f"--pes=3 --rows=63 --columns=40 --band=4 --wgs={wgs}",
        "a_band_is_of_all_pes": f"--pes=3 --rows=63 --band=20 --wgs={wgs} --threads=1",
        "the_own_part_does_not_lag": f"--pes=3 --rows=63 --lag=0 --wgs={wgs}",
        "the_own_part_lags_by_one_tile": f"--pes=4 --rows=112 --columns=16 --lag=1 --wgs={wgs}",
        "the_own_part_comes_last": f"--pes=3 --rows=63 --lag=3 --wgs={wgs}",
        "a_peer_s_tile_behind_an_own_one": f"--rows={32 * wgs} --columns=16 --band=5 --wgs={3 * wgs}",
        "more_wgs_than_tiles": f"--rows=12 --columns=8 --wgs={8 * wgs}",
        "shapes_in_turn": f"--rows=42,6,84 --columns=24,8,16 --wgs={wgs} --epochs=7",
        "shapes_in_turn_late": f"--pes=3 --rows=42,6,84 --columns=8,24,16 --wgs={wgs} --epochs=7 --slow-pe=1",
        "behind_an_aborted_launch": f"--pes=3 --wgs={wgs} {_TROUBLE}",
        "behind_an_aborted_launch_one_thread": f"--pes=3 --wgs={wgs} --threads=1 {_TROUBLE}",
        "behind_an_aborted_launch_many_wgs": f"--pes=3 --wgs={8 * wgs} {_TROUBLE}",
        "another_contract": f"--wgs={wgs} {_OTHER}",
    }


# Each tile has a cluster.
_PARTS = "--wgs=16 --rows=20 --columns=16"
_CASES_OF_PARTS = {
    "three_threads": _PARTS,
    "one_thread": f"{_PARTS} --threads=1",
    "two_threads": f"{_PARTS} --threads=2",
    "five_threads": f"{_PARTS} --threads=5 --epochs=2",
    "alone": f"{_PARTS} --pes=1",
    "one_step_each": f"{_PARTS} --depth=11",
    "a_half_without_rows": "--pes=3 --wgs=16 --rows=12 --columns=16",
    "late_pe": "--pes=3 --wgs=16 --rows=12 --columns=16 --slow-pe=1 --slow-us=20000",
    "shapes_in_turn": "--wgs=16 --rows=20,4 --columns=16,24 --epochs=6",
    "behind_an_aborted_launch": f"--pes=3 --wgs=16 --rows=12 --columns=16 {_TROUBLE}",
    "another_contract": f"{_PARTS} {_OTHER}",
}
# PE 2 has no rows, and gets those of PE 0. That PE comes later, and waits in vain for what PE 3 owes it.
_BLAMED = (
    "--pes=4 --rows=2 --columns=8 --stop-pe=3 --trouble-at=1 --epochs=2 --slow-pe=0 --slow-us=100000 --blamed-pe=3"
)
# PE 0 has all rows.
_ONE_ROW = "--pes=3 --rows=1 --columns=8 --wgs=1"
_NOT_MET = f"{_ONE_ROW} --other-pe=2 --trouble-at=1 --epochs=2 --slow-pe=2 --slow-us=20000"


# Builds whose kernels differ most have all cases, the others these.
_WITH_ALL_CASES = ("reduce_scatter", "reduce_scatter_parts", "all_reduce_sharing")
_CASES_OF_OTHERS = (
    "three_threads",
    "one_thread",
    "three_pes",
    "tiles_of_no_pe",
    "late_pe",
    "the_own_part_does_not_lag",
    "a_peer_s_tile_behind_an_own_one",
    "shapes_in_turn_late",
    "behind_an_aborted_launch",
    "another_contract",
)


def _cases_of(build: str) -> dict[str, str]:
    cases = dict(_CASES_OF_PARTS if build.endswith("parts") else _cases(2 if build.endswith("sharing") else 1))
    if build not in _WITH_ALL_CASES:
        cases = {name: arguments for name, arguments in cases.items() if name in _CASES_OF_OTHERS}
    if build == "reduce_scatter":
        cases["segments"] = "--pes=2 --segments=3"
        cases["a_peer_that_is_not_sent_to"] = _NOT_MET
    if build == "reduce_scatter_sharing":
        cases["segments"] = "--pes=3 --rows=63 --segments=3 --wgs=4"
    if build == "all_reduce_sharing":
        cases["fewer_rows_than_pes"] = "--pes=4 --rows=2"
        cases["parts_with_fewer_rows"] = "--pes=4 --rows=41"
    if build == "all_reduce":
        cases["fewer_rows_than_pes"] = f"{_ONE_ROW} --threads=5"
        cases["parts_with_fewer_rows"] = "--pes=4 --rows=41 --threads=1"
        cases["the_pe_that_stays_away_is_named"] = f"{_BLAMED} --timeout-ms=6000"
    return cases


CASES = {build: _cases_of(build) for build in BUILDS}

# A thread that pauses in place of a wait finds that the others have come, but in no order. Without the pause it can be
# rounds ahead of the others. Then they wait for a round that is over, and nobody reports that.
_PAUSE = "usleep(50000);"
_ONCE = "--wgs=1 --epochs=1"
_DIRECT = "--rows=16 --columns=8 --wgs=4 --epochs=1"  # a tile of each WG
_SIGNAL_FLAG = "signal(team_, block.pe, flag_offset(team_.rank, block), launch_flag(team_));"
_SIGNAL_WORD = (
    "const auto word = static_cast<uint64_t>(wg_.index());"
    "signal(team_, block.pe, ready_word_offset(team_, team_.rank, word), launch_flag(team_));"
)
_TELL = (
    "shared_.slots.taken[received.slot()].await(received.round() - 1); hand_over(shared_.slots.there[received.slot()]);"
)
MUTATIONS = {
    "a_slot_is_filled_before_it_is_free": Mutation((Before("tile-slot", _PAUSE), Drop("tile-slot")), _ONCE, RACE),
    "a_slot_is_free_before_it_is_sent": Mutation(
        (After("carrier-staged", "hand_over(shared_.slots.sent[sent.slot()]);"), Drop("tile-sent")), _ONCE, RACE
    ),
    "tiles_are_sent_before_they_are_staged": Mutation(
        (Before("carrier-staged", _PAUSE), Drop("carrier-staged")), _ONCE, RACE
    ),
    "tiles_are_handed_over_before_they_are_staged": Mutation(
        (After("tile-slot", "hand_over(shared.slots.staged[turn.slot()]);"), Drop("tile-staged")), _ONCE, RACE
    ),
    "the_epoch_is_used_before_it_is_known": Mutation((Drop("exchange-epoch-known"),), _DIRECT, RACE, may_crash=True),
    "the_last_tile_is_stored_before_its_place_is_known": Mutation(
        (Before("peer-opened", _PAUSE), Drop("peer-opened")), _DIRECT, RACE
    ),
    "the_last_tile_s_place_is_told_before_it_is_known": Mutation(
        (Before("peer-credit", "hand_over(shared_.slots.there[0]);"), Drop("peer-open")), _DIRECT, RACE
    ),
    "the_flag_of_the_last_tile_is_set_before_it_is_stored": Mutation(
        (Before("carrier-stored", _PAUSE), Drop("carrier-stored")), _DIRECT, RACE
    ),
    "poisons_before_all_have_stored": Mutation(
        (Drop("exchange-done"),), f"--pes=3 --wgs=2 {_TROUBLE}", RACE, build="all_to_all"
    ),
    "stores_without_credit": Mutation((Drop("exchange-credit"),), "--slow-pe=0 --slow-us=20000", RACE),
    "flags_before_partial_sums": Mutation(
        (Before("partials-before-flag", f"{_SIGNAL_FLAG} if (team_.rank == 1) {_PAUSE}"),), _ONCE, RACE
    ),
    "partial_sums_are_not_awaited": Mutation((Drop("partials-await"),), "--slow-pe=0 --slow-us=20000", RACE),
    "partial_sums_are_told_before_they_have_come": Mutation(
        (Before("partials-await", _TELL), Drop("partials-told")), _ONCE, RACE
    ),
    "partial_sums_are_added_before_they_are_there": Mutation(
        (Before("partials-there", _PAUSE), Drop("partials-there")), _ONCE, RACE
    ),
    # PE 0 gives up at once, as PE 1 has another contract. PE 2 comes later, and sends to PE 0 first.
    "adds_partial_sums_that_did_not_come": Mutation(
        (Swap("partials-left-out", "flag_load_relaxed_wg(&shared_.is_missing) != 0", "false"),),
        "--pes=3 --wgs=1 --other-pe=1 --trouble-at=1 --epochs=2 --slow-pe=2 --slow-us=50000",
        RACE,
    ),
    "partial_sums_that_did_not_come_are_not_missed": Mutation(
        (Drop("partials-missing"),), f"--pes=3 {_TROUBLE}", {Exit.WRONG_OUTPUT}
    ),
    "peers_that_are_not_sent_to_are_not_met": Mutation((Drop("exchange-credits"),), _NOT_MET, {Exit.WRONG_REPORT}),
    "no_poison": Mutation((Drop("exchange-poison"),), f"--pes=3 {_TROUBLE}", {Exit.WRONG_OUTPUT}),
    "words_before_the_rows": Mutation(
        (Before("tile-rows-before-word", f"{_SIGNAL_WORD} if (team_.rank == 1) {_PAUSE}"),),
        _ONCE,
        RACE,
        build="all_to_all",
    ),
    "rows_are_not_awaited": Mutation((Drop("tile-rows-await"),), "--slow-pe=0", RACE, build="all_to_all"),
    "words_behind_an_aborted_launch": Mutation(
        (Swap("tile-rows-unless-aborted", "is_aborted(team_)", "false"),),
        f"--pes=3 {_TROUBLE}",
        {Exit.TOOK_PART},
        build="all_to_all",
    ),
    "results_are_sent_before_they_are_stored": Mutation(
        (Before("carrier-result", _PAUSE), Drop("carrier-result")), _ONCE, RACE, build="all_reduce"
    ),
    "results_are_handed_over_before_they_are_stored": Mutation(
        (
            Before("result-store", "if constexpr (Traits::kReturns) hand_over(shared.slots.staged[turn.slot()]);"),
            Drop("result-stored"),
        ),
        _ONCE,
        RACE,
        build="all_reduce",
    ),
    "sends_results_of_an_aborted_launch": Mutation(
        (Swap("exchange-takes-part", "warp_.count(is_aborted(team_)) == 0", "true"),),
        f"--pes=3 {_TROUBLE}",
        RACE,
        build="all_reduce",
    ),
    "the_pe_that_owes_rows_is_named": Mutation(
        (Swap("tile-rows-await", "kPhaseRows", "make_phase(kFirstPhase + 1)"),),
        f"{_BLAMED} --timeout-ms=1500",
        {Exit.WRONG_REPORT},
        build="all_reduce",
    ),
}


class TestGemmExchange(SanitizerSuite):
    driver: ClassVar = Driver("gemm_exchange_driver.cpp", BUILDS, CASES, MUTATIONS, "reduce_scatter")
