"""A backward pass that begins while its lookups are sorted: what it pushes meanwhile, and what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import Drop, Edit, mutated
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR, Tuning
from persistent_ops.ops.embedding.inversion import InversionPlan
from persistent_ops.runtime.compile import jit
from persistent_ops.runtime.host import HostBackend
from persistent_ops.runtime.workspace import Workspace

ROWS, COLUMNS, LENGTH = 5000, 32, 40
STEPS = 6


def _problems(batch: int, num_tables: int = 2) -> list[str]:
    """Train with SGD and whole numbers, with other lookups in every step; compare all rows with torch's sums."""
    world, rank, device = po.world_size(), po.rank(), po.device()
    rng = torch.Generator().manual_seed(7 * rank + 1)
    tables = [torch.zeros(ROWS, COLUMNS, device=device) for _ in range(num_tables)]
    optimizer = po.EmbeddingOptimizer(tables, "sgd", lr=1.0)
    expected = torch.zeros(num_tables, ROWS, COLUMNS, device=device)
    offsets = torch.arange(0, num_tables * batch * LENGTH + 1, LENGTH, device=device)
    problems = []
    for step in range(STEPS):
        lookups = torch.randint(0, ROWS, (num_tables, batch, LENGTH), generator=rng).to(device)
        with torch.enable_grad():
            pooled = po.embedding_all_to_all(tables, lookups.flatten(), offsets, optimizer=optimizer)
        # A whole number for each sample and column of the global batch, which every PE knows.
        values = (torch.arange(batch)[:, None] * 7 + torch.arange(num_tables * COLUMNS * world) * 5 + step) % 9 - 4.0
        own = slice(rank * batch // world, (rank + 1) * batch // world)
        values = values.to(device)
        pooled.backward(values[own])
        of_tables = values[:, rank * num_tables * COLUMNS :][:, : num_tables * COLUMNS].unflatten(1, (-1, COLUMNS))
        for table in range(num_tables):
            gradients = of_tables[:, table].repeat_interleave(LENGTH, 0)
            expected[table].index_add_(0, lookups[table].flatten(), gradients, alpha=-1.0)
            if not torch.equal(tables[table], expected[table]):
                wrong = int((tables[table] != expected[table]).any(1).sum())
                problems.append(f"step {step}, table {table}: {wrong} rows are wrong")
    po.check()
    return problems


def test_rows_are_right(backend: str) -> None:
    assert in_world(_problems, 2, backend, 64) == [[], []]


def _tuned(early: int) -> list[str]:
    OPERATOR.tune(po.runtime.world.current(), Tuning(pushing_work_groups=1, pushing_at_par=0, early_work_groups=early))
    return _problems(16)


@pytest.mark.host
@pytest.mark.parametrize(("world", "early", "room"), [(2, 32, 1), (2, 0, 0), (1, 32, 0)])
def test_what_pushes_begins_behind_a_sort_that_leaves_room(
    backend: str, monkeypatch: pytest.MonkeyPatch, world: int, early: int, room: int
) -> None:
    launches: dict[int, list[Any]] = {pe: [] for pe in range(world)}
    launch, sort = Workspace.launch, InversionPlan._launch

    def noting(workspace: Workspace, *arguments: Any, begins_early: bool = False, **options: Any) -> None:
        launches[po.rank()].append("early" if begins_early else "whole")
        launch(workspace, *arguments, **options)

    def noting_sort(plan: InversionPlan, *arguments: Any) -> Any:
        inverted = sort(plan, *arguments)
        launches[po.rank()][-1] = f"sort with room for {plan.room_for}"
        return inverted

    monkeypatch.setattr(HostBackend, "begins_early", True)
    monkeypatch.setattr(Workspace, "launch", noting)
    monkeypatch.setattr(InversionPlan, "_launch", noting_sort)
    assert in_world(_tuned, world, backend, early) == [[]] * world
    step = ["whole", f"sort with room for {room}", "early" if room else "whole"]
    assert all(of_pe[-3 * (STEPS - 1) :] == step * (STEPS - 1) for of_pe in launches.values()), launches


# ---- how many push ---------------------------------------------------------------------------------------------------


MOST_STEPS = 100  # in which the first WG may pass all pieces


def _pushing(tuning: Tuning, length: int, wire: torch.dtype, is_more: bool) -> tuple[set[int], int]:
    """Launch until more than the first WG push. Return the WGs that push, and how many the plan permits to push."""
    world = po.runtime.world.current()
    OPERATOR.tune(world, tuning)
    num_tables, batch = 2, 64
    tables = [torch.zeros(50, COLUMNS, device=po.device()) for _ in range(num_tables)]
    optimizer = po.EmbeddingOptimizer(tables, "sgd", lr=1.0)
    num_lookups = num_tables * batch * length
    offsets = torch.arange(0, num_lookups + 1, length, device=po.device())
    lookups = torch.arange(num_lookups, device=po.device()) % 50

    def step() -> None:
        with torch.enable_grad():
            pooled = po.embedding_all_to_all(tables, lookups, offsets, optimizer=optimizer, wire_dtype=wire)
        pooled.backward(torch.ones_like(pooled))

    step()
    (plan,) = OPERATOR.state(world).plans.values()
    pushing: set[int] = set()
    for _ in range(MOST_STEPS if is_more else 1):
        with po.trace() as timeline:
            step()
        launches = (each for pe in timeline.pes if pe.pe == po.rank() for each in pe.launches)
        pushing |= {each.wg for each in launches if each.operator == OPERATOR.name and each.others}
        lacking = torch.tensor([float(len(pushing) < 2)], device=po.device())
        if po.all_reduce(lacking).item() == 0:
            break
    return pushing, int(plan._struct.pushing_wg_lookups) // num_lookups


@pytest.mark.parametrize(
    ("at_par", "length", "wire", "more"),
    [(192, 1, torch.float32, 96), (192, 1, torch.bfloat16, 48), (192, 24, torch.float32, 4), (0, 1, torch.float32, 0)],
)
def test_more_push_where_lookups_are_few(backend: str, at_par: int, length: int, wire: torch.dtype, more: int) -> None:
    """Half of the gradients go to the other PE."""
    tuning = Tuning(work_groups=6, pushing_work_groups=1, pushing_at_par=at_par, slice_samples=1)
    for pushing, number in in_world(_pushing, 2, backend, tuning, length, wire, more > 1):
        assert number == more
        assert len(pushing) > 1 if more > 1 else pushing == {0}


def _turns(tables_of: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return for each push: owner and number of the table, and the range of pushes whose pieces alternate."""
    world = po.runtime.world.current()
    tables = [torch.zeros(50, COLUMNS, device=po.device()) for _ in range(tables_of[po.rank()])]
    optimizer = po.EmbeddingOptimizer(tables, "sgd", lr=1.0)
    num_bags = len(tables) * 8
    offsets, lookups = (torch.arange(number, device=po.device()) for number in (num_bags + 1, num_bags))
    split = {"dim_per_rank": [COLUMNS * number for number in tables_of], "batch_per_rank": [2] * 4}
    pooled = po.embedding_all_to_all(tables, lookups, offsets, optimizer=optimizer, **split)
    pooled.sum().backward()
    (plan,) = OPERATOR.state(world).plans.values()
    return [(int(push.owner), int(push.table), int(push.first), int(push.count)) for push in plan._pushes]


@pytest.mark.parametrize("tables_of", [(2, 2, 2, 2), (1, 4, 1, 2), (0, 3, 1, 0)])
def test_tables_of_one_number_are_pushed_side_by_side(backend: str, tables_of: tuple[int, ...]) -> None:
    """So an owner's first tables are complete early, also if another PE has fewer tables."""
    for rank, pushes in enumerate(in_world(_turns, 4, backend, tables_of)):
        owners = [pe for pe in range(4) if pe != rank]
        assert sorted(push[:2] for push in pushes) == [(pe, table) for pe in owners for table in range(tables_of[pe])]
        for place, (_, table, first, count) in enumerate(pushes):
            assert first <= place < first + count
            assert [each[1] for each in pushes[first : first + count]] == [table] * count
            assert count == sum(table < tables_of[pe] for pe in owners)


# ---- on GPUs ---------------------------------------------------------------------------------------------------------

LARGE = 32768  # samples: a sort of 2.6 million lookups takes longer than the first pieces and the peers' credit
MOST_ROUNDS = 20  # beside other tests, a peer's turn and its credit may come after the sort has ended
POOL_BYTES = 4 << 30  # new, so it is zero: a mutation's first launch finds no lookups in unsorted memory
MUTATIONS: dict[str, tuple[Edit, ...]] = {
    "rows_are_reduced_before_the_sort_has_ended": (Drop("count-is-there"), Drop("sort-has-ended"))
}


def _problems_of_sources(backend: str, root: Path) -> list[str]:
    """Take kernels from other sources. For a process of its own, since it keeps them."""
    jit.kernel_source_root = lambda: root  # type: ignore[assignment]
    po.init(backend, heap_size=256 << 20)
    torch.zeros(POOL_BYTES, dtype=torch.uint8, device=po.device())
    problems: list[str] = []
    for _ in range(MOST_ROUNDS):
        problems += _problems(LARGE)
        told = po.all_reduce(torch.tensor([float(len(problems) > 0)], device=po.device()))
        if told.item() > 0:
            break
    po.finalize()
    return problems


def _told(backend: str, root: Path) -> str:
    """Return the problems of sources. Unsorted memory may hold any number, also a row that no table has."""
    try:
        return str(po.launch(_problems_of_sources, 2, backend, root, timeout=250))
    except torch.AcceleratorError as error:
        return str(error)


@pytest.mark.gpu
@pytest.mark.apart
def test_rows_are_right_behind_a_long_sort(backend: str) -> None:
    assert in_world(_problems, 2, backend, LARGE, heap_size=256 << 20) == [[], []]


@pytest.mark.gpu
@pytest.mark.apart
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(backend: str, tmp_path: Path, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("PEs that share a GPU take turns: a sort ends before its backward pass has a peer's credit")
    root = mutated(tmp_path, MUTATIONS[name])
    found = _told(backend, root)
    assert "rows are wrong" in found or "illegal memory access" in found, found


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_edits_what_is_there(tmp_path: Path, name: str) -> None:
    mutated(tmp_path, MUTATIONS[name])
