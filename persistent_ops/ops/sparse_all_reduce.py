"""Sparse all-reduce: the sum over PEs of tensors of which each has some rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..runtime import world as _world
from ..runtime.compile.literals import vector_bytes
from ..runtime.errors import to_raise
from ..runtime.overlap import check_apart
from ..runtime.plain_call import require_plain
from ..runtime.tensor_specs import TensorSpec, TensorSpecs
from ..runtime.torch_library import TorchOperator
from ..runtime.uncompiled import uncompiled
from ..runtime.work import Work
from .sparse_launch import PendingSum, find_plan, refuse_capture, sorted_entries, start
from .sparse_plan import MAX_ENTRIES, MAX_ROWS, OPERATOR, OPS, SCALARS, Entries, Layout, bad_row, state_of

__all__ = ["ALGORITHMS", "reference", "sparse_all_reduce", "sparse_all_reduce_into", "start_sum"]

ALGORITHMS = ("auto", "owner", "allgather", "dense")
_NO_GRADIENT = "sparse_all_reduce has no backward pass: it is for gradients, under torch.no_grad()"


@uncompiled
def sparse_all_reduce(
    x: torch.Tensor, *, op: str = "sum", algorithm: str = "auto", async_op: bool = False
) -> torch.Tensor | Work[torch.Tensor]:
    """Sum sparse tensors over all PEs, in one kernel.

    Sums are in fp32, and in one order: a PE's entries of a row as they occur, the PEs' sums by rank, from the first PE
    that has the row; what comes out is rounded once. So every PE gets the same bits, on every run and with every
    algorithm (but "dense", on a GPU, may make a -0.0 a 0.0 where a PE has a row more than once).

    Args:
        x: sparse COO `[R, ...]` with one sparse dimension and rows of any dense shape; float32, float16 or bfloat16;
            coalesced or not; with any number of entries on each PE up to 2^31 - 1, 0 included. R is at most 2^31.
            R, the rows' shape and the dtype are the same on every PE. A bit per row of R and PE travels:
            meant for R up to some 10^8.
        op: "sum", or "mean", the sum divided by the number of PEs.
        algorithm: "owner" sends a row that one PE has directly to its place on every PE; a row that several PEs have
            is summed by one of them. "allgather" sends such a row to every PE, and each sums it: one latency less,
            more bytes and room. "dense" uses dense tensors `[R, ...]` in fp32. "auto" takes "owner" or "allgather"
            by the size and overlap of the last call with a tensor of this kind.
        async_op: return a `Work` at once ("dense" with the sum). On "cuda" the kernel then runs on a stream of
            its own. The next call with equal shape, dtype and op waits on the host for this one's number of rows. x
            stays as it is until then, or until `wait()`: where the sum finds no room it is launched again.

    Returns:
        The sum, of x's shape and dtype: coalesced, indices int64, sorted, unique. It is in a buffer of the symmetric
        heap's pool, which is used again when no tensor shares it, and counts against `heap_size`. The buffer holds
        values, row numbers, and room for more rows, so that the next result likely fits: a few percent more than this
        one or, up to 16 MB, more than the largest of the last 32 results of this layout.

    Raises:
        TypeError, ValueError: an argument's type, layout, shape, dtype or device; before anything is launched.
        ValueError: x is not coalesced as it says, on the PE that passed it. The sum is wrong, on all PEs. ("dense" adds
            up what there is, whatever x says.)
        IndexError: a row out of range, on the PE that passed it; the sum lacks such entries, and the world stays
            usable.
        SymmetricHeapError: no room for the result.
        PeerTimeoutError, ContractMismatchError: a peer did not answer, or launched something else.
        RuntimeError: in a CUDA-graph capture; `sparse_all_reduce_into` is for those.
        NotImplementedError: in a backward pass; with `async_op`, where a gradient of x is recorded.

    Collective, on the current stream. It waits on the host until the number of rows is known, not for the rows. The
    first call with a layout, and one whose union has outgrown the room of the last, launch twice. torch.compile breaks
    its graph around a call.
    """
    if not async_op:
        return _operator((x, op, algorithm), {}, (x,))  # type: ignore[no-any-return]
    require_plain({"x": x}, layout=torch.sparse_coo)
    refuse_gradient(x)
    return _start(x, op, algorithm)


def sparse_all_reduce_into(
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    num_rows: int,
    out_indices: torch.Tensor,
    out_values: torch.Tensor,
    out_count: torch.Tensor,
    count: torch.Tensor | None = None,
    op: str = "sum",
    algorithm: str = "auto",
    is_coalesced: bool = False,
) -> None:
    """Sum sparse tensors over all PEs into buffers, without the host: for CUDA graphs.

    Bits and order of sums as in `sparse_all_reduce`.

    Args:
        indices: `[n]`, int32 or int64: row numbers, in any order, any number of times; n is at most 2^31 - 1.
        values: `[n, ...]`, contiguous, float32, float16 or bfloat16.
        num_rows: R, at most 2^31, the same on every PE.
        out_indices: `[capacity]`, int64, on the device: receives the union's rows, ascending.
        out_values: `[capacity, ...]` in the symmetric heap (`po.empty`), dtype of the values: receives the sums. The
            capacity is the same on every PE.
        out_count: `[1]`, int64, on the device: receives the number of rows of the union. Elements after this number in
            out_indices and out_values stay unchanged. The three outputs share no memory with each other or an input.
        count: `[1]`, int64, on the device: how many of the n entries are valid; None for all.
        op: "sum" or "mean".
        algorithm: "auto", "owner" or "allgather", see there; "auto" chooses by the size of the buffers.
        is_coalesced: whether the valid indices are ascending and each occurs once, so that they need not be sorted.

    Raises:
        TypeError, ValueError, NotSymmetricError: an argument; before anything is launched.
        CapacityError: the union has more rows than the buffers; only `out_count` is written, with the number of
            rows. On every PE; the world stays usable.
        IndexError: a row out of range, or a count; such entries are skipped.
        ValueError: the indices are not as `is_coalesced` says. The sums are wrong, on all PEs.
        PeerTimeoutError, ContractMismatchError: as with `sparse_all_reduce`; `out_values` is NaN.
        RuntimeError: a CUDA-graph capture meets shapes that were not called before.
        NotImplementedError: where a gradient of values or out_values is recorded.

    Collective, on the current stream; the first call with these shapes is blocking, and may not be captured. On "cuda"
    errors of the launch come with the next operator or `po.check()`.
    """
    outputs = {"out_indices": out_indices, "out_values": out_values, "out_count": out_count}
    arguments = (indices, values, num_rows, count, op, algorithm, is_coalesced)
    _into(arguments, outputs, (indices, values, out_indices, out_values, out_count), (count,))


# ---- launch --------------------------------------------------------------------------------------------------------


def _start(x: torch.Tensor, op: str, algorithm: str) -> Work[torch.Tensor]:
    if algorithm != "dense":
        pending = start_sum(x, op, algorithm)
        return Work(pending.wait, pending.done)
    world = _world.for_call()
    layout = _check(x, op, algorithm, world.backend.device)
    refuse_capture(world)
    found = _through_dense(world, layout, x)
    return Work(lambda: _sum_or_raise(found), lambda: True)


def start_sum(x: torch.Tensor, op: str, algorithm: str = "auto", *, tag: int = 0) -> PendingSum:
    """Check, launch, and leave the waiting to the caller; "dense" excepted. `tag` as in `sparse_launch.start`."""
    world = _world.for_call()
    device = world.backend.device
    layout = _check(x, op, algorithm, device)
    refuse_capture(world)
    if world.backend.name != "cuda":
        return _start_here(world, layout, x, algorithm, tag)
    stream = state_of(world).side_stream(device)
    with torch.cuda.stream(stream):
        for tensor in (x._indices(), x._values()):
            tensor.record_stream(stream)
        return _start_here(world, layout, x, algorithm, tag)


def _start_here(world: _world.World, layout: Layout, x: torch.Tensor, algorithm: str, tag: int = 0) -> PendingSum:
    return start(world, layout, x._indices(), x._values(), algorithm, in_order=x.is_coalesced(), tag=tag)


def _sum_or_raise(found: torch.Tensor | IndexError) -> torch.Tensor:
    if isinstance(found, IndexError):
        raise to_raise(found)
    return found


def _through_dense(world: _world.World, layout: Layout, x: torch.Tensor) -> torch.Tensor | IndexError:
    """Sum dense copies: every PE has all rows then, and only the rows of the union are kept; or return a bad row."""
    numbers = x._indices()[0]
    inside = (numbers >= 0) & (numbers < layout.num_rows)
    is_bad = bool((~inside).any())
    numbers_inside, values = numbers[inside], x._values()[inside].float()
    rows = torch.unique(numbers_inside)
    marks = Layout(layout.num_rows, (), torch.float32, "sum")
    present = torch.ones(rows.numel(), dtype=torch.float32, device=x.device)
    union, _ = start(world, marks, rows, present, "owner", in_order=True).pair()
    union = union.clone()
    everywhere = torch.arange(layout.num_rows, dtype=torch.int64, device=x.device)
    # -0.0 is the only number that does not change a number that it is added to.
    dense = torch.full((layout.num_rows, *layout.row_shape), -0.0, dtype=torch.float32, device=x.device)
    # Each device has one way to add up in order of occurrence.
    if x.is_cuda:
        dense.index_put_((numbers_inside,), values, accumulate=True)
    else:
        dense.index_add_(0, numbers_inside, values)
    whole = Layout(layout.num_rows, layout.row_shape, torch.float32, layout.op)
    _, sums = start(world, whole, everywhere, dense, "owner", in_order=True).pair()
    world.workspace.raise_pending()
    if is_bad:
        return bad_row(int((~inside).nonzero()[0]), int(numbers[~inside][0]), layout.num_rows)
    values = sums.index_select(0, union).to(layout.dtype)
    return torch.sparse_coo_tensor(
        union.unsqueeze(0), values, x.shape, device=x.device, check_invariants=False, is_coalesced=True
    )


# ---- checks --------------------------------------------------------------------------------------------------------


def _check(x: torch.Tensor, op: str, algorithm: str, device: torch.device) -> Layout:
    if x.sparse_dim() != 1:
        raise ValueError(
            f"x: expected one sparse dimension (rows), got {x.sparse_dim()} of shape {list(x.shape)}; x.to_sparse(1) "
            "of a dense tensor has one"
        )
    check_choices(op, algorithm, ALGORITHMS)
    layout = _layout(x.shape, x.dtype, x.device, op, device)
    check_num_entries("x", x._nnz())
    return layout


@functools.lru_cache(256)
def _layout(shape: torch.Size, dtype: torch.dtype, device: torch.device, op: str, expected: torch.device) -> Layout:
    check_values("x", dtype, device, expected)
    check_num_rows("x", shape[0])
    return Layout(shape[0], tuple(shape[1:]), dtype, op)


def _check_into(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    count: torch.Tensor | None,
    op: str,
    algorithm: str,
    is_coalesced: bool,
    **outputs: torch.Tensor,
) -> None:
    # A meta tensor would go to the fake kernel unseen.
    device = _world.current().backend.device
    check_entries(indices, values, num_rows, device)
    check_choices(op, algorithm, ALGORITHMS[:-1])
    _BUFFERS.check(device, values, outputs["out_values"], outputs["out_indices"], outputs["out_count"], count)
    refuse_gradient(values, outputs["out_values"])


def check_choices(op: str, algorithm: str, algorithms: Sequence[str]) -> None:
    """Raise for an unknown op or algorithm."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(map(repr, OPS))}, got {op!r}")
    if algorithm not in algorithms:
        raise ValueError(f"algorithm: expected one of {', '.join(map(repr, algorithms))}, got {algorithm!r}")


