"""Products of matrices on the tensor cores: shapes, tiles, and how a product is divided among work-groups."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.backend import Backend, LaunchShape
from ..runtime.compile.description import Description
from ..runtime.tuning import BoundedTuning, at_least

__all__ = [
    "CANDIDATES",
    "DTYPES",
    "HOST_TILE",
    "Division",
    "Rows",
    "Shape",
    "Tile",
    "Tuning",
    "blocks_of_part",
    "choose_tile",
    "has_tensor_cores",
    "is_row_major",
    "kernel_config",
    "launch_shape",
    "predicted_cycles",
]

DTYPES = (torch.float16, torch.bfloat16)
_Queries = Mapping[str, Callable[..., int]]
_UNIT = 16  # bytes: what rows of matrices begin at multiples of
_DEPTH = 64  # of a step, on GPUs
_RESERVED_BYTES = 1024  # of a WG's memory, for what the kernel declares itself
_MOST_STAGES = 8
_BAND = 8  # clusters whose rows of tiles share columns of b in the L2 cache


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices in place of what suits the shape. They change the order of sums, and so bits, by `parts` alone.

    Attributes:
        rows, columns: of a tile, for the tensor cores: 128 or 256, and a multiple of 16.
        sharing: WGs that share tiles of b by multicast in their cluster.
        parts: split-K: parts of the sum, 1 or 2, which different WGs add up.
        stages: steps whose tiles are in shared memory at the same time.
        band: rows of tiles, of clusters, that are made side by side.
    """

    rows: int | None = None
    columns: int | None = None
    sharing: int | None = None
    parts: int | None = None
    stages: int | None = at_least(2, None)
    band: int | None = None


class Shape(NamedTuple):
    """A product: `[rows, depth] @ [depth, columns]`.

    Attributes:
        rows, depth, columns: M, K, N.
        a_k_major, b_k_major: whether K is the contiguous dimension: `a` has stride 1 in its second dimension, `b` in
            its first.
    """

    rows: int
    depth: int
    columns: int
    a_k_major: bool
    b_k_major: bool


class Rows(NamedTuple):
    """Which PEs the rows of a product belong to: `ProductRows` in cuda/sched/product_tiles.cuh."""

    parts: int
    first_part: int
    segments: int
    segment_rows: int
    lag: int | None = None  # None: as many tiles as a part has

    @classmethod
    def of_one_pe(cls, rows: int) -> Rows:
        """Return that all of them belong to one."""
        return cls(1, 0, 1, rows)

    def tiles(self, tile_rows: int) -> int:
        """Return the tiles of a part, one below the other."""
        return self.segments * math.ceil(self.segment_rows / tile_rows)


class Tile(NamedTuple):
    """How a product is divided; see `Tuning`."""

    rows: int
    columns: int
    sharing: int
    parts: int
    stages: int

    @property
    def cluster(self) -> int:
        """The WGs of a cluster."""
        return self.sharing * self.parts


HOST_TILE = Tile(8, 8, 1, 1, 2)


# ---- the tile for a shape ------------------------------------------------------------------------------------------

# Measured on an H200.
_STEP_CYCLES = 36  # of a step, beside those of the tensor cores
_LOADED_BYTES_PER_CYCLE = 47  # of an SM, from the L2 cache
_BYTES_PER_CYCLE = 2200  # of all SMs, from memory
CANDIDATES = (
    *itertools.product((128,), range(64, 257, 16), (1, 2), (1,)),
    (256, 160, 2, 1),
    *itertools.product((128,), range(64, 257, 32), (1,), (2,)),
)


def _check(tuning: Tuning) -> None:
    allowed = {"rows": (128, 256), "columns": range(64, 257, 16), "sharing": (1, 2), "parts": (1, 2)}
    for name, values in allowed.items():
        if (value := getattr(tuning, name)) is not None and value not in values:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, values))}, got {value}")


