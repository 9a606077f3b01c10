"""GEMM: a matrix product on one PE, by the main loop of this package's operators that multiply matrices."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.backend import KernelRequest, LaunchShape
from ..runtime.compile.description import copy_of
from ..runtime.dtypes import SCALARS
from ..runtime.operator import Operator
from ..runtime.overlap import check_apart
from ..runtime.plans import Plan
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from ..runtime.tuning import BoundedTuning, at_least
from ..runtime.world import World, upload

__all__ = ["OPERATOR", "Shape", "Tile", "Tuning", "choose_tile", "gemm", "kernel_request", "sample_requests"]

_log = logging.getLogger("persistent_ops")
_UNIT = 16  # bytes: what rows of matrices begin at multiples of
_MOST = 1 << 31
_DEPTH = 64  # of a step, on GPUs
_RESERVED_BYTES = 1024  # of a WG's memory, for what the kernel declares itself
_MOST_STAGES = 8
_BAND = 8  # clusters whose rows of tiles share columns of b in the L2 cache


@dataclass(frozen=True)
class Tuning(BoundedTuning):
    """Choices in place of what suits the shape. They change the order of sums, and so bits, by `parts` alone.

    Attributes:
        rows, columns: of a tile, for the tensor cores: 128 or 256, and a multiple of 16.
        sharing: WGs that share tiles of b by multicast in their cluster.
        parts: split-K: parts of the sum, 1 or 2, which different WGs add up.
        stages: steps whose tiles are in shared memory at the same time.
        band: rows of tiles, of clusters, that are made side by side.
    """

    rows: int | None = None
    columns: int | None = None
    sharing: int | None = None
    parts: int | None = None
    stages: int | None = at_least(2, None)
    band: int | None = None


OPERATOR = Operator("gemm", (), default_tuning=Tuning())


class Shape(NamedTuple):
    """A product: `[rows, depth] @ [depth, columns]`.

    Attributes:
        rows, depth, columns: M, K, N.
        a_k_major, b_k_major: whether K is the contiguous dimension: `a` has stride 1 in its second dimension, `b` in
            its first.
    """

    rows: int
    depth: int
    columns: int
    a_k_major: bool
    b_k_major: bool


class Tile(NamedTuple):
    """How a product is divided; see `Tuning`."""

    rows: int
    columns: int
    sharing: int
    parts: int
    stages: int

    @property
    def cluster(self) -> int:
        """The WGs of a cluster."""
        return self.sharing * self.parts


def gemm(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply two matrices on this PE alone: ``round(a @ b + bias)``.

    Products are added in fp32 and rounded once. Repeated calls give the same bits, whatever else the GPU does. The
    kernel is for Hopper GPUs (sm_90) and for the host backend. Other GPUs, and matrices whose rows do not begin at
    multiples of 16 bytes, take `torch.addmm` (cuBLAS on GPUs), whose bits may differ; the first such call logs a
    warning. ``po.gemm.last_path`` is "kernel" or "torch": the path of the last call.

    Args:
        a: `[M, K]`, float16 or bfloat16, any strides. For the kernel, one stride is 1 and the other one a multiple of 8
            elements.
        b: `[K, N]`, dtype of a, strides as for a. `weight.t()` of an `nn.Linear` costs no copy.
        bias: `[N]`, contiguous, dtype of a.
        out: `[M, N]`, contiguous, dtype of a, in any memory of the device; apart from all other arguments.

    Returns:
        `[M, N]`, dtype of a, contiguous, in ordinary memory of this PE's device; N a multiple of 8 for the kernel.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device, layout or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        PersistentOpsError: an error of an earlier operator of this PE, as from `po.check()`.

    Not collective: other PEs need not call it. On the current stream. The first call with a shape is blocking; after
    it, calls may be captured in a CUDA graph. Gradients of a, b and bias are products of the same kernel.
    """
    result: torch.Tensor = _operator((a, b, bias), {"out": out}, (a, b), (bias, out))
    return result


gemm.last_path = None  # type: ignore[attr-defined]


# ---- the tile for a shape ------------------------------------------------------------------------------------------

