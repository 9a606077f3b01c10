"""The lookups of an embedding batch by table row: sorted in one launch of this PE alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..runtime.world import World

__all__ = ["Inverted", "Rows", "Tuning", "invert"]

_MAX_NARROW_KEY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that lookups are sorted by; what a plan makes once. Its identity is a part of the keys of plans.

    A row's *key* is its table's first key plus its number. Tables that are one tensor have the same first key, so that
    the lookups of such a row lie side by side, whichever of the tables they are in.

    Attributes:
        first_keys: `[T]`, int64, on the device.
        num_rows: `[T]`, int64, on the device.
        num_keys: all keys are below it.
        batch: bags of a table.
    """

    first_keys: torch.Tensor
    num_rows: torch.Tensor
    num_keys: int
    batch: int

    @classmethod
    def of(cls, world: World, first_keys: Sequence[int], num_rows: Sequence[int], batch: int) -> Rows:
        """Return the rows of tables.

        Args:
            world: of this PE.
            first_keys: of each table.
            num_rows: of each table.
            batch: bags of a table.

        Raises:
            ValueError: the lists differ in length, a number is negative, or there are 2^31 bags or more.
        """
        if len(first_keys) != len(num_rows):
            raise ValueError(f"num_rows: expected one for each of {len(first_keys)} tables, got {len(num_rows)}")
        if min((*first_keys, *num_rows, batch), default=0) < 0:
            raise ValueError(
                f"first_keys, num_rows, batch: expected none below 0, got {first_keys}, {num_rows}, {batch}"
            )
        if len(first_keys) * batch >= 2**31:
            raise ValueError(f"batch: at most 2^31 - 1 bags in all tables, got {len(first_keys) * batch}")
        device = world.backend.device
        return cls(
            torch.tensor(first_keys, dtype=torch.int64, device=device),
            torch.tensor(num_rows, dtype=torch.int64, device=device),
            max((first + rows for first, rows in zip(first_keys, num_rows, strict=True)), default=0),
            batch,
        )

    @property
    def num_tables(self) -> int:
        """Return T."""
        return self.first_keys.numel()

    @property
    def num_bags(self) -> int:
        """Return T * B."""
        return self.num_tables * self.batch

    @property
    def key_dtype(self) -> torch.dtype:
        """Return the dtype of `Inverted.keys`: int32 where there are fewer than 2^31 keys."""
        return torch.int32 if self.num_keys <= _MAX_NARROW_KEY else torch.int64


class Inverted(NamedTuple):
    """The lookups of a batch that count, sorted by key; those of a row keep their order.

    N is the number of indices; only the first `count` elements of keys, bags and lookups are written.

    Attributes:
        keys: `[N]`, `Rows.key_dtype`.
        bags: `[N]`, int32: table * B + sample.
        lookups: `[N]`, int32: place in `indices`; None where not asked for.
        counts: `[T * B]`, float32: lookups of a bag that count; None where not asked for.
        count: `[1]`, int64: lookups that count.
    """

    keys: torch.Tensor
    bags: torch.Tensor
    lookups: torch.Tensor | None
    counts: torch.Tensor | None
    count: torch.Tensor


@dataclass(frozen=True)
class Tuning:
    """Choices that change speed and nothing else.

    Attributes:
        work_groups: None for as many as the GPU holds at once.
        threads: of a WG, on the GPU.
        items: lookups of a thread in a tile; None for as many as leave a tile to every WG.
    """

    work_groups: int | None = None
    threads: int = 512
    items: int | None = None


def invert(
    world: World, rows: Rows, indices: torch.Tensor, offsets: torch.Tensor, *, counts: bool, lookups: bool
) -> Inverted:
    """Sort lookups by row, in one launch on the current stream.

    A lookup counts where a bag has it and its index is a row of the bag's table. The bag of a lookup is what a binary
    search of its place among the bags' ends finds (torch.searchsorted, right=True), so any offsets will do; those that
    fall have no bags that anyone meant, but the result is the same every time.

    Args:
        world: of this PE.
        rows: of the tables.
        indices: `[N]`, int32 or int64, contiguous; any numbers.
        offsets: `[T * B + 1]`, int32 or int64, contiguous: bag t * B + b has the lookups offsets[t * B + b] up to
            offsets[t * B + b + 1].
        counts: whether the result has counts.
        lookups: whether the result has lookups.

    Raises:
        TypeError, ValueError: an argument's dtype, shape, layout or device; 2^30 lookups or more.
        RuntimeError: a CUDA-graph capture meets a combination that was not called before.

    Not collective, no host synchronisation; may be captured in a CUDA graph behind a first call.
    """
    raise NotImplementedError
