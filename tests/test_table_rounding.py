"""Stochastic rounding of embedding collections: exact bits, in any world, of slices and replicas, and resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from embedding_backward_cases import random_halves, round_stochastically
from sharded_embedding_cases import Case, Reference, batch_of, gradient_of, samples_of
from worlds import in_world

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement
from persistent_ops.nn.table_rounding import rounding_seed

_SEED = 3
_CASE = Case(
    "rounded",
    [
        TableConfig("a", 30, 16, ["x", "y"], data_type=torch.bfloat16),
        TableConfig("b", 9, 8, ["z"], data_type=torch.float16),
        TableConfig("c", 7, 8, ["x"], data_type=torch.bfloat16),
        TableConfig("d", 20, 8, ["y"], data_type=torch.bfloat16),
        TableConfig("e", 6, 8, ["w"]),
    ],
    {"a": TablePlacement("column_wise", 2), "c": "replicated", "d": "replicated"},
    options={"rounding": "stochastic", "seed": _SEED, "gradient_scale": 1.0},
)
# Of tables of 16 bits: what each part of the columns is drawn as, and the number of the first row there.
_DRAWN: dict[str, list[tuple[tuple[str | int, ...], int]]] = {
    "a": [(("a", 0), 0), (("a", 1), 0)],
    "b": [(("b", 0), 0)],
    "c": [(("c", "d"), 0)],
    "d": [(("c", "d"), 7)],
}


class _Rounded(Reference):
    """With SGD and whole-numbered gradients, where nothing but a row's rounding rounds."""

    def step(self, world: int, step: int, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for rank in range(world):
            self.forward(batch_of(_CASE, rank, step)).backward(gradient_of(_CASE, rank, step) * scale)
        self.optimizer.step()
        for config in _CASE.tables:
            for part, (drawn, first) in enumerate(_DRAWN.get(config.name, [])):
                width = config.embedding_dim // len(_DRAWN[config.name])
                values = self.tables[config.name].detach()[:, part * width : (part + 1) * width]
                rows = torch.arange(first, first + config.num_embeddings)
                random = random_halves(rounding_seed(_SEED, drawn), step, rows, width)
                values.copy_(round_stochastically(values, random, config.data_type).float())


def _train(module: Any, step: int) -> None:
    batch = batch_of(_CASE, po.rank(), step)
    split = [samples_of(pe, step) for pe in range(po.world_size())] if step % 2 else None
    result = module(batch.values.to(po.device()), batch.lengths.to(po.device()), batch_per_rank=split)
    result.backward(gradient_of(_CASE, po.rank(), step).to(po.device()))


def _wrong(module: Any, reference: Reference) -> list[str]:
    """Return the tables of which this PE has other bits."""
    return [
        name
        for name, table in reference.tables.items()
        for (_, column), block in module.state_dict()[f"embedding_bags.{name}.weight"].shards
        if not torch.equal(block.cpu().float(), table.detach()[:, column : column + block.shape[1]])
    ]


def _trained(num_steps: int) -> list[list[str]]:
    """Train, with and without a split, and go on from a copy in memory in a collection of another seed."""
    module, reference = _CASE.make(), _Rounded(_CASE)
    wrong = []
    for step in range(num_steps):
        _train(module, step)
        reference.step(po.world_size(), step)
        wrong.append(_wrong(module, reference))
    tables, optimizer = copy.deepcopy((module.state_dict(), module.optimizer.state_dict()))
    following = _CASE.make(seed=99)
    following.load_state_dict(tables)
    following.optimizer.load_state_dict(optimizer)
    _train(following, num_steps)
    reference.step(po.world_size(), num_steps)
    return [*wrong, _wrong(following, reference), _wrong(module, reference)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bits_of_a_training_that_goes_on_elsewhere(backend: str, world: int) -> None:
    for told in in_world(_trained, world, backend, 3):
        *right, behind = told
        assert right == [[]] * 4
        assert behind  # it has not made the last step


def test_seeds() -> None:
    drawn = [("a", 0), ("a", 1), ("a", 11), ("a1", 1), ("b", 0), ("a", "b"), ("a",), ("ab",)]
    seeds = {rounding_seed(seed, each) for seed in (0, 1, 10, -1) for each in drawn}
    assert len(seeds) == 4 * len(drawn) and all(0 <= each < 1 << 63 for each in seeds)
    assert max(seeds) > 1 << 61
