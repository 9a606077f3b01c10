"""Linear layers whose weight is spread over the PEs.

A pair of layers forms a tensor-parallel block. `ColumnParallelLinear` computes this PE's share of the features without
communication. `RowParallelLinear` takes that share and sums the PEs' results, in one kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from .. import ops as _ops
from ..ops.gemv_plan import ALGORITHMS, MAX_VECTORS, OPERATOR as GEMV, GemvKey, kernel_vectors_of, request_for
from ..ops.product import DTYPES
from ..runtime import world as _world
from ..runtime.arguments import as_whole_number, as_whole_numbers
from ..runtime.compile.literals import vector_bytes
from ..runtime.dtypes import SCALARS
from ..runtime.plain_call import require_plain
from ..runtime.team import Team

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "balanced_splits"]

_GEMV_BYTES = 128 << 10  # of several vectors: with more, cuBLAS is faster (docs/lessons.md)
_ALL_REDUCE_BYTES = 32 << 20  # of sums; beyond, NCCL is nearly as fast (two H200, docs/results.md)
_FUSED_BYTES = 8 << 20  # of sums; from here on the product hides what is sent (docs/lessons.md)
_WITH_AUTOCAST = ("cpu", "cuda")  # devices; torch.compile of torch 2.11 breaks the graph where torch is asked
_log = logging.getLogger("persistent_ops")


def _is_under_autocast(device: torch.device) -> bool:
    return device.type in _WITH_AUTOCAST and torch.is_autocast_enabled(device.type)


def _without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products are of their operands' dtype, as the sums of a row-parallel layer must be."""
    if x.device.type not in _WITH_AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def balanced_splits(features: int, world_size: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Cut a number of features into one share per PE, as equal as whole units allow.

    Earlier PEs get the larger shares.

    Args:
        features: number of features.
        world_size: number of shares.
        multiple: size of a unit that stays whole, such as a head; it must divide `features`. A PE may get no unit.

    Returns:
        One share per PE, in rank order; they sum to `features`.

    Raises:
        ValueError: `multiple` does not divide `features`, or a number is out of range.
        TypeError: an argument is not a whole number.
    """
    given = {"features": features, "world_size": world_size, "multiple": multiple}
    features, world_size, multiple = (
        as_whole_number(value, f"{name}: expected a whole number, got {value!r}") for name, value in given.items()
    )
    if features < 0 or world_size < 1 or multiple < 1:
        raise ValueError(
            f"features must be at least 0, world_size and multiple at least 1; got {features}, {world_size}, {multiple}"
        )
    units, rest = divmod(features, multiple)
    if rest:
        raise ValueError(f"features: expected a multiple of {multiple}, got {features}")
    return tuple((units // world_size + (rank < units % world_size)) * multiple for rank in range(world_size))


class _Group:
    """A process group as an attribute of a layer: copies of the layer have the same one."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return _Group, (None,)
        raise TypeError(
            "RowParallelLinear: this layer was made with group=, and a process group cannot be pickled; save "
            "its state_dict()"
        )


class _ParallelLinear(torch.nn.Module):
    """The common part of both layers: the shard's bounds, its parameters and their loading."""

    sharded_dim: int  # of the weight [out_features, in_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        splits: Sequence[int] | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        world = _world.current()
        self.in_features = as_whole_number(in_features, f"in_features: expected a whole number, got {in_features!r}")
        self.out_features = as_whole_number(
            out_features, f"out_features: expected a whole number, got {out_features!r}"
        )
        full = (self.out_features, self.in_features)
        if min(full) < 0:
            raise ValueError(f"in_features, out_features: expected at least 0, got {in_features} and {out_features}")
        self.splits = self._checked_splits(full[self.sharded_dim], splits, world.size)
        bounds = [0, *itertools.accumulate(self.splits)]
        self.shard_range = (bounds[world.rank], bounds[world.rank + 1])
        self._pe = (world.rank, world.size)  # whose shard it is
        shape = list(full)
        shape[self.sharded_dim] = self.splits[world.rank]
        device = world.backend.device if device is None else torch.device(device)
        self.weight = self._parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = self._parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def _compile_ahead(self, team: Team, algorithm: str, wire_dtype: torch.dtype | None, prefetch_weight: bool) -> None:
        """Begin to compile the kernel for one vector."""
        world, dtype, (rows, columns) = _world.current(), self.weight.dtype, self.weight.shape
        is_aligned, tuning = columns * dtype.itemsize % vector_bytes() == 0, GEMV.tuned(world)
        key = GemvKey(team, rows, columns, 1, dtype, wire_dtype, algorithm, is_aligned, prefetch_weight, tuning)
        world.compile_ahead([lambda: request_for(world, key)], team)

    @classmethod
    def _checked_splits(cls, features: int, splits: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
        name = ("out_features", "in_features")[cls.sharded_dim]
        if splits is None:
            if features % world_size:
                raise ValueError(
                    f"{name}: {features} do not divide by {world_size} PEs; pass splits, such as "
                    f"{balanced_splits(features, world_size)}"
                )
            return (features // world_size,) * world_size
        shares = as_whole_numbers(splits, f"splits: expected whole numbers, got {splits!r}")
        if len(shares) != world_size or sum(shares) != features or min(shares) < 0:
            raise ValueError(
                f"splits: expected {world_size} shares of at least 0 that sum to {name} = {features}, got {shares}"
            )
        return shares

    @staticmethod
    def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
        # The fused operator is forward only: a parameter that asked for a gradient would fail in the backward pass.
        return torch.nn.Parameter(tensor, requires_grad=False)

    def reset_parameters(self) -> None:
        """Draw the weight from U(-k, k), k = in_features^-1/2, from torch's generator, and set the bias to zero.

        The bias of a row-parallel layer must be the same on every PE, which a draw per PE would not give. PEs whose
        shards differ in size draw differently often; pass device="meta" where the generators must stay together.
        """
        bound = self.in_features**-0.5 if self.in_features else 0.0
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.zero_()

    def shard_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this PE's part of a whole layer's parameter: a view, or `full` itself where every PE has all of it.

        Args:
            name: "weight" or "bias".
            full: `[out_features, in_features]` or `[out_features]`.
        """
        if name == "bias" and self.sharded_dim == 1:
            return full
        first, last = self.shard_range
        return full.narrow(self.sharded_dim, first, last - first)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the parameters of a whole `nn.Linear`, from which this PE's shard is cut, or of this very shard."""
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            found = state_dict.get(prefix + name)
            if parameter is None or not isinstance(found, torch.Tensor) or found.layout != torch.strided:
                continue
            # load_state_dict works on a copy of the caller's dictionary. Contiguous, because assign=True keeps it.
            if found.shape == parameter.shape:
                state_dict[prefix + name] = found if found.is_contiguous() else found.detach().contiguous()
            elif tuple(found.shape) == shapes[name]:
                state_dict[prefix + name] = self.shard_of(name, found.detach()).contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        splits: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Make the layer from a whole `nn.Linear`, from which this PE copies its shard.

        Args:
            linear: the same on every PE; on any device. It is not changed and not kept.
            splits: see the class.
            device: of the shard; None for `po.device()`.
            dtype: of the shard; None for `linear`'s.
            options: the other keyword arguments of the class.

        Raises:
            ValueError: see the class.
        """
        # On the meta device nothing is drawn: PEs with shards of different sizes would leave torch's generators apart.
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            splits=splits,
            device="meta",
            dtype=linear.weight.dtype if dtype is None else dtype,
            **options,
        )
        layer.to_empty(device=_world.current().backend.device if device is None else device)
        layer.load_state_dict(linear.state_dict())
        return layer

    def _check_input(self, x: torch.Tensor, features: int) -> None:
        world = _world.current()
        if self._pe != (world.rank, world.size):
            rank, size = self._pe
            raise RuntimeError(
                f"{type(self).__name__}: this layer was made for PE {rank} of {size}, but this is PE {world.rank} "
                f"of {world.size}. Make a new layer and load the whole layer's state dict."
            )
        if not torch.compiler.is_compiling():
            require_plain({"x": x}, may_be_fake=True)
        if x.dim() == 0 or x.shape[-1] != features:
            raise ValueError(f"x: expected [..., {features}], this PE's features, got {list(x.shape)}")
        if x.dtype != self.weight.dtype and not _is_under_autocast(x.device):
            raise TypeError(f"x: expected weight's dtype {self.weight.dtype}, got {x.dtype}")

    def _like_weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the weight's dtype, which it has but under autocast."""
        dtype = self.weight.dtype
        return tensor if tensor.dtype == dtype else tensor.to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for repr()."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"splits={self.splits}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are spread over the PEs: ``y_r = x @ weight_r.T + bias_r``.

    The layer communicates nothing. The result stays spread over the PEs, as `RowParallelLinear` takes it. `last_path`
    reports what computed the last result:

    - "gemv", for 1 to 16 vectors, as in decoding: `po.gemv`, with that operator's guarantees. 2 to 8 vectors count as
      8, 9 to 16 count as 16, and together they may have 128 KiB: K up to 8192 for 8 vectors in 16 bits.
    - "linear", for more vectors, and where gradients of either mode are recorded, under autocast, on another device
      than `po.device()`, or in a dtype that `po.gemv` does not take: `torch.nn.functional.linear`. The gradient of x is
      that of this PE's features: add it up over the PEs.

    Args:
        in_features: K; every PE passes all of x, `[..., K]`.
        out_features: M of the whole layer.
        bias: whether there is a bias, `[M_r]` on each PE.
        splits: output features of each PE, M_r, in rank order; None for equal shares, which M must allow.
        device: of the parameters; None for `po.device()`.
        dtype: of the parameters; None for torch's default.
        prefetch_weight: of `po.gemv`; safe if no kernel of the model writes weights.

    Attributes:
        weight: `[M_r, K]`; requires no gradient until `requires_grad_()`.
        bias: `[M_r]` or None.
        splits: output features of each PE.
        shard_range: this PE's output features, first and last + 1.
        last_path: "gemv" or "linear", the path of the last call; None before the first call.

    Raises:
        ValueError: the splits do not fit.
        RuntimeError: `po.init()` has not been called; in a call, another PE made the layer, or the world has another
            size.

    `load_state_dict` takes the state dict of the whole `nn.Linear` or of this shard; `state_dict` returns the shard.
    """

    sharded_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        splits: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        prefetch_weight: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, splits, device, dtype)
        self.prefetch_weight = prefetch_weight
        self.last_path: str | None = None
        self._compile_ahead(_world.current().alone, "one_shot", None, prefetch_weight)

    def _allows_gemv(self, x: torch.Tensor) -> bool:
        tensors = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        device = _world.current().backend.device
        is_here = x.device == device and self.weight.device == device and self.weight.is_contiguous()
        return is_here and not is_recorded and not torch.is_autocast_enabled(device.type)

    def path(self, num_vectors: int) -> str:
        """Return "gemv" or "linear": the path for this number of vectors, if no other condition rules out "gemv"."""
        if not 1 <= num_vectors <= MAX_VECTORS or self.weight.dtype not in SCALARS:
            return "linear"
        nbytes = kernel_vectors_of(num_vectors) * self.in_features * self.weight.itemsize
        return "gemv" if num_vectors == 1 or nbytes <= _GEMV_BYTES else "linear"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this PE's output features, `[..., M_r]`, of x `[..., K]`.

        Raises:
            ValueError, TypeError: the shape or dtype of x.
            RuntimeError, PersistentOpsError: of `po.gemv`.
        """
        self._check_input(x, self.in_features)
        num_vectors = math.prod(x.shape[:-1])
        self.last_path = self.path(num_vectors) if self._allows_gemv(x) else "linear"
        if self.last_path == "linear":
            return F.linear(x, self.weight, self.bias)
        vectors = x.reshape(num_vectors, self.in_features).contiguous()
        result = _ops.gemv(self.weight, vectors, bias=self.bias, prefetch_weight=self.prefetch_weight)
        return result.view(*x.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        """Return the sizes and options, for repr()."""
        return f"{super().extra_repr()}, prefetch_weight={self.prefetch_weight}"


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are spread over the PEs: ``y = sum over r of x_r @ weight_r.T + bias``.

    Every PE passes its features and gets the whole result, or with `sequence_parallel` its part of it. The choice of a
    path depends only on the layer, the number of vectors, and whether gradients are recorded, so all PEs take the same
    path. `path` returns it before a call, `last_path` after a call:

    - "gemm_reduce_scatter", with `sequence_parallel`: `po.gemm_reduce_scatter`, with gradients.
    - "fused", for 1 to 16 vectors, as in decoding: `po.gemv_all_reduce`, one kernel, with that operator's guarantees.
    - "gemm_all_reduce", for a weight in float16 or bfloat16, equal shares and M a multiple of 8, where gradients are
      recorded, sums travel in float32, or sums have more than 8 MiB: `po.gemm_all_reduce`, with gradients.
    - "all_reduce", for more vectors if sums travel in the weight's dtype and have at most 32 MiB: a matrix product,
      then `po.all_reduce`, which also adds bias and residual. The first call with a number of vectors is blocking and
      may not be captured.
    - "unfused", otherwise, as in a long prefill: a matrix product, then torch.distributed's all_reduce, then bias and
      residual. It needs a process group, which decides the order of the sums. It is the only path of a float64 weight,
      and such a layer refuses up to 16 vectors.

    Args:
        in_features: K of the whole layer.
        out_features: M.
        bias: whether there is a bias, `[M]`; all PEs have it, or none does. It is the same on every PE and added once.
        splits: input features of each PE, K_r, in rank order, 0 allowed; None for equal shares, which K must allow.
        device: of the parameters; None for `po.device()`.
        dtype: of the parameters; None for torch's default.
        algorithm: of `po.gemv_all_reduce`.
        wire_dtype: dtype in which sums travel: None for float32 (float64 for a float64 weight, the weight's dtype with
            `sequence_parallel`), float32, or the weight's dtype. Products of more than 16 vectors are rounded to it,
            and the unfused path also sums in it.
        prefetch_weight: of `po.gemv_all_reduce`; safe if no kernel of the model writes weights.
        group: process group of the unfused path, whose ranks are the PEs; None for the default group.
        sequence_parallel: whether each PE gets its part of the first dimension of the result, of which all PEs pass
            all. Needs float16 or bfloat16, and equal shares. A PE's gradient of the bias is that of its part: add them
            up over the PEs.

    Attributes:
        weight: `[M, K_r]`; requires no gradient until `requires_grad_()`.
        bias: `[M]` or None.
        splits: input features of each PE.
        shard_range: this PE's input features, first and last + 1.
        last_path: the path of the last call; None before the first call.

    Raises:
        ValueError: the splits do not fit, or there is no such algorithm.
        RuntimeError: `po.init()` has not been called; in a call, another PE made the layer, or the world has another
            size.

    `load_state_dict` takes the state dict of the whole `nn.Linear` or of this shard; `state_dict` returns the shard. A
    copy of a layer with a group keeps the group; such a layer cannot be pickled.
    """

    sharded_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        splits: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        algorithm: str = "auto",
        wire_dtype: torch.dtype | None = None,
        prefetch_weight: bool = False,
        group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
        super().__init__(in_features, out_features, bias, splits, device, dtype)
        if sequence_parallel and len(set(self.splits)) > 1:
            raise ValueError(f"sequence_parallel: expected equal shares of in_features, got splits {self.splits}")
        self.sequence_parallel = sequence_parallel
        self.algorithm = algorithm
        self.wire_dtype = wire_dtype
        self.prefetch_weight = prefetch_weight
        self.last_path: str | None = None
        self._group = _Group(group)
        if not sequence_parallel:
            self._compile_ahead(_world.current().team, algorithm, wire_dtype, prefetch_weight)

    def path(self, num_vectors: int) -> str:
        """Return the path for this number of vectors where no gradients are recorded."""
        if self.sequence_parallel:
            return "gemm_reduce_scatter"
        if 1 <= num_vectors <= MAX_VECTORS:
            return "fused"
        nbytes = num_vectors * self.out_features * self.weight.itemsize
        dtype, wire_dtype = self.weight.dtype, self.wire_dtype or torch.float32
        if self._has_fused_product() and nbytes and (wire_dtype == torch.float32 or nbytes > _FUSED_BYTES):
            return "gemm_all_reduce"
        is_summed_in_it = wire_dtype == dtype and dtype in SCALARS
        return "all_reduce" if is_summed_in_it and 0 < nbytes <= _ALL_REDUCE_BYTES else "unfused"

    def _has_fused_product(self) -> bool:
        """Return whether `po.gemm_all_reduce` takes the layer."""
        dtype = self.weight.dtype
        is_suited = dtype in DTYPES and self.wire_dtype in (None, torch.float32, dtype)
        return is_suited and len(set(self.splits)) == 1 and self.out_features % 8 == 0

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole layer's result on every PE, or this PE's part of it. Collective.

        Args:
            x: `[..., K_r]`, this PE's input features, dtype of the weight; all PEs pass the same leading dimensions.
                With `sequence_parallel` the first one is a multiple of the number of PEs.
            residual: the shape of the result; added once, before the result is rounded. It is the same on every PE, or
                with `sequence_parallel` this PE's part. Under autocast either may have another dtype, and is taken in
                the weight's.

        Returns:
            `[..., M]`, dtype of the weight; with `sequence_parallel` the PE's equal part of the first dimension, in
            rank order.

        Raises:
            ValueError, TypeError: a shape or dtype does not fit; up to 16 vectors in float64.
            RuntimeError: the unfused path has no process group.
            NotImplementedError: gradients are recorded, and the layer has no path with gradients; with up to 16
                vectors, the backward pass raises it.
            PeerTimeoutError, ContractMismatchError: of the operator.
        """
        self._check_input(x, self.weight.shape[1])
        rows = self._result_rows(x)
        shape = (*rows, self.out_features)
        if residual is not None:
            if not torch.compiler.is_compiling():
                require_plain({"residual": residual}, may_be_fake=True)
            if tuple(residual.shape) != shape:
                raise ValueError(f"residual: expected the result's shape {list(shape)}, got {list(residual.shape)}")
            if residual.dtype != self.weight.dtype and not _is_under_autocast(x.device):
                raise TypeError(f"residual: expected weight's dtype {self.weight.dtype}, got {residual.dtype}")
            if residual.device != x.device:
                raise ValueError(f"residual: expected a tensor on {x.device}, as x is, got one on {residual.device}")
        num_vectors = math.prod(x.shape[:-1])
        # reshape(-1, 0) does not know how many vectors there are, so a PE without features needs the number.
        vectors = self._like_weight(x).reshape(num_vectors, x.shape[-1])
        addend = None if residual is None else self._like_weight(residual).reshape(math.prod(rows), self.out_features)
        previous, self.last_path = self.last_path, self.path(num_vectors)
        if self._has_fused_product() and not self.sequence_parallel and self._records(vectors, addend):
            self.last_path = "gemm_all_reduce"
        if self.last_path not in ("fused", previous) and not torch.compiler.is_compiling():
            _log.debug("RowParallelLinear: %d vectors take the path %r", num_vectors, self.last_path)
        if self.last_path.startswith("gemm"):
            return self._by_one_kernel(vectors, addend).view(shape)
        if self.last_path != "fused":
            self._refuse_gradients(vectors, addend)
            take = self._all_reduced if self.last_path == "all_reduce" else self._unfused
            return take(vectors, addend).view(shape)
        result = _ops.gemv_all_reduce(
            self.weight,
            vectors.contiguous(),
            bias=self.bias,
            residual=None if addend is None else addend.contiguous(),
            algorithm=self.algorithm,
            wire_dtype=self.wire_dtype,
            prefetch_weight=self.prefetch_weight,
        )
        return result.view(shape)

    def _result_rows(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the result's dimensions without the last; raise where the layer cannot divide them."""
        rows, size = tuple(x.shape[:-1]), self._pe[1]
        if not self.sequence_parallel:
            return rows
        if self.weight.dtype not in DTYPES:
            raise TypeError(
                f"sequence_parallel: expected a weight in float16 or bfloat16, got one in {self.weight.dtype}"
            )
        if not rows or rows[0] % size:
            raise ValueError(
                f"x: expected [S, ..., {self.weight.shape[1]}] with S a multiple of {size}, the number of PEs, got "
                f"{list(x.shape)}"
            )
        return (rows[0] // size, *rows[1:])

    def _by_one_kernel(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        addends: dict[str, Any] = {"bias": self.bias, "residual": None if residual is None else residual.contiguous()}
        if self.sequence_parallel:
            return _ops.gemm_reduce_scatter(x, self.weight.t(), wire_dtype=self.wire_dtype, **addends)
        return _ops.gemm_all_reduce(x, self.weight.t(), wire_dtype=self.wire_dtype or torch.float32, **addends)

    def _records(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Return whether autograd records the call."""
        tensors = (x, self.weight, self.bias, residual)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def _refuse_gradients(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        if self._records(x, residual):
            raise NotImplementedError(
                "RowParallelLinear: the layer is forward only, but gradients are recorded; call it under "
                "torch.no_grad(), or use equal shares, out_features that 8 divides, and a weight in float16 or bfloat16"
            )

    def _all_reduced(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        with _without_autocast(x):
            product = F.linear(x, self.weight)
        addend = None if residual is None else residual.contiguous()
        return _ops.all_reduce(product, residual=addend, bias=self.bias, out=product)

    def _unfused(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        with _without_autocast(x):
            total = self._product(x)
        world = _world.current()
        if world.size > 1 and total.numel():
            self._check_group(world)
            torch.distributed.all_reduce(total, group=self._group.group)
        total = total.to(self._exact_dtype())
        for addend in (self.bias, residual):
            if addend is not None:
                total = total + addend
        return total.to(self.weight.dtype)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this PE's sums, `[N, M]`, in the dtype in which they travel."""
        wire_dtype = self.wire_dtype or self._exact_dtype()
        if wire_dtype not in (torch.float32, self.weight.dtype):
            raise ValueError(
                f"wire_dtype: expected None, torch.float32 or the weight's dtype {self.weight.dtype}, got {wire_dtype}"
            )
        if wire_dtype == self.weight.dtype:
            return F.linear(x, self.weight)
        if x.shape[1] == 0:
            return x.new_zeros((x.shape[0], self.out_features), dtype=wire_dtype)
        if self.weight.dtype == torch.float64:
            return F.linear(x, self.weight).to(wire_dtype)
        if x.is_cuda:
            return torch.mm(x, self.weight.t(), out_dtype=wire_dtype)  # type: ignore[call-overload,no-any-return]
        return F.linear(x.float(), self.weight.float())  # the CPU has no product of 16-bit operands with an fp32 result

    def _exact_dtype(self) -> torch.dtype:
        """Return what holds sums before they are rounded to the weight's dtype."""
        return torch.promote_types(torch.float32, self.weight.dtype)

    def _check_group(self, world: _world.World) -> None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "RowParallelLinear: this number of vectors takes the unfused path, which needs torch.distributed. "
                "Use po.process_group() on every PE, pass at most 16 vectors at a time, or pass "
                "wire_dtype=weight.dtype."
            )
        size, rank = distributed.get_world_size(self._group.group), distributed.get_rank(self._group.group)
        if (size, rank) != (world.size, world.rank):
            raise ValueError(
                f"group: expected the PEs as its ranks, {world.rank} of {world.size} here, got {rank} of {size}"
            )

    def extra_repr(self) -> str:
        """Return the sizes and options, for repr()."""
        return (
            f"{super().extra_repr()}, algorithm={self.algorithm!r}, wire_dtype={self.wire_dtype}, "
            f"prefetch_weight={self.prefetch_weight}, sequence_parallel={self.sequence_parallel}"
        )
