"""Gradients of embedding tables without a step: exact bits, against torch, in graphs, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_backward_cases import CASES, Case, Model, columns_of, make_gradient, make_inputs, sparse_problem
from embedding_cases import Case as Shape, split_of
from graphs import Graph
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR
from persistent_ops.ops.embedding.gradients import DenseGradients, dense_gradients, dense_size

# ---- of all rows -----------------------------------------------------------------------------------------------------


class _Dense:
    """Calls on samples that are all this PE's own: each PE makes a one-PE world's calls, at another iteration."""

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
        return dense_gradients(*arguments, pooling=self.case.shape.pooling, scale=scale, wants_factors=True, **options)

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
    """Sums of all rows, in newly allocated memory and in memory that the caller passes."""

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
_DENSE = [case for case in CASES if any(name in case.name for name in (*_SHAPES, *_OTHERS)) and case.shape.wire is None]


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
    """A graph whose buffers have other lookups at every replay. A higher rank replays more often."""
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
        "pooling": lambda: dense_gradients(gradient, tables, *lookups, pooling="max"),
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
        "pooling": ("ValueError", "pooling"),
        "size": ("ValueError", "memory"),
        "address": ("ValueError", "memory"),
        "offsets": ("ValueError", "offsets"),
        "capture": ("RuntimeError", "first call"),
    }
    assert seen.keys() == told.keys()
    for name, (error, text) in told.items():
        assert seen[name][0] == error and text in seen[name][1], f"{name}: {seen[name]}"


# ---- of the looked-up rows -------------------------------------------------------------------------------------------


def _leaves(case: Case) -> list[torch.Tensor]:
    tables = [table.to(po.device(), copy=True).requires_grad_() for table in make_inputs(case, po.rank(), 1, 0).tables]
    return [tables[0]] * 2 if case.shape.same_table else tables


def _own_part(case: Case, iteration: int) -> torch.Tensor:
    """Return the gradient of this PE's samples."""
    split = split_of(case.shape, po.world_size())
    first = sum(split[: po.rank()])
    return make_gradient(case, po.world_size(), iteration, 0)[first : first + split[po.rank()]].to(po.device())


