"""Shared code names no operator, and every shared header has a user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from host_driver.build import CUDA

import persistent_ops as po

PACKAGE = Path(po.__file__).parent
OPERATORS = sorted(
    {path.stem for path in PACKAGE.glob("ops/**/*.py")} & {path.stem for path in CUDA.glob("kernels/*.cuh")}
)


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
