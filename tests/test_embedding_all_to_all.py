"""embedding_all_to_all against a model of its exact bits, over worlds, transports and shapes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from embedding_cases import CASES, run_cases
from worlds import run_pes

# (world, transport, host WG shape): the staged transport of the host delays and reorders; several threads per WG and
# several WGs per PE are what a GPU has.
WORLDS = [
    pytest.param(1, {}, id="1"),
    pytest.param(2, {}, id="2"),
    pytest.param(3, {}, id="3"),
    pytest.param(4, {}, id="4"),
    pytest.param(2, {"transport": "staged"}, id="2-staged"),
    pytest.param(3, {"transport": "staged"}, id="3-staged"),
]


@functools.cache
def _results(backend: str, world: int, options: tuple[tuple[str, Any], ...]) -> list[dict[str, str | None]]:
    return run_pes(run_cases, world, backend, None, dict(options), timeout=400)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("world", "options"), WORLDS)
def test_bits(backend: str, world: int, options: dict[str, Any], case: Any) -> None:
    if backend == "cuda" and options:
        pytest.skip("the staged transport on GPUs needs a network or a stand-in: tests/test_gpu_staged.py")
    for rank, results in enumerate(_results(backend, world, tuple(options.items()))):
        assert results[case.name] is None, f"PE {rank}: {results[case.name]}"


def test_cases_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
