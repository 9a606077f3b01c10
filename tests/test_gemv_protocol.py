"""Faults around gemv_all_reduce: a PE that is late, stopped, killed or launches something else; recovery; far epochs.

And what shares a workspace: shapes, algorithms and operators that follow one another in any order.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import embedding_cases
import pytest
import torch
from gemv_cases import ALGORITHMS, Case, difference, expected_bits, make_inputs
from worlds import dead_peer, error_of, gave_up, init_with_impatient_kernels, run_pes

import persistent_ops as po

MB = 1 << 20
_CASE = Case("protocol", 75, lambda rank: 40 + 8 * rank, 2)


def _call(iteration: int, case: Case = _CASE, **options: Any) -> torch.Tensor:
    inputs, device = make_inputs(case, po.world_size(), iteration), po.device()
    bias, residual = (None if t is None else t.to(device) for t in (inputs.bias, inputs.residual))
    weight, x = inputs.weights[po.rank()].to(device), inputs.xs[po.rank()].to(device)
    return po.gemv_all_reduce(weight, x, bias=bias, residual=residual, **{"comm_dtype": case.comm, **options})


def _is_right(output: torch.Tensor, iteration: int, case: Case = _CASE) -> bool:
    want = expected_bits(make_inputs(case, po.world_size(), iteration), case.comm)
    return difference(output.cpu(), want) is None


def _checked(iteration: int, case: Case = _CASE, **options: Any) -> bool:
    output = _call(iteration, case, **options)
    po.check()
    return _is_right(output, iteration, case)


TRANSPORTS = [
    pytest.param({}, id="direct"),
    pytest.param({"transport": "staged"}, id="staged", marks=pytest.mark.host),
]


# ---- late and busy PEs -----------------------------------------------------------------------------------------------


def _late_pe(backend: str, options: dict[str, Any]) -> list[bool]:
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB, **options)
    right = []
    for iteration in range(9):
        if iteration % po.world_size() == po.rank():
            time.sleep(0.1)
        right.append(_checked(iteration, algorithm=ALGORITHMS[iteration % 2]))
    # Nobody waits on the host in between: PEs run ahead as far as the protocol lets them.
    outputs = []
    for iteration in range(24):
        if iteration % 8 == 2 * po.rank():
            time.sleep(0.05)
        outputs.append(_call(iteration % 6, algorithm=ALGORITHMS[iteration // 2 % 2]))
    po.check()
    right += [_is_right(output, iteration % 6) for iteration, output in enumerate(outputs)]
    po.finalize()
    return right


@pytest.mark.parametrize("options", TRANSPORTS)
def test_late_pe(backend: str, options: dict[str, Any]) -> None:
    assert run_pes(_late_pe, 3, backend, options, timeout=120) == [[True] * 33] * 3


def _busy_pe(backend: str, options: dict[str, Any]) -> list[bool]:
    """One PE has far more to multiply than the others, which wait for it inside their kernels."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB, **options)
    right = []
    for busy in range(po.world_size()):
        case = Case(f"PE {busy} is busy", 30, lambda rank, busy=busy: 60000 if rank == busy else 8, 16)
        for algorithm in ALGORITHMS:
            right.append(_checked(busy, case, algorithm=algorithm))
    po.finalize()
    return right


@pytest.mark.parametrize("options", TRANSPORTS)
def test_busy_pe(backend: str, options: dict[str, Any]) -> None:
    assert run_pes(_busy_pe, 2, backend, options, timeout=120) == [[True] * 4] * 2


# ---- what follows what on one workspace ------------------------------------------------------------------------------

_SHAPES = [
    Case("turns: plain", 75, lambda rank: 24, 2),
    Case("turns: large", 600, lambda rank: 8, 16),
    Case("turns: a row", 1, lambda rank: 40),
    Case("turns: no rows", 0, lambda rank: 8),
    Case("turns: fp16", 33, lambda rank: 7 * rank, 0, torch.float16),
    Case("turns: comm bf16", 52, lambda rank: 16, 0, comm_dtype="own"),
]
_LOOKUPS = embedding_cases.Case("turns", dims=lambda rank: (8, 16 * rank), batch=lambda world: 13)


