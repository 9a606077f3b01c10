"""The RDMA network of a machine, as its files under /sys, /proc and /dev describe it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .findings import Finding

__all__ = ["Device", "devices", "examine_network"]

_SECTION = "Network of several hosts"
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # vendor and classes of PCI
_ACTIVE, _ROUTED = "ACTIVE", "RoCE v2"
_LINK_LOCAL = "fe80:"
_OLDEST_DMA_BUF = (5, 12)  # version of Linux
_USUAL_PREFIX = "mlx5"  # NVSHMEM takes devices with other names only where NVSHMEM_HCA_PREFIX says so


@dataclasses.dataclass(frozen=True)
class Device:
    """A port of an RDMA device (a host channel adapter, HCA).

    Attributes:
        name: of the device.
        port: its number.
        state: such as "ACTIVE".
        rate: such as "400 Gb/sec (4X NDR)".
        link: "InfiniBand" or "Ethernet".
        routed_gid: the first index of a GID of RoCE version 2 that is not link-local; None where there is none.
        place: the device's folder under /sys/devices.
    """

    name: str
    port: str
    state: str
    rate: str
    link: str
    routed_gid: int | None
    place: Path


def devices(root: Path = Path("/")) -> list[Device]:
    """Return the ports of all RDMA devices, by name."""
    found = []
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        state = _text(port / "state").rpartition(": ")[2]
        types = {int(file.name): _text(file) for file in port.glob("gid_attrs/types/*")}
        local = {index for index in types if _text(port / f"gids/{index}").startswith(_LINK_LOCAL)}
        routed = min((index for index, kind in types.items() if kind == _ROUTED and index not in local), default=None)
        device = port.parent.parent
        place = (device / "device").resolve()
        link, rate = _text(port / "link_layer"), _text(port / "rate")
        found.append(Device(device.name, port.name, state, rate, link, routed, place))
    return found


def examine_network(heap_bytes: int, locked_bytes: float, root: Path = Path("/")) -> list[Finding]:
    """Return what PEs of several hosts would find here.

    Args:
        heap_bytes: of a PE's symmetric heap, which the network pins.
        locked_bytes: that a process may pin.
        root: where /sys, /proc and /dev are looked for.
    """
    ports = devices(root)
    if not ports:
        text = "no RDMA device: PEs on GPUs of several hosts need InfiniBand or RoCE"
        return [Finding(_SECTION, "devices", "info", text)]
    findings = [_port(each) for each in ports]
    prefix = os.environ.get("NVSHMEM_HCA_PREFIX", _USUAL_PREFIX)
    names = sorted({port.name for port in ports})
    if not any(name.startswith(prefix) for name in names):
        remedy = f"set NVSHMEM_HCA_PREFIX={re.sub(r'[_0-9]*$', '', names[0])} on all hosts"
        text = f"{', '.join(names)}: none begins with {prefix}, so NVSHMEM takes none"
        findings.append(Finding(_SECTION, "names of devices", "warning", text, remedy))
    findings += _distances(root, [port for port in ports if port.state == _ACTIVE])
    findings += [*_registration(root), *_permissions(root), *_initiation(root)]
    return findings + _memory(heap_bytes, locked_bytes, root)


def _port(port: Device) -> Finding:
    name, text = f"{port.name} port {port.port}", f"{port.rate}, {port.link}, {port.state}"
    if port.state != _ACTIVE:
        return Finding(_SECTION, name, "warning", text, "ibv_devinfo; check the cable and the switch")
    if port.link == "Ethernet":
        if port.routed_gid is None:
            remedy = "give the interface of this port an IP address"
            return Finding(_SECTION, name, "warning", f"{text}, no GID of RoCE version 2", remedy)
        text = f"{text}, GID {port.routed_gid} (RoCE version 2)"
    return Finding(_SECTION, name, "ok", text)


def _distances(root: Path, ports: Sequence[Device]) -> list[Finding]:
    """Return the closest device of each GPU."""
    findings = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        if _text(folder / "vendor") != _NVIDIA or not _text(folder / "class").startswith(_DISPLAYS):
            continue
        ranked = sorted((_distance(folder.resolve(), port.place), port.name) for port in ports)
        if ranked:
            distance, closest = ranked[0]
            is_far = distance == len(_PLACES) - 1
            remedy = "bind the PE to another GPU, or see NVSHMEM_HCA_PE_MAPPING" if is_far else ""
            text = f"{closest}, {_PLACES[distance]}"
            findings.append(Finding(_SECTION, f"GPU at {folder.name}", "warning" if is_far else "ok", text, remedy))
    return findings


_PLACES = ("under one PCIe switch", "under one host bridge", "of one NUMA node", "of another NUMA node")


def _distance(one: Path, other: Path) -> int:
    """Return the place in `_PLACES` of two PCI devices to each other."""
    shared = [a for a, b in zip(one.parts, other.parts, strict=False) if a == b]
    bridges = [part for part in shared if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:.*", part)]
    if any(part.startswith("pci") for part in shared):
        return 0 if bridges else 1
    nodes = {_text(each / "numa_node") for each in (one, other)}
    return 2 if len(nodes) == 1 and nodes.isdisjoint({"", "-1"}) else 3


def _registration(root: Path) -> list[Finding]:
    """Return whether a device can read and write a GPU's memory."""
    name = "GPU memory for devices"
    if (root / "sys/module/nvidia_peermem").exists():
        return [Finding(_SECTION, name, "ok", "nvidia_peermem is loaded")]
    release = re.match(r"(\d+)\.(\d+)", _text(root / "proc/sys/kernel/osrelease"))
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    if "Open Kernel Module" in _text(root / "proc/driver/nvidia/version") and version >= _OLDEST_DMA_BUF:
        return [Finding(_SECTION, name, "ok", "dma-buf, by the driver's open kernel modules")]
    text = "neither nvidia_peermem nor a driver with dma-buf (open kernel modules, Linux 5.12)"
    return [Finding(_SECTION, name, "warning", text, "modprobe nvidia_peermem")]


