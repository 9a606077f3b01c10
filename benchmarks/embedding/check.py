"""Checks of the timed results, in the run that times them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from harness.check import bits_differ, poisoned

from persistent_ops.runtime.world import World

from .inputs import LookupSet
from .methods import Methods

__all__ = ["TOLERANCE", "check_methods", "reference"]

# Largest difference from torch's result, relative to the largest magnitude, by the result's dtype. fp32: sums of up to
# some hundred rows, perhaps in another order. bf16: both round an fp32 sum once, so neighbors are one unit in the last
# place apart.
TOLERANCE = {"fp32": 1e-5, "bf16": 2.0**-7}


def reference(methods: Methods, lookups: LookupSet) -> torch.Tensor:
    """Return the expected result: torch's embedding_bag, then the collective."""
    return methods.unfused_torch(lookups)


def check_methods(world: World, methods: Methods) -> dict[str, Any]:
    """Compare the methods on every lookup set; collective.

    Returns:
        The largest relative difference from the reference, and "failures" on this PE.
    """
    tolerance = TOLERANCE[methods.config.wire or methods.config.dtype]
    largest = 0.0
    failures: list[str] = []
    for number, lookups in enumerate(methods.sets):
        where = f"set {number}"
        fused = poisoned(world, methods.out, functools.partial(methods.run, "fused", lookups))
        for name, text in (("fused", "a second run"), ("oblivious", "the oblivious order")):
            if bits_differ(poisoned(world, methods.out, functools.partial(methods.run, name, lookups)), fused):
                failures.append(f"{name}, {where}: {text} gives other bits")
        expected = reference(methods, lookups)
        difference = _relative_difference(fused, expected)
        largest = max(largest, difference)
        if not difference <= tolerance:
            failures.append(f"fused, {where}: {difference:.3g} from the unfused result, tolerance {tolerance:.3g}")
        if bits_differ(methods.unfused_own(lookups), fused):
            failures.append(f"unfused_own, {where}: the kernel without its exchange gives other bits")
        world.check()
    return {"largest_difference": largest, "tolerance": tolerance, "failures": failures}


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
