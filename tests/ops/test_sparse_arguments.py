"""Every wrong argument of the sparse_all_reduce functions is refused by name, and leaves the world as it was."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from worlds import run_pes

import persistent_ops as po

MB = 1 << 20
ROWS, COLUMNS, NNZ, CAPACITY = 20, 4, 5, 8
# entry -> what calls it
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sparse": po.sparse_all_reduce,
    "into": po.sparse_all_reduce_into,
    "buffers": po.sparse_all_reduce_buffers,
}


def _sparse(size: tuple[int, ...] = (ROWS, COLUMNS), **options: Any) -> torch.Tensor:
    device = options.pop("device", po.device())
    indices = torch.arange(NNZ, device=device)[None] * 3
    values = torch.ones(NNZ, *size[1:], device=device, **options)
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False)


def _completed(indices: torch.Tensor, values: torch.Tensor, context: object) -> None:
    assert indices.tolist() == [0, 3, 6, 9, 12] and torch.equal(values.cpu(), torch.ones(NNZ, COLUMNS))


def good(entry: str) -> dict[str, Any]:
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


def call(entry: str, arguments: dict[str, Any]) -> Any:
    positional = [arguments[name] for name in ("x", "indices", "values") if name in arguments]
    rest = {name: value for name, value in arguments.items() if name not in ("x", "indices", "values")}
    return _FUNCTIONS[entry](*positional, **rest)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: change(given[name])}


def given_as(**arguments: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: arguments


def in_dtype(dtype: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: given[name].to(dtype) for name in ("values",)}


_ENTRIES = ("indices", "values")
_Wrong = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]

# name -> (entry, arguments that differ from the good ones, exception, what its message must say)
WRONG: dict[str, _Wrong] = {
    # sparse_all_reduce
    "list as x": ("sparse", given_as(x=[1.0]), TypeError, "x: expected a tensor, got list"),
    "no x": ("sparse", given_as(x=None), TypeError, "x: expected a tensor, got NoneType"),
    "dense x": (
        "sparse",
        changed("x", torch.Tensor.to_dense),
        TypeError,
        r"x: expected a plain sparse COO tensor, as of to_sparse\(1\), got layout torch\.strided",
    ),
    "CSR": (
        "sparse",
        lambda given: {"x": given["x"].to_dense().to_sparse_csr()},
        TypeError,
        r"x: expected a plain sparse COO tensor, .*got layout torch\.sparse_csr",
    ),
    "two sparse dimensions": (
        "sparse",
        lambda given: {"x": given["x"].to_dense().to_sparse()},
        ValueError,
        r"x: expected one sparse dimension.*got 2 of shape \[20, 4\]",
    ),
    "no sparse dimension": (
        "sparse",
        lambda given: {
            "x": torch.sparse_coo_tensor(
                torch.empty(0, 1, dtype=torch.int64, device=po.device()), torch.ones(1, 4, device=po.device()), (4,)
            )
        },
        ValueError,
        r"x: expected one sparse dimension.*got 0 of shape \[4\]",
    ),
    "float64": (
        "sparse",
        lambda given: {"x": _sparse(dtype=torch.float64)},
        TypeError,
        r"x: expected float32, float16 or bfloat16, got torch\.float64",
    ),
    "integers": (
        "sparse",
        lambda given: {"x": _sparse(dtype=torch.int64)},
        TypeError,
        r"x: expected float32, float16 or bfloat16, got torch\.int64",
    ),
    "complex": (
        "sparse",
        lambda given: {"x": _sparse(dtype=torch.complex64)},
        TypeError,
        r"x: expected float32, float16 or bfloat16, got torch\.complex64",
    ),
    "x on another device": (
        "sparse",
        lambda given: {"x": _sparse(device="meta")},
        ValueError,
        r"x: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    "too many rows": (
        "sparse",
        lambda given: {"x": _sparse((2**31 + 1, COLUMNS))},
        ValueError,
        r"x: expected at most 2\^31 rows, got 2147483649",
    ),
    "far too many rows": (
        "sparse",
        lambda given: {"x": _sparse((2**40,))},
        ValueError,
        r"x: expected at most 2\^31 rows, got 1099511627776",
    ),
    "too many rows, asynchronously": (
        "sparse",
        lambda given: {"x": _sparse((2**31 + 1, COLUMNS)), "async_op": True},
        ValueError,
        r"x: expected at most 2\^31 rows, got 2147483649",
    ),
    "dense x, asynchronously": (
        "sparse",
        lambda given: {"x": given["x"].to_dense(), "async_op": True},
        TypeError,
        r"x: expected a plain sparse COO tensor, .*got layout torch\.strided",
    ),
    "op": ("sparse", given_as(op="max"), ValueError, "op: expected one of 'sum', 'mean', got 'max'"),
    "op that is no text": ("sparse", given_as(op=None), (TypeError, ValueError), "op: expected"),  # type: ignore[dict-item]
    "algorithm": (
        "sparse",
        given_as(algorithm="ring"),
        ValueError,
        "algorithm: expected one of 'auto', 'owner', 'allgather', 'dense', got 'ring'",
    ),
    "algorithm, asynchronously": (
        "sparse",
        given_as(algorithm="ring", async_op=True),
        ValueError,
        "algorithm: expected one of 'auto', 'owner', 'allgather', 'dense', got 'ring'",
    ),
    "too many entries": (
        "sparse",
        lambda given: {
            "x": torch.sparse_coo_tensor(
                torch.zeros(1, 1, dtype=torch.int64, device=po.device()).expand(1, 2**31),
                torch.ones(1, COLUMNS, device=po.device()).expand(2**31, COLUMNS),
                (ROWS, COLUMNS),
                check_invariants=False,
            )
        },
        ValueError,
        r"x: expected at most 2\^31 - 1 entries, got 2147483648",
    ),
    # what the other two have in common
    **{
        f"{name}, {entry}": (entry, change, error, text)
        for entry in ("into", "buffers")
        for name, change, error, text in (
            ("list as indices", given_as(indices=[1]), TypeError, "indices: expected a tensor, got list"),
            ("no indices", given_as(indices=None), TypeError, "indices: expected a tensor, got NoneType"),
            ("list as values", given_as(values=[1.0]), TypeError, "values: expected a tensor, got list"),
            (
                "indices of 16 bits",
                changed("indices", torch.Tensor.short),
                TypeError,
                r"indices: expected int32 or int64, got torch\.int16",
            ),
            (
                "indices as floats",
                changed("indices", torch.Tensor.float),
                TypeError,
                r"indices: expected int32 or int64, got torch\.float32",
            ),
            (
                "indices as in a sparse tensor",
                changed("indices", lambda indices: indices[None]),
                ValueError,
                r"indices: expected \[n\], got shape \[1, 5\]",
            ),
            (
                "fewer indices",
                changed("indices", lambda indices: indices[1:]),
                ValueError,
                r"values: expected \[4, \.\.\.\].*got \[5, 4\]",
            ),
            (
                "fewer values",
                changed("values", lambda values: values[1:]),
                ValueError,
                r"values: expected \[5, \.\.\.\].*got \[4, 4\]",
            ),
            (
                "values without dimensions",
                changed("values", lambda values: values[0, 0]),
                ValueError,
                r"values: expected \[5, \.\.\.\].*got \[\]",
            ),
            (
                "float64",
                in_dtype(torch.float64),
                TypeError,
                r"values: expected float32, float16 or bfloat16, got torch\.float64",
            ),
            (
                "integers",
                in_dtype(torch.int32),
                TypeError,
                r"values: expected float32, float16 or bfloat16, got torch\.int32",
            ),
            (
                "indices on another device",
                changed("indices", lambda indices: indices.to("meta")),
                ValueError,
                r"indices: expected a tensor on (cpu|cuda:\d+), got one on meta",
            ),
            (
                "values on another device",
                changed("values", lambda values: values.to("meta")),
                ValueError,
                r"values: expected a tensor on (cpu|cuda:\d+), got one on meta",
            ),
            ("too many rows", given_as(num_rows=2**31 + 1), ValueError, r"num_rows: .* 2\^31 rows, got 2147483649"),
            ("rows below 0", given_as(num_rows=-1), ValueError, "num_rows: expected at least 0 rows, got -1"),
            ("rows as text", given_as(num_rows="20"), TypeError, "num_rows: expected a whole number, got '20'"),
            ("rows as a fraction", given_as(num_rows=20.0), TypeError, "num_rows: expected a whole number, got 20.0"),
            ("op", given_as(op="max"), ValueError, "op: expected one of 'sum', 'mean', got 'max'"),
            (
                "too many entries",
                lambda given: {name: given[name][:1].expand(2**31, *given[name].shape[1:]) for name in _ENTRIES},
                ValueError,
                r"indices: expected at most 2\^31 - 1 entries, got 2147483648",
            ),
            (
                "values whose gradient is recorded",
                changed("values", lambda values: values.clone().requires_grad_()),
                NotImplementedError,
                "has no backward pass",
            ),
        )
    },
    # sparse_all_reduce_into
    "dense": (
        "into",
        given_as(algorithm="dense"),
        ValueError,
        "algorithm: expected one of 'auto', 'owner', 'allgather', got 'dense'",
    ),
    "values with gaps": (
        "into",
        changed("values", lambda values: torch.cat([values, values], 1)[:, :COLUMNS]),
        ValueError,
        r"values: expected a contiguous .*got strides? [\[(]8, 1",
    ),
    "list as out_values": ("into", given_as(out_values=[1.0]), TypeError, "out_values: expected a tensor, got list"),
    "no out_indices": ("into", given_as(out_indices=None), TypeError, "out_indices: expected a tensor, got NoneType"),
    "no out_count": ("into", given_as(out_count=None), TypeError, "out_count: expected a tensor, got NoneType"),
    "number as count": ("into", given_as(count=NNZ), TypeError, "count: expected a tensor, got int"),
    "out_values of another dtype": (
        "into",
        changed("out_values", torch.Tensor.half),
        TypeError,
        r"out_values: expected the values' dtype torch\.float32, got torch\.float16",
    ),
    "out_values of another width": (
        "into",
        changed("out_values", lambda out: out.view(-1)[:16].view(8, 2)),
        ValueError,
        r"out_values: expected \[capacity, 4\], got \[8, 2\]",
    ),
    "scalars as out_values": (
        "into",
        changed("out_values", lambda out: out.view(-1)[:8]),
        ValueError,
        r"out_values: expected \[capacity, 4\], got \[8\]",
    ),
    "ordinary out_values": (
        "into",
        changed("out_values", torch.Tensor.clone),
        po.NotSymmetricError,
        r"out_values: expected a tensor in the symmetric heap.*po\.empty",
    ),
    "out_values on another device": (
        "into",
        changed("out_values", lambda out: out.to("meta")),
        ValueError,
        "out_values: expected a tensor",
    ),
    "out_values with gaps": (
        "into",
        changed("out_values", lambda out: out[::2]),
        ValueError,
        r"(out_values: expected a contiguous .*got strides? [\[(]8, 1|out_indices: expected shape \[4\], got \[8\])",
    ),
    "transposed out_values": (
        "into",
        changed("out_values", lambda out: out.view(-1).view(COLUMNS, CAPACITY).t()),
        ValueError,
        r"out_values: expected a contiguous .*got strides? [\[(]1, 8",
    ),
    "out_indices that are the indices": (
        "into",
        lambda a: {"indices": a["out_indices"][:NNZ].copy_(a["indices"]), "is_coalesced": True},
        ValueError,
        "out_indices: expected memory apart from indices, got a tensor that overlaps it",
    ),
    "out_count that is the count": (
        "into",
        lambda a: {"out_count": a["count"]},
        ValueError,
        "out_count: expected memory apart from count, got a tensor that overlaps it",
    ),
    "out_count within out_indices": (
        "into",
        lambda a: {"out_count": a["out_indices"][1:2]},
        ValueError,
        "out_count: expected memory apart from out_indices, got a tensor that overlaps it",
    ),
    "out_indices of another capacity": (
        "into",
        changed("out_indices", lambda out: out[1:]),
        ValueError,
        r"out_indices: expected shape \[8\], got \[7\]",
    ),
    "out_indices of 32 bits": (
        "into",
        changed("out_indices", torch.Tensor.int),
        TypeError,
        r"out_indices: expected int64, got torch\.int32",
    ),
    "out_indices with gaps": (
        "into",
        changed("out_indices", lambda out: out.repeat(2)[::2]),
        ValueError,
        r"out_indices: expected a contiguous .*got strides? [\[(]2",
    ),
    "out_indices on another device": (
        "into",
        changed("out_indices", lambda out: out.to("meta")),
        ValueError,
        r"out_indices: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    "out_count without dimensions": (
        "into",
        changed("out_count", lambda out: out[0]),
        ValueError,
        r"out_count: expected shape \[1\], got \[\]",
    ),
    "out_count of 32 bits": (
        "into",
        changed("out_count", torch.Tensor.int),
        TypeError,
        r"out_count: expected int64, got torch\.int32",
    ),
    "out_count on another device": (
        "into",
        changed("out_count", lambda out: out.to("meta")),
        ValueError,
        r"out_count: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    "count of two": (
        "into",
        changed("count", lambda count: count.repeat(2)),
        ValueError,
        r"count: expected shape \[1\], got \[2\]",
    ),
    "count of 32 bits": (
        "into",
        changed("count", torch.Tensor.int),
        TypeError,
        r"count: expected int64, got torch\.int32",
    ),
    "count on another device": (
        "into",
        changed("count", lambda count: count.to("meta")),
        ValueError,
        r"count: expected a tensor on (cpu|cuda:\d+), got one on meta",
    ),
    "out_values whose gradient is recorded": (
        "into",
        changed("out_values", lambda out: out.detach().requires_grad_()),
        NotImplementedError,
        "has no backward pass",
    ),
    # sparse_all_reduce_buffers
    "no callback": (
        "buffers",
        given_as(completion_fn=None),
        ValueError,
        "completion_fn, alloc_fn: expected exactly one",
    ),
    "two callbacks": (
        "buffers",
        given_as(alloc_fn=_completed),
        ValueError,
        "completion_fn, alloc_fn: expected exactly one",
    ),
    "coalesce": (
        "buffers",
        given_as(coalesce="sorted"),
        ValueError,
        "coalesce: expected one of 'regular', 'disable', 'keep_precision', got 'sorted'",
    ),
    "mean of nothing summed": (
        "buffers",
        given_as(coalesce="disable", op="mean"),
        ValueError,
        "op: .*op='sum'",
    ),
}


def outcome_of(action: Callable[[], Any]) -> tuple[list[str], str]:
    """Return the names of an exception's classes, and its text."""
    try:
        action()
    except Exception as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    return [], "no error"


