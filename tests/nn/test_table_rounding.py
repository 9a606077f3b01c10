"""Stochastic rounding of embedding collections: exact bits in any world, of slices and replicas, and resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from embedding_backward_cases import random_halves, round_stochastically
from sharded_embedding_cases import Case, Reference, batch_of, gradient_of, samples_of
from worlds import in_world

import persistent_ops as po
from persistent_ops.nn import TableConfig, TablePlacement, placement_costs
from persistent_ops.nn.placement_costs import Rates
from persistent_ops.nn.table_rounding import rounding_seed
from persistent_ops.runtime import world as po_world

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
    """With SGD and whole-numbered gradients, only the rounding of a row rounds."""

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
    """Train, with and without a split, and continue from a copy in memory in a collection of another seed."""
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


def _other_slices() -> list[str]:
    """Return what loading a state of other slices says: of a table that draws, one that does not, and float32."""
    trained = TableConfig("a", 30, 16, ["x"], data_type=torch.bfloat16), TableConfig("b", 9, 16, ["y"])
    told = []
    for rounding, there, here in (
        ("stochastic", {"a": 2}, {"a": 4}),
        ("stochastic", {}, {"a": 2}),
        ("stochastic", {"a": 2, "b": 2}, {"a": 2, "b": 4}),
        ("nearest", {"a": 2}, {"a": 4}),
    ):
        of_saved, loading = (
            Case(
                "slices",
                trained,
                {name: TablePlacement("column_wise", count) for name, count in counts.items()},
                options={"rounding": rounding},
            ).make()
            for counts in (there, here)
        )
        try:
            loading.optimizer.load_state_dict(of_saved.optimizer.state_dict())
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def test_another_number_of_slices_draws_other_bits(backend: str) -> None:
    for told in in_world(_other_slices, 2, backend):
        assert "a was trained in 2 column slices, and has 4: stochastic rounding draws" in told[0]
        assert "a was trained in 1 column slices, and has 2: stochastic rounding draws" in told[1]
        assert told[2:] == ["", ""]


def _chosen_by_costs(rounding: str) -> set[str]:
    rates = Rates(memory=1e6, link=1e6, launch=0.0)  # so that to cut pays
    placement_costs._MEASURED.state(po_world.current()).own = rates
    sizes = {"hot": (40_000, 200.0), "b": (4, 1.0), "c": (4, 1.0)}
    module = po.nn.ShardedEmbeddingBagCollection(
        [TableConfig(name, rows, 128, [name], data_type=torch.bfloat16) for name, (rows, _) in sizes.items()],
        max_batch=512,
        lookups_per_sample={name: lookups for name, (_, lookups) in sizes.items()},
        placement="auto",
        rounding=rounding,
    )
    return {placement.kind for placement in module.layout.placements}


def test_auto_keeps_tables_whole_that_draw(backend: str) -> None:
    assert in_world(_chosen_by_costs, 2, backend, "stochastic") == [{"table_wise"}] * 2
    assert in_world(_chosen_by_costs, 2, backend, "nearest") == [{"column_wise", "table_wise"}] * 2


def test_seeds() -> None:
    drawn = [("a", 0), ("a", 1), ("a", 11), ("a1", 1), ("b", 0), ("a", "b"), ("a",), ("ab",)]
    seeds = {rounding_seed(seed, each) for seed in (0, 1, 10, -1) for each in drawn}
    assert len(seeds) == 4 * len(drawn) and all(0 <= each < 1 << 63 for each in seeds)
    assert max(seeds) > 1 << 61
