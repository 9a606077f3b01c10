"""torch's default dtype and device do not affect the package's own tensors."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import persistent_ops as po

_PACKAGE = Path(po.__file__).parent
_MAKERS = {maker.__name__ for maker in _device_constructors()}  # all that the default device has a say in
_WHOLE = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}  # made of int64 by default
_AS_THEIR_VALUES = {"sparse_coo_tensor"}


def _leaves_to_torch(call: ast.Call) -> list[str]:
    """Return what a call that makes a tensor leaves to torch's defaults; nothing for other calls."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in _MAKERS:
        return []
    if not isinstance(function.value, ast.Name) or function.value.id != "torch":
        return []
    given = {keyword.arg for keyword in call.keywords}
    needed = {"device"} if function.attr in _WHOLE | _AS_THEIR_VALUES else {"device", "dtype"}
    return sorted(needed - given)


def test_the_package_leaves_nothing_to_torch() -> None:
    calls = {
        f"{path.relative_to(_PACKAGE)}:{node.lineno}": _leaves_to_torch(node)
        for path in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {place: left for place, left in calls.items() if left} == {}
    assert len(calls) > 1000


# ---- results -------------------------------------------------------------------------------------------------------

_CPU = torch.device("cpu")


def _whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=_CPU)


def _floats(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=_CPU).view(shape) / 8


def _trained(placement: str, optimizer: str) -> list[torch.Tensor]:
    """Return a module's result and the gradients of its weights, of a second step."""
    weighted, mean = (placement, "sum", True), (placement, "mean", False)
    results = []
    for where, pooling, is_weighted in (weighted, mean):
        config = po.nn.TableConfig("table", 6, 4, ["feature"], pooling=pooling)
        module = po.nn.ShardedEmbeddingBagCollection(
            [config], max_batch=8, placement=where, optimizer=optimizer, lr=0.5, is_weighted=is_weighted, seed=3
        )
        factors = _floats(4).requires_grad_() if is_weighted else None
        for _ in range(2):
            pooled = module(_whole(0, 2, 2, 5), _whole(1, 2, 1), per_sample_weights=factors)
            pooled.backward(torch.ones_like(pooled))
        module.optimizer.load_state_dict(module.optimizer.state_dict())
        results += [pooled.detach(), *([] if factors is None or factors.grad is None else [factors.grad])]
    return results


def _by_operators() -> list[torch.Tensor]:
    tables, sparse = [_floats(6, 4)], [_floats(6, 4).requires_grad_()]
    optimizer = po.EmbeddingOptimizer(tables, "adam", lr=0.5, seed=3)
    optimizer.step_count, optimizer.seeds = 3, [5]  # type: ignore[assignment]
    lookups, offsets = _whole(0, 2, 2, 5), _whole(0, 1, 3, 4)
    for weights, given in ((tables, {"optimizer": optimizer}), (sparse, {})):
        pooled = po.embedding_all_to_all(weights, lookups, offsets, pooling="mean", **given)  # type: ignore[arg-type]
        pooled.backward(torch.ones_like(pooled))
    assert sparse[0].grad is not None
    twice = torch.sparse_coo_tensor(
        _whole(1, 1).unsqueeze(0), _floats(2, 4), (3, 4), device=_CPU, check_invariants=False
    )
    sums = [po.sparse_all_reduce(twice, algorithm=way) for way in ("owner", "dense")]
    normed = po.all_reduce_rms_norm(_floats(3, 8), _floats(8))
    products = po.gemv_all_reduce(_floats(16, 8), _floats(8))
    return [tables[0], sparse[0].grad.to_dense(), *(each.to_dense() for each in sums), *normed, products]


def _results(backend: str, device: str | None) -> list[torch.Tensor]:
    with torch.device(device) if device else contextlib.nullcontext():
        po.init(backend, heap_size=64 << 20)
        try:
            results = [
                each
                for placement, optimizer in (
                    ("table_wise", "adagrad"),
                    ("replicated", "adam"),
                    ("auto", "rowwise_adagrad"),
                )
                for each in _trained(placement, optimizer)
            ]
            results += _by_operators()
            po.check()
            return [each.clone() for each in results]
        finally:
            po.finalize()


@pytest.fixture(scope="module")
def usual() -> list[torch.Tensor]:
    return po.launch(_results, 1, "host", None, threads=True, timeout=200)[0]


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "default_dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], indirect=True, ids=str
)
@pytest.mark.usefixtures("default_dtype")
def test_results_under_another_default_dtype(usual: list[torch.Tensor]) -> None:
    _assert_same(po.launch(_results, 1, "host", None, threads=True, timeout=200)[0], usual)


def test_results_under_another_default_device(usual: list[torch.Tensor]) -> None:
    _assert_same(po.launch(_results, 1, "host", "meta", threads=True, timeout=200)[0], usual)


def _assert_same(found: list[torch.Tensor], usual: list[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, usual, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), f"result {number}: {one}, not {other}"
