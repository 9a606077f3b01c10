"""The network interface through which a PE reaches rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from persistent_ops.runtime.bootstrap.connection import Bootstrap
from persistent_ops.runtime.bootstrap.rendezvous import own_address
from persistent_ops.runtime.errors import BootstrapError

__all__ = ["Interface", "interface_to", "meeting_interface"]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_REQUEST = struct.Struct("16s24x")


class Interface(NamedTuple):
    """A network interface.

    Attributes:
        name: such as "eth0".
        family: "AF_INET" or "AF_INET6"; "" for either.
    """

    name: str
    family: str = ""


def meeting_interface(bootstrap: Bootstrap) -> Interface | None:
    """Return the interface through which this PE reaches rank 0; None if it is not known. Collective."""
    if bootstrap.single_host:
        return Interface("lo")
    mine = b""
    if bootstrap.rank == 0:
        with contextlib.suppress(BootstrapError):
            mine = own_address().encode()
    address = bootstrap.exchange("address of rank 0", mine)[0].decode()
    return interface_to(address) if address else None


def interface_to(host: str) -> Interface | None:
    """Return the interface through which a host name or an address is reached; None if there is no route.

    For an address of this host: the interface that has it. None for the loopback interface's, which no other host
    reaches.
    """
    with contextlib.suppress(OSError, UnicodeError):
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        if own.is_loopback:
            return None
        found = next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)
        return None if found is None else Interface(found, socket.AddressFamily(family).name)
    return None


def _addresses(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    request = ctypes.create_string_buffer(_REQUEST.pack(interface.encode()), _REQUEST.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        fcntl.ioctl(asked, _GET_ADDRESS, request)
        found.add(ipaddress.IPv4Address(request.raw[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if name == interface:
                found.add(ipaddress.IPv6Address(int(address, 16)))
    return found
