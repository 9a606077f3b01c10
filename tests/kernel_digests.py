"""Digests of what is compiled for GPUs, which do not change where comments do, or what is for the host alone."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from persistent_ops.runtime.jit import KernelSource

CUDA = Path(__file__).resolve().parents[1] / "cuda"

# Numbers, whose separators begin no literal; literals, in which nothing is a comment; comments.
_COMMENT_OR_NOT = re.compile(r"""\b\d[\w']*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|//[^\n]*|/\*.*?\*/""", re.DOTALL)

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)  # of ours, from CUDA on


def code_alone(text: str) -> str:
    """Return C++ without comments and layout."""
    code = _COMMENT_OR_NOT.sub(lambda found: " " if found[0].startswith(("//", "/*")) else found[0], text)
    return " ".join(code.split())


def for_gpus(text: str) -> str:
    """Return C++ without the lines that are compiled for the host backend alone."""
    kept = []
    holds: list[bool | None] = []  # on a GPU, each condition that a line stands in; None: not known
    for line in text.splitlines():
        if line.startswith("#if"):
            holds.append({"#if PO_ON_DEVICE": True, "#if !PO_ON_DEVICE": False}.get(line.rstrip()))
        elif line.startswith("#elif"):
            holds[-1] = False if holds[-1] else None
        elif line.startswith("#else") and holds[-1] is not None:
            holds[-1] = not holds[-1]
        if False not in holds:
            kept.append(line)
        if line.startswith("#endif"):
            holds.pop()
    return "\n".join(kept)


@functools.cache
def _headers(entry: str) -> str:
    """Return the code of a kernel's header, and of all that it includes of ours there, that is compiled for GPUs."""
    texts: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = for_gpus((CUDA / name).read_text())
            waiting += _INCLUDE.findall(texts[name])
    return "".join(f"{name}\n{code_alone(text)}\n" for name, text in sorted(texts.items()))


def digest(source: KernelSource, arch: str) -> str:
    """Return one of a kernel: its unit, the headers, the architecture."""
    text = f"{arch}\n{source.unit}\n{source.defines}\n{_headers(source.entry)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