def _exchange(iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an embedding exchange's result and what it must be."""
    rank, world, device = po.rank(), po.world_size(), po.device()
    inputs = [embedding_cases.make_inputs(_LOOKUPS, pe, world, iteration) for pe in range(world)]
    tables, indices, offsets, _ = inputs[rank]
    dims = [sum(_LOOKUPS.dims(pe)) for pe in range(world)]
    split = embedding_cases.split_of(_LOOKUPS, world)
    output = po.embedding_all_to_all(
        [table.to(device) for table in tables],
        indices.to(device),
        offsets.to(device),
        batch_per_rank=split,
        dim_per_rank=dims,
    )
    return output, embedding_cases.expected_bits(_LOOKUPS, inputs, rank, split)


def _turns(backend: str, options: dict[str, Any]) -> list[str]:
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB, **options)
    problems: list[str] = []
    pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    order = torch.Generator().manual_seed(3)  # the same on all PEs
    for turn in range(60):
        kind = int(torch.randint(len(_SHAPES) + 3, (), generator=order))
        iteration = turn % 5
        if (turn + po.rank()) % 11 == 0:
            time.sleep(0.01)
        if kind == len(_SHAPES) + 2:
            po.barrier()
        elif kind >= len(_SHAPES):
            pending.append((f"turn {turn}: embedding_all_to_all", *_exchange(iteration)))
        else:
            case, algorithm = _SHAPES[kind], ALGORITHMS[int(torch.randint(2, (), generator=order))]
            want = expected_bits(make_inputs(case, po.world_size(), iteration), case.comm)
            pending.append(
                (f"turn {turn}: {case.name}, {algorithm}", _call(iteration, case, algorithm=algorithm), want)
            )
        if turn % 7 == 6:  # now and then only, so that launches follow each other without the host
            problems += [f"{name}: {found}" for name, *pair in pending if (found := _difference(*pair))]
            pending.clear()
    po.check()
    problems += [f"{name}: {found}" for name, *pair in pending if (found := _difference(*pair))]
    po.finalize()
    return problems


def _difference(output: torch.Tensor, want: torch.Tensor) -> str | None:
    return difference(output.cpu(), want)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_shapes_algorithms_and_operators_take_turns(backend: str, options: dict[str, Any]) -> None:
    assert run_pes(_turns, 3, backend, options, timeout=120) == [[]] * 3


# ---- time-outs and recovery ------------------------------------------------------------------------------------------


