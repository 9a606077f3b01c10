"""Plans of an operator: what its launches of one kind share, kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from .site import Site

__all__ = ["Plan", "Plans"]


class Plan:
    """A kernel, and its data in device memory.

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
    """The key of the same plan with a kernel that traces."""

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

    def get(  # type: ignore[override]  # which never lacks one
        self, key: Hashable, build: Callable[[], _P], *tensors: object, caller: str | None = None
    ) -> _P:
        """Return the plan of a key. The first call with it keeps what `build` makes, and drops the oldest.

        Args:
            key: of the plan. Where a part of it, an argument of a wrong type, has no hash, `build` names the argument.
            build: makes the plan.
            tensors: that a CUDA graph which is being captured keeps, with the plan.
            caller: the function that was called, where it has not the operator's name.

        Raises:
            RuntimeError: `build` would be called while the current stream is captured into a CUDA graph.
        """
        tracer = self._site.tracer
        kept = key if tracer is None else Traced(tracer, key)
        try:
            plan = dict.get(self, kept)
        except TypeError:
            plan = None
        if plan is None:
            self.refuse_capture(caller)
            plan = build()
            self._site.make_room(self, self.most)
            self[kept] = plan
        elif self._workspace.is_capturing():
            self._site.keep_captured(plan, *tensors)
        return plan

    def refuse_capture(self, caller: str | None = None) -> None:
        """Raise where the current stream is being captured: nothing can be made or set aside."""
        if self._workspace.is_capturing():
            name = caller or self._name
            raise RuntimeError(
                f"{name}: the first call with these shapes compiles and loads its kernel, which a CUDA-graph capture "
                "cannot do: call it once before the capture, with the same shapes and tables"
            )

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
