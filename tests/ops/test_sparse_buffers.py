"""sparse_all_reduce_buffers and its callbacks; calls of each kind that are compiled, or after errors of other calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_cases import (
    Case,
    Entries,
    Rows,
    expected,
    make_inputs,
    padded,
    rows_problem,
    uniform,
)
from worlds import TRANSPORTS, error_of, in_world

import persistent_ops as po

# ---- the entry with buffers ------------------------------------------------------------------------------------------

_BUFFERS = [
    Case("buffers: fp32", 300, uniform(50, 0, 70), (6,)),
    Case("buffers: bf16, int32", 40, uniform(60, 45), (8,), torch.bfloat16, index_dtype=torch.int32),
    Case("buffers: fp16, mean", 100, uniform(80, 45), (), torch.float16, "mean"),
    Case("buffers: nothing", 100, uniform(0), (2, 4), index_dtype=torch.int32),
]
_COALESCE = ("regular", "keep_precision", "disable")


class Taken:
    """Callbacks of one call, and what they were given."""

    def __init__(self, case: Case, coalesce: str) -> None:
        self.case = case
        self.value_dtype = torch.float32 if coalesce == "keep_precision" else case.dtype
        self.context = object()
        self.problems: list[str] = []
        self.calls = 0
        self.rows: Rows | None = None
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    def complete(self, indices: torch.Tensor, values: torch.Tensor, context: object) -> None:
        self.calls += 1
        if context is not self.context:
            self.problems.append("completion_fn: another context")
        self._take(indices, values)

    def allocate(
        self, count: int, index_dtype: torch.dtype, row_shape: Any, value_dtype: torch.dtype, context: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        kind = (type(count), index_dtype, tuple(row_shape), value_dtype)
        if kind != (int, self.case.index_dtype, self.case.row_shape, self.value_dtype) or context is not self.context:
            self.problems.append(f"alloc_fn: {kind}, {context}")
        device = po.device()
        self.given = (
            torch.full((count,), -7, dtype=index_dtype, device=device),
            torch.full((count, *row_shape), float("nan"), dtype=value_dtype, device=device),
        )
        return self.given

    def take_allocated(self) -> None:
        if self.given is None:
            self.problems.append("alloc_fn was not called")
        else:
            self._take(*self.given)

    def _take(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        kind = (indices.dtype, values.dtype, indices.device, values.device, indices.dim(), tuple(values.shape[1:]))
        device = po.device()
        if kind != (self.case.index_dtype, self.value_dtype, device, device, 1, self.case.row_shape):
            self.problems.append(f"got {kind}")
        self.rows = Rows(indices.cpu().long().clone(), values.cpu().clone())

    def problem(self, want: Rows) -> str | None:
        if self.problems or self.calls != 1 or self.rows is None:
            return f"{self.calls} calls; {self.problems}"
        return rows_problem(self.rows, want)


def _buffers_wanted(case: Case, inputs: list[Entries], coalesce: str) -> Rows:
    if coalesce == "disable":
        return Rows(*(torch.cat(parts) for parts in zip(*inputs, strict=True)))
    return expected(inputs, case.op, torch.float32 if coalesce == "keep_precision" else None)


def _buffers() -> list[str]:
    problems = []
    rank, world = po.rank(), po.world_size()
    for iteration in range(3):
        for case in _BUFFERS:
            inputs = make_inputs(case, world, iteration)
            indices, values, _ = padded(case, inputs[rank], len(inputs[rank].indices))
            for coalesce in _COALESCE:
                if coalesce == "disable" and case.op == "mean":
                    continue
                want = _buffers_wanted(case, inputs, coalesce)
                for way in ("completion_fn", "alloc_fn"):
                    for async_op in (False, True):
                        taken = Taken(case, coalesce)
                        callback = taken.complete if way == "completion_fn" else taken.allocate
                        work = po.sparse_all_reduce_buffers(
                            indices,
                            values,
                            num_rows=case.rows,
                            fn_ctx=taken.context,
                            coalesce=coalesce,
                            op=case.op,
                            async_op=async_op,
                            **{way: callback},  # type: ignore[arg-type]
                        )
                        if (work is not None) != async_op:
                            problems.append(f"{case.name}, async_op {async_op}: returned {work}")
                        if work is not None:
                            work.wait()
                        if way == "alloc_fn":
                            taken.take_allocated()
                        if (found := taken.problem(want)) is not None:
                            problems.append(f"{case.name}, {coalesce}, {way}, async_op {async_op}: {found}")
    return problems


@pytest.mark.parametrize("options", TRANSPORTS)
def test_buffers(backend: str, options: dict[str, Any]) -> None:
    assert in_world(_buffers, 3, backend, **options) == [[]] * 3


def _entries_that_are_no_rows() -> list[Any]:
    """Also without coalescing, the PE that passes invalid rows gets the error, and the others get the rest."""
    rank = po.rank()
    indices = torch.tensor([3, 40 if rank == 1 else 4, 3, -1 if rank == 1 else 5], device=po.device())
    values = torch.arange(4.0, device=po.device())[:, None] + 10 * rank
    given: list[Any] = []
    found: list[Any] = []
    for rows in (indices, indices.clamp(0, 39)):
        error = error_of(
            lambda rows=rows: po.sparse_all_reduce_buffers(  # type: ignore[misc]
                rows,
                values,
                num_rows=40,
                coalesce="disable",
                completion_fn=lambda i, v, _: given.append([i.tolist(), v[:, 0].tolist()]),
            )
        )
        found.append(error[:2])
    return [found, given]


def test_entries_that_are_no_rows_without_coalescing(backend: str) -> None:
    whole = [[3, 4, 3, 5, 3, 39, 3, 0], [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]]
    (first, first_given), (second, second_given) = in_world(_entries_that_are_no_rows, 2, backend)
    assert first == [("", ""), ("", "")]
    assert first_given == [[[3, 4, 3, 5, 3, 3], [0.0, 1.0, 2.0, 3.0, 10.0, 12.0]], whole]
    assert second[0][0] == "IndexError" and "entry 1 is row 40, but the tensor has 40 rows" in second[0][1]
    assert second[1] == ("", "") and second_given == [whole]


def _first_called_when_compiled(kind: str) -> list[float]:
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: po.sparse_all_reduce(x)._values() * 2,
        "async": lambda x: po.sparse_all_reduce(x, async_op=True).wait()._values() * 2,
    }
    indices = torch.tensor([[1, 2, 5]], device=po.device())
    values = torch.ones(3, 4, device=po.device())
    x = torch.sparse_coo_tensor(indices, values, (8, 4), check_invariants=False, is_coalesced=True)
    compiled = torch.compile(calls[kind], backend="eager")
    return [float(compiled(x).sum()) for _ in range(2)]


@pytest.mark.parametrize("kind", ["sum", "async"])
def test_a_first_call_may_be_compiled(backend: str, kind: str) -> None:
    """torch.compile breaks its graph at the call, and does not trace the creation of its plan."""
    assert in_world(_first_called_when_compiled, 2, backend, kind) == [[48.0] * 2] * 2


@pytest.mark.host
def test_a_call_imports_no_compiler() -> None:
    """The compiler of torch.compile, whose import takes seconds."""
    program = (
        "import sys, torch, persistent_ops as po; po.init('host');"
        "x = torch.ones(3, 4).to_sparse(1); po.sparse_all_reduce(x); po.sparse_all_reduce(x, async_op=True).wait();"
        "print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "False\n", ran.stderr


def _waited_for_again(coalesce: str) -> list[Any]:
    rank = po.rank()
    indices = torch.tensor([3, 40 if rank == 1 else 4], device=po.device())
    values = torch.ones(2, 1, device=po.device())
    given: list[Any] = []
    work = po.sparse_all_reduce_buffers(
        indices,
        values,
        num_rows=40,
        coalesce=coalesce,
        completion_fn=lambda i, v, _: given.append([i.tolist(), v[:, 0].tolist()]),
        async_op=True,
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the report has arrived
    errors = [error_of(work.wait)[:2] for _ in range(3)]
    po.check()  # the error has been raised before
    return [errors, given, work.done()]


@pytest.mark.parametrize("coalesce", ["regular", "keep_precision", "disable"])
def test_a_wait_behind_one_that_failed_fails(backend: str, coalesce: str) -> None:
    summed = [[3, 4], [2.0, 1.0]] if coalesce != "disable" else [[3, 4, 3], [1.0] * 3]
    (errors, given, is_over), (failed, nothing, is_over_too) = in_world(_waited_for_again, 2, backend, coalesce)
    assert errors == [("", "")] * 3 and given == [summed] and is_over and is_over_too
    assert failed[0][0] == "IndexError" and "is row 40, but the tensor has 40 rows" in failed[0][1]
    assert failed == failed[:1] * 3 and nothing == []


def _bad_input_of_another_operator(takes_buffers: bool) -> list[Any]:
    given: list[Any] = []
    indices, values = torch.tensor([3, 4], device=po.device()), torch.ones(2, 1, device=po.device())
    if takes_buffers:
        work: Any = po.sparse_all_reduce_buffers(
            indices, values, num_rows=40, completion_fn=lambda i, v, _: given.append(v[:, 0].tolist()), async_op=True
        )
    else:
        x = torch.sparse_coo_tensor(indices[None], values, (40, 1), check_invariants=False)
        work = po.sparse_all_reduce(x, async_op=True)
    reports = iter([IndexError("table 3")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(po.runtime.world.current().workspace._input, "take", lambda: next(reports, None))
        told = error_of(work.wait)[:2]
        before = list(given)
        result = work.wait()
    given += [] if takes_buffers else [result.coalesce().values()[:, 0].tolist()]
    return [told, before, given]


@pytest.mark.parametrize("takes_buffers", [False, True])
def test_bad_input_of_another_operator_takes_no_sum_away(backend: str, takes_buffers: bool) -> None:
    for told, before, given in in_world(_bad_input_of_another_operator, 2, backend, takes_buffers):
        assert told == ("IndexError", "table 3") and before == [] and given == [[2.0, 2.0]]


def _different_num_rows() -> tuple[str, str]:
    indices, values = torch.arange(3, device=po.device()), torch.ones(3, 2, device=po.device())
    name, text, _ = error_of(
        lambda: po.sparse_all_reduce_buffers(
            indices, values, num_rows=40 + po.rank(), coalesce="disable", completion_fn=lambda *_: None
        )
    )
    po.recover()
    return name, text


def test_rows_that_differ_without_coalescing(backend: str) -> None:
    for name, text in in_world(_different_num_rows, 2, backend):
        assert name == "ContractMismatchError" and "num_rows is" in text, (name, text)


def _callback_problems() -> dict[str, Any]:
    """Callbacks that fail, or return what cannot be filled. Later calls work."""
    case = _BUFFERS[0]
    inputs = make_inputs(case, po.world_size(), 1)
    indices, values, _ = padded(case, inputs[po.rank()], len(inputs[po.rank()].indices))
    seen: dict[str, Any] = {}

    def fail(*_: object) -> Any:
        raise KeyError("the callback's own")

    def allocate(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
        def allocated(count: int, index_dtype: Any, row_shape: Any, value_dtype: Any, context: object) -> Any:
            device = po.device()
            rows = torch.empty(count, dtype=index_dtype, device=device)
            return change(rows, torch.empty(count, *row_shape, dtype=value_dtype, device=device))

        return allocated

    callbacks: dict[str, dict[str, Any]] = {
        "completion_fn fails": {"completion_fn": fail},
        "alloc_fn fails": {"alloc_fn": fail},
        "too few rows": {"alloc_fn": allocate(lambda i, v: (i[1:], v[1:]))},
        "other indices": {"alloc_fn": allocate(lambda i, v: (i.int(), v))},
        "other values": {"alloc_fn": allocate(lambda i, v: (i, v.half()))},
        "other rows": {"alloc_fn": allocate(lambda i, v: (i, v[:, 1:].contiguous()))},
        "elsewhere": {"alloc_fn": allocate(lambda i, v: (i, v.to("meta")))},
        "nothing": {"alloc_fn": allocate(lambda i, v: None)},
    }
    for name, options in callbacks.items():
        try:
            po.sparse_all_reduce_buffers(indices, values, num_rows=case.rows, **options)
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
        taken = Taken(case, "regular")
        po.sparse_all_reduce_buffers(
            indices, values, num_rows=case.rows, completion_fn=taken.complete, fn_ctx=taken.context
        )
        assert taken.problem(expected(inputs)) is None, name
    return seen


def test_callbacks_that_fail(backend: str) -> None:
    for seen in in_world(_callback_problems, 2, backend):
        for name in ("completion_fn fails", "alloc_fn fails"):
            kind, text = seen.pop(name)
            assert kind == "KeyError" and "the callback's own" in text
        assert set(seen) == {"too few rows", "other indices", "other values", "other rows", "elsewhere", "nothing"}
        for name, (kind, text) in seen.items():
            assert kind in ("ValueError", "TypeError") and text.startswith("alloc_fn: "), (name, kind, text)
