"""Launch contracts: what all PEs must agree on in one launch, and how an error names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .operator import Operator
    from .team import Team

__all__ = ["Contract", "Field", "describe", "differences", "operator_of", "register", "team_of"]


def _number(value: Any) -> int:
    return int(value)


@dataclass(frozen=True)
class Field:
    """One field of a contract.

    Attributes:
        name: as an error names it.
        encode: makes the word that travels of a value.
        show: makes text of that word; None where a word is a hash, of which nothing can be told.
    """

    name: str
    encode: Callable[[Any], int] = _number
    show: Callable[[int], str] | None = str

    @classmethod
    def flag(cls, name: str) -> Field:
        """Return a field for a bool."""
        return cls(name, int, lambda word: str(bool(word)))

    @classmethod
    def flags(cls, name: str, of: Sequence[str]) -> Field:
        """Return a field for a bool of each name, in one word."""

        def show(word: int) -> str:
            return "(" + ", ".join(f"{each}={bool(word >> bit & 1)}" for bit, each in enumerate(of)) + ")"

        return cls(name, lambda values: sum(bool(value) << bit for bit, value in enumerate(values)), show)

    @classmethod
    def dtype(cls, name: str, dtypes: Sequence[torch.dtype]) -> Field:
        """Return a field for one of some dtypes, in an order that is the same on all PEs."""
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return cls(name, list(dtypes).index, lambda word: names[word] if 0 <= word < len(names) else f"dtype {word}")

    @classmethod
    def numbers(cls, name: str) -> Field:
        """Return a field for a list of numbers, which travels as a hash."""
        return cls(name, _mixed, None)


def _show_team(word: int) -> str:
    number, size = team_of(word)
    return f"{size} (team {number})" if number else str(size)


def team_of(word: int) -> tuple[int, int]:
    """Return number and size of the team that a contract's second word stands for."""
    return divmod(word, 1 << _TEAM_SHIFT)


_TEAM_SHIFT = 32
_TEAM = Field("world_size", lambda team: team.number << _TEAM_SHIFT | team.size, _show_team)
_operators: dict[int, Operator] = {}  # by the word that a contract begins with


@dataclass(frozen=True)
class Contract:
    """One launch's contract.

    Attributes:
        operator: that is launched.
        team: by which PEs.
        values: one per field of the operator's.
        call: number of a call (`CallNumbers`), where all launches have the same; 0: each sets its own, or has none.
    """

    operator: Operator
    team: Team
    values: tuple[Any, ...]
    call: int = 0

    def words(self, count: int) -> tuple[int, ...]:
        """Return the contract as the `count` words that travel with every credit."""
        fields, values, name = _fields_of(self.operator), (self.team, *self.values), self.operator.name
        most = count - 3  # beside the operator's word, the team's and that of the number of a call
        if len(fields) - 1 > most:
            raise ValueError(f"contract of {name}: at most {most} fields, got {len(fields) - 1}")
        if len(values) != len(fields):
            names = ", ".join(field.name for field in fields[1:])
            raise ValueError(f"contract of {name}: expected values for {names}, got {self.values}")
        encoded = (field.encode(value) for field, value in zip(fields, values, strict=True))
        words = (_operator_id(name), *encoded)
        return words + (0,) * (count - 1 - len(words)) + (self.call,)


def register(operator: Operator) -> None:
    """Let an operator be told by its contracts; every one does so at import, so that all PEs know all."""
    _operators[_operator_id(operator.name)] = operator


def operator_of(word: int) -> Operator | None:
    """Return the operator that a contract begins with; None for one that this process does not know."""
    return _operators.get(word)


def describe(words: Sequence[int], own: Contract | None = None, show_call: Callable[[int], str] = str) -> str:
    """Return a contract's words as text.

    Args:
        words: they.
        own: a contract of this PE, which tells the lists that are the same in both.
        show_call: makes text of the number of a call.
    """
    if not words[0]:
        return "nothing yet"
    operator = operator_of(words[0])
    if operator is None:
        return f"an unknown operator (id {words[0]})"
    told = [f"{field.name}={text}" for field, text in _texts(operator, words, own)]
    if words[-1]:
        told.append(f"{operator.call}={show_call(words[-1])}")
    return f"{operator.name}({', '.join(told)})"


def differences(
    mine: Sequence[int],
    own: Contract | None,
    theirs: Sequence[int],
    me: int,
    peer: int,
    show_call: Callable[[int], str] = str,
) -> str:
    """Return in which fields two contracts of one operator differ, with both values; "" for different operators."""
    operator = operator_of(mine[0])
    if operator is None or operator is not operator_of(theirs[0]):
        return ""
    told = []
    for i, (field, text) in enumerate(_texts(operator, mine, own), start=1):
        if mine[i] != theirs[i]:
            other = "another list" if field.show is None else field.show(theirs[i])
            told.append(f"{field.name} is {text} on PE {me}, {other} on PE {peer}")
    if mine[-1] != theirs[-1]:
        told.append(f"{operator.call} is {show_call(mine[-1])} on PE {me}, {show_call(theirs[-1])} on PE {peer}")
    return "; ".join(told)


def _fields_of(operator: Operator) -> tuple[Field, ...]:
    return (_TEAM, *(Field(field) if isinstance(field, str) else field for field in operator.fields))


def _texts(operator: Operator, words: Sequence[int], own: Contract | None) -> list[tuple[Field, str]]:
    values = (own.team, *own.values) if own is not None and own.operator is operator else None
    texts = []
    for i, field in enumerate(_fields_of(operator)):
        if field.show is not None:
            text = field.show(words[i + 1])
        elif values is not None and field.encode(values[i]) == words[i + 1]:
            text = str(list(values[i]))
        else:
            text = f"a list (hash {words[i + 1] & 0xFFFFFF:06x})"
        texts.append((field, text))
    return texts


def _mixed(values: Sequence[int]) -> int:
    """Return a number that differs, in practice, where the lists differ."""
    mixed = 0
    for value in values:
        mixed = (mixed * 1000003 + value + 1) % (2**61 - 1)
    return mixed


def _operator_id(name: str) -> int:
    """Return a number that stands for an operator, the same in every process and version."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte) % (2**61 - 1)
    return number
