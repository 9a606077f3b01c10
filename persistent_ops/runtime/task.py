"""What `launch` sends to its processes, and back: a function and its arguments, results, exceptions.

Pickle sends functions and classes by name. A new process finds by that name what a module defines, and what a script
defines, since it runs the script again. Code from a notebook, python -c or standard input is in no file, so it must be
sent itself, with cloudpickle.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Task", "hidden_main", "pack", "pack_task"]

_hiding = threading.Lock()


class Task(NamedTuple):
    """A function and its arguments, as bytes.

    Attributes:
        data: what pickle.loads makes (fn, args) of.
        by_value: whether it holds what __main__ defines. What comes back holds it too then.
    """

    data: bytes
    by_value: bool


class _OfMainError(Exception):
    """Names what only this process' __main__ defines."""


class _ByName(pickle.Pickler):
    """Refuses what __main__ defines."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, (type, types.FunctionType)) and found.__module__ == "__main__":
            raise _OfMainError(found.__qualname__)
        return NotImplemented


def pack(value: Any, *, by_value: bool) -> bytes:
    """Pickle a value, with the functions and classes of __main__ that are in it or by their names."""
    if by_value:
        import cloudpickle

        return bytes(cloudpickle.dumps(value))
    return pickle.dumps(value)


def pack_task(fn: Any, args: tuple[Any, ...]) -> Task:
    """Pickle a function and its arguments for processes that are to be started.

    Raises:
        ValueError: they cannot be pickled, or need cloudpickle, which is not installed.
    """
    try:
        if _is_file(sys.modules["__main__"]):
            return Task(pack((fn, args), by_value=False), by_value=False)
        buffer = io.BytesIO()
        _ByName(buffer).dump((fn, args))
        return Task(buffer.getvalue(), by_value=False)
    except _OfMainError as error:
        name = error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fn and args must be picklable to reach the PEs ({error}); define fn at module level, or pass threads=True"
        ) from error
    try:
        return Task(pack((fn, args), by_value=True), by_value=True)
    except ImportError:
        raise ValueError(
            f"fn and args: {name} is defined in __main__, which no other process can import here (a notebook, python "
            "-c, python -m of a package, standard input); have it sent along: pip install 'persistent-ops[notebook]'. "
            "Or move it into a module, or pass threads=True"
        ) from None
    except Exception as error:  # cloudpickle raises what the objects in it raise
        raise ValueError(
            f"fn and args must be picklable to reach the PEs ({type(error).__name__}: {error}); make what they refer "
            "to inside fn, or pass threads=True"
        ) from error


def _is_file(main: types.ModuleType) -> bool:
    """Return whether multiprocessing makes a fresh process import or run again what `main` was made from."""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:  # python -m
        return name != "__main__" and not name.endswith(".__main__")
    file = getattr(main, "__file__", None)
    if file is None:
        return False
    path = Path(process.ORIGINAL_DIR or "", file)  # type: ignore[attr-defined]
    return path.is_file() and path.suffix != ".ipynb" and path.stem != "ipython"


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from having a fresh process run "<stdin>", or what else __main__ has for a file.

    It reads the attribute while it starts a process, and there is no other way to pass it.
    """
    main = sys.modules["__main__"]
    if _is_file(main) or not hasattr(main, "__file__"):
        yield
        return
    with _hiding:
        file = main.__file__
        main.__file__ = None
        try:
            yield
        finally:
            main.__file__ = file
