"""Tests of every operator in CUDA graphs: replays with other inputs, on several streams, between other calls.

An operator's class of tests derives from `GraphSuite` and says how it is called. One GPU is enough. The host has no
graphs: there a program is called again for every replay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bits import difference
from checks import Checks
from gpu_turns import gpus_alone
from worlds import in_world

import persistent_ops as po

__all__ = ["NUM_INPUTS", "Call", "Graph", "GraphSuite", "world_size", "num_replays"]

NUM_INPUTS = 5  # an odd number, so that inputs meet both parities of the epoch
Results = Sequence[torch.Tensor]


class Call:
    """A call of an operator on buffers at fixed addresses, with its inputs and expected results by turn.

    Args:
        name: in messages.
        way: the default way to call it.
        act: calls the operator, with the buffers and a way; returns the results.
        given: what the buffers hold, for each of NUM_INPUTS turns.
        wants: the results, likewise.
    """

    def __init__(
        self,
        name: str,
        way: str,
        act: Callable[..., torch.Tensor | Results],
        given: Sequence[Results],
        wants: Sequence[Results],
    ) -> None:
        assert len(given) == len(wants) == NUM_INPUTS
        self.name, self._way, self._act = f"{name}, {way}", way, act
        self._given, self._wants = ([[t.to(po.device()) for t in each] for each in of_all] for of_all in (given, wants))
        self._buffers = [tensor.clone() for tensor in self._given[0]]

    def load(self, turn: int) -> None:
        """Fill the buffers, on the current stream."""
        for buffer, tensor in zip(self._buffers, self._given[turn % NUM_INPUTS], strict=True):
            buffer.copy_(tensor)

    def run(self, way: str | None = None, **options: Any) -> Results:
        results = self._act(*self._buffers, way=way or self._way, **options)
        return (results,) if isinstance(results, torch.Tensor) else results

    def clear(self, results: Results, value: float = float("nan")) -> None:
        """Overwrite the results, so that a call must write them again."""
        for tensor in results:
            tensor.fill_(value)

    def problem(self, results: Results, turn: int) -> str | None:
        """Return what is wrong with the results of a turn, or None."""
        assert len(results) == len(self._wants[0])
        found = (difference(tensor, want) for tensor, want in zip(results, self._wants[turn % NUM_INPUTS], strict=True))
        return next(filter(None, found), None)

    def check(self, checks: Checks, results: Results, turn: int) -> None:
        """Compare the results of a turn later."""
        assert len(results) == len(self._wants[0])
        for tensor, want in zip(results, self._wants[turn % NUM_INPUTS], strict=True):
            checks.compare(f"turn {turn}, {self.name}", tensor, want)

    def is_poisoned(self, results: Results) -> bool:
        """Return whether nothing looks like a result."""
        return all(bool(tensor.isnan().all()) for tensor in results)


class Graph:
    """A program that has been captured.

    On the host it is called once, with everything refused that a capture refuses, and again for every replay.

    Attributes:
        results: what the program returned; where a replay writes.
    """

    def __init__(self, program: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> None:
        self._program = program
        if po.backend() == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            gc.collect()  # a graph that is freed during a capture would end the capture
            stream = stream or torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.cuda.graph(self._graph, stream=stream):
                self.results = program()
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(po.runtime.world.current().workspace, "is_capturing", lambda: True)
            self.results = program()

    def replay(self) -> Any:
        """Replay it on the current stream; return the results."""
        if po.backend() == "cuda":
            self._graph.replay()
        else:
            self.results = self._program()
        return self.results


def world_size(backend: str) -> int:
    """Return the number of PEs of a test: one per GPU, or two that share a GPU."""
    return 3 if backend == "host" else max(2, min(4, torch.cuda.device_count()))


def num_replays(backend: str, pes: int) -> int:
    """Return the number of replays of a test, which is odd. PEs that share a GPU take turns, and make fewer."""
    if backend == "host":
        return 51
    return 1001 if pes <= torch.cuda.device_count() else 301


class GraphSuite:
    """The tests, for one operator.

    Attributes:
        operator: the function's name.
        cases: three or more shapes, of which the first two make different results.
        ways: in which each can be called.
        growing: shapes, most of which need more of the operator's memory than the previous one; the last needs less.
        heap_bytes: of each PE.
    """

    operator: ClassVar[str]
    cases: ClassVar[Sequence[Any]]
    ways: ClassVar[Sequence[str]]
    growing: ClassVar[Sequence[Any]]
    heap_bytes: ClassVar[int] = 128 << 20

    # ---- of the operator -------------------------------------------------------------------------------------------

    @classmethod
    def call(cls, case: Any, way: str) -> Call:
        """Prepare a call of this PE; collective."""
        raise NotImplementedError

    @classmethod
    def more_calls(cls) -> list[Call]:
        """Prepare a graph's calls in addition to all shapes in all ways; an odd number of launches in total."""
        return []

    @classmethod
    def eager_calls(cls) -> list[Call]:
        """Prepare what is called between replays, an odd number of launches."""
        return [cls.call(case, cls.ways[number % len(cls.ways)]) for number, case in enumerate(cls.cases[:3])]

    @classmethod
    def first_calls(cls) -> Mapping[str, Call]:
        """Prepare a call of each function by its name. This PE's world has seen none of these calls."""
        return {cls.operator: cls.call(cls.cases[0], cls.ways[0])}

    @classmethod
    def options(cls, turn: int) -> dict[str, Any]:
        """Return the arguments of eager calls in a turn, in addition to the way."""
        return {}

    # ---- programs of the PEs ---------------------------------------------------------------------------------------

    @classmethod
    def _pair(cls) -> tuple[Call, Call]:
        return cls.call(cls.cases[0], cls.ways[0]), cls.call(cls.cases[1], cls.ways[-1])

    @classmethod
    def _replay(cls, graph: Graph, calls: Sequence[Call], turn: int, checks: Checks | None = None) -> list[str]:
        """Replay a graph of calls, whose results it returns, with a turn's inputs; return what went wrong.

        With `checks` the results are compared there.
        """
        for call, results in zip(calls, graph.results, strict=True):
            call.load(turn)
            call.clear(results)
        mine = checks or Checks()
        for call, results in zip(calls, graph.replay(), strict=True):
            call.check(mine, results, turn)
        return [] if checks else mine.look()

    @classmethod
    def _replayed(cls, replays: int) -> list[str]:
        calls = [cls.call(case, way) for case in cls.cases for way in cls.ways] + cls.more_calls()
        between = cls.eager_calls()
        assert len(calls) % 2 == len(between) % 2 == 1
        for call in (*calls, *between):
            call.run()
        po.check()
        graph = Graph(lambda: [call.run() for call in calls])
        checks = Checks()
        with gpus_alone():
            for turn in range(replays):
                if (turn + po.rank()) % 17 == 0:
                    time.sleep(0.002)
                cls._replay(graph, calls, turn, checks)
                if turn % 50 == 7:
                    for call in between:
                        call.load(turn)
                        call.check(checks, call.run(), turn)
                if problems := checks.look(turn):
                    return problems
            return checks.look()

    @classmethod
    def _ready(cls, way: str) -> list[str]:
        """Call each shape once, then all shapes under a ban on new plans and memory."""
        calls = [cls.call(case, way) for case in cls.growing]
        for call in calls:
            call.run()
        po.check()
        return cls._replay(Graph(lambda: [call.run() for call in calls]), calls, 1)

    @classmethod
    def _refused(cls) -> list[str]:
        """Capture a call that has not been made. It is refused. Neither the call nor the next capture is harmed."""
        problems = []
        for name, call in cls.first_calls().items():
            for attempt in range(2):
                try:
                    Graph(call.run)
                except RuntimeError as error:
                    text = str(error)
                    if not text.startswith(f"{name}: the first call") or "call it once before the capture" not in text:
                        problems.append(f"{name}, attempt {attempt}: {text}")
                else:
                    problems.append(f"{name}, attempt {attempt}: no error")
            call.load(1)
            if (found := call.problem(call.run(), 1)) is not None:
                problems.append(f"{name}, an eager call after it: {found}")
            graph = Graph(lambda call=call: [call.run()])  # type: ignore[misc]
            for turn in (2, 3, 4):
                problems += cls._replay(graph, [call], turn)
        return problems

    @classmethod
    def _in_turn(cls, turns: int) -> list[str]:
        """Replay two graphs and call other operators in an order that differs from the order of the capture."""
        problems: list[str] = []
        device, world = po.device(), po.world_size()
        weight = torch.arange(24.0, device=device).view(6, 4) + po.rank()
        ones = torch.ones(4, device=device)
        total = 4.0 * (torch.arange(6.0, device=device) * 4 + 1.5) * world + 4.0 * sum(range(world))
        table = torch.arange(32.0, device=device).view(8, 4)
        rows, bags = torch.arange(8, device=device), torch.arange(9, device=device)
        split = [8 // world + int(pe < 8 % world) for pe in range(world)]
        begin = sum(split[: po.rank()])
        lookups = table[begin : begin + split[po.rank()]].repeat(1, world)
        others: list[tuple[str, Callable[[], torch.Tensor], torch.Tensor]] = [
            ("gemv_all_reduce", lambda: po.gemv_all_reduce(weight, ones), total),
            (
                "embedding_all_to_all",
                lambda: po.embedding_all_to_all([table], rows, bags, batch_per_rank=split),
                lookups,
            ),
        ]
        calls = cls._pair()
        for call in calls:
            call.run()
        for _, act, _ in others:
            act()
        po.check()
        graphs = [Graph(lambda call=call: [call.run()]) for call in calls]  # type: ignore[misc]
        order = torch.Generator().manual_seed(11)  # the same on all PEs
        checks = Checks()
        for turn in range(turns):
            kind = int(torch.randint(5, (), generator=order))
            if kind == 4:
                po.runtime.world.current().enqueue_barrier()
            elif kind >= 2:
                name, act, want = others[kind - 2]
                checks.compare(f"turn {turn}, {name}", act(), want)
            else:
                cls._replay(graphs[kind], [calls[kind]], turn, checks)
            problems += checks.look(turn)
        return problems + checks.look()

    @classmethod
    def _two_streams(cls) -> list[str]:
        calls = cls._pair()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for call in calls:
            for way in cls.ways:
                call.run(way)
        po.check()
        with gpus_alone():
            return cls._eager_on_streams(calls, streams) + cls._replayed_on_streams(calls, streams)

    @classmethod
    def _eager_on_streams(cls, calls: Sequence[Call], streams: Sequence[torch.cuda.Stream]) -> list[str]:
        problems = []
        for turn in range(40):
            of_all = []
            for number, (call, stream) in enumerate(zip(calls, streams, strict=True)):
                with torch.cuda.stream(stream):
                    if (turn + po.rank()) % 3 in (number, 2):
                        torch.cuda._sleep(2_000_000)  # PEs and streams drift
                    call.load(turn)
                    of_all.append(call.run(cls.ways[turn // 2 % len(cls.ways)], **cls.options(turn)))
            torch.cuda.synchronize()
            for number, (call, results) in enumerate(zip(calls, of_all, strict=True)):
                if (found := call.problem(results, turn)) is not None:
                    problems.append(f"turn {turn}, stream {number}: {found}")
        return problems

    @classmethod
    def _replayed_on_streams(cls, calls: Sequence[Call], streams: Sequence[torch.cuda.Stream]) -> list[str]:
        """The same as graphs. An event puts their replays on two streams in one order on all PEs."""
        problems = []
        graphs = [Graph(call.run, stream) for call, stream in zip(calls, streams, strict=True)]
        torch.cuda.synchronize()
        last: torch.cuda.Stream | None = None
        for turn in range(40):
            for number in (turn % 2, 1 - turn % 2):
                if last is not None:
                    streams[number].wait_stream(last)
                last = streams[number]
                with torch.cuda.stream(last):
                    calls[number].load(turn)
                    calls[number].clear(graphs[number].results)
                    graphs[number].replay()
            torch.cuda.synchronize()
            for number, (call, graph) in enumerate(zip(calls, graphs, strict=True)):
                if (found := call.problem(graph.results, turn)) is not None:
                    problems.append(f"replay {turn}, stream {number}: {found}")
        return problems

    @classmethod
    def _without_a_peer(cls) -> dict[str, Any]:
        """A peer that does not replay: the others' replay ends with an error, and works again after recover()."""
        call = cls.call(cls.cases[0], cls.ways[0])
        call.run()
        po.check()
        graph = Graph(lambda: [call.run()])
        seen: dict[str, Any] = {"before": [cls._replay(graph, [call], turn) for turn in range(3)]}
        if po.rank() != 1:
            (results,) = graph.results
            call.clear(results, 1.0)
            try:
                graph.replay()
                po.check()
            except po.PeerTimeoutError as error:
                seen["error"] = str(error)
            seen["poisoned"] = call.is_poisoned(results)
        else:
            time.sleep(4.0)  # until the other PE has given up, since recover() does not wait longer for it
        po.recover()
        seen["after"] = [cls._replay(graph, [call], turn) for turn in range(3)]
        return seen

    # ---- tests -----------------------------------------------------------------------------------------------------

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "way" in metafunc.fixturenames:
            metafunc.parametrize("way", cls.ways)

    @classmethod
    def _assert_right(cls, program: Callable[..., Any], pes: int, backend: str, *args: Any) -> None:
        assert in_world(program, pes, backend, *args, heap_size=cls.heap_bytes) == [[]] * pes

    @pytest.mark.apart
    def test_a_thousand_replays_with_changing_inputs(self, backend: str) -> None:
        pes = world_size(backend)
        self._assert_right(self._replayed, pes, backend, num_replays(backend, pes))

    def test_one_call_of_each_shape_is_enough_before_a_capture(self, backend: str, way: str) -> None:
        self._assert_right(self._ready, 2, backend, way)

    def test_first_call_inside_a_capture_is_refused(self, backend: str) -> None:
        self._assert_right(self._refused, 2, backend)

    def test_graphs_and_other_operators_take_turns(self, backend: str) -> None:
        pes = world_size(backend)
        self._assert_right(self._in_turn, pes, backend, num_replays(backend, pes) // 4)

    @pytest.mark.apart
    @pytest.mark.gpu
    def test_two_calls_on_two_streams(self, backend: str) -> None:
        self._assert_right(self._two_streams, world_size(backend), backend)

    @pytest.mark.gpu
    def test_a_replay_without_a_peer_ends(self, backend: str) -> None:
        results = in_world(self._without_a_peer, 2, backend, heap_size=self.heap_bytes, operator_timeout=4.0)
        for seen in results:
            assert seen["before"] == seen["after"] == [[]] * 3, seen
        assert "PE 1" in results[0]["error"] and results[0]["poisoned"], results[0]
