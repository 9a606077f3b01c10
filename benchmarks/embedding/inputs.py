"""Tables and lookups, made on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .configs import Config

__all__ = ["DISTRIBUTIONS", "LookupSet", "Tables", "draw_lookups", "draw_rows", "num_sets"]

DISTRIBUTIONS = ("uniform", "zipf")
ZIPF_EXPONENT = 1.05
_SPREAD = 2654435761  # a prime: multiplying by it permutes the rows of any smaller table
_CACHE_BYTES = 60 << 20  # the L2 cache of an H200
_CHUNK = 1 << 25  # indices drawn at a time


class Tables:
    """Tables of this PE, shared by all configs of one row width and type.

    Args:
        configs: that will be asked for.
        device: of the tables.
        rank: of this PE, part of the seed.
    """

    def __init__(self, configs: list[Config], device: torch.device, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._num_rows: dict[tuple[int, str], int] = {}
        for config in configs:
            key = (config.dim, config.dtype)
            self._num_rows[key] = max(self._num_rows.get(key, 0), config.tables * config.rows)
        self._storage: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, config: Config) -> torch.Tensor:
        """Return `[tables * rows, dim]`, table after table, uniform in [-1, 1)."""
        key = (config.dim, config.dtype)
        if key not in self._storage:
            generator = torch.Generator(self._device).manual_seed(1000 + self._rank)
            storage = torch.empty(self._num_rows[key], config.dim, dtype=config.torch_dtype, device=self._device)
            for part in storage.split(100_000):  # a generator's call takes fewer than 2^31 elements
                part.uniform_(-1, 1, generator=generator)
            self._storage[key] = storage
        return self._storage[key][: config.tables * config.rows]


@dataclass(frozen=True)
class LookupSet:
    """The lookups of one call; bags all have the config's pooling.

    Attributes:
        indices: `[n]`, int64, feature-major (bag t * B + b), within each table: what the fused operator takes.
        offsets: `[T * B + 1]`, int64; the same for both orders.
        joint_indices: `[n]`, int64, sample-major (bag b * T + t), into all tables as one: with these a single
            embedding_bag call writes what the exchange sends, without a transpose.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    joint_indices: torch.Tensor


def num_sets(config: Config) -> int:
    """Return how many lookup sets take turns: at least 3, and more rows than four L2 caches hold."""
    return max(3, math.ceil(4 * _CACHE_BYTES / config.read_bytes)) if config.rows > 10_000 else 3


def draw_lookups(config: Config, distribution: str, *, seed: int, device: torch.device) -> LookupSet:
    """Draw one set.

    Args:
        config: shape.
        distribution: "uniform", or "zipf": the row of rank k (from 1) with probability proportional to k^-1.05, the
            ranks spread over the table by a multiplicative hash and another place in each table.
        seed: of the generator; another on every PE and for every set.
        device: where to draw.
    """
    generator = torch.Generator(device).manual_seed(seed)
    count = config.lookups
    indices = torch.empty(count, dtype=torch.int64, device=device)
    draw_rows(indices, config.rows, distribution, generator)
    by_table = indices.view(config.tables, config.batch, config.pooling)
    table = torch.arange(config.tables, dtype=torch.int64, device=device).view(-1, 1, 1)
    if distribution == "zipf":
        by_table.add_(table * 7919).remainder_(config.rows)
    joint = (by_table + table * config.rows).transpose(0, 1).reshape(-1)
    bags = config.tables * config.batch
    offsets = torch.arange(bags + 1, dtype=torch.int64, device=device) * config.pooling
    return LookupSet(indices, offsets, joint)


def draw_rows(out: torch.Tensor, rows: int, distribution: str, generator: torch.Generator) -> None:
    """Fill a vector, int64, with lookups in a table of so many rows; see `draw_lookups`."""
    if distribution == "zipf":
        weights = torch.arange(1, rows + 1, dtype=torch.float64, device=out.device).pow_(-ZIPF_EXPONENT)
        cumulative = weights.cumsum(0)
        cumulative /= cumulative[-1].clone()
    for part in out.split(_CHUNK):
        if distribution == "zipf":
            drawn = torch.rand(part.numel(), dtype=torch.float64, device=out.device, generator=generator)
            ranks = torch.searchsorted(cumulative, drawn).clamp_(max=rows - 1)
            part.copy_(ranks.mul_(_SPREAD).remainder_(rows))
        else:
            part.random_(0, rows, generator=generator)
