"""Kernel sources with a part removed, which a test must notice.

A place in the sources has a tag, `// @name` at the beginning of a comment: on the line where a statement begins, or on
a line of its own before it. The text of comments, and the layout and place of a statement, do not matter. A tag that is
missing, stands twice, or whose statement has no such part fails the test.

Many mutations live in one copy of the sources. A selector says which of them is active, so that a driver is compiled
once for all of them.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from host_driver.build import CUDA

__all__ = [
    "OVERTAKES",
    "After",
    "Before",
    "Condition",
    "Drop",
    "Edit",
    "Initial",
    "Relaxed",
    "Swap",
    "mutated",
    "mutated_by",
    "tags",
]

TAG = re.compile(r"// @([a-z0-9-]+)")


@dataclass(frozen=True)
class Drop:
    """The statement is left out."""

    tag: str


@dataclass(frozen=True)
class Condition:
    """The condition of the `if` is another one."""

    tag: str
    becomes: str


@dataclass(frozen=True)
class Swap:
    """An expression of the statement, which it has once, is another one."""

    tag: str
    old: str
    new: str


@dataclass(frozen=True)
class Relaxed:
    """The compiler's atomic operation in the statement orders nothing."""

    tag: str


@dataclass(frozen=True)
class Before:
    """Something is done before the statement."""

    tag: str
    code: str


@dataclass(frozen=True)
class After:
    """Something is done after the statement."""

    tag: str
    code: str


@dataclass(frozen=True)
class Initial:
    """A constant has another value; for all mutations of the copy."""

    tag: str
    value: str


Edit = Drop | Condition | Swap | Relaxed | Before | After | Initial

_PUT_SIGNAL = "team.network->put_signal(peer, offset, source, bytes, flag_offset, value)"
OVERTAKES = Swap("signal-after-put", _PUT_SIGNAL, f"team.network->signal(peer, flag_offset, value), {_PUT_SIGNAL}")
"""Signals may overtake the puts that they belong to."""


def tags(root: Path = CUDA) -> dict[str, Path]:
    """Return all tags and the file of each."""
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*.cuh")):
        for name in TAG.findall(path.read_text()):
            assert name not in found, f"@{name} stands in {found[name]} and in {path}"
            found[name] = path
    return found


def mutated(folder: Path, edits: Sequence[Edit]) -> Path:
    """Copy the kernel sources into a folder, apply edits to them, and return their root."""
    return mutated_by(folder, {1: edits}, "1")


def mutated_by(folder: Path, mutations: Mapping[int, Iterable[Edit]], selector: str) -> Path:
    """Copy the kernel sources with many mutations. `selector` is an expression for the number of the active one.

    Constants (`Initial`) are the same for all of them.
    """
    root = folder / "cuda"
    shutil.copytree(CUDA, root)
    places = tags(root)
    edits = defaultdict(list)
    for number, group in mutations.items():
        for edit in group:
            assert edit.tag in places, f"no source has @{edit.tag}"
            edits[edit.tag].append((number, edit))
    for tag, numbered in edits.items():
        path = places[tag]
        text = path.read_text()
        begin, end = _statement(text, tag)
        path.write_text(text[:begin] + _edited(text[begin:end], numbered, selector) + text[end:])
    return root


def _edited(statement: str, numbered: Sequence[tuple[int, Edit]], selector: str) -> str:
    """Return a statement that the mutations of this place can change."""
    code = _without_comments(statement)
    swaps: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    dropped, before, behind = [], "", ""
    for number, edit in numbered:
        match edit:
            case Drop():
                dropped.append(f"{selector} != {number}")
            case Before():
                before += f"if ({selector} == {number}) {{ {edit.code} }} "
            case After():
                behind += f" if ({selector} == {number}) {{ {edit.code} }}"
            case Condition():
                assert code.startswith("if "), f"@{edit.tag} is at no if: {code}"
                opening = code.index("(")
                swaps[opening + 1, _closing(code, opening)].append((number, edit.becomes))
            case Swap():
                assert code.count(edit.old) == 1, f"@{edit.tag} has {edit.old!r} {code.count(edit.old)} times: {code}"
                first = code.index(edit.old)
                swaps[first, first + len(edit.old)].append((number, edit.new))
            case Relaxed():
                call = re.search(r"__atomic_\w+\([^()]*(__ATOMIC_\w+)\)", code)
                assert call is not None, f"@{edit.tag} is at no atomic operation: {code}"
                swaps[call.span()].append((number, call.group().replace(call.group(1), "__ATOMIC_RELAXED")))
            case Initial():
                value = re.search(r"= ([^;]+);", code)
                assert value is not None, f"@{edit.tag} is at no constant: {code}"
                return statement[: value.start(1)] + edit.value + statement[value.end(1) :]
    for (first, last), others in sorted(swaps.items(), reverse=True):
        chosen = "".join(f"{selector} == {number} ? ({other}) : " for number, other in others)
        statement = f"{statement[:first]}({chosen}({statement[first:last]})){statement[last:]}"
    if dropped:
        statement = f"if ({' && '.join(dropped)}) {{ {statement} }}"
    return before + statement + behind


# ---- statements ------------------------------------------------------------------------------------------------------


def _without_comments(text: str) -> str:
    """Return the text with blanks for comments, so that places stay the same."""
    return re.sub(r"//[^\n]*", lambda comment: " " * len(comment.group()), text)


def _statement(text: str, tag: str) -> tuple[int, int]:
    """Return where the tag's statement begins and ends."""
    code = _without_comments(text)
    place = next(found.start() for found in TAG.finditer(text) if found.group(1) == tag)
    line = text.rindex("\n", 0, place) + 1
    begin = line + re.match(r"\s*", code[line:]).end()  # type: ignore[union-attr]
    return begin, _end_of_statement(code, begin)


def _end_of_statement(code: str, begin: int) -> int:
    place = begin + re.match(r"(PO_\w*UNROLL\s+)?", code[begin:]).end()  # type: ignore[union-attr]
    if code[place] == "{":
        return _closing(code, place) + 1
    if head := re.match(r"(if constexpr|if|for|while)\s*\(", code[place:]):
        end = _end_of_statement(code, _next(code, _closing(code, place + head.end() - 1) + 1))
        if head.group(1).startswith("if") and code.startswith("else", _next(code, end)):
            end = _end_of_statement(code, _next(code, _next(code, end) + len("else")))
        return end
    while code[place] != ";":
        place = _closing(code, place) + 1 if code[place] in "([{" else place + 1
    return place + 1


def _next(code: str, place: int) -> int:
    return place + re.match(r"\s*", code[place:]).end()  # type: ignore[union-attr]


def _closing(code: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth == 0:
            return place
    raise AssertionError(f"nothing closes {code[opening : opening + 60]!r}")
