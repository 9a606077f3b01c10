"""Repeated calls of `embedding_all_to_all` with equal arguments, for which the plan's key is found quickly."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from warm_python import Popen
from worlds import in_world, python_path

import persistent_ops as po
from persistent_ops.ops.embedding.plan import OPERATOR, EmbeddingKey, Tuning
from persistent_ops.runtime import world as worlds_of_package
from persistent_ops.runtime.bootstrap.launchers import LAUNCHER_VARIABLES

ROWS, WIDTH, BATCH = 9, 8, 6


@contextmanager
def _counted() -> Iterator[Any]:
    """Count the keys that are made."""
    module = importlib.import_module("persistent_ops.ops.embedding.all_to_all")
    with mock.patch.object(module, "EmbeddingKey", side_effect=EmbeddingKey) as made:
        yield made


def _tables(count: int = 2, *, requires_grad: bool = False) -> list[torch.Tensor]:
    values = torch.arange(count * ROWS * WIDTH, dtype=torch.float32, device=po.device()).view(count, ROWS, WIDTH)
    return [table.clone().requires_grad_(requires_grad) for table in values]


def _lookups(first: int, per_bag: int = 1, num_tables: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    bags = num_tables * BATCH
    indices = (first + torch.arange(bags * per_bag, device=po.device())) % ROWS
    return indices, torch.arange(bags + 1, device=po.device()) * per_bag


def _wanted(
    tables: list[torch.Tensor], lookups: tuple[torch.Tensor, torch.Tensor], pooling: str = "sum"
) -> torch.Tensor:
    indices, offsets = lookups
    columns = []
    for t, table in enumerate(tables):
        bounds = offsets[t * BATCH : (t + 1) * BATCH + 1]
        bags = indices[bounds[0] : bounds[-1]], table.detach(), bounds - bounds[0]
        columns.append(torch.nn.functional.embedding_bag(*bags, mode=pooling, include_last_offset=True))
    return torch.cat(columns, dim=1)


class _NothingElse(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _made_keys() -> list[str]:
    """Return what was wrong with results and with the number of keys; a world of one."""
    tables, problems = _tables(), []

    def call(what: str, is_new: bool, weights: Any = tables, first: int = 0, per_bag: int = 1, **options: Any) -> None:
        lookups = _lookups(first, per_bag)
        with _counted() as made:
            result = po.embedding_all_to_all(weights, *lookups, **options)
        if not torch.equal(result, _wanted(tables, lookups, options.get("pooling", "sum"))):
            problems.append(f"{what}: a wrong result")
        if made.call_count != is_new:
            problems.append(f"{what}: {made.call_count} keys were made")

    call("new tables", True)
    call("the same", False)
    call("other lookups", False, first=3)
    call("a tuple of the tables", False, weights=tuple(tables))
    call("more lookups", True, per_bag=3)
    call("again as many", False, first=5, per_bag=3)
    call("as many as at first", False)
    call("another pooling", True, pooling="mean", per_bag=3)
    call("the same pooling", False, pooling="mean", per_bag=3)
    call("a list of numbers", True, batch_per_rank=[BATCH])
    call("a tuple of them", False, batch_per_rank=(BATCH,))
    call("another list of them", False, batch_per_rank=[BATCH])
    call("a result that is given", False, out=po.empty(BATCH, 2 * WIDTH))
    with _NothingElse():
        call("a mode that looks on", True)  # which gets all arguments of the schema, including omitted ones
    call("tables in other objects", False, weights=[table.view(ROWS, WIDTH) for table in tables])
    tables[1].mul_(2)
    twice = [tables[0], tables[0]]
    for what in ("one table twice", "one table twice, again"):
        result = po.embedding_all_to_all(twice, *_lookups(2))
        if not torch.equal(result, _wanted(twice, _lookups(2))):
            problems.append(f"{what}: a wrong result")
    with torch.inference_mode():
        call("inference mode", False)
    call("other values", False)
    tables[0].data = tables[0].data + 1
    call("other memory", True)
    call("the same memory", False)
    OPERATOR.tune(worlds_of_package.current(), Tuning(work_groups=1))
    call("another tuning", True)
    call("the same tuning", False)
    return problems


def test_calls_that_are_alike_have_one_key(backend: str) -> None:
    assert in_world(_made_keys, 1, backend) == [[]]


def _gradients() -> list[str]:
    """Ask for gradients of tables, after calls without gradients and before others; a world of one."""
    tables, lookups, problems = _tables(), _lookups(1), []

    def call(what: str, requires_grad: bool) -> torch.Tensor:
        result = po.embedding_all_to_all(tables, *lookups)
        if result.requires_grad != requires_grad:
            problems.append(f"{what}: requires_grad is {result.requires_grad}")
        return result

    for what in ("first", "again"):
        call(what, False)
    tables[1].requires_grad_()
    with torch.no_grad():
        for what in ("not recorded", "not recorded again"):
            call(what, False)
    call("recorded", True).sum().backward()
    gradient = tables[1].grad
    assert gradient is not None
    counts = torch.bincount(lookups[0][BATCH:], minlength=ROWS).to(torch.float32)
    if not torch.equal(gradient.to_dense(), counts[:, None].expand(ROWS, WIDTH)):
        problems.append("a wrong gradient")
    tables[1].requires_grad_(False)
    for what in ("no longer", "no longer, again"):
        call(what, False)
    fresh = _tables(requires_grad=True)
    for what in ("new", "known"):
        with torch.no_grad():
            po.embedding_all_to_all(fresh, *lookups)
        if not po.embedding_all_to_all(fresh, *lookups).requires_grad:
            problems.append(f"{what} tables that were met without a gradient")
    return problems


def test_gradients_are_recorded_for_tables_of_earlier_calls(backend: str) -> None:
    assert in_world(_gradients, 1, backend) == [[]]


def _changing_lists() -> list[Any]:
    """Change a list between two calls that are equal otherwise; a world of two."""
    tables, lookups, batches = _tables(), _lookups(0), [4, 2]
    shapes = []
    for change in (0, 0, 1, 0, -2):
        batches[0], batches[1] = batches[0] - change, batches[1] + change
        shapes.append(po.embedding_all_to_all(tables, *lookups, batch_per_rank=batches).shape[0] - batches[po.rank()])
    return shapes


def test_a_list_that_changes_is_another(backend: str) -> None:
    assert in_world(_changing_lists, 2, backend) == [[0] * 5] * 2


# Another thread's call, which is refused, comes before the first call of the operators' thread.
REFUSED_ELSEWHERE = """
import threading, torch
import persistent_ops as po
po.init("host", heap_size=16 << 20)
tables, lookups = [torch.ones(9, 8).requires_grad_()], (torch.arange(6), torch.arange(7))
seen, go = [], threading.Event()
def call():
    try:
        po.embedding_all_to_all(tables, *lookups, out=torch.empty(6, 8))
    except NotImplementedError:
        seen.append("refused")
    go.wait(60)
other = threading.Thread(target=call, daemon=True)
other.start()
while not seen and other.is_alive():
    pass
print(seen, po.embedding_all_to_all(tables, *lookups).requires_grad)
"""


@pytest.mark.host
def test_a_refused_call_of_another_thread_makes_it_no_caller() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-c", REFUSED_ELSEWHERE]
    pe = Popen(command, env=environ | {"PYTHONPATH": python_path()}, stdout=subprocess.PIPE, text=True)
    try:
        assert pe.stdout is not None
        assert pe.stdout.read() == "['refused'] True\n"
    finally:
        pe.kill()
        pe.wait()
