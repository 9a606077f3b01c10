"""Embedding collections over the PEs: results and updated tables against one process with embedding_bag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sharded_embedding_cases import CASES, Case, Reference, batch_of, gradient_of, samples_of
from worlds import in_world

import persistent_ops as po
from persistent_ops.nn import TablePlacement

_STEPS = 6


def _run(module: Any, case: Case, step: int, *, knows_split: bool = False) -> torch.Tensor:
    batch = batch_of(case, po.rank(), step)
    weights = None if batch.weights is None else batch.weights.to(po.device())
    split = [samples_of(pe, step) for pe in range(po.world_size())] if knows_split else None
    result: torch.Tensor = module(
        batch.values.to(po.device()),
        batch.lengths.to(po.device()),
        per_sample_weights=weights,
        batch_per_rank=split,
    )
    return result


def _difference(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, what: str) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what}: {list(found.shape)}, not {list(wanted.shape)}"]
    if not wanted.numel():
        return []
    tolerance = 2e-5 if dtype == torch.float32 else 2.0**-6
    error = float(((found.cpu().float() - wanted).abs() / (1 + wanted.abs())).max())
    return [] if error <= tolerance else [f"{what}: off by {error}"]


def _problems_of_tables(module: Any, reference: Reference, case: Case) -> list[str]:
    """Compare what this PE has of each table."""
    problems = []
    for table in case.tables:
        shards = module.state_dict()[f"embedding_bags.{table.name}.weight"]
        assert shards.shape == (table.num_embeddings, table.embedding_dim)
        whole = reference.tables[table.name].detach()
        for (row, column), block in shards.shards:
            wanted = whole[row : row + block.shape[0], column : column + block.shape[1]]
            problems += _difference(block, wanted, table.data_type, f"table {table.name}")
    return problems


def _trained(name: str) -> list[str]:
    """Train some steps; return what differs from one process."""
    case = next(case for case in CASES if case.name == name)
    if case.name == "on the last":
        last = TablePlacement(ranks=(po.world_size() - 1,))
        case = replace(case, placement=dict.fromkeys("abcd", last))
    module, reference = case.make(gradient_scale=1.0), Reference(case)
    problems = _problems_of_tables(module, reference, case)
    for step in range(_STEPS):
        module.optimizer.zero_grad()
        result = _run(module, case, step, knows_split=step % 2 == 0)
        wanted = reference.forward(batch_of(case, po.rank(), step)).detach()
        is_rounded = "wire_dtype" in case.options or any(table.data_type != torch.float32 for table in case.tables)
        dtype = torch.bfloat16 if is_rounded else torch.float32
        if "wire_dtype" in case.options and result.dtype != case.options["wire_dtype"]:
            problems.append(f"result of step {step}: of {result.dtype}")
        problems += _difference(result.detach(), wanted, dtype, f"result of step {step}")
        result.backward(gradient_of(case, po.rank(), step).to(po.device()))
        module.optimizer.step()
        reference.step(po.world_size(), step)
    po.check()
    return problems + _problems_of_tables(module, reference, case)


@pytest.mark.parametrize("name", [case.name for case in CASES])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_is_that_of_one_process(backend: str, world: int, name: str) -> None:
    assert in_world(_trained, world, backend, name) == [[]] * world


def _kept() -> list[Any]:
    """Two forward passes ahead of their backward passes; a third one takes the first one's room."""
    case = next(case for case in CASES if case.name == "mixed")
    module = case.make()
    first, second = (_run(module, case, step, knows_split=True) for step in (2, 3))
    first.backward(gradient_of(case, po.rank(), 2))
    second.backward(gradient_of(case, po.rank(), 3))
    left = len(module._kept)
    results = [_run(module, case, step, knows_split=True) for step in (2, 3, 4)]
    before = {name: shards.clone() for name, shards in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="released"):
        results[0].backward(gradient_of(case, po.rank(), 2))
    same = all(
        torch.equal(a, b)
        for name, shards in module.state_dict().items()
        for (_, a), (_, b) in zip(shards.shards, before[name].shards, strict=True)
    )
    for step in (4, 3):
        results[step - 2].backward(gradient_of(case, po.rank(), step))
    with torch.no_grad():
        for step in (2, 3, 4):
            _run(module, case, step, knows_split=True)
    po.check()
    return [left, same, len(module._kept)]


def test_lookups_are_kept_until_the_backward_pass() -> None:
    assert in_world(_kept, 2, "host") == [[0, True, 0]] * 2
