"""A rehearsal of the tests for GPUs: it compiles the kernels that they will load, in advance and on all cores.

    python -m pytest --backend=rehearsal -n auto

Tests run as on the host, but operators plan as on a GPU and launch nothing. The backend only notes the requested
kernels. The process that hands out the tests compiles them into the compile cache, where the tests on GPUs find them.
Results are wrong, and every test counts as skipped. A kernel that a test requests after a step that needs a right
result, or after PATIENCE_S, is not noted. It is compiled when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import bits
import kept_pes
import pytest

import persistent_ops as po
from persistent_ops.ops.embedding.inversion import InversionPlan, Inverted
from persistent_ops.ops.embedding.lookups import Lookups
from persistent_ops.ops.sparse_plan import SparsePlan
from persistent_ops.runtime import joining
from persistent_ops.runtime.backend import GPU_BLOCKS_PER_SM, KernelRequest
from persistent_ops.runtime.compile.jit import CudaBinary, KernelSource, compile_cuda
from persistent_ops.runtime.host import HostBackend
from persistent_ops.runtime.paper import Gpu, SilentKernel
from persistent_ops.runtime.pe_threads import end_those_left_behind

__all__ = ["Compiler", "Gpu", "Noted", "Notes", "NotingBackend", "PaperGpu", "bound", "rehearsing"]

# In names of tests. torch 2.11 crashes if it traces in threads and the GPUs that it was built for are not visible.
_TRACING = ("opcheck", "make_fx", "fake_tensors", "what_a_mode_sees")
PATIENCE_S = 30.0  # for a test: some wait for results of kernels, and on a busy machine all are slow


# ---- requested kernels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noted:
    """A kernel that a backend was asked for.

    Attributes:
        source: of the kernel.
        nvshmem: whether it is linked with NVSHMEM.
        architecture_suffix: see `LaunchShape`.
    """

    source: KernelSource
    nvshmem: bool
    architecture_suffix: str = ""

    @classmethod
    def of_line(cls, line: bytes) -> Noted:
        found = json.loads(line)
        fields = found["source"]
        root = None if fields["root"] is None else Path(fields["root"])
        defines = tuple((name, value) for name, value in fields["defines"])
        return cls(
            KernelSource(**{**fields, "root": root, "defines": defines}), found["nvshmem"], found["architecture_suffix"]
        )

    @property
    def line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), default=str).encode() + b"\n"


@dataclass(frozen=True)
class Notes:
    """Kernels that processes note in a file, one per line."""

    path: Path

    def add(self, noted: Noted) -> None:
        with self.path.open("ab", buffering=0) as file:  # one write, so that lines of processes do not mix
            file.write(noted.line)

    def follow(self, is_over: threading.Event) -> Iterator[Noted]:
        """Yield each noted kernel once, until nothing more will come."""
        seen = set()
        self.path.touch()
        with self.path.open("rb") as file:
            while True:
                was_over = is_over.is_set()
                while (line := file.readline()).endswith(b"\n"):
                    if line not in seen:
                        seen.add(line)
                        yield Noted.of_line(line)
                file.seek(-len(line), os.SEEK_CUR)  # a line that is being written
                if was_over:
                    return
                is_over.wait(0.1)


# ---- backends that launch nothing ------------------------------------------------------------------------------------


class NotingBackend(HostBackend):
    """The host backend, with kernels that are noted and do nothing."""

    def __init__(self, notes: Notes, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes = notes

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Any:
        self._notes.add(Noted(request.source(), links_nvshmem, request.shape.architecture_suffix))
        return SilentKernel(self, request.shape)

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        """Nothing: what is loaded is noted."""
        return Path()


class PaperGpu(NotingBackend):
    """A backend that looks like a GPU's to a PE, until the PE uses the GPU."""

    name = "rehearsal"
    default_blocks_per_sm = GPU_BLOCKS_PER_SM

    def __init__(self, gpu: Gpu, notes: Notes, *args: Any, **options: Any) -> None:
        super().__init__(notes, *args, **options)
        self.num_sms, self.arena_bytes = gpu.num_sms, gpu.arena_bytes

    def warps_of(self, threads: int) -> int:
        return threads // 32


# The values that hosts read after launches, in place of what launches write. They are the same on all PEs. If an
# operator's host waits for a value that is missing here, its tests end early: add a line here.
_MOST_ROWS = 1000


def _rows_of_a_sum(plan: SparsePlan, *_: object) -> tuple[int, float]:
    return min(plan._key.layout.num_rows, _MOST_ROWS), 1.0


def _arrival(lookups: Lookups) -> Any:
    report = lookups._region.report
    report.full_source = -1  # there was room for all
    return report


_invert = InversionPlan._launch


def _nothing_inverted(plan: InversionPlan, call: Any, capacities: Any) -> Inverted:
    inverted = _invert(plan, call, capacities)
    inverted.count.zero_()
    return inverted


_ANSWERS = (
    (SparsePlan, "await_report", _rows_of_a_sum),
    (Lookups, "_await_report", _arrival),
    (InversionPlan, "_launch", _nothing_inverted),
)


