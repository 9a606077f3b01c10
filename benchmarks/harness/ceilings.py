"""The two ceilings of a run: bytes per second that a PE reads from its memory, and stores to all its peers together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import persistent_ops as po
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import World, upload

from .pes import gather
from .timing import Subject, time_interleaved

__all__ = ["H200", "Ceilings", "measure_ceilings"]

_CEILINGS = Operator("ceilings", ())
_READ_UNIT = 1 << 16  # a multiple of what the WGs of the read kernel take at a time


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second and PE.

    Attributes:
        read: from the PE's own memory.
        store: to all peers together while they do the same; None where there is no peer.
    """

    read: float
    store: float | None

    def limit_seconds(self, *, read_bytes: float, sent_bytes: float) -> tuple[float, str]:
        """Return the larger of the two times, and which it is: "HBM" or "NVLink"."""
        reading = read_bytes / self.read
        sending = sent_bytes / self.store if self.store else 0.0
        return (reading, "HBM") if reading >= sending else (sending, "NVLink")


# 8x H200 of one host, to seven peers: for a figure that does not depend on the run's own ceilings.
H200 = Ceilings(read=4.35e12, store=343e9)


def measure_ceilings(
    world: World, source: torch.Tensor, *, store_bytes: int, rounds: int, burst_seconds: float
) -> tuple[Ceilings, dict[str, Any]]:
    """Measure both ceilings; collective.

    Args:
        world: of this PE.
        source: what is read; much larger than the L2 cache on a GPU.
        store_bytes: of the symmetric buffer that the peers fill.
        rounds: times each way of reading or storing is timed.
        burst_seconds: length of one time.

    Returns:
        The ceilings (the best way's, of the slowest PE) and bytes per second of every way, for the record.

    Raises:
        RuntimeError: what the peers stored is not what they should have.
    """
    tile_bytes = _CEILINGS.description.constants["kTileBytes"]
    flat = source.view(-1).view(torch.uint8)
    read_bytes = flat.numel() // _READ_UNIT * _READ_UNIT
    sink = world.backend.private_words(1)
    buffer = po.empty(store_bytes // 4, dtype=torch.int32)
    place = world.heap.offset_of(buffer, "buffer")
    ways: dict[str, tuple[Callable[[], object], float]] = {}

    read = _kernel(world, "kRead", 512)
    ways["read: 16-byte loads"] = (lambda: read(flat.data_ptr(), read_bytes, sink.data_ptr()), read_bytes)
    if world.backend.name == "cuda":
        whole = flat[:read_bytes].view(torch.float32)
        ways["read: torch.sum"] = (lambda: torch.sum(whole), read_bytes)
    segment = store_bytes // world.size // tile_bytes * tile_bytes
    if world.size > 1 and world.all_reachable:
        store = _kernel(world, "kStore", 256)
        sent = segment * (world.size - 1)
        ways["store: 16-byte stores"] = (lambda: store(place, store_bytes, 0), sent)

    rates: dict[str, float] = {}
    for name, (call, nbytes) in ways.items():
        buffer.zero_()
        world.barrier()
        # Plain launches: they take milliseconds on a GPU, so the host runs ahead of them.
        times = time_interleaved(world, {name: Subject(call, 1)}, rounds=rounds, burst_seconds=burst_seconds)[name]
        rates[name] = nbytes / max(gather(world.bootstrap, statistics.median(times)))
        world.barrier()
        if name.startswith("store"):
            _check_stored(world, buffer, segment, name)
    po.free(buffer)
    best = {kind: max((r for n, r in rates.items() if n.startswith(kind)), default=None) for kind in ("read", "store")}
    assert best["read"] is not None
    ceilings = Ceilings(best["read"], best["store"])
    return ceilings, {**asdict(ceilings), "ways": rates, "read_bytes": read_bytes, "segment_bytes": segment}


def _kernel(world: World, ceiling: str, threads: int) -> Callable[[int, int, int], None]:
    config = (("ceiling", f"po::ceilings::Ceiling::{ceiling}"), ("threads", str(threads)))
    kernel = world.backend.load(KernelRequest("ceilings", config, threads))
    structs = _CEILINGS.description.structs
    plan = upload(world.backend, bytes(structs["Plan"](team=world.workspace.team(_CEILINGS.contract(world.team)))))
    grid = world.backend.num_sms * (2 if world.backend.name == "cuda" else 1)

    def launch(place: int, nbytes: int, sink: int) -> None:
        call = structs["Call"](place=place, bytes=nbytes, sink=sink)
        world.workspace.launch(kernel, grid, plan.data_ptr(), call)

    return launch


def _check_stored(world: World, buffer: torch.Tensor, segment: int, name: str) -> None:
    """Raise where a peer's segment does not carry the peer's mark in every 16-byte vector."""
    vectors = buffer[: segment * world.size // 4].view(world.size, -1, 4)
    for peer in range(world.size):
        mark = peer + 1 if peer != world.rank else 0
        expected = [mark, ~mark if mark else 0, _int32(mark * 0x9E3779B9), mark << 16]
        if not bool((vectors[peer] == torch.tensor(expected, dtype=torch.int32, device=buffer.device)).all()):
            raise RuntimeError(f"{name}: PE {world.rank} does not find what PE {peer} should have stored")


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