def check_values(name: str, dtype: torch.dtype, device: torch.device, expected: torch.device) -> None:
    """Raise for a dtype or device that the kernel does not take."""
    if dtype not in SCALARS:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {dtype}")
    if device != expected:
        raise ValueError(f"{name}: expected a tensor on {expected}, got one on {device}")


def check_num_rows(name: str, num_rows: int) -> None:
    """Raise for more rows than the kernel numbers."""
    if num_rows > MAX_ROWS:
        raise ValueError(f"{name}: expected at most 2^31 rows, got {num_rows}")
    if num_rows < 0:
        raise ValueError(f"{name}: expected at least 0 rows, got {num_rows}")


def check_num_entries(name: str, num_entries: int) -> None:
    """Raise for more entries than the kernel numbers."""
    if num_entries > MAX_ENTRIES:
        raise ValueError(f"{name}: expected at most 2^31 - 1 entries, got {num_entries}")


def refuse_gradient(*tensors: torch.Tensor) -> None:
    """Raise where the sums that a tensor is to have a part in are recorded for a backward pass."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(_NO_GRADIENT)


_ENTRIES = TensorSpecs(
    TensorSpec("indices", "n", (torch.int32, torch.int64), is_contiguous=False),
    TensorSpec("values", "n ...", is_contiguous=False),
)
_BUFFERS = TensorSpecs(
    TensorSpec("values", "n ..."),
    TensorSpec("out_values", "capacity ...", "values"),
    TensorSpec("out_indices", "capacity", (torch.int64,)),
    TensorSpec("out_count", "1", (torch.int64,)),
    TensorSpec("count", "1", (torch.int64,)),
)


def check_entries(
    indices: torch.Tensor, values: torch.Tensor, num_rows: int, device: torch.device
) -> tuple[int, tuple[int, ...]]:
    """Return n and the rows' shape; raise for entries that the kernel does not take."""
    if not isinstance(num_rows, int) or isinstance(num_rows, bool):
        raise TypeError(f"num_rows: expected a whole number, got {num_rows!r}")
    _ENTRIES.check(device, indices, values)
    check_num_rows("num_rows", num_rows)
    check_num_entries("indices", indices.shape[0])
    return indices.shape[0], tuple(values.shape[1:])


