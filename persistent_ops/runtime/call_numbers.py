"""Numbers of calls: a launch names the earlier call that it belongs to, such as a backward pass its forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["CallNumbers"]

_Name = str | Callable[[], str]

_COUNT_BITS = 39
_CAPTURED = 1 << _COUNT_BITS
_CALLER_SHIFT = _COUNT_BITS + 1
_MOST_NAMES = 256


class CallNumbers:
    """Counts the collective calls of a workspace that other launches belong to, and knows whose they are.

    A call's number is the same on all PEs without a message, since calls that differ are no launch. What a CUDA-graph
    capture records is counted apart, and keeps its number in every replay. A PE may capture more often than others
    without that its eager calls differ; its graphs do then.

    Calls that are not collective have no such numbers. Who makes them is a *caller*, which the PEs have agreed on, and
    a launch says how many calls of its caller came after the one that it belongs to.

    Args:
        is_capturing: `Workspace.is_capturing`.

    Attributes:
        last: number of the last collective call; 0 before.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self.last = 0
        self._is_capturing = is_capturing
        self._num_eager = self._num_captured = 0
        self._names: deque[tuple[int, _Name]] = deque(maxlen=_MOST_NAMES)  # of the last calls
        self._callers: dict[int, str] = {}
        self._named: dict[str, int] = {}

    def count(self) -> None:
        """Number a collective call, which begins."""
        if self._is_capturing():
            self._num_captured += 1
            self.last = self._num_captured | _CAPTURED
        else:
            self._num_eager += 1
            self.last = self._num_eager

    def name(self, number: int, name: _Name) -> None:
        """Let errors say whose call a number is; names of the last ones are kept."""
        self._names.append((number, name))

    def next_of(self, kind: str) -> str:
        """Return a name for the next one of a kind, by their number on this PE."""
        self._named[kind] = self._named.get(kind, 0) + 1
        return f"{kind} {self._named[kind]}"

    def show(self, number: int) -> str:
        """Return a number in the words of an error."""
        if not number:
            return "none"
        caller, count = number >> _CALLER_SHIFT, number & (_CAPTURED - 1)
        if caller:
            told = f"last{f' but {count}' if count else ''}"
            name: _Name | None = self._callers.get(caller, f"caller {caller}")
        else:
            told = f"{count} of those captured in CUDA graphs" if number & _CAPTURED else str(count)
            name = dict(self._names).get(number)
        if name is None:
            return told
        return f"{told} ({name if isinstance(name, str) else name()})"

    # ---- callers -----------------------------------------------------------------------------------------------------

    @property
    def last_caller(self) -> int:
        """The largest number of a caller, 0 if there is none."""
        return max(self._callers, default=0)

    def add_caller(self, caller: int, name: str) -> None:
        """Add a caller: on all PEs, under the same number, above the last number of any PE."""
        self._callers[caller] = name

    @staticmethod
    def of_caller(caller: int, calls_behind: int) -> int:
        """Return the number for the call of a caller, from the number of its later calls."""
        return caller << _CALLER_SHIFT | calls_behind

    # ---- what PEs have in common -------------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        """How far this PE has counted: eager calls, and captured ones."""
        return [self._num_eager, self._num_captured]

    def agree(self, told: Sequence[Sequence[int]]) -> None:
        """Continue at the count of the PE that has counted furthest; `told`: every PE's `counts`.

        A launch that was given up need not have begun on all of them.
        """
        self._num_eager, self._num_captured = (max(of_pes) for of_pes in zip(*told, strict=True))
