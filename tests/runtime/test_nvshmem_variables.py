"""The variables that NVSHMEM reads at its start: set then, and restored afterwards."""

from __future__ import annotations

import os

import pytest

from persistent_ops.runtime.bootstrap.route import Interface
from persistent_ops.runtime.nvshmem_variables import NvshmemVariables

SIZE, INTERFACE, NO_NVLS = "NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_DISABLE_NVLS"
NO_PROXY = "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"


@pytest.fixture(autouse=True)
def none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SIZE, INTERFACE, NO_PROXY, NO_NVLS):
        monkeypatch.setenv(name, "")  # so that it is as before after the test, whatever that does
        monkeypatch.delenv(name)


def seen() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in (SIZE, INTERFACE, NO_PROXY, NO_NVLS))


def test_each_start_gets_its_own_heap_size() -> None:
    for heap_bytes in (64 << 20, 512 << 20):
        with NvshmemVariables(heap_bytes, Interface("lo")):
            assert seen() == (str(heap_bytes + (64 << 20)), "lo", "1", "1")
        assert seen() == (None, None, None, "1")
    with NvshmemVariables(1 << 20, None):
        assert seen() == (str(65 << 20), None, "1", "1")


def test_the_route_to_rank_0_gives_interface_and_family(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"
    with NvshmemVariables(1 << 20, Interface("eth1", "AF_INET6")):
        assert (os.environ[INTERFACE], os.environ[family]) == ("eth1", "AF_INET6")
    monkeypatch.setenv(INTERFACE, "ib0")
    with NvshmemVariables(1 << 20, Interface("eth1", "AF_INET6")):
        assert os.environ[INTERFACE] == "ib0" and family not in os.environ


def test_what_the_user_has_set_stands_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE, "8G")
    monkeypatch.setenv(INTERFACE, "eth0")
    monkeypatch.setenv(NO_PROXY, "0")
    with NvshmemVariables(1 << 20, Interface("lo")):
        assert seen() == ("8G", "eth0", "0", "1")
        os.environ.pop(SIZE)
    assert seen() == ("8G", "eth0", "0", "1")


def test_a_start_that_fails_restores_them_too() -> None:
    with pytest.raises(RuntimeError, match="no peer"), NvshmemVariables(1 << 20, Interface("lo")):
        raise RuntimeError("no peer")
    assert seen() == (None, None, None, "1")


def test_multicast_is_off_whatever_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NO_NVLS, "0")
    for _ in range(2):
        with NvshmemVariables(1 << 20, Interface("lo")):
            assert os.environ[NO_NVLS] == "1"
        assert os.environ[NO_NVLS] == "1"
    assert [record.getMessage() for record in caplog.records] == [
        "persistent_ops: NVSHMEM_DISABLE_NVLS=0 becomes 1: NVLink multicast is never used"
    ]
