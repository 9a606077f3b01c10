"""A tile that travels to a peer in pieces, one in some steps of a loop that computes something else."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Piece", "Transfer", "finish_transfer", "first_piece", "move_piece", "no_transfer"]


class Transfer(NamedTuple):
    """A tile of a row-major matrix that travels, or none.

    Attributes:
        target, staged: pointers to its first element, on the peer and on this PE, where all threads have stored it.
        stride: elements from row to row.
        height, width: of what lies within the matrix; height 0: no tile.
    """

    target: tl.tensor
    staged: tl.tensor
    stride: tl.tensor
    height: tl.tensor
    width: tl.tensor


class Piece(NamedTuple):
    """Rows of the tile, which are loaded in one step and stored in the next one.

    Attributes:
        held, has: what was loaded and not stored so far, and which of it is there.
        left: rows of the tile that were not loaded so far.
        offset: of the next piece, in elements.
        due: the step that loads it.
    """

    held: tl.tensor
    has: tl.tensor
    left: tl.tensor
    offset: tl.tensor
    due: tl.tensor


@triton.jit
def no_transfer(out):
    """Return no transfer."""
    zero = tl.full([], 0, tl.int32)
    return Transfer(out, out, zero, zero, zero)


@triton.jit
def first_piece(transfer, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Begin to move a tile, in pieces of ROWS x COLS elements."""
    zero = tl.full([], 0, tl.int32)
    held = tl.zeros([ROWS, COLS], transfer.staged.dtype.element_ty)
    return Piece(held, tl.zeros([ROWS, COLS], tl.int1), transfer.height, zero, zero)


@triton.jit
def _move(transfer, piece, is_due, every):
    """Store the piece that is held; load the next one where it is due."""
    ROWS: tl.constexpr = piece.held.shape[0]
    COLS: tl.constexpr = piece.held.shape[1]
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    place = rows * transfer.stride + columns
    target = transfer.target + (piece.offset - ROWS * transfer.stride)
    tl.store(tl.multiple_of(target + place, (1, 16)), piece.held, mask=piece.has)
    has = (rows < tl.where(is_due, piece.left, 0)) & (columns < transfer.width)
    held = tl.load(tl.multiple_of(transfer.staged + piece.offset + place, (1, 16)), mask=has)
    left = piece.left - tl.where(is_due, ROWS, 0)
    offset = piece.offset + tl.where(is_due, ROWS * transfer.stride, 0)
    return Piece(held, has, left, offset, piece.due + tl.where(is_due, every, 0))


@triton.jit
def move_piece(transfer, piece, step, every):
    """Go on by a step of the loop, each `every`-th one of which loads a piece; return the piece that comes next."""
    return _move(transfer, piece, step == piece.due, every)


@triton.jit
def finish_transfer(transfer, piece):
    """Move what is left."""
    while piece.left > -piece.held.shape[0]:
        piece = _move(transfer, piece, True, 1)
