"""FBGEMM's table-batched embeddings in the exchange through torch.distributed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import persistent_ops as po

from .dense_optimizer import DENSE_OPTIMIZERS, EPS
from .peers import Bags, ExchangedEmbedding, means_over_pes, parts_of, sums

__all__ = ["FbgemmEmbedding", "why_no_fbgemm"]

_MODULES = ("split_table_batched_embeddings_ops_training", "split_table_batched_embeddings_ops_common")


def why_no_fbgemm() -> str | None:
    """Return why FBGEMM cannot be imported, or None where it can."""
    try:
        for name in _MODULES:
            importlib.import_module(f"fbgemm_gpu.{name}")
    except Exception as error:  # another library's, of any version
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


class FbgemmEmbedding(ExchangedEmbedding):
    """`ExchangedEmbedding` with FBGEMM's tables, which update rows in their backward pass.

    Exact, without stochastic rounding, all memory on the GPU. Replicated tables have dense gradients and torch's
    optimizer, as in TorchRec's "dense" kernel.

    Args:
        collection: see `ExchangedEmbedding`.
        algorithm: of the optimizer.
        rate: learning rate.
        wire_dtype: see `ExchangedEmbedding`.

    Raises:
        Exception: of any type; it cannot be made here.
    """

    def __init__(
        self,
        collection: po.nn.ShardedEmbeddingBagCollection,
        algorithm: str,
        rate: float,
        *,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._place(collection, wire_dtype)
        spread, copied = ([rows for rows, *_ in parts_of(collection, each)] for each in (self._slots, self._copied))
        if not spread:
            raise ValueError("FBGEMM makes no module without tables")
        self._fused = _fused(spread, algorithm, rate)
        optimizers: list[Any] = [_FusedRate(self._fused, rate)]
        self._dense: Any = None
        if copied:
            if algorithm == "rowwise_adagrad":
                raise ValueError("torch.optim, which updates replicated tables, has no row-wise Adagrad")
            self._dense = _dense(copied)
            optimizers.append(DENSE_OPTIMIZERS[algorithm]([self._dense.weights], lr=rate))
        self.optimizer = _Both(optimizers)
        self.take_over(collection)

    def _parts(self) -> list[list[torch.Tensor]]:
        rows = self._fused.split_embedding_weights()
        states = self._fused.split_optimizer_states() or [[]] * len(rows)
        parts = [[each, *of_table] for each, of_table in zip(rows, states, strict=True)]
        if self._dense is not None:
            weights = self._dense.weights
            whole = [weights.detach(), *sums(self.optimizer.parts[1], weights)]
            sizes = [each.shape for each in self._dense.split_embedding_weights()]
            of_tables = zip(*(each.split([size.numel() for size in sizes]) for each in whole), strict=True)
            parts += [[each.view(size) for each in part] for part, size in zip(of_tables, sizes, strict=True)]
        return parts

    def _pooled(self, bags: Bags, num_samples: int) -> torch.Tensor:
        pooled: torch.Tensor = self._fused(*_flat(bags))
        return pooled

    def _pooled_here(self, bags: Bags) -> torch.Tensor:
        (weights,) = means_over_pes(self._dense.weights)
        pooled: torch.Tensor = torch.func.functional_call(self._dense, {"weights": weights}, _flat(bags))
        return pooled


def _fused(blocks: list[torch.Tensor], algorithm: str, rate: float) -> Any:
    training, common = (importlib.import_module(f"fbgemm_gpu.{name}") for name in _MODULES)
    configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    is_gpu = blocks[0].is_cuda
    location = common.EmbeddingLocation.DEVICE if is_gpu else common.EmbeddingLocation.HOST
    device = training.ComputeDevice.CUDA if is_gpu else training.ComputeDevice.CPU
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(*block.shape, location, device) for block in blocks],
        optimizer=getattr(configs.EmbOptimType, f"EXACT_{algorithm.upper()}"),
        learning_rate=rate,
        eps=EPS,
        weights_precision=configs.SparseType.FP32,
        output_dtype=configs.SparseType.FP32,
        stochastic_rounding=False,
        device=blocks[0].device,
    )


def _dense(tables: list[torch.Tensor]) -> Any:
    training = importlib.import_module(f"fbgemm_gpu.{_MODULES[0]}")
    return training.DenseTableBatchedEmbeddingBagsCodegen(
        [tuple(table.shape) for table in tables], use_cpu=not tables[0].is_cuda
    )


def _flat(bags: Bags) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lookups of all slots, and where bags begin and end."""
    lengths = torch.cat(bags.lengths)
    return torch.cat(bags.values).long(), F.pad(lengths.long().cumsum(0), (1, 0))


class _FusedRate:
    """The learning rate of FBGEMM's optimizer; see `EmbeddingOptimizer`."""

    def __init__(self, fused: Any, rate: float) -> None:
        self._fused = fused
        self._pushed = rate
        self.param_groups: list[dict[str, Any]] = [{"lr": rate}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        rate = self.param_groups[0]["lr"]
        if rate != self._pushed:
            self._fused.set_learning_rate(rate)
            self._pushed = rate

    def step(self) -> None:
        pass  # the backward pass has updated the rows


class _Both:
    """Optimizers as one; see `EmbeddingOptimizer`.

    Attributes:
        parts: of these.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.param_groups: list[dict[str, Any]] = [group for part in parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("FBGEMM's states are not saved")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("FBGEMM's states are not loaded")
