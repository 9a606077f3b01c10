"""Import folders of the tests: their shared modules, the examples, benchmarks and scripts; and of the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
_FILES = (file for file in TESTS.rglob("*.py") if "new_operator" not in file.parts)
FOLDERS = [str(folder) for folder in sorted({file.parent for file in _FILES})]
FOLDERS += [str(TESTS.parent / name) for name in ("launch", "benchmarks", "scripts")]
# Of Triton's interpreter: numpy < 2.4, which that of Triton 3.6 needs (make_venv.sh).
INTERPRETER = str(Path(sys.prefix, "interpreter"))
