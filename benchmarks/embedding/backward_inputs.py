"""Tables, states and gradients of the backward pass. Their first values can be made again, a table at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

import persistent_ops as po

from .backward_configs import SECTOR_ROWS
from .configs import Config
from .inputs import LookupSet

__all__ = ["EPS", "RATE", "Touched", "Training", "count_touched", "draw_gradient", "first_state", "first_table"]

RATE = 0.05
EPS = 1e-8


class Touched(NamedTuple):
    """Of a set of lookups: rows, and sectors of memory with the states of rows; means over the sets."""

    rows: float
    sectors: float


def count_touched(config: Config, sets: Sequence[LookupSet]) -> Touched:
    """Count what each set of lookups touches in all tables of this PE."""
    table = torch.arange(config.tables, device=sets[0].indices.device).view(-1, 1)
    counts = []
    for drawn in sets:
        rows = drawn.indices.view(config.tables, -1)
        sectors = rows // SECTOR_ROWS + table * config.rows
        counts.append((float((rows + table * config.rows).unique().numel()), float(sectors.unique().numel())))
    return Touched(*(sum(each) / len(sets) for each in zip(*counts, strict=True)))


def first_table(config: Config, rank: int, table: int, out: torch.Tensor) -> torch.Tensor:
    """Write a table as it is at first, uniform in [-1, 1), and return it."""
    seed = 1_000_003 * rank + 2 * table + 1000
    return out.uniform_(-1, 1, generator=torch.Generator(out.device).manual_seed(seed))


def first_state(config: Config, rank: int, table: int, out: torch.Tensor) -> torch.Tensor:
    """Write the state of a table as it is at first, uniform in [0.5, 1.5), and return it.

    A root of what is near zero would make much of the rounding of a gradient.
    """
    seed = 1_000_003 * rank + 2 * table + 1001
    return out.uniform_(0.5, 1.5, generator=torch.Generator(out.device).manual_seed(seed))


def draw_gradient(config: Config, world_size: int, *, rank: int, number: int, device: torch.device) -> torch.Tensor:
    """Return the gradient of a PE's part of the batch for the tables of all PEs, uniform in [-1, 1).

    Returns:
        `[B / P, P * T * D]`.
    """
    shape = (config.batch // world_size, world_size * config.tables * config.dim)
    generator = torch.Generator(device).manual_seed(7_919 * rank + 101 * number + 3)
    return torch.empty(shape, dtype=config.wire_dtype, device=device).uniform_(-1, 1, generator=generator)


class Training:
    """The tables of this PE, and the optimizers that update them; a graph holds what it updates to the run's end.

    Args:
        configs: that will be asked for; those with rows of one width and dtype share their tables.
        device: of the tables.
        rank: of this PE, part of the seed.
    """

    def __init__(self, configs: Sequence[Config], device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._most: dict[tuple[int, torch.dtype], int] = {}
        for config in configs:
            key = (config.dim, config.torch_dtype)
            self._most[key] = max(self._most.get(key, 0), config.tables * config.rows)
        self._storage: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._optimizers: dict[tuple[str, str], tuple[list[torch.Tensor], po.EmbeddingOptimizer]] = {}

    def storage(self, config: Config) -> torch.Tensor:
        """Return `[tables * rows, dim]`, table after table, which is zero at first."""
        key = (config.dim, config.torch_dtype)
        if key not in self._storage:
            shape = (self._most[key], config.dim)
            self._storage[key] = torch.zeros(shape, dtype=config.torch_dtype, device=self._device)
        return self._storage[key][: config.tables * config.rows]

    def optimizer(self, config: Config, optimizer: str) -> tuple[list[torch.Tensor], po.EmbeddingOptimizer]:
        """Return the tables and their optimizer; collective."""
        key = (config.name, optimizer)
        if key not in self._optimizers:
            tables = list(self.storage(config).split(config.rows))
            self._optimizers[key] = (tables, po.EmbeddingOptimizer(tables, optimizer, lr=RATE, eps=EPS))
        return self._optimizers[key]

    def room(self, config: Config, optimizer: str, methods: Iterable[str]) -> int:
        """Return about how many bytes a case takes that are not allocated yet, without gradients."""
        tables = config.tables * config.rows * config.row_bytes
        width = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": config.dim}[optimizer]
        state = config.tables * config.rows * width * 4
        need = 0 if (config.dim, config.torch_dtype) in self._storage else tables
        need += 0 if (config.name, optimizer) in self._optimizers else state
        has_fbgemm = any(name.startswith("fbgemm") for name in methods)
        if has_fbgemm or "unfused_torch" in methods:
            need += state
        # FBGEMM allocates tables before it is given ours; torch's kernels keep sums and rows, in graphs and before.
        fp32_rows = min(config.lookups, config.tables * config.rows) * config.dim * 4
        own = (tables if has_fbgemm else 0, 4 * fp32_rows if "unfused_torch" in methods else 0)
        return need + max(own) + 6 * config.output_bytes

    def reset(self, config: Config, states: Sequence[torch.Tensor]) -> None:
        """Make tables, and states of each of them (or none), what they are at first."""
        for number, table in enumerate(self.storage(config).split(config.rows)):
            first_table(config, self._rank, number, table)
        for number, state in enumerate(states):
            first_state(config, self._rank, number, state)
