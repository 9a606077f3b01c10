"""Test inputs of all_reduce and all_reduce_rms_norm, a model of their exact bits, and the calls of a case.

Data depends on (case, rank, iteration), so every PE can compute the inputs of every other PE. Magnitudes differ
widely, so the bits of a sum show the order of the additions.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bits import NUM_ITERATIONS, Outcome, Trial, difference
from serially import serially

import persistent_ops as po
from persistent_ops.ops.all_reduce_plan import FLOAT8

ALGORITHMS = ("one_shot", "two_shot", "slices")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- a model of the exact bits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What the PEs pass in one iteration, on the CPU."""

    xs: Sequence[torch.Tensor]
    residual: torch.Tensor | None
    bias: torch.Tensor | None
    weight: torch.Tensor
    eps: float = 1e-6
    weight_bias: float = 0.0
    scale: float | None = None


def sum_model(inputs: Inputs) -> torch.Tensor:
    """In fp32: the PEs in rank order, bias, residual. One rounding at the end."""
    total = inputs.xs[0].float()
    for x in inputs.xs[1:]:
        total = total + x.float()
    for addend in (inputs.bias, inputs.residual):
        if addend is not None:
            total = total + addend.float()
    return total.to(inputs.xs[0].dtype)


def _tree(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension of 32 as a tree of neighbors."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _in_turn(values: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension one element after the other."""
    total = torch.zeros(values.shape[:-1])
    for value in values.unbind(-1):
        total = total + value
    return total


def norm_model(total: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Sum the squares of the rounded sum: chunks of 16 bytes, a tree of 32 chunks, a tree of 32 blocks."""
    width, elements = total.shape[-1], 16 // total.element_size()
    values = total.float().reshape(-1, width)
    groups = -(-width // (32 * 32 * elements))
    padded = torch.zeros(len(values), groups * 32 * 32 * elements)
    padded[:, :width] = values * values
    of_blocks = _tree(_in_turn(padded.view(len(values), groups * 32, 32, elements)))
    squares = _tree(_in_turn(of_blocks.view(len(values), groups, 32).transpose(1, 2)))
    # For a divisor that is the same for all elements, torch multiplies by the reciprocal. numpy divides.
    mean = squares.numpy() / np.float32(width)
    factor = torch.from_numpy(np.float32(1) / np.sqrt(mean + np.float32(inputs.eps)))
    norm = values * factor[:, None] * (torch.tensor(inputs.weight_bias) + inputs.weight.float())
    if inputs.scale is None:
        return norm.to(total.dtype).view(total.shape)
    divided = torch.from_numpy(norm.numpy() / np.float32(inputs.scale))
    return divided.clamp(-448, 448).to(FLOAT8).view(total.shape)


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A shape, the same on every PE.

    Attributes:
        norms: whether the norm is asked for.
        is_shifted: tensors begin one element after an aligned address.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    norms: bool = False
    is_shifted: bool = False


CASES = [
    Case("one element", (1,)),
    Case("no element, fp16", (0, 8), torch.float16),
    Case("a scalar", ()),
    Case("ragged, fp32", (1003,), torch.float32),
    Case("a block", (2, 128)),
    Case("matrix, fp16", (7, 333), torch.float16),
    Case("larger", (9001,)),
    Case("shifted, fp16", (5, 77), torch.float16, is_shifted=True),
    Case("norm, no rows", (0, 64), norms=True),
    Case("norm, one row", (1, 4096), norms=True),
    Case("norm, ragged rows, fp16", (5, 301), torch.float16, norms=True),
    Case("norm, narrow rows, fp32", (67, 3), torch.float32, norms=True),
    Case("norm, many blocks, fp32", (2, 5000), torch.float32, norms=True),
    Case("norm, a batch", (3, 2, 520), norms=True),
    Case("norm, shifted", (3, 264), norms=True, is_shifted=True),
]
_NAMES = ("ragged, fp32", "larger", "norm, ragged rows, fp16", "norm, a batch")
FEW = [next(case for case in CASES if case.name == name) for name in _NAMES]
# By iteration: what is passed, and where results go (new memory, an output, or the memory of an input).
WAYS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((), "new", "new"),
    (("residual",), "new", "out"),
    (("residual", "bias"), "residual", "x"),
    (("bias",), "x", "new"),
    (("residual", "bias"), "out", "residual"),
    (("residual",), "x", "residual"),
)


def make_inputs(case: Case, world: int, iteration: int) -> Inputs:
    """Make what all PEs pass. Another order of the additions gives other bits."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {iteration}".encode()))

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-4, 5, shape, generator=rng)).to(case.dtype)

    row = case.shape[-1:]
    passed = WAYS[iteration][0] if case.shape else ()
    return Inputs(
        [draw(*case.shape) for _ in range(world)],
        draw(*case.shape) if "residual" in passed else None,
        draw(*row) if "bias" in passed else None,
        draw(*row),
        eps=(1e-6, 0.0 if case.shape[-1:] == (4096,) else 1e-5, 1.0)[iteration % 3],
        weight_bias=float(iteration % 2),
        scale=0.07 if iteration % 3 == 1 else None,
    )


