"""GEMM + All-to-All in Triton many times: other inputs in each launch, replays and calls in turn, beside NCCL."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreters import run_interpreters
from triton.tools.tensor_descriptor import TensorDescriptor
from worlds import world_of

import persistent_ops as po

_EXAMPLES = Path(__file__).parents[2] / "launch" / "triton_operators"
# Of a PE; ragged in all dimensions. The interpreter cannot multiply bfloat16.
_ON_GPU: dict[str, Any] = {
    "rows": 200,
    "columns": 520,
    "depth": 200,
    "dtype": torch.bfloat16,
    "meta": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3},
    "launches": 1000,
}
_ON_HOST = {
    **_ON_GPU,
    **{"rows": 20, "columns": 40, "depth": 40, "dtype": torch.float16, "launches": 6},
    "meta": {"BM": 16, "BN": 16, "BK": 16},
}


def _operator() -> Any:
    if (folder := str(_EXAMPLES)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("overlapped_gemm_all_to_all").overlapped_gemm_all_to_all


def _turns(backend: str) -> tuple[int, int]:
    """Return how many launches gave wrong bits, and how many there were."""
    has_gpu = backend == "cuda"
    case = _ON_GPU if has_gpu else _ON_HOST
    with world_of(backend) as world:
        device, meta = world.backend.device, case["meta"]
        rows, columns, depth = case["rows"] * world.size, case["columns"], case["depth"]
        empty = functools.partial(torch.empty, dtype=case["dtype"], device=device)
        a, b, staging, want = empty(rows, depth), empty(columns, depth), empty(rows, columns), empty(rows, columns)
        out = po.empty((rows, columns), dtype=case["dtype"])
        factors = [TensorDescriptor.from_tensor(x, [meta[n], meta["BK"]]) for x, n in ((a, "BM"), (b, "BN"))]
        call = functools.partial(_operator(), *factors, staging, rows, columns, depth, out=out, meta=meta)
        generator = torch.Generator(device).manual_seed(po.rank())

        def draw() -> None:
            for factor in (a, b):
                factor.random_(-2, 3, generator=generator)

        draw()
        call()
        po.check()
        replay: Any = call
        if has_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            replay = graph.replay
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for number in range(case["launches"]):
            draw()
            (replay if number % 2 else call)()
            dist.all_to_all_single(want, (a.float() @ b.float().t()).to(case["dtype"]))
            wrong += (want != out).any()
            if number % 10 == 0:
                po.all_reduce(torch.ones(8, device=device))
        po.check()
        return int(wrong), case["launches"]


@pytest.mark.apart
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.host)])
def test_every_launch_has_the_bits_of_a_product_and_an_exchange(backend: str, world: int) -> None:
    for wrong, launches in run_interpreters(_turns, world, backend, timeout=200):
        assert wrong == 0 and launches >= 6
