"""The interface through which other hosts reach this one."""

from __future__ import annotations

import pytest
from pe_processes import host_address

from persistent_ops.runtime.bootstrap.route import interface_to


def test_an_address_of_this_host() -> None:
    found = interface_to(host_address())
    assert found is not None and found.name != "lo" and found.family in ("AF_INET", "AF_INET6")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "no.such.host.invalid", "a" * 70])
def test_what_other_hosts_do_not_reach(host: str) -> None:
    assert interface_to(host) is None
