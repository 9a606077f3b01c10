"""One word for one thing in the public API: rules over signatures and docstrings, each with a synonym that it finds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from public_names import Parameter, PublicName, parameters_of, public_names, summary_of

import persistent_ops as po

Names = Sequence[PublicName]

# Names with the signature of another function: which one.
_FOREIGN: dict[str, Callable[..., Any]] = {
    "op": dist.all_reduce,
    "bias": torch.nn.Linear,
    "in_features": torch.nn.Linear,
    "out_features": torch.nn.Linear,
    "dtype": torch.empty,
    "device": torch.empty,
}
# Pairs of different things whose names end alike, and which are not in one signature.
_TOLD_APART = {("heap_size", "world_size"), ("index_dtype", "wire_dtype")}
_CONTAINERS = {
    "None",
    "Sequence",
    "list",
    "tuple",
    "Mapping",
    "dict",
    "Iterable",
    "Callable",
    "Any",
    "torch",
    "collections",
    "abc",
}


def _parameters(names: Names) -> list[Parameter]:
    """Return the parameters that users pass. Classes that a call returns are made by the package."""
    returned = {kind for public in names for kind in re.findall(r"\w+", _returned(public))}
    return [
        each
        for public in names
        if not (inspect.isclass(public.what) and public.what.__name__ in returned)
        for each in parameters_of(public)
    ]


def _kinds(annotation: str) -> set[str]:
    """Return the types in an annotation, including types in containers."""
    return set(re.findall(r"\w+", annotation.replace("torch.nn.Parameter", "torch.Tensor"))) - _CONTAINERS


def _choices(parameter: Parameter) -> set[str]:
    """Return the texts that a parameter permits."""
    if "str" not in _kinds(parameter.annotation):
        return set()
    default = {parameter.default} if isinstance(parameter.default, str) else set()
    return set(re.findall(r'"([\w-]+)"', parameter.text)) | default


def _returned(public: PublicName) -> str:
    return "" if inspect.isclass(public.what) else str(inspect.signature(public.what).return_annotation)


def _pairs(names: Names) -> list[tuple[Parameter, Parameter]]:
    found = _parameters(names)
    return [(one, other) for number, one in enumerate(found) for other in found[:number]]


# ---- rules: each returns what breaks it -----------------------------------------------------------------------------


def one_name_two_types(names: Names) -> set[str]:
    """All parameters of one name share a type. The name of an object's kind may stand for the object."""
    named = {
        each.where.rpartition(".")[2]: {other.name for other in _parameters(names) if other.where == each.where}
        for each in _parameters(names)
        if each.where.rpartition(".")[2][0].isupper()
    }
    found = set()
    for one, other in _pairs(names):
        if one.name != other.name or one.name in _FOREIGN:
            continue
        kinds = _kinds(one.annotation), _kinds(other.annotation)
        is_kind_of_other = any(
            "str" in a and any(one.name in named.get(kind, ()) for kind in b) for a, b in (kinds, kinds[::-1])
        )
        if all(kinds) and not kinds[0] & kinds[1] and not is_kind_of_other:
            found.add(f"{one.name}: {one.where} takes {one.annotation}, {other.where} {other.annotation}")
    return found


def one_name_two_sets_of_choices(names: Names) -> set[str]:
    """Parameters of one name with texts share a text."""
    return {
        f"{one.name}: {one.where} takes {sorted(_choices(one))}, {other.where} {sorted(_choices(other))}"
        for one, other in _pairs(names)
        if one.name == other.name and _choices(one) and _choices(other) and not _choices(one) & _choices(other)
    }


def two_names_one_set_of_choices(names: Names) -> set[str]:
    """Two names have at most one choice in common, for example "auto"."""
    return {
        f"{one.where}({one.name}) and {other.where}({other.name}): {sorted(_choices(one) & _choices(other))}"
        for one, other in _pairs(names)
        if one.name != other.name
        and len(_choices(one) & _choices(other)) > 1
        and not {one.name, other.name} & set(_FOREIGN)
    }


def two_names_one_ending(names: Names) -> set[str]:
    """Names of one type that end with the same word need a signature that has both."""
    together = {public.name: {each.name for each in parameters_of(public)} for public in names}
    return {
        f"{one.name} ({one.where}) and {other.name} ({other.where})"
        for one, other in _pairs(names)
        if one.name != other.name
        and "_" in one.name.strip("_")
        and "_" in other.name.strip("_")
        and one.name.rpartition("_")[2] == other.name.rpartition("_")[2]
        and _kinds(one.annotation) & _kinds(other.annotation)
        and not any({one.name, other.name} <= taken for taken in together.values())
        and tuple(sorted((one.name, other.name))) not in _TOLD_APART
        and not {one.name, other.name} & set(_FOREIGN)
    }


