"""All-gather in one kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..runtime import world as _world
from ..runtime.backend import KernelRequest, LaunchShape, check_resident
from ..runtime.contract import Field
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.plans import Plan, Plans
from ..runtime.team import Team
from ..runtime.torch_library import TorchOperator
from ..runtime.tuning import BoundedTuning
from ..runtime.world import World, upload

__all__ = ["OPERATOR", "Tuning", "all_gather", "kernel_request"]

_VECTOR_BYTES = 16
_SMALLEST_BYTES = 2  # of an element


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else. All PEs must agree.

    Attributes:
        work_groups: None for one per SM.
    """

    work_groups: int | None = None


OPERATOR = Operator(
    "all_gather",
    (Field.numbers("shape"), Field.dtype("dtype", list(SCALARS)), "work_groups"),
    phases={"kPhasePiece": "the piece of its work-group {index}"},
    default_tuning=Tuning(),
)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """Return every PE's tensor, on every PE, in one kernel.

    ``result[r] = x of PE r``.

    Args:
        x: `[...]`, contiguous, float32, float16 or bfloat16, any memory of the device; the same shape and dtype on
            every PE. One that begins at a multiple of 16 bytes, and has a multiple of them, takes the fast path.

    Returns:
        `[world_size, ...]`, dtype of x, in the symmetric heap of this PE.

    Raises:
        TypeError: x is no tensor, or of another dtype.
        ValueError: x is not contiguous, or on another device.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before.
        SymmetricHeapError: no room for the result.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else. On "cuda" they come
            with the next operator or `po.check()`; the result is NaN.
        NotImplementedError: in a backward pass; the operator is forward only.

    Collective, on the current stream; the first call with a shape is blocking. May be captured in a CUDA graph after
    it.
    """
    result: torch.Tensor = _all_gather((x,), {}, (x,))
    return result


# ---- the plan ------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    """What tells plans apart.

    Attributes:
        team: who gathers.
        shape, dtype: of x.
        is_aligned: whether x begins at a multiple of 16 bytes, and has a multiple of them.
        tuning: see `OperatorState`.
    """

    team: Team
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool
    tuning: Tuning | None


def kernel_request(*, is_aligned: bool) -> KernelRequest:
    """Return what is compiled; `is_aligned`: as of the key."""
    vector_bytes = _VECTOR_BYTES if is_aligned else _SMALLEST_BYTES
    threads = OPERATOR.description.constants["kThreads"]
    return KernelRequest(OPERATOR.name, (("vector_bytes", str(vector_bytes)),), LaunchShape(threads))


class _Plan(Plan):
    """One key's kernel and plan.

    Raises:
        ValueError: the tuning asks for more work-groups than are resident.
    """

    def __init__(self, world: World, key: _Key) -> None:
        structs = OPERATOR.prepare(world).structs
        self._world = world
        self._kernel = world.load(kernel_request(is_aligned=key.is_aligned))
        self._grid = (key.tuning or Tuning()).work_groups or world.backend.num_sms
        check_resident(self._kernel, self._grid)
        self._dtype, self._shape = key.dtype, (key.team.size, *key.shape)
        self._output_bytes = math.prod(self._shape) * key.dtype.itemsize
        contract = OPERATOR.contract(key.team, key.shape, key.dtype, self._grid)
        team, part_bytes = world.workspace.team(contract), self._output_bytes // key.team.size
        self._words = upload(world.backend, structs["Plan"](team=team, part_bytes=part_bytes))
        self._new_call = structs["Call"]

    def launch(self, x: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream."""
        workspace, stream = self._world.workspace, self._world.backend.stream()
        slot = self._world.outputs.take(self._output_bytes, stream, is_captured=workspace.is_capturing())
        call = self._new_call()
        call.x, call.output_offset = x.data_ptr(), slot.offset
        workspace.launch(self._kernel, self._grid, self._words.data_ptr(), call)
        return slot.tensor(self._dtype, self._shape)


# ---- the call ------------------------------------------------------------------------------------------------------


def _run(x: torch.Tensor) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result."""
    world = _world.for_call()
    _check(x, world.backend.device)
    state = OPERATOR.state(world)
    is_aligned = not (x.data_ptr() | x.nbytes) % _VECTOR_BYTES
    key = _Key(world.team, tuple(x.shape), x.dtype, is_aligned, state.tuning)
    plans: Plans[_Plan] = state.plans
    plan = plans.find(key) or plans.make(key, lambda: _Plan(world, key))
    return plan.launch(x)


def _check(x: torch.Tensor, device: torch.device | None) -> None:
    """Raise for what the operator cannot take. No device: a fake call."""
    if x.dtype not in SCALARS:
        raise TypeError(f"x: expected float32, float16 or bfloat16, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"x: expected a contiguous tensor, got strides {x.stride()}; pass x.contiguous()")
    if device is not None and x.device != device:
        raise ValueError(f"x: expected a tensor on {device}, got one on {x.device}")


def _fake(x: torch.Tensor) -> torch.Tensor:
    _check(x, None)
    return x.new_empty((_world.current().size, *x.shape))


_all_gather = TorchOperator(
    "all_gather",
    "Tensor x",
    _run,
    fake=_fake,
    no_gradient="all_gather is forward only: call it under torch.no_grad(), or use torch.distributed.nn.all_gather",
)
