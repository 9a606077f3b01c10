"""Two hosts, made of namespaces (scripts/two_hosts.sh): launchers start every operator there, and faults of the network
between them end in a named error, or are survived."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pe_processes import SLACK, clean_environment, wait_for
from two_hosts_pe import SECONDS
from worlds import python_path

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(300)]

_ROOT = Path(__file__).resolve().parents[3]
_PE = Path(__file__).with_name("two_hosts_pe.py")
_NO_HOSTS = 77
_HYDRA = shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent))


class Hosts:
    """The two hosts while they exist; commands are run on their controller."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        pid = str(process.pid)
        for _ in range(2):  # the script, unshare, the first process in the namespaces
            (pid,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        namespaces = ("--mount", "--uts", "--net", "--pid")
        self._enter = ["nsenter", "--target", pid, *namespaces, "--root", "--wd", "timeout", "120"]

    def start(self, command: str, **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = clean_environment(PATH=path, OMP_NUM_THREADS="1", **variables)
        environment["PYTHONPATH"] = python_path()
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*self._enter, "bash", "-c", command], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def run(self, command: str, **variables: str) -> str:
        """Run a command; return what it printed."""
        return self.start(command, **variables).communicate()[0]

    def reports(self, folder: Path, command: str, task: str, **variables: str) -> list[str]:
        """Start PEs by a command with the place {pe}; return what they report, in the order of their ranks."""
        printed = self.run(command.format(pe=f"{sys.executable} {_PE} {task} {folder}"), **variables)
        found = [file.read_text() for file in sorted(folder.glob("*.txt"))]
        assert found, printed
        print(printed)  # which pytest shows where a test fails
        return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    command = [str(_ROOT / "scripts/two_hosts.sh"), "sh", "-c", "echo ready; exec cat"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.readline() != "ready\n":
            text = process.stderr.read()
            if process.wait() == _NO_HOSTS:
                pytest.skip(text.strip().splitlines()[-1])
            pytest.fail(text)
        yield Hosts(process)
    finally:
        process.terminate()
        process.communicate()


_SRUN = "srun --mpi=none --kill-on-bad-exit=0 -N2"
_TORCHRUN = "NNODES=2 ENDPOINT=n1:29400 on {host} launch/torchrun.sh 2 {pe}"
LAUNCHERS = {
    "slurm": ("salloc -Q -N2 --ntasks-per-node=2 bash launch/slurm.sbatch {pe}", {}),
    "slurm with pmi2": (f"{_SRUN} --ntasks-per-node=2 --mpi=pmi2 {{pe}}", {}),
    "slurm over IPv6": (
        f"{_SRUN} --ntasks-per-node=2 {{pe}}",
        {"MASTER_ADDR": "fd77::11", "MASTER_PORT": "29533"},
    ),
    "hydra": (
        "launch/nvshmrun.sh 4 {pe}",
        {"HOSTS": "n1,n2", "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": "/usr/local/bin/on", "MASTER_ADDR": "n1"},
    ),
    "openmpi": (
        "launch/mpirun.sh 4 {pe}",
        {
            "HOSTS": "n1:2,n2:2",
            "MASTER_ADDR": "n1",
            "OMPI_MCA_plm_rsh_agent": "/usr/local/bin/on",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    ),
    "torchrun": (
        " & ".join(f"on {host} NNODES=2 ENDPOINT=n1:29400 launch/torchrun.sh 2 {{pe}}" for host in ("n1", "n2"))
        + " & wait",
        {},
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_operator(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    if launcher == "hydra" and _HYDRA is None:
        pytest.skip("mpiexec.hydra is not installed (pip install mpich)")
    command, variables = LAUNCHERS[launcher]
    found = hosts.reports(tmp_path, command, "operators", **variables)
    assert sorted(found) == [f"n{host} {local}/2 of 4: all right" for host in (1, 2) for local in (0, 1)]


def test_doctor_compares_the_ranks(hosts: Hosts) -> None:
    doctor = f"{sys.executable} -m persistent_ops doctor --ranks"
    found = hosts.run(
        f"{_SRUN} --ntasks-per-node=2 {doctor}", MASTER_ADDR="fd77::11", MASTER_PORT="29555", COLUMNS="200"
    )
    for line in ("n1 (ranks 0, 1); n2 (ranks 2, 3)", "all: eth0 AF_INET6", "all: none"):
        assert line in found, found
    assert found.count("What would help") <= 1  # one rank prints


def test_uneven_tasks(hosts: Hosts, tmp_path: Path) -> None:
    found = hosts.reports(tmp_path, f"{_SRUN} -n3 {{pe}}", "operators")
    assert sorted(found) == [f"n{place} of 3: all right" for place in ("1 0/2", "1 1/2", "2 0/1")]


@pytest.mark.parametrize("per_host", [1, 2])
def test_dead_rank(hosts: Hosts, per_host: int, tmp_path: Path) -> None:
    found = hosts.reports(tmp_path, f"{_SRUN} --ntasks-per-node={per_host} {{pe}}", "dead")
    assert len(found) == 2 * per_host - 1, found
    for text in found:
        match = re.search(rf"PeerLostError after (.*?) s: .*PE {2 * per_host - 1}", text)
        assert match and float(match[1]) < SECONDS + SLACK, text


def test_slow_link(hosts: Hosts, tmp_path: Path) -> None:
    """1 Mbit/s: an exchange of a few values takes a noticeable time."""
    for host in ("n1", "n2"):
        assert not hosts.run(f"on {host} tc qdisc add dev eth0 root tbf rate 1mbit burst 4kb latency 2s")
    try:
        found = hosts.reports(tmp_path, f"{_SRUN} --ntasks-per-node=2 {{pe}}", "operators")
    finally:
        for host in ("n1", "n2"):
            hosts.run(f"on {host} tc qdisc del dev eth0 root")
    assert len(found) == 4 and all(text.endswith("all right") for text in found), found


def test_no_route(hosts: Hosts, tmp_path: Path) -> None:
    routes = ("route {} blackhole 10.77.0.11/32", "-6 route {} blackhole fd77::11/128")
    for route in routes:
        hosts.run(f"on n2 ip {route.format('add')}")
    try:
        found = hosts.reports(tmp_path, f"{_SRUN} --ntasks-per-node=2 {{pe}}", "no_route")
    finally:
        for route in routes:
            hosts.run(f"on n2 ip {route.format('del')}")
    assert len(found) == 4
    for text in found:
        match = re.match(r"BootstrapError after (.*?) s: (.*)", text)
        assert match and float(match[1]) < SECONDS + SLACK, text
    print("\n".join(found))


def test_link_that_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """Silently: nobody is told of it."""
    processes = []
    for rank in range(4):
        numbers = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        variables = {name: str(value) for name, value in numbers.items()}
        command = f"on n{rank // 2 + 1} {sys.executable} {_PE} cut {tmp_path}"
        processes.append(hosts.start(command, MASTER_ADDR="n1", MASTER_PORT="29544", **variables))
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.joined"))) == 4, 120)
        assert not hosts.run("ip link set v2 nomaster")
        (tmp_path / "cut").touch()
        printed = [process.communicate()[0] for process in processes]
    finally:
        hosts.run("ip link set v2 master bridge")
    found = [file.read_text() for file in sorted(tmp_path.glob("*.txt"))]
    assert len(found) == 4, printed
    for text in found:
        match = re.search(r"all_reduce works; BootstrapError after (.*?) s: (.*)", text)
        assert match and float(match[1]) < SECONDS + SLACK, text
    print("\n".join(found))
