"""Kernel sources with a part taken out, which a test must notice."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from host_driver.build import CUDA

__all__ = ["Edit", "mutated"]


@dataclass(frozen=True)
class Edit:
    """Replace all occurrences of a text, of which there must be as many as stated."""

    file: str
    old: str
    new: str
    count: int = 1


def mutated(folder: Path, edits: tuple[Edit, ...]) -> Path:
    """Copy the kernel sources into a folder, edit them there, and return their root."""
    root = folder / "cuda"
    shutil.copytree(CUDA, root)
    for edit in edits:
        text = (root / edit.file).read_text()
        found = text.count(edit.old)
        assert found == edit.count, f"{edit.file} has {edit.old!r} {found} times, not {edit.count}: update the mutation"
        (root / edit.file).write_text(text.replace(edit.old, edit.new))
    return root
