"""The progress bar of the trainings in this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(rank: int, *, first_step: int, last_step: int) -> Iterator[Callable[[int, float], None]]:
    """Show a bar on rank 0; yields what is called with the number of steps so far and the last loss."""
    if rank != 0:
        yield lambda step, loss: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=last_step, completed=first_step, loss="")
        yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.4f}")
