"""Forward and backward pass of lookups from an input exchange: bits, order of calls, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bits import NUM_ITERATIONS, BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_backward_cases import (
    CASES,
    FEW,
    Case,
    Inputs,
    Model,
    columns_of,
    make_gradient,
    make_inputs,
    sparse_problem,
)
from embedding_cases import Case as Shape, Placed, split_of
from embedding_lookups_cases import brought, exchange, make_exchange, of_own_samples
from graphs import NUM_INPUTS, Call, GraphSuite
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR

# ---- expected results ------------------------------------------------------------------------------------------------


def _pool_global_batch(case: Case, tables: Sequence[torch.Tensor], inputs: Inputs) -> torch.Tensor:
    indices, offsets, factors = (None if each is None else each.to(po.device()) for each in inputs[1:])
    assert indices is not None
    world = po.world_size()
    with torch.no_grad():
        return po.embedding_all_to_all(
            tables,
            indices,
            offsets,
            factors,
            pooling=case.shape.pooling,
            batch_per_rank=split_of(case.shape, world),
            dim_per_rank=columns_of(case, world),
            dtype=case.shape.dtype,
            wire_dtype=case.shape.wire,
            bounds="ignore",
        )


# ---- bits ------------------------------------------------------------------------------------------------------------


def _of_weights(
    case: Case, iteration: int, weights: torch.Tensor | None, of_owners: Mapping[int, torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradient of this PE's weights and the expected gradient, if there are weights."""
    wanted = of_own_samples(case, iteration, lambda owner: of_owners.get(owner))
    if weights is None or weights.grad is None or wanted is None:
        assert not case.shape.is_weighted
        return []
    return [(weights.grad, wanted)]


class _Steps(Trial):
    """A training. The next batch arrives between the forward and the backward pass of a batch."""

    held: ClassVar[Sequence[int]] = ()

    def __init__(self, case: Case) -> None:
        self._case = case
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._inputs = make_exchange(case)
        self._arriving: tuple[int, po.Lookups] | None = None
        self._begin()

    def _begin(self) -> None:
        """Make this PE's tables, and the models of all PEs' tables if the weights of lookups have gradients."""
        case, rank, world = self._case, po.rank(), po.world_size()
        tables = [table.to(po.device(), copy=True) for table in make_inputs(case, rank, world, 0).tables]
        self._tables = [tables[0]] * 2 if case.shape.same_table else tables
        self._optimizer = po.EmbeddingOptimizer(self._tables, case.optimizer, lr=0.1, **dict(case.options))
        self._optimizer.gradient_scale.fill_(case.scale)
        self._models = {pe: Model(case, pe, world) for pe in range(world) if pe == rank or case.shape.is_weighted}
        self._model = self._models[rank]

    def ways(self, turn: int) -> Sequence[Hashable]:
        return (0,)

    def _lookups(self, iteration: int) -> po.Lookups:
        if self._arriving is None:
            return exchange(self._inputs, self._case, iteration, gives_gradients=True)
        number, lookups = self._arriving
        assert number == iteration
        return lookups

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        if turn and iteration == 0:
            self._begin()
        case, rank, world = self._case, po.rank(), po.world_size()
        split, placed, lr = split_of(case.shape, world), Placed(case.shape, world), 0.1 / (1 + iteration)
        self._optimizer.lr.fill_(lr)
        with self._lookups(iteration) as lookups:
            weights = lookups.per_sample_weights
            wanted = _pool_global_batch(case, self._tables, make_inputs(case, rank, world, iteration))
            result = po.embedding_all_to_all(
                self._tables,
                lookups,
                pooling=case.shape.pooling,
                dim_per_rank=columns_of(case, world),
                dtype=case.shape.dtype,
                wire_dtype=case.shape.wire,
                columns=placed.columns,
                optimizer=self._optimizer,
            )
            result = placed.by_pe(result)
            after = (iteration + 1) % NUM_ITERATIONS
            self._arriving = after, exchange(self._inputs, case, after, gives_gradients=True)
            first = sum(split[:rank])
            gradient = make_gradient(case, world, iteration, 0)[first : first + split[rank]].to(po.device())
            result.backward(gradient)
        of_weights = {pe: model.step(iteration, 0, lr) for pe, model in self._models.items()}
        pairs = [(result.detach(), wanted), *zip(self._tables, self._model.tables, strict=True)]
        pairs += _of_weights(case, iteration, weights, of_weights)
        num_tensors = 1 if case.shape.same_table else len(self._tables)
        for table, states in zip(self._tables[:num_tensors], self._model.states, strict=False):
            pairs += zip(self._optimizer.state(table), states, strict=True)
        problems = [f"tensor {n}: {found}" for n, pair in enumerate(pairs) if (found := difference(*pair))]
        return Outcome([tensor.clone() for tensor, _ in pairs], problems[0] if problems else None)

    def close(self) -> None:
        assert self._arriving is not None
        with self._arriving[1]:
            pass
        OPERATOR.tune(po.runtime.world.current(), None)


