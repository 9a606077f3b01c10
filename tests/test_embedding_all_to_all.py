"""embedding_all_to_all against a model of its exact bits, over worlds, transports and shapes."""

from __future__ import annotations

from typing import ClassVar

import torch
from bits import BitsSuite, CaseWorld
from embedding_cases import CASES, EmbeddingTrial


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
