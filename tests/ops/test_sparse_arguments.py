"""Every wrong argument of the sparse_all_reduce functions is refused by name, and does not change the world."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from arguments import Arguments, ArgumentSuite, Function, Wrong, changed, given_as, outcome_of
from worlds import run_pes

import persistent_ops as po
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

MB = 1 << 20
ROWS, COLUMNS, NNZ, CAPACITY = 20, 4, 5, 8


def _sparse(size: tuple[int, ...] = (ROWS, COLUMNS), **options: Any) -> torch.Tensor:
    device = options.pop("device", po.device())
    indices = torch.arange(NNZ, device=device)[None] * 3
    values = torch.ones(NNZ, *size[1:], device=device, **options)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False)


def _completed(indices: torch.Tensor, values: torch.Tensor, context: object) -> None:
    assert indices.tolist() == [0, 3, 6, 9, 12] and torch.equal(values.cpu(), torch.ones(NNZ, COLUMNS))


def good(entry: str) -> Arguments:
    """Arguments of a call that works, on the world's device; collective for "into"."""
    if entry == "sparse":
        return {"x": _sparse()}
    x = _sparse()
    given = {"indices": x._indices()[0], "values": x._values(), "num_rows": ROWS}
    if entry == "buffers":
        return {**given, "completion_fn": _completed}
    device = po.device()
    return {
        **given,
        "out_indices": torch.empty(CAPACITY, dtype=torch.int64, device=device),
        "out_values": po.empty(CAPACITY, COLUMNS),
        "out_count": torch.empty(1, dtype=torch.int64, device=device),
        "count": torch.tensor([NNZ], device=device),
    }


def _is_right(arguments: Arguments, result: Any) -> bool:
    """Check the results. A completion_fn checks its own."""
    if "x" in arguments:
        rows, values = result._indices()[0], result._values()
    elif "out_count" in arguments:
        count = int(arguments["out_count"])
        rows, values = arguments["out_indices"][:count], arguments["out_values"][:count]
    else:
        return result is None
    return rows.tolist() == [0, 3, 6, 9, 12] and torch.equal(
        values.cpu(), torch.full((NNZ, COLUMNS), po.world_size()).float()
    )


_INDICES = TensorSpec("indices", "n", (torch.int32, torch.int64), is_contiguous=False)
_BUFFERS = TensorSpecs(_INDICES, TensorSpec("values", "n ...", is_contiguous=False))
_INTO = TensorSpecs(
    _INDICES,
    TensorSpec("values", "n ..."),
    TensorSpec("out_indices", "capacity", (torch.int64,)),
    TensorSpec("out_values", "capacity ...", "values"),
    TensorSpec("out_count", "1", (torch.int64,)),
    TensorSpec("count", "1", (torch.int64,)),
)


def _sparse_of(text: str, error: type[Exception] = ValueError, **options: Any) -> Wrong:
    """A call of the function for sparse tensors, with this tensor."""
    size = options.pop("size", (ROWS, COLUMNS))
    return Wrong("sparse", lambda given: {"x": _sparse(size, **options)}, error, text)


_FORMAT = r"x: expected a plain sparse COO tensor, as of to_sparse\(1\), got"
_PLAN = "algorithm: expected one of 'auto', 'owner', 'allgather'"


def _of_entries(function: str) -> dict[str, Wrong]:
    """What both functions of indices and values refuse, in addition to what they declare."""
    wrong = {
        "too many rows": Wrong(
            function, given_as(num_rows=2**31 + 1), ValueError, r"num_rows: .* 2\^31 rows, got 2147483649"
        ),
        "rows below 0": Wrong(
            function, given_as(num_rows=-1), ValueError, "num_rows: expected at least 0 rows, got -1"
        ),
        "rows as text": Wrong(
            function, given_as(num_rows="20"), TypeError, "num_rows: expected a whole number, got '20'"
        ),
        "op": Wrong(function, given_as(op="max"), ValueError, "op: expected one of 'sum', 'mean', got 'max'"),
        "too many entries": Wrong(
            function,
            lambda given: {name: given[name][:1].expand(2**31, *given[name].shape[1:]) for name in _ENTRIES},
            ValueError,
            r"indices: expected at most 2\^31 - 1 entries, got 2147483648",
        ),
        "values whose gradient is recorded": Wrong(
            function,
            changed("values", lambda values: values.clone().requires_grad_()),
            NotImplementedError,
            "has no backward pass",
        ),
    }
    return {f"{what}, {function}": each for what, each in wrong.items()}