_SHARED = Shape("shared by sources", same_table=True, rows=5, max_pooling=40, batch=lambda world: [9, 2, 7, 4][:world])
_ONE_SHARED = dataclasses.replace(_SHARED, name="weighted, shared by sources", is_weighted=True, dtype=torch.bfloat16)
_MORE = [
    Case("adagrad, a table of two slots", _SHARED, "adagrad"),
    Case("rowwise, weights of a table of two slots", _ONE_SHARED, "rowwise_adagrad"),
]


_NAMES = (
    "no samples",
    "empty bags only",
    "same table twice",
    "int32 both",
    "uneven",
    "mixed and odd widths",
    "mean",
    "weighted",
    "skipped",
)
_CASES = [case for case in CASES if any(name in case.name for name in _NAMES)] + _MORE


class TestBits(BitsSuite):
    trial = _Steps
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, _CASES),
        "2": CaseWorld(2, _CASES),
        "3": CaseWorld(3, FEW + _MORE),
        "4": CaseWorld(4, _CASES),
        "3-staged": CaseWorld(3, _CASES, {"transport": "staged"}),
        "2-wg4": CaseWorld(2, _CASES, {"host_options": {"wg_size": 4}}),
    }


class _Sparse(_Steps):
    """The same without an optimizer: tables stay unchanged and get sparse gradients."""

    def _begin(self) -> None:
        super()._begin()
        for table in self._tables:
            table.requires_grad_()

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        case, rank, world = self._case, po.rank(), po.world_size()
        split = split_of(case.shape, world)
        with self._lookups(iteration) as lookups:
            weights = lookups.per_sample_weights
            result = po.embedding_all_to_all(
                self._tables,
                lookups,
                pooling=case.shape.pooling,
                dim_per_rank=columns_of(case, world),
                dtype=case.shape.dtype,
                wire_dtype=case.shape.wire,
                requires_grad=not self._tables,
            )
            after = (iteration + 1) % NUM_ITERATIONS
            self._arriving = after, exchange(self._inputs, case, after, gives_gradients=True)
            first = sum(split[:rank])
            for table in self._tables:
                table.grad = None
            result.backward(make_gradient(case, world, iteration, 0)[first : first + split[rank]].to(po.device()))
        found = {pe: model.gradients(iteration, 0) for pe, model in self._models.items()}
        tables = self._tables[:1] if case.shape.same_table else self._tables
        problems = [
            sparse_problem(table, table.grad, sums) for table, sums in zip(tables, found[rank].sums, strict=True)
        ]
        of_owners = {pe: gradients.factors for pe, gradients in found.items()}
        problems += [difference(*pair) for pair in _of_weights(case, iteration, weights, of_owners)]
        gradients = [table.grad.values().clone() for table in tables if table.grad is not None]
        return Outcome(gradients, next(filter(None, problems), None))


_OF_SPARSE = ("same table twice", "int32 both", "mixed and odd widths", "mean", "weighted", "skipped entries")
_SPARSE = [
    dataclasses.replace(case, scale=1.0)
    for case in (*CASES, *_MORE)
    if any(name in case.name for name in _OF_SPARSE) or case in _MORE
]


class TestSparseBits(BitsSuite):
    trial = _Sparse
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, _SPARSE),
        "2": CaseWorld(2, _SPARSE),
        "3-staged": CaseWorld(3, _SPARSE, {"transport": "staged"}),
    }


