"""The backward pass where addresses exceed 31 and 32 bits, in elements and in bytes.

On the host such memory is mapped and left untouched, except for some rows near the boundaries.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.ops.embedding.all_to_all import _prepared
from persistent_ops.ops.embedding.backward import record_update
from persistent_ops.ops.embedding.backward_plan import OPERATOR, BackwardKey
from persistent_ops.ops.embedding.gradients import _Touched, dense_gradients, dense_size, gradient_plan
from persistent_ops.ops.embedding.inversion import invert
from persistent_ops.ops.embedding.plan import OfBatch
from persistent_ops.ops.embedding.recorded_call import EmbeddingCall
from persistent_ops.ops.embedding.split import table_set
from persistent_ops.runtime import world as po_world

_WIDTH = 256  # a row of bfloat16 is 512 bytes
_MOST_BYTES = 1 << 30  # that a program may have touched
_PAGE_BYTES = 4096


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros. On the host: fresh pages, which the kernel has zeroed and provides when they are touched."""
    if po.device().type == "cpu":
        return torch.empty(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=po.device())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _without_touching(patch: pytest.MonkeyPatch) -> None:
    """On the host, skip the zeroing of large memory, which is always fresh."""
    if po.device().type != "cpu":
        return
    zeros, zero_ = torch.zeros, torch.Tensor.zero_

    def is_large(shape: Any) -> bool:
        return isinstance(shape, (tuple, torch.Size)) and torch.Size(shape).numel() >= _MOST_BYTES

    patch.setattr(torch, "zeros", lambda *a, **k: (torch.empty if is_large(a[0]) else zeros)(*a, **k))
    patch.setattr(torch.Tensor, "zero_", lambda self: self if is_large(self.shape) else zero_(self))


def _whole(*shape: int, first: int = 0) -> torch.Tensor:
    """Return small whole numbers, which sum up exactly. None is 0."""
    numbers = torch.arange(first, first + torch.Size(shape).numel()) % 9 + 1
    return numbers.view(shape).to(po.device(), torch.bfloat16)


# ---- rows and states ------------------------------------------------------------------------------------------------


def _updated(optimizer: str, rows: int, width: int, touched: list[int]) -> list[str]:
    """Make two steps in a table in which rows near the boundaries have lookups; return what is wrong."""
    before = _resident()
    device, count = po.device(), len(touched)
    chosen = torch.tensor(touched, device=device)
    table = _zeros(rows, width, dtype=torch.bfloat16)
    first = _whole(count, width)
    table[chosen] = first
    with pytest.MonkeyPatch.context() as patch:
        _without_touching(patch)
        made = po.EmbeddingOptimizer([table], optimizer, lr=0.5, eps=0.0)
    # The same number in all columns, so that a mean of squares is exact too.
    gradient = torch.arange(1.0, count + 1, device=device, dtype=torch.bfloat16)[:, None].expand(count, width)
    gradient = gradient.contiguous()
    offsets = torch.arange(count + 1, device=device)
    for _ in range(2):
        pooled = po.embedding_all_to_all([table], chosen, offsets, optimizer=made)
        pooled.backward(gradient)
    po.check()
    wrong = []
    slopes = gradient.float()
    steps = {"sgd": slopes * 2}.get(optimizer, 1 + torch.full_like(slopes, 0.5).sqrt())
    wanted = first.float() - 0.5 * steps
    if not torch.allclose(table[chosen].float(), wanted, rtol=1 / 64, atol=1 / 64):
        wrong.append(f"rows: {table[chosen][:, 0]} instead of {wanted[:, 0]}")
    for state in made.state(table):
        squares = 2 * slopes.square()
        if not torch.equal(state[chosen], squares if state.dim() == 2 else squares[:, 0]):
            wrong.append(f"states: {state[chosen]}")
        if state.dim() == 2 and bool(state[[row - 1 for row in touched if row - 1 not in touched]].any()):
            wrong.append("a state that is none of theirs")
    if po.device().type == "cpu" and _resident() - before > _MOST_BYTES:
        wrong.append(f"{_resident() - before} bytes were touched")
    return wrong


# With rows of 512 bytes, row 2^22 begins at byte 2^31, row 2^23 at byte 2^32 and element 2^31; its state at byte 2^33.
_ABOUT = [3, 2**21, 2**22 - 1, 2**22, 2**22 + 3, 2**23 - 1, 2**23, 2**23 + 3]


@pytest.mark.parametrize(
    ("optimizer", "rows", "width", "touched"),
    [
        ("adagrad", 2**23 + 5, _WIDTH, _ABOUT),
        ("rowwise_adagrad", 2**23 + 5, _WIDTH, _ABOUT),
        ("sgd", 2**31 + 6, 1, [5, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 5]),
    ],
)
def test_rows_and_states(backend: str, optimizer: str, rows: int, width: int, touched: list[int]) -> None:
    assert in_world(_updated, 1, backend, optimizer, rows, width, touched) == [[]]


# ---- sums alone -----------------------------------------------------------------------------------------------------


