"""The backward pass of embedding_all_to_all: the faults of every operator (protocol.py), and its own faults."""

from __future__ import annotations

import dataclasses
import re
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from embedding_backward_cases import SMALL, Training, case_of, make_inputs
from protocol import Mismatch, ProtocolSuite, Work
from worlds import error_of, gave_up, in_world

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import OPERATOR
from persistent_ops.ops.embedding.gradients import dense_gradients


class TestFaults(ProtocolSuite):
    operator = "embedding_backward"
    ways = ("sgd", "rowwise_adagrad")
    absences = (("sgd", "auto"), ("rowwise_adagrad", "staged"))
    mismatches: ClassVar = {
        "shape": Mismatch(lambda: _prepared().pop("shape")(), ["the number of samples of all PEs is ", "21 on PE 1"]),
        "dtype": Mismatch(lambda: _prepared().pop("dtype")(), ["the dtype of weights is ", "bfloat16 on PE 1"]),
        "wire_dtype": Mismatch(lambda: _prepared().pop("wire_dtype")(), ["wire_dtype is ", "bfloat16 on PE 1"]),
        "optimizer": Mismatch(lambda: _prepared().pop("optimizer")(), ["optimizer is ", "rowwise_adagrad on PE 1"]),
        "barrier": Mismatch(po.barrier, ["barrier()"]),
    }
    deaths = (("stopped", "sgd"), ("killed", "rowwise_adagrad"))
    names_the_dead = False

    @classmethod
    def work(cls, iteration: int, way: str) -> Work:
        return cls._work(Training(case_of(way)), iteration)

    @classmethod
    def next_work(cls, iteration: int, way: str) -> Work:
        """With the optimizer of earlier passes. A new one's PEs agree on the host, where a dead PE is noticed late."""
        prepared = _prepared()
        if way in prepared:
            prepared[way].begin()
        else:
            prepared[way] = Training(case_of(way))
        return cls._work(prepared[way], iteration)

    @staticmethod
    def _work(training: Training, iteration: int) -> Work:
        backward = training.backward(iteration)
        training.model.step(iteration, 0, 0.1)
        return Work(backward, training.is_right)

    @classmethod
    def warm_up(cls) -> None:
        super().warm_up()
        shape = dataclasses.replace(SMALL, batch=lambda world: 21)
        others = {
            "shape": case_of("sgd", shape),
            "dtype": case_of("sgd", dataclasses.replace(SMALL, dtype=torch.bfloat16)),
            "wire_dtype": case_of("sgd", dataclasses.replace(SMALL, wire=torch.bfloat16)),
            "optimizer": case_of("rowwise_adagrad"),
        }
        _prepared().update({kind: Training(case).backward(1) for kind, case in others.items()})
        _prepared()["meet"] = [Training(case_of("sgd")).backward(1) for _ in cls.mismatches]

    @classmethod
    def meet(cls) -> object:
        return _prepared()["meet"].pop()()

    def test_the_first_call_meets_something_else(self, backend: str) -> None:
        """In the exchange of the tables' widths, which sets nothing aside."""
        assert in_world(_first_backward, 3, backend) == [["ContractMismatchError", True, True, True]] * 3


def _first_backward() -> list[Any]:
    """PE 1 meets the others' first backward pass with a barrier; then all make one."""
    training = Training(case_of("sgd"), is_new=True)
    backward, later = training.backward(1), training.backward(2)
    name, text, seconds = error_of(lambda: [po.barrier() if po.rank() == 1 else backward(), po.check()])
    po.recover()
    later()
    training.model.step(2, 0, 0.1)
    po.check()
    return [name, "agreement on the columns" in text, seconds < 30.0, training.is_right()]


_of_worlds: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _prepared() -> dict[str, Any]:
    """Return what this PE's world has ready: backward passes whose forward pass is complete."""
    return _of_worlds.setdefault(po.runtime.world.current(), {})


def _half_updated(folder: Path) -> list[Any]:
    """PE 0 stays away from a backward pass. Tables that PE 1's launch may have changed are refused."""
    po.runtime.world.current().workspace.timeout = 4.0  # of kernels; on the host PEs may be late without limit
    training = Training(case_of("sgd"))
    backward, later = training.backward(1), training.backward(2)
    if po.rank() == 0:
        gave_up(folder, 1)
    name, text, _ = error_of(lambda: [backward(), po.check()])
    (folder / f"gave_up_{po.rank()}").touch()
    error_of(po.barrier)
    po.recover()
    again = error_of(later) if po.rank() == 1 else ("", "", 0.0)
    # From a checkpoint:
    for table, saved in zip(training.tables, make_inputs(case_of("sgd"), po.rank(), 2, 0).tables, strict=True):
        table.copy_(saved)
    training.optimizer.loaded(0)
    training.backward(3)()
    training.model.step(3, 0, 0.1)
    po.check()
    return [name, text, again[:2], training.is_right()]


