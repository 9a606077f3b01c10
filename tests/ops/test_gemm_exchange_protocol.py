"""gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce: the faults of every operator (protocol.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from bits import difference
from gemm_exchange_cases import (
    ALL_REDUCE,
    ALL_TO_ALL,
    FLOAT16,
    FLOAT32,
    OPERATORS,
    REDUCE_SCATTER,
    Case,
    call,
    expected_bits,
    make_inputs,
)
from protocol import Mismatch, ProtocolSuite, Work

import persistent_ops as po
from persistent_ops.ops.gemm_exchange_plan import OPERATOR
from persistent_ops.ops.product import Tuning
from persistent_ops.runtime.world import current

_CASES = {
    ALL_TO_ALL: Case("protocol", (19,), 45, 72, operator=ALL_TO_ALL),
    REDUCE_SCATTER: Case("protocol", (19,), 45, 72, has_bias=True, has_residual=True),
    ALL_REDUCE: Case("protocol", (50,), 45, 72, operator=ALL_REDUCE, has_residual=True),
}
_OTHER = Case("protocol, others", (8,), 16, 24)


def _call(case: Case, **options: Any) -> torch.Tensor:
    return call(case, make_inputs(case, po.world_size(), 1), **options)


def _other(*told: str, **changes: Any) -> Mismatch:
    return Mismatch(lambda: _call(replace(_OTHER, **changes)), told)


def _tuned() -> torch.Tensor:
    before = OPERATOR.tune(current(), Tuning(columns=80, sharing=2))
    try:
        return _call(_OTHER)
    finally:
        OPERATOR.tune(current(), before)


def _lookups() -> torch.Tensor:
    world, device = po.world_size(), po.device()
    indices, offsets = torch.zeros(world, dtype=torch.int64, device=device), torch.arange(world + 1, device=device)
    split = {"batch_per_rank": [1] * world, "dim_per_rank": [8] * world}
    return po.embedding_all_to_all([torch.ones(4, 8, device=device)], indices, offsets, **split)


class TestFaults(ProtocolSuite):
    operator = "gemm_exchange"
    ways = OPERATORS
    absences = (*((operator, "auto") for operator in OPERATORS), (REDUCE_SCATTER, "staged"))
    mismatches: ClassVar = {
        "operator": _other("operator is ", "gemm_all_to_all on PE 1", operator=ALL_TO_ALL),
        "rows that are not scattered": _other(
            "operator is ", "gemm_all_reduce on PE 1", operator=ALL_REDUCE, rows=(24,)
        ),
        "M": _other("the number of rows of a is ", "21 on PE 1", rows=(7,)),
        "K": _other("the number of columns of a is ", "24 on PE 1", depth=24),
        "N": _other("the number of columns of b is ", "32 on PE 1", columns=32),
        "scatter_dim": _other("the number of rows before scatter_dim is ", "2 on PE 1", rows=(2, 4), scatter_dim=1),
        "dtype": _other("the dtype of a is ", "float16 on PE 1", dtype=FLOAT16),
        "wire_dtype": _other("wire_dtype is ", "float32 on PE 1", wire_dtype=FLOAT32),
        "op": _other("epilogue (mean, bias, residual) is ", "mean on PE 1", op="mean"),
        "bias and residual": _other("epilogue ", "bias+residual on PE 1", has_bias=True, has_residual=True),
        "tuning": Mismatch(_tuned, ["tile (of the same tuning) is "]),
        "algorithm": Mismatch(lambda: _call(_OTHER, algorithm="unfused"), ["all_reduce"]),
        "barrier": Mismatch(po.barrier, ["barrier"]),
        "embedding_all_to_all": Mismatch(_lookups, ["embedding_all_to_all"]),
    }
    first_call = "gemm_exchange"
    deaths = (("stopped", REDUCE_SCATTER), ("killed", ALL_REDUCE))
    deaths_on_gpus = (("stopped", ALL_TO_ALL),)

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        if po.backend() == "host":
            current().backend.num_sms = 3  # WGs, which share the tiles
        case = _CASES[way]
        inputs, shape = make_inputs(case, po.world_size(), iteration), case.shape(po.world_size())
        if way == REDUCE_SCATTER:  # behind an aligned address: it gets a copy
            out = torch.ones(math.prod(shape) + 1, dtype=case.dtype, device=po.device())[1:].view(shape)
        else:
            out = po.empty(shape, dtype=case.dtype).fill_(1)
        want = expected_bits(case, inputs, po.rank())
        return Work(
            lambda: call(case, inputs, out=out),
            lambda: difference(out.cpu(), want) is None,
            lambda: bool(out.isnan().all()),
            lambda: bool((out.isnan().cpu() | (out.cpu() == want)).all()),
        )

    @classmethod
    def meet(cls) -> object:
        return _call(_OTHER)

    def test_timeline(self, backend: str, tmp_path: Path) -> None:
        """Without the transport in which no kernel takes the call."""
        super().test_timeline(backend, {}, tmp_path)
