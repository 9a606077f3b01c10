"""gemv_all_reduce in CUDA graphs, on streams, and launched before its predecessor has ended. One GPU is enough.

All values are small whole numbers, so every bit of every result is known.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from gemv_cases import ALGORITHMS, Case, Inputs, bits, expected_bits, make_inputs
from kept_pes import in_processes

import persistent_ops as po
from persistent_ops.ops.gemv_plan import OPERATOR

pytestmark = pytest.mark.gpu
MB = 1 << 20
_ONE = Case("graphs: one vector", 1000, lambda rank: 512 + 8 * rank)
_FEW = Case("graphs: vectors", 200, lambda rank: 96, 6)
_ODD = Case("graphs: odd", 77, lambda rank: 33, 16, torch.float16)
_NUM_INPUTS = 5  # of an odd number of turns, so that inputs meet both parities of the epoch


def _pes() -> int:
    return max(2, min(4, torch.cuda.device_count()))


def _replays() -> int:
    return 1001 if torch.cuda.device_count() > 1 else 301  # PEs that share a GPU take turns


class Instance:
    """A shape with buffers that keep their place, and with inputs and results of several iterations."""

    def __init__(self, case: Case, first_iteration: int = 0) -> None:
        rank, world, device = po.rank(), po.world_size(), po.device()
        self.case = case
        self.inputs = [make_inputs(case, world, first_iteration + i) for i in range(_NUM_INPUTS)]
        # Bias and residual of one iteration serve all, since a graph reads them at one place.
        given = make_inputs(case, world, 3)
        assert given.bias is not None and given.residual is not None
        self.weight = given.weights[rank].to(device)
        self.bias, self.residual = given.bias.to(device), given.residual.to(device)
        self.xs = [inputs.xs[rank].to(device) for inputs in self.inputs]
        self.x = torch.zeros_like(self.xs[0])
        wants = [
            expected_bits(Inputs(inputs.weights, inputs.xs, given.bias, given.residual)).to(device)
            for inputs in self.inputs
        ]
        self.wants = [bits(want) for want in wants]

    def call(self, **options: Any) -> torch.Tensor:
        return po.gemv_all_reduce(self.weight, self.x, bias=self.bias, residual=self.residual, **options)

    def load(self, turn: int) -> None:
        self.x.copy_(self.xs[turn % _NUM_INPUTS])

    def is_right(self, output: torch.Tensor, turn: int) -> bool:
        return torch.equal(bits(output), self.wants[turn % _NUM_INPUTS])


def _captured(stream: torch.cuda.Stream, program: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        result = program()
    return graph, result


def _replayed(replays: int) -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=128 * MB)
    problems: list[str] = []
    instances = [Instance(case) for case in (_ONE, _FEW, _ODD)]
    # name, instance, options: an odd number of launches per graph, so that each meets both parities of the epoch.
    calls: list[tuple[str, Instance, dict[str, Any]]] = [
        (f"{instance.case.name}, {algorithm}", instance, {"algorithm": algorithm})
        for instance, algorithm in itertools.product(instances, ALGORITHMS)
    ]
    calls.append(("prefetched", instances[0], {"prefetch_weight": True}))
    calls.append(("comm bf16", instances[1], {"comm_dtype": torch.bfloat16}))
    calls.append(("out", instances[2], {"out": torch.empty_like(instances[2].residual)}))
    for _, instance, options in calls:
        instance.call(**options)
    po.check()
    rounded = [
        bits(
            expected_bits(Inputs(i.weights, i.xs, instances[1].bias.cpu(), instances[1].residual.cpu()), torch.bfloat16)
        )
        for i in instances[1].inputs
    ]
    rounded = [want.to(po.device()) for want in rounded]
    stream = torch.cuda.Stream()
    graph, outputs = _captured(stream, lambda: [instance.call(**options) for _, instance, options in calls])
    for turn in range(replays):
        for instance in instances:
            instance.load(turn)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        for (name, instance, _), output in zip(calls, outputs, strict=True):
            want = rounded[turn % _NUM_INPUTS] if name == "comm bf16" else instance.wants[turn % _NUM_INPUTS]
            if not torch.equal(bits(output), want):
                problems.append(f"replay {turn}, {name}: wrong bits")
        if turn % 50 == 7:  # now and then eager calls between replays, an odd number too
            for instance, algorithm in (
                (instances[0], "one_shot"),
                (instances[2], "two_phase"),
                (instances[1], "auto"),
            ):
                if not instance.is_right(instance.call(algorithm=algorithm), turn):
                    problems.append(f"eager call after replay {turn}, {instance.case.name}, {algorithm}: wrong bits")
        if problems:
            break
    po.check()
    po.finalize()
    return problems


def test_a_thousand_graph_replays_with_changing_inputs() -> None:
    assert in_processes(_replayed, _pes(), _replays(), timeout=300) == [[]] * _pes()


_WIDTH = 256


def _layers(replays: int) -> list[str]:
    """Run layers like a decoder's in a graph: a layer's vector and residual come from the sum of the one before."""
    po.init("cuda", operator_timeout=20.0, heap_size=128 * MB)
    rank, world, device = po.rank(), po.world_size(), po.device()
    problems: list[str] = []

    def draw(*shape: int, seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(-3, 4, shape, generator=rng).to(torch.bfloat16)

    weights = [[draw(_WIDTH, _WIDTH, seed=100 * layer + pe) for pe in range(world)] for layer in range(5)]
    own = [weight[rank].to(device) for weight in weights]
    starts = [draw(_WIDTH, seed=1000 + i) for i in range(_NUM_INPUTS)]

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

    wants = [run(start, on_host).to(device) for start in starts]
    first = torch.zeros(_WIDTH, dtype=torch.bfloat16, device=device)
    for turn, start in enumerate(starts):
        first.copy_(start)
        if not torch.equal(run(first, on_device), wants[turn]):
            problems.append(f"eager layers, start {turn}: wrong")
    po.check()
    graph, last = _captured(torch.cuda.Stream(), lambda: run(first, on_device))
    for turn in range(replays):
        first.copy_(starts[turn % _NUM_INPUTS])
        last.fill_(float("nan"))
        graph.replay()
        if not torch.equal(last, wants[turn % _NUM_INPUTS]):
            problems.append(f"replay {turn}: wrong")
            break
    # Replays that the host does not wait for in between, while PEs drift apart.
    results = []
    for turn in range(60):
        if (turn + rank) % 7 == 0:
            torch.cuda._sleep(1_000_000)
        first.copy_(starts[turn % _NUM_INPUTS])
        graph.replay()
        results.append(last.clone())
    problems += [
        f"queued replay {turn}: wrong" for turn, x in enumerate(results) if not torch.equal(x, wants[turn % 5])
    ]
    po.check()
    po.finalize()
    return problems


def test_layers_that_follow_one_another_in_a_graph() -> None:
    assert in_processes(_layers, _pes(), _replays() // 3, timeout=300) == [[]] * _pes()


_WIDE = 4096  # wide enough that a WG has more to read than its ring holds: the successor begins late


def _chain(replays: int, prefetches: tuple[bool, ...], count: int) -> list[str]:
    """Let products take the sums of the one before, and begin before it has ended.

    Args:
        replays: of the graph.
        prefetches: whether each of the three asks for its weights meanwhile.
        count: of vectors.
    """
    po.init("cuda", operator_timeout=20.0, heap_size=128 * MB)
    rank, world, device = po.rank(), po.world_size(), po.device()
    problems: list[str] = []
    # A row has one column that is not zero, so that sums stay small whole numbers.
    rng = torch.Generator().manual_seed(5)
    picks = torch.randint(_WIDE, (3, world, _WIDE), generator=rng)
    signs = torch.randint(0, 2, picks.shape, generator=rng).to(torch.bfloat16) * 2 - 1
    starts = torch.randint(-3, 4, (_NUM_INPUTS, count, _WIDE), generator=rng).to(torch.bfloat16)
    weights = torch.zeros(3, _WIDE, _WIDE, dtype=torch.bfloat16)
    weights.scatter_(2, picks[:, rank, :, None], signs[:, rank, :, None])
    own = weights.to(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        first = po.gemv_all_reduce(own[0], x, prefetch_weight=prefetches[0])
        second = po.gemv_all_reduce(own[1], first, residual=first, prefetch_weight=prefetches[1], algorithm="two_phase")
        return po.gemv_all_reduce(own[2], second, prefetch_weight=prefetches[2])

    def expected(x: torch.Tensor) -> torch.Tensor:
        for layer in range(3):
            total = (signs[layer] * x[:, picks[layer]]).float().sum(1)
            x = (total + x if layer == 1 else total).to(torch.bfloat16)
        return x

    wants = [expected(start).to(device) for start in starts]
    x = starts[0].to(device)
    if not torch.equal(run(x), wants[0]):
        problems.append("eager calls: wrong")
    po.check()
    graph, result = _captured(torch.cuda.Stream(), lambda: [run(x) for _ in range(3)])
    for turn in range(replays):
        x.copy_(starts[turn % _NUM_INPUTS])
        graph.replay()
        if not all(torch.equal(y, wants[turn % _NUM_INPUTS]) for y in result):
            problems.append(f"replay {turn}: wrong")
            break
    po.check()
    for plan in OPERATOR.state(po.runtime.world.current()).plans.values():
        if any(int(launch.asked[0]) for launch in plan._launches):
            problems.append("WGs are counted when all have asked for everything")
    po.finalize()
    return problems


def _overlapping() -> list[int]:
    """Replay products with different grids beside one another, which is slow but safe; return who stays counted."""
    po.init("cuda", operator_timeout=20.0, heap_size=64 * MB)
    device = po.device()
    streams, graphs, pairs = [torch.cuda.Stream() for _ in range(2)], [], []
    for rows, stream in zip((4096, 520), streams, strict=True):
        weight = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16)
        x = torch.randn(4096, device=device, dtype=torch.bfloat16)
        want = po.gemv(weight, x, prefetch_weight=True)
        graph, result = _captured(stream, lambda w=weight, v=x: [po.gemv(w, v, prefetch_weight=True) for _ in range(8)])
        graphs.append(graph)
        pairs.append((want, result, weight, x))  # a graph does not keep what it reads
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    po.check()
    assert all(torch.equal(want, y) for want, result, *_ in pairs for y in result)
    plans = OPERATOR.state(po.runtime.world.current()).plans.values()
    counted = [int(launch.asked[0]) for plan in plans for launch in plan._launches]
    po.finalize()
    return counted


def test_replays_that_overlap_count_to_the_end() -> None:
    assert in_processes(_overlapping, 1, timeout=100) == [[0, 0]]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("prefetches", [(True,) * 3, (False,) * 3, (True, False, True)], ids=["all", "none", "some"])
def test_products_that_take_each_other_s_sums(prefetches: tuple[bool, ...], count: int) -> None:
    assert in_processes(_chain, _pes(), _replays() // 5, prefetches, count, timeout=300) == [[]] * _pes()


def _two_streams() -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=128 * MB)
    problems: list[str] = []
    instances = [Instance(_ONE), Instance(_FEW, first_iteration=1)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for instance, algorithm in itertools.product(instances, ALGORITHMS):
        instance.call(algorithm=algorithm)
    po.check()
    for turn in range(40):
        outputs = []
        for i, (instance, stream) in enumerate(zip(instances, streams, strict=True)):
            with torch.cuda.stream(stream):
                if (turn + po.rank()) % 3 == i:
                    torch.cuda._sleep(2_000_000)  # PEs and streams drift
                instance.load(turn)
                outputs.append(instance.call(algorithm=ALGORITHMS[turn // 2 % 2], prefetch_weight=turn % 5 == 0))
        torch.cuda.synchronize()
        for i, (instance, output) in enumerate(zip(instances, outputs, strict=True)):
            if not instance.is_right(output, turn):
                problems.append(f"turn {turn}, stream {i}: wrong bits")
    # The same as graphs, whose replays on two streams an event puts in one order on all PEs.
    graphs = [_captured(stream, instance.call) for instance, stream in zip(instances, streams, strict=True)]
    torch.cuda.synchronize()
    last: torch.cuda.Stream | None = None
    for turn in range(40):
        for i in (turn % 2, 1 - turn % 2):
            if last is not None:
                streams[i].wait_stream(last)
            last = streams[i]
            with torch.cuda.stream(last):
                instances[i].load(turn)
                graphs[i][1].fill_(float("nan"))
                graphs[i][0].replay()
        torch.cuda.synchronize()
        for i, instance in enumerate(instances):
            if not instance.is_right(graphs[i][1], turn):
                problems.append(f"replay {turn}, stream {i}: wrong bits")
    po.check()
    po.finalize()
    return problems


def test_two_instances_on_two_streams() -> None:
    assert in_processes(_two_streams, _pes(), timeout=200) == [[]] * _pes()


def _two_graphs_and_other_operators(replays: int) -> list[str]:
    """Replay two graphs and call other operators in an order that is not that of the capture."""
    po.init("cuda", operator_timeout=20.0, heap_size=128 * MB)
    problems: list[str] = []
    instances = [Instance(_FEW), Instance(_ODD, first_iteration=2)]
    table = torch.arange(32.0, device=po.device()).view(8, 4)
    rows = torch.arange(8, device=po.device())
    bags = torch.arange(9, device=po.device())
    split = [8 // po.world_size() + int(pe < 8 % po.world_size()) for pe in range(po.world_size())]
    begin = sum(split[: po.rank()])
    want = table[begin : begin + split[po.rank()]].repeat(1, po.world_size())
    for instance in instances:
        instance.call()
    po.embedding_all_to_all([table], rows, bags, batch_per_rank=split)
    po.check()
    stream = torch.cuda.Stream()
    graphs = [_captured(stream, instance.call) for instance in instances]
    order = torch.Generator().manual_seed(11)  # the same on all PEs
    for turn in range(replays):
        kind = int(torch.randint(4, (), generator=order))
        if kind == 3:
            po.runtime.world.current().enqueue_barrier()
        elif kind == 2:
            if not torch.equal(po.embedding_all_to_all([table], rows, bags, batch_per_rank=split), want):
                problems.append(f"turn {turn}: embedding_all_to_all is wrong")
        else:
            instances[kind].load(turn)
            graphs[kind][1].fill_(float("nan"))
            graphs[kind][0].replay()
            if not instances[kind].is_right(graphs[kind][1], turn):
                problems.append(f"turn {turn}: graph {kind} has wrong bits")
    po.check()
    po.finalize()
    return problems


def test_graphs_and_other_operators_take_turns() -> None:
    assert in_processes(_two_graphs_and_other_operators, _pes(), _replays() // 5, timeout=200) == [[]] * _pes()


def _fails_in_a_graph() -> dict[str, Any]:
    """A peer that does not replay: the others' replay ends, tells, and works again after recover()."""
    po.init("cuda", operator_timeout=4.0, heap_size=128 * MB)
    instance = Instance(_FEW)
    instance.call()
    po.check()
    graph, output = _captured(torch.cuda.Stream(), instance.call)
    seen: dict[str, Any] = {"before": []}
    for turn in range(3):
        instance.load(turn)
        graph.replay()
        seen["before"].append(instance.is_right(output, turn))
    if po.rank() != 1:
        output.fill_(1.0)
        graph.replay()
        try:
            po.check()
        except po.PeerTimeoutError as error:
            seen["error"] = str(error)
        seen["poisoned"] = bool(output.isnan().all())
    else:
        time.sleep(4.0)  # until the other has given up, since recover() waits no longer than that for it
    po.recover()
    seen["after"] = []
    for turn in range(3):
        instance.load(turn)
        graph.replay()
        seen["after"].append(instance.is_right(output, turn))
    po.check()
    po.finalize()
    return seen