@serially
@functools.lru_cache(maxsize=32)
def expected(case: Case, world: int, iteration: int) -> tuple[Inputs, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return what all PEs pass, and the sum and the norm that every PE must get. Nobody may write to them."""
    inputs = make_inputs(case, world, iteration)
    total = sum_model(inputs)
    return inputs, (total, norm_model(total, inputs) if case.norms else None)


def placed(tensor: torch.Tensor | None, is_shifted: bool) -> torch.Tensor | None:
    """Return a copy on the device. A shifted copy begins one element after an aligned address."""
    if tensor is None:
        return None
    if not is_shifted:
        return tensor.to(po.device(), copy=True)
    room = torch.full((tensor.numel() + 2,), float("nan")).to(po.device(), tensor.dtype)
    room[1:-1] = tensor.reshape(-1).to(po.device())
    return room[1:-1].view(tensor.shape)


def call(
    case: Case, inputs: Inputs, iteration: int, algorithm: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator as the iteration demands, and return its results."""
    _, total_to, norm_to = WAYS[iteration]
    x = placed(inputs.xs[po.rank()], case.is_shifted)
    assert x is not None
    residual, bias = (placed(t, case.is_shifted) for t in (inputs.residual, inputs.bias))
    places = {"new": None, "x": x, "residual": residual, "out": torch.full_like(x, float("nan"))}
    out = places[total_to]
    if not case.norms:
        result = po.all_reduce(x, residual=residual, bias=bias, out=out, algorithm=algorithm)
        assert out is None or result is out
        return result, None
    scale = None if inputs.scale is None else torch.tensor([inputs.scale], device=po.device())
    places["out"] = torch.full_like(x, float("nan")).to(x.dtype if scale is None else FLOAT8)
    norm_out = places[norm_to]
    if norm_to in (total_to, "x", "residual") and (norm_to == total_to or scale is not None):
        norm_out = places["out"]
    weight = placed(inputs.weight, case.is_shifted)
    assert weight is not None
    total, norm = po.all_reduce_rms_norm(
        x,
        weight,
        residual=residual,
        bias=bias,
        eps=inputs.eps,
        weight_bias=inputs.weight_bias,
        out=out,
        norm_out=norm_out,
        scale=scale,
        algorithm=algorithm,
        **options,
    )
    assert (out is None or total is out) and (norm_out is None or norm is norm_out)
    return total, norm


class AllReduceTrial(Trial):
    """A case: called by every algorithm, and by "auto"."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def ways(self, turn: int) -> Sequence[str]:
        return (*ALGORITHMS, "auto") if turn == 0 else ALGORITHMS

    def call(self, turn: int, iteration: int, way: str) -> Outcome:
        inputs, (want, want_norm) = expected(self._case, po.world_size(), iteration)
        total, norm = call(self._case, inputs, iteration, way)
        found = difference(total, want)
        if norm is None or want_norm is None:
            return Outcome([total], found)
        return Outcome([total, norm], found or ((what := difference(norm, want_norm)) and f"norm: {what}"))


def problem_of(case: Case, iterations: Sequence[int] = range(NUM_ITERATIONS)) -> str | None:
    """Call a case in some iterations, by every algorithm; return what is wrong, or None."""
    trial = AllReduceTrial(case)
    found = [trial.call(i, i, way).problem for i in iterations for way in trial.ways(i)]
    problems = [problem for problem in found if problem is not None]
    po.check()
    return problems[0] if problems else None
