"""The progress bar."""

from __future__ import annotations

import pytest

import persistent_ops as po
from persistent_ops.testing.progress import progress_bar


def test_a_bar_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        monkeypatch.setattr(po, "rank", lambda rank=rank: rank)
        with progress_bar("training", first_step=2, last_step=10) as show:
            show(7, 0.5)
        found = capsys.readouterr()
        assert not found.out and bool(found.err) == (rank == 0)
