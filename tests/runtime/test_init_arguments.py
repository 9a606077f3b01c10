"""Joining and leaving a world wrongly: which exception, which argument it names, what was expected and what came."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import persistent_ops as po
from persistent_ops.runtime import pe_threads
from persistent_ops.runtime.bootstrap.connection import from_threads

MB = 1 << 20
_ONES = torch.ones(3, 4)

BEFORE_INIT: dict[str, Callable[[], Any]] = {
    "rank": po.rank,
    "world_size": po.world_size,
    "backend": po.backend,
    "device": po.device,
    "barrier": po.barrier,
    "check": po.check,
    "recover": po.recover,
    "empty": lambda: po.empty(3),
    "to_symmetric": lambda: po.to_symmetric(torch.zeros(3)),
    "peer_view": lambda: po.peer_view(torch.zeros(3), 0),
    "free": lambda: po.free(torch.zeros(3)),
    "embedding_all_to_all": lambda: po.embedding_all_to_all(
        [torch.ones(3, 4)], torch.zeros(1, dtype=torch.int64), torch.arange(2)
    ),
    "gemv": lambda: po.gemv(_ONES, _ONES[0]),
    "gemv_all_reduce": lambda: po.gemv_all_reduce(_ONES, _ONES[0]),
    "gemm": lambda: po.gemm(_ONES.half(), _ONES.t().half()),
    "gemm_all_to_all": lambda: po.gemm_all_to_all(_ONES.half(), _ONES.t().half()),
    "gemm_reduce_scatter": lambda: po.gemm_reduce_scatter(_ONES.half(), _ONES.t().half()),
    "gemm_all_reduce": lambda: po.gemm_all_reduce(_ONES.half(), _ONES.t().half()),
    "all_reduce": lambda: po.all_reduce(_ONES),
    "all_reduce_rms_norm": lambda: po.all_reduce_rms_norm(_ONES, _ONES[0]),
    "sparse_all_reduce": lambda: po.sparse_all_reduce(_ONES.to_sparse(1)),
    "sparse_all_reduce, async_op": lambda: po.sparse_all_reduce(_ONES.to_sparse(1), async_op=True),
    "sparse_all_reduce_buffers": lambda: po.sparse_all_reduce_buffers(
        torch.arange(3), _ONES, num_rows=3, completion_fn=print
    ),
    "sparse_all_reduce_into": lambda: po.sparse_all_reduce_into(
        torch.arange(3),
        _ONES,
        num_rows=3,
        out_indices=torch.arange(3),
        out_values=torch.ones(3, 4),
        out_count=torch.arange(1),
    ),
}
_KEYWORDS: dict[str, tuple[Any, ...]] = {  # one argument more than may come without its name
    "gemv": (_ONES, _ONES[0], _ONES[0]),
    "gemv_all_reduce": (_ONES, _ONES[0], _ONES[0]),
    "gemm": (_ONES, _ONES, _ONES[0]),
    "gemm_all_to_all": (_ONES, _ONES, _ONES),
    "gemm_reduce_scatter": (_ONES, _ONES, "sum"),
    "gemm_all_reduce": (_ONES, _ONES, _ONES[0]),
    "all_reduce": (_ONES, _ONES),
    "all_reduce_rms_norm": (_ONES, _ONES[0], _ONES),
    "sparse_all_reduce": (_ONES.to_sparse(1), "mean"),
    "sparse_all_reduce_into": (torch.arange(3), _ONES, 3),
    "sparse_all_reduce_buffers": (torch.arange(3), _ONES, 3),
}


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_use_before_init(name: str) -> None:
    assert not po.is_initialized()
    with pytest.raises(RuntimeError, match=r"not initialized in this process: call persistent_ops\.init\(\) first"):
        BEFORE_INIT[name]()


@pytest.mark.parametrize("name", _KEYWORDS)
def test_arguments_after_the_tensors_are_keywords(name: str) -> None:
    with pytest.raises(TypeError, match="positional"):
        getattr(po, name)(*_KEYWORDS[name])


def test_finalize_without_a_world_is_harmless() -> None:
    po.finalize()
    po.finalize()
    assert not po.is_initialized()


WRONG_INIT = {
    "backend": ({"backend": "gpu"}, ValueError, "backend: expected 'auto', 'cuda' or 'host', got 'gpu'"),
    "transport": ({"transport": "ib"}, ValueError, "transport: expected 'auto', 'staged' or 'nodes:N', got 'ib'"),
    "no time-out": ({"timeout": 0}, ValueError, "timeout: expected .*got 0"),
    "NaN time-out": ({"timeout": float("nan")}, ValueError, "timeout: expected .*got nan"),
    "endless time-out": ({"timeout": float("inf")}, ValueError, "timeout: expected .*got inf"),
    "text as time-out": ({"timeout": "30"}, TypeError, "timeout: expected .*'30'"),
    "empty heap": ({"heap_size": 0}, ValueError, "heap_size: expected bytes above 0, got 0"),
    "heap of a truth": ({"heap_size": True}, TypeError, "heap_size: expected .*True"),
    "heap of no machine": (
        {"heap_size": 1 << 60},
        po.SymmetricHeapError,
        "heap_size: this machine has no 11529.* bytes",
    ),
    "negative delay": (
        {"host_options": {"network_delay_us": -1}},
        ValueError,
        "network_delay_us: expected a whole number of at least 0, got -1",
    ),
    "threads that are no number": (
        {"host_options": {"wg_size": "a"}},
        ValueError,
        "wg_size: expected a whole number of at least 0, got 'a'",
    ),
    "heap of a fraction": ({"heap_size": 1e9}, TypeError, r"heap_size: expected .*1000000000\.0"),
    "heap too small for the flags": (
        {"heap_size": 4096},
        po.SymmetricHeapError,
        r"heap of PE 0 has no room for 131072 bytes \(heap_size 4096.*pass heap_size >= 135168 to po\.init",
    ),
    "unknown host option": ({"host_options": {"delay": 1}}, TypeError, "host_options: .*delay"),
    "WG of no threads": ({"host_options": {"wg_size": 0}}, ValueError, "wg_size: expected .*got 0"),
}


@pytest.mark.host
@pytest.mark.parametrize("name", WRONG_INIT)
def test_wrong_argument_of_init(name: str) -> None:
    options, error, text = WRONG_INIT[name]

    def program() -> None:
        with pytest.raises(error, match=text):
            po.init(**{"backend": "host", **options})  # type: ignore[arg-type]
        assert not po.is_initialized()

    po.launch(program, 1, threads=True, timeout=30)


@pytest.mark.host
def test_cuda_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(po.BackendUnavailableError) as caught:
        po.init("cuda")
    text = str(caught.value)
    assert "backend='cuda' needs a GPU" in text and f"torch {torch.__version__}" in text
    assert "backend='host'" in text and "install a CUDA build of torch" in text and "persistent-ops doctor" in text
    po.init("auto", heap_size=4 * MB)
    assert po.backend() == "host" and po.device() == torch.device("cpu")
    po.finalize()


@pytest.mark.host
def test_cuda_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.core", None)

    with pytest.raises(po.BackendUnavailableError, match=r"nvshmem4py and cuda\.core .*persistent-ops\[cuda13\]"):
        po.init("cuda")


@pytest.mark.host
def test_the_backends_choice_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with caplog.at_level("INFO", "persistent_ops"):
        po.init("auto", heap_size=4 * MB)
    assert "1 PE on backend 'host'" in caplog.text
    po.finalize()


@pytest.mark.host
def test_more_pes_than_a_world_holds() -> None:
    bootstrap = from_threads(1025, 10.0)[0]
    pe_threads._this_thread.bootstrap = bootstrap
    try:
        with pytest.raises(po.BootstrapError, match="a world has at most 1024 PEs, this job has 1025"):
            po.init("host")
    finally:
        del pe_threads._this_thread.bootstrap


def _errors_of_init(options: list[dict[str, Any]]) -> list[str]:
    """Return what each PE's init() raises when PE r passes options[r]."""

    def program() -> str:
        rank = pe_threads._this_thread.bootstrap.rank
        try:
            po.init(**{"backend": "host", "timeout": 10.0, "heap_size": 8 * MB, **options[rank]})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        po.finalize()
        return "no error"

    return po.launch(program, len(options), threads=True, timeout=60)


@pytest.mark.host
def test_heap_sizes_that_differ() -> None:
    for error in _errors_of_init([{}, {"heap_size": 16 * MB}, {}]):
        assert error.startswith("BootstrapError: heap_size differs between PEs")
        assert f"{[8 * MB, 16 * MB, 8 * MB]} bytes" in error


@pytest.mark.host
def test_transports_that_differ() -> None:
    for transports in (("auto", "staged"), ("nodes:1", "nodes:2", "nodes:3", "nodes:2")):
        for error in _errors_of_init([{"transport": transport} for transport in transports]):
            assert error.startswith("BootstrapError: "), error
            assert "disagree on whether they reach each other's memory directly: pass the same transport" in error


@pytest.mark.host
def test_backends_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in _errors_of_init([{}, {"backend": "cuda"}]):
        assert error.startswith("BackendUnavailableError: the PEs chose different backends (PE 0: host, PE 1: cuda)")


@pytest.mark.host
def test_a_pe_that_refuses_its_arguments_ends_the_others_wait() -> None:
    first, second = _errors_of_init([{"heap_size": -1}, {}])
    assert first.startswith("ValueError: heap_size: expected bytes above 0, got -1")
    assert second.startswith("BootstrapError: ") and "heap_size" in second
