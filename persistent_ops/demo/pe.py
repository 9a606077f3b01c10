"""One PE of the demo: build its tables, run the fused and the unfused exchange, compare and measure them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import persistent_ops as po

from ..testing.criteo import NUM_CATEGORICAL, read_batches
from ..testing.dlrm_batch import DLRM_POOLING, DLRM_ROWS, draw_feature
from ..testing.lookups import FeatureLookups, concatenate
from ..testing.machine import memory_of_pe, share_cores, shares_gpu
from ..testing.pes import gather, without_multicast
from ..testing.progress import progress_bar
from ..testing.timing import seconds_of
from .options import DemoOptions
from .placement import fit_rows, lookup_costs, place_tables
from .unfused import UnfusedExchange, split_features

__all__ = ["TOLERANCE", "PeReport", "differences", "run_pe"]

# Largest difference that is accepted, relative to the largest magnitude in the table's columns.
# fp32: both sides add at most some hundred rows in fp32, perhaps in another order; each addition rounds by 2^-24 of a
# partial sum, and 1e-5 leaves an order of magnitude over that. bf16, fp16: both round an fp32 sum once, and sums that
# differ in their last bits may round to neighbors, which are one unit in the last place (2^-7, 2^-10) apart.
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-7, "fp16": 2.0**-10}

# The part of a GPU's free memory that tables may take: the rest is for lookups, outputs and the reference's buffers.
_TABLE_SHARE_OF_FREE_MEMORY = 0.6


@dataclasses.dataclass(frozen=True)
class _Step:
    """The result of one step on one PE; times in seconds."""

    times: dict[str, float]
    lookups: int
    bytes_sent: int
    largest_difference: float
    relative_difference: float


@dataclasses.dataclass(frozen=True)
class PeReport:
    """The measurements of one PE; times in seconds, medians over the steps."""

    rank: int
    backend: str
    place: str
    hardware: str
    num_tables: int
    rows: int
    lookups: int  # rows read per step, the largest
    bytes_sent: int  # to other PEs per step, the largest
    steps: int
    batch: int
    row_cap: int
    reference: str  # backend of the process group
    largest_difference: float
    relative_difference: float
    fused: float
    unfused: float
    pooling: float
    exchange: float


def differences(actual: torch.Tensor, expected: torch.Tensor, *, table_dim: int) -> tuple[float, float]:
    """Compare the outputs table by table.

    Args:
        actual: `[B, T * table_dim]`.
        expected: the same shape.
        table_dim: columns of one table.

    Returns:
        The largest difference, and the largest of the tables' differences relative to the largest magnitude in the
        table's columns. Both are infinite where a value is not finite.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"the outputs have different shapes: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if actual.numel() == 0:
        return 0.0, 0.0
    by_table = (actual.double() - expected.double()).abs().amax(dim=0).view(-1, table_dim).amax(dim=1)
    magnitude = expected.double().abs().amax(dim=0).view(-1, table_dim).amax(dim=1)
    if not bool(torch.isfinite(by_table).all()):
        return math.inf, math.inf
    # A table whose bags are all empty must give exact zeros: any difference is infinitely large then.
    relative = torch.where(by_table == 0, 0.0, by_table / magnitude)
    return float(by_table.max()), float(relative.max())


@dataclasses.dataclass(frozen=True)
class _OwnBatch:
    """One global batch: its size and the lookups of this PE's tables."""

    batch_size: int
    features: list[FeatureLookups]


def _own_batches(
    options: DemoOptions, batch_size: int, tables: Sequence[int], num_rows: Sequence[int]
) -> Iterator[_OwnBatch]:
    """Yield the warm-up batch, then one batch a step."""
    if options.data is None:
        for step in range(options.steps + 1):
            drawn = [
                draw_feature(table, seed=options.seed, step=step, batch_size=batch_size, num_rows=num_rows)
                for table in tables
            ]
            yield _OwnBatch(batch_size, drawn)
        return
    for step, batch in enumerate(read_batches(options.data, batch_size=batch_size, num_rows=num_rows)):
        if step == options.steps:
            return
        own = _OwnBatch(batch.batch_size, [batch.categorical[table] for table in tables])
        if step == 0:
            yield own  # the warm-up takes the file's first batch too, so that a short file has every batch measured
        yield own


