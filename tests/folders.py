"""The folders in which tests find each other's modules."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
FOLDERS = [str(folder) for folder in (TESTS, *sorted(TESTS.iterdir())) if any(folder.glob("*.py"))]
