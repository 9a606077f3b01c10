"""cuda/DESIGN.md and the operators' pages say what is so: names, guards, rows, headings, what includes what."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import Edit, tags
from sanitizer import Driver, SanitizerSuite

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
CUDA = REPOSITORY / "cuda"
# That of the shared protocol, and the operators' pages.
DOCUMENTS = {path.name: path.read_text() for path in (CUDA / "DESIGN.md", *sorted(CUDA.glob("kernels/*.md")))}
SHARED = DOCUMENTS["DESIGN.md"]
TEXT = "\n\n".join(DOCUMENTS.values())
LAYERS = SHARED[SHARED.index("## Layers") : SHARED.index("## One launch")]
FOLDERS = ("platform", "comm", "sched", "tile", "kernels")
OPERATORS = ("embedding_all_to_all", "gemv_all_reduce", "sparse_all_reduce", "all_reduce")
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
    return span.endswith("/") or re.search(r"\.(cuh|h|py|cpp|md|json)$", span) is not None


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


# ---- pages -----------------------------------------------------------------------------------------------------------


def _pages() -> dict[str, str]:
    """Return the page of each kernel, or that of the shared protocol, as its table says."""
    rows = re.findall(r"^\| (?:\[(\w+\.md)\]\(kernels/\1\)|none) \| ([^|]+) \|", SHARED, re.MULTILINE)
    return {kernel: page or "DESIGN.md" for page, kernels in rows for kernel in _quoted(kernels)}


def test_every_kernel_and_every_page_stands_in_the_table() -> None:
    pages = _pages()
    assert sorted(pages) == sorted(path.stem for path in CUDA.glob("kernels/*.cuh"))
    assert set(pages.values()) == DOCUMENTS.keys()
    beside = {page: pages.get(page.removesuffix(".md")) for page in DOCUMENTS if page != "DESIGN.md"}
    assert beside == {page: page for page in beside}, "a page is named after one of its kernels"


# ---- mutations -------------------------------------------------------------------------------------------------------


@functools.cache
def _modules() -> dict[str, dict[str, tuple[Edit, ...]]]:
    """Return the test files with mutations, and those of each that no driver has."""
    found = {}
    for path in TESTS.glob("test_*.py"):
        if re.search(r"\(SanitizerSuite\)|^MUTATIONS\b", path.read_text(), re.MULTILINE) and path != Path(__file__):
            own = getattr(importlib.import_module(path.stem), "MUTATIONS", {})
            found[path.stem] = {name: edits for name, edits in own.items() if isinstance(edits, tuple)}
    return found


def _drivers() -> list[tuple[str, Driver]]:
    """Return those of all test files, with the file."""
    _modules()
    return [(suite.__module__, suite.driver) for suite in SanitizerSuite.__subclasses__()]


def _kernel(driver: Driver) -> str:
    """Return the kernel that a driver runs."""
    is_file = "\n" not in driver.source
    text = (TESTS / "host_driver" / driver.source).read_text() if is_file else driver.source
    (kernel,) = re.findall(r'#include "kernels/(\w+)\.cuh"', text)
    return kernel


def test_every_mutation_is_named() -> None:
    """On the page of the kernel that a driver runs, or of who names the test file; or in the shared protocol."""
    pages = _pages()
    unnamed = {}
    for file, driver in _drivers():
        named = {*_quoted(SHARED), *_quoted(DOCUMENTS[pages[_kernel(driver)]])}
        unnamed[file, _kernel(driver)] = sorted(driver.mutations.keys() - named)
    for file, mutations in _modules().items():
        texts = [text for text in DOCUMENTS.values() if f"`tests/{file}.py`" in text]
        unnamed[file, ""] = sorted(mutations.keys() - {span for text in texts for span in _quoted(text)})
    assert len(unnamed) > 15
    assert {where: names for where, names in unnamed.items() if names} == {}


def _edits() -> list[Edit]:
    """Return every edit of every mutation, and of the builds that fit the kernels to a small world."""
    drivers = [driver for _, driver in _drivers()]
    groups = [mutation.edits for driver in drivers for mutation in driver.mutations.values()]
    groups += [build.edits for driver in drivers for build in driver.builds.values()]
    groups += [edits for mutations in _modules().values() for edits in mutations.values()]
    return [edit for group in groups for edit in group]


def test_every_tag_has_a_mutation() -> None:
    assert set(tags()) == {edit.tag for edit in _edits()}


def _guards() -> list[tuple[str, str]]:
    """Return file and name of everything that a document names as a guard."""
    found = []
    for text in DOCUMENTS.values():
        of_tables = re.search(r'"Guarded by" names mutations in `tests/(\w+)\.py`', text)
        header: list[str] = []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells or cells[0] == "#":
                header = cells
            elif "guarded by" in header:
                assert of_tables is not None
                found += [(of_tables[1], name) for name in _quoted(cells[header.index("guarded by")])]
        for paragraph in re.split(r"\n\n", text):
            if start := re.match(r"Guarded by `tests/(\w+)\.py`", paragraph):
                found += [(start[1], name) for name in _quoted(paragraph) if re.fullmatch(r"\w+", name)]
    return found


def test_every_guard_is_a_mutation_or_a_test() -> None:
    guards = _guards()
    mutations = {(file, name) for file, driver in _drivers() for name in driver.mutations}
    assert {file for file, _ in guards} == {file for file, _ in mutations} and len(guards) > 150
    tests = {word for word in _words() if word.startswith("test_")}
    assert not [guard for guard in guards if guard not in mutations and guard[1] not in tests]


# ---- rows and headings -----------------------------------------------------------------------------------------------


def _rows(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rows_are_numbered_from_one_without_gaps(name: str) -> None:
    rows = _rows(DOCUMENTS[name])
    assert rows == list(range(1, len(rows) + 1))


def _in_one_line(text: str) -> str:
    """Return a text, or a source, whose sentences and comments go on in the next line, as one."""
    return re.sub(r"\s+(?:(?://|#) )?\s*", " ", text)


def _spoken_of(pattern: str) -> Iterator[tuple[Path, str, str]]:
    """Yield where something of a document is spoken of, the document's name, and what the pattern finds.

    In a document, what stands without a name is its own; elsewhere it is none of a document's.
    """
    own = {path: path.name for path in (CUDA / "DESIGN.md", *CUDA.glob("kernels/*.md"))}
    others = [*_sources(), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("tests/new_operator/**/*.cuh")]
    for path in (*own, *others):
        for name, found in re.findall(rf"(?:(\w+\.md)`?, )?{pattern}", _in_one_line(path.read_text())):
            if name or path in own:
                yield path, name or own[path], found


def test_rows_that_are_spoken_of_exist() -> None:
    """Row 1, rows 3 and 4: of the document that is named before it, or of the one in which it stands."""
    wrong, spoken = [], set()
    for path, document, numbers in _spoken_of(r"\b[Rr]ows? (\d+(?:(?:, | and | to )\d+)*)"):
        found = {(document, int(number)) for number in re.findall(r"\d+", numbers)}
        wrong += [(path.name, *row) for row in found if row[1] not in _rows(DOCUMENTS.get(document, ""))]
        spoken |= found
    assert wrong == [] and len(spoken) > 50


def _headings(text: str) -> set[str]:
    return {line or run_in for line, run_in in re.findall(r"^#+ (.+)$|\*\*([^*]+?)\.?\*\*", text, re.MULTILINE)}


def test_headings_that_are_spoken_of_exist() -> None:
    """DESIGN.md, "One launch": a heading, or bold words with which a paragraph begins."""
    spoken = list(_spoken_of(r'(?<=[(,;] |.\()"([A-Z][^"]+)"'))
    assert len(spoken) > 20
    assert [each for each in spoken if each[2] not in _headings(DOCUMENTS.get(each[1], ""))] == []


# ---- folders ---------------------------------------------------------------------------------------------------------


def _may_include() -> dict[str, set[str]]:
    """Return what the table of the layers says."""
    found = {}
    for line in LAYERS.splitlines():
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
    sentence = re.search(r"Arrows go one way: ([^.]+)\.", LAYERS)
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