def _absent_then_recovered(
    backend: str, timeout: float, algorithm: str, options: dict[str, Any], folder: Path
) -> dict[str, Any]:
    init_with_impatient_kernels(backend, timeout, 32 * MB, **options)
    seen: dict[str, Any] = {"first": [_checked(0, algorithm=each) for each in ALGORITHMS]}
    if po.rank() == 0:  # comes when the others have given up, however busy the machine is
        gave_up(folder, po.world_size() - 1)
    out = torch.ones(_CASE.shape, dtype=_CASE.dtype, device=po.device())

    def call() -> None:
        _call(1, algorithm=algorithm, out=out)
        po.check()

    seen["error"] = error_of(call)
    (folder / f"gave_up_{po.rank()}").touch()
    want = expected_bits(make_inputs(_CASE, po.world_size(), 1))
    seen["poisoned"] = bool(out.isnan().all())
    seen["right or poisoned"] = bool((out.isnan().cpu() | (out.cpu() == want)).all())
    # Who came too late may have found all of its peers' packets of that launch, but finds none of the next one.
    seen["again"] = error_of(lambda: [_call(2), po.check()])
    seen["barrier"] = error_of(po.barrier)
    po.recover()
    seen["after"] = [_checked(iteration, algorithm=ALGORITHMS[iteration % 2]) for iteration in range(3, 9)]
    po.finalize()
    return seen


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param("one_shot", {}, id="one_shot"),
        pytest.param("two_phase", {}, id="two_phase"),
        pytest.param("two_phase", {"transport": "staged"}, id="two_phase-staged", marks=pytest.mark.host),
    ],
)
def test_timeout_names_the_peer_and_recovery_works(
    backend: str, tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    timeout = 4.0
    arguments = (backend, timeout, algorithm, options, tmp_path)
    results = run_pes(_absent_then_recovered, 3, *arguments, timeout=120)
    for rank, seen in enumerate(results):
        assert seen["first"] == [True] * 2 and seen["after"] == [True] * 6, (rank, seen)
        # Only po.recover() ends the failure.
        assert seen["again"][0] == seen["barrier"][0] == "PeerTimeoutError", (rank, seen)
    for rank in (1, 2):
        name, text, seconds = results[rank]["error"]
        assert name == "PeerTimeoutError" and "PE 0" in text and "recover" in text, text
        assert seconds < timeout + 8.0  # far more PEs than cores may be spinning
        assert results[rank]["poisoned"], "rows that never came are no NaN"
    name, text, _ = results[0]["error"]
    assert name == "" or (name == "PeerTimeoutError" and "gave up" in text), "the late PE waits for nobody itself"
    assert results[0]["right or poisoned"]


# ---- PEs that call different things ----------------------------------------------------------------------------------

_OTHER = Case("protocol, others", 32, lambda rank: 16, 2)
# What PE 1 calls while the others call _OTHER with "one_shot"; and fields of the contract that every PE must name.
_MISMATCHES: dict[str, tuple[Case, str, list[str]]] = {
    "rows": (Case("other rows", 40, lambda rank: 16, 2), "one_shot", ["rows=40", "rows=32"]),
    "rows of the same tiles": (Case("rows of tiles", 31, lambda rank: 16, 2), "one_shot", ["rows=31", "rows=32"]),
    "vectors": (Case("other N", 32, lambda rank: 16, 3), "one_shot", ["vectors=3", "vectors=2"]),
    "no dimension of vectors": (Case("N gone", 32, lambda rank: 16), "one_shot", ["vectors=1", "vectors=2"]),
    "rows and vectors exchanged": (Case("MN", 16, lambda rank: 16, 4), "one_shot", ["rows=16", "vectors=4"]),
    "dtype": (Case("other dtype", 32, lambda rank: 16, 2, torch.float16), "one_shot", ["dtype=", "gemv_all_reduce"]),
    "comm_dtype": (Case("comm", 32, lambda rank: 16, 2, comm_dtype="own"), "one_shot", ["comm_dtype="]),
    "algorithm": (_OTHER, "two_phase", ["two_phase=True", "two_phase=False"]),
}


def _mismatches(backend: str) -> dict[str, tuple[str, str, float]]:
    po.init(backend, operator_timeout=60.0, heap_size=32 * MB)
    errors = {}
    for number, (kind, (other, algorithm, _)) in enumerate(_MISMATCHES.items()):
        case, algorithm = (other, algorithm) if po.rank() == 1 else (_OTHER, "one_shot")

        def act(case: Case = case, algorithm: str = algorithm) -> None:
            _call(1, case, algorithm=algorithm)
            po.check()

        errors[kind] = error_of(act)
        po.recover()
        assert _checked(number, algorithm=ALGORITHMS[number % 2]), kind
    for kind in ("barrier", "embedding_all_to_all"):

        def act_as(kind: str = kind) -> None:
            if po.rank() != 1:
                _call(1, _OTHER)
            elif kind == "barrier":
                po.barrier()
            else:
                _exchange(1)
            po.check()

        errors[kind] = error_of(act_as)
        po.recover()
        assert _checked(2), kind
    po.finalize()
    return errors


def test_mismatch_is_named_on_every_pe(backend: str) -> None:
    results = run_pes(_mismatches, 3, backend, timeout=200)
    for rank, errors in enumerate(results):
        for kind, (name, text, seconds) in errors.items():
            where = f"PE {rank}, {kind}: {name}: {text}"
            assert name == "ContractMismatchError" and "PE 1" in text and "recover" in text, where
            assert "gemv_all_reduce(world_size=3, " in text, where
            for field in _MISMATCHES[kind][2] if kind in _MISMATCHES else [kind]:
                assert field in text, where
            assert seconds < 30.0, f"a mismatch is not a time-out: {where}"


def _first_call(backend: str) -> list[Any]:
    """Meet something else in the very first call, in which the PEs set room aside."""
    po.init(backend, operator_timeout=60.0, heap_size=32 * MB)
    free = po.runtime.world.current().heap.free_list.free_bytes

    def act() -> None:
        if po.rank() == 1:
            po.barrier()
        else:
            _call(0)
        po.check()

    error = error_of(act)
    po.recover()
    is_clean = po.runtime.world.current().heap.free_list.free_bytes == free
    right = [_checked(iteration) for iteration in range(3)]
    po.finalize()
    return [error[0], "gemv_all_reduce" in error[1], error[2] < 30.0, is_clean, right]


def test_the_first_call_meets_something_else(backend: str) -> None:
    results = run_pes(_first_call, 3, backend, timeout=200)
    assert results == [["ContractMismatchError", True, True, True, [True] * 3]] * 3


def _pending_error(backend: str) -> list[Any]:
    """An error that an earlier operator left behind is raised when the peers have all launches of a call."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    device, rows = po.device(), 65544  # more than one launch has room for
    weight, x = torch.ones(rows, 2, device=device), torch.ones(2, device=device)
    po.gemv_all_reduce(weight, x)
    bad = torch.sparse_coo_tensor([[0, 9]], torch.ones(2), (4,), device=device, check_invariants=False)
    work = po.sparse_all_reduce(bad, async_op=True)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the kernel has reported it
    out = torch.zeros(rows, device=device)
    error = error_of(lambda: po.gemv_all_reduce(weight, x, out=out))[:2]
    is_right = bool((out == 2 * po.world_size()).all())
    again = _checked(1)
    error_of(work.wait)  # type: ignore[union-attr]  # launched again, it may meet the bad row again
    po.finalize()
    return [error[0], "row 9" in error[1], is_right, again]


def test_pending_errors_come_behind_all_launches_of_a_call(backend: str) -> None:
    results = run_pes(_pending_error, 2, backend, timeout=120)
    assert results == [["IndexError", True, True, True]] * 2


def _many_rows_without_a_peer(backend: str) -> float:
    init_with_impatient_kernels(backend, 2.0, 32 * MB)
    weight, x = torch.ones(60000, 1, device=po.device()), torch.ones(8, 1, device=po.device())
    po.gemv_all_reduce(weight, x)
    po.check()
    if po.rank() == 1:
        po.recover()  # waits for the other one
        seconds = 0.0
    else:

        def act() -> None:
            po.gemv_all_reduce(weight, x)
            po.check()

        name, _, seconds = error_of(act)
        assert name == "PeerTimeoutError"
        po.recover()
    po.finalize()
    return seconds


def test_giving_up_is_soon_over_however_many_rows_are_missing(backend: str) -> None:
    seconds = run_pes(_many_rows_without_a_peer, 2, backend, timeout=60)
    assert seconds[0] < 20.0, "thousands of tiles: it does not wait for each"


# ---- epochs ----------------------------------------------------------------------------------------------------------


def _far_epochs(backend: str, options: dict[str, Any]) -> dict[int, list[bool]]:
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB, **options)
    right: dict[int, list[bool]] = {}
    for epoch in (0, 2**16 - 3, 2**31 - 3, 2**32 - 3, 2**40 - 4, 2**47):
        if epoch:
            po.runtime.world.current().workspace.set_epoch(epoch)
        right[epoch] = []
        for iteration in range(6):
            if iteration % po.world_size() == po.rank():
                time.sleep(0.02)
            right[epoch].append(_checked(iteration, algorithm=ALGORITHMS[iteration // 2 % 2]))
    po.finalize()
    return right


@pytest.mark.parametrize("options", TRANSPORTS)
def test_far_epochs(backend: str, options: dict[str, Any]) -> None:
    for right in run_pes(_far_epochs, 2, backend, options, timeout=120):
        assert len(right) == 6 and all(found == [True] * 6 for found in right.values()), right


def _stale_packets(backend: str) -> list[bool]:
    """Come again to epochs that differ from earlier ones in their upper bits alone.

    PE 1 has long to multiply: it has granted its credit, but sent nothing, when PE 0 first looks for its packets.
    """
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    workspace = po.runtime.world.current().workspace
    case = Case("stale", 8, lambda rank: 2_000_000 if rank == 1 else 8)
    right = []
    for algorithm in ALGORITHMS:
        for distance in (2**16, 2**32):
            right.append(_checked(0, case, algorithm=algorithm))
            begun = int(workspace._local[0])
            workspace.set_epoch(begun - 1 + distance)  # the next launch is the last one's number + distance
            right.append(_checked(1, case, algorithm=algorithm))
    po.finalize()
    return right


def test_packets_of_far_epochs_are_not_taken_for_new_ones(backend: str) -> None:
    assert run_pes(_stale_packets, 2, backend, timeout=120) == [[True] * 8] * 2


# ---- dead peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "algorithm"),
    [
        pytest.param("stopped", "two_phase", id="stopped-two_phase"),
        pytest.param("stopped", "one_shot", id="stopped-one_shot", marks=pytest.mark.gpu),
        pytest.param("killed", "one_shot", id="killed-one_shot"),
    ],
)
def test_dead_peer(backend: str, how: str, algorithm: str, tmp_path: Path) -> None:
    for survivor in dead_peer(functools.partial(_checked, algorithm=algorithm), backend, how, tmp_path):
        assert "PE 1" in survivor.text, survivor
        assert survivor.seconds < 12.0
