"""`detect` in the environments of launchers, and in environments that contradict themselves."""

from __future__ import annotations

import pytest

from persistent_ops.runtime.bootstrap.launchers import LaunchEnvironment, detect
from persistent_ops.runtime.errors import BootstrapError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "9", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node0-12@1",
}
# A batch script without srun: the variables of the allocation, and the variables of the batch step's only process.
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
SRUN_ONE_HOST = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "gpu07"}
OWN = {
    "PERSISTENT_OPS_RANK": "1",
    "PERSISTENT_OPS_WORLD_SIZE": "2",
    "PERSISTENT_OPS_STORE": "127.0.0.1:4321",
    "PERSISTENT_OPS_JOB": "token",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# environment -> launcher, rank, world size, local rank, local world size, rendezvous, host
GOOD = {
    "nothing": ({}, "single", 0, 1, 0, 1, "none", ""),
    "torchrun": (TORCHRUN, "torchrun", 5, 8, 1, 4, "store", "node0"),
    "torchrun of one": (
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        *("torchrun", 0, 1, 0, 1, "none", ""),
    ),
    "torchrun, store in rank 0": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        *("torchrun", 5, 8, 1, 4, "tcp", "node0"),
    ),
    "torchrun, one host, store in rank 0": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5"},
        *("torchrun", 5, 8, 5, 8, "local", ""),
    ),
    "torchrun inside srun": ({**SRUN, **TORCHRUN}, "torchrun", 5, 8, 1, 4, "store", "node0"),
    "torchrun inside mpiexec -n 1": (
        {**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"},
        *("torchrun", 5, 8, 1, 4, "store", "node0"),
    ),
    "by hand": (BY_HAND, "torchrun", 1, 2, None, None, "tcp", "node0"),
    "by hand on localhost": ({**BY_HAND, "MASTER_ADDR": "127.0.0.1"}, "torchrun", 1, 2, None, None, "local", ""),
    "hydra": (HYDRA, "hydra", 2, 3, 2, 3, "pmi", ""),
    "hydra of one": ({"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"}, "hydra", 0, 1, 0, 1, "none", ""),
    "hydra started by srun": (
        {
            **SRUN,
            **HYDRA,
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_LOCALID": "0",
        },
        *("hydra", 2, 3, 2, 3, "pmi", ""),
    ),
    "openmpi": (OPENMPI, "openmpi", 3, 4, 3, 4, "local", ""),
    "openmpi 4": (
        {**without(OPENMPI, "PMIX_NAMESPACE"), "OMPI_MCA_ess_base_jobid": "123"},
        *("openmpi", 3, 4, 3, 4, "local", ""),
    ),
    "openmpi, several hosts, address set": (
        {
            **OPENMPI,
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
        },
        *("openmpi", 3, 4, 1, 2, "tcp", "node0"),
    ),
    "openmpi, several hosts": (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        *("openmpi", 3, 4, 1, 2, "mpi", ""),
    ),
    "openmpi whose daemons srun started": ({**SRUN, **OPENMPI}, "openmpi", 3, 4, 3, 4, "local", ""),
    "batch script without srun": (SBATCH, "single", 0, 1, 0, 1, "none", ""),
    "by hand in a batch step": (
        {**SBATCH, "SLURM_STEP_ID": "4294967291", **BY_HAND},
        *("torchrun", 1, 2, None, None, "tcp", "node0"),
    ),
    "srun": (SRUN, "slurm", 3, 4, 1, 2, "tcp", "gpu07"),
    "srun with pmi2": ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}, "slurm", 3, 4, 1, 2, "tcp", "gpu07"),
    "srun, address set": ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "slurm", 3, 4, 1, 2, "tcp", "a"),
    "srun on one host": ({**SRUN_ONE_HOST, "SLURM_LOCALID": "3"}, "slurm", 3, 4, 3, 4, "local", ""),
    "srun with uneven hosts": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        *("slurm", 3, 4, 0, 1, "tcp", "gpu07"),
    ),
    "launch": (OWN, "persistent_ops", 1, 2, 1, 2, "store", "127.0.0.1"),
    "launch and the same numbers by hand": (
        {**OWN, **BY_HAND},
        *("persistent_ops", 1, 2, 1, 2, "store", "127.0.0.1"),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_finds_the_launcher(name: str) -> None:
    environ, *expected = GOOD[name]
    found = detect(environ)
    assert [
        *(found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size),
        *(found.rendezvous, found.host),
    ] == expected


# environment -> words that the message must contain
BAD = {
    "rank is the world size": ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    "negative rank": ({**BY_HAND, "RANK": "-1"}, ["RANK='-1'", "unset"]),
    "not a number": ({**HYDRA, "PMI_SIZE": "three"}, ["PMI_SIZE='three'", "unset"]),
    "empty": ({**HYDRA, "PMI_RANK": ""}, ["PMI_RANK=''"]),
    "rank without world size": ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE is not", "unset RANK"]),
    "world size without rank": ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK is not", "unset WORLD_SIZE"]),
    "srun without size": (
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ["SLURM_PROCID=3", "SLURM_NTASKS is not"],
    ),
    "no address": (without(BY_HAND, "MASTER_PORT"), ["MASTER_ADDR", "MASTER_PORT", "torchrun"]),
    "port is no number": ({**BY_HAND, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    "port is no port": ({**BY_HAND, "MASTER_PORT": "65536"}, ["MASTER_PORT='65536'"]),
    "torchrun without rank": (without(TORCHRUN, "RANK", "WORLD_SIZE"), ["TORCHELASTIC_RUN_ID", "RANK"]),
    "local rank out of range": ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE"]),
    "more local ranks than ranks": ({**HYDRA, "MPI_LOCALNRANKS": "4"}, ["MPI_LOCALNRANKS=4"]),
    "no PMI_FD": (without(HYDRA, "PMI_FD"), ["PMI_FD is not", "mpiexec"]),
    "PMI singleton in a larger world": (
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9", "WORLD_SIZE": "4"},
        ["WORLD_SIZE=4", "PMI_SIZE", "1 processes"],
    ),
    "PMI singleton, rank by hand": (
        {**BY_HAND, "PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"},
        ["PMI_RANK", "RANK", "rank 1 of 2", "unset"],
    ),
    "stale WORLD_SIZE under mpirun": ({**OPENMPI, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE", "4"]),
    "other rank by hand under srun": (
        {**SRUN, "RANK": "2", "WORLD_SIZE": "4"},
        ["SLURM_PROCID", "rank 3 of 4", "rank 2 of 4"],
    ),
    "hydra and Open MPI": ({**HYDRA, **OPENMPI}, ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "unset"]),
    "launch and torchrun": ({**OWN, **TORCHRUN}, ["PERSISTENT_OPS_RANK", "RANK and WORLD_SIZE", "rank 5 of 8"]),
    "launch without store": (without(OWN, "PERSISTENT_OPS_STORE"), ["PERSISTENT_OPS_STORE", "launch()"]),
    "launch with a bad store": ({**OWN, "PERSISTENT_OPS_STORE": "127.0.0.1"}, ["PERSISTENT_OPS_STORE", "host:port"]),
    "Open MPI job without a name": (without(OPENMPI, "PMIX_NAMESPACE"), ["PMIX_NAMESPACE", "MASTER_PORT"]),
    "Slurm tasks do not add up": (
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        ["SLURM_STEP_TASKS_PER_NODE", "4 tasks"],
    ),
    "Slurm tasks unreadable": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x"}, ["SLURM_STEP_TASKS_PER_NODE='2x'"]),
    "Slurm without node list": (without(SRUN, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
    "Slurm with a bad node list": ({**SRUN, "SLURM_STEP_NODELIST": "]["}, ["SLURM_STEP_NODELIST=']['"]),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_contradictions(name: str) -> None:
    environ, words = BAD[name]
    with pytest.raises(BootstrapError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-12,20],cpu3", "gpu07"),
        ("gpu[9,11]", "gpu9"),
        ("rack[2-3]-node[05-06]", "rack2-node05"),
        ("node[1-2].cluster", "node1.cluster"),
    ],
)
def test_first_host_of_a_slurm_step(nodes: str, first: str) -> None:
    assert detect({**SRUN, "SLURM_STEP_NODELIST": nodes}).host == first


def test_slurm_ranks_agree_on_the_port_and_steps_differ() -> None:
    ports = {
        step: {
            detect({**SRUN, "SLURM_STEP_ID": step, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2)}).port
            for rank in range(4)
        }
        for step in ("0", "1")
    }
    assert all(len(found) == 1 for found in ports.values())
    assert ports["0"] != ports["1"]
    assert all(1024 <= port < 32768 for found in ports.values() for port in found)


def test_restarts_and_jobs_are_told_apart() -> None:
    jobs = [
        detect(TORCHRUN).job,
        detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).job,
        detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": "other"}).job,
        detect(SRUN_ONE_HOST).job,
        detect({**SRUN_ONE_HOST, "SLURM_JOB_ID": "78"}).job,
    ]
    assert len(set(jobs)) == len(jobs)


def test_address_and_token_are_not_shown() -> None:
    text = repr(detect(OWN))
    assert "token" not in text
    assert "4321" not in text
    assert isinstance(detect(OWN), LaunchEnvironment)
