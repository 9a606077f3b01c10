"""Worlds with more PEs than a word has bits: every operator, and who is blamed where one stays away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every_operator import BETWEEN_NODES, OPERATORS, problems
from worlds import error_of, gave_up, run_pes

import persistent_ops as po
from persistent_ops.runtime.world import current

pytestmark = pytest.mark.host

MB = 1 << 20


def _called(backend: str, names: Sequence[str], options: dict[str, Any]) -> dict[str, str]:
    po.init(backend, operator_timeout=600.0, heap_size=96 * MB, **options)
    try:
        return problems(names)
    finally:
        po.finalize()


def test_every_operator() -> None:
    assert run_pes(_called, 65, "host", list(OPERATORS), {}, timeout=250) == [{}] * 65


@pytest.mark.many_pes
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("size", [128, 256])
def test_operator(size: int, name: str) -> None:
    assert run_pes(_called, size, "host", [name], {}, timeout=900) == [{}] * size


@pytest.mark.parametrize("size", [3, 4])
def test_every_operator_between_nodes(size: int) -> None:
    """PEs of a node store directly, and put to the others."""
    assert run_pes(_called, size, "host", BETWEEN_NODES, {"transport": "nodes:2"}, timeout=250) == [{}] * size


def _sum_of_ranks(count: int) -> bool:
    x = torch.full((count,), float(po.rank()))
    return bool((po.all_reduce(x, algorithm="slices") == sum(range(po.world_size()))).all())


def _given_up(backend: str, folder: Path) -> tuple[str, bool, str]:
    """The last PE but one gives up because of the last one, which comes later; then the last one leaves."""
    po.init(backend, operator_timeout=100.0, heap_size=64 * MB)
    rank, last = po.rank(), po.world_size() - 1
    _sum_of_ranks(100)  # which compiles
    if rank == last - 1:
        current().workspace.timeout = 2.0
    if rank == last:
        gave_up(folder, last)
    kind, text, _ = error_of(lambda: _sum_of_ranks(50))
    (folder / f"gave_up_{rank}").touch()
    po.recover()
    is_right = _sum_of_ranks(100)
    lost = ""
    if rank != last:
        lost = ": ".join(error_of(lambda: _sum_of_ranks(100))[:2])
    po.finalize()
    return f"{kind}: {text}", is_right, lost


@pytest.mark.parametrize("size", [67, pytest.param(131, marks=pytest.mark.many_pes)])
def test_who_has_given_up_because_of_whom(size: int, tmp_path: Path) -> None:
    results = run_pes(_given_up, size, "host", tmp_path, timeout=300)
    accuser, blamed = size - 2, size - 1
    for rank, (text, is_right, lost) in enumerate(results):
        assert is_right, rank
        if rank == accuser:
            assert text.startswith(f"PeerTimeoutError: In all_reduce, PE {accuser} waited "), text
            assert f" s for PE {blamed}: " in text, text
        else:
            name = f"PE {blamed} (this PE)" if rank == blamed else f"PE {blamed}"
            assert text.startswith(f"PeerTimeoutError: PE {accuser} gave up on epoch "), (rank, text)
            assert f" because of {name}, so PE {rank} left its launch" in text, (rank, text)
        if rank != blamed:
            assert lost.startswith("PeerLostError: ") and f"PE {blamed} has ended" in lost, (rank, lost)
