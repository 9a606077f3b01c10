"""The dense part against formulas; its first weights; the plain embedding module against sums of rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from dlrm.embedding import PlainEmbedding
from dlrm.model import DenseModel, Sizes


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5)


def small(**changes: Any) -> Sizes:
    taken = {"dims": (4, 4, 4), "num_dense": 5, "bottom": (7, 4), "top": (6, 5, 1), "cross_layers": 2, "cross_rank": 3}
    return Sizes(**{**taken, **changes})


def mlp(layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x


def drawn(sizes: Sizes, batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, sizes.num_dense), (batch, sum(sizes.dims)))
    dense, pooled = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return dense, pooled


@pytest.mark.parametrize("dims", [(4, 4, 4), (3, 1, 6)])
def test_cross_layers_are_those_of_the_formula(dims: tuple[int, ...]) -> None:
    sizes = small(dims=dims)
    model = DenseModel(sizes, seed=2).double()
    assert model.cross is not None
    for bias in model.cross.bias:
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(4))
    dense, pooled = drawn(sizes)
    first = torch.cat([mlp(model.bottom, dense), pooled], dim=1)
    rows = []
    for x0 in first:
        x = x0
        for v, w, bias in zip(model.cross.v, model.cross.w, model.cross.bias, strict=True):
            assert v.shape == (3, 4 + sum(dims)) and w.shape == (4 + sum(dims), 3)
            x = x0 * (w @ (v @ x) + bias) + x
        rows.append(x)
    expected = mlp(model.top, torch.stack(rows)) @ model.logit.weight.T + model.logit.bias
    found = model(dense, pooled)
    assert found.shape == (6,)
    assert torch.allclose(found, expected[:, 0], rtol=1e-12, atol=1e-12)


def test_dot_interaction_is_that_of_the_formula() -> None:
    sizes = small(interaction="dot")
    model = DenseModel(sizes, seed=2).double()
    dense, pooled = drawn(sizes)
    bottom = mlp(model.bottom, dense)
    rows = []
    for h, own in zip(bottom, pooled, strict=True):
        vectors = [h, own[0:4], own[4:8], own[8:12]]
        rows.append(torch.stack([*h, *(a @ b for a, b in itertools.combinations(vectors, 2))]))
    expected = mlp(model.top, torch.stack(rows)) @ model.logit.weight.T + model.logit.bias
    assert torch.allclose(model(dense, pooled), expected[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interaction", ["dcn", "dot"])
def test_gradients_reach_everything(interaction: str) -> None:
    sizes = small(interaction=interaction)
    model = DenseModel(sizes, seed=2).double()
    dense, pooled = drawn(sizes)
    pooled.requires_grad_()
    assert torch.autograd.gradcheck(lambda each: model(dense, each), (pooled,))
    model(dense, pooled).sum().backward()
    assert all(bool(each.grad.any()) for each in [pooled, *model.parameters()])


def test_mlperf_s_model() -> None:
    model = DenseModel(Sizes())
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    mlp_shapes = [shape for name, shape in shapes.items() if name.endswith("weight")]
    assert mlp_shapes[:3] == [(512, 13), (256, 512), (128, 256)]
    assert mlp_shapes[3:] == [(1024, 3456), (1024, 1024), (512, 1024), (256, 512), (1, 256)]
    assert [shapes[f"cross.{name}.2"] for name in ("v", "w", "bias")] == [(512, 3456), (3456, 512), (3456,)]
    assert 15.9e6 < sum(each.numel() for each in model.parameters()) < 16.5e6
    dot = DenseModel(Sizes(interaction="dot"))
    assert dot.top[0].weight.shape == (1024, 128 + 27 * 26 // 2)
    assert model(torch.zeros(2, 13), torch.zeros(2, 26 * 128)).shape == (2,)


def test_first_weights_are_those_of_mlperf_s_reference() -> None:
    model = DenseModel(Sizes(), seed=1)
    for layer in (model.bottom[0], model.bottom[2], model.top[0], model.top[6], model.logit):
        bound = 1 / math.sqrt(layer.weight.shape[1])
        for each in (layer.weight.detach(), layer.bias.detach()):
            assert float(each.abs().max()) <= bound
        if layer.weight.numel() > 1000:
            weight = layer.weight.detach()
            assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
            assert abs(float(weight.mean())) < 0.1 * bound
    assert model.cross is not None
    for each in (*model.cross.v, *model.cross.w):
        weight = each.detach()
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / (512 + 3456)), rel=0.01)
        assert float(weight.abs().max()) > 4 * math.sqrt(2 / (512 + 3456))  # normal, not uniform
    assert not any(bool(bias.any()) for bias in model.cross.bias)


def test_first_weights_depend_on_the_seed_alone() -> None:
    def state(seed: int, of_torch: int = 0) -> list[torch.Tensor]:
        torch.manual_seed(of_torch)
        return list(DenseModel(small(), seed=seed).state_dict().values())

    one = state(5)
    assert all(torch.equal(a, b) for a, b in zip(one, state(5, 1), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one, state(6), strict=True))


# ---- the plain embedding module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pooled_rows_are_sums_in_the_order_of_features(dtype: torch.dtype) -> None:
    module = PlainEmbedding((5, 9), (2, 3), sgd, seed=1)
    a, b = (module.tables[name].detach().clone() for name in ("0", "1"))
    values = torch.tensor([4, 4, 0, 8, 1, 2], dtype=dtype)
    lengths = torch.tensor([2, 0, 1, 0, 3, 0], dtype=dtype)
    pooled = module((values, lengths))
    zeros = torch.zeros(3)
    expected = [torch.cat([2 * a[4], zeros]), torch.cat([zeros[:2], b[8] + b[1] + b[2]]), torch.cat([a[0], zeros])]
    assert torch.allclose(pooled, torch.stack(expected))
    pooled.sum().backward()
    module.optimizer.step()
    assert torch.allclose(module.tables["0"].detach()[4], a[4] - 0.5 * 2)  # both lookups, one update
    assert torch.equal(module.tables["0"].detach()[1:4], a[1:4])
    assert sorted(module.state_dict()) == ["tables.0", "tables.1"]
    nothing = torch.zeros(0, dtype=dtype)
    assert module((nothing, nothing)).shape == (0, 5)


def test_first_rows_depend_on_seed_and_table() -> None:
    one = PlainEmbedding((400, 400, 9), (4, 4, 4), sgd, seed=1)
    other = PlainEmbedding((400, 400), (4, 4), sgd, seed=1)
    assert torch.equal(one.tables["1"], other.tables["1"]) and not torch.equal(one.tables["0"], one.tables["1"])
    assert not torch.equal(PlainEmbedding((400,), (4,), sgd, seed=2).tables["0"], one.tables["0"])
    for name, rows in (("0", 400), ("2", 9)):
        table = one.tables[name].detach()
        assert 0.7 / math.sqrt(rows) < float(table.abs().max()) <= 1 / math.sqrt(rows)