def test_tables_that_may_be_half_updated_are_refused(backend: str, tmp_path: Path) -> None:
    late, (name, text, again, is_right) = in_world(_half_updated, 2, backend, tmp_path)
    assert name == "PeerTimeoutError" and is_right and late[3]
    launch, waited, _ = text.partition(" s for PE 0: ")
    assert re.match(
        r"In embedding_backward \(the backward pass of embedding_all_to_all\), forward pass \d+ "
        r"\(\d tables?, EmbeddingOptimizer \d+\), PE 1 waited ",
        launch,
    ), text
    assert waited and "po.recover()" in text and "NaN" not in text, text
    assert "may have left tables half updated" in text and "EmbeddingOptimizer.loaded(step_count)" in text, text
    # The late PE's error says who gave up, and in which of its own launches the PE learned of it.
    assert late[0] == "PeerTimeoutError" and "its launch of embedding_backward (" in late[1], late[1]
    assert "PE 1 gave up" in late[1] and "EmbeddingOptimizer.loaded(step_count)" in late[1], late[1]
    assert again[0] == "PersistentOpsError" and again[1].startswith("tables: "), again
    assert "load tables and states" in again[1] and "EmbeddingOptimizer.loaded(step_count)" in again[1], again


def _refused_by_all(has_tables: bool) -> list[Any]:
    """PE 0 does not know of a backward pass that PE 1 gives up, and may have no table at all."""
    device = po.device()
    tables = [torch.ones(4, 2, device=device)] if has_tables or po.rank() else []
    optimizer = po.EmbeddingOptimizer(tables, lr=1.0)
    lookups = torch.arange(2 * len(tables), device=device), torch.arange(2 * len(tables) + 1, device=device)
    dims = [2 * has_tables, 2]

    def forward() -> torch.Tensor:
        return po.embedding_all_to_all(
            tables, *lookups, dim_per_rank=dims, batch_per_rank=[1, 1], dtype=torch.float32, optimizer=optimizer
        )

    def evaluate() -> None:
        with torch.no_grad():
            forward()

    forward().sum().backward()
    po.check()
    given_up, later = forward(), forward()
    told = [error_of(lambda: [po.barrier() if po.rank() == 0 else given_up.sum().backward(), po.check()])[0]]
    po.recover()
    told += [":".join(error_of(call)[:2]) for call in (lambda: later.sum().backward(), forward, evaluate)]
    for table in tables:
        table.fill_(1.0)
    optimizer.loaded(1)
    forward().sum().backward()
    po.check()
    updated = [table.tolist() for table in tables]
    return [*told, updated == [[[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]] * len(tables)]


@pytest.mark.parametrize("has_tables", [True, False], ids=["both", "one_has_tables"])
def test_what_one_pe_refuses_is_refused_by_all(backend: str, has_tables: bool) -> None:
    for mismatch, *refusals, is_right in in_world(_refused_by_all, 2, backend, has_tables):
        assert mismatch == "ContractMismatchError" and is_right
        assert all(told.startswith("PersistentOpsError:tables: a launch that was given up may") for told in refusals)


def _sums_beside_leftovers() -> bool:
    """A given-up launch of all PEs leaves counts. A launch of this PE alone may come after it."""
    po.init("host", heap_size=32 << 20)
    world = po.runtime.world.current()
    table = torch.zeros(8, 4)
    optimizer = po.EmbeddingOptimizer([table])
    for samples in (100, 300):
        offsets = torch.arange(samples + 1) * 2
        rows = torch.arange(2 * samples) % 3
        pooled = po.embedding_all_to_all([table], rows, offsets, optimizer=optimizer)
        pooled.backward(torch.ones_like(pooled))
    po.check()
    gradient = torch.ones(samples, 4)
    expected = torch.zeros(8, 4).index_add(0, rows, gradient.repeat_interleave(2, dim=0))
    sums = []
    for leftover in (0, 7):
        world.workspace.zero_words(world.team, 1).fill_(leftover)
        sums.append(dense_gradients(gradient, [table], rows, offsets).sums[0])
    po.recover()  # clears the counts
    is_clear = not any(world.workspace.zero_words(team, 1).any() for team in (world.team, world.alone))
    po.finalize()
    return is_clear and all(torch.equal(found, expected) for found in sums)


def test_what_was_counted_in_vain_is_of_no_launch_of_this_pe_alone() -> None:
    assert po.launch(_sums_beside_leftovers, 2, threads=True, timeout=100) == [True, True]


def _plans_of_two_places() -> tuple[str, str]:
    """The staging grows. PE 0 launches with its earlier plan, as a CUDA graph does, PE 1 with its new plan."""
    po.init("host", heap_size=32 << 20)
    tables = [torch.zeros(4, 4)]
    optimizer = po.EmbeddingOptimizer(tables)

    def backward(samples: int) -> None:
        rows, offsets = torch.zeros(samples, dtype=torch.int64), torch.arange(samples + 1)
        pooled = po.embedding_all_to_all(tables, rows, offsets, optimizer=optimizer)
        pooled.backward(torch.ones_like(pooled))
        po.check()

    backward(4)
    plans = OPERATOR.state(po.runtime.world.current()).plans
    ((key, plan),) = plans.items()
    backward(64)
    if po.rank() == 0:
        plans[key] = plan
    name, text, _ = error_of(lambda: backward(4))
    po.recover()
    po.finalize()
    return name, text


def test_gradients_for_another_place_are_refused() -> None:
    for name, text in po.launch(_plans_of_two_places, 2, threads=True, timeout=100):
        assert name == "ContractMismatchError" and "staging_offset is" in text, text
