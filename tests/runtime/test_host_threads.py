"""Threads of a launch on the host if the system has no room for them: all start later, or none, but never some."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from host_driver.build import load_shim
from worlds import error_of, in_world, init_with_impatient_kernels, run_pes

import persistent_ops as po
from persistent_ops.runtime import host
from persistent_ops.runtime.world import current

REFUSED = 1000  # more often than anybody tries


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = load_shim("threads_shim.cpp", Path(tmp_path_factory.mktemp("threads")))
    library.run.argtypes, library.run.restype = [ctypes.c_int] * 3 + [ctypes.c_void_p], ctypes.c_long
    return library


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_a_thread_that_is_refused_is_tried_again(shim: ctypes.CDLL, accepted: int) -> None:
    calls = (ctypes.c_int * 9)()
    assert shim.run(9, accepted, 3, calls) == 1000 + 2000 + 4000
    assert list(calls) == [1] * 9


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_no_body_is_called_where_a_thread_stays_refused(shim: ctypes.CDLL, accepted: int) -> None:
    calls = (ctypes.c_int * 9)()
    assert -10e6 < shim.run(9, accepted, REFUSED, calls) < -1e6
    assert list(calls) == [0] * 9


def _refused(backend: str) -> list[Any]:
    """PE 1 has no room for a launch, once."""
    init_with_impatient_kernels(backend, 2.0, 16 << 20)
    here, refusals = current().backend, [False]
    load = here.load

    def load_refused(request: Any, **options: Any) -> Any:
        kernel: Any = load(request, **options)
        function = kernel._function
        kernel._function = lambda *given: not any(refusals) and function(*given)
        return kernel

    def is_right() -> bool:
        return po.all_reduce(torch.ones(8)).tolist() == [2.0] * 8

    try:
        with mock.patch.object(here, "load", load_refused):
            was_right = is_right()
        refusals[0] = po.rank() == 1
        name, told, _ = error_of(lambda: [is_right(), po.check()])
        refusals[0] = False
        po.recover()
        return [name, "the system has no room" in told, was_right and is_right()]
    finally:
        po.finalize()


def test_a_launch_without_room_is_an_error_that_can_be_recovered_from() -> None:
    waited, refused = run_pes(_refused, 2, "host", timeout=100)
    assert waited == ["PeerTimeoutError", False, True]
    assert refused == ["PersistentOpsError", True, True]


def test_a_network_without_room_is_an_error() -> None:
    with mock.patch.object(host, "load_host") as load:
        load.return_value.po_network_create.return_value = None
        found = po.launch(
            lambda: error_of(lambda: po.init("host", transport="staged", heap_size=16 << 20))[:2],
            2,
            threads=True,
            timeout=60,
        )
    for name, told in found:
        assert name == "PersistentOpsError" and "'staged': the system has no room" in told, told


def _sum_of_denormals() -> tuple[bool, bool]:
    """Return whether kernels add denormal numbers, and whether the caller flushes them meanwhile."""
    least = torch.full((8,), 2.0**-149)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        summed = po.all_reduce(least)
        is_flushed = bool((torch.full((1,), 2.0**-126) * 0.5 == 0).item())
    finally:
        torch.set_flush_denormal(False)
    return torch.equal(summed, least * po.world_size()), is_flushed


@pytest.mark.parametrize("world", [1, 2])
def test_kernels_have_denormal_numbers_whatever_the_caller_has_set(world: int) -> None:
    assert in_world(_sum_of_denormals, world, "host") == [(True, True)] * world
