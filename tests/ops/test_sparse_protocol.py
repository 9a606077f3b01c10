"""Faults around sparse_all_reduce: a PE is late, stopped, killed, passes bad rows or calls something else; recovery.

Also distant epochs. Sequences of operators are tested in test_turns.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import gemv_cases
import pytest
import torch
from protocol import Mismatch, ProtocolSuite, Work
from sparse_cases import (
    ALGORITHMS,
    INTO_ALGORITHMS,
    WAYS,
    Case,
    Entries,
    Room,
    call_into,
    disjoint,
    expected,
    identical,
    make_inputs,
    rows_problem,
    taken_apart,
    to_sparse,
    uniform,
    wanted,
)
from worlds import TRANSPORTS, error_of, in_world, run_pes

import persistent_ops as po
from persistent_ops.ops.sparse_plan import OPERATOR, Tuning

MB = 1 << 20
_CASE = Case("protocol", 300, uniform(60, 45, 80), (10,))


def _call(iteration: int, case: Case = _CASE, algorithm: str = "auto") -> torch.Tensor:
    x = to_sparse(case, make_inputs(case, po.world_size(), iteration)[po.rank()])
    return po.sparse_all_reduce(x, op=case.op, algorithm=algorithm)


def _problem(output: torch.Tensor, iteration: int, case: Case = _CASE) -> str | None:
    return rows_problem(taken_apart(output), wanted(case, po.world_size(), iteration), zeros_have_signs=False)


def _checked(iteration: int, case: Case = _CASE, algorithm: str = "auto") -> bool:
    output = _call(iteration, case, algorithm)
    po.check()
    return _problem(output, iteration, case) is None


# ---- busy PEs --------------------------------------------------------------------------------------------------------


def _busy_pe(many: int) -> list[str]:
    """One PE has far more rows than the others, which wait for it in their kernels."""
    problems = []
    for busy in range(po.world_size()):
        counts = [many if rank == busy else 5 for rank in range(po.world_size())]
        case = Case(f"PE {busy} is busy", 4 * many // 3, uniform(*counts), (12,), torch.bfloat16)
        problems += [f"{case.name}, {algorithm}" for algorithm in ALGORITHMS if not _checked(busy, case, algorithm)]
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_busy_pe(backend: str, options: dict[str, Any]) -> None:
    many = 600 if options else 30000  # in the proxy every row is a network operation, which takes time
    assert in_world(_busy_pe, 2, backend, many, **{"heap_size": 128 * MB, **options}) == [[], []]


# ---- another operator ------------------------------------------------------------------------------------------------

_PRODUCT = gemv_cases.Case("sparse turns", 75, lambda rank: 24, 2)


def _product(iteration: int) -> bool:
    inputs = gemv_cases.make_inputs(_PRODUCT, po.world_size(), iteration)
    output, _ = gemv_cases.call(_PRODUCT, inputs, inputs.weights[po.rank()].to(po.device()), iteration)
    return gemv_cases.difference(output.cpu(), gemv_cases.expected_bits(inputs)) is None


# ---- rows that are not in the table ----------------------------------------------------------------------------------

_BAD = {
    "minus one": -1,
    "R": 100,
    "in the last word of bits": 103,
    "behind the bits": 128,
    "far behind": 5000,
    "minus R": -100,
    "the largest of 32 bits": 2**31 - 1,
    "the smallest of 32 bits": -(2**31),
    "beyond 32 bits": 2**32 + 7,
    "the largest of 64 bits": 2**63 - 1,
    "the smallest of 64 bits": -(2**63),
}


def _bad_rows() -> list[str]:
    """One PE passes rows outside of the table, among good ones. The next call has none."""
    problems = []
    rank, world = po.rank(), po.world_size()
    room = Room(100, (4,), torch.float32)
    for number, (name, bad) in enumerate(_BAD.items()):
        index_dtype = torch.int32 if -(2**31) <= bad < 2**31 and number % 2 else torch.int64
        case = Case("bad rows", 100, uniform(30, 25, 20), (4,), index_dtype=index_dtype)
        inputs, want = make_inputs(case, world, number % 6), wanted(case, world, number % 6)
        entries, is_bad = inputs[rank], rank == number % world
        if is_bad:
            places = torch.tensor([0, 7, len(entries.indices)])  # of values between which bad rows are inserted
            indices, values = list(entries.indices.tensor_split(places)), list(entries.values.tensor_split(places))
            for place in (3, 2, 1):
                indices.insert(place, torch.tensor([bad]))
                values.insert(place, torch.full((1, 4), torch.nan))
            entries = Entries(torch.cat(indices), torch.cat(values))
        for entry, algorithm in WAYS:
            results: list[torch.Tensor] = []

            def call(
                entries: Entries = entries, entry: str = entry, algorithm: str = algorithm, case: Case = case
            ) -> None:
                if entry == "into":
                    room.reset()
                    call_into(case, entries, room, algorithm)
                else:
                    results.append(po.sparse_all_reduce(to_sparse(case, entries), algorithm=algorithm))  # noqa: B023
                po.check()

            kind, text, _ = error_of(call)
            found = None
            if is_bad and (kind != "IndexError" or str(bad) not in text or "100" not in text):
                found = f"{kind or 'no error'}: {text}"
            elif not is_bad and kind:
                found = f"{kind}: {text}"
            elif entry == "into":
                found = room.problem(want)
            elif results:
                found = rows_problem(taken_apart(results[0]), want, zeros_have_signs=False)
            elif not is_bad:
                found = "no result"
            if not _checked(number % 5):  # in any case, so that PEs stay in step
                found = found or "the call behind it is wrong"
            if found is not None:
                problems.append(f"{name}, {entry} {algorithm}: {found}")
    room.free()
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_bad_rows_are_told_where_they_were_passed(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_bad_rows, 3, backend, **options) == [[]] * 3


def _only_bad_rows() -> list[str]:
    """All rows of all PEs are bad, or all rows of one PE. The sum contains the rest."""
    problems = []
    for iteration, algorithm in enumerate((*ALGORITHMS, "auto")):
        for are_all in (True, False):
            case = Case("only bad rows", 64, uniform(9), (4,))
            inputs = make_inputs(case, po.world_size(), iteration)
            entries = inputs[po.rank()]
            is_bad = are_all or po.rank() == 0
            if is_bad:
                entries = Entries(torch.full((9,), 64 + iteration), torch.full((9, 4), torch.nan))
            left = [] if are_all else inputs[1:]
            nothing = Entries(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))
            results: list[torch.Tensor] = []

            def call(entries: Entries = entries, algorithm: str = algorithm, case: Case = case) -> None:
                results.append(po.sparse_all_reduce(to_sparse(case, entries), algorithm=algorithm))  # noqa: B023
                po.check()

            kind, text, _ = error_of(call)
            if kind != ("IndexError" if is_bad else ""):
                problems.append(f"{algorithm}, all {are_all}: {kind}: {text}")
            elif results and rows_problem(taken_apart(results[0]), expected([nothing, *left]), zeros_have_signs=False):
                problems.append(f"{algorithm}, all {are_all}: a wrong sum")
            if not _checked(iteration):
                problems.append(f"{algorithm}, all {are_all}: the call behind it is wrong")
    return problems


def test_only_bad_rows(backend: str) -> None:
    assert in_world(_only_bad_rows, 2, backend) == [[], []]


def _bad_rows_behind_a_handle() -> list[tuple[str, str]]:
    """The error of an asynchronous call is raised by the call, its wait(), or po.check()."""
    case = Case("bad rows", 100, uniform(30), (3,))
    good = to_sparse(case, make_inputs(case, po.world_size(), 0)[po.rank()])
    entries = Entries(torch.tensor([4, 100 + 7 * po.rank()]), torch.ones(2, 3))

    def call() -> None:
        works = [po.sparse_all_reduce(x, async_op=True) for x in (good, to_sparse(case, entries), good)]
        for work in works:
            work.wait()
        po.check()

    kind, text, _ = error_of(call)
    return [(kind, text), ("", "") if _checked(1) else ("", "the call behind it is wrong")]


def test_bad_rows_behind_a_handle(backend: str) -> None:
    for rank, (found, after) in enumerate(in_world(_bad_rows_behind_a_handle, 2, backend)):
        assert found[0] == "IndexError" and str(100 + 7 * rank) in found[1] and after == ("", "")


# ---- rows whose order is declared wrongly ----------------------------------------------------------------------------

_NOT_COALESCED = {
    "twice": [3, 5, 5, 90],
    "not ascending": [3, 50, 5, 90],
    "first not first": [99, 3, 5, 90],
    "last not last": [3, 5, 90, 0],
    "twice at the end": [3, 5, 99, 99],
}


def _not_coalesced() -> list[str]:
    """One PE declares that its rows ascend, which is wrong. It gets the error, and nobody waits forever."""
    problems = []
    case = Case("not coalesced", 100, uniform(20), (4,), is_coalesced=True)
    good = Entries(torch.tensor([3, 5, 7, 90]), torch.ones(4, 4))
    room = Room(100, (4,), torch.float32)
    for number, (name, rows) in enumerate(_NOT_COALESCED.items()):
        is_bad = po.rank() == number % po.world_size()
        for entry, algorithm in WAYS:
            if algorithm == "dense":  # adds up entries in any order
                continue
            entries = Entries(torch.tensor(rows), good.values) if is_bad else good

            def call(entries: Entries = entries, entry: str = entry, algorithm: str = algorithm) -> None:
                if entry == "into":
                    call_into(case, entries, room, algorithm)
                else:
                    po.sparse_all_reduce(to_sparse(case, entries), algorithm=algorithm)
                po.check()

            kind, text, _ = error_of(call)
            if kind != ("ValueError" if is_bad else "") or (is_bad and "coalesced" not in text):
                problems.append(f"{name}, {entry} {algorithm}: {kind}: {text}")
            if not _checked(number % 5):
                problems.append(f"{name}, {entry} {algorithm}: the call behind it is wrong")
    room.free()
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_rows_that_are_not_coalesced_as_they_say(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_not_coalesced, 2, backend, **options) == [[], []]


# ---- faults ----------------------------------------------------------------------------------------------------------

_OTHER = Case("others", 96, uniform(20, 30, 25), (6,))


def _other(case: Case, *told: str, algorithm: str = "owner") -> Mismatch:
    return Mismatch(lambda: _call(1, case, algorithm), told)


class TestFaults(ProtocolSuite):
    operator = "sparse_all_reduce"
    ways = (*ALGORITHMS, *(f"into {name}" for name in INTO_ALGORITHMS))
    absences = (
        *((name, "auto") for name in (*ALGORITHMS, "into owner")),
        ("into allgather", "staged"),
    )
    mismatches: ClassVar = {
        "rows": _other(replace(_OTHER, rows=200), "num_rows", "200 on PE 1"),
        "rows of the same words": _other(replace(_OTHER, rows=95), "num_rows", "95 on PE 1"),
        "row shape": _other(replace(_OTHER, row_shape=(7,)), "the shape of a row of values is "),
        "row shape of the same width": _other(replace(_OTHER, row_shape=(2, 3))),
        "scalar rows": _other(replace(_OTHER, row_shape=())),
        "dtype": _other(replace(_OTHER, dtype=torch.float16), "the dtype of values is "),
        "dtype of the same size": _other(replace(_OTHER, dtype=torch.bfloat16), "the dtype of values is "),
        "op": _other(replace(_OTHER, op="mean"), "op is ", "mean on PE 1"),
        "algorithm": _other(_OTHER, "algorithm is ", "allgather on PE 1", algorithm="allgather"),
        "dense": _other(_OTHER, algorithm="dense"),
        "barrier": Mismatch(po.barrier, ["barrier"]),
        "gemv_all_reduce": Mismatch(lambda: _product(1), ["gemv_all_reduce"]),
    }
    first_call = "sparse_all_reduce"
    deaths = (("stopped", "owner"), ("killed", "allgather"))
    deaths_on_gpus = (("stopped", "allgather"),)
    names_the_dead = False

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        algorithm = way.removeprefix("into ")
        if way == algorithm:
            outputs: list[torch.Tensor] = []
            return Work(
                lambda: outputs.append(_call(iteration, algorithm=algorithm)),
                lambda: _problem(outputs[0], iteration) is None,
            )
        room = Room(300, _CASE.row_shape, _CASE.dtype)
        entries = make_inputs(_CASE, po.world_size(), iteration)[po.rank()]
        return Work(
            lambda: call_into(_CASE, entries, room, algorithm, 120),
            lambda: room.problem(wanted(_CASE, po.world_size(), iteration)) is None,
            lambda: bool(room.values.isnan().all()),
        )

    @classmethod
    def meet(cls) -> object:
        return _call(1, _OTHER, "owner")

    @classmethod
    def warm_up(cls) -> None:
        """Kernels are compiled and other operators agree before PEs wait for each other in calls that do not match."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for algorithm in ("allgather", "dense"):  # the first call of a layout always uses "owner"
                assert _checked(0, Case("compiled", 64, uniform(9), (6,), dtype), algorithm)
        assert _product(0) and _product(1)


