"""Read from the environment which launcher started this process, its rank, and how it can reach rank 0.

This module only reads variables: it connects to nothing, opens nothing and imports nothing. The result goes to
`bootstrap.connect`. Several launchers may set variables at once (`srun torchrun`, `mpirun` in a Slurm step). The inner
launcher counts if its own variables prove that it is the inner one. An unexplained disagreement is an error, because a
guess would start a job with the wrong world.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from persistent_ops.runtime.errors import BootstrapError

__all__ = ["LAUNCHER_VARIABLES", "LaunchEnvironment", "detect", "local_numbers"]

# Variables that a launcher sets for one process, and that are wrong in a process started by that process.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"),
    *("PERSISTENT_OPS_RANK", "PERSISTENT_OPS_WORLD_SIZE", "PERSISTENT_OPS_STORE", "PERSISTENT_OPS_JOB"),
)

# Slurm numbers the steps that are not made by srun (batch script, interactive shell, external) from here on.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class LaunchEnvironment:
    """The knowledge of one process about its job before it communicates.

    Args:
        launcher: "torchrun", "hydra", "openmpi", "slurm", "persistent_ops" (`po.launch`) or "single" (no launcher).
        rank: This process' number, 0 <= rank < world_size.
        world_size: Number of processes (PEs) of the job.
        local_rank: Number among the processes of this host; None where the launcher does not say.
        local_world_size: Number of processes on this host; None where the launcher does not say.
        rendezvous: How rank 0 is reached. "none": there is no other rank. "store": a process already serves a store at
            `host`:`port`. "tcp": rank 0 serves it there. "local": rank 0 hands out its port over a Unix socket named
            after `job`. "pmi": over Hydra's process manager. "mpi": over mpi4py's communicator.
        host: Name or address of the store, or "".
        port: Port of the store, or 0.
        job: Identifies this job (or this restart of it) among all jobs.
        pmi_fd: File descriptor of the connection to Hydra, or None.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    rendezvous: str = "none"
    host: str = field(default="", repr=False)
    port: int = field(default=0, repr=False)
    job: str = field(default="", repr=False)
    pmi_fd: int | None = None


