"""Backward passes in different order on the PEs: the mismatch names both passes, and gradients are never swapped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from worlds import error_of, in_world, init_with_impatient_kernels, run_pes

import persistent_ops as po
from persistent_ops.ops.embedding.backward_plan import BackwardPlan
from persistent_ops.runtime.call_numbers import CallNumbers

ROWS, WIDTH, SAMPLES = 12, 4, 2  # of each table; of each PE


class _Trained:
    """Tables of all PEs of which sample s looks up row s; a step of SGD with rate 1 subtracts the gradient."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        rank, world = po.rank(), po.world_size()
        self._split = [SAMPLES] * world
        self._rows = torch.arange(SAMPLES * world, device=po.device())
        self._tables = [torch.zeros(ROWS, WIDTH, device=po.device())]
        self._optimizer: Any = None
        if kind in ("module", "replicated"):
            self._module: Any = po.nn.ShardedEmbeddingBagCollection(
                [(f"t{number}", ROWS, WIDTH, [f"f{number}"]) for number in range(world)],
                max_batch=SAMPLES,
                lr=1.0,
                gradient_scale=1.0,
                placement="table_wise" if kind == "module" else "replicated",
            )
            self._own = self._rows[rank * SAMPLES : (rank + 1) * SAMPLES].repeat(world)
            for parameter in self._module.parameters():
                parameter.zero_()
        elif kind == "optimizer":
            self._optimizer = po.EmbeddingOptimizer(self._tables, lr=1.0)
        else:
            self._tables[0].requires_grad_()

    def forward(self) -> torch.Tensor:
        if self._kind in ("module", "replicated"):
            lengths = torch.ones_like(self._own)
            result: torch.Tensor = self._module(self._own, lengths, batch_per_rank=self._split)
            return result
        offsets = torch.arange(len(self._rows) + 1, device=po.device())
        return po.embedding_all_to_all(
            self._tables, self._rows, offsets, batch_per_rank=self._split, optimizer=self._optimizer
        )

    def tables(self) -> list[torch.Tensor]:
        """Return this PE's tables."""
        if self._kind == "sparse":
            (table,) = self._tables
            return [torch.zeros(ROWS, WIDTH) if table.grad is None else -table.grad.to_dense().cpu()]
        tables = self._tables if self._kind == "optimizer" else self._module.parameters()
        return [table.detach().cpu().clone() for table in tables if table.numel()]


def _gradient(step: int) -> torch.Tensor:
    """Whole numbers that differ by step, PE, sample and column."""
    shape = (SAMPLES, WIDTH * po.world_size())
    return torch.arange(float(shape[0] * shape[1])).view(shape) + 100 * po.rank() + 1000 * (step + 1)


def _expected(number: int, steps: Sequence[int]) -> torch.Tensor:
    """Return table number `number` of the PEs after these steps."""
    table = torch.zeros(ROWS, WIDTH)
    columns = torch.arange(WIDTH * number, WIDTH * (number + 1))
    for step in steps:
        for pe in range(po.world_size()):
            for sample in range(SAMPLES):
                table[pe * SAMPLES + sample] -= (
                    sample * WIDTH * po.world_size() + columns + 100 * pe + 1000 * (step + 1)
                )
    return table


def _is_right(trained: _Trained, kind: str, steps: Sequence[int]) -> bool:
    numbers = range(po.world_size()) if kind == "replicated" else [po.rank()]
    return all(
        torch.equal(found, _expected(number, steps)) for number, found in zip(numbers, trained.tables(), strict=True)
    )


def _backward(result: torch.Tensor, step: int) -> Callable[[], None]:
    return partial(result.backward, _gradient(step).to(po.device()))


# ---- in different order ----------------------------------------------------------------------------------------------


