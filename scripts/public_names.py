"""The public names of `po` and its modules: functions, classes, methods and parameters, with their descriptions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import persistent_ops as po

__all__ = ["Parameter", "PublicName", "parameters_of", "public_names", "summary_of"]

_ENTRY = re.compile(r"^    (?! )([\w, ]+): (.*(?:\n        .*)*)", re.MULTILINE)


@dataclass(frozen=True)
class PublicName:
    """A function, class, method or property.

    Attributes:
        name: as a user writes it: "po.nn.TableConfig".
        what: the object; a property's getter.
    """

    name: str
    what: Any


@dataclass(frozen=True)
class Parameter:
    """A parameter of a public function, method or constructor.

    Attributes:
        where: the public name that takes it.
        name: of the parameter.
        annotation: as it is written.
        default: its value; None where there is none.
        text: what the docstring says.
    """

    where: str
    name: str
    annotation: str
    default: Any
    text: str


def public_names(*, with_parts: bool = True) -> Iterator[PublicName]:
    """Yield what `po` and its modules export, and the methods and properties of their classes, in order."""
    for prefix, module in (("po", po), ("po.heap_bytes", po.heap_bytes), ("po.nn", po.nn)):
        for name, what in sorted(vars(module).items()):
            if name not in getattr(module, "__all__", (name,)):
                continue
            if name.startswith("_") or not (inspect.isclass(what) or inspect.isfunction(what)):
                continue
            yield PublicName(f"{prefix}.{name}", what)
            if with_parts and inspect.isclass(what):
                yield from _parts(f"{prefix}.{name}", what)


def _parts(prefix: str, owner: type) -> Iterator[PublicName]:
    for name in dir(owner):
        definer = next((each for each in owner.__mro__ if name in vars(each)), None)
        if name.startswith("_") or definer is None or not definer.__module__.startswith("persistent_ops"):
            continue
        part = vars(definer)[name]
        part = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
        if inspect.isfunction(part):
            yield PublicName(f"{prefix}.{name}", part)


def summary_of(what: Any) -> str:
    """Return the first sentence of a docstring."""
    paragraph = " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) ", paragraph)[0].rstrip(":.") + "."


def parameters_of(public: PublicName) -> list[Parameter]:
    """Return the parameters of a function, method or constructor."""
    what = public.what
    if inspect.isclass(what) and issubclass(what, BaseException):
        return []
    texts: dict[str, str] = {}
    for heading in ("Attributes:\n", "Args:\n"):
        said = (inspect.getdoc(what) or "").partition(heading)[2].split("\n\n")[0]
        for names, text in _ENTRY.findall(said):
            texts.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return [
        Parameter(
            public.name,
            each.name,
            inspect.formatannotation(each.annotation).strip("'"),
            None if each.default is inspect.Parameter.empty else each.default,
            texts.get(each.name, ""),
        )
        for each in inspect.signature(what).parameters.values()
        if each.name not in ("self", "cls")
    ]
