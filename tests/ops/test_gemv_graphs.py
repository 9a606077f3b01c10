"""gemv_all_reduce and gemv in CUDA graphs (graphs.py), and launched before earlier launches have ended.

All values are small whole numbers, so every bit of every result is known.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from gemv_cases import ALGORITHMS, Case, Inputs, expected_bits, make_inputs
from graph_chains import Chain, ChainSuite, ChainTest
from graphs import NUM_INPUTS, Call, Graph
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.inversion import Rows, invert
from persistent_ops.ops.gemv_plan import OPERATOR

_ONE = Case("graphs: one vector", 1000, lambda rank: 512 + 8 * rank)
_FEW = Case("graphs: vectors", 200, lambda rank: 96, 6)
_ODD = Case("graphs: odd", 77, lambda rank: 33, 16, torch.float16)


def _call(
    case: Case, way: str, *, is_alone: bool = False, wire_dtype: torch.dtype | None = None, **options: Any
) -> Call:
    rank, world, device = po.rank(), po.world_size(), po.device()
    inputs = [make_inputs(case, world, turn) for turn in range(NUM_INPUTS)]
    # Bias and residual of one iteration serve all, since a graph reads them at one address.
    given = make_inputs(case, world, 3)
    assert given.bias is not None and given.residual is not None
    weight, bias, residual = (tensor.to(device) for tensor in (given.weights[rank], given.bias, given.residual))

    def act(x: torch.Tensor, *, way: str, **more: Any) -> torch.Tensor:
        added = {"bias": bias, "residual": residual, **options, **more}
        if is_alone:
            return po.gemv(weight, x, **added)
        return po.gemv_all_reduce(weight, x, algorithm=way, wire_dtype=wire_dtype, **added)

    pes = slice(rank, rank + 1) if is_alone else slice(world)
    wants = [
        [expected_bits(Inputs(of_all.weights[pes], of_all.xs[pes], given.bias, given.residual), wire_dtype)]
        for of_all in inputs
    ]
    name = ", ".join([case.name, *options, *(["gemv"] if is_alone else []), *([str(wire_dtype)] if wire_dtype else [])])
    return Call(name, way, act, [[of_all.xs[rank]] for of_all in inputs], wants)


# ---- chains ----------------------------------------------------------------------------------------------------------


def _layers() -> Chain:
    """Layers like a decoder's: a layer's vector and residual come from the sum of the previous layer."""
    rank, world, width = po.rank(), po.world_size(), 256

    def draw(*shape: int, seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(-3, 4, shape, generator=rng).to(torch.bfloat16)

    weights = [[draw(width, width, seed=100 * layer + pe) for pe in range(world)] for layer in range(5)]
    own = [weight[rank].to(po.device()) for weight in weights]
    starts = [draw(width, seed=1000 + number) for number in range(NUM_INPUTS)]

    def run(hidden: torch.Tensor, multiply: Any) -> torch.Tensor:
        for layer in range(len(weights)):
            # The remainder makes x right before the product needs it, and keeps all numbers small and whole.
            hidden = torch.fmod(multiply(layer, torch.fmod(hidden, 4), hidden), 64)
        return hidden

    def on_device(layer: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return po.gemv_all_reduce(
            own[layer], x, residual=residual, algorithm=ALGORITHMS[layer % 2], prefetch_weight=layer % 3 != 2
        )

    def on_host(layer: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return expected_bits(Inputs(weights[layer], [x] * world, None, residual))

    return Chain(lambda x: run(x, on_device), starts, [run(start, on_host) for start in starts])


_WIDE = 4096  # wide enough that a WG reads more than its ring holds, so the next launch begins late


def _products(prefetches: tuple[bool, ...], count: int) -> Chain:
    """Products that use the sums of the previous product.

    Args:
        prefetches: for each of the three products, whether it prefetches its weights.
        count: of vectors.
    """
    rank, world = po.rank(), po.world_size()
    # One column of each row is not zero, so that sums stay small whole numbers.
    rng = torch.Generator().manual_seed(5)
    picks = torch.randint(_WIDE, (3, world, _WIDE), generator=rng)
    signs = torch.randint(0, 2, picks.shape, generator=rng).to(torch.bfloat16) * 2 - 1
    starts = torch.randint(-3, 4, (NUM_INPUTS, count, _WIDE), generator=rng).to(torch.bfloat16)
    weights = torch.zeros(3, _WIDE, _WIDE, dtype=torch.bfloat16)
    weights.scatter_(2, picks[:, rank, :, None], signs[:, rank, :, None])
    own = weights.to(po.device())

    def run(x: torch.Tensor) -> torch.Tensor:
        first = po.gemv_all_reduce(own[0], x, prefetch_weight=prefetches[0])
        second = po.gemv_all_reduce(own[1], first, residual=first, prefetch_weight=prefetches[1], algorithm="two_shot")
        return po.gemv_all_reduce(own[2], second, prefetch_weight=prefetches[2])

    def expected(x: torch.Tensor) -> torch.Tensor:
        for layer in range(3):
            total = (signs[layer] * x[:, picks[layer]]).float().sum(1)
            x = (total + x if layer == 1 else total).to(torch.bfloat16)
        return x

    return Chain(run, list(starts), [expected(start) for start in starts])


def _decoder() -> Chain:
    """Pairs of layers as in a decoder. The first layer of a pair does not communicate."""
    rank, world, width = po.rank(), po.world_size(), 1024
    rng = torch.Generator().manual_seed(3)
    ups = torch.zeros(3, world, width, width, dtype=torch.bfloat16)
    picks = torch.randint(width, (3, world, width, 1), generator=rng)
    ups.scatter_(3, picks, (torch.randint(0, 2, picks.shape, generator=rng) * 2 - 1).to(ups.dtype))
    downs = ups.flip(0).contiguous()
    starts = torch.randint(-3, 4, (NUM_INPUTS, width), generator=rng).to(ups.dtype)

    def expected(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(ups, downs, strict=True):
            inner = [up[pe].float() @ x.float() for pe in range(world)]
            x = torch.fmod(x + sum(down[pe].float() @ inner[pe] for pe in range(world)), 8).to(ups.dtype)
        return x

    own_ups, own_downs = ups[:, rank].to(po.device()), downs[:, rank].to(po.device())

    def run(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(own_ups, own_downs, strict=True):
            inner = po.gemv(up, x, prefetch_weight=True)
            x = torch.fmod(po.gemv_all_reduce(down, inner, residual=x, prefetch_weight=True), 8)
        return x

    # One more, so that the number of this PE's own launches is odd.
    return Chain(run, list(starts), [expected(start) for start in starts], lambda x: po.gemv(own_ups[0], x))


_PREFETCHES = {"all": (True, True, True), "none": (False, False, False), "some": (True, False, True)}


class TestGraphs(ChainSuite):
    cases = (_ONE, _FEW, _ODD)
    ways = ALGORITHMS
    growing: ClassVar = [Case(f"{rows} rows", rows, lambda rank: 32, 4) for rows in (8, 80, 2000, 40)]
    chains: ClassVar = {
        "layers": ChainTest(_layers, share=3),
        "decoder, alone": ChainTest(_decoder, pes=1),
        "decoder": ChainTest(_decoder, pes=2),
        **{
            f"{name}-{count}": ChainTest(functools.partial(_products, prefetches, count), repeats=3, share=5)
            for name, prefetches in _PREFETCHES.items()
            for count in (1, 3)
        },
    }

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        return _call(case, way)

    @classmethod
    def more_calls(cls) -> list[Call]:
        out = torch.empty(_ODD.shape, dtype=_ODD.dtype, device=po.device())
        return [
            _call(_ONE, "auto", prefetch_weight=True),
            _call(_FEW, "auto", wire_dtype=torch.bfloat16),
            _call(_ODD, "auto", out=out),
        ]

    @classmethod
    def eager_calls(cls) -> list[Call]:
        return [_call(_ONE, "one_shot"), _call(_ODD, "two_shot"), _call(_FEW, "auto")]

    @classmethod
    def first_calls(cls) -> dict[str, Call]:
        return {"gemv_all_reduce": _call(_FEW, "auto"), "gemv": _call(_FEW, "alone", is_alone=True)}

    @classmethod
    def options(cls, turn: int) -> dict[str, Any]:
        return {"prefetch_weight": turn % 5 == 0}

    @classmethod
    def left_over(cls) -> list[str]:
        return ["WGs are counted when all have asked for everything"] if any(_counted()) else []


def _counted() -> list[int]:
    plans = OPERATOR.state(po.runtime.world.current()).plans.values()
    return [int(launch.asked[0]) for plan in plans for launch in plan._launches]


def _overlapping() -> list[int]:
    """Replay products with different grids at the same time, which is slow but safe; return who remains counted."""
    device = po.device()
    streams, graphs, pairs = [torch.cuda.Stream() for _ in range(2)], [], []
    for rows, stream in zip((4096, 520), streams, strict=True):
        weight = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
        x = torch.randn(4096, device=device, dtype=torch.bfloat16)
        want = po.gemv(weight, x, prefetch_weight=True)
        graphs.append(Graph(lambda w=weight, v=x: [po.gemv(w, v, prefetch_weight=True) for _ in range(8)], stream))
        pairs.append((want, weight, x))  # a graph does not keep what it reads
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    po.check()
    assert all(torch.equal(want, y) for (want, *_), graph in zip(pairs, graphs, strict=True) for y in graph.results)
    workspace = po.runtime.world.current().workspace
    departed = int(workspace._local_alone[workspace._structs["LocalState"].departed.offset // 8])
    _invert()
    return [*_counted(), departed]


def _invert() -> None:
    """Sort lookups, also in launches of this PE alone. Their last WG must leave zero words for the next launch."""
    world, device = po.runtime.world.current(), po.device()
    bags, rows = 4096, 1000
    offsets = torch.arange(bags + 1, device=device)
    for seed in range(3):
        indices = torch.randint(rows, (bags,), generator=torch.Generator().manual_seed(seed))
        own = Rows.of(world, [0], [rows], bags)
        inverted = invert(world, own, indices.to(device), offsets, counts=False, lookups=False)
        po.check()
        assert int(inverted.count) == bags and torch.equal(inverted.keys[:bags].cpu().long(), indices.sort().values)


@pytest.mark.gpu
def test_replays_that_overlap_count_to_the_end(backend: str) -> None:
    assert in_world(_overlapping, 1, backend) == [[0, 0, 0]]
