"""Forward and backward pass of lookups where an input exchange has left them: bits, the order of calls, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from bits import NUM_ITERATIONS, BitsSuite, CaseWorld, Outcome, Trial, difference
from embedding_backward_cases import CASES, FEW, Case, Inputs, Model, columns_of, make_gradient, make_inputs
from embedding_cases import Case as Shape
from embedding_cases import split_of

import persistent_ops as po
from persistent_ops.ops.embedding_backward_plan import OPERATOR

# ---- a batch, as the PEs have it that bring it -----------------------------------------------------------------------


def _slots(case: Case, world: int) -> list[list[tuple[int, int]]]:
    """Return every PE's; each table has a feature of its own."""
    slots, feature = [], 0
    for rank in range(world):
        num_tables = len(make_inputs(case, rank, world, 0).tables)
        slots.append([(feature + table, case.shape.rows) for table in range(num_tables)])
        feature += num_tables
    return slots


def _brought(case: Case, iteration: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what this PE brings of the batch: values, offsets and weights."""
    rank, world = po.rank(), po.world_size()
    split = split_of(case.shape, world)
    batch, first = sum(split), sum(split[:rank])
    values, lengths, weights = [], [], []
    for owner in range(world):
        inputs = make_inputs(case, owner, world, iteration)
        for table in range(len(inputs.tables)):
            begin = table * batch + first
            ends = inputs.offsets[begin : begin + split[rank] + 1].long()
            values.append(inputs.indices[ends[0] : ends[-1]])
            lengths.append(ends.diff())
            weights += [] if inputs.factors is None else [inputs.factors[ends[0] : ends[-1]]]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0).to(case.shape.offset_dtype)
    return torch.cat(values), offsets, torch.cat(weights) if weights else None


def _make(case: Case, **options: Any) -> po.EmbeddingInputs:
    """Collective."""
    world = po.world_size()
    slots = _slots(case, world)
    choices = {"lookups_per_sample": case.shape.max_pooling, "index_dtype": case.shape.index_dtype, **options}
    return po.EmbeddingInputs(
        slots,
        num_features=sum(map(len, slots)),
        max_batch=max(split_of(case.shape, world)),
        is_weighted=case.shape.is_weighted,
        bounds="ignore" if case.bad else "fatal",
        **choices,
    )


def _exchange(inputs: po.EmbeddingInputs, case: Case, iteration: int) -> po.Lookups:
    values, offsets, weights = (
        None if each is None else each.to(po.device()) for each in _brought(case, iteration)
    )  # fmt: skip
    assert values is not None
    split = split_of(case.shape, po.world_size())
    return inputs.exchange(values, offsets=offsets, per_sample_weights=weights, batch_per_rank=split)


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
            mode=case.shape.mode,
            batch_per_rank=split_of(case.shape, world),
            dim_per_rank=columns_of(case, world),
            dtype=case.shape.dtype,
            bounds="ignore",
        )


# ---- bits ------------------------------------------------------------------------------------------------------------


class _Steps(Trial):
    """A training; the next batch arrives between the forward and the backward pass of one."""

    held: ClassVar[Sequence[int]] = ()

    def __init__(self, case: Case) -> None:
        self._case = case
        OPERATOR.tune(po.runtime.world.current(), case.tuning)
        self._inputs = _make(case)
        self._arriving: tuple[int, po.Lookups] | None = None
        self._begin()

    def _begin(self) -> None:
        case, rank, world = self._case, po.rank(), po.world_size()
        tables = [table.to(po.device(), copy=True) for table in make_inputs(case, rank, world, 0).tables]
        self._tables = [tables[0]] * 2 if case.shape.same_table else tables
        self._optimizer = po.EmbeddingOptimizer(self._tables, case.algorithm, lr=0.1, **dict(case.options))
        self._optimizer.gradient_scale.fill_(case.scale)
        self._model = Model(case, rank, world)

    def ways(self, turn: int) -> Sequence[Hashable]:
        return (0,)

    def _lookups(self, iteration: int) -> po.Lookups:
        if self._arriving is None:
            return _exchange(self._inputs, self._case, iteration)
        number, lookups = self._arriving
        assert number == iteration
        return lookups

    def call(self, turn: int, iteration: int, way: Any) -> Outcome:
        if turn and iteration == 0:
            self._begin()
        case, rank, world = self._case, po.rank(), po.world_size()
        split, lr = split_of(case.shape, world), 0.1 / (1 + iteration)
        self._optimizer.lr.fill_(lr)
        with self._lookups(iteration) as lookups:
            wanted = _pool_global_batch(case, self._tables, make_inputs(case, rank, world, iteration))
            result = po.embedding_all_to_all(
                self._tables,
                lookups,
                mode=case.shape.mode,
                dim_per_rank=columns_of(case, world),
                dtype=case.shape.dtype,
                optimizer=self._optimizer,
            )
            after = (iteration + 1) % NUM_ITERATIONS
            self._arriving = after, _exchange(self._inputs, case, after)
            first = sum(split[:rank])
            gradient = make_gradient(case, world, iteration, 0)[first : first + split[rank]].to(po.device())
            result.backward(gradient)
        self._model.step(iteration, 0, lr)
        pairs = [(result.detach(), wanted), *zip(self._tables, self._model.tables, strict=True)]
        for table, states in zip(self._tables, self._model.states, strict=True):
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
