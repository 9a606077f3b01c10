"""Make sure that all PEs passed the same arguments to a collective function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .contract import LaunchKind
from .workspace import Workspace
from .world import World

__all__ = ["agree"]


def agree(world: World, on: LaunchKind, choices: Mapping[str, object], workspace: Workspace | None = None) -> None:
    """Raise where PEs passed different arguments; collective.

    Args:
        world: of this PE.
        on: what the PEs are to agree on, for PEs that make another call.
        choices: by argument, what has a `repr` that is equal on PEs that passed the same.
        workspace: in which the PEs meet; None for the world's own.

    Raises:
        ValueError: for the first argument that differs, with its values on this PE and another one.
    """
    texts = {name: repr(choice) for name, choice in choices.items()}  # long where there are many PEs or tables
    world.meet(on.contract(world.team), workspace)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts.values()]
    told = [json.loads(raw) for raw in world.bootstrap.exchange("agreement", json.dumps(digests).encode())]
    for number, (name, text) in enumerate(texts.items()):
        if len({of_pe[number] for of_pe in told}) > 1:
            others = [raw.decode() for raw in world.bootstrap.exchange("what differs", text.encode())]
            other = next(pe for pe, each in enumerate(others) if each != text)
            raise ValueError(
                f"{name}: expected the same on all PEs, got {text} on PE {world.rank} and {others[other]} on PE {other}"
            )
