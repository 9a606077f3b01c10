"""Small runs of benchmarks on the host backend, and the lines of their records."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from persistent_ops.testing.record import read_lines, select

__all__ = ["lines_of", "run"]


def run(benchmark: str, *arguments: str) -> int:
    """Run a benchmark quickly on the host backend, and return its exit code."""
    return int(importlib.import_module(benchmark).main(["--quick", "--backend", "host", *arguments]))


def lines_of(benchmark: str, folder: Path, kind: str, *, of: str = "") -> list[dict[str, Any]]:
    """Return the lines of a kind in a benchmark's record. `of` selects another record beside it, such as "tuning"."""
    return select(read_lines(folder / f"{benchmark}{of and '_' + of}.jsonl"), kind)
