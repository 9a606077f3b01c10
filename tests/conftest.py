"""Options shared by all tests, such as the backend of the operator tests; the distribution of tests over workers."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
import warm_python
from folders import FOLDERS
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

sys.path[:0] = FOLDERS  # of PEs too, which unpickle functions of test files
collect_ignore = ["new_operator"]  # for a checkout of its own (test_new_operator.py)
_WORKERS_PER_GPU = 4
_WORKER_MIB = 28 << 10  # of a GPU's memory: ten kept PEs, and the default heaps (4 GiB) of four for a while
_WORKERS_PER_GPU_APART = 2  # whose PEs use all GPUs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("host", "cuda", "rehearsal"),
        default="host",
        help="backend of the operator tests; a rehearsal compiles what they will load on cuda (see rehearsal.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Limit this process to its share of the machine, before torch is imported and looks at the machine."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; tests of Ctrl-C send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # PEs are many and cores are few: torch's threads would spin
    # torch.compile would compile programs to learn which vector instructions work here; plain loops do for tests.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    if _is_rehearsal(config):
        import rehearsal

        rehearsal.register(config)
    is_on_gpus = config.getoption("--backend") == "cuda"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if is_on_gpus and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus_of(worker, is_apart=_is_apart(config)))
    if not is_on_gpus:
        from jit_workshop import CXX_FLAGS, REAL_CXX
        from one_core import share_one_core  # which imports torch

        os.environ.setdefault("PERSISTENT_OPS_CXX", f"{os.environ.get('CXX') or REAL_CXX} {CXX_FLAGS}")
        share_one_core(int(worker.removeprefix("gw") or 0))
    warm_python.fork_launches(at_once=is_on_gpus and bool(worker))  # which takes as long as to collect the tests


def _is_rehearsal(config: pytest.Config) -> bool:
    return bool(config.getoption("--backend") == "rehearsal")


def _is_apart(config: pytest.Config) -> bool:
    """Return whether this run has the tests that deserve a GPU for each PE."""
    return str(config.option.markexpr).strip() == "apart"


def _gpus() -> list[str]:
    """Return the GPUs that tests may use, without torch, which would remember the answer."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def _gpu_mib() -> int:
    """Return the memory of the smallest GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return min(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def _gpus_of(worker: str, *, is_apart: bool) -> list[str]:
    """Return the GPUs of a pytest-xdist worker: one GPU that the PEs of its tests share, or all GPUs.

    Most worlds have two PEs, which take the first two GPUs, so each worker begins at another pair.
    """
    devices, number = _gpus(), int(worker.removeprefix("gw"))
    first = (2 * number if is_apart else number) % len(devices)
    return devices[first:] + devices[:first] if is_apart else [devices[first]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for `-n auto` on GPUs: PEs take turns on the GPUs, but start on CPU cores."""
    if _is_rehearsal(config):
        return max(1, (os.cpu_count() or 2) // 2)  # the compilers need cores too
    if config.getoption("--backend") != "cuda":
        return None
    gpus = len(_gpus())
    is_apart = _is_apart(config) and gpus > 1
    per_gpu = _WORKERS_PER_GPU_APART if is_apart else min(_WORKERS_PER_GPU, _gpu_mib() // _WORKER_MIB)
    return max(1, min(per_gpu * gpus, (os.cpu_count() or 2) // 2))


def _fixtures_of(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return "host" if _is_rehearsal(request.config) else str(request.config.getoption("--backend"))


# The slowest files come first, so that no worker still runs one when the others are done. pytest-xdist hands tests out
# in this order. The first files wait as much as they compute.
_LONG = (
    "sparse_sanitizer",
    "lifecycle",
    "gpu_kernels",
    "bootstrap",
    "spawn",
    "real_launchers",
    "new_operator",
    "gemv_sanitizer",
    "sparse_all_reduce",
    "launch_by_value",
    "all_reduce",
    "gemv_all_reduce",
    "all_reduce_sanitizer",
    "world",
    "decode_loop",
    "sparse_embedding_train",
    "embedding_sanitizer",
    "ddp_sparse_hook",
    "dlrm_training",
    "dlrm_train",
    "dlrm_graph",
)

# Files and functions in the same order. Each takes half a minute or more with eight workers on a GPU.
_LONG_ON_GPUS = (
    "test_each_world_has_the_heap_size_that_it_asked_for",
    "test_beside_nccl",
    "test_dlrm_graph",
    "test_gpu_staged",
    "test_gpu",
    "test_sparse_embedding_train",
    "test_bits",
    "test_tokens_are_those_of_a_plain_decoder",
    "test_gradients_are_those_of_one_process",
    "test_shapes_algorithms_and_operators_take_turns",
    "test_compiling_is_not_counted_as_waiting",
    "test_random_cases",
    "test_row_parallel_is_the_whole_layer",
    "test_world",
    "test_jobs_side_by_side",
    "test_sparse_protocol",
    "test_all_reduce",
    "test_torch_integration",
    "test_protocol",
    "test_gemv_protocol",
)

# Functions that wait for their turn to have the GPUs alone (gpu_turns.py). They run last, as they block their workers.
_ALONE_ON_GPUS = (
    "test_a_thousand_replays_with_changing_inputs",
    "test_launches_that_take_each_other_s_results",
    "test_two_calls_on_two_streams",
)


def _place_on_gpus(item: pytest.Item) -> int:
    names = (item.path.stem, getattr(item, "originalname", ""))
    first = next((place for place, name in enumerate(_LONG_ON_GPUS) if name in names), len(_LONG_ON_GPUS))
    return first + len(_LONG_ON_GPUS) * any(name in names for name in _ALONE_ON_GPUS)


# Tests of these files share what the first one makes. Tests with parameters share it per world (the first parameter).
_SHARING = (
    "test_bits",
    "test_gradients_are_those_of_one_process",
    "test_row_parallel_is_the_whole_layer",
    "test_the_hook",
    "test_wrong_argument",
)
_SCOPE = re.compile(r"(?P<test>[^[]*::(?P<function>\w+))(?:\[(?P<world>\d+(?:[-a-z0-9]*\.\d+)?)?.*)?", re.DOTALL)


class _Scopes(LoadScopeScheduling):
    """Hand out tests one by one, or together with the tests that share something with them.

    In a rehearsal, and on the host, all parts of a world are handed out together.
    """

    def _split_scope(self, nodeid: str) -> str:
        found = _SCOPE.fullmatch(nodeid)
        if found is None or found["function"] not in _SHARING:
            return nodeid
        world = found["world"] or ""
        return f"{found['test']} {world.partition('.')[0] if _is_rehearsal(self.config) else world}"

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker and hand out its remaining tests. If the worker crashed, return the test that it was running.

        pytest-xdist 3.8 also hands out the crashed test again, so it crashes one worker after the other.
        """
        units = self.assigned_work.pop(node)
        left = [(unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done]
        if not left:
            return None
        unit, crashed = left[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more tests if it needs some.

        pytest-xdist 3.8 ends with a KeyError if a worker crashes while another crashed worker's replacement collects.
        It also gives a replacement a single test, which a worker does not begin before it knows the next test.
        """
        if node not in self.registered_collections:
            return  # it is given some when it has collected
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return None if config.getoption("--backend") == "host" else _Scopes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what is imported and collected from garbage collection, as it stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)  # saves 5 to 8 % of CPU time against Python's own thresholds
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run only with --backend=cuda, tests marked host only without it. Long files come first.

    With --backend=cuda, tests that are the same on every backend are left to `make test`.
    """
    on_gpu = config.getoption("--backend") != "host"
    places = {f"test_{name}": place for place, name in enumerate(_LONG)}
    items.sort(key=_place_on_gpus if on_gpu else lambda item: places.get(item.path.stem, len(places)))
    if on_gpu:
        others = [item for item in items if "gpu" not in item.keywords and "backend" not in _fixtures_of(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    for item in items:
        if item.path.parent.name in ("benchmarks", "examples"):
            item.add_marker(pytest.mark.slow)
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs GPUs: run `make test-gpu`"))
        if "host" in item.keywords and on_gpu:
            item.add_marker(pytest.mark.skip(reason="tests the host backend"))
