"""Checks of the timed results, in the run that times them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness.timing import Subject

import persistent_ops as po
from persistent_ops.runtime.world import World

from .inputs import RowSet
from .limits import Traffic, count_traffic
from .methods import EAGER, OURS, Methods, Result, gather_single

__all__ = ["Reference", "check_graphs", "check_methods", "difference", "reference", "survey", "tolerance_of"]

_FP32_HALF_ULP = 2.0**-24
_GATHERED_BYTES = 256 << 20  # columns are compared in pieces that bound the temporaries
_COMPARED_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Reference:
    """The expected result of one input, on every PE.

    Attributes:
        union: `[u]`, int64, sorted.
        values: `[u, D]`, fp32: the sum in the order of the PEs, begun with the first contributor's row. The operator
            promises these bits.
        tolerance: of a sum in any order. Magnitudes are below 1, so P - 1 additions are each off by half a unit in the
            last place of P at the most.
    """

    union: torch.Tensor
    values: torch.Tensor
    tolerance: float


def tolerance_of(world_size: int) -> float:
    """Return how far a sum of one value below 1 per PE may be from another order's, or from the exact one."""
    return (world_size - 1) * world_size * _FP32_HALF_ULP


def survey(world: World, rows: RowSet) -> tuple[torch.Tensor, Traffic]:
    """Return the rows of the result, and what must travel; collective."""
    union, contributors = torch.unique(_gathered(world, rows.indices).view(-1), return_counts=True)
    is_own = torch.zeros_like(union, dtype=torch.bool)
    is_own[torch.searchsorted(union, rows.indices)] = True
    return union, count_traffic(contributors, is_own, world.size)


def reference(world: World, rows: RowSet, union: torch.Tensor) -> tuple[Reference, list[str]]:
    """Sum with torch and its process group; collective.

    Returns:
        The reference, and a sentence where its fp32 sums are not within the tolerance of fp64 ones.
    """
    slots = [torch.searchsorted(union, indices) for indices in _gathered(world, rows.indices)]
    dim = rows.values.shape[1]
    found = Reference(
        union,
        torch.empty(union.numel(), dim, dtype=rows.values.dtype, device=union.device),
        tolerance_of(world.size),
    )
    columns = max(1, _GATHERED_BYTES // (world.size * rows.values.shape[0] * rows.values.element_size()))
    worst = 0.0
    for begin in range(0, dim, columns):
        everyones = _gathered(world, rows.values[:, begin : begin + columns].contiguous())
        summed = everyones.new_full((union.numel(), everyones.shape[2]), -0.0)  # which changes no value added to it
        exact = torch.zeros_like(summed, dtype=torch.float64)
        for own, part in zip(slots, everyones, strict=True):
            summed[own] += part  # a PE's rows are distinct
            exact[own] += part
        found.values[:, begin : begin + columns] = summed
        worst = max(worst, float((exact - summed).abs().max()))
    wrong = [] if worst <= found.tolerance else [f"the reference is {worst:.3g} from fp64, not {found.tolerance:.3g}"]
    return found, wrong


def difference(result: Result, expected: Reference, *, exactly: bool) -> tuple[list[str], float]:
    """Compare a result with the expected one.

    Args:
        result: indices and values.
        expected: of the same input.
        exactly: whether the values must have the reference's bits; else they may be as far off as its tolerance.

    Returns:
        A sentence per failure, and the largest difference of a value.
    """
    indices, values = result
    if indices.shape != expected.union.shape or not torch.equal(indices.to(torch.int64), expected.union):
        return [f"{indices.numel()} rows, or others than the {expected.union.numel()} of the union, or unsorted"], 0.0
    if values.shape != expected.values.shape:
        return [f"values of shape {list(values.shape)}, expected {list(expected.values.shape)}"], 0.0
    step = max(1, _COMPARED_ELEMENTS // values.shape[1])
    worst, other_bits = 0.0, 0
    for part, right in zip(values.split(step), expected.values.split(step), strict=True):
        other_bits += int((part.contiguous().view(torch.int32) != right.view(torch.int32)).sum())
        off = (part - right).abs()
        worst = max(worst, float(off.nan_to_num(nan=torch.inf).max())) if off.numel() else worst
    if exactly and other_bits:
        return [f"{other_bits} values have other bits than sums in the order of the PEs (off by {worst:.3g})"], worst
    if not worst <= expected.tolerance:
        return [f"{worst:.3g} from the sum, tolerance {expected.tolerance:.3g}"], worst
    return [], worst


def check_methods(
    world: World, methods: Methods, chosen: Sequence[str], unions: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Compare the operator's results of every input, and the baselines' of the first one, with torch's; collective.

    Args:
        world: of this PE.
        methods: of the case.
        chosen: methods that will be timed.
        unions: of the inputs.

    Returns:
        The largest difference of a baseline's value from the operator's order of additions, and "failures" on this PE.
    """
    failures: list[str] = []
    largest = 0.0
    for number, union in enumerate(unions):
        expected, wrong = reference(world, methods.sets[number], union)
        failures += [f"input {number}: {text}" for text in wrong]
        for name in chosen:
            if number and name not in OURS:
                continue
            for again in ("", ", repeated") if name in OURS and not number else ("",):
                methods.poison()
                world.barrier()  # peers write into it as soon as they launch
                result = methods.result(name, number, union)
                world.check()
                wrong, worst = difference(result, expected, exactly=name in OURS)
                failures += [f"{name}, input {number}{again}: {text}" for text in wrong]
                if name not in OURS:
                    largest = max(largest, worst)
                if name in EAGER:  # its memory comes back for the next result of this size
                    result[1].fill_(math.nan)
                del result
    return {"failures": failures, "largest_difference": largest, "tolerance": tolerance_of(world.size)}


def check_graphs(world: World, methods: Methods, subjects: Mapping[str, Subject], union: torch.Tensor) -> list[str]:
    """Compare what graphs of the operator leave, the sum of the last input, with torch's; collective."""
    if not subjects:
        return []
    expected, failures = reference(world, methods.sets[-1], union)
    for name, subject in subjects.items():
        methods.poison()
        world.barrier()  # peers write into it as soon as they launch
        subject.replay()
        world.check()
        wrong, _ = difference(methods.into_result(), expected, exactly=True)
        failures += [f"{name}, a replay: {text}" for text in wrong]
    return failures


def _gathered(world: World, own: torch.Tensor) -> torch.Tensor:
    """Return `[P, *own.shape]`, every PE's tensor; collective."""
    everyones = own.new_empty(world.size, *own.shape)
    gather_single(everyones.view(-1), own.view(-1))
    if world.backend.name == "cuda":
        po.check()
    return everyones
