"""What a world leaves: in forked children, after an init that failed, and at the exit of the interpreter.

Every test runs its own programs, and checks their exit status and output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from warm_python import Popen

import persistent_ops as po
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES
from persistent_ops.runtime.bounded import within

pytestmark = pytest.mark.host
ROOT = Path(po.__file__).resolve().parents[1]


def environment(rank: int = 0, size: int = 1, job: str = "") -> dict[str, str]:
    """Return this process' environment without a launcher's variables, or with a one-host Slurm step's variables."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environ["PYTHONPATH"] = str(ROOT)
    if size > 1:
        environ |= {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_NUM_NODES": "1",
        }
    return environ


def run_pes(
    program: str, size: int, *arguments: str, more: dict[str, str] | None = None, seconds: float = 100.0
) -> list[tuple[int, str, str]]:
    """Run a program as the PEs of a job, with more variables; return exit status, output and error output of each."""
    job = f"lifecycle-{os.getpid()}-{os.urandom(4).hex()}"
    pes = [
        Popen(
            [sys.executable, "-c", program, *arguments],
            env=environment(rank, size, job) | (more or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    found = []
    try:
        for pe in pes:
            out, err = pe.communicate(timeout=seconds)
            found.append((pe.returncode, out, err))
    finally:
        for pe in pes:
            if pe.poll() is None:
                os.killpg(pe.pid, signal.SIGKILL)  # and the children that it has forked
                pe.wait()
    return found


# --- forked children ---

FORKS = """
import os, sys, time, warnings
import torch
import persistent_ops as po

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: a fork of a process with threads

def trial(name, call):
    try:
        call()
    except RuntimeError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: no error", flush=True)

po.init("host", timeout=20.0, heap_size=16 << 20, transport=sys.argv[1])
weight, x = torch.ones(4, 4), torch.ones(4)
expected = po.gemv_all_reduce(weight, x).tolist()
sys.stdout.flush()
child = os.fork()
if child == 0:
    trial("operator", lambda: po.gemv_all_reduce(weight, x))
    trial("barrier", po.barrier)
    trial("empty", lambda: po.empty(4))
    trial("init", lambda: po.init("host"))
    print("initialized:", po.is_initialized(), flush=True)
    po.finalize()
    sys.exit(3)
deadline, ended = time.monotonic() + 30, 0
while not ended and time.monotonic() < deadline:
    ended, status = os.waitpid(child, os.WNOHANG)
    time.sleep(0.02)
if not ended:
    os.kill(child, 9)
    raise SystemExit("the child did not end")
assert os.waitstatus_to_exitcode(status) == 3, status
for _ in range(3):  # the child has disturbed nothing
    assert po.gemv_all_reduce(weight, x).tolist() == expected
po.check()
po.finalize()
print("parent: finalized", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_forked_child_has_no_world_and_ends(size: int, transport: str) -> None:
    for status, out, err in run_pes(FORKS, size, transport):
        assert (status, err) == (0, ""), out + err
        told = dict(line.split(": ", 1) for line in out.splitlines())
        for name in ("operator", "barrier", "empty", "init"):
            assert "forked after persistent_ops.init()" in told[name] and "is no PE" in told[name], out
        assert told["initialized"] == "False"
        assert told["parent"] == "finalized"


# --- a world that is left open ---

LEFT_OPEN = """
import torch
import persistent_ops as po

po.init("host", timeout=20.0, heap_size=16 << 20)
rank = po.rank()
rows = torch.sparse_coo_tensor([[rank, 5]], torch.ones(2, 3), (9, 3), check_invariants=True).coalesce()
kept = [
    po.all_reduce(torch.ones(4)),
    po.gemv_all_reduce(torch.ones(4, 4), torch.ones(4)),
    po.sparse_all_reduce(rows),
    po.sparse_all_reduce(rows, async_op=True),
    po.embedding_all_to_all([torch.ones(8, 4)], torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4])),
]
print(float(kept[0].sum()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_exit_is_clean_where_a_world_and_its_results_are_left(size: int) -> None:
    """After `atexit` the interpreter releases them, in any order, and torch with them."""
    assert run_pes(LEFT_OPEN, size) == [(0, f"{4.0 * size}\n", "")] * size


# --- an init that fails ---

FAILS = """
import os, re, sys, threading, time
import persistent_ops as po

def fails(expected, make, **options):
    natives = []
    for attempt in range(4):
        try:
            make(**{"backend": "host", "timeout": 1.0, "heap_size": 16 << 20, **options})
        except Exception as error:
            assert re.search(expected, str(error)), repr(error)
        else:
            raise SystemExit("init did not fail")
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert left == [], f"attempt {attempt} left {left}"
        assert not po.is_initialized()
        deadline = time.monotonic() + 5
        natives.append(len(os.listdir("/proc/self/task")))
        while len(natives) > 2 and natives[-1] > natives[1] and time.monotonic() < deadline:
            time.sleep(0.05)  # what a library ends by itself
            natives[-1] = len(os.listdir("/proc/self/task"))
    assert max(natives[1:]) <= natives[1], f"native threads after each attempt: {natives}"

def try_kind(kind, folder):
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    if kind == "absent peer":
        fails("rank 1 of 2", po.init)
    elif kind == "absent rank 0":
        os.environ.update(SLURM_PROCID="1", SLURM_LOCALID="1")
        fails("rank 0 is missing", po.init)
    elif kind == "backend":
        fails("backend='cuda' needs a GPU", po.init, backend="cuda", timeout=20.0)
    elif kind == "heap_size":
        fails("heap_size differs", po.init, heap_size=(16 << 20) + rank * 4096, timeout=20.0)
    elif kind == "small heap":
        fails("no room", po.init, heap_size=4096, transport="staged", timeout=20.0)
    elif kind == "no compiler":
        os.environ.update(PERSISTENT_OPS_CXX="/nowhere/c++", PERSISTENT_OPS_CACHE=f"{folder}/cache")
        fails("PERSISTENT_OPS_CXX", po.init, transport="staged", timeout=20.0)
    elif kind == "group":
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        if rank == 0:
            fails("rank 1 of 2", po.init)
        dist.barrier()
    elif kind == "threads":
        def one_comes(**options):
            def program():
                if po.runtime.pe_threads.thread_bootstrap().rank == 0:
                    po.init(**options)
            po.launch(program, 2, threads=True, timeout=20)
        fails("rank 1 of 2", one_comes, transport="staged")
    else:
        raise SystemExit(f"there is no {kind!r}")

for kind in sys.argv[2:]:
    try_kind(kind, sys.argv[1])
    print(f"{kind}: nothing is left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "launcher", "kinds"),
    [
        (1, "none", ["backend", "small heap", "threads"]),
        (1, "srun of two", ["absent peer", "absent rank 0"]),
        (2, "srun", ["backend", "heap_size", "small heap", "no compiler"]),
        (2, "srun", ["group"]),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value) if isinstance(value, int) else value[0],
)
def test_a_failed_init_leaves_no_thread(size: int, launcher: str, kinds: list[str], tmp_path: Path) -> None:
    environ = environment(0, 2, f"lifecycle-{os.getpid()}") if launcher == "srun of two" else {}
    for status, out, err in run_pes(FAILS, size, str(tmp_path), *kinds, more=environ):
        assert (status, out.splitlines()) == (0, [f"{kind}: nothing is left" for kind in kinds]), out + err


def test_a_call_without_a_timeout_is_bounded_and_not_begun_twice() -> None:
    released = threading.Event()
    assert within(5.0, lambda: 7, "a call that returns") == 7
    with pytest.raises(KeyError, match="its own error"):
        within(5.0, lambda: {}["its own error"], "a call that raises")
    with pytest.raises(po.BootstrapError, match=r"a call that hangs did not finish within 0\.05 s"):
        within(0.05, released.wait, "a call that hangs")
    with pytest.raises(po.BootstrapError, match="a call that hangs has no time-out, and 1 earlier.*start this process"):
        within(5.0, lambda: 7, "a call that hangs")
    assert within(5.0, lambda: 8, "another call") == 8
    released.set()
    deadline = time.monotonic() + 5
    while any("a call that hangs" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert within(5.0, lambda: 9, "a call that hangs") == 9


# --- PEs that are threads ---

THREADS = """
import gc, os, sys, time
import torch
import persistent_ops as po

transport, kind, launches = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"network_delay_us": 2000} if transport == "staged" else {}

# An operator without torch.library.custom_op, which imports torch's compiler.
library = torch.library.Library("lifecycle", "DEF")
library.define("waits(Tensor x, float seconds) -> Tensor")

def wait(x, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:  # above C++ frames, which do not survive that the interpreter unwinds a thread
        time.sleep(0.001)
    return x.clone()

library.impl("waits", wait, "CPU")
waits = torch.ops.lifecycle.waits

def program():
    po.init("host", timeout=4.0, heap_size=16 << 20, transport=transport, host_options=options)
    weight, x = torch.full((64, 64), 1.0 + po.rank()), torch.arange(64.0)
    result = po.gemv_all_reduce(weight, x)
    late = po.rank() == 1
    if kind == "raises" and late:
        raise KeyError("rank 1's own error")
    if kind == "raises" and not late:
        po.gemv_all_reduce(weight, x)  # in vain
    if kind == "exits" and late:
        sys.exit(5)
    if kind == "hangs" and late:
        waits(x, 1000.0)
    if kind == "sleeps" and late:
        time.sleep(1000)
    return result.tolist()

def held():
    gc.collect()
    mapped = open("/proc/self/maps").read().count("memfd:persistent_ops")
    return len(os.listdir("/proc/self/task")), mapped

def settled():
    last = [held()]
    while len(last) < 25 or len(set(last[-25:])) > 1:  # for half a second
        time.sleep(0.02)
        last.append(held())
    return last[-1]

def left():
    for _ in range(1 if kind == "hangs" else 200):
        more = [max(0, now - then) for now, then in zip(held(), before)]
        if not any(more):
            break
        time.sleep(0.02)
    return more

seen = set()
for number in range(launches):
    try:
        seen.add(str(po.launch(program, 2, threads=True, timeout=3.0 if kind in ("hangs", "sleeps") else 60)[0][0]))
    except BaseException as error:
        seen.add(f"{type(error).__name__}: {error}".replace("PE 0, 1 ", "PE 1 "))  # PE 0 may be slow: a busy machine
    if not number:  # what is kept for good: pools of torch
        before = settled()
print(seen, "left:", left(), flush=True)
"""


HUNG = "still running: PE 1 (threads, which cannot be ended)"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize(
    ("kind", "launches", "expected"),
    [
        ("returns", 30, {"6048.0"}),
        ("raises", 3, {'KeyError: "rank 1\'s own error"'}),
        ("exits", 8, {"PersistentOpsError: PE 1 of 2 exited with code 5 before it returned a result"}),
        (
            "hangs",
            3,
            {f"PersistentOpsError: launch() ran longer than 3.0 s; {HUNG}"},
        ),
    ],
)
def test_worlds_that_thread_pes_leave_open_are_closed(
    transport: str, kind: str, launches: int, expected: set[str]
) -> None:
    ((status, out, err),) = run_pes(THREADS, 1, transport, kind, str(launches), seconds=200)
    left = "left: [0, 0]" if kind != "hangs" else "left: "  # they are still there
    assert (status, err) == (0, ""), out
    assert out.startswith(f"{expected} {left}")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_the_exit_is_clean_where_a_thread_pe_never_comes_back(transport: str) -> None:
    began = time.monotonic()
    ((status, out, err),) = run_pes(THREADS, 1, transport, "sleeps", "1")
    assert (status, err) == (0, ""), err
    assert "still running: PE 1 " in out
    assert time.monotonic() - began < 60


def test_what_thread_pes_hold_is_let_go_of_before_launch_returns() -> None:
    """After all their code. Releases while the interpreter ends, above all of torch's tensors, can abort it."""
    place, released = threading.local(), []

    class Held:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __del__(self) -> None:
            time.sleep(0.3)
            released.append(self.rank)

    def program() -> int:
        po.init("host", heap_size=1 << 20)
        rank = po.rank()
        po.finalize()
        place.held = Held(rank)
        return rank

    assert po.launch(program, 2, threads=True, timeout=60) == [0, 1]
    assert sorted(released) == [0, 1]


def test_at_exit_where_no_thread_can_be_started_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in handlers of atexit from Python 3.12 on, which close worlds."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(5.0, threading.get_ident, "a call at exit") == threading.get_ident()