def _check_places(inputs: dict[str, torch.Tensor | None], outputs: dict[str, torch.Tensor]) -> None:
    """Raise for buffers that lie where the kernel cannot use them."""
    if outputs["out_values"].data_ptr() % (unit := vector_bytes()):
        raise ValueError(f"out_values: expected a tensor that begins at a multiple of {unit} bytes, as from po.empty()")
    # Rows are looked up, and sums are sent, while others are written.
    others = dict(inputs)
    for name, tensor in outputs.items():
        check_apart(name, tensor, others)
        others[name] = tensor


# ---- torch operators -----------------------------------------------------------------------------------------------


def _run(x: torch.Tensor, op: str, algorithm: str) -> torch.Tensor:
    world = _world.for_call()
    layout = _check(x, op, algorithm, world.backend.device)
    if algorithm == "dense":
        return _sum_or_raise(_through_dense(world, layout, x))
    return start(
        world, layout, x._indices(), x._values(), algorithm, in_order=x.is_coalesced(), is_for_later=False
    ).wait()


def _run_into(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    count: torch.Tensor | None,
    op: str,
    algorithm: str,
    is_coalesced: bool = False,
    *,
    out_indices: torch.Tensor,
    out_values: torch.Tensor,
    out_count: torch.Tensor,
) -> None:
    world = _world.for_call()
    device = world.backend.device
    check_choices(op, algorithm, ALGORITHMS[:-1])
    _, row_shape = check_entries(indices, values, num_rows, device)
    capacity = _BUFFERS.check(device, values, out_values, out_indices, out_count, count)["capacity"]
    output_offset = world.heap.offset_of(out_values, "out_values")
    outputs = {"out_indices": out_indices, "out_values": out_values, "out_count": out_count}
    _check_places({"indices": indices, "values": values, "count": count}, outputs)
    layout = Layout(num_rows, row_shape, values.dtype, op)
    entries = Entries(indices.contiguous(), None, values) if is_coalesced else sorted_entries(indices, values, count)
    state, gathers = OPERATOR.state(world), algorithm == "allgather"
    if algorithm == "auto":
        gathers = world.size * capacity * layout.columns * 4 <= (state.tuning or OPERATOR.default_tuning).gather_bytes
    used, row_bytes = (out_indices, out_count, count), layout.row_bytes
    plan = find_plan(world, state, layout, capacity, entries, *used, gathers=gathers, row_bytes=row_bytes, is_into=True)
    increment_version((out_indices, out_values, out_count))
    count_at = 0 if count is None else count.data_ptr()
    plan.launch(entries, output_offset, (out_indices.data_ptr(), out_count.data_ptr(), count_at))


