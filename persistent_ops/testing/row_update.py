"""Optimizers of embedding tables in torch's operators, for tables that torch exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["RowUpdate"]

_ROWS_AT_ONCE = 1 << 20  # bounds the temporaries of an update


class RowUpdate(torch.optim.Optimizer):
    """SGD, Adagrad or row-wise Adagrad, which torch.optim lacks: of the rows of sparse gradients, or all of dense ones.

    Gradients are summed, and states kept, in float32, whatever the tables are.

    Args:
        parameters: tables `[R, D]`, or several in a vector.
        optimizer: "sgd", "adagrad" or "rowwise_adagrad", by the formulas of `po.EmbeddingOptimizer`.
        lr, eps: of it.
        width: D of tables in a vector.
        states: in whose place none are allocated, by the address of the table.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: str,
        *,
        lr: float,
        eps: float,
        width: int | None = None,
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._optimizer, self._eps, self._width = optimizer, eps, width
        for table in self.param_groups[0]["params"]:
            if optimizer != "sgd":
                given = (states or {}).get(table.data_ptr())
                self.state[table]["sum"] = self._no_sum(table) if given is None else given

    def _no_sum(self, table: torch.Tensor) -> torch.Tensor:
        rows = self._rows(table)
        shape = rows.shape[:1] if self._optimizer == "rowwise_adagrad" else rows.shape
        zeros = torch.zeros(shape, dtype=torch.float32, device=table.device)
        return zeros if table.dim() == 2 or zeros.dim() == 1 else zeros.view(table.shape)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._width is None or tensor.dim() == 2 else tensor.view(-1, self._width)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the rows."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, float(group["lr"]))

    def _update(self, table: nn.Parameter, lr: float) -> None:
        gradient, rows = table.grad, self._rows(table.detach())
        assert gradient is not None
        if gradient.is_sparse:
            values = gradient._values().float()
            summed = torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)
            summed = summed.coalesce()
            numbers, sums = summed.indices()[0], summed.values()
        else:
            sums = self._rows(gradient).float()
            numbers = torch.arange(len(rows), device=rows.device)
        state = self.state[table].get("sum")
        if state is not None and self._optimizer == "adagrad":
            state = self._rows(state)
        for some, part in zip(numbers.split(_ROWS_AT_ONCE), sums.split(_ROWS_AT_ONCE), strict=True):
            step = part if state is None else self._scaled(state, some, part)
            rows.index_copy_(0, some, rows[some].float().sub_(step, alpha=lr).to(rows.dtype))

    def _scaled(self, state: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Add the squares of gradients to the states of rows; return gradients over their roots."""
        squares = sums.square()
        added = state[rows].add_(squares if self._optimizer == "adagrad" else squares.mean(1))
        state.index_copy_(0, rows, added)
        root = added.sqrt_().add_(self._eps)
        return sums / (root if self._optimizer == "adagrad" else root[:, None])
