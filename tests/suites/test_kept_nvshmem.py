"""NVSHMEM that stays started in kept PEs, between worlds of tests on GPUs: when it starts again, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kept_nvshmem import LEAST_BYTES, Keeper

from persistent_ops.runtime.bootstrap.connection import Bootstrap, from_threads

pytestmark = pytest.mark.host


class _Backend:
    """A backend whose NVSHMEM is memory of the host."""

    def __init__(self, heap_bytes: int) -> None:
        self.device, self.heap_bytes = torch.device("cpu"), heap_bytes
        self.waits, self._bindings = mock.Mock(), mock.Mock()
        self._libraries = [SimpleNamespace(handle=7)]

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        assert address == self._buffer.handle
        return self._buffer.memory[:nbytes]  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        pass


class _Pe:
    """A PE's process with a keeper, and the requests to NVSHMEM there."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.keeper = Keeper(self._start, self._close)

    def _start(self, backend: Any, bootstrap: Bootstrap, timeout: float) -> None:
        self.asked.append(backend.heap_bytes)
        backend._nvshmem = object()
        backend._buffer = SimpleNamespace(handle=64, memory=torch.zeros(1 << 10, dtype=torch.uint8))

    def _close(self, backend: Any, *, is_alone: bool = False) -> None:
        self.asked.append("left" if is_alone else "ended")

    def world(self, bootstrap: Bootstrap, heap_bytes: int, *, is_alone: bool = False) -> tuple[Any, bool]:
        backend = _Backend(heap_bytes)
        self.keeper.start(backend, bootstrap, 30.0)
        was_empty = not backend._buffer.memory[:32].any()  # type: ignore[attr-defined]
        backend._buffer.memory.fill_(1)  # type: ignore[attr-defined]
        backend._bindings.culibrary_finalize.reset_mock()
        self.keeper.close(backend, is_alone=is_alone)
        if not is_alone and self.keeper.is_started:
            backend._bindings.culibrary_finalize.assert_called_once_with(7)
        assert backend.heap_bytes == heap_bytes
        return backend._nvshmem, was_empty  # type: ignore[attr-defined]


def _on_all(pes: list[_Pe], world: Callable[[_Pe, Bootstrap], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(pes)) as pool:
        return list(pool.map(world, pes, from_threads(len(pes), 30.0)))


def test_it_starts_again_for_a_larger_heap_which_is_not_kept() -> None:
    pes, sizes = [_Pe(), _Pe()], (32, 64, LEAST_BYTES + 1, 32, 64)
    found = [_on_all(pes, lambda pe, each, size=size: pe.world(each, size)) for size in sizes]  # type: ignore[misc]
    assert all(was_empty for of_world in found for _, was_empty in of_world)
    for rank, pe in enumerate(pes):
        first, second, large, fourth, last = (of_world[rank][0] for of_world in found)
        assert first is second and len({first, large, fourth}) == 3 and fourth is last
        assert pe.asked == [LEAST_BYTES, "ended", LEAST_BYTES + 1, "ended", LEAST_BYTES] and pe.keeper.is_started


def test_one_pe_without_room_is_enough() -> None:
    pes = [_Pe(), _Pe()]
    _on_all(pes, lambda pe, each: pe.world(each, 32))
    _on_all(pes, lambda pe, each: pe.world(each, 32 if each.rank else LEAST_BYTES + 1))
    large = [[LEAST_BYTES, "ended", LEAST_BYTES + (rank == 0), "ended"] for rank in range(2)]
    assert [pe.asked for pe in pes] == large
    _on_all(pes, lambda pe, each: pe.world(each, 32))
    assert [pe.asked for pe in pes] == [[*each, LEAST_BYTES] for each in large]


def test_without_peers_it_is_left_to_the_backend() -> None:
    pes = [_Pe(), _Pe()]
    _on_all(pes, lambda pe, each: pe.world(each, 32, is_alone=True))
    assert [pe.asked for pe in pes] == [[LEAST_BYTES, "left"]] * 2
    assert not any(pe.keeper.is_started for pe in pes)


def test_pes_of_different_starts_do_not_meet() -> None:
    one, other = [_Pe(), _Pe()], [_Pe(), _Pe()]
    for pes in (one, other):
        _on_all(pes, lambda pe, each: pe.world(each, 32))
    with pytest.raises(AssertionError, match="different worlds"):
        _on_all([one[0], other[1]], lambda pe, each: pe.world(each, 32))
