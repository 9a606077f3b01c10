"""Tunings of all operators: a value below the sensible minimum is refused by the tuning, with its field's name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from pathlib import Path
from typing import Any

import pytest

import persistent_ops.ops
from persistent_ops.runtime.operator import Operator

pytestmark = pytest.mark.host


def _tunings() -> dict[str, type[Any]]:
    """Return the tunings of all operators."""
    found: dict[str, type[Any]] = {}
    for module in pkgutil.walk_packages(persistent_ops.ops.__path__, "persistent_ops.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Operator) and value.default_tuning is not None:
                found[value.name] = type(value.default_tuning)
    return found


TUNINGS = _tunings()
FIELDS = [(name, field) for name, tuning in TUNINGS.items() for field in dataclasses.fields(tuning)]
LEAST = {  # fields whose least value is not 1: bytes, shares, optional WGs, stages
    "one_shot_bytes": 0,
    "two_shot_bytes": 0,
    "gather_bytes": 0,
    "gather_share": 0,
    "local_delay": 0,
    "early_work_groups": 0,
    "pushing_at_par": 0,
    "stages": 2,
}


def _refusal(operator: str, field: str, value: Any) -> tuple[str, str]:
    with pytest.raises((TypeError, ValueError)) as error:
        TUNINGS[operator](**{field: value})
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(("operator", "field"), [pytest.param(n, f, id=f"{n} {f.name}") for n, f in FIELDS])
def test_lower_bounds(operator: str, field: dataclasses.Field[Any]) -> None:
    tuning, name = TUNINGS[operator], field.name
    kinds = typing.get_type_hints(tuning)[name]
    is_whole, is_optional = kinds in (int, int | None), kinds in (int | None, float | None)
    least = LEAST.get(name, 1)
    expected = f"{name}: expected {'an int' if is_whole else 'a number'} of at least {least}"
    expected += ", or None" if is_optional else ""
    for value in (least - 1, -1, -(1 << 40)):
        assert _refusal(operator, name, value) == ("ValueError", f"{expected}, got {value}")
    for wrong in (True, False, "8", [8], *([1.0] if is_whole else []), *([] if is_optional else [None])):
        assert _refusal(operator, name, wrong) == ("TypeError", f"{expected}, got {wrong!r}")
    for value in (least, 17, 1 << 20, *([None] if is_optional else [])):  # a plan refuses too much
        assert getattr(tuning(**{name: value}), name) == value
    if not is_whole:
        assert _refusal(operator, name, float("nan")) == ("ValueError", f"{expected}, got nan")
        assert getattr(tuning(**{name: 1.5}), name) == 1.5


def test_what_is_asked_is_there() -> None:
    modules = [path.read_text() for path in Path(persistent_ops.ops.__path__[0]).rglob("*.py")]
    assert len(set(TUNINGS.values())) == sum(text.count("\nclass Tuning") for text in modules)
    assert LEAST.keys() <= {field.name for _, field in FIELDS}
