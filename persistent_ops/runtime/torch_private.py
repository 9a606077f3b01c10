"""The private names of torch that the package uses, in one place: the purpose, and the missing public name.

They are the functions themselves, so a call pays nothing for the indirection. A torch without one of them fails at
import; pyproject.toml limits torch to the versions that were run.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch._library.autograd import make_autograd_impl
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Variable, forward_ad
from torch.distributed import ProcessGroup
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

_guards = getattr(torch._C._dynamo, "guards", None)

__all__ = [
    "STAND_INS",
    "TensorGuards",
    "abort_groups",
    "autograd_kernel",
    "autograd_node",
    "backend_of_group",
    "backward_pass",
    "behind_a_break",
    "current_raw_stream",
    "dual_level",
    "frame_compiler",
    "function_transform",
    "is_for_compiled_cuda_graph",
    "is_zero_tensor",
    "never_recomputed",
    "num_dispatch_modes",
    "queue_callback",
    "storage_has_expired",
    "storage_of_weak",
    "sleep_on_gpu",
    "storage_use_count",
    "symmetric_memory",
    "tracing_context",
    "tracing_state",
    "without_dispatch_modes",
    "without_functions",
    "wrapper_subclass",
]

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
"""How many tensors share a storage, given its `_cdata`: the output pool uses a buffer again when none does.

Public torch counts no uses: `sys.getrefcount` sees Python's wrappers alone, and a view that C++ holds has none.
"""

storage_has_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
"""Whether a storage is gone, given the `cdata` of a `StorageWeakRef`: each call asks it for all tables.

`StorageWeakRef.expired` asks the same in five times the time.
"""

storage_of_weak: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr  # type: ignore[attr-defined]
"""A storage, given the `cdata` of a `StorageWeakRef`, or None where it is gone: what a launch left undone is poisoned.

Public torch knows weak references to tensor objects, which may go while others share the storage.
"""

current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The handle of a device's current stream; None in builds of torch without CUDA.

`torch.cuda.current_stream(device).cuda_stream` makes a Python object each time: a microsecond of every launch.
"""

STAND_INS: tuple[type[torch.Tensor], ...] = (FakeTensor, FunctionalTensor)
"""Subclasses that stand for plain tensors where torch.compile, torch.export or make_fx see a call.

Public torch has no names for them.
"""

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many TorchDispatchModes are active (fake tensors, tracing): a call must then go through the dispatcher.

Public torch lets a mode be entered, and does not say whether one is.
"""

function_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func (vmap, grad) that is active, or None; a call must go through the dispatcher.

Public torch applies transforms, and does not say whether one is active.
"""

dual_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
"""The innermost level of forward-mode derivatives that is open, of torch.func.jvp too, or -1.

Public torch opens one, and does not say whether one is.
"""

is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor  # type: ignore[attr-defined]
"""Whether a tensor is zeros without memory, as gradients may be, which kernels cannot read.

Public torch has no name for them; `is_neg` is the same question about a negative.
"""

autograd_kernel: Callable[..., Callable[..., Any]] = make_autograd_impl
"""Makes what `torch.library.register_autograd` registers, to have a check before it that refuses tangents.

Public torch lets an operator have a derivative of the reverse mode; without one of the forward mode it gives zeros.
"""

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is in, or -1: DDP's hook asks where it was called from.

Public torch numbers nodes and tensors of a graph, but no backward passes.
"""

queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Has a function called at the end of the backward pass that this thread is in: DDP is done with its buckets then.

Public torch has hooks for tensors and nodes, and none for the end of a backward pass.
"""

autograd_node: Callable[[], object | None] = torch._C._current_autograd_node
"""The node that the backward pass of this thread runs, or None in its final callbacks.

Public torch calls hooks with a node's gradients, but no public name gives the running node to other code.
"""

backend_of_group: Callable[..., Any] = ProcessGroup._get_backend
"""What a process group uses on a device: it has the options that the group was made with, as NCCL's most CTAs.

Public torch takes options for a new group, but of an existing group it returns only the backend's name.
"""

without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A context in which no TorchFunctionMode is active, and no subclass's __torch_function__: what is kept is made so.

Public torch leaves out those of subclasses alone.
"""

without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""A context in which no TorchDispatchMode is active: what the PEs agree on beside fake tensors is done with real ones.

Public torch lets a mode be left in the order of entering alone.
"""

abort_groups: Callable[[], None] | None = (
    torch.distributed.distributed_c10d._abort_process_group if torch.distributed.is_available() else None
)
"""Ends all process groups, and kernels of NCCL's that wait for a peer; None in builds of torch without groups.

Public torch's `destroy_process_group` waits for those kernels first.
"""

TensorGuards: Any = getattr(_guards, "TensorGuards", None)
"""Compares many tensors with shapes, strides and dtypes that they had once, in one call; None where torch lacks it.

Public torch gives these of one tensor at a time, each as a new object of Python's: 0.2 us per table and call.
"""

wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""A tensor of a subclass with a shape and no memory of its own: a table of which a PE has some blocks.

Public torch makes tensors with memory, and subclasses of those.
"""

behind_a_break: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo
"""A function that torch.compile does not look into: it breaks the graph there, and calls it as it is.

Public torch's `torch.compiler.disable` imports the compiler, which takes seconds, where a function is only defined.
"""

frame_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
"""What compiles the frames of Python that begin now, under torch.compile, or None.

Public torch's `torch.compiler.is_compiling` is true in what is compiled, and false where a frame has been passed over.
"""

tracing_context: Callable[[], object | None] = TracingContext.try_get
"""What torch.compile keeps of the graph that it makes, or None: fake kernels run there.

Public torch's `torch.compiler.is_compiling` is false in fake kernels of torch 2.11.
"""

tracing_state: Callable[[], object] = torch._C._get_tracing_state
"""What torch.jit.trace records in, or None: it sees what the dispatcher sees.

Public torch's `torch.jit.is_tracing` is a function of Python around it, of which every call would have a part.
"""


@contextmanager
def _never_recomputed() -> Iterator[None]:
    mode = get_proxy_mode() if traceback.has_preserved_node_meta() else None
    if mode is None:
        yield
        return
    nodes = mode.tracer.graph.nodes
    num_before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - num_before):
        node.meta.pop("recompute", None)
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


never_recomputed: Callable[[], AbstractContextManager[None]] = _never_recomputed
"""A context in which calls are traced such that a backward pass keeps their results and does not recompute them.

Public torch takes such a policy from the author of a checkpointed region, not from an operator.
"""


def _is_for_compiled_cuda_graph(device: torch.device) -> bool:
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda" or not hasattr(trees.local, "tree_manager_containers"):
        return False
    manager = trees.get_manager(device.index, create_if_none_exists=False)
    return manager is not None and manager.stream == torch.cuda.current_stream(device)


is_for_compiled_cuda_graph: Callable[[torch.device], bool] = _is_for_compiled_cuda_graph
"""Whether a call warms up or is recorded for a CUDA graph of torch.compile(mode="reduce-overhead").

Public torch says whether a stream is captured, which it is not while calls warm up.
"""


def _symmetric_memory() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")


symmetric_memory: Callable[[], Any] = _symmetric_memory
"""Returns the module of torch's symmetric memory; ImportError in builds without it.

Public torch has operators for such memory, `torch.ops.symm_mem`, and nothing that allocates it.
"""

sleep_on_gpu: Callable[[int], None] = torch.cuda._sleep
"""Keeps the current stream busy for so many cycles, in which the host can queue what is timed after it.

Public torch has no such kernel.
"""
