"""How PEs are started: invalid numbers of PEs and of seconds, no time limit, and Ctrl-C while PEs start."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import persistent_ops as po

_LAUNCH = Path(__file__).parents[2] / "launch"


# ---- seconds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9 + 1, 18446744074.0, 1e30])
@pytest.mark.parametrize("name", ["timeout", "operator_timeout"])
def test_time_outs_that_kernels_do_not_count(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected seconds above 0, 1000000000 \(30 years\) at most, got"):
        po.init("host", **{name: seconds})
    variable = f"PERSISTENT_OPS_{name.upper()}"
    monkeypatch.setenv(variable, str(seconds))
    with pytest.raises(ValueError, match=f"^{variable}: expected seconds above 0"):
        po.init("host")


def _late(seconds: float) -> str:
    """Meet a PE that comes late, under a time-out that is as long as any."""
    po.init("host", operator_timeout=1e9, heap_size=16 << 20)
    if po.rank() == 1:
        import time

        time.sleep(seconds)
    po.barrier()
    po.empty(4)
    po.finalize()
    return "met"


def test_a_time_out_of_thirty_years_is_one() -> None:
    assert po.launch(_late, 2, 0.5, threads=True, timeout=100) == ["met"] * 2


def _seven() -> int:
    return 7


@pytest.mark.parametrize("timeout", [3e6, 1e12, math.inf])
@pytest.mark.parametrize("threads", [False, True])
def test_a_launch_may_take_as_long_as_it_likes(timeout: float, threads: bool) -> None:
    assert po.launch(_seven, 1, timeout=timeout, threads=threads) == [7]


# ---- numbers of PEs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [True, 0, -1, 1.0, "2"])
def test_numbers_of_pes_that_are_none(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be a whole number of at least 1"):
        po.launch(_seven, world_size)


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_no_function_or_no_time_is_not_started(threads: bool) -> None:
    no_function: Any = "_seven"
    with pytest.raises(TypeError, match="fn: expected a function, got str"):
        po.launch(no_function, 1, threads=threads)
    no_time: Any
    for no_time in ("1", True):
        with pytest.raises(ValueError, match=f"timeout must be a positive number of seconds or None, got {no_time!r}"):
            po.launch(_seven, 1, timeout=no_time, threads=threads)


@pytest.mark.parametrize("pes", ["abc", "0", "-1", "2x", "python", ""])
@pytest.mark.parametrize("script", ["nvshmrun.sh", "mpirun.sh", "torchrun.sh"])
def test_scripts_want_a_number_of_pes(script: str, pes: str) -> None:
    command = ["bash", str(_LAUNCH / script), pes, "echo", "started"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("usage: ") and "PES" in ran.stderr and ran.stderr.count("\n") == 1


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

_PROGRAM = """
import signal
import persistent_ops as po

at_import = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def seen():
    is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return at_import, is_blocked, signal.getsignal(signal.SIGINT) is signal.SIG_IGN


if __name__ == "__main__":
    print(po.launch(seen, 2), at_import, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_pes_begin_with_interrupts_held_back(tmp_path: Path) -> None:
    """Those that come while a PE imports what it runs would end it with a traceback; it ignores them from there on."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "[(True, False, True), (True, False, True)] False False\n", ran.stderr
