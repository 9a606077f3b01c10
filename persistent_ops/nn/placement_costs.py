"""What a placement of embedding tables costs, by what this machine was measured to do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import ops as _ops
from ..runtime.operator import Operator
from ..runtime.world import World
from .embedding_tables import TableConfig
from .table_owners import Costs
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Rates", "Workload", "measured_rates"]

_MEASURED = Operator("measurement of what placements of tables cost", (), has_kernel=False)
_ROW = 128  # elements of a row that is measured
_TABLE_BYTES = {"cuda": 256 << 20, "host": 32 << 20}  # beyond caches
_GATHERED_BYTES = {"cuda": 64 << 20, "host": 4 << 20}
_SUMMED_BYTES = {"cuda": 16 << 20, "host": 1 << 20}
_ROUNDS, _CALLS = 10, 3
_REPLICA_LAUNCHES = 5  # beside those of spread tables: lookup, sort, sums, their all-reduce, update
_INDEX_BYTES = 4  # as lookups travel, for tables below 2^31 rows
_FLOAT_BYTES = 4
_STATE_ELEMENTS = {"sgd": 0, "adagrad": 1, "adam": 2}  # of an element; "rowwise_adagrad" has one of a row


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Attributes:
        memory: bytes per second that go to and from the memory where rows are gathered at random.
        link: bytes per second that a PE sends to its peers in a large all-reduce; infinite for one PE.
        launch: seconds of a small all-reduce.
    """

    memory: float
    link: float
    launch: float


@dataclass(frozen=True)
class Workload:
    """A step of training, which costs are of.

    U = min(lookups, R) rows are touched by the N lookups of a table of R rows; its rows have w bytes and s bytes of
    states, G bytes of pooled rows leave it, and there are P PEs.

    - A slice's owner moves ``N * (w + 4) + 3 * G + 2 * U * (w + s)`` bytes of memory: rows and lookups read, pooled
      rows written, gradients written where they arrive and read, rows and states read and written. Its links carry
      ``(P - 1) / P * (2 * G + 4 * N)``: pooled rows, gradients, lookups.
    - A replica has the N and G of this PE's samples alone and sends none of them. Beside them it moves 16 bytes of
      memory for each of R * D sums, which are zeroed, added up, reduced, and read, and its links carry
      ``2 * (P - 1) / P * 4`` bytes of each.

    Attributes:
        rates: of the machine.
        world_size: P.
        max_batch: samples of a PE.
        lookups_per_sample: of each feature.
        algorithm: of `po.EmbeddingOptimizer`.
        wire_dtype: of float32 tables' pooled rows and gradients; None for the tables'.
    """

    rates: Rates
    world_size: int
    max_batch: int
    lookups_per_sample: Mapping[str, float]
    algorithm: str
    wire_dtype: torch.dtype | None = None

    def costs(self, configs: Sequence[TableConfig], placements: Sequence[TablePlacement]) -> Costs:
        """Return the seconds of memory and of links that slices and replicas take."""
        pairs = zip(configs, placements, strict=True)
        return Costs("s_per_step", tuple(self.cost(config, placement) for config, placement in pairs))

    def cost(self, config: TableConfig, placement: TablePlacement) -> tuple[float, float]:
        """Return the same for a slice of a table, or a replica."""
        is_replica = placement.kind == REPLICATED
        width = config.embedding_dim // placement.num_slices
        samples = self.max_batch * (1 if is_replica else self.world_size)
        lookups = samples * sum(self.lookups_per_sample[name] for name in config.feature_names)
        row_bytes = width * config.data_type.itemsize
        wire_dtype = self.wire_dtype if config.data_type == torch.float32 else None
        pooled = samples * len(config.feature_names) * width * (wire_dtype or config.data_type).itemsize
        touched = min(lookups * self.world_size if is_replica else lookups, config.num_embeddings)
        updated = 2 * touched * (row_bytes + self._state_bytes(width))
        memory = lookups * (row_bytes + _INDEX_BYTES) + 3 * pooled + updated
        away = (self.world_size - 1) / self.world_size
        if is_replica:
            sums = config.num_embeddings * width * _FLOAT_BYTES
            memory, link = memory + 4 * sums, 2 * away * sums
        else:
            link = away * (2 * pooled + lookups * _INDEX_BYTES)
        return memory / self.rates.memory, link / self.rates.link

    def replicas_overhead(self) -> float:
        """Return the seconds that launches for replicated tables take, however small the tables."""
        return _REPLICA_LAUNCHES * self.rates.launch

    def _state_bytes(self, width: int) -> int:
        return _FLOAT_BYTES * _STATE_ELEMENTS.get(self.algorithm, 0) * width + _FLOAT_BYTES * (
            self.algorithm == "rowwise_adagrad"
        )


def measured_rates(world: World) -> Rates:
    """Return what PE 0 has measured, once in a world, while all PEs measured. Collective; tens of milliseconds."""
    state = _MEASURED.state(world)
    if state.own is None:
        mine = [_memory_rate(world), *_link_rate_and_launch(world)]
        told = world.bootstrap.exchange("embedding-rates", json.dumps(mine).encode())
        state.own = Rates(*json.loads(told[0]))
    rates: Rates = state.own
    return rates


def _memory_rate(world: World) -> float:
    device, name = world.backend.device, world.backend.name
    rows, gathered = (nbytes[name] // (_ROW * _FLOAT_BYTES) for nbytes in (_TABLE_BYTES, _GATHERED_BYTES))
    table = torch.zeros(rows, _ROW, dtype=torch.float32, device=device)
    indices = torch.randint(rows, (gathered,), device=device)
    return 2 * _GATHERED_BYTES[name] / _seconds(world, lambda: table.index_select(0, indices))


def _link_rate_and_launch(world: World) -> tuple[float, float]:
    device, count = world.backend.device, _SUMMED_BYTES[world.backend.name] // _FLOAT_BYTES
    small, large = (torch.zeros(n, dtype=torch.float32, device=device) for n in (64, count))
    with torch.no_grad():
        launch = _seconds(world, lambda: _ops.all_reduce(small))
        if world.size == 1:
            return math.inf, launch
        seconds = _seconds(world, lambda: _ops.all_reduce(large))
    sent = 2 * (world.size - 1) / world.size * large.nbytes
    return sent / max(seconds - launch, seconds / 10), launch


def _seconds(world: World, action: Callable[[], object]) -> float:
    """Return the least time of an action: data loaders and compilers that are at work beside it make it longer only."""
    return max(min(_round(world, action) for _ in range(_ROUNDS)) / _CALLS, 1e-9)


def _round(world: World, action: Callable[[], object]) -> float:
    """Return the seconds of some calls, on GPUs those from one event to another."""
    action()  # to which peers may come late
    if world.backend.name == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_CALLS):
            action()
        end.record()
        world.backend.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    for _ in range(_CALLS):
        action()
    return time.perf_counter() - start
