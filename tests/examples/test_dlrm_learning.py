"""What the DLRM training learns: exactly what one process does, in whole numbers; by default nearly all there is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from dlrm.batches import Batches
from dlrm.data import open_data
from dlrm.embedding import PlainEmbedding
from dlrm.options import MODELS, Options
from dlrm.summary import problems
from dlrm.training import Plan, Training
from dlrm.way import make_collection
from dlrm.workload import run_pe
from kept_pes import in_processes
from test_dlrm_train import options_of
from worlds import world_of

import persistent_ops as po

pytestmark = pytest.mark.host


class _Linear(torch.nn.Module):
    """Stands for the dense part, with products and sums of whole numbers, or of these over a power of 2.

    Args:
        sizes: of the dense part.
    """

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return pooled @ (torch.arange(pooled.shape[1]) % 5 - 2).float() + self.bias


def _whole_numbers(options: Options, alone: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with SGD, gradients and rows of few digits; return the losses, and this PE's tables."""
    data = open_data(options)
    rows, dim = data.train.num_rows, options.preset.dim
    drawn = [torch.randint(-1000, 1000, (each, dim), generator=torch.Generator().manual_seed(each)) for each in rows]
    state = {f"embedding_bags.t{number}.weight": each / 1024 for number, each in enumerate(drawn)}
    model, losses = _Linear(options.sizes(len(rows), data.train.num_dense)), torch.nn.functional
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    shared = {"batch_size": options.batch, "seed": options.seed}
    with pytest.MonkeyPatch.context() as patch:
        # Of which the gradient is -1 or 1.
        patch.setattr(
            losses, "binary_cross_entropy_with_logits", lambda logits, labels, **_: ((1 - 2 * labels) * logits).sum()
        )
        if alone:
            tables: Any = PlainEmbedding(rows, (dim,) * len(rows), sgd)
            with torch.no_grad():
                for table, first in zip(tables.tables.values(), state.values(), strict=True):
                    table.copy_(first)
            found = Training(model, tables, sgd(model.parameters()), Batches(data.train, **shared)).run(Plan()).losses
            return found, dict(zip(state, (table.detach() for table in tables.tables.values()), strict=True))
        with world_of("host", "gloo"):
            tables = make_collection(options, data)
            tables.load_state_dict(state)
            batches = Batches(data.train, rank=po.rank(), world_size=po.world_size(), **shared)
            found = Training(model, tables, sgd(model.parameters()), batches).run(Plan()).losses
            own = {name: shards.shards for name, shards in tables.state_dict().items()}
            return found, {name: shards[0][1].clone() for name, shards in own.items() if shards}


def test_whole_numbers_are_exact(tmp_path: Path) -> None:
    """With SGD, and gradients of whole numbers, losses and tables are those of embedding_bag and torch.optim."""
    rates = {"learning_rate": 0.5, "table_learning_rate": 0.5, "optimizer": "sgd", "replicated_rows": 20}
    options = options_of(tmp_path, batch=64, samples=640, **rates)
    losses, tables = _whole_numbers(options, True)
    assert len(set(losses)) == 10
    for own_losses, own_tables in in_processes(_whole_numbers, 2, options, False, timeout=200):
        assert own_losses == losses and own_tables
        for name, table in own_tables.items():
            assert torch.equal(table, tables[name]), name


def test_the_default_training_comes_within_a_hundredth_of_the_best_auc(tmp_path: Path) -> None:
    options = Options(**{**MODELS["small"].defaults, "output": str(tmp_path), "backend": "host", "evaluate_every": 0})
    report = in_processes(run_pe, 2, options, timeout=280)[0]
    assert not problems(report)
    (evaluation,) = report["evaluations"]
    assert report["best_auc"] - 0.01 < evaluation["auc"] < report["best_auc"] + 0.003, (
        "none knows more than the teacher"
    )
