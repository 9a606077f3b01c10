"""The kernels' structs, constants and geometry, as their own headers report them (cuda/platform/describe.cuh).

The C++ compiler makes a library from a header that answers questions about it. ctypes structs are built from the
answers, so nothing is defined twice. The library is made at the first question, once per process, and kept in the
compile cache.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .jit import KernelSource, load_host

__all__ = ["COMM", "Description", "copy_of", "describe", "description_of"]

COMM = "comm/team.cuh"  # the header of what all operators share
_KINDS: dict[str, type[ctypes._SimpleCData]] = {  # type: ignore[type-arg]
    **{f"i{size}": getattr(ctypes, f"c_int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"u{size}": getattr(ctypes, f"c_uint{8 * size}") for size in (1, 2, 4, 8)},
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
}
_HEAD = "#define PO_DESCRIPTION\n"
_describing: dict[str, threading.Lock] = {}  # by header


@dataclass(frozen=True)
class Description:
    """The description of a header, made by the header.

    Attributes:
        structs: by name, ctypes structs of the same layout; pointers are numbers.
        constants: by name.
        queries: by name, functions of whole numbers.
        layout: an assertion in C++ that a compiler lays every struct out as this says.
    """

    structs: Mapping[str, type[ctypes.Structure]]
    constants: Mapping[str, int]
    queries: Mapping[str, Callable[..., int]]
    layout: str


def copy_of(call: Any) -> Any:
    """Return a copy of a `Call` that is alike in all calls, for one of them to fill in.

    None is filled in that another call may have: a signal handler may call the operator between filling in and launch.
    """
    return type(call).from_buffer_copy(call)


@functools.cache
def describe(header: str) -> Description:
    """Return the descriptions of a header below cuda/, with all that it includes.

    Raises:
        CompileError: there is no C++ compiler, or the header does not compile.
    """
    with _describing.setdefault(header, threading.Lock()):  # threads that all ask first at the same time
        return _describe(header)


@functools.cache
def _describe(header: str) -> Description:
    library = load_host(KernelSource(header, head=_HEAD), is_portable=True)
    library.po_description.restype = ctypes.c_char_p
    structs: dict[str, type[ctypes.Structure]] = {}
    constants: dict[str, int] = {}
    queries: dict[str, Callable[..., int]] = {}
    fields: dict[str, list[tuple[str, int, str]]] = {}
    sizes: dict[str, int] = {}
    for line in library.po_description().decode().splitlines():
        what, name, *rest = line.split(" ")
        if what == "struct":
            fields[name], sizes[name] = [], int(rest[0])
            current = fields[name]
        elif what == "field":
            current.append((name, int(rest[0]), rest[1]))
        elif what == "constant":
            constants[name] = int(rest[0])
        else:
            queries[name] = _query(library, name)
    for name, size in sizes.items():  # a struct comes after those that it has as fields
        structs[name] = _struct(name, size, fields[name], structs)
    checks = [f"sizeof({name}) == {size}" for name, size in sizes.items()]
    checks += [f"offsetof({name}, {field}) == {place}" for name in sizes for field, place, _ in fields[name]]
    layout = f'static_assert({" && ".join(checks)}, "another layout than the host\'s");'
    return Description(structs, constants, queries, layout)


def description_of(kernel: str) -> Description:
    """Return the description of a kernel's header."""
    return describe(f"kernels/{kernel}.cuh")


def _query(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = getattr(library, f"po_query_{name}")
    function.restype = ctypes.c_int64

    def ask(*arguments: int) -> int:
        return int(function(*[ctypes.c_int64(argument) for argument in arguments]))

    return ask


_made: dict[tuple[object, ...], type[ctypes.Structure]] = {}  # a struct that several headers include is one type


def _struct(
    name: str, size: int, fields: list[tuple[str, int, str]], structs: Mapping[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    """Return a ctypes struct; where C++ aligns a field more than ctypes would, bytes without a name stand before it."""
    types = [_type_of(kind, structs) for _, _, kind in fields]
    return _made.setdefault((name, size, *fields, *types), _new_struct(name, size, fields, types))


def _new_struct(name: str, size: int, fields: list[tuple[str, int, str]], types: list[type]) -> type[ctypes.Structure]:
    laid_out: list[tuple[str, type]] = []

    def pad(upto: int) -> None:
        end = ctypes.sizeof(_structure(name, laid_out)) if laid_out else 0
        if upto > end:
            laid_out.append((f"_pad{len(laid_out)}", ctypes.c_uint8 * (upto - end)))

    for (field, offset, _), kind in zip(fields, types, strict=True):
        if offset > _offset_of_next(laid_out, kind):
            pad(offset)
        laid_out.append((field, kind))
    if size != ctypes.sizeof(_structure(name, laid_out)):
        pad(size)
    struct = _structure(name, laid_out)
    found = {field: getattr(struct, field).offset for field, _, _ in fields}
    assert found == {field: offset for field, offset, _ in fields}, (name, found)
    assert max(ctypes.sizeof(struct), 1) == size, (name, ctypes.sizeof(struct), size)
    return struct


def _offset_of_next(laid_out: list[tuple[str, type]], kind: type) -> int:
    """Return where ctypes would put one more field."""
    return int(_structure("_", [*laid_out, ("next_", kind)]).next_.offset)


def _structure(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    # Without a dictionary, so a wrong field name is an AttributeError.
    return type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields})


def _type_of(kind: str, structs: Mapping[str, type[ctypes.Structure]]) -> type:
    *counts, element = kind.split("*")
    found: type = _KINDS.get(element) or structs[element]
    for count in reversed(counts):
        found = found * int(count)  # type: ignore[operator, assignment]
    return found