def detect(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Find out from the environment alone which launcher started this process.

    Args:
        environ: The environment variables, normally `os.environ`.

    Returns:
        The launcher, this process' rank, the world size and how to reach rank 0. A world of one where no launcher
        speaks, also inside a Slurm allocation without `srun`.

    Raises:
        BootstrapError: Variables are missing, are not numbers, or contradict each other; the message names them.
    """
    own, elastic, step = _own(environ), _elastic(environ), _slurm(environ)
    hydra, openmpi = _hydra(environ, step), _openmpi(environ)
    started = own or hydra or openmpi or step
    by_hand = None if elastic else _by_hand(environ, started)

    if own is not None:
        # po.launch removes the other launchers' variables from its children, so these variables were set later.
        for other in (elastic, by_hand, hydra, openmpi):
            _must_agree(own, other)
        return own
    if elastic is not None:
        # torchrun starts processes, mpirun or srun may have started torchrun (one agent per host): torchrun is inner.
        return elastic
    if hydra is not None and openmpi is not None:
        _must_agree(hydra, openmpi)
    if started is not None:
        _must_agree(started, by_hand)
        _world_size_must_agree(environ, started)
        return _with_address(environ, started)
    if by_hand is not None:
        return by_hand
    return LaunchEnvironment("single", 0, 1, 0, 1)


def local_numbers(environ: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Return this process' local rank and, if the launcher gives it, the number of processes on this host.

    For processes that meet without a launcher's help (a torch.distributed group): what is missing or contradicts
    itself is no error then.
    """
    try:
        found = detect(environ)
        if found.launcher == "single" and "LOCAL_RANK" in environ:
            local = _local_numbers(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", 0, sys.maxsize)
        else:
            local = (None, None) if found.launcher == "single" else (found.local_rank, found.local_world_size)
    except BootstrapError:
        return None
    return None if local[0] is None else (local[0], local[1])


_NAMES = {
    "persistent_ops": "PERSISTENT_OPS_RANK and PERSISTENT_OPS_WORLD_SIZE",
    "torchrun": "RANK and WORLD_SIZE",
    "hydra": "PMI_RANK and PMI_SIZE",
    "openmpi": "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
    "slurm": "SLURM_PROCID and SLURM_STEP_NUM_TASKS",
}


def _own(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    numbers = _rank_and_size(environ, "PERSISTENT_OPS_RANK", "PERSISTENT_OPS_WORLD_SIZE")
    if numbers is None:
        return None
    rank, world_size = numbers
    host, _, port = environ.get("PERSISTENT_OPS_STORE", "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BootstrapError(
            "PERSISTENT_OPS_STORE must be host:port when PERSISTENT_OPS_RANK is set, and is missing or malformed; "
            "start the processes with persistent_ops.launch(), or unset PERSISTENT_OPS_RANK and "
            "PERSISTENT_OPS_WORLD_SIZE"
        )
    job = environ.get("PERSISTENT_OPS_JOB", "")
    return LaunchEnvironment(
        "persistent_ops", rank, world_size, rank, world_size, "store", host.strip("[]"), int(port), job
    )


def _elastic(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return torchrun's values, if it is certain that torchrun started this process."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    numbers = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if numbers is None:
        raise BootstrapError(
            "TORCHELASTIC_RUN_ID is set, but RANK and WORLD_SIZE are not: something between torchrun and this process "
            "removed them; pass the environment on, or unset TORCHELASTIC_RUN_ID"
        )
    return _torch(environ, *numbers)


def _by_hand(environ: Mapping[str, str], started: LaunchEnvironment | None) -> LaunchEnvironment | None:
    """Return the values of torch.distributed's variables if torchrun did not set them."""
    if started is not None and "RANK" not in environ:
        return None  # A bare WORLD_SIZE beside a real launcher is compared with it by _world_size_must_agree.
    numbers = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if numbers is None:
        return None
    return _torch(environ, *numbers) if started is None else LaunchEnvironment("torchrun", *numbers)


def _torch(environ: Mapping[str, str], rank: int, world_size: int) -> LaunchEnvironment:
    local = _local_numbers(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", rank, world_size)
    found = LaunchEnvironment("torchrun", rank, world_size, *local)
    if world_size == 1:
        return found
    address = _master(environ)
    if address is None:
        raise BootstrapError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but MASTER_ADDR and MASTER_PORT are not; set both to "
            "rank 0's host and a free port, or start the job with torchrun"
        )
    host, port = address
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    job = f"torchrun/{run}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return replace(found, rendezvous="store", host=host, port=port, job=job)
    if local[1] == world_size or host in ("localhost", "::1") or host.startswith("127."):
        # MASTER_PORT stays free for torch.distributed itself.
        return replace(found, rendezvous="local", job=f"{job}/{port}")
    return replace(found, rendezvous="tcp", host=host, port=port, job=job)


def _hydra(environ: Mapping[str, str], step: LaunchEnvironment | None) -> LaunchEnvironment | None:
    numbers = _rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    if numbers is None:
        return None
    rank, world_size = numbers
    if step is not None and "MPI_LOCALRANKID" not in environ and (step.rank, step.world_size) == numbers:
        return None  # srun --mpi=pmi2 sets PMI_RANK too, but does not speak Hydra's protocol.
    local = _local_numbers(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", rank, world_size)
    found = LaunchEnvironment("hydra", rank, world_size, *local)
    if world_size == 1:
        return found
    if "PMI_FD" not in environ:
        raise BootstrapError(
            f"PMI_RANK={rank} and PMI_SIZE={world_size} are set, but PMI_FD is not, so Hydra cannot be reached; start "
            "the job with mpiexec.hydra or nvshmrun without -pmi-port, or unset PMI_RANK and PMI_SIZE"
        )
    return replace(found, rendezvous="pmi", pmi_fd=_number(environ, "PMI_FD"))


def _openmpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    numbers = _rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if numbers is None:
        return None
    rank, world_size = numbers
    local = _local_numbers(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", rank, world_size)
    # Open MPI 5 numbers its jobs in PMIX_NAMESPACE, Open MPI 4 in the second one.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return LaunchEnvironment("openmpi", rank, world_size, *local, job=f"openmpi/{job}" if job else "")


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return srun's values, or None in a batch script, which has SLURM_PROCID and SLURM_NTASKS but is no task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    step = _number(environ, "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_SLURM_STEP:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    numbers = _rank_and_size(environ, "SLURM_PROCID", size_name)
    assert numbers is not None  # SLURM_PROCID is there.
    rank, world_size = numbers
    local_size = _slurm_tasks_here(environ, world_size)
    local_rank = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else None
    _check_local("SLURM_LOCALID", local_rank, "SLURM_STEP_TASKS_PER_NODE", local_size, world_size)
    job = f"slurm/{environ.get('SLURM_JOB_ID', '')}/{step}/{environ.get('SLURM_RESTART_COUNT', '0')}"
    return LaunchEnvironment("slurm", rank, world_size, local_rank, local_size, job=job)


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int | None:
    """Return the number of the step's tasks on this host from "4(x2),3": four on two hosts, three on the next."""
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return world_size
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks is None or "SLURM_NODEID" not in environ:
        return None
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", tasks):
        raise BootstrapError(f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not of Slurm's form 4(x2),3; unset it")
    per_node = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))
    ]
    node = _number(environ, "SLURM_NODEID")
    if node >= len(per_node) or sum(per_node) != world_size:
        raise BootstrapError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks!r} contradicts SLURM_NODEID={node} and the step's {world_size} tasks; "
            "start every rank with the same srun"
        )
    return per_node[node]


def _with_address(environ: Mapping[str, str], found: LaunchEnvironment) -> LaunchEnvironment:
    """Add how rank 0 is reached under Open MPI and Slurm, which bring nothing for that which Python can use."""
    if found.world_size == 1 or found.launcher == "hydra":
        return found
    address = _master(environ)
    if found.local_world_size == found.world_size:
        if found.job:
            return replace(found, rendezvous="local")
        if address is not None:
            return replace(found, rendezvous="local", job=f"{found.launcher}/{address[1]}")
        raise BootstrapError(
            "neither PMIX_NAMESPACE nor OMPI_MCA_ess_base_jobid is set, so this Open MPI job has no name; set "
            "MASTER_ADDR to localhost and MASTER_PORT to a number that no other job on this machine uses"
        )
    if address is not None:
        job = found.job or found.launcher
        return replace(found, rendezvous="tcp", host=address[0], port=address[1], job=job)
    if found.launcher == "openmpi":
        return replace(found, rendezvous="mpi")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise BootstrapError(
            "SLURM_STEP_NODELIST is not set, so rank 0's host is unknown; set MASTER_ADDR and MASTER_PORT"
        )
    # Below the ports that Linux gives to outgoing connections (32768 up), and another one for each step.
    port = 15000 + zlib.crc32(found.job.encode()) % 15000
    return replace(found, rendezvous="tcp", host=_first_host(nodes), port=port)


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as "node[03-07,9],gpu1"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if first is None:
        raise BootstrapError(f"SLURM_STEP_NODELIST={nodes!r} is not a Slurm node list; set MASTER_ADDR and MASTER_PORT")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port:
        return None
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise BootstrapError(f"MASTER_PORT={port!r} is not a port; set it to a free port of rank 0's host (1 to 65535)")
    return host, int(port)


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int] | None:
    present = [name for name in (rank_name, size_name) if name in environ]
    if not present:
        return None
    if len(present) == 1:
        absent = size_name if present == [rank_name] else rank_name
        raise BootstrapError(
            f"{present[0]}={environ[present[0]]} is set, but {absent} is not; set both, or unset {present[0]} to run "
            "alone"
        )
    rank, world_size = _number(environ, rank_name), _number(environ, size_name)
    if world_size < 1 or rank >= world_size:
        raise BootstrapError(
            f"{rank_name}={rank} and {size_name}={world_size} contradict each other: a rank counts from 0 to the world "
            "size - 1; correct the launcher's options, or unset both to run alone"
        )
    return rank, world_size


def _local_numbers(
    environ: Mapping[str, str], rank_name: str, size_name: str, rank: int, world_size: int
) -> tuple[int | None, int | None]:
    local_rank = _number(environ, rank_name) if rank_name in environ else None
    local_size = _number(environ, size_name) if size_name in environ else None
    _check_local(rank_name, local_rank, size_name, local_size, world_size)
    if local_size == world_size and local_rank is None:
        local_rank = rank
    return (0, 1) if world_size == 1 else (local_rank, local_size)


def _check_local(
    rank_name: str, local_rank: int | None, size_name: str, local_size: int | None, world_size: int
) -> None:
    if local_size is not None and not 1 <= local_size <= world_size:
        raise BootstrapError(
            f"{size_name}={local_size} contradicts the world size {world_size}; it counts the ranks of this host"
        )
    limit = world_size if local_size is None else local_size
    if local_rank is not None and local_rank >= limit:
        raise BootstrapError(
            f"{rank_name}={local_rank} is out of range: this host has at most {limit} ranks of the job ({size_name}); "
            "correct the launcher's options"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise BootstrapError(
            f"{name}={environ[name]!r} is not a whole number >= 0; the launcher sets it, unset it to run without one"
        )
    return int(text)


def _must_agree(found: LaunchEnvironment, other: LaunchEnvironment | None) -> None:
    if other is None or (other.rank, other.world_size) == (found.rank, found.world_size):
        return
    raise BootstrapError(
        f"two launchers claim this process: {_NAMES[found.launcher]} say rank {found.rank} of {found.world_size}, "
        f"{_NAMES[other.launcher]} say rank {other.rank} of {other.world_size}; unset the variables of the one that "
        "did not start it"
    )


def _world_size_must_agree(environ: Mapping[str, str], found: LaunchEnvironment) -> None:
    if "WORLD_SIZE" not in environ:
        return
    expected = _number(environ, "WORLD_SIZE")
    if expected != found.world_size:
        raise BootstrapError(
            f"WORLD_SIZE={expected}, but {_NAMES[found.launcher]} say that {found.world_size} processes were started; "
            f"start {expected} processes, or unset WORLD_SIZE"
        )
