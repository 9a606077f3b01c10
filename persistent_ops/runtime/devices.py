"""Choice of a PE's GPU, and the check that the PEs' choices work together, decided from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import BootstrapError

__all__ = ["Numbers", "architecture", "check_sharing", "choose_device"]


class Numbers(NamedTuple):
    """A process' place among the processes of its host.

    Attributes:
        rank: its number among them.
        size: how many they are; None where that is not known.
    """

    rank: int
    size: int | None


def architecture(major: int, minor: int) -> str:
    """Return what code for GPUs of a compute capability is compiled for, as nvcc spells it."""
    return f"sm_{major}{minor}"


def choose_device(count: int, *, current: int | None, of_job: Numbers | None, of_world: Numbers) -> int:
    """Return the index of the GPU that this PE takes.

    The device that the user has chosen; else the device of the launcher's local rank, since the PEs of a world may be
    a part of a job; else the device of the PE's place in its world.

    Args:
        count: GPUs that this process sees, at least 1.
        current: torch's current device where this process has initialized CUDA, which setting a device does; else
            None.
        of_job: the launcher's numbers, if it gives any.
        of_world: this PE among the world's on this host.
    """
    if current is not None:
        return current
    rank, size = of_job or of_world
    if size is not None and size > count:
        # Too few GPUs for one each. Each gets equally many PEs; otherwise NVSHMEM does not start.
        count = max(number for number in range(1, count + 1) if size % number == 0)
    return rank % count


def check_sharing(uuids: Sequence[str], rank: int) -> str:
    """Return the warning for PE `rank` about the GPU that it shares; "" if it has its own GPU.

    Args:
        uuids: of each PE's GPU, in rank order.
        rank: this PE.

    Raises:
        BootstrapError: some GPUs have more PEs than others, with which NVSHMEM's start does not end.
    """
    sharers: dict[str, list[int]] = {}
    for pe, uuid in enumerate(uuids):
        sharers.setdefault(uuid, []).append(pe)
    if len({len(pes) for pes in sharers.values()}) > 1:
        listed = "; ".join(f"{uuid}: PE {', '.join(map(str, pes))}" for uuid, pes in sharers.items())
        raise BootstrapError(
            f"some GPUs have more PEs than others ({listed}), which NVSHMEM does not support; give each PE a "
            "GPU of its own with torch.cuda.set_device() before init(), or put equally many PEs on each"
        )
    if len(sharers[uuids[rank]]) == 1:
        return ""
    gpus = "1 GPU" if len(sharers) == 1 else f"{len(sharers)} GPUs"
    return (
        f"{len(uuids)} PEs share {gpus}; fine for tests, useless for timing. Where there are more GPUs, call "
        "torch.cuda.set_device() before init()"
    )
