"""Plans of an operator: what its launches of one kind have in common, kept from call to call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from .site import Site

__all__ = ["Plan", "Plans"]


class Plan:
    """A kernel, and what it needs in device memory.

    Attributes:
        areas: names of those that it names and that may be replaced.
        held: they themselves.
    """

    areas: tuple[str, ...] = ()
    held: object = None

    def place(self) -> None:
        """Write it into device memory, for the areas that there are now, and hold them; what it wrote before stays."""


_P = TypeVar("_P", bound=Plan)


class Traced(NamedTuple):
    """What the key of a plan becomes whose kernel traces."""

    tracer: object
    key: Hashable


class Plans(dict[Hashable, _P]):
    """An operator's plans in one world, by keys: NamedTuples without addresses, equal where a plan serves again.

    Attributes:
        most: that are kept.

    Args:
        site: of this PE.
        name: of the operator.
        most: see above.
    """

    def __init__(self, site: Site, name: str, most: int) -> None:
        super().__init__()
        self._site = site
        self._name = name
        self._workspace = site.workspace
        self.most = most

    def find(self, key: Hashable, *tensors: object) -> _P | None:
        """Return the plan of a key, or None. A CUDA graph that is being captured keeps it, and `tensors`.

        None also where a part of the key, an argument of a wrong type, has no hash: the checks of a new plan name it.
        """
        tracer = self._site.tracer
        try:
            plan = self.get(key if tracer is None else Traced(tracer, key))
        except TypeError:
            return None
        if plan is not None and self._workspace.is_capturing():
            self._site.keep_captured(plan, *tensors)
        return plan

    def make(self, key: Hashable, build: Callable[[], _P], caller: str | None = None) -> _P:
        """Return what `build` makes, and keep it for the key; the oldest are dropped when there are too many.

        Args:
            key, build: see above.
            caller: the function that was called, where it has not the operator's name.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
        """
        self.refuse_capture(caller)
        plan = build()
        self._site.make_room(self, self.most)
        self[key] = plan
        return plan

    def refuse_capture(self, caller: str | None = None) -> None:
        """Raise where the current stream is being captured: nothing can be made or set aside."""
        if self._workspace.is_capturing():
            name = caller or self._name
            raise RuntimeError(
                f"{name}: the first call with these shapes compiles and loads its kernel, which a CUDA-graph capture "
                "cannot do: call it once before the capture, with the same shapes and tables"
            )

    def __setitem__(self, key: Hashable, plan: _P) -> None:
        tracer = self._site.tracer
        super().__setitem__(key if tracer is None else Traced(tracer, key), plan)

    def drop(self, is_dropped: Callable[[Any], bool]) -> None:
        """Forget the plans of some keys."""
        for key in [key for key in self if is_dropped(key.key if isinstance(key, Traced) else key)]:
            del self[key]

    def drop_traced(self) -> None:
        """Forget the plans whose kernels trace."""
        for key in [key for key in self if isinstance(key, Traced)]:
            del self[key]

    def renew(self, areas: set[str], replace: Callable[[], None]) -> None:
        """Replace areas, and all plans that name them; CUDA graphs keep both. Where it raises, the plans are gone."""
        renewed = {key: copy.copy(plan) for key, plan in self.items() if not areas.isdisjoint(plan.areas)}
        for key in renewed:
            del self[key]
        for plan in renewed.values():
            plan.held = None
        replace()
        for plan in renewed.values():
            plan.place()
        self.update(renewed)