def _make_table(table: int, num_rows: int, options: DemoOptions, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(options.seed * 1_000_003 + table)
    weight = torch.empty((num_rows, options.dim), device=device, dtype=options.torch_dtype)
    return weight.uniform_(-1, 1, generator=generator)


def _row_cap(options: DemoOptions, placement: Sequence[Sequence[int]]) -> int:
    """Return the cap on a table's rows, the same on every PE."""
    cap = options.max_rows_for(po.backend())
    if cap is not None:
        return cap
    budget = int(min(gather(memory_of_pe())) * _TABLE_SHARE_OF_FREE_MEMORY)
    return fit_rows(DLRM_ROWS, placement, options.dim * options.torch_dtype.itemsize, budget)


def _timed(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Run a function, all PEs together; returns its result and the seconds that it took on this PE."""
    results: list[torch.Tensor] = []
    seconds = seconds_of(lambda: results.append(function()))
    return results[0], seconds


def run_pe(options: DemoOptions) -> list[dict[str, Any]]:
    """Run the demo on this PE. Collective.

    Args:
        options: the same on every PE.

    Returns:
        The PeReport of every PE, as dictionaries, in rank order.
    """
    without_multicast()
    po.init(backend=options.backend, operator_timeout=options.timeout)
    try:
        share_cores()
        with po.process_group():
            with contextlib.nullcontext() if options.trace is None else po.trace(options.trace):
                report = _measure(options)
            return gather(dataclasses.asdict(report))
    finally:
        po.finalize()


class _Exchange:
    """One PE's tables, and both ways to pool and exchange a batch with them."""

    def __init__(
        self,
        options: DemoOptions,
        *,
        rank: int,
        placement: Sequence[Sequence[int]],
        num_rows: Sequence[int],
        device: torch.device,
        staged: bool,
    ) -> None:
        self._options = options
        self._rank = rank
        self._device = device
        self._staged = staged
        self._dim_per_rank = [len(owned) * options.dim for owned in placement]
        self._weights = [_make_table(table, num_rows[table], options, device) for table in placement[rank]]

    def step(self, batch: _OwnBatch) -> _Step:
        """Run the fused operator and the reference on one batch, compare and time them."""
        world_size = len(self._dim_per_rank)
        batch_per_rank = [
            batch.batch_size // world_size + (pe < batch.batch_size % world_size) for pe in range(world_size)
        ]
        host_indices, host_offsets = concatenate(batch.features)
        indices = torch.from_numpy(host_indices).to(self._device)
        offsets = torch.from_numpy(host_offsets).to(self._device)
        unfused = UnfusedExchange(
            self._weights,
            dim_per_rank=self._dim_per_rank,
            batch_per_rank=batch_per_rank,
            rank=self._rank,
            device=self._device,
            dtype=self._options.torch_dtype,
            staged=self._staged,
        )
        features = split_features(indices, offsets, len(self._weights))

        fused_output, fused = _timed(
            lambda: po.embedding_all_to_all(
                self._weights, indices, offsets, batch_per_rank=batch_per_rank, dim_per_rank=self._dim_per_rank
            )
        )
        expected, whole = _timed(lambda: unfused(features))
        pooled, pooling = _timed(lambda: unfused.pool(features))
        _, exchange = _timed(lambda: unfused.exchange(pooled))
        largest, relative = differences(fused_output, expected, table_dim=self._options.dim)
        times = {"fused": fused, "unfused": whole, "pooling": pooling, "exchange": exchange}
        return _Step(times, len(host_indices), unfused.bytes_sent, largest, relative)


def _measure(options: DemoOptions) -> PeReport:
    rank, world_size, backend, device = po.rank(), po.world_size(), po.backend(), po.device()
    pooling = DLRM_POOLING if options.data is None else (1,) * NUM_CATEGORICAL
    placement = place_tables(lookup_costs(pooling, options.dim, options.torch_dtype.itemsize), world_size)
    cap = _row_cap(options, placement)
    num_rows = [min(rows, cap) for rows in DLRM_ROWS]
    exchange = _Exchange(options, rank=rank, placement=placement, num_rows=num_rows, device=device, staged=shares_gpu())
    steps = []
    with progress_bar("steps", last_step=options.steps) as advance:
        for batch in _own_batches(options, options.batch_for(backend), placement[rank], num_rows):
            steps.append(exchange.step(batch))
            advance(len(steps) - 1)
    po.check()
    measured = steps[1:]  # the warm-up is checked like the others, but it also compiled and loaded the kernel
    times = {name: statistics.median(step.times[name] for step in measured) for name in measured[0].times}
    return PeReport(
        rank=rank,
        backend=backend,
        place=str(device) if device.type == "cuda" else f"pid {os.getpid()}",
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU process",
        num_tables=len(placement[rank]),
        rows=sum(num_rows[table] for table in placement[rank]),
        lookups=max(step.lookups for step in measured),
        bytes_sent=max(step.bytes_sent for step in measured),
        steps=len(measured),
        batch=options.batch_for(backend),
        row_cap=max(num_rows),
        reference=dist.get_backend(),
        largest_difference=max(step.largest_difference for step in steps),
        relative_difference=max(step.relative_difference for step in steps),
        **times,
    )
