"""This PE's own lookups of a subset of the features, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .embedding_features import Features

__all__ = ["Finding", "Findings", "LocalLookups", "SlotFeatures", "counted_lengths", "value_begins"]


class LocalLookups(NamedTuple):
    """Lookups of T slots, as `pool_alone` takes them.

    Attributes:
        indices: `[n]`; those after the last offset are any that were given. There may be fewer than offsets say.
        offsets: `[T * B + 1]`, int64, slot-major.
        weights: `[n]`, float32, or None.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    def for_backward(self) -> LocalLookups:
        """Return lookups that autograd may save: tensors of torch.inference_mode are copied."""
        return LocalLookups(
            *(each.clone() if each is not None and each.is_inference() else each for each in self)  # type: ignore[arg-type]
        )

    def is_short(self) -> torch.Tensor:
        """Return whether there are fewer than offsets say, which the host does not know."""
        return self.offsets[-1] > self.indices.numel()

    def without_bags_if(self, condition: torch.Tensor) -> LocalLookups:
        """Return them with bags that are all empty, if the condition is true on the device."""
        return self._replace(offsets=self.offsets.masked_fill(condition, 0))

    def bags(self) -> torch.Tensor:
        """Return the bag of every lookup; of those after the last offset the last one."""
        return _bags(self.offsets, self.indices.numel())


def counted_lengths(given: Features) -> torch.Tensor:
    """Return the lengths as `EmbeddingInputs` counts bad ones, int64: those below 0 are 0, none exceeds the values."""
    return given.lengths.long().clamp(0, given.values.numel())


class Findings:
    """The properties of a batch's lookups, on their way to the host.

    Args:
        lengths: `[F * B]`, int64.
        chosen: of some slots each.
        limits: rows of each of these slots' tables; None: indices are not looked at.
    """

    def __init__(
        self, lengths: torch.Tensor, chosen: Sequence[LocalLookups], limits: Sequence[torch.Tensor | None]
    ) -> None:
        # A length below 0 may be made up for by another one.
        least = lengths.amin() if lengths.numel() else lengths.sum()
        of_slots = [_finding(lookups, limit) for lookups, limit in zip(chosen, limits, strict=True)]
        words = torch.cat([torch.stack([lengths.sum(), least]), *of_slots])
        self._told = words.to("cpu", non_blocking=True)
        self._moment = torch.cuda.Event() if words.is_cuda else None
        if self._moment is not None:
            self._moment.record()

    def wait(self) -> tuple[int, int, list[Finding]]:
        """Return the sum of all lengths, the least one, and the findings of each of the slots."""
        while self._moment is not None and not self._moment.query():
            pass
        total, least, *words = self._told.tolist()
        return total, least, [Finding(*words[at : at + 3]) for at in range(0, len(words), 3)]


class Finding(NamedTuple):
    """The findings of some slots.

    Attributes:
        lookups: how many they have.
        slot: of the first one that is outside of its table; below 0: none is.
        row: that this one asks for.
    """

    lookups: int
    slot: int
    row: int


def _finding(lookups: LocalLookups, limits: torch.Tensor | None) -> torch.Tensor:
    indices, offsets, _ = lookups
    count, num_bags = offsets[-1:], offsets.numel() - 1
    if limits is None or not indices.numel() or not num_bags:
        return torch.nn.functional.pad(count, (0, 2), value=-1)
    slots = lookups.bags() // (num_bags // limits.numel())
    is_there = torch.arange(indices.numel(), device=indices.device) < count
    is_bad = is_there & ((indices < 0) | (indices >= limits[slots]))
    first = is_bad.int().argmax().view(1)
    return torch.cat([count, torch.where(is_bad[first], slots[first], -1), indices[first].long()])


