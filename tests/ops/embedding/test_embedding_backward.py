"""The backward pass of embedding_all_to_all: exact bits of updated tables and states, and comparison with torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_backward_cases import CASES, FEW, Case, Model, columns_of, make_gradient, make_inputs
from embedding_cases import Case as Shape, Placed, split_of
from graphs import Graph
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR

# ---- bits ------------------------------------------------------------------------------------------------------------


class BackwardTrial(Trial):
    """Tables that are updated from turn to turn. The last turn begins with the initial tables."""

    held: ClassVar[Sequence[int]] = ()

    def __init__(self, case: Case) -> None:
        self._case = case
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._begin()

    def _begin(self) -> None:
        case, rank, world = self._case, po.rank(), po.world_size()
        tables = [table.to(po.device(), copy=True) for table in make_inputs(case, rank, world, 0).tables]
        self._tables = [tables[0]] * 2 if case.shape.same_table else tables
        self._optimizer = po.EmbeddingOptimizer(self._tables, case.optimizer, lr=0.1, **dict(case.options))
        self._optimizer.gradient_scale.fill_(case.scale)
        self._model = Model(case, rank, world)

    def ways(self, turn: int) -> Sequence[Hashable]:
        return (0,)

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        if turn and iteration == 0:
            self._begin()
        case, rank, world = self._case, po.rank(), po.world_size()
        shape, split, placed = case.shape, split_of(case.shape, world), Placed(case.shape, world)
        lr = 0.1 / (1 + iteration)
        self._optimizer.lr.fill_(lr)
        inputs = make_inputs(case, rank, world, iteration)
        indices, offsets = inputs.indices.to(po.device()), inputs.offsets.to(po.device())
        factors = None if inputs.factors is None else inputs.factors.to(po.device(), copy=True).requires_grad_()
        result = po.embedding_all_to_all(
            self._tables,
            indices,
            offsets,
            factors,
            pooling=shape.pooling,
            batch_per_rank=split,
            dim_per_rank=columns_of(case, world),
            dtype=shape.dtype,
            wire_dtype=shape.wire,
            bounds="ignore",
            columns=placed.columns,
            optimizer=self._optimizer,
        )
        result = placed.by_pe(result)
        first = sum(split[:rank])
        gradient = make_gradient(case, world, iteration, 0)[first : first + split[rank]].to(po.device())
        result.backward(_as_it_may_lie(gradient, turn % 4))
        wanted = self._model.step(iteration, 0, lr)
        found = None
        pairs = [*zip(self._tables, self._model.tables, strict=True)]
        for table, states in zip(self._tables, self._model.states, strict=True):
            pairs += zip(self._optimizer.state(table), states, strict=True)
        if factors is not None:
            assert factors.grad is not None and wanted is not None
            pairs.append((factors.grad, wanted))
        for number, (tensor, want) in enumerate(pairs):
            found = found or ((problem := difference(tensor, want)) and f"tensor {number}: {problem}")
        outputs = [tensor.detach().clone() for tensor, _ in pairs]
        return Outcome(outputs, found)


def _as_it_may_lie(gradient: torch.Tensor, way: int) -> torch.Tensor:
    if way == 1:  # at any address
        return torch.cat([gradient.flatten()[:1], gradient.flatten()])[1:].view(gradient.shape)
    if way == 2:  # among others' columns, as torch.cat returns it
        before = gradient.new_full((len(gradient), 16), math.nan)
        behind = before[:, : -gradient.shape[1] % 8]
        return torch.cat([before, gradient, behind], 1)[:, 16 : 16 + gradient.shape[1]]
    if way == 3:  # column by column
        return gradient.t().contiguous().t()
    return gradient


class TestBits(BitsSuite):
    trial = BackwardTrial
    halved_by = torch.float32
    heap_bytes = 64 << 20
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, FEW),
        "4": CaseWorld(4, CASES),
        "3-staged": CaseWorld(3, FEW, {"transport": "staged"}),
        "2-wg4": CaseWorld(2, FEW, {"host_options": {"wg_size": 4}}),
    }


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _replayed(optimizer: str, rounding: str) -> list[str]:
    """Replay both passes, under schedules of rate and gradient scale; return what is wrong with tables and states."""
    rank, world = po.rank(), po.world_size()
    shape = Shape("replayed", dims=lambda rank: (16, 8), batch=lambda world: 13, dtype=torch.bfloat16)
    case = Case(f"replayed {optimizer}", shape, optimizer, (("rounding", rounding), ("seed", 3)))
    split = split_of(shape, world)
    inputs = make_inputs(case, rank, world, 0)
    tables = [table.to(po.device(), copy=True) for table in inputs.tables]
    indices, offsets = inputs.indices.to(po.device()), inputs.offsets.to(po.device())
    first = sum(split[:rank])
    gradient = make_gradient(case, world, 0, 0)[first : first + split[rank]].to(po.device())
    made = po.EmbeddingOptimizer(tables, optimizer, lr=0.1, **dict(case.options))

    def step() -> None:
        po.embedding_all_to_all(tables, indices, offsets, batch_per_rank=split, optimizer=made).backward(gradient)

    step()
    po.check()
    graph = Graph(step)
    for table, begin in zip(tables, inputs.tables, strict=True):
        table.copy_(begin)
        for state in made.state(table):
            state.zero_()
    made.loaded(0)
    model = Model(case, rank, world)
    for turn in range(7):
        made.lr.fill_(0.1 / (1 + turn))
        made.gradient_scale.fill_(2.0 ** -(turn % 3))
        graph.replay()
        model.rescale(2.0 ** -(turn % 3))
        model.step(0, 0, 0.1 / (1 + turn))
    po.check()
    pairs = [*zip(tables, model.tables, strict=True)]
    for table, states in zip(tables, model.states, strict=True):
        pairs += zip(made.state(table), states, strict=True)
    return [problem for pair in pairs if (problem := difference(*pair))]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_replays_have_steps_and_rates_of_their_own(backend: str, optimizer: str, rounding: str) -> None:
    assert in_world(_replayed, 2, backend, optimizer, rounding) == [[]] * 2


# ---- against torch ---------------------------------------------------------------------------------------------------


def _against_torch(optimizer: str, is_whole: bool) -> list[str]:
    """Make ten steps, also in one process with embedding_bag and torch.optim; return what differs too much."""
    rank, world = po.rank(), po.world_size()
    shape = Shape("torch", dims=lambda rank: (16, 8), batch=lambda world: 12)
    case = Case(f"torch {optimizer}", shape, optimizer)
    tables = make_inputs(case, rank, world, 0).tables
    if is_whole:
        tables = [table.mul(8).round() for table in tables]
    own = [table.to(po.device(), copy=True) for table in tables]
    wanted = [table.clone().requires_grad_() for table in tables]
    made = po.EmbeddingOptimizer(own, optimizer, lr=0.5)
    options = {} if optimizer == "sgd" else {"eps": 1e-8}
    of_torch = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer](wanted, lr=0.5, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(of_torch, 0.5 if is_whole else 0.9)]
    split = split_of(shape, world)
    batch, first = sum(split), sum(split[:rank])
    for step in range(10):
        inputs = make_inputs(case, rank, world, step % 5)
        gradient = make_gradient(case, world, step % 5, step)
        gradient = gradient.mul(4).round() if is_whole else gradient
        made.lr.fill_(of_torch.param_groups[0]["lr"])
        arguments = (own, inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
        result = po.embedding_all_to_all(*arguments, batch_per_rank=split, optimizer=made)
        result.backward(gradient[first : first + split[rank]].to(po.device()))
        of_torch.zero_grad()
        columns = []
        for number, table in enumerate(wanted):
            bounds = inputs.offsets[number * batch : (number + 1) * batch + 1]
            chosen = inputs.indices[bounds[0] : bounds[-1]]
            bag = torch.nn.functional.embedding_bag
            columns.append(bag(chosen, table, bounds - bounds[0], mode="sum", include_last_offset=True))
        begin = sum(columns_of(case, world)[:rank])
        pooled = torch.cat(columns, 1)
        pooled.backward(gradient[:, begin : begin + pooled.shape[1]])
        of_torch.step()
        for scheduler in schedulers:
            scheduler.step()
    po.check()
    tolerance = 0.0 if is_whole else 1e-5
    errors = [float((a.cpu() - b.detach()).abs().max()) for a, b in zip(own, wanted, strict=True)]
    return [f"table {number}: {error}" for number, error in enumerate(errors) if not error <= tolerance]


@pytest.mark.parametrize(("optimizer", "is_whole"), [("sgd", True), ("sgd", False), ("adagrad", False)])
@pytest.mark.parametrize("world", [1, 3])
def test_ten_steps_are_those_of_one_process(backend: str, optimizer: str, is_whole: bool, world: int) -> None:
    assert in_world(_against_torch, world, backend, optimizer, is_whole) == [[]] * world


def _with_decay(optimizer: str, mode: str, max_norm: float | None) -> list[float]:
    """Six steps with weight decay, torch's optimizers and renorm, with all rows looked up in each step; return where
    they differ.

    All columns of a row have the same number, so row-wise Adagrad's mean of squares is the square of each number.
    """
    rate, decay, rows, batch = 0.3, 0.2, 9, 11
    drawer = torch.Generator().manual_seed(5)
    begin = torch.randn(rows, 1, generator=drawer).expand(rows, 8)
    own, wanted = begin.to(po.device(), copy=True), begin.clone().requires_grad_()
    modes = {} if optimizer == "adam" else {"weight_decay_mode": mode, "max_norm": max_norm}
    made = po.EmbeddingOptimizer([own], optimizer, lr=rate, weight_decay=decay, **modes)
    if optimizer == "adam":
        of_torch: torch.optim.Optimizer = torch.optim.AdamW([wanted], lr=rate, eps=1e-8, weight_decay=decay)
    else:
        of_torch = torch.optim.Adagrad([wanted], lr=rate, eps=1e-8, weight_decay=decay * (mode == "l2"))
    errors, shrunk = [], list[bool]()
    for _ in range(6):
        indices = torch.cat([torch.randperm(rows, generator=drawer), torch.randint(rows, (13,), generator=drawer)])
        offsets = torch.tensor([0, *sorted(torch.randint(23, (batch - 1,), generator=drawer).tolist()), len(indices)])
        gradient = torch.randn(batch, 1, generator=drawer).expand(batch, 8).contiguous()
        given = (indices.to(po.device()), offsets.to(po.device()))
        po.embedding_all_to_all([own], *given, optimizer=made).backward(gradient.to(po.device()))
        of_torch.zero_grad()
        bags = torch.nn.functional.embedding_bag(indices, wanted, offsets, mode="sum", include_last_offset=True)
        bags.backward(gradient)
        if mode == "decoupled":
            with torch.no_grad():
                wanted.mul_(1 - rate * decay)
        of_torch.step()
        if max_norm is not None:
            shrunk += (wanted.detach().norm(dim=1) > max_norm).tolist()
            with torch.no_grad():
                wanted.copy_(wanted.renorm(2, 0, max_norm))
        errors.append(float((own.cpu() - wanted.detach()).abs().max()))
    po.check()
    assert max_norm is None or 0 < sum(shrunk) < len(shrunk)
    return [error for error in errors if not error < 1e-5]


@pytest.mark.parametrize(
    ("optimizer", "mode", "max_norm"),
    [
        ("adam", "", None),
        ("rowwise_adagrad", "l2", None),
        ("rowwise_adagrad", "decoupled", None),
        ("rowwise_adagrad", "decoupled", 2.0),
    ],
)
def test_weight_decay_and_norms_are_those_of_torch(
    backend: str, optimizer: str, mode: str, max_norm: float | None
) -> None:
    assert in_world(_with_decay, 1, backend, optimizer, mode, max_norm) == [[]]


# ---- values that are not finite --------------------------------------------------------------------------------------


def _infinite_weight(dim: int, dtype: torch.dtype) -> list[float]:
    """Train a row whose lookup has an infinite weight, and a row with a finite one; return the states of both."""
    rank, device = po.rank(), po.device()
    table = torch.ones(4, dim, dtype=dtype, device=device)
    weights = torch.tensor([torch.inf, 2.0], device=device)
    indices, offsets = torch.tensor([1, 2], device=device), torch.arange(3, device=device)
    tables = [table] if rank == 0 else []
    optimizer = po.EmbeddingOptimizer(tables, "rowwise_adagrad", lr=0.5)
    batch = [2] + [0] * (po.world_size() - 1)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    given = (indices, offsets, weights) if rank == 0 else (empty, offsets[:1], weights[:0])
    dims = [dim] + [0] * (po.world_size() - 1)
    result = po.embedding_all_to_all(
        tables, *given, batch_per_rank=batch, dim_per_rank=dims, dtype=dtype, optimizer=optimizer
    )
    result.backward(torch.full_like(result, 0.5))
    po.check()
    return optimizer.state(table)[0].flatten()[1:3].tolist() if rank == 0 else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 24, 96, 100, 250])
def test_a_row_of_an_infinite_weight_has_an_infinite_state(backend: str, dim: int, dtype: torch.dtype) -> None:
    """Also where lanes have chunks after the row's end, whose zeros would lead to NaN."""
    assert in_world(_infinite_weight, 2, backend, dim, dtype) == [[torch.inf, 1.0], []]
