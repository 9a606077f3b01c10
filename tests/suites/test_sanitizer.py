"""A mutation is caught if the driver ends as expected, and not if the driver crashes or does not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitizer import Exit, Mutation, assert_caught, assert_silent, run_driver

RACE = "WARNING: ThreadSanitizer: data race (pid=7)"
CAUGHT = {
    "a race": (f"echo '{RACE}' >&2; exit 66", Exit.RACE),
    "a wrong output": ("echo 'row 3 is 4, not 5' >&2; exit 3", Exit.WRONG_OUTPUT),
    "a hang": ("exit 4", Exit.TIMED_OUT),
    "a race in the third run": (
        f"echo >> $0.runs; [ $(wc -l < $0.runs) = 3 ] && echo '{RACE}' >&2 && exit 66",
        Exit.RACE,
    ),
}
NOT_CAUGHT = {
    "nothing in any run": ("exit 0", "noticed nothing"),
    "another end": ("echo 'row 3 is 4, not 5' >&2; exit 3", "WRONG_OUTPUT, not RACE.*row 3 is 4"),
    "a crash": ("kill -SEGV $$", "ended with -11"),
    "a crash that the sanitizer reports": (
        "echo 'ThreadSanitizer:DEADLYSIGNAL' >&2; exit 66",
        "does not call a data race",
    ),
    "memory that was given back": ("echo 'WARNING: ThreadSanitizer: heap-use-after-free' >&2; exit 66", "data race"),
    "a program that is not there": ("exit 127", "ended with 127"),
    "an option that is unknown": ("echo 'unknown option' >&2; exit 2", "unknown option"),
}


def _program(folder: Path, script: str) -> Path:
    program = folder / "driver"
    program.write_text(f"#!/bin/sh\n{script}\nexit 0\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("what", CAUGHT)
def test_what_was_noticed_is_caught(tmp_path: Path, what: str) -> None:
    script, end = CAUGHT[what]
    assert_caught(_program(tmp_path, script), Mutation((), "--pes=2", {end}))


@pytest.mark.parametrize("what", NOT_CAUGHT)
def test_anything_else_fails_the_test(tmp_path: Path, what: str) -> None:
    script, text = NOT_CAUGHT[what]
    with pytest.raises((AssertionError, pytest.fail.Exception), match=f"(?s){text}"):
        assert_caught(_program(tmp_path, script), Mutation((), "--pes=2", {Exit.RACE}))


def test_a_program_that_does_not_end_fails_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sanitizer._SECONDS", 0.2)
    with pytest.raises(pytest.fail.Exception, match="did not end in"):
        run_driver(_program(tmp_path, "exec sleep 30"), "")


def test_silence_is_the_end_that_is_expected_without_a_word_of_the_sanitizer(tmp_path: Path) -> None:
    assert_silent(run_driver(_program(tmp_path, "exit 0"), ""))
    for script in (f"echo '{RACE}' >&2; exit 66", "exit 4", "echo 'ThreadSanitizer: reported 1 warnings' >&2; exit 0"):
        with pytest.raises(AssertionError):
            assert_silent(run_driver(_program(tmp_path, script), ""))


def test_the_ends_have_numbers_of_their_own() -> None:
    assert {"AS_EXPECTED", "BAD_OPTION", "WRONG_OUTPUT", "TIMED_OUT", "RACE"} <= {end.name for end in Exit}
    assert len(Exit.__members__) == len(list(Exit)) and Exit.AS_EXPECTED == 0  # members of one number are aliases
