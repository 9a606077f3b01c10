"""What an operator tells the runtime of itself: its contract's fields, what its waits are for, what bad input is.

The runtime knows launches, flags and codes. What a code means stands here, beside the operator whose kernel uses it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

from .changes import ChangedInputs, OnAbort
from .compile.description import Description, describe, description_of
from .contract import Contract, Field, register
from .plans import OperatorState

if TYPE_CHECKING:
    import torch

    from .team import Team
    from .world import World

__all__ = ["COMM", "Operator"]

COMM = "comm/team.cuh"  # the header of what all operators share
_CREDIT = "credit to write its output (has it launched the operator?)"
_described: dict[str, Description] = {}  # of this process


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator, made at import, so that every PE can tell what another one launched.

    Attributes:
        name: of the operator, its kernel, and the namespace and the file of that.
        fields: of its launch contract behind the team, in order; a name alone stands for a number.
        phases: by the kernel's constant, what a wait is for, as "PE 0 waited for PE 1: ..." continues; "{index}" is
            what the wait counts.
        input_errors: by the kernel's enumerator, what makes an exception of an InputErrorRecord.
        has_kernel: False for what PEs only meet under (`World.meet`), which launches the barrier's.
        call: name of the contract's last word, which each launch sets by itself (`CallNumbers`); "": none does.
        known_as: what a user knows it as, where the name does not say so.
        changes: by the name of an argument that a launch changes in place, what an abort does to it.
        reloading: how to load anew what an abort has made unusable (`OnAbort.REFUSE`).
        max_plans: that are kept together, in a world.
        default_tuning: choices that change speed and nothing else, a frozen dataclass; None where it has none.
    """

    name: str
    fields: Sequence[Field | str]
    phases: Mapping[str, str] = field(default_factory=dict)
    input_errors: Mapping[str, Callable[[Any], Exception]] = field(default_factory=dict)
    has_kernel: bool = True
    call: str = ""
    known_as: str = ""
    changes: Mapping[str, OnAbort] = field(default_factory=dict)
    reloading: str = "load it anew, and say so"
    max_plans: int = 1024
    default_tuning: Any = None

    def __post_init__(self) -> None:
        register(self)

    @property
    def description(self) -> Description:
        """What its kernel's headers say of themselves."""
        return description_of(self.name) if self.has_kernel else describe(COMM)

    @property
    def title(self) -> str:
        """Its name, and what a user knows it as."""
        return f"{self.name} ({self.known_as})" if self.known_as else self.name

    def prepare(self, world: World) -> Description:
        """Return the description; where it must be compiled, peers that wait do not count the time."""
        if self.name not in _described:
            with world.preparing():
                _described[self.name] = self.description
        return _described[self.name]

    def contract(self, team: Team, *values: Any, call: int = 0) -> Contract:
        """Return the contract of a launch of a team; `values`: one per field; `call`: see `Contract`."""
        return Contract(self, team, values, call)

    # ---- what codes mean -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        constants = self.description.constants
        mask = (1 << constants["kCodeBits"]) - 1
        own = {constants[name] & mask: text for name, text in self.phases.items()}
        return {constants["kPhaseCredit"] & mask: _CREDIT} | own

    def waited_for(self, phase: int, index: int) -> str:
        """Return what a wait of this operator was for."""
        return self._texts[phase].format(index=index)

    def input_error(self, record: ctypes.Structure) -> Exception:
        """Return what bad input raises."""
        constants = self.description.constants
        return next(make for name, make in self.input_errors.items() if constants[name] == record.kind)(record)

    # ---- in a world -------------------------------------------------------------------------------------------------

    def state(self, world: World) -> OperatorState:
        """Return what a world keeps for it: plans, areas, tuning."""
        state: OperatorState | None = world.operator_state.get(self.name)
        if state is None:
            state = world.operator_state[self.name] = OperatorState(world, self)
        return state

    def changed_inputs(self, **tensors: Sequence[torch.Tensor]) -> ChangedInputs:
        """Return what launches of a plan change: contiguous tensors for each name in `changes`."""
        return ChangedInputs(tensors, self.changes, self.reloading)

    def begin_changes(self, world: World, inputs: ChangedInputs, tensors: Sequence[torch.Tensor]) -> None:
        """Declare, right before the launch, what it changes.

        Args:
            world: of the launch.
            inputs: see `changed_inputs`.
            tensors: the same, as the caller has them; autograd sees that they change.

        Raises:
            PersistentOpsError: an earlier launch was given up; or such a one has changed a part of a tensor, which was
                not loaded anew since (`Changes.loaded`).
        """
        world.workspace.raise_failure()  # of earlier launches, which did not touch these
        world.workspace.changes.begin(inputs)
        increment_version(tensors)

    def tuning(self, world: World) -> Any:
        """Return the tuning that holds."""
        return self.state(world).tuning or self.default_tuning

    def tune(self, world: World, tuning: Any) -> Any:
        """Set the tuning, None for the default one; return what was set before."""
        state = self.state(world)
        before, state.tuning = state.tuning, tuning
        return before
