"""Lines of the device functions that are changed while a program runs, which a test must notice.

A line has a tag, `# @name` at its end, where text may follow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import persistent_ops.triton as pot
from persistent_ops.triton import device

__all__ = ["Change", "changed", "changed_source"]


class Change(NamedTuple):
    """A line with another text.

    Attributes:
        tag: of the line.
        old, new: a text that the line has once, and what replaces it.
    """

    tag: str
    old: str
    new: str


def changed_source(change: Change) -> str:
    """Return the source of the device functions with another line."""
    source = Path(device.__file__).read_text()
    lines = re.findall(rf"^.*  # @{change.tag}\b(?!-).*$", source, re.MULTILINE)
    assert len(lines) == 1, f"@{change.tag} stands in {len(lines)} lines"
    assert lines[0].count(change.old) == 1, f"@{change.tag} has {change.old!r} {lines[0].count(change.old)} times"
    return source.replace(lines[0], lines[0].replace(change.old, change.new))


@contextlib.contextmanager
def changed(change: Change, folder: Path) -> Iterator[None]:
    """Let kernels call device functions with another line.

    Args:
        change: of the line.
        folder: for the source, whose text Triton reads.
    """
    path = folder / "device.py"
    path.write_text(changed_source(change))
    spec = importlib.util.spec_from_file_location(f"{pot.__name__}.changed_device", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        spec.loader.exec_module(module)
        for name in device.__all__:
            patch.setattr(pot, name, getattr(module, name))
        yield
