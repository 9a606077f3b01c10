"""The bound of the host's wait after replays: what counts, what is ended, what is raised, how a process leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dlrm.workload
import pytest
import torch.distributed as dist
from dlrm.options import Options
from dlrm.workload import run_pe
from kept_pes import in_processes
from test_dlrm_graph import stands_in
from test_dlrm_train import options_of
from worlds import in_world

import persistent_ops as po
from persistent_ops.nn import StepWatchdog, step_watchdog
from persistent_ops.runtime.bootstrap.process_group import abort_process_group
from persistent_ops.runtime.errors import BootstrapError

SECONDS, MARGIN = 60.0, 10.0


class Machine:
    """A clock, the peers, and steps that are over at times of that clock.

    Args:
        monkeypatch: which puts the clock in place.
        ends: when each step is over.
        lost_at: when PE 2 ends.
        prepares: from when until when PE 1 prepares a launch.
        abort_ends: whether an abort ends the steps.
        reports: what launches have reported, once the steps are over.
        interrupted_at: when Ctrl-C comes.

    Attributes:
        now: of the clock.
        calls: "abort" and "check", each with its time.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        ends: list[float],
        *,
        lost_at: float = float("inf"),
        prepares: tuple[float, float] = (0.0, 0.0),
        abort_ends: bool = True,
        reports: Exception | None = None,
        interrupted_at: float = float("inf"),
    ) -> None:
        self.now, self.calls = 0.0, []  # type: ignore[var-annotated]
        self._ends, self._lost_at, self._prepares = list(ends), lost_at, prepares
        self._abort_ends, self._reports, self._interrupted_at = abort_ends, reports, interrupted_at
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        self.workspace, self.backend = SimpleNamespace(timeout=SECONDS), SimpleNamespace(name="host")
        changes = {"time": clock, "current": lambda: self, "_mark_nothing": self._mark}
        for name, value in {**changes, "abort_process_group": self._abort}.items():
            monkeypatch.setattr(step_watchdog, name, value)
        monkeypatch.setattr(step_watchdog.os, "_exit", self._exit)
        self.watch = StepWatchdog()
        self._marks = iter(range(len(ends)))
        for step in range(len(ends)):
            self.watch.launched(14 + step)

    @property
    def lost_peers(self) -> frozenset[int]:
        return frozenset({2} if self.now >= self._lost_at else ())

    @property
    def preparing_peers(self) -> frozenset[int]:
        return frozenset({1} if self._prepares[0] <= self.now < self._prepares[1] else ())

    def _mark(self) -> Callable[[], bool]:
        number = next(self._marks)
        return lambda: self.now >= self._ends[number]

    def _sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.1
        self.now += seconds
        if self.now >= self._interrupted_at:
            self._interrupted_at = float("inf")
            raise KeyboardInterrupt

    def _abort(self, seconds: float) -> None:
        self.calls.append(("abort", self.now))
        if self._abort_ends:
            self._ends = [min(end, self.now + 0.5) for end in self._ends]

    def check(self) -> None:
        self.calls.append(("check", self.now))
        if self._reports is not None:
            raise self._reports

    def _exit(self, code: int) -> None:
        raise SystemExit(f"ended with {code}")


NEVER = float("inf")


def test_steps_may_take_long_together_and_while_a_peer_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [50.0, 110.0, 910.0, 911.0], prepares=(120.0, 900.0))
    machine.watch.wait()
    assert machine.calls == [("check", machine.now)] and machine.now >= 911.0
    machine.watch.wait()
    assert [call for call, _ in machine.calls] == ["check", "check"], "nothing is under way, and launches may report"


def test_a_step_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [50.0, NEVER, NEVER])
    with pytest.raises(po.PeerTimeoutError, match=r"^step 15 has not ended within 70 s: a peer is stuck.*checkpoint"):
        machine.watch.wait()
    (_, aborted), (last, checked) = machine.calls
    assert 50.0 + SECONDS + MARGIN < aborted < 50.0 + SECONDS + MARGIN + 1.0
    assert last == "check" and checked >= aborted + 0.5, "launches are looked at when the steps are over"
    machine.watch.close()
    assert len(machine.calls) == 2, "nothing is under way any more"


def test_preparing_does_not_begin_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [NEVER], prepares=(40.0, 140.0))
    with pytest.raises(po.PeerTimeoutError):
        machine.watch.wait()
    assert 170.0 < machine.calls[0][1] < 171.0


def test_a_peer_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [1.0, NEVER], lost_at=20.0)
    with pytest.raises(po.PeerLostError, match=r"^step 15 has not ended, and PE 2 is no longer running"):
        machine.watch.wait()
    assert 30.0 < machine.calls[0][1] < 31.0
    machine = Machine(monkeypatch, [1.0, 25.0], lost_at=20.0)
    machine.watch.wait()
    assert [call for call, _ in machine.calls] == ["check"], "who ended behind the last step is not missed"


