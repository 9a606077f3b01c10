"""The number of calls between a public function and the launch."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from count_calls import Call, count_on_pe, counted, summary_of

import persistent_ops as po

pytestmark = pytest.mark.host

# The maximum numbers of calls and files of each walk.
LIMITS = {
    "all_reduce": (19, 12),
    "gemv_all_reduce": (16, 13),
    "sparse_all_reduce": (49, 13),
    "embedding_all_to_all": (21, 13),
    "collection": (140, 25),
}


@pytest.fixture(scope="module")
def walks() -> dict[str, list[Call]]:
    # In a new process, as calls of other tests here are remembered as kinds of plain calls.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(po.launch, count_on_pe, 2, threads=True, timeout=120).result()[0]


@pytest.mark.parametrize("name", LIMITS)
def test_walk_is_short(name: str, walks: dict[str, list[Call]]) -> None:
    found, (calls, files) = summary_of(walks[name]), LIMITS[name]
    assert found.calls <= calls and found.files <= files, f"{found}: see scripts/count_calls.py {name}"


def test_every_walk_has_a_limit(walks: dict[str, list[Call]]) -> None:
    assert walks.keys() == LIMITS.keys()


def test_calls_of_the_package_alone_are_counted() -> None:
    def outside() -> None:
        with pytest.raises(TypeError):
            po.launch(None, 1)  # type: ignore[arg-type]

    assert [call.name for call in counted(outside)] == ["launch"]
