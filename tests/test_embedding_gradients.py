"""Gradients of embedding tables without a step: exact bits, against torch, in graphs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_backward_cases import CASES, Case, Model, make_gradient, make_inputs
from graphs import Graph
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding_backward_plan import OPERATOR
from persistent_ops.ops.embedding_gradients import DenseGradients, dense_gradients, dense_size

# ---- of all rows -----------------------------------------------------------------------------------------------------


class _Dense:
    """Calls on samples that are all this PE's own: each PE has those of a world of one, at another iteration."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tables = [table.to(po.device()) for table in make_inputs(case, 0, 1, 0).tables]
        self.tables = [tables[0]] * 2 if case.shape.same_table else tables
        self._model = Model(case, 0, 1)

    def arguments(self, iteration: int) -> tuple[Any, ...]:
        inputs = make_inputs(self.case, 0, 1, iteration + po.rank())
        gradient = make_gradient(self.case, 1, iteration + po.rank(), 0)
        given = (gradient, self.tables, inputs.indices, inputs.offsets, inputs.factors)
        return tuple(each.to(po.device()) if isinstance(each, torch.Tensor) else each for each in given)

    def call(self, arguments: tuple[Any, ...], **options: Any) -> DenseGradients:
        scale = None if self.case.scale == 1.0 else torch.full((1,), self.case.scale, device=po.device())
        return dense_gradients(*arguments, mode=self.case.shape.mode, scale=scale, wants_factors=True, **options)

    def problem(self, found: DenseGradients, iteration: int) -> str | None:
        wanted = self._model.gradients(iteration + po.rank(), 0)
        pairs = []
        for number, (sums, touched) in enumerate(zip(found.sums, found.touched, strict=True)):
            rows, values = wanted.sums[0 if self.case.shape.same_table else number]
            pairs.append((sums, torch.zeros(sums.shape).index_copy_(0, rows, values)))
            pairs.append((touched, torch.zeros(touched.shape).index_fill_(0, rows, 1.0)))
        if wanted.factors is not None:
            assert found.factors is not None
            pairs.append((found.factors, wanted.factors))
        return next((problem for pair in pairs if (problem := difference(*pair))), None)


class _DenseTrial(Trial):
    """Sums of all rows, in memory that is allocated and in memory that is given."""

    def __init__(self, case: Case) -> None:
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._calls = _Dense(case)
        self._memory = torch.empty(dense_size(self._calls.tables), device=po.device())

    def ways(self, turn: int) -> Sequence[Hashable]:
        return ("allocated", "given")

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        memory = self._memory.fill_(7.0) if way == "given" else None
        found = self._calls.call(self._calls.arguments(iteration), memory=memory)
        problem = self._calls.problem(found, iteration)
        if way == "given" and found.memory is not self._memory:
            problem = "other memory than was given"
        outputs = [found.memory.clone(), *([] if found.factors is None else [found.factors])]
        return Outcome(outputs, problem)

    def close(self) -> None:
        OPERATOR.tune(po.runtime.world.current(), None)


_SHAPES = (
    "one row",
    "same table twice",
    "no samples",
    "empty bags",
    "every row shape",
    "mixed and odd",
    "mean",
    "weighted",
)
_OTHERS = ("skipped", "L2", "wide", "chunk", "lanes", "one work-group")
_DENSE = [case for case in CASES if any(name in case.name for name in (*_SHAPES, *_OTHERS))]


class TestDenseBits(BitsSuite):
    trial = _DenseTrial
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, _DENSE),
        "3": CaseWorld(3, _DENSE),
        "2-wg4": CaseWorld(2, _DENSE, {"host_options": {"wg_size": 4}}),
    }


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _dense_replays() -> list[str]:
    """A graph whose buffers have other lookups at every replay, on one PE more often than on the others."""
    calls = _Dense(_case("adam, weighted, decay"))
    given = [calls.arguments(iteration) for iteration in range(5)]
    most = max(len(indices) for _, _, indices, _, _ in given)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(most - len(tensor))])

    def buffers(iteration: int) -> tuple[Any, ...]:
        gradient, tables, indices, offsets, factors = given[iteration]
        return gradient, tables, padded(indices), offsets, padded(factors)

    own = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in buffers(0))
    calls.call(own)
    graph = Graph(lambda: calls.call(own))
    problems = []
    for turn in range(11 + 2 * po.rank()):
        for buffer, new in zip(own, buffers(turn % 5), strict=True):
            if isinstance(buffer, torch.Tensor):
                buffer.copy_(new)
        found = graph.replay()
        count = len(given[turn % 5][2])
        problem = calls.problem(found._replace(factors=found.factors[:count]), turn % 5)
        problems += [] if problem is None else [f"turn {turn}: {problem}"]
    po.check()
    return problems


def test_sums_of_all_rows_in_a_graph(backend: str) -> None:
    assert in_world(_dense_replays, 2, backend) == [[]] * 2


def _dense_refusals() -> dict[str, tuple[str, str, float]]:
    calls = _Dense(_case("sgd"))
    gradient, tables, *lookups = calls.arguments(0)
    size = dense_size(tables)
    memory = torch.empty(size + 1, device=po.device())
    wrong: dict[str, Callable[[], Any]] = {
        "columns": lambda: dense_gradients(gradient[:, 1:], tables, *lookups),
        "dtype": lambda: dense_gradients(gradient.half(), tables, *lookups),
        "tables": lambda: dense_gradients(gradient, [tables[0].t(), *tables[1:]], *lookups),
        "mode": lambda: dense_gradients(gradient, tables, *lookups, mode="max"),
        "size": lambda: dense_gradients(gradient, tables, *lookups, memory=memory),
        "address": lambda: dense_gradients(gradient, tables, *lookups, memory=memory[1:]),
        "offsets": lambda: dense_gradients(gradient[1:], tables, *lookups),
        "capture": lambda: Graph(lambda: dense_gradients(gradient, tables, *lookups)),
    }
    return {name: error_of(act) for name, act in wrong.items()}


def test_what_sums_of_all_rows_refuse(backend: str) -> None:
    (seen,) = in_world(_dense_refusals, 1, backend)
    told = {
        "columns": ("ValueError", "gradient"),
        "dtype": ("TypeError", "gradient"),
        "tables": ("ValueError", "weights[0]"),
        "mode": ("ValueError", "mode"),
        "size": ("ValueError", "memory"),
        "address": ("ValueError", "memory"),
        "offsets": ("ValueError", "offsets"),
        "capture": ("RuntimeError", "first call"),
    }
    assert seen.keys() == told.keys()
    for name, (error, text) in told.items():
        assert seen[name][0] == error and text in seen[name][1], f"{name}: {seen[name]}"
