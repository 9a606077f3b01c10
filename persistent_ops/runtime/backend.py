"""Interface of the two backends: memory that peers can reach, private memory, and kernels."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .compile.description import description_of
from .compile.jit import KernelSource
from .interruptible import Interruptible
from .residency import Footprint, Sm

__all__ = [
    "GPU_BLOCKS_PER_SM",
    "Backend",
    "Kernel",
    "KernelRequest",
    "LaunchShape",
    "Peeked",
    "check_resident",
    "in_node",
]

GPU_BLOCKS_PER_SM = 2

_NOT_HELD = 'static_assert(alignof(Call) < 64, "a kernel that holds its call in registers cannot use a tensor map");'
_SPECIALIZED = "template <>\ninline constexpr {kind} po::{name}<> = {value};\n"


@dataclass(frozen=True)
class LaunchShape:
    """What a launch of a kernel takes of a GPU, and what the kernel is compiled for.

    Attributes:
        threads: of a WG.
        architecture_suffix: "a" for a kernel with instructions of one architecture alone (wgmma); else "".
        cluster: WGs that become resident together, where they reach each other's shared memory. A grid has whole
            clusters. The host has such clusters too.
        arena_bytes: of shared memory that a WG has, in addition to what the kernel declares.
        arena_alignment: of that memory, in bytes, on the host too.
        overlaps_predecessor: whether launches may begin before the kernel before them on the stream has ended. The
            kernel must wait for that end itself.
        is_resident: whether a grid must be resident as a whole, since its WGs wait for each other or for peers.
        links_nvshmem: whether the kernel can put to peers that it does not reach by stores: it is then compiled with
            NVSHMEM's device library for a team that has such peers. Other kernels refuse such a team.
    """

    threads: int
    architecture_suffix: str = ""
    cluster: int = 1
    arena_bytes: int = 0
    arena_alignment: int = 128
    overlaps_predecessor: bool = False
    is_resident: bool = True
    links_nvshmem: bool = True


@dataclass(frozen=True)
class KernelRequest:
    """A kernel, its configuration, and its launch shape.

    Attributes:
        name: symbol, namespace, and stem of the file in cuda/kernels/.
        config: fields of the kernel's `Config`, in order, as (name, C++ value); None where the kernel has none.
        shape: of its launches.
        holds_call: whether each thread has the call in registers; see cuda/platform/entry.cuh.
        traces: whether it writes a timeline; see cuda/platform/trace.cuh.
    """

    name: str
    config: tuple[tuple[str, str], ...] | None
    shape: LaunchShape
    holds_call: bool = False
    traces: bool = False

    @classmethod
    def of(
        cls, name: str, config: Mapping[str, str | int | bool], shape: LaunchShape, *, holds_call: bool = False
    ) -> KernelRequest:
        """Return the request for a kernel with a `Config` of numbers, truth values and C++ text."""
        return cls(name, tuple((field, _cpp(value)) for field, value in config.items()), shape, holds_call)

    def with_config(self, **changes: str | int | bool) -> KernelRequest:
        """Return the same with other values of some fields of the `Config`."""
        config = dict(self.config or ()) | {field: _cpp(value) for field, value in changes.items()}
        return dataclasses.replace(self, config=tuple(config.items()))

    def source(self) -> KernelSource:
        """Return what is compiled; a compiler that lays a struct out in another way than the description refuses it."""
        space, kernel = f"po::{self.name}", "Kernel"
        if self.config is not None:
            values = ", ".join(f".{name} = {value}" for name, value in self.config)
            kernel = f"Kernel<{space}::Config{{{values}}}>"
        check = f"namespace {space} {{ {description_of(self.name).layout} {_NOT_HELD * self.holds_call} }}"
        entry = "PO_ENTRY" + "_HOLDING_CALL" * self.holds_call + "_TRACED" * self.traces
        tail = f"{check}\n{entry}({self.name}, {space}::{kernel})\n"
        return KernelSource(
            f"kernels/{self.name}.cuh", head=f"#include <cstddef>\n{self._specializations()}", tail=tail
        )

    def _specializations(self) -> str:
        """Return what comes before all headers: what the unit has other than cuda/platform/platform.cuh says."""
        lines = ""
        if self.traces:
            lines += _SPECIALIZED.format(kind="bool", name="kTraces", value="true")
        if self.shape.cluster != LaunchShape.cluster:
            lines += _SPECIALIZED.format(kind="int", name="kClusterSize", value=self.shape.cluster)
        if self.shape.arena_alignment != LaunchShape.arena_alignment:
            lines += _SPECIALIZED.format(kind="int", name="kArenaAlignment", value=self.shape.arena_alignment)
        return lines and f'#include "platform/platform.cuh"\n{lines}'


def _cpp(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Peeked(NamedTuple):
    """A piece of device memory, and where it is copied to, in `host_visible_bytes`."""

    address: int
    copy: ctypes.Array[Any]


class Kernel(Protocol):
    """A loaded kernel."""

    admitted_grid: int
    """The most WGs with which it has been launched (`Workspace.admit`)."""

    def footprint(self) -> Footprint:
        """Return what WGs of this kernel take of an SM."""

    def resident_work_groups(self) -> int:
        """Return how many WGs of this kernel, in whole clusters, the device holds at once; the host, a fixed number.

        Raises:
            ValueError: of a kernel with clusters, where `Backend.leaves_room`.
        """

    def launch(self, grid: int, plan: int, call: ctypes.Structure, *, begins_early: bool = False) -> None:
        """Launch `grid` co-resident WGs on the current stream with the plan at address `plan`; `call` is copied.

        Args:
            grid, plan, call: see above.
            begins_early: whether WGs may become resident one by one beside the launch in front of it on the stream,
                which lets them in; only where `Backend.begins_early`. The kernel must wait for that launch's end.
        """

    def trace_into(self, sink: ctypes.Structure, memory: object) -> None:
        """Have launches of a kernel that traces leave their timelines in a TraceSink, whose memory is kept."""


class Backend(Protocol):
    """One PE's access to its world's memory and compute.

    What it makes tensors of is written for as long as the world lives, so they are no inference tensors, whatever mode
    they are made in.
    """

    name: str
    device: torch.device
    heap_bytes: int
    heap_base: int
    peer_heaps: tuple[int, ...]
    """Address of each PE's heap as mapped here; 0 where it is not load/store reachable."""
    num_sms: int
    """That launches may take, one WG on each where `leaves_room`."""
    sm: Sm
    default_blocks_per_sm: int
    arena_bytes: int
    """The most shared memory that a WG can have, what the kernel declares included."""
    waits: Interruptible
    """Makes the calls in which this PE waits for its launches."""
    runs_beside: bool
    """Whether launches from now on may be resident side by side, as all PEs have agreed."""
    leaves_room: bool
    """Whether they leave SMs to other libraries' collectives, as all PEs have agreed (`leave_sms`)."""
    network: int
    """Address of the host backend's delaying network; 0 where there is none."""

    @property
    def begins_early(self) -> bool:
        """Whether a launch may begin beside the one in front of it on its stream; not while workspaces run beside."""

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor, with a storage of its own, over heap memory of this PE or a reachable peer."""

    def private_words(self, count: int) -> torch.Tensor:
        """Return `count` zeroed int64 words that kernels of this PE alone see."""

    def host_visible_bytes(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` zeroed bytes that kernels write and the host reads."""

    def set_word(self, words: torch.Tensor, index: int, value: int) -> None:
        """Set one of `private_words` at once, also while kernels run and whatever streams are captured; any thread."""

    def peek(self, pieces: Sequence[Peeked]) -> bool:
        """Bring copies of device memory up to date, soon and also while kernels run; one thread's.

        Returns:
            Whether the last call's copies have been made.
        """

    def tensor_map(self, matrix: torch.Tensor, box: tuple[int, int], swizzle: int = 0) -> ctypes.Structure:
        """Return a TensorMap for a `Call`, of a matrix that is copied in boxes of (rows, columns); see `TensorMaps`."""

    def warps_of(self, threads: int) -> int:
        """Return how many warps a WG has where it would have so many threads on the GPU."""

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        """Return a kernel's code, compiled or from the cache; any thread. `links_nvshmem`: with its device library."""

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Kernel:
        """Compile and load a kernel. It waits where another thread or process compiles it."""

    def use_in_this_thread(self) -> None:
        """Let the calling thread launch on this PE's device, as the thread does that made the backend."""

    def stream(self) -> int:
        """Return the handle of the current stream; 0 on the host."""

    def synchronize(self, patience: float | None = None) -> None:
        """Wait until this PE's launches have completed; after `patience` seconds let those that wait give up."""

    def quiet(self) -> None:
        """Wait until this PE's puts and signals have been performed; no kernel may be running."""

    def close(self, *, is_alone: bool = False) -> None:
        """Release everything; no launch may be in flight. Collective, unless `is_alone`: peers may be gone."""


def in_node(transport: str, rank: int, world_size: int) -> list[bool]:
    """Return for each PE whether this one may store to it directly; other PEs take puts and signals.

    Args:
        transport: "auto": to all; "staged": to itself alone; "nodes:N": to the PEs of its node, of N nodes of
            consecutive ranks, or of one PE each where there are fewer PEs.
        rank: of this PE.
        world_size: number of PEs.
    """
    if transport == "auto":
        return [True] * world_size
    nodes = world_size if transport == "staged" else min(int(transport.removeprefix("nodes:")), world_size)
    return [pe * nodes // world_size == rank * nodes // world_size for pe in range(world_size)]


def check_resident(kernel: Kernel, grid: int, *, choices: str = "work_groups") -> None:
    """Raise ValueError, with the choices that are to blame, where the device does not hold a grid at once."""
    if grid % (cluster := kernel.footprint().cluster):
        raise ValueError(f"{choices}: expected a multiple of {cluster}, the WGs of a cluster, got {grid}")
    if (resident := kernel.resident_work_groups()) < grid:
        raise ValueError(
            f"{choices}: {resident} WGs of this kernel fit the device at once, not {grid}; a persistent grid must be "
            "resident as a whole"
        )