def _met_before(backend: str) -> dict[str, tuple[str, str, float]]:
    """PEs make different calls, each of which all PEs have made before."""
    po.init(backend, operator_timeout=60.0, heap_size=64 * MB)
    errors = {}

    def note(kind: str, act: Callable[[], Any]) -> None:
        errors[kind] = error_of(lambda: [act(), po.check()])
        po.recover()
        assert _checked(len(errors) % 6, algorithm=ALGORITHMS[len(errors) % 3]), kind

    is_other = po.rank() == 1
    half = replace(_OTHER, dtype=torch.float16)
    right = [_checked(2, case, algorithm) for case in (_OTHER, half) for algorithm in ALGORITHMS]
    assert all(right)
    wide = replace(_OTHER, row_shape=(300,))  # room that only "allgather" needs has not been set aside for it
    assert _checked(0, wide, "owner")
    note("algorithm of wide rows", lambda: _call(0, wide, "allgather" if is_other else "owner"))
    note("known shapes", lambda: _call(1, half if is_other else _OTHER, "owner"))
    note("known algorithms", lambda: _call(1, _OTHER, "dense" if is_other else "owner"))
    rooms = [Room(capacity, (6,), torch.float32) for capacity in (96, 90)]
    entries = make_inputs(_OTHER, po.world_size(), 0)[po.rank()]
    for room in rooms:
        call_into(_OTHER, entries, room, "owner", 40)
    note("capacity", lambda: call_into(_OTHER, entries, rooms[is_other], "owner", 40))
    note("algorithm of buffers", lambda: call_into(_OTHER, entries, rooms[0], INTO_ALGORITHMS[is_other], 40))
    rooms[1].reset()
    call_into(_OTHER, entries, rooms[1], "allgather", 40)
    po.check()
    assert rooms[1].problem(wanted(_OTHER, po.world_size(), 0)) is None
    po.finalize()
    return errors


