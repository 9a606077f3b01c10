"""Correctness of what is timed, in the run that times it."""

from __future__ import annotations

import math
from typing import Any

import torch
from harness.pes import gather
from harness.timing import Subject

from persistent_ops.runtime.world import World

from .inputs import LookupSet
from .methods import Methods

__all__ = ["TOLERANCE", "bits_differ", "check_graph", "check_methods", "reference"]

# Largest difference from torch's result, relative to the largest magnitude. fp32: sums of up to some hundred rows,
# perhaps in another order. bf16: both round an fp32 sum once, so neighbours are one unit in the last place apart.
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-7}


def reference(methods: Methods, lookups: LookupSet) -> torch.Tensor:
    """Return what the operator should give: torch's embedding_bag, then the collective."""
    return methods.unfused_torch(lookups)


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_methods(world: World, methods: Methods) -> dict[str, Any]:
    """Compare the methods on every lookup set; collective.

    Returns:
        The largest relative difference from the reference over all PEs, and "failures": a sentence each.
    """
    tolerance = TOLERANCE[methods.config.dtype]
    largest = 0.0
    failures: list[str] = []
    for number, lookups in enumerate(methods.sets):
        where = f"set {number}"
        fused = _poisoned(world, methods, "fused", lookups)
        for name, text in (("fused", "a second run"), ("oblivious", "the oblivious order")):
            if bits_differ(_poisoned(world, methods, name, lookups), fused):
                failures.append(f"{where}: {text} gives other bits")
        expected = reference(methods, lookups)
        difference = _relative_difference(fused, expected)
        largest = max(largest, difference)
        if not difference <= tolerance:
            failures.append(f"{where}: {difference:.3g} from the unfused result, tolerance {tolerance:.3g}")
        if bits_differ(methods.unfused_own(lookups), fused):
            failures.append(f"{where}: the kernel without its exchange gives other bits")
        world.check()
    everyone = gather(world.bootstrap, [largest if math.isfinite(largest) else 1e300, failures])
    return {
        "largest_difference": max(entry[0] for entry in everyone),
        "tolerance": tolerance,
        "failures": [f"PE {pe}, {text}" for pe, entry in enumerate(everyone) for text in entry[1]],
    }


def check_graph(world: World, methods: Methods, subject: Subject) -> list[str]:
    """Compare the graph of the fused operator with its plain call on the last set; collective."""
    expected = _poisoned(world, methods, "fused", methods.sets[-1])
    methods.out.fill_(math.nan)
    world.barrier()
    subject.replay()
    world.check()
    failures = ["a replay gives other bits than a call"] if bits_differ(methods.out, expected) else []
    return [f"PE {pe}: {text}" for pe, texts in enumerate(gather(world.bootstrap, failures)) for text in texts]


def _poisoned(world: World, methods: Methods, name: str, lookups: LookupSet) -> torch.Tensor:
    """Return a copy of a fused result whose buffer was full of NaN before on every PE."""
    methods.out.fill_(math.nan)
    world.barrier()  # peers write into it as soon as they launch
    result = methods.run(name, lookups).clone()
    world.check()
    return result


def _relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude; infinite where a value is not finite."""
    difference = magnitude = 0.0
    for part, other in zip(actual.split(64), expected.split(64), strict=True):  # bounds the temporaries
        worst = float((part.float() - other.float()).abs().max())
        if not math.isfinite(worst):
            return math.inf
        difference = max(difference, worst)
        magnitude = max(magnitude, float(other.float().abs().max()))
    return difference / magnitude if difference else 0.0
