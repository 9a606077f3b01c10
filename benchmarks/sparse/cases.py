"""The measured cases, and their contents."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

__all__ = ["CASES", "DTYPE", "SWEEPS", "Case", "num_sets", "swept"]

DTYPE = torch.float32
_INDEX_BYTES = 8
_CACHE_BYTES = 60 << 20  # the L2 cache of an H200
_FEWEST_SETS = 2
_MOST_SETS = 8


@dataclass(frozen=True)
class Case:
    """One gradient, the same sizes on every PE. The rows of a PE are distinct and sorted.

    Attributes:
        name: of the case, also where it was made smaller for the host backend.
        rows: R, of the dense gradient.
        rows_per_rank: n, that each PE has.
        dim: elements of a row.
        distribution: of each PE's rows: "uniform"; "zipf": the row of rank k is drawn with a weight of k^-skew, without
            putting it back; "overlap": `shared` of the rows are on all PEs, the others on one PE.
        skew: see "zipf".
        shared: see "overlap"; 0 is disjoint, 1 identical.
        point: where a sweep has this case on its axis.
    """

    name: str
    rows: int
    rows_per_rank: int
    dim: int
    distribution: str
    skew: float = 0.0
    shared: float = 0.0
    point: float | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.dim * DTYPE.itemsize

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.rows * self.row_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of a PE's indices and values."""
        return self.rows_per_rank * (self.row_bytes + _INDEX_BYTES)

    def sparse_bytes(self, rows: float) -> float:
        """Return the bytes of so many rows and their indices."""
        return rows * (self.row_bytes + _INDEX_BYTES)

    def union_at_most(self, world_size: int) -> int:
        """Return how many rows the result can have."""
        return min(self.rows, self.rows_per_rank * world_size)

    def for_host(self) -> Case:
        """Return a small case of the same kind and density, for CPUs."""
        factor = max(25, self.rows // 20_000)
        return dataclasses.replace(
            self,
            rows=self.rows // factor,
            rows_per_rank=max(1, self.rows_per_rank // factor),
            dim=max(4, self.dim // 32),
        )


CASES = {
    case.name: case
    for case in (
        Case("5Mx2048_50k_uniform", 5_000_000, 50_000, 2048, "uniform"),
        # 1.3: the union of 8 x 50k distinct rows has about 220k.
        Case("5Mx2048_50k_zipf", 5_000_000, 50_000, 2048, "zipf", skew=1.3),
        Case("5Mx2048_50k_identical", 5_000_000, 50_000, 2048, "overlap", shared=1.0),
        Case("5Mx2048_50k_disjoint", 5_000_000, 50_000, 2048, "overlap", shared=0.0),
        Case("1Mx128_100k_uniform", 1_000_000, 100_000, 128, "uniform"),
        # 1.58: each of 8 PEs lacks about 12.7k rows.
        Case("100kx512_4k_zipf", 100_000, 4_000, 512, "zipf", skew=1.58),
    )
}

# Two of them are above the range of sparse gradients, so that a crossover with dense ones comes into view.
_DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)
_QUICK_DENSITIES = (0.1, 0.01, 0.001, 0.0001)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_QUICK_SHARES = (0.0, 0.5, 1.0)
SWEEPS = ("sparsity", "overlap")


def swept(sweep: str, *, quick: bool) -> list[Case]:
    """Return the cases of a sweep in the order of its axis: the share of rows that a PE has, or that all have."""
    if sweep == "sparsity":
        return [
            Case(f"1Mx128_{1 - x:.2%}_sparse", 1_000_000, round(1_000_000 * x), 128, "uniform", point=x)
            for x in (_QUICK_DENSITIES if quick else _DENSITIES)
        ]
    return [
        Case(f"1Mx512_50k_{x:.0%}_shared", 1_000_000, 50_000, 512, "overlap", shared=x, point=x)
        for x in (_QUICK_SHARES if quick else _SHARES)
    ]


def num_sets(case: Case, backend: str) -> int:
    """Return how many inputs take turns: with a result each, more than four L2 caches hold, but at most eight."""
    if backend != "cuda":
        return _FEWEST_SETS
    return min(_MOST_SETS, max(_FEWEST_SETS, math.ceil(4 * _CACHE_BYTES / (2 * case.input_bytes))))
