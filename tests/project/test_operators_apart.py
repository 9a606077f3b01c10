"""What is shared by all operators knows none of them: which way modules import, names, and headers that have a user."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from host_driver.build import CUDA

import persistent_ops as po

PACKAGE = Path(po.__file__).parent
# Each of these builds on those before it.
LAYERS = ("runtime", "ops", "nn")
OPERATORS = sorted(
    {path.stem for path in PACKAGE.glob("ops/**/*.py")} & {path.stem for path in CUDA.glob("kernels/*.cuh")}
)


def _imported_folders(path: Path) -> set[str]:
    """Return the folders of the package of which a module imports something, in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            here = path.relative_to(PACKAGE.parent).parts[: -node.level] if node.level else ()
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {(*here, *name.split("."))[1] for name in names if here or name.startswith("persistent_ops.")}
    return found


@pytest.mark.parametrize("number", range(len(LAYERS)), ids=LAYERS)
def test_imports_go_one_way(number: int) -> None:
    above = set(LAYERS[number + 1 :])
    files = sorted((PACKAGE / LAYERS[number]).rglob("*.py"))
    assert files and {path.name: found for path in files if (found := _imported_folders(path) & above)} == {}


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_shared_does_not_know_its_name(name: str) -> None:
    folders = (PACKAGE / "runtime", CUDA / "platform", CUDA / "comm")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cuh", ".h")]
    own = {name, name.replace("gemv_all_reduce", "gemv")}
    knowing = [path.name for path in files if any(re.search(rf"\b{word}\b", path.read_text()) for word in own)]
    assert knowing == []


def test_every_header_has_an_includer() -> None:
    paths = [*CUDA.rglob("*.cuh"), *CUDA.rglob("*.h")]
    texts = {path.relative_to(CUDA).as_posix(): re.sub(r"//[^\n]*", "", path.read_text()) for path in paths}
    python = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    left = [path for path in texts if re.fullmatch(r"kernels/\w+\.cuh", path)]
    left += [path for path in re.findall(r'"([\w/]+\.(?:cuh|h))"', python) if path in texts]
    found: set[str] = set()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [each for each in re.findall(r'#include "([^"]+)"', texts[path]) if each in texts]
    assert texts.keys() - found == set()
