"""Kernels with warps of 32 lanes under ThreadSanitizer: communication between lanes.

Each lane is a thread (host_driver/lanes). A lane that skips a collective ends the program. If one lane writes and
another lane reads without a collective or sync of both in between, this is a race. gemv is left out: its lanes share
tiles of `mma` instructions, which the host does not have.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from mutations import Drop, Swap
from sanitizer import RACE, Build, Driver, Exit, Mutation, SanitizerSuite, of_lanes
from test_all_reduce_sanitizer import TestAllReduce as AllReduce
from test_embedding_backward_sanitizer import TestEmbeddingBackward as EmbeddingBackward
from test_embedding_inputs_sanitizer import TestEmbeddingInputs as EmbeddingInputs
from test_embedding_inversion_sanitizer import TestEmbeddingInversion as EmbeddingInversion
from test_embedding_sanitizer import TestEmbeddingAllToAll as EmbeddingAllToAll
from test_embedding_weight_gradients_sanitizer import TestEmbeddingWeightGradients as EmbeddingWeightGradients
from test_sparse_sanitizer import TestSparseAllReduce as SparseAllReduce

_WARP = "--wgs=1 --threads=32 --epochs=3"
_WARPS = "--wgs=2 --threads=64 --epochs=3"
_STAGED = f"{_WARPS} --delay-us=200"
_ALIGNED = "--width=40"  # of embedding_backward: ten chunks of 16 bytes, of more lanes than a tile has
_CHUNKS = f"--pes=2 --rows=1 --batch=200 {_ALIGNED}"
_ODD = "--width=30"  # of rows of eight chunks, the last one not whole

OF_EMBEDDING = {
    "a_lane_keeps_its_own_ticket": Mutation(
        (
            Swap(
                "ticket-of-lanes", "warp_.shuffle(ticket, 0)", "(warp_.rank() == 0 ? ticket : warp_.shuffle(ticket, 0))"
            ),
        ),
        _WARP,
        {Exit.TIMED_OUT},
    ),
}
OF_BACKWARD = {
    "pieces_are_counted_before_all_lanes_have_stored": Mutation(
        (Drop("pieces-of-lanes"),), f"{_WARPS} {_ALIGNED}", RACE
    ),
    "chunks_are_counted_before_all_lanes_have_stored": Mutation((Drop("sums-of-lanes"),), f"{_WARPS} {_CHUNKS}", RACE),
    "a_range_ends_where_lanes_do_not_know_yet": Mutation(
        (Drop("range-known-to-lanes"),), f"{_WARPS} {_CHUNKS}", RACE | {Exit.TIMED_OUT}, may_crash=True
    ),
    "a_window_changes_while_lanes_read_it": Mutation((Drop("window-read-by-lanes"),), f"{_WARPS} {_CHUNKS}", RACE),
    "rows_are_taken_before_they_are_in_order": Mutation(
        (Drop("rows-ordered"),), f"{_WARPS} {_ALIGNED}", RACE, may_crash=True
    ),
}
OF_BACKWARD_BY_ELEMENTS = {
    "a_chunk_is_of_one_lane": Mutation(
        (Swap("columns-of-lanes", "e / kElements", "0"),),
        f"{_WARPS} --pes=2 --rows=2 --batch=70 {_ODD}",
        {Exit.WRONG_OUTPUT},
    ),
}
OF_INPUTS = {
    "inputs_are_counted_before_all_lanes_have_stored": Mutation((Drop("inputs-of-lanes"),), _WARPS, RACE),
}
OF_INVERSION = {
    "a_lane_passes_a_collective_by": Mutation(
        (Swap("inversion-marked-lanes", "warp.ballot(marks[u] != 0)", "(marks[u] != 0 ? warp.ballot(true) : 0)"),),
        _WARP,
        {Exit.TIMED_OUT},
    ),
    "counters_are_added_to_before_all_lanes_have_read_them": Mutation(
        (Drop("inversion-counters-read"),), _WARP, RACE, may_crash=True
    ),
}
OF_WEIGHT_GRADIENTS = {
    "returns_are_counted_before_all_lanes_have_stored": Mutation(
        (Drop("returns-of-lanes"),), f"{_WARPS} --length=60 --piece=128", RACE
    ),
}
OF_SPARSE = {
    "a_lane_counts_no_others": Mutation(
        (Swap("lanes-there", "warp_.count(is_there)", "(warp_.rank() == 0 ? warp_.size() : warp_.count(is_there))"),),
        _WARP,
        {Exit.TIMED_OUT},
    ),
}
OF_ALL_REDUCE = {
    "packets_are_put_before_all_lanes_have_stored": Mutation(
        (Drop("packets-of-lanes"),), f"{_STAGED} --staged=1", RACE | {Exit.TIMED_OUT}
    ),
}
MUTATIONS = (
    OF_EMBEDDING
    | OF_BACKWARD
    | OF_BACKWARD_BY_ELEMENTS
    | OF_INPUTS
    | OF_INVERSION
    | OF_WEIGHT_GRADIENTS
    | OF_SPARSE
    | OF_ALL_REDUCE
)


def _driver(
    of: type[SanitizerSuite],
    build: str,
    staged: str,
    mutations: dict[str, Mutation],
    flags: tuple[str, ...] = (),
    **cases: str,
) -> Driver:
    found = of.driver.builds[build]
    builds: dict[str, Build] = {"lanes": of_lanes(Build((*flags, *found.flags), found.edits))}
    cases = {"one_warp": _WARP, "staged": f"{_STAGED} {staged}", **cases}
    return Driver(of.driver.source, builds, {"lanes": cases}, mutations, "lanes")


@pytest.mark.slow  # make test has the lanes of one operator
class TestEmbeddingAllToAll(SanitizerSuite):
    driver: ClassVar = _driver(EmbeddingAllToAll, "plain", "--tables=2,1 --batch=3,4 --transport=staged", OF_EMBEDDING)


@pytest.mark.slow
class TestEmbeddingBackward(SanitizerSuite):
    # Rows of windows are tiles', those with more lookups a whole warp's, each lane of which adds up two columns.
    driver: ClassVar = _driver(
        EmbeddingBackward,
        "sgd",
        f"--pes=2 --staged=1 {_ALIGNED}",
        OF_BACKWARD,
        ("-DDRIVER_LANES=8", "-DDRIVER_ROW_CHUNKS=16", "-DDRIVER_ALIGNED=true"),
        one_warp=f"{_WARP} {_ALIGNED}",
        more_rows_than_lanes=f"{_WARP} {_ALIGNED} --rows=1000 --batch=150",
        rows_of_a_warp=f"{_WARPS} --pes=2 --rows=2 --batch=70 {_ALIGNED}",
        rows_of_chunks=f"{_WARPS} {_CHUNKS}",
    )


@pytest.mark.slow
class TestEmbeddingBackwardByElements(SanitizerSuite):
    # One column a lane, its gradient of two bytes.
    driver: ClassVar = _driver(
        EmbeddingBackward,
        "narrow",
        f"--pes=2 --staged=1 {_ODD}",
        OF_BACKWARD_BY_ELEMENTS,
        ("-DDRIVER_LANES=8", "-DDRIVER_ROW_CHUNKS=8"),
        rows_of_a_warp=f"{_WARPS} --pes=2 --rows=2 --batch=70 {_ODD}",
        rows_of_chunks=f"{_WARPS} --pes=2 --rows=1 --batch=200 {_ODD}",
    )


@pytest.mark.slow
class TestEmbeddingInputs(SanitizerSuite):
    driver: ClassVar = _driver(EmbeddingInputs, "inputs", "--pes=2 --staged=1", OF_INPUTS)


@pytest.mark.slow
class TestEmbeddingInversion(SanitizerSuite):
    driver: ClassVar = _driver(
        EmbeddingInversion,
        "narrow",
        "",
        OF_INVERSION,
        three_sources=f"{_WARPS} --sources=3 --batch=60",
        offsets_fall=f"{_WARPS} --falling=1 --batch=60",
        bags_without_lookups=f"{_WARPS} --batch=300 --empty=9",
    )


@pytest.mark.slow
class TestEmbeddingWeightGradients(SanitizerSuite):
    driver: ClassVar = _driver(EmbeddingWeightGradients, "returns", "--pes=2 --staged=1", OF_WEIGHT_GRADIENTS)


@pytest.mark.slow
class TestSparseAllReduce(SanitizerSuite):
    driver: ClassVar = _driver(SparseAllReduce, "small_windows", "--pes=2 --staged=1", OF_SPARSE)


class TestAllReduce(SanitizerSuite):
    driver: ClassVar = _driver(AllReduce, "one_shot", "--pes=2 --staged=1", OF_ALL_REDUCE)
