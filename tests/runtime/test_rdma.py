"""What the doctor reports of RDMA networks: machines that are right, and machines that are wrong in one way."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from persistent_ops import ranks
from persistent_ops.findings import Finding
from persistent_ops.rdma import examine_network

GB = 1 << 30
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95"
NIC, GPU = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", "pci0000:15/0000:15:01.0/0000:16:01.0/0000:18:00.0"


class Machine:
    """A tree with the files that are read: a GPU and an active InfiniBand port under one PCIe switch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.locked_bytes = math.inf
        self.write("sys/module/nvidia_peermem/refcnt", "0")
        self.write("sys/module/gdrdrv/refcnt", "0")
        self.write("dev/infiniband/uverbs0", "")
        self.write("proc/driver/nvidia/params", 'RegistryDwords: "PeerMappingOverride=1;"')
        self.gpu(GPU)
        self.device("mlx5_0", NIC)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def gpu(self, place: str) -> None:
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "0")):
            self.write(f"sys/devices/{place}/{name}", text)
        link = self.root / "sys/bus/pci/devices" / Path(place).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / "sys/devices" / place)

    def device(self, name: str, place: str, link: str = "InfiniBand", state: str = "4: ACTIVE") -> None:
        port = f"sys/class/infiniband/{name}/ports/1"
        self.write(f"sys/devices/{place}/numa_node", "0")
        for file, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", link)):
            self.write(f"{port}/{file}", text)
        (self.root / f"sys/class/infiniband/{name}/device").symlink_to(self.root / "sys/devices" / place)

    def remove(self, path: str) -> None:
        file = self.root / path
        if file.is_dir() and not file.is_symlink():
            for each in sorted(file.rglob("*"), reverse=True):
                each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()
            file.rmdir()
        else:
            file.unlink()

    def findings(self) -> list[Finding]:
        return examine_network(4 * GB, self.locked_bytes, self.root)


def _move_gpu(machine: Machine, place: str, node: str) -> None:
    machine.remove(f"sys/bus/pci/devices/{Path(GPU).name}")
    machine.gpu(place)
    machine.write(f"sys/devices/{place}/numa_node", node)


def _roce(machine: Machine, *kinds: str) -> None:
    machine.remove("sys/class/infiniband/mlx5_0")
    machine.device("mlx5_0", NIC, link="Ethernet")
    for index, kind in enumerate(kinds):
        machine.write(f"sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}", kind)
        address = "fe80:0000:0000:0000:0000:0000:0000:0001" if index < 2 else "0000:0000:0000:0000:0000:ffff:0a00:0001"
        machine.write(f"sys/class/infiniband/mlx5_0/ports/1/gids/{index}", address)


def _rename(machine: Machine) -> None:
    machine.remove("sys/class/infiniband/mlx5_0")
    machine.device("ibp23s0", NIC)


def _down(machine: Machine) -> None:
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")


def _no_peermem(machine: Machine, release: str, driver: str = DRIVER) -> None:
    machine.remove("sys/module/nvidia_peermem")
    machine.write("proc/sys/kernel/osrelease", release)
    machine.write("proc/driver/nvidia/version", driver)


def _iommu(machine: Machine, line: str) -> None:
    machine.write("sys/class/iommu/dmar0/uevent", "")
    machine.write("proc/cmdline", line)


def _small_limit(machine: Machine) -> None:
    machine.locked_bytes = 8 << 20


def test_a_machine_that_is_right(tmp_path: Path) -> None:
    found = Machine(tmp_path).findings()
    assert {each.status for each in found} == {"ok", "info"}
    values = {each.name: each.value for each in found}
    assert values["mlx5_0 port 1"] == "400 Gb/sec (4X NDR), InfiniBand, ACTIVE"
    assert values["GPU at 0000:18:00.0"] == "mlx5_0, under one PCIe switch"


def test_a_machine_without_devices(tmp_path: Path) -> None:
    (found,) = examine_network(4 * GB, 0, tmp_path)
    assert found.status == "info" and "no RDMA device" in found.value