# Measured on an H200.
_STEP_CYCLES = 36  # of a step, beside those of the tensor cores
_LOADED_BYTES_PER_CYCLE = 47  # of an SM, from the L2 cache
_BYTES_PER_CYCLE = 2200  # of all SMs, from memory
_CANDIDATES = (
    *itertools.product((128,), range(64, 257, 16), (1, 2), (1,)),
    (256, 160, 2, 1),
    *itertools.product((128,), range(64, 257, 32), (1,), (2,)),
)


def _check(tuning: Tuning) -> None:
    allowed = {"rows": (128, 256), "columns": range(64, 257, 16), "sharing": (1, 2), "parts": (1, 2)}
    for name, values in allowed.items():
        if (value := getattr(tuning, name)) is not None and value not in values:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, values))}, got {value}")


def choose_tile(shape: Shape, tuning: Tuning, *, num_sms: int, arena_bytes: int) -> Tile:
    """Return the tile that is expected to be the fastest on a Hopper GPU with so many SMs, each with so many bytes."""
    found = []
    for rows, columns, sharing, parts in _CANDIDATES:
        tile = Tile(tuning.rows or rows, tuning.columns or columns, tuning.sharing or sharing, tuning.parts or parts, 0)
        stages = _stages_of(tile, shape, arena_bytes)
        tile = tile._replace(stages=min(stages, tuning.stages or _MOST_STAGES))
        if tile.stages >= 2 and (cycles := _cycles(tile, shape, num_sms)) is not None:
            found.append((cycles, tile))
    if not found:
        raise ValueError(f"no tile suits {shape} with {tuning}")
    return min(found, key=lambda each: (each[0], -each[1].sharing))[1]


