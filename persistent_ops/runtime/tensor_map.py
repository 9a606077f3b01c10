"""Tensor maps: matrices from which kernels copy boxes to shared memory (cuda/platform/tensor_map.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .compile.description import describe
from .dtypes import SCALARS

__all__ = ["TENSOR_MAP", "TensorMaps"]

TENSOR_MAP = "platform/tensor_map.cuh"
_MOST_MAPS = 4096  # that are kept: some MB. A model's layers have several each
_UNIT = 16  # bytes: what the copy engine reads at least, and what rows and addresses are multiples of
_MOST_BOX = 256  # rows, and columns
_SWIZZLES = (0, 32, 64, 128)


class TensorMaps:
    """Tensor maps of a backend, kept by all that they are made of.

    Args:
        encode: makes one, as its bytes.
    """

    def __init__(self, encode: Callable[[torch.Tensor, tuple[int, int], int], bytes]) -> None:
        self._encode = encode
        self._maps: dict[tuple[object, ...], ctypes.Structure] = {}

    def find(self, matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> ctypes.Structure:
        """Return the map of a matrix.

        Args:
            matrix: `[rows, columns]`, float32, float16 or bfloat16, on the device; neighbors in a row lie side by
                side, and rows begin at multiples of 16 bytes.
            box: rows and columns of a tile.
            swizzle: 0, or bytes of a tile's row within which a tile is swizzled: 32, 64 or 128.

        Raises:
            TypeError, ValueError: no map says that.
        """
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype, box, swizzle)
        found = self._maps.get(key)
        if found is None:
            _check(matrix, box, swizzle)
            if len(self._maps) >= _MOST_MAPS:
                del self._maps[next(iter(self._maps))]
            struct = describe(TENSOR_MAP).structs["TensorMap"]
            encoded = self._encode(matrix, box, swizzle)
            found = self._maps[key] = struct.from_buffer_copy(encoded.ljust(ctypes.sizeof(struct), b"\0"))
        return found


def _check(matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> None:
    if matrix.dtype not in SCALARS:
        raise TypeError(f"matrix: expected float32, float16 or bfloat16, got {matrix.dtype}")
    if matrix.dim() != 2 or not matrix.numel() or matrix.stride(1) != 1:
        raise ValueError(
            f"matrix: expected two dimensions that are not empty, and rows without gaps, got shape "
            f"{tuple(matrix.shape)}, strides {matrix.stride()}"
        )
    row_stride = matrix.stride(0) * matrix.element_size()
    if matrix.data_ptr() % _UNIT or row_stride % _UNIT:
        raise ValueError(
            f"matrix: expected rows that begin at multiples of {_UNIT} bytes, got address {matrix.data_ptr():#x} and "
            f"{row_stride} bytes from row to row"
        )
    row_bytes = box[1] * matrix.element_size()
    if not all(1 <= size <= _MOST_BOX for size in box) or row_bytes % _UNIT:
        raise ValueError(f"box: expected 1 to {_MOST_BOX} each, rows a multiple of {_UNIT} bytes, got {box}")
    if swizzle not in _SWIZZLES or (swizzle and row_bytes > swizzle):
        raise ValueError(f"swizzle: expected 0, or 32, 64 or 128 and rows of at most that many bytes, got {swizzle}")
