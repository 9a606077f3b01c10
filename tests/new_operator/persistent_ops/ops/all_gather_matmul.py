"""All-gather and a product with the gathered tensor, in one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from .all_reduce import all_reduce

__all__ = ["OPERATOR", "Tuning", "all_gather_matmul", "kernel_request"]

_VECTOR_BYTES = 16
_Results = tuple[torch.Tensor, list[torch.Tensor]]
_MOST_WORK_GROUPS = 32  # which every GPU with clusters holds


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices that change speed and nothing else. All PEs must agree.

    Attributes:
        work_groups: an even number; None for one per SM, and at most 32.
    """

    work_groups: int | None = None


OPERATOR = Operator(
    "all_gather_matmul",
    (
        Field.numbers("shape", "[M, K, N]"),
        Field.dtype("dtype", list(SCALARS), "the dtype of a"),
        Field.internal("work_groups"),
    ),
    phases={"kPhasePiece": "the piece of its work-group {index}"},
    default_tuning=Tuning(),
)


def all_gather_matmul(a: torch.Tensor, bs: Sequence[torch.Tensor]) -> _Results:
    """Gather every PE's rows on every PE, and multiply them, in one kernel.

    ``gathered = a of PE 0, of PE 1, ...`` one under the other, and ``products[i] = gathered @ bs[i]``, added up in fp32
    by rising rows of `bs[i]` and rounded once.

    Args:
        a: `[M, K]`, contiguous, float32, float16 or bfloat16, any memory of the device; the same shape and dtype on
            every PE. One that begins at a multiple of 16 bytes, and has a multiple of them, takes the fast path.
        bs: 1 to 7 matrices `[K, N_i]`, contiguous, dtype of a, any memory of the device; each PE has its own. They
            begin at multiples of 16 bytes, as do their rows.

    Returns:
        (gathered, products): `[world_size * M, K]` in the symmetric heap of this PE, and a list of
        `[world_size * M, N_i]` in ordinary memory; dtype of a.

    Raises:
        TypeError: an argument is no plain tensor, or of another dtype.
        ValueError: an argument's shape, layout, device, or the number of `bs`.
        RuntimeError: a CUDA-graph capture meets shapes that were not called before.
        SymmetricHeapError: no room for what is gathered.
        NotImplementedError: some PEs do not reach each other's memory, and the kernel cannot put.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else. On "cuda" they come
            with the next operator or `po.check()`; the results are NaN.

    Collective, on the current stream; the first call with shapes is blocking. May be captured in a CUDA graph after it.
    The backward pass is collective if `a` requires a gradient, which all PEs then want.
    """
    given: Any = (a, *bs) if isinstance(bs, (list, tuple)) else (a, None)  # which is refused
    results: _Results = _all_gather_matmul((a, bs, _world.current().size), {}, given)
    return results


