"""Modules of the package import in one direction. Every import counts, also for types and in functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import persistent_ops as po

PACKAGE = Path(po.__file__).parent
# Each of these builds on those before it.
LAYERS = ("runtime", "ops", "nn")


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imported(name: str, source: str, modules: set[str], *, is_package: bool = False) -> Iterator[str]:
    """Return the modules from which a module imports something.

    ``from a import b`` is an import of ``a.b`` where that is a module. Of a package's ``__init__`` it is one where it
    takes a name that is defined there. That Python runs the ``__init__`` of all packages around a module is none.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from modules.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = name.split(".")[: (1 if is_package else 0) - node.level or None] if node.level else []
            base = ".".join([*here, *([node.module] if node.module else [])])
            targets = {f"{base}.{alias.name}" for alias in node.names}
            yield from targets & modules
            if targets - modules and base in modules:
                yield base


@functools.cache
def _graph() -> dict[str, set[str]]:
    modules = set(MODULES)
    return {
        name: set(_imported(name, path.read_text(), modules, is_package=path.stem == "__init__"))
        for name, path in MODULES.items()
    }


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    graph = _graph()
    assert sum(map(len, graph.values())) > len(graph)
    assert _cycle(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "import p.b",
        "from p import b",
        "from . import b",
        "from .b import x",
        "if TYPE_CHECKING:\n    from .b import x",
        "def f():\n    from .b import x",
    ],
)
def test_a_cycle_is_found_whatever_the_import(source: str) -> None:
    modules = {"p", "p.a", "p.b"}
    graph = {"p.a": set(_imported("p.a", source, modules)), "p.b": set(_imported("p.b", "from p.a import y", modules))}
    assert set(_cycle(graph)) == {"p.a", "p.b"}


def test_a_name_of_a_package_is_imported_from_its_init() -> None:
    modules = {"p", "p.q", "p.q.a"}
    assert set(_imported("p.q.a", "from . import name", modules)) == {"p.q"}
    assert set(_imported("p.q", "from .. import q", modules, is_package=True)) == {"p.q"}
    assert set(_imported("p.q", "from .a import x\nimport numpy", modules, is_package=True)) == {"p.q.a"}


@pytest.mark.parametrize("number", range(len(LAYERS)), ids=LAYERS)
def test_layers_import_downward(number: int) -> None:
    below = f"{PACKAGE.name}.{LAYERS[number]}."
    above = tuple(f"{PACKAGE.name}.{layer}" for layer in LAYERS[number + 1 :])
    names = [name for name in _graph() if name.startswith(below)]
    assert names and [(name, each) for name in names for each in _graph()[name] if each.startswith(above)] == []