def _is_right(entry: str, arguments: dict[str, Any]) -> bool:
    """Call as it should be, and look at what comes; a completion_fn looks for itself."""
    result = call(entry, arguments)
    po.check()
    if entry == "sparse":
        rows, values = result._indices()[0], result._values()
    elif entry == "into":
        count = int(arguments["out_count"])
        rows, values = arguments["out_indices"][:count], arguments["out_values"][:count]
    else:
        return result is None
    return rows.tolist() == [0, 3, 6, 9, 12] and torch.equal(
        values.cpu(), torch.full((NNZ, COLUMNS), po.world_size()).float()
    )


def _wrong_calls(backend: str) -> dict[str, list[tuple[list[str], str]]]:
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    outcomes = {}
    kept = {entry: good(entry) for entry in _FUNCTIONS}
    for name, (entry, change, _, _) in WRONG.items():
        arguments = {**kept[entry], **change(kept[entry])}
        outcomes[name] = [outcome_of(lambda e=entry, a=arguments: call(e, a))]
        # The second call must not find a plan that the first one left behind, nor one of a right call.
        assert _is_right(entry, kept[entry]), name
        outcomes[name].append(outcome_of(lambda e=entry, a=arguments: call(e, a)))
    assert all(_is_right(entry, arguments) for entry, arguments in kept.items()), "the world has suffered"
    po.finalize()
    return outcomes