def _permissions(root: Path) -> list[Finding]:
    name, found = "access to devices", sorted(root.glob("dev/infiniband/uverbs*"))
    closed = [each.name for each in found if not os.access(each, os.R_OK | os.W_OK)]
    if not found:
        text = "no /dev/infiniband/uverbs*: in a container, pass the devices"
        return [Finding(_SECTION, name, "warning", text, "docker run --device=/dev/infiniband --cap-add=IPC_LOCK ...")]
    if closed:
        text = f"{', '.join(closed)} cannot be read and written"
        return [Finding(_SECTION, name, "warning", text, "chmod 666 /dev/infiniband/uverbs*, or a group of your own")]
    return [Finding(_SECTION, name, "ok", ", ".join(each.name for each in found))]


def _initiation(root: Path) -> list[Finding]:
    """Return how puts of kernels begin: by the GPU itself (IBGDA), or by a thread of the host (IBRC)."""
    asked = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0").lower() not in ("", "0", "false", "no")
    parameters = _text(root / "proc/driver/nvidia/params")
    can_map = "PeerMappingOverride=1" in parameters
    has_copies = (root / "sys/module/gdrdrv").exists()
    text = f"PeerMappingOverride {'set' if can_map else 'not set'}, GDRCopy {'loaded' if has_copies else 'not loaded'}"
    if not asked:
        return [Finding(_SECTION, "who begins a put", "info", f"a thread of the host (IBRC); {text}")]
    if can_map or has_copies:
        return [Finding(_SECTION, "who begins a put", "ok", f"the GPU (IBGDA); {text}")]
    remedy = 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;" in /etc/modprobe.d, or load gdrdrv'
    return [Finding(_SECTION, "who begins a put", "warning", f"the GPU, with a thread's help (IBGDA); {text}", remedy)]


def _memory(heap_bytes: int, locked_bytes: float, root: Path) -> list[Finding]:
    findings, name = [], "locked memory (ulimit -l)"
    if locked_bytes < heap_bytes:
        text = f"{locked_bytes / 2**20:.0f} MiB, and the heap has {heap_bytes / 2**20:.0f}"
        findings.append(Finding(_SECTION, name, "warning", text, "ulimit -l unlimited (under Slurm: LimitMEMLOCK)"))
    if any(root.glob("sys/class/iommu/*")) and "iommu=pt" not in _text(root / "proc/cmdline"):
        text = "translates the devices' addresses, which costs bandwidth"
        findings.append(Finding(_SECTION, "IOMMU", "warning", text, "iommu=pt on the kernel's command line"))
    return findings


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
