"""The order of a PE's tasks: complete, without repetition, and communication first."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from host_driver.build import load_shim
from hypothesis import given, settings, strategies as st

from persistent_ops.runtime.compile.description import describe

Task = tuple[int, int, int]  # destination, slice, table


@dataclass(frozen=True)
class Case:
    rank: int
    batch: tuple[int, ...]
    num_tables: int
    slice_samples: int
    local_delay: int  # rounds
    slice_major: bool
    num_beside: int = 0

    @property
    def size(self) -> int:
        return len(self.batch)

    def num_slices(self, destination: int) -> int:
        return -(-self.batch[destination] // self.slice_samples)

    @property
    def num_rounds(self) -> int:
        remote = [self.num_slices(pe) * self.num_tables for pe in range(self.size) if pe != self.rank]
        return max(remote, default=0)

    @property
    def all_tasks(self) -> set[Task]:
        return {
            (pe, s, t) for pe in range(self.size) for s in range(self.num_slices(pe)) for t in range(self.num_tables)
        }


@dataclass(frozen=True)
class Listing:
    tasks: list[Task | None]  # by position
    num_leading: int


List = Callable[[Case, bool], Listing]


@pytest.fixture(scope="module")
def list_order(tmp_path_factory: pytest.TempPathFactory) -> List:
    library = load_shim("order_shim.cpp", tmp_path_factory.mktemp("order"))
    library.list_tasks.restype = library.num_leading.restype = ctypes.c_int64
    library.list_tasks.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.num_leading.argtypes = [ctypes.c_void_p]

    def list_order(case: Case, oblivious: bool) -> Listing:
        starts = (ctypes.c_int64 * (case.size + 1))(*[sum(case.batch[:pe]) for pe in range(case.size + 1)])
        order = describe("sched/exchange_order.cuh").structs["ExchangeOrder"](
            rank=case.rank,
            size=case.size,
            num_tables=case.num_tables,
            slice_samples=case.slice_samples,
            batch_start=ctypes.addressof(starts),
            num_rounds=case.num_rounds,
            local_delay=case.local_delay,
            oblivious=int(oblivious),
            slice_major=int(case.slice_major),
            num_beside=case.num_beside,
        )
        capacity = 1 << 16
        words = (ctypes.c_int64 * (3 * capacity))()
        count = library.list_tasks(ctypes.addressof(order), capacity, ctypes.addressof(words))
        assert 0 <= count <= capacity
        triples = [(words[3 * i], words[3 * i + 1], words[3 * i + 2]) for i in range(count)]
        return Listing([t if t[0] >= 0 else None for t in triples], library.num_leading(ctypes.addressof(order)))

    return list_order


@st.composite
def cases(draw: st.DrawFn, min_size: int = 1, min_batch: int = 0, min_tables: int = 0) -> Case:
    size = draw(st.integers(min_size, 8))
    batch = draw(st.lists(st.integers(min_batch, 13), min_size=size, max_size=size))
    case = Case(
        rank=draw(st.integers(0, size - 1)),
        batch=tuple(batch),
        num_tables=draw(st.integers(min_tables, 5)),
        slice_samples=draw(st.integers(1, 6)),
        local_delay=0,
        slice_major=draw(st.booleans()),
    )
    return replace(case, local_delay=draw(st.integers(0, case.num_rounds)))


@st.composite
def cases_beside(draw: st.DrawFn) -> Case:
    case = replace(draw(cases(min_tables=2)), slice_major=False)
    return replace(case, num_beside=draw(st.integers(1, case.num_tables - 1)))


@settings(max_examples=300, deadline=None)
@given(case=cases() | cases_beside(), oblivious=st.booleans())
def test_every_task_has_one_position(list_order: List, case: Case, oblivious: bool) -> None:
    listing = list_order(case, oblivious)
    held = Counter(task for task in listing.tasks if task is not None)
    assert held == Counter(case.all_tasks)


@settings(max_examples=200, deadline=None)
@given(case=cases(), oblivious=st.booleans())
def test_leading_positions_hold_all_that_leaves(list_order: List, case: Case, oblivious: bool) -> None:
    listing = list_order(case, oblivious)
    assert 0 <= listing.num_leading <= len(listing.tasks)
    behind = {task[0] for task in listing.tasks[listing.num_leading :] if task is not None}
    assert behind <= {case.rank}


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_oblivious_is_the_order_of_the_logical_grid(list_order: List, case: Case) -> None:
    tasks = list_order(case, True).tasks
    key = (lambda t: (t[0], t[1], t[2])) if case.slice_major else (lambda t: (t[0], t[2], t[1]))
    assert tasks == sorted(case.all_tasks, key=key)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_tasks_of_a_destination_run_slice_by_slice_or_table_by_table(list_order: List, case: Case) -> None:
    tasks = list_order(case, False).tasks
    for destination in range(case.size):
        found = [task for task in tasks if task is not None and task[0] == destination]
        key = (lambda t: (t[1], t[2])) if case.slice_major else (lambda t: (t[2], t[1]))
        assert found == sorted(found, key=key)


@settings(max_examples=200, deadline=None)
@given(case=cases_beside())
def test_two_sequences_of_tables_run_beside_one_another(list_order: List, case: Case) -> None:
    """Each sequence goes table by table. At any time each has had its share of the tasks, to within one task."""
    tasks = list_order(case, False).tasks
    for destination in range(case.size):
        found = [(task[2], task[1]) for task in tasks if task is not None and task[0] == destination]
        first = [task for task in found if task[0] < case.num_beside]
        others = [task for task in found if task[0] >= case.num_beside]
        assert first == sorted(first) and others == sorted(others)
        assert len(first) == case.num_beside * case.num_slices(destination)
        num_first = 0
        for number, task in enumerate(found):
            num_first += task[0] < case.num_beside
            assert num_first == (number + 1) * case.num_beside // case.num_tables


@settings(max_examples=200, deadline=None)
@given(case=cases(min_size=2, min_batch=1, min_tables=1))
def test_first_tasks_go_round_the_ranks(list_order: List, case: Case) -> None:
    size = case.size
    first_of_rank = []
    for rank in range(size):
        mine = replace(case, rank=rank, local_delay=0)
        first = [task[0] if task is not None else None for task in list_order(mine, False).tasks[:size]]
        assert first == [(rank + 1 + slot) % size for slot in range(size)]
        first_of_rank.append(first)
    for slot in range(size):  # at no step do two PEs send to the same PE
        assert len({first[slot] for first in first_of_rank}) == size


@settings(max_examples=200, deadline=None)
@given(case=cases(min_size=2))
def test_full_delay_puts_local_tasks_last(list_order: List, case: Case) -> None:
    late = replace(case, local_delay=case.num_rounds)
    destinations = [task[0] for task in list_order(late, False).tasks if task is not None]
    remote = [pe for pe in destinations if pe != case.rank]
    assert destinations == remote + [case.rank] * (len(destinations) - len(remote))


@settings(max_examples=200, deadline=None)
@given(case=cases(min_size=2, min_batch=1, min_tables=1))
def test_delay_counts_rounds(list_order: List, case: Case) -> None:
    tasks = list_order(case, False).tasks
    first_local = next(i for i, task in enumerate(tasks) if task is not None and task[0] == case.rank)
    remote_before = (case.local_delay + 1) * (case.size - 1)  # rounds without own tasks, and the first with one
    assert first_local == min(remote_before, case.num_rounds * (case.size - 1))


def test_oblivious_starts_every_pe_at_destination_0(list_order: List) -> None:
    for rank in range(4):
        case = Case(rank, (4, 4, 4, 4), num_tables=2, slice_samples=2, local_delay=0, slice_major=False)
        assert list_order(case, True).tasks[0] == (0, 0, 0)


def test_known_order(list_order: List) -> None:
    case = Case(1, (2, 3, 1), num_tables=2, slice_samples=2, local_delay=1, slice_major=False)
    listing = list_order(case, False)
    assert listing.num_leading == 5
    assert listing.tasks == [
        *((2, 0, 0), (0, 0, 0)),  # a round without an own task
        *((2, 0, 1), (0, 0, 1), (1, 0, 0)),  # a round with one
        *((1, 1, 0), (1, 0, 1), (1, 1, 1)),  # the rest
    ]


def test_positions_of_smaller_destinations_stay_empty(list_order: List) -> None:
    case = Case(0, (1, 2, 1), num_tables=1, slice_samples=1, local_delay=0, slice_major=False)
    listing = list_order(case, False)
    assert listing.num_leading == 6
    assert listing.tasks == [(1, 0, 0), (2, 0, 0), (0, 0, 0), (1, 1, 0), None, None]
