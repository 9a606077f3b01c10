"""Operators in Triton: the faults of every operator (protocol.py). See also: test_triton_mutations.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from interpreters import interpreting, run_interpreters
from protocol import Mismatch, ProtocolSuite, Work
from triton_cases import HEAP_BYTES, SHAPE, added, another_all_gather, gather, numbers_of, total

import persistent_ops as po


def _other(*told: str, shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.float32, **options: Any) -> Mismatch:
    return Mismatch(lambda: gather(numbers_of(0, shape).to(dtype), **options), told)


_HASH = "the hash of source, meta and dtypes is "


class TestFaults(ProtocolSuite):
    operator = "triton.all_gather"
    ways = ("pool", "out")
    run_pes = staticmethod(run_interpreters)
    transports: ClassVar = [pytest.param({}, id="direct")]
    heap_bytes = HEAP_BYTES
    patience = 2.0
    lateness = 0.5
    absences = (("out", "auto"),)
    mismatches: ClassVar = {
        "contract": _other("N is ", "72 on PE 1", shape=(6, 72), out_shape=(18, 80)),
        "out_shape": _other("out_shape is ", "another list", out_shape=(18, 80, 1)),
        "meta": _other(_HASH, meta={"BM": 2, "BN": 64}),
        "dtype": _other(_HASH, dtype=torch.float16),
        "source": Mismatch(lambda: gather(numbers_of(0), op=another_all_gather()), [_HASH]),
        "work_groups": _other("from different plans", "work_groups is ", "2 on PE 1", work_groups=2),
        "operator of the package": Mismatch(lambda: po.all_reduce(numbers_of(0)[0]), [" all_reduce("]),
        "barrier": Mismatch(po.barrier, ["barrier()"]),
    }
    first_call = "triton.all_gather"
    deaths = (("stopped", "pool"),)

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        numbers = numbers_of(iteration)
        want = numbers.flatten(0, 1)
        found: list[torch.Tensor] = []
        if way == "pool":
            return Work(lambda: found.append(gather(numbers)), lambda: torch.equal(found[0], want))
        out = po.empty(want.shape)

        def is_poisoned() -> bool:  # but for rows that a late PE has stored after that
            return bool(out.isnan().any() and (out.isnan() | (out == want)).all())

        return Work(
            lambda: gather(numbers, out=out, work_groups=3),
            lambda: torch.equal(out, want),
            is_poisoned,
            lambda: torch.equal(out, want) or is_poisoned(),
        )

    @classmethod
    def meet(cls) -> object:
        return gather(numbers_of(0))

    @classmethod
    def warm_up(cls) -> None:
        super().warm_up()
        po.all_reduce(numbers_of(0)[0])

    def test_dead_peer(self, backend: str, how: str, way: str, tmp_path: Path) -> None:
        with interpreting(backend):
            super().test_dead_peer(backend, how, way, tmp_path)


@pytest.mark.slow
class TestFaultsOfLoads(TestFaults):
    """Of an operator that loads from its peers."""

    operator = "triton.sum_of_all"
    # What it loads is of po.empty, which is collective: it would meet a PE that calls something else, or is dead.
    test_mismatch_is_named_on_every_pe = test_the_first_call_meets_something_else = test_dead_peer = None

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        numbers = numbers_of(iteration)
        x, want = po.empty(SHAPE).copy_(numbers[po.rank()]), total(numbers)
        found: list[torch.Tensor] = []
        options = {} if way == "pool" else {"out": po.empty(SHAPE).zero_(), "work_groups": 3}
        return Work(lambda: found.append(added(x, **options)), lambda: torch.equal(found[0], want))
