"""Backward passes and optimizers: permitted uses (overlapping, resumed), and uses that are refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from bits import difference
from embedding_backward_cases import SMALL, Training, case_of, make_inputs
from embedding_cases import split_of
from worlds import error_of, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_kernel import Tiles
from persistent_ops.ops.embedding.backward_plan import rows_of


def _passes() -> list[Any]:
    """Forward A, forward B, backward A, backward B; then what is refused."""
    first, second = Training(case_of("sgd")), Training(case_of("adagrad"))
    passes = [first.backward(1), second.backward(2)]
    for backward in passes:
        backward()
    first.model.step(1, 0, 0.1)
    second.model.step(2, 0, 0.1)
    po.check()
    seen: list[Any] = [first.is_right(), second.is_right(), int(first.optimizer.step_count)]
    other = po.EmbeddingOptimizer([torch.ones(4, 8, device=po.device())])
    offsets = torch.arange(1, device=po.device())
    refused = error_of(
        lambda: po.embedding_all_to_all(first.tables, offsets[:0], offsets, batch_per_rank=[0] * 2, optimizer=other)
    )
    return [*seen, error_of(passes[0])[0], refused[0]]


def test_passes_may_overlap_and_come_once(backend: str) -> None:
    # torch itself refuses a second pass, unless the graph is retained.
    assert in_world(_passes, 2, backend) == [[True, True, 1, "RuntimeError", "ValueError"]] * 2


def _made_in_inference_mode() -> bool:
    training = Training(case_of("adam"))
    with torch.inference_mode():
        training.optimizer = po.EmbeddingOptimizer(training.tables, "adam", **dict(case_of("adam").options))
    training.begin()
    training.backward(1)()
    training.model.step(1, 0, 0.1)
    po.check()
    return training.is_right()


def test_an_optimizer_that_is_made_in_inference_mode_steps_outside_of_it(backend: str) -> None:
    assert in_world(_made_in_inference_mode, 2, backend) == [True, True]


def _retained() -> list[Any]:
    training = Training(case_of("sgd"))
    inputs = make_inputs(case_of("sgd"), po.rank(), 2, 0)
    arguments = (training.tables, inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
    split = split_of(SMALL, 2)
    result = po.embedding_all_to_all(*arguments, batch_per_rank=split, optimizer=training.optimizer)
    result.sum().backward(retain_graph=True)
    po.check()
    before = [table.clone() for table in training.tables]
    name, text, _ = error_of(lambda: result.sum().backward())
    po.check()
    return [name, "second backward" in text, all(map(torch.equal, before, training.tables))]


def test_a_second_backward_pass_is_refused(backend: str) -> None:
    assert in_world(_retained, 2, backend) == [["RuntimeError", True, True]] * 2


_NO_NORMS = (0.0, -1.0, float("nan"), float("inf"), 1e-19, 1e19)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "lamb"}, "optimizer"),
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas"),
        ({"optimizer": "rowwise_adagrad", "weight_decay_mode": "cowclip"}, "weight_decay_mode"),
        *(({"optimizer": "rowwise_adagrad", "max_norm": norm}, "expected a number from 1e-18") for norm in _NO_NORMS),
        ({"optimizer": "adam", "max_norm": 1.0}, "max_norm: 'rowwise_adagrad' alone has one, got 1.0 for 'adam'"),
        ({"optimizer": "gradient"}, "optimizer"),
        ({"rounding": "up"}, "rounding"),
        ({"rounding": "stochastic"}, "rounding"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"optimizer": "adam", "betas": (0.9, 0.99999999)}, "betas: expected numbers .* below 1, also in float32"),
    ],
)
def test_what_an_optimizer_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        po.EmbeddingOptimizer([torch.ones(2, 4)], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"betas": (0.9,)}, r"betas: expected two numbers, got \(0.9,\)"),
        ({"betas": 0.9}, "betas: expected two numbers, got 0.9"),
        ({"lr": "0.1"}, "lr: expected a number, got '0.1'"),
        ({"seed": 1.5}, "seed: expected a whole number, or one for each table, got 1.5"),
    ],
)
def test_what_no_option_of_an_optimizer_can_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        po.EmbeddingOptimizer([torch.ones(2, 4)], **options)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (torch.nn.EmbeddingBag(5, 4), "weights: expected a sequence of tensors, got EmbeddingBag"),
        (torch.ones(2, 4), "weights: expected a sequence of tensors, got Tensor"),
        ([{"params": []}], r"weights\[0\]: expected a tensor, got dict"),
    ],
)
def test_what_no_optimizer_can_have(tables: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        po.EmbeddingOptimizer(tables)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("step_count", -1, "step_count: expected a number of at least 0 and below 2^63, got -1"),
        ("step_count", 2**70, f"step_count: expected a number of at least 0 and below 2^63, got {2**70}"),
        ("step_count", 1.5, "step_count: expected a whole number, got 1.5"),
        (
            "gradient_scale",
            float("nan"),
            "gradient_scale: expected a number of at least 0 and below infinity, also in ",
        ),
        ("gradient_scale", "x", "gradient_scale: expected a number, got 'x'"),
        ("lr", -1.0, "lr: expected a number of at least 0"),
        ("lr", float("nan"), "lr: expected a number of at least 0"),
        ("seeds", 5, "seeds: expected a whole number for each table, got 5"),
        ("seeds", ["a"], "seed: expected whole numbers, got ['a']"),
        ("seeds", [1, 2], "seed: expected one for each of 1 tables, got 2"),
        ("lr", 10**400, "lr: expected a number of at least 0 and below infinity, also in float32, got 1000000"),
    ],
)
def test_what_steps_cannot_have(name: str, value: Any, text: str) -> None:
    optimizer = po.EmbeddingOptimizer([torch.ones(2, 4)], "adam", lr=0.5)
    optimizer.step_count, optimizer.gradient_scale = 3, 2.0  # type: ignore[assignment]
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        setattr(optimizer, name, value)
    assert [float(each) for each in (optimizer.step_count, optimizer.gradient_scale, optimizer.lr)] == [3, 2, 0.5]


def test_tables_that_overlap_are_refused() -> None:
    memory = torch.ones(6, 4)
    with pytest.raises(ValueError, match="overlap"):
        po.EmbeddingOptimizer([memory[:4], memory[2:]])
    po.EmbeddingOptimizer([memory[:3], memory[3:], memory[:3]])


_STOCHASTIC = dataclasses.replace(
    case_of("rowwise_adagrad", dataclasses.replace(SMALL, dtype=torch.bfloat16)),
    options=(("rounding", "stochastic"), ("seed", 11)),
)


def _resumed_stochastically() -> list[list[str | None]]:
    """Stop after two steps, and resume with an optimizer of other seeds: with the first one's seeds and without."""
    training = Training(_STOCHASTIC)
    for step in range(2):
        training.backward(step)()
        training.model.step(step, 0, 0.1)
    tables, optimizer = training.tables, training.optimizer
    before = [table.clone() for table in tables]
    states = [[state.clone() for state in optimizer.state(table)] for table in tables]
    training.model.step(2, 0, 0.1)
    found = []
    for is_restored in (True, False):
        training.tables = [table.clone() for table in before]
        training.optimizer = po.EmbeddingOptimizer(
            training.tables, "rowwise_adagrad", lr=0.1, rounding="stochastic", seed=5
        )
        for table, saved in zip(training.tables, states, strict=True):
            for state, old in zip(training.optimizer.state(table), saved, strict=True):
                state.copy_(old)
        training.optimizer.step_count = int(optimizer.step_count)
        if is_restored:
            training.optimizer.seeds = optimizer.seeds
        training.backward(2)()
        found.append([difference(*pair) for pair in zip(training.tables, training.model.tables, strict=True)])
    po.check()
    return found


