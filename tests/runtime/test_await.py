"""A kernel's wait looks once more before it gives up, as its thread may not have run since its last look."""

from __future__ import annotations

import ctypes

import pytest
from host_driver.build import load_shim


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_shim("await_shim.cpp", tmp_path_factory.mktemp("await"))


@pytest.mark.parametrize("lost", [False, True], ids=["late", "ended"])
@pytest.mark.parametrize("comes", [False, True], ids=["never", "in_time"])
def test_what_came_while_a_thread_was_held_up_has_come(shim: ctypes.CDLL, comes: bool, lost: bool) -> None:
    assert shim.held_up(comes, lost) == comes