def _stages_of(tile: Tile, shape: Shape, arena_bytes: int) -> int:
    geometry = OPERATOR.description.queries
    stage_bytes = geometry["stage_bytes"](tile.rows, tile.columns, _DEPTH, shape.a_k_major, shape.b_k_major)
    rest_bytes = geometry["rest_bytes"](tile.columns, tile.parts)
    return int((arena_bytes - _RESERVED_BYTES - rest_bytes) // stage_bytes)


def _cycles(tile: Tile, shape: Shape, num_sms: int) -> float | None:
    """Return an estimate of the cycles of an SM; None where the tile cannot be."""
    steps = math.ceil(shape.depth / _DEPTH)
    num_clusters = num_sms // tile.cluster
    tiles = math.ceil(shape.rows / (tile.rows * tile.sharing)) * math.ceil(shape.columns / tile.columns)
    if not num_clusters or steps < tile.parts or (tile.parts > 1 and tiles > num_clusters):
        return None
    products = tile.rows * tile.columns / 32  # of the tensor cores, in a step
    loaded = (min(tile.rows, shape.rows) + tile.columns / tile.sharing) * 2 * _DEPTH
    step = max(products + _STEP_CYCLES, loaded / _LOADED_BYTES_PER_CYCLE)
    waves = math.ceil(tiles / num_clusters)
    from_memory = 2 * (shape.rows + shape.columns) * shape.depth / _BYTES_PER_CYCLE
    piece = OPERATOR.description.queries["piece_columns"](tile.columns, tile.parts)
    stored = 800 + tile.columns / tile.parts / piece * (200 + 5 * piece) * tile.rows / 128
    exchanged = 0 if tile.parts == 1 else 500 + tile.rows * tile.columns / 8
    return max(waves * math.ceil(steps / tile.parts) * step, from_memory) + waves * stored + exchanged


# ---- plan ----------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    shape: Shape
    dtype: torch.dtype
    has_bias: bool
    tuning: Tuning | None


def kernel_request(dtype: torch.dtype, shape: Shape, tile: Tile, *, depth: int, has_bias: bool) -> KernelRequest:
    """Return the kernel for a tile; `depth`: of a step."""
    geometry = OPERATOR.description.queries
    stage_bytes = geometry["stage_bytes"](tile.rows, tile.columns, depth, shape.a_k_major, shape.b_k_major)
    return KernelRequest.of(
        "gemm",
        {
            "scalar": SCALARS[dtype],
            "rows": tile.rows,
            "columns": tile.columns,
            "depth": depth,
            "stages": tile.stages,
            "parts": tile.parts,
            "a_k_major": shape.a_k_major,
            "b_k_major": shape.b_k_major,
            "bias": has_bias,
        },
        LaunchShape(
            OPERATOR.description.constants["kProductThreads"],
            architecture_suffix="a",
            cluster=tile.cluster,
            arena_bytes=tile.stages * stage_bytes + geometry["rest_bytes"](tile.columns, tile.parts),
            arena_alignment=1024,
            overlaps_predecessor=True,
            is_resident=False,
            links_nvshmem=False,
        ),
    )


def sample_requests() -> Iterator[KernelRequest]:
    """Yield kernels that differ most in code; tests compile them for GPUs."""
    for k_major, tile in (
        ((True, True), Tile(128, 256, 2, 1, 4)),
        ((True, True), Tile(256, 160, 2, 1, 4)),
        ((True, True), Tile(128, 96, 2, 2, 7)),
        ((False, False), Tile(128, 224, 1, 1, 4)),
    ):
        shape = Shape(4096, 4096, 4096, *k_major)
        yield kernel_request(torch.bfloat16, shape, tile, depth=_DEPTH, has_bias=k_major[0])


class _Plan(Plan):
    """One key's kernel, and what its calls have in common."""

    def __init__(self, world: World, key: _Key) -> None:
        backend, structs = world.backend, OPERATOR.prepare(world).structs
        shape, tuning = key.shape, key.tuning or OPERATOR.default_tuning
        _check(tuning)
        if backend.name == "host":  # small tiles, so that small matrices have many
            depth, tile = 8, Tile(8, 8, tuning.sharing or 1, tuning.parts or 1, tuning.stages or 2)
            piece = (1, tile.columns)
        else:
            depth = _DEPTH
            tile = choose_tile(shape, tuning, num_sms=backend.num_sms, arena_bytes=backend.arena_bytes)
            piece = (16, OPERATOR.description.queries["piece_columns"](tile.columns, tile.parts))
        rows, columns = (
            math.ceil(size / each)
            for size, each in ((shape.rows, tile.rows * tile.sharing), (shape.columns, tile.columns))
        )
        steps = math.ceil(shape.depth / depth)
        clusters = min(rows * columns, max(1, backend.num_sms // tile.cluster))
        if steps < tile.parts or (tile.parts > 1 and clusters < rows * columns):
            raise ValueError(f"parts: {tile.parts} need as many steps of {depth}, and a cluster for each tile")
        self._grid = clusters * tile.cluster
        self._workspace, self._map = world.workspace, backend.tensor_map
        self._kernel = world.load(
            kernel_request(key.dtype, shape, tile, depth=depth, has_bias=key.has_bias), world.alone
        )
        self._a_k_major, self._b_k_major = shape.a_k_major, shape.b_k_major
        # Rows that do not exist are slow to load. The sums of rows that are not loaded are not stored.
        a_rows = min(tile.rows, math.ceil(shape.rows / 8) * 8) if shape.a_k_major else depth
        self._a_box = (a_rows, depth)
        self._b_box = (tile.columns // tile.sharing, depth) if shape.b_k_major else (depth // tile.sharing, depth)
        self._piece = piece
        self._swizzle, self._piece_swizzle = ((n if (n := width * 2) > _UNIT else 0) for width in (depth, piece[1]))
        self._words = upload(backend, structs["Plan"](team=world.workspace.team(OPERATOR.contract(world.alone))))
        self._address = self._words.data_ptr()
        tiles = structs["ProductTiles"](rows=rows, columns=columns, band=tuning.band or _BAND, steps=steps)
        geometry = OPERATOR.description.queries["stage_bytes"]
        loaded_rows = a_rows if shape.a_k_major else tile.rows
        step_bytes = geometry(loaded_rows, tile.columns, depth, shape.a_k_major, shape.b_k_major)
        self._template = structs["Call"](
            columns=shape.columns, product=structs["Product"](tiles=tiles, step_bytes=step_bytes)
        )

    def launch(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Launch on the current stream."""
        call = copy_of(self._template)
        call.product.a = self._map(a if self._a_k_major else a.t(), self._a_box, self._swizzle)
        call.product.b = self._map(b.t() if self._b_k_major else b, self._b_box, self._swizzle)
        call.output = self._map(out, self._piece, self._piece_swizzle)
        call.bias = 0 if bias is None else bias.data_ptr()
        self._workspace.launch(self._kernel, self._grid, self._address, call)


# ---- the call ------------------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16)
_TENSORS = TensorSpecs(
    TensorSpec("a", "M K", _DTYPES, is_contiguous=False),
    TensorSpec("b", "K N", "a", is_contiguous=False),
    TensorSpec("bias", "N", "a"),
    TensorSpec("out", "M N", "a"),
)


def _is_row_major(matrix: torch.Tensor) -> bool | None:
    """Return whether elements of a row follow each other, False for those of a column; None: no rows for the kernel."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if matrix.data_ptr() % _UNIT:
        return None
    if right == 1 and down >= columns and not down * 2 % _UNIT:
        return True
    return False if down == 1 and right >= rows and not right * 2 % _UNIT else None


def _shape_of(world: World, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Shape | None:
    """Return a product that the kernel makes, or None."""
    (rows, depth), columns = a.shape, b.shape[1]
    a_k_major, b_across = _is_row_major(a), _is_row_major(b)
    is_possible = a_k_major is not None and b_across is not None and _is_row_major(out)
    if not is_possible or not rows * depth * columns or max(rows, depth, columns) >= _MOST:
        return None
    return Shape(rows, depth, columns, bool(a_k_major), not b_across) if _has_kernel(world) else None


def _has_kernel(world: World) -> bool:
    device = world.backend.device
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def _run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result."""
    world = _world.for_call()
    device = world.backend.device
    dims = _TENSORS.check(device, a, b, bias, out)
    if out is None:
        out = torch.empty((dims["M"], dims["N"]), dtype=a.dtype, device=device)
    else:
        check_apart("out", out, {"a": a, "b": b, "bias": bias})
        increment_version(out)
    shape = _shape_of(world, a, b, out)
    if shape is None:
        return _by_torch(world, a, b, bias, out)
    gemm.last_path = "kernel"  # type: ignore[attr-defined]
    state = OPERATOR.state(world)
    key = _Key(shape, a.dtype, bias is not None, state.tuning)
    plan: _Plan = state.plans.get(key, lambda: _Plan(world, key))
    plan.launch(a, b, bias, out)
    return out


_WARNED: set[str] = set()  # reasons that this process has been told


def _by_torch(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    reason = (
        "rows of a, b or out do not begin at multiples of 16 bytes" if _has_kernel(world) else "this GPU's architecture"
    )
    if out.numel() and a.shape[1] and reason not in _WARNED:
        _WARNED.add(reason)
        _log.warning("persistent_ops: gemm takes torch's product: %s", reason)
    gemm.last_path = "torch"  # type: ignore[attr-defined]
    world.workspace.raise_failure()
    with torch.no_grad():
        if bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(bias, a, b, out=out)


def _fake(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    _TENSORS.check(None, a, b, bias, out)
    return a.new_empty((a.shape[0], b.shape[1]))


def _setup_context(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _ = inputs
    context.is_b_transposed = b.stride(0) == 1 and b.shape[1] > 1
    context.save_for_backward(a if context.needs_input_grad[1] else None, b if context.needs_input_grad[0] else None)


def _backward(
    context: Any, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    a, b = context.saved_tensors
    of_a = of_b = of_bias = None
    if context.needs_input_grad[0]:
        of_a = gemm(gradient, b.t())
    if context.needs_input_grad[1]:
        # In the memory layout of b: that of a weight in nn.Linear is the transposed one.
        of_b = gemm(gradient.t(), a).t() if context.is_b_transposed else gemm(a.t(), gradient)
    if context.needs_input_grad[2]:
        of_bias = gradient.sum(0)
    return of_a, of_b, of_bias


_operator = TorchOperator(
    "gemm",
    "Tensor a, Tensor b, Tensor? bias",
    _run,
    fake=_fake,
    outputs=("out",),
    setup_context=_setup_context,
    backward=_backward,
    is_collective=False,
)