def test_stochastic_rounding_is_resumed(backend: str) -> None:
    for restored, others in in_world(_resumed_stochastically, 2, backend):
        assert restored == [None, None] and None not in others


def _changed_in_place() -> list[Any]:
    training = Training(case_of("sgd"))
    inputs = make_inputs(case_of("sgd"), po.rank(), 2, 0)
    lookups = (inputs.indices.to(po.device()), inputs.offsets.to(po.device()))
    split, optimizer = split_of(SMALL, 2), training.optimizer
    po.embedding_all_to_all(
        training.tables, *lookups, batch_per_rank=split, optimizer=optimizer
    ).relu_().sum().backward()
    po.check()
    other_list = error_of(
        lambda: po.embedding_all_to_all(training.tables[::-1], *lookups, batch_per_rank=split, optimizer=optimizer)
    )
    factors = torch.ones(inputs.indices.shape, device=po.device(), requires_grad=True)
    results = [
        po.embedding_all_to_all(training.tables, *lookups, factors, batch_per_rank=split, optimizer=optimizer)
        for _ in range(2)
    ]
    results[0].sum().backward()
    return [other_list[0], error_of(lambda: results[1].sum().backward())[1]]


def test_results_in_place_other_lists_and_tables_that_have_changed(backend: str) -> None:
    for name, text in in_world(_changed_in_place, 2, backend):
        assert name == "ValueError" and "tables have changed" in text


@pytest.mark.parametrize("lanes", [None, 8, 16, 32])
def test_tiles_add_up_wide_rows_as_a_whole_warp_does(lanes: int | None) -> None:
    """Squares are added up in trees of 32 chunks. Where a lane has more chunks, a tile has as many as a whole warp."""
    for chunks in range(1, 1100):
        tiles = Tiles.of(16 * chunks, lanes)
        assert tiles.row_chunks % tiles.lanes == 0
        assert tiles.row_chunks >= (32 if tiles.has_wide_rows else chunks), (lanes, chunks, tiles)


_WIDER = torch.arange(5 * 40, dtype=torch.float32).view(5, 40)


@pytest.mark.parametrize(
    ("gradient", "is_copied"),
    [
        (_WIDER, False),
        (_WIDER[:, 8:24], False),
        (_WIDER[:1, 8:24].expand(5, 16), False),
        (_WIDER[:, 9:25], True),  # begins between multiples of 16 bytes
        (torch.ones(5, 41)[:, 8:24], True),  # so do most rows
        (torch.ones(16, 5).t(), True),
        (torch.ones(1, 1).expand(5, 16), True),
    ],
)
def test_a_gradient_is_read_where_it_is(gradient: torch.Tensor, is_copied: bool) -> None:
    """Also as columns of a larger tensor, which torch.cat returns. What kernels cannot read in place is copied."""
    found = rows_of(gradient)
    assert torch.equal(found, gradient)
    assert (found.data_ptr() != gradient.data_ptr()) == is_copied