def test_mismatch_of_what_all_have_met_before(backend: str) -> None:
    for rank, errors in enumerate(run_pes(_met_before, 3, backend, timeout=200)):
        for kind, (name, text, seconds) in errors.items():
            where = f"PE {rank}, {kind}: {name}: {text}"
            assert name == "ContractMismatchError" and "PE 1" in text and "recover" in text, where
            assert "sparse_all_reduce" in text, where
            assert seconds < 30.0, f"a mismatch is not a time-out: {where}"
            # A PE that only got the report may not know what differs.
            assert kind != "capacity" or "says what differs" in text or ("90" in text and "96" in text), where


# ---- epochs ----------------------------------------------------------------------------------------------------------


def _stale_flags() -> list[str]:
    """Return to epochs that differ from earlier epochs in their upper bits alone, with other rows each time."""
    problems = []
    workspace = po.runtime.world.current().workspace
    for algorithm in ALGORITHMS:
        for distance in (2**16, 2**32):
            for turn in range(4):
                pattern = identical(40) if turn % 2 else disjoint(40)
                case = Case(f"stale {turn}", 300, pattern, _CASE.row_shape)
                if turn % 2 == po.rank():
                    time.sleep(0.02)  # the peer looks for data that has not arrived
                if not _checked(turn, case, algorithm):
                    problems.append(f"{algorithm}, distance {distance}, turn {turn}")
                begun = int(workspace._local[0])
                workspace.set_epoch(begun - 1 + distance)  # the next launch is the last one's number + distance
    return problems