# ---- the order of calls ----------------------------------------------------------------------------------------------

_PLAIN = Case("order of calls", Shape("plain", batch=lambda world: [5, 2, 8, 3][:world], is_weighted=True))


def _tables_of(case: Case) -> list[torch.Tensor]:
    return [table.to(po.device(), copy=True) for table in make_inputs(case, po.rank(), po.world_size(), 0).tables]


def _of_no_room() -> list[str]:
    """A batch that does not fit arrives in larger regions, while another batch is between its two passes."""
    case, rank, world = _PLAIN, po.rank(), po.world_size()
    inputs = make_exchange(case, lookups_per_sample=0.5)
    tables = _tables_of(case)
    optimizer = po.EmbeddingOptimizer(tables, lr=0.1)
    model = Model(case, rank, world)
    problems = []
    first = sum(split_of(case.shape, world)[:rank])
    arriving, had = exchange(inputs, case, 0), inputs.capacity
    for iteration in range(3):
        with arriving as lookups:
            wanted = _pool_global_batch(case, tables, make_inputs(case, rank, world, iteration))
            result = po.embedding_all_to_all(tables, lookups, optimizer=optimizer)
            arriving = exchange(inputs, case, iteration + 1)
            arriving.wait()
            gradient = make_gradient(case, world, iteration, 0)[first : first + len(result)]
            result.backward(gradient.to(po.device()))
        model.step(iteration, 0, 0.1)
        pairs = [(result.detach(), wanted), *zip(tables, model.tables, strict=True)]
        problems += [found for pair in pairs if (found := difference(*pair))]
    arriving.release()
    po.check()
    return problems if inputs.capacity != had else ["there was room"]


@pytest.mark.parametrize("world", [1, 3])
def test_more_room_between_the_passes_of_a_batch(backend: str, world: int) -> None:
    assert in_world(_of_no_room, world, backend) == [[]] * world


def _out_of_order() -> list[Any]:
    """Lookups that have not arrived or are released are refused. Nothing is launched. The next calls are right."""
    case, rank, world = _PLAIN, po.rank(), po.world_size()
    inputs, tables = make_exchange(case), _tables_of(case)
    optimizer = po.EmbeddingOptimizer(tables, lr=0.1)
    first = sum(split_of(case.shape, world)[:rank])

    def pool(lookups: po.Lookups) -> torch.Tensor:
        return po.embedding_all_to_all(tables, lookups, optimizer=optimizer)

    lookups = exchange(inputs, case, 0)
    told = [error_of(lambda: pool(lookups))]
    with lookups:
        result = pool(lookups)
    gradient = make_gradient(case, world, 0, 0)[first : first + len(result)].to(po.device())
    told += [error_of(lambda: result.backward(gradient)), error_of(lambda: pool(lookups))]
    unchanged = all(map(torch.equal, tables, _tables_of(case)))
    with exchange(inputs, case, 0) as again:
        pool(again).backward(gradient)
    model = Model(case, rank, world)
    model.step(0, 0, 0.1)
    right = [difference(*pair) for pair in zip(tables, model.tables, strict=True)]
    before = exchange(inputs, case, 0)
    before.wait()
    po.recover()
    told.append(error_of(lambda: pool(before)))
    po.check()
    return [[name for name, _, _ in told], [text for _, text, _ in told], unchanged, right]


@pytest.mark.parametrize("world", [1, 2])
def test_lookups_that_are_not_here(backend: str, world: int) -> None:
    for names, texts, unchanged, right in in_world(_out_of_order, world, backend):
        assert names == ["RuntimeError"] * 3 + ["PeerTimeoutError"]
        assert [text in told for text, told in zip(("wait()", "release()", "release()"), texts, strict=False)] == [
            True
        ] * 3
        assert unchanged and right == [None, None]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _graph_call(case: Case, way: str) -> Call:
    """The exchange, and a forward pass of its lookups. Buffers are larger than the lookups."""
    rank, world = po.rank(), po.world_size()
    inputs, tables = make_exchange(case, bounds="ignore"), _tables_of(case)
    split, dims = split_of(case.shape, world), columns_of(case, world)
    given, wants = [], []
    for turn in range(NUM_INPUTS):
        values, offsets, _ = brought(case, turn)
        buffer = torch.zeros((len(offsets) - 1) * case.shape.max_pooling, dtype=values.dtype)
        buffer[: len(values)] = values
        given.append([buffer, offsets])
        wants.append([_pool_global_batch(case, tables, make_inputs(case, rank, world, turn)).cpu()])

    def act(values: torch.Tensor, offsets: torch.Tensor, *, way: str) -> torch.Tensor:
        with torch.no_grad(), inputs.exchange(values, offsets=offsets, batch_per_rank=split) as lookups:
            return po.embedding_all_to_all(
                tables, lookups, pooling=case.shape.pooling, dim_per_rank=dims, dtype=case.dtype, schedule=way
            )

    return Call(case.name, way, act, given, wants)


