"""Columns of groups side by side: a gradient is put together in one pass."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from persistent_ops.nn.column_runs import side_by_side
from persistent_ops.nn.table_layout import Run

_RUNS = [Run(1, 4, 6), Run(0, 0, 3), Run(1, 0, 4), Run(2, 0, 1), Run(0, 3, 8)]
_WIDTHS = [8, 6, 1]


def _pooled(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    made = [torch.randn(5, width, generator=rng) for width in _WIDTHS]
    return [each.to(dtype).requires_grad_() for each, dtype in zip(made, dtypes, strict=True)]


_WRITES_NOTHING = {torch.ops.aten.new_empty.default, torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default}


class _Written(TorchDispatchMode):
    """Counts the elements that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and func not in _WRITES_NOTHING:
            self.count += result.numel()
        return result


def test_a_gradient_is_written_once() -> None:
    """No copy at all if a group has one run and the result's dtype."""
    for dtypes, not_written in (([torch.float32] * 3, _WIDTHS[2]), ([torch.bfloat16, torch.float32, torch.float16], 0)):
        pooled = _pooled(dtypes)
        result = side_by_side(_RUNS, pooled)
        gradient = torch.ones(5, sum(_WIDTHS))
        with _Written() as written:
            torch.autograd.grad(result, pooled, gradient)
        assert written.count == result.numel() - 5 * not_written