def _fake_into(
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    count: torch.Tensor | None,
    op: str,
    algorithm: str,
    is_coalesced: bool = False,
    *,
    out_indices: torch.Tensor,
    out_values: torch.Tensor,
    out_count: torch.Tensor,
) -> None:
    check_choices(op, algorithm, ALGORITHMS[:-1])
    _BUFFERS.check(None, values, out_values, out_indices, out_count, count)


_operator = TorchOperator(
    "sparse_all_reduce",
    "Tensor x, str op, str algorithm",
    _run,
    lambda x, op, algorithm: check_choices(op, algorithm, ALGORITHMS),
    no_gradient=_NO_GRADIENT,
    layout=torch.sparse_coo,
)
_into = TorchOperator(
    "sparse_all_reduce_into",
    "Tensor indices, Tensor values, int num_rows, Tensor? count, str op, str algorithm, bool is_coalesced=False",
    _run_into,
    _check_into,
    results="()",
    fake=_fake_into,
    outputs=("out_indices", "out_values", "out_count"),
)


# ---- reference -----------------------------------------------------------------------------------------------------


def reference(xs: Sequence[torch.Tensor], op: str = "sum") -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the result in fp64 on the CPU, from every PE's tensor.

    Returns:
        The union's rows, `[U]`, ascending, and the sums, `[U, ...]`, float64, not rounded.
    """
    parts = [x.detach().cpu() for x in xs]
    indices = torch.cat([part._indices()[0] for part in parts])
    values = torch.cat([part._values().double() for part in parts])
    rows, where = torch.unique(indices, return_inverse=True)
    sums = torch.zeros((rows.numel(), *values.shape[1:]), dtype=torch.float64, device="cpu")
    sums.index_add_(0, where, values)
    return rows, sums / len(parts) if op == "mean" else sums
