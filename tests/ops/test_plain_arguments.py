"""A tensor that is not plain is refused with one message, and without a launch. Each tensor argument is checked."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.runtime.world import current

SIZE, ROWS = 8, 12


def _ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, device=po.device(), **options)


def _vector() -> torch.Tensor:
    return _ones(SIZE)


def _matrix() -> torch.Tensor:
    return _ones(SIZE, SIZE)


def _factor() -> torch.Tensor:
    return _ones(SIZE, SIZE, dtype=torch.bfloat16)


def _table() -> torch.Tensor:
    return _ones(ROWS, SIZE)


def _factors() -> torch.Tensor:
    return _ones(ROWS)


def _indices() -> torch.Tensor:
    return torch.arange(ROWS, device=po.device())


def _offsets() -> torch.Tensor:
    return torch.arange(0, ROWS + 1, 2, device=po.device())


def _lengths() -> torch.Tensor:
    return torch.ones(ROWS, dtype=torch.int64, device=po.device())


def _count() -> torch.Tensor:
    return torch.ones(1, dtype=torch.int64, device=po.device())


def _pooled() -> torch.Tensor:
    return po.empty(ROWS // 2, SIZE)


def _sparse() -> torch.Tensor:
    return _table().to_sparse(1)


# ---- calls -----------------------------------------------------------------------------------------------------------


class Function(NamedTuple):
    """A public function that is called with its tensors by name, and a function for a plain tensor of each name."""

    make: Callable[[], Callable[..., Any]]
    tensors: dict[str, Callable[[], torch.Tensor]]


def _embedding(weights: torch.Tensor, **options: Any) -> torch.Tensor:
    return po.embedding_all_to_all([weights], dim_per_rank=[SIZE], batch_per_rank=[ROWS // 2], **options)


def _recorded(weights: torch.Tensor, **options: Any) -> torch.Tensor:
    return _embedding(weights, requires_grad=True, **options)


def _optimized() -> Callable[..., torch.Tensor]:
    table = _table()
    optimizer = po.EmbeddingOptimizer([table], "sgd", lr=0.1)
    return functools.partial(po.embedding_all_to_all, [table], optimizer=optimizer)


def _exchange() -> Callable[..., None]:
    sizes = {"num_features": 1, "max_batch": ROWS, "lookups_per_sample": 1}
    inputs = po.EmbeddingInputs([[(0, ROWS)]], is_weighted=True, **sizes)

    def call(**given: torch.Tensor) -> None:
        with inputs.exchange(**given) as lookups:
            lookups.wait()

    return call


def _collection(placement: str) -> Callable[..., torch.Tensor]:
    table, options = ("t", ROWS, SIZE, ["f"]), {"max_batch": ROWS, "is_weighted": True, "placement": placement}
    module = po.nn.ShardedEmbeddingBagCollection([table], lr=0.5, **options)
    return lambda values, **given: module(values, **given)


_PRODUCT = {"weight": _matrix, "x": _vector, "bias": _vector, "residual": _vector, "out": _vector}
_SUM = {"x": _matrix, "residual": _matrix, "bias": _vector, "out": _matrix}
_FACTORS = {"a": _factor, "b": _factor, "out": lambda: po.empty(SIZE, SIZE, dtype=torch.bfloat16)}
_ADDED = {"bias": lambda: _ones(SIZE, dtype=torch.bfloat16), "residual": _factor}
_ENTRIES = {"indices": _indices, "values": _table}
_LOOKUPS = {"indices": _indices, "offsets": _offsets, "per_sample_weights": _factors}
_FEATURES = {"values": _indices, "lengths": _lengths, "per_sample_weights": _factors}
_INTO = {
    **_ENTRIES,
    "out_indices": _indices,
    "out_values": lambda: po.empty(ROWS, SIZE),
    "out_count": _count,
    "count": _count,
}

FUNCTIONS: dict[str, Function] = {
    "gemv": Function(lambda: po.gemv, _PRODUCT),
    "gemv_all_reduce": Function(lambda: po.gemv_all_reduce, _PRODUCT),
    "all_reduce": Function(lambda: po.all_reduce, _SUM),
    "all_reduce_rms_norm": Function(lambda: po.all_reduce_rms_norm, {**_SUM, "weight": _vector, "norm_out": _matrix}),
    "gemm": Function(lambda: po.gemm, {**_FACTORS, "bias": _ADDED["bias"]}),
    "gemm_all_to_all": Function(lambda: po.gemm_all_to_all, _FACTORS),
    "gemm_reduce_scatter": Function(lambda: po.gemm_reduce_scatter, {**_FACTORS, **_ADDED}),
    "gemm_all_reduce": Function(lambda: po.gemm_all_reduce, {**_FACTORS, **_ADDED}),
    "sparse_all_reduce": Function(lambda: po.sparse_all_reduce, {"x": _sparse}),
    "sparse_all_reduce, async_op": Function(
        lambda: lambda x: po.sparse_all_reduce(x, async_op=True).wait(), {"x": _sparse}
    ),
    "sparse_all_reduce_into": Function(lambda: functools.partial(po.sparse_all_reduce_into, num_rows=ROWS), _INTO),
    "sparse_all_reduce_buffers": Function(
        lambda: functools.partial(po.sparse_all_reduce_buffers, num_rows=ROWS, completion_fn=lambda *_: None), _ENTRIES
    ),
    "embedding_all_to_all": Function(lambda: _embedding, {"weights": _table, **_LOOKUPS, "out": _pooled}),
    "embedding_all_to_all, recorded": Function(lambda: _recorded, {"weights": _table, **_LOOKUPS}),
    "embedding_all_to_all, optimizer": Function(_optimized, _LOOKUPS),
    "EmbeddingOptimizer": Function(
        lambda: lambda weights: po.EmbeddingOptimizer([weights], "sgd", lr=0.1), {"weights": _table}
    ),
    "EmbeddingInputs.exchange": Function(_exchange, _FEATURES),
    "ShardedEmbeddingBagCollection, table-wise": Function(lambda: _collection("table_wise"), _FEATURES),
    "ShardedEmbeddingBagCollection, replicated": Function(lambda: _collection("replicated"), _FEATURES),
    "ColumnParallelLinear": Function(lambda: po.nn.ColumnParallelLinear(SIZE, SIZE), {"x": _vector}),
    "RowParallelLinear": Function(lambda: po.nn.RowParallelLinear(SIZE, SIZE), {"x": _vector, "residual": _vector}),
    "to_symmetric": Function(lambda: po.to_symmetric, {"tensor": _table}),
    "peer_view": Function(lambda: lambda tensor: po.peer_view(tensor, 0), {"tensor": _pooled}),
    "free": Function(lambda: po.free, {"tensor": _pooled}),
}
_LISTS = ("weights",)  # but for all_reduce_rms_norm's weight

# ---- what is not plain -----------------------------------------------------------------------------------------------


class Own(torch.Tensor):
    """A subclass over ordinary memory."""


class Wrapper(torch.Tensor):
    """Like a DTensor: a tensor without memory, around one with memory."""

    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} of a wrapper")


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout, device=po.device())


def _without_storage(tensor: torch.Tensor) -> torch.Tensor:
    freed = torch.empty_like(tensor)
    freed.untyped_storage().resize_(0)
    return freed


# replacement of a plain tensor -> its name in the error
TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "subclass": (lambda tensor: tensor.as_subclass(Own), "a Own"),
    "wrapper": (Wrapper, "a Wrapper"),
    "quantized": (
        lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        "a quantized tensor",
    ),
    "nested": (lambda _: _nested(torch.strided), "a nested tensor"),
    "jagged": (lambda _: _nested(torch.jagged), "a NestedTensor"),
    "COO": (torch.Tensor.to_sparse, "layout torch.sparse_coo"),
    "negative bit": (torch._neg_view, "a tensor with the negative bit"),
    "zeros": (
        lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device),
        "a tensor without memory",
    ),
}
SPARSE_TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dense": (torch.Tensor.to_dense, "layout torch.strided"),
    "CSR": (lambda tensor: tensor.to_dense().to_sparse_csr(), "layout torch.sparse_csr"),
    "wrapper": (lambda tensor: Wrapper(tensor.to_dense()), "a Wrapper"),
    "nested": TENSORS["nested"],
    "jagged": TENSORS["jagged"],
}
_Call = Callable[[torch.Tensor], Any]


def _with_tangent(call: _Call, tensor: torch.Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


# use of a call and its tensor -> its name in the error
CONTEXTS: dict[str, tuple[Callable[[_Call, torch.Tensor], Any], str]] = {
    "vmap": (lambda call, tensor: torch.func.vmap(call)(tensor[None]), "one inside of torch.func"),
    "vmap of others": (
        lambda call, tensor: torch.func.vmap(lambda _: call(tensor))(_ones(2)),
        "one inside of torch.func",
    ),
    "grad": (lambda call, tensor: torch.func.grad(call)(tensor), "one inside of torch.func"),
    "jvp": (lambda call, tensor: torch.func.jvp(call, (tensor,), (tensor,)), "one inside of torch.func"),
    "tangent": (_with_tangent, "one with a tangent of forward-mode AD"),
    "trace": (
        lambda call, tensor: torch.jit.trace(call, (tensor,), check_trace=False),
        "one under torch.jit.trace",
    ),
}
_OF_NUMBERS = ("grad", "jvp", "tangent")  # contexts that take no indices


def _refused(function: str, argument: str, chosen: tuple[str, ...] = ()) -> list[str]:
    """Return the actions with wrong results, among the chosen ones or all."""
    make_call, makers = FUNCTIONS[function]
    call = make_call()
    good = {name: make() for name, make in makers.items()}
    is_sparse = good[argument].is_sparse

    def with_it(tensor: torch.Tensor) -> Any:
        return call(**{**good, argument: tensor})

    actions: dict[str, tuple[Callable[[], Any], str]] = {}
    for kind, (make, found) in (SPARSE_TENSORS if is_sparse else TENSORS).items():
        actions[kind] = (lambda make=make: with_it(make(makers[argument]())), found)  # type: ignore[misc]
    if argument in _LISTS:  # which are checked again if their memory changes
        actions["without storage"] = lambda: with_it(_without_storage(good[argument])), "a tensor without memory"
    for context, (within, found) in CONTEXTS.items():
        is_possible = good[argument].is_floating_point() if context in _OF_NUMBERS else True
        if is_possible and (not is_sparse or context == "vmap of others"):
            actions[context] = (lambda within=within: within(with_it, makers[argument]()), found)  # type: ignore[misc]
    actions = {kind: action for kind, action in actions.items() if kind in chosen or not chosen}
    assert actions
    problems = []
    name = f"{argument}[0]" if argument in _LISTS else argument
    expected = r"a plain sparse COO tensor, as of to_sparse\(1\)" if is_sparse else "a plain dense tensor"
    warnings.simplefilter("ignore")  # prototypes and deprecations of torch
    for records, (kind, (action, found)) in itertools.product((False, True), actions.items()):
        before = current().workspace.calls.last
        with torch.set_grad_enabled(records):
            error, text, _ = error_of(action)
        # In a transform or trace, all tensors are not plain. The error names the first.
        begin = rf"\w+(\[0\])?: expected {expected}" if kind in CONTEXTS else f"{re.escape(name)}: expected {expected}"
        if error != "TypeError" or not re.match(f"{begin}, got {found}. Pass a torch.Tensor that is not a ", text):
            problems.append(f"{kind}: {error} {text}")
        if current().workspace.calls.last != before:
            problems.append(f"{kind}: launched")
    call(**good)
    po.check()
    return problems


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("all_reduce", "x"),
        ("sparse_all_reduce", "x"),
        ("embedding_all_to_all", "weights"),
        ("EmbeddingOptimizer", "weights"),
    ],
)
def test_the_gate(backend: str, function: str, argument: str) -> None:
    assert in_world(_refused, 1, backend, function, argument) == [[]]


def _past_the_gate(function: str) -> list[str]:
    """Pass tensors that are not plain, one at a time, and all tensors within a transform."""
    arguments = list(FUNCTIONS[function].tensors)
    problems = _refused(function, arguments[0], ("vmap of others",))
    for argument in arguments:
        problems += _refused(function, argument, ("negative bit", "dense"))
    return problems


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_tensor_passes_the_gate(backend: str, function: str) -> None:
    assert in_world(_past_the_gate, 1, backend, function) == [[]]
