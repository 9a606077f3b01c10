"""Numbers of calls, by which a later launch says in its contract to which call it belongs: a backward pass its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["CallNumbers"]

_Name = str | Callable[[], str]

_COUNT_BITS = 39
_CAPTURED = 1 << _COUNT_BITS
_SERIES_SHIFT = _COUNT_BITS + 1
_MOST_NAMES = 256


class CallNumbers:
    """Counts calls, in series: 0 is of collective launches of this workspace, others are of whoever adds them.

    A number is the same on all PEs as they make the same calls; in series 0 they must, since calls that differ are no
    launch. Each PE counts by itself, so it costs no message. What a CUDA-graph capture records is counted apart, and
    keeps its number in every replay: a PE may capture more often than others without that its eager calls differ. Its
    graphs do then.

    Args:
        is_capturing: `Workspace.is_capturing`.

    Attributes:
        last: number of the last call in series 0; 0 before.
    """

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self.last = 0
        self._is_capturing = is_capturing
        self._counts = {0: [0, 0]}  # by series: of eager calls, and of captured ones
        self._series_names: dict[int, str] = {}
        self._names: dict[int, _Name] = {}  # of the last calls in series 0
        self._named: dict[str, int] = {}

    def count(self, series: int = 0) -> int:
        """Return the number of the call that begins; no two calls have the same."""
        is_captured = self._is_capturing()
        counts = self._counts[series]
        counts[is_captured] += 1
        number = counts[is_captured] | series << _SERIES_SHIFT
        if is_captured:
            number |= _CAPTURED
        if not series:
            self.last = number
        return number

    # ---- names -------------------------------------------------------------------------------------------------------

    def name(self, number: int, name: _Name) -> None:
        """Let an error say whose call a number of series 0 is; names of the last ones are kept."""
        if len(self._names) >= _MOST_NAMES:
            del self._names[next(iter(self._names))]
        self._names[number] = name

    def next_of(self, kind: str) -> str:
        """Return a name for the next one of a kind, by their number on this PE."""
        self._named[kind] = self._named.get(kind, 0) + 1
        return f"{kind} {self._named[kind]}"

    def show(self, number: int) -> str:
        """Return a number as an error tells it."""
        if not number:
            return "none"
        series = number >> _SERIES_SHIFT
        name = self._names.get(number) if series == 0 else self._series_names.get(series, f"series {series}")
        told = str(number & (_CAPTURED - 1))
        if number & _CAPTURED:
            told += " of those captured in CUDA graphs"
        if name is not None:
            told += f" ({name if isinstance(name, str) else name()})"
        return told

    # ---- what PEs have in common -------------------------------------------------------------------------------------

    @property
    def num_series(self) -> int:
        """The largest number of a series."""
        return max(self._counts)

    def add_series(self, series: int, name: str) -> None:
        """Begin a series; all PEs do, with the same number, above that of any PE's last one."""
        self._counts[series] = [0, 0]
        self._series_names[series] = name

    def counts(self) -> list[tuple[int, int, int]]:
        """Return how far this PE has counted: series, eager calls, captured ones."""
        return [(series, *counts) for series, counts in self._counts.items()]  # type: ignore[misc]

    def agree(self, told: Iterable[Iterable[tuple[int, int, int]]]) -> None:
        """Go on where the PE is that has counted furthest; `told`: every PE's `counts`.

        A launch that was given up need not have begun on all of them.
        """
        for of_pe in told:
            for series, *counts in of_pe:
                if (own := self._counts.get(series)) is not None:
                    self._counts[series] = list(map(max, own, counts))
