"""Sparse gradients under DistributedDataParallel, summed by sparse_all_reduce."""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.

import contextlib
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..ops.sparse_all_reduce import start_sum
from ..ops.sparse_launch import PendingSum
from ..ops.sparse_plan import state_of
from ..runtime import torch_private, world as _world
from ..runtime.bootstrap.process_group import only_tensor
from ..runtime.operator import Operator
from ..runtime.uncompiled import uncompiled

__all__ = ["allow_unused_sparse", "ddp_sparse_hook"]

_HOOK = Operator("ddp_sparse_hook", (), has_kernel=False)
_PLACEHOLDER = "_persistent_ops_placeholder"  # attribute of a gradient that stands for none


@uncompiled
def ddp_sparse_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the PEs: a communication hook for DistributedDataParallel.

        ddp.register_comm_hook(None, po.nn.ddp_sparse_hook)

    A sparse gradient, as of `nn.Embedding` and `nn.EmbeddingBag` with sparse=True, goes through
    `po.sparse_all_reduce(gradient, op="mean")`. It may have any number of entries on each PE, including 0. A bucket of
    dense gradients goes through the group's all_reduce, with the mean that DDP takes without a hook.

    On "cuda", the sum of a sparse gradient runs beside the rest of the backward pass. The host waits for the numbers of
    rows once the last bucket has been launched. Results are then in stream order, as DDP expects.

    A parameter's `.grad` is the operator's result itself: coalesced, in the symmetric heap's pool, without a copy. It
    counts against `heap_size` until the optimizer's `zero_grad()`. If a table has no row on any PE, `.grad` is empty,
    or None if no PE has used the table at all (see `po.nn.allow_unused_sparse`).

    Args:
        state: the process group of the module, whose ranks are the PEs in the same order; None for the default group.
        bucket: from DDP.

    Returns:
        A future of the averaged tensor.

    Raises:
        ValueError: the group's ranks are not the PEs.
        RuntimeError: `po.init()` has not been called, or there is no process group.
        TypeError: a sparse gradient is not float32, float16 or bfloat16.
        IndexError: of `po.sparse_all_reduce`. `backward()` raises it when all gradients are there; the gradients lack
            the invalid entries, and training can go on.
        SymmetricHeapError, PeerTimeoutError, ContractMismatchError: of `po.sparse_all_reduce`; `backward()` raises
            them.

    Collective, once per bucket, in DDP's order.
    """
    world = _world.current()
    group = _group_of(state, world)
    kept = _HOOK.state(world)
    if kept.own is None:
        kept.own = _Pending()
    pending: _Pending = kept.own
    gradient = bucket.buffer()
    future: torch.futures.Future[torch.Tensor]
    if gradient.is_sparse:
        (parameter,) = bucket.parameters()
        # A sum of an aborted backward pass has no waiter.
        pending.pop(id(parameter), None)
        with _communication(world):
            launched = start_sum(gradient, "mean", tag=1 + bucket.index())
        future = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else None)
        pending[id(parameter)] = _Exchange(parameter, gradient, launched, future)
    else:
        gradient.mul_(1.0 / group.size())  # rounds as DDP does, which a division would not
        with _communication(world):
            reduced = dist.all_reduce(gradient, group=group, async_op=True)
            assert reduced is not None
            if gradient.is_cuda:
                reduced.wait()
        future = reduced.get_future().then(only_tensor)
    if bucket.is_last() or _is_after_all_nodes():
        exchanges = list(pending.values())
        pending.clear()
        _finish(exchanges, group)
    return future


def allow_unused_sparse(module: DistributedDataParallel) -> None:
    """Allow a forward pass to leave sparse parameters out, on some PEs or on all.

    DDP's find_unused_parameters=True and static_graph=True serve this purpose, but refuse sparse parameters ("Expected
    sparse gradient to be defined"). This function gives an empty gradient to each sparse parameter that a backward pass
    has left without one. With `po.nn.ddp_sparse_hook`, a table that no PE has used still ends with `.grad` None, as
    without DDP.

    A table that is looked up with no index at all counts as used and does not need this function.

    Args:
        module: the module whose parameters get hooks, for as long as they live. Call once, before the first forward
            pass.

    Raises:
        TypeError: `module` is not a DistributedDataParallel.
        ValueError: `module` was made without find_unused_parameters=True or static_graph=True.
    """
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(f"module: expected a DistributedDataParallel, got {type(module).__name__}")
    if not (module.find_unused_parameters or module.static_graph):
        raise ValueError(
            "module: expected DistributedDataParallel(..., find_unused_parameters=True), or static_graph=True: without "
            "either, DDP waits for a gradient of every parameter"
        )
    unused = _Unused(_sparse_parameters(module.module))
    module.register_forward_hook(unused.after_forward)
    for parameter in module.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(unused.before_accumulation, weakref.ref(parameter)))


# ---- hook ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exchange:
    """A sparse gradient under way."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    sum: PendingSum
    future: torch.futures.Future[torch.Tensor]


class _Pending(dict[int, _Exchange]):
    """The exchanges of a backward pass, by the parameter's id."""

    def forget(self) -> None:
        """Drop them: their launches were given up."""
        self.clear()