# ---- the plan ------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    """What distinguishes plans.

    Attributes:
        team: the PEs that gather.
        shape, dtype: of a.
        columns: of the other factor.
        is_aligned: whether a's address and size are multiples of 16 bytes.
        tuning: see `OperatorState`.
    """

    team: Team
    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: tuple[int, ...]
    is_aligned: bool
    tuning: Tuning | None


def kernel_request(dtype: torch.dtype, *, is_aligned: bool) -> KernelRequest:
    """Return what is compiled for a dtype; `is_aligned`: as of the key."""
    constants = OPERATOR.description.constants
    shape = LaunchShape(
        constants["kThreads"],
        cluster=constants["kCluster"],
        arena_bytes=constants["kArenaBytes"],
        arena_alignment=1024,
    )
    vector_bytes = _VECTOR_BYTES if is_aligned else dtype.itemsize
    return KernelRequest.of(OPERATOR.name, {"scalar": SCALARS[dtype], "vector_bytes": vector_bytes}, shape)


def sample_requests() -> Iterator[KernelRequest]:
    """Yield what tests compile for GPUs."""
    yield kernel_request(torch.bfloat16, is_aligned=True)


class _Plan(Plan):
    """One key's kernel and plan.

    Raises:
        ValueError: the tuning asks for work-groups that make no clusters, or more than are resident.
    """

    def __init__(self, world: World, key: _Key) -> None:
        structs, constants = OPERATOR.prepare(world).structs, OPERATOR.description.constants
        self._world = world
        self._kernel = world.load(kernel_request(key.dtype, is_aligned=key.is_aligned), key.team)
        most = max(world.backend.num_sms // 2 * 2, constants["kCluster"])
        self._grid = (key.tuning or Tuning()).work_groups or min(most, _MOST_WORK_GROUPS)
        check_resident(self._kernel, self._grid)
        rows, depth = key.shape
        self._gathered = key.team.size * rows, depth
        part_bytes = rows * depth * key.dtype.itemsize
        self._gathered_bytes = key.team.size * part_bytes
        self._box = constants["kBoxRows"], constants["kTileRowBytes"] // key.dtype.itemsize
        self._swizzle = constants["kTileRowBytes"]
        plan = structs["Plan"](
            team=world.workspace.team(OPERATOR.contract(key.team, key.shape, key.dtype, self._grid)),
            part_bytes=part_bytes,
            rows=rows,
            depth=depth,
            num_products=len(key.columns),
        )
        plan.columns[: len(key.columns)] = key.columns
        self._words = upload(world.backend, plan)
        self._new_call = structs["Call"]

    def launch(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> _Results:
        """Launch on the current stream."""
        backend, workspace = self._world.backend, self._world.workspace
        slot = self._world.outputs.take(self._gathered_bytes, backend.stream(), is_captured=workspace.is_capturing())
        products = [a.new_empty((self._gathered[0], b.shape[1])) for b in bs]
        call: Any = self._new_call()
        call.a, call.output_offset = a.data_ptr(), slot.offset
        for i, (b, product) in enumerate(zip(bs, products, strict=True)):
            call.products[i], call.matrices[i] = product.data_ptr(), backend.tensor_map(b, self._box, self._swizzle)
        workspace.launch(self._kernel, self._grid, self._words.data_ptr(), call)
        return slot.tensor(a.dtype, self._gathered), products


# ---- the call ------------------------------------------------------------------------------------------------------


def _run(a: torch.Tensor, bs: Sequence[torch.Tensor], world_size: int) -> _Results:
    """Check, find or make the plan, launch it, return the results."""
    world = _world.for_call()
    _check(a, bs, world.backend.device)
    if world_size != world.size:
        raise ValueError(f"world_size: expected {world.size}, the size of this world, got {world_size}")
    state = OPERATOR.state(world)
    is_aligned = not (a.data_ptr() | a.nbytes) % _VECTOR_BYTES
    key = _Key(world.team, tuple(a.shape), a.dtype, tuple(b.shape[1] for b in bs), is_aligned, state.tuning)
    plans: Plans[_Plan] = state.plans
    plan = plans.get(key, lambda: _Plan(world, key))
    return plan.launch(a, bs)


def _check(a: torch.Tensor, bs: Sequence[torch.Tensor], device: torch.device | None) -> None:
    """Raise for what the operator cannot take. No device: a fake call."""
    most = OPERATOR.description.constants["kMaxProducts"]
    if a.dtype not in SCALARS:
        raise TypeError(f"a: expected float32, float16 or bfloat16, got {a.dtype}")
    if a.dim() != 2 or not a.shape[1]:
        raise ValueError(f"a: expected [M, K] with at least one column, got {list(a.shape)}")
    if not 1 <= len(bs) <= most:
        raise ValueError(f"bs: expected 1 to {most} matrices, got {len(bs)}")
    for name, tensor in (("a", a), *((f"bs[{i}]", b) for i, b in enumerate(bs))):
        if tensor.dtype != a.dtype:
            raise TypeError(f"{name}: expected {a.dtype} as a has, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; pass .contiguous()")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    for i, b in enumerate(bs):
        if b.dim() != 2 or b.shape[0] != a.shape[1] or not b.shape[1]:
            raise ValueError(f"bs[{i}]: expected [{a.shape[1]}, N], got {list(b.shape)}")
        if b.shape[1] * b.element_size() % _VECTOR_BYTES or (device is not None and b.data_ptr() % _VECTOR_BYTES):
            raise ValueError(f"bs[{i}]: expected rows that begin at multiples of {_VECTOR_BYTES} bytes")


def _fake(a: torch.Tensor, bs: Sequence[torch.Tensor], world_size: int) -> _Results:
    _check(a, bs, None)
    rows = world_size * a.shape[0]
    return a.new_empty((rows, a.shape[1])), [a.new_empty((rows, b.shape[1])) for b in bs]


def _setup_context(context: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    context.save_for_backward(output[0], *inputs[1])


def _backward(
    context: Any, gathered_gradient: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, list[torch.Tensor], None]:
    gathered, *bs = context.saved_tensors
    own = None
    if context.needs_input_grad[0]:
        for b, gradient in zip(bs, gradients, strict=True):
            gathered_gradient = gathered_gradient + gradient @ b.t()
        world = _world.current()
        own = all_reduce(gathered_gradient).chunk(world.size)[world.rank].clone()
    return own, [gathered.t() @ gradient for gradient in gradients], None


_all_gather_matmul = TorchOperator(
    "all_gather_matmul",
    "Tensor a, Tensor[] bs, int world_size",  # compilers keep graphs by arguments: what a shape depends on is one
    _run,
    fake=_fake,
    results="(Tensor, Tensor[])",
    counts=lambda a, bs, world_size: (1, len(bs)),
    setup_context=_setup_context,
    backward=_backward,
    result_in_heap=True,
)
