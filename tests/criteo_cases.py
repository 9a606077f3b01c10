"""Samples in Criteo's format whose fields depend on their number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def criteo_line(number: int, separator: str = "\t") -> str:
    """Return a sample whose fields depend on its number. Some fields are empty."""
    dense = ["" if (number + column) % 5 == 0 else str(number * column - 3) for column in range(13)]
    categorical = [
        "" if (number * 7 + column) % 4 == 0 else f"{number * 1_000_003 + column:08x}" for column in range(26)
    ]
    return separator.join([str(number % 2), *dense, *categorical])


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path
