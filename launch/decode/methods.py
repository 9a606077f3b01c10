"""The methods: the matrix products of half a layer. A column-parallel product begins it. A row-parallel one ends it.

All methods use the same weights. "fused" is po.nn.ColumnParallelLinear and po.nn.RowParallelLinear with the residual
inside. "fused sums" is po.nn.RowParallelLinear alone. "fused norm" is po.nn.ColumnParallelLinear, then a cuBLAS product
and po.all_reduce_rms_norm. "flashinfer" is "fused norm" with FlashInfer's kernel. The others are cuBLAS products and
another library's all-reduce. One kernel then adds the residual and applies the norm.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import persistent_ops as po
from persistent_ops.testing.symmetric_memory import allocate, one_shot, rendezvous, two_shot

from .kernels import Kernels

__all__ = ["FlashInfer", "Fused", "FusedNorm", "FusedSums", "Method", "Peers", "SymmetricMemory", "Unfused"]


class Peers:
    """The collectives that all methods share, over torch's default process group.

    Args:
        rank: of this PE.
        size: number of PEs; 1 communicates nothing and needs no group.
        is_staged: whether tensors travel through host memory: gloo, for PEs that share a GPU.
    """

    def __init__(self, rank: int, size: int, *, is_staged: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.is_staged = is_staged

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the PEs, in place where it can be; returns the sum."""
        if self.size == 1:
            return x
        sent = x.cpu() if self.is_staged else x
        dist.all_reduce(sent)
        return sent.to(x.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return every PE's x, `[W, *shape]`."""
        if self.size == 1:
            return x[None]
        sent = x.cpu() if self.is_staged else x
        received = sent.new_empty((self.size, *x.shape))
        # torch 2.13 renamed it.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(received.view(-1), sent.contiguous().view(-1))
        return received.to(x.device)


class Method:
    """One way to open and close half a layer: here with the library's products, and a sum that a subclass makes."""

    def open(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """Return this PE's features of a column-parallel layer, `[N, M_r]`, for x `[N, hidden]`."""
        return F.linear(x, linear.weight)

    def close(
        self, kernels: Kernels, linear: Any, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new residual, ``residual + sum over the PEs of linear(x)``, and its RMSNorm.

        Args:
            kernels: of the model.
            linear: the row-parallel layer.
            x: `[N, K_r]`.
            residual: `[N, hidden]`; not changed.
            norm: weight of the norm, `[hidden]`.
        """
        return kernels.add_norm(residual, self.summed_product(x, linear.weight), norm)

    def summed_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product of x `[N, K_r]` and a weight `[hidden, K_r]`, summed over the PEs."""
        raise NotImplementedError


class FusedSums(Method):
    """po.nn.RowParallelLinear: up to 16 rows in one kernel with the residual; more, in a prefill, by its `path`."""

    def close(
        self, kernels: Kernels, linear: Any, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Close half a layer; see `Method`."""
        total = linear(x, residual=residual)
        return total, kernels.norm(total, norm)


class Fused(FusedSums):
    """The same after po.nn.ColumnParallelLinear, which multiplies up to 16 rows by po.gemv."""

    def open(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        """Open half a layer; see `Method`."""
        features: torch.Tensor = linear(x)
        return features


class FusedNorm(Fused):
    """A product, then po.all_reduce_rms_norm: sum, residual and norm in one kernel."""

    def close(
        self, kernels: Kernels, linear: Any, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Close half a layer; see `Method`."""
        return po.all_reduce_rms_norm(F.linear(x, linear.weight), norm, residual=residual, eps=kernels.eps)


class Unfused(Method):
    """A product and the process group's all_reduce; without peers a plain product, the single-rank reference."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def summed_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply and sum; see `Method`."""
        return self._peers.all_reduce(F.linear(x, weight))


class SymmetricMemory(Method):
    """A product into torch's symmetric memory and one of its all-reduces.

    Collective: every PE makes it. One buffer serves all layers, because both all-reduces end with a barrier.

    Args:
        kind: "one_shot" or "two_shot".
        batch: rows of a product.
        hidden: elements of a row.
        device: of this PE, the only one that uses it.
        dtype: of the sums.

    Raises:
        RuntimeError: torch cannot do it here, for instance because the GPUs do not reach each other.
    """

    def __init__(self, kind: str, *, batch: int, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        self._kind = kind
        self._buffer = allocate((batch, hidden), dtype=dtype, device=device)
        rendezvous(self._buffer)
        self._sum = one_shot if kind == "one_shot" else two_shot

    def summed_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply and sum; see `Method`."""
        torch.mm(x, weight.t(), out=self._buffer)
        return self._sum(self._buffer)

    def probe(self) -> None:
        """Sum ones over the PEs and check it; RuntimeError where this torch has no such all-reduce for this world."""
        self._buffer.fill_(1.0)
        total = self._sum(self._buffer).clone()
        torch.cuda.synchronize()
        if not bool((total == dist.get_world_size()).all()):
            raise RuntimeError(f"{self._kind}_all_reduce gave a wrong sum")


@contextlib.contextmanager
def _no_multicast_objects() -> Iterator[None]:
    """Let CUDA's Python bindings make no NVLink multicast object meanwhile: RuntimeError if one is asked for."""
    driver = importlib.import_module("cuda.bindings.driver")
    original = driver.cuMulticastCreate

    def refuse(*_: object) -> None:
        raise RuntimeError("it asks for NVLink multicast, which stays off here")

    driver.cuMulticastCreate = refuse  # type: ignore[attr-defined]
    try:
        yield
    finally:
        driver.cuMulticastCreate = original  # type: ignore[attr-defined]


class FlashInfer(Method):
    """A product, then FlashInfer's all-reduce with residual and norm in one kernel, called as inference engines do.

    Collective: every PE makes it. One workspace serves all layers. Its backend "trtllm" needs no NVLink multicast; a
    version whose workspace asks CUDA's Python bindings for it nevertheless is stopped.

    Args:
        batch: rows of a product.
        hidden: elements of a row.
        dtype: of the sums.

    Raises:
        ImportError: FlashInfer is not installed, or has no such operator.
        RuntimeError: it cannot run here, or would use NVLink multicast.
    """

    def __init__(self, *, batch: int, hidden: int, dtype: torch.dtype) -> None:
        from flashinfer.comm import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace

        with _no_multicast_objects():
            self._workspace = create_allreduce_fusion_workspace(
                backend="trtllm",
                world_size=dist.get_world_size(),
                rank=dist.get_rank(),
                max_token_num=batch,
                hidden_dim=hidden,
                dtype=dtype,
            )
        self._operator = allreduce_fusion
        self._pattern = AllReduceFusionPattern.kARResidualRMSNorm

    def close(
        self, kernels: Kernels, linear: Any, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Close half a layer; see `Method`."""
        return self._sum_and_norm(F.linear(x, linear.weight), residual, norm, kernels.eps)

    def _sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        self._operator(
            x,
            self._workspace,
            self._pattern,
            launch_with_pdl=True,
            residual_in=residual,
            residual_out=total,
            norm_out=normed,
            rms_gamma=norm,
            rms_eps=eps,
            fp32_acc=True,
        )
        return total, normed

    def probe(self, like: torch.Tensor) -> None:
        """Sum ones, of the shape of `like` `[N, hidden]`, over the PEs; RuntimeError where sum or norm is wrong."""
        ones = torch.ones_like(like)
        total, normed = self._sum_and_norm(ones, ones, torch.ones_like(like[0]), 0.0)
        is_right = (total == dist.get_world_size() + 1).all() and ((normed - 1).abs() <= 1e-5).all()  # by rsqrtf
        if not bool(is_right):
            raise RuntimeError("FlashInfer's all-reduce with a norm gave a wrong result")
