"""Errors that the package keeps and raises hold no references to objects of the caller."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from worlds import in_world

import persistent_ops as po
from persistent_ops.runtime.errors import to_raise


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _outlives(call: Callable[[], object], error: type[Exception]) -> bool:
    """Return whether a caller's objects still exist after the error that the caller received is gone."""

    def attempt() -> weakref.ref[torch.Tensor]:
        tensor = torch.empty(1)
        with pytest.raises(error):
            call()
        return weakref.ref(tensor)

    with _no_collector():
        return attempt()() is not None


def _bad_row() -> torch.Tensor:
    rows = torch.tensor([[3, 40]])
    return torch.sparse_coo_tensor(rows, torch.ones(2, 4), (40, 4), check_invariants=False)


def _with_buffers() -> Callable[[], None]:
    rows, values = torch.tensor([3, 40]), torch.ones(2, 4)
    taken = {"completion_fn": lambda *given: None, "coalesce": "disable", "async_op": True}
    work = po.sparse_all_reduce_buffers(rows, values, num_rows=40, **taken)  # type: ignore[arg-type]
    assert work is not None
    return work.wait


def _bad_inputs() -> list[str]:
    table, offsets = torch.ones(5, 8), torch.tensor([0, 1])
    collection = po.nn.ShardedEmbeddingBagCollection([("table", 5, 8, ["feature"])], max_batch=4)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("embedding_all_to_all", lambda: po.embedding_all_to_all([table], torch.tensor([7]), offsets)),
        ("a module", lambda: collection(torch.tensor([7]), torch.tensor([1]))),
        ("sparse_all_reduce", lambda: po.sparse_all_reduce(_bad_row())),
    ]
    kept = [name for name, call in calls if _outlives(call, IndexError)]
    for make in (lambda: po.sparse_all_reduce(_bad_row(), async_op=True).wait, _with_buffers):
        wait = make()
        kept += [f"wait {number} of {make}" for number in range(2) if _outlives(wait, IndexError)]
    return kept


def test_an_error_of_bad_input_holds_nothing_of_its_callers() -> None:
    assert in_world(_bad_inputs, 1, "host") == [[]]


def _time_outs() -> list[bool]:
    world = po.runtime.world.current()
    world.workspace._failure = po.PeerTimeoutError("PE 1")
    found = [_outlives(po.check, po.PeerTimeoutError) for _ in range(2)]
    world.workspace._failure = None
    return found


def test_neither_does_one_of_a_launch_that_was_given_up() -> None:
    assert in_world(_time_outs, 1, "host") == [[False, False]]


def _waits_behind_a_recovery() -> list[bool]:
    given = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1, 4), (40, 4), check_invariants=False)
    work = po.sparse_all_reduce(given, async_op=True)
    po.recover()

    def wait() -> None:
        try:
            raise KeyError("what its caller is at")
        except KeyError:
            work.wait()

    return [_outlives(wait, po.PeerTimeoutError) for _ in range(2)]


def test_neither_does_one_of_a_sum_that_is_not_there_any_more() -> None:
    assert in_world(_waits_behind_a_recovery, 1, "host") == [[False, False]]


def test_an_error_to_raise_says_all_that_was_kept() -> None:
    kept = po.CapacityError("12 rows", 3)
    kept.__cause__ = OSError("why")
    again = to_raise(kept)
    assert type(again) is po.CapacityError and again is not kept
    assert again.args == kept.args and again.__cause__ is kept.__cause__ and again.__traceback__ is None
    assert to_raise(ValueError()).__suppress_context__ is False and again.__suppress_context__
