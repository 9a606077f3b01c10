"""embedding_all_to_all against a model of its exact bits, over worlds, transports and shapes."""

from __future__ import annotations

from typing import ClassVar

import torch
from bits import BitsSuite, CaseWorld
from embedding_cases import CASES, EmbeddingTrial
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.plan import OPERATOR


class TestBits(BitsSuite):
    trial = EmbeddingTrial
    halved_by = torch.float32
    heap_bytes = 256 << 20
    is_the_same_on_all_pes = False
    # The staged transport of the host delays and reorders.
    worlds: ClassVar = {
        "1": CaseWorld(1, CASES),
        "2": CaseWorld(2, CASES),
        "3": CaseWorld(3, CASES),
        "4": CaseWorld(4, CASES),
        "2-staged": CaseWorld(2, CASES, {"transport": "staged"}),
        "3-staged": CaseWorld(3, CASES, {"transport": "staged"}),
    }


def _dtypes_said_or_left_out() -> tuple[list[list[float]], int]:
    """Return the results of calls that mean the same, and the number of plans that they have made."""
    device = po.device()
    table = torch.arange(32.0, device=device).view(8, 4) + 100 * po.rank()
    rows, bags = torch.arange(8, device=device), torch.arange(9, device=device)
    names = ((), ("dtype",), ("wire_dtype",), ("dtype", "wire_dtype"))
    calls = [po.embedding_all_to_all([table], rows, bags, **dict.fromkeys(said, torch.float32)) for said in names]
    results = [result.flatten().tolist() for result in calls]
    return results, len(OPERATOR.state(po.runtime.world.current()).plans)


def test_a_dtype_that_is_said_needs_no_plan_of_its_own(backend: str) -> None:
    rows = torch.arange(32.0).view(8, 4)
    whole = torch.cat([rows, rows + 100], dim=1)
    for rank, (results, num_plans) in enumerate(in_world(_dtypes_said_or_left_out, 2, backend)):
        assert results == [whole[4 * rank : 4 * rank + 4].flatten().tolist()] * 4
        assert num_plans == 1
