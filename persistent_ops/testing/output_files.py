"""Output files of a run: checked before the run, and complete or absent after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.bootstrap import launchers
from ..runtime.file_sync import sync

__all__ = ["check_outputs", "put_in_place", "sync"]


def check_outputs(
    *,
    files: Mapping[str, str | os.PathLike[str] | None],
    folders: Mapping[str, str | os.PathLike[str] | None] | None = None,
) -> None:
    """Raise where a file or a folder cannot be written; leave no file.

    Of a launcher's processes the first one looks, because that one writes.

    Args:
        files: by option; the folder of each must exist, or be made with one of `folders`. None for no file.
        folders: by option; what is missing of their path is made in the run. None for no folder.

    Raises:
        ValueError: it names the option, the path and why.
        BootstrapError: a launcher's variables contradict each other.
    """
    if launchers.detect(os.environ).rank != 0:
        return
    made = [Path(os.path.realpath(folder)) for folder in (folders or {}).values() if folder is not None]
    taken: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        is_kept = not os.path.lexists(file) or os.path.isfile(file)  # and no device, such as /dev/null
        if is_kept and (other := taken.setdefault(os.path.realpath(file), option)) != option:
            raise ValueError(f"{option}: expected another file than that of {other}, got {os.fspath(file)!r}")
        if problem := _problem_of_file(Path(file), made):
            raise ValueError(f"{option}: expected a file that can be written, got {os.fspath(file)!r}: {problem}")
    for option, folder in (folders or {}).items():
        if folder is not None and (problem := _problem_of_folder(Path(folder))):
            raise ValueError(f"{option}: expected a folder that can be written, got {os.fspath(folder)!r}: {problem}")


def _problem_of_file(file: Path, made: Sequence[Path]) -> str | None:
    if file.is_dir():
        return "that is a folder"
    parent = Path(os.path.realpath(file)).parent  # of a link, what it points to is written
    if not os.path.lexists(parent) and any(parent in (folder, *folder.parents) for folder in made):
        return None  # whether that folder can be made is looked at too
    if not parent.is_dir():
        return f"there is no folder {str(parent)!r}"
    if file.exists():
        return None if os.access(file, os.W_OK) else "permission denied"
    return _problem_within(parent)


def _problem_of_folder(folder: Path) -> str | None:
    first = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not first.is_dir():
        return f"{str(first)!r} is no folder"
    problem = _problem_within(first)
    return None if problem is None else f"{str(first)!r}: {problem}"


def _problem_within(folder: Path) -> str | None:
    """Return why nothing can be made there. Asked for rights alone, /proc says that it can be written."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()


def put_in_place(written: Path, path: Path) -> None:
    """Rename a file to one of the same folder: whatever happens, that is the one before or the new one, whole."""
    sync(written)
    os.replace(written, path)
    sync(path.parent)
