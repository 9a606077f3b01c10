"""Lanes of a warp reach its collectives together: no collective stands where `&&`, `||` or `?:` lets lanes skip it.

A GPU waits for the missing lanes forever. The host's warps of one lane do not show this.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[2] / "cuda"
_OF_LANES = r"(?:shuffle|count|count_below|first|union_of|sum_through|add_across)"
_COLLECTIVES = rf"\b(?:(?:warp|tile|lanes)_?(?:\(\))?\.{_OF_LANES}|ballot|lanes_alike|tree_sum|sum_by_trees)\("
_SKIPPED = re.compile(rf"(?:&&|\|\||\?)[^;{{}}]*{_COLLECTIVES}")


def skipped(code: str) -> list[str]:
    """Return the statements in which a lane may skip a collective."""
    code = re.sub(r"//[^\n]*", "", code)
    return [" ".join(found.group().split()) for found in _SKIPPED.finditer(code)]


@pytest.mark.parametrize(
    "code",
    [
        "const bool is_first = counts && digit == warp.shuffle(digit, 0);",
        "if (is_done ||\n    warp.count(is_here) == 0) return;",
        "total = is_there ? tree_sum(warp, values) : 0.0f;",
    ],
)
def test_it_is_found(code: str) -> None:
    assert len(skipped(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "const uint32_t first = warp.shuffle(digit, 0);\nconst bool is_first = counts && digit == first;",
        "const int number = warp.first(!begins && key != before);",
        "return is_last ? wg.count() : 0;",
    ],
)
def test_nothing_else_is(code: str) -> None:
    assert not skipped(code)


@pytest.mark.parametrize("path", sorted(CUDA.rglob("*.cuh")), ids=lambda path: str(path.relative_to(CUDA)))
def test_no_lane_passes_a_collective_by(path: Path) -> None:
    assert not skipped(path.read_text())