_ENTRIES = ("indices", "values")
_OF_SPARSE = {
    "list as x": Wrong("sparse", given_as(x=[1.0]), TypeError, "x: expected a tensor, got list"),
    "two sparse dimensions": Wrong(
        "sparse",
        lambda given: {"x": given["x"].to_dense().to_sparse()},
        ValueError,
        r"x: expected one sparse dimension.*got 2 of shape \[20, 4\]",
    ),
    **{
        f"{dtype}": _sparse_of(f"x: expected float32, float16 or bfloat16, got {dtype}", error=TypeError, dtype=dtype)
        for dtype in (torch.float64, torch.int64, torch.complex64)
    },
    "x on another device": _sparse_of(r"x: expected a tensor on (cpu|cuda:\d+), got one on meta", device="meta"),
    "too many rows": _sparse_of(r"x: expected at most 2\^31 rows, got 2147483649", size=(2**31 + 1, COLUMNS)),
    "op": Wrong("sparse", given_as(op="max"), ValueError, "op: expected one of 'sum', 'mean', got 'max'"),
    "algorithm": Wrong("sparse", given_as(algorithm="ring"), ValueError, f"{_PLAN}, 'dense', got 'ring'"),
}
_OF_INTO = {
    "dense": Wrong("into", given_as(algorithm="dense"), ValueError, f"{_PLAN}, got 'dense'"),
    "ordinary out_values": Wrong(
        "into",
        changed("out_values", torch.Tensor.clone),
        po.NotSymmetricError,
        r"out_values: expected a tensor in the symmetric heap.*po\.empty",
    ),
    "transposed out_values": Wrong(
        "into",
        changed("out_values", lambda out: out.view(-1).view(COLUMNS, CAPACITY).t()),
        ValueError,
        r"out_values: expected a contiguous .*got strides? [\[(]1, 8",
    ),
    "out_indices that are the indices": Wrong(
        "into",
        lambda a: {"indices": a["out_indices"][:NNZ].copy_(a["indices"]), "is_coalesced": True},
        ValueError,
        "out_indices: expected memory apart from indices, got a tensor that overlaps it",
    ),
    "out_count that is the count": Wrong(
        "into",
        lambda a: {"out_count": a["count"]},
        ValueError,
        "out_count: expected memory apart from count, got a tensor that overlaps it",
    ),
    "out_values whose gradient is recorded": Wrong(
        "into",
        changed("out_values", lambda out: out.detach().requires_grad_()),
        NotImplementedError,
        "has no backward pass",
    ),
}
_ONE_OF_THEM = "completion_fn, alloc_fn: expected exactly one"
_OF_BUFFERS = {
    "no callback": Wrong("buffers", given_as(completion_fn=None), ValueError, _ONE_OF_THEM),
    "two callbacks": Wrong("buffers", given_as(alloc_fn=_completed), ValueError, _ONE_OF_THEM),
    "coalesce": Wrong(
        "buffers",
        given_as(coalesce="sorted"),
        ValueError,
        "coalesce: expected one of 'regular', 'disable', 'keep_precision', got 'sorted'",
    ),
    "mean of nothing summed": Wrong(
        "buffers", given_as(coalesce="disable", op="mean"), ValueError, "op: expected .sum. with"
    ),
}


