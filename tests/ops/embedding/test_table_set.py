"""Recognizing lists of tables: by their properties, and only while the list is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding import table_set
from persistent_ops.ops.embedding.table_set import TableSets


def _drop_the_older_half(sets: dict[Any, Any], most: int) -> None:
    if len(sets) >= min(most, 4):
        for key in list(sets)[: len(sets) // 2]:
            del sets[key]


def test_tables_are_known_by_their_memory() -> None:
    sets = TableSets(_drop_the_older_half)
    table = torch.ones(2, 3)
    found = sets.find([table])
    assert sets.find([table]) is found and sets.find([table.view(2, 3)]) is found
    assert sets.find([table.view(3, 2)]) is not found and sets.find([table, table]) is not found


def test_a_set_that_was_dropped_is_new_to_every_tensor_object() -> None:
    sets = TableSets(_drop_the_older_half)
    tables = [torch.ones(2, 3) for _ in range(7)]
    found = [sets.find([table]) for table in tables]
    assert sets.find([tables[6]]) is found[6]
    again = sets.find([tables[0].view(2, 3)])
    assert again is not found[0] and sets.find([tables[0]]) is again


# Possible changes of a tensor under the same object. Each leaves a table of 4 columns in total.
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shrunk": lambda table: setattr(table, "data", table.data[:3]),
    "grown": lambda table: setattr(table, "data", torch.cat([table.data, table.data + 50])),
    "reshaped": lambda table: setattr(table, "data", table.data.view(-1, 4)),
    "resized": lambda table: table.resize_(2, table.shape[1]),
    "another dtype at the same address": lambda table: setattr(table, "data", table.data.view(torch.bfloat16)),
    "transposed": lambda table: setattr(table, "data", table.data[: table.shape[1]].t()),
}


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_has_changed_is_another(monkeypatch: pytest.MonkeyPatch, change: str, has_guards: bool) -> None:
    if not has_guards:
        monkeypatch.setattr(table_set, "TensorGuards", None)
    sets = TableSets(_drop_the_older_half)
    table = torch.arange(64.0).view(8, 8)
    found = sets.find([table])
    assert sets.find([table]) is found
    CHANGES[change](table)
    other = sets.find([table])
    assert other is not found and sets.find([table]) is other


def test_memory_at_the_same_address_is_another_table() -> None:
    sets = TableSets(_drop_the_older_half)
    room = torch.zeros(16)
    table = torch.nn.Parameter(torch.from_numpy(room.numpy()).view(4, 4))
    found = sets.find([table])
    table.data = torch.empty(0, 0)
    table.data = torch.from_numpy(room.numpy()).view(4, 4)
    assert table.data_ptr() == room.data_ptr()
    assert sets.find([table]) is not found


def test_what_does_not_matter_makes_no_other_set() -> None:
    sets = TableSets(_drop_the_older_half)
    table = torch.nn.Parameter(torch.ones(2, 3))
    found = sets.find([table])
    with torch.inference_mode():
        assert sets.find([table]) is found
    table.requires_grad_(False)
    assert sets.find([table]) is found


def _changed_tables() -> list[str]:
    """Pool one row of a table repeatedly, while the table changes under its tensor object."""
    problems = []
    world, device = po.world_size(), po.device()
    table = torch.nn.Parameter(torch.arange(24.0, device=device).view(6, 4) + 100 * po.rank(), requires_grad=False)
    offsets = torch.arange(world + 1, device=device)
    for name in (None, "shrunk", "grown", "reshaped", "resized"):
        if name == "reshaped":
            table.data = table.data.view(-1, 2)  # the same elements
        if name is not None:
            CHANGES[name](table)
        for row in range(table.shape[0]):
            indices = torch.full((world,), row, device=device)
            result = po.embedding_all_to_all([table], indices, offsets, dim_per_rank=[4] * world)
            po.check()
            want = torch.cat([table.data[row] + 100 * (pe - po.rank()) for pe in range(world)])[None]
            if not torch.equal(result, want):
                problems.append(f"PE {po.rank()}, {name}, row {row}: {result.tolist()}, not {want.tolist()}")
        rejected = torch.full((world,), table.shape[0], device=device)
        try:
            po.embedding_all_to_all([table], rejected, offsets, dim_per_rank=[4] * world)
            po.check()
        except IndexError:
            continue
        problems.append(f"PE {po.rank()}, {name}: a row behind the table was read")
    return problems


def test_the_operator_reads_what_the_tensor_is_now(backend: str) -> None:
    assert in_world(_changed_tables, 2, backend) == [[], []]
