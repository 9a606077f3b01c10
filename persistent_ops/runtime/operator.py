"""An operator, and what it keeps in a world between calls: plans, the memory that they name, and a tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

from .areas import Areas
from .changes import ChangedInputs
from .compile.description import Description
from .contract import LaunchKind
from .plans import Plans
from .site import Forgetful, Site

if TYPE_CHECKING:
    import torch

__all__ = ["Operator", "OperatorState"]

_described: dict[str, Description] = {}  # of this process


class OperatorState:
    """The state of one operator in one world.

    Attributes:
        plans: by key.
        areas: that they name.
        tuning: in place of the operator's default one, or None.
        own: whatever else the operator keeps.
    """

    def __init__(self, site: Site, operator: Operator) -> None:
        self.plans: Plans[Any] = Plans(site, operator.name, operator.max_plans)
        self.areas = Areas(site, self.plans)
        self.tuning: Any = None
        self.own: Any = None

    def drop_plans(self, *, only_traced: bool) -> None:
        """See `Kept`."""
        if only_traced:
            self.plans.drop_traced()
        else:
            self.plans.clear()

    def forget(self) -> None:
        """See `Forgetful`."""
        if isinstance(self.own, Forgetful):
            self.own.forget()


@dataclass(frozen=True, eq=False)
class Operator(LaunchKind):
    """One operator: what it launches, and how it plans and changes things in a world.

    Attributes:
        reloading: how to load again what an abort has made unusable (`OnAbort.REFUSE`).
        max_plans: that are kept together, in a world.
        default_tuning: choices that change speed and nothing else, a frozen dataclass; None where it has none.
    """

    reloading: str = "load it again, and report that"
    max_plans: int = 1024
    default_tuning: Any = None

    def prepare(self, site: Site) -> Description:
        """Return the description; where it must be compiled, peers that wait do not count the time."""
        if self.name not in _described:
            with site.preparing():
                _described[self.name] = self.description
        return _described[self.name]

    def state(self, site: Site) -> OperatorState:
        """Return the operator's state in a world."""
        state = site.kept.get(self.name)
        if state is None:
            self.prepare(site)
            state = site.kept[self.name] = OperatorState(site, self)
        assert isinstance(state, OperatorState)
        return state

    def changed_inputs(self, **tensors: Sequence[torch.Tensor]) -> ChangedInputs:
        """Return the tensors that launches of a plan change: contiguous, for each name in `changes`."""
        return ChangedInputs(tensors, self.changes, self.reloading)

    def begin_changes(self, site: Site, inputs: ChangedInputs, tensors: Sequence[torch.Tensor]) -> None:
        """Declare, right before the launch, the tensors that it changes.

        Args:
            site: of the launch.
            inputs: see `changed_inputs`.
            tensors: the same, as the caller has them; autograd sees that they change.

        Raises:
            PersistentOpsError: an earlier launch was given up; or such a launch has changed a part of a tensor that was
                not loaded again since (`Changes.loaded`).
        """
        site.workspace.raise_failure()  # of earlier launches, which did not touch these
        site.workspace.changes.begin(inputs)
        increment_version(tensors)

    def tuning(self, site: Site) -> Any:
        """Return the tuning that holds."""
        return self.state(site).tuning or self.default_tuning

    def tuned(self, site: Site) -> Any:
        """Return the tuning that was set, or None; any thread."""
        state = site.kept.get(self.name)
        return state.tuning if isinstance(state, OperatorState) else None

    def tune(self, site: Site, tuning: Any) -> Any:
        """Set the tuning, None for the default one; return what was set before."""
        state = self.state(site)
        before, state.tuning = state.tuning, tuning
        return before
