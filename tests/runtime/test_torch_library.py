"""An operator with a list argument, results that are not only tensors, and a backward pass, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from persistent_ops.runtime.program_order import keep_order_on
from persistent_ops.runtime.torch_library import TorchOperator

pytestmark = pytest.mark.host
_Results = tuple[torch.Tensor | None, list[torch.Tensor]]
_calls: list[str] = []


def _run(x: torch.Tensor, ys: Sequence[torch.Tensor], returns_x: bool) -> _Results:
    _calls.append("forward")
    return x * 2 if returns_x else None, [x * y for y in ys]


def _fake(x: torch.Tensor, ys: Sequence[torch.Tensor], returns_x: bool) -> _Results:
    return torch.empty_like(x) if returns_x else None, [torch.empty_like(x) for _ in ys]


def _set_up(context: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    x, ys, context.returns_x = inputs
    context.save_for_backward(x, *ys)


def _backward(context: Any, of_double: torch.Tensor | None, of_products: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    _, products = _scaled(context.saved_tensors[0].new_ones(()).expand_as(of_products[0]).contiguous(), of_products)
    x, *ys = context.saved_tensors
    gradient = sum(each * y for each, y in zip(products, ys, strict=True))
    if of_double is not None:
        gradient = gradient + 2 * of_double
    return gradient, [each * x for each in products], None


_operator = TorchOperator(
    "test_scaled",
    "Tensor x, Tensor[] ys, bool returns_x",
    _run,
    results="(Tensor?, Tensor[])",
    counts=lambda x, ys, returns_x: (int(returns_x), len(ys)),
    fake=_fake,
    setup_context=_set_up,
    backward=_backward,
)


def _scaled(x: torch.Tensor, ys: Sequence[torch.Tensor], returns_x: bool = False) -> _Results:
    """Return 2 x, or None, and x * y for each y. The backward pass calls it again, as collectives do."""
    results: _Results = _operator((x, ys, returns_x), {}, (x, *ys))
    return results


@pytest.fixture(autouse=True)
def _order() -> None:
    keep_order_on(torch.device("cpu"))
    _calls.clear()


def _gradients(function: Any, returns_x: bool) -> list[torch.Tensor]:
    leaves = [torch.arange(1.0, 4.0) + i for i in range(3)]
    x, *ys = [leaf.requires_grad_() for leaf in leaves]
    double, products = function(x, ys, returns_x)
    assert (double is not None) == returns_x
    total = sum((i + 1) * product.sum() for i, product in enumerate(products))
    (total if double is None else total + double.sum()).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _expected(returns_x: bool) -> list[torch.Tensor]:
    return _gradients(lambda x, ys, returns_x: (x * 2 if returns_x else None, [x * y for y in ys]), returns_x)


@pytest.mark.parametrize("returns_x", [True, False])
def test_records_a_gradient(returns_x: bool) -> None:
    for got, expected in zip(_gradients(_scaled, returns_x), _expected(returns_x), strict=True):
        assert torch.equal(got, expected)
    assert len(_calls) == 2


def test_a_call_that_records_none_has_no_graph() -> None:
    with torch.no_grad():
        double, products = _scaled(torch.ones(3, requires_grad=True), [torch.ones(3)], True)
    assert double is not None
    assert not double.requires_grad
    assert not products[0].requires_grad


@pytest.mark.parametrize("returns_x", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(backend: str, returns_x: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_scaled, backend=backend, fullgraph=True)
    for got, expected in zip(_gradients(compiled, returns_x), _expected(returns_x), strict=True):
        assert torch.equal(got, expected)
    assert len(_calls) == 2  # of which the compiler makes none, and drops none


def test_compiled_calls_are_made_though_nobody_wants_the_result() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(x: torch.Tensor) -> torch.Tensor:
        _scaled(x, [x])
        _scaled(x, [x])
        return x + 1

    twice(torch.ones(3))
    assert _calls == ["forward"] * 2


def test_opcheck() -> None:
    x, ys = torch.randn(3, requires_grad=True), [torch.randn(3, requires_grad=True), torch.randn(3)]
    torch.library.opcheck(torch.ops.persistent_ops.test_scaled.results_3, (x, ys, True))
