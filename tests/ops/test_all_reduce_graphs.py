"""all_reduce and all_reduce_rms_norm in CUDA graphs (graphs.py), and launched before earlier launches have ended."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from all_reduce_cases import ALGORITHMS, Case, Inputs, norm_model, sum_model
from graph_chains import Chain, ChainSuite, ChainTest
from graphs import NUM_INPUTS, Call

import persistent_ops as po


@functools.lru_cache(maxsize=8)
def _turns(case: Case, world: int) -> tuple[list[Inputs], list[list[torch.Tensor]]]:
    """Return what all PEs pass in each turn, and what every PE must get."""
    weight = torch.randn(case.shape[-1], generator=torch.Generator().manual_seed(5)).to(case.dtype)
    inputs, wants = [], []
    for turn in range(NUM_INPUTS):
        rngs = [torch.Generator().manual_seed(100 * turn + pe) for pe in range(world)]
        inputs.append(
            Inputs([torch.randn(case.shape, generator=rng).to(case.dtype) for rng in rngs], None, None, weight)
        )
        total = sum_model(inputs[-1])
        wants.append([total, norm_model(total, inputs[-1])] if case.norms else [total])
    return inputs, wants


def _successors() -> Chain:
    """Sums and a product in a chain: every algorithm after another one, and one with its input as output."""
    width, rank, world = 4096, po.rank(), po.world_size()
    # One nonzero column in each row of the weights, so that sums stay small whole numbers.
    rng = torch.Generator().manual_seed(5)
    picks = torch.randint(width, (world, width), generator=rng)
    weights = torch.zeros(width, width, dtype=torch.bfloat16)
    weights[torch.arange(width), picks[rank]] = 1
    own = weights.to(po.device())
    starts = torch.randint(-3, 4, (NUM_INPUTS, width), generator=rng).to(torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        first = po.all_reduce(x, algorithm="one_shot")
        second = po.gemv_all_reduce(own, first, prefetch_weight=True)
        third = po.all_reduce(second, residual=first, algorithm="two_shot")
        fourth = po.all_reduce(third, algorithm="slices")
        return po.all_reduce(fourth, residual=third, out=fourth, algorithm="one_shot")

    def expected(x: torch.Tensor) -> torch.Tensor:
        first = x.float() * world
        second = first[picks].sum(0)
        third = second * world + first
        # Whole numbers that bf16 represents exactly. The last sum is rounded once.
        return (third * world * world + third).to(torch.bfloat16)

    return Chain(run, list(starts), [expected(start) for start in starts])


class TestGraphs(ChainSuite):
    cases = (
        Case("graphs: a row", (1, 8192), norms=True),
        Case("graphs: ragged rows, fp16", (33, 1000), torch.float16, norms=True),
        Case("graphs: more rows", (67, 520), norms=True),
    )
    ways = ALGORITHMS
    growing: ClassVar = [Case(f"{count} elements", (count,)) for count in (900, 90_000, 500_000, 9_000)]
    heap_bytes = 512 << 20
    chains: ClassVar = {"successors": ChainTest(_successors, repeats=3)}

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        inputs, wants = _turns(case, po.world_size())
        weight = inputs[0].weight.to(po.device())

        def act(x: torch.Tensor, *, way: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            if case.norms:
                return po.all_reduce_rms_norm(x, weight, algorithm=way)
            return po.all_reduce(x, algorithm=way)

        return Call(case.name, way, act, [[of_all.xs[po.rank()]] for of_all in inputs], wants)

    @classmethod
    def more_calls(cls) -> list[Call]:
        if po.backend() == "host":  # the host would take too long
            return []
        large = Case("graphs: many rows", (300, 7168), norms=True)
        return [*(cls.call(large, way) for way in cls.ways), cls.call(Case("graphs: a sum", (300, 7168)), "auto")]

    @classmethod
    def first_calls(cls) -> dict[str, Call]:
        calls = {
            "all_reduce": Case("first sum", (4, 64)),
            "all_reduce_rms_norm": Case("first norm", (4, 64), norms=True),
        }
        return {name: cls.call(case, "auto") for name, case in calls.items()}
