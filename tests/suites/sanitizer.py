"""Operators under ThreadSanitizer: no error, but one for each mutation of their protocol.

`SanitizerSuite` contains the tests. An operator provides its driver: a program of host_driver/ that runs all PEs of a
world as threads, its builds, the cases without errors, and the mutations that it must notice.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from host_driver.build import HERE, compile_source, standard_headers
from mutations import Edit, mutated_by

__all__ = [
    "RACE",
    "Build",
    "Driver",
    "Exit",
    "Mutation",
    "Outcome",
    "SanitizerSuite",
    "assert_caught",
    "assert_silent",
    "of_lanes",
    "run_driver",
]

_EXITS = dict(re.findall(r"^  k(\w+) = (\d+),", (HERE / "exits.h").read_text(), re.MULTILINE))
Exit = enum.IntEnum(  # type: ignore[misc]
    "Exit", {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): int(number) for name, number in _EXITS.items()}
)
_RACE_REPORT = "WARNING: ThreadSanitizer: data race"
_CRASH_REPORT = "ThreadSanitizer:DEADLYSIGNAL"
# The sanitizer does not see a copy larger than a register that the compiler makes itself. It sees a library's copy.
_FLAGS = ("-g1", "-fsanitize=thread", "-fno-builtin-memcpy", "-fno-builtin-memset")
_SECONDS = 120  # of one run, which takes a few where the machine has nothing else to do
_RUNS = 12  # of a mutation, at most: a race is reported only where the threads meet


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what it wrote."""

    exit: Exit
    text: str


# A PE that reads too early finds old data, and may report them before the writer makes it a race.
RACE = frozenset({Exit.RACE, Exit.WRONG_OUTPUT})


@dataclass(frozen=True)
class Mutation:
    """A part of the protocol taken out, and how a driver must end then.

    Attributes:
        edits: of the kernel sources.
        arguments: of the driver.
        shows: the ends that count as noticed; several if the order of the threads decides.
        build: which of its builds the driver needs; None for the one that mutations have.
        may_crash: the mutation can access any memory. A run that crashes shows nothing and is repeated.
    """

    edits: tuple[Edit, ...]
    arguments: str
    shows: Set[Exit]
    build: str | None = None
    may_crash: bool = False


@dataclass(frozen=True)
class Build:
    """How a driver is compiled: flags, and edits of the kernel sources that make them fit a small world."""

    flags: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()


_LANES = ("-I", str(HERE / "lanes"))


def of_lanes(build: Build) -> Build:
    """Return the same with warps of 32 lanes, each a thread (host_driver/lanes); `--threads` are whole warps then."""
    return Build((*_LANES, *build.flags), build.edits)


@dataclass(frozen=True)
class Driver:
    """What an operator gives to the suite.

    Attributes:
        source: in host_driver/, or its text.
        builds: by name.
        cases: of each build, the arguments with which it must end as expected, without a report of the sanitizer.
        mutations: by name.
        mutation_build: the build of mutations that name none.
    """

    source: str
    builds: Mapping[str, Build]
    cases: Mapping[str, Mapping[str, str]]
    mutations: Mapping[str, Mutation]
    mutation_build: str

    def build_of(self, mutation: Mutation) -> str:
        return mutation.build or self.mutation_build


class Programs:
    """A driver's programs, each compiled when it is requested."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self._driver = driver
        self._folder = folder
        self._mutations = {
            build: [name for name, mutation in driver.mutations.items() if driver.build_of(mutation) == build]
            for build in driver.builds
        }

    def of(self, build: str) -> Path:
        """Return the program of a build, with its mutations; `number_of` gives a mutation's number, 0 is none."""
        if not self._mutations[build]:
            return self._compiled(build, {}, "-Werror")
        edits = {number: self._driver.mutations[name].edits for number, name in enumerate(self._mutations[build], 1)}
        return self._compiled(build, edits, "-include", str(HERE / "mutant.h"))

    def number_of(self, name: str) -> int:
        return self._mutations[self._driver.build_of(self._driver.mutations[name])].index(name) + 1

    def _compiled(self, build: str, mutations: Mapping[int, Iterable[Edit]], *flags: str) -> Path:
        folder = self._folder / f"{build}{' with mutations' if mutations else ''}"
        if not (folder / "driver").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a compilation that failed, or was skipped
            folder.mkdir()
            own = self._driver.builds[build]
            root = mutated_by(folder, {0: own.edits, **mutations}, "mutant")
            source = self._driver.source
            if "\n" in source:
                text, source = source, str(folder / "driver.cpp")
                Path(source).write_text(text)
            flags = (*_FLAGS, *standard_headers(*_FLAGS), *own.flags, *flags, "-I", str(HERE))
            compile_source(source, folder / "driver", *flags, cuda=root)
        return folder / "driver"


