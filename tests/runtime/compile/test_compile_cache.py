"""The folder of compiled kernels: many processes, processes that die, damaged entries, permissions."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jit_workshop import (
    Workshop,
    make_workshop,
    value_of,
    wait_until,
)

from persistent_ops.runtime.compile import cache
from persistent_ops.runtime.errors import CompileError


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return make_workshop(tmp_path, monkeypatch)


def test_six_processes_compile_once(workshop: Workshop) -> None:
    workshop.on_compile("sleep 0.5")
    processes = [workshop.start() for _ in range(6)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, outputs
    assert len({output for output, _ in outputs}) == 1
    assert workshop.compilations == 1
    assert value_of(Path(outputs[0][0].strip())) == 7


def test_process_killed_while_compiling_leaves_no_entry_and_no_lock(workshop: Workshop) -> None:
    workshop.on_compile("exec sleep 600")
    process = workshop.start()
    compiler = 0
    try:
        wait_until(lambda: workshop.compilations == 1)
        compiler = int((workshop.state / "compiled").read_text())
        assert list((workshop.cache / "tmp").iterdir()) != []
        process.kill()
        process.communicate()
        assert list((workshop.cache / "entries").iterdir()) == []
        (workshop.state / "on_compile").unlink()
        started = time.monotonic()
        assert value_of(workshop.build()) == 7
        assert time.monotonic() - started < 10.0
        assert list((workshop.cache / "tmp").iterdir()) == []
    finally:
        process.kill()
        if compiler:
            with contextlib.suppress(ProcessLookupError):
                os.kill(compiler, signal.SIGKILL)


def test_wait_for_another_process_is_bounded_and_names_it(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.on_compile(f"while [ ! -e {workshop.state}/go ]; do sleep 0.05; done")
    process = workshop.start()
    wait_until(lambda: workshop.compilations == 1)
    monkeypatch.setenv("PERSISTENT_OPS_COMPILE_TIMEOUT", "0.3")
    with pytest.raises(CompileError, match=rf"waited 0\.3 s for process {process.pid} on "):
        workshop.build()
    (workshop.state / "go").touch()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    monkeypatch.delenv("PERSISTENT_OPS_COMPILE_TIMEOUT")
    assert str(workshop.build()) == output.strip()
    assert workshop.compilations == 1


def test_compiler_that_hangs_is_ended_with_its_children(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.on_compile(f"sleep 600 & echo $! > {workshop.state}/child; wait")
    monkeypatch.setenv("PERSISTENT_OPS_COMPILE_TIMEOUT", "4.5")
    with pytest.raises(CompileError, match=r"did not finish within 4\.5 s"):
        workshop.build()
    child = Path(f"/proc/{int((workshop.state / 'child').read_text())}/stat")

    def ended() -> bool:
        try:
            return child.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(ended, 5.0)
    assert list((workshop.cache / "tmp").iterdir()) == []


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_malformed_time_out_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PERSISTENT_OPS_COMPILE_TIMEOUT", value)
    with pytest.raises(CompileError, match="PERSISTENT_OPS_COMPILE_TIMEOUT must be a number of seconds"):
        workshop.build()


def flip_a_byte(entry: Path) -> None:
    data = bytearray((entry / "scale.so").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (entry / "scale.so").write_bytes(data)


def truncate_manifest(entry: Path) -> None:
    text = (entry / "manifest.json").read_text()
    (entry / "manifest.json").write_text(text[: len(text) // 2])


def move_manifest(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["key"] = "0" * 40
    (entry / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: list[Callable[[Path], object]] = [
    flip_a_byte,
    lambda entry: os.truncate(entry / "scale.so", 100),
    lambda entry: (entry / "scale.so").unlink(),
    truncate_manifest,
    move_manifest,
    lambda entry: (entry / "manifest.json").write_text("[]"),
    lambda entry: (entry / "manifest.json").unlink(),
]


def test_damaged_entry_is_a_miss(workshop: Workshop) -> None:
    library = workshop.build()
    good = library.read_bytes()
    for expected, damage in enumerate(DAMAGES, start=2):
        damage(library.parent)
        assert workshop.build() == library
        assert workshop.compilations == expected
        assert library.read_bytes() == good
        assert workshop.build() == library
        assert workshop.compilations == expected
    assert list((workshop.cache / "tmp").iterdir()) == []


def test_old_working_folders_of_other_keys_are_removed(workshop: Workshop) -> None:
    workshop.build()
    old, young = workshop.cache / "tmp" / "old.x", workshop.cache / "tmp" / "young.x"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    workshop.build(is_portable=True)
    assert not old.exists()
    assert young.exists()


def test_one_line_says_that_kernels_are_compiled(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    workshop.on_compile(f"while [ ! -e {workshop.state}/go ]; do sleep 0.05; done")
    other = workshop.start()
    wait_until(lambda: workshop.compilations == 1)
    (workshop.state / "on_compile").write_text("")
    workshop.build(is_portable=True)  # beside the other process, which has said so
    (workshop.state / "go").touch()
    errors = other.communicate(timeout=60)[1]
    assert errors == f"persistent_ops: compiling kernels, once; they stay in {workshop.cache}\n"
    assert not caplog.records


def test_what_is_in_the_cache_is_not_announced(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    workshop.build()
    workshop.build(is_portable=True)
    assert [record.message for record in caplog.records] == [
        f"persistent_ops: compiling kernels, once; they stay in {workshop.cache}"
    ]
    process = workshop.start()
    assert process.communicate(timeout=60)[1] == ""


def test_folder_is_created_for_its_owner_alone(workshop: Workshop) -> None:
    before = os.umask(0)
    try:
        library = workshop.build()
    finally:
        os.umask(before)
    assert stat.S_IMODE(workshop.cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_folder_that_others_can_write_is_refused(workshop: Workshop, mode: int) -> None:
    workshop.build()
    workshop.cache.chmod(mode)
    with pytest.raises(CompileError, match=rf"mode {mode:04o}.*chmod 700.*PERSISTENT_OPS_CACHE"):
        workshop.build()
    workshop.cache.chmod(0o755)
    workshop.build()
    assert workshop.compilations == 1


def test_folder_of_another_user_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.build()
    owner = workshop.cache.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(cache, "_ROOT", owner + 2)
    with pytest.raises(CompileError, match=rf"belongs to user id {owner}.*PERSISTENT_OPS_CACHE"):
        workshop.build()
    monkeypatch.setattr(cache, "_ROOT", owner)  # of an image that another user runs
    workshop.build()
    assert workshop.compilations == 1


def test_folder_that_cannot_be_written_names_the_variable(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"is not a folder.*PERSISTENT_OPS_CACHE"):
        workshop.build()
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CompileError, match=r"cannot be created.*PERSISTENT_OPS_CACHE"):
        workshop.build()
    # Nothing can be written inside: what a read-only home folder looks like (permissions do not stop root).
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "entries").touch()
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(closed))
    with pytest.raises(CompileError, match=r"cannot be written.*PERSISTENT_OPS_CACHE"):
        workshop.build()


def test_hit_writes_nothing(workshop: Workshop) -> None:
    library = workshop.build()
    shutil.rmtree(workshop.cache / "locks")
    shutil.rmtree(workshop.cache / "shared")
    shutil.rmtree(workshop.cache / "tmp")
    assert workshop.build() == library
    assert sorted(path.name for path in workshop.cache.iterdir()) == ["entries"]
