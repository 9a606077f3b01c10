"""Checks of the timed results, in the run that times them."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.check import bits_differ, poisoned

import persistent_ops as po
from persistent_ops.runtime.world import World
from persistent_ops.testing.pes import gather

from .methods import FUSED, UNFUSED, Methods

__all__ = ["Reference", "check_fused", "check_methods", "reference"]

_HALF_ULP = 2.0**-8  # of bf16, relative: what rounding a value once may change
_FP32_HALF_ULP = 2.0**-24
_ROWS_AT_A_TIME = 2048  # bounds the fp64 temporaries


@dataclass(frozen=True)
class Reference:
    """The exact result on the host of one copy of the weight, and how far a result may be from it.

    Attributes:
        value: `[N, M]`, fp64.
        bound: `[N, M]`; of fp32 sums, rounded once. A sum over K elements is taken to have no chain of additions longer
            than K / 16 + 256: lanes add their parts side by side. Longer chains would still be correct, but slow.
        loose_bound: of sums of results that were rounded on every PE, in any order.
    """

    value: torch.Tensor
    bound: torch.Tensor
    loose_bound: float


def reference(world: World, methods: Methods, copy: int) -> Reference:
    """Compute the result in fp64 with torch and its process group; collective."""
    x = methods.x.view(-1, methods.shape.columns).double()
    parts = []
    for rows in methods.weights[copy].split(_ROWS_AT_A_TIME):
        exact = rows.double()
        own = x @ exact.t()
        parts.append(torch.stack([own, x.abs() @ exact.abs().t(), own.abs()]))
    sums = torch.cat(parts, 2)
    if world.size > 1:
        dist.all_reduce(sums)
    value, magnitude, partials = sums
    chain = methods.shape.columns / 16 + 256 + world.size
    bound = value.abs() * _HALF_ULP + magnitude * (chain * _FP32_HALF_ULP)
    return Reference(value, bound, (world.size + 8) * _HALF_ULP * float(partials.max()))


def check_fused(world: World, methods: Methods, name: str, copy: int) -> tuple[torch.Tensor, list[str], float]:
    """Compare one way to call the operator with the fp64 result; collective.

    Returns:
        The result, a sentence per failure, and the largest share of the bound that a value needed.
    """
    expected = reference(world, methods, copy)
    result = poisoned(world, methods.out, functools.partial(methods.run, name, copy))
    share = float(((result.view(expected.value.shape).double() - expected.value).abs() / expected.bound).max())
    if share <= 1:
        return result, [], share
    text = f"{_timed_as(world, name)}, copy {copy}: {share:.3g} times as far from the fp64 result as rounding explains"
    return result, [text], share


def check_methods(world: World, methods: Methods, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Compare the operator on every copy of the weight, and the other methods on the first; collective.

    Args:
        world: of this PE.
        methods: of the shape.
        chosen: the methods that will be timed.

    Returns:
        The largest share of the bound that a result needed, and "failures" on this PE.
    """
    largest = 0.0
    failures: list[str] = []
    digests: list[str] = []
    for copy in range(methods.shape.copies):
        fused, wrong, share = check_fused(world, methods, "fused", copy)
        failures += wrong
        largest = max(largest, math.inf if math.isnan(share) else share)
        digests.append(hashlib.sha256(fused.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
        for name in FUSED:
            if bits_differ(poisoned(world, methods.out, functools.partial(methods.run, name, copy)), fused):
                text = "a second run gives other bits" if name == "fused" else "other bits than fused"
                failures.append(f"{_timed_as(world, name)}, copy {copy}: {text}")
        if copy == 0:
            failures += _check_single_vectors(world, methods, fused)
            failures += _check_unfused(world, methods, chosen)
    first = gather(digests)[0]
    others = [copy for copy, digest in enumerate(digests) if digest != first[copy]]
    if others:
        failures.append(f"{_timed_as(world, 'fused')}, copy {others[0]}: other bits than on PE 0")
    return {"largest_share_of_bound": largest, "failures": failures}


def _check_single_vectors(world: World, methods: Methods, fused: torch.Tensor) -> list[str]:
    """Compare the first and the last vector's result with the result of the vector alone."""
    failures = []
    for number in sorted({0, methods.shape.vectors - 1}) if methods.shape.vectors > 1 else ():
        alone = po.gemv_all_reduce(methods.weights[0], methods.x[number].contiguous())
        world.check()
        if bits_differ(alone, fused[number]):
            text = f"vector {number} alone gives other bits than among {methods.shape.vectors}"
            failures.append(f"{_timed_as(world, 'fused')}, {text}")
    return failures


def _check_unfused(world: World, methods: Methods, chosen: tuple[str, ...]) -> list[str]:
    """Check the baselines' results: a baseline that drops work would be no rival."""
    expected = reference(world, methods, 0)
    failures = []
    for name in chosen:
        if name in UNFUSED or (name == "cublas_alone" and world.size == 1):
            methods.poison()
            result = methods.run(name, 0).view(expected.value.shape).double()
            worst = float((result - expected.value).abs().max())
            if not worst <= expected.loose_bound:
                failures.append(f"{name}, {worst:.3g} from the fp64 result, tolerance {expected.loose_bound:.3g}")
    return failures


def _timed_as(world: World, name: str) -> str:
    """Return the method that is timed: in a world of one the operator is its GEMV alone."""
    alone = {"fused": "gemv_alone", "prefetch": "gemv_alone_prefetch"}
    return alone.get(name, name) if world.size == 1 else name
