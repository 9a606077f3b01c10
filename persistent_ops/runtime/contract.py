"""Launch contracts: what all PEs must agree on in one launch, and how an error names it.

The runtime knows launches, flags and codes. The operator whose kernel uses a code defines its meaning.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field as with_default, replace
from typing import Any, NamedTuple

import torch

from .changes import OnAbort
from .compile.description import COMM, Description, describe as describe_header, description_of
from .team import Team

__all__ = ["Contract", "Difference", "Field", "LaunchKind", "describe", "difference", "kind_of", "team_of"]

_CREDIT = "its credit, with which a launch begins"


def _number(value: Any) -> int:
    return int(value)


@dataclass(frozen=True)
class Field:
    """One field of a contract.

    Attributes:
        name: short, as an error lists the fields of a call.
        encode: makes the word that travels of a value.
        show: makes text of that word; None where a word is a hash, which has no text.
        argument: in the caller's words, as "... is 1 on PE 0, 2 on PE 1" begins; "": the name.
        is_internal: whether no caller knows it; an error names it only where nothing else differs.
    """

    name: str
    encode: Callable[[Any], int] = _number
    show: Callable[[int], str] | None = str
    argument: str = ""
    is_internal: bool = False

    @classmethod
    def internal(cls, name: str) -> Field:
        """Return a field for a number that no caller knows."""
        return cls(name, is_internal=True)

    @classmethod
    def flag(cls, name: str, argument: str = "", texts: tuple[str, str] = ("False", "True")) -> Field:
        """Return a field for a bool; `texts`: of its values."""
        return cls(name, int, lambda word: texts[bool(word)], argument)

    @classmethod
    def flags(cls, name: str, of: Sequence[str]) -> Field:
        """Return a field for a bool of each name, in one word."""

        def show(word: int) -> str:
            return "+".join(each for bit, each in enumerate(of) if word >> bit & 1) or "none"

        return cls(name, lambda values: sum(bool(value) << bit for bit, value in enumerate(values)), show)

    @classmethod
    def choice(cls, name: str, choices: Sequence[str]) -> Field:
        """Return a field for one of some strings, in an order that is the same on all PEs."""
        return cls(name, list(choices).index, lambda word: choices[word] if 0 <= word < len(choices) else str(word))

    @classmethod
    def dtype(cls, name: str, dtypes: Sequence[torch.dtype], argument: str = "") -> Field:
        """Return a field for one of some dtypes, in an order that is the same on all PEs."""
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return replace(cls.choice(name, names), encode=list(dtypes).index, argument=argument)

    @classmethod
    def numbers(cls, name: str, argument: str = "") -> Field:
        """Return a field for a list of numbers, which travels as a hash."""
        return cls(name, _mixed, None, argument)


@dataclass(frozen=True, eq=False)
class LaunchKind:
    """What PEs launch, or meet under. Made at import, so that every PE can name what another PE launched.

    Attributes:
        name: of the operator, its kernel, and the namespace and the file of that.
        fields: of its contract after the team, in order; a name alone stands for a number.
        phases: by the kernel's constant, or its value, what a wait is for, as "PE 0 waited for PE 1: ..." continues;
            "{index}" is what the wait counts.
        input_errors: by the kernel's enumerator, or its value, what makes an exception of an InputErrorRecord.
        has_kernel: False for what PEs only meet under (`World.meet`), which launches the barrier's.
        call: name of the contract's last word, which each launch sets (`CallNumbers`); "": no launch sets it.
        known_as: what a user knows it as, where the name does not say so.
        changes: by the name of an argument that a launch changes in place, what an abort does to it.
    """

    name: str
    fields: Sequence[Field | str]
    phases: Mapping[str | int, str] = with_default(default_factory=dict)
    input_errors: Mapping[str | int, Callable[[Any], Exception]] = with_default(default_factory=dict)
    has_kernel: bool = True
    call: str = ""
    known_as: str = ""
    changes: Mapping[str, OnAbort] = with_default(default_factory=dict)

    def __post_init__(self) -> None:
        _kinds[_word_of(self.name)] = self

    @property
    def description(self) -> Description:
        """What its kernel's headers say of themselves."""
        return description_of(self.name) if self.has_kernel else describe_header(COMM)

    @property
    def title(self) -> str:
        """Its name, and what a user knows it as."""
        return f"{self.name} ({self.known_as})" if self.known_as else self.name

    def contract(self, team: Team, *values: Any, call: int = 0) -> Contract:
        """Return the contract of a launch of a team; `values`: one per field; `call`: see `Contract`."""
        return Contract(self, team, values, call)

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        constants = self.description.constants
        mask = (1 << constants["kCodeBits"]) - 1
        own = {_value(constants, name) & mask: text for name, text in self.phases.items()}
        return {constants["kPhaseCredit"] & mask: _CREDIT} | own

    def waited_for(self, phase: int, index: int) -> str:
        """Return the purpose of a wait of this operator; a kernel in Triton may have named none."""
        return self._texts.get(phase, f"phase {phase}, index {{index}}").format(index=index)

    def input_error(self, record: ctypes.Structure) -> Exception:
        """Return the exception for bad input."""
        constants = self.description.constants
        makers = {_value(constants, name): make for name, make in self.input_errors.items()}
        return makers[record.kind](record)


