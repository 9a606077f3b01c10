"""What a training leaves to see: curves of loss and AUC as a PNG."""

from __future__ import annotations

import sys
from pathlib import Path

from persistent_ops.testing.figures import pyplot, why_none

from .training import History

__all__ = ["draw", "draw_if_possible"]


def draw_if_possible(history: History, path: Path, *, title: str, best_auc: float | None = None) -> bool:
    """Draw the curves, or say in one line why not: the training behind it may have taken hours.

    Args: see `draw`.

    Returns:
        Whether there is a figure.
    """
    try:
        draw(history, path, title=title, best_auc=best_auc)
    except Exception as error:
        print(f"no curves: {why_none(error)}", file=sys.stderr)
        return False
    return True


def draw(history: History, path: Path, *, title: str, best_auc: float | None = None) -> None:
    """Draw the losses and the AUC of the evaluations into a PNG file.

    Args:
        history: of the training.
        path: of the file.
        title: of the figure.
        best_auc: the best possible AUC, where it is known; a dashed line.

    Raises:
        ImportError: matplotlib is missing (the extra "plot").
    """
    plot = pyplot()
    figure, (left, right) = plot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    losses = history.losses
    span = max(1, len(losses) // 50)
    left.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.4, label="loss of each step")
    ends = range(span, len(losses) + 1)
    means = [sum(losses[end - span : end]) / span for end in ends]
    left.plot([end - (span - 1) / 2 for end in ends], means, linewidth=1.8, label=f"mean of {span} steps")
    steps = [each["step"] for each in history.evaluations]
    if steps:
        left.plot(steps, [each["loss"] for each in history.evaluations], "o-", markersize=4, label="evaluation")
        right.plot(steps, [each["auc"] for each in history.evaluations], "o-", markersize=4, label="evaluation")
    if best_auc is not None:
        right.axhline(best_auc, color="grey", linestyle="--", label=f"best possible, {best_auc:.4f}")
    left.set(xlabel="step", ylabel="binary cross-entropy")
    right.set(xlabel="step", ylabel="AUC", xlim=(0, max(len(losses), 1)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plot.close(figure)
