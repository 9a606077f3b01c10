"""Embedding collections over the PEs: results and updated tables against one process with embedding_bag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from bits import difference
from kept_pes import in_processes
from sharded_embedding_cases import CASES, Case, Reference, batch_of, gradient_of, samples_of
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.nn import TablePlacement, pooled_lookups

_STEPS = 6


def _weights_of(case: Case, step: int) -> torch.Tensor | None:
    """Return this PE's weights, which require a gradient."""
    weights = batch_of(case, po.rank(), step).weights
    return None if weights is None else weights.to(po.device(), copy=True).requires_grad_()


def _run(
    module: Any, case: Case, step: int, weights: torch.Tensor | None = None, *, knows_split: bool = False
) -> torch.Tensor:
    batch = batch_of(case, po.rank(), step)
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
        weights = _weights_of(case, step)
        result = _run(module, case, step, weights, knows_split=step % 2 == 0)
        batch = batch_of(case, po.rank(), step)
        if batch.weights is not None:
            batch = replace(batch, weights=batch.weights.clone().requires_grad_())
        pooled = reference.forward(batch)
        wanted = pooled.detach()
        is_rounded = "wire_dtype" in case.options or any(table.data_type != torch.float32 for table in case.tables)
        dtype = torch.bfloat16 if is_rounded else torch.float32
        if "wire_dtype" in case.options and result.dtype != case.options["wire_dtype"]:
            problems.append(f"result of step {step}: of {result.dtype}")
        problems += _difference(result.detach(), wanted, dtype, f"result of step {step}")
        gradient = gradient_of(case, po.rank(), step)
        result.backward(gradient.to(po.device()))
        if weights is not None and batch.weights is not None:
            assert weights.grad is not None
            (of_weights,) = torch.autograd.grad(pooled, batch.weights, gradient)
            problems += _difference(weights.grad, of_weights, torch.float32, f"gradient of weights of step {step}")
        module.optimizer.step()
        reference.step(po.world_size(), step)
    po.check()
    return problems + _problems_of_tables(module, reference, case)


@pytest.mark.parametrize("name", [case.name for case in CASES])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_is_that_of_one_process(backend: str, world: int, name: str) -> None:
    assert in_world(_trained, world, backend, name) == [[]] * world


def _gradients_of_weights(name: str, knows_split: bool) -> list[torch.Tensor]:
    """Return this PE's gradients of weights in some steps, in which the tables stay as they are."""
    case = next(case for case in CASES if case.name == name)
    module, found = case.make(lr=0.0), []
    for step in range(_STEPS):
        weights = _weights_of(case, step)
        result = _run(module, case, step, weights, knows_split=knows_split)
        rng = torch.Generator().manual_seed(100 * step + po.rank())
        result.backward(torch.randn(result.shape, generator=rng).to(po.device()))
        assert weights is not None and weights.grad is not None
        found.append(weights.grad.cpu())
    po.check()
    return found


@pytest.mark.parametrize("name", ["weighted slices", "weighted, of two dtypes", "weighted slices beside replicas"])
def test_gradients_of_weights_have_the_same_bits_in_every_world(backend: str, name: str) -> None:
    wanted: dict[int, list[torch.Tensor]] = {}
    for world in (1, 2, 3, 4):
        for knows_split in (True, False):
            for rank, found in enumerate(in_world(_gradients_of_weights, world, backend, name, knows_split)):
                assert any(gradient.any() for gradient in found)
                for step, (one, other) in enumerate(zip(wanted.setdefault(rank, found), found, strict=True)):
                    assert difference(one, other) is None, f"world of {world}, PE {rank}, step {step}"


def _in_inference() -> list[Any]:
    """Weights that require a gradient where none is recorded, and a batch that is never differentiated."""
    case = next(case for case in CASES if case.name == "weighted slices beside replicas")
    module = case.make()
    with torch.no_grad():
        weights = _weights_of(case, 2)
        plain = _run(module, case, 2, weights, knows_split=True)
    with torch.inference_mode():
        inferred = _run(module, case, 2, batch_of(case, po.rank(), 2).weights.to(po.device()), knows_split=True)  # type: ignore[union-attr]
    first = _run(module, case, 2, weights, knows_split=True)
    second = _run(module, case, 2, weights, knows_split=True)
    second.sum().backward()
    assert weights is not None
    told = error_of(first.sum().backward)[:2]  # the tables have changed since
    po.check()
    return [plain.requires_grad, torch.equal(plain, inferred), weights.grad is not None, *told]


def test_weights_that_require_a_gradient_where_none_is_recorded() -> None:
    for requires, is_same, has_one, name, text in in_world(_in_inference, 2, "host"):
        assert not requires and is_same and has_one
        assert name == "RuntimeError" and "changed since the forward pass" in text, text


def _several_wait() -> list[Any]:
    """Four forward passes before their backward passes, and the same one by one; return where lookups were copied."""
    po.init("host", heap_size=64 << 20)
    case = next(case for case in CASES if case.name == "mixed")
    order, copies, tables = (5, 2, 4, 3), [], []
    with mock.patch.object(pooled_lookups, "_global_batch", wraps=pooled_lookups._global_batch) as copied:
        for is_ahead in (True, False):
            module = case.make()
            results = {step: _run(module, case, step) for step in range(2, 6)} if is_ahead else {}
            for step in order:
                result = results[step] if is_ahead else _run(module, case, step)
                result.backward(gradient_of(case, po.rank(), step))
            copies.append(copied.call_count / len(module.layout.groups))
            tables.append({name: shards.shards for name, shards in module.state_dict().items()})
            assert not module._kept
    po.check()
    same = all(
        torch.equal(a, b)
        for name, shards in tables[0].items()
        for (_, a), (_, b) in zip(shards, tables[1][name], strict=True)
    )
    po.finalize()
    return [copies, same]


@pytest.mark.host
def test_any_number_of_forward_passes_may_wait_where_the_host_does_not_know_the_split() -> None:
    """The first one's lookups are read where they arrived. The lookups of the next three are copied."""
    assert in_processes(_several_wait, 2, timeout=200) == [[[3.0, 3.0], True]] * 2


def _never_differentiated() -> list[Any]:
    """Forward passes that record a gradient without any backward pass; return how often lookups were copied."""
    po.init("host", heap_size=64 << 20)
    case = next(case for case in CASES if case.name == "mixed")
    module, waiting, copies = case.make(), [], []
    lengths = torch.ones(len(module.feature_names), dtype=torch.int64)
    with mock.patch.object(pooled_lookups, "_global_batch", wraps=pooled_lookups._global_batch) as copied:
        for way in ("dropped", "of bad lookups", "before a recovery"):
            copied.reset_mock()
            held = None
            if way == "of bad lookups":
                assert error_of(lambda: module(torch.full((len(lengths),), 1 << 20), lengths))[0] == "IndexError"
            else:
                held = _run(module, case, 2)
            waiting.append(len(module._kept))
            if way == "before a recovery":
                po.recover()
            else:
                held = None
            _run(module, case, 3).backward(gradient_of(case, po.rank(), 3))
            copies.append(copied.call_count)
            del held
    po.check()
    po.finalize()
    return [waiting, copies]


@pytest.mark.host
def test_forward_passes_that_are_never_differentiated_hold_nobody_up() -> None:
    assert in_processes(_never_differentiated, 2, timeout=200) == [[[1, 0, 1], [0, 0, 0]]] * 2
