"""What is timed takes turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["in_turn"]


def in_turn(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield the names `rounds` times over, beginning each round with another one."""
    listed = list(names)
    for number in range(rounds):
        first = number % max(len(listed), 1)
        yield from listed[first:] + listed[:first]