def _pool(case: Case, tables: Sequence[torch.Tensor], iteration: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Call the operator; return its result and the factors, which require a gradient."""
    world = po.world_size()
    inputs = make_inputs(case, po.rank(), world, iteration)
    factors = None if inputs.factors is None else inputs.factors.to(po.device(), copy=True).requires_grad_()
    result = po.embedding_all_to_all(
        tables,
        inputs.indices.to(po.device()),
        inputs.offsets.to(po.device()),
        factors,
        pooling=case.shape.pooling,
        batch_per_rank=split_of(case.shape, world),
        dim_per_rank=columns_of(case, world),
        dtype=case.dtype,
        wire_dtype=case.shape.wire,
        bounds="ignore",
        requires_grad=not tables,
        **options,
    )
    return result, factors


class _SparseTrial(Trial):
    """Sparse gradients of tables, and gradients of per-sample weights."""

    def __init__(self, case: Case) -> None:
        self._case = case
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._tables = _leaves(case)
        self._model = Model(case, po.rank(), po.world_size())

    def ways(self, turn: int) -> Sequence[Hashable]:
        return (0,)

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        result, factors = _pool(self._case, self._tables, iteration)
        for table in self._tables:
            table.grad = None
        result.backward(_own_part(self._case, iteration))
        wanted = self._model.gradients(iteration, 0)
        tables = self._tables[:1] if self._case.shape.same_table else self._tables
        found = (
            sparse_problem(table, table.grad, of_table) for table, of_table in zip(tables, wanted.sums, strict=True)
        )
        problem = next((each for each in found if each), None)
        if factors is not None:
            assert factors.grad is not None and wanted.factors is not None
            problem = problem or difference(factors.grad, wanted.factors)
        gradients = [table.grad.values().clone() for table in tables if table.grad is not None]
        return Outcome([*gradients, *([] if factors is None else [factors.grad])], problem)

    def close(self) -> None:
        OPERATOR.tune(po.runtime.world.current(), None)


# How tables would be updated is irrelevant here.
_SPARSE = [
    *{(case.shape, case.bad, case.drawn, case.tuning): dataclasses.replace(case, scale=1.0) for case in CASES}.values()
]
_FEW_SPARSE = [case for number, case in enumerate(_SPARSE) if number % 3 == 0 or "skipped" in case.name]


class TestSparseBits(BitsSuite):
    trial = _SparseTrial
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, _FEW_SPARSE),
        "2": CaseWorld(2, _SPARSE),
        "3": CaseWorld(3, _FEW_SPARSE),
        "3-staged": CaseWorld(3, _FEW_SPARSE, {"transport": "staged"}),
        "2-wg4": CaseWorld(2, _FEW_SPARSE, {"host_options": {"wg_size": 4}}),
    }


# ---- against torch ---------------------------------------------------------------------------------------------------

_OPTIMIZERS = {"SGD": torch.optim.SGD, "SparseAdam": torch.optim.SparseAdam, "Adagrad": torch.optim.Adagrad}


def _against_torch(name: str, is_whole: bool) -> list[float]:
    """Six steps of a torch optimizer, also in one process with sparse embedding_bag; return the differences.

    The first table has two features.
    """
    rank, world = po.rank(), po.world_size()
    shape = Shape("sparse, torch", dims=lambda rank: (8, 8), batch=lambda world: 14)
    case = Case(f"sparse, torch {name}", shape, "sgd")
    begin = make_inputs(case, rank, world, 0).tables[0]
    begin = begin.mul(8).round() if is_whole else begin
    own, wanted = (torch.nn.Parameter(begin.to(device, copy=True)) for device in (po.device(), "cpu"))
    of_own, of_wanted = (_OPTIMIZERS[name]([table], lr=0.5) for table in (own, wanted))
    split = split_of(shape, world)
    batch, first = sum(split), sum(split[:rank])
    for step in range(6):
        inputs = make_inputs(case, rank, world, step)
        gradient = make_gradient(case, world, step, 0)
        gradient = gradient.mul(4).round() if is_whole else gradient
        lookups = (inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
        of_own.zero_grad()
        result = po.embedding_all_to_all([own, own], *lookups, batch_per_rank=split)
        result.backward(gradient[first : first + split[rank]].to(po.device()))
        of_own.step()
        of_wanted.zero_grad()
        columns = []
        for number in range(2):
            bounds = inputs.offsets[number * batch : (number + 1) * batch + 1]
            chosen = inputs.indices[bounds[0] : bounds[-1]]
            bag = torch.nn.functional.embedding_bag
            columns.append(bag(chosen, wanted, bounds - bounds[0], mode="sum", sparse=True, include_last_offset=True))
        of_own_tables = gradient[:, sum(columns_of(case, world)[:rank]) :][:, :16]
        torch.cat(columns, 1).backward(of_own_tables)
        of_wanted.step()
    return [float((own.detach().cpu() - wanted.detach()).abs().max())]


@pytest.mark.parametrize(
    ("name", "is_whole"), [("SGD", True), ("SGD", False), ("SparseAdam", False), ("Adagrad", False)]
)
@pytest.mark.parametrize("world", [1, 3])
def test_steps_of_torchs_optimizers(backend: str, name: str, is_whole: bool, world: int) -> None:
    tolerance = 0.0 if is_whole else 1e-5
    for errors in in_world(_against_torch, world, backend, name, is_whole):
        assert errors[0] <= tolerance


# ---- which gradients there are ---------------------------------------------------------------------------------------

_WEIGHTED = Case("which gradients", Shape("which", is_weighted=True, batch=lambda world: 9))


def _chosen() -> dict[str, Any]:
    """A table without a gradient, PEs without any gradient, two passes of one graph, and torch.autograd.grad."""
    tables = _leaves(_WEIGHTED)
    wanted = Model(_WEIGHTED, po.rank(), po.world_size()).gradients(0, 0)
    own = _own_part(_WEIGHTED, 0)
    tables[0].requires_grad_(False)
    result, factors = _pool(_WEIGHTED, tables, 0)
    result.backward(own, retain_graph=True)
    seen: dict[str, Any] = {
        "none": tables[0].grad is None,
        "one": sparse_problem(tables[1], tables[1].grad, wanted.sums[1]),
        "factors": difference(factors.grad, wanted.factors),
    }
    result.backward(own)
    assert tables[1].grad is not None
    rows, values = wanted.sums[1]
    dense = torch.zeros(tables[1].shape).index_copy_(0, rows, 2 * values)
    seen["twice"] = difference(tables[1].grad.to_dense(), dense)
    given = torch.autograd.grad(_pool(_WEIGHTED, tables, 0)[0], tables[1], own)
    seen["grad"] = sparse_problem(tables[1], given[0], wanted.sums[1])
    # PE 1 has no table that requires a gradient.
    frozen = [table.detach() for table in tables] if po.rank() else tables
    detached = [
        None if each is None else each.detach().to(po.device()) for each in make_inputs(_WEIGHTED, po.rank(), 2, 0)[1:]
    ]
    tables[1].grad = None
    split = split_of(_WEIGHTED.shape, 2)
    result = po.embedding_all_to_all(frozen, *detached, batch_per_rank=split, requires_grad=True)
    result.backward(own)
    if po.rank() == 0:
        seen["frozen elsewhere"] = sparse_problem(tables[1], tables[1].grad, wanted.sums[1])
    plain = po.embedding_all_to_all(frozen, *detached, batch_per_rank=split)
    seen["not recorded"] = plain.requires_grad == any(table.requires_grad for table in frozen)
    return seen


def test_which_tensors_get_gradients(backend: str) -> None:
    for seen in in_world(_chosen, 2, backend):
        assert seen.pop("none") is True and seen.pop("not recorded") is True
        assert not any(seen.values()), seen


def _passes_again(is_exchanged: bool) -> list[Any]:
    """Two backward passes of one forward pass, with another one's pass between them; then one whose graph is freed."""
    rank, world = po.rank(), po.world_size()
    samples = [3 + pe for pe in range(world)]
    tables = [torch.randn(7, 4, device=po.device()).requires_grad_() for _ in range(2)]
    rows = [torch.arange(2 * count, device=po.device()) % 7 for count in samples]  # of each PE, of one feature
    inputs = po.EmbeddingInputs(
        [[(0, 7)] for _ in range(world)], num_features=1, max_batch=8, lookups_per_sample=2.0, is_weighted=False
    )
    results, held = [], []
    for table in tables:
        if is_exchanged:
            lengths = torch.full((samples[rank],), 2, device=po.device())
            lookups = inputs.exchange(rows[rank], lengths=lengths, batch_per_rank=samples)
            lookups.wait()
            held.append(lookups)
            results.append(po.embedding_all_to_all([table], lookups))
        else:
            offsets = 2 * torch.arange(sum(samples) + 1, device=po.device())
            results.append(po.embedding_all_to_all([table], torch.cat(rows), offsets, batch_per_rank=samples))
    result, other = results
    gradient = torch.arange(float(result.numel()), device=po.device()).view_as(result) + 100 * rank
    (once,) = torch.autograd.grad(result, tables[0], gradient, retain_graph=True)
    other.backward(gradient)
    result.backward(2 * gradient)
    assert tables[0].grad is not None
    seen = [difference(tables[0].grad.to_dense(), 2 * once.to_dense()), bool(once.to_dense().any())]
    seen.append(error_of(lambda: result.backward(gradient))[:2])
    for lookups in held:
        lookups.release()
    return seen


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_second_backward_pass_is_as_in_torch(backend: str, is_exchanged: bool) -> None:
    """It changes nothing, so it is allowed while the graph is kept."""
    for problem, has_values, (name, text) in in_world(_passes_again, 2, backend, is_exchanged):
        assert problem is None and has_values
        assert name == "RuntimeError" and "retain_graph=True" in text, text


def _accumulated() -> list[list[list[float]]]:
    """Return the first columns of the gradients of two tables. The first pass has no lookups in the first table."""
    device, size = po.device(), po.world_size()
    tables = [torch.nn.Parameter(torch.zeros(5, 2, device=device)) for _ in range(2)]
    for rows, scale, negates in (([], 1.0, False), ([1, 3], 2.0, False), ([1], 4.0, True)):
        indices = torch.tensor(rows * size + [2] * size, device=device)
        ends = [len(rows)] * size + [1] * size
        offsets = torch.tensor([0, *ends], device=device).cumsum(0)
        out = po.embedding_all_to_all(tables, indices, offsets)
        gradient = torch.full_like(out, scale)
        out.backward(torch._neg_view(-gradient) if negates else gradient, retain_graph=True)
        out.backward(torch._efficientzerotensor(out.shape, device=device))  # type: ignore[attr-defined]
    return [table.grad.to_dense()[:, 0].tolist() for table in tables]  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_accumulated(backend: str, world: int) -> None:
    """Also onto gradients of tables without lookups. Values that torch negates or fills lazily are respected."""
    want = [[0.0, 6.0 * world, 0.0, 2.0 * world, 0.0], [0.0, 0.0, 7.0 * world, 0.0, 0.0]]
    assert in_world(_accumulated, world, backend) == [want] * world


def _sparse_refusals() -> list[tuple[str, str, float]]:
    tables = _leaves(_WEIGHTED)
    result, _ = _pool(_WEIGHTED, tables, 0)
    own = _own_part(_WEIGHTED, 0)
    out = po.empty(9, result.shape[1])[: len(result)]
    lookups = [None if each is None else each.to(po.device()) for each in make_inputs(_WEIGHTED, po.rank(), 2, 0)[1:]]
    split, dims = split_of(_WEIGHTED.shape, 2), columns_of(_WEIGHTED, 2)
    choices = {"batch_per_rank": split, "dim_per_rank": dims, "dtype": _WEIGHTED.dtype, "bounds": "ignore"}

    def both_passes() -> None:  # autograd runs a backward pass on the stream of its forward pass
        po.embedding_all_to_all(tables, *lookups, **choices).backward(own)

    found = [
        error_of(lambda: Graph(both_passes)),
        error_of(lambda: _pool(_WEIGHTED, tables, 0, out=out)),
    ]
    result.backward(own)
    with torch.no_grad():
        tables[0].add_(1.0)
    result, _ = _pool(_WEIGHTED, tables, 0)
    with torch.no_grad():
        tables[0].add_(1.0)
    return [*found, error_of(lambda: result.backward(own))]


def test_what_sparse_gradients_refuse(backend: str) -> None:
    for captured, out, changed in in_world(_sparse_refusals, 2, backend):
        assert captured[0] == "RuntimeError" and "capture" in captured[1] and "waits on the host" in captured[1]
        assert out[0] == "NotImplementedError" and out[1].startswith("out: ")
        assert changed[0] == "RuntimeError" and "tables have changed" in changed[1]
