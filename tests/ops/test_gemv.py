"""gemv: exact bits of each PE's own product, mixed with collective operators, and without the other PEs.

gemv uses the kernel of gemv_all_reduce, whose tests cover it, also in graphs. Here is what differs for a PE alone.
See also: arguments in test_gemv_arguments.py, torch in test_forward_only.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from bits import BitsSuite, CaseWorld, Outcome, Trial, difference
from gemv_cases import (
    CASES,
    FEW,
    Case,
    Inputs,
    bound_problem,
    expected_bits,
    make_inputs,
    placed,
)
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.gemv_plan import OPERATOR
from persistent_ops.runtime.compile.description import describe

MB = 1 << 20
ROWS, COLUMNS = 21, 24


class OwnTrial(Trial):
    """A case with collective operators in between. PEs make different numbers of products."""

    def __init__(self, case: Case) -> None:
        self._case, self._reduced = case, CASES[0]
        shared = make_inputs(self._reduced, po.world_size(), 0)
        self._weight, self._x = (placed(self._reduced, given[po.rank()]) for given in (shared.weights, shared.xs))
        self._sum = expected_bits(Inputs(shared.weights, shared.xs, None, None))

    def ways(self, turn: int) -> Sequence[str]:
        return ("alone",)

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        case, rank = self._case, po.rank()
        found = None
        if turn % 3 == 0:
            found = difference(po.gemv_all_reduce(self._weight, self._x).cpu(), self._sum)
            found = found and f"gemv_all_reduce before it: {found}"
        inputs = make_inputs(case, po.world_size(), iteration)
        # Each PE has its own numbers, and often its own width.
        own = Inputs(inputs.weights[rank : rank + 1], inputs.xs[rank : rank + 1], inputs.bias, inputs.residual)
        weight, x = placed(case, own.weights[0]), placed(case, own.xs[0])
        bias, residual = (None if tensor is None else placed(case, tensor) for tensor in (own.bias, own.residual))
        in_place = residual.clone() if iteration == 4 else None  # type: ignore[union-attr]
        for _ in range(1 + (rank + iteration) % 2):
            if in_place is not None:
                residual = in_place.copy_(own.residual)  # type: ignore[arg-type]
            result = po.gemv(weight, x, bias=bias, residual=residual, out=in_place, prefetch_weight=iteration == 5)
        exact = case.values in ("whole", "ordered")
        problem = difference(result.cpu(), expected_bits(own)) if exact else bound_problem(result.cpu(), own)
        return Outcome([result], found or problem)


class TestBits(BitsSuite):
    trial = OwnTrial
    halved_by = torch.bfloat16
    is_the_same_on_all_pes = False
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, FEW),
        "3-staged": CaseWorld(3, FEW[::3], {"transport": "staged"}),
        "2-wg3": CaseWorld(2, FEW[1::3], {"host_options": {"wg_size": 3}}),
    }


def _alone() -> list[str]:
    """One PE multiplies, and the others do not know of it."""
    weight, x = torch.ones(ROWS, COLUMNS, device=po.device()), torch.ones(COLUMNS, device=po.device())
    results = [po.gemv(weight * (1 + call), x) for call in range(5 * (po.rank() == 1))]
    wanted = [float(COLUMNS * (1 + call)) for call in range(len(results))]
    problems = [f"call {call}" for call, y in enumerate(results) if y.tolist() != [wanted[call]] * ROWS]
    if po.gemv_all_reduce(weight, x).tolist() != [float(COLUMNS * po.world_size())] * ROWS:
        problems.append("the sum over the PEs behind it")
    return problems


def test_is_not_collective(backend: str) -> None:
    assert in_world(_alone, 2, backend) == [[], []]


def _places() -> list[str]:
    """A team of one must own what it writes: no part may belong to the world."""
    world = po.runtime.world.current()
    workspace = world.workspace
    shape = (8, 1, torch.float32, torch.float32, False, False, False, 1, 0)
    contracts = (OPERATOR.contract(team, *shape) for team in (world.team, world.alone))
    description = describe("comm/team.cuh")
    grant_bytes, copies = ctypes.sizeof(description.structs["Grant"]), description.constants["kGrantCopies"]
    ours, own = map(workspace.team, contracts)
    problems = []
    if (own.rank, own.size) != (0, 1) or own.local == ours.local:
        problems.append(f"rank {own.rank} of {own.size}, state at {own.local}")
    end_of_world = ours.grants_offset + (world.size + copies) * grant_bytes
    end_of_area = ours.grants_offset + workspace.credits.memory.nbytes
    if not end_of_world <= own.grants_offset <= end_of_area - (1 + copies) * grant_bytes:
        problems.append(f"grants from {own.grants_offset}, of the world up to {end_of_world}, of all to {end_of_area}")
    first = (own.peer_heaps - workspace._peer_heaps.data_ptr()) // 8
    if int(workspace._peer_heaps[first]) != world.backend.heap_base:
        problems.append("its only heap is another one")
    return problems


@pytest.mark.parametrize("world", [1, 3])
def test_a_team_of_one_has_memory_of_its_own(backend: str, world: int) -> None:
    assert in_world(_places, world, backend) == [[]] * world


def _words_of_a_pe_alone() -> list[int]:
    weight, x = torch.ones(ROWS, COLUMNS, device=po.device()), torch.ones(COLUMNS, device=po.device())
    for _ in range(3):
        po.gemv(weight, x)
    po.check()
    return po.runtime.world.current().workspace._local_alone.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_team_of_one_counts_nothing(backend: str, world: int) -> None:
    for words in in_world(_words_of_a_pe_alone, world, backend):
        assert words and not any(words)


def _checked(weight: torch.Tensor, x: torch.Tensor) -> None:
    po.gemv_all_reduce(weight, x)
    po.check()


def _after_a_failure() -> list[str]:
    weight, x = torch.ones(ROWS, COLUMNS, device=po.device()), torch.ones(COLUMNS, device=po.device())
    other = torch.ones(ROWS + po.rank(), COLUMNS, device=po.device())
    with pytest.raises(po.ContractMismatchError):
        _checked(other, x)
    with pytest.raises(po.ContractMismatchError):
        po.gemv(weight, x)
    po.recover()
    results = [po.gemv(weight, x), po.gemv_all_reduce(weight, x)]
    return [f"{y.tolist()[:3]}" for y, n in zip(results, (1, 2), strict=True) if y.tolist() != [n * COLUMNS] * ROWS]


def test_what_an_earlier_operator_left_behind_is_raised(backend: str) -> None:
    assert in_world(_after_a_failure, 2, backend) == [[], []]
