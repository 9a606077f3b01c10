"""The public API: its contents, the results of its functions, and that the examples need no more."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import persistent_ops as po

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
OPEN = re.compile(r"persistent_ops(\.nn|\.triton|\.testing(\.\w+)?)?")  # modules whose names anybody may import


def public() -> dict[str, Any]:
    """Return everything that has a public name, except modules."""
    found = {name: value for module in (po, po.nn) for name, value in vars(module).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def test_public_names_are_functions_and_classes_of_the_package() -> None:
    found = public()
    assert {"init", "Lookups", "StepWatchdog"} <= found.keys()
    assert [name for name, value in found.items() if not str(value.__module__).startswith("persistent_ops")] == []
    assert [name for name, value in found.items() if not (inspect.isroutine(value) or inspect.isclass(value))] == []


def test_what_public_functions_return_is_public() -> None:
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("persistent_ops.")]
    classes = {name for names in modules for name, value in names.items() if _is_class_of_package(value)}
    functions = [value for value in public().values() if inspect.isroutine(value)]
    annotations = [str(inspect.unwrap(each).__annotations__["return"]) for each in functions]
    returned = {word for each in annotations for word in re.findall(r"\w+", each)}
    assert "Work" in returned & classes
    assert returned & classes - public().keys() == set()


def _is_class_of_package(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.startswith("persistent_ops")


# ---- the examples ----------------------------------------------------------------------------------------------------


def internals(source: str) -> list[str]:
    """Return the private parts of the package that a program uses, and where it changes sys.path."""
    found, packages = [], {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken = [(alias.name, alias.asname or alias.name) for alias in node.names]
            packages |= {asname: name for name, asname in taken if name.startswith("persistent_ops")}
            found += [name for name, _ in taken if name.startswith("persistent_ops") and not OPEN.fullmatch(name)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("persistent_ops"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            is_open = OPEN.fullmatch(str(node.module))
            found += [name for name in names if not is_open or _is_internal(name)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            first, _, rest = name.partition(".")
            found += ["sys.path"] * (name == "sys.path")
            if first in packages and _is_internal(f"{packages[first]}.{rest}"):
                found.append(name)
    return found


def _is_internal(name: str) -> bool:
    """Return whether a dotted name is private, or leads to a private module, or into one."""
    value: Any = po
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
        if re.match("_(?!_)", part) or (inspect.ismodule(value) and not OPEN.fullmatch(value.__name__)):
            return True
    return False


@pytest.mark.parametrize("file", sorted(str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*.py")))
def test_examples_use_the_public_api_alone(file: str) -> None:
    assert internals((LAUNCH / file).read_text()) == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import sys\nsys.path.insert(0, '')", ["sys.path"]),
        ("from persistent_ops.runtime.world import World", ["persistent_ops.runtime.world.World"]),
        ("from persistent_ops import ops", ["persistent_ops.ops"]),
        ("import persistent_ops.ops.gemv", ["persistent_ops.ops.gemv"]),
        ("import persistent_ops as po\npo.runtime", ["po.runtime"]),
        ("import persistent_ops as po\npo.init()\npo.nn.leave_room\npo.gemv", []),
        ("import persistent_ops.nn as po_nn\npo_nn.ddp", ["po_nn.ddp"]),
        ("from persistent_ops.nn import _private, balanced_splits", ["persistent_ops.nn._private"]),
        ("from persistent_ops.testing.pes import gather", []),
    ],
)
def test_the_list_sees_what_it_is_to_see(source: str, told: list[str]) -> None:
    assert internals(source) == told