class SlotFeatures:
    """The features of T slots, in the order of the slots.

    Args:
        slots: numbers of features, of which one may occur several times.
        num_features: F, that lookups have.
        device: of the lookups.

    Attributes:
        is_all: whether they are all features, once each and in their order: lookups are what they are then.
        most: how often a feature occurs.
    """

    def __init__(self, slots: Sequence[int], num_features: int, device: torch.device) -> None:
        self._num_features = num_features
        self.is_all = list(slots) == list(range(num_features))
        self.most = max(map(list(slots).count, slots))
        self._slots = torch.tensor(slots, dtype=torch.int64, device=device)
        # Of each feature its first slot, then its second one, and so on; T where it has no more.
        in_turn = [[len(slots)] * num_features for _ in range(self.most)]
        for slot, feature in enumerate(slots):
            turn = slots[:slot].count(feature)
            in_turn[turn][feature] = slot
        self._in_turn = torch.tensor(in_turn, dtype=torch.int64, device=device)

    def lookups(self, given: Features, lengths: torch.Tensor, room: int) -> LocalLookups:
        """Return the lookups of the slots, one slot after the other; no wait on the host.

        Args:
            given: lookups of all features.
            lengths: of these, as `counted_lengths` returns them.
            room: indices of the result. Where there are more, those at the end are left out.
        """
        values, weights = given.values, given.weights
        if self.is_all:
            return LocalLookups(values, _ends(lengths), weights)
        offsets = _ends(self._of_slots(lengths))
        if not values.numel() or offsets.numel() < 2:
            return LocalLookups(values[:0], offsets, None if weights is None else weights[:0])
        shift = self._of_slots(_ends(lengths)[:-1]) - offsets[:-1]
        sources = torch.arange(room, device=values.device).add_(shift[_bags(offsets, room)])
        is_there = (sources >= 0) & (sources < values.numel())  # unless lengths are bad
        sources.clamp_(0, values.numel() - 1)
        indices = torch.where(is_there, values[sources], -1)
        return LocalLookups(indices, offsets, None if weights is None else weights[sources])

    def to_values(
        self, of_lookups: torch.Tensor, offsets: torch.Tensor, begins: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return for each of a batch's values the sum over its lookups, in the order of the slots.

        Args:
            of_lookups: `[n]`: of each of the lookups that `lookups` has returned, floating-point.
            offsets: of these.
            begins: `[F + 1]`, int64: where each feature's values begin, and the last one's end.
            count: values of the batch.

        Returns:
            `[count]`; 0 where a value has no lookup. No wait on the host.
        """
        if self.is_all:
            return of_lookups
        total = of_lookups.new_zeros(count)
        num_slots, most = self._slots.numel(), of_lookups.numel()
        if not count or not most or offsets.numel() < 2:
            return total
        places = torch.arange(count, device=total.device)
        features = torch.searchsorted(begins, places, right=True).sub_(1)
        is_one = (features >= 0) & (features < self._num_features)
        features.clamp_(0, self._num_features - 1)
        first, shift = offsets[:: (offsets.numel() - 1) // num_slots], places - begins[features]
        for slots in self._in_turn:
            slot = slots[features]
            at = first[slot] + shift
            has_one = is_one & (slot < num_slots) & (at >= 0) & (at < most)
            total = total + torch.where(has_one, of_lookups[at.clamp_(0, most - 1)], 0.0)
        return total

    def _of_slots(self, of_bags: torch.Tensor) -> torch.Tensor:
        of_slots: torch.Tensor = of_bags.unflatten(0, (self._num_features, -1))[self._slots]  # type: ignore[no-untyped-call]
        return of_slots.flatten()


def value_begins(given: Features, num_features: int) -> torch.Tensor:
    """Return where each feature's values begin in a batch, and the last one's end, int64."""
    counts = counted_lengths(given).unflatten(0, (num_features, -1)).sum(1)  # type: ignore[no-untyped-call]
    return _ends(counts)


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Return 0 and the sums of the lengths so far."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _bags(offsets: torch.Tensor, count: int) -> torch.Tensor:
    places = torch.arange(count, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True).sub_(1).clamp_(0, offsets.numel() - 2)