def _swapped(kind: str, *, is_one: bool, is_first: bool) -> list[Any]:
    """The last PE makes two backward passes in the other order."""
    first = _Trained(kind)
    second = first if is_one else _Trained(kind)
    warm = [] if is_first else [_backward(trained.forward(), 0) for trained in dict.fromkeys([first, second])]
    for step in warm:
        step()
    po.check()
    before = [table for trained in (first, second) for table in trained.tables()]
    passes = [_backward(first.forward(), 1), _backward(second.forward(), 2)]
    if po.rank() == po.world_size() - 1:
        passes.reverse()
    name, text, _ = error_of(lambda: [passes[0](), passes[1](), po.check()])
    po.recover()
    after = [table for trained in (first, second) for table in trained.tables()]
    # On GPUs autograd passes gradients on before their launch has ended.
    is_same = _is_same_or_nan if kind == "sparse" and po.backend() == "cuda" else torch.equal
    return [name, text, all(map(is_same, before, after))]


def _is_same_or_nan(before: torch.Tensor, after: torch.Tensor) -> bool:
    return bool(((before == after) | after.isnan()).all())


def _given_up() -> list[bool]:
    trained = _Trained("sparse")
    with mock.patch.object(BackwardPlan, "launch", return_value=None):
        _backward(trained.forward(), 0)()
    (gradient,) = trained.tables()
    return [bool(row.isnan().all()) for row in gradient[:SAMPLES]]


def test_gradients_of_a_launch_that_is_given_up_are_no_numbers(backend: str) -> None:
    assert in_world(_given_up, 1, backend) == [[True] * SAMPLES]


@pytest.mark.parametrize("kind", ["optimizer", "sparse", "module", "replicated"])
@pytest.mark.parametrize(
    ("world", "is_one", "is_first"),
    [(2, False, True), (2, False, False), (2, True, False), (3, False, False), (3, True, False)],
)
def test_another_order_is_a_mismatch(backend: str, world: int, is_one: bool, is_first: bool, kind: str) -> None:
    """With equal modules or one module; in the first passes, where PEs meet on the host before the launch, or later."""
    for name, text, is_unchanged in in_world(partial(_swapped, kind, is_one=is_one, is_first=is_first), world, backend):
        assert name == "ContractMismatchError" and is_unchanged and "forward_pass is" in text, (name, text)
        if not is_first:
            mine, theirs = _told(text)
            assert mine != theirs, text


def _told(text: str) -> tuple[str, str]:
    """Return what the error says of both PEs' passes if they differ in nothing else."""
    found = re.search(
        r" for different calls: forward_pass is ([^(]+ \(.*?\)) on PE \d, ([^(]+ \(.*?\)) on PE \d\. ", text
    )
    assert found, text
    return found[1], found[2]


def _names() -> str:
    """Two modules whose tables have owners, and two whose tables are replicated."""
    modules = [_Trained(kind) for kind in ("module", "module", "replicated", "replicated")]
    for module in modules:
        _backward(module.forward(), 0)()
    po.check()
    texts = []
    for first, second in (modules[:2], modules[2:]):
        passes = [_backward(first.forward(), 1), _backward(second.forward(), 2)]
        if po.rank() == 1:
            passes.reverse()
        texts.append(error_of(lambda passes=passes: [*(step() for step in passes), po.check()])[1])
        po.recover()
    return "\n".join(texts)


def test_the_mismatch_names_modules() -> None:
    first, second = in_world(_names, 2, "host")
    for text, own, other in ((first, 1, 2), (second, 2, 1)):
        of_owners, of_replicas = text.split("\n")
        for told, of_one in ((of_owners, "tables t0, t1, EmbeddingOptimizer"), (of_replicas, "ReplicatedTables")):
            mine, theirs = _told(told)
            assert mine.endswith(f"{of_one} {own})") and theirs.endswith(f"{of_one} {other})"), told


# ---- in one order ----------------------------------------------------------------------------------------------------


