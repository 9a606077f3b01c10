"""The decoder's small functions between the matrix products, plain or each compiled into one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .config import ModelConfig

__all__ = ["Kernels", "rope_tables"]


def rope_tables(config: ModelConfig, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary angles, `[positions, head_dim / 2]` each, fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        # Wavelengths per original context: at least high_freq_factor stay, below low_freq_factor are stretched.
        turns = scaling.original_positions * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return total, _rms_norm(total, weight, eps)


def _rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, batch: int, group: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut `[N*T, (G+2)*H*D]` into queries `[N, H, G*T, D]` and keys and values `[2, N, H, T, D]`; rotate the first two.

    The G query heads of a key head are rows of one matrix, so that attention is one batched product per key head.
    """
    heads = qkv.shape[1] // ((group + 2) * dim)
    rows = qkv.view(batch, -1, (group + 2) * heads, dim)
    rotated, value = rows.split([(group + 1) * heads, heads], dim=2)
    cos, sin = cos[positions][:, None], sin[positions][:, None]  # [T, 1, D / 2]
    low, high = rotated.float().chunk(2, dim=-1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(qkv.dtype)
    query, key = rotated.split([group * heads, heads], dim=2)
    query = query.unflatten(2, (heads, group)).permute(0, 2, 3, 1, 4).reshape(batch, heads, -1, dim)
    return query, torch.stack([key, value]).transpose(2, 3).contiguous()


def _attention_weights(
    scores: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the softmax of scores `[N, H, G*T, L]` over the slots up to each row's position."""
    num_positions = positions.shape[0]
    later = slots > positions[:, None]  # [T, L]
    wide = scores.float().unflatten(2, (-1, num_positions)) * scale
    return wide.masked_fill(later, -math.inf).softmax(-1).to(scores.dtype).flatten(2, 3)


def _store(
    qkv: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, group: int
) -> torch.Tensor:
    """Store the keys and values of `Kernels.attend`; returns the rotated queries `[N, H, G*T, D]`."""
    query, keys_values = _rotate(qkv, cos, sin, positions, cache.shape[1], group, cache.shape[4])
    cache.index_copy_(3, positions, keys_values)
    return query


def _attend_step(
    query: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """Let one row of each sequence attend; returns `[N, H*G*D]`.

    The scores of so few rows are sums, not a product, so that they are one kernel with their scale. Slots come before
    query heads: neighbors share a key.
    """
    keys, values = cache.unbind(0)
    scores = (keys[:, :, :, None].float() * query[:, :, None].float()).sum(-1)  # [N, H, L, G]
    later = (slots > positions)[:, None]
    weights = (scores * scale).masked_fill(later, -math.inf).softmax(2).to(query.dtype)
    return torch.matmul(weights.transpose(2, 3), values).reshape(query.shape[0], -1)  # of [N, H, G, D]


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _best(logits: torch.Tensor, first: int) -> torch.Tensor:
    """Return the largest logit and its token, the first of equals, `[N, 2]`; the PE's tokens begin with `first`."""
    value = logits.amax(-1, keepdim=True)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    # NaN is the largest of no row: a row of NaN gets the last token, and the comparison of logits reports it.
    token = torch.where(logits == value, tokens, logits.shape[1] - 1).amin(-1, keepdim=True)
    return torch.cat([value, (token + first).to(value.dtype)], dim=-1)


def _best_of_all(candidates: torch.Tensor) -> torch.Tensor:
    """Return the token of the largest logit among the PEs' candidates `[W, N, 2]`, the first of equals, `[N]`."""
    values, tokens = candidates.unbind(-1)
    is_best = values == values.amax(0, keepdim=True)
    return torch.where(is_best, tokens, tokens.amax(0, keepdim=True)).amin(0).to(torch.int64)


class Kernels:
    """The functions above with one model's constants.

    Args:
        config: of the model.
        is_compiled: whether torch.compile makes few kernels of them; for shapes that stay the same, and one row of each
            sequence.
    """

    def __init__(self, config: ModelConfig, *, is_compiled: bool) -> None:
        # On a GPU that can, each kernel lets the next one start early, and starts before the previous one has ended.
        options = {"triton.enable_pdl": True}

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True, options=options) if is_compiled else function

        self._is_compiled = is_compiled
        self.eps = config.norm_eps
        self._group = config.group
        self._scale = config.head_dim**-0.5
        self._norm, self._add_norm = made(_rms_norm), made(_add_rms_norm)
        # Two functions: within one, torch.compile lets a kernel read what was stored in place before it waits for it.
        self._store, self._attend_step = made(_store), made(_attend_step)
        self.swiglu = made(_swiglu)
        self.best, self.best_of_all = made(_best), made(_best_of_all)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm of the rows of x."""
        return self._norm(x, weight, self.eps)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return residual + x, and its RMSNorm."""
        return self._add_norm(residual, x, weight, self.eps)

    def attend(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Store keys and values, and attend to all up to each row's position.

        Args:
            qkv: `[N*T, (G+2)*H*D]`: queries, keys, values of this PE's H key heads, T rows of each of N sequences.
            cache: `[2, N, H, L, D]`; written at the positions.
            positions: `[T]`, the same in every sequence.
            slots: 0 .. L-1.
            rope: cosines and sines.

        Returns:
            `[N*T, G*H*D]`.
        """
        query = self._store(qkv, cache, positions, *rope, self._group)
        if self._is_compiled:
            return self._attend_step(query, cache, positions, slots, self._scale)
        keys, values = cache.unbind(0)
        weights = _attention_weights(torch.matmul(query, keys.transpose(2, 3)), positions, slots, self._scale)
        mixed = torch.matmul(weights, values)  # [N, H, G*T, D]
        by_row = mixed.unflatten(2, (self._group, -1)).permute(0, 3, 1, 2, 4)  # [N, T, H, G, D]
        return by_row.reshape(qkv.shape[0], -1)
