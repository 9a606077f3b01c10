"""FBGEMM's table-batched embeddings in the exchange through torch.distributed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import persistent_ops as po

from .exchanged_embedding import Bags, ExchangedEmbedding, means_over_pes, parts_of, sums

__all__ = ["FbgemmEmbedding", "fbgemm_version", "fused_tables", "why_no_fbgemm"]

_PRECISIONS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_MODULES = ("split_table_batched_embeddings_ops_training", "split_table_batched_embeddings_ops_common")


def why_no_fbgemm() -> str | None:
    """Return why FBGEMM cannot be imported, or None where it can."""
    try:
        for name in _MODULES:
            importlib.import_module(f"fbgemm_gpu.{name}")
    except Exception as error:  # another library's, of any version
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def fbgemm_version() -> str | None:
    """Return the version, or None where FBGEMM cannot be imported or does not say."""
    if why_no_fbgemm() is not None:
        return None
    version = getattr(importlib.import_module("fbgemm_gpu"), "__version__", None)
    return None if version is None else str(version)


class FbgemmEmbedding(ExchangedEmbedding):
    """`ExchangedEmbedding` with FBGEMM's tables, which update rows in their backward pass.

    Exact, without stochastic rounding, all memory on the GPU. Replicated tables have dense gradients and an optimizer
    of torch's kind, as in TorchRec's "dense" kernel.

    Args:
        collection: see `ExchangedEmbedding`.
        fused: of `fused_tables`, with what this PE has of the tables that the PEs share out.
        rate: its learning rate.
        replicas_optimizer: makes the optimizer of replicated tables.
        wire_dtype: see `ExchangedEmbedding`.

    Raises:
        Exception: of any type; it cannot be made here.
    """

    def __init__(
        self,
        collection: po.nn.ShardedEmbeddingBagCollection,
        fused: Any,
        rate: float,
        replicas_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._place(collection, wire_dtype)
        copied = [rows for rows, *_ in parts_of(collection, self._copied)]
        self._fused = fused
        optimizers: list[Any] = [_FusedRate(fused, rate)]
        self._dense: Any = None
        if copied:
            self._dense = _dense(copied)
            optimizers.append(replicas_optimizer([self._dense.weights]))
        self.optimizer = _Both(optimizers)
        self.take_over(collection)

    def try_out(self) -> None:
        """Make both passes with a lookup in each table, on this PE alone, by a gradient of zeros.

        Raises:
            Exception: of any type; a kernel is not in this FBGEMM.
        """
        with torch.enable_grad():
            modules = [self._fused] if self._dense is None else [self._fused, self._dense]
            for module, slots in zip(modules, (self._slots, self._copied), strict=False):
                values = torch.zeros(len(slots), dtype=torch.int64, device=module.weights_offsets.device)
                offsets = torch.arange(len(slots) + 1, device=values.device)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "fbgemm::dense.*autograd kernel")  # it has one, of the older kind
                    pooled = module(values, offsets)
                    pooled.backward(torch.zeros_like(pooled))
                if pooled.is_cuda:
                    torch.cuda.synchronize()
        self.optimizer.zero_grad()

    def parts(self) -> list[list[torch.Tensor]]:
        rows = self._fused.split_embedding_weights()
        states = self._fused.split_optimizer_states() or [[]] * len(rows)
        parts = [[each, *of_table] for each, of_table in zip(rows, states, strict=True)]
        if self._dense is not None:
            weights = self._dense.weights
            whole = [weights.detach(), *sums(self.optimizer.parts[1], weights)]
            sizes = [each.shape for each in self._dense.split_embedding_weights()]
            parts += [list(part) for part in zip(*(_of_tables(each, sizes) for each in whole), strict=True)]
        return parts

    def _pooled(self, bags: Bags, num_samples: int) -> torch.Tensor:
        pooled: torch.Tensor = self._fused(*_flat(bags))
        return pooled

    def _pooled_here(self, bags: Bags) -> torch.Tensor:
        (weights,) = means_over_pes(self._dense.weights)
        pooled: torch.Tensor = torch.func.functional_call(self._dense, {"weights": weights}, _flat(bags))
        return pooled


def _of_tables(whole: torch.Tensor, sizes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return the tables `[R, D]` in a vector, or the states of their rows `[R]`."""
    if whole.numel() == sum(size.numel() for size in sizes):
        parts = whole.view(-1).split([size.numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
    return list(whole.split([size[0] for size in sizes]))


def fused_tables(
    shapes: Sequence[Sequence[int]],
    optimizer: str,
    rate: float,
    *,
    eps: float,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    device: torch.device,
    memory: Sequence[torch.Tensor] = (),
) -> Any:
    """Make tables that FBGEMM updates in its backward pass.

    Args:
        shapes: `[R, D]` of each; at least one.
        optimizer: "sgd", "adagrad" or "rowwise_adagrad".
        rate, eps: of it.
        dtype: of the tables.
        wire_dtype: of what they give; on CPUs, where it has no bfloat16, that is float32.
        device: of the tables.
        memory: vectors with as many elements as all tables, and as all states, which it is to take in place of its own;
            of tables alone, or none.

    Raises:
        Exception: of any type; it cannot be made here.
    """
    if not shapes:
        raise ValueError("FBGEMM makes no module without tables")
    training, common = (importlib.import_module(f"fbgemm_gpu.{name}") for name in _MODULES)
    configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    is_gpu = device.type == "cuda"
    location = common.EmbeddingLocation.DEVICE if is_gpu else common.EmbeddingLocation.HOST
    compute = training.ComputeDevice.CUDA if is_gpu else training.ComputeDevice.CPU
    precisions = {getattr(torch, name): getattr(configs.SparseType, short) for name, short in _PRECISIONS.items()}
    if wire_dtype == torch.bfloat16 and not is_gpu:
        wire_dtype = torch.float32
    with _InPlaceOfZeros(memory):
        fused = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*shape, location, compute) for shape in shapes],
            optimizer=getattr(configs.EmbOptimType, f"EXACT_{optimizer.upper()}"),
            learning_rate=rate,
            eps=eps,
            weights_precision=precisions[dtype],
            output_dtype=precisions[wire_dtype],
            stochastic_rounding=False,
            device=device,
        )
    place = "dev" if is_gpu else "host"
    for name, given in zip((f"weights_{place}", f"momentum1_{place}"), memory, strict=False):
        own = getattr(fused, name)
        if own.numel() != given.numel() or own.dtype != given.dtype:
            raise RuntimeError(f"its {name} have {own.numel()} elements of {own.dtype}, not {given.numel()}")
        if own.data_ptr() != given.data_ptr():
            own.data = given.view(own.shape)
    return fused


class _InPlaceOfZeros(TorchFunctionMode):
    """Gives out vectors, each once, where zeros of as many elements are asked for: two copies of tables may not fit."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._left = list(memory)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int):
            for number, vector in enumerate(self._left):
                if vector.numel() == args[0] and vector.dtype == kwargs.get("dtype"):
                    return self._left.pop(number)
        return func(*args, **kwargs)


def _dense(tables: list[torch.Tensor]) -> Any:
    training = importlib.import_module(f"fbgemm_gpu.{_MODULES[0]}")
    return training.DenseTableBatchedEmbeddingBagsCodegen(
        [tuple(table.shape) for table in tables], use_cpu=not tables[0].is_cuda
    )


def _flat(bags: Bags) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lookups of all slots, and where bags begin and end, in the lookups' dtype."""
    values, lengths = bags.whole or (torch.cat(bags.values), torch.cat(bags.lengths))
    return values, F.pad(lengths.cumsum(0, dtype=values.dtype), (1, 0))


class _FusedRate:
    """The learning rate of FBGEMM's optimizer, and what else a training asks of an optimizer."""

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
    """Optimizers as one.

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
