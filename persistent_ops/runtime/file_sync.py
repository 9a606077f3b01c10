"""Files that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync"]


def sync(path: Path) -> None:
    """Wait until a file's content, or which names a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
