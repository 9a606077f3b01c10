"""Calls that may not go to the kernel at once: of each operator, those in which torch has a part.

Forward-mode derivatives, which no operator has, and tensors whose memory does not hold their values.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import error_of, in_world

import persistent_ops as po
import persistent_ops.nn as po_nn
from persistent_ops.runtime import plain_call
from persistent_ops.runtime.plain_call import PlainCalls, is_plain

SIZE, ROWS = 8, 12


def _ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, device=po.device(), **options)


def _lookups() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(ROWS, device=po.device()), torch.arange(0, ROWS + 1, 2, device=po.device())


def _embedding(table: torch.Tensor, factors: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    split = {"dim_per_rank": [SIZE], "batch_per_rank": [ROWS // 2]}
    return po.embedding_all_to_all([table], *_lookups(), factors, **split, **options)


def _into(values: torch.Tensor) -> torch.Tensor:
    out = po.empty(ROWS, SIZE)
    indices, count = (torch.zeros(size, dtype=torch.int64, device=po.device()) for size in (ROWS, 1))
    po.sparse_all_reduce_into(
        torch.tensor([1, 3], device=po.device()),
        values,
        num_rows=ROWS,
        out_indices=indices,
        out_values=out,
        out_count=count,
    )
    return out


def _exchanged(weights: torch.Tensor, inputs: po.EmbeddingInputs | None = None) -> po.EmbeddingInputs:
    inputs = inputs or po.EmbeddingInputs(
        [[(0, ROWS)]], num_features=1, max_batch=ROWS, lookups_per_sample=1, is_weighted=True
    )
    given = {"lengths": _ones(ROWS).long(), "per_sample_weights": weights}
    with inputs.exchange(_lookups()[0], **given) as lookups:
        lookups.wait()
    return inputs


# name -> what has no derivative, and the shape of what it is called with
CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "gemv, x": (lambda x: po.gemv(_ones(SIZE, SIZE), x), (SIZE,)),
    "gemv, weight": (lambda weight: po.gemv(weight, _ones(SIZE)), (SIZE, SIZE)),
    "gemv, residual": (lambda r: po.gemv(_ones(SIZE, SIZE), _ones(SIZE), residual=r), (SIZE,)),
    "gemv, out": (lambda x: po.gemv(_ones(SIZE, SIZE), x, out=_ones(SIZE)), (SIZE,)),
    "gemv of torch.ops": (
        lambda x: torch.ops.persistent_ops.gemv(_ones(SIZE, SIZE), x, None, None, False),
        (SIZE,),
    ),
    "gemv_all_reduce": (lambda x: po.gemv_all_reduce(_ones(SIZE, SIZE), x), (SIZE,)),
    "all_reduce": (po.all_reduce, (3, SIZE)),
    "all_reduce, bias": (lambda bias: po.all_reduce(_ones(3, SIZE), bias=bias), (SIZE,)),
    "all_reduce, out": (lambda x: po.all_reduce(x, out=_ones(3, SIZE)), (3, SIZE)),
    "all_reduce_rms_norm": (lambda x: po.all_reduce_rms_norm(x, _ones(SIZE))[1], (3, SIZE)),
    "all_reduce_rms_norm, norm_out": (
        lambda x: po.all_reduce_rms_norm(x, _ones(SIZE), norm_out=_ones(3, SIZE))[1],
        (3, SIZE),
    ),
    "embedding_all_to_all, table": (_embedding, (ROWS, SIZE)),
    "embedding_all_to_all, factors": (lambda factors: _embedding(_ones(ROWS, SIZE), factors), (ROWS,)),
    "embedding_all_to_all, widths": (lambda table: po.embedding_all_to_all([table], *_lookups()), (ROWS, SIZE)),
    "embedding_all_to_all, out": (lambda table: _embedding(table, out=po.empty(ROWS // 2, SIZE)), (ROWS, SIZE)),
    "sparse_all_reduce_into": (_into, (2, SIZE)),
}


def _in_forward_mode(name: str) -> dict[str, Any]:
    function, shape = CALLS[name]
    primal = _ones(*shape)

    def at_a_dual_level(*, has_tangent: bool) -> bool:
        with forward_ad.dual_level():
            return torch.equal(function(forward_ad.make_dual(primal, primal) if has_tangent else primal), want)

    want = function(primal)
    seen: dict[str, Any] = {
        "jvp": error_of(lambda: torch.func.jvp(function, (primal,), (primal,))),
        "dual level": error_of(lambda: at_a_dual_level(has_tangent=True)),
        "without a tangent": at_a_dual_level(has_tangent=False),
    }
    po.check()
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(backend: str, name: str) -> None:
    (seen,) = in_world(_in_forward_mode, 1, backend, name)
    assert seen.pop("without a tangent") and len(seen) == 2
    for error, text, _ in seen.values():
        assert error == "NotImplementedError" and ("forward only" in text or "gradient" in text or "backward" in text)


def _under_func_grad() -> dict[str, tuple[str, str, str]]:
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_reduce": po.all_reduce,
        "all_reduce_rms_norm": lambda x: po.all_reduce_rms_norm(x, torch.ones_like(x[0]))[1],
        "gemv": lambda weight: po.gemv(weight, torch.ones_like(weight[0])),
        "gemv_all_reduce": lambda weight: po.gemv_all_reduce(weight, torch.ones_like(weight[0])),
    }
    x = _ones(2, SIZE)
    whole = torch.func.vmap(lambda row: row * 2)(x)  # a transform that records nothing is none of their business
    assert bool((torch.func.vmap(po.all_reduce)(x) == whole / 2).all())
    unrecorded = torch.func.grad(lambda each: (torch.no_grad()(po.all_reduce)(each) * each).sum())(x)
    assert torch.equal(unrecorded, x)
    return {name: error_of(lambda f=f: torch.func.grad(lambda each: f(each).sum())(x)) for name, f in calls.items()}  # type: ignore[misc]


def test_torch_func_grad_raises_what_a_backward_pass_raises(backend: str) -> None:
    (seen,) = in_world(_under_func_grad, 1, backend)
    for name, (error, text, _) in seen.items():
        assert error == "NotImplementedError" and text.startswith(f"{name} is forward only"), (name, error, text)


def _weights_in_forward_mode() -> tuple[str, str, float]:
    weights = _ones(ROWS)
    inputs = _exchanged(weights)
    return error_of(lambda: torch.func.jvp(lambda each: _exchanged(each, inputs), (weights,), (weights,)))


def test_weights_of_lookups_in_forward_mode_are_refused(backend: str) -> None:
    ((error, text, _),) = in_world(_weights_in_forward_mode, 1, backend)
    assert error == "NotImplementedError" and text.startswith("per_sample_weights: no derivative in forward mode")


def _weights_inside_of_func() -> tuple[str, str, float]:
    weights = _ones(ROWS)
    inputs = _exchanged(weights)
    return error_of(lambda: torch.func.grad(lambda each: [_exchanged(each, inputs), each.sum()][1])(weights))


def test_weights_of_lookups_inside_of_func_are_refused(backend: str) -> None:
    ((error, text, _),) = in_world(_weights_inside_of_func, 1, backend)
    assert error == "NotImplementedError" and text.startswith("per_sample_weights: no gradient inside of torch.func")


def _wrapped_tables() -> list[Any]:
    table = _ones(ROWS, SIZE)

    def pooled(each: torch.Tensor, **options: Any) -> torch.Tensor:
        return po.embedding_all_to_all([each], *_lookups(), **options)

    seen = [
        error_of(lambda: torch.func.grad(lambda each: pooled(each).sum())(table)),
        error_of(lambda: torch.func.vmap(pooled)(_ones(2, ROWS, SIZE))),
        error_of(lambda: torch.func.grad(lambda x, each: (x * pooled(each)).sum())(_ones(1), table)),
    ]
    gradient = torch.func.grad(lambda x, each: (x * pooled(each, dim_per_rank=[SIZE])).sum())(_ones(1), table)
    gradient_beside = torch.func.grad(lambda x: (x * pooled(table)).sum())(_ones(1))
    po.check()
    return [[error[:2] for error in seen], gradient.tolist(), gradient_beside.tolist()]


def test_tables_inside_of_func_are_told(backend: str) -> None:
    ((errors, gradient, beside),) = in_world(_wrapped_tables, 1, backend)
    assert [error for error, _ in errors] == ["NotImplementedError"] * 3
    assert errors[0][1].startswith("embedding_all_to_all has a backward pass as a plain call")
    for _, text in errors[1:]:
        assert text == "weights[0]: a table that torch.func has wrapped cannot be recognised; pass dim_per_rank"
    assert gradient == beside == [2.0 * (ROWS // 2) * SIZE]


def _layers() -> dict[str, Any]:
    x, few = _ones(20, SIZE), _ones(2, SIZE)
    with torch.no_grad():
        row = po_nn.RowParallelLinear(SIZE, SIZE)
        column = po_nn.ColumnParallelLinear(SIZE, SIZE)
    own = po_nn.RowParallelLinear(SIZE, SIZE, comm_dtype=torch.float32, dtype=torch.bfloat16)
    halves = x.to(torch.bfloat16)
    calls = {"fused": (row, few), "all_reduce": (row, x), "unfused": (own, halves)}
    seen: dict[str, Any] = {path: layer.path(given.shape[0]) for path, (layer, given) in calls.items()}
    for path, (layer, given) in calls.items():
        found = error_of(lambda layer=layer, given=given: torch.func.jvp(layer, (given,), (given,)))
        seen[path] = seen[path] == path and found[0] == "NotImplementedError"
    _, tangent = torch.func.jvp(column, (few,), (few,))
    seen["column"] = torch.allclose(tangent, torch.nn.functional.linear(few, column.weight))
    return seen


def test_layers_in_forward_mode(backend: str) -> None:
    (seen,) = in_world(_layers, 1, backend)
    assert len(seen) == 4 and all(value is True for value in seen.values()), seen


def _negated() -> dict[str, bool]:
    """Take tensors whose memory holds what they are the negative of."""
    weight, x = _ones(SIZE, SIZE), torch.arange(1.0, 1 + SIZE, device=po.device())
    negative = torch._neg_view
    factors = torch.arange(1.0, 1 + ROWS, device=po.device())
    table = _ones(ROWS, SIZE)
    seen = {
        "gemv, x": torch.equal(po.gemv(weight, negative(x)), -po.gemv(weight, x)),
        "gemv, residual": torch.equal(po.gemv(weight, x, residual=negative(x)), po.gemv(weight, x) - x),
        "gemv, out": error_of(lambda: po.gemv(weight, x, out=negative(_ones(SIZE))))[:2]
        == ("ValueError", "out: expected a tensor without the negative bit, which is written as it is"),
        "gemv_all_reduce": torch.equal(po.gemv_all_reduce(negative(weight), x), -po.gemv_all_reduce(weight, x)),
        "all_reduce": torch.equal(po.all_reduce(negative(x)), -po.all_reduce(x)),
        "all_reduce_rms_norm": torch.equal(
            po.all_reduce_rms_norm(negative(x), weight[0])[1], -po.all_reduce_rms_norm(x, weight[0])[1]
        ),
        "factors": torch.equal(_embedding(table, negative(factors)), -_embedding(table, factors)),
        "table": error_of(lambda: _embedding(negative(table)))[:2]
        == ("TypeError", "weights[0]: expected a tensor without the negative bit; pass its resolve_neg()"),
        "EmbeddingInputs": error_of(lambda: _exchanged(negative(factors)))[:2]
        == ("ValueError", "per_sample_weights: expected a tensor without the negative bit; pass its resolve_neg()"),
        "sparse_all_reduce_into": torch.equal(_into(negative(_ones(2, SIZE))), -_into(_ones(2, SIZE))),
    }
    po.check()
    return seen


def test_negative_bit(backend: str) -> None:
    (seen,) = in_world(_negated, 1, backend)
    assert all(seen.values()), seen


def _zeros() -> list[Any]:
    zero = torch._efficientzerotensor(1, device=po.device())
    seen = [not is_plain((zero,)), not is_plain((_ones(1),), (zero,)), is_plain((_ones(1),), (_ones(1),))]
    total = po.all_reduce(zero)  # has no memory to read
    product = po.gemv(_ones(1, 1), zero, bias=zero)
    po.check()
    return [*seen, total.tolist(), product.tolist()]


def test_zeros_without_memory(backend: str) -> None:
    assert in_world(_zeros, 1, backend) == [[True, True, True, [0.0], [0.0]]]


# ---- one look at all tensors --------------------------------------------------------------------------------------


class _Own(torch.Tensor):
    pass


class _Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _tensors() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inference = torch.ones(3)
    return {
        "plain": torch.ones(3),
        "other": torch.ones(3),
        "longer": torch.ones(5),
        "half": torch.ones(3, dtype=torch.float16),
        "matrix": torch.ones(3, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "requires": torch.ones(3, requires_grad=True),
        "recorded": torch.ones(3, requires_grad=True) * 2,
        "negative": torch._neg_view(torch.ones(3)),
        "zeros": torch._efficientzerotensor(3),
        "of a class": torch.ones(3).as_subclass(_Own),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "inference": inference,
        "none": None,  # type: ignore[dict-item]
        "text": "text",  # type: ignore[dict-item]
    }


CONTEXTS: dict[str, Callable[[], Any]] = {
    "recording": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": FakeTensorMode,
    "dispatch mode": _Seeing,
    "dual level": forward_ad.dual_level,
}


def _with_transforms(call: Callable[[torch.Tensor | None], bool]) -> list[bool]:
    """Return what a call says in each context, and in transforms, of whose wrapped tensors it gets one."""
    said: list[bool] = []
    for context in CONTEXTS.values():
        with context():
            said.append(call(None))

    def inside(wrapped: torch.Tensor) -> torch.Tensor:
        said.extend((call(None), call(wrapped)))
        return wrapped.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    torch.func.jvp(inside, (torch.ones(3),), (torch.ones(3),))
    return said


def test_one_look_says_what_looks_at_each_tensor_say() -> None:
    tensors = _tensors()
    pairs = list(itertools.product(tensors, repeat=2))
    some_plain = 0
    for round_number in range(6):
        random.Random(round_number).shuffle(pairs)
        calls = PlainCalls()
        if round_number % 2:  # what has been plain in one context is asked about in all others
            for context, kind in itertools.product(("no_grad", "recording"), ("parameter", "plain")):
                with CONTEXTS[context]():
                    calls.has((tensors[kind],), (tensors["other"],), ())
        for first, second in pairs[:40]:

            def both(
                wrapped: torch.Tensor | None, first: str = first, second: str = second, calls: PlainCalls = calls
            ) -> bool:
                nonlocal some_plain
                given = (tensors[first] if wrapped is None else wrapped,), (tensors[second], tensors["plain"])
                for tables in ((), [tensors["half"]], [tensors["half"], tensors["parameter"]], ["text"]):
                    wanted = is_plain(*given, tables)  # type: ignore[arg-type]
                    some_plain += wanted
                    for _ in range(2):
                        assert calls.has(*given, tables) == wanted, (first, second, tables)  # type: ignore[arg-type]
                return wanted

            _with_transforms(both)
    assert some_plain > 100


@pytest.mark.parametrize("is_recording", [False, True])
def test_calls_of_a_kind_are_looked_at_once(is_recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(*given: Any) -> bool:
        looked.append(1)
        return is_plain(*given)

    monkeypatch.setattr(plain_call, "is_plain", counted)
    tensors, calls = _tensors(), PlainCalls()
    names = ["half", "frozen" if is_recording else "parameter"]
    with torch.set_grad_enabled(is_recording):
        for _ in range(3):
            for name in names:
                x, fresh = tensors[name], torch.ones(7)
                assert calls.has((x,), (None, fresh)) and calls.has((x,), (fresh, x, None))
                assert calls.has((fresh, x), (x, None))
        assert len(looked) == 2 * len(names)  # (x, fresh) and (fresh, x) are two kinds
        for dimensions in range(2, 9):  # more kinds than are kept
            assert all(calls.has((torch.ones((1,) * dimensions),)) for _ in range(2))
    assert max(map(len, calls._kinds.values())) == plain_call._MOST_KINDS


def test_without_what_compares_all_calls_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_call, "TensorGuards", None)
    calls = PlainCalls()
    assert all(calls.has((torch.ones(3),)) and not calls.has((torch._neg_view(torch.ones(3)),)) for _ in range(2))


def test_nested_tensors_end_no_process() -> None:
    plain, calls = torch.ones(2, 8), PlainCalls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert not calls.has((nested,)) and not calls.has((plain,), (nested,))
    assert calls.has((plain,)) and calls.has((plain, torch.zeros(2, 8)))
    assert not calls.has((nested,)) and not calls.has((plain, nested)) and not calls.has((plain,), (nested,))


# ---- torch.jit.trace -------------------------------------------------------------------------------------------------


def _traced() -> list[str]:
    x, weight, gain = _ones(SIZE), _ones(ROWS, SIZE), _ones(SIZE)
    layer = po_nn.RowParallelLinear(SIZE, ROWS)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gemv": lambda x: po.gemv(weight, x),
        "gemv_all_reduce": lambda x: po.gemv_all_reduce(weight, x),
        "all_reduce": lambda x: po.all_reduce(x),
        "all_reduce_rms_norm": lambda x: po.all_reduce_rms_norm(x, gain)[1],
        "RowParallelLinear": layer,
    }
    wrong = []
    for name, call in calls.items():
        for is_known in (False, True):  # whether the call was made before
            with torch.no_grad():
                traced = torch.jit.trace(call, (x,), check_trace=False)
                found, want = traced(2 * x), call(2 * x)
            if "persistent_ops::" not in str(traced.graph) or not torch.equal(found, want):
                wrong.append(f"{name}, {is_known}: {found}, not {want}")
    told = error_of(lambda: torch.jit.trace(_embedding, (_ones(ROWS, SIZE),), check_trace=False))
    return [*wrong, *([] if "not under torch.jit.trace" in told[1] else [str(told)])]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_tracer_sees_the_operator() -> None:
    assert in_world(_traced, 1, "host") == [[]]
