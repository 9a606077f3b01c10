"""This PE's own lookups of some of its features, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .embedding_features import Features

__all__ = ["Counts", "LocalLookups", "SlotFeatures", "check_features"]

_INTEGERS = (torch.int32, torch.int64)


class LocalLookups(NamedTuple):
    """Lookups of T slots, as `pool_alone` takes them.

    Attributes:
        indices: `[n]`; those behind the last offset are any that were given.
        offsets: `[T * B + 1]`, int64, slot-major.
        weights: `[n]`, float32, or None.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def check_features(
    given: Features, num_features: int, max_batch: int, device: torch.device, *, is_weighted: bool
) -> None:
    """Raise ValueError or TypeError for lookups of another form than `num_features` features have."""
    for name, tensor, dtypes in (
        ("values", given.values, _INTEGERS),
        ("lengths", given.lengths, _INTEGERS),
        ("per_sample_weights", given.weights, (torch.float32,)),
    ):
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name}: expected a contiguous 1-D tensor on {device}, got {tensor.dim()}-D on {tensor.device}"
            )
    if (given.weights is not None) != is_weighted:
        raise ValueError(f"per_sample_weights: expected exactly where is_weighted, which is {is_weighted}")
    if given.weights is not None and given.weights.shape != given.values.shape:
        raise ValueError(f"per_sample_weights: expected {list(given.values.shape)}, got {list(given.weights.shape)}")
    samples, rest = divmod(given.lengths.numel(), num_features)
    if rest:
        raise ValueError(f"lengths: expected F * B elements for F = {num_features}, got {given.lengths.numel()}")
    if samples > max_batch:
        raise ValueError(f"lengths: {samples} samples, but max_batch is {max_batch}")


class Counts:
    """How many lookups a batch has, on their way to the host.

    Args:
        lengths: `[F * B]`, int64.
        offsets: of some slots each, where their bags begin and end.
    """

    def __init__(self, lengths: torch.Tensor, offsets: Sequence[torch.Tensor]) -> None:
        # A length below 0 may be made up for by another one.
        least = lengths.amin() if lengths.numel() else lengths.sum()
        words = torch.stack([lengths.sum(), least, *(each[-1] for each in offsets)])
        self._told = words.to("cpu", non_blocking=True)
        self._moment = torch.cuda.Event() if words.is_cuda else None
        if self._moment is not None:
            self._moment.record()

    def wait(self) -> tuple[int, int, list[int]]:
        """Return the sum of all lengths, the least one, and the sums of each of the slots."""
        while self._moment is not None and not self._moment.query():
            pass
        total, least, *of_slots = self._told.tolist()
        return total, least, of_slots


class SlotFeatures:
    """The features of T slots, in the order of the slots.

    Args:
        slots: numbers of features, of which one may occur several times.
        num_features: F, that lookups have.
        device: of the lookups.
    """

    def __init__(self, slots: Sequence[int], num_features: int, device: torch.device) -> None:
        self._num_features = num_features
        self._is_all = list(slots) == list(range(num_features))
        self._most = max(map(list(slots).count, slots))
        self._slots = torch.tensor(slots, device=device)

    def offsets(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return where the slots' bags begin and end, `[T * B + 1]`, int64."""
        return _ends(lengths if self._is_all else self._of_slots(lengths))

    def lookups(self, given: Features, lengths: torch.Tensor, offsets: torch.Tensor, count: int | None) -> LocalLookups:
        """Return the lookups of the slots, one slot behind the other; no wait on the host.

        Args:
            given: those of all features.
            lengths: of these, int64.
            offsets: of the slots.
            count: how many there are; None for room for as many as there may be.
        """
        values, weights = given.values, given.weights
        most = values.numel() * self._most
        room = most if count is None else min(max(count, 0), most)
        if self._is_all:
            return LocalLookups(values, offsets, weights)
        if not room:
            return LocalLookups(values[:0], offsets, None if weights is None else weights[:0])
        shift = self._of_slots(_ends(lengths)[:-1]) - offsets[:-1]
        places = torch.arange(room, device=values.device)
        bags = torch.searchsorted(offsets, places, right=True).sub_(1).clamp_(0, shift.numel() - 1)
        sources = places.add_(shift[bags]).clamp_(0, values.numel() - 1)
        return LocalLookups(values[sources], offsets, None if weights is None else weights[sources])

    def _of_slots(self, of_bags: torch.Tensor) -> torch.Tensor:
        of_slots: torch.Tensor = of_bags.unflatten(0, (self._num_features, -1))[self._slots]  # type: ignore[no-untyped-call]
        return of_slots.flatten()


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Return 0 and the sums of the lengths so far."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