def choose_tile(
    queries: _Queries, shape: Shape, tuning: Tuning, *, num_sms: int, arena_bytes: int, rows: Rows | None = None
) -> Tile:
    """Return the tile that is expected to be the fastest on a Hopper GPU.

    Args:
        queries: of a description with tile/product_loop.cuh.
        shape, tuning: of the product.
        num_sms, arena_bytes: SMs, and bytes of shared memory of each.
        rows: whose rows these are; None for one PE's.

    Raises:
        ValueError: there is none.
    """
    found = []
    rows_of = rows or Rows.of_one_pe(shape.rows)
    for height, columns, sharing, parts in CANDIDATES:
        tile = Tile(
            tuning.rows or height, tuning.columns or columns, tuning.sharing or sharing, tuning.parts or parts, 0
        )
        stages = _stages_of(queries, tile, shape, arena_bytes)
        tile = tile._replace(stages=min(stages, tuning.stages or _MOST_STAGES))
        if tile.stages >= 2 and (cycles := predicted_cycles(queries, tile, shape, rows_of, num_sms)) is not None:
            found.append((cycles, tile))
    if not found:
        raise ValueError(f"no tile suits {shape} with {tuning}")
    return min(found, key=lambda each: (each[0], -each[1].sharing))[1]


def _stages_of(queries: _Queries, tile: Tile, shape: Shape, arena_bytes: int) -> int:
    stage_bytes = queries["stage_bytes"](tile.rows, tile.columns, _DEPTH, shape.a_k_major, shape.b_k_major)
    rest_bytes = queries["rest_bytes"](tile.columns, tile.parts)
    return int((arena_bytes - _RESERVED_BYTES - rest_bytes) // stage_bytes)


def predicted_cycles(queries: _Queries, tile: Tile, shape: Shape, rows: Rows, num_sms: int) -> float | None:
    """Return an estimate of the cycles of an SM; None where the tile cannot be."""
    steps = math.ceil(shape.depth / _DEPTH)
    num_clusters = num_sms // tile.cluster
    tiles = math.ceil(rows.parts * rows.tiles(tile.rows) / tile.sharing) * math.ceil(shape.columns / tile.columns)
    if not num_clusters or steps < tile.parts or (tile.parts > 1 and tiles > num_clusters):
        return None
    products = tile.rows * tile.columns / 32  # of the tensor cores, in a step
    loaded = (min(tile.rows, shape.rows) + tile.columns / tile.sharing) * 2 * _DEPTH
    step = max(products + _STEP_CYCLES, loaded / _LOADED_BYTES_PER_CYCLE)
    waves = math.ceil(tiles / num_clusters)
    from_memory = 2 * (shape.rows + shape.columns) * shape.depth / _BYTES_PER_CYCLE
    piece = queries["piece_columns"](tile.columns, tile.parts)
    stored = 800 + tile.columns / tile.parts / piece * (200 + 5 * piece) * tile.rows / 128
    exchanged = 0 if tile.parts == 1 else 500 + tile.rows * tile.columns / 8
    return max(waves * math.ceil(steps / tile.parts) * step, from_memory) + waves * stored + exchanged


def blocks_of_part(rows: Rows, columns: int, tile: Tile) -> int:
    """Return what WGs finish of a part of the rows of a product with so many columns."""
    return rows.tiles(tile.rows) * math.ceil(columns / tile.columns) * tile.parts


# ---- the division --------------------------------------------------------------------------------------------------


def kernel_config(shape: Shape, tile: Tile, depth: int) -> dict[str, str | int | bool]:
    """Return the fields of a kernel's `Config` that describe its tiles; `depth`: of a step."""
    return {
        "rows": tile.rows,
        "columns": tile.columns,
        "depth": depth,
        "stages": tile.stages,
        "parts": tile.parts,
        "a_k_major": shape.a_k_major,
        "b_k_major": shape.b_k_major,
    }


def launch_shape(description: Description, shape: Shape, tile: Tile, depth: int, *, is_resident: bool) -> LaunchShape:
    """Return what a launch takes; `depth`: of a step."""
    queries = description.queries
    stage_bytes = queries["stage_bytes"](tile.rows, tile.columns, depth, shape.a_k_major, shape.b_k_major)
    return LaunchShape(
        description.constants["kProductThreads"],
        architecture_suffix="a",
        cluster=tile.cluster,
        arena_bytes=tile.stages * stage_bytes + queries["rest_bytes"](tile.columns, tile.parts),
        arena_alignment=1024,
        overlaps_predecessor=True,
        is_resident=is_resident,
        links_nvshmem=False,
    )


class Division:
    """How one product is divided.

    Attributes:
        tile: its tiles.
        depth: of a step.
        grid: WGs.
        blocks_per_part: what WGs finish of a part of the rows.
        piece: rows and columns of what is stored at a time.

    Args:
        backend: of this PE.
        description: of the kernel.
        shape, tuning: of the product.
        rows: whose rows these are.

    Raises:
        ValueError: the tuning does not suit the shape.
    """

    def __init__(self, backend: Backend, description: Description, shape: Shape, tuning: Tuning, rows: Rows) -> None:
        _check(tuning)
        structs, queries = description.structs, description.queries
        if backend.name == "host":  # small tiles, so that small matrices have many
            self.depth = 8
            self.tile = HOST_TILE._replace(
                sharing=tuning.sharing or 1, parts=tuning.parts or 1, stages=tuning.stages or 2
            )
            self.piece = (1, 8)
        else:
            self.depth = _DEPTH
            self.tile = choose_tile(
                queries, shape, tuning, num_sms=backend.num_sms, arena_bytes=backend.arena_bytes, rows=rows
            )
            self.piece = (16, queries["piece_columns"](self.tile.columns, self.tile.parts))
        tile, depth = self.tile, self.depth
        of_part, columns = rows.tiles(tile.rows), math.ceil(shape.columns / tile.columns)
        down = math.ceil(rows.parts * of_part / tile.sharing)
        steps = math.ceil(shape.depth / depth)
        clusters = min(down * columns, max(1, backend.num_sms // tile.cluster))
        if steps < tile.parts or (tile.parts > 1 and clusters < down * columns):
            raise ValueError(f"parts: {tile.parts} need as many steps of {depth}, and a cluster for each tile")
        self.grid = clusters * tile.cluster
        self.blocks_per_part = blocks_of_part(rows, shape.columns, tile)
        self._map = backend.tensor_map
        self._a_k_major, self._b_k_major = shape.a_k_major, shape.b_k_major
        # Rows that do not exist are slow to load. The sums of rows that are not loaded are not stored.
        a_rows = min(tile.rows, math.ceil(rows.segment_rows / 8) * 8) if shape.a_k_major else depth
        self._a_box = (a_rows, depth)
        self._b_box = (tile.columns // tile.sharing, depth) if shape.b_k_major else (depth // tile.sharing, depth)
        self._swizzle = swizzle_of(depth)
        # A band has one PE's rows, so that all rows of a PE are made before those of the next one.
        per_part = max(1, of_part // tile.sharing)
        band = tuning.band or math.ceil(per_part / math.ceil(per_part / _BAND))
        loaded_rows = a_rows if shape.a_k_major else tile.rows
        self.product = structs["Product"](
            tiles=structs["ProductTiles"](rows=down, columns=columns, band=band, steps=steps),
            rows=structs["ProductRows"](
                count=shape.rows,
                parts=rows.parts,
                first_part=rows.first_part,
                segments=rows.segments,
                segment_rows=rows.segment_rows,
                segment_tiles=of_part // rows.segments,
                lag=of_part if rows.lag is None else min(rows.lag, of_part),
            ),
            step_bytes=queries["stage_bytes"](loaded_rows, tile.columns, depth, shape.a_k_major, shape.b_k_major),
        )

    def set_factors(self, product: Any, a: torch.Tensor, b: torch.Tensor) -> None:
        """Set the factors, `[rows, depth]` and `[depth, columns]`, of a `Call`'s product."""
        product.a = self._map(a if self._a_k_major else a.t(), self._a_box, self._swizzle)
        product.b = self._map(b.t() if self._b_k_major else b, self._b_box, self._swizzle)

    def output_map(self, out: torch.Tensor) -> ctypes.Structure:
        """Return the map of a result that is stored in pieces."""
        return self._map(out, self.piece, swizzle_of(self.piece[1]))


def swizzle_of(width: int) -> int:
    """Return the swizzle of boxes with so many elements in a row."""
    return width * 2 if width * 2 > _UNIT else 0


def is_row_major(matrix: torch.Tensor) -> bool | None:
    """Return whether elements of a row follow each other, False for those of a column; None: no rows for the kernel."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if matrix.data_ptr() % _UNIT:
        return None
    if right == 1 and down >= columns and not down * 2 % _UNIT:
        return True
    return False if down == 1 and right >= rows and not right * 2 % _UNIT else None


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether kernels of products run on a device: a Hopper GPU, or the host."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9
