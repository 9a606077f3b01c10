"""Files that are there after a machine has lost its power."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["put_in_place", "sync"]


def sync(path: Path) -> None:
    """Wait until a file's content, or which names a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a file to one of the same folder: whatever happens, that is the one before or the new one, whole."""
    sync(written)
    os.replace(written, path)
    sync(path.parent)