def bound(backend: type[NotingBackend], *arguments: Any) -> type[NotingBackend]:
    """Return a backend with its first arguments given. The others are the arguments of `HostBackend`."""
    return type(backend.__name__, (backend,), {"__init__": functools.partialmethod(backend.__init__, *arguments)})


@contextlib.contextmanager
def rehearsing(backend: type[NotingBackend]) -> Iterator[None]:
    """Replace the backend of all worlds that are opened in this context; see `bound`."""
    real = joining._make_backend
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(joining, "HostBackend", backend))
        stack.enter_context(mock.patch.object(joining, "_make_backend", lambda name, *rest: real("host", *rest)))
        for place, name, answer in _ANSWERS:
            stack.enter_context(mock.patch.object(place, name, answer))
        stack.enter_context(mock.patch.object(bits, "check", _call))
        yield


def _call(trial: bits.Trial) -> tuple[None, int]:
    """Call a trial as `bits.check` does, and ignore the results."""
    for iteration in range(bits.NUM_ITERATIONS):
        for way in trial.ways(iteration):
            with contextlib.suppress(Exception):
                trial.call(iteration, iteration, way)
    with contextlib.suppress(Exception):
        po.check()
    trial.close()
    return None, 0


def _as_pe(gpu: Gpu, notes: Notes, program: Callable[..., Any], *args: Any) -> Any:
    """Be a PE that is a process."""
    with rehearsing(bound(PaperGpu, gpu, notes)):
        return program(*args)


# ---- under pytest ----------------------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """Raised in a test that has taken too long."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise _EnoughError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Rehearsal:
    """Lets tests rehearse in a process that runs them; a plugin of pytest.

    Args:
        gpu: that operators plan for.
        notes: where the requests are noted.
    """

    def __init__(self, gpu: Gpu, notes: Notes) -> None:
        self.gpu, self.notes = gpu, notes

    def pytest_configure(self) -> None:
        """Let all PEs that tests start rehearse, before test modules are imported."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a request for a GPU fails at once
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiled programs ask for the same kernels
        self._context = rehearsing(bound(PaperGpu, self.gpu, self.notes))
        self._context.__enter__()
        po.launch = self._with_rehearsing_processes(po.launch)
        kept_pes.in_processes = self._with_rehearsing_processes(kept_pes.in_processes)

    def _with_rehearsing_processes(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launch_rehearsal(program: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> Any:
            if not options.get("threads"):
                program = functools.partial(_as_pe, self.gpu, self.notes, program)
            return launch(program, world_size, *args, **options)

        return launch_rehearsal

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        if any(name in pyfuncitem.name for name in _TRACING):
            pytest.skip("not rehearsed: torch's tracing")
        with contextlib.suppress(Exception, pytest.fail.Exception), _at_most(PATIENCE_S):
            yield
        end_those_left_behind()  # torch's fake tensors and tracing do not work for two tests at a time
        pytest.skip("rehearsed")


class Compiler:
    """Compiles the noted kernels in the process that hands out the tests; a plugin of pytest.

    Args:
        gpu: to compile for.
        notes: to read.
    """

    def __init__(self, gpu: Gpu, notes: Notes) -> None:
        self._gpu, self._notes = gpu, notes
        self._begin = time.monotonic()
        self._is_over = threading.Event()
        self._made: list[Future[CudaBinary]] = []
        self._follower = ThreadPoolExecutor(1)
        self._followed = self._follower.submit(self._compile)

    def _compile(self) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for noted in self._notes.follow(self._is_over):
                arch = self._gpu.arch + noted.architecture_suffix
                make = functools.partial(compile_cuda, noted.source, arch=arch, nvshmem=noted.nvshmem)
                self._made.append(pool.submit(make))

    def finish(self) -> list[str]:
        """Wait for all noted kernels, and return the results, line by line."""
        asked = time.monotonic() - self._begin
        self._is_over.set()
        self._followed.result()
        errors = [error for each in self._made if (error := each.exception()) is not None]
        count = f"{len(self._made) - len(errors)} of {len(self._made)} kernels for {self._gpu.arch}"
        seconds = f"after {time.monotonic() - self._begin:.0f} s; the tests took {asked:.0f} s to ask for them"
        return [*dict.fromkeys(map(str, errors)), f"{count} are in the compile cache, {seconds}"]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Inform a pytest-xdist worker."""
        node.workerinput["rehearsal"] = (self._gpu._asdict(), str(self._notes.path))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("kernels")
        for line in self.finish():
            terminalreporter.line(line)

    def pytest_unconfigure(self) -> None:
        self._is_over.set()
        self._follower.shutdown()
        shutil.rmtree(self._notes.path.parent, ignore_errors=True)


def register(config: pytest.Config) -> None:
    """Let this pytest process take part in a rehearsal."""
    told = getattr(config, "workerinput", {}).get("rehearsal")
    if told is None:
        gpu, notes = Gpu.of_machine() or Gpu(), Notes(Path(tempfile.mkdtemp(prefix="rehearsal-"), "notes"))
        if not config.option.collectonly:
            config.pluginmanager.register(Compiler(gpu, notes), "compiler of the rehearsal")
    else:
        gpu, notes = Gpu(**told[0]), Notes(Path(told[1]))
    config.pluginmanager.register(Rehearsal(gpu, notes), "rehearsal")