def _group_of(state: Any, world: _world.World) -> Any:
    group = dist.group.WORLD if state is None else state
    if group is None:
        raise RuntimeError(
            f"{_HOOK.name}: torch.distributed has no default process group; pass the module's group as state"
        )
    if (group.rank(), group.size()) != (world.rank, world.size):
        raise ValueError(
            f"state: expected a process group whose ranks are the PEs, got rank {group.rank()} of {group.size()} on PE "
            f"{world.rank} of {world.size}; po.init(group=...) takes the module's group"
        )
    return group


def _communication(world: _world.World) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose work follows the current stream's and all communication before.

    The operator's kernel is resident as a whole, and so are the group's: side by side, one PE's could keep off the GPU
    what another PE's waits for. On the operator's own stream they come one after the other, on all PEs in one order.
    """
    device = world.backend.device
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(state_of(world).side_stream(device))


def _is_after_all_nodes() -> bool:
    """Return whether this is a callback at the end of a backward pass, where the first one over a static graph reduces.

    DDP then calls no bucket the last, and waits for them next.
    """
    return torch_private.backward_pass() != -1 and torch_private.autograd_node() is None


@uncompiled
def _finish(exchanges: list[_Exchange], group: Any) -> None:
    """Take in the sums, in the order of their launches, which is the same on all PEs.

    What is wrong with this PE's input is raised when the other PEs have all that they need of it, and DDP its futures:
    it takes up no later pass where a hook has raised.
    """
    for exchange in exchanges:
        exchange.sum.resolve()
    results = [exchange.sum.tensor() for exchange in exchanges]
    empty = [number for number, result in enumerate(results) if result._nnz() == 0]
    unused = set()
    if empty:
        # All PEs see the same sums, so all come here; only the PE that used a table knows that it did.
        used = [not hasattr(exchanges[number].gradient, _PLACEHOLDER) for number in empty]
        flags = torch.tensor(used, dtype=torch.int32, device=results[0].device)
        dist.all_reduce(flags, group=group)
        unused = {number for number, flag in zip(empty, flags.tolist(), strict=True) if not flag}
    for number, (exchange, result) in enumerate(zip(exchanges, results, strict=True)):
        parameter, gradient = exchange.parameter, exchange.gradient
        is_own = parameter.grad is gradient
        if is_own:
            parameter.grad = None if number in unused else result
        # What DDP does with a future's tensor is to copy it into the bucket's; here they are the same tensor, so that
        # nothing is copied. The parameter has one of its own: DDP keeps the bucket's until the next backward pass.
        gradient.data = result
        exchange.future.set_result(gradient)
        if is_own and torch_private.backward_pass() != -1:
            _after_ddp(functools.partial(_let_go, gradient))
    sums = [exchange.sum for exchange in exchanges]
    if torch_private.backward_pass() != -1:
        _after_ddp(functools.partial(_raise_reported, sums))
    else:
        _raise_reported(sums)


def _raise_reported(sums: list[PendingSum]) -> None:
    for each in sums:
        each.raise_reported()


def _after_ddp(callback: Any) -> None:
    """Call back at the end of this backward pass, when DDP is done with it.

    DDP asks for its own callback after its last hook has returned; one that is asked for from a callback comes later.
    """
    queue = torch_private.queue_callback
    queue(lambda: queue(callback))


def _let_go(gradient: torch.Tensor) -> None:
    gradient.data = _empty_like(gradient)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of the shape of a parameter, or its gradient, that has no entry."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=tensor.device),
        torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device),
        tensor.shape,
        device=tensor.device,
        is_coalesced=True,
        check_invariants=False,
    )


# ---- unused parameters ---------------------------------------------------------------------------------------------


def _sparse_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters for which DDP expects sparse gradients."""
    found: dict[int, torch.Tensor] = {}
    for part in module.modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            is_ignored = getattr(part.weight, "_ddp_ignored", False)
            if part.weight.requires_grad and not is_ignored:
                found[id(part.weight)] = part.weight
    return list(found.values())


class _Unused:
    """Sees to it that every sparse parameter has a gradient when DDP looks.

    DDP takes up the parameters that it has found unused when the first gradient has been accumulated. What comes before
    that, whatever the user does between forward and backward pass, is the hook of that gradient.
    """

    def __init__(self, sparse: list[torch.Tensor]) -> None:
        # The parameters hold this object: a strong reference would keep them for ever.
        self._sparse = [weakref.ref(parameter) for parameter in sparse]
        self._is_armed = False

    def after_forward(self, module: DistributedDataParallel, inputs: Any, output: Any) -> None:
        """Note that a backward pass will synchronize; in no_sync() nothing may be made up."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._is_armed = True

    def before_accumulation(self, reference: "weakref.ref[torch.Tensor]", gradient: torch.Tensor | None) -> None:
        """Give out placeholders if this is the first gradient; take this parameter's back, for it has one."""
        if self._is_armed:
            self._is_armed = False
            for each in self._sparse:
                other = each()
                if other is not None and other.grad is None:
                    other.grad = _empty_like(other)
                    setattr(other.grad, _PLACEHOLDER, True)
        parameter = reference()
        if gradient is not None and parameter is not None and hasattr(parameter.grad, _PLACEHOLDER):
            parameter.grad = None  # adding to an empty one would copy
