"""The picture of a training: curves of loss and AUC as a PNG."""

from __future__ import annotations

from pathlib import Path

from curves import draw_losses

from persistent_ops.testing.figures import pyplot

from .training import History

__all__ = ["draw"]


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
    draw_losses(left, history.losses)
    steps = [each["step"] for each in history.evaluations]
    if steps:
        left.plot(steps, [each["loss"] for each in history.evaluations], "o-", markersize=4, label="evaluation")
        right.plot(steps, [each["auc"] for each in history.evaluations], "o-", markersize=4, label="evaluation")
    if best_auc is not None:
        right.axhline(best_auc, color="grey", linestyle="--", label=f"best possible, {best_auc:.4f}")
    left.set(xlabel="step", ylabel="binary cross-entropy")
    right.set(xlabel="step", ylabel="AUC", xlim=(0, max(len(history.losses), 1)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plot.close(figure)
