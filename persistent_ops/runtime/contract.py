"""Launch contracts: what all PEs must agree on in one launch, and how an error names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import CONTRACT_WORDS

__all__ = ["Contract", "describe", "register"]

_fields: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Contract:
    """One launch's contract.

    Attributes:
        operator: its name, registered with its fields.
        values: one integer per field.
    """

    operator: str
    values: tuple[int, ...]

    def words(self) -> tuple[int, ...]:
        """Return the contract as the fixed number of words that travel with every credit."""
        if len(self.values) != len(_fields[self.operator]):
            raise ValueError(f"contract of {self.operator}: expected {_fields[self.operator]}, got {self.values}")
        words = (_operator_id(self.operator), *self.values)
        return words + (0,) * (CONTRACT_WORDS - len(words))


def register(operator: str, fields: Sequence[str]) -> None:
    """Name the fields of an operator's contract; every operator does so at import, so that all PEs know all."""
    if len(fields) >= CONTRACT_WORDS:
        raise ValueError(f"contract of {operator}: at most {CONTRACT_WORDS - 1} fields, got {len(fields)}")
    _fields[operator] = tuple(fields)


def describe(words: Sequence[int]) -> str:
    """Return a contract's words as text."""
    for operator, fields in _fields.items():
        if _operator_id(operator) == words[0]:
            named = (f"{field}={value}" for field, value in zip(fields, words[1:], strict=False))
            return f"{operator}({', '.join(named)})"
    if not words[0]:
        return "nothing yet"
    return f"an unknown operator (id {words[0]})"


def _operator_id(name: str) -> int:
    """Return a number that stands for an operator, the same in every process and version."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte) % (2**61 - 1)
    return number
