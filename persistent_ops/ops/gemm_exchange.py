"""GEMM with all-to-all, reduce-scatter or all-reduce of its result, in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.dtypes import fill_nan
from ..runtime.errors import PersistentOpsError
from ..runtime.overlap import check_apart
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from ..runtime.world import World
from .gemm import gradients_of_factors, multiply, save_factors
from .gemm_exchange_plan import OPERATOR, Choice, ExchangeKey, ExchangePlan, choose_algorithm
from .product import DTYPES, Rows, Shape, has_tensor_cores, is_row_major
from .row_exchange import all_gather_rows, all_to_all_rows

__all__ = ["ALGORITHMS", "gemm_all_reduce", "gemm_all_to_all", "gemm_reduce_scatter"]

ALGORITHMS = ("auto", "fused", "unfused")
_OPS = ("sum", "mean")
_Optional = torch.Tensor | None
_MOST = 1 << 31


def gemm_all_to_all(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, algorithm: str = "auto"
) -> torch.Tensor:
    """Multiply two matrices, and send equal blocks of the product's rows to the PEs, in one kernel.

    The result is that of ``torch.distributed.all_to_all_single(out, a @ b)``: block r of the product goes to PE r, and
    the result has the blocks of all PEs in rank order. Each element is added up in fp32 and rounded once, as by
    `po.gemm`.

    Args:
        a: `[M, ..., K]`, float16 or bfloat16, the same shape on every PE; M a multiple of the number of PEs. Rows that
            do not begin at multiples of 16 bytes are copied first.
        b: `[K, N]`, dtype of a; each PE has its own. `weight.t()` of an `nn.Linear` costs no copy.
        out: `[M, ..., N]`, dtype of a, contiguous, in the symmetric heap (`po.empty`); apart from a and b.
        algorithm: "fused", "unfused" (the product, then an exchange), or "auto" for the one that is expected to be
            faster. All PEs must agree. ``po.gemm_all_to_all.last_choice`` says what the last call took, and why.

    Returns:
        `[M, ..., N]`, dtype of a, contiguous. In the symmetric heap; without `out`, the memory is used again after the
        tensor has been dropped.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or overlap; before any launch.
        NotSymmetricError: `out` is not in the symmetric heap.
        SymmetricHeapError: no room for the result.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        NotImplementedError: "fused" for what no kernel takes: see `gemm_reduce_scatter`.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else. On "cuda" the next
            operator or `po.check()` raises them, and the result is NaN.

    Collective, on the current stream. The first call with a shape is blocking; after it, calls may be captured in a
    CUDA graph. Gradients of a and b: the backward pass exchanges the gradient's rows, then multiplies. Source: the
    third operator of Punniyamurthy et al., "Optimizing Distributed ML Communication with Fused Computation-Collective
    Operations" (2024).
    """
    result: torch.Tensor = _all_to_all((a, b, algorithm, _world_size()), {"out": out}, (a, b), (out,))
    return result


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    op: str = "sum",
    scatter_dim: int = 0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply two matrices, add up the products of all PEs, and leave each PE its rows of the sum, in one kernel.

    ``round(p_0 + p_1 + ... + p_{P-1} + bias + residual)``, where p_r is PE r's ``a @ b``, rounded to `wire_dtype`. Sums
    are added in fp32 in rank order and rounded once, by the PE that gets the row. Repeated calls give the same bits.
    "unfused" gives the bits of "fused" where its product is added up in the same order, as on the host.

    Args:
        a: `[..., K]`, two or more dimensions, float16 or bfloat16; the same shape on every PE. Rows that do not begin
            at multiples of 16 bytes are copied first.
        b: `[K, N]`, dtype of a; each PE has its own. `weight.t()` of an `nn.Linear` costs no copy.
        op: "sum", or "mean" for the sum times 1 / P, in fp32.
        scatter_dim: 0 or 1, a dimension of a's rows. PE r gets the r-th of equal parts of it; its size must be a
            multiple of the number of PEs.
        bias: `[N]`, dtype of a; added once. Each PE uses its own for its rows.
        residual: the shape of the result, dtype of a, contiguous; added once. Each PE has its own.
        wire_dtype: dtype in which products travel: a's dtype (the default), or torch.float32.
        out: the shape of the result, dtype of a, contiguous, in any memory; apart from all other arguments.
        algorithm: "fused", "unfused" (the product, then an exchange), or "auto" for the one that is expected to be
            faster. All PEs must agree. ``po.gemm_reduce_scatter.last_choice`` says what the last call took, and why.

    Returns:
        The shape of a, with `scatter_dim` divided by the number of PEs and K replaced by N; dtype of a, contiguous, in
        ordinary memory of the device.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or overlap; before any launch.
        RuntimeError: a CUDA-graph capture meets a shape that was not called before, or `po.init()` was not called.
        NotImplementedError: "fused" for what no kernel takes: a GPU other than Hopper (sm_90), N that is no multiple of
            8, or PEs that do not reach each other's memory. "auto" takes "unfused" then.
        SymmetricHeapError: no room for partial sums: (P - 1) / P of M x N elements of `wire_dtype`, in whole tiles.
        PeerTimeoutError, ContractMismatchError: as for `gemm_all_to_all`.

    Collective, stream and CUDA graphs as for `gemm_all_to_all`. Gradients of a, b, bias and residual: the backward pass
    gathers the gradient's rows from all PEs, then multiplies. A PE's gradient of bias is that of its own rows.
    """
    arguments = (a, b, bias, residual, op, scatter_dim, wire_dtype, algorithm, _world_size())
    result: torch.Tensor = _reduce_scatter(arguments, {"out": out}, (a, b), (bias, residual, out))
    return result


