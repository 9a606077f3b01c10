"""gemv_all_reduce's protocol: the faults of every operator (protocol.py), busy PEs, distant epochs.

Sequences of operators are tested in test_turns.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from bits import difference
from gemv_cases import ALGORITHMS, Case, expected_bits, make_inputs
from protocol import Mismatch, ProtocolSuite, Work
from worlds import TRANSPORTS, error_of, init_with_impatient_kernels, run_pes, told_later

import persistent_ops as po

MB = 1 << 20
_CASE = Case("protocol", 75, lambda rank: 40 + 8 * rank, 2)


def _call(iteration: int, case: Case = _CASE, **options: Any) -> torch.Tensor:
    inputs, device = make_inputs(case, po.world_size(), iteration), po.device()
    bias, residual = (None if t is None else t.to(device) for t in (inputs.bias, inputs.residual))
    weight, x = inputs.weights[po.rank()].to(device), inputs.xs[po.rank()].to(device)
    return po.gemv_all_reduce(weight, x, **{"bias": bias, "residual": residual, "wire_dtype": case.comm, **options})


def _is_right(output: torch.Tensor, iteration: int, case: Case = _CASE) -> bool:
    want = expected_bits(make_inputs(case, po.world_size(), iteration), case.comm)
    return difference(output.cpu(), want) is None


def _checked(iteration: int, case: Case = _CASE, **options: Any) -> bool:
    output = _call(iteration, case, **options)
    po.check()
    return _is_right(output, iteration, case)


# ---- busy PEs --------------------------------------------------------------------------------------------------------


def _busy_pe(backend: str, options: dict[str, Any]) -> list[bool]:
    """One PE has far more to multiply than the others, which wait for it in their kernels."""
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


# ---- faults ----------------------------------------------------------------------------------------------------------

_OTHER = Case("protocol, others", 32, lambda rank: 16, 2)


def _other(case: Case, *told: str, **options: Any) -> Mismatch:
    return Mismatch(lambda: _call(1, case, **{"algorithm": "one_shot", **options}), told)


def _lookups() -> torch.Tensor:
    world, device = po.world_size(), po.device()
    indices, offsets = torch.zeros(world, dtype=torch.int64, device=device), torch.arange(world + 1, device=device)
    split = {"batch_per_rank": [1] * world, "dim_per_rank": [8] * world}
    return po.embedding_all_to_all([torch.ones(4, 8, device=device)], indices, offsets, **split)


def _with_residual() -> torch.Tensor:
    residual = torch.zeros(_OTHER.shape, dtype=_OTHER.dtype, device=po.device())
    return _call(1, _OTHER, algorithm="one_shot", residual=residual)


class TestFaults(ProtocolSuite):
    operator = "gemv_all_reduce"
    ways = ALGORITHMS
    heap_bytes = 32 * MB
    absences = (("one_shot", "auto"), ("two_shot", "auto"), ("two_shot", "staged"))
    mismatches: ClassVar = {
        "rows": _other(Case("other rows", 40, lambda rank: 16, 2), "rows of weight", "40 on PE 1"),
        "rows of the same tiles": _other(Case("rows of tiles", 31, lambda rank: 16, 2), "rows of weight", "31 on PE 1"),
        "vectors": _other(Case("other N", 32, lambda rank: 16, 3), "vectors in x", "3 on PE 1"),
        "no dimension of vectors": _other(Case("N gone", 32, lambda rank: 16), "vectors in x", "1 on PE 1"),
        "rows and vectors exchanged": _other(Case("MN", 16, lambda rank: 16, 4), "16 on PE 1", "4 on PE 1"),
        "dtype": _other(
            Case("other dtype", 32, lambda rank: 16, 2, torch.float16), "dtype of weight", "float16 on PE 1"
        ),
        "wire_dtype": _other(Case("comm", 32, lambda rank: 16, 2, wire_dtype="own"), "wire_dtype is "),
        "algorithm": _other(_OTHER, "algorithm is ", "two_shot on PE 1", algorithm="two_shot"),
        "no bias": _other(_OTHER, "bias is ", "None on PE 1", bias=None),
        "a residual": Mismatch(_with_residual, ["residual is ", "a tensor on PE 1"]),
        "barrier": Mismatch(po.barrier, ["barrier"]),
        "embedding_all_to_all": Mismatch(_lookups, ["embedding_all_to_all"]),
    }
    first_call = "gemv_all_reduce"
    deaths = (("stopped", "two_shot"), ("killed", "one_shot"))
    deaths_on_gpus = (("stopped", "one_shot"),)

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        out = torch.ones(_CASE.shape, dtype=_CASE.dtype, device=po.device())
        want = expected_bits(make_inputs(_CASE, po.world_size(), iteration), _CASE.comm)
        return Work(
            lambda: _call(iteration, algorithm=way, out=out),
            lambda: difference(out.cpu(), want) is None,
            lambda: bool(out.isnan().all()),
            lambda: bool((out.isnan().cpu() | (out.cpu() == want)).all()),
        )

    @classmethod
    def meet(cls) -> object:
        return _call(1, _OTHER, algorithm="one_shot")


# ---- several launches ------------------------------------------------------------------------------------------------


def _pending_error(backend: str) -> list[Any]:
    """An error of an earlier operator is raised when the peers have all launches of a call."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    device, rows = po.device(), 65544  # more than one launch has room for
    weight, x = torch.ones(rows, 2, device=device), torch.ones(2, device=device)
    po.gemv_all_reduce(weight, x)
    with told_later():
        lookups = (torch.tensor([0, 9], device=device), torch.arange(3, device=device))
        po.embedding_all_to_all([torch.ones(4, 2, device=device)], *lookups)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the kernel has reported it
    out = torch.zeros(rows, device=device)
    error = error_of(lambda: po.gemv_all_reduce(weight, x, out=out))[:2]
    is_right = bool((out == 2 * po.world_size()).all())
    again = _checked(1)
    po.finalize()
    return [error[0], "index 9" in error[1], is_right, again]


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


def _stale_packets(backend: str) -> list[bool]:
    """Return to epochs that differ from earlier epochs in their upper bits alone.

    PE 1 multiplies for a long time. It has granted its credit, but sent nothing, when PE 0 first looks for its packets.
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
