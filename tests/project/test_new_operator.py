"""A new operator is four files and one line. The files of new_operator/ are tested in a copy of the checkout.

`new_operator/` is a template for a new operator; it is not part of the package. The line stands in each of the two
modules that list the operators. Other tests require the documents of an operator: a page of the kernel with its
releases and guards, a row in cuda/DESIGN.md, and the table of tests.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import persistent_ops as po
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.errors import CompileError

HERE = Path(__file__).resolve().parents[1]
REPOSITORY = HERE.parent
NEW = HERE / "new_operator"
NAME = "all_gather_matmul"
# Of each module that lists the operators: the beginning of its list, and the line.
IMPORTS = {
    "persistent_ops/ops/__init__.py": ("", f"from .{NAME} import {NAME} as {NAME}"),
    "persistent_ops/__init__.py": ("from .ops import (", f"    {NAME} as {NAME},"),
}
# Its own tests, and the tests of all operators that find it automatically.
TESTS = (
    f"tests/ops/test_{NAME}.py",
    "tests/runtime/compile/test_description.py",
    "tests/project/test_design_document.py",
    "tests/project/test_gpu_kernels.py",
)
# Not the driver without mutations: the driver with mutations, all inactive, takes as long to compile. Nor
# inductor, which is slow.
CHOSEN = f"({NAME} or test_every_tag_has_a_mutation) and not test_is_silent[ and not inductor"

pytestmark = pytest.mark.host


def _copy(target: Path) -> None:
    """Copy what a checkout has of the package, its kernels, benchmarks and tests."""
    for folder in ("persistent_ops", "cuda", "benchmarks", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "results", NEW.name, Path(__file__).name)
        shutil.copytree(REPOSITORY / folder, target / folder, ignore=left_out)
    shutil.copy(REPOSITORY / "pyproject.toml", target)


def _add_operator(target: Path) -> None:
    """Add the new files, and a line to each module that lists the operators, where it belongs in their order."""
    shutil.copytree(NEW, target, ignore=shutil.ignore_patterns("__pycache__", "README.md"), dirs_exist_ok=True)
    for file, (head, line) in IMPORTS.items():
        lines = (target / file).read_text().splitlines(keepends=True)
        first = lines.index(f"{head}\n") + 1
        place = next(number for number, other in enumerate(lines) if number >= first and other > line)
        lines.insert(place, f"{line}\n")
        (target / file).write_text("".join(lines))


def _files(root: Path) -> dict[str, str]:
    paths = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def before_and_after(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkout, and the same with the new operator."""
    before, after = tmp_path_factory.mktemp("before"), tmp_path_factory.mktemp("after")
    _copy(before)
    _copy(after)
    _add_operator(after)
    return before, after


def test_it_is_four_files_and_one_line(before_and_after: tuple[Path, Path]) -> None:
    before, after = map(_files, before_and_after)
    assert sorted(after.keys() - before.keys()) == [
        f"benchmarks/{NAME}.py",
        f"cuda/kernels/{NAME}.cuh",
        f"persistent_ops/ops/{NAME}.py",
        f"tests/ops/test_{NAME}.py",
    ]
    assert before.keys() <= after.keys()
    changes = {
        file: [line for line in difflib.ndiff(text.splitlines(), after[file].splitlines()) if line[0] != " "]
        for file, text in before.items()
        if after[file] != text
    }
    assert changes == {file: [f"+ {line}"] for file, (_, line) in IMPORTS.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_passes_its_tests(before_and_after: tuple[Path, Path], tmp_path: Path) -> None:
    """Bits, protocol, graphs, ThreadSanitizer, the command line's bench and trace; nvcc if there is one."""
    root, report = before_and_after[1], tmp_path / "report.xml"
    options = ("-q", "-p", "no:cacheprovider", "-k", CHOSEN, f"--junitxml={report}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-m", "pytest", *TESTS, *options]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = {
        (case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0])
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is None
    }
    assert {"TestBits", "TestProtocol", "TestGraphs", "TestSanitizer"} <= {owner for owner, _ in passed}
    tests = {name for _, name in passed}
    assert {
        "test_gradients",
        "test_opcheck",
        "test_benchmark",
        "test_every_code_of_a_kernel_has_its_text",
        "test_every_tag_has_a_mutation",
    } <= tests
    try:
        find_nvcc()
    except CompileError:
        return
    assert "test_what_a_kernel_needs_of_an_sm" in tests


def test_it_is_no_part_of_the_package() -> None:
    assert not hasattr(po, NAME) and not (REPOSITORY / "persistent_ops/ops" / f"{NAME}.py").exists()