@functools.cache
def _outcomes(backend: str) -> dict[str, list[tuple[list[str], str]]]:
    return run_pes(_wrong_calls, 1, backend, timeout=200)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(backend: str, name: str) -> None:
    _, _, error, text = WRONG[name]
    names = [each.__name__ for each in (error if isinstance(error, tuple) else (error,))]
    for attempt, (classes, message) in enumerate(_outcomes(backend)[name]):
        assert set(names) & set(classes), f"attempt {attempt}: {classes} {message}"
        assert re.search(text, message), f"attempt {attempt}: {message}"


def _right_calls(backend: str) -> list[str]:
    """Calls that look wrong and are not."""
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
    problems = [name for name, (entry, given) in variants.items() if not _is_right(entry, {**good(entry), **given})]
    if not _is_right("buffers", {**good("buffers"), "num_rows": 13}):
        problems.append("the last row")
    po.finalize()
    return problems


def test_right_arguments(backend: str) -> None:
    assert run_pes(_right_calls, 1, backend, timeout=200) == [[]]


def _bad_counts(backend: str) -> list[tuple[list[str], str]]:
    """A count below 0 or above the number of entries: what there is counts, and the error tells."""
    po.init(backend, operator_timeout=20.0, heap_size=32 * MB)
    given = good("into")
    outcomes = []
    for count, rows in ((NNZ + 1, NNZ), (-1, 0), (2**40, NNZ)):
        given["count"].fill_(count)
        outcomes.append(outcome_of(lambda: [call("into", given), po.check()]))
        assert int(given["out_count"]) == rows
        given["count"].fill_(NNZ)
        assert _is_right("into", given)
    po.finalize()
    return outcomes


