"""Running the drivers of host_driver/ under ThreadSanitizer, and telling apart how they end."""

from __future__ import annotations

import enum
import os
import re
import subprocess
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import pytest
from host_driver.build import HERE, compile_source
from mutations import Edit

__all__ = ["Exit", "Mutation", "Outcome", "assert_caught", "assert_silent", "compile_sanitized", "run_driver"]

_EXITS = dict(re.findall(r"^  k(\w+) = (\d+),", (HERE / "exits.h").read_text(), re.MULTILINE))
Exit = enum.IntEnum(  # type: ignore[misc]
    "Exit", {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): int(number) for name, number in _EXITS.items()}
)
_RACE_REPORT = "WARNING: ThreadSanitizer: data race"
_SECONDS = 120  # of one run, which takes a few where the machine has nothing else to do
_RUNS = 6  # of a mutation: a race is reported only where the threads meet


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what it wrote."""

    exit: Exit
    text: str


@dataclass(frozen=True)
class Mutation:
    """A part of the protocol taken out, and how a driver must end then.

    Attributes:
        edits: of the kernel sources.
        arguments: of the driver.
        shows: the ends that say that it was noticed; several where it depends on what the threads do first.
        build: which of its builds the driver needs, where there are several.
    """

    edits: tuple[Edit, ...]
    arguments: str
    shows: Set[Exit]
    build: str = ""


# A copy of more than a register that the compiler makes itself is not seen by the sanitizer; one by the library is.
_FLAGS = ("-g1", "-fsanitize=thread", "-fno-builtin-memcpy", "-fno-builtin-memset")


def compile_sanitized(source: str, program: Path, *flags: str, cuda: Path) -> Path:
    """Compile a driver with the sanitizer."""
    return compile_source(source, program, *_FLAGS, *flags, cuda=cuda)


def run_driver(program: Path, arguments: str) -> Outcome:
    """Run a driver; fail the test where it ends in a way that is none of Exit, or does not end."""
    options = f"halt_on_error=1 exitcode={Exit.RACE.value}"
    if "--trouble-at" in arguments:  # only where launches are given up: elsewhere the function has more to say
        options += f" suppressions='{HERE / 'suppressions.txt'}'"
    environment = {**os.environ, "TSAN_OPTIONS": options}
    command = [str(program), *arguments.split()]
    status, text = _run(command, environment)
    if "unexpected memory mapping" in text:  # this kernel randomises more address bits than the sanitizer expects
        status, text = _run(["setarch", "-R", *command], environment)
    told = f"{' '.join(command)} ended with {status}\n{text[:6000]}"
    assert status in set(Exit), f"{told}\nwhich is no end of a driver"
    assert status != Exit.BAD_OPTION, told
    assert status != Exit.RACE or _RACE_REPORT in text, f"{told}\nwhich the sanitizer does not call a data race"
    return Outcome(Exit(status), text)


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{' '.join(command)} did not end in {_SECONDS} s\n{error.stderr}")
    return result.returncode, result.stderr


def assert_silent(outcome: Outcome) -> None:
    """Fail where a run did not end as it should, or the sanitizer said something."""
    assert outcome.exit == Exit.AS_EXPECTED, f"{outcome.exit!r}\n{outcome.text[:6000]}"
    assert "ThreadSanitizer" not in outcome.text, outcome.text[:6000]


def assert_caught(program: Path, mutation: Mutation) -> None:
    """Run a mutated driver a few times, and fail where it does not end as the mutation says, or nothing is noticed."""
    for _ in range(_RUNS):
        outcome = run_driver(program, mutation.arguments)
        if outcome.exit != Exit.AS_EXPECTED:
            expected = " or ".join(sorted(end.name for end in mutation.shows))
            assert outcome.exit in mutation.shows, f"{outcome.exit.name}, not {expected}\n{outcome.text[:6000]}"
            return
    pytest.fail(f"{_RUNS} runs with {mutation.arguments} noticed nothing")
