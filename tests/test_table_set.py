"""Recognising lists of tables: by what they are, and only while they are known."""

from __future__ import annotations

from typing import Any

import torch

from persistent_ops.ops.table_set import TableSets


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
