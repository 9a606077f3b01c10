"""The options of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Options of the training; the command line has one for each.

    Attributes:
        text: a file or a folder; None for the sources of Python's standard library.
        max_bytes: of the text that are read.
        min_count: how often a word must occur to be learned.
        max_words: the most frequent words that are learned.
        keep: a word of a larger share of the text than this is left out now and then; 0 to leave out nothing.
        dim: length of a word's vector.
        window: words before and words after that predict a word.
        negatives: words drawn against each predicted one.
        batch: predicted words of a step, on all PEs together.
        steps: to train until; a resumed training continues up to it.
        learning_rate: of SparseAdam.
        seed: of vectors, order and drawn words.
        backend: "auto", "cuda" or "host".
        output: folder for the loss curve and the checkpoint.
        checkpoint_every: steps between checkpoints; there is one at the end in any case.
        is_resumed: go on from the checkpoint in `output`.
        check_steps: steps that one PE repeats alone, with the whole batch and without the operator; 0 for none.
        overlap_steps: steps of each of the three ways that are timed at the end; 0 for none.
        words: whose neighbors are printed.
        timeout: seconds that the PEs wait for each other.
        trace: file for a timeline of all launches, or None.
    """

    text: str | None = None
    max_bytes: int = 8 << 20
    min_count: int = 5
    max_words: int = 20_000
    keep: float = 1e-3
    dim: int = 64
    window: int = 4
    negatives: int = 5
    batch: int = 2048
    steps: int = 400
    learning_rate: float = 0.01
    seed: int = 0
    backend: str = "auto"
    output: str = "out/sparse_embedding_train"
    checkpoint_every: int = 100
    is_resumed: bool = False
    check_steps: int = 10
    overlap_steps: int = 8
    words: tuple[str, ...] = ("file", "integer", "thread", "bytes", "import")
    timeout: float = 60.0
    trace: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "min_count", "dim", "window", "negatives", "batch", "steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("keep", "check_steps", "overlap_steps"):
            if not getattr(self, name) >= 0:  # NaN is not either
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_words < 2:
            raise ValueError(f"max_words must be at least 2, got {self.max_words}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0 and below infinity, got {self.learning_rate}")
        if self.backend not in ("auto", "cuda", "host"):
            raise ValueError(f"backend must be one of auto, cuda, host, got {self.backend!r}")

    @property
    def checkpoint_path(self) -> Path:
        """Where the checkpoint is."""
        return Path(self.output) / "checkpoint.pt"

    @property
    def plot_path(self) -> Path:
        """Where the loss curve is."""
        return Path(self.output) / "loss.png"

    def identity(self) -> dict[str, Any]:
        """Return the choices that decide the losses besides the text: a checkpoint of others cannot be resumed."""
        names = ("dim", "window", "negatives", "batch", "learning_rate", "seed")
        return {name: getattr(self, name) for name in names}
