"""Cost of a placement of embedding tables, from rates measured on this machine."""

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
from .table_owners import Cost, Costs
from .table_placements import REPLICATED, TablePlacement

__all__ = ["Rates", "Workload", "measured_rates"]

_MEASURED = Operator("measurement of what placements of tables cost", (), has_kernel=False)
_COPIED_BYTES = {"cuda": 256 << 20, "host": 32 << 20}  # beyond caches
_SUMMED_BYTES = {"cuda": 16 << 20, "host": 1 << 20}
_ROUNDS, _CALLS = 10, 3
_REPLICA_LAUNCHES = 5  # besides the launches for spread tables: lookup, sort, sums, their all-reduce, update
_INDEX_BYTES = 4  # as lookups travel, for tables below 2^31 rows
# What was measured beside the bytes of rows, as bytes of a copy (docs/lessons.md, "embedding_all_to_all").
_LOOKUP_BYTES = 64  # of a lookup that arrives, and that a row is read for
_SORTED_BYTES = 192  # of one that is sorted by its row, and found there
_ROW_BYTES = 32  # of a row or a state that is read or written somewhere: a sector
_FLOAT_BYTES = 4
_NUM_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}  # of the size of a row; "rowwise_adagrad" has a float of one


@dataclass(frozen=True)
class Rates:
    """The measured rates.

    Attributes:
        memory: bytes per second that go to and from the memory in a large copy.
        link: bytes per second that a PE sends to its peers in a large all-reduce; infinite for one PE.
        launch: seconds of a small all-reduce.
    """

    memory: float
    link: float
    launch: float


@dataclass(frozen=True)
class Workload:
    """A step of training, which costs are of.

    About U = N * R / (N + R) rows are touched by N lookups in a table of R rows, none of which is likelier than
    another; computed by what all machines round alike, since all PEs decide by it. A row has w bytes, and its states s
    bytes in a arrays; G bytes of pooled rows leave it, and there are P PEs. What is read or written somewhere costs a
    sector of memory more: w' = w + 32, s' = s + 32 * a.

    - In the forward pass a slice's owner moves ``N * (w' + 64) + G`` bytes of memory: rows and lookups read, pooled
      rows written. Its links carry ``(P - 1) / P * (G + 4 * N)``: pooled rows and lookups.
    - In the backward pass it is ``N * 192 + 2 * G + 2 * U * (w' + s')``: lookups sorted, gradients written where they
      arrive and read, rows and states read and written; and ``(P - 1) / P * G`` of gradients.
    - A replica has the N and G of this PE's samples alone and sends none of them. Its backward pass moves 16 bytes of
      memory more for each of R * D sums, which are zeroed, added up, reduced, and read, and its links carry
      ``2 * (P - 1) / P * 4`` bytes of each.

    Attributes:
        rates: of the machine.
        world_size: P.
        max_batch: samples of a PE.
        lookups_per_sample: of each feature.
        optimizer: of `po.EmbeddingOptimizer`.
        wire_dtype: of float32 tables' pooled rows and gradients; None for the tables'.
    """

    rates: Rates
    world_size: int
    max_batch: int
    lookups_per_sample: Mapping[str, float]
    optimizer: str
    wire_dtype: torch.dtype | None = None

    def costs(self, configs: Sequence[TableConfig], placements: Sequence[TablePlacement]) -> Costs:
        """Return the seconds of memory and of links that slices and replicas take."""
        pairs = zip(configs, placements, strict=True)
        return Costs("s_per_step", tuple(self.cost(config, placement) for config, placement in pairs))

    def cost(self, config: TableConfig, placement: TablePlacement) -> Cost:
        """Return the same for a slice of a table, or a replica: of the forward pass, and of the backward pass."""
        is_replica = placement.kind == REPLICATED
        width = config.embedding_dim // placement.num_slices
        samples = self.max_batch * (1 if is_replica else self.world_size)
        lookups = samples * sum(self.lookups_per_sample[name] for name in config.feature_names)
        row_bytes = width * config.data_type.itemsize + _ROW_BYTES
        pooled = self._pooled_bytes(config, samples, width)
        of_all = lookups * self.world_size if is_replica else lookups
        touched = of_all * config.num_embeddings / (of_all + config.num_embeddings)
        forward = lookups * (row_bytes + _LOOKUP_BYTES) + pooled
        backward = lookups * _SORTED_BYTES + 2 * pooled + 2 * touched * (row_bytes + self._state_bytes(width))
        away = (self.world_size - 1) / self.world_size
        sent, received = away * (pooled + lookups * _INDEX_BYTES), away * pooled
        if is_replica:
            sums = config.num_embeddings * width * _FLOAT_BYTES
            backward, sent, received = backward + 4 * sums, 0.0, 2 * away * sums
        memory, link = self.rates.memory, self.rates.link
        return (forward / memory, sent / link), (backward / memory, received / link)

    def replicas_overhead(self, configs: Sequence[TableConfig]) -> float:
        """Return the seconds that replicas take, however small they are: launches, and copies of the result.

        What is pooled of replicas, and of the other tables, is read and written again to stand side by side; so are its
        gradients.
        """
        copied = sum(self._pooled_bytes(config, self.max_batch, config.embedding_dim) for config in configs)
        return _REPLICA_LAUNCHES * self.rates.launch + 4 * copied / self.rates.memory

    def _pooled_bytes(self, config: TableConfig, samples: int, width: int) -> int:
        wire_dtype = self.wire_dtype if config.data_type == torch.float32 else None
        return samples * len(config.feature_names) * width * (wire_dtype or config.data_type).itemsize

    def _state_bytes(self, width: int) -> int:
        if self.optimizer == "rowwise_adagrad":
            return _FLOAT_BYTES + _ROW_BYTES
        return _NUM_STATES.get(self.optimizer, 0) * (_FLOAT_BYTES * width + _ROW_BYTES)


def measured_rates(world: World) -> Rates:
    """Return PE 0's measurements, made once in a world, while all PEs measure. Collective; tens of milliseconds."""
    state = _MEASURED.state(world)
    if state.own is None:
        mine = [_memory_rate(world), *_link_rate_and_launch(world)]
        told = world.bootstrap.exchange("embedding-rates", json.dumps(mine).encode())
        state.own = Rates(*json.loads(told[0]))
    rates: Rates = state.own
    return rates


def _memory_rate(world: World) -> float:
    given = torch.zeros(_COPIED_BYTES[world.backend.name], dtype=torch.uint8, device=world.backend.device)
    copy = torch.empty_like(given)
    return 2 * given.numel() / _seconds(world, lambda: copy.copy_(given))


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
    """Return the least time of an action: data loaders and compilers that run beside it only make it longer."""
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
