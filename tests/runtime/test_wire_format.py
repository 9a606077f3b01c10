"""What operators send to peers that are not reachable: one put with its signal for each slice and peer."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from host_driver.build import CUDA
from worlds import run_pes

import persistent_ops as po
from persistent_ops.ops import all_reduce_plan
from persistent_ops.runtime.world import World, current


class Counts(NamedTuple):
    """Of a PE's network; see DelayedNetwork::Count."""

    signals: int
    put_signals: int
    repeats: int
    quiets: int

    @classmethod
    def of(cls, world: World) -> Counts:
        backend: Any = world.backend
        counts = (ctypes.c_uint64 * len(cls._fields))()
        backend._runtime.po_network_counts(ctypes.c_void_p(backend.network), counts)
        return cls(*counts)

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def _all_reduce(algorithm: str) -> Callable[[], None]:
    def call() -> None:
        po.all_reduce(torch.ones(64, 512, dtype=torch.bfloat16), algorithm=algorithm)

    return call


def _lookups(tables: int) -> tuple[torch.Tensor, torch.Tensor]:
    bags = tables * 24 * po.world_size()
    return torch.arange(bags) % 7, torch.arange(bags + 1)


def _embedding() -> Callable[[], None]:
    tables = [torch.ones(7, dim, requires_grad=True) for dim in (8, 5)]
    optimizer = po.EmbeddingOptimizer(tables, "sgd", lr=0.1)

    def call() -> None:
        po.embedding_all_to_all(tables, *_lookups(len(tables)), optimizer=optimizer).sum().backward()

    return call


def _collection() -> Callable[[], None]:
    configs = [po.nn.TableConfig(f"t{number}", 50, 8, [f"f{number}"]) for number in range(2 * po.world_size())]
    collection = po.nn.ShardedEmbeddingBagCollection(
        configs, max_batch=16, lookups_per_sample=2, optimizer="sgd", is_weighted=True
    )

    def call() -> None:
        count = len(configs) * 16
        lengths = torch.ones(count, dtype=torch.int64)
        factors = torch.ones(count, requires_grad=True)
        collection(torch.arange(count) % 50, lengths=lengths, per_sample_weights=factors).sum().backward()

    return call


def _gemv() -> None:
    po.gemv_all_reduce(torch.ones(64, 32), torch.ones(2, 32))


def _sparse() -> None:
    rows = torch.tensor([1 + po.rank(), 40, 41])
    po.sparse_all_reduce(torch.sparse_coo_tensor(rows[None], torch.ones(3, 4), (64, 4)))


# The calls of an operator; whether its launches have a quiet each.
PROGRAMS: dict[str, tuple[Callable[[], Callable[[], None]], bool]] = {
    **{
        f"all_reduce, {name}": (lambda name=name: _all_reduce(name), False)
        for name in ("one_shot", "two_shot", "slices")
    },  # type: ignore[misc]
    "gemv_all_reduce": (lambda: _gemv, False),
    "embedding_all_to_all": (_embedding, True),
    "ShardedEmbeddingBagCollection": (_collection, True),
    "sparse_all_reduce": (lambda: _sparse, True),
}


def _counted(backend: str, name: str) -> tuple[Counts, int]:
    po.init(backend, operator_timeout=60.0, heap_size=64 << 20, transport="staged")
    try:
        call, world, launches = PROGRAMS[name][0](), current(), [0]
        for _ in range(2):
            call()
        for workspace in world.workspaces:
            _count_launches(workspace, launches)
        before = Counts.of(world)
        call()
        po.check()
        return Counts.of(world).since(before), launches[0]
    finally:
        po.finalize()


def _count_launches(workspace: Any, launches: list[int]) -> None:
    launch = workspace.launch

    def counted(*args: Any, **options: Any) -> None:
        launches[0] += 1
        launch(*args, **options)

    workspace.launch = counted


@pytest.mark.host
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_put_with_its_signal(name: str) -> None:
    has_quiets = PROGRAMS[name][1]
    for counts, launches in run_pes(_counted, 3, "host", name, timeout=200):
        assert launches > 0 and counts.put_signals >= 2 * launches  # the credits alone
        assert counts.repeats == 0
        assert counts.quiets <= launches * has_quiets


def test_kernels_have_no_other_puts_and_no_fences() -> None:
    """`Network` offers none to the host."""
    source = (CUDA / "comm" / "put.cuh").read_text()
    calls = set(re.findall(r"\bnvshmemx?_\w+(?=\()", source))
    assert calls == {
        "nvshmem_putmem_signal_nbi",
        "nvshmemx_signal_op",
        "nvshmem_getmem",
        "nvshmem_quiet",
        "nvshmem_uint64_test",
    }
    for path in CUDA.rglob("*.cuh"):
        assert "nvshmem.h" not in path.read_text() or path.name == "put.cuh"


def test_slices_are_put_once() -> None:
    """A slice for each peer, and a grant."""
    for rank, (counts, launches) in enumerate(run_pes(_counted, 3, "host", "all_reduce, one_shot", timeout=200)):
        blocks = 64 * 512 * 2 // all_reduce_plan.OPERATOR.description.constants["kBlockBytes"]
        assert (launches, counts.put_signals) == (1, 2 * (blocks + 1)), f"PE {rank}: {counts}"
