"""The dense part of a DLRM: bottom MLP, interaction, top MLP. Pooled embeddings are an input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .checks import NUM_DENSE

__all__ = ["DenseModel", "Sizes"]

_INTERACTIONS = ("dcn", "dot")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dense part; the defaults are the sizes of MLPerf's DLRM-DCNv2.

    Attributes:
        dims: widths of the pooled embeddings, in the order of features.
        num_dense: dense columns.
        bottom: widths of the bottom MLP's layers.
        top: widths of the top MLP's layers; the last one is the logit's, 1.
        interaction: "dcn", low-rank cross layers (Wang et al., DCN V2, WWW 2021, section 3.2.2); or "dot", products of
            all pairs (Naumov et al., arXiv 1906.00091), all widths then equal the bottom MLP's last width.
        cross_layers, cross_rank: of "dcn".
    """

    dims: tuple[int, ...] = (128,) * 26
    num_dense: int = NUM_DENSE
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    interaction: str = "dcn"
    cross_layers: int = 3
    cross_rank: int = 512

    def __post_init__(self) -> None:
        if self.interaction not in _INTERACTIONS:
            raise ValueError(f"interaction: expected one of {', '.join(_INTERACTIONS)}, got {self.interaction!r}")
        for name in ("dims", "bottom", "top"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected positive widths, got {getattr(self, name)}")
        for name in ("num_dense", "cross_layers", "cross_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top[-1] != 1:
            raise ValueError(f"top: the last width is that of the logit, 1, got {self.top}")
        if self.interaction == "dot" and set(self.dims) != {self.bottom[-1]}:
            raise ValueError(
                f"dims: the dot interaction needs vectors of one width, that of the bottom MLP's last layer, "
                f"{self.bottom[-1]}, got {sorted(set(self.dims))}"
            )

    def identity(self) -> dict[str, Any]:
        """Return the sizes, as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


class DenseModel(nn.Module):
    """The dense part of a DLRM.

    With the bottom MLP's output h, the pooled embeddings e_1 ... e_T and sigma the rectifier:

        "dcn": x_0 = [h, e_1, ..., e_T]; x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l; logit = top(x_L)
        "dot": logit = top([h, the products of all pairs of h, e_1, ..., e_T])

    where sigma follows every layer of the MLPs but the top MLP's last. First weights are the same as in MLPerf's
    reference: in a layer of an MLP uniform between -1/sqrt(fan_in) and 1/sqrt(fan_in), weight and bias alike; in a
    cross layer normal by Glorot, with a bias of zeros.

    Args:
        sizes: of the layers.
        seed: of the first weights; they are the same on every device and PE.
        device: of the weights.
    """

    def __init__(self, sizes: Sizes, *, seed: int = 0, device: torch.device | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)
        num_features, width = len(sizes.dims), sizes.bottom[-1]
        self.bottom = _mlp(sizes.num_dense, sizes.bottom, generator)
        self.cross: _CrossLayers | None = None
        self._pairs: torch.Tensor
        if sizes.interaction == "dcn":
            top_in = width + sum(sizes.dims)
            self.cross = _CrossLayers(top_in, sizes.cross_layers, sizes.cross_rank, generator)
        else:
            top_in = width + math.comb(num_features + 1, 2)
            pairs = torch.triu_indices(num_features + 1, num_features + 1, offset=1)
            self.register_buffer("_pairs", pairs, persistent=False)
        self.top = _mlp(top_in, sizes.top[:-1], generator)
        self.logit = _linear(sizes.top[-2] if len(sizes.top) > 1 else top_in, 1, generator)
        self.to(device)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return the logits.

        Args:
            dense: `[B, num_dense]`.
            pooled: `[B, sum of dims]`, the features' pooled embeddings in their order.

        Returns:
            `[B]`.
        """
        bottom = self.bottom(dense)
        pooled = pooled.to(bottom.dtype)  # under autocast; the interaction would go on in the wider one of both
        mixed = self._dot(bottom, pooled) if self.cross is None else self.cross(torch.cat([bottom, pooled], dim=1))
        logits: torch.Tensor = self.logit(self.top(mixed))
        return logits.squeeze(1)

    def _dot(self, bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([bottom, pooled], dim=1).unflatten(1, (-1, bottom.shape[1]))
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([bottom, products[:, self._pairs[0], self._pairs[1]]], dim=1)


class _CrossLayers(nn.Module):
    """Low-rank cross layers; `[B, width]` to `[B, width]`."""

    def __init__(self, width: int, num_layers: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.v = nn.ParameterList(_glorot(rank, width, generator) for _ in range(num_layers))
        self.w = nn.ParameterList(_glorot(width, rank, generator) for _ in range(num_layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(num_layers))

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        x = first
        for v, w, bias in zip(self.v, self.w, self.bias, strict=True):
            x = torch.addcmul(x, first, F.linear(F.linear(x, v), w, bias))
        return x


def _glorot(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    weight = torch.empty(rows, columns)
    return nn.Parameter(weight.normal_(0.0, math.sqrt(2.0 / (rows + columns)), generator=generator))


def _linear(fan_in: int, fan_out: int, generator: torch.Generator) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
    bound = 1.0 / math.sqrt(fan_in)
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer


def _mlp(fan_in: int, widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [_linear(fan_in, width, generator), nn.ReLU()]
        fan_in = width
    return nn.Sequential(*layers)