def a_parameter_and_a_function(names: Names) -> set[str]:
    """A parameter that is what a function returns has the function's name."""
    returned = {
        re.sub(r"^return (the )?", "", summary_of(public.what).lower()): public.name.rpartition(".")[2]
        for public in names
        if summary_of(public.what).startswith("Return ")
    }
    return {
        f"{each.where}({each.name}) is what {returned[each.text.lower()]}() returns"
        for each in _parameters(names)
        if each.text.lower() in returned and returned[each.text.lower()] != each.name
    }


def numbers_per_what(names: Names) -> set[str]:
    """The word for "per" a thing is unique: a name `*_per_pe` would be a synonym of `*_per_rank`."""
    words = {public.name.rpartition(".")[2] for public in names} | {each.name for each in _parameters(names)}
    return {name for name in words if name.endswith("_per_pe")}


def written_results(names: Names) -> set[str]:
    """A result is written to `out`; `*_into` is for buffers whose sizes are capacities."""
    found = set()
    for public in names:
        taken = {each.name: each for each in parameters_of(public)}
        if public.name.endswith("_into") and not any("[capacity" in each.text for each in taken.values()):
            found.add(f"{public.name} takes no buffers with capacities")
        if public.name.endswith("_into") and "out" in taken:
            found.add(f"{public.name} takes out")
        found |= {
            f"{public.name}({name})"
            for name in taken
            if re.fullmatch(r"output|result|dst|dest|\w+_(output|result)", name)
        }
    return found


def handles(names: Names) -> set[str]:
    """Calls with `async_op` return a `Work`; what else is returned and waited for has `wait` and `done` as well."""
    classes = {public.name.rpartition(".")[2]: public.what for public in names if inspect.isclass(public.what)}
    found = set()
    for public in names:
        returned = _returned(public)
        for kind in re.findall(r"\w+", returned):
            has = {
                name
                for name in ("wait", "done", "is_completed", "is_done", "result")
                if hasattr(classes.get(kind), name)
            }
            if has and has != {"wait", "done"}:
                found.add(f"{public.name} returns {kind}, which has {sorted(has)}")
        if any(each.name == "async_op" for each in parameters_of(public)) and "Work[" not in returned:
            found.add(f"{public.name} returns {returned}")
    return found


# ---- the package, and synonyms that are found -----------------------------------------------------------------------


def _comm_dtype(x: torch.Tensor, *, comm_dtype: torch.dtype | None = None) -> None: ...


def _mode(x: torch.Tensor, mode: str = "sum") -> None:
    """Pool.

    Args:
        x: rows.
        mode: "sum", or "mean".
    """


def _algorithm(x: torch.Tensor, algorithm: str = "sgd") -> None: ...


def _tables(weights: str) -> None: ...


def _num_pes(num_pes: int) -> None:
    """Start.

    Args:
        num_pes: Number of PEs.
    """


def _batch_per_pe(batch_per_pe: int) -> None: ...


def _pool_into(x: torch.Tensor, out: torch.Tensor) -> None: ...


def _starts(x: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | None: ...


_RULES: dict[Callable[[Names], set[str]], Any] = {
    one_name_two_types: _tables,
    one_name_two_sets_of_choices: _algorithm,
    two_names_one_set_of_choices: _mode,
    two_names_one_ending: _comm_dtype,
    a_parameter_and_a_function: _num_pes,
    numbers_per_what: _batch_per_pe,
    written_results: _pool_into,
    handles: _starts,
}


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.__name__)
def test_one_word_for_one_thing(rule: Callable[[Names], set[str]]) -> None:
    assert rule(list(public_names())) == set(), rule.__doc__


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.__name__)
def test_a_synonym_is_found(rule: Callable[[Names], set[str]]) -> None:
    names = list(public_names())
    added = PublicName(f"po.{_RULES[rule].__name__.lstrip('_')}", _RULES[rule])
    assert len(rule([*names, added])) > len(rule(names))


def test_foreign_names_are_of_others() -> None:
    for name, whose in _FOREIGN.items():
        try:
            taken = set(inspect.signature(whose).parameters)
        except ValueError:  # of a builtin
            taken = set(re.findall(r"\w+", whose.__doc__ or ""))
        assert name in taken


def test_everything_public_says_what_it_is() -> None:
    names = list(public_names(with_parts=False))
    assert [public.name for public in names if summary_of(public.what) == "."] == []
    assert {po.all_reduce, po.Work, po.nn.order_all_reduce} <= {public.what for public in names}
