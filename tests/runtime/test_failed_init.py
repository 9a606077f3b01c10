"""An init that fails: what is ended together with peers that fail too, and what is left if peers do not come."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import persistent_ops as po
from persistent_ops.runtime import joining, nvshmem_end
from persistent_ops.runtime.bootstrap import connection as bootstraps, process_identity
from persistent_ops.runtime.bootstrap.connection import Bootstrap, from_threads
from persistent_ops.runtime.errors import BootstrapError
from persistent_ops.runtime.host import HostBackend


@pytest.mark.host
@pytest.mark.parametrize("failing", [(0, 1, 2), (1,), (0, 2)], ids=["all", "one", "two"])
def test_a_failed_init_tells_its_backend_whether_all_have_failed(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    """The PEs that continue notice, when they leave, that they are alone."""
    closed: list[bool] = []
    close, make = HostBackend.close, joining.World
    all_failed = len(failing) == 3

    def closing(self: HostBackend, *, is_alone: bool = False) -> None:
        closed.append(is_alone)
        close(self, is_alone=is_alone)

    def fail(bootstrap: Bootstrap, *arguments: Any) -> Any:
        made = make(bootstrap, *arguments)
        if bootstrap.rank in failing:
            made._watch.close()  # type: ignore[union-attr]
            raise ValueError(f"PE {bootstrap.rank} cannot go on")
        return made

    def program() -> None:
        try:
            po.init("host", heap_size=1 << 20)
        except ValueError:
            return
        while len(closed) < len(failing):
            time.sleep(0.01)
        po.finalize()

    monkeypatch.setattr(HostBackend, "close", closing)
    monkeypatch.setattr(joining, "World", fail)
    monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 60.0 if all_failed else 0.5)
    po.launch(program, 3, threads=True, timeout=60)
    assert closed == [not all_failed] * 3


def test_a_peer_that_is_dead_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 120.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pes = from_threads(2, 10.0)
    own = process_identity.identify()
    its = process_identity.ProcessIdentity(own.host, own.pid_space, child.pid, process_identity.start_of(child.pid))
    pes[0]._identities = [bootstraps._Identity("threads", None, None, each) for each in (own, its)]
    child.kill()
    child.wait()
    begin = time.monotonic()
    assert not pes[0].fail_and_meet("it cannot go on")
    assert time.monotonic() - begin < 60.0


def test_who_comes_behind_a_decision_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pes = from_threads(3, 10.0)
    monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 0.1)
    assert not pes[0].fail_and_meet("it cannot go on")
    monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 120.0)
    begin = time.monotonic()
    assert not pes[1].fail_and_meet("it cannot go on")
    assert not pes[2].meet_to_leave(120.0)
    assert time.monotonic() - begin < 60.0
    with pytest.raises(BootstrapError, match="it cannot go on"):
        pes[2].exchange("next", b"")


def test_a_pe_alone_has_nobody_to_wait_for() -> None:
    assert Bootstrap(None, 0, 1, "single", 10.0).fail_and_meet("it cannot go on")


# ---- on GPUs, with CUDA and NVSHMEM replaced -------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the cuda backend, with a driver and a torch whose calls all succeed.

    What is made a text or a number of is one: a MagicMock makes `__str__` and `__int__` at their first use, and threads
    that use one at the same time can find it half made.
    """
    driver = mock.MagicMock(CUresult=SimpleNamespace(CUDA_SUCCESS=0))
    driver.cuStreamCreate.return_value = driver.cuDeviceGetAttribute.return_value = (driver.CUresult.CUDA_SUCCESS, 1)
    bindings, nvshmem = mock.MagicMock(driver=driver), mock.MagicMock()
    nvshmem.bindings.init_status.return_value = 2
    modules = {"cuda": mock.MagicMock(), "cuda.bindings": bindings, "cuda.core": mock.MagicMock()}
    modules |= {"nvshmem": nvshmem, "nvshmem.bindings": nvshmem.bindings, "nvshmem.core": nvshmem.core}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    had = sys.modules.pop("persistent_ops.runtime.gpu", None)
    module = importlib.import_module("persistent_ops.runtime.gpu")
    properties = SimpleNamespace(uuid="GPU-0", multi_processor_count=132, shared_memory_per_block_optin=232448)
    device = {"get_device_capability.return_value": (9, 0), "get_device_properties.return_value": properties}
    monkeypatch.setattr(module, "torch", mock.MagicMock(**{f"cuda.{name}": value for name, value in device.items()}))
    nvshmem.core.buffer.return_value = SimpleNamespace(handle=1 << 20)
    monkeypatch.setattr(module, "_choose_device", lambda _: 0)
    monkeypatch.setattr(module, "check_sharing", lambda *_: "")
    monkeypatch.setattr(module, "NvshmemVariables", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(module, "within", lambda seconds, call, what: call())
    monkeypatch.setattr(nvshmem_end, "_is_left_running", False)
    monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 0.5)
    yield module
    del sys.modules["persistent_ops.runtime.gpu"]
    if had is not None:
        sys.modules["persistent_ops.runtime.gpu"] = had


@pytest.mark.parametrize("fails", ["heap", "map"])
@pytest.mark.parametrize("together", [True, False])
def test_nvshmem_ends_with_all_peers_or_not_at_all(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, fails: str, together: bool
) -> None:
    """Where the heap cannot be allocated, and after it. The other PE fails as well, or continues."""
    nvshmem, pes, has_failed = sys.modules["nvshmem.core"], from_threads(2, 30.0), threading.Event()
    ends: list[bool] = []
    monkeypatch.setattr(nvshmem_end, "end", lambda *_, is_alone, **__: ends.append(is_alone))
    if together:
        monkeypatch.setattr(bootstraps, "_MEET_BEHIND_FAILURE_S", 60.0)
    if fails == "heap":
        nvshmem.buffer.side_effect = MemoryError("no heap")
    else:
        sys.modules["nvshmem.bindings"].my_pe.return_value = 7

    def start(pe: Bootstrap) -> None:
        if pe.rank == 1 and not together:
            pe.exchange("gpu", b"0")
            with contextlib.suppress(BootstrapError):
                pe.exchange("nvshmem-uid", b"")
            has_failed.wait(30.0)
            return
        try:
            gpu.GpuBackend(pe, 1 << 20, "auto", 30.0)
        finally:
            has_failed.set()

    identity = SimpleNamespace(_data=mock.MagicMock())
    identity._data.tobytes.return_value = b"uid"
    nvshmem.get_unique_id.return_value = identity
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(start, pe) for pe in pes]
        for future in futures if together else futures[:1]:
            with pytest.raises((MemoryError, BootstrapError), match="no heap" if fails == "heap" else "this PE 7"):
                future.result()
    if fails == "heap":
        assert ends == [] and nvshmem.finalize.call_count == (2 if together else 0)
        assert nvshmem_end.runs_on() is not together
    else:
        assert ends == ([False, False] if together else [True])