def _quick_ones(kinds: Mapping[tuple[str, ...], object], chosen: object = None) -> list[Any]:
    """Return parameters. `make test` has the first one of each kind, or of the chosen kind only."""
    first = {kind: values for values, kind in reversed(kinds.items())}
    quick = [values for kind, values in first.items() if chosen in (None, kind)]
    return [pytest.param(*values, marks=() if values in quick else pytest.mark.slow) for values in kinds]


class SanitizerSuite:
    """The tests. An operator's class, a subclass, names its driver."""

    driver: ClassVar[Driver]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        driver = cls.driver
        if "case" in metafunc.fixturenames:
            kinds = {(build, case): build for build, cases in driver.cases.items() for case in cases}
            # The build of the mutations is compiled for them anyhow.
            metafunc.parametrize(("build", "case"), _quick_ones(kinds, driver.mutation_build))
        elif "name" in metafunc.fixturenames:
            mutations = driver.mutations.items()
            kinds = {(name,): (type(each.edits[0]), frozenset(each.shows)) for name, each in mutations}
            metafunc.parametrize(("name",), _quick_ones(kinds))

    @pytest.fixture(scope="class")
    @classmethod
    def programs(cls, tmp_path_factory: pytest.TempPathFactory) -> Programs:
        return Programs(cls.driver, tmp_path_factory.mktemp("drivers"))

    def test_is_silent(self, programs: Programs, build: str, case: str) -> None:
        assert_silent(run_driver(programs.of(build), self.driver.cases[build][case]))

    def test_mutation_is_caught(self, programs: Programs, name: str) -> None:
        mutation = self.driver.mutations[name]
        assert_caught(programs.of(self.driver.build_of(mutation)), mutation, programs.number_of(name))


def run_driver(program: Path, arguments: str, mutant: int = 0, *, may_crash: bool = False) -> Outcome:
    """Run a driver. Repeat a run that crashes and may. Fail on an end that is not in Exit, or on no end."""
    options = f"halt_on_error=1 exitcode={Exit.RACE.value}"
    if "--trouble-at" in arguments:  # only where launches are given up: elsewhere the function has more to say
        options += f" suppressions='{HERE / 'suppressions.txt'}'"
    environment = {**os.environ, "TSAN_OPTIONS": options, "MUTANT": str(mutant)}
    command = [str(program), *arguments.split()]
    status, text = _run(command, environment)
    if "unexpected memory mapping" in text:  # this kernel randomizes more address bits than the sanitizer expects
        command = ["setarch", "-R", *command]
        status, text = _run(command, environment)
    for _ in range(_RUNS if may_crash else 0):
        if _CRASH_REPORT not in text:
            break
        status, text = _run(command, environment)
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


def assert_caught(program: Path, mutation: Mutation, number: int = 0) -> None:
    """Run a mutated driver a few times. Fail if it ends in another way than the mutation says, or unnoticed."""
    for _ in range(_RUNS):
        outcome = run_driver(program, mutation.arguments, number, may_crash=mutation.may_crash)
        if outcome.exit != Exit.AS_EXPECTED:
            expected = " or ".join(sorted(end.name for end in mutation.shows))
            assert outcome.exit in mutation.shows, f"{outcome.exit.name}, not {expected}\n{outcome.text[:6000]}"
            return
    pytest.fail(f"{_RUNS} runs with {mutation.arguments} noticed nothing")
