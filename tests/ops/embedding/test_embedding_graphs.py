"""embedding_all_to_all in CUDA graphs (graphs.py), and bad indices before a capture begins."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from embedding_cases import Case, expected_bits, make_inputs, split_of
from graphs import NUM_INPUTS, Call, Graph, GraphSuite
from worlds import in_world

import persistent_ops as po

_CASE = Case("graphs", dims=lambda rank: (64, 128, 8), batch=lambda world: 24, max_pooling=5)


def _call(case: Case, way: str, out: torch.Tensor | None = None) -> Call:
    rank, world = po.rank(), po.world_size()
    inputs = [[make_inputs(case, pe, world, turn) for pe in range(world)] for turn in range(NUM_INPUTS)]
    tables = [weight.to(po.device()) for weight in inputs[0][rank][0]]
    given = []
    for of_all in inputs:
        _, indices, offsets, _ = of_all[rank]
        buffer = torch.zeros((len(offsets) - 1) * case.max_pooling, dtype=torch.int64)
        buffer[: len(indices)] = indices
        given.append([buffer, offsets])

    def act(indices: torch.Tensor, offsets: torch.Tensor, *, way: str) -> torch.Tensor:
        # bounds="ignore": the buffer is larger than the lookups, so the last offset is not the number of indices
        return po.embedding_all_to_all(
            tables, indices, offsets, pooling=case.pooling, bounds="ignore", schedule=way, out=out
        )

    wants = [[expected_bits(case, of_all, rank, split_of(case, world))] for of_all in inputs]
    return Call(case.name, way, act, given, wants)


class TestGraphs(GraphSuite):
    operator = "embedding_all_to_all"
    cases = (
        _CASE,
        Case("graphs: as many tables as PEs", dims=lambda rank: (8,) * (1 + rank), batch=lambda world: 37),
        Case("graphs: mean", dims=lambda rank: (16, 40), batch=lambda world: 4 * world + 1, pooling="mean"),
    )
    ways = ("communication_aware", "oblivious")
    growing: ClassVar = [Case(f"batch of {batch}", batch=lambda world, b=batch: b) for batch in (7, 70, 700, 30)]
    heap_bytes = 256 << 20

    @classmethod
    def call(cls, case: Case, way: str) -> Call:
        return _call(case, way)

    @classmethod
    def more_calls(cls) -> list[Call]:
        rows = split_of(_CASE, po.world_size())[po.rank()]
        out = po.empty(rows, sum(sum(_CASE.dims(pe)) for pe in range(po.world_size())))
        return [_call(_CASE, "communication_aware", out)]


def _bad_index_before_a_capture() -> list[str]:
    rank, world, device = po.rank(), po.world_size(), po.device()
    inputs = [make_inputs(_CASE, pe, world, 0) for pe in range(world)]
    want = expected_bits(_CASE, inputs, rank, split_of(_CASE, world))
    weights, lookups, bounds, _ = inputs[rank]
    tables, indices, offsets = [w.to(device) for w in weights], lookups.to(device), bounds.to(device)

    def call() -> torch.Tensor:
        return po.embedding_all_to_all(tables, indices, offsets)

    call()
    po.check()
    problems: list[str] = []
    for turn in range(3):
        indices[0] = 10**6
        call()
        torch.cuda.synchronize()  # the kernel has reported it, and the host has not read it
        told: list[str] = []

        def program(told: list[str] = told) -> torch.Tensor:
            try:
                return call()
            except IndexError as error:
                told.append(str(error))
                return call()

        graph = Graph(program)
        if not told:
            problems.append(f"turn {turn}: the capture's first launch did not tell of the bad index")
        indices.copy_(lookups)
        for _ in range(turn):
            graph.replay()
        torch.cuda.synchronize()
        if turn and not torch.equal(graph.results.cpu(), want):
            problems.append(f"turn {turn}: wrong bits")
        po.check()
    return problems


@pytest.mark.gpu
def test_bad_indices_are_still_told_after_a_capture_has_told_one(backend: str) -> None:
    assert in_world(_bad_index_before_a_capture, 2, backend) == [[], []]
