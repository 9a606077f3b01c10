"""Inputs that launches change in place (tables, states of an optimizer), and their state after an abort."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import PersistentOpsError
from .torch_private import storage_of_weak

__all__ = ["ChangedInputs", "Changes", "OnAbort"]

_MANY = 1024


class OnAbort(enum.Enum):
    """The state of an input after a launch that was given up."""

    POISON = enum.auto()
    """All bits set, which is NaN: what it holds can be made again."""
    REFUSE = enum.auto()
    """As the launch has left it, and refused until the caller says that it was loaded again."""


@dataclass(frozen=True)
class _Input:
    name: str
    on_abort: OnAbort
    storage: StorageWeakRef
    first: int
    nbytes: int
    reloading: str

    def poison(self) -> None:
        storage = storage_of_weak(self.storage.cdata)
        if storage is not None:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device)
            bytes_.set_(storage, self.first, (self.nbytes,), (1,)).fill_(0xFF)


_Place = tuple[int, int]  # of a storage, and where in it


def _place_of(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size()


class ChangedInputs:
    """The tensors that each launch of a plan changes in place, looked up once for all launches.

    Args:
        tensors: by the name of an argument, contiguous; they keep their memory while the plan is used.
        on_abort: by name, what an abort makes of them.
        reloading: how those that an abort makes unusable are loaded again.
    """

    def __init__(
        self, tensors: Mapping[str, Sequence[torch.Tensor]], on_abort: Mapping[str, OnAbort], reloading: str
    ) -> None:
        self.by_place: dict[_Place, _Input] = {}
        for name, each in tensors.items():
            for tensor in each:
                place = _place_of(tensor)
                storage = StorageWeakRef(tensor.untyped_storage())
                self.by_place[place] = _Input(name, on_abort[name], storage, place[1], tensor.nbytes, reloading)

    def is_alive(self) -> bool:
        """Return whether any of them is."""
        return not all(each.storage.expired() for each in self.by_place.values())


class Changes:
    """The inputs that launches of a world change.

    Args:
        is_capturing: `Workspace.is_capturing`.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self._is_capturing = is_capturing
        self._under_way: set[ChangedInputs] = set()  # by launches that may still give up
        self._captured: set[ChangedInputs] = set()  # by graphs, at every replay
        self._given_up: dict[_Place, _Input] = {}
        self._known: dict[str, ChangedInputs] = {}

    def know(self, name: str, inputs: ChangedInputs) -> None:
        """Let these be refused on all PEs where they are on one, from `recover` on.

        Args:
            name: the same on all PEs.
            inputs: all of this PE's that launches under this name change.
        """
        self._known = {of_name: each for of_name, each in self._known.items() if each.is_alive()} | {name: inputs}

    def begin(self, inputs: ChangedInputs) -> None:
        """Note that the launch to come changes them.

        Raises:
            PersistentOpsError: one of them has to be loaded again.
        """
        for place in self._given_up.keys() & inputs.by_place.keys():
            self._refuse(inputs.by_place[place].name, self._given_up[place])
        noted = self._captured if self._is_capturing() else self._under_way
        if len(noted) > _MANY:
            noted.difference_update([each for each in noted if not each.is_alive()])
        noted.add(inputs)

    def check(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raise where a tensor that is to be read has to be loaded again.

        Args:
            name: of the argument.
            tensors: contiguous.

        Raises:
            PersistentOpsError: one of them shares memory with what a launch that was given up has changed.
        """
        if not self._given_up:
            return
        for tensor in tensors:
            storage, first = _place_of(tensor)
            for (other, begin), given_up in self._given_up.items():
                if storage == other and first < begin + given_up.nbytes and begin < first + tensor.nbytes:
                    self._refuse(name, given_up)

    @staticmethod
    def _refuse(name: str, given_up: _Input) -> None:
        if not given_up.storage.expired():
            raise PersistentOpsError(
                f"{name}: a launch that was given up may have changed a part of this tensor, or of a peer's; "
                f"{given_up.reloading}"
            )

    def settle(self) -> None:
        """Note that the launches so far have completed; tensors that graphs change stay under way."""
        self._under_way.clear()

    def at_risk(self) -> str:
        """Report, before `give_up`, what a launch that was given up may have left half changed; "" if nothing."""
        refused = [
            each
            for inputs in self._under_way | self._captured
            for each in inputs.by_place.values()
            if _is_refused(each)
        ]
        names, ways = sorted({each.name for each in refused}), sorted({each.reloading for each in refused})
        if not refused:
            return ""
        return (
            f"Launches since the last po.check() may have left {', '.join(names)} half updated; they are refused until "
            f"they are loaded: {'; or '.join(ways)}."
        )

    def give_up(self) -> None:
        """Take note that a launch was given up: those under way may be any of its, and what came after it."""
        for inputs in self._under_way | self._captured:
            self._given_up |= inputs.by_place
        self._under_way.clear()
        if not self._is_capturing():
            self._poison()

    def refused(self) -> list[str]:
        """Return the names of the inputs that this PE refuses (`know`), for the peers."""
        refused = {at for at, each in self._given_up.items() if _is_refused(each)}
        return [name for name, inputs in self._known.items() if not refused.isdisjoint(inputs.by_place)]

    def recover(self, refused: Iterable[str]) -> None:
        """Poison once more, now that no launch writes any longer; what was poisoned may be used.

        Args:
            refused: what any PE refuses; so does this one.
        """
        self._poison()
        for name in refused:
            if name in self._known:
                self._given_up |= self._known[name].by_place
        self._given_up = {at: each for at, each in self._given_up.items() if _is_refused(each)}

    def loaded(self, *tensors: torch.Tensor) -> None:
        """Let tensors be used that have been loaded again, as a whole."""
        for tensor in tensors:
            self._given_up.pop(_place_of(tensor), None)

    def _poison(self) -> None:
        for each in self._given_up.values():
            if each.on_abort is OnAbort.POISON:
                each.poison()


def _is_refused(given_up: _Input) -> bool:
    return given_up.on_abort is OnAbort.REFUSE and not given_up.storage.expired()
