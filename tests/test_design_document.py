"""cuda/DESIGN.md says what is so: names, mutations that guard, numbers of rows, which folder includes which."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
import test_all_reduce_sanitizer
import test_embedding_backward_early
import test_embedding_backward_sanitizer
import test_embedding_inputs_sanitizer
import test_embedding_inversion_sanitizer
import test_embedding_sanitizer
import test_embedding_weight_gradients_sanitizer
import test_gemv_sanitizer
import test_gemv_vectors
import test_lanes_sanitizer
import test_sparse_sanitizer
from mutations import Edit, tags
from sanitizer import Driver, SanitizerSuite

REPOSITORY = Path(__file__).resolve().parent.parent
CUDA = REPOSITORY / "cuda"
TEXT = (CUDA / "DESIGN.md").read_text()
SECTIONS = {part.split(".")[0]: part for part in re.split(r"^## (?=\d)", TEXT, flags=re.MULTILINE)[1:]}
FOLDERS = ("platform", "comm", "sched", "tile", "kernels")
OPERATORS = ("embedding_all_to_all", "gemv_all_reduce", "sparse_all_reduce", "all_reduce")
# The mutations of a test file, and the section that names them where those of the shared protocol do not.
MUTATIONS = {
    "test_embedding_sanitizer": (test_embedding_sanitizer.MUTATIONS, "3"),
    "test_gemv_sanitizer": (test_gemv_sanitizer.MUTATIONS, "7"),
    "test_gemv_vectors": (test_gemv_vectors.MUTATIONS, "7"),
    "test_sparse_sanitizer": (test_sparse_sanitizer.MUTATIONS, "8"),
    "test_all_reduce_sanitizer": (test_all_reduce_sanitizer.MUTATIONS, "9"),
    "test_embedding_backward_sanitizer": (test_embedding_backward_sanitizer.MUTATIONS, "10"),
    "test_embedding_inversion_sanitizer": (test_embedding_inversion_sanitizer.MUTATIONS, "10"),
    "test_embedding_inputs_sanitizer": (test_embedding_inputs_sanitizer.MUTATIONS, "11"),
    "test_embedding_weight_gradients_sanitizer": (test_embedding_weight_gradients_sanitizer.MUTATIONS, "11"),
    "test_lanes_sanitizer": (test_lanes_sanitizer.MUTATIONS, "3"),
}
SHARED = ("2", "3", "4", "5")
# Instructions that no source has, a compiler's family of functions, a program.
_NOT_OURS = re.compile(r"cp\.async\.bulk|fence\.proxy|__atomic$|compute-sanitizer")
_WORD = re.compile(r"[A-Za-z_]\w*")


def _quoted(text: str) -> list[str]:
    """Return what stands between backticks, fenced blocks left out."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


# ---- names -----------------------------------------------------------------------------------------------------------


