"""cuda/DESIGN.md and the pages beside the kernels list the actual kernels, mutations and layers."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

from folders import FOLDERS
from mutations import Edit, tags
from sanitizer import Driver, SanitizerSuite

TESTS = Path(__file__).resolve().parents[1]
CUDA = TESTS.parent / "cuda"
DOCUMENTS = [path.read_text() for path in (CUDA / "DESIGN.md", *CUDA.glob("kernels/*.md"))]


def _quoted(text: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


# ---- mutations -------------------------------------------------------------------------------------------------------


@functools.cache
def _modules() -> dict[str, dict[str, tuple[Edit, ...]]]:
    """Return the test files with mutations, and the mutations of each file that no driver has."""
    found = {}
    for path in (path for folder in FOLDERS for path in Path(folder).glob("test_*.py")):
        if re.search(r"\(SanitizerSuite\)|^MUTATIONS\b", path.read_text(), re.MULTILINE) and path != Path(__file__):
            own = getattr(importlib.import_module(path.stem), "MUTATIONS", {})
            found[path.stem] = {name: edits for name, edits in own.items() if isinstance(edits, tuple)}
    return found


def _drivers() -> list[tuple[str, Driver]]:
    """Return the mutations of all test files, with the file."""
    _modules()
    return [(suite.__module__, suite.driver) for suite in SanitizerSuite.__subclasses__()]


def _edits() -> list[Edit]:
    """Return every edit of every mutation, and of the builds that fit the kernels to a small world."""
    drivers = [driver for _, driver in _drivers()]
    groups = [mutation.edits for driver in drivers for mutation in driver.mutations.values()]
    groups += [build.edits for driver in drivers for build in driver.builds.values()]
    groups += [edits for mutations in _modules().values() for edits in mutations.values()]
    return [edit for group in groups for edit in group]


def test_every_tag_has_a_mutation() -> None:
    assert set(tags()) == {edit.tag for edit in _edits()}


def _guards() -> set[tuple[str, str]]:
    """Return file and name of every guard in a document."""
    found = []
    for text in DOCUMENTS:
        of_tables = re.search(r'"Guarded by" names mutations in `tests/(?:\w+/)*(\w+)\.py`', text)
        header: list[str] = []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells or cells[0] == "#":
                header = cells
            elif "guarded by" in header:
                assert of_tables is not None
                found += [(of_tables[1], name) for name in _quoted(cells[header.index("guarded by")])]
        for paragraph in re.split(r"\n\n", text):
            if start := re.match(r"Guarded by `tests/(?:\w+/)*(\w+)\.py`", paragraph):
                found += [(start[1], name) for name in _quoted(paragraph) if re.fullmatch(r"\w+", name)]
    return set(found)


def test_every_guard_is_a_mutation_or_a_test() -> None:
    guards = _guards()
    mutations = {(file, name) for file, driver in _drivers() for name in driver.mutations}
    assert {file for file, _ in guards} == {file for file, _ in mutations}
    tests = {name for path in TESTS.rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert not [guard for guard in guards if guard not in mutations and guard[1] not in tests]


# ---- folders ---------------------------------------------------------------------------------------------------------


def _includes() -> dict[str, set[str]]:
    """Return the other folders that the files of a folder include."""
    found: dict[str, set[str]] = {path.name: set() for path in CUDA.iterdir() if path.is_dir()}
    for path in CUDA.rglob("*"):
        if path.suffix in (".cuh", ".h"):
            folder = path.relative_to(CUDA).parts[0]
            found[folder] |= set(re.findall(r'#include "(\w+)/', path.read_text())) - {folder}
    return found


def test_folders_include_what_the_table_says_and_arrows_go_one_way() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", DOCUMENTS[0], re.MULTILINE)
    includes = _includes()
    assert {folder for folder, _ in rows} == includes.keys()
    for number, (folder, may_include) in enumerate(rows):
        below = {other for other, _ in rows[:number]}
        assert includes[folder] <= below, folder
        if may_include != "all of them":
            assert includes[folder] == {name.strip("/") for name in _quoted(may_include)}, folder


def test_nvshmem_is_included_in_one_place() -> None:
    places = [path for path in CUDA.rglob("*.*h") if re.search(r"^#include <nvshmem", path.read_text(), re.MULTILINE)]
    assert places == [CUDA / "comm" / "put.cuh"]
