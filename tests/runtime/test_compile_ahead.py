"""Kernels that are compiled before they are loaded: side by side, once each, and those that calls will load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_workshop import Workshop, make_workshop
from rehearsal import Gpu, Notes, PaperGpu, bound, rehearsing

import persistent_ops as po
from persistent_ops.nn import ShardedEmbeddingBagCollection, TableConfig
from persistent_ops.runtime import world as _world
from persistent_ops.runtime.backend import KernelRequest, LaunchShape
from persistent_ops.runtime.compile.description import COMM, describe, description_of

BATCH, FEATURES, LOOKUPS = 6, 3, 2
HEAP_BYTES = 16 << 20


class _Listening(PaperGpu):
    """A GPU on paper that tells apart what is compiled ahead and what is loaded."""

    ahead: set[tuple[KernelRequest, bool]]
    loaded: set[tuple[KernelRequest, bool]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ahead, self.loaded = set(), set()

    def compile(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Path:
        self.ahead.add((request, links_nvshmem))
        return Path()

    def load(self, request: KernelRequest, *, links_nvshmem: bool = False) -> Any:
        self.loaded.add((request, links_nvshmem))
        return super().load(request, links_nvshmem=links_nvshmem)


def _lookups() -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(FEATURES * BATCH * LOOKUPS) % 7
    return values, torch.full((FEATURES * BATCH,), LOOKUPS)


def _collection(**options: Any) -> torch.Tensor:
    tables = [TableConfig(f"t{n}", 50 + n, 16, [f"f{n}"]) for n in range(FEATURES)]
    module = ShardedEmbeddingBagCollection(tables, max_batch=BATCH, lookups_per_sample=LOOKUPS, **options)
    _world.current().await_compilations()  # all of what it has known when it was made
    _world.current().backend.guessed = set(_world.current().backend.ahead)  # type: ignore[attr-defined]
    values, lengths = _lookups()
    weights = torch.ones(values.numel(), requires_grad=True) if options.get("is_weighted") else None
    return module(values, lengths, per_sample_weights=weights)  # type: ignore[no-any-return]


def _operator(*, has_optimizer: bool, is_weighted: bool = False, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    tables = [torch.zeros(50 + n, 16, requires_grad=not has_optimizer) for n in range(FEATURES)]
    optimizer = po.EmbeddingOptimizer(tables, "adagrad") if has_optimizer else None
    _world.current().await_compilations()
    _world.current().backend.guessed = set(_world.current().backend.ahead)  # type: ignore[attr-defined]
    values, lengths = _lookups()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.ones(values.numel(), requires_grad=True) if is_weighted else None
    result = po.embedding_all_to_all(tables, values.to(dtype), offsets.to(dtype), weights, optimizer=optimizer)
    _world.current().await_compilations()
    return result


def _heard(call: Any, tmp_path: Path, transport: str = "auto", **options: Any) -> Any:
    """Run both passes on paper; return the backend."""
    with rehearsing(bound(_Listening, Gpu(), Notes(tmp_path / "notes"))):

        def run() -> Any:
            po.init("host", heap_size=HEAP_BYTES, transport=transport)
            backend = _world.current().backend
            call(**options).sum().backward()
            po.finalize()
            return backend

        return po.launch(run, 1, threads=True, timeout=100)[0]


MODULES: dict[str, dict[str, Any]] = {
    "spread": {"optimizer": "rowwise_adagrad"},
    "spread, weighted": {"optimizer": "adam", "is_weighted": True},
    "narrow rows on the wire": {"wire_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_all_that_its_steps_load(name: str, tmp_path: Path) -> None:
    backend = _heard(_collection, tmp_path, **MODULES[name])
    assert backend.loaded and backend.loaded <= backend.guessed
    assert backend.guessed == backend.ahead == backend.loaded, "nothing is compiled in vain"


def test_replicated_tables_say_what_their_steps_load(tmp_path: Path) -> None:
    backend = _heard(_collection, tmp_path, placement="replicated", optimizer="adagrad")
    missing = {request.name for request, _ in backend.loaded - backend.guessed}
    assert missing <= {"all_reduce"}, "the kernel that adds up is loaded when the module is made"


def test_an_optimizer_expects_lookups_of_int64(tmp_path: Path) -> None:
    backend = _heard(_operator, tmp_path, has_optimizer=True)
    of_world = {each for each in backend.ahead if each[0].name == "barrier"}
    assert backend.loaded and backend.loaded == backend.guessed - of_world == backend.ahead - of_world


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_first_call_starts_all_kernels_of_both_passes(tmp_path: Path, has_optimizer: bool) -> None:
    options = {"has_optimizer": has_optimizer, "is_weighted": True, "dtype": torch.int32}
    backend = _heard(_operator, tmp_path, **options)
    begun = {(request.name, links) for request, links in backend.loaded & backend.ahead}
    assert begun >= {("embedding_backward", False), ("embedding_inversion", False)}
    assert {request.name for request, _ in backend.loaded - backend.ahead} <= {"embedding_all_to_all"}


def test_kernels_that_put_are_linked_ahead(tmp_path: Path) -> None:
    """A world of one PE puts to none, so this looks at a team that says otherwise."""
    with rehearsing(bound(_Listening, Gpu(), Notes(tmp_path / "notes"))):

        def run() -> set[tuple[str, bool]]:
            po.init("host", heap_size=HEAP_BYTES, transport="staged")
            world = _world.current()
            world.await_compilations()
            world.compile_ahead([lambda: KernelRequest("ceilings", None, LaunchShape(64))], world.alone)
            world.compile_ahead([lambda: KernelRequest("ceilings", None, LaunchShape(64, links_nvshmem=False))])
            world.await_compilations()
            found = {(request.name, links) for request, links in world.backend.ahead}  # type: ignore[attr-defined]
            po.finalize()
            return found

        assert po.launch(run, 2, threads=True, timeout=100)[0] == {("barrier", True), ("ceilings", False)}


@pytest.mark.parametrize("kind", [po.nn.RowParallelLinear, po.nn.ColumnParallelLinear])
def test_a_layer_says_what_a_decoded_token_loads(kind: Any, tmp_path: Path) -> None:
    def call() -> torch.Tensor:
        with torch.no_grad():
            layer = kind(256, 96, dtype=torch.bfloat16)
            _world.current().await_compilations()
            result: torch.Tensor = layer(torch.ones(256, dtype=torch.bfloat16))
        return result.requires_grad_()

    backend = _heard(call, tmp_path)
    assert "gemv_all_reduce" in {request.name for request, _ in backend.loaded}
    assert backend.loaded <= backend.ahead


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return make_workshop(tmp_path, monkeypatch)


def _request(kernel: str) -> KernelRequest:
    return KernelRequest(kernel, None, LaunchShape(description_of(kernel).constants["kThreads"]))


def test_kernels_are_compiled_side_by_side_and_a_load_waits(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ("barrier", "clock_alignment")
    for header in (COMM, *(f"kernels/{kernel}.cuh" for kernel in kernels)):
        describe(header)
    before = workshop.compilations
    monkeypatch.setattr(_world, "_compiling_ahead", _Unbounded())
    begun = f"$(cat {workshop.state}/compiled | wc -l)"
    workshop.on_compile(f"while [ {begun} -lt {before + 2} ]; do sleep 0.05; done")

    def run() -> int:
        po.init("host", heap_size=HEAP_BYTES)  # begins to compile its barrier
        world = _world.current()

        def fails() -> KernelRequest:
            raise ValueError("no such kernel")

        world.compile_ahead([lambda: _request("clock_alignment"), fails, lambda: None])
        for kernel in kernels:
            world.load(_request(kernel))
        po.finalize()
        return workshop.compilations - before

    assert po.launch(run, 1, threads=True, timeout=100) == [2]


LEAVES = """
import logging
import persistent_ops as po
from persistent_ops.runtime import world

logging.basicConfig(level=logging.INFO)
po.init("host", heap_size=16 << 20)
world.current().compile_ahead([lambda: world._barrier_request()] * 3)
"""


def test_a_program_that_ends_meanwhile_ends_well(workshop: Workshop) -> None:
    describe(COMM), description_of("barrier")
    workshop.on_compile("sleep 0.5")
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiling kernels/barrier.cuh for the host: compiled in" in done.stderr
    assert list((workshop.cache / "tmp").iterdir()) == []


class _Unbounded:
    """As many at a time as there are, also on one core."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""
