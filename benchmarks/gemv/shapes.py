"""The measured shapes, and the bytes that they read."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch

from persistent_ops.ops.gemv_plan import MAX_VECTORS

__all__ = ["DTYPE", "SHAPES", "Shape", "shape_named", "shape_of"]

DTYPE = torch.bfloat16
_ROTATED_BYTES = 200_000_000  # more than three L2 caches of an H200: a copy of the weight is gone when its turn comes
_FEWEST_COPIES = 3
_MOST_COPIES = 64  # of small weights, which then stay in the cache


@dataclass(frozen=True)
class Shape:
    """One product, the same on every PE.

    Attributes:
        rows: M, the elements of the result.
        columns: K, this PE's share of the vectors.
        vectors: N, multiplied in one call.
        copies: of the weight, of which each call takes the next one.
    """

    rows: int
    columns: int
    vectors: int = 1
    copies: int = _FEWEST_COPIES

    @property
    def name(self) -> str:
        """Return the name of the shape in these sizes."""
        return f"{self.rows}x{self.columns}" + (f"_N{self.vectors}" if self.vectors > 1 else "")

    @property
    def weight_bytes(self) -> int:
        """Bytes that each PE reads per call."""
        return self.rows * self.columns * DTYPE.itemsize

    def for_host(self) -> Shape:
        """Return a small shape of the same kind, for CPUs."""
        return dataclasses.replace(
            self, rows=-(-self.rows // 64), columns=-(-self.columns // 16), copies=min(self.copies, _FEWEST_COPIES)
        )


def shape_of(rows: int, columns: int, vectors: int = 1) -> Shape:
    """Return a shape with as many copies of the weight as no L2 cache holds together."""
    shape = Shape(rows, columns, vectors)
    copies = max(_FEWEST_COPIES, min(_ROTATED_BYTES // shape.weight_bytes + 1, _MOST_COPIES))
    return dataclasses.replace(shape, copies=copies)


def shape_named(name: str) -> Shape:
    """Return the shape of a name such as 8192x1024 or 8192x3584_N8.

    Raises:
        ValueError: it is no such name.
    """
    match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})(?:_N([1-9]\d?))?", name)
    rows, columns, vectors = (int(number or 1) for number in match.groups()) if match else (0, 0, 0)
    if not 1 <= vectors <= MAX_VECTORS:
        raise ValueError(
            f"--shapes: there is no {name}; there are {', '.join(SHAPES)}, and others such as 1280x8192 or "
            f"1280x8192_N4, with at most {MAX_VECTORS} vectors"
        )
    return shape_of(rows, columns, vectors)


SHAPES = {
    shape.name: shape
    for shape in (
        shape_of(8192, 3584),
        shape_of(8192, 1024),
        shape_of(7168, 2048),
        shape_of(16384, 6656),
        shape_of(4096, 1792),
        shape_of(16384, 2048),
        shape_of(8192, 3584, 8),
        shape_of(8192, 3584, 16),
    )
}
