"""What an operator tells the runtime of itself: its contract's fields, what its waits are for, what bad input is.

The runtime knows launches, flags and codes. What a code means stands here, beside the operator whose kernel uses it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .contract import Contract, Field, register
from .description import Description, describe, description_of

if TYPE_CHECKING:
    from .world import World

__all__ = ["COMM", "Operator"]

COMM = "comm/team.cuh"  # the header of what all operators share
_MAX_PLANS = 1024  # of an operator in a world; a decode loop's layers have a plan each where they have a bias
_PHASE_BITS = 16
_CREDIT = "credit to write its output (has it launched the operator?)"
_Plan = TypeVar("_Plan")
_described: dict[str, Description] = {}  # of this process


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator, made at import, so that every PE can tell what another one launched.

    Attributes:
        name: of the operator, its kernel, and the namespace and the file of that.
        fields: of its launch contract, in order; a name alone stands for a number.
        phases: by the kernel's constant, what a wait is for, as "PE 0 waited for PE 1: ..." continues; "{index}" is
            what the wait counts.
        input_errors: by the kernel's enumerator, what makes an exception of an InputErrorRecord.
        has_kernel: False for what PEs only meet under (`World.meet`), which launches the barrier's.
        max_plans: that are kept together; None for as many as there is room for in any case.
    """

    name: str
    fields: Sequence[Field | str]
    phases: Mapping[str, str] = field(default_factory=dict)
    input_errors: Mapping[str, Callable[[Any], Exception]] = field(default_factory=dict)
    has_kernel: bool = True
    max_plans: int | None = None

    def __post_init__(self) -> None:
        register(self.name, self.fields, self)

    @property
    def description(self) -> Description:
        """What its kernel's headers say of themselves."""
        return description_of(self.name) if self.has_kernel else describe(COMM)

    def prepare(self, world: World) -> Description:
        """Return the description; where it must be compiled, peers that wait do not count the time."""
        if self.name not in _described:
            with world.preparing():
                _described[self.name] = self.description
        return _described[self.name]

    def contract(self, *values: Any) -> Contract:
        """Return the contract of a launch; `values`: one per field."""
        return Contract(self.name, values)

    # ---- what codes mean -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        constants, mask = self.description.constants, (1 << _PHASE_BITS) - 1
        own = {constants[name] & mask: text for name, text in self.phases.items()}
        return {constants["kPhaseCredit"] & mask: _CREDIT} | own

    def waited_for(self, phase: int, index: int) -> str:
        """Return what a wait of this operator was for."""
        return self._texts[phase].format(index=index)

    def input_error(self, record: ctypes.Structure) -> Exception:
        """Return what bad input raises."""
        constants = self.description.constants
        return next(make for name, make in self.input_errors.items() if constants[name] == record.kind)(record)

    # ---- plans -----------------------------------------------------------------------------------------------------

    def begin_plan(self, world: World) -> Description:
        """Return the description for a plan that is to be made.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
        """
        if world.workspace.is_capturing():
            raise RuntimeError(
                f"{self.name}: the first call with these shapes compiles and loads its kernel, which a CUDA-graph "
                "capture cannot do: call it once before the capture, with the same shapes, tables, buffers and bias"
            )
        return self.prepare(world)

    def keep(self, world: World, plans: dict[Any, _Plan], key: Any, plan: _Plan) -> _Plan:
        """Keep a plan for later calls; the oldest are dropped when there are too many."""
        world.make_room(plans, self.max_plans or _MAX_PLANS)
        plans[key] = plan
        return plan
