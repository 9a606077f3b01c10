"""Inputs and results of an embedding collection, in TorchRec's forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Features", "KeyedEmbeddings", "features_of"]


class Features(NamedTuple):
    """Lookups of this PE's samples.

    Attributes:
        values: `[n]`, feature by feature, in a feature sample by sample.
        lengths: `[F * B]`, of the bags.
        weights: `[n]` or None.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


def features_of(jagged: Any, names: Sequence[str], *, is_weighted: bool) -> Features:
    """Return the lookups of a KeyedJaggedTensor, with its features in the order of `names`; with weights if they count.

    Raises:
        TypeError: it is none.
        ValueError: it lacks a feature.
        NotImplementedError: its features have batches of different sizes; or they come in another order, and putting
            them in order takes its weights' gradient away.
    """
    needed = ("keys", "values", "lengths", "weights_or_none")
    if not all(callable(getattr(jagged, name, None)) for name in needed):
        raise TypeError(
            f"features: expected a KeyedJaggedTensor, or values and lengths, got {type(jagged).__name__} alone"
        )
    is_variable = getattr(jagged, "variable_stride_per_key", lambda: False)()
    inverse = getattr(jagged, "inverse_indices_or_none", lambda: None)()
    if is_variable or inverse is not None:
        raise NotImplementedError(
            "features: variable batch per feature (VBE: a KeyedJaggedTensor with stride_per_key_per_rank or "
            "inverse_indices) is not supported; repeat the samples so that every feature has the same batch"
        )
    keys = list(jagged.keys())
    missing = [name for name in names if name not in keys]
    if missing:
        raise ValueError(f"features: expected {list(names)}, the KeyedJaggedTensor lacks {missing}")
    weights = jagged.weights_or_none() if is_weighted else None
    if keys != list(names):
        jagged = jagged.permute([keys.index(name) for name in names])
        given, weights = weights, jagged.weights_or_none() if is_weighted else None
        is_lost = weights is not None and not weights.requires_grad
        if is_lost and given is not None and given.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"features: weights require a gradient, but {type(jagged).__name__}.permute drops it; pass features "
                f"in the order {list(names)}"
            )
    return Features(jagged.values(), jagged.lengths(), weights)


class KeyedEmbeddings:
    """Pooled embeddings by feature name: the part of TorchRec's KeyedTensor that models use.

    Args:
        keys: names, in the order of columns.
        length_per_key: number of columns of each name.
        values: `[B, sum of length_per_key]`.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """Return the names."""
        return self._keys

    def values(self) -> torch.Tensor:
        """Return all columns."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the number of columns of each name."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return the first column of each name, and the number of all."""
        return [0, *itertools.accumulate(self._lengths)]

    def key_dim(self) -> int:
        """Return the dimension that the names divide."""
        return 1

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the columns of each name, as views."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the columns of a name, as a view."""
        number = self._keys.index(key)
        return self._values.narrow(1, sum(self._lengths[:number]), self._lengths[number])
