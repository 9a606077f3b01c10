"""Checks of an operator of torch.ops: torch's own checks, and the arguments that its schema declares as written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["assert_schemas", "opcheck_problems", "written_by"]

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck_problems(
    calls: Mapping[str, tuple[Any, Sequence[Any], dict[str, torch.Tensor]]], utilities: Sequence[str] = ALL
) -> list[str]:
    """Return what torch.library.opcheck finds wrong.

    Args:
        calls: by name: operator, arguments, and the arguments that it writes.
        utilities: the checks.
    """
    problems = []
    for name, (operator, arguments, written) in calls.items():
        found = torch.library.opcheck(
            operator.default, tuple(arguments), written, test_utils=utilities, raise_exception=False
        )
        assert set(found) == set(utilities)
        problems += [f"{name}, {check}: {result}" for check, result in found.items() if str(result) != "SUCCESS"]
    return problems


def assert_schemas(name: str, *outputs: str, is_collective: bool = True) -> None:
    """Fail if an operator declares writes, or if its form with outputs declares writes of anything but outputs.

    Collective operators also declare that they change the object that orders them in compiled graphs.
    """
    order = ["order"] if is_collective else []
    plain, with_out = (getattr(torch.ops.persistent_ops, each).default._schema for each in (name, f"{name}_out"))
    assert written_by(plain) == order and len(plain.returns) == len(outputs)
    assert written_by(with_out) == order + list(outputs) and not with_out.returns


def written_by(schema: torch.FunctionSchema) -> list[str]:
    return [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
