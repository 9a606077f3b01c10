"""The rehearsal of the tests for GPUs requests the kernels that the tests load, and stores them where these look."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import all_reduce_cases
import bits
import embedding_cases
import gemv_cases
import pytest
import rehearsal
import sparse_cases
import test_embedding_lookups
import torch
from all_reduce_cases import AllReduceTrial
from embedding_cases import EmbeddingTrial
from gemv_cases import GemvTrial
from gpu_kernels import SAMPLE
from rehearsal import Compiler, Gpu, Noted, Notes, NotingBackend, PaperGpu, bound, rehearsing
from sparse_cases import SparseTrial

import persistent_ops as po
from persistent_ops.runtime import joining
from persistent_ops.runtime.backend import KernelRequest
from persistent_ops.runtime.compile import cache as compile_cache
from persistent_ops.runtime.compile.jit import KernelSource, clear_memo, compile_cuda
from persistent_ops.runtime.compile.toolchain import find_nvcc
from persistent_ops.runtime.devices import architecture
from persistent_ops.runtime.dtypes import SCALARS
from persistent_ops.runtime.errors import CompileError
from persistent_ops.runtime.host import HostBackend

SAMPLES = {each.request.name: each.request for each in reversed(SAMPLE)}  # the first of each operator
TESTS = Path(__file__).resolve().parents[1]
# By the file of the last kernel that they launch.
TRIALS: dict[str, Callable[[], bits.Trial]] = {
    "all_reduce": lambda: AllReduceTrial(all_reduce_cases.CASES[4]),
    "embedding_all_to_all": lambda: EmbeddingTrial(embedding_cases.CASES[0]),
    "embedding_backward": lambda: _first_of(test_embedding_lookups.TestBits),
    "embedding_inversion": lambda: _first_of(test_embedding_lookups.TestSparseBits),
    "gemv_all_reduce": lambda: GemvTrial(gemv_cases.CASES[0]),
    "sparse_all_reduce": lambda: SparseTrial(sparse_cases.CASES[0]),
}


def _first_of(suite: type[bits.BitsSuite]) -> bits.Trial:
    return suite.trial(suite.worlds["2"].cases[0])  # type: ignore[call-arg]


class _Overheard(HostBackend):
    """The host's backend, which notes the requests."""

    def __init__(self, notes: Notes, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes = notes

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Any:
        self._notes.add(Noted(request.source(), links_nvshmem, request.shape.architecture_suffix))
        return super().load(request, links_nvshmem=links_nvshmem)


def _called(operators: Sequence[str]) -> list[str | None]:
    """Call operators as their tests do."""
    po.init("host", operator_timeout=30.0, heap_size=64 << 20)
    found = [bits.check(TRIALS[operator]())[0] for operator in operators]
    po.finalize()
    return found


def _noted(notes: Notes) -> set[Noted]:
    is_over = threading.Event()
    is_over.set()
    return set(notes.follow(is_over))


def _rehearsed(notes: Notes, backend: type[NotingBackend], operators: Sequence[str]) -> set[Noted]:
    with rehearsing(backend):
        po.launch(_called, 2, operators, threads=True, timeout=100)
    return _noted(notes)


@pytest.mark.parametrize(
    "operator", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(TRIALS)]
)
def test_what_is_noted_is_what_is_loaded(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests request the same kernels with results and without."""
    notes, heard = Notes(tmp_path / "notes"), Notes(tmp_path / "heard")
    rehearsed = _rehearsed(notes, bound(NotingBackend, notes), [operator])
    monkeypatch.setattr(joining, "HostBackend", functools.partial(_Overheard, heard))
    assert po.launch(_called, 2, [operator], threads=True, timeout=100) == [[None]] * 2
    assert rehearsed == _noted(heard) != set()
    assert any(noted.source.entry == f"kernels/{operator}.cuh" for noted in rehearsed)


def test_plans_are_those_for_a_gpu(tmp_path: Path) -> None:
    operators = ["all_reduce", "embedding_all_to_all", "sparse_all_reduce"]
    notes = Notes(tmp_path / "notes")
    noted = _rehearsed(notes, bound(PaperGpu, Gpu(), notes), operators)
    one_shot = SAMPLES["all_reduce"]
    share = SAMPLES["sparse_all_reduce"].with_config(scalar=SCALARS[torch.float32], lanes=4)
    with_room = [one_shot.with_config(norms=False), share, share.with_config(gathers=True)]  # for PEs of a word's set
    bags = SAMPLES["embedding_all_to_all"].with_config(pooling="po::Pooling::kSum", shapes=32, threads=256)
    wanted = [SAMPLES["barrier"], bags, *[each.with_config(pes=64) for each in with_room]]
    assert {Noted(each.source(), nvshmem=False) for each in wanted} <= noted


def test_what_is_compiled_ahead_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_nvcc()
    except CompileError as error:
        pytest.skip(f"needs the CUDA compiler: {error}")
    source = SAMPLES["barrier"].source()
    monkeypatch.setenv("PERSISTENT_OPS_CACHE", str(tmp_path / "cache"))
    notes = Notes(tmp_path / "notes")
    for _ in range(3):
        notes.add(Noted(source, nvshmem=False))
    compiler = Compiler(Gpu(), notes)
    notes.add(Noted(KernelSource("kernels/absent.cuh"), nvshmem=False))
    problem, result = compiler.finish()
    assert "absent.cuh" in problem and result.startswith("1 of 2 kernels for sm_90 are in the compile cache")
    (entry,) = (tmp_path / "cache" / "entries").iterdir()
    clear_memo()
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: pytest.fail("it is compiled again"))
    assert compile_cuda(source, arch=architecture(9, 0)).path.parent == entry


def test_a_source_survives_being_noted(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    sources = [KernelSource("a.cuh"), KernelSource("b.cuh", (("A", "1"), ("B", "")), tmp_path, 'say "x"\n', "}\n")]
    for source in (*sources, *sources):
        for nvshmem in (False, True):
            notes.add(Noted(source, nvshmem))
    assert _noted(notes) == {Noted(source, nvshmem) for source in sources for nvshmem in (False, True)}


def test_a_note_is_read_when_it_is_whole(tmp_path: Path) -> None:
    notes, noted, is_over = Notes(tmp_path / "notes"), Noted(KernelSource("a.cuh"), nvshmem=False), threading.Event()
    notes.path.write_bytes(noted.line[:-9])
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(notes.follow(is_over)))
        time.sleep(0.2)
        with notes.path.open("ab") as file:
            file.write(noted.line[-9:])
        is_over.set()
        assert found.result() == [noted]


@pytest.mark.slow
def test_a_rehearsal_says_what_it_has_compiled_and_that_nothing_was_tested() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["--backend=rehearsal", "-p", "no:cacheprovider", "-k", "check_and_barrier"]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / "runtime" / "test_world.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"of 1 kernels for sm_\d+ are in the compile cache", done.stdout), done.stdout[-3000:]
    assert re.search(r"^=+ [1-9] skipped", done.stdout, re.MULTILINE) and " passed" not in done.stdout


def test_nothing_of_a_test_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PE that is a thread, and takes longer than a test is given, is ended before the next test begins."""
    pes: list[threading.Thread] = []

    def be_pe() -> None:
        pes.append(threading.current_thread())
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.5)
    test = SimpleNamespace(name="test_that_waits")
    hook = rehearsal.Rehearsal(Gpu(), Notes(tmp_path / "notes")).pytest_pyfunc_call(test)  # type: ignore[arg-type]
    next(hook)
    try:
        po.launch(be_pe, 2, threads=True)
    except rehearsal._EnoughError as error:
        with pytest.raises(pytest.skip.Exception, match="rehearsed"):
            hook.throw(error)
    assert len(pes) == 2 and not any(pe.is_alive() for pe in pes)
