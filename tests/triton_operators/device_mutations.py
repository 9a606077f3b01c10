"""persistent_ops/triton/device.py with a part changed, which a test must notice.

A place has a tag, `# @name` in a comment of the statement.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from persistent_ops.triton import device

__all__ = ["SOURCE", "TAG", "mutated"]

SOURCE = Path(device.__file__).read_text()
TAG = re.compile(r"# @([a-z-]+)")


def mutated(folder: Path, tag: str, old: str, new: str) -> ModuleType:
    """Return a copy of the module: in the statement with the tag, `new` stands for `old`, which it has once."""
    begin, end = _lines_of(SOURCE, tag)
    lines = SOURCE.splitlines(keepends=True)
    statement = "".join(lines[begin:end])
    assert statement.count(old) == 1, f"@{tag} has {old!r} {statement.count(old)} times: {statement}"
    name = f"{device.__name__}_{tag.replace('-', '_')}"  # in the package, for its relative imports
    path = folder / f"{name}.py"
    path.write_text("".join([*lines[:begin], statement.replace(old, new), *lines[end:]]))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lines_of(source: str, tag: str) -> tuple[int, int]:
    """Return where the tag's statement begins and ends; with the decorators of a function."""
    line = next(number for number, text in enumerate(source.splitlines(), 1) if tag in TAG.findall(text))
    statements = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.stmt)]
    inner = max(
        (each for each in statements if each.lineno <= line <= (each.end_lineno or 0)), key=lambda each: each.lineno
    )
    first = min([inner.lineno, *(each.lineno for each in getattr(inner, "decorator_list", ()))])
    return first - 1, inner.end_lineno or 0
