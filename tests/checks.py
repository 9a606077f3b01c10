"""Comparisons of results on the device. The host looks at many of them at once.

Where worlds take turns on GPUs, a host that waits for its PE's turn also waits for the turns of all other worlds.
"""

from __future__ import annotations

import torch
from bits import bits, difference

__all__ = ["TURNS_PER_LOOK", "Checks"]

TURNS_PER_LOOK = 20


class Checks:
    """Comparisons that run on the device in stream order. The host looks at them once in several turns."""

    def __init__(self) -> None:
        self._counts: list[tuple[str, torch.Tensor]] = []
        self._problems: list[str] = []

    def compare(self, what: str, found: torch.Tensor, want: torch.Tensor) -> None:
        """Compare the bits of two tensors on one device, on the current stream. `what` begins the message."""
        if (found.shape, found.dtype, found.device) != (want.shape, want.dtype, want.device):
            self.tell(what, difference(found, want))
        else:
            self._counts.append((what, (bits(found.contiguous()) != bits(want.contiguous())).sum()))

    def tell(self, what: str, problem: str | None) -> None:
        """Add a problem that was found by other means, or None."""
        if problem is not None:
            self._problems.append(f"{what}: {problem}")

    def look(self, turn: int | None = None) -> list[str]:
        """Wait for the comparisons and return what was wrong. `turn`: wait only at some turns, or after a problem."""
        if turn is not None and turn % TURNS_PER_LOOK and not self._problems:
            return []
        counts = torch.stack([count for _, count in self._counts]).tolist() if self._counts else []
        found = [f"{what}: {n} elements differ" for (what, _), n in zip(self._counts, counts, strict=True) if n]
        problems = self._problems + found
        self._counts, self._problems = [], []
        return problems
