"""embedding_all_to_all's protocol: the faults of every operator (protocol.py), bad input, a PE that exits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from embedding_cases import Case, expected_bits, make_inputs, split_of
from protocol import Mismatch, ProtocolSuite, Work
from worlds import assert_gone, error_of, run_pes

import persistent_ops as po

_CASE = Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19)


def _call(iteration: int, case: Case = _CASE, **options: Any) -> torch.Tensor:
    rank, world = po.rank(), po.world_size()
    weights, indices, offsets, factors = (
        [t.to(po.device()) for t in x] if isinstance(x, list) else None if x is None else x.to(po.device())
        for x in make_inputs(case, rank, world, iteration)
    )
    split = split_of(case, world)
    dims = [sum(case.dims(pe)) for pe in range(world)]
    output = po.embedding_all_to_all(
        weights, indices, offsets, factors, batch_per_rank=split, dim_per_rank=dims, wire_dtype=case.wire, **options
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


def _first_widths(backend: str) -> list[Any]:
    """PE 1 calls something else where the PEs would agree on the widths of new tables."""
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
        elif kind == "least offset":
            offsets[bag + 1] = -(2**63)
        elif kind == "least last offset":
            offsets[-1] = -(2**63)
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
    assert _checked(1)  # the launcher notices and ends the survivors long before they would give up


# ---- tests ---------------------------------------------------------------------------------------------------------


def _other(case: Case) -> Mismatch:
    return Mismatch(lambda: _call(1, case))


class TestFaults(ProtocolSuite):
    operator = "embedding_all_to_all"
    ways = ("communication_aware", "oblivious")
    absences = (("communication_aware", "auto"), ("communication_aware", "staged"))
    patience = 8.0
    gives_up_within = 1.6 * patience
    mismatches: ClassVar = {
        "shape": _other(Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 21)),
        "dtype": _other(
            Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19, dtype=torch.bfloat16),
        ),
        "wire_dtype": _other(
            Case("protocol", dims=lambda rank: (8, 32), batch=lambda world: 19, wire=torch.bfloat16),
        ),
        "barrier": Mismatch(po.barrier, ["barrier()"]),
    }
    deaths = (("killed", "communication_aware"), ("stopped", "communication_aware"))
    noticed_within = 6.0

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        outputs: list[torch.Tensor] = []
        return Work(
            lambda: outputs.append(_call(iteration, schedule=way)),
            lambda: _is_right(outputs[0], iteration),
        )

    @classmethod
    def meet(cls) -> object:
        return _call(1)

    def test_the_first_call_meets_something_else(self, backend: str) -> None:
        """For new tables: in the exchange of their widths, which sets nothing aside."""
        results = run_pes(_first_widths, 3, backend, timeout=120)
        assert results == [["ContractMismatchError", True, True, True]] * 3


@pytest.mark.parametrize("bounds", ["fatal", "ignore"])
@pytest.mark.parametrize(
    "kind",
    [
        "index",
        "negative index",
        "falling offset",
        "offset beyond",
        "first offset",
        "last offset",
        "least offset",
        "least last offset",
    ],
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


def test_peer_that_exits(backend: str, tmp_path: Path) -> None:
    with pytest.raises(po.PersistentOpsError, match="rank 1|PE 1"):
        po.launch(_exits, 3, backend, str(tmp_path), timeout=200)
    assert_gone(tmp_path, 3)
