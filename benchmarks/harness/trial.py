"""One case of an experiment on one PE: the methods as calls, the expected results, and the least traffic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from persistent_ops.runtime.world import World

from .timing import Subject, record

__all__ = ["LeftOut", "Trial"]


class LeftOut(Exception):
    """A method cannot be timed here, through no fault of ours; the message says why. Raised by `Trial.subject`."""


class Trial(ABC):
    """One case, ready on this PE. All PEs make the same trials and call the same methods of them.

    Attributes:
        fields: that name the case in each of its lines in the record.
        methods: that can run here, of those asked for.
        moved: bytes that a PE reads from its memory, and sends to peers, at the least, for the limit of a time; None
            where the record has the limit elsewhere.
    """

    fields: dict[str, Any]
    methods: Sequence[str]
    moved: tuple[float, float] | None = None

    @property
    def title(self) -> str:
        """The case in words."""
        return ", ".join(value for value in self.fields.values() if isinstance(value, str))

    @abstractmethod
    def calls(self, name: str) -> list[Callable[[], Any]]:
        """Return one call of a method per set of inputs, in the order in which they take turns."""

    @abstractmethod
    def check(self) -> dict[str, Any]:
        """Compare the methods' results with the expected ones; collective.

        Returns:
            "failures", each "METHOD, what is wrong" on this PE, and numbers, of which the record gets the PEs' largest.
        """

    def subject(self, world: World, name: str, calls: list[Callable[[], object]]) -> Subject:
        """Return the timed subject: on GPUs one graph of the calls."""
        return record(world, calls)

    def check_replays(self, subjects: Mapping[str, Subject]) -> list[str]:
        """Compare the timed calls with plain calls; collective. Returns failures as `check` does."""
        return []

    def measured(self, name: str, calls: int) -> dict[str, Any]:
        """Return a method's own fields of its "time" line; `calls`: in a replay."""
        return {}

    def problem_of(self, name: str, tuning: Any) -> str | None:
        """Return why a method has no kernel for a Tuning; None if it has one, or if only the call shows it.

        Launches nothing.
        """
        return None

    def check_tuned(self, name: str) -> list[str]:
        """Compare a method's result under the Tuning that holds; collective. Returns failures as `check` does."""
        return [failure for failure in self.check()["failures"] if failure.startswith(f"{name},")]

    def close(self) -> None:  # noqa: B027
        """Give symmetric memory back; collective."""
