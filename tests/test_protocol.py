"""Faults: a PE that is late, stopped, killed or launches something else; bad input; recovery; far epochs."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_cases import Case, expected_bits, make_inputs, split_of
from worlds import assert_gone, dead_peer, error_of, gave_up, init_with_impatient_kernels, run_pes

import persistent_ops as po

_CASE = Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19)
_TIMEOUT = 8.0  # of a kernel that waits for a PE that does not come


def _call(iteration: int, case: Case = _CASE, **options: Any) -> torch.Tensor:
    rank, world = po.rank(), po.world_size()
    weights, indices, offsets, factors = (
        [t.to(po.device()) for t in x] if isinstance(x, list) else None if x is None else x.to(po.device())
        for x in make_inputs(case, rank, world, iteration)
    )
    split = split_of(case, world)
    dims = [sum(case.dims(pe)) for pe in range(world)]
    output = po.embedding_all_to_all(
        weights, indices, offsets, factors, batch_per_rank=split, dim_per_rank=dims, **options
    )
    return output


def _is_right(output: torch.Tensor, iteration: int, case: Case = _CASE) -> bool:
    rank, world = po.rank(), po.world_size()
    inputs = [make_inputs(case, pe, world, iteration) for pe in range(world)]
    return torch.equal(output.cpu(), expected_bits(case, inputs, rank, split_of(case, world)))


def _checked(iteration: int, **options: Any) -> bool:
    output = _call(iteration, **options)
    po.check()
    return _is_right(output, iteration)


# ---- programs of the PEs -------------------------------------------------------------------------------------------


def _late_pe(backend: str, options: dict[str, Any]) -> list[bool]:
    po.init(backend, operator_timeout=20.0, heap_size=64 << 20, **options)
    right = []
    for iteration in range(8):
        if iteration % po.world_size() == po.rank():
            time.sleep(0.3)
        right.append(_checked(iteration))
    po.finalize()
    return right


def _absent_then_recovered(backend: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    init_with_impatient_kernels(backend, _TIMEOUT, 64 << 20, **options)
    first = _checked(0)
    seen: dict[str, Any] = {"first": first}
    if po.rank() != 0:
        output: list[torch.Tensor] = []

        def call() -> None:
            output.append(_call(1))
            po.check()

        seen["error"] = error_of(call)
        seen["again"] = error_of(lambda: _call(2))
        (folder / f"gave_up_{po.rank()}").touch()
    else:
        gave_up(folder, po.world_size() - 1)
    po.recover()
    seen["after"] = [_checked(iteration) for iteration in range(3, 7)]
    po.finalize()
    return seen


def _mismatch(backend: str, kind: str) -> tuple[str, str, float]:
    po.init(backend, operator_timeout=60.0, heap_size=64 << 20)
    assert _checked(0)
    me = po.rank()

    def act() -> None:
        if kind == "operator" and me == 1:
            po.barrier()
        elif kind == "shape" and me == 1:
            _call(1, Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 21))
        elif kind == "dtype" and me == 1:
            _call(1, Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19, dtype=torch.bfloat16))
        else:
            _call(1)
        po.check()

    error = error_of(act)
    po.recover()
    assert _checked(2)
    po.finalize()
    return error


def _first_widths(backend: str) -> list[Any]:
    """Meet something else where the PEs would agree on the widths of tables that are new."""
    po.init(backend, operator_timeout=60.0, heap_size=64 << 20)
    table = torch.ones(4, 8, device=po.device())
    world = po.world_size()
    lookups = torch.zeros(world, dtype=torch.int64, device=po.device()), torch.arange(world + 1, device=po.device())

    def act() -> None:
        if po.rank() == 1:
            po.barrier()
        else:
            po.embedding_all_to_all([table], *lookups)
        po.check()

    error = error_of(act)
    po.recover()
    result = po.embedding_all_to_all([table], *lookups)
    po.check()
    is_right = bool((result == 1).all())
    po.finalize()
    return [error[0], "widths" in error[1], error[2] < 30.0, is_right]


def _far_epoch(backend: str, epoch: int, options: dict[str, Any]) -> list[bool]:
    po.init(backend, operator_timeout=20.0, heap_size=64 << 20, **options)
    po.runtime.world.current().workspace.set_epoch(epoch)
    right = [_checked(iteration) for iteration in range(6)]
    po.finalize()
    return right


def _bad_input(backend: str, kind: str, bounds: str) -> dict[str, Any]:
    po.init(backend, operator_timeout=10.0, heap_size=64 << 20)
    rank, world = po.rank(), po.world_size()
    weights, indices, offsets, _ = make_inputs(_CASE, rank, world, 0)
    batch = 19
    bag = next(b for b in range(batch, 2 * batch) if offsets[b + 1] - offsets[b] >= 2)  # of table 1
    if rank == 1:
        if kind == "index":
            indices[offsets[bag] + 1] = 61
        elif kind == "negative index":
            indices[offsets[bag] + 1] = -1
        elif kind == "falling offset":
            offsets[bag + 1] = offsets[bag] - 1
        elif kind == "offset beyond":
            offsets[bag + 1] = offsets[-1] + 1000
        elif kind == "first offset":
            offsets[0] = 1
        elif kind == "last offset":
            offsets[-1] -= 1
    device = po.device()
    outcome: dict[str, Any] = {"bag": bag - batch}

    def call() -> None:
        outcome["output"] = po.embedding_all_to_all(
            [w.to(device) for w in weights], indices.to(device), offsets.to(device), bounds=bounds
        )
        po.check()

    outcome["error"] = error_of(call)[:2]
    outcome["usable"] = _checked(1)
    if bounds == "ignore" and "index" in kind:
        inputs = [list(make_inputs(_CASE, pe, world, 0)) for pe in range(world)]
        bad = int(inputs[1][2][bag]) + 1
        inputs[1][1] = torch.cat([inputs[1][1][:bad], inputs[1][1][bad + 1 :]])
        inputs[1][2] = torch.where(torch.arange(len(inputs[1][2])) > bag, inputs[1][2] - 1, inputs[1][2])
        want = expected_bits(_CASE, inputs, rank, split_of(_CASE, world))  # type: ignore[arg-type]
        outcome["skipped"] = torch.equal(outcome["output"].cpu(), want)
    outcome.pop("output", None)
    po.finalize()
    return outcome


def _exits(backend: str, folder: str) -> None:
    po.init(backend, operator_timeout=250.0, heap_size=64 << 20)
    assert _checked(0)
    with open(f"{folder}/{po.rank()}.pid", "w") as file:
        file.write(str(os.getpid()))
    po.barrier()
    if po.rank() == 1:
        os._exit(0)
    assert _checked(1)  # the launcher ends the survivors once it has noticed, long before they would give up


# ---- tests ---------------------------------------------------------------------------------------------------------


TRANSPORTS = [pytest.param({}, id="direct"), pytest.param({"transport": "staged"}, id="staged", marks=pytest.mark.host)]


@pytest.mark.parametrize("options", TRANSPORTS)
def test_late_pe(backend: str, options: dict[str, Any]) -> None:
    results = run_pes(_late_pe, 3, backend, options, timeout=120)
    assert results == [[True] * 8] * 3


@pytest.mark.parametrize("options", TRANSPORTS)
def test_timeout_names_the_peer_and_recovery_works(backend: str, tmp_path: Path, options: dict[str, Any]) -> None:
    soonest = math.inf
    for attempt in range(3):  # a busy machine adds to the time, and takes nothing from it
        folder = tmp_path / str(attempt)
        folder.mkdir()
        arguments = (backend, options, folder)
        results = run_pes(_absent_then_recovered, 3, *arguments, timeout=120)
        for rank, seen in enumerate(results):
            assert seen["first"] and seen["after"] == [True] * 4, rank
        for seen in results[1:]:
            name, text, _ = seen["error"]
            assert name == "PeerTimeoutError" and "PE 0" in text and "recover" in text
            assert seen["again"][0] == "PeerTimeoutError", "a failed world takes no launch before po.recover()"
        soonest = min(soonest, max(seen["error"][2] for seen in results[1:]))
        if soonest < 1.6 * _TIMEOUT:
            break
    assert soonest < 1.6 * _TIMEOUT, "it gives up once, not one wait after the other"


@pytest.mark.parametrize("kind", ["operator", "shape", "dtype"])
def test_contract_mismatch_is_seen_by_every_pe(backend: str, kind: str) -> None:
    results = run_pes(_mismatch, 3, backend, kind, timeout=120)
    for rank, (name, text, seconds) in enumerate(results):
        assert name in ("ContractMismatchError",), (rank, name, text)
        assert "embedding_all_to_all(world_size=3, " in text
        assert "PE 1" in text and (rank != 1 or kind != "operator" or "barrier(world_size=3)" in text)
        assert seconds < 30.0, "a mismatch is not a time-out"


def test_the_agreement_on_widths_meets_something_else(backend: str) -> None:
    results = run_pes(_first_widths, 3, backend, timeout=120)
    assert results == [["ContractMismatchError", True, True, True]] * 3


@pytest.mark.parametrize("options", TRANSPORTS)
@pytest.mark.parametrize("epoch", [2**32 - 3, 2**47])
def test_far_epochs(backend: str, epoch: int, options: dict[str, Any]) -> None:
    assert run_pes(_far_epoch, 2, backend, epoch, options, timeout=120) == [[True] * 6] * 2


@pytest.mark.parametrize("bounds", ["fatal", "ignore"])
@pytest.mark.parametrize(
    "kind", ["index", "negative index", "falling offset", "offset beyond", "first offset", "last offset"]
)
def test_bad_input(backend: str, kind: str, bounds: str) -> None:
    results = run_pes(_bad_input, 2, backend, kind, bounds, timeout=120)
    for rank, outcome in enumerate(results):
        name, text = outcome["error"]
        if rank == 1 and bounds == "fatal":
            assert name == "IndexError", text
            if "index" in kind:
                assert f"table 1, bag {outcome['bag']} has index {61 if kind == 'index' else -1}" in text
            else:
                assert "offsets: table" in text
        else:
            assert name == "", (rank, text)
        assert outcome["usable"], rank
        assert outcome.get("skipped", True), rank


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_dead_peer(backend: str, how: str, tmp_path: Path) -> None:
    soonest = math.inf
    for attempt in range(3):  # a busy machine adds to the time, and takes nothing from it
        folder = tmp_path / str(attempt)
        folder.mkdir()
        survivors = dead_peer(_checked, backend, how, folder)
        assert all("PE 1" in survivor.text for survivor in survivors), survivors
        soonest = min(soonest, max((survivor.seconds for survivor in survivors), default=0.0))
        if soonest < 6.0:
            break
    assert soonest < 6.0


def test_peer_that_exits(backend: str, tmp_path: Path) -> None:
    with pytest.raises(po.PersistentOpsError, match="rank 1|PE 1"):
        po.launch(_exits, 3, backend, str(tmp_path), timeout=200)
    assert_gone(tmp_path, 3)