def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply two matrices, and add up the products of all PEs for every PE, in one kernel.

    The sum of `gemm_reduce_scatter`, whose rows are then sent to all PEs: every PE gets the same bits.

    Args:
        a: `[..., K]`, two or more dimensions, float16 or bfloat16; the same shape on every PE.
        b: `[K, N]`, dtype of a; each PE has its own.
        bias: `[N]`, dtype of a; added once. All PEs pass the same bias.
        residual: the shape of the result, dtype of a, contiguous; added once. All PEs pass the same residual.
        wire_dtype: dtype in which products travel: a's dtype (the default), or torch.float32.
        out: the shape of the result, dtype of a, contiguous, in the symmetric heap (`po.empty`); apart from all other
            arguments.
        algorithm: as for `gemm_reduce_scatter`; ``po.gemm_all_reduce.last_choice``.

    Returns:
        The shape of a, with K replaced by N; dtype of a, contiguous, in the symmetric heap.

    Raises:
        All errors of `gemm_reduce_scatter` and `gemm_all_to_all`.

    Collective, stream and CUDA graphs as for `gemm_all_to_all`. Gradients are those of one loss that every PE computes
    from its copy of the result, as in tensor parallelism: the backward pass communicates nothing.
    """
    arguments = (a, b, bias, residual, wire_dtype, algorithm)
    result: torch.Tensor = _all_reduce(arguments, {"out": out}, (a, b), (bias, residual, out))
    return result


for _function in (gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce):
    _function.last_choice = None  # type: ignore[attr-defined]


def _world_size() -> int:
    return _world.current().size


# ---- arguments -----------------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """What is asked for, whatever the tensors hold.

    Attributes:
        operator: its name.
        op, scatter_dim, wire_dtype, algorithm: the caller's.
    """

    operator: str
    op: str
    scatter_dim: int
    wire_dtype: torch.dtype | None
    algorithm: str

    def check(self) -> None:
        """Raise for a choice that there is not."""
        for name, value, choices in (("op", self.op, _OPS), ("algorithm", self.algorithm, ALGORITHMS)):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
        if not isinstance(self.scatter_dim, int) or self.scatter_dim not in (0, 1):
            raise ValueError(f"scatter_dim: expected 0 or 1, got {self.scatter_dim!r}")

    def layout(self, a: torch.Tensor, b: torch.Tensor, size: int) -> tuple[tuple[int, ...], int, int]:
        """Return the result's shape, and segments and rows of a segment of a part; raise for shapes that do not fit."""
        if a.dim() < 2:
            raise ValueError(f"a: expected two or more dimensions, got {list(a.shape)}")
        if b.dim() != 2 or b.shape[0] != a.shape[-1]:
            raise ValueError(f"b: expected [{a.shape[-1]}, N], as a has {a.shape[-1]} columns, got {list(b.shape)}")
        rows, columns, dim = a.shape[:-1], b.shape[1], self.scatter_dim
        if dim >= len(rows):
            raise ValueError(f"scatter_dim: expected a dimension of a's rows {list(rows)}, got {dim}")
        if self.operator == "gemm_all_reduce":
            return (*rows, columns), 1, math.ceil(math.prod(rows) / size)
        if rows[dim] % size:
            raise ValueError(
                f"a: expected a multiple of {size}, the number of PEs, in dimension {dim}, got {rows[dim]}"
            )
        segment = rows[dim] // size * math.prod(rows[dim + 1 :])
        if self.operator == "gemm_all_to_all":
            return (*rows, columns), 1, segment
        return (*rows[:dim], rows[dim] // size, *rows[dim + 1 :], columns), math.prod(rows[:dim]), segment

    def wire(self, a: torch.Tensor) -> torch.dtype:
        """Return the dtype in which products travel."""
        if self.wire_dtype not in (None, a.dtype, torch.float32):
            raise TypeError(f"wire_dtype: expected {a.dtype} or torch.float32, got {self.wire_dtype}")
        return self.wire_dtype or a.dtype


_FACTORS = TensorSpecs(
    TensorSpec("a", "... K", DTYPES, is_contiguous=False),
    TensorSpec("b", "K N", "a", is_contiguous=False),
    TensorSpec("bias", "N", "a"),
)
_RESULTS = TensorSpecs(TensorSpec("residual", "... N", DTYPES), TensorSpec("out", "... N", DTYPES))


def _check(
    request: _Request,
    device: torch.device | None,
    size: int,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: _Optional,
    residual: _Optional,
    out: _Optional,
) -> tuple[tuple[int, ...], int, int]:
    """Raise for what the operator cannot take; return what `_Request.layout` does."""
    request.check()
    layout = request.layout(a, b, size)
    _FACTORS.check(device, a, b, bias)
    _RESULTS.check(device, residual, out)
    request.wire(a)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is None:
            continue
        if tensor.dtype != a.dtype:
            raise TypeError(f"{name}: expected a's dtype {a.dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != layout[0]:
            raise ValueError(f"{name}: expected the result's shape {list(layout[0])}, got {list(tensor.shape)}")
    return layout


# ---- the call ------------------------------------------------------------------------------------------------------


def _run(
    request: _Request, a: torch.Tensor, b: torch.Tensor, bias: _Optional, residual: _Optional, out: _Optional
) -> torch.Tensor:
    """Check, find or make the plan, launch it, return the result."""
    world = _world.for_call()
    shape, segments, segment_rows = _check(request, world.backend.device, world.size, a, b, bias, residual, out)
    rows = Rows(world.size, (world.rank + 1) % world.size, segments, segment_rows)
    state = OPERATOR.state(world)
    product = Shape(math.prod(a.shape[:-1]), a.shape[-1], b.shape[1], True, True)
    epilogue = request.op == "mean", bias is not None, residual is not None
    key = ExchangeKey(world.team, request.operator, product, rows, a.dtype, request.wire(a), *epilogue, state.tuning)
    if out is not None:
        check_apart("out", out, {"a": a, "b": b, "bias": bias, "residual": residual})
    choice = _chosen(world, request, key)
    _PUBLIC[request.operator].last_choice = choice
    take = _fused if choice.algorithm == "fused" else _unfused
    world.workspace.raise_failure()
    if out is not None:
        increment_version(out)
    return take(world, key, shape, a, b, bias, residual, out)


def _chosen(world: World, request: _Request, key: ExchangeKey) -> Choice:
    """Return the algorithm of a call, the same on all PEs."""
    refusal = _refusal(world, key)
    if request.algorithm == "unfused" or (refusal and request.algorithm == "auto"):
        return Choice("unfused", refusal or "asked for")
    if refusal:
        raise NotImplementedError(f"algorithm: {key.operator} cannot be fused here: {refusal}")
    if request.algorithm == "fused":
        return Choice("fused", "asked for")
    state = OPERATOR.state(world)
    if state.own is None:
        state.own = {}
    choices: dict[ExchangeKey, Choice] = state.own
    if key not in choices:
        choices[key] = choose_algorithm(world, key)
    return choices[key]


def _refusal(world: World, key: ExchangeKey) -> str:
    """Return why no kernel takes it, or an empty text."""
    rows, depth, columns, _, _ = key.shape
    if not has_tensor_cores(world.backend.device):
        return "this GPU's architecture is not sm_90"
    if not key.team.all_reachable:
        return "some PEs do not reach each other's memory"
    if columns % 8:
        return "N is no multiple of 8"
    return "a dimension has 2^31 or more" if max(rows, depth, columns) >= _MOST else ""


def _fused(
    world: World,
    key: ExchangeKey,
    shape: tuple[int, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: _Optional,
    residual: _Optional,
    out: _Optional,
) -> torch.Tensor:
    a = _loadable(a.flatten(0, -2))
    if is_row_major(a) is False and key.rows.segment_rows % 8:  # boxes begin at multiples of 16 bytes in each column
        a = _loadable(a.contiguous())
    b = _loadable(b)
    key = key._replace(
        shape=Shape(a.shape[0], a.shape[1], b.shape[1], is_row_major(a) is True, is_row_major(b) is False)
    )
    result, offset, held = _output(world, key, shape, a, out)
    if not result.numel():
        return result
    if residual is not None and residual.data_ptr() % 4:
        residual = residual.clone()
    plans = OPERATOR.state(world).plans
    plan: ExchangePlan = plans.get(key, lambda: ExchangePlan(world, key), caller=key.operator)
    try:
        plan.launch(a, b, bias, residual, held.data_ptr(), offset)
    finally:  # also what a launch that was given up has left
        if held is not result:
            result.copy_(held)
    return result


def _output(
    world: World, key: ExchangeKey, shape: tuple[int, ...], a: torch.Tensor, out: _Optional
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return the result, its offset in the heap, and where the kernel stores it."""
    if not key.stores_to_peers:
        result = a.new_empty(shape) if out is None else out
        return result, 0, result if not result.data_ptr() % 16 else torch.empty_like(result)
    if out is not None:
        offset = world.heap.offset_of(out, "out")
        if offset % 16:
            raise ValueError(f"out: expected a tensor that begins at a multiple of 16 bytes, got offset {offset}")
        return out, offset, out
    nbytes = math.prod(shape) * a.dtype.itemsize
    slot = world.outputs.take(nbytes, world.backend.stream(), is_captured=world.workspace.is_capturing())
    result = slot.tensor(a.dtype, shape)
    return result, slot.offset, result


def _loadable(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with rows (or columns) that begin at multiples of 16 bytes, and at least one of each."""
    if matrix.numel() and is_row_major(matrix) is not None:
        return matrix
    rows, columns = matrix.shape
    padded = matrix.new_zeros((max(rows, 8 if not rows else 1), max(8, -(-columns // 8) * 8)))
    padded[:rows, :columns] = matrix
    return padded if not columns else padded[:, : max(columns, 1)]


def _unfused(
    world: World,
    key: ExchangeKey,
    shape: tuple[int, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: _Optional,
    residual: _Optional,
    out: _Optional,
) -> torch.Tensor:
    """Multiply, then exchange: with the same bits as the fused kernel, but for how the product is added up."""
    if key.stores_to_peers and out is not None:
        world.heap.offset_of(out, "out")  # refuses the same tensors
    if not math.prod(shape):
        return a.new_empty(shape) if out is None else out
    with torch.no_grad():
        try:
            product = _product(a.flatten(0, -2), b, key.wire_dtype)
            result = _added_up(world, key, product, bias, residual) if key.adds else all_to_all_rows(product)
            if key.operator == "gemm_all_reduce":
                result = all_gather_rows(result, world.size)[: key.shape.rows]
        except PersistentOpsError:
            if out is not None:
                fill_nan(out)
            raise
        return result.view(shape) if out is None else out.copy_(result.view(shape))


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if a.dtype == dtype:
        return multiply(a, b, None)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)  # type: ignore[call-overload,no-any-return]
    return a.float() @ b.float()


def _added_up(
    world: World, key: ExchangeKey, product: torch.Tensor, bias: _Optional, residual: _Optional
) -> torch.Tensor:
    """Return this PE's rows of the sum."""
    columns, parts, segments, rows = product.shape[1], key.rows.parts, key.rows.segments, key.rows.segment_rows
    addend = None if residual is None else residual.reshape(-1, columns)
    if key.operator == "gemm_all_reduce":
        product = _with_rows(product, parts * rows)
        addend = None if addend is None else _with_rows(addend, parts * rows).view(parts, rows, columns)[world.rank]
    blocks = product.view(segments, parts, rows, columns).transpose(0, 1).reshape(-1, columns)
    first, *others = all_to_all_rows(blocks).view(parts, -1, columns)
    total: torch.Tensor = first.float()
    for block in others:
        total = total + block
    total = total * (1 / parts) if key.is_mean else total
    for each in (bias, addend):
        total = total if each is None else total + each
    return total.to(key.dtype)


def _with_rows(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a matrix with zeros below, so that it has so many rows."""
    result: torch.Tensor = matrix.new_zeros((rows, matrix.shape[1]))
    result[: matrix.shape[0]] = matrix
    return result


# ---- torch operators -----------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """The arguments of a torch operator: a request, the number of PEs that the result's shape depends on, tensors."""

    request: _Request
    size: int
    tensors: tuple[torch.Tensor, torch.Tensor, _Optional, _Optional, _Optional]  # a, b, bias, residual, out


def _asked_all_to_all(
    a: torch.Tensor, b: torch.Tensor, algorithm: str, world_size: int, out: _Optional = None
) -> _Asked:
    request = _Request("gemm_all_to_all", "sum", 0, None, algorithm)
    return _Asked(request, world_size, (a, b, None, None, out))


def _asked_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: _Optional,
    residual: _Optional,
    op: str,
    scatter_dim: int,
    wire_dtype: torch.dtype | None,
    algorithm: str,
    world_size: int,
    out: _Optional = None,
) -> _Asked:
    request = _Request("gemm_reduce_scatter", op, scatter_dim, wire_dtype, algorithm)
    return _Asked(request, world_size, (a, b, bias, residual, out))


def _asked_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: _Optional,
    residual: _Optional,
    wire_dtype: torch.dtype | None,
    algorithm: str,
    out: _Optional = None,
) -> _Asked:
    return _Asked(_Request("gemm_all_reduce", "sum", 0, wire_dtype, algorithm), 1, (a, b, bias, residual, out))


def _fake(asked: _Asked) -> torch.Tensor:
    shape, _, _ = _check(asked.request, None, asked.size, *asked.tensors)
    return asked.tensors[0].new_empty(shape)


def _set_up_all_to_all(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _, _ = inputs
    save_factors(context, a, b)


def _backward_all_to_all(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    rows = all_to_all_rows(gradient.flatten(0, -2).contiguous())
    return *gradients_of_factors(context, rows), None, None


def _set_up_reduce_scatter(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _, _, op, scatter_dim, _, _, world_size = inputs
    context.outer = math.prod(a.shape[:scatter_dim])
    context.size = world_size
    context.divisor = world_size if op == "mean" else 1
    save_factors(context, a, b)


def _backward_reduce_scatter(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    columns, size = gradient.shape[-1], context.size
    of_bias = gradient.flatten(0, -2).sum(0) if context.needs_input_grad[2] else None
    of_residual = gradient if context.needs_input_grad[3] else None
    of_a = of_b = None
    if context.needs_input_grad[0] or context.needs_input_grad[1]:
        of_product = gradient if context.divisor == 1 else gradient / context.divisor
        gathered = all_gather_rows(of_product.flatten(0, -2).contiguous(), size)
        rows = gathered.view(size, context.outer, -1, columns).transpose(0, 1).reshape(-1, columns)
        of_a, of_b = gradients_of_factors(context, rows)
    return of_a, of_b, of_bias, of_residual, None, None, None, None, None


def _set_up_all_reduce(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, *_ = inputs
    save_factors(context, a, b)


def _backward_all_reduce(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    rows = gradient.flatten(0, -2)
    of_bias = rows.sum(0) if context.needs_input_grad[2] else None
    of_residual = gradient if context.needs_input_grad[3] else None
    return *gradients_of_factors(context, rows), of_bias, of_residual, None, None


def _operator(
    name: str,
    arguments: str,
    asked: Callable[..., _Asked],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    result_in_heap: bool,
) -> TorchOperator:
    def run(*args: Any, **keywords: Any) -> torch.Tensor:
        request, _, tensors = asked(*args, **keywords)
        return _run(request, *tensors)

    return TorchOperator(
        name,
        arguments,
        run,
        fake=lambda *args, **keywords: _fake(asked(*args, **keywords)),
        outputs=("out",),
        setup_context=setup_context,
        backward=backward,
        result_in_heap=result_in_heap,
    )


_PUBLIC: dict[str, Any] = {each.__name__: each for each in (gemm_all_to_all, gemm_reduce_scatter, gemm_all_reduce)}
_all_to_all = _operator(
    "gemm_all_to_all",
    "Tensor a, Tensor b, str algorithm, int world_size",  # compilers keep graphs by arguments: a shape depends on it
    _asked_all_to_all,
    _set_up_all_to_all,
    _backward_all_to_all,
    result_in_heap=True,
)
_reduce_scatter = _operator(
    "gemm_reduce_scatter",
    "Tensor a, Tensor b, Tensor? bias, Tensor? residual, str op, int scatter_dim, ScalarType? wire_dtype, "
    "str algorithm, int world_size",
    _asked_reduce_scatter,
    _set_up_reduce_scatter,
    _backward_reduce_scatter,
    result_in_heap=False,
)
_all_reduce = _operator(
    "gemm_all_reduce",
    "Tensor a, Tensor b, Tensor? bias, Tensor? residual, ScalarType? wire_dtype, str algorithm",
    _asked_all_reduce,
    _set_up_all_reduce,
    _backward_all_reduce,
    result_in_heap=True,
)
