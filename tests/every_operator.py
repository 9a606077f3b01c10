"""One case of every operator, with its reference: for worlds, transports and launchers of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from all_reduce_cases import ALGORITHMS, CASES as SUMS, AllReduceTrial
from bits import Trial, difference
from embedding_backward_cases import Case as Training, Model, columns_of, make_gradient, make_inputs, sparse_problem
from embedding_cases import Case as Shape, EmbeddingTrial, split_of
from embedding_lookups_cases import exchange, make_exchange, of_own_samples
from gemm_exchange_cases import ALL_REDUCE, OPERATORS as EXCHANGES, Case as Exchanged, ExchangeTrial
from gemv_cases import Case as Product, GemvTrial
from serially import serially
from sparse_cases import (
    Case as Rows,
    make_inputs as make_rows,
    rows_problem,
    taken_apart,
    to_sparse,
    uniform,
    wanted as wanted_rows,
    zeros_have_signs,
)

import persistent_ops as po

__all__ = ["BETWEEN_NODES", "OPERATORS", "problems"]

_ITERATION = 1


def _of(trial: Trial, *ways: Any) -> str | None:
    """Call a case in some ways; return what is wrong, or None."""
    found = [(way, trial.call(_ITERATION, _ITERATION, way).problem) for way in ways]
    trial.close()
    return next((f"{way}: {problem}" for way, problem in found if problem is not None), None)


def _sum(*, norms: bool) -> str | None:
    case = next(case for case in SUMS if case.norms == norms and case.name.endswith("fp16"))
    return _of(AllReduceTrial(case), *ALGORITHMS)


def _product() -> str | None:
    return _of(GemvTrial(Product("many PEs", 50, lambda rank: 16 + rank % 3, 2)), "one_shot", "two_shot")


def _exchanged(operator: str) -> str | None:
    rows = (po.world_size() + 9,) if operator == ALL_REDUCE else (3,)
    return _of(ExchangeTrial(Exchanged("many PEs", rows, 16, 24, operator=operator)), "auto")


def _rows() -> str | None:
    case, rank, world = Rows("many PEs", 90, uniform(7, 0, 4), (5,), torch.bfloat16), po.rank(), po.world_size()
    x, want = to_sparse(case, make_rows(case, world, _ITERATION)[rank]), wanted_rows(case, world, _ITERATION)
    for optimizer in ("owner", "allgather", "dense"):
        found = taken_apart(po.sparse_all_reduce(x, algorithm=optimizer))
        if problem := rows_problem(found, want, zeros_have_signs=zeros_have_signs(optimizer)):
            return f"{optimizer}: {problem}"
    return None


_SHAPE = Shape("many PEs", lambda rank: (8,) * (rank % 8 == 0), lambda world: world + 7, max_pooling=3)


def _pooled() -> str | None:
    return _of(EmbeddingTrial(_SHAPE), "communication_aware", "oblivious")


_TRAINED = Training(
    "many PEs, trained",
    Shape("many PEs", _SHAPE.dims, _SHAPE.batch, rows=9, max_pooling=2, is_weighted=True),
    "rowwise_adagrad",
)


@serially
@functools.lru_cache(maxsize=256)
def _weights_gradient(owner: int, world: int) -> torch.Tensor | None:
    """Return that of an owner's lookups in the global batch."""
    return Model(_TRAINED, owner, world).gradients(_ITERATION, 0).factors


def _trained() -> str | None:
    """Lookups that PEs have exchanged, weighted: tables that a backward pass updates, and gradients of the weights."""
    case, rank, world = _TRAINED, po.rank(), po.world_size()
    tables = [table.to(po.device(), copy=True) for table in make_inputs(case, rank, world, 0).tables]
    optimizer = po.EmbeddingOptimizer(tables, case.optimizer, lr=0.1)
    with exchange(make_exchange(case), case, _ITERATION, gives_gradients=True) as lookups:
        weights = lookups.per_sample_weights
        dims = columns_of(case, world)
        result = po.embedding_all_to_all(tables, lookups, dim_per_rank=dims, dtype=case.dtype, optimizer=optimizer)
        result.backward(_gradient(case))
    model = Model(case, rank, world)
    model.step(_ITERATION, 0, 0.1)
    wanted = of_own_samples(case, _ITERATION, lambda owner: _weights_gradient(owner, world))
    assert weights is not None and weights.grad is not None and wanted is not None
    pairs = [(weights.grad, wanted), *zip(tables, model.tables, strict=True)]
    return next((found for pair in pairs if (found := difference(*pair)) is not None), None)


def _sparse_gradients() -> str | None:
    case, rank, world = Training("many PEs, sparse", _SHAPE), po.rank(), po.world_size()
    inputs = make_inputs(case, rank, world, _ITERATION)
    tables = [table.to(po.device(), copy=True).requires_grad_() for table in inputs.tables]
    result = po.embedding_all_to_all(
        tables,
        inputs.indices.to(po.device()),
        inputs.offsets.to(po.device()),
        batch_per_rank=split_of(case.shape, world),
        dim_per_rank=columns_of(case, world),
        dtype=case.dtype,
        requires_grad=not tables,
    )
    result.backward(_gradient(case))
    sums = Model(case, rank, world).gradients(_ITERATION, 0).sums
    found = [sparse_problem(t.detach(), t.grad, want) for t, want in zip(tables, sums, strict=True)]
    return next((problem for problem in found if problem is not None), None)


def _gradient(case: Training) -> torch.Tensor:
    """Return that of this PE's samples."""
    split = split_of(case.shape, po.world_size())
    return make_gradient(case, po.world_size(), _ITERATION, 0).split(split)[po.rank()].to(po.device())


def _heap() -> str | None:
    """A tensor at the same place of every PE, to which each PE has written."""
    mine = po.empty(3, dtype=torch.int64).fill_(po.rank())
    po.barrier()
    seen = [int(po.peer_view(mine, pe)[1]) for pe in range(po.world_size())]
    po.barrier()
    po.free(mine)
    return None if seen == list(range(po.world_size())) else f"saw {seen}"


OPERATORS: Mapping[str, Callable[[], str | None]] = {
    "all_reduce": lambda: _sum(norms=False),
    "all_reduce_rms_norm": lambda: _sum(norms=True),
    "gemv_all_reduce": _product,
    **{operator: functools.partial(_exchanged, operator) for operator in EXCHANGES},
    "sparse_all_reduce": _rows,
    "embedding_all_to_all": _pooled,
    "lookups and optimizer": _trained,
    "sparse gradients": _sparse_gradients,
    "empty and barrier": _heap,
}


BETWEEN_NODES = [name for name in OPERATORS if name != "empty and barrier"]  # which reads peers' memory directly


def problems(names: Sequence[str]) -> dict[str, str]:
    """Call operators, collectively; return what is wrong, by operator."""
    found = {name: OPERATORS[name]() for name in names}
    po.check()
    return {name: problem for name, problem in found.items() if problem is not None}
