"""The part of a world that operators see: `World` is a `Site`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from .backend import Backend
from .contract import Contract
from .heap import OutputPool, SymmetricHeap
from .workspace import Workspace

__all__ = ["Forgetful", "Kept", "Site"]


@runtime_checkable
class Forgetful(Protocol):
    """State that PEs may see differently after a failure; its handles end with the world."""

    def forget(self) -> None:
        """Go back to what all PEs agree on; refuse what is still under way."""


class Kept(Forgetful, Protocol):
    """The state of an operator in a world, kept from call to call."""

    def drop_plans(self, *, only_traced: bool) -> None:
        """Have launches planned again: all, or only those whose kernels trace. CUDA graphs keep theirs."""


class Site(Protocol):
    """Where an operator plans and launches; see `World`."""

    backend: Backend
    heap: SymmetricHeap
    outputs: OutputPool
    workspace: Workspace
    kept: dict[str, Kept]
    """By the operator's name; an operator keeps nothing elsewhere."""

    @property
    def tracer(self) -> object:
        """Where kernels leave timelines; None for nowhere."""

    def preparing(self) -> AbstractContextManager[None]: ...

    def meet(self, contract: Contract) -> None: ...

    def keep_captured(self, *used: object) -> None: ...

    def make_room(self, plans: dict[Any, Any], most: int) -> None: ...
