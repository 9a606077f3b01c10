"""Choice of the kernel for an embedding's backward pass: optimizer step, layout of rows in registers, WGs per SM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...runtime.backend import KernelRequest, LaunchShape
from ...runtime.compile.literals import vector_bytes
from ...runtime.dtypes import SCALARS

__all__ = ["DECAYS", "GRADIENT", "NAME", "STEPS", "Tiles", "check_rounding", "kernel_request", "sample_requests"]

NAME = "embedding_backward"
GRADIENT = "gradient"  # the step that writes rows' sums and leaves tables alone
STEPS = {
    "sgd": "kSgd",
    "adagrad": "kAdagrad",
    "rowwise_adagrad": "kRowwiseAdagrad",
    "adam": "kAdam",
    GRADIENT: "kGradient",
}
ROUNDINGS = {"nearest": "kNearest", "stochastic": "kStochastic"}
DECAYS = {"none": "kNone", "l2": "kL2", "decoupled": "kDecoupled"}
_THREADS = 256
_HOST_LANES = 32
_LANES = (8, 16, 32)  # of a tile
_BLOCKS_PER_SM = {1: 3, 2: 3, 4: 2}  # by the chunks of a row that a lane has: its registers


class Tiles(NamedTuple):
    """How rows lie in registers.

    Attributes:
        lanes: of a warp that have a row.
        row_chunks: of 16 bytes of it, that they have at a time.
        has_wide_rows: whether rows may have more.
    """

    lanes: int
    row_chunks: int
    has_wide_rows: bool

    @classmethod
    def of(cls, row_bytes: int, lanes: int | None = None) -> Tiles:
        """Return the tiles for rows of at most so many bytes.

        Args:
            row_bytes: of the widest row.
            lanes: see `Tuning`.
        """
        chunks = -(-row_bytes // vector_bytes())
        lanes = lanes or next((lanes for lanes in _LANES if chunks <= 2 * lanes), _LANES[-1])
        of_lane = next((count for count in _BLOCKS_PER_SM if chunks <= count * lanes), max(_BLOCKS_PER_SM))
        return cls(lanes, of_lane * lanes, chunks > of_lane * lanes)

    @classmethod
    def on_host(cls, row_bytes: int) -> Tiles:
        """Return the tiles of the host backend, where one lane has a row: fewer libraries.

        Args:
            row_bytes: of the widest row.
        """
        return cls(_HOST_LANES, _HOST_LANES, row_bytes > _HOST_LANES * vector_bytes())


def check_rounding(rounding: str) -> None:
    """Raise ValueError for a rounding that is not in ROUNDINGS."""
    if rounding not in tuple(ROUNDINGS):
        raise ValueError(f"rounding: expected one of {', '.join(map(repr, ROUNDINGS))}, got {rounding!r}")


def kernel_request(
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    step: str,
    *,
    pooling: str,
    is_weighted: bool,
    is_aligned: bool,
    tiles: Tiles,
    decay: str = "none",
    rounding: str = "nearest",
    has_max_norm: bool = False,
    has_wide_keys: bool = False,
    blocks_per_sm: int | None = None,
    has_one_wg: bool = False,
) -> KernelRequest:
    """Return the kernel request for one combination of choices; `has_one_wg`: whether an SM has a large WG alone."""
    enumerator = "kMean" if pooling == "mean" else "kWeightedSum" if is_weighted else "kSum"
    scope = "po::embedding_backward::"
    is_narrow = dtype.itemsize == 2  # more columns a chunk
    has_many_columns = tiles.row_chunks > 2 * tiles.lanes or is_narrow  # in a lane
    is_tight = has_many_columns or tiles.lanes == _LANES[-1] or not is_aligned
    needs_registers = int(step == "adam" or (step == "adagrad" and is_tight))
    needs_registers += (is_weighted or pooling == "mean") + has_wide_keys
    needs_registers += is_narrow and (step == "adam" or decay != "none")
    needs_registers += is_narrow and not is_aligned
    # For rows of 1 KB, or single elements, squares take a few registers more than three WGs of an SM leave.
    is_one_short = step == "rowwise_adagrad" and (
        tiles.row_chunks > 32 if is_narrow else not is_aligned and tiles.lanes > _LANES[0]
    )
    needs_registers = max(needs_registers, rounding == "stochastic", is_one_short, has_max_norm)
    lane_chunks, threads = tiles.row_chunks // tiles.lanes, _THREADS
    blocks = blocks_per_sm or max(1, _BLOCKS_PER_SM[lane_chunks] - needs_registers)
    if has_one_wg:
        # Three WGs' windows would be more than the 48 KB of memory that a kernel can declare.
        blocks, threads = 1, _THREADS * min(blocks, 2)
    return KernelRequest.of(
        NAME,
        {
            "scalar": SCALARS[dtype],
            "wire": SCALARS[wire_dtype],
            "step": f"{scope}Step::{STEPS[step]}",
            "pooling": f"{scope}Pooling::{enumerator}",
            "decay": f"{scope}Decay::{DECAYS[decay]}",
            "rounding": f"{scope}Rounding::{ROUNDINGS[rounding]}",
            "has_max_norm": has_max_norm,
            "aligned": is_aligned,
            "wide_keys": has_wide_keys,
            "lanes": tiles.lanes,
            "row_chunks": tiles.row_chunks,
            "wide_rows": tiles.has_wide_rows,
            "threads": threads,
            "blocks_per_sm": blocks,
        },
        LaunchShape(threads),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for dtype, wire_dtype, step, pooling, is_weighted, row_bytes, choices in (
        (bf16, bf16, "rowwise_adagrad", "sum", True, 256, {}),
        (bf16, bf16, "adagrad", "sum", False, 8192, {"decay": "l2", "has_wide_keys": True}),
        (fp32, bf16, "adam", "mean", False, 1024, {"decay": "decoupled"}),
        (fp16, fp16, "sgd", "sum", False, 512, {"rounding": "stochastic", "is_aligned": False}),
        (fp32, fp32, GRADIENT, "sum", True, 32, {}),
    ):
        kind: dict[str, Any] = {
            "pooling": pooling,
            "is_weighted": is_weighted,
            "tiles": Tiles.of(row_bytes),
            "is_aligned": True,
        }
        yield kernel_request(dtype, wire_dtype, step, **{**kind, **choices})
