"""Operators that share a workspace: shapes, algorithms and operators in any order, with late PEs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import all_reduce_cases
import embedding_cases
import gemm_exchange_cases
import gemv_cases
import pytest
import sparse_cases
import torch
from bits import difference
from sparse_cases import distinct, uniform, zipf
from worlds import TRANSPORTS, in_world

import persistent_ops as po

Problem = Callable[[], str | None]  # of a call that has been launched
_TURNS = 120

_SUMS = [
    all_reduce_cases.Case("turns: norms", (6, 700), norms=True),
    all_reduce_cases.Case("turns: flat", (3001,), torch.float16),
    all_reduce_cases.Case("turns: wide", (2, 4000), norms=True),
    all_reduce_cases.CASES[1],
]
_PRODUCTS = [
    gemv_cases.Case("turns: plain", 75, lambda rank: 24, 2),
    gemv_cases.Case("turns: large", 600, lambda rank: 8, 16),
    gemv_cases.Case("turns: a row", 1, lambda rank: 40),
    gemv_cases.Case("turns: no rows", 0, lambda rank: 8),
    gemv_cases.Case("turns: fp16", 33, lambda rank: 7 * rank, 0, torch.float16),
    gemv_cases.Case("turns: comm bf16", 52, lambda rank: 16, 0, wire_dtype="own"),
]
_EXCHANGED = [
    gemm_exchange_cases.Case("turns: rows", (9,), 24, 40, operator="gemm_all_to_all"),
    gemm_exchange_cases.Case("turns: sums", (4, 3), 40, 24, has_residual=True),
    gemm_exchange_cases.Case("turns: means", (2, 5), 16, 72, torch.float16, op="mean", scatter_dim=1),
    gemm_exchange_cases.Case("turns: sums for all", (31,), 16, 40, operator="gemm_all_reduce", has_bias=True),
    gemm_exchange_cases.Case("turns: N of 4", (2,), 8, 4, operator="gemm_all_reduce", wire_dtype=torch.float32),
]
_SPARSE = [
    sparse_cases.Case("turns: plain", 300, uniform(60, 45), (10,)),
    sparse_cases.Case("turns: wide", 64, uniform(25, 33), (200,), torch.float16),
    sparse_cases.Case("turns: scalars, mean", 1000, zipf(200), (), torch.bfloat16, "mean"),
    sparse_cases.Case("turns: all rows", 65, distinct(65), (3,)),
    sparse_cases.Case("turns: nothing", 100, uniform(0), (4,)),
    sparse_cases.Case("turns: nothing on rank 1", 100, uniform(30, 0), (4,), torch.bfloat16),
]
_LOOKUPS = embedding_cases.Case("turns", dims=lambda rank: (8, 16 * rank), batch=lambda world: 13)


def _sum(case: all_reduce_cases.Case, iteration: int, way: str) -> Problem:
    inputs = all_reduce_cases.make_inputs(case, po.world_size(), iteration)
    result = all_reduce_cases.call(case, inputs, iteration, way)[0]
    return lambda: difference(result, all_reduce_cases.sum_model(inputs))


def _product(case: gemv_cases.Case, iteration: int, way: str) -> Problem:
    inputs, device = gemv_cases.make_inputs(case, po.world_size(), iteration), po.device()
    bias, residual = (None if each is None else each.to(device) for each in (inputs.bias, inputs.residual))
    weight, x = inputs.weights[po.rank()].to(device), inputs.xs[po.rank()].to(device)
    result = po.gemv_all_reduce(weight, x, bias=bias, residual=residual, wire_dtype=case.comm, algorithm=way)
    return lambda: difference(result, gemv_cases.expected_bits(inputs, case.comm))


def _exchanged(case: gemm_exchange_cases.Case, iteration: int) -> Problem:
    inputs = gemm_exchange_cases.make_inputs(case, po.world_size(), iteration)
    result = gemm_exchange_cases.call(case, inputs)
    return lambda: difference(result.cpu(), gemm_exchange_cases.expected_bits(case, inputs, po.rank()))


def _sparse(case: sparse_cases.Case, iteration: int, way: tuple[str, str], room: sparse_cases.Room) -> Problem:
    entry, algorithm = way
    entries = sparse_cases.make_inputs(case, po.world_size(), iteration)[po.rank()]
    want = sparse_cases.wanted(case, po.world_size(), iteration)
    if entry == "sparse":
        result = po.sparse_all_reduce(sparse_cases.to_sparse(case, entries), op=case.op, algorithm=algorithm)
        return lambda: sparse_cases.rows_problem(sparse_cases.taken_apart(result), want, zeros_have_signs=False)
    room.reset()
    sparse_cases.call_into(case, entries, room, algorithm)
    problem = room.problem(want)  # now, as the next call uses the room
    return lambda: problem


def _exchange(iteration: int) -> Problem:
    rank, world, device = po.rank(), po.world_size(), po.device()
    inputs = [embedding_cases.make_inputs(_LOOKUPS, pe, world, iteration) for pe in range(world)]
    tables, indices, offsets, _ = inputs[rank]
    split = embedding_cases.split_of(_LOOKUPS, world)
    result = po.embedding_all_to_all(
        [table.to(device) for table in tables],
        indices.to(device),
        offsets.to(device),
        batch_per_rank=split,
        dim_per_rank=[sum(_LOOKUPS.dims(pe)) for pe in range(world)],
    )
    return lambda: difference(result, embedding_cases.expected_bits(_LOOKUPS, inputs, rank, split))


def _launch(order: torch.Generator, iteration: int, rooms: dict[str, sparse_cases.Room]) -> tuple[str, Problem]:
    """Make the next call; return its name, and a function that checks its result."""

    def one_of(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=order))]

    kind = one_of(("sum", "product", "exchanged product", "sparse", "sparse", "exchange", "barrier"))
    if kind == "sum":
        case, way = one_of(_SUMS), one_of(all_reduce_cases.ALGORITHMS)
        return f"all_reduce, {case.name}, {way}", _sum(case, iteration, way)
    if kind == "product":
        case, way = one_of(_PRODUCTS), one_of(gemv_cases.ALGORITHMS)
        return f"gemv_all_reduce, {case.name}, {way}", _product(case, iteration, way)
    if kind == "exchanged product":
        case = one_of(_EXCHANGED)
        return f"{case.operator}, {case.name}", _exchanged(case, iteration)
    if kind == "sparse":
        case, way = one_of(_SPARSE), one_of(sparse_cases.WAYS)
        return f"sparse_all_reduce, {case.name}, {way}", _sparse(case, iteration, way, rooms[case.name])
    if kind == "exchange":
        return "embedding_all_to_all", _exchange(iteration)
    po.barrier()
    return "barrier", lambda: None


def _turns() -> list[str]:
    problems: list[str] = []
    pending: list[tuple[str, Problem]] = []
    rooms = {case.name: sparse_cases.Room(case.rows, case.row_shape, case.dtype) for case in _SPARSE}
    order = torch.Generator().manual_seed(3)  # the same on all PEs
    for turn in range(_TURNS):
        if turn % 7 == po.rank():
            time.sleep(0.01)
        name, problem = _launch(order, turn % 5, rooms)
        pending.append((f"turn {turn}: {name}", problem))
        if turn % 7 == 6 or turn == _TURNS - 1:  # not at each turn, so that launches follow each other without the host
            problems += [f"{where}: {found}" for where, act in pending if (found := act()) is not None]
            pending.clear()
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_shapes_algorithms_and_operators_take_turns(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_turns, 3, backend, **options) == [[]] * 3
