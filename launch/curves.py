"""Curves of a training's losses. The trainings of this folder share this module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from persistent_ops.testing.figures import why_none

__all__ = ["draw_if_possible", "draw_losses", "recent"]


def recent(losses: list[float]) -> float:
    """Return the mean of the last losses, which a report gives as the loss at the end."""
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)


def draw_losses(axes: Any, losses: list[float]) -> None:
    """Draw the loss of each step, and means over some steps."""
    span = max(1, len(losses) // 50)
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.4, label="loss of each step")
    ends = range(span, len(losses) + 1)
    means = [sum(losses[end - span : end]) / span for end in ends]
    axes.plot([end - (span - 1) / 2 for end in ends], means, linewidth=1.8, label=f"mean of {span} steps")


def draw_if_possible(what: str, draw: Callable[[], object]) -> None:
    """Draw, or say in one line why not: the training before it may have taken hours."""
    try:
        draw()
    except Exception as error:
        print(f"no {what}: {why_none(error)}", file=sys.stderr)