def _sums_of_all_rows() -> list[str]:
    """The second table's sums begin after 2^31 floats, the flags after both tables' sums."""
    before = _resident()
    device, count = po.device(), len(_ABOUT)
    tables = [_zeros(2**23 + 5, _WIDTH, dtype=torch.bfloat16), _zeros(7, _WIDTH, dtype=torch.bfloat16)]
    chosen = [torch.tensor(_ABOUT, device=device), torch.arange(count, device=device) % 5]
    gradient = _whole(count, 2 * _WIDTH)
    offsets = torch.arange(2 * count + 1, device=device)
    memory = _zeros(dense_size(tables))
    with pytest.MonkeyPatch.context() as patch:
        _without_touching(patch)
        found = dense_gradients(gradient, tables, torch.cat(chosen), offsets, memory=memory)
    po.check()
    wrong = []
    for number, (rows, sums, touched) in enumerate(zip(chosen, found.sums, found.touched, strict=True)):
        distinct, places = rows.unique(return_inverse=True)
        values = gradient[:, number * _WIDTH : (number + 1) * _WIDTH].float()
        wanted = torch.zeros(len(distinct), _WIDTH, device=device).index_add_(0, places, values)
        if not torch.equal(sums[distinct], wanted):
            wrong.append(f"sums of table {number}")
        if not torch.equal(touched.nonzero().flatten(), distinct):
            wrong.append(f"rows that table {number} has")
    if device.type == "cpu" and _resident() - before > _MOST_BYTES:
        wrong.append(f"{_resident() - before} bytes were touched")
    return wrong


def test_sums_of_all_rows(backend: str) -> None:
    assert in_world(_sums_of_all_rows, 1, backend) == [[]]


def _sums_of_touched_rows() -> list[str]:
    """Half of the sums are stored after 2^31 other floats."""
    world, device, width, count = po_world.current(), po.device(), 16, 8
    tables = [torch.zeros(20, width, device=device, dtype=torch.bfloat16)]
    rows = torch.tensor([3, 9, 4, 19, 3, 0, 9, 12], device=device)
    gradient = _whole(count, width)
    split = (width,), ((width,),), (count,)
    key = BackwardKey(
        world.alone,
        table_set(world, tables),
        None,
        OPERATOR.state(world).tuning,
        *split,
        torch.bfloat16,
        torch.bfloat16,
        "sum",
        is_weighted=False,
    )
    plan = gradient_plan(world, key, tables)
    inverted = invert(world, plan.rows, rows, torch.arange(count + 1, device=device), counts=False, lookups=False)
    touched = _Touched.of(plan, inverted, tables)
    distinct, numbers = rows.unique(return_inverse=True)
    places = touched.places + (touched.places >= 3 * width) * 2**31
    sums = _zeros(touched.num_elements + 2**31)
    plan.launch(gradient, inverted, None, None, scale=None, sums=sums, places=places, touched=None)
    po.check()
    wanted = torch.zeros(len(distinct), width, device=device).index_add_(0, numbers, gradient.float())
    found = torch.cat([sums[: 3 * width], sums[2**31 + 3 * width :]]).view(-1, width)
    return [] if torch.equal(found, wanted) else [f"{found} instead of {wanted}"]


def test_sums_of_touched_rows(backend: str) -> None:
    assert in_world(_sums_of_touched_rows, 1, backend) == [[]]


# ---- gradients on their way -----------------------------------------------------------------------------------------

_SAMPLES = [2100, 3]
_WIDTHS = [1 << 20, 8]
_BAGS = [[0, 1, 1023, 1024, 2047, 2048, 2099, 2100, 2102], [0, 5, 1024, 2047, 2048, 2099, 2101]]  # of each PE's table


def _gradient_of(sample: int, rank: int) -> torch.Tensor:
    """Return a sample's gradient for the table of a PE."""
    return _whole(_WIDTHS[rank], first=7 * sample + rank)


def _pushed() -> list[str]:
    """PE 0's gradient, and its staging memory, are more than 2^31 elements and 2^32 bytes.

    PE 1's gradients for PE 0 go beyond byte 2^32 of that staging memory. The columns for PE 1 lie as far in PE 0's
    gradient.
    """
    before = _resident()
    rank, device = po.rank(), po.device()
    first, samples = sum(_SAMPLES[:rank]), _SAMPLES[rank]
    table = torch.zeros(3, _WIDTHS[rank], device=device, dtype=torch.bfloat16)
    bags = _BAGS[rank]
    rows = torch.arange(len(bags), device=device) % 3
    offsets = torch.zeros(sum(_SAMPLES) + 1, dtype=torch.int64)
    offsets[torch.tensor(bags) + 1] = 1
    offsets = offsets.cumsum(0).to(device)
    gradient = _zeros(samples, sum(_WIDTHS), dtype=torch.bfloat16)
    for sample in {*range(first, first + samples)} & {*_BAGS[0]}:
        gradient[sample - first, : _WIDTHS[0]] = _gradient_of(sample, 0)
    for sample in {*range(first, first + samples)} & {*_BAGS[1]}:
        gradient[sample - first, _WIDTHS[0] :] = _gradient_of(sample, 1)
    optimizer = po.EmbeddingOptimizer([table], "sgd", lr=0.5)
    world, lookups = po_world.current(), OfBatch(rows, offsets, None)
    choices = (_WIDTHS, _SAMPLES, torch.bfloat16, None, "sum", "fatal", "communication_aware", None)
    _, key, _ = _prepared(world, world.team, [table], lookups, choices)
    call = EmbeddingCall(world, key, (table,), None)
    # The forward pass alone would write all of its result.
    forward = functools.partial(_zeros, samples, sum(_WIDTHS), dtype=torch.bfloat16)
    result = record_update(optimizer, call, forward, *lookups)
    result.backward(gradient)
    po.check()
    wanted = torch.zeros(3, _WIDTHS[rank], device=device)
    for row, sample in zip(rows.tolist(), bags, strict=True):
        wanted[row] -= 0.5 * _gradient_of(sample, rank).float()
    wrong = [] if torch.equal(table.float(), wanted) else [f"{table} instead of {wanted}"]
    if device.type == "cpu" and _resident() - before > _MOST_BYTES:
        wrong.append(f"{_resident() - before} bytes were touched")
    return wrong


def test_gradients_that_are_pushed(backend: str) -> None:
    assert in_world(_pushed, 2, backend, heap_size=7 << 30) == [[]] * 2
