"""A progress bar on rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import persistent_ops as po

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(text: str, *, first_step: int = 0, last_step: int) -> Iterator[Callable[..., None]]:
    """Show a bar on rank 0; yields what is called with the number of steps so far and the last loss."""
    if po.rank() != 0:
        yield lambda step, loss=None: None
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=last_step, completed=first_step, note="")

        def show(step: int, loss: float | None = None) -> None:
            progress.update(task, completed=step, note="" if loss is None else f"loss {loss:.4f}")

        yield show
