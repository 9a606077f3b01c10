"""Several vectors on a GPU. Warps with a part of the columns load that part together, step by step, as they multiply.

The host reads vectors in place, so all tests except for the texts of the mutations are for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from mutations import Before, Drop, Edit, Initial, mutated
from worlds import in_world

import persistent_ops as po
from persistent_ops.runtime.compile import jit

CALLS = 100


@dataclass(frozen=True)
class Case:
    """A product of one PE."""

    name: str
    rows: int
    columns: int
    vectors: int
    dtype: torch.dtype = torch.bfloat16
    prefetch: bool = False


# On an H200, 16 vectors find room with up to 4864 columns in bf16 and 2432 in fp32, eight with about twice as many.
CASES = {
    case.name: case
    for case in (
        Case("an odd number of steps", 4400, 1000, 2),
        Case("many steps", 4400, 3584, 16),
        Case("prefetched", 2200, 3584, 8, prefetch=True),
        Case("fewer steps than are asked for ahead, prefetched", 2200, 192, 5, prefetch=True),
        Case("elements without alignment", 300, 777, 16),
        Case("a tile for one team alone", 8, 1024, 16),
        Case("fp32", 4400, 1024, 16, torch.float32),
        Case("ring", 4400, 8192, 16),
        Case("ring, prefetched", 4400, 8192, 16, prefetch=True),
        Case("ring, eight vectors", 1100, 14336, 7),
        Case("ring, two tiles", 9, 8200, 16, torch.float16),
        Case("ring, elements without alignment", 2200, 8191, 16),
        Case("ring, fp32", 2200, 4096, 16, torch.float32),
        Case("ring, a lone vector", 300, 131072, 1),
    )
}


def _problems(names: list[str]) -> list[str]:
    """Compare calls with a call for each vector, and that call with fp64."""
    problems = []
    for case in (CASES[name] for name in names):
        generator = torch.Generator(po.device()).manual_seed(case.rows)
        shapes = ((case.rows, case.columns), (case.vectors, case.columns))
        weight, x = (torch.randn(s, device=po.device(), generator=generator).to(case.dtype) for s in shapes)
        alone = torch.stack([po.gemv(weight, vector.clone()) for vector in x])
        exact, magnitude = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
        bound = exact.abs() * torch.finfo(case.dtype).eps + magnitude * 2.0**-14
        if not bool(((alone.double() - exact).abs() <= bound).all()):
            problems.append(f"{case.name}: vectors alone are wrong")
        for call in range(CALLS):
            result = po.gemv(weight, x, prefetch_weight=case.prefetch)
            if not torch.equal(result.view(torch.uint8), alone.view(torch.uint8)):
                problems.append(f"{case.name}: other bits in call {call}")
                break
    return problems


def _problems_of_sources(backend: str, root: Path) -> list[str]:
    """Take kernels from other sources. For a process of its own, since it keeps them."""
    jit.kernel_source_root = lambda: root  # type: ignore[assignment]
    po.init(backend, heap_size=64 << 20)
    problems = _problems(LATE_CASES)
    po.finalize()
    return problems


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bits_of_vectors_that_come_step_by_step(backend: str, name: str) -> None:
    assert in_world(_problems, 1, backend, [name]) == [[]]


LAST_TEAM_READS_LATE = Before("multiply-steps", "if (share_.team == share_.num_teams - 1) __nanosleep(3000);")
LATE_CASES = ["an odd number of steps", "prefetched", "ring", "ring, eight vectors", "ring, fp32"]


@pytest.mark.gpu
def test_a_team_reads_late(backend: str, tmp_path: Path) -> None:
    root = mutated(tmp_path, (LAST_TEAM_READS_LATE,))
    assert po.launch(_problems_of_sources, 1, backend, root, timeout=250) == [[]]


MUTATIONS: dict[str, tuple[Edit, ...]] = {
    "warps_do_not_meet": (Drop("warps-meet"),),
    "ring_without_places_for_what_is_in_use": (Initial("ring-steps", "Traits::kDepth"),),
    # Rarely visible without a delay: replacing a step takes the other warps as long as reading it takes these.
    "teams_leave_before_they_have_read": (Drop("teams-leave"), LAST_TEAM_READS_LATE),
    "prefetched_vectors_are_not_awaited": (Drop("prefetched-await"),),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(backend: str, tmp_path: Path, name: str) -> None:
    root = mutated(tmp_path, MUTATIONS[name])
    problems = po.launch(_problems_of_sources, 1, backend, root, timeout=250)[0]
    assert any("other bits" in problem for problem in problems), problems


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_edits_what_is_there(tmp_path: Path, name: str) -> None:
    mutated(tmp_path, MUTATIONS[name])
