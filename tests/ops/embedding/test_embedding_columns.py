"""Columns that a caller of embedding_all_to_all chooses: refused ones, agreement between PEs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.columns import columns_of

WIDTHS = ((4, 2), (), (3, 1, 2))
DIMS = tuple(map(sum, WIDTHS))


def test_tables_fill_a_row_in_any_order() -> None:
    found = columns_of((8, 6, 3, 2, 0), DIMS)
    assert found.begins == ((8, 6), (), (3, 2, 0)) and found.widths == ((4, 2), (), (3, 1, 2))
    assert columns_of((), (0, 0)).begins == ((), ())


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ((8, 6, 3, 2, 1), "from 0 up"),
        ((8, 6, 3, 3, 0), "different numbers"),
        ((8, 6, 3, -1, 0), "from 0 up"),
        ((8, 6, 3, 2, 0, 12), "below the 12 columns"),
        ((), "below the 12 columns"),
        ((4, 2, 6, 3, 0), "PE 0 has 6 columns, but its tables would have 9"),
    ],
)
def test_what_fills_no_row_is_refused(columns: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        columns_of(columns, DIMS)


def _call(columns: Any, **options: Any) -> torch.Tensor:
    """Pool two samples in a table of 2 columns and in one of 4, whose elements are all rank + 1, on two PEs."""
    tables = [torch.full((3, width), po.rank() + 1.0, device=po.device()) for width in (2, 4)]
    indices, offsets = torch.arange(4, device=po.device()) % 3, torch.arange(5, device=po.device())
    result: torch.Tensor = po.embedding_all_to_all(tables, indices, offsets, columns=columns, **options)
    return result


def _refused() -> list[Any]:
    with torch.no_grad():
        told = [error_of(lambda: _call([0, 4, 6, 10])), error_of(lambda: _call(["0", 4, 6, 10]))]
        right = _call([0, 8, 6, 2])
        split = [1, 1] if po.world_size() == 2 else None
        told.append(error_of(lambda: _call([0, 8, 6, 2], batch_per_rank=split, dim_per_rank=[6, 5])))
    return [*told, right.tolist()]


@pytest.mark.host
def test_what_is_refused() -> None:
    for rank, (shapes, types, dims, right) in enumerate(in_world(_refused, 2, "host")):
        assert shapes[0] == "ValueError" and f"tables of PE {rank} would have [4, 2] columns" in shapes[1]
        assert types[0] == "TypeError"
        assert dims[0] == "ValueError"
        assert right == [[1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1]]


def _different() -> Any:
    with torch.no_grad():
        _call([0, 8, 6, 2])
        told = error_of(lambda: _call([0, 8, 6, 2] if po.rank() else [0, 2, 6, 8]))
        po.recover()
        return told


@pytest.mark.host
def test_pes_that_want_columns_elsewhere_do_not_match() -> None:
    for error, told, *_ in in_world(_different, 2, "host"):
        assert error == "ContractMismatchError" and "columns" in told


def _compiled() -> list[bool]:
    columns = [0, 8, 6, 2]
    with torch.no_grad():
        want = _call(columns, dim_per_rank=[6, 6])
        compiled = torch.compile(_call, backend="eager", fullgraph=True)
        return [torch.equal(compiled(columns, dim_per_rank=[6, 6]), want)]


@pytest.mark.host
def test_the_compiler_passes_them_on() -> None:
    assert in_world(_compiled, 2, "host") == [[True]] * 2


def _sparse_gradients() -> list[list[float]]:
    """Return each table's gradient of two rows, where the gradient of a column of the result is its number."""
    tables = [torch.zeros(3, width, device=po.device(), requires_grad=True) for width in (2, 4)]
    indices, offsets = torch.tensor([0, 1, 0, 1], device=po.device()), torch.arange(5, device=po.device())
    result = po.embedding_all_to_all(tables, indices, offsets, columns=[0, 8, 6, 2])
    result.backward(torch.arange(12.0, device=po.device())[None] + 100 * po.rank())
    return [table.grad.to_dense()[:2].flatten().tolist() for table in tables]  # type: ignore[union-attr]


def test_gradients_come_from_there(backend: str) -> None:
    for begins, found in zip(((0, 8), (6, 2)), in_world(_sparse_gradients, 2, backend), strict=True):
        for begin, width, values in zip(begins, (2, 4), found, strict=True):
            first = [float(begin + column) for column in range(width)]
            assert values == [*first, *(100 + value for value in first)]
