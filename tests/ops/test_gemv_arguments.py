"""All wrong calls of gemv and gemv_all_reduce: the exception, the argument that it names, and what was expected.

Calls run in a world of one PE. No check may launch or hang, and none may change the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from arguments import Arguments, ArgumentSuite, Function, Wrong, given_as, outcome_of
from worlds import run_pes

import persistent_ops as po
from persistent_ops.runtime.tensor_specs import TensorSpec, TensorSpecs

MB = 1 << 20
ROWS, COLUMNS, VECTORS = 6, 8, 3
_TENSORS = TensorSpecs(
    TensorSpec("weight", "M K"),
    TensorSpec("x", "N? K", "weight"),
    TensorSpec("bias", "M", "weight"),
    TensorSpec("residual", "N? M", "weight"),
    TensorSpec("out", "N? M", "weight"),
)


def good(vectors: int | None = VECTORS) -> Arguments:
    """Arguments of a call that works, on the world's device."""
    shape = () if vectors is None else (vectors,)
    device = po.device()
    return {
        "weight": torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS).float(),
        "x": torch.ones(*shape, COLUMNS, device=device),
        "bias": torch.ones(ROWS, device=device),
        "residual": torch.ones(*shape, ROWS, device=device),
    }


def with_out(vectors: int | None) -> Arguments:
    given = good(vectors)
    return {**given, "out": torch.empty_like(given["residual"])}


def _is_right(given: Arguments, result: torch.Tensor) -> bool:
    want = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).sum(1).float() + 2
    return result.shape == given["residual"].shape and bool((result.cpu() == want).all())


def all_in(dtype: torch.dtype) -> Arguments:
    return {name: tensor.to(dtype) for name, tensor in good().items()}


def _of_both(functions: Callable[[str, Callable[..., Any]], dict[str, Any]]) -> dict[str, Any]:
    return functions("gemv", po.gemv) | functions("gemv_all_reduce", po.gemv_all_reduce)


def _functions(name: str, call: Callable[..., Any]) -> dict[str, Function]:
    options: dict[str, Any] = {"specs": _TENSORS, "required": ("weight", "x")}
    return {
        name: Function(call, lambda: with_out(VECTORS), _is_right, **options),
        f"{name}, one vector": Function(call, lambda: with_out(None), _is_right, **options),
    }


def _wrong(name: str, call: Callable[..., Any]) -> dict[str, Wrong]:
    """What both functions refuse, in addition to what they declare."""
    apart = "out: expected memory apart from"
    wrong = {
        "17 vectors": Wrong(
            name,
            lambda given: {**good(17), "bias": None, "out": None},
            ValueError,
            r"x: expected 1 to 16 vectors, got 17.*bound.*linear",
        ),
        "no vectors": Wrong(
            name,
            lambda given: {**good(0), "bias": None, "out": None},
            ValueError,
            r"x: expected 1 to 16 vectors, got 0$",
        ),
        "residual of a vector with a dimension more": Wrong(
            name,
            lambda given: {**good(None), "residual": good(1)["residual"]},
            ValueError,
            r"residual: expected shape \[6\], got \[1, 6\]",
        ),
        "expanded residual": Wrong(
            name,
            lambda given: {"residual": given["residual"][:1].expand(3, 6)},
            ValueError,
            r"residual: expected a contiguous .*got strides? [\[(]0, 1",
        ),
        "out in x": Wrong(
            name,
            lambda given: {"x": (x := good()["x"]), "out": x.view(-1)[6:].view(3, 6)},
            ValueError,
            f"{apart} x, got",
        ),
        "out a row behind residual": Wrong(
            name,
            lambda given: {"residual": (m := torch.ones(4, 6, device=po.device()))[:3], "out": m[1:]},
            ValueError,
            "out: expected residual itself or memory apart from residual, got",
        ),
    }
    return {f"{name}, {what}": each for what, each in wrong.items()}


def _wrong_algorithm(algorithm: Any) -> Wrong:
    text = f"algorithm: expected one of 'auto', 'one_shot', 'two_shot', got {algorithm!r}"
    return Wrong("gemv_all_reduce", given_as(algorithm=algorithm), ValueError, text)


