"""Measure the offsets between the PEs' clocks, for timelines of several PEs."""

from __future__ import annotations

import ctypes
import json
from typing import NamedTuple

from .areas import Need
from .backend import KernelRequest, LaunchShape
from .contract import Field
from .operator import Operator
from .world import World, upload

__all__ = ["Clock", "align_clocks"]

_WORDS = "words"  # an area
_ALIGNMENT = Operator(
    "clock_alignment",
    (Field.flag("room"),),
    phases={"kPhaseQuestion": "question {index} about the time", "kPhaseAnswer": "the time, question {index}"},
)


class Clock(NamedTuple):
    """How far this PE's clock is ahead of PE 0's, in nanoseconds.

    Attributes:
        offset: by so much.
        error: by how much that may be wrong.
        at: when that was so, by this PE's clock.
    """

    offset: float
    error: float
    at: float


def align_clocks(world: World) -> Clock:
    """Measure how far this PE's clock is ahead of PE 0's; collective."""
    if world.size == 1:
        return Clock(0.0, 0.0, 0.0)
    description = _ALIGNMENT.prepare(world)
    structs, constants = description.structs, description.constants
    areas = _ALIGNMENT.state(world).areas
    nbytes = world.size * ctypes.sizeof(structs["Words"])
    areas.reserve([Need(_WORDS, nbytes, fill=0)], lambda: _ALIGNMENT.contract(world.team, True))
    kernel = world.load(KernelRequest("clock_alignment", None, LaunchShape(constants["kThreads"])))
    team = world.workspace.team(_ALIGNMENT.contract(world.team, False))
    plan = upload(world.backend, structs["Plan"](team=team, words_offset=areas[_WORDS].offset))
    rounds, sample_words = constants["kRounds"], ctypes.sizeof(structs["Sample"]) // 8
    samples = world.backend.private_words(world.size * rounds * sample_words)
    call = structs["Call"](samples=samples.data_ptr())
    # Bad input of earlier launches on this PE is raised later: the peers count on the next launches.
    world.workspace.launch(kernel, 1, plan.data_ptr(), call, raises_input_errors=False)
    world.backend.synchronize()
    world.workspace.raise_failure()
    clocks = [_clock(rows) for rows in samples.cpu().view(world.size, rounds, sample_words).tolist()]
    told = world.bootstrap.exchange("clocks", json.dumps(clocks).encode())[0]  # PE 0 has asked
    return Clock(*json.loads(told)[world.rank])


def _clock(samples: list[list[int]]) -> Clock:
    asked, told, heard = min(samples, key=lambda sample: sample[2] - sample[0])
    return Clock(told - (asked + heard) / 2, (heard - asked) / 2, told)
