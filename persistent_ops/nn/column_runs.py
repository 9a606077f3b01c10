"""Columns of several groups of tables, put side by side in the order of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .table_layout import Run

__all__ = ["side_by_side"]


def side_by_side(runs: Sequence[Run], pooled: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the runs' columns, one after the other.

    Backward, each group's gradient is put together in one pass over it, or is columns of the result's where the group
    has one run. Autograd would take three passes over the whole group for each of its runs: zeros, a copy, and a sum.

    Args:
        runs: of a result, more than one; each column of a group is in one of them.
        pooled: `[B, columns]` of each group.
    """
    result: torch.Tensor = _SideBySide.apply(tuple(runs), *pooled)  # type: ignore[no-untyped-call]
    return result


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, runs: tuple[Run, ...], *pooled: torch.Tensor) -> torch.Tensor:
        context.runs, context.dtypes = runs, [each.dtype for each in pooled]
        return torch.cat([pooled[group][:, begin:end] for group, begin, end in runs], dim=1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_runs = gradient.split([end - begin for _, begin, end in context.runs], dim=1)
        found: list[torch.Tensor | None] = []
        for group, dtype in enumerate(context.dtypes):
            parts = [(run, part) for run, part in zip(context.runs, of_runs, strict=True) if run.group == group]
            parts.sort(key=lambda part: part[0].begin)
            if not context.needs_input_grad[1 + group]:
                found.append(None)
            elif dtype == gradient.dtype:
                found.append(parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts], dim=1))
            else:  # which torch.cat would leave to another pass
                made = gradient.new_empty((len(gradient), parts[-1][0].end), dtype=dtype)
                for run, part in parts:
                    made[:, run.begin : run.end].copy_(part)
                found.append(made)
        return None, *found