def _wrong_wire_dtype(dtype: Any, weight: torch.dtype = torch.float32) -> Wrong:
    text = rf"wire_dtype: expected None, torch\.float32 or the weight's dtype {weight}, got '?{dtype}"
    return Wrong(
        "gemv_all_reduce", lambda given: {**all_in(weight), "out": None, "wire_dtype": dtype}, ValueError, text
    )


class TestArguments(ArgumentSuite):
    functions: ClassVar = _of_both(_functions)
    wrong: ClassVar = {
        **_of_both(_wrong),
        "algorithm": _wrong_algorithm("ring"),
        "algorithm that is no text": _wrong_algorithm(None),
        "wire_dtype of neither": _wrong_wire_dtype(torch.bfloat16),
        "wire_dtype of another half": _wrong_wire_dtype(torch.float16, torch.bfloat16),
        "wire_dtype that is no dtype": _wrong_wire_dtype("float32"),
    }


def _right_calls(backend: str) -> list[str]:
    """Calls that look wrong and are right."""
    po.init(backend, operator_timeout=20.0, heap_size=16 * MB)
    device = po.device()
    want = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).sum(1).float()
    weight, x = good(None)["weight"], good(None)["x"]
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "bias and residual None": lambda: po.gemv_all_reduce(weight, x, bias=None, residual=None, out=None),
        "out is residual": lambda: po.gemv_all_reduce(weight, x, residual=(r := want.to(device) * 0), out=r),
        "symmetric out": lambda: po.gemv_all_reduce(weight, x, out=po.empty(ROWS)),
        "symmetric weight and x": lambda: po.gemv_all_reduce(po.to_symmetric(weight), po.to_symmetric(x)),
        "one row of a batch as x": lambda: po.gemv_all_reduce(weight, x.expand(3, COLUMNS).contiguous()[1]),
        "rows of a larger weight": lambda: po.gemv_all_reduce(torch.cat([weight, weight])[ROWS:], x),
        "stride of a dimension of one": lambda: po.gemv_all_reduce(weight, x.as_strided((1, COLUMNS), (77, 1)))[0],
        "wire_dtype float32": lambda: po.gemv_all_reduce(weight, x, wire_dtype=torch.float32),
        "16 vectors": lambda: po.gemv_all_reduce(weight, x.expand(16, COLUMNS).contiguous())[15],
    }
    problems = [name for name, call in calls.items() if not torch.equal(call().cpu(), want)]
    for columns, rows in ((0, ROWS), (COLUMNS, 0), (0, 0)):
        empty = po.gemv_all_reduce(torch.ones(rows, columns, device=device), torch.ones(2, columns, device=device))
        if not torch.equal(empty.cpu(), torch.full((2, rows), float(columns))):
            problems.append(f"{rows} rows, {columns} columns: {empty.tolist()}")
    po.check()
    po.finalize()
    return problems


def test_right_arguments(backend: str) -> None:
    assert run_pes(_right_calls, 1, backend, timeout=200) == [[]]


def _full_heap(backend: str) -> tuple[list[str], str]:
    po.init(backend, operator_timeout=20.0, heap_size=2 * MB)
    # Two blocks, since the remaining size of the heap after its flags is not known here.
    taken = [po.empty(MB, dtype=torch.uint8)]
    free_list = po.runtime.world.current().heap.free_list
    # First without room for any packets, then with room for some of them.
    for left in (free_list.size // 16 * 5 // 2, 4096):
        taken.append(po.empty(free_list.free_bytes - left, dtype=torch.uint8))
        outcome = outcome_of(lambda: po.gemv_all_reduce(**good()))
        if free_list.free_bytes != left:
            return [], f"{left - free_list.free_bytes} bytes were not given back"
    for tensor in taken:
        po.free(tensor)
    po.gemv_all_reduce(**good())
    po.check()
    po.finalize()
    return outcome


def test_a_heap_without_room_for_packets(backend: str) -> None:
    for classes, text in run_pes(_full_heap, 2, backend, timeout=60):
        assert "SymmetricHeapError" in classes and "pass heap_size >= " in text, (classes, text)