def _in_one_order(kind: str) -> list[bool]:
    """Two modules: forward, then backward, then backward from the last one on; and two passes of one, both ways."""
    first, second = _Trained(kind), _Trained(kind)
    done: dict[_Trained, list[int]] = {first: [], second: []}
    seen = []
    for step, (modules, is_reversed) in enumerate(
        [
            ((first, second), False),
            ((first, second), True),
            ((first, first), False),
            ((second, second), True),
            ((second, first), True),
            ((first, second), False),
        ]
    ):
        passes = [_backward(module.forward(), 2 * step + number) for number, module in enumerate(modules)]
        for backward in reversed(passes) if is_reversed else passes:
            backward()
        po.check()
        for number, module in enumerate(modules):
            done[module].append(2 * step + number)
        seen += [_is_right(module, kind, steps) for module, steps in done.items()]
    return seen


@pytest.mark.parametrize("kind", ["optimizer", "sparse", "module", "replicated"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_order_on_all_pes_is_right(backend: str, kind: str, world: int) -> None:
    assert in_world(_in_one_order, world, backend, kind) == [[True] * 12] * world


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _steps_behind(backend: str, trouble: str, kind: str) -> list[Any]:
    """One PE counts a forward pass that the other PE does not make, or that raises. Then all PEs train."""
    init_with_impatient_kernels(backend, 2.0, 64 << 20)
    trained = _Trained(kind)
    _backward(trained.forward(), 0)()
    po.check()
    told = ""
    if trouble == "absent":
        if po.rank() == 0:
            told = error_of(lambda: [trained.forward(), po.check()])[0]
        po.recover()
    else:
        rows = trained._own if kind == "replicated" else trained._rows
        kept = rows.clone()
        if po.rank() == 1:
            rows[0] = ROWS
        told = error_of(lambda: [trained.forward(), po.check()])[0]
        rows.copy_(kept)
    _backward(trained.forward(), 1)()
    po.check()
    is_right = _is_right(trained, kind, [0, 1])
    po.finalize()
    return [told, is_right]


@pytest.mark.parametrize(
    ("trouble", "kind", "told"),
    [
        ("absent", "optimizer", ["PeerTimeoutError", ""]),
        ("bad lookups", "optimizer", ["", "IndexError"]),
        ("bad lookups", "replicated", ["", "IndexError"]),
    ],
)
def test_pes_go_on_with_equal_numbers(trouble: str, kind: str, told: list[str]) -> None:
    found = run_pes(_steps_behind, 2, "host", trouble, kind, timeout=200)
    assert [name for name, _ in found] == told
    # A given-up launch. Other tests cover tables that such a launch has changed. This launch changed none.
    assert all(is_right for _, is_right in found)


def _tried_alone() -> bool:
    """A PE reads replicated tables alone, and so counts more forward passes than the other PE."""
    trained = _Trained("replicated")
    _backward(trained.forward(), 0)()
    if po.rank() == 1:
        with torch.no_grad():
            trained.forward()
        trained.forward()
    result = trained.forward()
    if po.rank() == 1:
        with torch.no_grad():
            trained.forward()
    _backward(result, 1)()
    po.check()
    return _is_right(trained, "replicated", [0, 1])


def test_replicated_tables_may_be_looked_at_alone() -> None:
    assert in_world(_tried_alone, 2, "host") == [True, True]


def test_what_is_captured_is_counted_apart() -> None:
    is_capturing = False
    calls = CallNumbers(lambda: is_capturing)

    def count() -> int:
        calls.count()
        return calls.last

    eager = [count(), count()]
    is_capturing = True
    captured = [count(), count()]
    calls.name(captured[-1], "tables a")
    is_capturing = False
    eager.append(count())
    assert len({*eager, *captured}) == 5
    assert [calls.show(number) for number in eager] == ["1", "2", "3"]
    assert calls.show(captured[-1]) == "2 of those captured in CUDA graphs (tables a)"
