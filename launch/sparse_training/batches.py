"""Batches as a function of seed and step. The global batch does not depend on the number of PEs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from persistent_ops.nn import balanced_splits

from .options import Options
from .text import Corpus

__all__ = ["Batch", "Batches"]

_POWER = 0.75  # of a word's frequency, by which negatives are drawn


@dataclass(frozen=True)
class Batch:
    """Some words to predict.

    Attributes:
        contexts: `[n, 2 * window]`, the words around each.
        words: `[n, 1 + negatives]`, the word itself, then those drawn against it.
    """

    contexts: torch.Tensor
    words: torch.Tensor


class Batches:
    """The batches of a training.

    Every word of the text is predicted once per epoch, in a new random order for each epoch.

    Args:
        corpus: the text.
        options: of the training.
        device: of the batches.
    """

    def __init__(self, corpus: Corpus, options: Options, device: torch.device) -> None:
        self._stream = corpus.stream
        self._options = options
        self._device = device
        window = options.window
        self.num_targets = len(corpus.stream) - 2 * window
        self._offsets = torch.tensor([*range(window), *range(window + 1, 2 * window + 1)])
        shares = corpus.counts.double() ** _POWER
        self._cumulative = shares.cumsum(0) / shares.sum()
        self._order: tuple[int, torch.Tensor] | None = None

    def share(self, step: int, rank: int, world_size: int) -> Batch:
        """Return a PE's part of a step's batch; shares of PEs differ by at most one word."""
        splits = balanced_splits(self._options.batch, world_size)
        first = sum(splits[:rank])
        own = slice(first, first + splits[rank])
        places = self._places(step)[own]
        generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + step)
        draws = torch.rand((self._options.batch, self._options.negatives), generator=generator, dtype=torch.float64)
        # Rounding may leave the last sum below a draw.
        negatives = torch.searchsorted(self._cumulative, draws[own], right=True).clamp_(max=len(self._cumulative) - 1)
        contexts = self._stream[places[:, None] + self._offsets]
        targets = self._stream[places + self._options.window]
        words = torch.cat([targets[:, None], negatives], dim=1)
        return Batch(contexts.to(self._device), words.to(self._device))

    def _places(self, step: int) -> torch.Tensor:
        """Return where the windows of a step's batch begin."""
        numbers = torch.arange(step * self._options.batch, (step + 1) * self._options.batch)
        epochs = numbers // self.num_targets
        places = torch.empty_like(numbers)
        for epoch in epochs.unique().tolist():
            places[epochs == epoch] = self._epoch(epoch)[numbers[epochs == epoch] % self.num_targets]
        return places

    def _epoch(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 - 1 - epoch)
            self._order = (epoch, torch.randperm(self.num_targets, generator=generator))
        return self._order[1]