class TestGraphs(GraphSuite):
    operator = "embedding_inputs"  # the first operator of a call
    cases = tuple(
        Case(f"graphs of {shape.name}", shape)
        for shape in (
            Shape("lookups", batch=lambda world: 11),
            Shape("means", dims=lambda rank: (16,) * (rank % 2), pooling="mean"),
            Shape("int32 lookups", index_dtype=torch.int32, offset_dtype=torch.int32, dtype=torch.bfloat16),
        )
    )
    ways = ("communication_aware", "oblivious")
    growing: ClassVar = [
        Case(f"lookups, batch of {n}", Shape(f"lookups, batch of {n}", batch=lambda world, n=n: n))
        for n in (3, 30, 300, 9)
    ]
    heap_bytes = 64 << 20

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        return _graph_call(case, way)

    @classmethod
    def more_calls(cls) -> list[Call]:
        return [_graph_call(cls.cases[0], "communication_aware")]


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refused() -> dict[str, tuple[str, str]]:
    case = _PLAIN
    inputs, tables = make_exchange(case), _tables_of(case)
    values, offsets, weights = brought(case, 0)
    assert weights is not None
    seen = {}
    with inputs.exchange(values, offsets=offsets, per_sample_weights=weights) as unknown:
        seen["no split"] = error_of(lambda: po.embedding_all_to_all(tables, unknown))[:2]
    with exchange(inputs, case, 0) as lookups:
        calls: dict[str, Callable[[], Any]] = {
            "offsets": lambda: po.embedding_all_to_all(tables, lookups, offsets),
            "weights": lambda: po.embedding_all_to_all(tables, lookups, None, weights),
            "another split": lambda: po.embedding_all_to_all(tables, lookups, batch_per_rank=[3]),
            "a table too many": lambda: po.embedding_all_to_all([*tables, tables[0]], lookups),
            "fewer rows": lambda: po.embedding_all_to_all([tables[0], tables[1][:-1]], lookups),
            "no tables": lambda: po.embedding_all_to_all(3, lookups),  # type: ignore[arg-type]
            "a mean": lambda: po.embedding_all_to_all(tables, lookups, pooling="mean"),
            "no offsets": lambda: po.embedding_all_to_all(tables, values),
        }
        seen |= {name: error_of(call)[:2] for name, call in calls.items()}
        out = po.empty(split_of(case.shape, 1)[0], sum(columns_of(case, 1)))
        with torch.no_grad():
            into = po.embedding_all_to_all(tables, lookups, out=out)
        wanted = _pool_global_batch(case, tables, make_inputs(case, 0, 1, 0))
        seen["out"] = (str(into is out), difference(out, wanted) or "")
    po.check()
    return seen


def test_what_is_refused() -> None:
    (seen,) = in_world(_refused, 1, "host")
    told = {
        "no split": ("ValueError", "batch_per_rank"),
        "offsets": ("ValueError", "offsets"),
        "weights": ("ValueError", "per_sample_weights"),
        "another split": ("ValueError", "batch_per_rank"),
        "a table too many": ("ValueError", "slots"),
        "fewer rows": ("ValueError", "slots"),
        "no tables": ("TypeError", "weights"),
        "a mean": ("ValueError", "per_sample_weights"),
        "no offsets": ("TypeError", "offsets"),
    }
    assert seen.pop("out") == ("True", "")
    assert seen.keys() == told.keys()
    for name, (error, text) in told.items():
        assert seen[name][0] == error and text in seen[name][1], f"{name}: {seen[name]}"
