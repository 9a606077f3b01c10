"""Continuous bag of words with negative sampling: two tables, both with sparse gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .batches import Batch

__all__ = ["WordVectors", "neighbors"]


class WordVectors(torch.nn.Module):
    """Predicts a word from the mean of the vectors around it (Mikolov et al., 2013).

    For a context with mean h, a word w and negatives v: ``-log sigmoid(h . w) - sum over v of log sigmoid(-h . v)``.

    Args:
        num_words: of the vocabulary.
        dim: of the vectors.
        seed: of the first vectors; vectors of predicted words begin at zero.
        device: of the tables.
    """

    def __init__(self, num_words: int, dim: int, *, seed: int, device: torch.device) -> None:
        super().__init__()
        self.context = torch.nn.EmbeddingBag(num_words, dim, mode="mean", sparse=True)
        self.predicted = torch.nn.Embedding(num_words, dim, sparse=True)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.context.weight.uniform_(-0.5 / dim, 0.5 / dim, generator=generator)
            self.predicted.weight.zero_()
        self.to(device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the batch's words."""
        hidden = self.context(batch.contexts)
        scores = torch.bmm(self.predicted(batch.words), hidden.unsqueeze(2)).squeeze(2)
        signs = torch.full_like(scores, -1.0)
        signs[:, 0] = 1.0
        return -F.logsigmoid(scores * signs).sum()


def neighbors(vectors: torch.Tensor, row: int, count: int) -> list[tuple[int, float]]:
    """Return the rows of a table that point most nearly where a given one does, with their cosines."""
    unit = F.normalize(vectors.float(), dim=1)
    cosines = unit @ unit[row]
    cosines[row] = -2.0
    found = cosines.topk(min(count, len(unit) - 1))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))