def test_bad_counts(backend: str) -> None:
    for outcomes in run_pes(_bad_counts, 2, backend, timeout=100):
        for count, (classes, text) in zip((NNZ + 1, -1, 2**40), outcomes, strict=True):
            assert "IndexError" in classes and re.search(rf"count: {count} .* 0 to {NNZ}", text), (classes, text)


def test_use_before_init() -> None:
    assert not po.is_initialized()
    x = torch.eye(3).to_sparse(1)
    for action in (
        lambda: po.sparse_all_reduce(x),
        lambda: po.sparse_all_reduce(x, async_op=True),
        lambda: po.sparse_all_reduce_buffers(torch.arange(3), torch.ones(3), num_rows=3, completion_fn=_completed),
        lambda: po.sparse_all_reduce_into(
            torch.arange(3),
            torch.ones(3),
            num_rows=3,
            out_indices=torch.arange(3),
            out_values=torch.ones(3),
            out_count=torch.arange(1),
        ),
    ):
        with pytest.raises(RuntimeError, match=r"not initialized in this process: call persistent_ops\.init\(\) first"):
            action()


def test_arguments_after_the_tensors_are_keywords() -> None:
    x = torch.eye(3).to_sparse(1)
    for action in (
        lambda: po.sparse_all_reduce(x, "mean"),  # type: ignore[misc]
        lambda: po.sparse_all_reduce_into(torch.arange(3), torch.ones(3), 3),  # type: ignore[call-arg,misc]
        lambda: po.sparse_all_reduce_buffers(torch.arange(3), torch.ones(3), 3),  # type: ignore[call-arg,misc]
    ):
        with pytest.raises(TypeError, match="positional"):
            action()


def _full_heap(backend: str) -> tuple[list[str], str]:
    po.init(backend, operator_timeout=20.0, heap_size=4 * MB)
    # Two blocks, since what remains of the heap behind its flags is not known here.
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
        assert "SymmetricHeapError" in classes and "pass a larger heap_size to po.init()" in text, (classes, text)
