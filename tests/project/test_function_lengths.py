"""A function is short enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 60  # without the docstring


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    of_docstring = 0 if ast.get_docstring(function) is None else (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - of_docstring


@pytest.mark.parametrize("folder", ["persistent_ops", "benchmarks", "launch", "scripts", "tests"])
def test_functions_are_short(folder: str) -> None:
    lines = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": _lines(node)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert lines and {name: count for name, count in lines.items() if count > MOST_LINES} == {}
