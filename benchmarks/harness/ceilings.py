"""The ceilings of a run: bytes per second that a PE reads from its memory, updates there, and stores to its peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import persistent_ops as po
from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile.literals import vector_bytes
from persistent_ops.runtime.operator import Operator
from persistent_ops.runtime.world import World, upload
from persistent_ops.testing.pes import gather

from .timing import Subject, time_interleaved

__all__ = ["H200", "Ceilings", "measure_ceilings"]

_CEILINGS = Operator("ceilings", ())
_READ_UNIT = 1 << 16  # a multiple of what the WGs of the read kernel take at a time
_GAPS = (1, 4)  # rows of which one is updated; 100,000 rows and 20,480 uniform lookups touch one in 5.4


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second and PE.

    Attributes:
        read: from the PE's own memory.
        store: to all peers together while they do the same; None where there is no peer.
        update: read and written, together, where rows in the PE's own memory are changed; None where it is not known.
    """

    read: float
    store: float | None
    update: float | None = None

    def limit_seconds(
        self, *, read_bytes: float = 0.0, sent_bytes: float, updated_bytes: float = 0.0
    ) -> tuple[float, str]:
        """Return the larger of the two times, and which it is: "HBM" or "NVLink".

        Args:
            read_bytes: that are only read.
            sent_bytes: to peers.
            updated_bytes: read and written, in a mix as an update's; at the read ceiling where theirs is not known.
        """
        memory = read_bytes / self.read + updated_bytes / (self.update or self.read)
        sending = sent_bytes / self.store if self.store else 0.0
        return (memory, "HBM") if memory >= sending else (sending, "NVLink")


# About an H200's: for a figure that does not depend on the run's own ceilings.
H200 = Ceilings(read=4.35e12, store=343e9)


def measure_ceilings(
    world: World,
    source: torch.Tensor,
    *,
    updated_rows: Sequence[int] = (),
    store_bytes: int,
    rounds: int,
    burst_seconds: float,
) -> tuple[Ceilings, dict[str, Any]]:
    """Measure the ceilings; collective.

    Args:
        world: of this PE.
        source: what is read; much larger than the L2 cache on a GPU. Where rows are updated, they are its rows.
        updated_rows: bytes of rows, each a power of two of at least 16; none: nothing is updated.
        store_bytes: of the symmetric buffer that the peers fill.
        rounds: times each way of reading or storing is timed.
        burst_seconds: length of one time.

    Returns:
        The ceilings (the best way's, of the slowest PE) and bytes per second of every way, for the record.

    Raises:
        RuntimeError: what the peers stored, or an update wrote, is not what it should be.
    """
    tile_bytes = _CEILINGS.description.constants["kTileBytes"]
    flat = source.view(-1).view(torch.uint8)
    read_bytes = flat.numel() // _READ_UNIT * _READ_UNIT
    sink = world.backend.private_words(1)
    buffer = po.empty(store_bytes // 4, dtype=torch.int32)
    place = world.heap.offset_of(buffer, "buffer")
    ways: dict[str, tuple[Callable[[], object], float]] = {}

    read = _kernel(world, "kRead", 512)
    ways["read: 16-byte loads"] = (
        lambda: read(place=flat.data_ptr(), bytes=read_bytes, sink=sink.data_ptr()),
        read_bytes,
    )
    if world.backend.name == "cuda":
        whole = flat[:read_bytes].view(torch.float32)
        ways["read: torch.sum"] = (lambda: torch.sum(whole), read_bytes)
    for row_bytes in updated_rows:
        for gap in _GAPS:
            name = f"update: rows of {row_bytes} bytes" + (f", one in {gap}" if gap > 1 else "")
            ways[name] = _updating(world, flat, row_bytes, gap, name)
    segment = store_bytes // world.size // tile_bytes * tile_bytes
    if world.size > 1 and world.all_reachable:
        store = _kernel(world, "kStore", 256)
        sent = segment * (world.size - 1)
        ways["store: 16-byte stores"] = (lambda: store(place=place, bytes=store_bytes), sent)

    rates: dict[str, float] = {}
    for name, (call, nbytes) in ways.items():
        buffer.zero_()
        world.barrier()
        # Plain launches: they take milliseconds on a GPU, so the host runs ahead of them.
        times = time_interleaved(world, {name: Subject(call, 1)}, rounds=rounds, burst_seconds=burst_seconds)[name]
        rates[name] = nbytes / max(gather(statistics.median(times)))
        world.barrier()
        if name.startswith("store"):
            _check_stored(world, buffer, segment, name)
    po.free(buffer)
    kinds = ("read", "store", "update")
    best = {kind: max((r for n, r in rates.items() if n.startswith(kind)), default=None) for kind in kinds}
    assert best["read"] is not None
    ceilings = Ceilings(best["read"], best["store"], best["update"])
    return ceilings, {**asdict(ceilings), "ways": rates, "read_bytes": read_bytes, "segment_bytes": segment}


def _updating(
    world: World, flat: torch.Tensor, row_bytes: int, gap: int, name: str
) -> tuple[Callable[[], object], float]:
    """Return a call that updates one row in `gap` of a buffer, and the bytes that it reads and writes."""
    if row_bytes < vector_bytes() or row_bytes & (row_bytes - 1):
        raise ValueError(f"updated_rows: expected powers of two of at least {vector_bytes()}, got {row_bytes}")
    update = _kernel(world, "kUpdate", 512)
    num_rows = flat.numel() // (row_bytes * gap)
    shift = (row_bytes // vector_bytes()).bit_length() - 1

    def call() -> None:
        update(place=flat.data_ptr(), bytes=num_rows * gap * row_bytes, row_shift=shift, gap=gap)

    _check_updated(world, flat, call, (num_rows, row_bytes, gap), name)
    return call, 2 * num_rows * row_bytes


def _check_updated(
    world: World, flat: torch.Tensor, call: Callable[[], None], shape: tuple[int, int, int], name: str
) -> None:
    """Raise where one call does not add 1 to every word of one row in so many, and to no other."""
    num_rows, row_bytes, gap = shape
    words = flat[: num_rows * gap * row_bytes].view(torch.int32).view(num_rows, gap, -1)
    looked_at = min(num_rows, 1024)  # at the begin and at the end
    ends = [words[:looked_at], words[num_rows - looked_at :]]
    before = [part.clone() for part in ends]
    call()
    world.check()
    expected = torch.zeros(gap, dtype=torch.int32, device=flat.device)
    expected[-1] = 1  # of the rows of a gap, sorted by what was added to them
    for part, old in zip(ends, before, strict=True):
        added = part - old
        if not (bool((added == added[:, :, :1]).all()) and bool((added[:, :, 0].sort(-1).values == expected).all())):
            raise RuntimeError(f"{name}: PE {world.rank} does not find what its update should have left")


def _kernel(world: World, ceiling: str, threads: int) -> Callable[..., None]:
    config = (("ceiling", f"po::ceilings::Ceiling::{ceiling}"), ("threads", str(threads)))
    kernel = world.backend.load(KernelRequest("ceilings", config, LaunchShape(threads)))
    structs = _CEILINGS.description.structs
    plan = upload(world.backend, structs["Plan"](team=world.workspace.team(_CEILINGS.contract(world.team))))
    grid = world.backend.num_sms * (2 if world.backend.name == "cuda" else 1)

    def launch(**fields: int) -> None:
        world.workspace.launch(kernel, grid, plan.data_ptr(), structs["Call"](**fields))

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