class TestArguments(ArgumentSuite):
    functions: ClassVar = {
        "sparse": Function(po.sparse_all_reduce, lambda: good("sparse"), _is_right),
        "into": Function(
            po.sparse_all_reduce_into,
            lambda: good("into"),
            _is_right,
            _INTO,
            ("indices", "values", "out_indices", "out_values", "out_count"),
        ),
        "buffers": Function(po.sparse_all_reduce_buffers, lambda: good("buffers"), _is_right, _BUFFERS, _ENTRIES),
    }
    wrong: ClassVar = {**_OF_SPARSE, **_of_entries("into"), **_of_entries("buffers"), **_OF_INTO, **_OF_BUFFERS}


def _works(entry: str, arguments: Arguments) -> bool:
    result = TestArguments.functions[entry].call(**arguments)
    po.check()
    return _is_right(arguments, result)


def _right_calls(backend: str) -> list[str]:
    """Calls that look wrong and are right."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    device = po.device()
    into = good("into")
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "int32": ("into", {"indices": into["indices"].int()}),
        "indices with gaps": ("into", {"indices": into["indices"].repeat_interleave(2)[::2]}),
        "no count": ("into", {"count": None}),
        "capacity of the union": (
            "into",
            {"out_indices": into["out_indices"][:5], "out_values": into["out_values"][:5]},
        ),
        "part of a symmetric tensor": ("into", {"out_values": po.empty(20, COLUMNS)[7:15]}),
        "symmetric out_indices": ("into", {"out_indices": po.empty(8, dtype=torch.int64)}),
        "symmetric values": ("into", {"values": po.to_symmetric(into["values"])}),
        "values with gaps": ("buffers", {"values": torch.ones(NNZ, 2 * COLUMNS, device=device)[:, ::2]}),
        "expanded values": ("buffers", {"values": torch.ones(1, 1, device=device).expand(NNZ, COLUMNS)}),
        "no completion_fn but None": ("buffers", {"alloc_fn": None, "fn_ctx": None}),
    }
    variants["the last row"] = "buffers", {"num_rows": 13}
    problems = [name for name, (entry, given) in variants.items() if not _works(entry, {**good(entry), **given})]
    po.finalize()
    return problems


def test_right_arguments(backend: str) -> None:
    assert run_pes(_right_calls, 1, backend, timeout=200) == [[]]


def _bad_counts(backend: str) -> list[tuple[list[str], str]]:
    """A count below 0 or above the number of entries: the existing entries count, and the error reports the count."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    given = good("into")
    outcomes = []
    for count, rows in ((NNZ + 1, NNZ), (-1, 0), (2**40, NNZ)):
        given["count"].fill_(count)
        outcomes.append(outcome_of(lambda: [po.sparse_all_reduce_into(**given), po.check()]))
        assert int(given["out_count"]) == rows
        given["count"].fill_(NNZ)
        assert _works("into", given)
    po.finalize()
    return outcomes


def test_bad_counts(backend: str) -> None:
    for outcomes in run_pes(_bad_counts, 2, backend, timeout=100):
        for count, (classes, text) in zip((NNZ + 1, -1, 2**40), outcomes, strict=True):
            assert "IndexError" in classes and re.search(rf"count: expected 0 to {NNZ}, .* got {count}$", text), (
                classes,
                text,
            )


def _full_heap(backend: str) -> tuple[list[str], str]:
    po.init(backend, operator_timeout=20.0, heap_size=4 * MB)
    # Two blocks, since the remaining size of the heap after its flags is not known here.
    taken = [po.empty(MB, dtype=torch.uint8)]
    taken.append(po.empty(po.runtime.world.current().heap.free_list.free_bytes - 4096, dtype=torch.uint8))
    x = _sparse((2**20, COLUMNS))
    outcome = outcome_of(lambda: po.sparse_all_reduce(x))
    for tensor in taken:
        po.free(tensor)
    result = po.sparse_all_reduce(x)
    po.check()
    assert torch.equal(result._values().cpu(), torch.full((NNZ, COLUMNS), 2.0))
    po.finalize()
    return outcome


def test_a_heap_without_room(backend: str) -> None:
    for classes, text in run_pes(_full_heap, 2, backend, timeout=60):
        assert "SymmetricHeapError" in classes and "pass heap_size >= " in text, (classes, text)
