"""The click logs for a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from persistent_ops.testing.dlrm_batch import DLRM_ROWS

from .click_log import ClickLog
from .criteo_text import CriteoText
from .mlperf_numpy import numpy_days
from .options import Options
from .raw import RawFile
from .records import Source, Span

__all__ = ["Data", "check_data", "open_data"]

_MAPPED_BLOCK = 64  # samples of a mapped file that stay together when the order is drawn: one read brings them


@dataclass(frozen=True)
class Data:
    """The training data and the evaluation data.

    Attributes:
        name: for people.
        train, evaluation: samples.
        shuffle_block: of `Batches`.
        log: the synthetic log, whose best AUC is known; None for files.
    """

    name: str
    train: Source
    evaluation: Source
    shuffle_block: int = 1
    log: ClickLog | None = None

    def best_auc(self) -> float | None:
        """Return the AUC of the probabilities that labels were drawn with, over the evaluation data; None for files."""
        if self.log is None:
            return None
        return self.log.best_auroc(self.train.num_samples, self.evaluation.num_samples)


def open_data(options: Options) -> Data:
    """Open the data that the options name.

    Raises:
        ValueError: it cannot be read, is malformed, or has too few samples.
    """
    num_rows = [min(rows, options.max_rows) for rows in DLRM_ROWS]
    try:
        if options.format == "npy":
            train, validation, _ = numpy_days(_path(options), options.days, num_rows=num_rows)
            return Data(str(options.data), train, validation, _MAPPED_BLOCK)
        if options.format == "raw":
            return _of_file(options, RawFile(_path(options), num_rows=num_rows), _MAPPED_BLOCK)
        if options.format == "criteo":
            return _of_file(options, CriteoText(_path(options), num_rows=num_rows), 1)
    except OSError as error:
        raise ValueError(f"data: {error}") from error
    return _synthetic(options)


def check_data(options: Options) -> None:
    """Make the quick checks before PEs start, so that there is one error and not one per PE.

    Raises:
        ValueError: see `open_data`.
    """
    if options.format != "criteo":
        open_data(options)
    elif not _path(options).is_file():
        raise ValueError(f"data: expected a file, got {options.data!r}")


def _path(options: Options) -> Path:
    assert options.data is not None
    return Path(options.data)


def _of_file(options: Options, source: Source, shuffle_block: int) -> Data:
    """Divide a file: its last samples evaluate."""
    num_train = source.num_samples - options.evaluation_samples
    if num_train < 1:
        raise ValueError(
            f"data: {options.data} has {source.num_samples} samples, and the last {options.evaluation_samples} would "
            "evaluate; pass a smaller --evaluation-samples"
        )
    parts = (Span(source, 0, num_train), Span(source, num_train, options.evaluation_samples))
    return Data(str(options.data), *parts, shuffle_block)


def _synthetic(options: Options) -> Data:
    preset = options.preset
    rows: Sequence[int] = [min(rows, options.max_rows) for rows in preset.num_rows]
    num_samples = options.samples + options.evaluation_samples
    log = ClickLog(num_samples, num_rows=rows, hotness=preset.hotness, seed=options.seed)
    parts = (Span(log, 0, options.samples), Span(log, options.samples, options.evaluation_samples))
    return Data("the synthetic click log", *parts, log=log)
