"""Room on every GPU for NCCL's collectives and this world's launches together, in any order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..runtime import world as _world
from ..runtime.leave_sms import leave_sms
from ..runtime.torch_private import backend_of_group

__all__ = ["leave_room"]

_REMEDY = (
    "options = torch.distributed.ProcessGroupNCCL.Options(); options.config.max_ctas, options.config.cga_cluster_size "
    "= {num_sms}, 1; torch.distributed.init_process_group('nccl', pg_options=options)"
)
# Environment variables that NCCL prefers to a group's options (envConfigOverride in its init.cc, connect.cc).
_MAX_CTAS, _CLUSTER = "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE"
_AT_LEAST = ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MIN_P2P_NCHANNELS")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_LARGEST_CLUSTER = 8  # a larger number from the environment counts as this


def leave_room(*groups: DistributedDataParallel | dist.ProcessGroup, num_sms: int) -> None:
    """Leave SMs to NCCL, so that its collectives and this world's launches fit on the GPU together, in any order.

        options = torch.distributed.ProcessGroupNCCL.Options()
        options.config.max_ctas, options.config.cga_cluster_size = 8, 1
        torch.distributed.init_process_group("nccl", pg_options=options)
        ...
        po.nn.leave_room(ddp, num_sms=8)  # once, before CUDA graphs are captured

    NCCL's kernels and this package's launches both stay on the GPU until the other PEs' ones come. Without room for
    both, one could block on one GPU what the other waits for on another GPU. After this call, each launch of this PE
    has at most one CTA for each of the other SMs, and NCCL's kernels have at most as many CTAs as the SMs that are
    left. Wherever all of them lie, the next CTA finds an empty SM. So the two need no order (`order_all_reduce`), and
    gradients of DistributedDataParallel travel beside the tables' backward pass. Launches lose some speed.

    Args:
        groups: all process groups whose collectives may run beside launches.
        num_sms: SMs that are left to NCCL: at least the sum of the groups' `max_ctas`, each rounded up to a power of
            two, as for NCCL's sends and receives. The same on all PEs.

    Raises:
        TypeError: an argument is not a process group.
        ValueError: on some PE a group is not NCCL's, has no `max_ctas` or too large a value, or uses clusters, whose
            CTAs need neighboring empty SMs; NCCL_* variables override the options; launches of different streams share
            a hardware queue; or no SM remains for launches. All PEs raise it, and nothing changes.
        RuntimeError: in a CUDA-graph capture.

    Collective and blocking. All launches are planned again, so each shape's next call is a first call again. Call it
    after `EmbeddingInputs.run_beside`, if that is used too. CUDA graphs that were captured before keep launches that
    leave no room. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts: by default there are 8 hardware queues, and
    kernels of streams that share a queue wait for each other even if there is room. Sources: cuda/DESIGN.md, "Launches
    side by side"; ncclConfig_t in NCCL's user guide.
    """
    found = [each.process_group if isinstance(each, DistributedDataParallel) else each for each in groups]
    if not found or not all(isinstance(each, dist.ProcessGroup) for each in found):
        names = ", ".join(type(each).__name__ for each in groups) or "none"
        raise TypeError(f"groups: expected DistributedDataParallel modules or process groups, got {names}")
    if not isinstance(num_sms, int):
        raise TypeError(f"num_sms: expected an int, got {num_sms!r}")
    world = _world.for_call()
    leave_sms(world, num_sms, _problem(_backends(found, world.backend.device), num_sms, os.environ))


def _backends(groups: Iterable[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """Return the groups' communicators on a device, each once: several groups may share one."""
    backends = {id(group): backend_of_group(group, device) for group in groups}
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    return [getattr(each, "wrapped_pg", each) for each in backends.values()]


def _problem(backends: Iterable[Any], num_sms: int, environment: Mapping[str, str]) -> str:
    """Return why the groups' kernels, by their configuration, may take more than this number of SMs; or ""."""
    if _number(environment, _QUEUES) == 1:
        return f"{_QUEUES}=1 puts the kernels of all streams into one queue, where they wait for each other; unset it"
    total = 0
    for backend in backends:
        config = getattr(getattr(backend, "options", None), "config", None)
        if backend.name() != "nccl" or config is None:
            return f"groups: expected process groups of NCCL 2.17 or later, got {backend.name()!r}"
        most, cluster = config.max_ctas, config.cga_cluster_size  # below 0: NCCL decides
        if (number := _number(environment, _MAX_CTAS)) > 0:
            most = number
        if (number := _number(environment, _CLUSTER)) >= 0:
            cluster = min(number, _LARGEST_CLUSTER)
        remedy = "make the group with " + _REMEDY.format(num_sms=num_sms)
        if most <= 0:
            return f"groups: expected max_ctas of at most {num_sms} in a group's options, which have none; {remedy}"
        if not 0 <= cluster <= 1:
            given = "none, which is 4" if cluster < 0 else str(cluster)
            return f"groups: expected a cga_cluster_size of 1 in a group's options, got {given}; {remedy}"
        for name in _AT_LEAST:
            if _number(environment, name) > most:
                return f"{name}={environment[name]} overrules max_ctas, {most}, of a group's options; unset it"
        total += 1 << (most - 1).bit_length()
    if total > num_sms:
        return (
            f"num_sms: expected at least {total}, which NCCL may take (max_ctas of each group, rounded up to a power "
            f"of two), got {num_sms}; pass more, or make the groups with a smaller max_ctas"
        )
    return ""


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return a variable's number; -1 where it has none, which NCCL then ignores."""
    try:
        return int(environment.get(name, ""), 0)
    except ValueError:
        return -1