def test_what_a_launch_has_reported_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = po.PeerTimeoutError("PE 0 waited 60.00 s for PE 1: lookups")
    machine = Machine(monkeypatch, [NEVER], reports=reported)
    with pytest.raises(po.PeerTimeoutError, match="step 14 has not ended") as raised:
        machine.watch.wait()
    assert raised.value.__cause__ is reported
    machine = Machine(monkeypatch, [3.0], reports=IndexError("row 7"))
    with pytest.raises(IndexError, match="row 7"):
        machine.watch.wait()


def test_ctrl_c_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [NEVER], interrupted_at=5.0)
    with pytest.raises(KeyboardInterrupt):
        machine.watch.wait()
    assert machine.calls[0][0] == "abort" and machine.now < 6.0


def test_an_error_ends_a_training_whose_steps_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [NEVER])
    machine.watch.close()
    assert [call for call, _ in machine.calls] == ["abort", "check"]


@pytest.mark.parametrize("raises", [False, True])
def test_what_cannot_be_ended_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raises: bool
) -> None:
    machine = Machine(monkeypatch, [NEVER], abort_ends=False)
    if raises:

        def fail(seconds: float) -> None:
            raise BootstrapError("the abort did not finish")

        monkeypatch.setattr(step_watchdog, "abort_process_group", fail)
    with pytest.raises(SystemExit, match="ended with 1"):
        machine.watch.wait()
    assert (machine.now > SECONDS + MARGIN + step_watchdog._ABORT_S) == (not raises)
    told = capsys.readouterr().err
    assert "PeerTimeoutError: step 14 has not ended within 70 s" in told
    assert ("the abort did not finish" in told) == raises and "this process ends" in told.splitlines()[-1]


def test_errors_of_the_device_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [])

    def is_over() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access")

    machine.watch._under_way.append((14, is_over))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        machine.watch.wait()
    machine.watch.close()
    assert machine.calls == []


def _waits_on_the_host() -> None:
    watch = StepWatchdog()
    watch._seconds = 1e-9
    watch.launched(1)
    watch.wait()


def test_on_the_host_steps_are_over_when_they_return() -> None:
    in_world(_waits_on_the_host, 1, "host")


# ---- trainings -------------------------------------------------------------------------------------------------------


def stuck(options: Options, can_be_ended: bool) -> str:
    """Be a PE of a training whose graphs have a stand-in; on PE 0 step 14 ends when the group is aborted, if ever."""
    aborted: list[bool] = []
    marked: list[bool] = []

    def mark() -> Callable[[], bool]:
        marked.append(True)
        is_stuck = dist.get_rank() == 0 and len(marked) == 14
        return lambda: not is_stuck or (can_be_ended and bool(aborted))

    def abort(seconds: float) -> None:
        abort_process_group(seconds)
        aborted.append(not dist.is_initialized())

    def watch() -> StepWatchdog:
        found = StepWatchdog()
        assert found._seconds == options.timeout + MARGIN
        found._seconds = 3.5
        return found

    with stands_in() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlrm.workload, "check_machine", lambda **_: None)
        patch.setattr(dlrm.workload, "own_stream", lambda _: contextlib.nullcontext())
        patch.setattr(step_watchdog, "_ABORT_S", 30.0 if can_be_ended else 0.5)
        patch.setattr(step_watchdog, "_mark_nothing", mark)
        patch.setattr(step_watchdog, "abort_process_group", abort)
        patch.setattr(po.nn, "StepWatchdog", watch)
        try:
            run_pe(options)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}; {aborted}, {events}"
    return f"it went on; {events}"


@pytest.mark.host
def test_a_training_whose_peer_is_stuck_ends(tmp_path: Path) -> None:
    """And leaves its world: the PE's process is kept."""
    told, other = in_processes(
        stuck, 2, options_of(tmp_path, steps=20, is_captured=True, timeout=20.0), True, timeout=200
    )
    assert told.startswith("PeerTimeoutError: step 14 has not ended within 3.5 s: a peer is stuck.")
    assert told.endswith("; [True], ['captured', 'given back']")
    assert "it went on" not in other, "its sum has lost a peer"


@pytest.mark.host
def test_a_training_that_cannot_end_its_steps_ends_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tmp_path, steps=20, is_captured=True)
    with pytest.raises(po.PersistentOpsError, match="PE 0 of 1 exited with code 1"):
        po.launch(stuck, 1, options, False, timeout=200)
    told: Any = capfd.readouterr().err
    assert "PeerTimeoutError: step 14 has not ended within 3.5 s" in told