def _code_of_cpp(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def _code_of_python(text: str) -> str:
    """Return a module without comments and docstrings; other strings stay, as mutations have their names in them."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        if is_documented:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


@functools.cache
def _sources() -> dict[Path, str]:
    """Return the code of kernels, package and tests, this file left out."""
    found = {}
    for folder in ("cuda", "persistent_ops", "tests"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".cuh", ".h", ".cpp"):
                found[path] = _code_of_cpp(path.read_text())
            elif path.suffix == ".py" and path != Path(__file__):
                found[path] = _code_of_python(path.read_text())
    return found


@functools.cache
def _words() -> set[str]:
    return {word for code in _sources().values() for word in _WORD.findall(code)}


def _is_path(span: str) -> bool:
    return span.endswith("/") or re.search(r"\.(cuh|h|py|cpp)$", span) is not None


def _exists(path: str) -> bool:
    return any((root / path).exists() for root in (REPOSITORY, CUDA, REPOSITORY / "persistent_ops"))


def test_every_path_exists() -> None:
    paths = [span for span in _quoted(TEXT) if _is_path(span) and " " not in span]
    assert len(paths) > 30
    missing = [path for path in paths for operator in OPERATORS if not _exists(path.replace("<op>", operator))]
    # Folders are named relative to their own, too.
    missing = [path for path in missing if not any((CUDA / folder / path).exists() for folder in FOLDERS)]
    assert not missing


def test_every_name_exists() -> None:
    spans = [span for span in _quoted(TEXT) if not _is_path(span) and not _NOT_OURS.match(span)]
    unknown = {}
    for span in spans:
        words = {word for part in span.split() if not _is_path(part) for word in _WORD.findall(part)}
        if not words <= _words():
            unknown[span] = words - _words()
    assert not unknown


def test_every_member_is_one() -> None:
    """`A::b` and `A.b` of a type A of the kernels: where A is defined, there is a b."""
    wrong = []
    for span in _quoted(TEXT):
        for owner, member in re.findall(r"\b([A-Z]\w+)(?:\[[^\]]*\])?(?:::|\.)(\w+)", span):
            places = [code for code in _sources().values() if re.search(rf"\b(?:struct|class) [^;(]*\b{owner}\b", code)]
            if places and not any(re.search(rf"\b{member}\b", code) for code in places):
                wrong.append(span)
    assert not wrong


def test_what_is_called_is_a_function() -> None:
    called = {name for span in _quoted(TEXT) for name in re.findall(r"(\w+)\(", span)}
    assert len(called) > 5
    code = "\n".join(_sources().values())
    defined = r"\bdef {0}\(|\b(?!return\b)[\w>&*]+[ &*]{0}\("  # a type, or an end of one, before the name
    assert not [name for name in called if not re.search(defined.format(name), code)]


# ---- mutations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", MUTATIONS)
def test_every_mutation_is_named(file: str) -> None:
    mutations, section = MUTATIONS[file]
    named = {span for each in (*SHARED, section) for span in _quoted(SECTIONS[each])}
    unnamed = sorted(set(mutations) - named)
    assert not unnamed


def _drivers() -> list[Driver]:
    """Return those of all test files."""
    files = [path for path in Path(__file__).parent.glob("test_*.py") if "(SanitizerSuite)" in path.read_text()]
    for path in files:
        importlib.import_module(path.stem)
    return [suite.driver for suite in SanitizerSuite.__subclasses__()]


def _edits() -> list[Edit]:
    """Return every edit of every mutation, and of the builds that fit the kernels to a small world."""
    drivers = _drivers()
    groups = [mutation.edits for driver in drivers for mutation in driver.mutations.values()]
    groups += [build.edits for driver in drivers for build in driver.builds.values()]
    groups += [*test_gemv_vectors.MUTATIONS.values(), *test_embedding_backward_early.MUTATIONS.values()]
    return [edit for group in groups for edit in group]


def test_every_tag_has_a_mutation() -> None:
    assert set(tags()) == {edit.tag for edit in _edits()}


def _guards() -> list[tuple[str, str]]:
    """Return file and name of everything that the document names as a guard."""
    found = []
    header: list[str] = []
    for line in SECTIONS["3"].splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "#":
            header = cells
        elif header:
            found += [("test_embedding_sanitizer", name) for name in _quoted(cells[header.index("guarded by")])]
    for paragraph in re.split(r"\n\n", TEXT):
        if start := re.match(r"Guarded by `tests/(\w+)\.py`", paragraph):
            found += [(start[1], name) for name in _quoted(paragraph) if re.fullmatch(r"\w+", name)]
    return found


def test_every_guard_is_a_mutation_or_a_test() -> None:
    guards = _guards()
    assert {file for file, _ in guards} == set(MUTATIONS) - {"test_gemv_vectors"} and len(guards) > 60
    tests = {word for word in _words() if word.startswith("test_")}
    assert not [(file, name) for file, name in guards if name not in MUTATIONS[file][0] and name not in tests]


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows() -> list[int]:
    return [int(number) for number in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)]


def test_rows_are_numbered_from_one_without_gaps() -> None:
    rows = _rows()
    assert rows == list(range(1, len(rows) + 1)) and len(rows) > 20


def test_rows_that_are_spoken_of_exist() -> None:
    """Rows of the tables, not of a matrix: as row 1, (rows 15 and 16), Row 20 has; and those that comments name."""
    numbers_behind = r"rows? (\d+)(?:(?: to | and )(\d+))?"
    spoken = re.findall(rf"(?i)(?:\bas |\(|^|\. ){numbers_behind}", TEXT, re.MULTILINE)
    for path in _sources():
        if path.suffix in (".cuh", ".h"):
            spoken += re.findall(rf"DESIGN\.md, {numbers_behind}", path.read_text())
    numbers = {int(number) for pair in spoken for number in pair if number}
    assert len(numbers) > 10 and numbers <= set(_rows())


# ---- folders ---------------------------------------------------------------------------------------------------------


def _may_include() -> dict[str, set[str]]:
    """Return what the table of section 1 says."""
    found = {}
    for line in SECTIONS["1"].splitlines():
        if row := re.match(r"\| `(\w+)/` \|.*\| ([^|]+) \|$", line):
            found[row[1]] = set(FOLDERS) if row[2] == "all of them" else {f.strip("/") for f in _quoted(row[2])}
    return found


def _includes() -> dict[str, set[str]]:
    """Return which other folders the files of a folder include."""
    found: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for path in CUDA.rglob("*"):
        if path.suffix in (".cuh", ".h"):
            folder = path.relative_to(CUDA).parts[0]
            found[folder] |= set(re.findall(r'#include "(\w+)/', path.read_text())) - {folder}
    return found


def test_folders_include_what_the_table_says() -> None:
    table, includes = _may_include(), _includes()
    assert list(table) == list(FOLDERS) and {path.name for path in CUDA.iterdir() if path.is_dir()} == set(FOLDERS)
    for folder in FOLDERS[:-1]:
        assert table[folder] == includes[folder], f"{folder}: in the table, and in the files"
    assert includes["kernels"] <= table["kernels"]


def test_arrows_are_those_of_the_table_and_go_one_way() -> None:
    sentence = re.search(r"Arrows go one way: ([^.]+)\.", SECTIONS["1"])
    assert sentence is not None
    arrows: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for chain in re.split(r";|, and ", sentence[1]):
        steps = [re.findall(r"\w+", step) for step in chain.split("->")]
        for number, sources in enumerate(steps):
            for source in sources:
                arrows[source] |= {target for step in steps[number + 1 :] for target in step}
    assert arrows == {folder: targets - {folder} for folder, targets in _may_include().items()}
    assert not [(a, b) for a in FOLDERS for b in FOLDERS if b in arrows[a] and a in arrows[b]]


def test_nvshmem_is_included_in_one_place() -> None:
    places = {path for path, code in _sources().items() if CUDA in path.parents and "#include <nvshmem" in code}
    assert places == {CUDA / "comm" / "put.cuh"}