def _value(constants: Mapping[str, int], name: str | int) -> int:
    return constants[name] if isinstance(name, str) else name


def _show_team(word: int) -> str:
    number, size = team_of(word)
    return f"{size} (team {number})" if number else str(size)


def team_of(word: int) -> tuple[int, int]:
    """Return number and size of the team that a contract's second word stands for."""
    return divmod(word, 1 << _TEAM_SHIFT)


_TEAM_SHIFT = 32
_TEAM = Field("world_size", lambda team: team.number << _TEAM_SHIFT | team.size, _show_team)
_kinds: dict[int, LaunchKind] = {}  # by the word that a contract begins with


@dataclass(frozen=True)
class Contract:
    """One launch's contract.

    Attributes:
        kind: what is launched.
        team: by which PEs.
        values: one per field of the kind's.
        call: number of a call (`CallNumbers`), where all launches have the same; 0: each sets its own, or has none.
    """

    kind: LaunchKind
    team: Team
    values: tuple[Any, ...]
    call: int = 0

    def words(self, count: int) -> tuple[int, ...]:
        """Return the contract as the `count` words that travel with every credit."""
        fields, values, name = _fields_of(self.kind), (self.team, *self.values), self.kind.name
        most = count - 3  # besides the words of the operator, the team and the call's number
        if len(fields) - 1 > most:
            raise ValueError(f"contract of {name}: at most {most} fields, got {len(fields) - 1}")
        if len(values) != len(fields):
            names = ", ".join(field.name for field in fields[1:])
            raise ValueError(f"contract of {name}: expected values for {names}, got {self.values}")
        encoded = (field.encode(value) for field, value in zip(fields, values, strict=True))
        words = (_word_of(name), *encoded)
        return words + (0,) * (count - 1 - len(words)) + (self.call,)


def kind_of(word: int) -> LaunchKind | None:
    """Return the kind of the contract that begins with this word; None if this process does not know it."""
    return _kinds.get(word)


def describe(words: Sequence[int], own: Contract | None = None, show_call: Callable[[int], str] = str) -> str:
    """Return a contract's words as a call: its operator, and what a caller knows of its arguments.

    Args:
        words: they.
        own: a contract of this PE, which has the lists that are the same in both.
        show_call: makes text of the number of a call.
    """
    if not words[0]:
        return "nothing yet"
    kind = kind_of(words[0])
    if kind is None:
        return f"an unknown operator (id {words[0]})"
    texts = list(zip(_fields_of(kind), _texts(kind, words, own), strict=True))[1:]  # without the team
    told = [f"{field.name}={text}" for field, text in texts if text and not field.is_internal]
    if words[-1]:
        told.append(f"{kind.call}={show_call(words[-1])}")
    return f"{kind.name}({', '.join(told)})" if told or kind.has_kernel else kind.name


class Difference(NamedTuple):
    """In what two contracts of one operator differ, with both values; "" each where they do not.

    Attributes:
        arguments: in the caller's words.
        call: the number of the call that they belong to.
        internals: what no caller knows.
    """

    arguments: str
    call: str
    internals: str


def difference(
    mine: Sequence[int],
    own: Contract | None,
    theirs: Sequence[int],
    me: int,
    peer: int,
    show_call: Callable[[int], str] = str,
) -> Difference | None:
    """Return in what two contracts of one operator differ; None for different operators."""
    kind = kind_of(mine[0])
    if kind is None or kind is not kind_of(theirs[0]):
        return None
    arguments: list[str] = []
    internals: list[str] = []
    for i, (field, text) in enumerate(zip(_fields_of(kind), _texts(kind, mine, own), strict=True), start=1):
        if mine[i] != theirs[i]:
            other = "another list" if field.show is None else field.show(theirs[i])
            told = f"{field.argument or field.name} is {text or 'a list'} on PE {me}, {other} on PE {peer}"
            (internals if field.is_internal else arguments).append(told)
    call = ""
    if mine[-1] != theirs[-1]:
        call = f"{kind.call} is {show_call(mine[-1])} on PE {me}, {show_call(theirs[-1])} on PE {peer}"
    return Difference("; ".join(arguments), call, "; ".join(internals))


def _fields_of(kind: LaunchKind) -> tuple[Field, ...]:
    return (_TEAM, *(Field(each) if isinstance(each, str) else each for each in kind.fields))


def _texts(kind: LaunchKind, words: Sequence[int], own: Contract | None) -> list[str]:
    """Return the text of each field; "" for a list that this PE does not know."""
    values = (own.team, *own.values) if own is not None and own.kind is kind else None
    texts = []
    for i, field in enumerate(_fields_of(kind)):
        if field.show is not None:
            text = field.show(words[i + 1])
        elif values is not None and field.encode(values[i]) == words[i + 1]:
            text = str(list(values[i]))
        else:
            text = ""
        texts.append(text)
    return texts


def _mixed(values: Sequence[int]) -> int:
    """Return a number that differs, in practice, where the lists differ."""
    return int.from_bytes(hashlib.blake2b(array("q", values).tobytes(), digest_size=7).digest(), "little")


def _word_of(name: str) -> int:
    """Return the word that a contract of this name begins with, the same in every process and version."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte) % (2**61 - 1)
    return number