WRONG: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    "port is down": (_down, "mlx5_0 port 1", "DOWN"),
    "RoCE version 1": (lambda m: _roce(m, "IB/RoCE v1"), "mlx5_0 port 1", "no GID of RoCE version 2"),
    "link-local GID": (lambda m: _roce(m, "IB/RoCE v1", "RoCE v2"), "mlx5_0 port 1", "no GID of RoCE version 2"),
    "another prefix": (_rename, "names of devices", "ibp23s0: none begins with mlx5"),
    "another NUMA node": (
        lambda m: _move_gpu(m, "pci0000:80/0000:80:01.0/0000:81:00.0", "1"),
        "GPU at 0000:81:00.0",
        "mlx5_0, of another NUMA node",
    ),
    "closed driver": (lambda m: _no_peermem(m, "6.1.0", "NVIDIA UNIX x86_64 Kernel Module"), "GPU memory", "neither"),
    "old Linux": (lambda m: _no_peermem(m, "5.4.0-100"), "GPU memory for devices", "neither nvidia_peermem nor"),
    "a container": (lambda m: m.remove("dev/infiniband"), "access to devices", "pass the devices"),
    "little locked memory": (_small_limit, "locked memory (ulimit -l)", "8 MiB, and the heap has 4096"),
    "IOMMU": (lambda m: _iommu(m, "quiet splash"), "IOMMU", "translates"),
}


@pytest.mark.parametrize("name", WRONG)
def test_machines_that_are_wrong_in_one_way(name: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    change, of, text = WRONG[name]
    change(machine)
    found = [each for each in machine.findings() if each.status == "warning"]
    assert len(found) == 1 and found[0].name.startswith(of) and text in found[0].value and found[0].remedy, found


RIGHT: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    "RoCE version 2": (
        lambda m: _roce(m, "IB/RoCE v1", "RoCE v2", "IB/RoCE v1", "RoCE v2"),
        "mlx5_0 port 1",
        "GID 3 (RoCE version 2)",
    ),
    "one host bridge": (
        lambda m: _move_gpu(m, "pci0000:15/0000:19:00.0", "0"),
        "GPU at 0000:19:00.0",
        "mlx5_0, under one host bridge",
    ),
    "one NUMA node": (
        lambda m: _move_gpu(m, "pci0000:30/0000:30:01.0/0000:31:00.0", "0"),
        "GPU at 0000:31:00.0",
        "mlx5_0, of one NUMA node",
    ),
    "dma-buf": (lambda m: _no_peermem(m, "6.8.0-generic"), "GPU memory for devices", "dma-buf"),
    "IOMMU passes through": (lambda m: _iommu(m, "quiet iommu=pt"), "access to devices", "uverbs0"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_machines_that_are_right_in_another_way(name: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    change, of, text = RIGHT[name]
    change(machine)
    found = machine.findings()
    assert not [each for each in found if each.status == "warning"], found
    assert any(each.name == of and text in each.value for each in found), found


def test_devices_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = next(each for each in Machine(tmp_path).findings() if each.name == "access to devices")
    assert found.status == "warning" and "uverbs0 cannot be read" in found.value


@pytest.mark.parametrize(("asked", "status"), [("0", "info"), ("1", "warning")])
def test_who_begins_a_put(asked: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", asked)
    machine = Machine(tmp_path)
    machine.remove("sys/module/gdrdrv")
    machine.write("proc/driver/nvidia/params", 'RegistryDwords: ""')
    (found,) = (each for each in machine.findings() if each.name == "who begins a put")
    assert found.status == status and "PeerMappingOverride not set" in found.value


def test_ranks_that_differ() -> None:
    one = ranks.Seen("n1", "a", "eth0 AF_INET", "mlx5_0/1 400 Gb/sec", "torch 2.11")
    far = dataclasses.replace(one, host="n2", machine="b")
    assert {each.status for each in ranks.compare([one, one, far])} == {"ok"}
    cases = {
        "host names": dataclasses.replace(far, host="n1"),
        "interface to rank 0": dataclasses.replace(far, interface="docker0 AF_INET"),
        "RDMA ports": dataclasses.replace(far, ports="none"),
        "packages": dataclasses.replace(far, versions="torch 2.12"),
    }
    for name, other in cases.items():
        found = [each for each in ranks.compare([one, one, other]) if each.status == "warning"]
        assert [each.name for each in found] == [name] and found[0].remedy