def test_a_replay_without_a_peer_ends() -> None:
    results = in_processes(_fails_in_a_graph, 2, timeout=120)
    for seen in results:
        assert seen["before"] == seen["after"] == [True] * 3
    assert "PE 1" in results[0]["error"] and results[0]["poisoned"]


def _capture_needs_a_call_before() -> list[str]:
    po.init("cuda", operator_timeout=20.0, heap_size=64 * MB)
    instance = Instance(_FEW)
    problems = []
    for attempt in range(2):
        try:
            _captured(torch.cuda.Stream(), instance.call)
        except RuntimeError as error:
            if "call it once before the capture" not in str(error):
                problems.append(f"attempt {attempt}: {error}")
        else:
            problems.append(f"attempt {attempt}: no error")
    instance.load(1)
    if not instance.is_right(instance.call(), 1):
        problems.append("an eager call after it: wrong bits")
    graph, output = _captured(torch.cuda.Stream(), instance.call)
    for turn in (2, 3, 4):
        instance.load(turn)
        graph.replay()
        if not instance.is_right(output, turn):
            problems.append(f"replay {turn}: wrong bits")
    po.finalize()
    return problems


def test_first_call_inside_a_capture_is_refused() -> None:
    assert in_processes(_capture_needs_a_call_before, 1, timeout=100) == [[]]