def test_flags_of_far_epochs_are_not_taken_for_new_ones(backend: str) -> None:
    assert in_world(_stale_flags, 2, backend) == [[], []]


# ---- plans of two places ---------------------------------------------------------------------------------------------


def _plans_of_two_places() -> tuple[str, str]:
    """Words for progress move. PE 0 launches with its earlier plan, as a CUDA graph does, PE 1 with its new plan."""
    po.init("host", heap_size=32 << 20, operator_timeout=20.0)
    world = po.runtime.world.current()
    indices, values = torch.arange(3), torch.ones(3, 2)
    outputs = {
        "out_indices": torch.zeros(8, dtype=torch.int64),
        "out_values": po.empty(8, 2),
        "out_count": torch.zeros(1, dtype=torch.int64),
    }

    def add_up(work_groups: int) -> None:
        OPERATOR.tune(world, Tuning(work_groups=work_groups))
        po.sparse_all_reduce_into(indices, values, num_rows=9, algorithm="owner", **outputs)
        po.check()

    add_up(1)
    plans = OPERATOR.state(world).plans
    ((key, plan),) = plans.items()
    add_up(8)
    if po.rank() == 0:
        plans[key] = plan
    name, text, _ = error_of(lambda: add_up(1))
    po.recover()
    po.finalize()
    return name, text


def test_progress_at_another_place_is_refused() -> None:
    for name, text in po.launch(_plans_of_two_places, 2, threads=True, timeout=100):
        assert name == "ContractMismatchError" and "progress_area is" in text, text
